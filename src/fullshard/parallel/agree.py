"""What ranks tell one another: a value from the main process, an error of any of them, a flag of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.constants import default_pg_timeout

from fullshard.errors import UserError, first_line

Result = TypeVar("Result")


def on_main(accelerator: Accelerator, function: Callable[[], Result], *, group: dist.ProcessGroup | None = None) -> Result:
    """What `function` returns on the main process, on every rank of `group` (None: the one that trains). Collective; the result is pickled.

    A UserError there is raised here on every rank; any other exception too, as a RuntimeError where it did not happen. Nobody is left
    waiting. For what all ranks must see alike (a listing, a folder that is being renamed), and for what takes less than the process
    group's timeout.
    """
    attempt = _Attempt.of(function) if accelerator.is_main_process else None
    said: list[Any] = [attempt]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(said, src=0, group=group)
    return (attempt or said[0]).result_of(rank=0)


def from_all(accelerator: Accelerator, function: Callable[[], Result], *, group: dist.ProcessGroup | None = None) -> list[Result]:
    """What `function` returns on each rank, by rank, on every rank. Collective; pickled. Exceptions are raised as by `on_main`."""
    attempt = _Attempt.of(function)
    said: list[Any] = [attempt]
    if accelerator.num_processes > 1:
        said = [None] * accelerator.num_processes
        dist.all_gather_object(said, attempt, group=group)
        said[accelerator.process_index] = attempt
    attempt.result_of(rank=accelerator.process_index)  # A rank's own exception first: it has the traceback.
    return [other.result_of(rank=rank) for rank, other in enumerate(said)]


@dataclass(frozen=True)
class _Attempt(Generic[Result]):
    """What came of a call, as other ranks hear it."""

    result: Result | None = None
    message: str | None = None
    """One line, where it raised."""
    mistake: type[UserError] | None = None
    """Its class, where that is a UserError's."""
    error: Exception | None = None
    """Here only."""

    @classmethod
    def of(cls, function: Callable[[], Result]) -> _Attempt[Result]:
        try:
            return cls(result=function())
        except UserError as error:
            return cls(message=str(error), mistake=type(error), error=error)
        except Exception as error:
            return cls(message=first_line(error), error=error)

    def result_of(self, *, rank: int) -> Result:
        """Raises what `rank` has raised."""
        if self.error is not None:
            raise self.error
        if self.message is not None:
            raise self.mistake(self.message) if self.mistake else RuntimeError(f"rank {rank}: {self.message}")
        return self.result  # type: ignore[return-value]  # None only where the function returned it.

    def __getstate__(self) -> dict[str, Any]:
        return {"result": self.result, "message": self.message, "mistake": self.mistake, "error": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def dump_collectives(accelerator: Accelerator, folder: Path) -> None:
    """Write what the flight recorder has of this rank's last collectives, torch's pickle for its `torchfrtrace`. No test reaches NCCL's."""
    recorder: Any = torch._C._distributed_c10d
    trace = recorder._dump_nccl_trace() if accelerator.device.type == "cuda" else recorder._dump_fr_trace()
    (folder / f"collectives_rank_{accelerator.process_index}").write_bytes(trace)


def host_group(accelerator: Accelerator, *, longest_wait_s: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for `agree`, whatever the device; None for a single process. Collective; make it once.

    longest_wait_s: for which ranks may have to wait there for one another, beside torch's own timeout.
    """
    timeout = default_pg_timeout + timedelta(seconds=longest_wait_s)
    return dist.new_group(backend="gloo", timeout=timeout) if accelerator.num_processes > 1 else None


@dataclass(frozen=True)
class Agreed:
    """What makes all ranks end the step together."""

    failure: str | None = None
    """Of the first rank that has one."""
    stop: int = 0
    """The largest of the ranks' codes; 0: nobody has to stop."""
    save_failed: bool = False
    """A rank has seen that the last save did not succeed."""


def agree(group: dist.ProcessGroup | None, *, failure: str | None, stop: int = 0, save_failed: bool = False) -> Agreed:
    """What any rank has to say, the same on every rank. Collective, once per optimizer step.

    Ranks meet on the host: nothing waits for a GPU, and a rank that is slow to read keeps the others here and not in a collective of the
    device, whose timeout is shorter. What is agreed on is one int64 vector under MAX.
    Two gloo ranks on a busy machine with 2 cores: 250 to 310 us a call where nothing failed (median of 2,000).
    """
    if group is None:
        return Agreed(failure, stop, save_failed)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    word = torch.tensor([0 if failure is None else world_size - rank, stop, save_failed])  # The largest is the first rank's.
    dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)
    failed, stop, save_failed = word.tolist()
    said: list[str | None] = [failure]
    if failed:
        dist.broadcast_object_list(said, src=world_size - failed, group=group)
    return Agreed(said[0] if failed else None, stop, bool(save_failed))
