"""`Placement`: what an accelerate YAML means, read from the file or from the environment that the launcher made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullshard.errors import COMMAND_LINE, UserError
from fullshard.placement.file import check_accelerate_yaml, check_keys, refusal
from fullshard.placement.rules import BOOLEAN, DYNAMO_RULES, FSDP1_RULES, META, PARALLELISM_RULES, REFUSED_VALUES, TOP_RULES, WRAPPABLE


@dataclass(frozen=True)
class Placement:
    """Where a run is: what the launcher tells the ranks. Fields in Accelerate's spelling; those of FSDP hold their defaults without it."""

    distributed_type: Literal["FSDP", "MULTI_GPU", "NO"] = "NO"
    """MULTI_GPU is DDP, on GPUs or gloo; NO is one process."""
    num_processes: int = 1
    dp_replicate_size: int = 1
    """Ranks that hold copies of the same shard."""
    dp_shard_size: int = 1
    """Ranks over which a copy is sharded."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Compute type; no is fp32."""
    fsdp_version: int = 2
    reshard_after_forward: bool = True
    """FSDP1: what sharding_strategy means."""
    sharding_strategy: str = "FULL_SHARD"
    """FSDP1 only, as the next two."""
    backward_prefetch: str = "NO_PREFETCH"
    forward_prefetch: bool = False
    auto_wrap_policy: str = "NO_WRAP"
    transformer_cls_names_to_wrap: tuple[str, ...] = ()
    """Classes that become FSDP units; () is the model's own choice (`_no_split_modules`)."""
    min_num_params: int = 10**8
    """Parameters from which a module becomes a unit (SIZE_BASED_WRAP)."""
    state_dict_type: str = "SHARDED_STATE_DICT"
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    offload_params: bool = False
    dynamo_backend: str = "NO"
    dynamo_regional: bool = False
    """Compile each decoder layer rather than the whole model."""


def placement_from_yaml(path: str | Path, *, num_processes: int | None = None) -> Placement:
    """What ranks launched with this YAML (and `--num_processes`) would be told. UserError for mistakes in it."""
    return placement_of(environment_from_yaml(path, num_processes=num_processes), source=str(path))


def placement_from_environment(env: Mapping[str, str] | None = None) -> Placement:
    """What the launcher told this rank (os.environ): its YAML with its command-line flags on top. UserError for what is not supported."""
    return placement_of(os.environ if env is None else env, source="accelerate launch")


def environment_from_yaml(path: str | Path, *, num_processes: int | None = None) -> dict[str, str]:
    """The environment in which `accelerate launch --config_file path` starts the ranks, as far as placement goes (and its sizes)."""
    checked = check_accelerate_yaml(path)
    if num_processes is not None:
        checked = check_keys(COMMAND_LINE, checked | {"num_processes": num_processes})
    processes = checked.get("num_processes") or (1 if checked["distributed_type"] == "NO" else None)
    if processes is None:
        raise UserError(f"{path}: num_processes: missing: write it, or pass --num_processes")
    return launch_environment(checked, processes=processes)


