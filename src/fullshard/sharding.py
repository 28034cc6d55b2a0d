"""What an accelerate YAML means, read strictly: a key that the launcher would ignore or misread is an error.

Layer 0: imports neither torch nor accelerate. tests/test_sharding.py holds the keys and choices below against the installed accelerate.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fullshard.config import Recipe, divisors, mistake
from fullshard.errors import COMMAND_LINE, UserError, shown
from fullshard.parsing import load_yaml

# A rule says what a key may hold: a tuple of choices, a range of integers, or text.
Rule = tuple[Any, ...] | range | type[str]
BOOLEAN = (True, False)
ANY_SIZE = 2**31
_BACKENDS = (
    *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT", "TENSORRT"),
    *("AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON"),
)
DYNAMO_BACKENDS = (*_BACKENDS, *(name.lower() for name in _BACKENDS))
TOP_RULES: dict[str, Rule] = {
    "distributed_type": ("FSDP", "MULTI_GPU", "NO"),
    "mixed_precision": ("no", "bf16", "fp16"),
    "num_processes": range(1, ANY_SIZE),
    "num_machines": range(1, ANY_SIZE),
    "machine_rank": range(ANY_SIZE),
    "main_process_ip": str,
    "main_process_port": range(2**16),
    "gpu_ids": str,
    "use_cpu": BOOLEAN,
    "debug": BOOLEAN,
    "dynamo_backend": DYNAMO_BACKENDS,
    "compute_environment": ("LOCAL_MACHINE",),
    "main_training_function": str,
}
FSDP_RULES: dict[str, Rule] = {
    "fsdp_version": (1, 2, "1", "2"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": str,
    "fsdp_min_num_params": range(1, ANY_SIZE),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "fsdp_offload_params": BOOLEAN,
    "fsdp_cpu_ram_efficient_loading": (False,),
    "fsdp_activation_checkpointing": BOOLEAN,
}
# Keys that have an effect with one version of FSDP alone.
FSDP1_RULES: dict[str, Rule] = {
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_forward_prefetch": BOOLEAN,
    "fsdp_use_orig_params": (True,),
    "fsdp_sync_module_states": (False,),
}
FSDP2_RULES: dict[str, Rule] = {
    "fsdp_reshard_after_forward": BOOLEAN,
    "fsdp_activation_checkpointing_offload": BOOLEAN,
}
DYNAMO_RULES: dict[str, Rule] = {
    "dynamo_backend": DYNAMO_BACKENDS,
    "dynamo_mode": ("default", "reduce-overhead", "max-autotune"),
    "dynamo_use_fullgraph": BOOLEAN,
    "dynamo_use_dynamic": BOOLEAN,
    "dynamo_use_regional_compilation": BOOLEAN,
}
# The launcher reads these only with their prefix spelled out; `dp_shard_size: 2` alone it ignores.
PARALLELISM_RULES: dict[str, Rule] = {
    "parallelism_config_dp_replicate_size": range(1, ANY_SIZE),
    "parallelism_config_dp_shard_size": range(1, ANY_SIZE),
}
# (rules, prefix that may be left out) of each section.
SECTION_RULES = {
    "fsdp_config": (FSDP_RULES | FSDP1_RULES | FSDP2_RULES, "fsdp_"),
    "dynamo_config": (DYNAMO_RULES, "dynamo_"),
    "parallelism_config": (PARALLELISM_RULES, ""),
}
# Known to the launcher, refused here: key -> reason.
_META = "must be false: the model is built on meta and no rank loads weights"
_PARALLELISM = "tensor, context and sequence parallelism are not supported; remove it"
REFUSED = {
    "fsdp_ignored_modules": "not supported: every parameter is sharded; remove it",
    **{f"parallelism_config_{axis}_size": _PARALLELISM for axis in ("tp", "cp", "sp")},
    **{f"parallelism_config_cp_{what}": _PARALLELISM for what in ("backend", "comm_strategy")},
    **{
        f"parallelism_config_sp_{what}": _PARALLELISM for what in ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
    },
    "gradient_accumulation_steps": "derived from the recipe's train.global_batch_size; remove it",
    "fp16": "an old spelling; write mixed_precision: fp16",
}
# Classes of transformers' Llama that can be units: name -> pattern of its modules' names. LlamaModel holds units that are not its own.
WRAPPABLE = {
    "LlamaDecoderLayer": r"model\.layers\.\d+",
    "LlamaAttention": r"model\.layers\.\d+\.self_attn",
    "LlamaMLP": r"model\.layers\.\d+\.mlp",
    "LlamaRMSNorm": r"model\.(norm|layers\.\d+\.\w+_layernorm)",
    "Embedding": r"model\.embed_tokens",
    "Linear": r"lm_head|model\.layers\.\d+\.\w+\.\w+_proj",
}
# Sections and keys of other launch paths; `accelerate config` writes some of them empty.
UNSUPPORTED = (
    *("deepspeed_config", "megatron_lm_config", "mpirun_config", "fp8_config", "downcast_bf16", "command_file", "commands"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
)
# Of one version of FSDP: key -> what to write for the other.
SUCCESSORS = {
    "fsdp_sharding_strategy": " (fsdp_reshard_after_forward is its successor)",
    "fsdp_reshard_after_forward": " (fsdp_sharding_strategy says it: FULL_SHARD or SHARD_GRAD_OP)",
}
# Values that the launcher takes and that are refused here: (key, value) -> reason.
REFUSED_VALUES = {
    ("fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2"): "not supported; write HYBRID_SHARD, or fsdp_version: 2 and a parallelism_config",
    ("fsdp_use_orig_params", False): "must be true: a flat parameter mixes matrices, which decay, with norms, which do not",
    ("fsdp_sync_module_states", True): "must be false: every rank derives the same weights from the seed",
}
# Flags of the launcher that take no value, of those that matter here.
SWITCHES = ("multi_gpu", "use_fsdp", "use_parallelism_config", "cpu", *(key for key in DYNAMO_RULES if key.startswith("dynamo_use_")))
# The launcher reads these from its command line alone: key -> the value that it takes whatever the YAML says.
COMMAND_LINE_ONLY = {"rdzv_backend": "static", "same_network": False, "enable_cpu_affinity": False}


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


def check_accelerate_yaml(path: str | Path) -> dict[str, Any]:
    """The YAML with section keys in their long spelling (fsdp_config.version -> fsdp_config.fsdp_version).

    Raises UserError for the first mistake.
    """
    return _check_tree(path, load_yaml(path))


def _check_tree(path: str | Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for key, value in tree.items():
        if key in SECTION_RULES:
            checked[key] = _check_section(path, key, value)
        elif key in UNSUPPORTED:
            if value and value != "no":
                raise _mistake(path, key, value, "not supported; remove it")
        elif key in COMMAND_LINE_ONLY:
            if value is not None and value != COMMAND_LINE_ONLY[key]:
                raise _mistake(path, key, value, f"the launcher ignores it in a file; pass --{key} to accelerate launch")
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
        raise _mistake(path, section, values, "must be a section with `key: value` lines")
    checked: dict[str, Any] = {}
    other = _of_other_version(values or {}) if section == "fsdp_config" else {}
    for key, value in (values or {}).items():
        name = key if str(key).startswith(prefix) else f"{prefix}{key}"
        if section == "parallelism_config" and name in REFUSED and value in (1, "torch", "deepspeed"):
            checked[name] = value  # The defaults, spelled out.
            continue
        if name in REFUSED:
            raise _mistake(path, f"{section}.{key}", value, REFUSED[name])
        if name not in rules:
            raise _unknown_key(path, section, key, tuple(rules), prefix)
        if name in checked:
            raise _mistake(path, f"{section}.{key}", value, f"written twice, as {key} and as {name}" if key != name else "written twice")
        if name in other:
            raise _mistake(path, f"{section}.{key}", value, other[name])
        if isinstance(value, str | bool) and (name, value) in REFUSED_VALUES:
            raise _mistake(path, f"{section}.{key}", value, REFUSED_VALUES[name, value])
        if name == "fsdp_cpu_ram_efficient_loading" and value is not False:
            raise _mistake(path, f"{section}.{key}", value, _META)
        if name == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, str) and (" " in value or not value):
            raise _mistake(path, f"{section}.{key}", value, "must be class names with commas and no spaces between them")
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
            raise _mistake(path, key, value, f"must be an integer {bounds}")
    elif isinstance(rule, tuple):
        # By type too: 0 == False, and a quoted 'false' is text, which is true wherever the launcher does not parse it.
        if any(value == choice and type(value) is type(choice) for choice in rule):
            return
        choices = ", ".join(dict.fromkeys(shown(choice).upper() if rule is DYNAMO_BACKENDS else shown(choice) for choice in rule))
        no = next((choice for choice in rule if str(choice).lower() == "no"), None)
        if value is False and no is not None:
            raise _mistake(path, key, value, f"an unquoted no is a boolean in YAML; write {key.rpartition('.')[2]}: '{no}'")
        quotes = " without quotes" if rule == BOOLEAN and isinstance(value, str) else ""
        raise _mistake(path, key, value, f"must be {choices}{quotes}" if len(rule) <= 2 else f"must be one of {choices}")
    elif not isinstance(value, str):
        raise _mistake(path, key, value, "must be text; put quotes around it" if not isinstance(value, list | dict) else "must be text")


def _check_together(path: str | Path, checked: Mapping[str, Any]) -> None:
    kind, fsdp, dynamo = checked.get("distributed_type"), checked.get("fsdp_config", {}), checked.get("dynamo_config", {})
    if kind is None:
        raise UserError(f"{path}: distributed_type: missing: must be one of FSDP, MULTI_GPU, NO")
    if kind == "NO" and checked.get("num_processes", 1) > 1:
        raise _mistake(path, "num_processes", checked["num_processes"], "distributed_type NO starts one process; write FSDP or MULTI_GPU")
    if checked.get("use_cpu") and kind != "NO":
        raise _mistake(path, "use_cpu", True, f"the launcher ignores it with {kind}; remove it (without a GPU the CPU is used)")
    for section in ("fsdp_config", "parallelism_config"):
        if checked.get(section) and kind != "FSDP":
            raise _mistake(path, "distributed_type", kind, f"{section} has an effect with FSDP only; remove it or write FSDP")
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
                    raise _mistake(path, f"fsdp_config.{key}", value, f"not used by NO_SHARD, which gathers nothing; write {shown(idle)}")
        policy = fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")
        for key, user in (("fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"), ("fsdp_min_num_params", "SIZE_BASED_WRAP")):
            if key in fsdp and policy != user:
                raise _mistake(path, f"fsdp_config.{key}", fsdp[key], f"not used by fsdp_auto_wrap_policy {policy}, only by {user}")
        if fsdp.get("fsdp_activation_checkpointing_offload") and not fsdp.get("fsdp_activation_checkpointing"):
            key = "fsdp_config.fsdp_activation_checkpointing_offload"
            raise _mistake(path, key, True, "needs fsdp_activation_checkpointing: true")
    machines = checked.get("num_machines", 1)
    if checked.get("num_processes", machines) % machines:
        raise _mistake(path, "num_processes", checked["num_processes"], f"must be a multiple of num_machines, {machines}")
    if dynamo and "dynamo_backend" not in dynamo:
        raise UserError(f"{path}: dynamo_config.dynamo_backend: missing: without it nothing is compiled; write INDUCTOR")
    if dynamo and "dynamo_backend" in checked:
        raise _mistake(path, "dynamo_backend", checked["dynamo_backend"], "replaces dynamo_config, which is then lost; write it inside")


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
        raise _mistake(COMMAND_LINE, "--gradient_accumulation_steps", steps, REFUSED["gradient_accumulation_steps"])
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
    tree = _check_tree(COMMAND_LINE, tree)
    if passed_over:  # The launcher tells it to the ranks all the same.
        tree["fsdp_config"] = passed_over | tree["fsdp_config"]
    return tree


def check_sharding(recipe: Recipe, placement: Placement) -> None:
    """Raises UserError where the placement cannot honour what the recipe's `sharding` section asks for: nothing there is ignored.

    Without torch, so that it is told before anything is started.
    """
    sharding, kind = recipe.sharding, placement.distributed_type
    alone = placement.num_processes == 1

    def refuse(key: str, fix: str) -> UserError:
        return mistake(recipe, f"sharding.{key}", fix)

    if kind != "FSDP" and sharding.reduce_dtype != "float32":
        raise refuse("reduce_dtype", f"{kind} reduces gradients in fp32; write float32 or use an FSDP config")
    gathering = {
        "forward_prefetch": sharding.forward_prefetch is not None,
        "backward_prefetch": sharding.backward_prefetch is not None,
        "reshard_after_forward_size": sharding.reshard_after_forward_size is not None,
        "reshard_after_backward": not sharding.reshard_after_backward,
    }
    for key, asked in gathering.items():
        if asked and kind == "FSDP" and alone:
            raise refuse(key, "one process gathers nothing; remove it, or start more")
        if asked and (kind, placement.fsdp_version) != ("FSDP", 2):
            twin = f"fsdp_{key} of the accelerate YAML is FSDP1's" if key.endswith("_prefetch") else "FSDP1 cannot do it"
            raise refuse(key, f"FSDP2 only; {twin if kind == 'FSDP' else f'{kind} gathers no parameters'}; remove it")
        if asked and placement.auto_wrap_policy == "NO_WRAP" and key != "reshard_after_backward":
            raise refuse(key, "fsdp_auto_wrap_policy NO_WRAP leaves all layers in one unit, which stays whole; remove it")
        if asked and not placement.reshard_after_forward and key in ("backward_prefetch", "reshard_after_forward_size"):
            raise refuse(key, "fsdp_reshard_after_forward: false keeps units whole until backward; remove it or write true there")
    if (size := sharding.reshard_after_forward_size) and size not in (fitting := divisors(placement.dp_shard_size)[1:-1]):
        choices = f"choose from {', '.join(map(str, fitting))}" if fitting else "there is none; remove it"
        fix = f"must divide the ranks of a shard, {placement.dp_shard_size}, and be neither 1 nor all of them: {choices}"
        raise refuse("reshard_after_forward_size", fix)
    if placement.activation_checkpointing and sharding.activation_checkpointing is not None:
        fix = "the accelerate YAML checkpoints by itself (fsdp_activation_checkpointing: true); write false there or null here"
        raise refuse("activation_checkpointing", fix)
    if placement.activation_checkpointing and placement.fsdp_version == 2 and recipe.model.attention_dropout:
        fix = "fsdp_activation_checkpointing of the accelerate YAML would drop others when it computes a layer again; write false there"
        raise mistake(recipe, "model.attention_dropout", f"{fix}, and sharding.activation_checkpointing: full")
    checkpointed = placement.activation_checkpointing or sharding.activation_checkpointing not in (None, "none")
    smaller = placement.auto_wrap_policy == "SIZE_BASED_WRAP" or set(placement.transformer_cls_names_to_wrap) - {"LlamaDecoderLayer"}
    if sharding.forward_prefetch and checkpointed and smaller:
        fix = "units in a checkpointed layer would gather ahead in backward too, when it is computed again; remove it or wrap whole layers"
        raise refuse("forward_prefetch", fix)
    if sharding.gradient_sync is not None and alone:
        raise refuse("gradient_sync", "one process has nothing to reduce; remove it")
    if sharding.gradient_sync == "every_step" and kind == "FSDP":
        if placement.fsdp_version == 1 and placement.mixed_precision != "no":
            fix = f"FSDP1 would add micro batches up in {placement.mixed_precision}; write every_micro_batch or use fsdp_version: 2"
            raise refuse("gradient_sync", fix)
        if sharding.reduce_dtype != "float32":
            fix = f"would add micro batches up in {sharding.reduce_dtype}, the reduce_dtype; write every_micro_batch, or float32 there"
            raise refuse("gradient_sync", fix)
    if recipe.model.tie_word_embeddings and (shared := {"Embedding", "Linear"} & set(placement.transformer_cls_names_to_wrap)):
        fix = f"{shared.pop()} of fsdp_transformer_layer_cls_to_wrap cannot be a unit: embedding and head are one tensor; write false"
        raise mistake(recipe, "model.tie_word_embeddings", fix)


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
    for field, value in vars(_placement(_environment(asked, processes=placement.num_processes), source=COMMAND_LINE)).items():
        if value != (made := getattr(placement, field)):
            fix = f"accelerate launch makes {shown(made)} of it; write it into the YAML"
            raise _mistake(COMMAND_LINE, field, value, fix)
    return placement


def placement_from_yaml(path: str | Path, *, num_processes: int | None = None) -> Placement:
    """What ranks launched with this YAML (and `--num_processes`) would be told. UserError for mistakes in it."""
    return _placement(environment_from_yaml(path, num_processes=num_processes), source=str(path))


def placement_from_environment(env: Mapping[str, str] | None = None) -> Placement:
    """What the launcher told this rank (os.environ): its YAML with its command-line flags on top. UserError for what is not supported."""
    return _placement(os.environ if env is None else env, source="accelerate launch")


def environment_from_yaml(path: str | Path, *, num_processes: int | None = None) -> dict[str, str]:
    """The environment in which `accelerate launch --config_file path` starts the ranks, as far as placement goes (and its sizes)."""
    checked = check_accelerate_yaml(path)
    if num_processes is not None:
        checked = _check_tree(COMMAND_LINE, checked | {"num_processes": num_processes})
    processes = checked.get("num_processes") or (1 if checked["distributed_type"] == "NO" else None)
    if processes is None:
        raise UserError(f"{path}: num_processes: missing: write it, or pass --num_processes")
    return _environment(checked, processes=processes)


def _environment(checked: Mapping[str, Any], *, processes: int) -> dict[str, str]:
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


def _placement(env: Mapping[str, str], *, source: str) -> Placement:
    def flag(key: str, default: str) -> bool:
        return env.get(key, default).lower() in ("true", "1", "yes", "y", "t", "on")

    if steps := env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        fix = "derived from the recipe's train.global_batch_size; unset it"
        raise UserError(f"environment: ACCELERATE_GRADIENT_ACCUMULATION_STEPS: {steps}: {fix}")
    processes = int(env.get("WORLD_SIZE", "1"))
    fsdp = flag("ACCELERATE_USE_FSDP", "false")
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in TOP_RULES["mixed_precision"]:  # type: ignore[operator]
        raise _mistake(source, "mixed_precision", precision, "must be one of no, bf16, fp16")
    common: dict[str, Any] = {
        "num_processes": processes,
        "mixed_precision": precision,
        "dynamo_backend": env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper(),
        "dynamo_regional": flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "false"),
    }
    if not fsdp:
        return Placement(distributed_type="MULTI_GPU" if "WORLD_SIZE" in env else "NO", dp_replicate_size=processes, **common)
    if (version := env.get("FSDP_VERSION", "1")) not in ("1", "2"):
        raise _mistake(source, "fsdp_version", version, "must be 1 or 2")
    if flag("FSDP_CPU_RAM_EFFICIENT_LOADING", "false"):
        raise _mistake(source, "fsdp_cpu_ram_efficient_loading", True, _META)
    policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if policy == "SIZE_BASED_WRAP" and version == "1":
        raise _mistake(source, "fsdp_auto_wrap_policy", policy, "not supported with FSDP1; write fsdp_version: 2")
    if policy != "TRANSFORMER_BASED_WRAP" and flag("FSDP_ACTIVATION_CHECKPOINTING", "false"):
        fix = f"goes around the classes that are wrapped, and {policy} names none; use the recipe's sharding.activation_checkpointing"
        raise _mistake(source, "fsdp_activation_checkpointing", True, fix)
    replicate, shard = 1, processes
    reshard_after_forward = flag("FSDP_RESHARD_AFTER_FORWARD", "true")
    if version == "1":
        strategy = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
        strategies = ", ".join(FSDP1_RULES["fsdp_sharding_strategy"])  # type: ignore[arg-type]
        told: dict[str, str | bool] = {
            "fsdp_sharding_strategy": strategy,
            "fsdp_use_orig_params": flag("FSDP_USE_ORIG_PARAMS", "false"),
            "fsdp_sync_module_states": flag("FSDP_SYNC_MODULE_STATES", "false"),
        }
        for key, value in told.items():
            if value not in FSDP1_RULES[key]:  # type: ignore[operator]
                raise _mistake(source, key, value, REFUSED_VALUES.get((key, value), f"must be one of {strategies}"))
        if common["dynamo_regional"]:
            fix = "torch cannot compile layer by layer under FSDP1; write false, or fsdp_version: 2"
            raise _mistake(source, "dynamo_config.dynamo_use_regional_compilation", True, fix)
        for key in ("FSDP_OFFLOAD_PARAMS", "ACCELERATE_USE_PARALLELISM_CONFIG"):
            if flag(key, "false"):
                raise _mistake(source, key.removeprefix("ACCELERATE_").lower(), True, "not supported with FSDP1; write fsdp_version: 2")
        common |= {
            "fsdp_version": 1,
            "sharding_strategy": strategy,
            "backward_prefetch": env.get("FSDP_BACKWARD_PREFETCH", "NO_PREFETCH").upper(),
            "forward_prefetch": flag("FSDP_FORWARD_PREFETCH", "false"),
        }
        reshard_after_forward = strategy in ("FULL_SHARD", "HYBRID_SHARD")
        # FSDP1 under Accelerate has a copy per machine.
        local = processes if strategy != "HYBRID_SHARD" else int(env.get("LOCAL_WORLD_SIZE", processes))
        replicate, shard = (processes, 1) if strategy == "NO_SHARD" else (processes // local, local)
        if strategy == "HYBRID_SHARD" and (replicate == 1 or shard == 1):
            fix = f"a copy per machine, sharded inside it: nothing to do with machines x ranks = {replicate} x {shard}; write "
            fix += "FULL_SHARD" if replicate == 1 else "NO_SHARD"
            raise _mistake(source, "fsdp_sharding_strategy", strategy, fix)
    if flag("ACCELERATE_USE_PARALLELISM_CONFIG", "false"):
        replicate, shard = (int(env.get(f"PARALLELISM_CONFIG_DP_{axis}_SIZE", "1")) for axis in ("REPLICATE", "SHARD"))
        for axis in ("TP", "CP", "SP"):
            if (size := env.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")) != "1":
                raise _mistake(source, f"parallelism_config_{axis.lower()}_size", size, "must be 1: not supported")
        if replicate * shard != processes:
            fix = f"dp_replicate_size x dp_shard_size, {replicate} x {shard} = {replicate * shard}, must equal num_processes, {processes}"
            raise _mistake(source, "parallelism_config.parallelism_config_dp_shard_size", shard, fix)
        if shard == 1 and processes > 1:
            fix = "nothing would be sharded; raise it, or use distributed_type MULTI_GPU"
            raise _mistake(source, "parallelism_config.parallelism_config_dp_shard_size", shard, fix)
    classes = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    for name in classes.split(",") if classes else ():
        if name not in WRAPPABLE:
            fix = f"not in the model, or no unit of it; choose from {', '.join(WRAPPABLE)}"
            raise _mistake(source, "fsdp_config.fsdp_transformer_layer_cls_to_wrap", name, fix)
    return Placement(
        distributed_type="FSDP",
        dp_replicate_size=replicate,
        dp_shard_size=shard,
        reshard_after_forward=reshard_after_forward,
        auto_wrap_policy=policy,
        transformer_cls_names_to_wrap=tuple(classes.split(",")) if classes else (),
        min_num_params=int(env.get("FSDP_MIN_NUM_PARAMS", "0")),
        state_dict_type=env.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT" if version == "1" else "SHARDED_STATE_DICT").upper(),
        activation_checkpointing=flag("FSDP_ACTIVATION_CHECKPOINTING", "false"),
        activation_checkpointing_offload=flag("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
        offload_params=flag("FSDP_OFFLOAD_PARAMS", "false"),
        **common,
    )


def _mistake(source: str | Path, key: str, value: Any, fix: str) -> UserError:
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
