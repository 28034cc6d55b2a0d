"""AdamW with decay on matrices only, and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.lr_scheduler import LambdaLR

from fullshard.config import OptimConfig

_FUSED_DEVICES = ("cuda", "cpu")
_NORM_BLOCK = 2**12  # Elements.


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


@torch.no_grad()
def clip_by_global_norm_(parameters: Iterable[nn.Parameter], *, max_norm: float | None) -> torch.Tensor:
    """Scale the gradients in place so that their global L2 norm is at most `max_norm` (null: leave them). Collective if they are sharded.

    Returns the norm before clipping, fp32, the same on every rank. Gradients are plain or all DTensors of one mesh.
    Not torch's clip_grad_norm_: on a CPU its fp32 sum over a large tensor is short by up to 1e-4 of the norm, and by less the smaller the
    shards, so that runs at different world sizes would clip differently. Here blocks are summed in fp32 and their sums in fp64.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    blocks = [block for g in local for block in g.reshape(-1).split(max(_NORM_BLOCK, -(-g.numel() // 256))) if block.numel()]
    squares = torch.stack(torch._foreach_norm(blocks)).double().square().sum()
    if isinstance(sharded := gradients[0], DTensor):
        placements = [Partial() if placement.is_shard() else Replicate() for placement in sharded.placements]
        squares = DTensor.from_local(squares, sharded.device_mesh, placements, run_check=False).full_tensor()
    norm = squares.sqrt().float()
    if max_norm is not None:
        # 1e-6 as in torch: keeps a norm of zero from dividing.
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
