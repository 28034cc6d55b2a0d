"""The accelerate YAML: what is accepted means what the installed launcher makes of it, and every mistake is one line."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fullshard.errors import UserError
from fullshard.placement import launch as launch_module
from fullshard.placement import rules
from fullshard.placement.file import check_accelerate_yaml
from fullshard.placement.launch import check_launch, launcher_yaml
from fullshard.placement.placement import Placement, environment_from_yaml, placement_from_environment, placement_from_yaml
from support import HANG_S, ROOT

SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
FSDP = {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False}
FSDP1 = {"fsdp_version": 1, "fsdp_sync_module_states": False}


def fsdp(**keys: object) -> str:
    return yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {**FSDP, **keys}})


BASE = fsdp()
# (content of x.yaml, the line without "x.yaml: ")
WRONG = [
    # The launcher itself would start 8 processes.
    ("distributed_type: FSDP\nnum_processes: 010", "num_processes: 010: YAML reads it as 8; write 10, or put quotes around text"),
    (
        "distributed_type: FSDP\nfsdp_config: {fsdp_min_num_params: 1:30}",
        "fsdp_config.fsdp_min_num_params: 1:30: YAML reads it as 90; write 90, or put quotes around text",
    ),
    ("num_processes: 2", "distributed_type: missing: must be one of FSDP, MULTI_GPU, NO"),
    (BASE + "mixed_precison: bf16", "mixed_precison: unknown key; did you mean mixed_precision?"),
    (BASE + "mixed_precision: no", "mixed_precision: false: an unquoted no is a boolean in YAML; write mixed_precision: 'no'"),
    (BASE + "mixed_precision: on", "mixed_precision: true: must be one of no, bf16, fp16"),
    (BASE + "mixed_precision: fp8", "mixed_precision: fp8: must be one of no, bf16, fp16"),
    ("distributed_type: no", "distributed_type: false: an unquoted no is a boolean in YAML; write distributed_type: 'NO'"),
    ("distributed_type: MULTI_CPU", "distributed_type: MULTI_CPU: must be one of FSDP, MULTI_GPU, NO"),
    (BASE + "dynamo_backend: no", "dynamo_backend: false: an unquoted no is a boolean in YAML; write dynamo_backend: 'NO'"),
    (
        BASE + "dynamo_config: {dynamo_backend: no}",
        "dynamo_config.dynamo_backend: false: an unquoted no is a boolean in YAML; write dynamo_backend: 'NO'",
    ),
    (BASE + "dynamo_config: {dynamo_mod: default}", "dynamo_config.dynamo_mod: unknown key; did you mean dynamo_mode?"),
    (
        BASE + "dynamo_config: {dynamo_use_regional_compilation: true}",
        "dynamo_config.dynamo_backend: missing: without it nothing is compiled; write INDUCTOR",
    ),
    (
        BASE + "dynamo_backend: INDUCTOR\ndynamo_config: {dynamo_backend: INDUCTOR}",
        "dynamo_backend: INDUCTOR: replaces dynamo_config, which is then lost; write it inside",
    ),
    (fsdp(fsdp_reshard_after_foward=True), "fsdp_config.fsdp_reshard_after_foward: unknown key; did you mean fsdp_reshard_after_forward?"),
    (fsdp(reshard_after=True), "fsdp_config.reshard_after: unknown key; did you mean fsdp_reshard_after_forward?"),
    (fsdp(fsdp_version=3), "fsdp_config.fsdp_version: 3: must be one of 1, 2"),
    (fsdp(fsdp_version=1), "fsdp_config.fsdp_sync_module_states: missing: the launcher's default is true; write false"),
    (
        fsdp(**FSDP1 | {"fsdp_sync_module_states": True}),
        "fsdp_config.fsdp_sync_module_states: true: must be false: every rank derives the same weights from the seed",
    ),
    (
        fsdp(**FSDP1, use_orig_params=False),
        "fsdp_config.use_orig_params: false: must be true: a flat parameter mixes matrices, which decay, with norms, which do not",
    ),
    (
        fsdp(**FSDP1, reshard_after_forward=True),
        "fsdp_config.reshard_after_forward: true: FSDP2 only, no effect with fsdp_version 1; "
        "remove it (fsdp_sharding_strategy says it: FULL_SHARD or SHARD_GRAD_OP)",
    ),
    (
        fsdp(**FSDP1, activation_checkpointing=True, activation_checkpointing_offload=True),
        "fsdp_config.activation_checkpointing_offload: true: FSDP2 only, no effect with fsdp_version 1; remove it",
    ),
    (
        fsdp(**FSDP1, sharding_strategy="HYBRID_SHARD"),
        "fsdp_sharding_strategy: HYBRID_SHARD: a copy per machine, sharded inside it: nothing to do with machines x ranks = 1 x 2; "
        "write FULL_SHARD",
    ),
    (
        fsdp(**FSDP1, sharding_strategy="HYBRID_SHARD") + "num_machines: 2",
        "fsdp_sharding_strategy: HYBRID_SHARD: a copy per machine, sharded inside it: nothing to do with machines x ranks = 2 x 1; "
        "write NO_SHARD",
    ),
    (
        fsdp(**FSDP1, sharding_strategy="HYBRID_SHARD_ZERO2"),
        "fsdp_config.sharding_strategy: HYBRID_SHARD_ZERO2: not supported; write HYBRID_SHARD, or fsdp_version: 2 and a parallelism_config",
    ),
    (BASE + "num_machines: 3", "num_processes: 2: must be a multiple of num_machines, 3"),
    (
        fsdp(**FSDP1, auto_wrap_policy="SIZE_BASED_WRAP"),
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP: not supported with FSDP1; write fsdp_version: 2",
    ),
    (
        fsdp(auto_wrap_policy="SIZE_BASED_WRAP", activation_checkpointing=True),
        "fsdp_activation_checkpointing: true: goes around the classes that are wrapped, and SIZE_BASED_WRAP names none; "
        "use the recipe's sharding.activation_checkpointing",
    ),
    (
        fsdp(auto_wrap_policy="NO_WRAP", activation_checkpointing=True),
        "fsdp_activation_checkpointing: true: goes around the classes that are wrapped, and NO_WRAP names none; "
        "use the recipe's sharding.activation_checkpointing",
    ),
    (fsdp(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=0), "fsdp_config.min_num_params: 0: must be an integer >= 1"),
    (
        fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap="LlamaMLP,LlamaModel"),
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap: LlamaModel: not in the model, or no unit of it; choose from LlamaDecoderLayer, "
        "LlamaAttention, LlamaMLP, LlamaRMSNorm, Embedding, Linear",
    ),
    (
        fsdp(**FSDP1, sharding_strategy="NO_SHARD", backward_prefetch="BACKWARD_PRE"),
        "fsdp_config.fsdp_backward_prefetch: BACKWARD_PRE: not used by NO_SHARD, which gathers nothing; write NO_PREFETCH",
    ),
    (
        fsdp(**FSDP1, sharding_strategy="NO_SHARD", forward_prefetch=True),
        "fsdp_config.fsdp_forward_prefetch: true: not used by NO_SHARD, which gathers nothing; write false",
    ),
    (
        fsdp(**FSDP1) + "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}",
        "dynamo_config.dynamo_use_regional_compilation: true: torch cannot compile layer by layer under FSDP1; write false, "
        "or fsdp_version: 2",
    ),
    (
        fsdp(**FSDP1, sharding_strategy=1),
        "fsdp_config.sharding_strategy: 1: must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD",
    ),
    (fsdp(**FSDP1, offload_params=True), "fsdp_offload_params: true: not supported with FSDP1; write fsdp_version: 2"),
    (
        fsdp(**FSDP1) + "parallelism_config: {parallelism_config_dp_shard_size: 2}",
        "parallelism_config: needs fsdp_version: 2",
    ),
    (fsdp(version=2), "fsdp_config.version: 2: written twice, as version and as fsdp_version"),
    (
        "distributed_type: FSDP\nfsdp_config: {fsdp_cpu_ram_efficient_loading: false}",
        "fsdp_config.fsdp_version: missing: the launcher's default is 1; write 2",
    ),
    (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}",
        "fsdp_config.fsdp_cpu_ram_efficient_loading: missing: the launcher's default is true; write false",
    ),
    (
        fsdp(fsdp_cpu_ram_efficient_loading=True),
        "fsdp_config.fsdp_cpu_ram_efficient_loading: true: must be false: the model is built on meta and no rank loads weights",
    ),
    (fsdp(reshard_after_forward="FULL_SHARD"), "fsdp_config.reshard_after_forward: FULL_SHARD: must be true, false without quotes"),
    (fsdp(fsdp_offload_params="false"), "fsdp_config.fsdp_offload_params: false: must be true, false without quotes"),
    (
        fsdp(fsdp_sharding_strategy="FULL_SHARD"),
        "fsdp_config.fsdp_sharding_strategy: FULL_SHARD: FSDP1 only, no effect with fsdp_version 2; "
        "remove it (fsdp_reshard_after_forward is its successor)",
    ),
    (fsdp(fsdp_forward_prefetch=True), "fsdp_config.fsdp_forward_prefetch: true: FSDP1 only, no effect with fsdp_version 2; remove it"),
    (
        fsdp(fsdp_state_dict_type="LOCAL_STATE_DICT"),
        "fsdp_config.fsdp_state_dict_type: LOCAL_STATE_DICT: must be SHARDED_STATE_DICT, FULL_STATE_DICT",
    ),
    (
        fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_transformer_layer_cls_to_wrap="A, B"),
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap: A, B: must be class names with commas and no spaces between them",
    ),
    (
        fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_transformer_layer_cls_to_wrap=["A"]),
        'fsdp_config.fsdp_transformer_layer_cls_to_wrap: ["A"]: must be text',
    ),
    (
        fsdp(fsdp_min_num_params=1000),
        "fsdp_config.fsdp_min_num_params: 1000: not used by fsdp_auto_wrap_policy NO_WRAP, only by SIZE_BASED_WRAP",
    ),
    (
        fsdp(fsdp_activation_checkpointing_offload=True),
        "fsdp_config.fsdp_activation_checkpointing_offload: true: needs fsdp_activation_checkpointing: true",
    ),
    (
        BASE + "parallelism_config: {dp_shard_size: 2}",
        "parallelism_config.dp_shard_size: unknown key; did you mean parallelism_config_dp_shard_size?",
    ),
    (
        BASE + "parallelism_config: {parallelism_config_tp_size: 2}",
        "parallelism_config.parallelism_config_tp_size: 2: tensor, context and sequence parallelism are not supported; remove it",
    ),
    (
        BASE + "parallelism_config: {parallelism_config_dp_shard_size: 4}",
        "parallelism_config.parallelism_config_dp_shard_size: 4: dp_replicate_size x dp_shard_size, 1 x 4 = 4, must equal num_processes, 2",
    ),
    (
        BASE + "parallelism_config: {parallelism_config_dp_replicate_size: 2}",
        "parallelism_config.parallelism_config_dp_shard_size: 1: nothing would be sharded; raise it, or use distributed_type MULTI_GPU",
    ),
    (BASE + "use_cpu: true", "use_cpu: true: the launcher ignores it with FSDP; remove it (without a GPU the CPU is used)"),
    (BASE + "use_cpu: 'false'", "use_cpu: false: must be true, false without quotes"),
    (
        BASE + "enable_cpu_affinity: true",
        "enable_cpu_affinity: true: the launcher ignores it in a file; pass --enable_cpu_affinity to accelerate launch",
    ),
    (BASE + "rdzv_backend: c10d", "rdzv_backend: c10d: the launcher ignores it in a file; pass --rdzv_backend to accelerate launch"),
    (BASE + "gradient_accumulation_steps: 2", "gradient_accumulation_steps: derived from the recipe's train.global_batch_size; remove it"),
    (BASE + "fp16: true", "fp16: an old spelling; write mixed_precision: fp16"),
    (BASE + "tpu_use_cluster: true", "tpu_use_cluster: true: not supported; remove it"),
    (BASE + "deepspeed_config: {zero_stage: 3}", 'deepspeed_config: {"zero_stage": 3}: not supported; remove it'),
    (BASE + "gpu_ids: 0", "gpu_ids: 0: must be text; put quotes around it"),
    ("distributed_type: MULTI_GPU\nnum_processes: '2'", "num_processes: 2: must be an integer >= 1"),
    ("distributed_type: MULTI_GPU\nnum_processes: 0", "num_processes: 0: must be an integer >= 1"),
    ("distributed_type: MULTI_GPU", "num_processes: missing: write it, or pass --num_processes"),
    ("distributed_type: MULTI_GPU\nmain_process_port: 70000", "main_process_port: 70000: must be an integer from 0 to 65535"),
    ("distributed_type: 'NO'\nnum_processes: 2", "num_processes: 2: distributed_type NO starts one process; write FSDP or MULTI_GPU"),
    (
        "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}",
        "distributed_type: MULTI_GPU: fsdp_config has an effect with FSDP only; remove it or write FSDP",
    ),
    ("distributed_type: FSDP\nfsdp_config: 2", "fsdp_config: 2: must be a section with `key: value` lines"),
    ("distributed_type: FSDP\ndistributed_type: 'NO'", "line 2: distributed_type: written twice"),
]


@pytest.mark.parametrize(("content", "line"), WRONG)
def test_a_mistake_is_one_line(content: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(content)
    with pytest.raises(UserError) as caught:
        placement_from_yaml("x.yaml")
    assert str(caught.value) == f"x.yaml: {line}"


def test_missing_file_is_one_line() -> None:
    with pytest.raises(UserError, match=r"fsdp2\.yaml: no such file; did you mean .*fsdp\.yaml\?"):
        check_accelerate_yaml(ROOT / "accelerate_configs" / "fsdp2.yaml")


VARIANTS = [
    *(path.read_text() for path in SHIPPED),
    BASE,
    BASE + "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 1}",
    BASE.replace("num_processes: 2", "num_processes: 4")
    + "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}",
    BASE + "dynamo_config: {backend: inductor, use_regional_compilation: true}\nmixed_precision: fp16",
    BASE + "dynamo_backend: EAGER",
    BASE + "mixed_precision: null\nmain_process_ip: null\ntpu_env: []\ntpu_use_cluster: false\ndowncast_bf16: 'no'\nrdzv_backend: static",
    fsdp(
        **{"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "activation_checkpointing": True, "activation_checkpointing_offload": True},
        offload_params=True,
        reshard_after_forward=False,
    ),
    fsdp(auto_wrap_policy="NO_WRAP", state_dict_type="FULL_STATE_DICT"),
    fsdp(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap="LlamaDecoderLayer,Embedding"),
    fsdp(**FSDP1),
    fsdp(**FSDP1, sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True, backward_prefetch="BACKWARD_POST", use_orig_params=True),
    fsdp(**FSDP1, sharding_strategy="NO_SHARD", auto_wrap_policy="TRANSFORMER_BASED_WRAP", activation_checkpointing=True),
    "distributed_type: MULTI_GPU\nnum_processes: 3",
    "distributed_type: 'NO'",
]


def told_by_launcher(words: list[str]) -> dict[str, str]:
    """The environment in which `accelerate launch` would start the ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if not (arguments.use_fsdp or arguments.multi_gpu):
        return prepare_simple_launcher_cmd_env(arguments)[1]
    told = prepare_multi_gpu_env(arguments)  # Sets nproc_per_node too.
    return {**told, "WORLD_SIZE": str(arguments.num_processes), "LOCAL_WORLD_SIZE": arguments.nproc_per_node}


