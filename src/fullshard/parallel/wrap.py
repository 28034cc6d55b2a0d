"""A model on the meta device -> the model as the placement shards it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from transformers import LlamaForCausalLM

from fullshard.errors import UserError
from fullshard.model.fsdp1 import free_gathered, mark_flat_pieces
from fullshard.model.initialise import materialise, module_materialiser, restore_rope_buffers
from fullshard.parallel.units import checkpoint_layers, set_prefetch, share_smaller_groups
from fullshard.recipe.fields import DEFAULT_SHARDING, ShardingConfig


def prepare_model(
    accelerator: Accelerator, model: LlamaForCausalLM, *, seed: int, sharding: ShardingConfig = DEFAULT_SHARDING
) -> nn.Module:
    """Wrap a meta model by Accelerate and give each rank its initialised part. The optimizer is built on the result.

    FSDP2 shards on meta and is materialised shard by shard, FSDP1 unit by unit; DDP and a single process hold the whole model and need it
    before wrapping. sharding: what `check_sharding` has found that the placement can honour.
    """
    checkpoint_layers(model, sharding=sharding)
    if sharding.reshard_after_forward_size is not None:
        # Accelerate takes booleans alone, and hands to torch, which takes a number too, what is there.
        accelerator.state.fsdp_plugin.reshard_after_forward = sharding.reshard_after_forward_size
    match accelerator.state.fsdp_plugin.fsdp_version if accelerator.distributed_type == DistributedType.FSDP else None:
        case 2:
            if accelerator.state.fsdp_plugin.auto_wrap_policy is size_based_auto_wrap_policy:
                _wrap_by_size(accelerator, model)
            # Accelerate refuses a model without an optimizer, and re-binds an optimizer's parameters by data_ptr, which is 0 on meta
            # for all: a real optimizer would be left with one parameter. So a placeholder goes in and is dropped.
            placeholder = torch.optim.SGD(model.parameters(), lr=0.0)
            # Units inside a layer: transformers adds their outputs to the residual out of place, which is what torch warns to do.
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
            model, _ = accelerator.prepare(model, placeholder)
            accelerator._optimizers.clear()
            set_prefetch(model, sharding=sharding)
            share_smaller_groups(model, timeout=accelerator.init_handler.timeout)
            # Offloaded shards are made where they stay; no test reaches that, it needs a GPU.
            offloaded = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
            materialise(model, device=torch.device("cpu") if offloaded else accelerator.device, seed=seed)
            if offloaded:
                restore_rope_buffers(model, device=accelerator.device)
            return model
        case 1:
            accelerator.state.fsdp_plugin.param_init_fn = module_materialiser(model, device=accelerator.device, seed=seed)
            with _devices_of_this_machine(accelerator.device):
                wrapped = accelerator.prepare_model(model)
            restore_rope_buffers(wrapped, device=accelerator.device)
            mark_flat_pieces(wrapped)
            return wrapped
        case _:
            materialise(model, device=accelerator.device, seed=seed)
            return accelerator.prepare_model(model)


def _wrap_by_size(accelerator: Accelerator, model: LlamaForCausalLM) -> None:
    """SIZE_BASED_WRAP under FSDP2; Accelerate, which shards what is left over, passes over units that are there.

    Its own policy counts what is inside a unit again for the module around it, up to the list of layers, which has no forward: it fails.
    Here, as in FSDP1, a unit's parameters are those of no unit in it. Embedding and [norm, head] are units anyway.
    """
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    plugin.auto_wrap_policy = None
    units = [unit for layer in model.model.layers for unit in units_by_size(layer, min_num_params=plugin.min_num_params)[0]]
    if not units:
        largest = sum(p.numel() for p in model.model.layers[0].parameters())
        fix = f"no part of a layer has so many, a layer has {largest:,}; lower it, or write fsdp_auto_wrap_policy: NO_WRAP"
        raise UserError(f"fsdp_config.fsdp_min_num_params: {plugin.min_num_params}: {fix}")
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy,
            offload_policy=plugin.cpu_offload,
        )


def units_by_size(module: nn.Module, *, min_num_params: int) -> tuple[list[nn.Module], int]:
    """(modules with that many parameters outside of the units in them, innermost first; parameters in none of them)."""
    below = [units_by_size(child, min_num_params=min_num_params) for child in module.children()]
    units = [unit for inner, _ in below for unit in inner]
    left = sum(rest for _, rest in below) + sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return ([*units, module], 0) if left >= min_num_params else (units, left)


@contextmanager
def _devices_of_this_machine(device: torch.device) -> Iterator[None]:
    """FSDP1's HYBRID_SHARD asks how many devices a machine has, to shard over them. A CPU would be one: here it is the ranks on it."""
    count = torch.cpu.device_count
    if device.type == "cpu":
        torch.cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        yield
    finally:
        torch.cpu.device_count = count


def fsdp_units(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """(name, module) of each module that FSDP2 wrapped, outermost first."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def reshard(model: nn.Module) -> None:
    """A forward without backward leaves the units that are not resharded after forward whole; give their memory back."""
    for _, unit in fsdp_units(model):
        unit.reshard()
    free_gathered(model)


def root_gathered(model: nn.Module) -> AbstractContextManager[None]:
    """Around calls of the unwrapped model's forward, such as generate() makes: FSDP1 gathers the root unit in the wrapper's. Collective."""
    wrapper = getattr(model, "_orig_mod", model)  # torch.compile's, around it.
    if isinstance(wrapper, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(wrapper, recurse=False, writeback=False)
    return nullcontext()
