"""One recipe under every accelerate config, in one go: memory per rank by category, step time, bytes sent, loss.

python benchmarks/sharding.py [--steps 8] [--rounds 2] [--configs fsdp.yaml ...] [--write]

The ranks are started once and take each config in turn, round after round, because machines drift: compare rows of one record, not
records. A step of each is measured to the byte, its collectives counted. With --write the record goes to benchmarks/records/sharding.json,
the tables into README.md, accelerate_configs/README.md and docs/fsdp.md, the plots into docs/; tests fail when they disagree. Plots need
`pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "sharding.json"
PAGES = ("README.md", "accelerate_configs/README.md", "docs/fsdp.md")
sys.path.insert(0, str(ROOT / "tests"))  # support/pool.py: the gloo processes that the tests use too.

import psutil  # noqa: E402

from support.pool import GlooPool  # noqa: E402

RANKS = 4
RECIPE = "recipes/pretrain_llama3_debug.yaml"
# More and smaller layers than the recipe has, so that one of them is a small part of the model, and short rows, so that the model is not a
# small part of the memory. One process takes its rows as the ranks take theirs, 4 at a time.
OVERRIDES = (
    *("--model.num_hidden_layers=8", "--model.hidden_size=128", "--model.intermediate_size=344", "--model.tie_word_embeddings=false"),
    *("--data.sequence_length=32", "--train.micro_batch_size=4", "--optim.warmup_steps=0"),
    *("--data.num_workers=0", "--data.num_streams=16"),
)
# Everything that runs without a GPU. Compiled code is left out: compiling takes longer than all of the rest.
LEFT_OUT = ("fsdp_cpu_offload.yaml", "fsdp_compile.yaml")
# Whose memory is drawn over a step, and in README.
DRAWN = {
    "ddp.yaml": "DDP",
    "fsdp_shard_grad_op.yaml": "SHARD_GRAD_OP",
    "fsdp.yaml": "FULL_SHARD",
    "fsdp_activation_checkpointing.yaml": "FULL_SHARD, activation checkpointing",
}
POINTS = 400  # Of a drawn line.
MIB = 2**20


def take_steps(*, steps: int, words: Sequence[str]) -> dict[str, Any]:
    """What rank 0 measures over `steps` steps and one more: the recipe's run, without what is around its steps."""
    from fullshard.data.batches import train_batches
    from fullshard.data.sources import list_corpus
    from fullshard.data.tokenizer import load_tokenizer
    from fullshard.measure.communication import count_communication
    from fullshard.measure.memory import measure_memory, optimizer_bytes, tensor_bytes
    from fullshard.model.build import build_on_meta, llama_config
    from fullshard.model.optim import build_optimizer, build_schedule
    from fullshard.parallel.accelerator import build_accelerator
    from fullshard.parallel.wrap import prepare_model
    from fullshard.placement.placement import placement_from_environment
    from fullshard.plan.communication import sent_bytes
    from fullshard.recipe.batch import resolve_batch
    from fullshard.recipe.parsing import parse_recipe
    from fullshard.train.step import train_step

    placement = placement_from_environment()
    recipe = resolve_batch(parse_recipe(words), world_size=placement.num_processes)
    assert recipe.train.micro_batch_size is not None
    accelerator = build_accelerator(placement=placement, sharding=recipe.sharding, trackers=[])
    gc.collect()
    with measure_memory(accelerator.device) as before:
        pass
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    batches = train_batches(
        data=recipe.data,
        tokenizer=tokenizer,
        corpus=list_corpus(recipe.data, held_out=True),
        seed=recipe.seed,
        rank=accelerator.process_index,
        world_size=placement.num_processes,
        global_batch_size=recipe.train.global_batch_size,
    )
    model = prepare_model(
        accelerator, build_on_meta(llama_config(recipe.model, tokenizer=tokenizer)), seed=recipe.seed, sharding=recipe.sharding
    )
    adamw = build_optimizer(model.parameters(), optim=recipe.optim)
    schedule = build_schedule(adamw, optim=recipe.optim, max_steps=recipe.train.max_steps)
    if (scaler := accelerator.scaler) is not None:  # fp16 as after some steps: from torch's 2^16 the first ones overflow and are left out.
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10})
    step = functools.partial(
        train_step,
        accelerator=accelerator,
        model=model,
        optimizer=accelerator.prepare_optimizer(adamw),
        schedule=schedule,
        micro_batch_size=recipe.train.micro_batch_size,
        max_grad_norm=recipe.train.max_grad_norm,
        sharding=recipe.sharding,
    )
    times = []
    for _ in range(steps):
        rows = next(batches)
        start = time.perf_counter()
        step(inputs=rows[:, :-1], targets=rows[:, 1:]).loss.item()
        times.append(time.perf_counter() - start)
    phases: list[tuple[str, int]] = []
    rows = next(batches)
    main = accelerator.is_main_process
    with count_communication() as communication, measure_memory(accelerator.device, enabled=main) as measurement:
        result = step(
            inputs=rows[:, :-1],
            targets=rows[:, 1:],
            measurement=measurement,
            phase=lambda name: phases.append((name, time.time_ns())),
        )
    if not main:
        return {}
    use, base = measurement.use, before.use
    assert use is not None
    assert base is not None
    first, last = use.timeline[0][0], use.timeline[-1][0]
    return {
        "loss": result.loss.item(),
        "step_s": statistics.median(times[2:] or times),  # The first touches all memory, the second rebuilds DDP's buckets.
        "parameters": tensor_bytes(model.parameters()),
        "gradients": result.gradient_bytes,
        "optimizer": optimizer_bytes(adamw),
        "left_by_forward": use.activations,
        "peak": use.peak_allocated - base.allocated,
        "sent": sent_bytes(communication),
        "collectives": {
            kind: sum(traffic.count for (other, _), traffic in communication.items() if other == kind)
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
        },
        "phases": [(name, (at - first) / (last - first)) for name, at in phases],
        "timeline": _thinned([((at - first) / (last - first), size - base.allocated) for at, size in use.timeline]),
        "model_parameters": sum(p.numel() for p in build_on_meta(llama_config(recipe.model, tokenizer=tokenizer)).parameters()),
    }


