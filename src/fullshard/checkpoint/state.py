"""Checkpoints: what a run needs to continue exactly, at the same or another number of processes.

`<output_dir>/checkpoints/step_XXXXXXXX/` holds the weights, AdamW's moments and each rank's random state through
torch.distributed.checkpoint: with SHARDED_STATE_DICT each rank its shards, with FULL_STATE_DICT rank 0 all of it. Tensors have canonical
names and whole shapes, so that FSDP, DDP and a single process, compiled or with activation checkpointing, read each other's. Everything
else is in state.json; manifest.json has size and checksum of every file. Tensor files are read as weights only; the index that
torch.distributed.checkpoint keeps in `.metadata` is a pickle of its own, read after its checksum was checked where there is one.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from fullshard.checkpoint.file_errors import call_dcp
from fullshard.checkpoint.resume import Resume
from fullshard.checkpoint.tensors import restore_tensors, training_tensors
from fullshard.errors import UserError, one_line
from fullshard.model.bad_steps import BadSteps
from fullshard.model.parameters import canonical_parameters
from fullshard.parallel.agree import from_all, on_main
from fullshard.recipe.fields import Recipe

# Known: a single process. Once, since filters are the process's and saves are written in a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


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
        needed |= collect_random_states(accelerator)
    from_all(accelerator, lambda: _check_names(folder, metadata, needed))  # Of the random states each rank needs its own.
    call_dcp(dcp.load, needed, place=place, no_dist=accelerator.num_processes == 1, storage_reader=dcp.FileSystemReader(folder))
    restore_tensors(model, optimizer, tensors)
    for name, value in needed.items():
        if name.startswith("rng."):
            torch.cuda.set_rng_state(value) if name.endswith(".cuda") else torch.set_rng_state(value)
    if accelerator.scaler is not None and resume.scaler is not None:
        accelerator.scaler.load_state_dict(resume.scaler)
    # All that a LambdaLR is: the rate is a function of the step. Stepped into place, it sets the optimizer's rates.
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": resume.step - 1, "_step_count": resume.step + 1})
    schedule.step()


def collect_random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
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
