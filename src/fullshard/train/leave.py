"""How a run ends before its last step, and how it goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator

from fullshard.checkpoint.manifest import checkpoint_steps
from fullshard.checkpoint.resume import Resume, newest_whole
from fullshard.checkpoint.save import Saver
from fullshard.checkpoint.state import load_checkpoint
from fullshard.errors import Preempted, UserError
from fullshard.parallel.agree import Agreed, on_main
from fullshard.process.preemption import Stop, StopRequested, cause_name
from fullshard.recipe.fields import Recipe
from fullshard.train.log import RunLog
from fullshard.train.run import Run, later_checkpoints, set_aside

if TYPE_CHECKING:
    from fullshard.data.batches import Batches


@dataclass
class Progress:
    """Where a run is, beside its data and its weights."""

    step: int
    """Optimizer steps done; one whose update was left out is done too."""
    tokens_seen: int
    """That the weights have learned from: those of a rollback do not count, and the batch may have been another once."""
    rollbacks: int


def next_rows(batches: Batches, stop: Stop) -> tuple[torch.Tensor | None, str | None]:
    """The next rows, or why there are none: another rank has to hear it before anybody stops."""
    try:
        with stop.interruptible():  # A dead server may be asked for minutes.
            return next(batches), None
    except StopRequested:
        return None, None
    except UserError as error:
        return None, str(error)


def save_together(act: Callable[[], None], *, recipe: Recipe, run: Run) -> None:
    """Save, or wait for a save. What comes of it is the same on every rank."""
    try:
        act()
    except UserError as error:
        if recipe.checkpoint.on_failure == "stop":
            raise
        run.terminal.say(f"{error}; training goes on")


def leave(agreed: Agreed, *, now: Progress, resume: Resume, saver: Saver, stop: Stop, save: Callable[[], None]) -> NoReturn:
    """Save the steps done and end the run on all ranks."""
    why = agreed.failure if agreed.failure is not None else f"stopped after step {now.step} by {cause_name(agreed.stop)}"
    error = UserError if agreed.failure is not None else Preempted
    try:
        if saver.step == now.step:  # Begun already, or what was resumed.
            saver.finish()
        elif now.step != resume.step or now.rollbacks != resume.rollbacks:
            save()
            saver.finish()
        stop.saved_step = saver.saved_step
    except UserError as failed:
        raise UserError(f"{why}; {failed}") from None
    if saver.step is None:
        raise error(f"{why}; nothing was trained yet")
    raise error(f"{why}; saved {saver.folder(saver.step)}, continue with --checkpoint.resume auto")


def roll_back(
    what: str,
    *,
    first_bad: int,
    recipe: Recipe,
    accelerator: Accelerator,
    run: Run,
    saver: Saver,
    resume: Resume,
    now: Progress,
    state: dict[str, Any],
) -> None:
    """Put everything but the data back to the last checkpoint before step `first_bad`. Collective.

    Raises UserError where that is not wanted, was done too often, or where there is no such checkpoint. The counts are the same on every
    rank, so all come here together.
    """
    train = recipe.train
    advice = "lower optim.learning_rate, raise optim.warmup_steps, or look at the data"
    if train.on_divergence == "stop" or now.rollbacks >= train.max_rollbacks:
        limit = "" if train.on_divergence == "stop" else f" after {now.rollbacks} rollbacks (train.max_rollbacks)"
        raise UserError(f"{what}; stopped{limit}; {advice}")
    save_together(saver.finish, recipe=recipe, run=run)
    other = [resume.folder] if resume.folder is not None and resume.step < first_bad else []
    own = on_main(accelerator, lambda: [path for step, path in checkpoint_steps(recipe.output_dir).items() if step < first_bad])
    back = newest_whole(list(dict.fromkeys([*other, *own])), recipe=recipe, accelerator=accelerator)
    if back is None:
        raise UserError(f"{what}; no checkpoint to go back to (checkpoint.every is {recipe.checkpoint.every}); {advice}")
    bad_total = state["bad_steps"].read()[1]
    load_checkpoint(back, recipe=recipe, accelerator=accelerator, **state)
    state["bad_steps"].begin_anew(total=bad_total)
    now.step, now.tokens_seen, now.rollbacks = back.step, back.tokens_seen, now.rollbacks + 1
    saver.step = None  # Even of that step there is none that knows of the rollback.
    on_main(accelerator, lambda: set_aside(Path(recipe.output_dir), later_checkpoints(recipe.output_dir, back.step)))
    run.log.rewind(back.step)
    run.terminal.say(f"{what}; back to {back.folder}, the data since are left out: rollback {now.rollbacks} of {train.max_rollbacks}")


@contextmanager
def closed_by_user_error(log: RunLog, saver: Saver) -> Iterator[None]:
    """In the loop a UserError is every rank's, and the process ends with it."""
    try:
        yield
    except UserError:
        saver.close()  # Closing the log destroys the process groups.
        log.close()
        raise
