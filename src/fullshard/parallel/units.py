"""What the recipe's `sharding` section asks of layers and FSDP2 units: recompute in backward, gather ahead.

Before a model is wrapped `checkpoint_layers`, after FSDP2 has wrapped it `set_prefetch` and `share_smaller_groups`; the rest of the section
is a word to torch for each micro batch, in `train_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaForCausalLM

from fullshard.recipe.fields import ShardingConfig

KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm"),  # What a linear layer is, without and with a bias.
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
)
"""Operators whose outputs selective checkpointing keeps. Not bmm: attention without a fused kernel would keep all its scores."""


def checkpoint_layers(model: LlamaForCausalLM, *, sharding: ShardingConfig) -> None:
    """Make decoder layers keep what `sharding.activation_checkpointing` says and compute the rest again in backward.

    Before the model is wrapped, or compiled. A layer's forward is replaced, the layer stays: names and classes are those of the plain
    model, and hooks, FSDP's above all, are outside of what is computed again. Without gradients to come torch keeps nothing.

    Moving the inputs to the host: on a CPU, where the tests run it, a copy in the same memory. No test reaches pinned memory.
    """
    kind, every = sharding.activation_checkpointing, sharding.activation_checkpointing_every or 1
    if kind in (None, "none"):
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": bool(model.config.attention_dropout)}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    # The first of every so many: at the last layer's backward, when most is alive, nothing is added by computing it again.
    for layer in model.model.layers[::every]:
        layer.forward = _checkpointed(layer.forward, offload=sharding.activation_checkpointing_offload, options=options)


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(forward: Callable[..., Any], *, offload: bool, options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True) if offload else nullcontext():
            return checkpoint(forward, *args, **kwargs, **options)

    return wrapped


def set_prefetch(model: nn.Module, *, sharding: ShardingConfig) -> None:
    """Have each FSDP2 unit gather the next ones, so many as `sharding` says, before it computes. Null depths stay torch's own.

    The order is that of the modules in the model: what is defined first runs first, and a unit inside another one runs within it.
    """
    if depth := sharding.forward_prefetch:
        units = _units(model.modules())
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
    if depth := sharding.backward_prefetch:
        units = _units(_innermost_first(model))[::-1]
        for index, unit in enumerate(units):
            unit.set_modules_to_backward_prefetch(units[index + 1 : index + 1 + depth])


def share_smaller_groups(model: nn.Module, *, timeout: timedelta) -> None:
    """With `reshard_after_forward_size` torch makes process groups for each unit. Let all use the first one's, with `timeout`.

    The other groups are never used: NCCL makes no communicator, which is what takes memory, for such a group. Nothing happens without them.
    """
    shared: FSDPMeshInfo | None = None
    for unit in _units(model.modules()):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            if group.post_forward_mesh_info in (None, group.mesh_info):  # Whole after forward, or sharded over all.
                continue
            if shared is None:
                shared = group.post_forward_mesh_info
                dist.distributed_c10d._set_pg_timeout(timeout, shared.shard_process_group)
            group.post_forward_mesh_info = shared
            for parameter in group.fsdp_params:
                parameter.post_forward_mesh_info = shared


def _units(modules: Iterator[nn.Module]) -> list[FSDPModule]:
    """Those that own parameters; a unit of several modules, [norm, head], once."""
    units: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and (state := module._get_fsdp_state())._fsdp_param_groups:
            units.setdefault(id(state), module)
    return list(units.values())


def _innermost_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _innermost_first(child)
    yield module
