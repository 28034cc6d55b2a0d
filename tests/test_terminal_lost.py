"""What concerns the terminal alone ends nothing: a reader that leaves, a full disk, an encoding, a closed window, closed descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import HANG_S, ROOT
from support.launcher import Launched, finished, start

STEPS = 6


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`$python` is this interpreter."""
    env = {**os.environ, "python": sys.executable, "PYTHONUNBUFFERED": "", **environment}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, text=True, capture_output=True, timeout=HANG_S, check=False)


# Each writes more than a pipe holds, after its reader has left.
PRINTS = {
    "print": 'print("é" * 3000)',
    "buffer": 'sys.stdout.buffer.write(b"x" * 3000)',
    "stderr": 'sys.stderr.write("x" * 3000 + "\\n")',
    "rich": 'from rich.console import Console; Console().print("─é" * 1500)',
    "logging": 'logging.error("x" * 3000)',
    "warnings": 'warnings.warn("x" * 3000)',
    "surrogates": 'print("\\udcff" * 3000)',
}
SCRIPT = """
import logging, os, sys, threading, warnings
from fullshard.errors import one_line_errors
@one_line_errors
def main():
    warnings.simplefilter("always")
    for _ in range(30):
        {body}
    sys.stdout.flush()
    if os.fork() == 0:
        {body}
        sys.exit(0)
    assert os.wait()[1] == 0
    open(sys.argv[1], "w").write("done")
main()
print("after main")
"""


ASCII = {"PYTHONIOENCODING": "ascii:strict"}
BYTES = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # stdout is ascii there too.


@pytest.mark.parametrize("environment", [{}, ASCII, BYTES, {"PYTHONUNBUFFERED": "1"}], ids=["utf-8", "ascii", "C", "unbuffered"])
@pytest.mark.parametrize(
    "where", ["2>&1 | true", "> /dev/full 2>&1", ">&- 2>&- <&-", "2>&1 | head -c 99 > /dev/null", "> {tmp}/out 2> {tmp}/err"]
)
@pytest.mark.parametrize("rank", ["", "LOCAL_RANK=0"])  # A rank leaves without the interpreter's end.
def test_what_a_stream_cannot_take_is_lost(rank, where, environment, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(body="; ".join(PRINTS.values())))
    command = f"{rank} $python {tmp_path}/script.py {tmp_path}/done {where.format(tmp=tmp_path)}; exit ${{PIPESTATUS[0]}}"
    result = shell(command, ACCELERATE_MIXED_PRECISION="no", COLUMNS="0", **environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "done").read_text() == "done"
    if "{tmp}" in where:  # What a stream can take is all there.
        out = (tmp_path / "out").read_text()
        assert "─" in out or environment in (ASCII, BYTES)  # rich's, though COLUMNS is 0.
        assert out.count("x" * 3000) == out.count("\\udcff" * 3000) == 31
        assert out.count(("\\xe9" if environment in (ASCII, BYTES) else "é") * 3000) == 31
        err = (tmp_path / "err").read_text()
        assert err.count("x" * 3000) == 31 * 3
        assert "Traceback" not in err


