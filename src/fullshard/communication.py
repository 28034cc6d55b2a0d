"""What a training step sends: counted from the collectives that ran, and computed from the recipe's numbers before any did.

A `Traffic` is kept per kind of collective and group of ranks. Its bytes are those of the whole tensor: what an all-gather gives, what a
reduce-scatter takes, what is all-reduced. `sent_bytes` turns them into what a rank puts on the wire. Layer 1: holds no Accelerator.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from fullshard.config import DEFAULT_SHARDING, ModelConfig, ShardingConfig
from fullshard.sharding import Placement

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
Ranks = tuple[int, ...]

# Of DistributedDataParallel: the first bucket is sent when it has so many bytes, each other one at 25 MiB.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20
_FLAT_ALIGNMENT = 16  # Bytes; FSDP1 lets each parameter of a flat tensor begin at a multiple.
# Modules of transformers' Llama that have parameters, by class.
_MODULES = {
    "LlamaDecoderLayer": r"model\.layers\.\d+",
    "LlamaAttention": r"model\.layers\.\d+\.self_attn",
    "LlamaMLP": r"model\.layers\.\d+\.mlp",
    "LlamaRMSNorm": r"model\.(layers\.\d+\.\w+_layer)?norm",
    "Embedding": r"model\.embed_tokens",
    "Linear": r"lm_head|model\.layers\.\d+\.\w+\.\w+_proj",
}
_ITEM_SIZE = {"Byte": 1, "Char": 1, "Bool": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Double": 8, "Long": 8}


@dataclass(frozen=True)
class Traffic:
    """Of one kind over one group."""

    count: int
    bytes: int


Communication = dict[tuple[Kind, Ranks], Traffic]


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together."""

    name: str
    """Of the module; "" is the root. [norm, head] is model.norm."""
    shapes: tuple[tuple[int, ...], ...]
    resharded: bool
    """Freed after its forward and gathered again for its backward."""


