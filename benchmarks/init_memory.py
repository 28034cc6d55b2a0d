"""Host memory and time to start a 1.1B Llama from scratch, up to the optimizer.

accelerate launch --config_file accelerate_configs/fsdp.yaml benchmarks/init_memory.py [--config RECIPE] [--model.key value ...]

Prints one JSON object: the largest over ranks of the peak RSS beyond what imports take, in GiB and as a share of the whole fp32 model
(4 bytes x parameters), which is what a rank would hold without sharding.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from accelerate.utils import gather_object

from fullshard.errors import one_line_errors
from fullshard.measure.memory import host_rss_bytes
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.parameters import sharded_fraction, weights_hash
from fullshard.parallel.accelerator import build_accelerator
from fullshard.parallel.precision import check_precision
from fullshard.parallel.wrap import prepare_model
from fullshard.placement.launch import check_launch
from fullshard.plan.shapes import GIB
from fullshard.recipe.parsing import parse_recipe

# TinyLlama's shape (arXiv:2401.02385): 1.1 B parameters. Any of it can be overridden on the command line, which is read after it.
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": "false",
}


@one_line_errors
def main() -> None:
    recipe = parse_recipe([*(f"--model.{key}={value}" for key, value in SHAPE.items()), *sys.argv[1:]])
    placement = check_launch()
    accelerator = build_accelerator(placement=placement, sharding=recipe.sharding, trackers=[])
    imports = host_rss_bytes()
    begin = time.perf_counter()
    model = prepare_model(accelerator, build_on_meta(llama_config(recipe.model)), seed=recipe.seed)
    started_s = time.perf_counter() - begin
    check_precision(accelerator, model, sharding=recipe.sharding)
    held = sharded_fraction(model, shards=placement.dp_shard_size)
    digest = weights_hash(model)
    whole = 4 * sum(p.numel() for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = gather_object([(peak - imports, imports)])
    if accelerator.is_main_process:
        beyond, before = max(peaks)
        record = {
            "ranks": accelerator.num_processes,
            "parameters": whole // 4,
            "parameters_sharded": held,
            "whole_model_gib": round(whole / GIB, 3),
            "imports_rss_gib": round(before / GIB, 3),
            "peak_rss_beyond_imports_gib": round(beyond / GIB, 3),
            "share_of_whole_model": round(beyond / whole, 3),
            "seconds_to_sharded_weights": round(started_s, 1),
            "initial_weights_hash": digest,
            "torch": torch.__version__,
        }
        print(json.dumps(record))
    accelerator.end_training()


if __name__ == "__main__":
    main()
