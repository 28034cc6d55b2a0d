"""An HTTP server and a Hugging Face Hub for tests: on 127.0.0.1, counted, and faulty on demand.

    with Server(folder, faults=every(3, "503", "reset", "cut")) as server:
        read(f"{server.url}/part.parquet")
        assert server.gets["/part.parquet"] == 4

    with Server() as server:
        server.hub.add("datasets", "HuggingFaceFW/fineweb-edu", folder)
        subprocess.run(..., env=os.environ | server.hub.environment(tmp_path / "hf"))

A fault is a string: a status ("503"), or
  "reset"       RST instead of an answer
  "reset_body"  RST in the middle of the body
  "cut"         half of the body that Content-Length promises, then an orderly close
  "stall"       half of the body, then silence until the server closes; without a body: silence
  "short"       a well-formed answer that holds half of what was asked for: no HTTP client can see that it is wrong
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import itertools
import json
import os
import random
import re
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

STALL_SECONDS = 300  # At most; closing the server ends a stall at once.
CHUNK = 2**18  # Bytes read from disk and sent at a time.


@dataclass
class Request:
    method: str
    path: str  # Decoded, without the query.
    range: str | None  # The Range header.
    number: int  # 1, 2, ... among the requests of this method and path: the same at any number of clients.
    query: dict[str, list[str]] = field(default_factory=dict)
    status: int = 0  # 0 when no answer was sent.
    fault: str | None = None
    bytes_sent: int = 0  # Of the body.


Faults = Callable[[Request], str | None]


def every(k: int, *kinds: str, methods: tuple[str, ...] = ("GET",), ranges_only: bool = False, paths: str = "*") -> Faults:
    """The k-th, 2k-th, ... matching request fails, with each kind in turn. k=1: all fail."""
    matching, failing = itertools.count(1), itertools.cycle(kinds)  # next() of both is atomic: handlers are threads.

    def faults(request: Request) -> str | None:
        if request.method not in methods or not fnmatch(request.path, paths) or (ranges_only and request.range is None):
            return None
        return next(failing) if next(matching) % k == 0 else None

    return faults


def sometimes(rate: float, *kinds: str, seed: int = 0, methods: tuple[str, ...] = ("GET",), ranges_only: bool = False) -> Faults:
    """Requests fail at random; which ones depends on seed, path and the request's number there, not on the order of the clients."""

    def faults(request: Request) -> str | None:
        if request.method not in methods or (ranges_only and request.range is None):
            return None
        generator = random.Random(f"{seed} {request.path} {request.number}")
        return generator.choice(kinds) if generator.random() < rate else None

    return faults


