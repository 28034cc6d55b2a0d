"""The Accelerator: one function that returns it, and the checks that it is what the accelerate YAML asked for.

Without a GPU, `accelerate launch` starts the processes but each believes it is alone, and FSDP is not engaged. Here the same YAML gives
FSDP over gloo; on a GPU nothing is changed. Whatever the device, what was asked is checked and a difference stops the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from fullshard.errors import UserError
from fullshard.measure.memory import count_cpu_memory
from fullshard.parallel.cpu_products import widen_products
from fullshard.parallel.precision import COMPUTE_DTYPE
from fullshard.placement.placement import Placement
from fullshard.process.watchdog import record_nccl
from fullshard.recipe.fields import ShardingConfig

RENDEZVOUS = "fullshard://"
"""init_method of the process group."""


def build_accelerator(
    *,
    placement: Placement,
    sharding: ShardingConfig,
    trackers: list[str],
    output_dir: str | None = None,
    timeout_seconds: float = 0.0,
) -> Accelerator:
    """The Accelerator of this run, checked against the placement. Raises UserError when they differ.

    Trackers that keep files of their own put them below output_dir. timeout_seconds: the watchdog's, which a collective outlasts: it has
    the stacks to show. Never less than torch's own.

    CUDA and NCCL: no test here reaches that branch; it is Accelerate's own path, with NCCL's flight recorder on.
    """
    timeout = max(default_pg_timeout, timedelta(seconds=timeout_seconds)) + timedelta(minutes=1)
    if not torch.cuda.is_available():
        _engage_on_cpu(placement, timeout=timeout)
    elif output_dir is not None:
        record_nccl(output_dir)
    reduce_dtype = getattr(torch, sharding.reduce_dtype)
    fsdp_plugin = None
    if placement.distributed_type == "FSDP":
        # Accelerate's own policy reduces gradients in the compute type and rounds the output to it.
        dtypes = {"param_dtype": COMPUTE_DTYPE[placement.mixed_precision], "reduce_dtype": reduce_dtype}
        # Buffers, the rotary frequencies, stay fp32 under both.
        policy = MixedPrecision(**dtypes) if placement.fsdp_version == 1 else MixedPrecisionPolicy(**dtypes, output_dtype=None)
        fsdp_plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accelerator = Accelerator(
        fsdp_plugin=fsdp_plugin,
        log_with=trackers or None,
        project_dir=output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(init_method=RENDEZVOUS, timeout=timeout)],
    )
    if placement.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        _scale_gradients_on_cpu(accelerator)
    _check(accelerator, placement)
    if (mesh := accelerator.torch_device_mesh) is not None:  # Its groups are made with torch's own timeout, 10 minutes under NCCL.
        for name in mesh.mesh_dim_names:
            dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(name))
    return accelerator


def _rendezvous(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's env://, with a store of its own for each start of the ranks.

    With --max_restarts the launcher's static rendezvous, which is accelerate's default, keeps one store, and torch 2.13 keeps the starts in
    it no longer apart (pytorch #135712): a rank that comes first would take the address that its peer had before, and fail or wait for it.
    One launcher counts its starts; those of several machines may count differently, so there it stays as it is.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    yield store, rank, world_size


register_rendezvous_handler(RENDEZVOUS.removesuffix("://"), _rendezvous)


def _engage_on_cpu(placement: Placement, *, timeout: timedelta) -> None:
    """Make Accelerate see a gloo process group where it would see none, and let FSDP run on it.

    FSDP is only considered for the MULTI_GPU type; DDP on the other hand refuses device ids on the CPU and needs MULTI_CPU.
    The launcher gives each process one thread; they share all cores here. Products in a type that this CPU is slow at are widened.
    """
    if placement.offload_params:
        raise UserError("fsdp_config.fsdp_offload_params: true: needs a GPU to offload from; set it to false")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    widen_products(COMPUTE_DTYPE[placement.mixed_precision])
    count_cpu_memory()  # Before the model exists: what is older is not counted.
    state = PartialState(cpu=True, init_method=RENDEZVOUS, timeout=timeout)
    if placement.distributed_type == "FSDP" and state.distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        PartialState._shared_state["device"] = torch.device("cpu")


def _scale_gradients_on_cpu(accelerator: Accelerator) -> None:
    """Accelerate's gradient scaler and autocast of fp16, which it leaves out on a CPU: the classes are those that it takes on a GPU."""
    accelerator.native_amp = True
    flat = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    # None, the group that trains: the default was that group when torch was imported.
    accelerator.scaler = ShardedGradScaler("cpu", process_group=None) if flat else torch.amp.GradScaler("cpu")


def _check(accelerator: Accelerator, placement: Placement) -> None:
    """Stop unless the Accelerator is what was asked for. Silence here is N unsharded runs that look like one (PUBLIC_REPORTS L01)."""
    engaged = "MULTI_GPU" if accelerator.distributed_type == DistributedType.MULTI_CPU else accelerator.distributed_type.value
    found: list[tuple[str, object, object]] = [
        ("num_processes", placement.num_processes, accelerator.num_processes),
        ("distributed_type", placement.distributed_type, engaged),
        ("mixed_precision", placement.mixed_precision, accelerator.mixed_precision),
        ("gradient_accumulation_steps", 1, accelerator.gradient_accumulation_steps),
    ]
    if placement.distributed_type == "FSDP" and accelerator.distributed_type == DistributedType.FSDP:
        plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {}
        found += [("fsdp_version", placement.fsdp_version, plugin.fsdp_version)]
        if placement.fsdp_version == 1:
            found += [
                ("sharding_strategy", placement.sharding_strategy, plugin.sharding_strategy.name),
                ("use_orig_params", True, plugin.use_orig_params),
            ]
        else:
            found += [
                ("dp_replicate_size", placement.dp_replicate_size, sizes.get("dp_replicate", 1)),
                ("dp_shard_size", placement.dp_shard_size, sizes.get("dp_shard", accelerator.num_processes if mesh is None else 1)),
            ]
    for key, asked, got in found:
        if asked != got:
            fix = f"asked for {asked}, got {got}; start with `accelerate launch --config_file ...`"
            raise UserError(f"accelerate config: {key}: {fix}")
    if placement.mixed_precision == "fp16" and accelerator.scaler is None:
        raise UserError("accelerate config: mixed_precision: fp16: no gradient scaler on this device, small gradients vanish; use bf16")
