"""Small models whose sizes are chosen for what a test asks, and `prepared`, which has Accelerate shard one."""

from __future__ import annotations

from typing import Any

from fullshard.model.build import build_on_meta, llama_config
from fullshard.recipe.fields import DEFAULT_SHARDING, ModelConfig, ShardingConfig

TINY = ModelConfig(
    vocab_size=131,  # divides by no world size here, so the last rank's shard is the smaller one
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=64,
    attention_bias=True,
)
TIED = ModelConfig(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
GQA = ModelConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
MHA = ModelConfig(
    vocab_size=2000, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8
)


def prepared(model: ModelConfig = TINY, *, seed: int = 7, sharding: ShardingConfig = DEFAULT_SHARDING) -> tuple[Any, Any]:
    from fullshard.parallel.accelerator import build_accelerator
    from fullshard.parallel.wrap import prepare_model
    from fullshard.placement.placement import placement_from_environment

    accelerator = build_accelerator(placement=placement_from_environment(), sharding=sharding, trackers=[])
    return accelerator, prepare_model(accelerator, build_on_meta(llama_config(model)), seed=seed, sharding=sharding)
