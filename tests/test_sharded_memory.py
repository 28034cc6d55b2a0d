"""What sharding saves, measured on 4 ranks with a model whose parameters, gradients and optimizer state outweigh everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fullshard.placement.placement import placement_from_yaml
from fullshard.plan.memory import activation_bytes_per_token, predict_memory
from fullshard.plan.shapes import parameter_counts
from fullshard.recipe.fields import ModelConfig, ShardingConfig
from support import ROOT
from support.memory import memory_of_a_step

MODEL = ModelConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=4
)
COUNTS = parameter_counts(MODEL)
PARAMETERS = COUNTS["total"]  # All shapes divide by 4.
ROWS, LENGTH = 1, 8


@pytest.mark.parametrize(
    ("config", "shards", "micro_batches"),
    [
        ("ddp.yaml", 1, 1),
        ("fsdp.yaml", 4, 1),
        ("fsdp.yaml", 4, 2),
        ("fsdp_shard_grad_op.yaml", 4, 1),
        ("fsdp_hybrid.yaml", 2, 1),
        ("fsdp_hybrid.yaml", 2, 2),
        ("fsdp_fine_grained.yaml", 4, 2),
        ("fsdp_no_wrap.yaml", 4, 2),
    ],
)
def test_states_are_cut_by_the_ranks_of_a_shard(pool: Any, config: str, shards: int, micro_batches: int) -> None:
    """Parameters, gradients and AdamW's moments, 16 bytes a parameter under DDP: 1/4 of it fully sharded and under SHARD_GRAD_OP, 1/2 under
    HSDP 2 x 2. At the peak of the step that is all there is beside gathered units, the gradient being reduced, and activations.
    """
    placement = placement_from_yaml(ROOT / "accelerate_configs" / config, num_processes=4)
    predicted = predict_memory(
        model=MODEL, placement=placement, micro_batch_size=ROWS, sequence_length=LENGTH, gradient_accumulation_steps=micro_batches
    )
    step = {"model": MODEL, "rows": ROWS, "length": LENGTH, "micro_batches": micro_batches}
    for rank in pool.run(memory_of_a_step, world_size=4, config=config, **step):
        for kind, size in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
            assert rank[kind] == pytest.approx(size * PARAMETERS / shards, rel=0.001)  # And a step counter per parameter.
        assert rank["peak"] == pytest.approx(predicted["peak"], rel=0.05)
        if config == "fsdp.yaml":
            reducing = (2 + 4) * COUNTS["layer"]
            assert rank["peak"] - predicted["gathered"] - reducing - predicted["activations"] <= 1.05 * 16 * PARAMETERS / 4
        if config == "fsdp_shard_grad_op.yaml":  # The whole model in bf16 is there when the forward ends.
            assert rank["activations"] == pytest.approx(2 * PARAMETERS + predicted["activations"], rel=0.05)


@pytest.mark.parametrize(
    ("config", "world_size", "micro_batches", "tied"),
    [
        ("fsdp.yaml", 4, 2, True),
        ("fsdp_fp32.yaml", 2, 2, True),
        ("fsdp_fp32.yaml", 4, 2, False),
        ("fsdp_hybrid.yaml", 4, 1, True),
        ("ddp.yaml", 2, 2, True),
        ("single.yaml", 1, 2, True),
        ("single.yaml", 1, 1, False),
    ],
)
def test_the_embedding_may_be_most_of_the_model(pool: Any, config: str, world_size: int, micro_batches: int, tied: bool) -> None:
    model = replace(MODEL, vocab_size=16_000, hidden_size=64, intermediate_size=176, num_hidden_layers=2, tie_word_embeddings=tied)
    placement = placement_from_yaml(ROOT / "accelerate_configs" / config, num_processes=world_size)
    predicted = predict_memory(
        model=model, placement=placement, micro_batch_size=1, sequence_length=16, gradient_accumulation_steps=micro_batches
    )
    step = {"model": model, "rows": 1, "length": 16, "micro_batches": micro_batches}
    for rank in pool.run(memory_of_a_step, world_size=world_size, config=config, **step):
        assert rank["peak"] == pytest.approx(predicted["peak"], rel=0.03)


def test_checkpointed_layers_keep_their_inputs(pool: Any) -> None:
    """2 bytes per token, layer and channel, and in backward one layer more; selective lies between that and all."""
    model = replace(MODEL, vocab_size=64, num_hidden_layers=8)  # Next to no head: what is left are the layers.
    rows, length, tokens = 2, 256, 512
    per_token = activation_bytes_per_token(model, compute_bytes=2)
    counts = parameter_counts(model)
    none, selective, full = (
        pool.run(
            memory_of_a_step, world_size=4, config="fsdp.yaml", model=model, rows=rows, length=length, micro_batches=1,
            sharding=ShardingConfig(activation_checkpointing=kind),
        )[0]
        for kind in ("none", "selective", "full")
    )  # fmt: skip
    besides = 2 * counts["tail"] + tokens * per_token["head"]  # The tail stays gathered.
    inputs, one_layer = tokens * model.num_hidden_layers * 2 * model.hidden_size, tokens * per_token["layer"]
    assert none["activations"] - besides == pytest.approx(model.num_hidden_layers * one_layer, rel=0.1)
    assert full["activations"] - besides == pytest.approx(inputs, rel=0.1)
    # Computed again: its weights and the next one's are gathered. The gradient of its output is there.
    states = full["parameters"] + full["optimizer"]
    assert full["in_last_layer"] - states - 2 * 2 * counts["layer"] == pytest.approx(inputs + one_layer, rel=0.1)
    for key in ("activations", "peak"):
        assert full[key] < 0.8 * selective[key]
        assert selective[key] < 0.8 * none[key]
