"""LlamaConfig -> model on the meta device -> weights, shard by shard.

The order is what Accelerate's FSDP2 asks for: build on meta (no storage), let Accelerate wrap, then `materialise`.
Layer 1: knows tensors and meshes, holds no Accelerator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fullshard.config import ModelConfig
from fullshard.errors import UserError
from fullshard.fsdp1 import flat_piece, to_rows
from fullshard.tokenizer import vocabulary_size

# Elements drawn from one generator state. Small enough that a rank draws little beyond its shard, large enough that seeding costs nothing.
_BLOCK_ELEMENTS = 2**20


def llama_config(model: ModelConfig, *, tokenizer: PreTrainedTokenizerBase | None = None) -> LlamaConfig:
    """transformers' config of a recipe's model section, with the tokenizer's special tokens.

    Raises UserError where transformers refuses the values, or where the tokenizer has more tokens than the embedding has rows.
    """
    if model.hidden_act not in ACT2FN:
        raise UserError(f"model.hidden_act: {model.hidden_act}: unknown activation; choose one of {', '.join(sorted(ACT2FN))}")
    if tokenizer is not None and (needed := vocabulary_size(tokenizer)) > model.vocab_size:
        raise UserError(f"model.vocab_size: {model.vocab_size}: smaller than the tokenizer, {needed} tokens; raise it to that or more")
    fields = asdict(model)
    fields["rope_parameters"] = {key: value for key, value in fields["rope_parameters"].items() if value is not None}
    fields |= {
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "pad_token_id": None,  # Rows are packed: nothing is padded, and a padding row would be initialised to zero.
        "use_cache": False,
    }
    try:
        return LlamaConfig(**fields)
    except Exception as error:  # huggingface_hub's strict dataclasses raise several types, all of them for a bad value
        raise UserError(f"model: {' '.join(str(error).split())}") from error


def build_on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    """The model with fp32 parameters that have shapes but no storage."""
    with torch.device("meta"):
        return LlamaForCausalLM(config)


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