@pytest.mark.parametrize("content", VARIANTS)
def test_a_yaml_means_what_the_launcher_makes_of_it(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise of "known before launch": a failure says that accelerate reads this YAML otherwise than we do."""
    path = tmp_path / "x.yaml"
    path.write_text(content)
    told = told_by_launcher(["--config_file", str(path), "train.py"])
    ours = environment_from_yaml(path)
    assert ours == {key: told.get(key) for key in ours}
    ignored = r"FSDP_(SHARDING_STRATEGY|FORWARD_PREFETCH|USE_ORIG_PARAMS|SYNC_MODULE_STATES)|PARALLELISM_CONFIG_(TP|CP|SP)_.*"
    placing = {key for key in told if key.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_FSDP"))}
    assert {key for key in placing - set(ours) if not re.fullmatch(ignored, key)} == set()
    assert placement_from_yaml(path) == placement_from_environment(told)


@pytest.mark.parametrize("content", [content for content in VARIANTS if "FSDP" in content])
def test_placement_is_what_the_plugin_reads(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    path = tmp_path / "x.yaml"
    path.write_text(content)
    for key, value in environment_from_yaml(path).items():
        monkeypatch.setenv(key, value)
    plugin, placement = FullyShardedDataParallelPlugin(), placement_from_yaml(path)
    assert plugin.fsdp_version == placement.fsdp_version
    if placement.fsdp_version == 1:
        assert plugin.sharding_strategy.name == placement.sharding_strategy
        assert (plugin.backward_prefetch.name if plugin.backward_prefetch else "NO_PREFETCH") == placement.backward_prefetch
        assert (plugin.forward_prefetch, plugin.use_orig_params, plugin.sync_module_states) == (placement.forward_prefetch, True, False)
        assert placement.reshard_after_forward == (placement.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"))
        shards = {"NO_SHARD": 1, "HYBRID_SHARD": placement.num_processes // 2}  # A machine's; the file has two.
        assert placement.dp_shard_size == shards.get(placement.sharding_strategy, placement.num_processes)
    else:
        assert plugin.reshard_after_forward == placement.reshard_after_forward
    assert plugin.state_dict_type.name == placement.state_dict_type
    assert (plugin.activation_checkpointing, plugin.activation_checkpointing_offload) == (
        placement.activation_checkpointing,
        placement.activation_checkpointing_offload,
    )
    assert tuple(plugin.transformer_cls_names_to_wrap or ()) == placement.transformer_cls_names_to_wrap
    assert plugin.cpu_ram_efficient_loading is False
    assert (plugin.auto_wrap_policy is None) == (placement.auto_wrap_policy == "NO_WRAP")


def test_shipped_files() -> None:
    assert placement_from_yaml(ROOT / "accelerate_configs" / "fsdp.yaml") == Placement(
        distributed_type="FSDP",
        num_processes=2,
        dp_shard_size=2,
        mixed_precision="bf16",
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=("LlamaDecoderLayer",),
    )
    for path in SHIPPED:
        lines = path.read_text().splitlines()
        assert len(lines) <= 20
        assert [line for line in lines if "#" not in line] == []


def test_each_shipped_file_differs_from_fsdp_in_what_it_is_named_after() -> None:
    fsdp = placement_from_yaml(ROOT / "accelerate_configs" / "fsdp.yaml", num_processes=4)
    flat = dataclasses.replace(fsdp, fsdp_version=1, backward_prefetch="BACKWARD_PRE")
    assert {path.stem: placement_from_yaml(path, num_processes=1 if path.stem == "single" else 4) for path in SHIPPED} == {
        "single": Placement(mixed_precision="bf16"),
        "ddp": Placement(distributed_type="MULTI_GPU", num_processes=4, dp_replicate_size=4, mixed_precision="bf16"),
        "fsdp": fsdp,
        "fsdp_fp32": dataclasses.replace(fsdp, mixed_precision="no"),
        "fsdp_fp16": dataclasses.replace(fsdp, mixed_precision="fp16"),
        "fsdp_shard_grad_op": dataclasses.replace(fsdp, reshard_after_forward=False),
        "fsdp_hybrid": dataclasses.replace(fsdp, dp_replicate_size=2, dp_shard_size=2),
        "fsdp_activation_checkpointing": dataclasses.replace(fsdp, activation_checkpointing=True),
        "fsdp_full_state_dict": dataclasses.replace(fsdp, state_dict_type="FULL_STATE_DICT"),
        "fsdp_fine_grained": dataclasses.replace(fsdp, transformer_cls_names_to_wrap=("LlamaAttention", "LlamaMLP")),
        "fsdp_no_wrap": dataclasses.replace(fsdp, auto_wrap_policy="NO_WRAP", transformer_cls_names_to_wrap=()),
        "fsdp_size_based": dataclasses.replace(
            fsdp, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=100_000, transformer_cls_names_to_wrap=()
        ),
        "fsdp_compile": dataclasses.replace(fsdp, dynamo_backend="INDUCTOR", dynamo_regional=True),
        "fsdp_cpu_offload": dataclasses.replace(fsdp, offload_params=True),
        "fsdp1_full_shard": flat,
        "fsdp1_shard_grad_op": dataclasses.replace(
            flat, sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=False, backward_prefetch="NO_PREFETCH"
        ),
        "fsdp1_no_shard": dataclasses.replace(
            flat,
            sharding_strategy="NO_SHARD",
            reshard_after_forward=False,
            backward_prefetch="NO_PREFETCH",
            dp_replicate_size=4,
            dp_shard_size=1,
        ),
        "fsdp1_hybrid": dataclasses.replace(flat, sharding_strategy="HYBRID_SHARD", dp_replicate_size=2, dp_shard_size=2),
    }


def test_ranks_that_the_machines_cannot_share_equally_are_refused() -> None:
    """The launcher would start fewer of them, and say nothing."""
    path = ROOT / "accelerate_configs" / "fsdp1_hybrid.yaml"
    with pytest.raises(UserError, match=r"^command line: num_processes: 5: must be a multiple of num_machines, 2$"):
        placement_from_yaml(path, num_processes=5)


def test_our_keys_are_those_of_the_installed_accelerate() -> None:
    """A failure says that an upgrade added, dropped or renamed keys: decide what each new one means here."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.constants import (
        FSDP2_STATE_DICT_TYPE,
        FSDP_AUTO_WRAP_POLICY,
        FSDP_BACKWARD_PREFETCH,
        FSDP_SHARDING_STRATEGY,
        TORCH_DYNAMO_MODES,
    )
    from accelerate.utils.dataclasses import DynamoBackend

    top = {*rules.TOP_RULES, *rules.SECTION_RULES, *rules.UNSUPPORTED, *rules.COMMAND_LINE_ONLY}
    assert {field.name for field in dataclasses.fields(ClusterConfig)} == top - {"dynamo_backend"}
    parser = launch_command_parser()
    options = {action.dest for action in parser._actions}
    for prefix, known_rules in {
        "fsdp_": rules.FSDP_RULES | rules.FSDP1_RULES | rules.FSDP2_RULES,
        "dynamo_": rules.DYNAMO_RULES,
        "parallelism_config_": rules.PARALLELISM_RULES,
    }.items():
        known = set(known_rules) | {key for key in rules.REFUSED if key.startswith(prefix)} - {"fsdp_ignored_modules"}
        assert {option for option in options if option.startswith(prefix)} == known
    # The launcher takes a top-level key from the file only where its own default is None.
    assert {key: parser.get_default(key) for key in rules.COMMAND_LINE_ONLY} == rules.COMMAND_LINE_ONLY
    for key in set(rules.TOP_RULES) - {"debug"}:
        assert parser.get_default(key) is None
    assert set(DynamoBackend.list()) == {name for name in rules.DYNAMO_BACKENDS if name.isupper()}
    assert set(rules.FSDP_RULES["fsdp_auto_wrap_policy"]) == set(FSDP_AUTO_WRAP_POLICY)
    strategies = {value for key, value in rules.REFUSED_VALUES if key == "fsdp_sharding_strategy"}
    assert set(rules.FSDP1_RULES["fsdp_sharding_strategy"]) | strategies == set(FSDP_SHARDING_STRATEGY)
    assert set(rules.FSDP1_RULES["fsdp_backward_prefetch"]) == set(FSDP_BACKWARD_PREFETCH)
    assert set(rules.FSDP_RULES["fsdp_state_dict_type"]) == set(FSDP2_STATE_DICT_TYPE)
    assert set(rules.DYNAMO_RULES["dynamo_mode"]) == set(TORCH_DYNAMO_MODES)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"},
            "environment: ACCELERATE_GRADIENT_ACCUMULATION_STEPS: 2: derived from the recipe's train.global_batch_size; unset it",
        ),
        ({"FSDP_VERSION": "3"}, "accelerate launch: fsdp_version: 3: must be 1 or 2"),
        (
            {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "true"},
            "accelerate launch: fsdp_sync_module_states: true: must be false: every rank derives the same weights from the seed",
        ),
        (
            {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_SHARDING_STRATEGY": "3"},
            "accelerate launch: fsdp_sharding_strategy: 3: must be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "accelerate launch: mixed_precision: fp8: must be one of no, bf16, fp16"),
        (
            {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "accelerate launch: fsdp_cpu_ram_efficient_loading: true: must be false: the model is built on meta and no rank loads weights",
        ),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "WORLD_SIZE": "4"},
            "accelerate launch: parallelism_config.parallelism_config_dp_shard_size: 2: "
            "dp_replicate_size x dp_shard_size, 1 x 2 = 2, must equal num_processes, 4",
        ),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            "accelerate launch: parallelism_config_cp_size: 2: must be 1: not supported",
        ),
    ],
)
def test_flags_of_the_launcher_are_checked_too(change: dict[str, str], line: str) -> None:
    env = environment_from_yaml(ROOT / "accelerate_configs" / "fsdp.yaml")
    assert placement_from_environment(env).distributed_type == "FSDP"
    with pytest.raises(UserError) as caught:
        placement_from_environment({**env, **change})
    assert str(caught.value) == line


