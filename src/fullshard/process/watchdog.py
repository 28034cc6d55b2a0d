"""Hangs: a rank that makes no progress ends the run on all ranks, after each has written what it was doing.

    <output_dir>/heartbeat/rank_00000.json   one line, rewritten every few seconds: where the rank is
    <output_dir>/heartbeat/hangs             number of hangs of this folder so far; counting up is the alarm that all ranks read
    <output_dir>/hang/<n>/rank_00000.txt     of the n-th hang: rank, step, phase, how long, and the Python stacks of all its threads

Ranks hear of one another through the folder, which they share anyway: a collective would hang too. The alarm is a file that is there from
the start, not one that appears, since a network file system may show a new name only half a minute later. Earlier hangs keep their folders.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fullshard.process.preemption import leave

PHASES = ("load", "forward", "backward", "optimizer", "evaluate", "save")
HANG_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h. A failure: with --max_restarts the launcher starts the run again, which resumes."""
HEARTBEAT_S = 5.0
UNHEARD_BEATS = 3  # Own heartbeats in which another rank's did not change, after which it is taken for gone.
ANSWER_S = 5.0  # For which the others are waited for.
AFTER_S = 2.0  # By which those that do not tell the outcome outlast the one that does: the launcher ends them when it exits.
DUMP_S = 5.0  # For a file system that hangs as well, beyond the above.


class Now(NamedTuple):
    """What the main thread is doing."""

    phase: str
    step: int
    extra_s: float


