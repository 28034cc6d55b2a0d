"""The real thing: `accelerate launch --config_file ... recipes/pretrain.py ...` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support import HANG_S, ROOT

# A model and a batch that train in a second; everything else as in the debug recipe.
SMALL = {
    "model.hidden_size": 64,
    "model.intermediate_size": 96,
    "model.num_hidden_layers": 2,
    "data.sequence_length": 64,
    "data.num_streams": 4,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "optim.warmup_steps": 5,
    "evaluation.max_rows": 5,
    "checkpoint.every": 0,
    "logging.every": 1,
    "logging.sample_tokens": 4,
    "logging.trackers": "[]",
}


@dataclass(frozen=True)
class Launched:
    returncode: int
    stdout: str
    stderr: str
    output_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.output_dir / "config.yaml").read_text())

    def column(self, key: str) -> list[float]:
        return [line[key] for line in self.metrics if key in line]

    def check(self) -> Launched:
        assert self.returncode == 0, self.stdout + self.stderr
        return self


def start(
    output_dir: Path,
    /,
    *,
    placement: str | Path = "fsdp.yaml",
    launcher: list[str] | None = None,
    environment: dict[str, str] | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    preexec_fn: Callable[[], Any] | None = None,
    **overrides: Any,
) -> subprocess.Popen[str]:
    """overrides: `train__max_steps=3` for --train.max_steps 3. SMALL applies where nothing is said; None takes a key out of it."""
    values = SMALL | {key.replace("__", "."): value for key, value in overrides.items()}
    values.setdefault("output_dir", output_dir)
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(placement if Path(placement).is_absolute() else ROOT / "accelerate_configs" / placement)),
        *(launcher or []),
        "recipes/pretrain.py",
        *(word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONFAULTHANDLER": "1"} | (environment or {}),
        stdout=stdout,
        stderr=stderr,
        text=True,
        stdin=stdin,
        preexec_fn=preexec_fn,
    )


def launch(output_dir: Path, /, *, timeout: float = HANG_S, **options: Any) -> Launched:
    """`start`, and its end. A launch that does not end within `timeout` seconds is a hang: subprocess.TimeoutExpired."""
    with start(output_dir, **options) as process:
        try:
            return finished(process, output_dir, timeout=timeout)
        except BaseException:
            process.kill()
            raise


def finished(process: subprocess.Popen[str], output_dir: Path, *, timeout: float = HANG_S) -> Launched:
    stdout, stderr = process.communicate(timeout=timeout)
    return Launched(process.returncode, stdout, stderr, output_dir)
