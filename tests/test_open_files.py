"""Each stream keeps a file open: a limit that is too low is told before step 1, and one that is enough is enough for saving too."""

from __future__ import annotations

import functools
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.launcher import launch


def options(tmp_path: Path) -> dict[str, Any]:
    """64 streams, all of which the first batch opens. None comes to its end: that would close its file."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{json.dumps({'text': f'def f{number}(): return {number} * {number}'})}\n" for number in range(5_000)))
    return {
        "placement": "fsdp_fp32.yaml",
        "environment": {"WANDB_MODE": "offline"},
        "data__path": "json",
        "data__data_files": f"[{file}]",
        "data__evaluation_documents": 32,
        "data__num_streams": 64,
        "data__num_workers": 0,
        "data__sequence_length": 16,
        "data__shuffle_window": 1,
        "train__global_batch_size": 64,
        "train__micro_batch_size": 32,
        "train__max_steps": 2,
        "checkpoint__every": 1,
        "logging__trackers": "[wandb]",
    }


def allow_files(count: int) -> Callable[[], None]:
    """What `ulimit -n` says to the launcher and its ranks."""
    return functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (count, count))


def test_a_limit_that_is_too_low_is_named_and_what_is_named_is_enough(tmp_path: Path) -> None:
    refused = launch(tmp_path / "refused", preexec_fn=allow_files(100), **options(tmp_path))
    assert refused.returncode != 0
    kept = "a process keeps 32 files open for its 32 streams, too many for its limit of 100 open files"
    needed = re.search(rf"^error: data\.num_streams: 64: {kept}; raise it to (\d+) \(ulimit -Hn\), lower data", refused.stderr, re.M)
    assert needed is not None, refused.stderr
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    run = launch(tmp_path / "run", preexec_fn=allow_files(int(needed[1])), **options(tmp_path)).check()
    assert [path.name for path in sorted((run.output_dir / "checkpoints").iterdir())] == ["step_00000001", "step_00000002"]
    assert (run.output_dir / "model" / "model.safetensors").is_file()
