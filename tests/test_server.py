"""The tests' server does what it says, and what the libraries raise over its faults is told apart: may it pass or not?"""

from __future__ import annotations

import errno
import http.client
import json
import os
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.exceptions import FSTimeoutError

import fullshard
from fullshard.data import hub
from fullshard.data.hub import bound_hub_waits, is_transient, open_options
from fullshard.errors import UserError
from support import HANG_S
from support.server import Hub, Server, every, sometimes

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes: more than a socket's buffer holds unread.
ASSETS = Path(fullshard.__file__).parent / "assets"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.bin").write_bytes(CONTENT)
    pq.write_table(pa.table({"text": [f"document {row} " * 20 for row in range(4000)]}), tmp_path / "x.parquet", row_group_size=1000)
    return tmp_path


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def ask(server: Server, path: str = "/x.bin", *, method: str = "GET", byte_range: str | None = None, timeout: float = 5.0) -> Any:
    """(status, headers, body) over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http.server_address[1], timeout=timeout)
    try:
        connection.request(method, path, headers={"Range": byte_range} if byte_range else {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_ranges_and_counts(folder: Path) -> None:
    with Server(folder) as server:
        status, headers, body = ask(server)
        assert (status, body, headers["Accept-Ranges"]) == (200, CONTENT, "bytes")
        assert ask(server, method="HEAD")[1]["Content-Length"] == str(len(CONTENT))
        for byte_range, wanted in [("bytes=10-19", CONTENT[10:20]), ("bytes=-5", CONTENT[-5:]), ("bytes=1023990-", CONTENT[1023990:])]:
            status, headers, body = ask(server, byte_range=byte_range)
            assert (status, body) == (206, wanted)
            assert headers["Content-Range"].endswith(f"/{len(CONTENT)}")
            assert headers["ETag"] == ask(server, method="HEAD")[1]["ETag"]
        assert ask(server, byte_range="bytes=1024000-1024001")[0] == 416
        assert ask(server, "/nothing")[0] == 404
        assert server.gets == {"/x.bin": 5, "/nothing": 1}
        assert server.heads == {"/x.bin": 4}
        assert server.bytes_sent["/x.bin"] == len(CONTENT) + 10 + 5 + 10
        server.forget()
        assert not server.gets


def test_keeps_connections(folder: Path) -> None:
    with Server(folder) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http.server_address[1], timeout=5)
        for _ in range(3):
            connection.request("GET", "/x.bin", headers={"Range": "bytes=0-9"})
            connection.getresponse().read()
            used = connection.sock
        assert connection.sock is used
        assert len(server.http.connections) == 1
        connection.close()


def test_fsspec_lists_a_folder(folder: Path) -> None:
    with Server(folder) as server:
        assert fsspec.filesystem("http").glob(f"{server.url}/*.parquet") == [f"{server.url}/x.parquet"]


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("reset", ConnectionResetError),
        ("reset_body", (ConnectionResetError, http.client.IncompleteRead)),
        ("cut", http.client.IncompleteRead),
        ("stall", TimeoutError),
    ],
)
def test_faults_of_connections(folder: Path, fault: str, raised: type[Exception]) -> None:
    start = time.monotonic()
    with Server(folder, faults=every(1, fault)) as server:
        with pytest.raises(raised):
            ask(server, timeout=0.2)
        assert server.log[0].fault == fault
        assert server.bytes_sent["/x.bin"] == (0 if fault == "reset" else len(CONTENT) // 2)
    assert time.monotonic() - start < 30, "closing the server must end a stall"


def test_faults_that_answer(folder: Path) -> None:
    with Server(folder, faults=every(1, "503", "429", "short")) as server:
        assert [ask(server)[0] for _ in range(2)] == [503, 429]
        status, headers, body = ask(server, byte_range="bytes=0-99")
        assert (status, body, headers["Content-Length"]) == (206, CONTENT[:50], "50")


def test_schedules(folder: Path) -> None:
    with Server(folder, faults=every(3, "503")) as server:
        assert [ask(server)[0] for _ in range(7)] == [200, 200, 503, 200, 200, 503, 200]
        server.faults = every(1, "503", ranges_only=True)
        assert (ask(server)[0], ask(server, byte_range="bytes=0-1")[0]) == (200, 503)
        server.faults = every(1, "503", methods=("HEAD",), paths="*.parquet")
        asked = [ask(server, method="HEAD"), ask(server, "/x.parquet", method="HEAD"), ask(server, "/x.parquet")]
        assert [status for status, _, _ in asked] == [200, 503, 200]

    def statuses(seed: int, order: list[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"/x.bin": [], "/x.parquet": []}
        with Server(folder, faults=sometimes(0.4, "503", "429", seed=seed)) as server:
            for path in order:
                found[path].append(ask(server, path, byte_range="bytes=0-1")[0])
        return found

    alternating, grouped = ["/x.bin", "/x.parquet"] * 15, ["/x.bin"] * 15 + ["/x.parquet"] * 15
    assert statuses(1, alternating) == statuses(1, grouped) != statuses(2, grouped)


def test_dies_for_good(folder: Path) -> None:
    with Server(folder, die_after_gets=2) as server:
        assert [ask(server)[0] for _ in range(2)] == [200, 200]
        with pytest.raises(ConnectionResetError):
            ask(server)
        with pytest.raises(ConnectionRefusedError):
            ask(server)


def test_a_forked_child_keeps_nothing_open(folder: Path) -> None:
    """Loader workers are forked while the server runs. If they held its socket, connections to the dead server would hang, not fail."""
    with Server(folder) as server:
        reader, writer = os.pipe()
        started, starting = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.write(starting, b"1")
            os.read(reader, 1)  # Until the parent is done.
            os._exit(0)
        os.read(started, 1)  # It has let go by now.
        server.die()
        with pytest.raises(ConnectionRefusedError):
            ask(server, timeout=2)
        os.close(writer)
        os.waitpid(child, 0)
        for descriptor in (reader, started, starting):
            os.close(descriptor)


# What the libraries make of the faults: held against the installed fsspec and aiohttp.


def http_system(**options: Any) -> Any:
    return fsspec.filesystem("http", **open_options("http://x", timeout_seconds=0.3), skip_instance_cache=True, **options)


def caught(read: Callable[[], Any]) -> Exception:
    try:
        found = read()
    except Exception as error:
        return error
    raise AssertionError(f"read {len(found)} bytes")


def causes(error: BaseException | None) -> list[str]:
    return [] if error is None else [type(error).__name__, *causes(error.__cause__)]


READS: dict[str, Callable[[str], Any]] = {
    "cat_file": lambda url: http_system().cat_file(url),
    "range": lambda url: http_system().cat_file(url, start=1000, end=900_000),
    "read": lambda url: http_system().open(url).read(),
    "readahead": lambda url: http_system().open(url, cache_type="readahead", block_size=2**16).read(500_000),
    "uncached": lambda url: http_system().open(url, cache_type="none").read(500_000),
    "parquet": lambda url: list(pq.ParquetFile(http_system().open(url.replace(".bin", ".parquet"))).iter_batches()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    ("fault", "raised", "passes"),
    [
        ("503", "ClientResponseError", True),
        ("429", "ClientResponseError", True),
        ("reset", "ClientOSError", True),
        ("reset_body", "ClientPayloadError", True),
        ("cut", "ClientPayloadError", True),
        ("stall", "FSTimeoutError", True),
        ("403", "ClientResponseError", False),
        ("404", None, False),  # ClientResponseError or FileNotFoundError.
    ],
)
def test_faults_over_http(folder: Path, fault: str, raised: str | None, passes: bool, read: Callable[[str], Any]) -> None:
    """Every fault is an error: what was cut is never returned as if it were all. is_transient knows which may pass."""
    with Server(folder, faults=every(1, fault)) as server:
        error = caught(lambda: read(f"{server.url}/x.bin"))
    assert raised in (None, causes(error)[0])
    assert is_transient(error) is passes, causes(error)


@pytest.mark.parametrize(("fault", "passes"), [("503", True), ("reset", True), ("404", False), ("403", False)])
def test_open_over_http_hides_the_cause(folder: Path, fault: str, passes: bool) -> None:
    """fsspec raises FileNotFoundError for a server that is busy; only its cause says so."""
    with Server(folder, faults=every(1, fault, methods=("HEAD", "GET"))) as server:
        for look in (lambda: http_system().info(f"{server.url}/x.bin"), lambda: http_system().open(f"{server.url}/x.bin")):
            error = caught(look)
            assert type(error) is FileNotFoundError
            assert is_transient(error) is passes, causes(error)


def test_a_dead_server_over_http(folder: Path) -> None:
    with Server(folder) as server:
        file = http_system().open(f"{server.url}/x.bin", block_size=2**16)
        file.read(1000)
        server.die()
        assert is_transient(caught(lambda: file.seek(500_000) and file.read(1000)))
        assert is_transient(caught(lambda: http_system().info(f"{server.url}/x.bin")))


def test_a_file_goes_on_after_a_fault(folder: Path) -> None:
    """No cache of fsspec's keeps half of a block: the same file object read again gives what it should have given."""
    for kind in ("bytes", "readahead", "none"):
        for fault in ("503", "cut", "stall"):
            with Server(folder) as server:
                file = http_system().open(f"{server.url}/x.bin", cache_type=kind, block_size=2**16)
                first = file.read(100_000)
                server.faults = every(1, fault)
                assert is_transient(caught(lambda file=file: file.read(500_000)))
                server.faults = None
                assert first + file.read() == CONTENT


