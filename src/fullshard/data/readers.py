"""A piece of a file and a cursor -> the documents that follow, exactly once, whatever connection breaks on the way.

To go on after a fault or in another run the file is opened again at the cursor: nothing is read twice or lost. All functions take and
yield plain values.
"""

from __future__ import annotations

import errno
import resource
import zlib
from collections.abc import Iterator
from typing import Any

from fullshard.data.corpus import file_format
from fullshard.data.hub import is_transient, reason, retrying
from fullshard.data.lines import in_batches, read_lines, read_text
from fullshard.data.other import read_rows
from fullshard.data.pieces import Bad, Entry, Piece, Reading, Tally
from fullshard.data.tables import read_arrow, read_parquet
from fullshard.errors import UserError, first_line


def documents(piece: Piece, cursor: int, reading: Reading, tally: Tally) -> Iterator[Entry]:
    """The documents of the piece from `cursor` on, 0 being its beginning.

    A read that breaks is tried again at the cursor, up to max_retries times in a row. Raises UserError for a source that stays away, a file
    that is not what it should be and, unless bad rows are skipped, for a row that cannot be used.
    """
    url = piece.file.url
    opened: Iterator[list[Entry]] | None = None

    def next_batch() -> list[Entry] | None:
        nonlocal opened
        if opened is None:
            opened = _open(piece, cursor, reading)
        return next(opened, None)

    def again(attempt: Any) -> None:
        nonlocal opened
        opened = None  # Whatever it held is gone; the cursor is not.
        tally.retries += 1
        tally.note(reading.source.name, f"{reading.source.name}: read again after {reason(attempt.outcome.exception())}")

    retry = retrying(reading.max_retries, before_sleep=again)
    while True:
        try:
            batches = retry(next_batch)
        except (UserError, AttributeError, IndexError, KeyError, MemoryError, NameError, TypeError):
            raise  # The latter are this code's own.
        except Exception as error:
            if is_transient(error):
                raise UserError(f"{url}: lost after {reading.max_retries} retries: {reason(error)}") from error
            if not _is_damage(error):  # No access, no such file, nothing installed to open it: no row's fault.
                raise UserError(f"{url}: {reason(error)}{_too_many_files(error)}") from error
            if not reading.skip_bad_rows:
                raise UserError(f"{url}: {first_line(error)}; set data.on_bad_row: skip to leave out the rest of it") from error
            tally.bad_rows += 1
            tally.note(url, f"{url}: skipped from {cursor} on: {first_line(error)}")
            return
        if batches is None:
            return
        for entry in batches:
            number, after, value = entry
            if isinstance(value, Bad):
                place = f"{url}: {'byte' if file_format(reading.source.builder, url).endswith('lines') else 'row'} {number}"
                if not reading.skip_bad_rows:
                    raise UserError(f"{place}: {value.reason}; set data.on_bad_row: skip to leave it out")
                tally.bad_rows += 1
                tally.note(url, f"{place}: skipped: {value.reason}")
            else:
                yield entry
            if after is None:
                return
            cursor = after


def _too_many_files(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"; this process may have {limit} open (ulimit -n), a stream keeps one: raise it or lower data.num_streams"


def _is_damage(error: Exception) -> bool:
    """Whether what the file holds is at fault: pyarrow, zlib, the decompressors and `datasets` say so with a ValueError of their own, an
    EOFError, an error of theirs, or an OSError that is none of the operating system."""
    if isinstance(error, OSError):
        return error.errno is None and not isinstance(error, FileNotFoundError | PermissionError)
    special = type(error).__name__ in ("ZstdError", "LZMAError")
    return special or isinstance(error, EOFError | zlib.error) or (isinstance(error, ValueError) and type(error) is not ValueError)


def first_document(piece: Piece, reading: Reading) -> bool:
    """Whether the piece has a document. Raises UserError for what is wrong with the file."""
    return next(documents(piece, 0, reading, Tally()), None) is not None


def _open(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    """Batches of documents from the cursor on."""
    match file_format(reading.source.builder, piece.file.url):
        case "parquet":
            return read_parquet(piece, cursor, reading)
        case "arrow":
            return read_arrow(piece, cursor, reading)
        case "lines" | "compressed lines":
            return in_batches(read_lines(piece, cursor, reading))
        case "text":
            return read_text(piece, cursor, reading)
    return in_batches(read_rows(piece, cursor, reading))
