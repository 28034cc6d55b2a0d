"""A recipe that is not the one that a checkpoint was saved with: what differs, what may, what another length does to the schedule.

Compared is what decides the numbers of a step: weights, rows, batch, update. Where and how fast they are computed, what is logged,
evaluated and saved, and what is done about bad rows and divergence may change at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.errors import UserError, shown
from fullshard.paths import expanded
from fullshard.recipe.fields import PATH_KEYS, Recipe, SourceConfig
from fullshard.recipe.schedule import learning_rate_factor
from fullshard.recipe.writing import flat, recipe_to_dict

COMPARED = (
    "seed",
    "model",
    "data",
    "train.global_batch_size",
    "train.max_grad_norm",
    "train.spike_factor",  # It decides which updates are left out.
    "optim",
    "sharding.reduce_dtype",  # The one key of its section that changes what is computed: otherwise a lower precision would come unseen.
)
NOT_COMPARED = (
    "data.path",  # The same files may have moved: the data position knows names and sizes, and refuses others.
    "data.data_files",
    "data.evaluation_files",
    "data.evaluation_split",
    "data.evaluation_path",
    "data.evaluation_name",  # evaluation_documents is compared: they are taken from the training data.
    "data.on_bad_row",
    "data.num_workers",
    "data.max_retries",
    "data.timeout_seconds",
    "data.log_documents",
)
SHAPE = ("optim.schedule", "optim.warmup_steps", "optim.decay_steps", "optim.min_learning_rate_ratio")


@dataclass(frozen=True)
class Change:
    """A key of the recipe whose value another run would have."""

    key: str
    saved: Any
    """In the checkpoint, as JSON has it."""
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.saved)} -> {shown(self.now)}"


def recipe_changes(saved: Mapping[str, Any], recipe: Recipe) -> list[Change]:
    """What differs in the keys that are compared, in the recipe's order. saved: `recipe_to_dict` of the other, through JSON.

    A key that `saved` lacks, because it was made by an older fullshard, counts as its default. A key that only `saved` has is a change
    unless it is null, false, 0 or empty: what it did is not known here.
    """
    default, before, now = (_comparable(tree) for tree in (recipe_to_dict(Recipe()), saved, recipe_to_dict(recipe)))
    pairs = {key: (before.get(key, default[key]), value) for key, value in now.items()}
    pairs |= {key: (value, None) for key, value in before.items() if key not in now and value}
    differing = [Change(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]
    return [change for change in differing if covers(COMPARED, change.key) and not covers(NOT_COMPARED, change.key)]


def check_changes(saved: Mapping[str, Any], recipe: Recipe, *, folder: object) -> list[Change]:
    """The changes since the checkpoint in `folder`. Raises UserError, with the diff, where checkpoint.allow_changes has not all of them."""
    changes = recipe_changes(saved, recipe)
    allowed = recipe.checkpoint.allow_changes
    if refused := [change.key for change in changes if not covers(allowed, change.key)]:
        diff = "; ".join(f"{change}{'' if change.key in refused else ' (allowed)'}" for change in changes)
        names = ", ".join([*allowed, *refused])
        fix = f"change back, go on with --checkpoint.allow_changes '[{names}]', or begin anew with --checkpoint.resume never"
        raise UserError(f"{folder}: saved with another recipe: {diff}; {fix}")
    return changes


def covers(names: Sequence[str], key: str) -> bool:
    """Whether the key, or a section that it is in, is among `names`."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def schedule_steps(
    recipe: Recipe, *, step: int, saved_steps: int, saved_max_steps: int, changes: Sequence[Change] = ()
) -> tuple[int, str | None]:
    """(steps over which the schedule of a run that goes on after `step` is laid out, a line on what another train.max_steps did to it).

    saved_steps: those over which the checkpoint's was; saved_max_steps: its recipe's train.max_steps; changes: those of its recipe that are
    allowed. The schedule is laid out over train.max_steps where that changes no rate of a step that is done, where its shape has changed,
    and where checkpoint.allow_changes has train.max_steps. Otherwise it stays as it is: a decay that is under way, or over, would jump up.
    """
    optim, max_steps = recipe.optim, recipe.train.max_steps
    if saved_steps == max_steps:
        return max_steps, None
    allowed = covers(recipe.checkpoint.allow_changes, "train.max_steps") or any(change.key in SHAPE for change in changes)
    if saved_max_steps == max_steps and not allowed:
        return saved_steps, None  # As it was told when max_steps changed.

    def factor(number: int, length: int) -> float:
        return learning_rate_factor(number, optim=optim, max_steps=length)

    anew = allowed or all(factor(done, saved_steps) == factor(done, max_steps) for done in range(step, 0, -1))
    length = max_steps if anew else saved_steps
    rates = ", ".join(f"{optim.learning_rate * factor(number, length):.3g} at step {number}" for number in (step + 1, max_steps))
    if anew:
        what = f"is laid out anew over them: learning rate {rates}"
    else:
        rest = "the steps after them run at its floor" if max_steps > saved_steps else "the run ends before it"
        other = "checkpoint.allow_changes: [train.max_steps] lays it out anew"
        what = f"stays laid out over {saved_steps}, {rest}: learning rate {rates}; {other}"
    return length, f"train.max_steps is {max_steps}, was {saved_max_steps}: the schedule {what}"


def _comparable(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, as JSON gives it back: tuples are lists. Each source of a mixture has all its keys, and paths are expanded: an
    older fullshard has saved them as they were written."""
    leaves = flat(json.loads(json.dumps(tree)))
    default = asdict(SourceConfig())
    leaves["data.mixture"] = [
        default | source | {key: _expanded(source[key]) for key in ("path", "data_files") if key in source}
        for source in leaves.get("data.mixture", [])
    ]
    return leaves | {key: _expanded(leaves[key]) for key in PATH_KEYS if key in leaves}


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    try:
        return expanded(value) if isinstance(value, str) else value
    except ValueError:
        return value
