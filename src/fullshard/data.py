"""Text -> documents -> tokens -> packed rows, in an order that belongs to the recipe and not to the machine.

The training files are dealt to `num_streams` logical streams. Row n of the run, counted over all steps, comes from stream
n % num_streams; a rank owns the streams with stream % world_size == rank and opens no file of another. So the global batch at step k is the
same at any world size that divides num_streams. More streams mix more files. Everything is read through `datasets` in streaming mode: the
standard library, local files and the Hub take one path.
"""

from __future__ import annotations

import copy
import glob
import itertools
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config import DataConfig, divisors
from fullshard.errors import UserError, one_line
from fullshard.hub import ask_hub

if TYPE_CHECKING:
    import torch
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerFast

Encode = Callable[[str], list[int]]

FILE_BUILDERS = ("text", "json", "csv", "parquet", "arrow")  # Builders of `datasets` that read local files.
HELD_OUT_EVERY = 20  # One file in so many of the standard library is held out.
HELD_OUT_GROUPS = 32


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """(training, held-out) Python files of the running interpreter's standard library, sorted by relative path.

    A file is held out by a hash of its relative path, so that it is held out on every machine and in every version of Python that has it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    training: list[Path] = []
    held_out: list[Path] = []
    for relative in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(relative.split("/")) and _is_utf8(root / relative):
            (held_out if zlib.crc32(relative.encode()) % HELD_OUT_EVERY == 0 else training).append(root / relative)
    return training, held_out


def train_rows(
    *, data: DataConfig, tokenizer: PreTrainedTokenizerFast, seed: int, rank: int, world_size: int, global_batch_size: int
) -> Iterator[torch.Tensor]:
    """Endless: for each optimizer step this rank's rows, int64 [global_batch_size // world_size, sequence_length + 1].

    Inputs are row[:-1], targets row[1:]; rows do not overlap. Of a global batch a rank gets the rows j with j % world_size == rank.
    Each stream reads all its documents once an epoch, in an order drawn from (seed, stream, epoch), and carries what an epoch leaves over
    into the next. The first rows are made before this returns: a mistake in the recipe is a UserError here, not in the first step.
    """
    import torch

    if data.num_streams % world_size:
        raise UserError(
            f"data.num_streams: {data.num_streams}: not divisible by {world_size} processes; use {divisors(data.num_streams)} processes"
        )
    if global_batch_size % world_size:
        raise UserError(f"train.global_batch_size: {global_batch_size}: not a multiple of the number of processes, {world_size}")
    source = _source(data, held_out=False)
    own = range(rank, data.num_streams, world_size)
    streams = _open_streams(source, data=data, seed=seed, own=own, world_size=world_size)
    encode = _encoder(tokenizer)
    rows = {
        number: _pack(_endless_tokens(stream, data=data, encode=encode, seed=seed, number=number), data.sequence_length + 1)
        for number, stream in streams.items()
    }

    def steps() -> Iterator[torch.Tensor]:
        for first in itertools.count(0, global_batch_size):
            step = [next(rows[n % data.num_streams]) for n in range(first + rank, first + global_batch_size, world_size)]
            yield torch.tensor(step, dtype=torch.int64)  # [global_batch_size // world_size, sequence_length + 1]

    endless = steps()
    return itertools.chain([next(endless)], endless)


def evaluation_rows(*, data: DataConfig, tokenizer: PreTrainedTokenizerFast, rank: int, world_size: int, max_rows: int) -> torch.Tensor:
    """This rank's held-out rows, int64 [n, sequence_length + 1]: of the first max_rows those with j % world_size == rank.

    n differs by at most one between ranks and may be 0. The order does not depend on the seed. What remains of a group of files after its
    last full row is left out.
    """
    import torch

    length = data.sequence_length + 1
    if max_rows == 0:
        return torch.empty((0, length), dtype=torch.int64)
    source = _source(data, held_out=True)
    if data.evaluation_files and source.files is not None:
        shared = {path.resolve() for path in source.files} & {path.resolve() for path in _source(data, held_out=False).files or []}
        if shared:
            raise UserError(f"data.evaluation_files: {min(shared)}: also a training file; keep it out of data.data_files")
    stream = _open_stream(source, source.files)
    order = _shuffled(range(len(stream.shards)), "held-out")
    encode = _encoder(tokenizer)
    # In turn from groups of files, so that the first max_rows are not those of one long file.
    groups = [order[group::HELD_OUT_GROUPS] for group in range(min(HELD_OUT_GROUPS, len(order)))]
    packed = [_pack(map(encode, _documents(stream, group, data.text_column)), length) for group in groups]
    in_turn = (row for turn in itertools.zip_longest(*packed) for row in turn if row is not None)
    rows = list(itertools.islice(in_turn, max_rows))
    if not rows:
        raise UserError(f"{source.name}: the held-out text is shorter than one row of {length} tokens; give more of it")
    return torch.tensor(rows[rank::world_size], dtype=torch.int64).reshape(-1, length)


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    name: str
    """`key: value` of the recipe, for messages."""
    files: list[Path] | None
    """Local files; None when `datasets` resolves them (Hub, URLs)."""
    arguments: dict[str, Any]
    """Of datasets.load_dataset, without local files."""


@dataclass(frozen=True)
class Stream:
    """A streaming dataset and the shards of it (files) that one logical stream reads."""

    name: str
    dataset: IterableDataset
    shards: list[int]
    files: list[Path] | None
    """File of each shard of the dataset, when local."""


def _source(data: DataConfig, *, held_out: bool) -> Source:
    """The training or the held-out source; local files are listed, nothing is opened."""
    key, patterns, split = "data_files", data.data_files, data.split
    if data.path == "stdlib":
        for key in ("name", "revision", "data_files", "evaluation_files", "evaluation_split"):
            if getattr(data, key):
                raise UserError(f"data.{key}: {getattr(data, key)}: has no meaning with data.path: stdlib, which has its own files")
        return Source("data.path: stdlib", stdlib_files()[held_out], {"path": "text", "split": "train", "sample_by": "document"})
    if held_out and data.evaluation_files:
        key, patterns, split = "evaluation_files", data.evaluation_files, "train"
    elif held_out:
        key, split = "evaluation_split", data.evaluation_split or data.split
        if split == data.split:
            fix = "set data.evaluation_files or another data.evaluation_split, or evaluation.max_rows: 0"
            raise UserError(f"data.evaluation_split: {data.evaluation_split}: no held-out text; {fix}")
    arguments: dict[str, Any] = {"path": data.path, "split": split}
    if data.evaluation_files and data.evaluation_split:
        raise UserError(f"data.evaluation_split: {data.evaluation_split}: data.evaluation_files is set too; remove one")
    if data.path in FILE_BUILDERS:
        for unused in ("name", "revision"):
            if getattr(data, unused):
                raise UserError(f"data.{unused}: {getattr(data, unused)}: of a Hub dataset, has no meaning with data.path: {data.path}")
        if not patterns:
            raise UserError(f"data.data_files: null: data.path: {data.path} reads files; list them here")
        if data.path == "text":
            arguments["sample_by"] = "document"  # A file is a document; by default every line would be one.
        if not any("://" in pattern for pattern in patterns):
            return Source(f"data.{key}: {', '.join(patterns)}", _local_files(key, patterns), arguments)
    elif not Path(data.path).exists() and not ask_hub(data.path, repo_type="dataset", key="data.path", revision=data.revision):
        raise UserError(f"data.path: {data.path}: not found; no such folder here and the Hub cannot be reached")
    arguments |= {"name": data.name, "revision": data.revision, "data_files": patterns}
    return Source(f"data.path: {data.path}", None, arguments)


def _local_files(key: str, patterns: list[str]) -> list[Path]:
    """Files named by paths, folders and globs, each once, in the order of `patterns` and sorted within one."""
    found: dict[Path, Path] = {}  # By the resolved path: two spellings are one file.
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = sorted(entry for entry in path.rglob("*") if entry.is_file())
        else:
            files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not files:
            raise UserError(f"data.{key}: {pattern}: no such file")
        found |= {file.resolve(): file for file in files if file.is_file() and file.resolve() not in found}
    return list(found.values())


def _open_streams(source: Source, *, data: DataConfig, seed: int, own: range, world_size: int) -> dict[int, Stream]:
    """The rank's streams by number. Files are shuffled by seed and dealt: by size where it is known, else in turn."""
    count = data.num_streams
    local = source.files or []
    whole = _open_stream(source, None) if source.files is None else None
    sizes = [path.stat().st_size for path in local] if whole is None else [0] * whole.dataset.num_shards
    if len(sizes) < count:
        fits = len(sizes) // world_size * world_size
        fix = f"set it to at most {fits}" if fits else f"give at least {world_size} files"
        raise UserError(f"data.num_streams: {count}: only {len(sizes)} files to train on, and each belongs to one stream; {fix}")
    # Large files first, by powers of two, each to the stream that has least: streams then end their epochs nearly together.
    order = sorted(_shuffled(range(len(sizes)), seed), key=lambda index: -sizes[index].bit_length())
    dealt: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in order:
        lightest = filled.index(min(filled))
        dealt[lightest].append(index)
        filled[lightest] += sizes[index] + 1
    if whole is not None:
        return {number: Stream(source.name, whole.dataset, dealt[number], None) for number in own}
    # One load_dataset for all of this rank's files: it looks at every file that it is given, and must not look at another rank's.
    files = [local[index] for number in own for index in dealt[number]]
    opened = _open_stream(source, files)
    if opened.files is None:
        raise RuntimeError(f"{source.name}: {len(files)} files are {len(opened.shards)} shards; each file must be one")
    starts = itertools.accumulate((len(dealt[number]) for number in own), initial=0)
    return {
        number: Stream(source.name, opened.dataset, opened.shards[start : start + len(dealt[number])], files)
        for number, start in zip(own, starts, strict=False)
    }


