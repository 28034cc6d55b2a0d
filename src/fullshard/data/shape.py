"""How much a file holds, as far as its footer, its header or a small part of it tells."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.data.corpus import COMPRESSED, File, enterable, file_format
from fullshard.data.hub import is_transient, reason, retrying
from fullshard.data.opened import open_decompressed, open_listed, size_of_head
from fullshard.data.other import datasets_rows
from fullshard.data.pieces import Piece, Reading
from fullshard.data.tables import open_arrow, open_parquet, row_group_starts, row_range
from fullshard.errors import UserError

COMPRESSED_SAMPLE_BYTES = 2**23
ZSTD_HEADER_BYTES = 18  # Of a frame, at most (RFC 8878).


def read_amplification(pieces: Sequence[Piece], reading: Reading) -> float:
    """Bytes that are decoded to read the pieces once, in units of their own bytes. Opens each parquet file's footer; one that cannot be
    read counts as decoded once: its reading will tell."""

    @functools.cache
    def row_groups(file: File) -> list[int]:
        with open_listed(file, reading) as opened:
            return row_group_starts(open_parquet(opened))

    decoded = own = 0.0
    for piece in pieces:
        share = (piece.end - piece.begin) * (piece.drawn[1] - piece.drawn[0])
        own += share
        if piece.is_drawn:
            decoded += piece.end - piece.begin
        elif piece.extent and not enterable(reading.source.builder, piece.file.url):
            decoded += piece.end  # From the beginning.
        elif file_format(reading.source.builder, piece.file.url) == "parquet":
            try:
                groups = retrying(reading.max_retries)(row_groups, piece.file)
            except Exception:
                decoded += share
                continue
            first, last = row_range(piece, groups[-1])
            touched = [(low, high) for low, high in itertools.pairwise(groups) if low < last and first < high]
            decoded += piece.file.size * sum(high - low for low, high in touched) / max(groups[-1], 1)
        else:
            decoded += share
    return decoded / own if own else 1.0


def row_count(file: File, reading: Reading) -> int | None:
    """Rows of the file as its footer tells; None where only reading it would."""
    match file_format(reading.source.builder, file.url):
        case "parquet":
            with open_listed(file, reading) as opened:
                return int(open_parquet(opened).metadata.num_rows)
        case "arrow":
            return int(open_arrow(file, reading).num_rows)
    return None


LINE_SEGMENTS = 4  # Of a file of JSON lines, each of which is sampled on its own.


@dataclass(frozen=True)
class Shape:
    """What a file tells of where its column's bytes are, without reading them."""

    sizes: np.ndarray
    """float64 [segments]: bytes of the column, of lines, or tokens."""
    edges: np.ndarray | None
    """int64 [segments + 1]: the byte as stored at which each begins, and the end. None: it can be entered at its beginning alone."""
    rows: int | None
    """Where a footer tells."""
    exact_tokens: bool
    """Whether `sizes` are tokens."""


def shape_of(file: File, reading: Reading) -> Shape:
    """Of a file that is still to be read: from its footer, its size, or the size that the compressed file tells.

    A file in which that cannot be found is as large as it is stored: reading it will tell what is wrong. Raises UserError where the file
    cannot be reached.
    """
    kind = file_format(reading.source.builder, file.url)
    plain = Shape(
        np.array([float(file.size)]), np.array([0, file.size]) if enterable(reading.source.builder, file.url) else None, None, False
    )
    shapes = {"parquet": _parquet_shape, "arrow": _arrow_shape, "lines": _lines_shape}
    shape = _compressed_shape if file.url.lower().endswith(COMPRESSED) else shapes.get(kind)
    if shape is None:
        return plain
    try:
        return retrying(reading.max_retries)(shape, file, reading)
    except UserError:
        raise
    except Exception as error:
        if is_transient(error):
            raise UserError(f"{file.url}: lost after {reading.max_retries} retries: {reason(error)}") from error
        return plain


