"""Readers of lines: JSON lines and plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fullshard.data.corpus import COMPRESSED, file_format
from fullshard.data.opened import open_decompressed, open_listed, size_of_head, too_few_documents
from fullshard.data.pieces import Entry, Piece, Reading
from fullshard.data.tables import BATCH_ROWS
from fullshard.data.values import text_or_bad, value_from_json
from fullshard.errors import UserError

BATCH_BYTES = 2**18


def in_batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """Lists of entries. Where the file breaks, what came before is handed over first: it does not depend on where the reading began."""
    batch: list[Entry] = []
    size = 0
    try:
        for entry in entries:
            batch.append(entry)
            size += len(entry[2]) if isinstance(entry[2], str) else 0
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def read_lines(piece: Piece, cursor: int, reading: Reading) -> Iterator[Entry]:
    """JSON lines: those that begin in the piece. Compressed: from the beginning, up to the cursor in vain."""
    compressed = file_format(reading.source.builder, piece.file.url) != "lines"
    listed, extent = piece.file, piece.extent
    with open_listed(listed, reading) as raw, open_decompressed(raw, listed.url) as file:
        number, offset, end = 0, 0, None if compressed else piece.end
        first, last = (0, None) if extent is None else (extent.first, extent.last)
        if extent is not None and not compressed:
            end = listed.size if last is None else last + 1
        counted = piece.is_drawn or listed.take is not None  # Then lines are counted from the beginning.
        if not compressed and not counted:
            if cursor or first:
                offset = max(cursor, first)
                file.seek(offset)
                number = listed.skip
            else:
                head, begin = size_of_head(file, listed), piece.begin if extent is None else 0
                number, offset = listed.skip, _seek_line(file, max(begin, head), at_line=head >= begin)
        while number != listed.take and (end is None or offset < end) and (last is None or offset <= last):
            line = file.readline()
            if end is not None and not line.endswith(b"\n") and offset + len(line) < listed.size:
                raise ConnectionError(f"{offset + len(line)} of {listed.size} bytes")  # An answer that was short and did not say so.
            if not line:
                break
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            this, number = number, number + 1
            if start < max(cursor, first) or (not cursor and this < listed.skip) or not piece.draws(this):
                continue
            ends = (end is not None and offset >= end) or (last is not None and offset > last)
            yield start, None if ends else offset, value_from_json(line, reading)
        if listed.take is not None and number < listed.take:
            raise UserError(too_few_documents(listed.take, listed, number))


def _seek_line(file: Any, position: int, *, at_line: bool) -> int:
    """Go to `position`, or to the first line that begins at or after it; where that is."""
    if at_line or position == 0:
        file.seek(position)
        return position
    file.seek(position - 1)
    return position - 1 + len(file.readline())


def read_text(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    """The file is the document."""
    if cursor == 0:
        if reading.source.column != "text":
            raise UserError(f"{reading.source.column_key}: {reading.source.column}: no such column; there are text")
        with open_listed(piece.file, reading) as raw, open_decompressed(raw, piece.file.url) as file:
            content = file.read()
        if not piece.file.url.lower().endswith(COMPRESSED) and len(content) != piece.file.size:
            raise ConnectionError(f"{len(content)} of {piece.file.size} bytes")  # An answer that was short and did not say so.
        yield [(0, None, text_or_bad(content))]
