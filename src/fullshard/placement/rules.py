"""The keys and values of an accelerate YAML that mean something here, and those that are refused with the reason.

`tests/test_sharding.py` holds them against the installed accelerate.
"""

from __future__ import annotations

from typing import Any

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
META = "must be false: the model is built on meta and no rank loads weights"
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
