"""A user's mistake: one line on stderr, a non-zero exit on every rank, no traceback."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from fullshard.standard_streams import lost_for_want_of_space, protect_standard_streams

COMMAND_LINE = "command line"


class UserError(Exception):
    """A mistake of the user's. Its message is the one line that is shown: file, key, value, fix."""

    exit_code = 2
    label = "error: "
    everyones = False
    """All ranks have it, always: one says it."""


class Preempted(UserError):  # noqa: N818  # Not an error.
    """A run that was asked to stop and has saved: nobody's mistake. Started again it goes on."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later.
    label = ""
    everyones = True


class Complete(UserError):  # noqa: N818  # Not an error.
    """There is nothing left to do: a loop that starts the run again until it succeeds ends here."""

    exit_code = 0
    label = ""
    everyones = True


def error_line(source: str, key: str, value: Any, fix: str) -> str:
    """The message of a UserError: where it was written, key, value, fix."""
    return f"{source}: {'--' if source == COMMAND_LINE else ''}{key}: {shown(value)}: {fix}"


def shown(value: Any) -> str:
    """A value as YAML would spell it, on one line and not too long."""
    text = value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def stop(error: UserError, *, wait_s: float = 5.0) -> NoReturn:
    """Ends the process with one line on stderr and the error's exit code.

    Under a launcher an error that all ranks share is printed once: local rank 0 says it and exits, upon which the launcher ends the others
    while they wait `wait_s` seconds. An error that only they have is said after the wait.
    """
    message = " ".join(str(error).split())
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The launcher's: ends the wait without a word.
        time.sleep(1.0 if error.everyones else wait_s)
        if error.everyones:
            raise SystemExit(error.exit_code)
    sys.stdout.flush()
    sys.stderr.write(f"{error.label}{message}\n")
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # What torch's agent quotes as the cause in its closing report.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    raise SystemExit(error.exit_code)


def one_line_errors(main: Callable[[], None]) -> Callable[[], None]:
    """Decorator of a main(): a user's mistake ends in `stop`, not in a traceback; what stdout or stderr cannot take ends nothing.

    A rank leaves without taking the interpreter down: a worker thread of gloo's that wants the GIL at that moment aborts the process, and a
    run that succeeded would end with exit code -6 (seen once in some 80 launches).
    """

    @functools.wraps(main)
    def wrapper() -> None:
        protect_standard_streams()
        code = 0
        try:
            try:
                _check_working_folder()
                main()
                check_printed()
            except UserError as error:
                stop(error)
        except SystemExit as ended:
            if "LOCAL_RANK" not in os.environ or not isinstance(ended.code, int):
                raise
            code = ended.code
        if "LOCAL_RANK" in os.environ:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return wrapper


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("working folder: it is there no more, and relative paths mean nothing; cd to one that is there") from None


def check_printed() -> None:
    """Raises UserError where a full disk has taken no more of what a command printed: half a file is no recipe."""
    if (reason := lost_for_want_of_space()) is not None:
        raise UserError(f"stdout: cannot be written: {reason}")


@contextlib.contextmanager
def one_line(place: str) -> Iterator[None]:
    """Turns whatever the libraries raise over a file, a name or a split into one line. They share no base class of errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