def test_a_known_size_saves_the_question(folder: Path) -> None:
    with Server(folder) as server:
        system = http_system()
        assert system.open(f"{server.url}/x.bin", size=len(CONTENT)).read() == CONTENT
        assert not server.heads


def test_a_short_answer_is_silent(folder: Path) -> None:
    """What no library notices, so that readers must count: an answer that is well formed and holds less than was asked for."""
    with Server(folder, faults=every(1, "short")) as server:
        assert len(http_system().open(f"{server.url}/x.bin").read()) == len(CONTENT) // 2


def test_http_options() -> None:
    options = open_options("https://host/x.parquet", timeout_seconds=7)
    timeout = options["client_kwargs"]["timeout"]
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 7, 7)
    assert fsspec.filesystem("https", **options) is fsspec.filesystem("https", **open_options("https://host/y", timeout_seconds=7))
    assert open_options("/a/folder/x.parquet", timeout_seconds=7) == open_options("s3://bucket/x", timeout_seconds=7) == {}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Requests to the Hub wait 0.3 s at most; afterwards as before."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    before = hub._hub_bound_seconds
    bound_hub_waits(0.3)
    yield
    set_client_factory(default_client_factory)
    hub._hub_bound_seconds = None
    if before is not None:
        bound_hub_waits(before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    ("fault", "raised", "passes"),
    [
        ("503", "HfHubHTTPError", True),
        ("429", "HfHubHTTPError", True),
        ("reset", "ReadError", True),
        ("reset_body", "ReadError", True),
        ("cut", "RemoteProtocolError", True),
        ("stall", "ReadTimeout", True),
        ("401", "HfHubHTTPError", False),
        ("403", "HfHubHTTPError", False),
    ],
)
def test_faults_of_the_hub(tmp_path: Path, fault: str, raised: str, passes: bool) -> None:
    """paths-info has no timeout of its own and is not tried again: without bound_hub_waits the stall hangs here for ever."""
    from huggingface_hub import HfApi

    (tmp_path / "README.md").write_text("of a data set")
    with Server(faults=every(1, fault, methods=("GET", "POST"))) as server:
        server.hub.add("datasets", "some/data", tmp_path)
        api = HfApi(endpoint=server.url, token=False)
        error = caught(lambda: api.get_paths_info("some/data", ["README.md"], repo_type="dataset"))
    assert causes(error)[0] == raised
    assert is_transient(error) is passes, causes(error)


