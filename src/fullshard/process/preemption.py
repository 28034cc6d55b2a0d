"""Being asked to stop: by one of STOP_SIGNALS on any rank, or by train.max_time. The loop saves and leaves; what takes too long is left.

What torch's elastic agent does, which `accelerate launch` of several processes is (torch 2.13):

- Each rank is a session of its own, so a Ctrl-C in the terminal reaches the agent alone. SIGTERM, SIGINT, SIGHUP and SIGQUIT it passes on
  to the process group of each rank, loader workers included, waits 30 s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT) and kills what is left.
- A second Ctrl-C interrupts that wait: the ranks get SIGTERM, and 30 s more. So SIGINT followed by SIGTERM is a second Ctrl-C here. A
  third one ends the agent while ranks may still be there.
- A closed terminal sends SIGHUP, often twice: the shell's and the kernel's. The agent takes it under nohup too, unless it is told not to by
  PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT; only then do the ranks see that it is ignored. (TORCHELASTIC_SIGNALS_TO_HANDLE is
  overwritten by that or by the default.)
- SIGUSR1 it does not handle and dies of at once, unless PET_SIGNALS_TO_HANDLE names it too. Ranks whose agent is gone get SIGTERM
  from the kernel here: they save and leave, where they would train on with nobody to start them again.
- One rank that exits with another code than 0 ends the others: SIGTERM, 30 s, SIGKILL. With --max_restarts it starts all of them again,
  even if they were asked to stop, unless it got the signal itself. max_time counts from the agent's start: it stays over then.
- Every code but 0 of a rank becomes the launcher's own 1, with a ChildFailedError report that names the rank's code; a launcher that got a
  signal itself leaves with 1 and a SignalException. So what a script that requeues sees is 75 from a run without launcher and 1 from one
  with it. There, start again as long as the code is not 0: the run goes on from its newest checkpoint, and ends with 0 when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import psutil

from fullshard.errors import Preempted

# Those that the agent passes on, and SIGUSR1, which a batch system sends to the ranks.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# Codes of causes that are no signal's number; the largest of all ranks is the one that is shown.
MAX_TIME, ORPHANED = 100, 101
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells give it.
# Signals within this time are one: whoever signals all processes of a job reaches each rank twice, the second time through the agent.
SAME_S = 1.0


class StopRequested(BaseException):
    """Raised in the main thread by a signal inside `Stop.interruptible`, nowhere else. No Exception: what retries a read lets it pass."""


class Stop:
    """Whether this rank was asked to stop. Made by `stop_signals`."""

    def __init__(self, *, grace_seconds: float, max_time: float | None) -> None:
        age = time.time() - psutil.Process(os.getppid() if _under_agent() else None).create_time()
        self._deadline = None if max_time is None else time.monotonic() + max_time - age
        self._grace_seconds = grace_seconds
        self._code = 0
        self._interruptible = False
        self._pid, self._parent = os.getpid(), os.getppid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self.step = 0
        """Steps done, for the line that is shown when the process leaves without having saved them. The loop keeps it."""
        self.saved_step: int | None = None
        """Step of the newest whole checkpoint. The loop keeps it."""

    def requested(self) -> int:
        """0, or the code of the cause: a signal's number, MAX_TIME or ORPHANED. Codes of ranks may be put together by their maximum."""
        if self._code == 0 and self._deadline is not None and time.monotonic() >= self._deadline:
            self._code = MAX_TIME
        return self._code

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal raises StopRequested inside, once; at once if one has come already. For waits that may be long: the next rows.

        What is inside is broken off anywhere and is not to be used again.
        """
        self._interruptible = True
        try:
            if self._code:
                raise StopRequested(cause_name(self._code))
            yield
        finally:
            self._interruptible = False

    def _cause(self, signum: int) -> int:
        return ORPHANED if signum == signal.SIGTERM and os.getppid() != self._parent else signum

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """In the main thread, as soon as it runs Python."""
        if os.getpid() != self._pid:  # In a forked loader worker that has not come to `leave_with_parent` yet.
            return
        self._code = self._code or self._cause(signum)
        if self._interruptible:
            self._interruptible = False  # What cleans up after it is not broken off again.
            raise StopRequested(cause_name(self._code))

    def _forget(self) -> None:
        """In a forked child: what it is sent is not this process's."""
        if self._reader.fileno() >= 0:
            signal.set_wakeup_fd(-1)

    def _watch(self) -> None:
        """In a thread, since the main thread may be stuck: ends the process after the grace period, or at a second SIGINT."""
        leave_s = interrupted_s = math.inf
        while True:
            self._reader.settimeout(None if leave_s == math.inf else max(0.01, leave_s - time.monotonic()))
            try:
                received = self._reader.recv(64)
            except TimeoutError:
                leave(self._given_up(), code=Preempted.exit_code)
            if 0 in received:
                return
            now_s = time.monotonic()
            for signum in received:
                if signum not in STOP_SIGNALS:  # One that others handle.
                    continue
                self._code = self._code or self._cause(signum)
                leave_s = min(leave_s, now_s + self._grace_seconds)
                if signum in (signal.SIGINT, signal.SIGTERM) and now_s - interrupted_s > SAME_S:
                    # The terminal's reaches all ranks: one says it.
                    line = f"stopped at once by a second SIGINT; {self._lost()}" if os.environ.get("LOCAL_RANK", "0") == "0" else ""
                    leave(line, code=INTERRUPTED_EXIT_CODE)
                if signum == signal.SIGINT:
                    interrupted_s = min(interrupted_s, now_s)

    def _given_up(self) -> str:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        return f"{rank}{cause_name(self._code)}: checkpoint.grace_seconds, {self._grace_seconds:g}, are over; {self._lost()}"

    def _lost(self) -> str:
        if self.saved_step == self.step:
            return f"the checkpoint of step {self.step} is there"
        kept = "earlier checkpoints are as they were" if self.saved_step is None else f"that of step {self.saved_step} is there"
        return f"there is no checkpoint of step {self.step}, {kept}"


