"""The values that are logged of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from fullshard.measure.memory import MemoryMeasurement, host_rss_bytes, optimizer_bytes, tensor_bytes
from fullshard.parallel.precision import COMPUTE_DTYPE
from fullshard.plan.shapes import GIB
from fullshard.recipe.fields import Recipe
from fullshard.train.flops import peak_flops, throughput, training_flops_per_token
from fullshard.train.run import Run
from fullshard.train.step import StepResult

if TYPE_CHECKING:
    from fullshard.data.batches import Batches


def step_values(result: StepResult) -> dict[str, float]:
    loss, grad_norm = torch.stack([result.loss.float(), result.grad_norm.float()]).tolist()
    return {"train/loss": loss, "train/grad_norm": grad_norm, "train/learning_rate": result.learning_rate}


def throughput_values(recipe: Recipe, accelerator: Accelerator, *, steps: int, wall_s: float, data_wait_s: float) -> dict[str, float]:
    peak = peak_flops(accelerator.device, COMPUTE_DTYPE[accelerator.mixed_precision], recipe.logging.peak_tflops)
    return throughput(
        steps=steps,
        tokens=steps * recipe.train.global_batch_size * recipe.data.sequence_length,
        wall_s=wall_s,
        data_wait_s=data_wait_s,
        flops_per_token=training_flops_per_token(model=recipe.model, sequence_length=recipe.data.sequence_length),
        peak_flops_per_s=None if peak is None else peak * accelerator.num_processes,
    )


def memory_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, *, measurement: MemoryMeasurement, result: StepResult
) -> dict[str, float]:
    values = {"memory/host_rss_gib": host_rss_bytes() / GIB, "memory/predicted_peak_gib": run.predicted_peak_bytes / GIB}
    if measurement.use is not None:
        values |= {
            "memory/allocated_gib": measurement.use.allocated / GIB,
            "memory/peak_allocated_gib": measurement.use.peak_allocated / GIB,
            "memory/reserved_gib": measurement.use.reserved / GIB,
            "memory/parameters_gib": tensor_bytes(model.parameters()) / GIB,
            "memory/gradients_gib": result.gradient_bytes / GIB,
            "memory/optimizer_gib": optimizer_bytes(optimizer) / GIB,
            "memory/activations_gib": measurement.use.activations / GIB,
        }
    return values


def loader_values(
    accelerator: Accelerator, batches: Batches, run: Run, *, wait_s: float, noted: set[str]
) -> tuple[dict[str, float], float]:
    """(the data/* keys of all ranks; the longest wait of a rank in seconds). Says what the loaders have to say, once. Collective."""
    counts, notes, (fewest, most) = batches.counts(), list(batches.notes().items()), batches.epochs()
    values = [counts["retries"], counts["bad_rows"], len(notes), *(round(value * 1e6) for value in (fewest, most, wait_s))]
    gathered = accelerator.gather(torch.tensor([values], dtype=torch.int64, device=accelerator.device))  # [ranks, 6]
    retries, bad_rows, said, *_ = gathered.sum(dim=0).tolist()
    epochs = {"data/epochs_min": int(gathered[:, 3].min()) / 1e6, "data/epochs_max": int(gathered[:, 4].max()) / 1e6}
    if said:
        for subject, line in gather_object(notes):
            if subject not in noted:  # Another rank, or another worker, may have said it.
                noted.add(subject)
                run.terminal.say(line)
    return {"data/retries": retries, "data/bad_rows": bad_rows, **epochs}, int(gathered[:, 5].max()) / 1e6
