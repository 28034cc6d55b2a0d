"""A rank that stands still ends the run in a bounded time, with what every rank was doing in a file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest

from fullshard.process.watchdog import HANG_EXIT_CODE, PHASES, Watchdog, blame, record_nccl
from support import HANG_S


def started(folder: Path, *bodies: str, timeout_s: float = 1.0, more: str = "") -> list[subprocess.Popen[str]]:
    """A process for each rank that begins its body, with a watchdog, when all have one."""
    ranks = []
    for rank, body in enumerate(bodies):
        script = f"""
import sys, threading, time
from fullshard.process import watchdog as module
from fullshard.process.watchdog import Watchdog
def stuck_in_a_function():
    threading.Event().wait()
{more}
with Watchdog(output_dir={str(folder)!r}, rank={rank}, world_size={len(bodies)}, timeout_s={timeout_s}) as watchdog:
    watchdog.phase("load", step=1, extra_s=60)
    print("ready", flush=True)
    sys.stdin.readline()
    watchdog.phase("forward", step=1)
    {body}
"""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([sys.executable, "-c", script], text=True, **pipes))
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return ranks


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    return process.returncode, err


def test_a_rank_that_is_stuck_leaves_its_stacks(tmp_path):
    (process,) = started(tmp_path, 'watchdog.phase("backward", step=7); stuck_in_a_function()')
    code, err = ended(process)
    assert code == HANG_EXIT_CODE
    assert re.fullmatch(rf"error: no progress for \d+ s: rank 0 is in backward of step 7 for \d+ s; stacks are in {tmp_path}/hang/1\n", err)
    first, *rest = (tmp_path / "hang" / "1" / "rank_00000.txt").read_text().splitlines()
    main = re.fullmatch(r"rank 0: backward of step 7, for \d+ s; main thread (0x[0-9a-f]{16})", first)
    assert main is not None
    stacks = "\n".join(rest).split("\n\n")
    (stack,) = [stack for stack in stacks if stack.startswith(f"Thread {main[1]}")]
    assert "in stuck_in_a_function" in stack


def test_progress_is_no_hang_and_a_longer_wait_can_be_announced(tmp_path):
    body = """
    for step in range(1, 4):
        for phase in ("load", "forward", "backward"):
            watchdog.phase(phase, step=step); time.sleep(0.3)
    watchdog.phase("load", step=4, extra_s=600); time.sleep(3)
