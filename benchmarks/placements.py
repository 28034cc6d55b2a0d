"""The debug recipe under each placement, in one go: loss, speed and memory side by side.

python benchmarks/placements.py [--steps 40] [--rounds 3] [--write]

Launches are interleaved (every placement once per round) because machines drift: compare rows of one record, not records. With --write the
record goes to benchmarks/records/placements.json and the table into README.md; a test fails when the two disagree.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "placements.json"
PLACEMENTS = ("fsdp.yaml", "fsdp_fp32.yaml", "ddp.yaml")
MARKED = re.compile(r"<!-- placements -->.*?<!-- /placements -->", re.S)


def run(config: str, *, steps: int) -> dict[str, Any]:
    """Last logged values and derived quantities of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"--output_dir={folder}", f"--train.max_steps={steps}", "--logging.trackers=[]", "--logging.sample_tokens=0"]
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            f"accelerate_configs/{config}",
            "recipes/pretrain.py",
            *overrides,
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        described = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    # The first line's window is the first step: first touch of all memory.
    speeds = [line["throughput/tokens_per_second"] for line in lines[1:]]
    return {
        "tokens_per_second": statistics.median(speeds),
        "train_loss": lines[-1]["train/loss"],
        "eval_loss": lines[-1]["eval/loss"],
        "peak_allocated_gib": lines[-1]["memory/peak_allocated_gib"],
        "states_gib": sum(lines[-1][f"memory/{kind}_gib"] for kind in ("parameters", "gradients", "optimizer")),
        "predicted_peak_gib": lines[-1]["memory/predicted_peak_gib"],
        "ranks": described["accelerate"]["num_processes"],
        "parameters": described["derived"]["parameters"],
        "initial_weights_hash": described["derived"]["initial_weights_hash"],
        "git_commit": described["git_commit"],
        "versions": described["versions"],
    }


def measure(*, steps: int, rounds: int) -> dict[str, Any]:
    """The record: per placement the median over rounds of speed, and the values that do not vary."""
    results: dict[str, list[dict[str, Any]]] = {config: [] for config in PLACEMENTS}
    for _ in range(rounds):
        for config in PLACEMENTS:
            results[config].append(run(config, steps=steps))
    first = results[PLACEMENTS[0]][0]
    rows = {}
    for config, runs in results.items():
        ratios = [mine["tokens_per_second"] / ddp["tokens_per_second"] for mine, ddp in zip(runs, results["ddp.yaml"], strict=True)]
        rows[config] = {
            key: runs[0][key] for key in ("train_loss", "eval_loss", "peak_allocated_gib", "predicted_peak_gib", "states_gib")
        } | {
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in runs),
            "speed_over_ddp": statistics.median(ratios),
            "same_initial_weights": all(r["initial_weights_hash"] == first["initial_weights_hash"] for r in runs),
        }
    return {
        "command": f"python benchmarks/placements.py --steps {steps} --rounds {rounds}",
        "recipe": "recipes/pretrain_llama3_debug.yaml",
        "hardware": f"{psutil.cpu_count()} CPU cores, {platform.machine()}, shared machine",
        "steps": steps,
        "rounds": rounds,
        **{key: first[key] for key in ("ranks", "parameters", "git_commit", "versions")},
        "rows": rows,
    }


def table(record: dict[str, Any]) -> str:
    """The record as README's Markdown."""
    lines = [
        f"| {record['ranks']} ranks, {record['parameters'] / 1e6:.1f} M parameters | loss after {record['steps']} steps | held-out loss "
        "| parameters, gradients, optimizer per rank | peak per rank (expected) | speed / DDP |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{config}` | {row['train_loss']:.4f} | {row['eval_loss']:.4f} | {row['states_gib'] * 1024:.1f} MiB "
        f"| {row['peak_allocated_gib'] * 1024:.0f} MiB ({row['predicted_peak_gib'] * 1024:.0f}) | {row['speed_over_ddp']:.2f} |"
        for config, row in record["rows"].items()
    ]
    commit = (record["git_commit"] or "unknown")[:12]
    note = f"{record['hardware']}, commit {commit}, `{record['command']}`; speeds are ratios within one run of it."
    return "\n".join(["<!-- placements -->", *lines, "", note, "<!-- /placements -->"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="update the record and README.md")
    arguments = parser.parse_args()
    record = measure(steps=arguments.steps, rounds=arguments.rounds)
    print(table(record))
    if arguments.write:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        readme = ROOT / "README.md"
        readme.write_text(MARKED.sub(lambda _: table(record), readme.read_text()))


if __name__ == "__main__":
    main()
