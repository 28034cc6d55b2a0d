"""Collectives of a step by kind, group and bytes, predicted.

`measure/communication.py` counts the same, and tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fullshard.placement.placement import Placement
from fullshard.plan.shapes import GIB, fsdp_units, parameter_shapes
from fullshard.recipe.batch import gradient_accumulation_steps
from fullshard.recipe.fields import DEFAULT_SHARDING, ModelConfig, Recipe, ShardingConfig

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
Ranks = tuple[int, ...]

# Of DistributedDataParallel: the first bucket is sent when it has so many bytes, each other one at 25 MiB.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20
_FLAT_ALIGNMENT = 16  # Bytes; FSDP1 lets each parameter of a flat tensor begin at a multiple.


@dataclass(frozen=True)
class Traffic:
    """Of one kind over one group."""

    count: int
    bytes: int


Communication = dict[tuple[Kind, Ranks], Traffic]


def sent_bytes(communication: Mapping[tuple[Kind, Ranks], Traffic]) -> int:
    """Bytes that a rank sends under ring algorithms: (n - 1) / n of what is gathered or scattered over n ranks, twice that where it is
    all-reduced; a broadcast once.
    """
    sent = 0.0
    for (kind, ranks), traffic in communication.items():
        share = (len(ranks) - 1) / len(ranks)
        sent += traffic.bytes * {"all_reduce": 2 * share, "broadcast": 1.0}.get(kind, share)
    return round(sent)


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
    fp16 of whether one overflowed (FSDP1: among all ranks, sharded or not).
    Activation checkpointing computes again inside of what is gathered anyway, and sends nothing; but for FSDP1's units inside of layers,
    some of which are gathered once more, which is left out.
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
    add_traffic(sent, "all_reduce", everyone, Traffic(2, 8 + 12))
    if not sharded:
        sizes = [4 * math.prod(shape) for shape in parameter_shapes(model).values()]
        add_traffic(sent, "all_reduce", everyone, Traffic(syncs * _buckets(sizes[::-1]), syncs * sum(sizes)))
        add_traffic(sent, "broadcast", everyone, Traffic(syncs, syncs * 2 * 4 * (model.head_width // 2)))  # inv_freq and original_inv_freq.
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
        add_traffic(sent, "all_reduce", shard_ranks, Traffic(1, 8))
    if placement.mixed_precision == "fp16" and (flat or shards > 1):
        add_traffic(sent, "all_reduce", everyone if flat else shard_ranks, Traffic(1, 4))
    for unit in fsdp_units(model, placement):
        if flat:
            elements = _flat_elements(unit.shapes, shards=shards, alignment=_FLAT_ALIGNMENT // compute_bytes)
        else:
            elements = sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in unit.shapes)
        whole, reduced = compute_bytes * elements, reduce_bytes * elements
        if shards > 1:
            add_traffic(sent, "all_gather", shard_ranks, Traffic(gathers, gathers * whole))
            add_traffic(sent, "reduce_scatter", shard_ranks, Traffic(syncs, syncs * reduced))
            if unit.resharded:
                add_traffic(sent, "all_gather", everyone[again : again + smaller], Traffic(micro_batches, micro_batches * whole))
        if world > shards:
            add_traffic(sent, "all_reduce", replica_ranks, Traffic(syncs, syncs * reduced // shards))
    return sent


def add_traffic(communication: Communication, kind: Kind, ranks: Ranks, traffic: Traffic) -> None:
    before = communication.get((kind, ranks), Traffic(0, 0))
    communication[kind, ranks] = Traffic(before.count + traffic.count, before.bytes + traffic.bytes)


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


def communication_line(recipe: Recipe, placement: Placement) -> str:
    """`step_communication` of a recipe whose batch is resolved, summed up."""
    sent = step_communication(
        model=recipe.model,
        placement=placement,
        gradient_accumulation_steps=gradient_accumulation_steps(recipe.train, world_size=placement.num_processes),
        sharding=recipe.sharding,
    )
    return f"{sent_bytes(sent) / GIB:.3f} GiB sent per rank and step, in {sum(traffic.count for traffic in sent.values()):,} collectives"
