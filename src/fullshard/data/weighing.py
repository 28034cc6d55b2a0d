"""Where the tokens of a source are.

A small source is read, and each of its documents is known. Of a larger one the footers tell what they can, and a sample tells the rest.
Stored bytes do not tell tokens: a file may be compressed, and may hold other columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullshard.data.corpus import COMPRESSED, File, Source, file_format
from fullshard.data.pieces import Piece, Reading, Tally
from fullshard.data.readers import documents
from fullshard.data.shape import shape_of, stored_bytes
from fullshard.data.sources import LISTING_THREADS
from fullshard.data.streams import no_document, tokenized, unplaced, whole
from fullshard.data.tokenizer import end_every_document
from fullshard.errors import UserError

COUNTED_BYTES = 2**24  # A source of fewer stored bytes is read as a whole before the run: 1 to 2 s.
TOKENIZED_BYTES = 2**25  # Of text, so much is tokenized before the run where many streams share few documents: 2 to 8 s.
SAMPLED_DOCUMENTS = 128
SAMPLED_CHARACTERS = 2**14  # Of a document.
SAMPLED_FILES = 32
FILE_CHARACTERS = 2**16  # Of a file that is not read as a whole, from SAMPLED_PLACES places in it.
SAMPLED_PLACES = 4
MISSED = 0.02  # The share of a source's tokens that may be read not once in one pass. More is told before the run.
Encode = Callable[[list[str]], list[np.ndarray]]


@dataclass(frozen=True)
class FileTokens:
    """Where the tokens of a file are."""

    tokens: np.ndarray
    """float64 [segments]: about so many in each."""
    edges: np.ndarray | None
    """int64 [segments + 1]: the byte as stored at which each segment begins, and the end; None: the file can be entered at its beginning
    alone. Where each segment is a document, [segments]: the documents' cursors."""
    each_document: bool
    """Whether each segment is a document."""
    text_bytes: float
    """Of the column that is read, about; tokens where it holds tokens."""


@dataclass(frozen=True)
class Weights:
    """Where the tokens of a source are, and how far that is known."""

    files: tuple[FileTokens, ...]
    counted: bool
    """Whether every document was looked at. False: estimated from a sample."""
    documents: float
    deviation: float
    """Standard deviation of what is not known of a document's tokens: so much the streams differ that hold one document each."""

    @property
    def tokens(self) -> float:
        """About so many, with the end-of-texts."""
        return float(sum(file.tokens.sum() for file in self.files))


def weigh(source: Source, reading: Reading, encode: Encode, end_of_text: int, *, streams: int) -> Weights:
    """Where the tokens of the source are, well enough to deal it to so many streams. Reads a sample, or all of a small source.

    Raises UserError for a source that cannot be read. A row that cannot be used is passed over: the reading to come tells it.
    """
    reading = replace(reading, skip_bad_rows=True)
    if source.builder == "text":
        if (count := len(source.files)) < streams:
            raise UserError(
                f"data.num_streams: {streams}: {source.name} has only {count} files, each one document; set it to at most {count}"
            )
        if not any(file.url.lower().endswith(COMPRESSED) for file in source.files):
            return _weigh_documents(_files_as_documents(source, reading), encode, streams=streams)
    if sum(file.size for file in source.files) > COUNTED_BYTES:
        return _estimate(source, reading, encode, end_of_text)
    tally = Tally()
    found = _read_documents(source, reading, tally, end_of_text)
    if (count := sum(map(len, found))) < streams and not tally.bad_rows:
        raise UserError(no_document(f"{source.name}: stream {count} of {streams}", 1))
    return _weigh_documents(found, encode, streams=streams)


# Every document is known -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    cursor: int
    size: int
    """Bytes of text, or tokens with the end-of-text."""
    fetch: Callable[[], Any]
    """Its text, or None where it cannot be used; called for those alone that are sampled."""


def _files_as_documents(source: Source, reading: Reading) -> list[list[_Document]]:
    """Of files that are a document each: their sizes are their texts'."""

    def fetched(file: File) -> Any:
        return next((value for _, _, value in documents(whole(file), 0, reading, Tally())), None)

    return [[_Document(0, file.size, functools.partial(fetched, file))] for file in source.files]


