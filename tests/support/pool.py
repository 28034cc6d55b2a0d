"""One pool of gloo processes for all tests that need ranks but not the launcher.

Starting a process and importing torch, accelerate and transformers costs seconds; a task in a running process costs milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import HANG_S, ROOT

MAX_RANKS = 4


def _serve(connection: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline")
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    clean = dict(os.environ)
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            task = None
        if task is None:  # The pool was closed.
            return
        function, arguments, environment, rendezvous = task
        os.environ.clear()
        os.environ.update(clean)
        os.environ.update(environment)
        try:
            if "WORLD_SIZE" in environment:
                rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
            result = (True, function(**arguments))
        except BaseException:
            result = (False, traceback.format_exc())
        connection.send(result)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        torch._dynamo.reset()
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooPool:
    """`run(function, world_size=2, config="fsdp.yaml")`: the function's result on each rank, as the launcher would have started it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def _worker(self, index: int) -> Connection:
        while len(self._workers) <= index:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[index][1]

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int = 2,
        config: str | Path = "fsdp.yaml",
        environment: dict[str, str] | None = None,
        timeout: float = HANG_S,
        **arguments: Any,
    ) -> list[Any]:
        """config: a file in accelerate_configs/ or a path. A rank that raises fails the test with its traceback; so does a hang."""
        from fullshard.placement.placement import environment_from_yaml

        path = Path(config) if Path(config).is_absolute() else ROOT / "accelerate_configs" / config
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                launched = environment_from_yaml(path, num_processes=world_size)
                if "WORLD_SIZE" in launched:  # Else distributed_type NO, one process of no group.
                    # Accelerate asks for the address where there are several machines.
                    launched |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                self._worker(rank).send((function, arguments, launched | (environment or {}), f"{folder}/rendezvous"))
            results = []
            for rank in range(world_size):
                connection = self._worker(rank)
                if not connection.poll(timeout):
                    self.close()
                    raise TimeoutError(f"rank {rank} of {world_size} did not answer within {timeout} s")
                try:
                    results.append(connection.recv())
                except (EOFError, ConnectionResetError):
                    self.close()  # The others would wait for it in the next test.
                    raise AssertionError(f"rank {rank} of {world_size} died") from None
        failures = [f"rank {rank}:\n{result}" for rank, (good, result) in enumerate(results) if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in results]

    def close(self) -> None:
        for process, connection in self._workers:
            # Not the closing alone: a loader worker that a test forked may hold a copy of our end.
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
            process.join(5)
            process.kill()
        self._workers.clear()
