"""Checkpoints: what a run needs to continue exactly, at the same or another number of processes.

`<output_dir>/checkpoints/step_XXXXXXXX/` holds the weights, AdamW's moments and each rank's random state through
torch.distributed.checkpoint: with SHARDED_STATE_DICT each rank its shards, with FULL_STATE_DICT rank 0 all of it. Tensors have canonical
names and whole shapes, so that FSDP, DDP and a single process, compiled or with activation checkpointing, read each other's. Everything
else is in state.json; manifest.json has size and checksum of every file. Tensor files are read as weights only; the index that
torch.distributed.checkpoint keeps in `.metadata` is a pickle of its own, read after its checksum was checked where there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from fullshard import __version__
from fullshard.accelerator import from_all, host_group, on_main
from fullshard.bad_steps import BadSteps
from fullshard.changes import check_changes, schedule_steps
from fullshard.config import Recipe, mistake, recipe_to_dict
from fullshard.data import merge_positions
from fullshard.errors import Complete, UserError, first_line, one_line
from fullshard.export import export_checkpoint
from fullshard.files import put_in_place, sync
from fullshard.manifest import (
    FORMAT,
    LEFTOVERS,
    STATE,
    FileRecord,
    checkpoint_steps,
    checkpoints_folder,
    faults,
    outdated,
    record_files,
    remove,
    settle,
    write_manifest,
)
from fullshard.model import canonical_parameters, whole_tensor
from fullshard.sharding import Placement
from fullshard.tensors import restore_tensors, training_tensors

# Known: a single process. Once, since filters are the process's and saves are written in a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Resume:
    """From where a run starts: a checkpoint, or the beginning."""

    schedule_steps: int
    """Optimizer steps over which the learning rate's schedule is laid out."""
    folder: Path | None = None
    """Of the checkpoint; None at the beginning."""
    own: bool = False
    """Whether it is one of this run's folder."""
    step: int = 0
    """Optimizer steps done."""
    position: dict[str, Any] | None = None
    """Of the data, all ranks' parts together; None at the beginning."""
    num_processes: int | None = None
    """That saved it."""
    tokens_seen: int = 0
    """That the weights have learned from."""
    device: str | None = None
    """Type of the device that it was saved on."""
    rollbacks: int = 0
    """Done in the run so far."""
    wandb_id: str | None = None
    """W&B run to continue; None where there is none, or where the checkpoint is another run's."""
    scaler: dict[str, Any] | None = None
    """State of fp16's gradient scaler."""
    notes: tuple[str, ...] = ()
    """Lines to show: a damaged checkpoint that was passed over, allowed changes, what becomes of the schedule."""


def find_checkpoint(*, recipe: Recipe, accelerator: Accelerator) -> Resume:
    """What `checkpoint.resume` means: the same on every rank. Collective; each rank checks its share of the files.

    Raises UserError where it names no checkpoint, or one that is damaged or does not continue with this recipe, and Complete where nothing
    is left to do. Ranks that `accelerate launch --max_restarts` has started again go on from what this launch has saved, whatever the key
    says.
    """
    steps = on_main(accelerator, lambda: _candidates(recipe))
    return newest_whole(steps, recipe=recipe, accelerator=accelerator) or Resume(schedule_steps=recipe.train.max_steps)


def newest_whole(folders: list[Path], *, recipe: Recipe, accelerator: Accelerator) -> Resume | None:
    """The last of `folders` that is whole, read; None of none. Collective. Raises UserError where none is."""
    notes: list[str] = []
    for folder in reversed(folders):
        own = faults(folder, hashes=recipe.checkpoint.checksums, part=(accelerator.process_index, accelerator.num_processes))
        if not (found := list(dict.fromkeys(gather_object(own)))):  # The manifest's is every rank's.
            return on_main(accelerator, lambda folder=folder: _read(recipe, folder, notes))  # type: ignore[misc]
        notes.append(f"{folder} is damaged and was passed over: {found[0]}{f', and {len(found) - 1} more' if len(found) > 1 else ''}")
    if notes:
        fix = "nothing older is whole; --checkpoint.resume never begins anew"
        raise UserError(notes[0].replace("damaged and was passed over", "damaged") + f"; {fix}")
    return None


