"""What a recipe will read, before anything is trained: `fullshard data`.

Sizes that only reading all of it would tell are estimates, marked `~`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.data.batches import train_batches, weighed
from fullshard.data.corpus import Corpus, Source, file_format
from fullshard.data.dealing import deal, file_shares, missed
from fullshard.data.pieces import Piece, Reading
from fullshard.data.sample import Sample, take_sample
from fullshard.data.shape import read_amplification, row_count
from fullshard.data.sources import list_corpus
from fullshard.data.streams import encoder, reading_of
from fullshard.data.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from fullshard.data.weighing import Weights
from fullshard.recipe.fields import Recipe
from fullshard.terminal import Terminal, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COUNTED_FILES = 16  # Of so many files each footer is read for the number of rows.
SHOWN_FILES = 20
AMPLIFIED_PIECES = 16  # So many streams' pieces stand for all.
END = "⏎"  # Where a document ends.
CUT = "…"  # Where a row begins or ends within one.


@dataclass(frozen=True)
class Size:
    """Of a source. None: unknown."""

    documents: float | None
    exact: bool
    """Whether `documents` is counted."""
    tokens: float | None
    """End-of-text included; always an estimate."""


def describe(recipe: Recipe, *, rows: int, terminal: Terminal) -> None:
    """Prints the sources, how they are dealt to streams, how often the run reads each file, and its first `rows` packed rows."""
    data, train = recipe.data, recipe.train
    corpus = list_corpus(data, held_out=recipe.evaluation.max_rows > 0)
    tokenizer = load_tokenizer(data.tokenizer)
    encode = encoder(tokenizer)
    run_rows = train.max_steps * train.global_batch_size
    product = f"{train.max_steps:,} steps x {train.global_batch_size:,} rows x {data.sequence_length:,} tokens"
    terminal.table(
        recipe.sources.get("", "recipe"),
        [
            ("tokenizer", f"{data.tokenizer}, {vocabulary_size(tokenizer):,} tokens, hash {tokenizer_hash(tokenizer)}"),
            ("training", f"{run_rows * data.sequence_length:,} tokens = {product}"),
        ],
    )
    corpus = weighed(corpus, data=data, tokenizer=tokenizer)
    assert corpus.weights is not None
    sum_of_weights = sum(source.weight for source in corpus.training)
    for source, weights in zip(corpus.training, corpus.weights, strict=True):
        reading = reading_of(source, data, tokenizer)
        sample = take_sample(source, reading, encode, int(tokenizer.eos_token_id))
        size = replace(_size(source, reading, sample), tokens=weights.tokens)
        if weights.counted:
            size = replace(size, documents=weights.documents, exact=True)
        # A row takes sequence_length + 1 tokens from its source: rows do not overlap.
        wanted = run_rows * (data.sequence_length + 1) * source.weight / sum_of_weights
        dealt = deal(source, weights, count=data.num_streams, seed=recipe.seed, row_tokens=data.sequence_length + 1)
        uneven = missed(weights, dealt, row_tokens=data.sequence_length + 1)
        terminal.table(
            source.name,
            [
                *_source_lines(source, sample, size),
                ("weight", f"{source.weight:g} of {sum_of_weights:g}"),
                ("streams", _dealing(source, reading, size, dealt)),
                ("epochs", f"~{wanted / weights.tokens:,.2f} in this run"),
                ("in one pass", f"about {uneven:.1%} of the tokens are read twice, and as many not at all"),
            ],
        )
        terminal.table(f"files of {source.name}", _file_lines(source, weights, dealt, wanted=wanted))
    for source in corpus.held_out:
        reading = reading_of(source, data, tokenizer)
        sample = take_sample(source, reading, encode, int(tokenizer.eos_token_id))
        size = _size(source, reading, sample)
        have = f"~{size.tokens / (data.sequence_length + 1):,.0f}" if size.tokens else "?"
        lines = [*_source_lines(source, sample, size), ("rows", f"{have}, of which at most {recipe.evaluation.max_rows:,} are evaluated")]
        terminal.table(f"held out: {source.name}", lines)
    if rows:
        for line in _first_rows(recipe, corpus, tokenizer, count=rows):
            terminal.say(line)


def _size(source: Source, reading: Reading, sample: Sample) -> Size:
    stored = sum(file.size for file in source.files)
    ratio = stored / sample.stored_bytes if sample.stored_bytes else None
    tokens = ratio * sample.tokens if ratio is not None else None
    if source.builder == "text":
        return Size(len(source.files), True, tokens)
    if len(source.files) <= COUNTED_FILES:
        counts = [row_count(file, reading) for file in source.files]
        rows = [_kept(count, file.skip, file.take) for count, file in zip(counts, source.files, strict=True) if count is not None]
        if len(rows) == len(counts):
            return Size(sum(rows), True, sum(rows) * sample.tokens / sample.documents if sample.documents else None)
    if len(source.files) == 1 and source.files[0].take is not None:
        take = source.files[0].take
        return Size(take, True, take * sample.tokens / sample.documents if sample.documents else None)
    return Size(ratio * sample.documents if ratio is not None else None, False, tokens)


def _kept(rows: int, skip: int, take: int | None) -> int:
    return max(0, (rows if take is None else min(take, rows)) - skip)


def _source_lines(source: Source, sample: Sample, size: Size) -> list[tuple[str, str]]:
    kinds = {file_format(source.builder, file.url) for file in source.files}
    kind = ", ".join(sorted(source.builder if kind == "other" else kind for kind in kinds))
    stored = sum(file.size for file in source.files)
    documents = "?" if size.documents is None else f"{'' if size.exact else '~'}{size.documents:,.0f}"
    tokens = "?" if size.tokens is None else f"~{size.tokens:,.0f}"
    per_document = f", ~{sample.tokens / sample.documents:,.1f} a document" if sample.documents else ""
    per_token = f", ~{sample.text_bytes / sample.tokens:.2f} bytes of text a token" if sample.text_bytes else ""
    column = f"{source.column} ({'token ids' if source.tokens_column else 'text'})"
    return [
        ("files", f"{len(source.files):,} ({kind}), {stored / 1e6:,.1f} MB stored; column {column}"),
        ("documents", documents),
        ("tokens", f"{tokens}{per_document}{per_token}"),
    ]


def _file_lines(source: Source, weights: Weights, dealt: Sequence[Sequence[Piece]], *, wanted: float) -> list[tuple[str, str]]:
    """Of each file its text, its share of the source's tokens and of those that are read, and how often the run reads it."""
    read = dict(file_shares(source, dealt))
    lines = []
    for file, tokens in list(zip(source.files, weights.files, strict=True))[:SHOWN_FILES]:
        own = float(tokens.tokens.sum())
        unit = "token ids" if source.tokens_column else "MB of text"
        text = f"{tokens.text_bytes:,.0f} {unit}" if source.tokens_column else f"{tokens.text_bytes / 1e6:,.3f} {unit}"
        shares = f"{own / weights.tokens:.2%} of the tokens, {read[file]:.2%} of those that are read"
        lines.append((file.name, f"~{text}, {shares}, ~{read[file] * wanted / own:,.2f} passes"))
    if (more := len(source.files) - SHOWN_FILES) > 0:
        passes = [
            read[file] * wanted / float(tokens.tokens.sum())
            for file, tokens in list(zip(source.files, weights.files, strict=True))[SHOWN_FILES:]
        ]
        lines.append((f"{more:,} more", f"~{min(passes):,.2f} to {max(passes):,.2f} passes"))
    return lines


