"""Checkpoints: what a run needs to continue exactly, at the same or another number of processes.

`<output_dir>/checkpoints/step_XXXXXXXX/` holds the weights and AdamW's moments through torch.distributed.checkpoint, each rank its shards,
and state.json: the step, of which the schedule is a function, and the data position of all ranks together. The tensors have canonical
names, so that FSDP, DDP and a single process, compiled or with activation checkpointing, read each other's. state.json is plain JSON and
the tensor files are read as weights only; the index that torch.distributed.checkpoint keeps in `.metadata` is a pickle of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from fullshard import __version__
from fullshard.accelerator import on_main
from fullshard.config import Recipe, mistake
from fullshard.data import merge_positions
from fullshard.errors import UserError, first_line, one_line
from fullshard.files import sync
from fullshard.model import canonical_parameters

FORMAT = 1  # Of state.json and of the tensors' names.


@dataclass(frozen=True)
class Resume:
    """From where a run starts: a checkpoint, or the beginning."""

    folder: Path | None = None
    """Of the checkpoint; None at the beginning."""
    step: int = 0
    """Optimizer steps done."""
    position: dict[str, Any] | None = None
    """Of the data, all ranks' parts together; None at the beginning."""
    num_processes: int | None = None
    """That saved it."""


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def checkpoint_steps(output_dir: str | Path) -> dict[int, Path]:
    """Complete checkpoints of a run by step, in rising order: a folder gets its final name last."""
    found = {}
    for folder in checkpoints_folder(output_dir).glob("step_*"):
        if (match := re.fullmatch(r"step_(\d{8,})", folder.name)) and (folder / "state.json").is_file():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def find_checkpoint(*, recipe: Recipe, accelerator: Accelerator) -> Resume:
    """What `checkpoint.resume` means, as the main process sees it: the same on every rank. Collective.

    Raises UserError where it names no checkpoint, or one that does not continue with this recipe.
    """
    return on_main(accelerator, lambda: _find(recipe))


def _find(recipe: Recipe) -> Resume:
    match recipe.checkpoint.resume:
        case "never":
            return Resume()
        case "auto":
            _settle(checkpoints_folder(recipe.output_dir))
            folder = next(reversed(checkpoint_steps(recipe.output_dir).values()), None)
            if folder is None:
                return Resume()
        case path:
            folder = Path(path).expanduser()
            if not (folder / "state.json").is_file():
                raise mistake(recipe, "checkpoint.resume", "not a checkpoint; name a folder <output_dir>/checkpoints/step_*, auto or never")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise UserError(f"{folder}: format {state['format']}, this fullshard reads {FORMAT}; continue with the version that saved it")
        resume = Resume(folder=folder, step=state["step"], position=state["position"], num_processes=state["num_processes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/state.json: damaged: {first_line(error)}; continue from another checkpoint") from error
    if resume.step >= recipe.train.max_steps:
        raise mistake(recipe, "train.max_steps", f"{folder} has done {resume.step} steps, the run is complete; raise it to go on")
    return resume


def save_checkpoint(
    *, recipe: Recipe, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, position: dict[str, Any]
) -> Path:
    """Write the checkpoint of optimizer step `step` and return its folder. Collective.

    position: this rank's part of the data position after that step. Everything is written to step_XXXXXXXX.tmp, synced to disk and then
    renamed, so that a folder with the final name is complete; an older one of the same step goes only then. Raises UserError on every
    rank where one cannot write; what was saved before is then as it was.
    """
    final = checkpoints_folder(recipe.output_dir) / f"step_{step:08d}"
    partial = final.with_name(f"{final.name}.tmp")
    state = {
        "format": FORMAT,
        "step": step,
        "position": merge_positions(gather_object([position])),
        "seed": recipe.seed,
        "num_processes": accelerator.num_processes,
        "versions": {"fullshard": __version__, "torch": torch.__version__},
    }
    place = f"{final}: cannot be saved"
    on_main(accelerator, lambda: _make_folder(partial, place=place))
    try:
        writer = dcp.FileSystemWriter(partial, sync_files=True)  # Each file to disk before it says so.
        _dcp(dcp.save, accelerator, _tensors(model, optimizer), place=place, storage_writer=writer)
        on_main(accelerator, lambda: _commit(partial, final, state, place=place))
    except UserError:
        if accelerator.is_main_process:  # A full disk stays full otherwise; no rank writes any more.
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    resume: Resume, *, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler
) -> None:
    """Put weights, moments and schedule where the checkpoint has them; at the beginning do nothing. Collective.

    Exact; at another number of processes each rank reads what its shards need. Learning rate, betas and decay are the recipe's. Raises
    UserError on every rank where the model has other parameters than the checkpoint, or where it cannot be read.
    """
    folder = resume.folder
    if folder is None:
        return
    place = f"{folder}: cannot be read"
    metadata = on_main(accelerator, lambda: _read_metadata(folder, place=place))
    _check_shapes(folder, metadata, model)
    _allocate_moments(metadata, model, optimizer)
    _dcp(dcp.load, accelerator, _tensors(model, optimizer), place=place, storage_reader=dcp.FileSystemReader(folder))
    # All that a LambdaLR is: the rate is a function of the step. Stepped into place, it sets the optimizer's rates.
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": resume.step - 1, "_step_count": resume.step + 1})
    schedule.step()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors themselves, not copies: weights as model.<name>, the optimizer's as optimizer.<name>.<field>.

    Not torch's get_state_dict: it adds the hyperparameters, which are the recipe's and would be pickled one by one.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in canonical_parameters(model):
        tensors[f"model.{name}"] = parameter.detach()
        tensors |= {f"optimizer.{name}.{field}": value for field, value in optimizer.state[parameter].items()}
    return tensors


