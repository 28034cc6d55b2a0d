"""From a row to a document: its text, or its token ids, checked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.data.corpus import File, Source
from fullshard.data.pieces import Bad, Entry, Reading
from fullshard.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

TOKENIZER_KEY = b"fullshard.tokenizer"  # Of the parquet files' metadata: hash of the tokenizer that made the tokens.


def _no_such_column(source: Source, names: Sequence[str]) -> str:
    fix = "; it holds tokens: set data.tokens_column" if "input_ids" in names and not source.tokens_column else ""
    return f"{source.column_key}: {source.column}: no such column; there are {', '.join(names)}{fix}"


def check_schema(schema: pa.Schema, file: File, reading: Reading) -> None:
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


def column_entries(column: pa.Array, row: int, last: int, reading: Reading) -> list[Entry]:
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
        return [text_or_bad(value) for value in column.cast("binary").to_pylist()]


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


def text_or_bad(value: bytes | None) -> Any:
    if value is None:
        return Bad("null, not text")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad(str(error))


def value_from_json(line: bytes, reading: Reading) -> Any:
    source = reading.source
    try:
        row = json.loads(line)
    except ValueError as error:
        return Bad(f"not JSON: {error}")
    if not isinstance(row, dict):
        return Bad(f"{type(row).__name__}, not a JSON object")
    return value_from_row(row, source, reading)


def value_from_row(row: dict[str, Any], source: Source, reading: Reading) -> Any:
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
