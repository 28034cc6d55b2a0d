"""Errors of disks and folders, told as one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.checkpoint.manifest import settle
from fullshard.errors import UserError, first_line


def make_folder(partial: Path, *, place: str) -> None:
    """Main process only."""
    with file_errors(place):
        partial.parent.mkdir(parents=True, exist_ok=True)
        settle(partial.parent)
        for leftover in partial.parent.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=leftover != partial)
        partial.mkdir()


def call_dcp(call: Callable[..., Any], tensors: dict[str, torch.Tensor], *, place: str, **options: Any) -> Any:
    with file_errors(place):
        return call(tensors, **options)


@contextmanager
def file_errors(place: str) -> Iterator[None]:
    """Turns a failure of the file system into one line. What torch.distributed.checkpoint raises, it raises on every rank, as no Exception;
    here it becomes one."""
    try:
        yield
    except CheckpointException as failed:  # Of all ranks, by rank.
        rank, (error, _) = min(failed.failures.items())
        line = f"{place}: rank {rank}: {first_line(error)}"  # type: ignore[arg-type]
        if "inline_container" in line:
            line += " (what torch says of a disk that is full)"
        raise (UserError(line) if _is_of_files(error) else RuntimeError(line)) from failed
    except OSError as error:
        raise UserError(f"{place}: {first_line(error)}") from error


def _is_of_files(error: BaseException | None) -> bool:
    """torch's zip writer and reader have no error class of their own; a disk that is full amid a record shows as any of these."""
    while error is not None:
        if isinstance(error, OSError | EOFError) or any(name in str(error) for name in ("PytorchStream", "inline_container")):
            return True
        error = error.__cause__ or error.__context__
    return False
