"""`run` reads a corpus as a run of several ranks does that is stopped after each `Leg`, and says which documents each row is of."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fsspec.compression import compr

from fullshard.data.batches import Batches, merge_positions, train_batches, weighed
from fullshard.data.sources import list_corpus
from fullshard.data.tokenizer import load_tokenizer
from fullshard.recipe.fields import DataConfig

TOKENIZER = load_tokenizer("bundled")
EOS = int(TOKENIZER.eos_token_id)
BATCH = 8  # Rows of a global batch, unless said otherwise.


def ids_of(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), EOS]


def compress(content: bytes) -> bytes:
    out = io.BytesIO()
    with compr["zstd"](out, mode="wb") as file:
        file.write(content)
    return out.getvalue()


def small(data: DataConfig, **changes: Any) -> DataConfig:
    defaults = {"sequence_length": 16, "num_streams": 4, "shuffle_window": 5, "num_workers": 0, "log_documents": True}
    return replace(data, **(defaults | changes))


@dataclass(frozen=True)
class Leg:
    """A part of a run between two stops."""

    steps: int
    world_size: int = 1
    workers: int = 0
    batch: int = BATCH


@dataclass(frozen=True)
class Ran:
    rows: list[list[int]]
    """In the order of the run."""
    log: list[list[Any]]
    """Of each row, the spans of documents: (document, epoch, begin, end)."""
    position: dict[str, Any]
    counts: Counter[str]
    notes: list[str]

    def streams(self, count: int) -> list[list[list[Any]]]:
        """Spans of each stream, in order."""
        return [[span for row in self.log[stream::count] for span in row] for stream in range(count)]


def ranks(
    data: DataConfig,
    world_size: int = 1,
    *,
    batch: int = BATCH,
    seed: int = 0,
    position: dict[str, Any] | None = None,
    allow_changes: Sequence[str] = (),
    documents_log: Path | None = None,
) -> list[Batches]:
    corpus = list_corpus(data, held_out=False)
    if position is None:
        corpus = weighed(corpus, data=data, tokenizer=TOKENIZER)  # Once, as the main process does it.
    return [
        train_batches(
            data=data,
            tokenizer=TOKENIZER,
            corpus=corpus,
            seed=seed,
            rank=rank,
            world_size=world_size,
            global_batch_size=batch,
            position=position,
            allow_changes=allow_changes,
            documents_log=documents_log,
        )
        for rank in range(world_size)
    ]


_logs = itertools.count()


def run(data: DataConfig, *legs: Leg, seed: int = 0, log_in: Path, position: dict[str, Any] | None = None) -> Ran:
    """One after the other, each from the position where the one before stopped."""
    log = log_in / f"log_{next(_logs)}"
    placed: dict[int, list[int]] = {}
    counts: Counter[str] = Counter()
    notes: list[str] = []
    first = consumed = position["rows"] if position else 0
    for leg in legs:
        leg_data = replace(data, num_workers=leg.workers)
        running = ranks(leg_data, leg.world_size, batch=leg.batch, seed=seed, position=position, documents_log=log)
        for _ in range(leg.steps):
            for rank, batches in enumerate(running):
                rows = next(batches)
                assert rows.dtype == torch.int64
                assert rows.shape == (leg.batch // leg.world_size, data.sequence_length + 1)
                numbers = [n for n in range(consumed, consumed + leg.batch) if n % leg.world_size == rank]
                placed |= dict(zip(numbers, rows.tolist(), strict=True))
            consumed += leg.batch
        position = json.loads(json.dumps(merge_positions([batches.position() for batches in running])))
        for batches in running:
            counts.update(batches.counts())
            notes += [note for subject, note in batches.notes().items() if not subject.endswith(": shares")]
    assert position is not None
    logged = [json.loads(line) for path in log.glob("rank_*.jsonl") for line in path.read_text().splitlines()]
    logged.sort(key=lambda line: line["row"])
    if data.log_documents:
        assert [line["row"] for line in logged] == list(range(first, consumed)), "each row is logged once"
    return Ran([placed[n] for n in range(first, consumed)], [line["documents"] for line in logged], position, counts, notes)
