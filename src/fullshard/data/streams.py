"""One logical stream: the pieces of files that it reads, the order of its documents, and the rows that they are packed in.

A stream reads its pieces once an epoch, in an order drawn from (seed, stream, epoch), and puts shuffle_window documents at a time in random
order. Its position is five integers, and they suffice: the epoch, the place in the epoch's order of pieces and the reader's cursor where
the window begins, the place in the window's order, and the token within the document. To go on, a window is read again, no more.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fullshard.data.corpus import File, Source
from fullshard.data.pieces import Piece, Reading, Tally
from fullshard.data.readers import documents as read_documents
from fullshard.data.tokenizer import end_every_document, tokenizer_hash, vocabulary_size
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

ENCODED_CHARACTERS = 2**15  # Texts that are tokenized in one call: many enough that the call costs nothing, few at the start of a run.

Position = tuple[int, int, int, int, int]
"""(epoch, place of the piece in the epoch's order, cursor in it where the window begins, place in the window's order, token)"""
START: Position = (0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Span:
    """What a row holds of a document."""

    document: str
    """File and the document's row or byte in it."""
    epoch: int
    begin: int
    """First token of the document that is in the row."""
    end: int


@dataclass(frozen=True)
class Row:
    """A packed row."""

    tokens: np.ndarray
    """int32 [sequence_length + 1]"""
    source: int
    """Place of its source in the mixture."""
    position: Position
    """Of the token after the row."""
    spans: tuple[Span, ...]
    """Empty unless documents are logged."""


