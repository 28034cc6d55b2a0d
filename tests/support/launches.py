"""Runs of one recipe through the launcher, in every placement that a CPU can run: one seed, one global batch, 20 steps."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

from support import ROOT
from support.launcher import Launched, finished, launch, start

STEPS = 20
NOT_RUN = {"fsdp_cpu_offload": "needs a GPU"}
FILES = [path.stem for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")) if path.stem not in NOT_RUN]
FP32 = ["--mixed_precision", "no"]
# Beside each file as it is, under its name.
OTHERS = {
    "single in fp32": ("single", FP32),
    "ddp in fp32": ("ddp", FP32),
    "fsdp_fp32 x 4": ("fsdp_fp32", ["--num_processes", "4"]),
}
# What a file needs here and not elsewhere.
LAUNCHER = {
    "fsdp_size_based": ["--fsdp_min_num_params", "10000"],  # A layer of this small model has 30,000 parameters.
    # INDUCTOR generates C++.
    "fsdp_compile": [] if shutil.which("g++") or shutil.which("clang++") else ["--dynamo_backend", "aot_eager"],
}


def launched(name: str, output_dir: Path) -> Launched:
    """One of FILES or OTHERS."""
    file, flags = OTHERS.get(name, (name, LAUNCHER.get(name, [])))
    # A cache of its own: in the user's a killed run may have left half a file.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(output_dir.parent / "inductor")}
    options: dict[str, Any] = {"placement": f"{file}.yaml", "environment": environment, "train__max_steps": STEPS}
    if file != "fsdp1_hybrid":
        return launch(output_dir, launcher=flags, **options).check()
    # Two machines on this one.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        flags = ["--main_process_port", str(free.getsockname()[1])]
    with start(output_dir, launcher=[*flags, "--machine_rank", "1"], **options) as other:
        try:
            first = launch(output_dir, launcher=flags, **options)
            return finished(other, output_dir).check() and first.check()
        finally:
            other.kill()
