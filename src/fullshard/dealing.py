"""A source's files -> the pieces of its streams, so that all streams have the same number of tokens.

Every stream gives the same number of rows. Only if all have the same number of tokens is every document read once in the time in which the
run reads as many tokens as the source has. Stored bytes do not tell tokens: a file may be compressed, and may hold other columns.

`weigh` says where the tokens of a source are. A small source is read: each document is known. Of a larger one the footers tell what they
can, and a sample the rest. `deal` lays the files end to end and cuts them into streams of equal tokens.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullshard.config import divisors
from fullshard.errors import UserError
from fullshard.readers import Extent, Piece, Reading, Tally, documents, shape_of, stored_bytes
from fullshard.sources import COMPRESSED, LISTING_THREADS, File, Source, file_format
from fullshard.streams import no_document, shuffled, tokenized, unplaced, whole
from fullshard.tokenizer import end_every_document

COUNTED_BYTES = 2**24  # A source of fewer stored bytes is read as a whole before the run: 1 to 2 s.
TOKENIZED_BYTES = 2**25  # Of text, so much is tokenized before the run where many streams share few documents: 2 to 8 s.
SAMPLED_DOCUMENTS = 128
SAMPLED_CHARACTERS = 2**14  # Of a document.
SAMPLED_FILES = 32
FILE_CHARACTERS = 2**16  # Of a file that is not read as a whole, from SAMPLED_PLACES places in it.
SAMPLED_PLACES = 4
MISSED = 0.02  # The share of a source's tokens that may be read not once in one pass. More is told before the run.
SNAP = 0.02  # Of a stream's tokens: a cut this near to a document's border is made there.
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
        rough = _missed_by_chance(deviation, documents=len(every), tokens=tokens.sum(), streams=streams) > 0.75 * MISSED
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


# Dealing ---------------------------------------------------------------------------------------------------------------------------

Point = tuple[int, float]
"""Of a file: (segment, share of it before the point); its end is (segments, 0.0)."""


def deal(source: Source, weights: Weights, *, count: int, seed: int, row_tokens: int) -> list[list[Piece]]:
    """The pieces of each of `count` streams, all documents of the source in all, each once, and equal tokens in each stream.

    The files lie end to end, in an order drawn from the seed. A cut is made at a border of files or documents where one is near. Else it
    goes through a document where each is known, and two streams share it; through the rows or bytes of a file that can be entered anywhere;
    or it parts the documents of a file that cannot by their numbers. row_tokens: of a row, of which a stream that shares a document's
    beginning reads up to one more.
    """
    if weights.tokens < 4 * count:
        raise UserError(no_document(f"{source.name}: stream {count - 1} of {count}", 1))
    order = shuffled(range(len(source.files)), seed)
    totals = [float(weights.files[index].tokens.sum()) for index in order]
    starts = list(itertools.accumulate(totals, initial=0.0))
    quota = starts[-1] / count
    near = min(max(SNAP * quota, row_tokens / 2), 0.45 * quota)  # Less than half: no two cuts at one border.
    cuts: list[tuple[int, Point]] = [(0, (0, 0.0))]
    for number in range(1, count):
        wanted = quota * number
        place = min(bisect.bisect_right(starts, wanted) - 1, len(order) - 1)
        point = _point_at(weights.files[order[place]], wanted - starts[place], snap=SNAP * quota, snap_document=near)
        cut = (place, point) if point[0] < len(weights.files[order[place]].tokens) else (place + 1, (0, 0.0))
        cuts.append(max(cut, cuts[-1]))
    cuts.append((len(order), (0, 0.0)))
    dealt = []
    for begin, end in itertools.pairwise(cuts):
        pieces = []
        for place in range(begin[0], min(end[0] + 1, len(order))):
            index = order[place]
            tokens = weights.files[index]
            first = begin[1] if place == begin[0] else (0, 0.0)
            last = end[1] if place == end[0] else (len(tokens.tokens), 0.0)
            if first < last:
                pieces.append(_piece(source.files[index], tokens, first, last))
        dealt.append(pieces)
    return dealt


def _point_at(file: FileTokens, wanted: float, *, snap: float, snap_document: float) -> Point:
    """Where `wanted` of the file's tokens are over, or a border that near to it: the file's, or a document's."""
    ends = np.cumsum(file.tokens)
    if wanted <= snap:
        return 0, 0.0
    if ends[-1] - wanted <= snap:
        return len(ends), 0.0
    segment = int(np.searchsorted(ends, wanted, side="right"))
    before = float(ends[segment - 1]) if segment else 0.0
    share = (wanted - before) / float(file.tokens[segment])
    left = float(ends[segment]) - wanted
    if file.each_document and min(wanted - before, left) <= snap_document:
        return (segment, 0.0) if wanted - before <= left else (segment + 1, 0.0)
    return segment, min(max(share, 0.0), 1.0)