def reading_of(source: Source, data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> Reading:
    """How the recipe reads the source."""
    return Reading(
        source=source,
        tokenizer_hash=tokenizer_hash(tokenizer) if source.tokens_column else "",
        vocab_size=vocabulary_size(tokenizer),
        max_retries=data.max_retries,
        timeout_seconds=data.timeout_seconds,
        skip_bad_rows=data.on_bad_row == "skip",
    )


def whole(file: File) -> Piece:
    return Piece(file, 0, file.size)


Where = tuple[int, int, int, int]
"""A Position without its token: a document's."""
Share = tuple[float, float]
"""(from, to) in shares of a document's tokens: what the stream has of it."""
WHOLE: Share = (0.0, 1.0)
Found = tuple[Where, str, Any, Share]
"""(place, name of the document, text or token ids, share)"""
Tokenized = tuple[Where, str, np.ndarray, Share]
"""(place, name of the document, token ids of all of it, share)"""


def no_document(name: str, pieces: int) -> str:
    return f"{name} has no document" + ("; lower data.num_streams" if pieces else ": fewer bytes than streams; lower data.num_streams")


def unplaced(values: Sequence[Any]) -> list[Found]:
    """A window of documents to which no run goes back."""
    return [((0, 0, 0, 0), "", value, WHOLE) for value in values]


def windows_of(
    pieces: Sequence[Piece], reading: Reading, *, position: Position, window: int, key: tuple[int, ...], tally: Tally, name: str
) -> Iterator[list[Found]]:
    """The stream's documents from the position on, epoch after epoch, in lists that are shuffled each in itself."""
    epoch, place, cursor, index, _ = position
    while True:
        order = shuffled(range(len(pieces)), *key, epoch)
        empty = (place, cursor, index) == (0, 0, 0)
        read = _epoch_documents([pieces[number] for number in order], place, cursor, reading, tally)
        while held := list(itertools.islice(read, window)):
            empty = False
            mixed = shuffled(held, *key, epoch, place, cursor) if window > 1 else held
            yield [((epoch, place, cursor, index + n), name, value, share) for n, (_, name, _, value, share) in enumerate(mixed[index:])]
            last, _, after, _, _ = held[-1]
            place, cursor = (last + 1, 0) if after is None else (last, after)
            index = 0
        if empty:  # Without this an empty stream would be read for ever.
            raise UserError(no_document(name, len(pieces)))
        epoch, place, cursor, index = epoch + 1, 0, 0, 0


def _epoch_documents(
    pieces: Sequence[Piece], place: int, cursor: int, reading: Reading, tally: Tally
) -> Iterator[tuple[int, str, int | None, Any, Share]]:
    """(place of the piece, name of the document, cursor after it, value, share) of the pieces from `place` on."""
    for number in range(place, len(pieces)):
        piece = pieces[number]
        for document, after, value in read_documents(piece, cursor, reading, tally):
            yield number, f"{piece.file.name}:{document}", after, value, piece.share_of(document)
        cursor = 0


def tokenized(windows: Iterable[list[Found]], *, encode: Callable[[list[str]], list[np.ndarray]], end_of_text: int) -> Iterator[Tokenized]:
    """Token ids instead of texts, each document with exactly one end-of-text at its end. Reads no window ahead."""
    for window in windows:
        for held in _calls(window):
            if isinstance(held[0][2], str):
                tokens = encode([value for _, _, value, _ in held])
            else:
                tokens = [end_every_document(value, end_of_text) for _, _, value, _ in held]
            yield from ((where, name, ids, share) for (where, name, _, share), ids in zip(held, tokens, strict=True))


def _calls(window: list[Found]) -> Iterator[list[Found]]:
    """The window's documents in lists of about ENCODED_CHARACTERS: few enough calls, and little done in vain by a run that ends."""
    held: list[Found] = []
    characters = 0
    for item in window:
        held.append(item)
        characters += len(item[2])
        if characters >= ENCODED_CHARACTERS:
            yield held
            held, characters = [], 0
    if held:
        yield held


def encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], list[np.ndarray]]:
    """Texts -> their tokens, int32, each with exactly one end-of-text after them and no other special token."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    # `<|endoftext|>` written in a document is text, not a border between documents.
    backend.encode_special_tokens = True
    end = int(tokenizer.eos_token_id)

    def encode(texts: list[str]) -> list[np.ndarray]:
        documents = []
        for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            tokens = np.empty(len(ids) + 1, dtype=np.int32)
            tokens[:-1], tokens[-1] = ids, end
            # Some tokenizers make it of a text all the same (Unigram; BPE that takes whole words): there it is no border.
            documents.append(tokens if (tokens[:-1] != end).all() else np.append(tokens[tokens != end], np.int32(end)))
        return documents

    return encode


def pack(documents: Iterable[Tokenized], *, length: int, source: int, token: int, carry: bool, spans: bool) -> Iterator[Row]:
    """Lays the documents end to end, from token number `token` of the first, and cuts them into rows of `length`.

    What remains when they end is left out; what remains when an epoch ends too unless it is carried over. Where a stream has a document's
    beginning alone, its row is filled up with what follows there: no end-of-text stands at that cut, so no other document may.
    """
    row, filled, begins_in = np.empty(length, dtype=np.int32), 0, -1
    parts: list[Span] = []
    rows_of_epoch = tokens_of_epoch = 0
    for where, name, tokens, (share_from, share_to) in documents:
        # Streams that share a document come to the same token: neither loses one.
        token, end = max(token, int(share_from * len(tokens))), int(share_to * len(tokens))
        epoch = where[0]
        if epoch != begins_in:
            first = begins_in < 0  # Of which there may be left less than a row, or nothing.
            if not first and not tokens_of_epoch:  # Else it would be read for ever.
                raise UserError("data.num_streams: a stream holds less than a token; lower it")
            if not carry:
                if not first and not rows_of_epoch:
                    problem = f"an epoch of a stream is shorter than a row of {length} tokens"
                    raise UserError(f"data.carry_remainder: false: {problem}; lower data.num_streams")
                filled, parts = 0, []
            begins_in, rows_of_epoch, tokens_of_epoch = epoch, int(first), int(first)
        while token < end:
            taken = min(length - filled, len(tokens) - token)
            row[filled : filled + taken] = tokens[token : token + taken]
            if spans:
                parts.append(Span(name, epoch, token, token + taken))
            filled, token, tokens_of_epoch = filled + taken, token + taken, tokens_of_epoch + taken
            if filled == length:
                after = (*where[:3], where[3] + 1, 0) if token >= end else (*where, token)
                yield Row(row, source, after, tuple(parts))
                row, filled, parts, rows_of_epoch = np.empty(length, dtype=np.int32), 0, [], rows_of_epoch + 1
        token = 0


def shuffled(items: Iterable[T], *key: int | str) -> list[T]:
    """The same order for the same key on every machine: seeded by text, random.Random does not depend on the process's hash seed."""
    shuffled = list(items)
    random.Random("/".join(map(str, key))).shuffle(shuffled)
    return shuffled
