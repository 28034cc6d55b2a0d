"""Readers of tables: parquet by row group, arrow by record batch."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fullshard.data.corpus import File
from fullshard.data.opened import open_listed, too_few_documents
from fullshard.data.pieces import Entry, Piece, Reading
from fullshard.data.values import check_schema, column_entries
from fullshard.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_ROWS = 64  # Documents decoded together. More would be read in vain where a run goes on in the middle.
BUFFERED_BYTES = 2**22  # Of a column of a row group, read at once.


def read_parquet(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    # No cache: pyarrow asks for whole column chunks, and a cache that reads on behind each would read most of the file twice.
    with open_listed(piece.file, reading, cache_type="none") as file:
        parquet = open_parquet(file)
        check_schema(parquet.schema_arrow, piece.file, reading)
        groups = row_group_starts(parquet)
        first, last = row_range(piece, groups[-1])
        row = max(first, cursor)
        while row < last:
            group = bisect.bisect_right(groups, row) - 1
            start = groups[group]
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[reading.source.column], use_threads=False):
                end = min(start + batch.num_rows, last)
                if row < end:
                    # By its name: `columns` takes the fields of a struct `a` along with a column `a.b`.
                    yield column_entries(batch.column(reading.source.column).slice(row - start, end - row), row, last, reading)
                    row = end
                start += batch.num_rows
                if row >= last:
                    return
            if row < groups[group + 1]:
                raise OSError(f"row group {group} ends before its row {row - groups[group]}")


def open_parquet(file: Any) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    # A column of a row group may have hundreds of megabytes, and each stream has one: it is read in parts.
    return pq.ParquetFile(file, buffer_size=BUFFERED_BYTES)


def row_group_starts(parquet: pq.ParquetFile) -> list[int]:
    """First row of each row group, and the number of rows."""
    metadata = parquet.metadata
    return list(itertools.accumulate((metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)), initial=0))


def read_arrow(piece: Piece, cursor: int, reading: Reading) -> Iterator[list[Entry]]:
    table = open_arrow(piece.file, reading)
    check_schema(table.schema, piece.file, reading)
    first, last = row_range(piece, table.num_rows)
    row = max(first, cursor)
    while row < last:
        end = min(row + BATCH_ROWS, last)
        for chunk in table.column(reading.source.column).slice(row, end - row).chunks:
            if len(chunk):
                yield column_entries(chunk, row, last, reading)
                row += len(chunk)


def open_arrow(file: File, reading: Reading) -> pa.Table:
    import pyarrow as pa

    with open_listed(file, reading):
        mapped = pa.memory_map(file.url)
    try:
        return pa.ipc.open_stream(mapped).read_all()  # No copy: pages are read when they are used.
    except pa.ArrowInvalid:
        return pa.ipc.open_file(mapped).read_all()


def row_range(piece: Piece, rows: int) -> tuple[int, int]:
    """First row of the piece and the row after its last. Neighbouring pieces meet."""
    size, file = max(piece.file.size, 1), piece.file
    if (asked := max(file.take or 0, file.skip)) > rows:
        raise UserError(too_few_documents(asked, file, rows))
    if (extent := piece.extent) is not None:
        first, last = extent.first, rows if extent.last is None else min(rows, extent.last + 1)
    else:
        first, last = (-(-rows * byte // size) for byte in (piece.begin, piece.end))
    return max(first, file.skip), last if file.take is None else min(last, file.take)
