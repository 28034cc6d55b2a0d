"""Memory: bytes that are allocated, measured. What will be is in `plan/memory.py`.

On CUDA the caching allocator's own counters. On CPU "allocated" is tensor bytes counted by c10's CPU allocator, never RSS: from
`count_cpu_memory()` on, the allocator adds every allocation and subtracts every free, by whatever thread and through whatever path
(temporaries inside kernels, the UntypedStorage.resize_ with which FSDP2 drops gathered parameters, DDP's C++ buckets, compiled code).
Around a measured step the profiler, with all operator events filtered out, hands over the running total at each of those events, whose
maximum is the peak. An allocation of 100 MB raises the peak by 100,000,000 bytes exactly, and torch's own FSDPMemTracker and MemTracker
gave the same rise over a step, byte for byte. Not counted: memory that c10 did not allocate (torch.from_numpy, mmap-ed files, gloo's own).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
import torch
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device."""

    allocated: int
    """In live tensors when the measurement ended."""
    peak_allocated: int
    """Largest during the measurement."""
    reserved: int
    """Held by the allocator; on CPU, whose allocator keeps nothing back, the same as peak_allocated."""
    activations: int
    """Largest growth over one `forward()` block: what it left alive at its end, units that FSDP2 leaves gathered included."""
    timeline: tuple[tuple[int, int], ...] = ()
    """CPU only: (nanoseconds since the epoch, bytes allocated) after each allocation and each free."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct local storages behind `tensors`: views and tied weights count once, a DTensor counts its local shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in the optimizer's state (local shards)."""
    return tensor_bytes(value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))


def host_rss_bytes() -> int:
    """Resident set size of this process, without its children."""
    return int(psutil.Process().memory_info().rss)


@functools.cache
def count_cpu_memory() -> bool:
    """Let c10's CPU allocator keep its running total from now on; call it before the model exists: what is older is not counted.

    Costs a hash-table entry, about 1 microsecond, per allocation and per free. False if this torch build has no such switch: then nothing
    is measured.
    """
    # Kineto, which carries the profiler's events, otherwise writes two lines to stderr per measurement. Read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        # No Python binding sets it, and without it frees by threads other than the profiled one (gloo's) are lost.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    except (OSError, ValueError):
        return False
    return True


@dataclass
class MemoryMeasurement:
    """What `measure_memory` yields; `use` is set when its block ends, and stays None where nothing was measured."""

    use: MemoryUse | None = None
    _device: torch.device | None = None
    _marks: list[int] = field(default_factory=list)  # CUDA: bytes at each mark
    _markers: list[torch.Tensor] = field(default_factory=list)  # CPU: one byte, kept alive so that its address names one event

    def _mark(self) -> None:
        match self._device:
            case None:
                pass
            case torch.device(type="cuda"):
                self._marks.append(torch.cuda.memory_allocated(self._device))
            case _:
                self._markers.append(torch.empty(1, dtype=torch.uint8))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap one forward pass, loss included: its growth is a candidate for `activations`."""
        self._mark()
        yield
        self._mark()


class measure_memory:  # noqa: N801 - used as a function: with measure_memory(device, enabled=...) as measurement
    """Measure the memory of a block on `device`: a MemoryMeasurement. With enabled=False it does nothing and costs nothing.

    CUDA: counters of the caching allocator (no test reaches this branch: there is no GPU in CI). Resets the peak statistics.
    CPU: see the module's docstring. Ending it takes about 7 microseconds per allocation event, 30 ms for a step of the debug recipe.
    Events come from the calling thread (which runs autograd's CPU backward too); other threads' bytes are in the running total that the
    next event reports. Raises RuntimeError inside another torch profiler.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._measurement = MemoryMeasurement()
        if enabled and (device.type == "cuda" or count_cpu_memory()):
            self._measurement._device = device

    def __enter__(self) -> MemoryMeasurement:
        match self._measurement._device:
            case None:
                pass
            case torch.device(type="cuda") as device:
                torch.cuda.reset_peak_memory_stats(device)
            case _:
                activities = {ProfilerActivity.CPU}
                # Without profile_all_threads: its global callbacks carry no memory events.
                config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
                torch._C._autograd._prepare_profiler(config, activities)
                # A scope that no operator has: memory events alone are recorded, which keeps the overhead at 1 to 2 % of the step.
                enable = torch._C._autograd._enable_profiler  # Its type stub lacks the third argument.
                enable(config, activities, {RecordScope.LITE_INTERPRETER})  # type: ignore[call-arg]
                self._measurement._mark()
        return self._measurement

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        measurement = self._measurement
        match measurement._device:
            case None:
                return
            case torch.device(type="cuda") as device:
                measurement.use = MemoryUse(
                    allocated=torch.cuda.memory_allocated(device),
                    peak_allocated=torch.cuda.max_memory_allocated(device),
                    reserved=torch.cuda.memory_reserved(device),
                    activations=_largest_growth(measurement._marks),
                )
            case _:
                measurement._mark()
                result = torch._C._autograd._disable_profiler()
                measurement.use = _cpu_use(result.experimental_event_tree(), [marker.data_ptr() for marker in measurement._markers])
                measurement._markers.clear()
        measurement._device = None


def _largest_growth(marks: list[int]) -> int:
    return max((after - before for before, after in zip(marks[::2], marks[1::2], strict=False)), default=0)


def _cpu_use(events: list, addresses: list[int]) -> MemoryUse:
    """Totals from allocation events in time order. `addresses`: the one-byte markers', first at the start, last at the end."""
    events = sorted(events, key=lambda event: event.start_time_ns)
    # The last ones there: markers stay alive, and an earlier byte, of a boolean of the program's, may have had the address of one.
    last = {event.extra_fields.ptr: number for number, event in enumerate(events) if event.extra_fields.alloc_size == 1}
    markers = {last[address] for address in addresses}
    marks: list[int] = []
    timeline: list[tuple[int, int]] = []
    for number, event in enumerate(events):
        total = event.extra_fields.total_allocated
        if number in markers:
            # `len(marks)` earlier ones and this one are no tensors of the program's.
            marks.append(total - len(marks) - 1)
        timeline.append((event.start_time_ns, total - len(marks)))
    peak = max(0, *(size for _, size in timeline))
    return MemoryUse(
        allocated=marks[-1],
        peak_allocated=peak,
        reserved=peak,
        activations=_largest_growth(marks[1:-1]),
        timeline=tuple(timeline),
    )
