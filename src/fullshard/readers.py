"""A piece of a file and a cursor -> the documents that follow, exactly once, whatever connection breaks on the way.

A cursor is one integer: the row of the next document (parquet, arrow and what is read from the beginning) or its byte offset (JSON lines).
To go on after a fault or in another run the file is opened again there: nothing is read twice or lost. All functions take and yield plain
values.
"""

from __future__ import annotations

import bisect
import errno
import functools
import io
import itertools
import json
import os
import resource
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.errors import UserError, first_line
from fullshard.hub import is_transient, open_options, reason, retrying
from fullshard.sources import COMPRESSED, File, Source, enterable, file_format

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 64  # Documents decoded together. More would be read in vain where a run goes on in the middle.
BATCH_BYTES = 2**18
COMPRESSED_SAMPLE_BYTES = 2**23
ZSTD_HEADER_BYTES = 18  # Of a frame, at most (RFC 8878).
BUFFERED_BYTES = 2**22  # Of a column of a row group, read at once.
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: its multiples, modulo 2**64, fill the unit interval evenly.
TOKENIZER_KEY = b"fullshard.tokenizer"  # Of the parquet files' metadata: hash of the tokenizer that made the tokens.


@dataclass(frozen=True)
class Extent:
    """The documents of a piece whose ends lie at documents, or within them."""

    first: int
    """Cursor of the first document."""
    last: int | None
    """Cursor of the last one; None: all that follow, to the end of the file."""
    first_from: float = 0.0
    """The share of the first document's tokens that is not this piece's."""
    last_to: float = 1.0
    """The share of the last document's tokens with which the piece ends."""


@dataclass(frozen=True)
class Piece:
    """What one logical stream reads of a file."""

    file: File
    begin: int
    """Byte of the file as stored. Rows are cut in the same ratio."""
    end: int
    drawn: tuple[float, float] = (0.0, 1.0)
    """Only documents whose `point` lies in this part of the unit interval."""
    extent: Extent | None = None
    """Only these documents, whatever `begin` and `end` say."""
    tokens: float = 0.0
    """About so many; 0: not estimated."""

    @property
    def is_drawn(self) -> bool:
        """Whether the piece is every so-manieth document of the file, which is read from its beginning."""
        return self.drawn != (0.0, 1.0)

    def draws(self, number: int) -> bool:
        """Whether document number `number` of the file is in the part that is drawn."""
        low, high = self.drawn
        return low <= point(number) < high

    def share_of(self, cursor: int) -> tuple[float, float]:
        """(from, to) in shares of its tokens: what the piece has of the document at `cursor`."""
        if self.extent is None:
            return 0.0, 1.0
        begin = self.extent.first_from if cursor == self.extent.first else 0.0
        return begin, self.extent.last_to if cursor == self.extent.last else 1.0


def point(number: int, offset: int = 0) -> float:
    """Of the unit interval, [0, 1), which the points of consecutive numbers fill evenly."""
    return (number * GOLDEN + offset) % 2**64 / 2**64


@dataclass(frozen=True)
class Reading:
    """How to read a source."""

    source: Source
    tokenizer_hash: str
    vocab_size: int
    """Token ids are less than this."""
    max_retries: int
    timeout_seconds: float
    skip_bad_rows: bool


@dataclass
class Tally:
    """What went wrong on the way, for the log."""

    retries: int = 0
    bad_rows: int = 0
    _notes: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def note(self, subject: str, line: str) -> None:
        """A line for the user, once per subject: a source that was retried, a file of which rows were skipped."""
        if subject not in self._taken:
            self._notes.setdefault(subject, line)

    def take_notes(self) -> list[tuple[str, str]]:
        """(subject, line) of what is new."""
        notes = list(self._notes.items())
        self._taken |= self._notes.keys()
        self._notes.clear()
        return notes


@dataclass(frozen=True)
class Bad:
    """In the place of a document that cannot be used."""

    reason: str


Entry = tuple[int, int | None, Any]
"""(the document's row or byte offset in its file, cursor after it or None where the piece ends with it, text or token ids or Bad)"""


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


