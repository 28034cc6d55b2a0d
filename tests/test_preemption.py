"""Signals are heard wherever the main thread is, end nothing before they should, and reach nobody they are not for (R18, R19)."""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from fullshard.process.preemption import MAX_TIME, STOP_SIGNALS, StopRequested, cause_name, stop_signals
from support import HANG_S

# What torch's agent passes on to the ranks (LaunchConfig.signals_to_handle), and SIGUSR1, which a batch system sends to them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# The main thread where no Python runs again: a C mutex that it locks twice. ctypes lets the other threads run.
STUCK = "import ctypes; mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)"


def started(body: str, *, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that runs `body` and has said that it is ready."""
    script = f"import os, signal, sys, time\nfrom fullshard.process import preemption\nfrom fullshard.process.preemption import *\n{body}"
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | (environment or {}),
        start_new_session=True,  # As the agent starts a rank.
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


def ended(process: subprocess.Popen[str], *, within_s: float = HANG_S) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=within_s)
    finally:
        process.kill()
    return process.returncode, out, err


def gone(pid: int, *, within_s: float = HANG_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_told_and_raises_nothing(signum):
    before = [signal.getsignal(one) for one in SIGNALS]
    with stop_signals(grace_seconds=60, max_time=None) as stop:
        assert stop.requested() == 0
        os.kill(os.getpid(), signum)
        time.sleep(0.01)
        assert cause_name(stop.requested()) == signum.name
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "stop_signals" not in [thread.name for thread in threading.enumerate()]


def test_the_signals_are_those_of_the_agent():
    from torch.distributed.launcher.api import LaunchConfig

    names = inspect.signature(LaunchConfig).parameters["signals_to_handle"].default.split(",")
    assert set(STOP_SIGNALS) == set(SIGNALS) == {signal.Signals[name] for name in names} | {signal.SIGUSR1}


def test_the_launcher_can_be_told_to_leave_sighup_alone(monkeypatch):
    """As README says; `accelerate launch` has no option for it."""
    from accelerate.utils.launch import _filter_args
    from torch.distributed.run import config_from_args, get_args_parser

    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    parser = get_args_parser()
    torchrun = _filter_args(argparse.Namespace(num_processes=2), parser, ["--nproc_per_node", "2", "script.py"])
    assert config_from_args(torchrun)[0].signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"


def test_a_signal_breaks_off_a_wait_once_and_nothing_else():
    def read() -> None:
        try:
            time.sleep(10)
        except Exception as error:  # As what retries a read would.
            raise AssertionError from error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # What cleans up is left in peace.
            time.sleep(0.05)
            cleaned.append(True)

    cleaned: list[bool] = []
    with stop_signals(grace_seconds=60, max_time=None) as stop:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
            read()
        assert cleaned
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        with pytest.raises(StopRequested), stop.interruptible():  # It came before: nobody would tell the wait.
            raise AssertionError
    with stop_signals(grace_seconds=60, max_time=None) as stop, stop.interruptible():
        pass


def test_max_time_counts_from_the_start_of_the_process():
    age = time.time() - psutil.Process().create_time()
    with stop_signals(grace_seconds=0.1, max_time=age + 0.2) as stop:
        assert stop.requested() == 0
        time.sleep(0.5)  # And nobody is killed after it.
        assert stop.requested() == MAX_TIME
        assert cause_name(MAX_TIME) == "train.max_time"
    with stop_signals(grace_seconds=60, max_time=age + 3600) as stop:
        assert stop.requested() == 0


def test_max_time_counts_from_the_start_of_the_agent(monkeypatch):
    """A rank that it starts again has no more time than the first."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    age = time.time() - psutil.Process(os.getppid()).create_time()
    with stop_signals(grace_seconds=60, max_time=age - 0.1) as stop:
        assert stop.requested() == MAX_TIME
    with stop_signals(grace_seconds=60, max_time=age + 60) as stop:
        assert stop.requested() == 0


@pytest.mark.parametrize("body", [STUCK, "time.sleep(60)"])
def test_the_grace_period_ends_what_is_stuck(body):
    process = started(
        f"""
with stop_signals(grace_seconds=0.5, max_time=None) as stop:
    stop.step, stop.saved_step = 7, 5
    print("ready", flush=True)
    {body}
""",
        environment={"RANK": "3", "LOCAL_RANK": "1"},
    )
    process.send_signal(signal.SIGUSR1)
    line = "rank 3: SIGUSR1: checkpoint.grace_seconds, 0.5, are over; there is no checkpoint of step 7, that of step 5 is there\n"
    assert ended(process) == (75, "", line)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])  # The agent makes SIGTERM of a second Ctrl-C.