def _read_documents(source: Source, reading: Reading, tally: Tally, end_of_text: int) -> list[list[_Document]]:
    """Of each file all documents that can be used."""

    def read(file: File) -> list[_Document]:
        found = []
        for cursor, _, value in documents(whole(file), 0, reading, tally):
            size = len(value.encode()) if isinstance(value, str) else len(end_every_document(value, end_of_text))
            found.append(_Document(cursor, size, functools.partial(_same, value)))
        return found

    return _of_files(read, source.files)


def _same(value: Any) -> Any:
    return value


def _of_files(function: Callable[[File], Any], files: Sequence[File]) -> list[Any]:
    """The function's result for each file; remote ones several at a time."""
    if not any("://" in file.url for file in files):
        return [function(file) for file in files]
    with ThreadPoolExecutor(LISTING_THREADS) as threads:
        return list(threads.map(function, files))


def _weigh_documents(files: list[list[_Document]], encode: Encode, *, streams: int) -> Weights:
    """Documents of known size: tokens by their bytes and a sample; by tokenizing all where that is too rough for so many streams."""
    every = [document for file in files for document in file]
    sizes = np.array([document.size for document in every], dtype=np.float64)
    count = min(len(every), SAMPLED_DOCUMENTS)
    picked = [every[index * len(every) // count] for index in range(count)]
    values = [document.fetch() for document in picked]
    tokens, deviation = sizes, 0.0
    if any(isinstance(value, str) for value in values):
        usable = [value is not None for value in values]
        picked_sizes = np.array([document.size for document in picked], dtype=np.float64)[usable]
        values = [value for value in values if value is not None]
        found = _token_counts([value[:SAMPLED_CHARACTERS] for value in values], encode) - 1
        found *= [max(len(value) / SAMPLED_CHARACTERS, 1) for value in values]
        rate = max(found.sum(), 1) / max(picked_sizes.sum(), 1)
        tokens, deviation = 1 + sizes * rate, _deviation(found - picked_sizes * rate)
        rough = missed_by_chance(deviation, documents=len(every), tokens=tokens.sum(), streams=streams) > 0.75 * MISSED
        if rough and sizes.sum() <= TOKENIZED_BYTES:
            values = [document.fetch() for document in every]
            usable = [value is not None for value in values]
            tokens[usable] = _token_counts([value for value in values if value is not None], encode)
            deviation = 0.0
    elif every and every[0].fetch() is None:  # Texts of which none can be used: reading them tells.
        tokens = 1 + sizes
    weighed, at = [], 0
    for file in files:
        own = tokens[at : at + len(file)]
        cursors = [document.cursor for document in file]
        at += len(file)
        if not file:  # Somebody has to read it all the same: what cannot be used there stops the run.
            own, cursors = np.full(1, 4.0 * streams), [0]
        text = float(sum(document.size for document in file))
        weighed.append(FileTokens(own, np.array(cursors, dtype=np.int64), each_document=True, text_bytes=text))
    return Weights(tuple(weighed), counted=True, documents=len(every), deviation=deviation)


def _token_counts(texts: list[str], encode: Encode) -> np.ndarray:
    """float64 [documents], with the end-of-texts. All at once: the tokenizer has all cores."""
    return np.array([len(tokens) for tokens in encode(texts)], dtype=np.float64)


def _deviation(residuals: np.ndarray) -> float:
    return float(np.sqrt(np.mean(residuals**2))) if len(residuals) else 0.0


# A sample --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    tokens: np.ndarray
    """Of each document that was read."""
    text_bytes: int
    stored_bytes: float | None
    """What these documents take of the file as it is stored, or as it is when decompressed; None where that is unknown."""
    exhausted: bool
    """Whether these are all documents of their part of the file."""


def _estimate(source: Source, reading: Reading, encode: Encode, end_of_text: int) -> Weights:
    """What footers and sizes tell of each file, times the tokens of a sample."""
    shapes = _of_files(lambda file: shape_of(file, reading), source.files)
    count = min(len(source.files), SAMPLED_FILES)
    sampled = sorted({index * len(source.files) // count for index in range(count)})
    samples = dict(
        zip(sampled, _of_files(lambda file: _sample(file, reading, encode, end_of_text), [source.files[n] for n in sampled]), strict=True)
    )
    pooled = _rates([sample for places in samples.values() for sample in places], tokens_column=bool(source.tokens_column))
    files, number_of_documents = [], 0.0
    for index, (file, shape) in enumerate(zip(source.files, shapes, strict=True)):
        own = samples.get(index, [])
        rates = _rates(own, tokens_column=bool(source.tokens_column)) if own else pooled
        lines = file_format(source.builder, file.url) in ("lines", "compressed lines")
        if shape.exact_tokens:
            tokens = shape.sizes
        elif lines and len(own) == len(shape.sizes):  # Each segment was sampled.
            each = [_rates([sample], tokens_column=False).per_stored or rates.per_stored or 0.25 for sample in own]
            tokens = shape.sizes * np.array(each)
        else:
            tokens = shape.sizes * (rates.per_stored or rates.per_text or 0.25)
        if shape.edges is None and file.skip:  # What is held out is read over.
            tokens = tokens - file.skip * rates.per_document
        if (lines or shape.edges is None) and len(own) == len(shape.sizes):  # Each sample is of one segment.
            tokens = np.array([sample.tokens.sum() if sample.exhausted else part for sample, part in zip(own, tokens, strict=True)])
        tokens = np.maximum(tokens, 1.0)
        text = float(tokens.sum() / rates.per_text) if rates.per_text else float(tokens.sum())
        files.append(FileTokens(tokens, shape.edges, each_document=False, text_bytes=text))
        number_of_documents += shape.rows if shape.rows is not None else float(tokens.sum()) / max(rates.per_document, 1.0)
    found = np.concatenate([sample.tokens for places in samples.values() for sample in places] or [np.zeros(0)])
    # A cut by rows or by drawing gives each stream so many documents, of whatever length.
    return Weights(tuple(files), counted=False, documents=number_of_documents, deviation=float(found.std()) if len(found) else 0.0)


@dataclass(frozen=True)
class _Rates:
    per_text: float | None
    """Tokens a byte of text."""
    per_stored: float | None
    """Tokens a byte as stored, or as decompressed."""
    per_document: float


def _rates(samples: Sequence[_Sample], *, tokens_column: bool) -> _Rates:
    tokens = float(sum(sample.tokens.sum() for sample in samples))
    number = sum(len(sample.tokens) for sample in samples)
    text = sum(sample.text_bytes for sample in samples)
    stored = [sample.stored_bytes for sample in samples if sample.stored_bytes]
    return _Rates(
        per_text=1.0 if tokens_column else tokens / text if text and tokens else None,
        per_stored=tokens / sum(stored) if stored and tokens else None,
        per_document=tokens / number if number else 0.0,
    )


def _sample(file: File, reading: Reading, encode: Encode, end_of_text: int) -> list[_Sample]:
    """Documents from some places of the file; from its beginning where it cannot be entered elsewhere."""
    kind = file_format(reading.source.builder, file.url)
    places = SAMPLED_PLACES if kind in ("lines", "parquet", "arrow") else 1
    samples = []
    for place in range(places):
        piece = Piece(file, file.size * place // places, file.size * (place + 1) // places)
        held: list[Any] = []
        characters, first, last = 0, 0, None
        for cursor, after, value in documents(piece, 0, reading, Tally()):
            first, last = first if held else cursor, after
            held.append(value)
            characters += len(value)
            if characters >= FILE_CHARACTERS // places and after is not None:
                break
        encoded = tokenized([unplaced(held)], encode=encode, end_of_text=end_of_text)
        tokens = np.array([len(ids) for _, _, ids, _ in encoded], dtype=np.float64)
        text = sum(len(value.encode()) if isinstance(value, str) else len(value) for value in held)
        stored = float(last - first) if last is not None and kind in ("lines", "compressed lines") else None
        if kind == "other" and held:
            rows = last or file.skip + len(held)
            before = stored_bytes(file, rows, reading)
            stored = before and before * len(held) / rows  # Of these, the held out ones are not read.
        samples.append(_Sample(tokens, text, stored, exhausted=last is None))
    return samples


def missed_by_chance(deviation: float, *, documents: float, tokens: float, streams: int) -> float:
    """Where `documents` documents, whose tokens are known to a standard deviation, make `streams` streams. The mean of max(0, x) of a
    normal x is 0.4 standard deviations."""
    return 0.4 * deviation * math.sqrt(documents * streams) / max(tokens, 1.0) if streams > 1 else 0.0
