"""Step time of the debug recipe in bf16 and fp16 against fp32, eager and compiled.

python benchmarks/precision.py [--steps 10] [--rounds 5] [--write]

On a GPU the short types are the fast ones; here it is to be seen that a CPU which is slow at them does not pay for them. The ranks are
started once and take each config in turn, round after round, because machines drift; a ratio is that of two neighbours in a round. With
--write the record goes to benchmarks/records/precision.json, the table into README.md; a test fails when they disagree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sharding import RECIPE, ROOT, GlooPool, provenance, take_steps

RECORD = ROOT / "benchmarks" / "records" / "precision.json"
RANKS = 2
CONFIGS = {"fp32": "fsdp_fp32.yaml", "bf16": "fsdp.yaml", "fp16": "fsdp_fp16.yaml"}
COMPILED = "fsdp_compile.yaml"
# Data are read in the process that trains, as little as can be: what is measured is the step.
OVERRIDES = ("--data.num_workers=0", "--data.num_streams=16", "--optim.warmup_steps=0")
FROM, TO = "<!-- precision -->", "<!-- /precision -->"


def cpu() -> dict[str, Any]:
    """What torch says of this CPU."""
    import torch

    from fullshard.parallel.cpu_products import has_fast_products

    fast = [name for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items() if has_fast_products(dtype)]
    return {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "fast_products": fast}


def measure(*, steps: int, rounds: int) -> dict[str, Any]:
    """The record: medians over the rounds."""
    pool = GlooPool()
    words = ["--config", str(ROOT / RECIPE), *OVERRIDES]
    times: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in CONFIGS} for mode in ("eager", "compiled")}
    losses: dict[str, float] = {}
    try:
        for _ in range(rounds):
            for mode, own in times.items():
                for name, config in CONFIGS.items():
                    compiled = mode == "compiled"
                    result, *_ = pool.run(
                        take_steps,
                        world_size=RANKS,
                        config=COMPILED if compiled else config,
                        environment={"ACCELERATE_MIXED_PRECISION": "no" if name == "fp32" else name} if compiled else None,
                        timeout=600,
                        steps=steps,
                        words=words,
                    )
                    own[name].append(result["step_s"])
                    print(f"{mode} {name}: {result['step_s']:.3f} s a step", flush=True)
                    losses[f"{mode} {name}"] = result["loss"]
    finally:
        pool.close()
    return {
        **provenance(f"python benchmarks/precision.py --steps {steps} --rounds {rounds}"),
        **cpu(),
        "recipe": RECIPE,
        "overrides": list(OVERRIDES),
        "ranks": RANKS,
        "rounds": rounds,
        "losses": losses,
        "step_s": {mode: {name: statistics.median(each) for name, each in own.items()} for mode, own in times.items()},
        "over_fp32": {
            mode: {name: statistics.median(one / fp32 for one, fp32 in zip(each, own["fp32"], strict=True)) for name, each in own.items()}
            for mode, own in times.items()
        },
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["| step time, debug recipe | of fp32's, eager | of fp32's, compiled layers |", "|---|---|---|"]
    for name, config in CONFIGS.items():
        ratios = " | ".join(f"{own[name]:.2f} ({record['step_s'][mode][name]:.3f} s)" for mode, own in record["over_fp32"].items())
        lines.append(f"| {name}, `{config}` | {ratios} |")
    slow = [name for name in ("bf16", "fp16") if name not in record["fast_products"]]
    products = f"torch has no fast products in {' and '.join(slow)}" if slow else "torch has fast products in both"
    note = (
        f"{record['hardware']}, {record['cpu_capability']}: {products}; {record['ranks']} ranks, commit {record['git_commit']}, "
        f"`{record['command']}`. Compiled is `{COMPILED}` in each precision."
    )
    return "\n".join([FROM, *lines, "", note, TO])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each config in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update the record and README.md")
    arguments = parser.parse_args()
    record = measure(steps=arguments.steps, rounds=arguments.rounds)
    print(table(record))
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        readme = ROOT / "README.md"
        before, _, rest = readme.read_text().partition(FROM)
        readme.write_text(before + table(record) + rest.partition(TO)[2])


if __name__ == "__main__":
    main()