def test_without_accelerate_launch_is_an_error() -> None:
    """torchrun sets WORLD_SIZE and nothing of Accelerate's; `distributed_type: 'NO'` through the launcher sets the precision."""
    assert launcher_yaml() is None
    for env in ({}, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}):
        with pytest.raises(UserError, match="not started by accelerate launch"):
            check_launch(env)
    assert check_launch({"ACCELERATE_MIXED_PRECISION": "no"}) == Placement()


# (YAML, flags of accelerate launch, the line after "command line: ", or None where they are honoured)
FLAGS = [
    ("ddp", "--fsdp_activation_checkpointing true", "distributed_type: MULTI_GPU: fsdp_config has an effect with FSDP only"),
    (
        "fsdp",
        "--parallelism_config_dp_replicate_size 1 --parallelism_config_dp_shard_size 2",
        "--parallelism_config_dp_",
    ),
    ("single", "--num_processes 2", "num_processes: 2: distributed_type NO starts one process; write FSDP or MULTI_GPU"),
    ("fsdp", "--multi_gpu", "--multi_gpu: starts MULTI_GPU, and the YAML says FSDP"),
    ("fsdp", "--fsdp_sharding_strategy SHARD_GRAD_OP", "fsdp_config.fsdp_sharding_strategy: SHARD_GRAD_OP: FSDP1 only, no effect"),
    ("fsdp", "--fsdp_forward_prefetch=true", "fsdp_config.fsdp_forward_prefetch: true: FSDP1 only, no effect with fsdp_version 2"),
    ("fsdp", "--fsdp-min-num-params 1000", "fsdp_config.fsdp_min_num_params: 1000: not used by fsdp_auto_wrap_policy TRANSFORMER"),
    ("fsdp1_full_shard", "--fsdp_reshard_after_forward false", "fsdp_config.fsdp_reshard_after_forward: false: FSDP2 only"),
    ("fsdp", "--gradient_accumulation_steps 4", "--gradient_accumulation_steps: 4: derived from the recipe's"),
    ("fsdp", "--fsdp_state_dict_type SHARDED", "fsdp_config.fsdp_state_dict_type: SHARDED: must be SHARDED_STATE_DICT, FULL_STATE_DICT"),
    ("fsdp", "--fsdp_auto_wrap_policy FOO", "fsdp_config.fsdp_auto_wrap_policy: FOO: must be one of"),
    ("fsdp", "--fsdp_reshard_after_forward nope", "fsdp_config.fsdp_reshard_after_forward: nope: must be true, false"),
    ("fsdp", "--fsdp_activation_checkpointing_offload true", "fsdp_config.fsdp_activation_checkpointing_offload: true: needs"),
    ("fsdp1_full_shard", "--fsdp_backward_prefetch FOO", "fsdp_config.fsdp_backward_prefetch: FOO: must be one of"),
    ("fsdp", "--debug --num_processes 4 --mixed_precision no --fsdp_reshard_after_forward false train.py --multi_gpu", None),
    ("fsdp", "--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1000", None),
    ("fsdp_compile", "--dynamo_backend aot_eager", None),
    ("fsdp1_full_shard", "--fsdp_sharding_strategy NO_SHARD", None),
]