def _thinned(timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The largest of each of POINTS equal parts of the step."""
    largest: dict[int, int] = {}
    for at, size in timeline:
        part = min(int(at * POINTS), POINTS - 1)
        largest[part] = max(size, largest.get(part, 0))
    return [(part / POINTS, size) for part, size in sorted(largest.items())]


def measure(*, configs: Sequence[str], steps: int, rounds: int) -> dict[str, Any]:
    """The record: rank 0's values of the first round, and of the times the medians over the rounds."""
    from fullshard.placement.placement import placement_from_yaml

    pool = GlooPool()
    runs: dict[str, list[dict[str, Any]]] = {config: [] for config in configs}
    try:
        for _ in range(rounds):
            for config in configs:
                alone = placement_from_yaml(ROOT / "accelerate_configs" / config).distributed_type == "NO"
                world_size = 1 if alone else RANKS
                words = ["--config", str(ROOT / RECIPE), *OVERRIDES]
                results = pool.run(take_steps, world_size=world_size, config=config, timeout=300, steps=steps, words=words)
                runs[config].append(results[0] | {"ranks": world_size})
    finally:
        pool.close()
    rows = {}
    for config, own in runs.items():
        row = {key: value for key, value in own[0].items() if key not in ("timeline", "phases", "model_parameters", "step_s")}
        row["step_s"] = statistics.median(run["step_s"] for run in own)
        row["step_over_ddp"] = statistics.median(run["step_s"] / ddp["step_s"] for run, ddp in zip(own, runs["ddp.yaml"], strict=True))
        rows[config] = row
    return {
        **provenance(f"python benchmarks/sharding.py --steps {steps} --rounds {rounds}"),
        "recipe": RECIPE,
        "overrides": list(OVERRIDES),
        "ranks": RANKS,
        "parameters": runs["ddp.yaml"][0]["model_parameters"],
        "steps": steps + 1,
        "rounds": rounds,
        "rows": rows,
        "traces": {config: {key: runs[config][0][key] for key in ("phases", "timeline")} for config in DRAWN if config in runs},
    }


def provenance(command: str) -> dict[str, Any]:
    """What every record says of where it is from."""
    commit = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "command": command,
        "hardware": f"{psutil.cpu_count()} CPU cores, {platform.machine()}, shared machine",
        "git_commit": commit.stdout.strip(),
    }


def table(record: dict[str, Any], *, configs: Sequence[str] | None = None) -> str:
    """The record as Markdown, all of it or these configs."""
    lines = [
        f"| {record['ranks']} ranks, {record['parameters'] / 1e6:.1f} M parameters | parameters, gradients, optimizer per rank "
        f"| peak per rank | of DDP's | sent per rank and step | step time / DDP | loss of step {record['steps']} |",
        "|---|---|---|---|---|---|---|",
    ]
    ddp = record["rows"]["ddp.yaml"]
    for config in configs or record["rows"]:
        row = record["rows"][config]
        states = row["parameters"] + row["gradients"] + row["optimizer"]
        lines.append(
            f"| `{config}`{'' if row['ranks'] == record['ranks'] else ' (1 rank)'} | {states / MIB:.1f} MiB | {row['peak'] / MIB:.1f} MiB "
            f"| {row['peak'] / ddp['peak']:.2f} | {row['sent'] / MIB:.1f} MiB | {row['step_over_ddp']:.2f} | {row['loss']:.4f} |"
        )
    note = (
        f"{record['hardware']}, commit {record['git_commit']}, `{record['command']}`: `{record['recipe']}` with {len(record['overrides'])} "
        "overrides. Ranks share the cores and send through memory: the times say what the code costs, not what a network does."
    )
    return "\n".join(["<!-- sharding -->", *lines, "", note, "<!-- /sharding -->"])


