"""A file, local or remote, opened and decompressed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fullshard.data.corpus import File
from fullshard.data.hub import open_options
from fullshard.data.pieces import Reading
from fullshard.errors import UserError


@contextmanager
def open_listed(file: File, reading: Reading, **options: Any) -> Iterator[Any]:
    """The file in binary mode; its size must be what it was when it was listed, on which the positions in it rest."""
    if "://" not in file.url:
        handle: Any = open(file.url, "rb")  # noqa: SIM115
        size = os.fstat(handle.fileno()).st_size
    else:
        import fsspec

        system, path = fsspec.url_to_fs(file.url, **open_options(file.url, timeout_seconds=reading.timeout_seconds))
        if file.immutable:
            options["size"] = file.size  # Saves a HEAD request.
        handle = system.open(path, "rb", **options)
        size = handle.size
    with handle:
        if size != file.size:
            raise UserError(f"{file.url}: has {size} bytes, had {file.size} when the run listed it; files must not change under a run")
        yield handle


def too_few_documents(asked: int, file: File, there: int) -> str:
    return f"data.evaluation_documents: {asked}: {file.url} has only {there} documents; hold out fewer, they are the first file's"


def size_of_head(file: Any, listed: File) -> int:
    """Bytes of the lines with the documents that are to be skipped. An empty line is none."""
    size, documents = 0, listed.skip
    while documents and (line := file.readline()):
        size += len(line)
        documents -= bool(line.strip())
    if documents:
        raise UserError(too_few_documents(listed.skip, listed, listed.skip - documents))
    return size


@contextmanager
def open_decompressed(file: Any, url: str) -> Iterator[Any]:
    """A file of which lines can be read. Of a compressed one, positions are those of what it holds."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    compression = infer_compression(url)
    if compression is None:
        # A remote file's own readline copies its cache, 5 MB, for each line.
        yield file if "://" not in url else io.BufferedReader(file, 2**20)
        return
    if compression not in compr:
        raise UserError(f"{url}: no decompressor for {compression} is installed")
    with compr[compression](file, mode="rb") as inner:
        yield io.BufferedReader(inner, 2**20) if isinstance(inner, io.RawIOBase) else inner
