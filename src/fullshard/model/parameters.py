"""Parameters by their canonical names and whole shapes, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.model.fsdp1 import flat_piece, to_rows


def canonical_name(name: str) -> str:
    """A parameter's name without what torch.compile, activation checkpointing, DDP and FSDP1 put into it."""
    for inserted in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(inserted, "")
    return name.removeprefix("module.")


def canonical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter), a tied parameter once."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the parameter, however it is sharded: under FSDP1 that is not the shape of the tensor in its place."""
    piece = flat_piece(parameter)
    return parameter.shape if piece is None else piece.shape


def whole_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's values in one tensor on every rank. Collective where it is sharded."""
    if (piece := flat_piece(parameter)) is not None:
        parameter = to_rows(piece, parameter)
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def weights_hash(model: nn.Module) -> str:
    """Hash over names, shapes and fp32 bytes of all parameters: equal exactly when the weights are, however they are sharded.

    Collective. Gathers one parameter at a time, so that a rank never holds more than its shards and one whole parameter.
    """
    digest = xxhash.xxh3_128()
    for name, parameter in canonical_parameters(model):
        whole = whole_tensor(parameter)
        digest.update(f"{name} {tuple(whole.shape)}".encode())
        digest.update(whole.detach().contiguous().cpu().view(torch.uint8).numpy().data)
        del whole
    return digest.hexdigest()


def sharded_fraction(model: nn.Module, *, shards: int) -> tuple[int, int]:
    """(parameters of which every rank holds 1/`shards`, all parameters), counted from the tensors that the ranks really hold. Collective.

    A parameter counts when the local part is ceil(rows / shards) rows or what remains of them, and the parts of all ranks add up to
    the whole, once per replica. FSDP1 cuts units, not parameters: there the memory behind the local part must be a shard of the unit.
    """
    parameters = [parameter for _, parameter in canonical_parameters(model)]
    held = torch.tensor([(p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters], dtype=torch.int64)
    total = held.clone().to(parameters[0].device)
    world_size = 1
    if dist.is_initialized():
        world_size = dist.get_world_size()
        dist.all_reduce(total)
    good = torch.tensor(
        [
            _is_shard(p, shards=shards) and together == whole_shape(p).numel() * world_size // shards
            for p, together in zip(parameters, total.tolist(), strict=True)
        ],
        dtype=torch.int64,
        device=total.device,
    )
    if dist.is_initialized():
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
    return int(good.sum()), len(parameters)


def _is_shard(parameter: nn.Parameter, *, shards: int) -> bool:
    if (piece := flat_piece(parameter)) is not None:
        held = parameter.untyped_storage().nbytes() // parameter.itemsize
        return len(piece.bounds) == shards and held in (piece.shard_numel, 0)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    rows = parameter.shape[0]
    return local.numel() <= -(-rows // shards) * (parameter.numel() // rows)
