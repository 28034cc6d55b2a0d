"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from fullshard.recipe.fields import OptimConfig


def learning_rate_factor(step: int, *, optim: OptimConfig, max_steps: int) -> float:
    """Share of the peak learning rate at which optimizer step `step` = 1, 2, ... runs; laid out over max_steps, then as at its end.

    The last warmup step runs at the peak and the last step of a decay at the floor, exactly. Not transformers' schedules: those waste
    the first step at a rate of 0, and their WSD warms up from the floor while their cosine warms up from 0.
    """
    if step < optim.warmup_steps:
        return step / optim.warmup_steps
    rest = max_steps - optim.warmup_steps
    length = {"cosine": rest, "linear": rest, "wsd": optim.decay_steps or 0, "constant": 0}[optim.schedule]
    progress = min(1.0, max(0, step - (max_steps - length)) / length) if length > 0 else 0.0
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.min_learning_rate_ratio + (1.0 - optim.min_learning_rate_ratio) * remaining
