"""Rows of the logical streams in their order, read in this process or by loader workers, each of which has streams of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fullshard.data.pieces import Piece, Reading, Tally, point
from fullshard.data.streams import Position, Row, pack, tokenized, windows_of
from fullshard.errors import UserError
from fullshard.process.preemption import leave_with_parent
from fullshard.recipe.fields import DataConfig

CHUNK_ROWS = 8  # Rows that a worker hands over at once.
PREFETCHED_CHUNKS = 4  # Per worker.
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


def rows_in_order(plan: Plan, *, first: int, streams: dict[str, list[Position]], tally: Tally) -> Iterator[Row]:
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


def stream_name(plan: Plan, stream: int, source: int) -> str:
    return f"{plan.readings[source].source.name}: stream {stream} of {plan.data.num_streams}"


def position_from(values: Sequence[int]) -> Position:
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
        name=stream_name(plan, stream, source),
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