def _parquet_shape(file: File, reading: Reading) -> Shape:
    with open_listed(file, reading, **({"cache_type": "none"} if "://" in file.url else {})) as opened:
        parquet = open_parquet(opened)
        metadata, column = parquet.metadata, reading.source.column
        groups = row_group_starts(parquet)
    sizes = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        leaves = [group.column(index) for index in range(group.num_columns)]
        own = [leaf for leaf in leaves if leaf.path_in_schema == column]
        own = own or [leaf for leaf in leaves if leaf.path_in_schema.startswith(f"{column}.")]
        # Of a list each value is counted; of texts the bytes, as they are before they are compressed.
        sizes.append(sum(leaf.num_values if reading.source.tokens_column else leaf.total_uncompressed_size for leaf in own))
    return _rows_shape(file, groups, sizes, exact_tokens=bool(reading.source.tokens_column))


def _arrow_shape(file: File, reading: Reading) -> Shape:
    chunks = open_arrow(file, reading).column(reading.source.column).chunks
    groups = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    exact = bool(reading.source.tokens_column)
    return _rows_shape(file, groups, [len(chunk.flatten()) if exact else chunk.nbytes for chunk in chunks], exact_tokens=exact)


def _rows_shape(file: File, groups: list[int], sizes: Sequence[int], *, exact_tokens: bool) -> Shape:
    """groups: first row of each segment, and the number of rows. The rows that are held out are not this source's."""
    rows = groups[-1]
    if not rows:
        return Shape(np.zeros(1), np.array([0, file.size]), 0, exact_tokens)
    kept = [
        (max(low, file.skip), high, size * (high - max(low, file.skip)) / (high - low))
        for (low, high), size in zip(itertools.pairwise(groups), sizes, strict=True)
        if high > max(low, file.skip)
    ]
    edges = [low * file.size // rows for low, _, _ in kept] + [file.size]
    return Shape(np.array([size for *_, size in kept], dtype=np.float64), np.array(edges), rows - file.skip, exact_tokens)


def _lines_shape(file: File, reading: Reading) -> Shape:
    head = 0
    if file.skip:
        with open_listed(file, reading) as raw, open_decompressed(raw, file.url) as opened:
            head = size_of_head(opened, file)
    edges = np.array([max(head, file.size * segment // LINE_SEGMENTS) for segment in range(LINE_SEGMENTS + 1)])
    return Shape(np.diff(edges).astype(np.float64), edges, None, False)


def _compressed_shape(file: File, reading: Reading) -> Shape:
    """What the file tells of its size, where that fits to how far its first megabytes are compressed; else from these."""
    with open_listed(file, reading) as raw:
        told = _told_size(raw, file)
        raw.seek(0)
        with open_decompressed(raw, file.url) as opened:
            size = len(opened.read(COMPRESSED_SAMPLE_BYTES))
            stored = min(raw.tell(), file.size)
    expected = size if stored >= file.size else size * file.size / max(stored, 1)
    # Of several members or frames, each tells its own size.
    return Shape(np.array([float(told) if told and 0.5 < told / max(expected, 1) < 2 else float(expected)]), None, None, False)


def _told_size(raw: Any, file: File) -> int | None:
    """Bytes of the decompressed file: gzip's trailer has them modulo 2**32, zstd's frame header where its writer knew."""
    if file.url.lower().endswith(".gz"):
        raw.seek(file.size - 4)
        return int.from_bytes(raw.read(4), "little")
    if file.url.lower().endswith(".zst"):
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return zstd.get_frame_info(raw.read(ZSTD_HEADER_BYTES)).decompressed_size
    return None


def stored_bytes(file: File, rows: int, reading: Reading) -> float | None:
    """About so many bytes, decompressed, are the first rows of a file that `datasets` reads, with all their columns; None: unknown."""
    source, taken, inside, ended = reading.source, 0, False, -1  # The first line names the columns.
    if source.builder == "json":
        held = itertools.islice(datasets_rows(file, source), rows)
        return float(sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in held))
    if source.builder != "csv":
        return None
    with open_listed(file, reading) as raw, open_decompressed(raw, file.url) as opened:
        for line in opened:
            taken += len(line) if ended >= 0 else 0
            inside ^= bool(line.count(b'"') % 2)  # A line within quotes goes on in the next.
            ended += not inside
            if ended >= rows:
                break
    return float(taken)
