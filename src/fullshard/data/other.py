"""The reader of every other format that `datasets` has: csv, JSON lists and more, always from the beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fullshard.data.corpus import COMPRESSED, File, Source
from fullshard.data.opened import open_listed, too_few_documents
from fullshard.data.pieces import Entry, Extent, Piece, Reading
from fullshard.data.values import value_from_row
from fullshard.errors import UserError


def read_rows(piece: Piece, cursor: int, reading: Reading) -> Iterator[Entry]:
    """Whatever else `datasets` reads, from the beginning, up to the cursor in vain."""
    file, source = piece.file, reading.source
    with open_listed(file, reading):
        pass  # It is what was listed.
    rows = datasets_rows(file, source)
    extent = piece.extent or Extent(0, None)
    start = max(cursor, file.skip, extent.first)
    if start:
        rows = rows.skip(start)
    # Not iter(rows): in a loader worker that leaves rows to the other workers, which do not read this file.
    numbered: Iterator[tuple[int, Any]] = enumerate(rows.iter(1), start)
    stop = extent.last + 1 if extent.last is not None else file.take
    if stop is not None:
        numbered = itertools.islice(numbered, max(0, stop - start))
    seen = start
    for number, row in numbered:
        seen = number + 1
        if piece.draws(number):
            yield number, None if seen == stop else seen, value_from_row({name: values[0] for name, values in row.items()}, source, reading)
    if file.take is not None and seen < file.take:
        raise UserError(too_few_documents(file.take, file, seen))
    if file.skip and not cursor and seen == start:
        raise UserError(f"data.evaluation_documents: {file.skip}: {file.url} has no more rows than that")


def datasets_rows(file: File, source: Source) -> Any:
    """The file's rows as `datasets` streams them."""
    import datasets

    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # Each opening would ask the Hub to count a download.
    options = source.options
    if source.builder == "csv" and file.url.lower().endswith((".tsv", *(f".tsv{ending}" for ending in COMPRESSED))):
        options = {"sep": "\t"} | options
    return datasets.load_dataset(source.builder, data_files=[glob_escaped(file.url)], split="train", streaming=True, **options)


def glob_escaped(url: str) -> str:
    """A local path that `datasets` takes literally."""
    import glob

    return url if "://" in url else glob.escape(url)
