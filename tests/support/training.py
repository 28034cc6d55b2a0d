"""`run_steps` trains a small model on a rank of the pool, on made-up rows and by a recipe that `recipe_for` makes.

`lines`, `column` and `folders` read what a run has left in its folder.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.errors import UserError
from fullshard.recipe.fields import CheckpointConfig, DataConfig, EvaluationConfig, LoggingConfig, ModelConfig, Recipe, TrainConfig
from support.models import TINY, prepared
from support.steps import OPTIM

STREAMS, STEPS = 8, 6
FP32 = {"ACCELERATE_MIXED_PRECISION": "no"}


class FakeBatches:
    """Rows drawn from (stream, place in the stream); every stream has `each` rows in each global batch."""

    def __init__(self, *, rank: int, world_size: int, position: dict[str, Any] | None, each: int = 1, lost_at: int | None = None) -> None:
        self.rows = position["rows"] if position else 0
        self.places = {s: (position["streams"][str(s)] if position else 0) for s in range(rank, STREAMS, world_size)}
        self.rank, self.each, self.lost_at = rank, each, lost_at
        self.told = False

    def __next__(self) -> torch.Tensor:
        if self.lost_at is not None and self.rows // STREAMS + 1 == self.lost_at:
            raise UserError(f"data.path: here: rank {self.rank} gets nothing any more")
        seeds = [stream * 1000 + place + more for more in range(self.each) for stream, place in self.places.items()]
        self.places = {stream: place + self.each for stream, place in self.places.items()}
        self.rows += STREAMS * self.each
        return torch.stack([torch.randint(0, 131, (33,), generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    def position(self) -> dict[str, Any]:
        streams = {str(s): place for s, place in self.places.items()}
        return {"rows": self.rows, "streams": streams, "dealt": {key: [] for key in streams}, "read": streams, "order": {}}

    def epochs(self) -> tuple[float, float]:
        return 0.5 + self.rank, 1.5 + self.rank

    def counts(self) -> dict[str, int]:
        return {"retries": self.rank + 1, "bad_rows": 10 * self.rank}

    def notes(self) -> dict[str, str]:
        told, self.told = self.told, True
        return {} if told else {"both": f"of rank {self.rank}, a note", f"{self.rank}": f"a note of rank {self.rank}"}


def recipe_for(output_dir: Path, *, resume: str = "never", every: int = 0, max_steps: int = STEPS, model: ModelConfig = TINY) -> Recipe:
    return Recipe(
        output_dir=str(output_dir),
        seed=7,
        model=model,
        data=DataConfig(sequence_length=32, num_streams=STREAMS),
        train=TrainConfig(max_steps=max_steps, global_batch_size=STREAMS, micro_batch_size=2),
        optim=OPTIM,
        evaluation=EvaluationConfig(max_rows=0),
        checkpoint=CheckpointConfig(every=every, resume=resume, export="never"),
        logging=LoggingConfig(trackers=[], every=1, weights_hash=False),
    )


def with_checkpoint(recipe: Recipe, **options: Any) -> Recipe:
    return replace(recipe, checkpoint=replace(recipe.checkpoint, **options))


def with_train(recipe: Recipe, **options: Any) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **options))


def assembled(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """(what find_checkpoint says, what the recipe .py makes before the run starts, the checkpoint loaded)."""
    from fullshard.checkpoint.resume import find_checkpoint
    from fullshard.checkpoint.state import load_checkpoint
    from fullshard.model.bad_steps import BadSteps
    from fullshard.model.optim import build_optimizer, build_schedule

    accelerator, model = prepared(recipe.model, seed=recipe.seed)
    resume = find_checkpoint(recipe=recipe, accelerator=accelerator)
    adamw = build_optimizer(model.parameters(), optim=recipe.optim)
    schedule = build_schedule(adamw, optim=recipe.optim, max_steps=8)
    parts = {"accelerator": accelerator, "model": model, "optimizer": accelerator.prepare_optimizer(adamw), "schedule": schedule}
    parts["bad_steps"] = BadSteps(spike_factor=recipe.train.spike_factor, device=accelerator.device)
    load_checkpoint(resume, recipe=recipe, **parts)
    return resume, parts


def whole_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments, gathered."""
    from fullshard.checkpoint.tensors import training_tensors

    tensors = training_tensors(model, optimizer)
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in tensors.items()}


def run_steps(*, recipe: Recipe, lost_at: int | None = None, lost_ranks: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """What recipes/pretrain.py does, on made-up rows."""
    from fullshard.placement.placement import placement_from_environment
    from fullshard.train.loop import train
    from fullshard.train.run import start

    Path(recipe.output_dir).mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        resume, parts = assembled(recipe)
    accelerator = parts["accelerator"]
    loaded = whole_state(parts["model"], parts["optimizer"])
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches: Any = FakeBatches(
        rank=rank,
        world_size=world_size,
        position=resume.position,
        each=recipe.train.global_batch_size // STREAMS,
        lost_at=lost_at if rank in lost_ranks else None,
    )
    placement = placement_from_environment()
    run = start(recipe=recipe, placement=placement, accelerator=accelerator, model=parts["model"], resume=resume)
    held_out = torch.ones(recipe.evaluation.max_rows, 33, dtype=torch.int64)
    said: list[str] = []
    run.terminal.say = said.append  # type: ignore[assignment, method-assign]
    error = None
    try:
        train(recipe=recipe, placement=placement, **parts, batches=batches, held_out=held_out, run=run, resume=resume)
    except UserError as caught:
        error = str(caught)
    return {
        "error": error,
        "step": resume.step,
        "loaded": loaded,
        "said": said,
        "state": None if error else whole_state(parts["model"], parts["optimizer"]),
    }


def saving(recipe: Recipe, parts: dict[str, Any]) -> Any:
    """save(step): to disk when it returns, without training."""
    from fullshard.checkpoint.resume import Resume
    from fullshard.checkpoint.save import Saver
    from fullshard.placement.placement import placement_from_environment

    saver = Saver(
        recipe=recipe, placement=placement_from_environment(), accelerator=parts["accelerator"], resume=Resume(schedule_steps=STEPS)
    )

    def save(step: int) -> None:
        values = {"tokens_seen": 0, "rollbacks": 0, "wandb_id": None}
        state = {name: parts[name] for name in ("model", "optimizer", "bad_steps")}
        saver.save(**state, step=step, position={"rows": step, "streams": {}, "dealt": {}, "read": {}, "order": {}}, values=values)
        saver.finish()

    return save


def lines(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def column(output_dir: Path, key: str) -> list[float]:
    return [line[key] for line in lines(output_dir)]


def folders(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())