def _dealing(source: Source, reading: Reading, size: Size, dealt: Sequence[Sequence[Piece]]) -> str:
    """How the files become streams, in one line."""
    count = len(dealt)
    pieces = [len(stream) for stream in dealt]
    files = f"{min(pieces)}" if min(pieces) == max(pieces) else f"{min(pieces)} to {max(pieces)}"
    documents = "?" if size.documents is None else f"~{size.documents / count:,.1f}"
    parts = [f"{count:,} of {documents} documents each, from {files} files or parts of files"]
    if len(source.files) < count:
        some: list[Piece] = [piece for stream in dealt[:: -(-count // AMPLIFIED_PIECES)] for piece in stream]
        parts.append(f"what is read is decoded {read_amplification(some, reading):.1f} times")
    return "; ".join(parts)


def _first_rows(recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, *, count: int) -> Iterator[str]:
    """The run's first rows, each document in a row under its name."""
    with tempfile.TemporaryDirectory() as folder:
        batches = train_batches(
            data=replace(recipe.data, num_workers=0, log_documents=True),
            tokenizer=tokenizer,
            corpus=corpus,
            seed=recipe.seed,
            rank=0,
            world_size=1,
            global_batch_size=count,
            documents_log=Path(folder),
        )
        rows = next(batches).numpy()  # [count, sequence_length + 1]
        logged = [json.loads(line) for path in Path(folder).iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
    for row, entry in zip(rows, sorted(logged, key=lambda entry: entry["row"]), strict=True):
        number = entry["row"]
        yield f"row {number} (stream {number % recipe.data.num_streams}, {len(row):,} tokens)"
        yield from _documents(row, entry["documents"], tokenizer)
    yield from batches.notes().values()


def _documents(row: np.ndarray, spans: list[list[Any]], tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    at = 0
    for name, _, begin, end in spans:
        ids = row[at : at + end - begin].tolist()
        at += end - begin
        ended = ids[-1] == tokenizer.eos_token_id
        text = printable(str(tokenizer.decode(ids[:-1] if ended else ids)))
        body = (("" if begin == 0 else CUT) + text + (END if ended else CUT)).splitlines()
        yield f"├─ {name}, tokens {begin:,} to {end - 1:,}"
        yield from (f"│ {line}" for line in body)
