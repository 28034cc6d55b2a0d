"""Collectives of a training step: those that ran are those of the formulas, by kind, group, number and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fullshard.measure.communication import count_communication
from fullshard.model.build import llama_config
from fullshard.model.optim import build_optimizer, build_schedule
from fullshard.placement.placement import Placement, placement_from_environment
from fullshard.plan.communication import Communication, sent_bytes, step_communication
from fullshard.plan.shapes import fsdp_units, parameter_shapes
from fullshard.recipe.fields import ModelConfig, ShardingConfig
from support import ROOT
from support.models import TIED, TINY, prepared
from support.steps import OPTIM

# Above DDP's first bucket of 1 MiB.
LARGER = replace(TINY, vocab_size=4000, hidden_size=96, intermediate_size=200)
FP16 = {"ACCELERATE_MIXED_PRECISION": "fp16"}
NO = {"ACCELERATE_MIXED_PRECISION": "no"}


def step_counts(model: ModelConfig, sharding: ShardingConfig) -> list[tuple[Communication, Communication]]:
    """(counted, computed) of a step with 1 micro batch and one with 3. The steps before them let DDP rebuild its buckets."""
    from fullshard.train.step import train_step

    placement = placement_from_environment()
    accelerator, built = prepared(model, sharding=sharding)
    raw = build_optimizer(built.parameters(), optim=OPTIM)
    schedule = build_schedule(raw, optim=OPTIM, max_steps=8)
    optimizer = accelerator.prepare_optimizer(raw)
    results = []
    for micro_batches in (1, 1, 1, 3):
        ids = torch.randint(0, model.vocab_size, (micro_batches, 16))
        with count_communication() as counted:
            train_step(
                accelerator=accelerator,
                model=built,
                optimizer=optimizer,
                schedule=schedule,
                inputs=ids,
                targets=ids,
                micro_batch_size=1,
                max_grad_norm=1.0,
                sharding=sharding,
            )
        computed = step_communication(
            model=model,
            placement=placement,
            gradient_accumulation_steps=micro_batches,
            sharding=sharding,
            rank=accelerator.process_index,
        )
        results.append((counted, computed))
    return results[2:]


@pytest.mark.parametrize(
    ("config", "world_size", "environment", "model", "sharding"),
    [
        ("single.yaml", 1, {}, TINY, {}),
        ("ddp.yaml", 2, {}, TINY, {}),
        ("ddp.yaml", 4, {}, LARGER, {"gradient_sync": "every_micro_batch"}),
        ("fsdp.yaml", 1, {}, TINY, {}),
        ("fsdp.yaml", 2, {}, TINY, {}),
        ("fsdp.yaml", 4, {}, TIED, {"reduce_dtype": "bfloat16"}),
        ("fsdp.yaml", 4, {}, TINY, {"reshard_after_forward_size": 2, "forward_prefetch": 2, "backward_prefetch": 2}),
        ("fsdp.yaml", 2, {}, TINY, {"reshard_after_backward": False, "activation_checkpointing": "full"}),
        ("fsdp_shard_grad_op.yaml", 2, {}, TINY, {"gradient_sync": "every_step"}),
        ("fsdp_shard_grad_op.yaml", 2, {}, TINY, {"reshard_after_backward": False}),
        ("fsdp_hybrid.yaml", 4, {}, TINY, {}),
        ("fsdp_hybrid.yaml", 4, {"FSDP_RESHARD_AFTER_FORWARD": "false"}, TIED, {"gradient_sync": "every_step"}),
        ("fsdp_activation_checkpointing.yaml", 2, {}, TINY, {}),
        ("fsdp_fine_grained.yaml", 2, {}, TINY, {"activation_checkpointing": "selective"}),
        ("fsdp_fine_grained.yaml", 2, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,LlamaMLP"}, TIED, {}),
        ("fsdp_fine_grained.yaml", 2, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,LlamaRMSNorm"}, TINY, {}),
        ("fsdp_fine_grained.yaml", 2, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear,Embedding"}, TINY, {}),
        ("fsdp_no_wrap.yaml", 2, {}, TINY, {}),
        ("fsdp_size_based.yaml", 2, {"FSDP_MIN_NUM_PARAMS": "4000"}, TINY, {}),
        ("fsdp_fp16.yaml", 2, {}, TINY, {}),
        ("fsdp_hybrid.yaml", 4, FP16, TINY, {}),
        ("fsdp1_full_shard.yaml", 2, FP16, TINY, {}),
        ("fsdp1_no_shard.yaml", 2, FP16, TINY, {}),
        ("fsdp1_hybrid.yaml", 4, FP16, TINY, {}),
        ("ddp.yaml", 2, FP16, TINY, {}),
        ("fsdp_fp32.yaml", 2, {}, TINY, {}),
        ("fsdp_compile.yaml", 2, {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}, TINY, {}),
        ("fsdp_full_state_dict.yaml", 2, {}, TINY, {}),
        ("fsdp1_full_shard.yaml", 2, {}, TINY, {}),
        ("fsdp1_full_shard.yaml", 4, NO, TIED, {"gradient_sync": "every_step"}),
        ("fsdp1_shard_grad_op.yaml", 2, NO, TINY, {"gradient_sync": "every_step"}),
        ("fsdp1_shard_grad_op.yaml", 2, {}, TINY, {}),
        ("fsdp1_no_shard.yaml", 2, {}, TINY, {}),
        ("fsdp1_hybrid.yaml", 4, {}, TINY, {}),
    ],
)
def test_a_step_sends_what_the_formulas_say(
    pool: Any, config: str, world_size: int, environment: dict[str, str], model: ModelConfig, sharding: dict[str, Any]
) -> None:
    """Every collective of the step, scalars included, with and without accumulation; a rank's groups are its own."""
    for results in pool.run(
        step_counts, world_size=world_size, config=config, environment=environment, model=model, sharding=ShardingConfig(**sharding)
    ):
        for counted, computed in results:
            assert counted == computed


