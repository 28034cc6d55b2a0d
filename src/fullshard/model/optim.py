"""AdamW with decay on matrices only, and its schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.lr_scheduler import LambdaLR

from fullshard.model.fsdp1 import flat_piece
from fullshard.model.parameters import whole_shape
from fullshard.recipe.fields import OptimConfig
from fullshard.recipe.schedule import learning_rate_factor

_FUSED_DEVICES = ("cuda", "cpu")
_NORM_BLOCK = 2**12  # Elements.


def build_optimizer(parameters: Iterable[nn.Parameter], *, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over every parameter: matrices decay, norms and biases do not. Parameters may be sharded."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if len(whole_shape(p)) >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=parameters[0].device.type in _FUSED_DEVICES,
    )


def build_schedule(optimizer: torch.optim.Optimizer, *, optim: OptimConfig, max_steps: int) -> LambdaLR:
    """The schedule as torch's LambdaLR. Step it once after each optimizer step."""
    # LambdaLR counts from 0; our first optimizer step is number 1.
    return LambdaLR(optimizer, lambda index: learning_rate_factor(index + 1, optim=optim, max_steps=max_steps))


@torch.no_grad()
def clip_by_global_norm_(parameters: Iterable[nn.Parameter], *, max_norm: float | None) -> torch.Tensor:
    """Scale the gradients in place so that their global L2 norm is at most `max_norm` (null: leave them). Collective if they are sharded.

    Returns the norm before clipping, fp32, the same on every rank. Gradients are plain, all DTensors of one mesh, or all pieces of FSDP1's.
    Not torch's clip_grad_norm_: on a CPU its fp32 sum over a large tensor is short by up to 1e-4 of the norm, and by less the smaller the
    shards, so that runs at different world sizes would clip differently. Here blocks are summed in fp32 and their sums in fp64.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    blocks = [block for g in local for block in g.reshape(-1).split(max(_NORM_BLOCK, -(-g.numel() // 256))) if block.numel()]
    # Under FSDP1 a rank may hold nothing that has a gradient.
    norms = torch.stack(torch._foreach_norm(blocks)) if blocks else torch.zeros(1, device=parameters[0].device)
    squares = norms.double().square().sum()
    if (piece := flat_piece(parameters[0])) is not None:
        dist.all_reduce(squares, group=piece.mesh.get_group())
    elif isinstance(sharded := gradients[0], DTensor):
        placements = [Partial() if placement.is_shard() else Replicate() for placement in sharded.placements]
        squares = DTensor.from_local(squares, sharded.device_mesh, placements, run_check=False).full_tensor()
    norm = squares.sqrt().float()
    if max_norm is not None and local:
        # 1e-6 as in torch: keeps a norm of zero from dividing.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, factor.to(local[0].device))  # Offloaded gradients are in host memory, the norm is not.
    return norm
