"""AdamW with decay on matrices only, and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fullshard.config import OptimConfig

_FUSED_DEVICES = ("cuda", "cpu")


def build_optimizer(parameters: Iterable[nn.Parameter], *, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over every parameter: matrices decay, norms and biases do not. Parameters may be sharded."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=parameters[0].device.type in _FUSED_DEVICES,
    )


def learning_rate_factor(step: int, *, optim: OptimConfig, max_steps: int) -> float:
    """Share of the peak learning rate at which optimizer step `step` = 1, 2, ..., max_steps runs.

    The last warmup step runs at the peak and the last step of a decay at the floor, exactly. Not transformers' schedules: those waste
    the first step at a rate of 0, and their WSD warms up from the floor while their cosine warms up from 0.
    """
    if step < optim.warmup_steps:
        return step / optim.warmup_steps
    rest = max_steps - optim.warmup_steps
    length = {"cosine": rest, "linear": rest, "wsd": optim.decay_steps or 0, "constant": 0}[optim.schedule]
    progress = max(0, step - (max_steps - length)) / max(1, length)
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.min_learning_rate_ratio + (1.0 - optim.min_learning_rate_ratio) * remaining


def build_schedule(optimizer: torch.optim.Optimizer, *, optim: OptimConfig, max_steps: int) -> LambdaLR:
    """The schedule as torch's LambdaLR. Step it once after each optimizer step."""
    # LambdaLR counts from 0; our first optimizer step is number 1.
    return LambdaLR(optimizer, lambda index: learning_rate_factor(index + 1, optim=optim, max_steps=max_steps))