def read_amplification(pieces: Sequence[Piece], reading: Reading) -> float:
    """Bytes that are decoded to read the pieces once, in units of their own bytes. Opens each parquet file's footer; one that cannot be
    read counts as decoded once: its reading will tell."""

    @functools.cache
    def row_groups(file: File) -> list[int]:
        with _opened(file, reading) as opened:
            return _row_groups(_parquet_file(opened))

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
            first, last = _row_range(piece, groups[-1])
            touched = [(low, high) for low, high in itertools.pairwise(groups) if low < last and first < high]
            decoded += piece.file.size * sum(high - low for low, high in touched) / max(groups[-1], 1)
        else:
            decoded += share
    return decoded / own if own else 1.0


def row_count(file: File, reading: Reading) -> int | None:
    """Rows of the file as its footer tells; None where only reading it would."""
    match file_format(reading.source.builder, file.url):
        case "parquet":
            with _opened(file, reading) as opened:
                return int(_parquet_file(opened).metadata.num_rows)
        case "arrow":
            return int(_arrow_table(file, reading).num_rows)
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
    with _opened(file, reading, **({"cache_type": "none"} if "://" in file.url else {})) as opened:
        parquet = _parquet_file(opened)
        metadata, column = parquet.metadata, reading.source.column
        groups = _row_groups(parquet)
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
    chunks = _arrow_table(file, reading).column(reading.source.column).chunks
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
        with _opened(file, reading) as raw, _decompressed(raw, file.url) as opened:
            head = _size_of_head(opened, file)
    edges = np.array([max(head, file.size * segment // LINE_SEGMENTS) for segment in range(LINE_SEGMENTS + 1)])
    return Shape(np.diff(edges).astype(np.float64), edges, None, False)


def _compressed_shape(file: File, reading: Reading) -> Shape:
    """What the file tells of its size, where that fits to how far its first megabytes are compressed; else from these."""
    with _opened(file, reading) as raw:
        told = _told_size(raw, file)
        raw.seek(0)
        with _decompressed(raw, file.url) as opened:
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


def _open(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    """Batches of documents from the cursor on."""
    match file_format(reading.source.builder, piece.file.url):
        case "parquet":
            return _parquet(piece, cursor, reading)
        case "arrow":
            return _arrow(piece, cursor, reading)
        case "lines" | "compressed lines":
            return _batches(_lines(piece, cursor, reading))
        case "text":
            return _text(piece, cursor, reading)
    return _batches(_other(piece, cursor, reading))


@contextmanager
def _opened(file: File, reading: Reading, **options: Any) -> Iterator[Any]:
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


def _parquet(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    # No cache: pyarrow asks for whole column chunks, and a cache that reads on behind each would read most of the file twice.
    with _opened(piece.file, reading, cache_type="none") as file:
        parquet = _parquet_file(file)
        _check_schema(parquet.schema_arrow, piece.file, reading)
        groups = _row_groups(parquet)
        first, last = _row_range(piece, groups[-1])
        row = max(first, cursor)
        while row < last:
            group = bisect.bisect_right(groups, row) - 1
            start = groups[group]
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[reading.source.column], use_threads=False):
                end = min(start + batch.num_rows, last)
                if row < end:
                    # By its name: `columns` takes the fields of a struct `a` along with a column `a.b`.
                    yield _entries(batch.column(reading.source.column).slice(row - start, end - row), row, last, reading)
                    row = end
                start += batch.num_rows
                if row >= last:
                    return
            if row < groups[group + 1]:
                raise OSError(f"row group {group} ends before its row {row - groups[group]}")


def _parquet_file(file: Any) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    # A column of a row group may have hundreds of megabytes, and each stream has one: it is read in parts.
    return pq.ParquetFile(file, buffer_size=BUFFERED_BYTES)


def _row_groups(parquet: pq.ParquetFile) -> list[int]:
    """First row of each row group, and the number of rows."""
    metadata = parquet.metadata
    return list(itertools.accumulate((metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)), initial=0))


def _arrow(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    table = _arrow_table(piece.file, reading)
    _check_schema(table.schema, piece.file, reading)
    first, last = _row_range(piece, table.num_rows)
    row = max(first, cursor)
    while row < last:
        end = min(row + BATCH_ROWS, last)
        for chunk in table.column(reading.source.column).slice(row, end - row).chunks:
            if len(chunk):
                yield _entries(chunk, row, last, reading)
                row += len(chunk)


def _arrow_table(file: File, reading: Reading) -> pa.Table:
    import pyarrow as pa

    with _opened(file, reading):
        mapped = pa.memory_map(file.url)
    try:
        return pa.ipc.open_stream(mapped).read_all()  # No copy: pages are read when they are used.
    except pa.ArrowInvalid:
        return pa.ipc.open_file(mapped).read_all()


def _row_range(piece: Piece, rows: int) -> tuple[int, int]:
    """First row of the piece and the row after its last. Neighbouring pieces meet."""
    size, file = max(piece.file.size, 1), piece.file
    if (asked := max(file.take or 0, file.skip)) > rows:
        raise UserError(_too_few(asked, file, rows))
    if (extent := piece.extent) is not None:
        first, last = extent.first, rows if extent.last is None else min(rows, extent.last + 1)
    else:
        first, last = (-(-rows * byte // size) for byte in (piece.begin, piece.end))
    return max(first, file.skip), last if file.take is None else min(last, file.take)


def _no_such_column(source: Source, names: Sequence[str]) -> str:
    fix = "; it holds tokens: set data.tokens_column" if "input_ids" in names and not source.tokens_column else ""
    return f"{source.column_key}: {source.column}: no such column; there are {', '.join(names)}{fix}"


def _too_few(asked: int, file: File, there: int) -> str:
    return f"data.evaluation_documents: {asked}: {file.url} has only {there} documents; hold out fewer, they are the first file's"


def _check_schema(schema: pa.Schema, file: File, reading: Reading) -> None:
    import pyarrow as pa

    source = reading.source
    if source.column not in schema.names:
        raise UserError(_no_such_column(source, schema.names))
    if schema.names.count(source.column) > 1:
        raise UserError(f"{source.column_key}: {source.column}: {file.url}: has several columns of that name")
    kind = schema.field(source.column).type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if source.tokens_column:
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_integer(kind.value_type):
            raise UserError(f"data.tokens_column: {source.column}: {file.url}: holds {kind}, not lists of token ids")
        made_by = (schema.metadata or {}).get(TOKENIZER_KEY, b"").decode()
        if made_by and made_by != reading.tokenizer_hash:
            made_by = f"{made_by} not {reading.tokenizer_hash}; use the tokenizer that it was tokenized with"
            raise UserError(f"data.tokenizer: {file.url}: its tokens are of another tokenizer, {made_by}")
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"data.text_column: {source.column}: {file.url}: holds {kind}, not text")


def _entries(column: pa.Array, row: int, last: int, reading: Reading) -> list[Entry]:
    """The column's values as documents number row, row + 1, ...; the piece ends before row `last`."""
    values = _token_arrays(column, reading.vocab_size) if reading.source.tokens_column else _texts(column)
    afters: list[int | None] = list(range(row + 1, row + len(values) + 1))
    if row + len(values) == last:
        afters[-1] = None
    return list(zip(range(row, row + len(values)), afters, values, strict=True))


def _texts(column: pa.Array) -> list[Any]:
    try:
        return [Bad("null, not text") if value is None else value for value in column.to_pylist()]
    except UnicodeDecodeError:
        return [_text_or_bad(value) for value in column.cast("binary").to_pylist()]


def _token_arrays(column: pa.Array, vocab_size: int) -> list[Any]:
    """Views of the column's buffer, one array of ids for each row."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    offsets, flat = column.offsets.to_numpy(), column.values
    nulls = column.null_count or flat.null_count
    ids = flat.to_numpy(zero_copy_only=not flat.null_count)
    used = ids[offsets[0] : offsets[-1]]
    if not nulls and (not len(used) or (int(used.min()) >= 0 and int(used.max()) < vocab_size)):
        return [ids[low:high] for low, high in itertools.pairwise(offsets.tolist())]
    return [_tokens_or_bad(value.as_py(), vocab_size) for value in column]


def _tokens_or_bad(value: Any, vocab_size: int) -> Any:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        return Bad(f"{type(value).__name__}, not a list of token ids")
    wrong = next((token for token in value if not 0 <= token < vocab_size), None)
    return np.asarray(value, dtype=np.int64) if wrong is None else Bad(f"token {wrong} is not in the tokenizer's {vocab_size}")


def _text_or_bad(value: bytes | None) -> Any:
    if value is None:
        return Bad("null, not text")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad(str(error))


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
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


def _lines(piece: Piece, cursor: int, reading: Reading) -> Iterator[Entry]:
    """JSON lines: those that begin in the piece. Compressed: from the beginning, up to the cursor in vain."""
    compressed = file_format(reading.source.builder, piece.file.url) != "lines"
    listed, extent = piece.file, piece.extent
    with _opened(listed, reading) as raw, _decompressed(raw, listed.url) as file:
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
                head, begin = _size_of_head(file, listed), piece.begin if extent is None else 0
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
            yield start, None if ends else offset, _from_json(line, reading)
        if listed.take is not None and number < listed.take:
            raise UserError(_too_few(listed.take, listed, number))


def _size_of_head(file: Any, listed: File) -> int:
    """Bytes of the lines with the documents that are to be skipped. An empty line is none."""
    size, documents = 0, listed.skip
    while documents and (line := file.readline()):
        size += len(line)
        documents -= bool(line.strip())
    if documents:
        raise UserError(_too_few(listed.skip, listed, listed.skip - documents))
    return size


def _seek_line(file: Any, position: int, *, at_line: bool) -> int:
    """Go to `position`, or to the first line that begins at or after it; where that is."""
    if at_line or position == 0:
        file.seek(position)
        return position
    file.seek(position - 1)
    return position - 1 + len(file.readline())


@contextmanager
def _decompressed(file: Any, url: str) -> Iterator[Any]:
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


def _from_json(line: bytes, reading: Reading) -> Any:
    source = reading.source
    try:
        row = json.loads(line)
    except ValueError as error:
        return Bad(f"not JSON: {error}")
    if not isinstance(row, dict):
        return Bad(f"{type(row).__name__}, not a JSON object")
    return _from_row(row, source, reading)


def _from_row(row: dict[str, Any], source: Source, reading: Reading) -> Any:
    if source.column not in row:
        return Bad(f"{source.column_key}: {source.column}: no such column; there are {', '.join(map(str, row))}")
    value = row[source.column]
    if source.tokens_column:
        return _tokens_or_bad(value, reading.vocab_size)
    if not isinstance(value, str):
        return Bad(f"{source.column} holds {'null' if value is None else type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes.
        return Bad(str(error))
    return value


def _text(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    """The file is the document."""
    if cursor == 0:
        if reading.source.column != "text":
            raise UserError(f"{reading.source.column_key}: {reading.source.column}: no such column; there are text")
        with _opened(piece.file, reading) as raw, _decompressed(raw, piece.file.url) as file:
            content = file.read()
        if not piece.file.url.lower().endswith(COMPRESSED) and len(content) != piece.file.size:
            raise ConnectionError(f"{len(content)} of {piece.file.size} bytes")  # An answer that was short and did not say so.
        yield [(0, None, _text_or_bad(content))]


def _other(piece: Piece, cursor: int, reading: Reading) -> Iterator[Entry]:
    """Whatever else `datasets` reads, from the beginning, up to the cursor in vain."""
    file, source = piece.file, reading.source
    with _opened(file, reading):
        pass  # It is what was listed.
    rows = _rows(file, source)
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
            yield number, None if seen == stop else seen, _from_row({name: values[0] for name, values in row.items()}, source, reading)
    if file.take is not None and seen < file.take:
        raise UserError(_too_few(file.take, file, seen))
    if file.skip and not cursor and seen == start:
        raise UserError(f"data.evaluation_documents: {file.skip}: {file.url} has no more rows than that")


def _rows(file: File, source: Source) -> Any:
    """The file's rows as `datasets` streams them."""
    import datasets

    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # Each opening would ask the Hub to count a download.
    options = source.options
    if source.builder == "csv" and file.url.lower().endswith((".tsv", *(f".tsv{ending}" for ending in COMPRESSED))):
        options = {"sep": "\t"} | options
    return datasets.load_dataset(source.builder, data_files=[glob_escaped(file.url)], split="train", streaming=True, **options)


def stored_bytes(file: File, rows: int, reading: Reading) -> float | None:
    """About so many bytes, decompressed, are the first rows of a file that `datasets` reads, with all their columns; None: unknown."""
    source, taken, inside, ended = reading.source, 0, False, -1  # The first line names the columns.
    if source.builder == "json":
        held = itertools.islice(_rows(file, source), rows)
        return float(sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in held))
    if source.builder != "csv":
        return None
    with _opened(file, reading) as raw, _decompressed(raw, file.url) as opened:
        for line in opened:
            taken += len(line) if ended >= 0 else 0
            inside ^= bool(line.count(b'"') % 2)  # A line within quotes goes on in the next.
            ended += not inside
            if ended >= rows:
                break
    return float(taken)


def glob_escaped(url: str) -> str:
    """A local path that `datasets` takes literally."""
    import glob

    return url if "://" in url else glob.escape(url)