def test_a_reader_that_stands_still_is_not_waited_for(tmp_path):
    """Ctrl-S, `less`: only a command that is there to print waits."""
    script = """
import sys
from fullshard import standard_streams
standard_streams.PATIENCE_S = 0.5
standard_streams.protect_standard_streams()
for _ in range(2000):
    print("x" * 99)
print("done", file=sys.stderr)
input()
print("read again", flush=True)
"""
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "done\n"  # Nobody has read a byte of stdout.
        taken = 0
        while select.select([process.stdout], [], [], 0)[0]:  # What the pipe holds.
            taken += len(os.read(process.stdout.fileno(), 2**16))
        out, err = process.communicate("\n", timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("read again\n")
    assert taken + len(out) < 2000 * 100


def test_a_command_that_could_not_print_says_so():
    """Half a recipe would be a recipe."""
    result = shell("$python recipes/pretrain.py --print_config > /dev/full")
    assert (result.returncode, result.stderr) == (2, "error: stdout: cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "command", ["recipes/pretrain.py --help", "recipes/pretrain.py --print_config", "-m fullshard check", "-m fullshard"]
)
def test_the_reader_of_a_command_may_leave(command):
    result = shell(f"$python {command} | true; exit ${{PIPESTATUS[0]}}")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def reader_that_leaves(folder: Path) -> Launched:
    """`accelerate launch ... <&- 2> /dev/full | head -3`, in ascii."""
    ours, theirs = os.pipe()
    environment = {"PYTHONIOENCODING": "ascii:strict"}
    with (
        open("/dev/full", "w") as full,
        start(folder, stdout=theirs, stderr=full, preexec_fn=lambda: os.close(0), environment=environment, **RUN) as process,
    ):
        os.close(theirs)
        with os.fdopen(ours, errors="replace") as out:
            shown = "".join(out.readline() for _ in range(3))
        return replace(finished(process, folder), stdout=shown)


def closed_streams(folder: Path) -> Launched:
    """`accelerate launch ... >&- 2>&- <&-`"""
    with start(folder, preexec_fn=lambda: os.closerange(0, 3), **RUN) as process:
        return finished(process, folder)


def closed_window(folder: Path) -> Launched:
    """A terminal that is closed amid the run: SIGHUP from the kernel, and from the shell, and nothing can be printed any more."""
    window, terminal = pty.openpty()

    def foreground() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with start(
        folder, **streams, preexec_fn=foreground, environment={"TERM": "xterm", "NO_COLOR": ""}, **RUN | {"train__max_steps": 2000}
    ) as run:
        os.close(terminal)
        log = folder / "metrics.jsonl"
        shown = b""
        while run.poll() is None and not (log.exists() and log.read_text().count("\n") >= STEPS):
            if select.select([window], [], [], 0.1)[0]:
                shown += os.read(window, 2**16)
        os.close(window)
        time.sleep(0.3)
        with contextlib.suppress(ProcessLookupError):
            run.send_signal(signal.SIGHUP)
        return replace(finished(run, folder), stdout=shown.decode(errors="replace"))


WAYS = {function.__name__: function for function in (reader_that_leaves, closed_streams, closed_window)}
# With the tracker that has a process of its own, which shares the rank's streams and its process group.
RUN: dict[str, Any] = {"placement": "fsdp_fp32.yaml", "train__max_steps": STEPS, "data__num_workers": 2, "logging__trackers": "[wandb]"}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    """All, two at a time."""
    folders = {name: tmp_path_factory.mktemp("run") / "out" for name in WAYS}
    with ThreadPoolExecutor(2) as executor:
        return dict(zip(WAYS, executor.map(lambda name: WAYS[name](folders[name]), WAYS), strict=True))


@pytest.mark.parametrize("name", ["reader_that_leaves", "closed_streams"])
def test_a_run_goes_on_without_its_streams(launched: dict[str, Launched], name: str) -> None:
    run = launched[name]
    assert run.returncode == 0
    assert [line["step"] for line in run.metrics if "train/loss" in line] == list(range(1, STEPS + 1))
    assert run.column("eval/loss")
    assert (run.output_dir / "model" / "model.safetensors").is_file()
    assert list((run.output_dir / "wandb").glob("offline-run-*/*.wandb"))
    if name == "reader_that_leaves":
        assert "fullshard pretrain" in run.stdout


def test_a_closed_window_saves(launched: dict[str, Launched]) -> None:
    run = launched["closed_window"]
    assert "tokens/s" in run.stdout  # A bar, as in any terminal.
    (checkpoint,) = (run.output_dir / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{run.metrics[-1]['step']:08}"
    ranks = [json.loads(path.read_text())["pid"] for path in (run.output_dir / "heartbeat").glob("rank_*.json")]
    assert len(ranks) == 2
    assert not [pid for pid in ranks if psutil.pid_exists(pid)]