def _open_stream(source: Source, files: list[Path] | None) -> Stream:
    import datasets

    datasets.disable_progress_bars()
    given = {} if files is None else {"data_files": [glob.escape(str(path)) for path in files]}
    with one_line(source.name):
        dataset = datasets.load_dataset(**source.arguments, **given, streaming=True)
        shards = list(range(dataset.num_shards))
    return Stream(source.name, dataset, shards, files if files is not None and len(files) == len(shards) else None)


def _documents(stream: Stream, order: Iterable[int], column: str) -> Iterator[str]:
    """The texts of the stream's shards, in the given order of positions in `stream.shards`."""
    for position in order:
        shard = stream.shards[position]
        place = f"{stream.files[shard]}" if stream.files else f"{stream.name}: shard {shard}"
        rows = iter(stream.dataset.shard(num_shards=stream.dataset.num_shards, index=shard))
        for number in itertools.count():
            # No yield inside: a generator that is still suspended there when the interpreter ends would complain.
            with one_line(place):
                row = next(rows, None)
            if row is None:
                break
            if column not in row:
                raise UserError(f"data.text_column: {column}: no such column; there are {', '.join(row)}")
            if not isinstance(row[column], str):
                raise UserError(f"data.text_column: {column}: {place}: row {number} holds {type(row[column]).__name__}, not text")
            yield row[column]


