"""A rank's batches: rows of the logical streams, in an order that belongs to the recipe and not to the machine.

The files are cut into `num_streams` logical streams. Row n of the run, counted over all steps, comes from stream n % num_streams; a rank
owns the streams with stream % world_size == rank and reads nothing of the others. So the global batch at step k is the same at any world
size that divides num_streams, and with any number of loader workers.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fullshard.data.corpus import Corpus
from fullshard.data.dealing import deal, packed_pieces, stream_tokens, uneven_line, unpacked_pieces
from fullshard.data.loader import Plan, position_from, rows_in_order, stream_name
from fullshard.data.order import order_changes, order_of
from fullshard.data.pieces import Piece, Tally
from fullshard.data.readers import first_document
from fullshard.data.shape import read_amplification
from fullshard.data.sources import list_corpus
from fullshard.data.streams import START, Position, Row, encoder, no_document, reading_of
from fullshard.data.weighing import weigh
from fullshard.errors import UserError
from fullshard.files import keep_json_lines
from fullshard.recipe.batch import divisors
from fullshard.recipe.fields import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBED_BYTES = 2**16  # Of a source with less for each stream, each stream is looked into before the run.
RESERVED_FILES = 64  # Of a process, for checkpoints, the export, trackers, held-out text.


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
            str(number): [position_from(values) for values in position["streams"].get(str(number), [START] * len(plan.readings))]
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
        self._rows = rows_in_order(
            plan, first=-(-(self._consumed - self._rank) // self._world_size), streams=self._streams, tally=self._tally
        )
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
    order = order_of(data, corpus=corpus, seed=seed, tokenizer=tokenizer)
    changed: list[str] = []
    if position is not None:
        if changed := order_changes(position["order"], order, allow_changes=allow_changes):
            position = position | {"streams": {}, "dealt": {}, "read": {}}
        elif len(position["streams"]) != count or any(len(places) != len(readings) for places in position["streams"].values()):
            raise UserError(
                f"checkpoint.resume: its data position has not all of {count} streams x {len(readings)} sources; take an older one"
            )
    from_start = position is None or not position["streams"]
    if from_start:
        corpus = weighed(corpus, data=data, tokenizer=tokenizer)
        dealt = _deal(corpus, data=data, seed=seed)
    else:
        assert position is not None
        dealt = _dealt_before(corpus, position["dealt"], count=count)
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
        _note_shares(batches, plan, corpus, world_size=world_size)
    if from_start:  # It opens files that a run which goes on may not need for long.
        _note_amplification(batches, plan)
    return batches


def _deal(corpus: Corpus, *, data: DataConfig, seed: int) -> list[list[list[Piece]]]:
    """The pieces of each source's streams: [source][stream]. The corpus is weighed."""
    assert corpus.weights is not None
    return [
        deal(source, weights, count=data.num_streams, seed=seed, row_tokens=data.sequence_length + 1)
        for source, weights in zip(corpus.training, corpus.weights, strict=True)
    ]


def _dealt_before(corpus: Corpus, packed: dict[str, Any], *, count: int) -> list[list[list[Piece]]]:
    """As `_deal`, from what a checkpoint has of it."""
    return [
        [unpacked_pieces(source, packed[str(stream)][number]) for stream in range(count)] for number, source in enumerate(corpus.training)
    ]


def _note_shares(batches: Batches, plan: Plan, corpus: Corpus, *, world_size: int) -> None:
    """Where streams get tokens that are not equal to 2 %."""
    assert corpus.weights is not None
    row_tokens = plan.data.sequence_length + 1
    for source, weights, dealt in zip(corpus.training, corpus.weights, plan.dealt, strict=True):
        if line := uneven_line(source, weights, dealt, seed=plan.seed, row_tokens=row_tokens, world_size=world_size):
            batches.note(f"{source.name}: shares", line)


def _note_amplification(batches: Batches, plan: Plan) -> None:
    """Where streams that share a file decode more of it than they use."""
    for reading, dealt in zip(plan.readings, plan.dealt, strict=True):
        source, streams = reading.source, plan.data.num_streams
        if len(source.files) < streams:
            pieces = [piece for stream in plan.own for piece in dealt[stream]]
            if (times := read_amplification(pieces, reading)) > 1.05:
                line = f"{len(source.files)} files for {streams} streams: what is read is decoded {times:.1f} times"
                fix = "smaller row groups or fewer data.num_streams decode less"
                batches.note(f"{source.name}: amplification", f"{source.name}: {line}; {fix}")


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


def _check_sources(plan: Plan) -> None:
    """Each source can be read, and each stream has a document of each small one: of a source that is seldom chosen it would show late."""
    for number, (reading, dealt) in enumerate(zip(plan.readings, plan.dealt, strict=True)):
        small = sum(piece.end - piece.begin for pieces in dealt for piece in pieces) < PROBED_BYTES * len(dealt)
        if not small and len(plan.readings) == 1:
            continue  # The first batch reads it.
        for stream in plan.own if small else plan.own[:1]:
            if not any(first_document(piece, reading) for piece in dealt[stream]):
                raise UserError(no_document(stream_name(plan, stream, number), len(dealt[stream])))


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
