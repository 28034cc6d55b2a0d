"""Fault campaigns: a run that is killed again and again, and a checkpoint that is damaged in many ways. `make campaign` runs both in full.

python tests/campaign.py [--seed 0] [--kills 50] [--steps 120] [--only kills|damages] [--folder FOLDER]

Both follow a schedule that the seed gives, print a line per fault, and end with 1 where what comes out is not, bit for bit, what comes out
without faults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp

from fullshard.checkpoint.manifest import MANIFEST, STATE, checkpoint_steps, checkpoints_folder, faults, verify
from fullshard.recipe.fields import Recipe
from support.launcher import launch, start
from support.models import TINY, prepared
from support.pool import GlooPool
from support.training import STEPS, column, recipe_for, run_steps

LONGEST_S = 120.0
"""For a launch to be where it is wanted, and for what a kill has left to be gone: more is a hang."""
EVERY = 2  # Steps between saves: about half of the time a save runs.
OPTIONS: dict[str, Any] = {
    "checkpoint__every": EVERY,
    "checkpoint__keep_last": 2,
    "model__attention_dropout": 0.1,
    "data__log_documents": "true",
    "logging__sample_tokens": 0,
}
LAUNCHER, TREE = "launcher", "tree"


class CampaignError(Exception):
    """A fault that was not survived."""


@dataclass(frozen=True)
class Kill:
    """kill -9 of `target` at a moment."""

    target: str
    """`rank 0`, `rank 1`, `ranks`; `launcher`: it alone, the ranks are to see it; `tree`: it and all below."""
    moment: str
    """`start`: delay_s after the launch, or after what the last kill left has ended; `step`: delay_s after step `step`, or a later one, was
    logged since; `save`: delay_s after the next step_*.tmp has appeared."""
    step: int
    delay_s: float


@dataclass
class Tally:
    """What came of the kills."""

    kills: int = 0
    in_saves: int = 0
    """While a step_*.tmp was being written."""
    launches: int = 0
    restarts: int = 0
    """By the launcher, which had survived."""
    resumed: int = 0
    """Starts that came so far as to say from where they go on."""
    passed_over: int = 0
    """Checkpoints that a start found damaged."""
    targets: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)


def schedule(*, seed: int, kills: int, max_steps: int) -> list[Kill]:
    """By rising step, so that the run gets on in between; several may fall on one step."""
    draw = random.Random(seed)
    made = []
    for step in sorted(draw.randint(1, max_steps - 5 * EVERY) for _ in range(kills)):
        (target,) = draw.choices(["rank 0", "rank 1", "ranks", LAUNCHER, TREE], weights=[4, 4, 4, 3, 6])
        (moment,) = draw.choices(["save", "step", "start"], weights=[12, 4, 4])
        made.append(Kill(target, moment, step, delay_s=draw.random() * {"save": 0.1, "step": 0.5, "start": 10.0}[moment]))
    return made


def killed_run(folder: Path, kills: list[Kill], *, say: Callable[[str], object] = print, **options: Any) -> Tally:
    """One command until the run is complete, given again after each kill that its launcher does not survive.

    Raises CampaignError where it does not go on by itself from the newest checkpoint, where a checkpoint is not whole, or something hangs.
    """
    tally, began = Tally(), time.monotonic()
    log = folder.with_name(f"{folder.name}.log")
    process: Popen[str] | None = None

    def started(file: Any) -> Popen[str]:
        tally.launches += 1
        return start(folder, launcher=["--max_restarts", str(len(kills))], stdout=file, stderr=file, **options)

    try:
        with log.open("w") as file:
            newest, logged = 0, 0  # Step of the newest checkpoint, and size of the log, when the ranks began that run now.
            for number, kill in enumerate(kills, 1):
                process = process or started(file)
                before = saves(folder)
                victims, others = _await_moment(kill, process, folder, step=lambda since=logged: _last_step(log, since))  # type: ignore[misc]
                for victim in victims:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.kill()
                in_save = bool(saves(folder) - before)
                step = _last_step(log, logged)
                if kill.target in (LAUNCHER, TREE):
                    process.wait(LONGEST_S)
                    process = None
                    _await(lambda: not running(folder), what="the ends of all ranks")
                else:
                    _await(lambda others=others: not any(map(_alive, others)), what="the ends of all ranks")  # type: ignore[misc]
                    tally.restarts += 1
                _check_start(log, logged, newest, tally)
                newest, logged = _newest_of_whole(folder), log.stat().st_size
                tally.kills += 1
                tally.in_saves += in_save
                tally.targets[kill.target] += 1
                tally.moments[kill.moment] += 1
                say(
                    f"kill {number} of {len(kills)}: {kill.target}, {kill.moment}{', in a save' if in_save else ''};"
                    f" step {step}, newest checkpoint {newest}; {time.monotonic() - began:.0f} s"
                )
            process = process or started(file)
            if code := process.wait(LONGEST_S + options["train__max_steps"]):
                raise CampaignError(f"the last launch ended with {code}")
            _check_start(log, logged, newest, tally)
            _await(lambda: not running(folder), what="the ends of all ranks")
    except Exception as error:
        raise CampaignError(f"{error or type(error).__name__}\n{log.read_text()[-6000:]}") from error
    finally:
        for left in running(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        if process is not None:
            process.wait()
    return tally


def _await_moment(
    kill: Kill, process: Popen[str], folder: Path, *, step: Callable[[], int]
) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Wait until a kill is due: (whom to kill, who is to be gone then, the launcher aside).

    step: the last one that was logged since the start.
    """
    if kill.moment == "start":
        time.sleep(kill.delay_s)
    else:
        _await(lambda: step() >= kill.step, what=f"step {kill.step}", process=process)
    if kill.target in (LAUNCHER, TREE):
        below = psutil.Process(process.pid).children(recursive=True)
        victims = [psutil.Process(process.pid), *(below if kill.target == TREE else [])]
    else:
        _await(lambda: len(ranks(process)) == 2, what="two ranks", process=process)
        found = ranks(process)
        below = [*found.values(), *(child for rank in found.values() for child in rank.children(recursive=True))]
        victims = list(found.values()) if kill.target == "ranks" else [found[int(kill.target.removeprefix("rank "))]]
    if kill.moment == "save":
        running_one = {name for name, *_ in saves(folder)}
        _await(lambda: any(name not in running_one for name, *_ in saves(folder)), what="a save", process=process)
    if kill.moment != "start":
        time.sleep(kill.delay_s)
    return victims, below