def test_what_the_hub_does_not_have(tmp_path: Path) -> None:
    from huggingface_hub import HfFileSystem

    with Server() as server:
        server.hub.add("datasets", "some/data", tmp_path)
        system = HfFileSystem(endpoint=server.url, token=False, skip_instance_cache=True)
        for path, reason in [
            ("datasets/no/such/x.parquet", "RepositoryNotFoundError"),
            ("datasets/some/data@nowhere/x.parquet", "RevisionNotFoundError"),
            ("datasets/some/data/x.parquet", None),
        ]:
            error = caught(lambda path=path: system.info(path))
            assert type(error) is FileNotFoundError
            assert reason is None or causes(error)[1] == reason
            assert not is_transient(error)


def from_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "not yours"), False),
        (IsADirectoryError(errno.EISDIR, "a folder"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError(errno.EIO, "disk"), True),
        (OSError(errno.ESTALE, "NFS"), True),
        (OSError(errno.ETIMEDOUT, "NFS"), True),
        (OSError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.EHOSTUNREACH, "route"), True),
        (FSTimeoutError(), True),  # Not a TimeoutError in Python 3.10.
        (socket.gaierror(socket.EAI_AGAIN, "resolver"), True),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), True),
        (ssl.SSLCertVerificationError(1, "self-signed"), False),
        (from_cause(OSError("cannot connect"), ssl.SSLCertVerificationError(1, "self-signed")), False),
        (from_cause(RuntimeError("while generating"), ConnectionResetError(errno.ECONNRESET, "reset")), True),
        (from_cause(FileNotFoundError("url"), FileNotFoundError("url")), False),
        (from_cause(UserError("said already"), ConnectionResetError(errno.ECONNRESET, "reset")), False),
        (UserError("a mistake"), False),
        (ValueError("not JSON"), False),
        (EOFError("compressed file ended"), False),
        (pa.ArrowInvalid("not parquet"), False),
        (OSError("File too short"), False),  # pyarrow, over a file that is corrupt.
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_is_transient(error: BaseException, passes: bool) -> None:
    assert is_transient(error) is passes


def test_what_was_only_being_handled_does_not_count() -> None:
    error = KeyError("a bug in the handler")
    error.__context__ = ConnectionResetError(errno.ECONNRESET, "reset")
    assert not is_transient(error)