@contextlib.contextmanager
def stop_signals(*, grace_seconds: float, max_time: float | None) -> Iterator[Stop]:
    """Inside, STOP_SIGNALS make `requested` tell; they end nothing. In the main thread only (ValueError in another).

    SIGHUP is left alone where it is ignored: under nohup the run goes on.

    grace_seconds: after the first signal the process is given this long; then it says what is not saved and leaves with exit code 75
    (Preempted's), whatever the main thread is doing. A second SIGINT does so at once, with 130. Neither follows max_time, after which
    nobody kills. max_time: seconds since the process started, or the launcher where there is one; None: no limit.
    """
    stop = Stop(grace_seconds=grace_seconds, max_time=max_time)
    thread = threading.Thread(target=stop._watch, name="stop_signals", daemon=True)
    heard = [signum for signum in STOP_SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, stop._handle) for signum in heard}
    # Written by the C handler: the thread hears of a signal also while the main thread is in C code that does not come back.
    wakeup = signal.set_wakeup_fd(stop._writer.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=stop._forget)
    if _under_agent():
        signal_at_death_of_parent(signal.SIGTERM)
    thread.start()
    try:
        yield stop
    finally:
        if _under_agent():
            signal_at_death_of_parent(0)
        signal.set_wakeup_fd(wakeup)
        for signum, handler in handlers.items():
            signal.signal(signum, handler or signal.SIG_DFL)  # None: one that Python has not set.
        stop._writer.send(b"\0")  # Closing it would not end the thread: forked workers hold copies.
        thread.join()
        stop._reader.close()
        stop._writer.close()


def cause_name(code: int) -> str:
    """As it is shown: `SIGTERM`, `train.max_time`."""
    return {MAX_TIME: "train.max_time", ORPHANED: "the launcher is gone"}.get(code) or signal.Signals(code).name


def _under_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def leave(line: str, *, code: int) -> NoReturn:
    """End the process from any thread, with a line on stderr unless it is empty. Waits for nothing: no lock, no full pipe, no atexit."""
    if line and select.select([], [2], [], 0)[1]:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
    os._exit(code)


def end_with_launcher() -> None:
    """Until `stop_signals`: this rank ends when its launcher does, also of a kill -9.

    It would go on trying to reach the launcher for as long as torch's timeout, and might find the next one at the same port.
    """
    if _under_agent():
        signal_at_death_of_parent(signal.SIGTERM)


def leave_with_parent() -> None:
    """In a forked loader worker: stop signals are not its own. It ends when its rank ends, of whatever, and when its rank tells it to.

    The agent signals a rank's whole process group, and with a worker goes the batch that the rank is waiting for. SIGTERM is ignored unless
    the rank sent it: so the DataLoader ends a worker that has not heard for 5 s that it is to leave, because it reads, and so does
    multiprocessing's atexit, which waits for it without end.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    for signum in set(STOP_SIGNALS) - {signal.SIGTERM}:
        signal.signal(signum, signal.SIG_IGN)
    # A handler is not told who sent it; a thread that waits for it is. Threads that the libraries start from here on inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def leave_when_told() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=leave_when_told, daemon=True).start()
    signal_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent.pid:  # It was over before the kernel was asked.
        os._exit(0)


def signal_at_death_of_parent(signum: int) -> None:
    """Have the kernel send this process a signal when its parent is gone, also of a kill -9. 0: not any more. Does nothing but on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