def test_a_second_ctrl_c_stops_at_once(second):
    process = started(
        f"""
preemption.SAME_S = 0.6
with stop_signals(grace_seconds=60, max_time=None) as stop:
    print("ready", flush=True)
    {STUCK}
"""
    )
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(second)  # One Ctrl-C that comes twice.
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(second)
    line = "stopped at once by a second SIGINT; there is no checkpoint of step 0, earlier checkpoints are as they were\n"
    assert ended(process) == (130, "", line)


# What a closed terminal sends, and more than once, is never a second Ctrl-C: not even after a first one.
@pytest.mark.parametrize("signums", [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP", "SIGTERM"), ("SIGINT", "SIGHUP", "SIGQUIT")])
def test_other_signals_may_come_twice(signums):
    process = started(
        """
preemption.SAME_S = 0.1
with stop_signals(grace_seconds=60, max_time=None) as stop:
    print("ready", flush=True)
    time.sleep(1)
print(cause_name(stop.requested()))
"""
    )
    for signum in signums:
        process.send_signal(signal.Signals[signum])
        time.sleep(0.2)
    assert ended(process) == (0, f"{signums[0]}\n", "")


def test_nohup_is_respected():
    """Where the launcher leaves SIGHUP alone, or there is none."""
    process = started(
        """
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.
with stop_signals(grace_seconds=60, max_time=None) as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.1)
    print("ready", flush=True)
print(stop.requested(), signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
"""
    )
    assert ended(process) == (0, "0 True\n", "")


def test_a_rank_without_launcher_stops(tmp_path):
    """SIGUSR1, or kill -9, to the agent leaves the ranks behind: they would train on, unseen."""
    rank = f"""
import pathlib, time
from fullshard.process.preemption import cause_name, stop_signals
with stop_signals(grace_seconds=60, max_time=None) as stop:
    print("ready", flush=True)
    while not stop.requested():
        time.sleep(0.01)
pathlib.Path({str(tmp_path / "told")!r}).write_text(cause_name(stop.requested()))
"""
    body = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {rank!r}]).wait()"
    agent = started(body, environment={"TORCHELASTIC_RUN_ID": "none"})
    agent.send_signal(signal.SIGUSR1)
    assert ended(agent)[0] == -signal.SIGUSR1  # Its pipes are the rank's too: both are over.
    assert (tmp_path / "told").read_text() == "the launcher is gone"


WORKERS = """
import multiprocessing
def work(connection, leaves):
    if leaves:
        leave_with_parent()
    connection.send(None)
    {work}
ours, theirs = multiprocessing.Pipe()
worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs, {leaves}), daemon=True)
if {leaves}:  # As those of the first batch, which is made before the training begins.
    worker.start()
with stop_signals(grace_seconds=60, max_time=None) as stop:
    with stop.interruptible():
        if not {leaves}:  # As those after a rollback.
            worker.start()
        ours.recv()
    print("ready", worker.pid, sep="\\n", flush=True)
    {then}
"""


def worker_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_r19_signals_of_the_group_are_not_the_workers():
    """The rank asks it to leave afterwards, and it does, though it is in C code as one that reads."""
    process = started(WORKERS.format(work=STUCK, leaves=True, then="time.sleep(0.5); print(stop.requested(), worker.is_alive())"))
    worker = worker_of(process)
    for signum in SIGNALS:
        os.killpg(process.pid, signum)
    code, out, err = ended(process)  # At its end multiprocessing terminates the worker and waits for it.
    assert (code, out.split()[1], err) == (0, "True", "")
    assert gone(worker)


@pytest.mark.parametrize("leaves", [True, False])  # False: a worker that has not come so far.
def test_r19_what_a_worker_is_sent_is_not_the_ranks(leaves):
    process = started(WORKERS.format(work="time.sleep(1)", leaves=leaves, then="worker.join(); print(stop.requested(), worker.exitcode)"))
    worker = worker_of(process)
    for signum in SIGNALS:
        os.kill(worker, signum)
    assert ended(process) == (0, "0 0\n", "")


def test_a_worker_ends_when_its_rank_is_killed():
    process = started(WORKERS.format(work=STUCK, leaves=True, then="time.sleep(60)"))
    worker = worker_of(process)
    process.kill()
    process.wait()
    assert gone(worker)
