"""What a benchmark promises, where it is a bound and not a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.recipe.parsing import parse_recipe
from support import HANG_S, ROOT
from support.benchmarks import benchmark


@pytest.mark.launch
def test_a_rank_starts_a_1b_model_in_its_shards_and_little_more() -> None:
    """Peak RSS of each of 2 ranks, beyond its imports, under 0.75 of the whole fp32 model; half of it are the shards."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/fsdp.yaml",
        "benchmarks/init_memory.py",
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["parameters"] == 1_100_048_384
    assert measured["parameters_sharded"] == [201, 201]
    assert 0.5 < measured["share_of_whole_model"] < 0.75


def test_default_recipe_reaches_its_goal_in_its_time() -> None:
    """Held-out loss below 4 nats in under 12 minutes on 2 cores without fast bf16, at the recipe that is shipped; README quotes the run."""
    record = json.loads((ROOT / "benchmarks" / "records" / "debug_recipe.json").read_text())
    recipe = parse_recipe(["--config", str(ROOT / record["recipe"])])
    assert record["steps"] == recipe.train.max_steps
    assert record["tokens"] == recipe.train.max_steps * recipe.train.global_batch_size * recipe.data.sequence_length
    assert record["eval_loss"] < 4.0
    assert record["training_s"] < 720
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Training took {record['training_s']} s on two cores and ended at {record['eval_loss']:.2f} nats per token" in readme


def test_an_asynchronous_save_waits_less_than_a_durable_one(tmp_path: Path) -> None:
    """The benchmark's saves, small; and the run whose starts it measures is a recipe."""
    checkpoint = benchmark("checkpoint")
    measured = checkpoint.measure_saves(tmp_path, gigabytes=0.1, rounds=1)
    summary = checkpoint.summary([measured])
    assert summary["ranks"] == 2
    # Weights and two moments in fp32; little is added.
    assert summary["parameters"] * 12 / 1e9 < summary["checkpoint_gb"] < summary["parameters"] * 12 / 1e9 * 1.01
    assert summary["async_stall_over_sync"] < 0.5
    recipe = parse_recipe(checkpoint.run_words(1.0))
    assert (recipe.train.max_steps, recipe.checkpoint.every, recipe.checkpoint.resume) == (2, 1, "auto")


def test_readme_quotes_the_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "init_memory.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{record['peak_rss_beyond_imports_gib']:.2f} GiB" in readme
    assert f"{record['share_of_whole_model']:.2f} of the whole model" in readme