def _await(condition: Callable[[], bool], *, what: str, process: Popen[str] | None = None) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise CampaignError(f"the launch ended with {process.returncode} instead of coming to {what}")
        if time.monotonic() > end:
            raise CampaignError(f"a hang: waited {LONGEST_S:.0f} s for {what}")
        time.sleep(0.002)


def saves(folder: Path) -> set[tuple[str, int, int]]:
    """Folders step_*.tmp, those of one step and of different times told apart."""
    found = set()
    for path in checkpoints_folder(folder).glob("step_*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.add((path.name, status.st_ino, status.st_mtime_ns))
    return found


def _said(log: Path, since: int) -> str:
    with log.open("rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace")


def _last_step(log: Path, since: int) -> int:
    """That rank 0 has shown; 0 where it has come to none."""
    return max(map(int, re.findall(r"^step (\d+)/.*\n", _said(log, since), re.M)), default=0)


def ranks(process: Popen[str]) -> dict[int, psutil.Process]:
    """Of a launch that runs."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            if _alive(child) and "RANK" in (environment := child.environ()):
                found[int(environment["RANK"])] = child
    return found


def running(folder: Path) -> list[psutil.Process]:
    """All processes of the run: launchers, ranks, loader workers."""
    return [found for found in psutil.process_iter(["cmdline"]) if str(folder) in (found.info["cmdline"] or []) and _alive(found)]


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _newest_of_whole(folder: Path) -> int:
    """Step of the newest checkpoint; 0 where there is none."""
    found = checkpoint_steps(folder)
    for path in found.values():
        if wrong := faults(path, hashes=True):
            raise CampaignError(f"{path} is not whole: {wrong}")
    return max(found, default=0)


def _check_start(log: Path, since: int, newest: int, tally: Tally) -> None:
    """What the last start has said, if it came so far."""
    said = _said(log, since)
    steps = [int(step or 0) for step in re.findall(r"^ *begins: (?:after step (\d+), |from the seed)", said, re.M)]
    if len(steps) > 1:
        raise CampaignError(f"failed by itself and was started again, {len(steps) - 1} times")
    if steps and steps != [newest]:
        raise CampaignError(f"went on after step {steps[0]}, the newest checkpoint was that of step {newest}")
    tally.resumed += len(steps)
    tally.passed_over += said.count("was passed over")


def differences(straight: Path, other: Path) -> list[str]:
    """What is not the same in two complete runs: metrics, data ids, export, weights, moments, random states. Also what is not whole."""
    both = (straight, other)
    found = [f"metrics.jsonl: {one} and {two}" for one, two in itertools.zip_longest(*map(_metrics, both)) if one != two]
    for contents in (
        *(tuple(_contents(folder / name) for folder in both) for name in ("documents", "model")),
        tuple(_tensors(max(checkpoint_steps(folder).items())[1]) for folder in both),
    ):
        assert contents[0]
        names = sorted(set().union(*contents))
        found += [f"{name}: another content" for name in names if contents[0].get(name) != contents[1].get(name)]
    found += [verdict.line for verdict in verify(other, hashes=True) if not (verdict.whole and verdict.checkpoint)]
    if (other / "hang").exists():
        found.append("a watchdog has called a hang")
    return found


def _metrics(folder: Path) -> list[dict[str, float]]:
    """What does not depend on the machine's speed and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key.startswith(("step", "train/", "eval/", "data/bad"))} for line in lines]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    """All of a checkpoint, whole. As bytes: what no step has filled yet is NaN."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # Known: a single process.
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return {name: str((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes() for name, tensor in tensors.items()}


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", STATE, MANIFEST)


def _flipped(content: bytes, draw: random.Random) -> bytes:
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    """A block is lost; one that is not zeros already."""
    place = draw.choice([place for place, byte in enumerate(content) if byte])
    length = min(512, len(content) - place)
    return content[:place] + bytes(length) + content[place + length :]


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": _flipped,
    "a block zeroed": _zeroed,
    "cut": lambda content, draw: content[: draw.randrange(1, len(content) - 1)],  # Not the manifest's last newline: that says nothing.
    "emptied": lambda content, draw: b"",
    "grown": lambda content, draw: content + draw.randbytes(draw.randrange(1, 100)) + b"x",
    "noise of its size": lambda content, draw: draw.randbytes(len(content)),
}
"""Ways to damage a file: what it is, and the seeded place -> what it is then."""
WAYS = (*CONTENTS, "deleted", "a folder", "the file of the checkpoint before", "another file")


@dataclass(frozen=True)
class Damage:
    name: str
    """Of the file."""
    way: str
    seed: int
    """Of the place."""


def damages(*, seed: int) -> list[Damage]:
    """Each way for each file: 50."""
    draw = random.Random(seed)
    return [Damage(name, way, seed=draw.randrange(2**32)) for name in FILES for way in WAYS]


def inflict(damage: Damage, folder: Path, *, before: Path) -> None:
    """On a checkpoint, of which `before` is the one before."""
    path, content = folder / damage.name, (folder / damage.name).read_bytes()
    path.unlink()
    match damage.way:
        case "deleted":
            return
        case "a folder":
            path.mkdir()
            return
        case "the file of the checkpoint before":
            shutil.copy(before / damage.name, path)
        case "another file":
            shutil.copy(folder / FILES[FILES.index(damage.name) - 1], path)
        case way:
            path.write_bytes(CONTENTS[way](content, random.Random(damage.seed)))
    assert path.read_bytes() != content, damage


def resumes(*, recipes: list[Recipe]) -> list[tuple[int, tuple[str, ...]]]:
    """On each rank: step and notes of what each recipe goes on from."""
    from fullshard.checkpoint.resume import find_checkpoint

    accelerator, _ = prepared()
    found = [find_checkpoint(recipe=recipe, accelerator=accelerator) for recipe in recipes]
    return [(resume.step, resume.notes) for resume in found]


def damaged_runs(
    folder: Path, chosen: list[Damage], *, pool: GlooPool, go_on: Callable[[int], bool], say: Callable[[str], object] = print
) -> list[str]:
    """What was not as it has to be: each damage of the newest checkpoint is told, by the file's name, and the one before is taken.

    The runs whose number `go_on` chooses are trained to their end, which is to be that of the straight run.
    """
    recipe = recipe_for(folder / "straight", every=2, model=replace(TINY, attention_dropout=0.1))
    straight = pool.run(trained, config="fsdp_fp32.yaml", recipe=recipe)
    recipes = []
    for number, damage in enumerate(chosen):
        run = folder / f"{number:02}"
        shutil.copytree(folder / "straight", run)
        newest, _ = max(checkpoint_steps(run).items())
        shutil.rmtree(checkpoint_steps(run)[newest])  # The complete run's: nothing would be left to do.
        before, damaged = sorted(checkpoint_steps(run))[-2:]
        inflict(damage, checkpoint_steps(run)[damaged], before=checkpoint_steps(run)[before])
        recipes.append(replace(recipe, output_dir=str(run), checkpoint=replace(recipe.checkpoint, resume="auto")))
    wrong = []
    for number, (damage, *found) in enumerate(zip(chosen, *pool.run(resumes, config="fsdp_fp32.yaml", recipes=recipes), strict=True)):
        run = Path(recipes[number].output_dir)
        lost = checkpoints_folder(run) / f"step_{STEPS - 2:08}"
        line = f"damage {number + 1} of {len(chosen)}: {damage.name}: {damage.way}"
        bad = []
        for step, notes in found:
            if step != STEPS - 4 or len(notes) != 1 or not notes[0].startswith(f"{lost} is damaged and was passed over: {damage.name}: "):
                bad.append(f"goes on after step {step}, says {notes}")
        whole = {verdict.folder: verdict.whole for verdict in verify(run, hashes=True)}
        if whole != {lost.with_name(f"step_{STEPS - 4:08}"): True, lost: False}:
            bad.append(f"fullshard verify says {whole}")
        if go_on(number):
            ended = pool.run(trained, config="fsdp_fp32.yaml", recipe=recipes[number])
            if _metrics(run) != _metrics(folder / "straight"):
                bad.append(f"another curve: {column(run, 'train/loss')}")
            for one, other in zip(straight, ended, strict=True):
                bad += [f"{name}: bits differ" for name, value in one["state"].items() if not torch.equal(other["state"][name], value)]
        wrong += [f"{line}: {fault}" for fault in bad]
        told = found[0][1][0].partition("passed over: ")[2] if found[0][1] else "nothing"
        say(f"{line}; told: {told}{'; trained to the end' if go_on(number) else ''}{'; WRONG' if bad else ''}")
        shutil.rmtree(run)
    return wrong


def trained(*, recipe: Recipe) -> dict[str, Any]:
    """run_steps without its tables."""
    with contextlib.redirect_stdout(io.StringIO()):
        return run_steps(recipe=recipe)


@contextlib.contextmanager
def _folder(chosen: str | None) -> Iterator[Path]:
    if chosen is not None:
        Path(chosen).mkdir(parents=True)
        yield Path(chosen).resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="campaign") as folder:
            yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run and damage its checkpoints, under a seeded schedule.")
    parser.add_argument("--seed", type=int, default=0, help="of the schedules")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=120, help="of the run that is killed")
    parser.add_argument("--only", choices=["kills", "damages"], help="one of the two")
    parser.add_argument("--folder", help="to work in and to keep; a temporary one if not given")
    chosen = parser.parse_args()
    summary, wrong = [], []
    say = lambda line: print(line, flush=True)  # noqa: E731
    with _folder(chosen.folder) as folder:
        if chosen.only != "damages":
            began = time.monotonic()
            options = OPTIONS | {"train__max_steps": chosen.steps}
            launch(folder / "straight", **options).check()
            kills = schedule(seed=chosen.seed, kills=chosen.kills, max_steps=chosen.steps)
            try:
                tally = killed_run(folder / "killed", kills, say=say, **options)
            except CampaignError as error:
                wrong.append(f"kills: {error}")
            else:
                wrong += [f"kills: {line}" for line in differences(folder / "straight", folder / "killed")]
                summary += [
                    f"kills: {tally.kills} under seed {chosen.seed} in {chosen.steps} steps, {tally.in_saves} inside a save,"
                    f" {(time.monotonic() - began) / 60:.1f} min",
                    f"  of {', '.join(f'{name} {count}' for name, count in sorted(tally.targets.items()))}",
                    f"  at {', '.join(f'{name} {count}' for name, count in sorted(tally.moments.items()))}",
                    f"  {tally.launches} launches, {tally.restarts} restarts by the launcher; {tally.resumed} starts got as far as saying"
                    f" from where they go on: the newest checkpoint; {tally.passed_over} found a damaged one",
                ]
        if chosen.only != "kills":
            began = time.monotonic()
            pool = GlooPool()
            try:
                (folder / "damages").mkdir()
                inflicted = damages(seed=chosen.seed)
                wrong += damaged_runs(folder / "damages", inflicted, pool=pool, go_on=lambda number: True, say=say)
            finally:
                pool.close()
            summary.append(
                f"damages: {len(inflicted)} under seed {chosen.seed}: {len(WAYS)} ways for each of {', '.join(FILES)};"
                f" {(time.monotonic() - began) / 60:.1f} min"
            )
    for line in [*summary, *wrong]:
        say(line)
    say("all as without faults: metrics, data ids, weights, moments" if not wrong else f"{len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
