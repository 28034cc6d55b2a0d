"""A source's files -> the pieces of its streams, so that all streams have the same number of tokens.

Every stream gives the same number of rows. Only if all have the same number of tokens is every document read once in the time in which the
run reads as many tokens as the source has. `deal` lays the files end to end and cuts them into streams of equal tokens.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fullshard.data.corpus import File, Source
from fullshard.data.pieces import Extent, Piece
from fullshard.data.streams import no_document, shuffled
from fullshard.data.weighing import MISSED, FileTokens, Weights, missed_by_chance
from fullshard.errors import UserError
from fullshard.recipe.batch import divisors

SNAP = 0.02  # Of a stream's tokens: a cut this near to a document's border is made there.

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
    by_chance = missed_by_chance(weights.deviation, documents=weights.documents, tokens=weights.tokens, streams=len(dealt))
    return float(uneven + shared * row_tokens / 2) / weights.tokens + by_chance


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