def digest(record: dict[str, Any]) -> str:
    """Of what is drawn; each PNG holds it."""
    return hashlib.sha256(json.dumps([record["rows"], record["traces"]], sort_keys=True).encode()).hexdigest()


def plot(record: dict[str, Any], folder: Path) -> None:
    """sharding.png: every config beside DDP. memory_over_a_step.png: the traces."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    metadata = {"Description": digest(record), "Software": "matplotlib"}
    rows = record["rows"]
    names = [name.removesuffix(".yaml") for name in rows]
    figure, (memory, sent, speed) = pyplot.subplots(
        1, 3, figsize=(13, 0.32 * len(rows) + 1.6), sharey=True, layout="constrained", width_ratios=(2, 1, 1)
    )
    left = [0.0] * len(rows)
    kinds = {"parameters": "#4c72b0", "optimizer": "#55a868", "gradients": "#c44e52"}
    for kind, colour in kinds.items():
        values = [row[kind] / MIB for row in rows.values()]
        memory.barh(names, values, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    rest = [max(0.0, row["peak"] / MIB - held) for row, held in zip(rows.values(), left, strict=True)]
    memory.barh(names, rest, left=left, color="#cccccc", label="gathered, reduced and activations at the peak")
    memory.set_xlabel("memory per rank, MiB")
    memory.legend(fontsize=8)
    sent.barh(names, [row["sent"] / MIB for row in rows.values()], color="#8172b2")
    sent.set_xlabel("sent per rank and step, MiB")
    speed.barh(names, [row["step_over_ddp"] for row in rows.values()], color="#937860")
    speed.set_xlabel("step time / DDP")
    for axes, value in ((memory, rows["ddp.yaml"]["peak"] / MIB), (sent, rows["ddp.yaml"]["sent"] / MIB), (speed, 1.0)):
        axes.axvline(value, color="black", linewidth=0.8, linestyle=":")
    memory.invert_yaxis()
    figure.savefig(folder / "sharding.png", dpi=90, metadata=metadata)
    pyplot.close(figure)

    traces = record["traces"]
    figure, grid = pyplot.subplots(1, len(traces), figsize=(3.6 * len(traces), 3.4), sharey=True, layout="constrained", squeeze=False)
    for axes, (config, trace) in zip(grid[0], traces.items(), strict=True):
        row = rows[config]
        held = (row["parameters"] + row["optimizer"]) / MIB
        at, sizes = [point[0] for point in trace["timeline"]], [point[1] / MIB for point in trace["timeline"]]
        axes.fill_between(at, sizes, step="post", color="#cccccc", label="all else")
        axes.fill_between(at, [min(held, size) for size in sizes], step="post", color="#55a868", label="parameters, optimizer")
        for name, start in trace["phases"]:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
            side = {"x": start - 0.01, "ha": "right"} if start > 0.5 else {"x": start + 0.01, "ha": "left"}
            axes.text(y=0.99, s=name, transform=axes.get_xaxis_transform(), rotation=90, va="top", fontsize=8, **side)
        axes.set_title(DRAWN[config], fontsize=10)
        axes.set_xlabel("one step")
        axes.set_xlim(0, 1)
    grid[0][0].set_ylabel("memory of a rank, MiB")
    grid[0][0].legend(fontsize=8, loc="lower right")
    figure.savefig(folder / "memory_over_a_step.png", dpi=90, metadata=metadata)
    pyplot.close(figure)


def pages(record: dict[str, Any]) -> dict[Path, str]:
    """Each page -> its table: all configs where they are described, else those that are drawn."""
    drawn = [config for config in DRAWN if config in record["rows"]]
    return {ROOT / page: table(record, configs=None if page.startswith("accelerate_configs") else drawn) for page in PAGES}


def main() -> None:
    everything = sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml") if path.name not in LEFT_OUT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="before the measured one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--configs", nargs="+", default=everything, help="ddp.yaml always goes with them")
    parser.add_argument("--write", action="store_true", help="update record, pages and plots")
    arguments = parser.parse_args()
    configs = list(dict.fromkeys(["ddp.yaml", *arguments.configs]))
    record = measure(configs=configs, steps=arguments.steps, rounds=arguments.rounds)
    print(table(record))
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")
        plot(record, ROOT / "docs")
        for path, text in pages(record).items():
            before, _, rest = path.read_text().partition("<!-- sharding -->")
            path.write_text(before + text + rest.partition("<!-- /sharding -->")[2])


if __name__ == "__main__":
    main()
