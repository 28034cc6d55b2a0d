"""Units of a source -> parquet shards of token ids, made in parallel processes.

A shard gets its name when it is whole and on disk, and then a record in `.progress/`: what is finished is never in doubt.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fullshard.data.pieces import Piece, Reading, Tally
from fullshard.data.readers import documents
from fullshard.data.streams import encoder, tokenized, unplaced
from fullshard.data.tokenizer import tokenizer_hash
from fullshard.data.values import TOKENIZER_KEY
from fullshard.errors import UserError, first_line
from fullshard.files import sync, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COLUMN = "input_ids"
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_TOKENS = 2**18  # 1 MiB of int32: what a stream decodes at most in vain where it begins.
ENCODED_DOCUMENTS = 64
CHECKSUM_BYTES = 2**22


@dataclass(frozen=True)
class Unit:
    """What one shard is made of."""

    split: str
    file: str
    """Of the shard, in the output folder."""
    source: dict[str, Any]
    """What it is made of, as the manifest says it."""
    bytes: int
    """Of the source, as stored."""
    pieces: tuple[Piece, ...]
    reading: Reading


Show = Callable[[int, int, int], None]
"""Called with (bytes of finished units, tokens of finished units, tokens made so far)."""


def make_shards(
    units: Sequence[Unit], *, output: Path, tokenizer: PreTrainedTokenizerFast, num_workers: int, tally: Tally, show: Show
) -> Iterator[dict[str, Any]]:
    """The records of the units' shards as they are finished. What a failure interrupts is lost; what is finished is not."""
    if not units:
        return
    (output / ".progress").mkdir(exist_ok=True)
    # Spawned, not forked: the libraries that listed the files left threads behind.
    context = multiprocessing.get_context("spawn")
    live_tokens = context.Value("q", 0)
    theirs, ours = context.Pipe(duplex=False)
    workers = min(num_workers, len(units))
    executor = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(output, tokenizer, live_tokens, theirs)
    )
    try:
        pending = {executor.submit(_make_shard, unit): unit for unit in units}
        finished_bytes = finished_tokens = 0
        while pending:
            done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done:
                entry, notes = future.result()
                for subject, line in notes:
                    tally.note(subject, line)
                finished_bytes += pending.pop(future).bytes
                finished_tokens += entry["tokens"]
                yield entry
            show(finished_bytes, finished_tokens, live_tokens.value)
        executor.shutdown()
    except BrokenProcessPool as error:
        fix = "out of memory? Run it again with fewer; finished shards stay"
        raise UserError(f"--num_workers: {workers}: a worker was killed; {fix}") from error
    except KeyboardInterrupt:
        raise UserError(f"--output: {output}: stopped; the same command goes on, finished shards stay") from None
    finally:
        ours.close()  # Ends the workers at once, if there are any left.
        executor.shutdown(cancel_futures=True)
        theirs.close()


# In the workers.

_in_worker: dict[str, Any] = {}


def _start_worker(output: Path, tokenizer: PreTrainedTokenizerFast, live_tokens: Any, life: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # A worker is one core's.
    import pyarrow as pa

    pa.set_cpu_count(1)

    def leave() -> None:
        multiprocessing.connection.wait([life])  # Until the main process closes its end, or is killed.
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()

    def advance(tokens: int) -> None:
        with live_tokens.get_lock():
            live_tokens.value += tokens

    _in_worker.update(output=output, encode=encoder(tokenizer), tokenizer=tokenizer, hash=tokenizer_hash(tokenizer), advance=advance)


def _make_shard(unit: Unit) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(the shard's record, (subject, line) to show). When this returns the shard and its record are on disk."""
    output, tally = _in_worker["output"], Tally()
    tokens = _unit_tokens(unit, tally)
    partial, final = output / ".progress" / Path(unit.file).name, output / unit.file
    try:
        counts = _write_parquet(tokens, partial, made_by=_in_worker["hash"])
        entry: dict[str, Any] = {"split": unit.split, "file": unit.file, **counts, "bytes": 0, "xxh3_128": None}
        if counts["documents"]:
            entry |= {"bytes": partial.stat().st_size, "xxh3_128": _checksum(partial)}
            sync(partial)
            final.parent.mkdir(exist_ok=True)
            partial.rename(final)
            sync(final.parent)
        else:
            partial.unlink()
        entry |= {"bad_rows": tally.bad_rows, "source": unit.source}
        write_whole(partial.with_suffix(".json"), json.dumps(entry))
    except OSError as error:  # Reading raises none.
        raise UserError(f"--output: {final}: cannot be written: {first_line(error)}") from error
    return entry, tally.take_notes()


def _unit_tokens(unit: Unit, tally: Tally) -> Iterator[np.ndarray]:
    """The unit's documents, in order, each with its end-of-text."""
    end = int(_in_worker["tokenizer"].eos_token_id)

    def windows() -> Iterator[list[Any]]:
        held: list[Any] = []
        for piece in unit.pieces:
            for _, _, value in documents(piece, 0, unit.reading, tally):
                held.append(value)
                if len(held) == ENCODED_DOCUMENTS:
                    yield unplaced(held)
                    held = []
        yield unplaced(held)

    told = 0
    for _, _, ids, _ in tokenized(windows(), encode=_in_worker["encode"], end_of_text=end):
        yield ids
        told += len(ids)
        if told >= ROW_GROUP_TOKENS // 4:
            _in_worker["advance"](told)
            told = 0
    _in_worker["advance"](told)


def _write_parquet(documents: Iterable[np.ndarray], path: Path, *, made_by: str) -> dict[str, int]:
    """One column of lists of int32, in row groups that are small enough to begin in the middle of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(COLUMN, pa.list_(pa.int32()))], metadata={TOKENIZER_KEY: made_by})
    count = tokens = 0
    # A dictionary makes it larger and 6 times slower to write, 4 times to read.
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=3, use_dictionary=False, write_statistics=False) as writer:
        for group in _row_groups(documents):
            lengths = [len(ids) for ids in group]
            offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
            column = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(group).astype(np.int32, copy=False)))
            writer.write_table(pa.table([column], schema=schema), row_group_size=len(group))
            count += len(group)
            tokens += sum(lengths)
    return {"documents": count, "tokens": tokens}


def _row_groups(documents: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    held: list[np.ndarray] = []
    tokens = 0
    for ids in documents:
        if held and (len(held) == ROW_GROUP_DOCUMENTS or tokens + len(ids) > ROW_GROUP_TOKENS):
            yield held
            held, tokens = [], 0
        held.append(ids)
        tokens += len(ids)
    if held:
        yield held


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(CHECKSUM_BYTES):
            digest.update(block)
    return digest.hexdigest()