class Server:
    """Serves folder under url. A context manager; fork-safe: a forked child lets go of the sockets."""

    def __init__(self, folder: Path | None = None, *, faults: Faults | None = None, die_after_gets: int | None = None) -> None:
        self.folder = folder
        self.faults = faults  # May be replaced while it runs.
        self.die_after_gets = die_after_gets
        self.log: list[Request] = []
        self.hub = Hub(self)
        self.ended = threading.Event()  # Dead or closed: stalls end.
        self.lock = threading.Lock()
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.total_gets = 0
        self.http = _Http(("127.0.0.1", 0), _Handler)
        self.http.owner = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        _servers.add(self)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.die()

    def die(self) -> None:
        """From now on connections are refused; open ones are broken. For good."""
        if self.ended.is_set():
            return
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        with self.lock:
            connections = list(self.http.connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # The handler was faster.
                connection.shutdown(socket.SHUT_RDWR)  # Wakes its handler; close() alone would not.

    def count(self, method: str) -> Counter[str]:
        with self.lock:
            return Counter(request.path for request in self.log if request.method == method)

    @property
    def gets(self) -> Counter[str]:
        """GET requests by path, failed ones too."""
        return self.count("GET")

    @property
    def heads(self) -> Counter[str]:
        return self.count("HEAD")

    @property
    def bytes_sent(self) -> Counter[str]:
        """Bytes of bodies by path."""
        with self.lock:
            total: Counter[str] = Counter()
            for request in self.log:
                total[request.path] += request.bytes_sent
            return total

    def forget(self) -> None:
        """Empties the log; the requests' numbers go on."""
        with self.lock:
            self.log = []

    def admit(self, request: Request) -> None:
        """Enters request in the log and decides its fault."""
        with self.lock:
            self.numbers[request.method, request.path] += 1
            request.number = self.numbers[request.method, request.path]
            self.log.append(request)
            self.total_gets += request.method == "GET"
            last = self.die_after_gets is not None and self.total_gets > self.die_after_gets
        request.fault = self.faults(request) if self.faults else None
        if last:
            request.fault = "reset"
            self.die()


class _Http(ThreadingHTTPServer):
    request_queue_size = 128
    owner: Server

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.owner.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.owner.lock:
            self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # A client that hung up.


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _let_go() -> None:
    # A listening socket that a forked loader worker still holds would accept after die(), and a reset waits for the last holder.
    for server in _servers:
        for held in [server.http.socket, *server.http.connections]:
            if held.fileno() >= 0:
                os.close(held.detach())


os.register_at_fork(after_in_child=_let_go)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Keep-alive.
    disable_nagle_algorithm = True  # Else header and body of a small answer are 40 ms apart.
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        query = parse_qs(parts.query) | parse_qs(form)
        self.request_ = Request(self.command, unquote(parts.path), self.headers.get("Range"), 0, query)
        owner.admit(self.request_)
        fault = self.request_.fault
        if fault == "reset" or owner.ended.is_set():
            self.reset()
        elif fault and fault.isdigit():
            self.send_body(int(fault), b"a fault\n", {"Content-Type": "text/plain"})
        elif (answer := owner.hub.answer(self.request_, parts.path)) is not None:
            self.send(answer)
        else:
            self.send(Answer(path=owner.folder / self.request_.path.lstrip("/")) if owner.folder else Answer(status=404))

    def send(self, answer: Answer) -> None:
        if answer.path is None:
            self.send_body(answer.status, answer.body, answer.headers)
        elif answer.path.is_dir():  # Links, so that fsspec can list and glob.
            names = sorted(entry.name + "/" * entry.is_dir() for entry in answer.path.iterdir())
            page = "".join(f'<a href="{html.escape(name)}">{html.escape(name)}</a>\n' for name in names)
            self.send_body(200, page.encode(), {"Content-Type": "text/html"})
        elif answer.path.is_file():
            self.send_file(answer.path, answer.headers)
        else:
            self.send_body(404, b"not found\n", {"Content-Type": "text/plain"})

    def send_file(self, path: Path, headers: dict[str, str]) -> None:
        state = path.stat()
        etag = hashlib.sha1(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"{etag}"'} | headers
        start, stop, status = 0, state.st_size, 200
        if self.request_.range is not None:
            match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.request_.range)
            if match is None or match.groups() == ("", ""):
                return self.send_body(400, b"one range, please\n", {})
            if match[1]:
                start, stop = int(match[1]), min(int(match[2]) + 1, stop) if match[2] else stop
            else:
                start = max(stop - int(match[2]), 0)  # The last n bytes.
            if start >= stop:
                return self.send_body(416, b"", {"Content-Range": f"bytes */{state.st_size}"})
            if self.request_.fault == "short":
                stop -= (stop - start) // 2
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{state.st_size}"
        elif self.request_.fault == "short" and self.command == "GET":
            stop //= 2
        with path.open("rb") as file:
            file.seek(start)
            pieces = (file.read(min(CHUNK, stop - position)) for position in range(start, stop, CHUNK))
            return self.send_pieces(status, pieces, stop - start, headers)

    def send_body(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_pieces(status, iter([body]), len(body), headers)

    def send_pieces(self, status: int, pieces: Iterator[bytes], length: int, headers: dict[str, str]) -> None:
        fault = self.request_.fault
        half = length // 2 if fault in ("cut", "reset_body", "stall") else length
        if fault == "stall" and (self.command == "HEAD" or not length):
            return self.stall()
        self.request_.status = status
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        for piece in pieces:
            piece = piece[: half - self.request_.bytes_sent]
            self.wfile.write(piece)
            self.request_.bytes_sent += len(piece)
            if self.request_.bytes_sent >= half:
                break
        if fault == "reset_body":
            time.sleep(0.02)  # An RST overtakes what the client has not read yet.
            self.reset()
        elif fault == "cut":
            self.close_connection = True
        elif fault == "stall":
            self.stall()
        return None

    def stall(self) -> None:
        self.close_connection = True
        self.server.owner.ended.wait(STALL_SECONDS)

    def reset(self) -> None:
        self.close_connection = True
        with self.server.owner.lock:
            self.server.connections.discard(self.connection)
            if self.connection.fileno() >= 0:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())  # close() would wait for rfile; with no linger this sends an RST.


@dataclass(frozen=True)
class Answer:
    """A file or folder (path), or a status with a body."""

    path: Path | None = None
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Hub:
    """As much of the Hugging Face Hub as datasets, huggingface_hub and transformers ask when they read."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.page_size = 1000  # Entries of a listing, as there.
        self.redirect = False  # Whether large files are elsewhere, as there: /cdn/... of another host name.
        self.folders: dict[tuple[str, str], dict[str, Path]] = {}  # (kind, repository) -> revision -> folder

    def add(self, kind: str, name: str, folder: Path, *, revision: str = "main") -> None:
        """kind: "datasets" or "models"; name: "user/repository"; folder: what is in it."""
        self.folders.setdefault((kind, name), {})[revision] = folder

    def environment(self, home: Path) -> dict[str, str]:
        """For a subprocess: huggingface_hub reads HF_ENDPOINT when it is imported. home: token and caches, never the user's."""
        caches = {"HF_HUB_CACHE": str(home / "hub"), "HF_DATASETS_CACHE": str(home / "datasets"), "HF_XET_CACHE": str(home / "xet")}
        online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
        return {"HF_ENDPOINT": self.server.url, "HF_HOME": str(home), "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1"} | caches | online

    @staticmethod
    def commit(folder: Path) -> str:
        """The revision that stands for what is in folder now: 40 hexadecimal digits."""
        state = [(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
        return hashlib.sha1(repr(state).encode()).hexdigest()

    def answer(self, request: Request, raw_path: str) -> Answer | None:
        """None: not one of the Hub's paths. raw_path: still percent-encoded, since a revision may hold a slash."""
        pieces = [unquote(piece) for piece in raw_path.strip("/").split("/")]
        match pieces:
            case ["api", ("datasets" | "models") as kind, user, repository, *rest]:
                return self.api(request, kind, f"{user}/{repository}", rest)
            case ["datasets", user, repository, "resolve", revision, *path]:
                return self.resolve("datasets", f"{user}/{repository}", revision, "/".join(path))
            case [user, repository, "resolve", revision, *path]:
                return self.resolve("models", f"{user}/{repository}", revision, "/".join(path))
            case ["cdn", kind, user, repository, revision, *path]:
                return self.resolve(kind, f"{user}/{repository}", revision, "/".join(path), here=True)
            case ["api", *_]:
                return missing("EntryNotFound")
        return None

    def find(self, kind: str, name: str, revision: str) -> Path | Answer:
        revisions = self.folders.get((kind, name))
        if revisions is None:
            return missing("RepoNotFound")
        for known, folder in revisions.items():
            if revision in (known, self.commit(folder)):
                return folder
        return missing("RevisionNotFound")

    def resolve(self, kind: str, name: str, revision: str, path: str, *, here: bool = False) -> Answer:
        folder = self.find(kind, name, revision)
        if isinstance(folder, Answer):
            return folder
        commit = {"X-Repo-Commit": self.commit(folder)}
        if not (folder / path).is_file():
            return missing("EntryNotFound", commit)
        linked = {"X-Linked-Size": str((folder / path).stat().st_size), "X-Linked-Etag": f'"{oid(folder / path)}"'}
        if self.redirect and not here and is_large(path):
            place = f"{self.server.url.replace('127.0.0.1', 'localhost')}/cdn/{kind}/{name}/{quote(revision, safe='')}/{quote(path)}"
            return Answer(status=302, headers=commit | linked | {"Location": place})
        return Answer(path=folder / path, headers=commit | linked)

    def api(self, request: Request, kind: str, name: str, rest: list[str]) -> Answer:
        what, revision, path = (rest[0] if rest else ""), (rest[1] if len(rest) > 1 else "main"), "/".join(rest[2:])
        folder = self.find(kind, name, revision)
        if isinstance(folder, Answer):
            return folder
        match what:
            case "" | "revision":
                files = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_file())
                state = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
                return as_json({"id": name, "sha": self.commit(folder), "siblings": [{"rfilename": file} for file in files]} | state)
            case "tree":
                if not (folder / path).is_dir():
                    return missing("EntryNotFound")
                recursive = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
                found = sorted((folder / path).rglob("*") if recursive else (folder / path).iterdir())
                first = int(request.query.get("cursor", ["0"])[0])
                page = found[first : first + self.page_size]
                headers = {}
                if first + self.page_size < len(found):
                    query = f"recursive={recursive}&cursor={first + self.page_size}"
                    headers["Link"] = f'<{self.server.url}{request.path}?{query}>; rel="next"'
                return as_json([describe(folder, entry) for entry in page], headers)
            case "paths-info":
                asked = [folder / path for path in request.query.get("paths", [])]
                return as_json([describe(folder, entry) for entry in asked if entry.exists()])
        return missing("EntryNotFound")


def oid(path: Path) -> str:
    """Stands for the content's SHA-256, without reading it: the tests' corpora may be large."""
    state = path.stat()
    return hashlib.sha256(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()


def is_large(name: str) -> bool:
    """Whether git LFS would hold it."""
    return not name.endswith((".md", ".json", ".yaml", ".txt"))


def describe(folder: Path, entry: Path) -> dict[str, Any]:
    name = entry.relative_to(folder).as_posix()
    if entry.is_dir():
        return {"type": "directory", "path": name, "oid": oid(entry)[:40], "size": 0}
    size = entry.stat().st_size
    described: dict[str, Any] = {"type": "file", "path": name, "oid": oid(entry)[:40], "size": size}
    if is_large(name):
        described["lfs"] = {"oid": oid(entry), "size": size, "pointerSize": 134}
    return described


def as_json(value: Any, headers: dict[str, str] | None = None) -> Answer:
    return Answer(body=json.dumps(value).encode(), headers={"Content-Type": "application/json"} | (headers or {}))


def missing(code: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status=404, headers={"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))