def test_offline_stays_offline() -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    assert not is_transient(OfflineModeIsEnabled("HF_HUB_OFFLINE"))


def test_is_transient_imports_nothing() -> None:
    code = (
        "import sys, fullshard.data.hub as h; h.is_transient(OSError(5, '')); print({'aiohttp', 'httpx2', 'datasets'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""

# In a process of its own: HF_ENDPOINT is read when huggingface_hub is imported.
USE_THE_HUB = """
import json, pickle, sys
import datasets, fsspec
import pyarrow.parquet as pq
from transformers import AutoTokenizer

name = "HuggingFaceFW/fineweb-edu"
mark = lambda step: fsspec.filesystem("http").cat_file(sys.argv[1] + "/mark/" + step)
builder = datasets.load_dataset_builder(name, "sample-10BT")
files = list(builder.config.data_files["train"])
hub = fsspec.filesystem("hf")
sizes = [hub.info(file)["size"] for file in files]
try:
    mark("listed")
except FileNotFoundError:
    pass
with hub.open(files[0], block_size=2**12) as file:
    group = pq.ParquetFile(file, pre_buffer=False).read_row_group(2)["text"].to_pylist()
stream = datasets.load_dataset(name, "sample-10BT", split="train", streaming=True, revision=builder.hash)
again = pickle.loads(pickle.dumps(hub))
tokenizer = AutoTokenizer.from_pretrained("some/tokenizer")
print(json.dumps({
    "files": files, "sizes": sizes, "group": group, "texts": [row["text"] for row in stream],
    "ids": tokenizer("Hello world")["input_ids"], "eos": tokenizer.eos_token, "kept": len(again.dircache),
}))
"""


def test_the_libraries_read_the_hub(tmp_path: Path) -> None:
    """datasets lists hf:// files with their sizes in ten requests, whatever their number, and reads none; all that is there can be read."""
    from tokenizers import Tokenizer

    number = 20
    texts = [[f"file {file} row {row}, " * 50 for row in range(40)] for file in range(number)]
    data, tokenizer = tmp_path / "data", tmp_path / "tokenizer"
    (data / "sample" / "10BT").mkdir(parents=True)
    (data / "data").mkdir()
    for file, rows in enumerate(texts):
        path = data / "sample" / "10BT" / f"{file:03d}_00000.parquet"
        pq.write_table(pa.table({"text": rows}), path, row_group_size=10, compression="none", use_dictionary=False)
    shutil.copy(path, data / "data")
    (data / "README.md").write_text(CARD)
    tokenizer.mkdir()
    shutil.copy(ASSETS / "tokenizer.json", tokenizer)
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))

    with Server() as server:
        server.hub.redirect = True
        server.hub.add("datasets", "HuggingFaceFW/fineweb-edu", data)
        server.hub.add("models", "some/tokenizer", tokenizer)
        environment = os.environ | server.hub.environment(tmp_path / "home")
        done = subprocess.run(
            [sys.executable, "-c", USE_THE_HUB, server.url], env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stderr
        log = server.log
    found = json.loads(done.stdout.splitlines()[-1])
    root = f"hf://datasets/HuggingFaceFW/fineweb-edu@{Hub.commit(data)}/sample/10BT"
    assert found["files"] == [f"{root}/{file:03d}_00000.parquet" for file in range(number)]
    assert found["sizes"] == [path.stat().st_size for path in sorted((data / "sample" / "10BT").iterdir())]
    assert found["group"] == texts[0][20:30]
    assert found["texts"] == [text for rows in texts for text in rows]
    assert found["ids"] == own.encode("Hello world").ids
    assert found["eos"] == "<|endoftext|>"
    assert found["kept"], "a pickled HfFileSystem takes its listings along"

    listed = next(index for index, request in enumerate(log) if request.path == "/mark/listed")
    assert listed == 10, [request.path for request in log[:listed]]
    assert not [request for request in log[:listed] if request.path.endswith(".parquet")]
    opened = [request for request in log[listed:] if request.path.endswith("000_00000.parquet") and request.status == 206]
    assert all(request.range for request in opened)
    assert opened[0].path.startswith("/cdn/")


def test_the_hub_lists_in_pages(tmp_path: Path) -> None:
    from huggingface_hub import HfFileSystem

    for number in range(25):
        (tmp_path / f"{number:02d}.parquet").write_bytes(b"x" * number)
    with Server() as server:
        server.hub.page_size = 10
        server.hub.add("datasets", "some/data", tmp_path, revision="v1")
        system = HfFileSystem(endpoint=server.url, token=False, skip_instance_cache=True)
        found = system.find("datasets/some/data@v1", detail=True)
        assert [entry["size"] for entry in found.values()] == list(range(25))
        assert sum("/tree/" in request.path for request in server.log) == 3
        pickle.dumps(system)