def launch_environment(checked: Mapping[str, Any], *, processes: int) -> dict[str, str]:
    kind, machines = checked["distributed_type"], checked.get("num_machines", 1)
    dynamo = checked.get("dynamo_config", {})
    env = {
        "ACCELERATE_MIXED_PRECISION": checked.get("mixed_precision", "no"),
        "ACCELERATE_DYNAMO_BACKEND": dynamo.get("dynamo_backend", checked.get("dynamo_backend", "NO")).upper(),
        "ACCELERATE_DYNAMO_MODE": dynamo.get("dynamo_mode", "default"),
        **{f"ACCELERATE_{key.upper()}": str(dynamo.get(key, False)) for key, rule in DYNAMO_RULES.items() if rule is BOOLEAN},
    }
    if kind != "NO":
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes // machines)}
    if kind == "FSDP":
        # Every other FSDP key goes to the ranks as FSDP_<KEY>, lower-cased where it is a boolean.
        names = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        defaults: dict[str, Any] = {"fsdp_min_num_params": 10**8, "fsdp_reshard_after_forward": True} | dict.fromkeys(
            ("fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"), False
        )
        if checked["fsdp_config"]["fsdp_version"] in (1, "1"):
            defaults |= {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_forward_prefetch": False, "fsdp_use_orig_params": True}
        env["ACCELERATE_USE_FSDP"] = "true"
        for key, value in (defaults | checked["fsdp_config"]).items():
            env[names.get(key, key.upper())] = str(value).lower() if isinstance(value, bool) else str(value)
    if checked.get("parallelism_config"):
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        env |= {key.upper(): str(checked["parallelism_config"].get(key, 1)) for key in PARALLELISM_RULES}
    return env


def placement_of(env: Mapping[str, str], *, source: str) -> Placement:
    """From what the launcher tells its ranks. `source` is the file or the command that a message names."""
    if steps := env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        fix = "derived from the recipe's train.global_batch_size; unset it"
        raise UserError(f"environment: ACCELERATE_GRADIENT_ACCUMULATION_STEPS: {steps}: {fix}")
    processes = int(env.get("WORLD_SIZE", "1"))
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in TOP_RULES["mixed_precision"]:  # type: ignore[operator]
        raise refusal(source, "mixed_precision", precision, "must be one of no, bf16, fp16")
    common: dict[str, Any] = {
        "num_processes": processes,
        "mixed_precision": precision,
        "dynamo_backend": env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper(),
        "dynamo_regional": _is_on(env, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    }
    if not _is_on(env, "ACCELERATE_USE_FSDP"):
        return Placement(distributed_type="MULTI_GPU" if "WORLD_SIZE" in env else "NO", dp_replicate_size=processes, **common)
    if (version := env.get("FSDP_VERSION", "1")) not in ("1", "2"):
        raise refusal(source, "fsdp_version", version, "must be 1 or 2")
    if _is_on(env, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise refusal(source, "fsdp_cpu_ram_efficient_loading", True, META)
    policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if policy == "SIZE_BASED_WRAP" and version == "1":
        raise refusal(source, "fsdp_auto_wrap_policy", policy, "not supported with FSDP1; write fsdp_version: 2")
    if policy != "TRANSFORMER_BASED_WRAP" and _is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"):
        fix = f"goes around the classes that are wrapped, and {policy} names none; use the recipe's sharding.activation_checkpointing"
        raise refusal(source, "fsdp_activation_checkpointing", True, fix)
    if version == "1":
        of_version = _fsdp1(env, source=source, processes=processes, compiles_layers=common["dynamo_regional"])
    else:
        of_version = {"reshard_after_forward": _is_on(env, "FSDP_RESHARD_AFTER_FORWARD", "true"), "dp_shard_size": processes}
    if _is_on(env, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        of_version |= _mesh(env, source=source, processes=processes)
    return Placement(
        distributed_type="FSDP",
        auto_wrap_policy=policy,
        transformer_cls_names_to_wrap=_wrapped_classes(env, source=source),
        min_num_params=int(env.get("FSDP_MIN_NUM_PARAMS", "0")),
        state_dict_type=env.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT" if version == "1" else "SHARDED_STATE_DICT").upper(),
        activation_checkpointing=_is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"),
        activation_checkpointing_offload=_is_on(env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        offload_params=_is_on(env, "FSDP_OFFLOAD_PARAMS"),
        **common,
        **of_version,
    )


def _is_on(env: Mapping[str, str], key: str, default: str = "false") -> bool:
    """As Accelerate reads a switch."""
    return env.get(key, default).lower() in ("true", "1", "yes", "y", "t", "on")


def _fsdp1(env: Mapping[str, str], *, source: str, processes: int, compiles_layers: bool) -> dict[str, Any]:
    """The fields of Placement that FSDP1 decides. Raises UserError for what it cannot do."""
    strategy = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    strategies = ", ".join(FSDP1_RULES["fsdp_sharding_strategy"])  # type: ignore[arg-type]
    told: dict[str, str | bool] = {
        "fsdp_sharding_strategy": strategy,
        "fsdp_use_orig_params": _is_on(env, "FSDP_USE_ORIG_PARAMS"),
        "fsdp_sync_module_states": _is_on(env, "FSDP_SYNC_MODULE_STATES"),
    }
    for key, value in told.items():
        if value not in FSDP1_RULES[key]:  # type: ignore[operator]
            raise refusal(source, key, value, REFUSED_VALUES.get((key, value), f"must be one of {strategies}"))
    if compiles_layers:
        fix = "torch cannot compile layer by layer under FSDP1; write false, or fsdp_version: 2"
        raise refusal(source, "dynamo_config.dynamo_use_regional_compilation", True, fix)
    for key in ("FSDP_OFFLOAD_PARAMS", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        if _is_on(env, key):
            raise refusal(source, key.removeprefix("ACCELERATE_").lower(), True, "not supported with FSDP1; write fsdp_version: 2")
    # FSDP1 under Accelerate has a copy per machine.
    local = processes if strategy != "HYBRID_SHARD" else int(env.get("LOCAL_WORLD_SIZE", processes))
    replicate, shard = (processes, 1) if strategy == "NO_SHARD" else (processes // local, local)
    if strategy == "HYBRID_SHARD" and (replicate == 1 or shard == 1):
        fix = f"a copy per machine, sharded inside it: nothing to do with machines x ranks = {replicate} x {shard}; write "
        fix += "FULL_SHARD" if replicate == 1 else "NO_SHARD"
        raise refusal(source, "fsdp_sharding_strategy", strategy, fix)
    return {
        "fsdp_version": 1,
        "sharding_strategy": strategy,
        "backward_prefetch": env.get("FSDP_BACKWARD_PREFETCH", "NO_PREFETCH").upper(),
        "forward_prefetch": _is_on(env, "FSDP_FORWARD_PREFETCH"),
        "reshard_after_forward": strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "dp_replicate_size": replicate,
        "dp_shard_size": shard,
    }


def _mesh(env: Mapping[str, str], *, source: str, processes: int) -> dict[str, Any]:
    """The sizes that a parallelism_config gives. Raises UserError where they do not make up the number of processes."""
    replicate, shard = (int(env.get(f"PARALLELISM_CONFIG_DP_{axis}_SIZE", "1")) for axis in ("REPLICATE", "SHARD"))
    for axis in ("TP", "CP", "SP"):
        if (size := env.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")) != "1":
            raise refusal(source, f"parallelism_config_{axis.lower()}_size", size, "must be 1: not supported")
    if replicate * shard != processes:
        fix = f"dp_replicate_size x dp_shard_size, {replicate} x {shard} = {replicate * shard}, must equal num_processes, {processes}"
        raise refusal(source, "parallelism_config.parallelism_config_dp_shard_size", shard, fix)
    if shard == 1 and processes > 1:
        fix = "nothing would be sharded; raise it, or use distributed_type MULTI_GPU"
        raise refusal(source, "parallelism_config.parallelism_config_dp_shard_size", shard, fix)
    return {"dp_replicate_size": replicate, "dp_shard_size": shard}


def _wrapped_classes(env: Mapping[str, str], *, source: str) -> tuple[str, ...]:
    classes = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    names = tuple(classes.split(",")) if classes else ()
    for name in names:
        if name not in WRAPPABLE:
            fix = f"not in the model, or no unit of it; choose from {', '.join(WRAPPABLE)}"
            raise refusal(source, "fsdp_config.fsdp_transformer_layer_cls_to_wrap", name, fix)
    return names