def _candidates(recipe: Recipe) -> list[Path]:
    folder = checkpoints_folder(recipe.output_dir)
    if folder.is_symlink() and not folder.exists():
        raise mistake(recipe, "output_dir", "its folder checkpoints is a link to a place that is not there")
    with _file_errors(f"{folder}: cannot be read"):
        settle(folder)
        own = list(checkpoint_steps(recipe.output_dir).values())
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and any(_launch_of(folder) == _launch() for folder in own):
        return own
    match recipe.checkpoint.resume:
        case "never":
            return []
        case "auto":
            return own
        case path:
            folder = Path(path).expanduser()
            if not (folder / STATE).is_file() or folder.suffix in LEFTOVERS:
                raise mistake(recipe, "checkpoint.resume", "not a checkpoint; name a folder <output_dir>/checkpoints/step_*, auto or never")
            return [folder]


def _launch() -> str:
    """The launcher that this process is of, the same for all its restarts."""
    launcher = psutil.Process(os.getppid())
    return f"{launcher.pid} {launcher.create_time()}"


def _launch_of(folder: Path) -> str | None:
    """That saved a checkpoint; None where it does not say."""
    try:
        return str(json.loads((folder / STATE).read_text(encoding="utf-8"))["launch"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _read(recipe: Recipe, folder: Path, notes: Iterable[str]) -> Resume:
    notes = list(notes)
    with one_line(f"{folder}/{STATE}: damaged"):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        step, position = int(state["step"]), state["position"]
        saved_recipe, saved_steps = state["recipe"], int(state["schedule_steps"])
    own = folder.resolve().parent == checkpoints_folder(recipe.output_dir).resolve()
    changes = check_changes(saved_recipe, recipe, folder=folder)
    if step >= recipe.train.max_steps:
        if not own:
            raise mistake(recipe, "train.max_steps", f"{folder} has done {step} steps, the run is complete; raise it to go on")
        done = f"{folder} has done {step} steps, train.max_steps is {recipe.train.max_steps}: the run is complete"
        model = Path(recipe.output_dir) / "model"
        if recipe.checkpoint.export != "never" and not (model / "config.json").exists():  # It was killed between the two.
            done += f", its model is now in {export_checkpoint(folder, folder=model, dtype=recipe.checkpoint.export)}"
        raise Complete(f"{done}; raise it to go on, or begin anew with --checkpoint.resume never")
    notes += [f"changed after step {step}: {change}" for change in changes]
    length, said = schedule_steps(
        recipe, step=step, saved_steps=saved_steps, saved_max_steps=int(saved_recipe["train"]["max_steps"]), changes=changes
    )
    if said:
        notes.append(said)
    return Resume(
        folder=folder,
        own=own,
        step=step,
        position=position,
        num_processes=state["num_processes"],
        schedule_steps=length,
        tokens_seen=state["tokens_seen"],
        device=state["device"],
        rollbacks=state["rollbacks"],
        wandb_id=state["wandb_id"] if own else None,
        scaler=state["scaler"],
        notes=tuple(notes),
    )


def load_checkpoint(
    resume: Resume,
    *,
    recipe: Recipe,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    bad_steps: BadSteps,
) -> None:
    """Put weights, moments, schedule and random states where the run starts: at the checkpoint, or at the seed. Collective.

    Exact; at another number of processes each rank reads what its shards need, and dropout is drawn from the seed and the step, as on
    another kind of device. Learning rate, betas and decay are the recipe's. Raises UserError on every rank where the model has other
    parameters than the checkpoint, or where it cannot be read.
    """
    # Dropout: other numbers on each rank, the same in each run.
    set_seed((recipe.seed + resume.step) % (2**32 - accelerator.num_processes), device_specific=True)
    folder = resume.folder
    if folder is None:
        return
    place = f"{folder}: cannot be read"
    metadata = on_main(accelerator, lambda: _read_metadata(folder, place=place))
    _allocate_moments(model, optimizer)
    tensors = training_tensors(model, optimizer)
    needed = tensors | bad_steps.tensors()
    if (resume.num_processes, resume.device) == (accelerator.num_processes, accelerator.device.type):
        needed |= _random_states(accelerator)
    from_all(accelerator, lambda: _check_names(folder, metadata, needed))  # Of the random states each rank needs its own.
    _dcp(dcp.load, needed, place=place, no_dist=accelerator.num_processes == 1, storage_reader=dcp.FileSystemReader(folder))
    restore_tensors(model, optimizer, tensors)
    for name, value in needed.items():
        if name.startswith("rng."):
            torch.cuda.set_rng_state(value) if name.endswith(".cuda") else torch.set_rng_state(value)
    if accelerator.scaler is not None and resume.scaler is not None:
        accelerator.scaler.load_state_dict(resume.scaler)
    # All that a LambdaLR is: the rate is a function of the step. Stepped into place, it sets the optimizer's rates.
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": resume.step - 1, "_step_count": resume.step + 1})
    schedule.step()


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
        tensors = training_tensors(model, optimizer) | bad_steps.tensors() | _random_states(self._accelerator)
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
            "launch": _launch(),
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
            on_main(self._accelerator, lambda: _make_folder(partial, place=place), group=group)
            writer = dcp.FileSystemWriter(partial, sync_files=True)  # Each file to disk before it says so.
            if self._full:
                index = on_main(
                    self._accelerator, lambda: _dcp(dcp.save, tensors, place=place, no_dist=True, storage_writer=writer), group=group
                )
            else:
                index = _dcp(dcp.save, tensors, place=place, no_dist=group is None, process_group=group, storage_writer=writer)
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
        with _file_errors(f"{place}: rank {self._accelerator.process_index}"):
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
        with _file_errors(place):
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
        random_states = from_all(self._accelerator, lambda: _random_states(self._accelerator), group=self._group)
        return gathered | {name: value for states in random_states for name, value in states.items()} if main else {}


def _random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """This rank's generators, which dropout draws from: uint8, copies. No test reaches the CUDA one."""
    rank = accelerator.process_index
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _allocate_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that its first step would, sharded as the parameters are."""
    for _, parameter in canonical_parameters(model):
        optimizer.state[parameter] |= {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _check_names(folder: Path, metadata: Metadata, needed: dict[str, torch.Tensor]) -> None:
    """Raises UserError unless the checkpoint has the tensors that are needed, in their shapes, and no other ones."""
    saved = {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
        if name in needed or not name.startswith("rng.")
    }
    own = {name: tuple(tensor.shape) for name, tensor in needed.items()}
    for name in [*own, *saved]:
        if saved.get(name) != own.get(name):
            sides = f"{saved.get(name, 'missing')} in the checkpoint, {own.get(name, 'missing')} in this run"
            raise UserError(f"{folder}: {name}: {sides}; continue with the model section that it was saved with")


def _read_metadata(folder: Path, *, place: str) -> Metadata:
    """Names, shapes and files of the tensors."""
    with one_line(place):  # A damaged pickle raises anything.
        return dcp.FileSystemReader(folder).read_metadata()


def _make_folder(partial: Path, *, place: str) -> None:
    """Main process only."""
    with _file_errors(place):
        partial.parent.mkdir(parents=True, exist_ok=True)
        settle(partial.parent)
        for leftover in partial.parent.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=leftover != partial)
        partial.mkdir()


def _dcp(call: Callable[..., Any], tensors: dict[str, torch.Tensor], *, place: str, **options: Any) -> Any:
    with _file_errors(place):
        return call(tensors, **options)


@contextmanager
def _file_errors(place: str) -> Iterator[None]:
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
