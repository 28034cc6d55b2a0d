"""The tensors of a training run by name: what a checkpoint holds, the same names and shapes however the model is placed.

`model.<canonical name>` and `optimizer.<canonical name>.<field>` (exp_avg, exp_avg_sq, step).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.model.fsdp1 import FlatPiece, flat_piece, from_rows, to_rows
from fullshard.model.parameters import canonical_parameters


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name in whole shapes, DTensors where they are sharded. Collective.

    The tensors themselves, except under sharded FSDP1: there copies, sharded by rows instead of by flat pieces, which `restore_tensors`
    puts back. Not torch's get_state_dict: it adds the hyperparameters, which are the recipe's and would be pickled one by one, and
    gathers FSDP1's units whole.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces = _pieces(model)
    fields = _fields(pieces, optimizer)
    for name, parameter in canonical_parameters(model):
        if name not in pieces:
            tensors[f"model.{name}"] = parameter.detach()
            tensors |= {f"optimizer.{name}.{field}": value for field, value in optimizer.state[parameter].items()}
            continue
        piece = pieces[name][1]
        tensors[f"model.{name}"] = to_rows(piece, parameter)
        for field, kind in fields.get(name, {}).items():
            if isinstance(kind, torch.Tensor):
                tensors[f"optimizer.{name}.{field}"] = kind.to(parameter.device)
            else:
                local = optimizer.state[parameter][field] if parameter.numel() else parameter.new_empty(0, dtype=kind)
                tensors[f"optimizer.{name}.{field}"] = to_rows(piece, local)
    return tensors


@torch.no_grad()
def restore_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put `tensors`, a result of `training_tensors` into which values were read, in place. Collective.

    They are in place already, and nothing is done, except under sharded FSDP1.
    """
    pieces = _pieces(model)
    for key, value in tensors.items():
        section, _, name = key.partition(".")
        name, field = (name, "") if section == "model" else (name.rpartition(".")[0], name.rpartition(".")[2])
        if name not in pieces:
            continue
        parameter, piece = pieces[name]
        local = from_rows(piece, value) if isinstance(value, DTensor) else value
        if parameter.numel():  # What this rank has nothing of has no state here.
            (optimizer.state[parameter][field] if field else parameter).copy_(local)


def _pieces(model: nn.Module) -> dict[str, tuple[nn.Parameter, FlatPiece]]:
    """Parameters that sharded FSDP1 keeps, by canonical name."""
    return {name: (parameter, piece) for name, parameter in canonical_parameters(model) if (piece := flat_piece(parameter)) is not None}


def _fields(
    pieces: Mapping[str, tuple[nn.Parameter, FlatPiece]], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor | torch.dtype]]:
    """Of each parameter the fields of its optimizer state, the same on every rank: the value of a scalar, the type of a moment.

    The optimizer has no state for a parameter on a rank that holds nothing of it, or an old one.
    """
    if not pieces:
        return {}
    own = {
        name: {field: value.dtype if value.ndim else value.cpu() for field, value in optimizer.state[parameter].items()}
        for name, (parameter, _) in pieces.items()
        if parameter.numel()
    }
    group = next(iter(pieces.values()))[1].mesh.get_group()
    gathered: list[dict[str, dict[str, torch.Tensor | torch.dtype]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, own, group=group)
    return {name: fields for rank in reversed(gathered) for name, fields in rank.items()}