@pytest.mark.parametrize(("name", "flags", "line"), FLAGS)
def test_a_flag_has_an_effect_or_is_an_error(name: str, flags: str, line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the YAML. What the launcher makes of file and flags is what it tells the ranks."""
    words = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), *flags.split()]
    words += [] if "train.py" in words else ["train.py"]
    told = told_by_launcher(words)
    monkeypatch.setattr(launch_module, "_parent", lambda: (["python", "/bin/accelerate", "launch", *words], Path("/")))
    if line is None:
        assert check_launch(told) == placement_from_environment(told)
        return
    with pytest.raises(UserError) as caught:
        check_launch(told)
    assert str(caught.value).startswith(f"command line: {line}")
    assert "\n" not in str(caught.value)


def test_what_the_launcher_makes_of_a_flag_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it ever ignore one: a run of another placement than was asked for is not started."""
    path = ROOT / "accelerate_configs" / "fsdp.yaml"
    words = ["python", "/bin/accelerate", "launch", "--config_file", str(path), "--fsdp_reshard_after_forward", "false", "train.py"]
    monkeypatch.setattr(launch_module, "_parent", lambda: (words, Path("/")))
    with pytest.raises(UserError, match=r"^command line: reshard_after_forward: false: accelerate launch makes true of it"):
        check_launch(environment_from_yaml(path))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /env/bin/accelerate launch --config_file a/x.yaml train.py --config y.yaml", "/home/me/a/x.yaml"),
        ("python /env/bin/accelerate launch --num_processes 2 --config_file=/a/x.yaml train.py", "/a/x.yaml"),
        ("python -m accelerate.commands.launch --config-file x.yaml train.py", "/home/me/x.yaml"),
        ("python /env/bin/accelerate-launch --config_file x.yaml -m train", "/home/me/x.yaml"),
        ("python /env/bin/accelerate launch train.py --config_file x.yaml", None),
        ("python train.py --config_file x.yaml", None),
        ("/bin/bash launch --config_file x.yaml", None),
    ],
)
def test_the_launchers_command_line_names_the_yaml(command: str, expected: str | None) -> None:
    path = launch_module._yaml_of_command(command.split(), Path("/home/me"), {"HF_HOME": "/nowhere"})
    assert path == (Path(expected) if expected else None)


