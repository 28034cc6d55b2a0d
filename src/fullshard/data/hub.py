"""What is remote: the Hugging Face Hub, asked once whether it has this; how long to wait; which errors pass."""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from fullshard.errors import UserError, first_line

HUB_TIMEOUT = 10  # Seconds.
LONGEST_WAIT_S = 30.0  # Between two tries of a read.


def ask_hub(name: str, *, repo_type: str, key: str, revision: str | None = None) -> bool:
    """Whether the Hub answers; UserError when it does and has no such repository. Asked once: the libraries retry for up to 47 s."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=repo_type, revision=revision, timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError) as error:
        if is_transient(error):
            return False
        raise UserError(f"{key}: {name}: not found; no such path here, and the Hub says: {first_line(error)}") from error
    except Exception:  # Connection errors have no common base: OSError, the HTTP client's own, offline mode.
        return False
    return True


def retrying(max_retries: int, *, before_sleep: Callable[[Any], None] | None = None) -> Retrying:
    """Calls a function again after an error that may pass, up to max_retries times, after 0.1, 0.2, ... at most 30 s, and a bit."""
    return Retrying(
        retry=retry_if_exception(is_transient),
        stop=stop_after_attempt(max_retries + 1),
        wait=wait_exponential_jitter(multiplier=0.1, max=LONGEST_WAIT_S, jitter=0.1),
        before_sleep=before_sleep,
        reraise=True,
    )


def reason(error: BaseException) -> str:
    """One line about an error: of the deepest that says something, since fsspec's own say no more than the URL, or nothing."""
    link: BaseException | None = error
    line = ""
    while link is not None:
        text = str(link).strip()
        line = f"{type(link).__name__}: {text.splitlines()[0]}" if text else line or type(link).__name__
        link = link.__cause__
    return line[:300]


def is_transient(error: BaseException) -> bool:
    """Whether the same read may succeed when it is done again: the connection broke or was refused, time ran out, the server was busy.

    The libraries share no base class, and fsspec hides what happened: its `info` and `open` turn any failure, a 503 too, into
    FileNotFoundError, and a stall into an error without a message. So the deepest error that was raised `from` decides, if it says
    anything; what was only being handled (`__context__`) does not. HTTP: status 408, 425, 429 and 5xx pass, others (401, 403, 404, 416)
    do not. Errors of the operating system pass when they are of a network or a device (`TRANSIENT_ERRNOS`). A certificate that is refused
    stays refused, and so does the Hub in offline mode. A host name that is not found may be a resolver that is down: it passes.
    """
    if isinstance(error, UserError):
        return False  # Whatever it was, it was tried often enough.
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    return next((verdict for verdict in map(_verdict, reversed(chain)) if verdict is not None), False)


def _verdict(error: BaseException) -> bool | None:
    """is_transient of this error alone; None where it does not say."""
    if isinstance(error, ssl.SSLCertVerificationError) or _is_one(error, "huggingface_hub.errors", ("OfflineModeIsEnabled",)):
        return False
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)  # aiohttp; httpx, huggingface_hub, requests.
    if isinstance(status, int):
        return status in (408, 425, 429) or 500 <= status < 600
    if any(_is_one(error, module, names) for module, names in CONNECTION_ERRORS.items()):
        return True
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror | ssl.SSLError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in TRANSIENT_ERRNOS
    return False if isinstance(error, FileNotFoundError | PermissionError) else None


def _is_one(error: BaseException, module: str, names: tuple[str, ...]) -> bool:
    """Whether it is of these classes of the module. A module that nobody imported raised nothing: it need not be imported for this."""
    loaded = sys.modules.get(module)
    return any(isinstance(error, kind) for name in names if isinstance(kind := getattr(loaded, name, None), type))


CONNECTION_ERRORS = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),  # The latter: a body that was cut.
    "asyncio": ("TimeoutError",),  # fsspec's base of FSTimeoutError; TimeoutError itself from Python 3.11 on.
    "httpx2": ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"),  # RemoteProtocolError: a body that was cut.
    "httpx": ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"),
    "requests": ("ConnectionError", "Timeout"),
}
TRANSIENT_ERRNOS = {
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR),  # A network file system that is restarted.
}


def open_options(url: str, *, timeout_seconds: float) -> dict[str, Any]:
    """fsspec's options for the url's protocol: no wait for a connection or for the next bytes is longer than timeout_seconds.

    Without them aiohttp gives a whole answer 300 s, however well it flows, and waits as long for one that does not. hf:// has no such
    options: here the Hub's client is bounded, for the whole process.
    """
    match url.partition("://")[0]:
        case "http" | "https":
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_seconds, sock_read=timeout_seconds)
            options: dict[str, Any] = {
                "client_kwargs": {"timeout": timeout, "trust_env": True}
            }  # trust_env: HTTPS_PROXY, as the Hub's client.
            if token := _hub_token(url):
                options["headers"] = {"Authorization": f"Bearer {token}"}
            return options
        case "hf":
            bound_hub_waits(timeout_seconds)
    return {}


def _hub_token(url: str) -> str | None:
    """The user's token, for files of the Hub alone. aiohttp does not pass it on where the Hub redirects to another host."""
    from huggingface_hub import constants, get_token

    return get_token() if url.startswith(f"{constants.ENDPOINT}/") else None


def bound_hub_waits(timeout_seconds: float) -> None:
    """No request to the Hub waits longer than this for a connection or for the next bytes.

    huggingface_hub lists files without any timeout: a stall there would hang for ever. It reads them with one of its own, 10 s, which stays
    if it is the shorter one, and tries a read or listing that failed 5 times again within 23 s and the timeouts: before it raises.
    """
    global _hub_bound_seconds
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bound(request: Any) -> None:
        waits = request.extensions.get("timeout") or {}
        limits = {wait: min(waits.get(wait) or timeout_seconds, timeout_seconds) for wait in ("connect", "read", "write", "pool")}
        request.extensions["timeout"] = limits

    def bounded_client() -> Any:
        client = default_client_factory()
        client.event_hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], bound]}
        return client

    if _hub_bound_seconds != timeout_seconds:  # Setting it closes the client that others may be using.
        set_client_factory(bounded_client)
        _hub_bound_seconds = timeout_seconds


_hub_bound_seconds: float | None = None
