"""The Accelerator: one function that returns it, and the checks that it is what the accelerate YAML asked for.

Without a GPU, `accelerate launch` starts the processes but each believes it is alone, and FSDP is not engaged. Here the same YAML gives
FSDP over gloo; on a GPU nothing is changed. Whatever the device, what was asked is checked and a difference stops the run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from transformers import LlamaForCausalLM

from fullshard.config import DEFAULT_SHARDING, ShardingConfig
from fullshard.cpu_products import widen_products
from fullshard.errors import UserError, first_line
from fullshard.fsdp1 import flat_units, free_gathered, mark_flat_pieces
from fullshard.memory import count_cpu_memory
from fullshard.model import canonical_name, canonical_parameters, materialise, module_materialiser, restore_rope_buffers
from fullshard.sharding import Placement
from fullshard.units import checkpoint_layers, set_prefetch, share_smaller_groups
from fullshard.watchdog import record_nccl

# By Accelerate's `mixed_precision`.
COMPUTE_DTYPE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

RENDEZVOUS = "fullshard://"
"""init_method of the process group."""

Result = TypeVar("Result")


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


def check_precision(accelerator: Accelerator, model: nn.Module, *, sharding: ShardingConfig) -> dict[str, str]:
    """Assert the precision contract on the prepared model and return it: master weights, compute, gradient reduction, loss.

    Raises RuntimeError when the model is not what was promised: that would be a fault of this code or of an upgrade, not of the user.
    """
    contract = {
        "parameters": "float32",
        "compute": str(COMPUTE_DTYPE[accelerator.mixed_precision]).removeprefix("torch."),
        "gradient_reduction": sharding.reduce_dtype,
        "loss": "float32",
    }
    for name, parameter in canonical_parameters(model):
        if parameter.dtype != torch.float32:
            raise RuntimeError(f"{name} is {parameter.dtype}, master weights must be float32")
    for name, policy in precision_policies(model):
        kept = {
            "compute": policy.param_dtype or torch.float32,
            "gradient_reduction": policy.reduce_dtype or policy.param_dtype or torch.float32,
        }
        for key, dtype in kept.items():
            if f"torch.{contract[key]}" != str(dtype):
                raise RuntimeError(f"unit {name or 'root'}: {key} is {dtype}, the contract says {contract[key]}")
    if accelerator.distributed_type == DistributedType.FSDP and next(precision_policies(model), None) is None:
        raise RuntimeError("FSDP was asked for and no module was wrapped")
    # Without FSDP2 there is autocast, of which without FSDP the compute type is; Accelerate keeps the forward that it has wrapped in it.
    if not accelerator.is_fsdp2 and ("_original_forward" in vars(accelerator.unwrap_model(model, keep_torch_compile=False))) != (
        contract["compute"] != "float32"
    ):
        raise RuntimeError(f"the contract says compute in {contract['compute']}, and the forward is not set up for it")
    return contract


def precision_policies(model: nn.Module) -> Iterator[tuple[str, MixedPrecision | MixedPrecisionPolicy]]:
    """(name, policy) of every FSDP unit that owns parameters; a unit of several modules, [final norm, head], once."""
    seen = set()
    for name, module in fsdp_units(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield name, group.mp_policy
    for name, unit, _ in flat_units(model):
        yield canonical_name(f"{name}.").removesuffix("."), unit.mixed_precision


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


def on_main(accelerator: Accelerator, function: Callable[[], Result], *, group: dist.ProcessGroup | None = None) -> Result:
    """What `function` returns on the main process, on every rank of `group` (None: the one that trains). Collective; the result is pickled.

    A UserError there is raised here on every rank; any other exception too, as a RuntimeError where it did not happen. Nobody is left
    waiting. For what all ranks must see alike (a listing, a folder that is being renamed), and for what takes less than the process
    group's timeout.
    """
    attempt = _Attempt.of(function) if accelerator.is_main_process else None
    said: list[Any] = [attempt]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(said, src=0, group=group)
    return (attempt or said[0]).result_of(rank=0)


def from_all(accelerator: Accelerator, function: Callable[[], Result], *, group: dist.ProcessGroup | None = None) -> list[Result]:
    """What `function` returns on each rank, by rank, on every rank. Collective; pickled. Exceptions are raised as by `on_main`."""
    attempt = _Attempt.of(function)
    said: list[Any] = [attempt]
    if accelerator.num_processes > 1:
        said = [None] * accelerator.num_processes
        dist.all_gather_object(said, attempt, group=group)
        said[accelerator.process_index] = attempt
    attempt.result_of(rank=accelerator.process_index)  # A rank's own exception first: it has the traceback.
    return [other.result_of(rank=rank) for rank, other in enumerate(said)]


@dataclass(frozen=True)
class _Attempt(Generic[Result]):
    """What came of a call, as other ranks hear it."""

    result: Result | None = None
    message: str | None = None
    """One line, where it raised."""
    mistake: type[UserError] | None = None
    """Its class, where that is a UserError's."""
    error: Exception | None = None
    """Here only."""

    @classmethod
    def of(cls, function: Callable[[], Result]) -> _Attempt[Result]:
        try:
            return cls(result=function())
        except UserError as error:
            return cls(message=str(error), mistake=type(error), error=error)
        except Exception as error:
            return cls(message=first_line(error), error=error)

    def result_of(self, *, rank: int) -> Result:
        """Raises what `rank` has raised."""
        if self.error is not None:
            raise self.error
        if self.message is not None:
            raise self.mistake(self.message) if self.mistake else RuntimeError(f"rank {rank}: {self.message}")
        return self.result  # type: ignore[return-value]  # None only where the function returned it.

    def __getstate__(self) -> dict[str, Any]:
        return {"result": self.result, "message": self.message, "mistake": self.mistake, "error": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def dump_collectives(accelerator: Accelerator, folder: Path) -> None:
    """Write what the flight recorder has of this rank's last collectives, torch's pickle for its `torchfrtrace`. No test reaches NCCL's."""
    recorder: Any = torch._C._distributed_c10d
    trace = recorder._dump_nccl_trace() if accelerator.device.type == "cuda" else recorder._dump_fr_trace()
    (folder / f"collectives_rank_{accelerator.process_index}").write_bytes(trace)


def host_group(accelerator: Accelerator, *, longest_wait_s: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for `agree`, whatever the device; None for a single process. Collective; make it once.

    longest_wait_s: for which ranks may have to wait there for one another, beside torch's own timeout.
    """
    timeout = default_pg_timeout + timedelta(seconds=longest_wait_s)
    return dist.new_group(backend="gloo", timeout=timeout) if accelerator.num_processes > 1 else None


@dataclass(frozen=True)
class Agreed:
    """What makes all ranks end the step together."""

    failure: str | None = None
    """Of the first rank that has one."""
    stop: int = 0
    """The largest of the ranks' codes; 0: nobody has to stop."""
    save_failed: bool = False
    """A rank has seen that the last save did not succeed."""


def agree(group: dist.ProcessGroup | None, *, failure: str | None, stop: int = 0, save_failed: bool = False) -> Agreed:
    """What any rank has to say, the same on every rank. Collective, once per optimizer step.

    Ranks meet on the host: nothing waits for a GPU, and a rank that is slow to read keeps the others here and not in a collective of the
    device, whose timeout is shorter. What is agreed on is one int64 vector under MAX.
    Two gloo ranks on a busy machine with 2 cores: 250 to 310 us a call where nothing failed (median of 2,000).
    """
    if group is None:
        return Agreed(failure, stop, save_failed)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    word = torch.tensor([0 if failure is None else world_size - rank, stop, save_failed])  # The largest is the first rank's.
    dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
    failed, stop, save_failed = word.tolist()
    said: list[str | None] = [failure]
    if failed:
        dist.broadcast_object_list(said, src=world_size - failed, group=group)
    return Agreed(said[0] if failed else None, stop, bool(save_failed))