def test_the_default_yaml_of_accelerate_is_found(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.write_text(BASE)
    assert (
        launch_module._yaml_of_command(["python", "/bin/accelerate", "launch", "train.py"], Path("/"), {"HF_HOME": str(tmp_path)})
        == default
    )


RANK = """
import os, sys
from fullshard.errors import one_line_errors
from fullshard.placement.launch import check_launch, launcher_yaml
@one_line_errors
def main():
    print(f"{launcher_yaml()} {check_launch(os.environ)}\\n", end="", flush=True)
main()
"""


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=HANG_S, check=False)


@pytest.mark.launch
def test_a_shipped_yaml_in_the_real_launcher(tmp_path: Path) -> None:
    """The others: test_parity.py."""
    path = ROOT / "accelerate_configs" / "fsdp.yaml"
    (tmp_path / "rank.py").write_text(RANK)
    result = launch("--config_file", os.path.relpath(path, tmp_path), "rank.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    expected = f"{tmp_path / os.path.relpath(path, tmp_path)} {placement_from_yaml(path)}"
    assert result.stdout.splitlines() == [expected] * 2


@pytest.mark.launch
def test_a_mistake_under_the_real_launcher_is_said_once_and_named_as_the_cause(tmp_path: Path) -> None:
    """The launcher itself ignores unknown keys in fsdp_config; the ranks do not."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "x.yaml").write_text(fsdp(fsdp_reshard_after_foward=False) + "main_process_port: 0\n")
    result = launch("--config_file", "x.yaml", "rank.py", cwd=tmp_path)
    assert result.returncode != 0
    line = "x.yaml: fsdp_config.fsdp_reshard_after_foward: unknown key; did you mean fsdp_reshard_after_forward?"
    assert len([text for text in result.stderr.splitlines() if text.startswith("error: ") and text.endswith(line)]) == 1
    assert re.search(rf"traceback : .*{re.escape(line)}", result.stderr)


@pytest.mark.launch
def test_cpu_flag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    result = launch("--cpu", "--config_file", str(ROOT / "accelerate_configs" / "fsdp.yaml"), "rank.py", cwd=tmp_path)
    assert result.returncode != 0
    assert "error: command line: --cpu: starts one process without FSDP; leave it out: without a GPU the CPU is used\n" in result.stderr