"""
    assert ended(*started(tmp_path, body.strip(), timeout_s=2)) == (0, "")
    beat = json.loads((tmp_path / "heartbeat" / "rank_00000.json").read_text())
    assert set(beat) == {"rank", "pid", "host", "step", "phase", "seconds", "time", "hang"}
    assert not (tmp_path / "hang").exists()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_ends_the_run_and_every_rank_has_a_file(tmp_path, stopped):
    """SIGSTOP, or a host that is gone: it writes nothing itself."""
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "heartbeat" / "rank_00003.json").write_text('{"rank": 3, "step": 0, "phase": "load"}\n')  # Of a run with more ranks.
    # Time enough for the rank that runs to answer, however busy the machine is.
    short = "module.ANSWER_S = 20; module.HEARTBEAT_S = 0.1"
    ranks = started(tmp_path, *["stuck_in_a_function()"] * 3, timeout_s=2, more=short)
    while not all("forward" in (tmp_path / "heartbeat" / f"rank_0000{rank}.json").read_text() for rank in range(3)):
        time.sleep(0.02)
    ranks[stopped].send_signal(signal.SIGSTOP)
    try:
        results = [ended(ranks[rank]) for rank in range(3) if rank != stopped]
    finally:
        ranks[stopped].kill()
        ranks[stopped].wait()
    assert [code for code, _ in results] == [HANG_EXIT_CODE] * 2
    (line,) = [err for _, err in results if err]  # One rank tells it.
    first = min({0, 1, 2} - {stopped})
    silent = rf"rank {stopped} did not answer \(last heartbeat \d+ s ago in forward of step 1\)"
    assert re.match(rf"error: no progress for \d+ s: {silent}, rank {first} is in forward of step 1 for \d+ s; stacks are in ", line), line
    files = {path.name: path.read_text() for path in (tmp_path / "hang" / "1").iterdir()}
    assert sorted(files) == [f"rank_0000{rank}.txt" for rank in range(3)]
    assert not (tmp_path / "heartbeat" / "rank_00003.json").exists()
    for rank in range(3):
        assert ("stuck_in_a_function" in files[f"rank_0000{rank}.txt"]) == (rank != stopped)
    line = rf"rank {stopped}: did not answer within 20 s: no stacks; last heartbeat \d+ s ago in forward of step 1\n"
    assert re.fullmatch(line, files[f"rank_0000{stopped}.txt"])


def test_all_ranks_write_their_stacks_when_one_is_behind(tmp_path):
    """Those that still make progress too: they only wait less long, or elsewhere."""
    bodies = (
        'watchdog.phase("backward", step=9); stuck_in_a_function()',
        'watchdog.phase("load", step=9, extra_s=60); stuck_in_a_function()',
    )
    waiting, slow = started(tmp_path, *bodies, timeout_s=1, more="module.ANSWER_S = 20; module.AFTER_S = 1")
    code, err = ended(waiting)
    assert code == HANG_EXIT_CODE
    assert re.match(
        r"error: no progress for \d+ s: rank 1 is in load of step 9 for \d+ s, rank 0 is in backward of step 9 for \d+ s; stacks", err
    )
    assert ended(slow) == (HANG_EXIT_CODE, "")
    assert all("stuck_in_a_function" in (tmp_path / "hang" / "1" / f"rank_0000{rank}.txt").read_text() for rank in range(2))


WAITS = 'watchdog.phase("load", step=2, extra_s=600); '


def test_a_stopped_rank_does_not_use_the_time_that_a_read_may_take(tmp_path):
    short = "module.ANSWER_S = module.AFTER_S = 0.5; module.HEARTBEAT_S = 0.1"
    waiting, stopped = started(tmp_path, *[f"{WAITS} stuck_in_a_function()"] * 2, timeout_s=0.6, more=short)
    stopped.send_signal(signal.SIGSTOP)
    try:
        code, err = ended(waiting)
    finally:
        stopped.kill()
        stopped.wait()
    assert code == HANG_EXIT_CODE
    assert "rank 1 did not answer" in err


def test_ranks_that_wait_for_a_read_are_left_alone(tmp_path):
    ranks = started(tmp_path, *[f"{WAITS} time.sleep(3)"] * 2, timeout_s=2, more="module.HEARTBEAT_S = 0.1")
    assert [ended(process) for process in ranks] == [(0, "")] * 2


def test_files_of_an_earlier_hang_stay_and_do_not_fire(tmp_path):
    for _ in range(2):
        assert ended(*started(tmp_path, "stuck_in_a_function()", timeout_s=0.4))[0] == HANG_EXIT_CODE
    assert ended(*started(tmp_path, "time.sleep(1)", timeout_s=10)) == (0, "")
    assert sorted(path.name for path in (tmp_path / "hang").iterdir()) == ["1", "2"]


def test_a_rank_that_was_stopped_goes_on(tmp_path):
    """Its own time stood still; whoever waited for it has ended the run, or nobody did."""
    (process,) = started(tmp_path, "for _ in range(8): time.sleep(0.1)", timeout_s=3)
    time.sleep(0.3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    assert ended(process) == (0, "")


def test_a_folder_that_cannot_be_written_fails_no_run_and_hides_no_hang(tmp_path):
    (tmp_path / "heartbeat").write_text("a file where a folder should be")
    (tmp_path / "hang").write_text("another")
    assert ended(*started(tmp_path, "time.sleep(0.5)", timeout_s=10)) == (0, "")
    code, err = ended(*started(tmp_path, "stuck_in_a_function()", timeout_s=0.4))
    assert code == HANG_EXIT_CODE
    assert "in stuck_in_a_function" in err
    line = rf"error: no progress for \d+ s: rank 0 is in forward of step 1; its stacks are above: {tmp_path}/hang: .+"
    assert re.fullmatch(line, err.splitlines()[-1])
    assert "Traceback" not in err


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path):
    hanging = "module.DUMP_S = module.ANSWER_S = module.AFTER_S = 0.3; Watchdog._report = lambda self, now: stuck_in_a_function()"
    code, err = ended(*started(tmp_path, "stuck_in_a_function()", timeout_s=0.4, more=hanging))
    assert code == HANG_EXIT_CODE
    assert "in stuck_in_a_function" in err


def test_saying_what_is_done_costs_nothing(tmp_path):
    """Called several times a step, each of which takes a millisecond at the least. About 10 times as long as it takes to read the clock."""
    with Watchdog(output_dir=tmp_path, rank=0, world_size=1, timeout_s=60) as watchdog:
        says, reads = (
            min(timeit.repeat(call, number=10_000, repeat=9)) for call in (lambda: watchdog.phase("forward", step=7), time.monotonic)
        )
    assert says < 100 * reads, "not a few lines of Python any more"


@pytest.mark.parametrize(
    ("places", "silent", "line"),
    [
        ([(7, "backward"), (7, "forward")], [], "rank 1 is in forward of step 7 for 0 s, rank 0 is in backward of step 7 for 0 s"),
        ([(8, "load"), (7, "save"), (8, "load")], [], "rank 1 is in save of step 7 for 0 s, rank 0 is in load of step 8 for 0 s"),
        ([(7, "backward")] * 3, [], "rank 0 and 2 more are in backward of step 7 for 0 s"),
        (
            [(7, "load"), (7, "save")],
            [1],
            "rank 1 did not answer (last heartbeat 3 s ago in save of step 7), rank 0 is in load of step 7 for 0 s",
        ),
    ],
)
def test_who_is_to_blame(places, silent, line):
    assert blame([{"step": step, "phase": phase, "time": time.time() - 3} for step, phase in places], silent) == line


def test_blame_of_a_rank_that_was_never_heard_of():
    assert blame([{"step": 1, "phase": PHASES[0]}, {}], [1]) == "rank 1 did not answer (no heartbeat), rank 0 is in load of step 1 for 0 s"


def test_the_recorder_leaves_what_the_environment_says(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCH_FR_", "TORCH_NCCL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "10")
    before = set(os.environ)
    record_nccl(tmp_path)
    try:
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "hang" / "nccl_trace_rank_")
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


def test_the_recorders_names_are_torchs():
    """An upgrade that renames them would be silent."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    include = Path(str(spec.origin)).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = (include / "FlightRecorder.hpp").read_text() + (include / "ProcessGroupNCCL.hpp").read_text()
    assert '{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}' in text
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in text