def test_every_config_is_counted() -> None:
    """But for what needs a GPU."""
    counted = {case[0] for case in test_a_step_sends_what_the_formulas_say.pytestmark[0].args[1]}
    assert {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")} - counted == {"fsdp_cpu_offload.yaml"}


def fsdp(**fields: Any) -> Placement:
    return Placement(
        distributed_type="FSDP",
        mixed_precision="bf16",
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        **{"num_processes": 4, "dp_shard_size": 4} | fields,
    )


def counts(placement: Placement, **settings: Any) -> dict[str, int]:
    """Collectives without those of scalars and buffers."""
    sent = step_communication(model=TINY, placement=placement, **settings)
    return {f"{kind} over {len(ranks)}": traffic.count for (kind, ranks), traffic in sent.items() if traffic.bytes > 48}


def test_the_table() -> None:
    """What accelerate_configs/README.md says. Per unit and micro batch: 2 gathers and 1 reduce-scatter under FULL_SHARD, 1 and 1 of the
    tail; 1 and 1 under SHARD_GRAD_OP; HSDP reduces over the replicas too; DDP reduces once."""
    layers = TINY.num_hidden_layers
    assert counts(fsdp(), gradient_accumulation_steps=3) == {
        "all_gather over 4": 3 * (2 * (layers + 1) + 1),
        "reduce_scatter over 4": 3 * (layers + 2),
    }
    assert counts(fsdp(reshard_after_forward=False)) == {"all_gather over 4": layers + 2, "reduce_scatter over 4": layers + 2}
    assert counts(fsdp(dp_shard_size=2, dp_replicate_size=2)) == {
        "all_gather over 2": 2 * (layers + 1) + 1,
        "reduce_scatter over 2": layers + 2,
        "all_reduce over 2": layers + 2,
    }
    assert counts(Placement("MULTI_GPU", 4, 4), gradient_accumulation_steps=3) == {"all_reduce over 4": 2 + 1}


def test_fp32_full_sharding_sends_half_as_much_again_as_ddp() -> None:
    """3 P against 2 P of the parameters' bytes, less the tail's second gather; bf16 gathers make it the same."""
    model = replace(LARGER, vocab_size=100, num_hidden_layers=20)  # No tail to speak of.
    ddp = sent_bytes(step_communication(model=model, placement=Placement("MULTI_GPU", 4, 4)))
    for precision, share in (("no", 1.5), ("bf16", 1.0)):
        placement = replace(fsdp(), mixed_precision=precision)
        assert sent_bytes(step_communication(model=model, placement=placement)) == pytest.approx(share * ddp, rel=0.01)


@pytest.mark.parametrize("model", [TINY, TIED])
def test_shapes_are_those_of_the_model(model: ModelConfig) -> None:
    with torch.device("meta"):
        built = LlamaForCausalLM(llama_config(model))
    assert parameter_shapes(model) == {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    assert sorted(shape for unit in fsdp_units(model, fsdp()) for shape in unit.shapes) == sorted(parameter_shapes(model).values())
