"""Which checkpoint a run continues from: the newest that is whole, of its own or of the folder that it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator
from accelerate.utils import gather_object

from fullshard.checkpoint.export import export_checkpoint
from fullshard.checkpoint.file_errors import file_errors
from fullshard.checkpoint.manifest import LEFTOVERS, STATE, checkpoint_steps, checkpoints_folder, faults, settle
from fullshard.errors import Complete, UserError, one_line
from fullshard.parallel.agree import on_main
from fullshard.recipe.changes import check_changes, schedule_steps
from fullshard.recipe.fields import Recipe, mistake


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
    with file_errors(f"{folder}: cannot be read"):
        settle(folder)
        own = list(checkpoint_steps(recipe.output_dir).values())
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and any(_launch_of(folder) == this_launch() for folder in own):
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


def this_launch() -> str:
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