def _piece(file: File, tokens: FileTokens, first: Point, last: Point) -> Piece:
    segments = len(tokens.tokens)
    begins_after, ends_after = _tokens_before(tokens, first), _tokens_before(tokens, last)
    held = ends_after - begins_after
    if tokens.each_document:
        assert tokens.edges is not None
        begins = int(tokens.edges[first[0]]) if first != (0, 0.0) else 0
        if last[1]:
            ends: int | None = int(tokens.edges[last[0]])
        else:
            ends = int(tokens.edges[last[0]]) - 1 if last[0] < segments else None
        extent = Extent(begins, ends, first[1], last[1] or 1.0)
        total = float(tokens.tokens.sum())
        low, high = (round(file.size * before / total) for before in (begins_after, ends_after))
        return Piece(file, low, high, extent=extent, tokens=held)
    if tokens.edges is None:
        return Piece(file, 0, file.size, drawn=(first[1], last[1] if last[0] < segments else 1.0), tokens=held)
    begin, end = (_byte_at(tokens.edges, at) for at in (first, last))
    return Piece(file, begin, end, tokens=held)


def _tokens_before(tokens: FileTokens, at: Point) -> float:
    """Tokens of the file before the point."""
    segment, share = at
    return float(tokens.tokens[:segment].sum()) + (float(tokens.tokens[segment]) * share if share else 0.0)


def _byte_at(edges: np.ndarray, at: Point) -> int:
    segment, share = at
    if not share:
        return int(edges[segment])
    return int(edges[segment]) + int(share * int(edges[segment + 1] - edges[segment]))


# What comes of it ------------------------------------------------------------------------------------------------------------------


def missed(weights: Weights, dealt: Sequence[Sequence[Piece]], *, row_tokens: int) -> float:
    """Expected share of the source's tokens that are not read in the time of one pass; as many are read twice."""
    held = np.array([stream_tokens(pieces) for pieces in dealt])
    uneven = np.maximum(held - held.mean(), 0).sum()
    shared = sum(1 for pieces in dealt for piece in pieces if piece.extent and piece.extent.last_to < 1.0)
    by_chance = _missed_by_chance(weights.deviation, documents=weights.documents, tokens=weights.tokens, streams=len(dealt))
    return float(uneven + shared * row_tokens / 2) / weights.tokens + by_chance


def _missed_by_chance(deviation: float, *, documents: float, tokens: float, streams: int) -> float:
    """Where `documents` documents, whose tokens are known to a standard deviation, make `streams` streams. The mean of max(0, x) of a
    normal x is 0.4 standard deviations."""
    return 0.4 * deviation * math.sqrt(documents * streams) / max(tokens, 1.0) if streams > 1 else 0.0


def uneven_line(
    source: Source, weights: Weights, dealt: Sequence[Sequence[Piece]], *, seed: int, row_tokens: int, world_size: int
) -> str | None:
    """A line for the user where in one pass more than MISSED of the source's tokens are read not once; None elsewhere."""
    count, share = len(dealt), missed(weights, dealt, row_tokens=row_tokens)
    if share <= MISSED:
        return None
    for fewer in reversed([n for n in divisors(count)[:-1] if n % world_size == 0]):
        again = deal(source, weights, count=fewer, seed=seed, row_tokens=row_tokens)
        if (better := missed(weights, again, row_tokens=row_tokens)) <= MISSED:
            fix = f"; with data.num_streams: {fewer} it is {better:.1%}"
            break
    else:
        fix = "; give more documents"
    rows = weights.tokens / count / row_tokens
    what = f"{count:,} streams of about {weights.documents / count:,.1f} documents and {rows:,.1f} rows each"
    return f"{source.name}: {what}: in the time of one pass about {share:.1%} of the tokens are read twice, and as many not at all{fix}"


def stream_tokens(pieces: Sequence[Piece]) -> float:
    """About so many tokens has a stream with these pieces."""
    return sum(piece.tokens for piece in pieces)


def packed_pieces(source: Source, pieces: Sequence[Piece]) -> list[list[Any]]:
    """The pieces as JSON: a checkpoint keeps them, so that a run that goes on neither reads a sample nor depends on one."""
    numbers = {file: number for number, file in enumerate(source.files)}
    packed = []
    for piece in pieces:
        extent = piece.extent
        more = [] if extent is None else [extent.first, extent.last, extent.first_from, extent.last_to]
        packed.append([numbers[piece.file], piece.begin, piece.end, round(piece.tokens, 1), list(piece.drawn), more])
    return packed


def unpacked_pieces(source: Source, packed: Sequence[Sequence[Any]]) -> list[Piece]:
    """What `packed_pieces` has written."""
    pieces = []
    for number, begin, end, tokens, (low, high), more in packed:
        extent = Extent(*more) if more else None
        pieces.append(Piece(source.files[number], begin, end, drawn=(low, high), extent=extent, tokens=tokens))
    return pieces


def file_shares(source: Source, dealt: Sequence[Sequence[Piece]]) -> Iterator[tuple[File, float]]:
    """(file, its part of the tokens that the streams read while each reads the same number)."""
    read: dict[File, float] = dict.fromkeys(source.files, 0.0)
    for pieces in dealt:
        whole_stream = stream_tokens(pieces)
        for piece in pieces:
            read[piece.file] += piece.tokens / whole_stream / len(dealt)
    yield from read.items()
