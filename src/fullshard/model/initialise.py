"""Weights, shard by shard: each rank fills its part of a model that was built on the meta device.

The whole is the same at any placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fullshard.model.parameters import canonical_name, canonical_parameters

# Elements drawn from one generator state. Small enough that a rank draws little beyond its shard, large enough that seeding costs nothing.
_BLOCK_ELEMENTS = 2**20


def materialise(model: LlamaForCausalLM, *, device: torch.device, seed: int) -> None:
    """Give a meta model storage on `device` and initialise it in place, holding no more than this rank's shards and part of one parameter.

    Matrices are normal with std `initializer_range`, norms one, biases zero: transformers' own initialisation. The values depend on
    `seed` and the parameter's name and position alone, so they are the same bits at every world size, sharded or not.
    """
    config = model.config
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        # to_empty gives each module that shares a parameter a tensor of its own.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    restore_rope_buffers(model, device=device)
    for name, parameter in canonical_parameters(model):
        _initialise(parameter, name=name, std=config.initializer_range, seed=seed)


def module_materialiser(model: LlamaForCausalLM, *, device: torch.device, seed: int) -> Callable[[nn.Module], nn.Module]:
    """`materialise` for FSDP1, which calls it for each module of a unit before it flattens and shards the unit: its param_init_fn.

    Same values. A rank holds the unit whole that is being wrapped, of which the root unit has embedding and head, and its shards of the
    rest. `restore_rope_buffers` is left to be called on the wrapped model.
    """
    names = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}

    def initialise(module: nn.Module) -> nn.Module:
        own = [(key, names[parameter]) for key, parameter in module.named_parameters(recurse=False)]
        module.to_empty(device=device, recurse=False)
        for key, name in own:
            _initialise(getattr(module, key), name=name, std=model.config.initializer_range, seed=seed)
        return module

    return initialise


def restore_rope_buffers(model: nn.Module, *, device: torch.device) -> None:
    """Recompute the inverse frequencies: they are in no state dict, and to_empty leaves them as garbage (PUBLIC_REPORTS O13)."""
    restored = set()
    for prefix, module in model.named_modules():
        if isinstance(module, LlamaRotaryEmbedding):
            fresh = LlamaRotaryEmbedding(module.config)
            for name, buffer in fresh.named_buffers():
                module.register_buffer(name, buffer.to(device), persistent=False)
                restored.add(f"{prefix}.{name}")
    left = {name for name, _ in model.named_buffers()} - restored
    if left:
        raise RuntimeError(f"buffers without a known initial value: {sorted(left)}")


@torch.no_grad()
def _initialise(parameter: nn.Parameter, *, name: str, std: float, seed: int) -> None:
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        first_row = offset[0] if local.numel() else 0
        if tuple(local.shape[1:]) != tuple(parameter.shape[1:]):
            raise RuntimeError(f"{name}: sharded along another dimension than 0: {parameter.placements}")
    else:
        local, first_row = parameter.data, 0

    if name.endswith("bias"):
        local.zero_()
    elif "norm" in name.rsplit(".", 2)[-2]:
        local.fill_(1.0)
    else:
        _fill_normal(local, first_row=first_row, rows=parameter.shape[0], std=std, seed=seed, name=name)


def _fill_normal(local: torch.Tensor, *, first_row: int, rows: int, std: float, seed: int, name: str) -> None:
    """Rows [first_row, first_row + len(local)) of a [rows, columns] normal matrix, block of rows by block of rows.

    A block is always drawn whole, on the CPU, from a generator seeded by (seed, name, block): which rank needs which part of it,
    and on what device, cannot change a value.
    """
    if not local.numel():
        return
    columns = local[0].numel()
    block_rows = max(1, _BLOCK_ELEMENTS // columns)
    generator = torch.Generator(device="cpu")
    last_row = first_row + local.shape[0]
    for block in range(first_row // block_rows, -(-last_row // block_rows)):
        start, stop = block * block_rows, min((block + 1) * block_rows, rows)
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty((stop - start, *local.shape[1:]), dtype=torch.float32).normal_(0.0, std, generator=generator)
        begin, end = max(start, first_row), min(stop, last_row)
        local[begin - first_row : end - first_row].copy_(values[begin - start : end - start])
