"""Under `accelerate launch`: a signal to one rank or to the launcher, and a rank that stands still (R18, R19, R20)."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fullshard.process.watchdog import HANG_EXIT_CODE
from support.launcher import Launched, launch

pytestmark = pytest.mark.launch
LONG = 2000  # Steps: more than are done before the signal.


def launched(folder: Path, act: Callable[[list[int], int], None], **overrides: object) -> Launched:
    """A launch of two ranks in which `act(the ranks' process ids, the launcher's)` is called when some steps are done."""
    done: list[Launched] = []
    thread = threading.Thread(target=lambda: done.append(launch(folder, **overrides)))  # type: ignore[arg-type]
    thread.start()
    log = folder / "metrics.jsonl"
    while thread.is_alive() and not (log.exists() and log.read_text().count("\n") >= 6):
        time.sleep(0.05)
    assert thread.is_alive(), done
    ranks = [json.loads((folder / "heartbeat" / f"rank_0000{rank}.json").read_text())["pid"] for rank in range(2)]
    act(ranks, psutil.Process(ranks[0]).ppid())
    thread.join()
    assert not [pid for pid in ranks if psutil.pid_exists(pid)]
    return done[0]


def steps(run: Launched) -> list[int]:
    return [line["step"] for line in run.metrics if "train/loss" in line]


def stopped_after(run: Launched, cause: str) -> int:
    """The step that the one line names. The launcher makes 1 of every code but 0."""
    assert run.returncode == 1
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("stopped after step")]
    match = re.fullmatch(rf"stopped after step (\d+) by {cause}; saved (\S+), continue with --checkpoint\.resume auto", line)
    assert match is not None, line
    assert sorted(path.name for path in (run.output_dir / "checkpoints").iterdir()) == [
        f"step_{int(match[1]):08}"
    ]  # One, and nothing beside.
    assert Path(match[2]).name == f"step_{int(match[1]):08}"
    return int(match[1])


def test_r18_r20_sigterm_to_one_rank_saves_once_and_the_resumed_run_ends_at_max_steps(tmp_path):
    """With checkpoint.every 0: nobody would save before the end."""
    run = launched(tmp_path, lambda ranks, _: os.kill(ranks[1], signal.SIGTERM), train__max_steps=LONG)
    last = stopped_after(run, "SIGTERM")
    assert steps(run) == list(range(1, last + 1))  # After the signal no further one.
    assert "exitcode  : 75" in run.stderr
    again = launch(tmp_path, train__max_steps=last + 2, **{"checkpoint__allow_changes": "[train.max_steps]"}).check()
    assert steps(again) == list(range(1, last + 3))


def test_r19_sigterm_to_the_launcher_is_not_the_loader_workers(tmp_path):
    run = launched(tmp_path, lambda _, agent: os.kill(agent, signal.SIGTERM), train__max_steps=LONG, data__num_workers=2)
    stopped_after(run, "SIGTERM")
    tracebacks = re.findall(r"^(\S+): ", run.stderr.split("Traceback", 1)[1], flags=re.MULTILINE)
    assert run.stderr.count("Traceback") == 1, run.stderr
    assert "torch.distributed.elastic.multiprocessing.api.SignalException" in tracebacks  # The launcher's own.


def test_a_rank_that_stands_still_ends_the_run_and_max_restarts_resumes_it(tmp_path):
    """The launcher gives the stopped rank 30 s before it kills it."""
    run = launched(
        tmp_path,
        lambda ranks, _: os.kill(ranks[1], signal.SIGSTOP),
        launcher=["--max_restarts", "1"],
        train__max_steps=40,
        train__timeout_seconds=3,
        checkpoint__every=5,
    ).check()
    assert steps(run) == list(range(1, 41))
    assert re.search(r"begins: after step (5|10|15), from", run.stdout)
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: no progress for \d+ s: rank 1 did not answer \(last heartbeat \d+ s ago in \w+ of step \d+\), rank 0 is in ", line
    )
    assert f"exitcode: {HANG_EXIT_CODE}" in run.stderr
    files = {path.name: path.read_text(errors="replace") for path in (tmp_path / "hang" / "1").iterdir()}
    assert len(files["collectives_rank_0"]) > 1000
    assert sorted(name for name in files if name.endswith(".txt")) == ["rank_00000.txt", "rank_00001.txt"]
    assert "in train" in files["rank_00000.txt"]
