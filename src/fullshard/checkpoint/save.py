"""Saving: a checkpoint is written by all ranks together, in the background where that was asked for, and gets its name when it is whole."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import __version__
from fullshard.checkpoint.file_errors import call_dcp, file_errors, make_folder
from fullshard.checkpoint.manifest import (
    FORMAT,
    STATE,
    FileRecord,
    checkpoint_steps,
    checkpoints_folder,
    outdated,
    record_files,
    remove,
    write_manifest,
)
from fullshard.checkpoint.resume import Resume, this_launch
from fullshard.checkpoint.state import collect_random_states
from fullshard.checkpoint.tensors import training_tensors
from fullshard.data.batches import merge_positions
from fullshard.errors import UserError, first_line
from fullshard.files import put_in_place, sync
from fullshard.model.bad_steps import BadSteps
from fullshard.model.parameters import whole_tensor
from fullshard.parallel.agree import from_all, host_group, on_main
from fullshard.placement.placement import Placement
from fullshard.recipe.fields import Recipe
from fullshard.recipe.writing import recipe_to_dict


class Saver:
    """Writes the checkpoints of a run one after another, beside the training or while it waits.

    With `checkpoint.async_save` the tensors are copied to host memory, which is kept for the next time, and a thread writes them. Its
    collectives have a gloo group of their own: on the group that trains they would come between the step's. How a save has ended is the
    same on every rank, though each may see it at another step.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        placement: Placement,
        accelerator: Accelerator,
        resume: Resume,
        say: Callable[[str], None] = print,
    ) -> None:
        """say: prints a line; called on the main process, in the thread."""
        self._say = say
        self._recipe, self._placement, self._accelerator, self._resume = recipe, placement, accelerator, resume
        self._group = host_group(accelerator, longest_wait_s=recipe.train.timeout_seconds)
        self._full = placement.distributed_type == "FSDP" and placement.state_dict_type == "FULL_STATE_DICT"
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.step: int | None = resume.step if resume.own else None
        """Of the last save, or of the checkpoint of this folder that the run was resumed from; None after a failure or a rollback."""
        self.saved_step = self.step
        """Of the newest one that is complete, as far as this rank knows."""

    def save(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        bad_steps: BadSteps,
        step: int,
        position: dict[str, Any],
        values: dict[str, Any],
        retain_all: bool = False,
    ) -> None:
        """Save optimizer step `step`. Collective; waits for the save before. Raises UserError as `finish` does.

        position: this rank's part of the data position after that step. values: what state.json has beside it. retain_all: delete no older
        checkpoint this time.
        """
        self.finish()
        self.step = step
        tensors = training_tensors(model, optimizer) | bad_steps.tensors() | collect_random_states(self._accelerator)
        if self._full:
            tensors = self._gathered(tensors)
        elif self._recipe.checkpoint.async_save:
            tensors = {name: self._staged(name, tensor) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        state = {
            "format": FORMAT,
            "step": step,
            "position": merge_positions(gather_object([position])),
            "device": self._accelerator.device.type,
            "launch": this_launch(),
            "num_processes": self._accelerator.num_processes,
            "distributed_type": self._placement.distributed_type,
            "state_dict_type": self._placement.state_dict_type,
            "schedule_steps": self._resume.schedule_steps,
            "scaler": self._accelerator.scaler.state_dict() if self._accelerator.scaler is not None else None,
            **values,
            "recipe": recipe_to_dict(self._recipe),
            "accelerate": asdict(self._placement),
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {"fullshard": __version__, "torch": torch.__version__},
        }
        self._thread = threading.Thread(
            target=self._write, kwargs={"tensors": tensors, "state": state, "retain_all": retain_all}, name="save", daemon=True
        )
        self._thread.start()
        if not self._recipe.checkpoint.async_save:
            self.finish()

    def folder(self, step: int) -> Path:
        """Of the checkpoint of step `step`."""
        return checkpoints_folder(self._recipe.output_dir) / f"step_{step:08d}"

    def failed(self) -> bool:
        """Whether the last save has ended and failed, as far as this rank knows. Waits for nothing."""
        return self._thread is not None and not self._thread.is_alive() and self._error is not None

    def finish(self) -> None:
        """Wait until the last save is on disk. Raises its UserError, the same on every rank; what was saved before is then as it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if (error := self._error) is not None:
                self._error, self.step = None, None
                raise error

    def close(self) -> None:
        """Wait until nothing is written any more, whatever comes of it. Before the process group goes: a save would be lost with it."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, *, tensors: dict[str, torch.Tensor], state: dict[str, Any], retain_all: bool) -> None:
        """In the thread. Everything goes to step_XXXXXXXX.tmp, is synced to disk, and is then renamed."""
        final = self.folder(state["step"])
        partial = final.with_name(f"{final.name}.tmp")
        place = f"{final}: cannot be saved"
        main, group = self._accelerator.is_main_process, self._group
        if self._accelerator.device.type == "cuda":  # A new thread's device is the first one, and torch copies on its stream.
            torch.cuda.set_device(self._accelerator.device)
        # This thread's alone. torch.load looks at no CRC32, and to compute them takes a third of the save.
        torch.serialization.set_crc32_options(False)
        try:
            on_main(self._accelerator, lambda: make_folder(partial, place=place), group=group)
            writer = dcp.FileSystemWriter(partial, sync_files=True)  # Each file to disk before it says so.
            if self._full:
                index = on_main(
                    self._accelerator, lambda: call_dcp(dcp.save, tensors, place=place, no_dist=True, storage_writer=writer), group=group
                )
            else:
                index = call_dcp(dcp.save, tensors, place=place, no_dist=group is None, process_group=group, storage_writer=writer)
            listed = {entry.relative_path for entry in index.storage_data.values()}
            names = [name for name in listed if name.startswith(f"__{self._accelerator.process_index}_")]
            written = from_all(self._accelerator, lambda: self._record(partial, names, place=place), group=group)
            keep = {self._resume.step} if self._resume.own else set()
            on_main(self._accelerator, lambda: self._commit(partial, final, state, written, listed, place=place), group=group)
            self.saved_step = state["step"]
            if not retain_all:
                on_main(self._accelerator, lambda: self._retain(keep), group=group)
        except BaseException as error:  # torch's CheckpointException is no Exception.
            self._error = error
            if main and isinstance(error, Exception):  # A full disk stays full otherwise; no rank writes any more.
                shutil.rmtree(partial, ignore_errors=True)

    def _record(self, partial: Path, names: list[str], *, place: str) -> dict[str, FileRecord]:
        with file_errors(f"{place}: rank {self._accelerator.process_index}"):
            return record_files(partial, names, checksums=self._recipe.checkpoint.checksums)

    def _commit(
        self, partial: Path, final: Path, state: dict[str, Any], written: list[dict[str, FileRecord]], listed: set[str], *, place: str
    ) -> None:
        """Make the written folder the checkpoint. Main process only, when all ranks have written."""
        files = {name: record for part in written for name, record in part.items()}
        if listed != set(files):
            raise RuntimeError(f"{partial}: the index has {sorted(listed)}, written are {sorted(files)}")
        for name, record in files.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != record.bytes:
                raise UserError(f"{partial}: {name} is not seen from rank 0; output_dir must be one folder that all machines share")
        with file_errors(place):
            with (partial / STATE).open("w", encoding="utf-8") as file:
                json.dump(state, file, allow_nan=False)
            sync(partial / STATE)
            files |= record_files(partial, [STATE, ".metadata"], checksums=self._recipe.checkpoint.checksums)
            write_manifest(partial, step=state["step"], files=files)
            sync(partial)
            put_in_place(partial, final)

    def _retain(self, keep: set[int]) -> None:
        """Delete what is outdated. Main process only, when the newer one is complete: what cannot be deleted is told, nothing more."""
        steps = checkpoint_steps(self._recipe.output_dir)
        options = self._recipe.checkpoint
        try:
            for step in outdated(steps, keep_last=options.keep_last, keep_every=options.keep_every, keep=keep):
                remove(steps[step])
        except OSError as error:
            self._say(f"{steps[step]}: cannot be deleted: {first_line(error)}")

    def _staged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that is allocated once: the first touch of fresh memory costs more than the copy."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
        buffer.copy_(local, non_blocking=True)
        # By its constructor: from_local would move the copy to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer

    def _gathered(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors in host memory on the main process, none elsewhere. Collective; a rank holds one whole tensor at a time."""
        main, gathered = self._accelerator.is_main_process, {}
        for name, tensor in tensors.items():
            whole = whole_tensor(tensor)
            if main:
                gathered[name] = self._staged(name, whole)
            del whole
        random_states = from_all(self._accelerator, lambda: collect_random_states(self._accelerator), group=self._group)
        return gathered | {name: value for states in random_states for name, value in states.items()} if main else {}
