"""A rank's batches: rows of the logical streams, in an order that belongs to the recipe and not to the machine.

The files are cut into `num_streams` logical streams. Row n of the run, counted over all steps, comes from stream n % num_streams; a rank
owns the streams with stream % world_size == rank and reads nothing of the others. So the global batch at step k is the same at any world
size that divides num_streams, and with any number of loader workers, each of which has streams of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fullshard.changes import covers
from fullshard.config import DataConfig, SourcePlace, divisors
from fullshard.dealing import deal, packed_pieces, stream_tokens, uneven_line, unpacked_pieces, weigh
from fullshard.errors import UserError
from fullshard.files import keep_json_lines
from fullshard.preemption import leave_with_parent
from fullshard.readers import Piece, Reading, Tally, documents, first_document, point, read_amplification
from fullshard.sources import Corpus, list_corpus
from fullshard.streams import (
    START,
    Position,
    Row,
    encoder,
    no_document,
    pack,
    reading_of,
    shuffled,
    tokenized,
    unplaced,
    whole,
    windows_of,
)
from fullshard.tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_GROUPS = 32
CHUNK_ROWS = 8  # Rows that a worker hands over at once.
PREFETCHED_CHUNKS = 4  # Per worker.
PROBED_BYTES = 2**16  # Of a source with less for each stream, each stream is looked into before the run.
RESERVED_FILES = 64  # Of a process, for checkpoints, the export, trackers, held-out text.
FILE_KEYS = [f"data.{key}" for key in (*(entry.name for entry in fields(SourcePlace)), "mixture", "evaluation_documents")]
SILVER = 0x6A09E667F3BCC908  # 2**64 * (sqrt(2) - 1).


@dataclass(frozen=True)
class Chunk:
    """What a worker hands over: rows of its streams, in order, and what went wrong while they were made."""

    rows: list[tuple[int, Row]]
    """(place in the rank's order, row)"""
    retries: int = 0
    bad_rows: int = 0
    notes: tuple[tuple[str, str], ...] = ()
    """(subject, line)"""
    failure: str | None = None
    """A UserError's message, after which nothing comes."""


@dataclass(frozen=True)
class Plan:
    """All that decides a rank's rows; the same for each of its workers."""

    data: DataConfig
    seed: int
    readings: list[Reading]
    """Of each source."""
    dealt: list[list[list[Piece]]]
    """Pieces by source and stream."""
    weights: list[float]
    encode: Callable[[list[str]], list[np.ndarray]]
    end_of_text: int
    own: range
    """The rank's streams."""


class Batches:
    """Endless iterator over this rank's rows of each global batch, int64 [global_batch_size // world_size, sequence_length + 1].

    Inputs are row[:-1], targets row[1:]; rows do not overlap. `next` raises UserError when the data cannot be read; `position` is then
    still that of the last batch. The first batch is made when the object is: a mistake in the recipe shows there.
    """

    def __init__(self, plan: Plan, *, position: dict[str, Any], order: dict[str, Any], rows_per_step: int, log: Path | None) -> None:
        self._plan, self._order, self._rows_per_step, self._log = plan, order, rows_per_step, log
        self._world_size, self._rank = plan.own.step, plan.own.start
        self._consumed: int = position["rows"]  # Of the run: all ranks, all steps.
        self._streams: dict[str, list[Position]] = {
            str(number): [_position(values) for values in position["streams"].get(str(number), [START] * len(plan.readings))]
            for number in plan.own
        }
        self._dealt = {
            str(stream): [packed_pieces(reading.source, dealt[stream]) for reading, dealt in zip(plan.readings, plan.dealt, strict=True)]
            for stream in plan.own
        }
        read = position.get("read", {})
        self._read = {number: list(read.get(number, [0] * len(plan.readings))) for number in self._streams}
        """Rows that were taken of each stream's sources."""
        self._tally = Tally()
        self._rows = _in_order(plan, first=-(-(self._consumed - self._rank) // self._world_size), streams=self._streams, tally=self._tally)
        self._log_is_cut = False
        # Rows that are not given out yet, or why there are none. Not the exception: its traceback would keep all this alive, workers too.
        self._held: list[Row] | str | None = self._next_rows()
        if isinstance(self._held, str):
            raise UserError(self._held)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        rows, self._held = self._held if self._held is not None else self._next_rows(), None
        if isinstance(rows, str):
            self._held = rows
            raise UserError(rows)
        first = self._consumed
        for place, row in enumerate(rows):
            number = self._number(place)
            stream = str(number % self._plan.data.num_streams)
            self._streams[stream][row.source] = row.position
            self._read[stream][row.source] += 1
            if self._log is not None:
                if not self._log_is_cut:  # With the first row, when the run has begun: a mistake until then costs no log.
                    self._cut_log(self._log)
                self._write(number, row)
        self._consumed = first + self._rows_per_step * self._world_size
        return torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64))

    def position(self) -> dict[str, Any]:
        """This rank's part of where the run is in its data, after the last batch: small, JSON. See merge_positions."""
        return {
            "rows": self._consumed,
            "streams": {number: [list(position) for position in positions] for number, positions in self._streams.items()},
            "dealt": self._dealt,
            "read": {number: list(rows) for number, rows in self._read.items()},
            "order": self._order,
        }

    def epochs(self) -> tuple[float, float]:
        """(smallest, largest) number of passes that a stream of this rank has made over a source. Whole passes are counted; what is done of
        the last one is estimated."""
        row_tokens = self._plan.data.sequence_length + 1
        passes = []
        for number, positions in self._streams.items():
            for dealt, rows, (epoch, *_) in zip(self._plan.dealt, self._read[number], positions, strict=True):
                expected = rows * row_tokens / max(stream_tokens(dealt[int(number)]), 1.0)
                passes.append(min(max(expected, epoch), epoch + 1))
        return min(passes), max(passes)

    def counts(self) -> dict[str, int]:
        """Reads that were tried again and rows that were skipped so far, by this rank."""
        return {"retries": self._tally.retries, "bad_rows": self._tally.bad_rows}

    def note(self, subject: str, line: str) -> None:
        """Add a line to show, once per subject."""
        self._tally.note(subject, line)

    def notes(self) -> dict[str, str]:
        """Lines to show by what they are about, each given once: a source that was retried, a file of which rows were skipped."""
        return dict(self._tally.take_notes())

    def _number(self, place: int) -> int:
        """Row of the run that is this rank's row `place` of the next step."""
        return self._consumed + (self._rank - self._consumed) % self._world_size + place * self._world_size

    def _next_rows(self) -> list[Row] | str:
        try:
            return list(itertools.islice(self._rows, self._rows_per_step))
        except UserError as error:
            return str(error)

    def _cut_log(self, log: Path) -> None:
        """Take out of the log what an earlier run wrote of rows that are still to come. Rank r has the files r, r + world_size, ..."""
        for path in sorted(log.glob("rank_*.jsonl")):
            if int(path.stem.removeprefix("rank_")) % self._world_size == self._rank:
                keep_json_lines(path, lambda line: line["row"] < self._consumed)
        self._log_is_cut = True

    def _write(self, number: int, row: Row) -> None:
        assert self._log is not None
        self._log.mkdir(parents=True, exist_ok=True)
        with open(self._log / f"rank_{self._rank:05}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"row": number, "documents": [list(asdict(span).values()) for span in row.spans]}) + "\n")


def train_batches(
    *,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    seed: int,
    rank: int,
    world_size: int,
    global_batch_size: int,
    position: dict[str, Any] | None = None,
    allow_changes: Sequence[str] = (),
    documents_log: str | Path | None = None,
) -> Batches:
    """This rank's batches, from the beginning or from a position that `merge_positions` made, whatever world size it was made at.

    allow_changes: keys or sections of the recipe. Where what differs from the position's files and recipe is among them, every stream
    begins anew, with a note, while the rows of the run are counted on.
    Raises UserError where the streams or the batch cannot be dealt out to the ranks, where something else differs from the position's
    files and recipe, and for what is wrong with the data of the first batch.
    """
    count = data.num_streams
    if count % world_size:
        raise UserError(f"data.num_streams: {count}: not divisible by {world_size} processes; use {divisors(count)} processes")
    if global_batch_size % world_size:
        raise UserError(f"train.global_batch_size: {global_batch_size}: not a multiple of the number of processes, {world_size}")
    readings = [reading_of(source, data, tokenizer) for source in corpus.training]
    order = _order(data, corpus=corpus, seed=seed, tokenizer=tokenizer)
    changed: list[str] = []
    if position is not None:
        if changed := _changed_order(position["order"], order, allow_changes=allow_changes):
            position = position | {"streams": {}, "dealt": {}, "read": {}}
        elif len(position["streams"]) != count or any(len(places) != len(readings) for places in position["streams"].values()):
            raise UserError(
                f"checkpoint.resume: its data position has not all of {count} streams x {len(readings)} sources; take an older one"
            )
    from_start = position is None or not position["streams"]
    if from_start:
        corpus = weighed(corpus, data=data, tokenizer=tokenizer)
        assert corpus.weights is not None
        row_tokens = data.sequence_length + 1
        dealt = [
            deal(source, weights, count=count, seed=seed, row_tokens=row_tokens)
            for source, weights in zip(corpus.training, corpus.weights, strict=True)
        ]
    else:
        assert position is not None
        packed = position["dealt"]
        dealt = [
            [unpacked_pieces(source, packed[str(stream)][number]) for stream in range(count)]
            for number, source in enumerate(corpus.training)
        ]
    plan = Plan(
        data=data,
        seed=seed,
        readings=readings,
        dealt=dealt,
        weights=[source.weight for source in corpus.training],
        encode=encoder(tokenizer),
        end_of_text=int(tokenizer.eos_token_id),
        own=range(rank, count, world_size),
    )
    _allow_open_files(plan)
    if from_start:
        _check_sources(plan)
    batches = Batches(
        plan,
        position=position or {"rows": 0, "streams": {}},
        order=order,
        rows_per_step=global_batch_size // world_size,
        log=Path(documents_log) if data.log_documents and documents_log else None,
    )
    if changed:
        subject = f"{', '.join(changed)}: not what the checkpoint was made with, as allowed"
        batches.note("data position", f"{subject}; the data begin anew after {batches.position()['rows']:,} rows")
    if from_start and rank == 0:  # The same on all of them.
        assert corpus.weights is not None
        for source, weights, dealt_source in zip(corpus.training, corpus.weights, plan.dealt, strict=True):
            if line := uneven_line(source, weights, dealt_source, seed=seed, row_tokens=data.sequence_length + 1, world_size=world_size):
                batches.note(f"{source.name}: shares", line)
    for source, reading, dealt_source in zip(corpus.training, readings, plan.dealt, strict=True):
        if len(source.files) < count and from_start:  # It opens files that a run which goes on may not need for long.
            pieces = [piece for number in plan.own for piece in dealt_source[number]]
            if (times := read_amplification(pieces, reading)) > 1.05:
                line = f"{len(source.files)} files for {count} streams: what is read is decoded {times:.1f} times"
                batches.note(
                    f"{source.name}: amplification", f"{source.name}: {line}; smaller row groups or fewer data.num_streams decode less"
                )
    return batches


def survey(data: DataConfig, *, tokenizer: PreTrainedTokenizerFast, held_out: bool, position: dict[str, Any] | None) -> Corpus:
    """What the recipe reads, and where its tokens are: all that `train_batches` asks of files. For the main process, which hands it on.

    position: of a run that goes on; it knows how its files were dealt, and nothing is weighed.
    """
    corpus = list_corpus(data, held_out=held_out)
    return corpus if position is not None else weighed(corpus, data=data, tokenizer=tokenizer)


def weighed(corpus: Corpus, *, data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """The corpus with the weights of its training sources. Reads a sample of each, all of a small one, unless that was done."""
    if corpus.weights is not None:
        return corpus
    encode, end = encoder(tokenizer), int(tokenizer.eos_token_id)
    readings = [reading_of(source, data, tokenizer) for source in corpus.training]
    return replace(corpus, weights=tuple(weigh(reading.source, reading, encode, end, streams=data.num_streams) for reading in readings))


def merge_positions(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of the run from the parts of all its ranks."""
    if len({part["rows"] for part in parts}) != 1:
        raise RuntimeError(f"ranks are at different rows: {[part['rows'] for part in parts]}")

    def by_stream(key: str) -> dict[str, Any]:
        values = {number: value for part in parts for number, value in part[key].items()}
        return dict(sorted(values.items(), key=lambda item: int(item[0])))

    return {"rows": parts[0]["rows"], **{key: by_stream(key) for key in ("streams", "dealt", "read")}, "order": parts[0]["order"]}


def evaluation_rows(
    *,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    rank: int,
    world_size: int,
    max_rows: int,
    note: Callable[[str, str], None] | None = None,
) -> torch.Tensor:
    """This rank's held-out rows, int64 [n, sequence_length + 1]: of the first max_rows those with j % world_size == rank.

    n differs by at most one between ranks and may be 0. The order does not depend on the seed. What remains of a group of files after its
    last full row is left out. note: told (subject, line) of what was read again or left out.
    """
    length = data.sequence_length + 1
    if max_rows == 0:
        return torch.empty((0, length), dtype=torch.int64)
    encode, tally = encoder(tokenizer), Tally()
    packed: list[Iterator[Row]] = []
    for source in corpus.held_out:
        reading = reading_of(source, data, tokenizer)
        order = shuffled(range(len(source.files)), "held-out")
        # In turn from groups of files, so that the first max_rows are not those of one long file.
        for group in range(min(HELD_OUT_GROUPS, len(order))):
            pieces = [whole(source.files[index]) for index in order[group::HELD_OUT_GROUPS]]
            windows = (unplaced([value]) for piece in pieces for _, _, value in documents(piece, 0, reading, tally))
            tokens = tokenized(windows, encode=encode, end_of_text=int(tokenizer.eos_token_id))
            packed.append(pack(tokens, length=length, source=0, token=0, carry=True, spans=False))
    in_turn = (row.tokens for turn in itertools.zip_longest(*packed) for row in turn if row is not None)
    rows = list(itertools.islice(in_turn, max_rows))
    if not rows:
        names = ", ".join(source.name for source in corpus.held_out)
        raise UserError(f"{names}: the held-out text is shorter than one row of {length} tokens; give more of it")
    if note is not None:
        for subject, line in tally.take_notes():
            note(f"held-out {subject}", f"held-out {line}")
    return torch.from_numpy(np.stack(rows).astype(np.int64))[rank::world_size]


def _in_order(plan: Plan, *, first: int, streams: dict[str, list[Position]], tally: Tally) -> Iterator[Row]:
    """The rank's rows from its `first` on, made here or by workers; the order is the same."""
    loader = _Loader(plan, first=first, streams={number: list(positions) for number, positions in streams.items()})
    workers = min(plan.data.num_workers, len(plan.own))
    chunks = loader.chunks(0, 1) if workers == 0 else _from_workers(loader, workers)
    with contextlib.closing(chunks):  # Ends the workers at once; left to the garbage collector each takes 5 s.
        while True:
            block: list[tuple[int, Row]] = []
            failures: list[str] = []
            for chunk in itertools.islice(chunks, max(workers, 1)):
                block += chunk.rows
                tally.retries += chunk.retries
                tally.bad_rows += chunk.bad_rows
                for subject, line in chunk.notes:
                    tally.note(subject, line)
                if chunk.failure is not None:
                    failures.append(chunk.failure)
            for place, row in sorted(block, key=lambda placed: placed[0]):
                if place != first:  # One that could not be made.
                    break
                yield row
                first += 1
            if failures:
                raise UserError(failures[0])


def _from_workers(loader: _Loader, workers: int) -> Generator[Chunk, None, None]:
    # Forked: spawned ones would import torch anew, seconds each. They touch neither the device nor the process group.
    # A generator of its own: the default one's numbers are the dropout's.
    parallel: DataLoader[Chunk] = DataLoader(
        loader,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,  # type: ignore[arg-type]
        prefetch_factor=PREFETCHED_CHUNKS,
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    handler = signal.getsignal(signal.SIGCHLD)
    chunks = iter(parallel)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGCHLD, handler)  # DataLoader's own raises wherever the training is when a worker dies. Here it shows below.
    try:
        yield from chunks
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):  # One that was killed; what else a worker raises keeps its traceback.
            raise
        raise UserError(f"data.num_workers: {workers}: {str(error).splitlines()[0]}; was it out of memory?") from error


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk


class _Loader(IterableDataset[Chunk]):
    """The rank's rows in blocks of CHUNK_ROWS per worker; of each block a worker makes the rows of its streams."""

    def __init__(self, plan: Plan, *, first: int, streams: dict[str, list[Position]]) -> None:
        self._plan, self._first, self._streams = plan, first, streams

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        assert worker is not None
        leave_with_parent()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # A worker is one core's.
        return self.chunks(worker.id, worker.num_workers)

    def chunks(self, worker: int, workers: int) -> Generator[Chunk, None, None]:
        """Those of worker number `worker`. Worker w has the rank's streams number w, w + workers, ...; all go through the same blocks."""
        plan, tally = self._plan, Tally()
        streams = len(plan.own)
        rows = {
            place: _stream_rows(plan, plan.own[place], first=_uses(self._first, place, streams), positions=self._streams, tally=tally)
            for place in range(worker, streams, workers)
        }
        width = CHUNK_ROWS * workers
        told = Tally()
        for cycle in itertools.count(self._first // streams):
            for start in range(0, streams, width):
                made: list[tuple[int, Row]] = []
                failure = None
                try:
                    for place in range(start + worker, min(start + width, streams), workers):
                        number = cycle * streams + place
                        if number >= self._first:
                            made.append((number, next(rows[place])))  # A failure must not take it along.
                except UserError as error:
                    failure = str(error)
                notes = tuple(tally.take_notes())
                yield Chunk(made, tally.retries - told.retries, tally.bad_rows - told.bad_rows, notes, failure)
                told.retries, told.bad_rows = tally.retries, tally.bad_rows
                if failure is not None:
                    return


def _check_sources(plan: Plan) -> None:
    """Each source can be read, and each stream has a document of each small one: of a source that is seldom chosen it would show late."""
    for number, (reading, dealt) in enumerate(zip(plan.readings, plan.dealt, strict=True)):
        small = sum(piece.end - piece.begin for pieces in dealt for piece in pieces) < PROBED_BYTES * len(dealt)
        if not small and len(plan.readings) == 1:
            continue  # The first batch reads it.
        for stream in plan.own if small else plan.own[:1]:
            if not any(first_document(piece, reading) for piece in dealt[stream]):
                raise UserError(no_document(_stream_name(plan, stream, number), len(dealt[stream])))


def _stream_name(plan: Plan, stream: int, source: int) -> str:
    return f"{plan.readings[source].source.name}: stream {stream} of {plan.data.num_streams}"


def _allow_open_files(plan: Plan) -> None:
    """As many as the system lets a process have: every stream keeps a file open, and the usual limit is 1,024.

    Raises UserError where that is not enough for the streams and for what a run opens beside them: a save must not be the first to notice.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    workers = min(plan.data.num_workers, len(plan.own))
    streams = -(-len(plan.own) // max(workers, 1))  # Of one process.
    # A text file is read at once, a remote one in requests.
    kept = [any("://" not in file.url for file in reading.source.files) for reading in plan.readings if reading.source.builder != "text"]
    files = streams * sum(kept)
    # Two more process groups of sockets; a worker's queues.
    needed = files + len(os.listdir("/dev/fd")) + RESERVED_FILES + 2 * plan.own.step + 8 * workers
    if most != resource.RLIM_INFINITY and needed > most:
        fix = f"raise it to {needed} (ulimit -Hn), lower data.num_streams or raise data.num_workers"
        line = f"a process keeps {files} files open for its {streams} streams, too many for its limit of {most} open files; {fix}"
        raise UserError(f"data.num_streams: {plan.data.num_streams}: {line}")


def _position(values: Sequence[int]) -> Position:
    """From JSON, which knows no tuples."""
    epoch, place, cursor, index, token = values
    return epoch, place, cursor, index, token


def _uses(first: int, place: int, streams: int) -> int:
    """How many of the rank's rows before its row `first` are of its stream number `place`."""
    return (first - place + streams - 1) // streams


def _stream_rows(plan: Plan, stream: int, *, first: int, positions: dict[str, list[Position]], tally: Tally) -> Iterator[Row]:
    """The stream's rows from its `first` on: each from one source, chosen so that the weights hold in every stretch of rows."""
    sources = [_source_rows(plan, stream, source, position=position, tally=tally) for source, position in enumerate(positions[str(stream)])]
    bounds = list(itertools.accumulate(plan.weights))
    for number in itertools.count(first):
        # Multiples of an irrational number fill the unit interval evenly: one for a stream's rows, another for the streams of a batch.
        place = point(number, stream * SILVER) * bounds[-1]
        yield next(sources[next(source for source, bound in enumerate(bounds) if place < bound or source == len(bounds) - 1)])


def _source_rows(plan: Plan, stream: int, source: int, *, position: Position, tally: Tally) -> Iterator[Row]:
    data = plan.data
    windows = windows_of(
        plan.dealt[source][stream],
        plan.readings[source],
        position=position,
        window=data.shuffle_window,
        key=(plan.seed, stream) if len(plan.readings) == 1 else (plan.seed, stream, source),
        tally=tally,
        name=_stream_name(plan, stream, source),
    )
    tokens = tokenized(windows, encode=plan.encode, end_of_text=plan.end_of_text)
    return pack(
        tokens,
        length=data.sequence_length + 1,
        source=source,
        token=position[4],
        carry=data.carry_remainder,
        spans=data.log_documents,
    )


def _order(data: DataConfig, *, corpus: Corpus, seed: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides which row is where: a position is good only where all of it is the same. Files may have moved to another folder."""
    files = [
        [source.weight, source.column, [[file.url.rpartition("/")[2], file.size, file.skip] for file in source.files]]
        for source in corpus.training
    ]
    # Not on_bad_row: before the row that stopped a run there was none to skip.
    keys = ("num_streams", "sequence_length", "shuffle_window", "carry_remainder")
    sizes = [file.size for source in corpus.training for file in source.files]
    return {
        "seed": seed,
        "files": f"{len(sizes)} files, {sum(sizes)} bytes, {hashlib.blake2b(json.dumps(files).encode(), digest_size=8).hexdigest()}",
        "tokenizer": tokenizer_hash(tokenizer),
        **{key: getattr(data, key) for key in keys},
        "dealing": "equal tokens",
    }


def _changed_order(saved: dict[str, Any], now: dict[str, Any], *, allow_changes: Sequence[str]) -> list[str]:
    """What differs. Raises UserError where allow_changes has no key that it comes from."""
    changed = []
    for key, value in now.items():
        if saved.get(key) != value:
            names = {"files": "the files of data (names, sizes, columns, weights)", "dealing": "how files are dealt to streams"}
            place = ({"seed": "seed"} | names).get(key, f"data.{key}")
            keys = {"seed": ["seed"], "files": FILE_KEYS, "dealing": ["data.num_streams"]}.get(key, [f"data.{key}"])
            if not any(covers(allow_changes, name) for name in keys):
                fix = f"begin the data anew with checkpoint.allow_changes: [{keys[0]}]"
                before = saved.get(key, "equal stored bytes" if key == "dealing" else None)
                line = f"the checkpoint was made with {before}, its data position has no meaning here; {fix}"
                raise UserError(f"{place}: {value}: {line}")
            changed.append(place)
    return changed