def _endless_tokens(stream: Stream, *, data: DataConfig, encode: Encode, seed: int, number: int) -> Iterator[list[int]]:
    """Documents as tokens, epoch after epoch."""
    for epoch in itertools.count():
        order = _shuffled(range(len(stream.shards)), seed, number, epoch)
        pieces = map(encode, _documents(stream, order, data.text_column))
        first = next(pieces, None)
        if first is None:  # Without this an empty stream would be read for ever.
            raise UserError(f"{stream.name}: stream {number} of {data.num_streams} has no document; lower data.num_streams")
        yield first
        yield from pieces


def _encoder(tokenizer: PreTrainedTokenizerFast) -> Encode:
    """Text -> its tokens, with exactly one end-of-text after them and no other special token."""
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.no_truncation()
    encoder.no_padding()
    # `<|endoftext|>` written in a document is text, not a border between documents.
    encoder.encode_special_tokens = True
    end = tokenizer.eos_token_id
    return lambda text: [*encoder.encode(text, add_special_tokens=False).ids, end]


def _pack(pieces: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Concatenates the pieces and cuts them into rows of `length`; what remains at the end of a finite stream is left out."""
    held: list[int] = []
    for piece in pieces:
        held += piece
        full = len(held) - len(held) % length
        for start in range(0, full, length):
            yield held[start : start + length]
        del held[:full]


def _shuffled(items: Iterable[int], *key: int | str) -> list[int]:
    """The same order for the same key on every machine: seeded by text, random.Random does not depend on the process's hash seed."""
    shuffled = list(items)
    random.Random("/".join(map(str, key))).shuffle(shuffled)
    return shuffled


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
