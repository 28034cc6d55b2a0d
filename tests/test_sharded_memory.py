"""What sharding saves, measured on 4 ranks with a model whose parameters, gradients and optimizer state outweigh everything else."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_memory import measured
from test_train_step import OPTIM

from fullshard.config import DEFAULT_SHARDING, ModelConfig, ShardingConfig
from fullshard.memory import activation_bytes_per_token, measure_memory, optimizer_bytes, parameter_counts, predict_memory, tensor_bytes
from fullshard.model import build_on_meta, llama_config
from fullshard.optim import build_optimizer, build_schedule

MODEL = ModelConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=4
)
COUNTS = parameter_counts(MODEL)
PARAMETERS = COUNTS["total"]  # All shapes divide by 4.
ROWS, LENGTH = 1, 8


def memory_of_a_step(
    *, model: ModelConfig, rows: int, length: int, gradient_accumulation_steps: int = 1, sharding: ShardingConfig = DEFAULT_SHARDING
) -> dict[str, int]:
    """Bytes of this rank, less what was there before the model."""
    from fullshard.accelerator import build_accelerator, prepare_model
    from fullshard.sharding import placement_from_environment
    from fullshard.train import train_step

    gc.collect()
    base = measured(lambda: None).allocated
    accelerator = build_accelerator(placement=placement_from_environment(), sharding=sharding, trackers=[])
    built = prepare_model(accelerator, build_on_meta(llama_config(model)), seed=0, sharding=sharding)
    raw = build_optimizer(built.parameters(), optim=OPTIM)
    schedule = build_schedule(raw, optim=OPTIM, max_steps=8)
    optimizer = accelerator.prepare_optimizer(raw)
    ids = torch.randint(0, model.vocab_size, (gradient_accumulation_steps * rows, length))
    uses = []
    for _ in range(5):
        with measure_memory(accelerator.device) as measurement:
            step = train_step(
                accelerator=accelerator,
                model=built,
                optimizer=optimizer,
                schedule=schedule,
                inputs=ids,
                targets=ids,
                micro_batch_size=rows,
                max_grad_norm=1.0,
                sharding=sharding,
                measurement=measurement,
            )
        assert measurement.use is not None
        uses.append(measurement.use)
    use = min(uses[2:], key=lambda use: use.peak_allocated)  # As in test_memory.
    return {
        "states": tensor_bytes(built.parameters()) + step.gradient_bytes + optimizer_bytes(raw),
        "peak": use.peak_allocated - base,
        "left_by_forward": use.activations,
    }


def test_states_are_cut_by_the_ranks_of_a_shard(pool: Any) -> None:
    """Parameters, gradients and AdamW's moments, 16 bytes a parameter under DDP: 1/4 of it fully sharded and under SHARD_GRAD_OP, 1/2 under
    HSDP 2 x 2. At the peak of the step that is all there is beside gathered units, the gradient being reduced, and activations.
    """
    results = {
        (config, accumulation): pool.run(
            memory_of_a_step,
            world_size=4,
            config=config,
            model=MODEL,
            rows=ROWS,
            length=LENGTH,
            gradient_accumulation_steps=accumulation,
        )[3]
        for config, accumulation in (("ddp.yaml", 1), ("fsdp.yaml", 2), ("fsdp_shard_grad_op.yaml", 2), ("fsdp_hybrid.yaml", 1))
    }
    whole = results["ddp.yaml", 1]["states"]
    assert whole == pytest.approx(16 * PARAMETERS, rel=0.001)  # And a step counter per parameter.
    for (config, accumulation), rank in results.items():
        if config == "ddp.yaml":
            continue
        shards = 2 if config == "fsdp_hybrid.yaml" else 4
        assert rank["states"] <= 1.05 * whole / shards
        predicted = predict_memory(
            model=MODEL,
            distributed_type="FSDP",
            shard_size=shards,
            mixed_precision="bf16",
            micro_batch_size=ROWS,
            sequence_length=LENGTH,
            reshard_after_forward=config != "fsdp_shard_grad_op.yaml",
            gradient_accumulation_steps=accumulation,
        )
        assert rank["states"] == pytest.approx(sum(predicted[kind] for kind in ("parameters", "gradients", "optimizer")), rel=0.05)
        assert rank["peak"] == pytest.approx(predicted["peak"], rel=0.05)
        if config == "fsdp.yaml":
            reducing = (2 + 4) * COUNTS["layer"]
            assert rank["peak"] - predicted["gathered"] - reducing - predicted["activations"] <= 1.05 * whole / 4
        if config == "fsdp_shard_grad_op.yaml":  # The whole model in bf16 is there when the forward ends.
            assert rank["left_by_forward"] == pytest.approx(2 * PARAMETERS + predicted["activations"], rel=0.05)


def test_checkpointed_layers_keep_their_inputs(pool: Any) -> None:
    """2 bytes per token, layer and channel; selective lies between that and all."""
    model = replace(MODEL, vocab_size=64, num_hidden_layers=8)  # Next to no head: what is left are the layers.
    rows, length, tokens = 2, 256, 512
    per_token = activation_bytes_per_token(model, compute_bytes=2)
    kinds = ("none", "selective", "full")
    none, selective, full = (
        pool.run(
            memory_of_a_step, world_size=2, config="fsdp.yaml", model=model, rows=rows, length=length,
            sharding=ShardingConfig(activation_checkpointing=kind),
        )[0]
        for kind in kinds
    )  # fmt: skip
    besides = 2 * parameter_counts(model)["tail"] + tokens * per_token["head"]  # The tail stays gathered.
    inputs = tokens * model.num_hidden_layers * 2 * model.hidden_size
    assert none["left_by_forward"] - besides == pytest.approx(tokens * model.num_hidden_layers * per_token["layer"], rel=0.1)
    assert full["left_by_forward"] - besides == pytest.approx(inputs, rel=0.1)
    for key in ("left_by_forward", "peak"):
        assert full[key] < 0.8 * selective[key]
        assert selective[key] < 0.8 * none[key]
