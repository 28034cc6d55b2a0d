"""What a training step sends, counted from the collectives that ran. What will be sent is in `plan/communication.py`."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fullshard.plan.communication import Communication, Traffic, add_traffic

_ITEM_SIZE = {"Byte": 1, "Char": 1, "Bool": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Double": 8, "Long": 8}


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Count this rank's collectives from here to the end of the block; filled in there.

    Read from torch's flight recorder, which keeps each collective of every process group, whoever issued it (DDP's reducer does in C++).
    Gloo carries a reduce-scatter as an all-reduce; the call that asked for it tells them apart. On CUDA it is NCCL's recorder, which
    `build_accelerator` switches on; no test reaches that. What a rank sends to itself alone is left out. RuntimeError where there was more
    than the recorder keeps.
    """
    communication: Communication = {}
    last = max((entry["record_id"] for entry in _recorded()), default=-1)
    yield communication
    entries = [entry for entry in _recorded() if entry["record_id"] > last]
    if entries and len(entries) != max(entry["record_id"] for entry in entries) - last:
        raise RuntimeError("the flight recorder has lost collectives; raise TORCH_FR_BUFFER_SIZE")
    for entry in entries:
        kind = entry["profiling_name"].partition(":")[2].strip("_")
        if "reduce_scatter" in kind or (kind == "all_reduce" and any("reduce_scatter" in frame["name"] for frame in entry["frames"])):
            kind = "reduce_scatter"
        elif "all_gather" in kind or "allgather" in kind:
            kind = "all_gather"
        side = "output" if kind == "all_gather" else "input"
        size = sum(
            math.prod(shape) * _ITEM_SIZE[dtype] for shape, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=True)
        )
        ranks = tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(entry["process_group"][0])))
        if len(ranks) > 1:
            add_traffic(communication, kind, ranks, Traffic(1, size))


def _recorded() -> list[dict[str, Any]]:
    recorder: Any = torch._C._distributed_c10d
    trace = recorder._dump_nccl_trace() if torch.cuda.is_available() else recorder._dump_fr_trace()
    entries: list[dict[str, Any]] = pickle.loads(trace).get("entries", [])
    return entries