def sent_bytes(communication: Mapping[tuple[Kind, Ranks], Traffic]) -> int:
    """Bytes that a rank sends under ring algorithms: (n - 1) / n of what is gathered or scattered over n ranks, twice that where it is
    all-reduced; a broadcast once.
    """
    sent = 0.0
    for (kind, ranks), traffic in communication.items():
        share = (len(ranks) - 1) / len(ranks)
        sent += traffic.bytes * {"all_reduce": 2 * share, "broadcast": 1.0}.get(kind, share)
    return round(sent)


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Count this rank's collectives from here to the end of the block; filled in there.

    Read from torch's flight recorder, which keeps each collective of every process group, whoever issued it (DDP's reducer does in C++).
    Gloo carries a reduce-scatter as an all-reduce; the call that asked for it tells them apart. On CUDA it is NCCL's recorder, which
    `build_accelerator` switches on; no test reaches that. What a rank sends to itself alone is left out. RuntimeError where there was more
    than the recorder keeps.
    """
    communication: Communication = {}
    last = max((entry["record_id"] for entry in _recorded()), default=-1)
    yield communication
    entries = [entry for entry in _recorded() if entry["record_id"] > last]
    if entries and len(entries) != max(entry["record_id"] for entry in entries) - last:
        raise RuntimeError("the flight recorder has lost collectives; raise TORCH_FR_BUFFER_SIZE")
    for entry in entries:
        kind = entry["profiling_name"].partition(":")[2].strip("_")
        if "reduce_scatter" in kind or (kind == "all_reduce" and any("reduce_scatter" in frame["name"] for frame in entry["frames"])):
            kind = "reduce_scatter"
        elif "all_gather" in kind or "allgather" in kind:
            kind = "all_gather"
        side = "output" if kind == "all_gather" else "input"
        size = sum(
            math.prod(shape) * _ITEM_SIZE[dtype] for shape, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
        )
        ranks = tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(entry["process_group"][0])))
        if len(ranks) > 1:
            _add(communication, kind, ranks, Traffic(1, size))


def _recorded() -> list[dict[str, Any]]:
    recorder: Any = torch._C._distributed_c10d
    trace = recorder._dump_nccl_trace() if torch.cuda.is_available() else recorder._dump_fr_trace()
    entries: list[dict[str, Any]] = pickle.loads(trace).get("entries", [])
    return entries


def _add(communication: Communication, kind: Any, ranks: Ranks, traffic: Traffic) -> None:
    before = communication.get((kind, ranks), Traffic(0, 0))
    communication[kind, ranks] = Traffic(before.count + traffic.count, before.bytes + traffic.bytes)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of transformers' Llama, in its order; a tied head is not listed."""
    hidden, inner = model.hidden_size, model.intermediate_size
    head = model.head_dim or hidden // model.num_attention_heads
    query, key = model.num_attention_heads * head, model.num_key_value_heads * head
    linears = {
        **{f"self_attn.{name}_proj": (rows, hidden, model.attention_bias) for name, rows in (("q", query), ("k", key), ("v", key))},
        "self_attn.o_proj": (hidden, query, model.attention_bias),
        **{f"mlp.{name}_proj": (inner, hidden, model.mlp_bias) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner, model.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def fsdp_units(model: ModelConfig, placement: Placement) -> list[Unit]:
    """The units into which a Llama is cut.

    A module of a wrapped class, or under SIZE_BASED_WRAP of enough parameters, is a unit of what no unit inside it has; the root has the
    rest. With FSDP2 the embedding and the tail, [final norm, head] and with tied weights the embedding, are units too. Root and tail stay
    gathered from forward to backward.
    """
    shapes = parameter_shapes(model)
    match placement.auto_wrap_policy:
        case "TRANSFORMER_BASED_WRAP":
            classes = placement.transformer_cls_names_to_wrap or ("LlamaDecoderLayer",)
            wrapped = [name for name in _modules(shapes) if any(re.fullmatch(_MODULES[each], name) for each in classes)]
        case "SIZE_BASED_WRAP":
            wrapped = _units_by_size(shapes, min_num_params=placement.min_num_params)
        case _:
            wrapped = []
    kept = {""}
    tail: set[str] = set()
    if placement.fsdp_version == 2:
        tail = {"model.norm", "model.embed_tokens" if model.tie_word_embeddings else "lm_head"} - set(wrapped)
        kept.add("model.norm")
        if not model.tie_word_embeddings:
            wrapped.append("model.embed_tokens")
    members: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        owners = ["model.norm"] if module in tail else [unit for unit in wrapped if name.startswith(f"{unit}.")]
        members.setdefault(max(owners, key=len, default=""), []).append(shape)
    return [Unit(name, tuple(own), placement.reshard_after_forward and name not in kept) for name, own in members.items()]


def _modules(names: Iterable[str]) -> list[str]:
    """Modules that have parameters of these names, or have modules that do; the innermost first."""
    found = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    return sorted(found, key=lambda module: -module.count("."))


def _units_by_size(shapes: Mapping[str, tuple[int, ...]], *, min_num_params: int) -> list[str]:
    units, left = [], {name: math.prod(shape) for name, shape in shapes.items()}
    for module in _modules(shapes):
        if re.match(r"model\.layers\.\d+", module):
            own = [name for name in left if name.startswith(f"{module}.")]
            if sum(left[name] for name in own) >= min_num_params:
                units.append(module)
                left |= dict.fromkeys(own, 0)
    return units


def step_communication(
    *,
    model: ModelConfig,
    placement: Placement,
    gradient_accumulation_steps: int = 1,
    sharding: ShardingConfig = DEFAULT_SHARDING,
    rank: int = 0,
) -> Communication:
    """What `rank` takes part in over one training step (`train_step`), from the third of a run on.

    m micro batches, c bytes of the compute type, r of reduce_dtype, P parameters, s = dp_shard_size; gradients are reduced n times: m with
    FSDP, once with DDP, or as `gradient_sync` says.
    FSDP, per unit of p elements, each parameter's rows padded to a multiple of s (FSDP1: the unit):
      all-gathers of c p       m, and m more where the unit is resharded after forward, these over reshard_after_forward_size ranks if set;
                               without reshard_after_backward the former are 1
      reduce-scatters of r p   n
      all-reduces of r p / s   n over the replicas, with dp_replicate_size > 1 (FSDP1's NO_SHARD: s = 1, and nothing else)
    DDP: n times 4 P in all-reduces, in buckets of 25 MiB, the first of 1 MiB, and n broadcasts of the rotary buffers.
    Every step: all-reduces of the target tokens and of [loss, left_out, bad]; where gradients are sharded, of their squared norm, and in
    fp16 of whether one overflowed.
    Activation checkpointing computes again inside of what is gathered anyway, and sends nothing.
    """
    world, shards, micro_batches = placement.num_processes, placement.dp_shard_size, gradient_accumulation_steps
    if world == 1:
        return {}
    everyone, first = tuple(range(world)), rank // shards * shards
    shard_ranks, replica_ranks = everyone[first : first + shards], everyone[rank % shards :: shards]
    sharded = placement.distributed_type == "FSDP"
    every_micro_batch = sharding.gradient_sync == "every_micro_batch" or (sharding.gradient_sync is None and sharded)
    syncs = micro_batches if every_micro_batch else 1
    sent: Communication = {}
    _add(sent, "all_reduce", everyone, Traffic(2, 8 + 12))
    if not sharded:
        sizes = [4 * math.prod(shape) for shape in parameter_shapes(model).values()]
        _add(sent, "all_reduce", everyone, Traffic(syncs * _buckets(sizes[::-1]), syncs * sum(sizes)))
        head = model.head_dim or model.hidden_size // model.num_attention_heads
        _add(sent, "broadcast", everyone, Traffic(syncs, syncs * 2 * 4 * (head // 2)))  # inv_freq and original_inv_freq.
        return sent

    flat = placement.fsdp_version == 1
    compute_bytes = 4 if placement.mixed_precision == "no" else 2
    reduce_bytes = 4 if sharding.reduce_dtype == "float32" else 2
    gathers = micro_batches if sharding.reshard_after_backward else 1
    if flat and not placement.reshard_after_forward and not every_micro_batch:
        gathers = 1  # SHARD_GRAD_OP keeps its units while it keeps their gradients.
    smaller = sharding.reshard_after_forward_size or shards
    again = rank // smaller * smaller
    if shards > 1:
        _add(sent, "all_reduce", shard_ranks, Traffic(1, 8))
        if placement.mixed_precision == "fp16":
            _add(sent, "all_reduce", shard_ranks, Traffic(1, 4))
    for unit in fsdp_units(model, placement):
        if flat:
            elements = _flat_elements(unit.shapes, shards=shards, alignment=_FLAT_ALIGNMENT // compute_bytes)
        else:
            elements = sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in unit.shapes)
        whole, reduced = compute_bytes * elements, reduce_bytes * elements
        if shards > 1:
            _add(sent, "all_gather", shard_ranks, Traffic(gathers, gathers * whole))
            _add(sent, "reduce_scatter", shard_ranks, Traffic(syncs, syncs * reduced))
            if unit.resharded:
                _add(sent, "all_gather", everyone[again : again + smaller], Traffic(micro_batches, micro_batches * whole))
        if world > shards:
            _add(sent, "all_reduce", replica_ranks, Traffic(syncs, syncs * reduced // shards))
    return sent


def _flat_elements(shapes: Sequence[tuple[int, ...]], *, shards: int, alignment: int) -> int:
    """Of FSDP1's flat tensor: each parameter begins at a multiple of `alignment`, the whole is one of `shards`."""
    end = 0
    for shape in shapes:
        end = -(-end // alignment) * alignment + math.prod(shape)
    return -(-end // shards) * shards


def _buckets(sizes: Sequence[int]) -> int:
    """DDP's buckets of gradients of these bytes, in the order in which they are ready: about the last parameter first."""
    count, limit, held = 0, _FIRST_BUCKET, 0
    for size in sizes:
        held += size
        if held >= limit:
            count, limit, held = count + 1, _BUCKET, 0
    return count + (held > 0)
