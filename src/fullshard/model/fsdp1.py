"""FSDP1, the legacy FullyShardedDataParallel (`fsdp_version: 1`): where it keeps a parameter. The only module that looks inside.

FSDP1 lays the parameters of a unit end to end in one flat tensor and cuts that into equal shards, whatever parameter a cut goes through.
With use_orig_params each parameter of the model is a view of the piece of it that is in this rank's shard: one dimension, often no
elements, so that neither its shape nor its rows can be read off it. `mark_flat_pieces` notes on each where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class FlatPiece:
    """What this rank holds of a parameter, as elements of the flattened parameter."""

    shape: torch.Size
    """Of the whole parameter."""
    bounds: tuple[tuple[int, int], ...]
    """[start, stop) of each rank of the mesh; empty pieces are (0, 0)."""
    shard_numel: int
    """Elements of a rank's shard of the whole unit, padding included."""
    mesh: DeviceMesh
    """The ranks over which the unit is sharded, one dimension."""


def flat_piece(parameter: torch.Tensor) -> FlatPiece | None:
    """None for a parameter that FSDP1 does not shard."""
    return getattr(parameter, "_fullshard_piece", None)


def mark_flat_pieces(model: nn.Module) -> None:
    """Note on each parameter what it is a piece of. Once, on a model that was just wrapped; nothing happens without FSDP1. Collective."""
    handles = [handle for _, _, handle in flat_units(model) if handle.uses_sharded_strategy]
    if not handles:
        return
    own = [
        [
            (part.intra_param_start_idx or 0, (part.intra_param_end_idx or 0) + 1) if part.in_shard else (0, 0)
            for part in handle.flat_param._shard_param_infos
        ]
        for handle in handles
    ]
    group = handles[0].process_group
    gathered: list[list[list[tuple[int, int]]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, own, group=group)
    mesh = DeviceMesh.from_group(group, handles[0].device.type)
    for unit, handle in enumerate(handles):
        flat = handle.flat_param
        if flat._params is None:
            raise RuntimeError("FSDP1 without use_orig_params")
        for index, (parameter, shape) in enumerate(zip(flat._params, flat._shapes, strict=True)):
            bounds = tuple(rank[unit][index] for rank in gathered)
            parameter._fullshard_piece = FlatPiece(shape, bounds, flat._sharded_size.numel(), mesh)  # type: ignore[attr-defined]


def flat_units(model: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel, FlatParamHandle]]:
    """(name, module, where its parameters are) of each FSDP1 unit that owns parameters, outermost first."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield name, module, module._handle


def free_gathered(model: nn.Module) -> None:
    """Drop what a forward without backward has left gathered: the root unit, and every unit of SHARD_GRAD_OP."""
    for _, unit, handle in flat_units(model):
        # Freeing what was never gathered fails.
        if handle.uses_sharded_strategy and handle.flat_param._full_param_padded.untyped_storage().size():
            _reshard(unit, handle, True)


def to_rows(piece: FlatPiece, local: torch.Tensor) -> DTensor:
    """The tensor of which every rank holds its `piece` [elements], in the parameter's shape, sharded by rows: a copy. Collective.

    An element goes straight from the rank that has it to the one whose rows it belongs to; nobody holds more than 1/N.
    """
    rank = piece.mesh.get_local_rank()
    rows = _row_bounds(piece)
    received = _exchange(local.detach(), piece.mesh, own=piece.bounds[rank], of_others=rows, wanted=rows[rank], from_others=piece.bounds)
    return DTensor.from_local(
        received.view(-1, *piece.shape[1:]),
        piece.mesh,
        [Shard(0)],
        run_check=False,
        shape=piece.shape,
        stride=torch.empty(piece.shape, device="meta").stride(),
    )


def from_rows(piece: FlatPiece, rows: DTensor) -> torch.Tensor:
    """This rank's piece [elements] of a tensor that is sharded by rows over the piece's mesh: the inverse of `to_rows`. Collective."""
    rank = piece.mesh.get_local_rank()
    bounds = _row_bounds(piece)
    local = rows.to_local().reshape(-1)
    return _exchange(local, piece.mesh, own=bounds[rank], of_others=piece.bounds, wanted=piece.bounds[rank], from_others=bounds)


def _row_bounds(piece: FlatPiece) -> list[tuple[int, int]]:
    """[start, stop) elements of each rank's rows under Shard(0)."""
    rows, numel = piece.shape[0], piece.shape.numel()
    columns, part = numel // rows, -(-rows // len(piece.bounds))
    return [(min(rank * part, rows) * columns, min((rank + 1) * part, rows) * columns) for rank in range(len(piece.bounds))]


def _exchange(
    local: torch.Tensor,
    mesh: DeviceMesh,
    *,
    own: tuple[int, int],
    of_others: Sequence[tuple[int, int]],
    wanted: tuple[int, int],
    from_others: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Elements `wanted`, where this rank has the elements `own`. Intervals rise with the rank, so both sides are in order."""
    sent = [_overlap(own, other) for other in of_others]
    received = [_overlap(wanted, other) for other in from_others]
    output = local.new_empty(sum(received))
    dist.all_to_all_single(output, local.contiguous(), received, sent, group=mesh.get_group())
    return output


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
