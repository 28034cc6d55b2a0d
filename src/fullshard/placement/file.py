"""An accelerate YAML, checked key by key: one that the launcher would ignore or misread is an error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import UserError, shown
from fullshard.placement.rules import (
    ANY_SIZE,
    BOOLEAN,
    COMMAND_LINE_ONLY,
    DYNAMO_BACKENDS,
    FSDP1_RULES,
    FSDP2_RULES,
    META,
    REFUSED,
    REFUSED_VALUES,
    SECTION_RULES,
    SUCCESSORS,
    TOP_RULES,
    UNSUPPORTED,
    Rule,
)
from fullshard.recipe.strict_yaml import load_yaml


def check_accelerate_yaml(path: str | Path) -> dict[str, Any]:
    """The YAML with section keys in their long spelling (fsdp_config.version -> fsdp_config.fsdp_version).

    Raises UserError for the first mistake.
    """
    return check_keys(path, load_yaml(path))


def check_keys(path: str | Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in tree.items():
        if key in SECTION_RULES:
            checked[key] = _check_section(path, key, value)
        elif key in UNSUPPORTED:
            if value and value != "no":
                raise refusal(path, key, value, "not supported; remove it")
        elif key in COMMAND_LINE_ONLY:
            if value is not None and value != COMMAND_LINE_ONLY[key]:
                raise refusal(path, key, value, f"the launcher ignores it in a file; pass --{key} to accelerate launch")
        elif key not in TOP_RULES:
            raise _unknown_key(path, "", key, (*TOP_RULES, *SECTION_RULES, *COMMAND_LINE_ONLY))
        elif value is not None or key in ("distributed_type", "num_processes", "dynamo_backend"):
            _check_value(path, key, value, TOP_RULES[key])
            checked[key] = value
    _check_together(path, checked)
    return checked


def _check_section(path: str | Path, section: str, values: Any) -> dict[str, Any]:
    rules, prefix = SECTION_RULES[section]
    if not isinstance(values, dict | None):
        raise refusal(path, section, values, "must be a section with `key: value` lines")
    checked: dict[str, Any] = {}
    other = _of_other_version(values or {}) if section == "fsdp_config" else {}
    for key, value in (values or {}).items():
        name = key if str(key).startswith(prefix) else f"{prefix}{key}"
        if section == "parallelism_config" and name in REFUSED and value in (1, "torch", "deepspeed"):
            checked[name] = value  # The defaults, spelled out.
            continue
        if name in REFUSED:
            raise refusal(path, f"{section}.{key}", value, REFUSED[name])
        if name not in rules:
            raise _unknown_key(path, section, key, tuple(rules), prefix)
        if name in checked:
            raise refusal(path, f"{section}.{key}", value, f"written twice, as {key} and as {name}" if key != name else "written twice")
        if name in other:
            raise refusal(path, f"{section}.{key}", value, other[name])
        if isinstance(value, str | bool) and (name, value) in REFUSED_VALUES:
            raise refusal(path, f"{section}.{key}", value, REFUSED_VALUES[name, value])
        if name == "fsdp_cpu_ram_efficient_loading" and value is not False:
            raise refusal(path, f"{section}.{key}", value, META)
        if name == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, str) and (" " in value or not value):
            raise refusal(path, f"{section}.{key}", value, "must be class names with commas and no spaces between them")
        _check_value(path, f"{section}.{key}", value, rules[name])
        checked[name] = value
    return checked


def _of_other_version(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys that have no effect with the FSDP version that these values ask for -> what to do about it."""
    version = values.get("fsdp_version", values.get("version"))
    if version in (1, "1"):
        return {key: f"FSDP2 only, no effect with fsdp_version 1; remove it{SUCCESSORS.get(key, '')}" for key in FSDP2_RULES}
    return {key: f"FSDP1 only, no effect with fsdp_version 2; remove it{SUCCESSORS.get(key, '')}" for key in FSDP1_RULES}


def _check_value(path: str | Path, key: str, value: Any, rule: Rule) -> None:
    if isinstance(rule, range):
        if type(value) is not int or value not in rule:
            bounds = f">= {rule.start}" if rule.stop == ANY_SIZE else f"from {rule.start} to {rule.stop - 1}"
            raise refusal(path, key, value, f"must be an integer {bounds}")
    elif isinstance(rule, tuple):
        # By type too: 0 == False, and a quoted 'false' is text, which is true wherever the launcher does not parse it.
        if any(value == choice and type(value) is type(choice) for choice in rule):
            return
        choices = ", ".join(dict.fromkeys(shown(choice).upper() if rule is DYNAMO_BACKENDS else shown(choice) for choice in rule))
        no = next((choice for choice in rule if str(choice).lower() == "no"), None)
        if value is False and no is not None:
            raise refusal(path, key, value, f"an unquoted no is a boolean in YAML; write {key.rpartition('.')[2]}: '{no}'")
        quotes = " without quotes" if rule == BOOLEAN and isinstance(value, str) else ""
        raise refusal(path, key, value, f"must be {choices}{quotes}" if len(rule) <= 2 else f"must be one of {choices}")
    elif not isinstance(value, str):
        raise refusal(path, key, value, "must be text; put quotes around it" if not isinstance(value, list | dict) else "must be text")