def _allocate_moments(metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that its first step would, with the fields of the checkpoint, sharded as the parameters are."""
    parameters = dict(canonical_parameters(model))
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata):
            name, _, field = key.removeprefix("optimizer.").rpartition(".")
            parameter = parameters[name]
            scalar = torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
            optimizer.state[parameter][field] = torch.zeros_like(parameter) if entry.size == parameter.shape else scalar


def _check_shapes(folder: Path, metadata: Metadata, model: nn.Module) -> None:
    saved = {
        key.removeprefix("model."): tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(parameter.shape) for name, parameter in canonical_parameters(model)}
    for name in [*own, *saved]:
        if saved.get(name) != own.get(name):
            sides = f"{saved.get(name, 'missing')} in the checkpoint, {own.get(name, 'missing')} in this recipe's model"
            raise UserError(f"{folder}: {name}: {sides}; continue with the model section that it was saved with")


def _read_metadata(folder: Path, *, place: str) -> Metadata:
    """Names, shapes and files of the tensors."""
    with one_line(place):  # A damaged pickle raises anything.
        return dcp.FileSystemReader(folder).read_metadata()


def _make_folder(partial: Path, *, place: str) -> None:
    """Main process only."""
    with _file_errors(place):
        partial.parent.mkdir(parents=True, exist_ok=True)
        _settle(partial.parent)
        for leftover in partial.parent.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        partial.mkdir()


def _commit(partial: Path, final: Path, state: dict[str, Any], *, place: str) -> None:
    """Make the written folder the checkpoint. Main process only, when all ranks have written."""
    metadata = _read_metadata(partial, place=place)
    for name in sorted({entry.relative_path for entry in metadata.storage_data.values()}):
        if not (partial / name).is_file():
            raise UserError(f"{partial}: {name} is not seen from rank 0; output_dir must be one folder that all machines share")
    with _file_errors(place):
        with (partial / "state.json").open("w", encoding="utf-8") as file:
            json.dump(state, file, allow_nan=False)
        sync(partial / "state.json")
        sync(partial)
        replaced = final.with_name(f"{final.name}.old")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def _settle(folder: Path) -> None:
    """End a replacement that was interrupted: either the new checkpoint has the name, or the old one gets it back."""
    for replaced in folder.glob("step_*.old"):
        if replaced.with_suffix("").exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(replaced.with_suffix(""))


def _dcp(call: Callable[..., Any], accelerator: Accelerator, tensors: dict[str, torch.Tensor], *, place: str, **storage: Any) -> None:
    with warnings.catch_warnings(), _file_errors(place):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # Known: a single process.
        call(tensors, no_dist=accelerator.num_processes == 1, **storage)


@contextmanager
def _file_errors(place: str) -> Iterator[None]:
    """Turns a failure of the file system into one line. What torch.distributed.checkpoint raises, it raises on every rank."""
    try:
        yield
    except CheckpointException as failed:  # Not an Exception; of all ranks, by rank.
        rank, (error, _) = min(failed.failures.items())
        # torch's zip writer and reader have no error class of their own.
        if not isinstance(error, OSError | EOFError) and not (isinstance(error, RuntimeError) and "PytorchStream" in str(error)):
            raise
        raise UserError(f"{place}: rank {rank}: {first_line(error)}") from failed
    except OSError as error:
        raise UserError(f"{place}: {first_line(error)}") from error
