"""What saving costs, and going on: asynchronous and durable saves against Accelerate's save_state and a plain write of the same bytes.

python benchmarks/checkpoint.py [--gigabytes 1] [--rounds 3] [--launches 2] [--write]

Two ranks over gloo train a Llama under accelerate_configs/fsdp.yaml; what is compared is saved in turn in each round, since machines drift,
and a ratio is the median of the rounds' ratios. Whatever the kind, its tensors are on disk when it ends: torch.distributed.checkpoint,
through which Accelerate's save_state writes too, calls fsync on each of its files by default (sync_files), and so does the plain write.
Not so folders and random states of save_state. With --write the record goes to benchmarks/records/checkpoint.json, which README quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import __version__ as accelerate_version
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.resume import Resume
from fullshard.checkpoint.save import Saver
from fullshard.checkpoint.tensors import training_tensors
from fullshard.model.bad_steps import BadSteps
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.optim import build_optimizer, build_schedule
from fullshard.parallel.accelerator import build_accelerator
from fullshard.parallel.agree import agree, host_group
from fullshard.parallel.wrap import prepare_model
from fullshard.placement.launch import check_launch
from fullshard.recipe.fields import Recipe
from fullshard.recipe.parsing import parse_recipe
from fullshard.train.step import train_step

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "checkpoint.json"
MARKED = re.compile(r"<!-- checkpoint -->.*?<!-- /checkpoint -->", re.S)
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/fsdp.yaml")
WIDTH, INNER, VOCABULARY = 768, 2048, 4096
SEQUENCE_LENGTH = 64  # Short: a step is to be shorter than a save.
LONGEST_LAUNCH_S = 900


def shape(gigabytes: float) -> list[str]:
    """Overrides for a recipe whose weights and moments, fp32, have about so many bytes: at least one layer, 0.12 GB."""
    layer = 4 * WIDTH**2 + 3 * WIDTH * INNER
    layers = max(1, round((gigabytes * 1e9 / 12 - VOCABULARY * WIDTH) / layer))
    values = {
        "model.vocab_size": VOCABULARY,
        "model.hidden_size": WIDTH,
        "model.intermediate_size": INNER,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": 12,
        "model.num_key_value_heads": 12,
        "model.tie_word_embeddings": "true",
        "data.sequence_length": SEQUENCE_LENGTH,
        "data.num_streams": 8,
        "train.global_batch_size": 2,
    }
    return [f"--{key}={value}" for key, value in values.items()]


class Saves:
    """The measurements of one rank. All are collective; a time is that of the rank that took longest."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.placement = check_launch()
        self.accelerator = build_accelerator(placement=self.placement, sharding=recipe.sharding, trackers=[])
        self.group = host_group(self.accelerator, longest_wait_s=0)
        self.model = prepare_model(self.accelerator, build_on_meta(llama_config(recipe.model)), seed=0)
        adamw = build_optimizer(self.model.parameters(), optim=recipe.optim)
        self.schedule = build_schedule(adamw, optim=recipe.optim, max_steps=1000)
        self.optimizer = self.accelerator.prepare_optimizer(adamw)
        self.bad_steps = BadSteps(spike_factor=None, device=self.accelerator.device)
        self.rows = torch.randint(0, VOCABULARY, (1, SEQUENCE_LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.number = 0
        self.background = self.saver(async_save=True)
        self.steps(2)  # The first makes the moments.

    def steps(self, count: int) -> float:
        """Seconds of `count` training steps."""
        start = time.perf_counter()
        for _ in range(count):
            train_step(
                accelerator=self.accelerator,
                model=self.model,
                optimizer=self.optimizer,
                schedule=self.schedule,
                inputs=self.rows[:, :-1],
                targets=self.rows[:, 1:],
                micro_batch_size=1,
                max_grad_norm=1.0,
            )
        return self.longest(time.perf_counter() - start)

    def longest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return float(value)

    def settled(self) -> Path:
        """The folder to write to, empty. Nothing of before is left to write or to delete."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            os.sync()
        dist.barrier(group=self.group)
        return self.folder

    def saver(self, *, async_save: bool = False, checksums: bool = True) -> Saver:
        options = replace(self.recipe.checkpoint, async_save=async_save, checksums=checksums, keep_last=None)
        recipe = replace(self.recipe, output_dir=str(self.folder), checkpoint=options)
        return Saver(recipe=recipe, placement=self.placement, accelerator=self.accelerator, resume=Resume(schedule_steps=1000))

    def save(self, saver: Saver) -> float:
        """Seconds for which the call keeps training waiting."""
        self.settled()
        self.number += 1
        start = time.perf_counter()
        saver.save(
            model=self.model,
            optimizer=self.optimizer,
            bad_steps=self.bad_steps,
            step=self.number,
            position={"rows": 0, "streams": {str(self.accelerator.process_index): [0, 0, 0, 0, 0]}, "dealt": {}, "read": {}, "order": {}},
            values={"skipped_rows": 0, "rollbacks": 0, "wandb_id": None, "tokens_seen": 0},
        )
        return self.longest(time.perf_counter() - start)

    def timed(self, act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        return self.longest(time.perf_counter() - start)

    def save_state(self) -> float:
        folder = self.settled()
        return self.timed(lambda: self.accelerator.save_state(str(folder / "state")))

    def plain_write(self) -> float:
        """One file a rank: its part of every tensor, then fsync."""
        path = self.settled() / f"{self.accelerator.process_index}.bin"
        tensors = training_tensors(self.model, self.optimizer).values()
        parts = [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                for part in parts:
                    rest = part.reshape(-1).view(torch.uint8).numpy().data
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())

        return self.timed(write)

    def asynchronous(self) -> dict[str, float]:
        stall = self.save(self.background)
        return {"stall_s": stall, "s": stall + self.timed(self.background.finish)}

    def beside(self) -> dict[str, float]:
        """Steps while a save is in flight, and as many without."""
        stall = self.save(self.background)
        seconds, count, in_flight = 0.0, 0, 1
        while in_flight:
            seconds += self.steps(1)
            count += 1
            in_flight = agree(self.group, failure=None, stop=int(self.background.saved_step != self.number)).stop
        self.background.finish()
        self.settled()
        return {"stall_s": stall, "steps": count, "beside_s": seconds, "quiet_s": count * self.steps(2) / 2}

    def round(self, number: int) -> dict[str, Any]:
        """Each kind of save once, and the asynchronous one again with steps beside it."""
        kinds: list[tuple[str, Callable[[], Any]]] = [
            ("async", self.asynchronous),
            ("sync", lambda: self.save(self.saver())),
            ("sync_without_checksums", lambda: self.save(self.saver(checksums=False))),
            ("save_state", self.save_state),
            ("plain_write", self.plain_write),
            ("steps", self.beside),
        ]
        turn = number % len(kinds)  # None always comes after the same.
        return {kind: act() for kind, act in kinds[turn:] + kinds[:turn]}


def rank_main(result: Path, *, rounds: int, words: list[str]) -> None:
    """What each launched process does; rank 0 leaves the rounds in the file `result`."""
    recipe = parse_recipe(words)
    saves = Saves(recipe, result.parent / "saves")
    first = saves.asynchronous()
    size = sum(path.stat().st_size for path in saves.folder.rglob("*") if path.is_file())
    measured = [saves.round(number) for number in range(rounds)]
    saves.settled()
    if saves.accelerator.is_main_process:
        parameters = sum(parameter.numel() for parameter in saves.model.parameters())
        ranks = saves.accelerator.num_processes
        result.write_text(json.dumps({"parameters": parameters, "ranks": ranks, "bytes": size, "async_first": first, "rounds": measured}))
    saves.accelerator.end_training()


def launched(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen([*LAUNCH, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=LONGEST_LAUNCH_S)
    if process.returncode:
        sys.exit(output)


def measure_saves(folder: Path, *, gigabytes: float, rounds: int) -> dict[str, Any]:
    """What the ranks of one launch have measured."""
    result = folder / "rounds.json"
    ended(launched("benchmarks/checkpoint.py", "--rank_result", str(result), "--rounds", str(rounds), *shape(gigabytes)))
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def summary(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians: seconds, and ratios within a round. Of the first save of a process there is one a launch."""
    rounds = [one for launch in launches for one in launch["rounds"]]
    firsts = [launch["async_first"] | {"sync": statistics.median(one["sync"] for one in launch["rounds"])} for launch in launches]

    def median(value: Callable[[dict[str, Any]], float], of: list[dict[str, Any]] = rounds) -> float:
        return statistics.median(map(value, of))

    rows = {
        "async": {key: median(lambda one, key=key: one["async"][key]) for key in ("stall_s", "s")},  # type: ignore[misc]
        "async_first": {key: median(lambda one, key=key: one[key], firsts) for key in ("stall_s", "s")},  # type: ignore[misc]
    }
    for kind in ("sync", "sync_without_checksums", "save_state", "plain_write"):
        seconds = median(lambda one, kind=kind: one[kind])  # type: ignore[misc]
        rows[kind] = {"stall_s": seconds, "s": seconds}
    return {
        "parameters": launches[0]["parameters"],
        "ranks": launches[0]["ranks"],
        "checkpoint_gb": launches[0]["bytes"] / 1e9,
        "rows": rows,
        "async_stall_over_sync": median(lambda one: one["async"]["stall_s"] / one["sync"]),
        "async_first_stall_over_sync": median(lambda one: one["stall_s"] / one["sync"], firsts),
        "without_checksums_over_save_state": median(lambda one: one["sync_without_checksums"] / one["save_state"]),
        "sync_over_plain_write": median(lambda one: one["sync"] / one["plain_write"]),
        "step_beside_over_quiet": median(lambda one: one["steps"]["beside_s"] / one["steps"]["quiet_s"]),
        # All that a save takes from training: the wait, and by what the steps beside it are longer.
        "async_cost_s": median(lambda one: one["steps"]["stall_s"] + one["steps"]["beside_s"] - one["steps"]["quiet_s"]),
        "launches": launches,
    }


def first_step_s(output_dir: Path, words: list[str]) -> float:
    """From the start of the launcher to the first line that it adds to metrics.jsonl."""
    metrics = output_dir / "metrics.jsonl"
    before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    start = time.perf_counter()
    process = launched("recipes/pretrain.py", f"--output_dir={output_dir}", *words)
    seconds = None
    while seconds is None and process.poll() is None:
        time.sleep(0.02)
        with suppress(FileNotFoundError):
            if metrics.read_text().count("\n") > before:
                seconds = time.perf_counter() - start
    ended(process)
    assert seconds is not None, "the run logged no step"
    return seconds


def run_words(gigabytes: float) -> list[str]:
    """Overrides of a run of two steps, each of which is saved."""
    return [
        *shape(gigabytes),
        *("--train.max_steps=2", "--checkpoint.every=1", "--checkpoint.keep_last=null", "--checkpoint.export=never"),
        *("--evaluation.max_rows=0", "--logging.every=1", "--logging.trackers=[]", "--logging.sample_tokens=0"),
    ]


def measure_starts(folder: Path, *, gigabytes: float) -> dict[str, float]:
    """Time from `accelerate launch` to the first step that is done, fresh and from a checkpoint of the state that is saved above."""
    output_dir, words = folder / "run", run_words(gigabytes)
    fresh = first_step_s(output_dir, words)
    # As if killed after its first step.
    shutil.rmtree(output_dir / "checkpoints" / "step_00000002")
    metrics = output_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    resumed = first_step_s(output_dir, words)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2], f"the second launch did not go on: {steps}"
    shutil.rmtree(output_dir)
    return {"fresh_first_step_s": fresh, "resumed_first_step_s": resumed}


def file_system(folder: Path) -> str:
    """Its type: on a tmpfs there is no disk to wait for."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype


def table(record: dict[str, Any]) -> str:
    """The record as README's Markdown."""
    names = {
        "async": "`async_save: true`, from the second save on",
        "async_first": "`async_save: true`, the first save",
        "sync": "`async_save: false`",
        "sync_without_checksums": "`async_save: false`, `checksums: false`",
        "save_state": "Accelerate's `save_state`, which syncs its files too",
        "plain_write": "the same bytes, one file a rank, synced",
    }
    size, rows = record["checkpoint_gb"], record["rows"]
    lines = [
        f"| {size:.1f} GB: weights and moments of {record['parameters'] / 1e6:.0f} M parameters on {record['ranks']} ranks "
        "| training waits | on disk after | GB/s |",
        "|---|---|---|---|",
    ]
    shares = {"async": record["async_stall_over_sync"], "async_first": record["async_first_stall_over_sync"]}
    for kind, name in names.items():
        share = f" ({shares[kind]:.0%} of `async_save: false`)" if kind in shares else ""
        seconds = rows[kind]["s"]
        lines.append(f"| {name} | {rows[kind]['stall_s']:.2f} s{share} | {seconds:.2f} s | {size / seconds:.2f} |")
    more = (
        f"Without checksums a save takes {record['without_checksums_over_save_state']:.2f} of the time of `save_state`. With no core to "
        f"spare, steps beside an asynchronous save take {record['step_beside_over_quiet']:.1f} times as long: in all it costs training "
        f"{record['async_cost_s']:.1f} s, a synchronous one {rows['sync']['s']:.1f} s. From `accelerate launch` to the first step that is "
        f"done: {record['resumed_first_step_s']:.1f} s from this checkpoint, {record['fresh_first_step_s']:.1f} s from the seed."
    )
    note = f"{record['hardware']}, commit {record['git_commit'][:12]}, `{record['command']}`."
    return "\n".join(["<!-- checkpoint -->", *lines, "", more, "", note, "<!-- /checkpoint -->"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of weights and moments, all ranks together")
    parser.add_argument("--rounds", type=int, default=3, help="a launch")
    parser.add_argument("--launches", type=int, default=2, help="of the saves, of a fresh run and of a resumed one")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="where to write")
    parser.add_argument("--rank_result", type=Path, help=argparse.SUPPRESS)  # In the processes that this one launches.
    parser.add_argument("--write", action="store_true", help="update the record and README.md")
    arguments, words = parser.parse_known_args()
    if arguments.rank_result is not None:
        rank_main(arguments.rank_result, rounds=arguments.rounds, words=words)
        return
    if words:
        parser.error(f"unknown: {' '.join(words)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    sizes = f"--gigabytes {arguments.gigabytes:g} --rounds {arguments.rounds} --launches {arguments.launches}"
    launches, starts = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        disk = file_system(Path(name))
        for _ in range(arguments.launches):
            launches.append(measure_saves(Path(name), gigabytes=arguments.gigabytes, rounds=arguments.rounds))
            starts.append(measure_starts(Path(name), gigabytes=arguments.gigabytes))
    record: dict[str, Any] = {
        "command": f"python benchmarks/checkpoint.py {sizes}",
        "hardware": f"{psutil.cpu_count()} CPU cores, {platform.machine()}, {disk}, shared machine",
        "git_commit": commit,
        "versions": {"torch": torch.__version__, "accelerate": accelerate_version},
        **{key: statistics.median(start[key] for start in starts) for key in starts[0]},
        **summary(launches),
    }
    print(json.dumps(record, indent=1))
    print(table(record))
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        readme = ROOT / "README.md"
        readme.write_text(MARKED.sub(lambda _: table(record), readme.read_text()))


if __name__ == "__main__":
    main()