def _check_together(path: str | Path, checked: Mapping[str, Any]) -> None:
    kind, fsdp, dynamo = checked.get("distributed_type"), checked.get("fsdp_config", {}), checked.get("dynamo_config", {})
    if kind is None:
        raise UserError(f"{path}: distributed_type: missing: must be one of FSDP, MULTI_GPU, NO")
    if kind == "NO" and checked.get("num_processes", 1) > 1:
        raise refusal(path, "num_processes", checked["num_processes"], "distributed_type NO starts one process; write FSDP or MULTI_GPU")
    if checked.get("use_cpu") and kind != "NO":
        raise refusal(path, "use_cpu", True, f"the launcher ignores it with {kind}; remove it (without a GPU the CPU is used)")
    for section in ("fsdp_config", "parallelism_config"):
        if checked.get(section) and kind != "FSDP":
            raise refusal(path, "distributed_type", kind, f"{section} has an effect with FSDP only; remove it or write FSDP")
    if kind == "FSDP":
        for key, default in (("fsdp_version", "1; write 2"), ("fsdp_cpu_ram_efficient_loading", "true; write false")):
            if key not in fsdp:
                raise UserError(f"{path}: fsdp_config.{key}: missing: the launcher's default is {default}")
        if fsdp["fsdp_version"] in (1, "1"):
            key = "fsdp_sync_module_states"
            if key not in fsdp:
                raise UserError(f"{path}: fsdp_config.{key}: missing: the launcher's default is true; write false")
            if checked.get("parallelism_config"):
                raise UserError(f"{path}: parallelism_config: needs fsdp_version: 2")
        if fsdp.get("fsdp_sharding_strategy") == "NO_SHARD":
            for key, idle in (("fsdp_forward_prefetch", False), ("fsdp_backward_prefetch", "NO_PREFETCH")):
                if (value := fsdp.get(key, idle)) != idle:
                    raise refusal(path, f"fsdp_config.{key}", value, f"not used by NO_SHARD, which gathers nothing; write {shown(idle)}")
        policy = fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")
        for key, user in (("fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"), ("fsdp_min_num_params", "SIZE_BASED_WRAP")):
            if key in fsdp and policy != user:
                raise refusal(path, f"fsdp_config.{key}", fsdp[key], f"not used by fsdp_auto_wrap_policy {policy}, only by {user}")
        if fsdp.get("fsdp_activation_checkpointing_offload") and not fsdp.get("fsdp_activation_checkpointing"):
            key = "fsdp_config.fsdp_activation_checkpointing_offload"
            raise refusal(path, key, True, "needs fsdp_activation_checkpointing: true")
    machines = checked.get("num_machines", 1)
    if checked.get("num_processes", machines) % machines:
        raise refusal(path, "num_processes", checked["num_processes"], f"must be a multiple of num_machines, {machines}")
    if dynamo and "dynamo_backend" not in dynamo:
        raise UserError(f"{path}: dynamo_config.dynamo_backend: missing: without it nothing is compiled; write INDUCTOR")
    if dynamo and "dynamo_backend" in checked:
        raise refusal(path, "dynamo_backend", checked["dynamo_backend"], "replaces dynamo_config, which is then lost; write it inside")


def refusal(source: str | Path, key: str, value: Any, fix: str) -> UserError:
    return UserError(f"{source}: {key}: {shown(value)}: {fix}")


def _unknown_key(path: str | Path, section: str, key: Any, known: tuple[str, ...], prefix: str = "") -> UserError:
    if key in REFUSED:
        return UserError(f"{path}: {key}: {REFUSED[key]}")
    candidates = {name.removeprefix(prefix): name for name in known} | {name: name for name in known}
    # parallelism_config's prefix may not be left out: point from the short name to the long one.
    candidates |= {name.removeprefix("parallelism_config_"): name for name in known}
    near = difflib.get_close_matches(str(key), candidates, 1)
    fix = f"did you mean {candidates[near[0]]}?" if near else f"known: {', '.join(known)}"
    return UserError(f"{path}: {section + '.' if section else ''}{key}: unknown key; {fix}")