class Watchdog:
    """Two threads beside the training loop, which says by `phase` what it does. Use it as a context manager.

    A phase that lasts longer than timeout_s + its extra_s is a hang: the run ends with HANG_EXIT_CODE. Time in which the process did not
    run (SIGSTOP, a debugger that stops all threads, a laptop asleep) does not count: continued, it goes on. Where others waited for it too
    long, they have ended the run. A folder that hangs too holds nobody up: the stacks are on stderr then. Of a rank whose C code keeps the
    GIL no thread runs either: the others say that it did not answer.

    The process group's own timeout must be longer, or its error comes first.
    """

    def __init__(
        self,
        *,
        output_dir: str | Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        poll_s: float = 2.0,
        also: Callable[[Path], None] | None = None,
    ) -> None:
        """also: called with the hang's folder after the stacks are written, in a thread; for the device's own records."""
        self._heartbeats, self._hangs = Path(output_dir) / "heartbeat", Path(output_dir) / "hang"
        self._rank, self._world_size, self._timeout_s, self._also = rank, world_size, timeout_s, also
        self._poll_s = min(poll_s, timeout_s / 4)
        self._now = Now("load", 0, 0.0)
        self._since_s = 0.0  # In this phase, as _watch counts it.
        self._alarm, self._closed = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._number = 1
        """Of the hang that would be the next. The same on all ranks: none can count up before all have begun to train."""

    def __enter__(self) -> Watchdog:
        with contextlib.suppress(OSError):
            self._heartbeats.mkdir(parents=True, exist_ok=True)
            (self._heartbeats / "hangs").touch()
            self._number = self._count() + 1
            if self._rank == 0:  # Of an earlier run with more ranks.
                for path in self._heartbeats.glob("rank_*.json"):
                    if path.stem.removeprefix("rank_").isdigit() and int(path.stem.removeprefix("rank_")) >= self._world_size:
                        path.unlink()
        self._beat()
        for work in (self._watch, self._listen):
            threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """The threads end by themselves: one may be in a file system that hangs. The last heartbeat stays."""
        self._closed.set()
        self._alarm.set()

    def phase(self, phase: str, *, step: int, extra_s: float = 0.0) -> None:
        """The main thread begins `phase` of `step`; extra_s: how much longer than timeout_s it may take, as for waits for remote data."""
        self._now = Now(phase, step, extra_s)

    def _watch(self) -> None:
        """Counts time, and does nothing else that could hang, until there is an alarm."""
        seen, last = self._now, time.monotonic()
        while not self._alarm.wait(self._poll_s):
            before, last = last, time.monotonic()
            if self._now is seen:
                self._since_s += min(last - before, 2 * self._poll_s)  # A longer step of the clock: this process stood still.
            else:
                seen, self._since_s = self._now, 0.0
            if self._since_s > self._timeout_s + seen.extra_s:
                break
        if not self._closed.is_set():
            self._end(seen)

    def _listen(self) -> None:
        """Hears the alarm, tells the others where this rank is, and looks after one of them while it waits long itself.

        The others wait as long as a rank may read. A rank that is stopped, or gone, would use all of that; but it sends no heartbeat.
        """
        beaten, unheard, last = time.monotonic(), 0, None
        while not self._closed.wait(self._poll_s) and self._count() < self._number and unheard < UNHEARD_BEATS:
            if time.monotonic() - beaten > HEARTBEAT_S:
                beaten = time.monotonic()
                self._beat()
                if self._since_s <= self._timeout_s or self._world_size == 1:
                    unheard, last = 0, None
                    continue
                heard = self._read((self._rank + 1) % self._world_size).get("time")  # Each rank one: all are looked after.
                unheard, last = (unheard + 1 if heard == last else 0), heard
        self._alarm.set()

    def _end(self, now: Now) -> None:
        """Write what there is to say, in a thread that is waited for not too long, and leave."""
        lines: list[str] = []
        reasons: list[Exception] = []

        def report() -> None:
            try:
                lines.append(self._report(now))
            except Exception as error:
                reasons.append(error)

        thread = threading.Thread(target=report, name="watchdog report", daemon=True)
        thread.start()
        thread.join(ANSWER_S + AFTER_S + self._poll_s + DUMP_S)
        if not lines:
            faulthandler.dump_traceback(2, all_threads=True)
            reason = f"{self._hangs}: {reasons[0]}" if reasons else f"{self._hangs} does not answer"
            lines.append(
                f"error: no progress for {self._since_s:.0f} s: rank {self._rank} is in {_place(now)}; its stacks are above: {reason}"
            )
        leave(lines[0], code=HANG_EXIT_CODE)

    def _report(self, now: Now) -> str:
        """Write this rank's file, and those of ranks that do not answer; returns the line to show, empty where another rank shows it.

        That is rank 0 if it answers, otherwise the lowest that does.
        """
        folder = self._hangs / str(self._number)
        with contextlib.suppress(OSError):
            (self._heartbeats / "hangs").write_text(f"{self._number}\n")  # All write the same.
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _file(self._rank), "w", encoding="utf-8") as file:
            file.write(f"rank {self._rank}: {_place(now)}, for {self._since_s:.0f} s; main thread {threading.main_thread().ident:#018x}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        self._beat(hang=self._number)
        if self._also is not None:
            with contextlib.suppress(Exception):
                self._also(folder)
        deadline = time.monotonic() + ANSWER_S
        awaited = list(range(self._world_size)) if self._rank == 0 else [0]  # Not all by all: that would be a million files of 1,000 ranks.
        while (awaited := [rank for rank in awaited if not self._answered(rank)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        first = next(rank for rank in range(self._world_size) if rank == self._rank or self._answered(rank))
        if first != self._rank:
            time.sleep(max(0.0, deadline - time.monotonic()) + self._poll_s + AFTER_S)  # It may have heard the alarm so much later.
            return ""
        beats = [self._read(rank) for rank in range(self._world_size)]
        silent = [rank for rank, beat in enumerate(beats) if beat.get("hang") != self._number]
        for rank in silent:
            with contextlib.suppress(FileExistsError), open(folder / _file(rank), "x", encoding="utf-8") as file:
                file.write(f"rank {rank}: did not answer within {ANSWER_S:.0f} s: no stacks; {_last(beats[rank])}\n")
        seconds = max(_number(beat, "seconds") for beat in beats)
        return f"error: no progress for {seconds:.0f} s: {blame(beats, silent)}; stacks are in {folder}"

    def _answered(self, rank: int) -> bool:
        return self._read(rank).get("hang") == self._number

    def _count(self) -> int:
        """Hangs so far. 0 where the file is missing or just being written."""
        try:
            return int((self._heartbeats / "hangs").read_text() or 0)
        except (OSError, ValueError):
            return 0

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            beat = json.loads((self._heartbeats / f"rank_{rank:05}.json").read_text(encoding="utf-8"))
            return beat if isinstance(beat, dict) else {}
        except (OSError, ValueError):
            return {}

    def _beat(self, *, hang: int | None = None) -> None:
        """Say where this rank is. A full disk, or a folder that is gone, is no reason to end the run."""
        now = self._now
        beat = {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": now.step,
            "phase": now.phase,
            "seconds": round(self._since_s, 1),
            "time": round(time.time(), 3),
            "hang": hang,
        }
        path = self._heartbeats / f"rank_{self._rank:05}.json"
        partial = path.with_suffix(".tmp")
        with contextlib.suppress(OSError), self._writing:
            partial.write_text(f"{json.dumps(beat)}\n", encoding="utf-8")
            partial.replace(path)


def blame(beats: list[dict[str, Any]], silent: list[int]) -> str:
    """Who holds the others up, by the last heartbeat of each rank: who does not answer, or else who is furthest behind."""
    behind = silent
    if not behind:
        places = [(beat["step"], PHASES.index(beat["phase"]) if beat["phase"] in PHASES else -1) for beat in beats]
        behind = [rank for rank, place in enumerate(places) if place == min(places)]
    named = f"rank {behind[0]}" + (f" and {len(behind) - 1} more" if len(behind) > 1 else "")
    if silent:
        line = f"{named} did not answer ({_last(beats[behind[0]])})"
    else:
        line = f"{named} {'is' if len(behind) == 1 else 'are'} {_seen(beats[behind[0]])}"
    rest = next((rank for rank in range(len(beats)) if rank not in behind), None)
    return line if rest is None else f"{line}, rank {rest} is {_seen(beats[rest])}"


def record_nccl(output_dir: str | Path) -> None:
    """Have NCCL's flight recorder keep the last collectives of each rank, and write them below output_dir when NCCL's own timeout fires.

    Before the process group is made; what the environment says already stays. Names and defaults as in torch 2.13's FlightRecorder.hpp and
    ProcessGroupNCCL.hpp, where the recorder is on by default with 2,000 entries. No test here reaches NCCL.
    """
    folder = Path(output_dir).resolve() / "hang"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(folder / "nccl_trace_rank_")),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def _file(rank: int) -> str:
    return f"rank_{rank:05}.txt"


def _place(now: Now) -> str:
    return f"{now.phase} of step {now.step}"


def _seen(beat: dict[str, Any]) -> str:
    return f"in {beat.get('phase')} of step {beat.get('step')} for {_number(beat, 'seconds'):.0f} s"


def _last(beat: dict[str, Any]) -> str:
    """The age is by this host's clock."""
    if not beat:
        return "no heartbeat"
    return f"last heartbeat {time.time() - _number(beat, 'time'):.0f} s ago in {beat.get('phase')} of step {beat.get('step')}"


def _number(beat: dict[str, Any], key: str) -> float:
    value = beat.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
