"""stdout and stderr that cost nothing: what they cannot take is lost there, and nowhere else.

A reader that has left, a closed terminal, a full disk, an encoding without the character: whoever prints, logs or warns, in this process or
in a forked worker, does not hear of it. Libraries would: print raises, rich exits, logging and the interpreter's end write tracebacks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

PATIENCE_S = 5.0


class _Descriptor(io.FileIO):
    """Descriptor 1 or 2, to which any write succeeds."""

    def __init__(self, descriptor: int, *, patience_s: float | None) -> None:
        """patience_s: how long a reader that has stopped (Ctrl-S, a pager) is waited for, once; None: as long as it takes."""
        super().__init__(descriptor, "wb", closefd=False)
        self._patience_s = patience_s
        self._stalled = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.full: OSError | None = None
        """Why something was lost, unless its reader had left."""

    def write(self, data: Any, /) -> int:
        whole = memoryview(data).cast("B")
        rest = whole
        while rest:
            wait_s = 0.0 if self._stalled else self._patience_s
            self._stalled = not self._poll.poll(None if wait_s is None else wait_s * 1000)
            if self._stalled:
                break
            try:
                # Of so many bytes the poll says that they are taken without a wait.
                written = super().write(rest[: select.PIPE_BUF])
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self.full = error
                break
            if not written:  # Of a non-blocking descriptor that was full after all.
                break
            rest = rest[written:]
        return len(whole)


def protect_standard_streams() -> None:
    """Put such streams in the place of sys.stdout and sys.stderr, and /dev/null where one of the three descriptors is closed.

    The next file or socket that is opened would get its number, and what a library prints would be written into it. COLUMNS=0, which
    terminals without a size leave, is taken for unset: rich would print nothing.
    """
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name) == "0":
            del os.environ[name]
    for descriptor in (0, 1, 2):
        if not _is_open(descriptor):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest number that is free.
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # Somebody else's: a test's, a notebook's.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
        raw = _Descriptor(descriptor, patience_s=PATIENCE_S if _launched() else None)
        unbuffered = getattr(stream, "write_through", False)  # PYTHONUNBUFFERED
        protected = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # As the interpreter does it.
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=getattr(stream, "line_buffering", True),
            write_through=unbuffered,
        )
        setattr(sys, name, protected)
        setattr(sys, f"__{name}__", protected)


def lost_for_want_of_space() -> str | None:
    """Why a command that is there to print could not, though it is still being read; None of a run: it prints beside what it does."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return None if _launched() or not isinstance(raw, _Descriptor) or raw.full is None else raw.full.strerror


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _launched() -> bool:
    return "ACCELERATE_MIXED_PRECISION" in os.environ  # Set by accelerate launch, whatever the YAML.
