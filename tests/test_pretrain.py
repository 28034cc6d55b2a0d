"""Whole runs through the real launcher."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fullshard.__main__ import _check
from fullshard.recipe.fields import OptimConfig
from fullshard.recipe.schedule import learning_rate_factor
from support import HANG_S, ROOT
from support.launcher import SMALL, Launched, launch
from support.launches import STEPS

Run = Callable[[str], Launched]  # See conftest.py.


def test_a_run_learns_and_starts_at_the_uniform_loss(run: Run) -> None:
    losses = run("fsdp").column("train/loss")
    # Not exactly ln(4096): initial logits have a standard deviation of 0.06 x sqrt(64), which adds half its square, 0.12.
    assert losses[0] == pytest.approx(math.log(4096) + 0.12, abs=0.1)
    assert losses[-1] < losses[0] - 1.0


def test_every_rank_holds_its_part(run: Run) -> None:
    """The check in the run itself, and the bytes that it logs: parameters and both moments at 1/4 of 4 bytes each."""
    four, ddp = run("fsdp_fp32 x 4"), run("ddp in fp32")
    parameters = four.config["derived"]["parameters"]
    assert "every rank holds 1/4 of each of" in four.stdout
    assert "not sharded" in ddp.stdout
    for launched, shards in ((four, 4), (ddp, 1)):
        last = launched.metrics[-1]
        whole_gib = 4 * parameters / 2**30
        assert last["memory/parameters_gib"] == pytest.approx(whole_gib / shards, rel=1e-6)
        assert last["memory/gradients_gib"] == pytest.approx(whole_gib / shards, rel=1e-6)
        assert last["memory/optimizer_gib"] == pytest.approx(2 * whole_gib / shards, rel=1e-3)  # plus a step counter per parameter


def test_log_keys_are_those_promised(run: Run) -> None:
    """DESIGN's keys, and no others. mfu_pct needs a device whose peak is known, or logging.peak_tflops."""
    always = {f"train/{key}" for key in ("loss", "grad_norm", "learning_rate", "tokens_seen", "bad_steps", "rollbacks")}
    always |= {f"throughput/{key}" for key in ("tokens_per_second", "step_time_s", "data_wait_pct")}
    kinds = ("allocated", "peak_allocated", "reserved", "host_rss", "parameters", "gradients", "optimizer", "activations", "predicted_peak")
    always |= {f"memory/{kind}_gib" for kind in kinds} | {f"data/{key}" for key in ("retries", "bad_rows", "epochs_min", "epochs_max")}
    metrics = run("fsdp").metrics
    assert all(set(line) == always | {"step"} for line in metrics[:-1])
    assert set(metrics[-1]) == always | {"step", "eval/loss", "eval/perplexity"}
    assert metrics[-1]["eval/perplexity"] == pytest.approx(math.exp(metrics[-1]["eval/loss"]))


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_check_says_what_the_run_says(run: Run, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and communication, before there is a process or a GPU."""
    recipe = tmp_path / "x.yaml"
    values = run(name).config
    recipe.write_text(
        yaml.safe_dump({key: values[key] for key in ("model", "data", "train", "sharding")} | {"output_dir": str(tmp_path / "out")})
    )
    _check(["--accelerate_config", str(ROOT / "accelerate_configs" / f"{name}.yaml"), "--config", str(recipe)])
    memory, communication = capsys.readouterr().out.splitlines()[-2:]
    assert memory.startswith("memory per rank: 0.0")
    assert " GiB sent per rank and step, in " in communication
    for line in (memory, communication):
        assert line in run(name).stdout


def test_learning_rate_is_the_formula(run: Run) -> None:
    """O03, through the launcher."""
    launched = run("fsdp_fp32")
    optim = OptimConfig(**launched.config["optim"])
    expected = [optim.learning_rate * learning_rate_factor(step, optim=optim, max_steps=STEPS) for step in range(1, STEPS + 1)]
    assert launched.column("train/learning_rate") == pytest.approx(expected, rel=1e-12)


def test_predicted_peak_is_near_the_measured_one(run: Run) -> None:
    for name in ("fsdp", "fsdp_fp32 x 4", "ddp in fp32"):
        last = run(name).metrics[-1]
        assert last["memory/predicted_peak_gib"] == pytest.approx(last["memory/peak_allocated_gib"], rel=0.15), name


def test_config_holds_what_the_run_was(run: Run) -> None:
    config = run("fsdp").config
    assert config["precision"] == {"parameters": "float32", "compute": "bfloat16", "gradient_reduction": "float32", "loss": "float32"}
    assert config["accelerate"]["distributed_type"] == "FSDP"
    assert config["accelerate"]["dp_shard_size"] == 2
    # The layers and the tail: final norm, head, and the embedding that it is tied to.
    assert config["model"]["tie_word_embeddings"] is True
    assert config["derived"]["fsdp_units"] == SMALL["model.num_hidden_layers"] + 1
    assert config["derived"]["gradient_accumulation_steps"] == 2
    assert config["model"]["hidden_size"] == SMALL["model.hidden_size"]
    assert set(config["versions"]) == {"fullshard", "torch", "accelerate", "transformers", "datasets", "wandb"}


def test_plain_lines_when_not_a_terminal(run: Run) -> None:
    stdout = run("fsdp").stdout
    assert stdout.count("fullshard pretrain") == 1, "printed by more than one rank"
    assert sum(line.startswith(f"step {STEPS}/{STEPS}  loss ") for line in stdout.splitlines()) == 1
    assert "\x1b" not in stdout
    assert sum(line.startswith("> ") for line in stdout.splitlines()) == 3
    assert "finished" in stdout


def test_second_run_in_a_folder_keeps_the_first(tmp_path: Path) -> None:
    first = launch(tmp_path / "out", train__max_steps=2).check().metrics
    second = launch(tmp_path / "out", train__max_steps=3, seed=1).check()
    assert [line["step"] for line in second.metrics] == [1, 2, 3]
    kept = [json.loads(line) for line in (tmp_path / "out" / "previous" / "1" / "metrics.jsonl").read_text().splitlines()]
    assert kept == first
    assert second.metrics[0]["train/loss"] != first[0]["train/loss"]
    assert "previous/1" in second.stdout


def test_a_folder_that_a_run_writes_to_is_refused(tmp_path: Path) -> None:
    take = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    code = f"import fcntl, os, sys, time\n{take}\nprint('locked', flush=True)\ntime.sleep(60)"
    (tmp_path / "out").mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        launched = launch(tmp_path / "out", train__max_steps=1)
        holder.kill()
    assert launched.returncode != 0
    assert "another run is writing there; choose another folder" in launched.stderr


@pytest.mark.parametrize("command", [[sys.executable], [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_without_accelerate_launch_nothing_runs(tmp_path: Path, command: list[str]) -> None:
    """Nothing would tell the ranks how to shard: torchrun would give unsharded DDP in fp32, in silence."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    result = subprocess.run(
        [*command, "recipes/pretrain.py", "--output_dir", tmp_path],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode != 0
    assert "error: command line: not started by accelerate launch" in result.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wandb_without_a_key_is_offline_one_run_and_exits(tmp_path: Path) -> None:
    """W03, W04, W07: online is asked for, there is no key and no network; two ranks, one run, and W&B holds what metrics.jsonl holds."""
    launched = launch(
        tmp_path / "out", environment={"WANDB_MODE": "online", "HOME": str(tmp_path)}, train__max_steps=3, logging__trackers="[wandb]"
    ).check()
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    lines = [line for line in launched.stdout.splitlines() if "wandb leet" in line]
    assert len(lines) == 1
    assert f"wandb leet {folder}" in lines[0]
    assert f"wandb sync {folder}" in lines[0]
    shown = subprocess.run(
        [Path(sys.executable).parent / "wandb", "leet", "inspect", "--json", folder],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    for value in (launched.metrics[1]["train/loss"], launched.metrics[2]["eval/loss"]):
        assert repr(value) in shown.stdout


def test_a_crash_ends_every_rank(tmp_path: Path) -> None:
    """W03: an error that is nobody's mistake keeps its traceback, and no process stays."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import fullshard.model.optim\n"
        "    def broken(*args, **kwargs): raise ZeroDivisionError('broken on rank 1')\n"
        "    fullshard.model.optim.build_schedule = broken\n"
    )
    launched = launch(tmp_path / "out", environment={"PYTHONPATH": str(site)}, train__max_steps=2)
    assert launched.returncode != 0
    assert "ZeroDivisionError: broken on rank 1" in launched.stderr
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "out")], capture_output=True, text=True, check=False).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []
