"""The launcher's command line: which YAML it read, and which of its values a flag replaced."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fullshard.errors import COMMAND_LINE, UserError, shown
from fullshard.placement.file import check_accelerate_yaml, check_keys, refusal
from fullshard.placement.placement import Placement, launch_environment, placement_from_environment, placement_of
from fullshard.placement.rules import FSDP1_RULES, FSDP2_RULES, REFUSED, SECTION_RULES, SWITCHES, TOP_RULES, Rule


def launcher_yaml() -> Path | None:
    """The accelerate YAML of the `accelerate launch` that started this process, read off its command line: the ranks are not told.

    None where there is none, or this process was not started by `accelerate launch`.
    """
    words, folder = _parent()
    return _yaml_of_command(words, folder, os.environ)


@functools.cache
def _parent() -> tuple[list[str], Path]:
    """(command line, working folder) of the process that started this one."""
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        return parent.cmdline(), Path(parent.cwd())
    except psutil.Error:
        return [], Path()


def _flags(words: list[str]) -> dict[str, str | bool] | None:
    """Flags of an `accelerate launch`, in their spelling with underscores -> value, true for a switch; None for another command."""
    whole = ("accelerate-launch", "accelerate.commands.launch")
    starts = [i + 1 for i, word in enumerate(words) if Path(word).name in whole]
    starts += [i + 2 for i, word in enumerate(words[:-1]) if Path(word).name.startswith("accelerate") and words[i + 1] == "launch"]
    if not starts:
        return None
    flags: dict[str, str | bool] = {}
    own = words[starts[0] :]
    for word, following in zip(own, [*own[1:], ""], strict=True):
        if word.endswith(".py") or word in ("-m", "--module"):  # The script: what follows is its own.
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name[2:].replace("-", "_")
            switch = name in SWITCHES or following.startswith("--") or following.endswith(".py")
            flags[name] = value if equals else True if switch else following
    return flags


def _yaml_of_command(words: list[str], folder: Path, env: Mapping[str, str]) -> Path | None:
    if (flags := _flags(words)) is None:
        return None
    if "config_file" in flags:
        return folder / str(flags["config_file"])
    cache = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    default = folder / Path(cache).expanduser() / "accelerate" / "default_config.yaml"
    return next((path for path in (default, default.with_suffix(".json")) if path.is_file()), None)


def _with_flags(checked: Mapping[str, Any], flags: Mapping[str, str | bool]) -> dict[str, Any]:
    """The YAML as the flags of `accelerate launch` change it, checked as a file is: UserError for a flag that would have no effect.

    What the file says of one wrap policy, FSDP version or strategy is not held against a flag that asks for another one.
    """
    kind = checked["distributed_type"]
    for flag, starts in (("multi_gpu", "MULTI_GPU"), ("use_fsdp", "FSDP")):
        if flag in flags and kind != starts:
            raise UserError(f"{COMMAND_LINE}: --{flag}: starts {starts}, and the YAML says {kind}; leave it out, or take another YAML")
    if (steps := flags.get("gradient_accumulation_steps")) is not None:
        raise refusal(COMMAND_LINE, "--gradient_accumulation_steps", steps, REFUSED["gradient_accumulation_steps"])
    tree: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in checked.items()}
    fsdp = tree.get("fsdp_config", {})
    dropped: set[str] = set()
    if "fsdp_auto_wrap_policy" in flags:
        dropped |= {"fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"}
    if "fsdp_sharding_strategy" in flags:
        dropped |= {"fsdp_backward_prefetch", "fsdp_forward_prefetch"}
    if "fsdp_version" in flags:
        dropped |= set(FSDP1_RULES) | set(FSDP2_RULES)
    passed_over = {key: fsdp.pop(key) for key in dropped & set(fsdp)}
    sections: dict[str | None, Mapping[str, Rule]] = {section: rules for section, (rules, _) in SECTION_RULES.items()}
    for section, rules in {**sections, None: TOP_RULES}.items():
        for key in set(rules) & set(flags):
            if section == "parallelism_config" and not (checked.get(section) or "use_parallelism_config" in flags):
                raise UserError(f"{COMMAND_LINE}: --{key}: the launcher ignores it without --use_parallelism_config; add that")
            if section is None and key == "dynamo_backend" and "dynamo_config" in tree:
                continue  # Its own section's.
            value = flags[key]
            if isinstance(value, str) and rules[key] is not str and key != "mixed_precision":
                value = yaml.safe_load(value)
            (tree if section is None else tree.setdefault(section, {}))[key] = value
    tree = check_keys(COMMAND_LINE, tree)
    if passed_over:  # The launcher tells it to the ranks all the same.
        tree["fsdp_config"] = passed_over | tree["fsdp_config"]
    return tree


def check_launch(env: Mapping[str, str] | None = None) -> Placement:
    """Placement of this rank; the YAML that the launcher was given, if any, is checked first. UserError names the file where it can."""
    env = os.environ if env is None else env
    if "ACCELERATE_MIXED_PRECISION" not in env:  # Set by accelerate launch, whatever the YAML.
        fix = "nothing says how to shard; start with `accelerate launch --config_file accelerate_configs/fsdp.yaml ...`"
        raise UserError(f"{COMMAND_LINE}: not started by accelerate launch: {fix}")
    path = launcher_yaml()
    checked = check_accelerate_yaml(path) if path is not None else {}
    if env.get("ACCELERATE_USE_CPU", "").lower() == "true" and checked.get("distributed_type", "NO") != "NO":
        fix = f"starts one process without {checked['distributed_type']}; leave it out: without a GPU the CPU is used"
        raise UserError(f"{COMMAND_LINE}: --cpu: {fix}")
    if path is None:
        return placement_from_environment(env)
    asked = _with_flags(checked, _flags(_parent()[0]) or {})
    placement = placement_from_environment(env)
    for field, value in vars(placement_of(launch_environment(asked, processes=placement.num_processes), source=COMMAND_LINE)).items():
        if value != (made := getattr(placement, field)):
            fix = f"accelerate launch makes {shown(made)} of it; write it into the YAML"
            raise refusal(COMMAND_LINE, field, value, fix)
    return placement
