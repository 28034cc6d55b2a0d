"""A recipe that is not the checkpoint's: what counts as a change, what may change, and what another length does to the schedule."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import UserError
from fullshard.recipe.changes import COMPARED, NOT_COMPARED, SHAPE, Change, check_changes, covers, recipe_changes, schedule_steps
from fullshard.recipe.checks import check_recipe
from fullshard.recipe.fields import CheckpointConfig, OptimConfig, Recipe, SourceConfig, TrainConfig
from fullshard.recipe.parsing import KEYS, parse_recipe
from fullshard.recipe.schedule import learning_rate_factor
from fullshard.recipe.writing import flat, recipe_to_dict
from support import HANG_S

OTHER_VALUES: dict[str, Any] = {
    "data.mixture": [SourceConfig(path="a"), SourceConfig(path="b", weight=2.0)],
    "logging.trackers": ["tensorboard"],
    "checkpoint.allow_changes": ["seed"],
    "evaluation.max_rows": 1,
    "checkpoint.keep_last": None,
}


def as_saved(recipe: Recipe) -> dict[str, Any]:
    return json.loads(json.dumps(recipe_to_dict(recipe)))


def with_key(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.rpartition(".")
    if not section:
        return replace(recipe, **{name: value})
    node = recipe
    for part in section.split("."):
        node = getattr(node, part)
    return with_key(recipe, section, replace(node, **{name: value}))


def other_value(key: str) -> Any:
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    value = flat(recipe_to_dict(Recipe()))[key]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return 7
        case list():
            return ["x"]
    raise AssertionError(key)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_a_change_or_it_is_not(key: str) -> None:
    changed = recipe_changes(as_saved(Recipe()), with_key(Recipe(), key, other_value(key)))
    compared = covers(COMPARED, key) and key not in NOT_COMPARED
    assert [change.key for change in changed] == ([key] if compared else [])
    free = ("output_dir", "logging", "checkpoint", "evaluation", "train", "data", "sharding")
    assert compared or covers(free, key), "model, optim and seed are compared whole"


def test_names_are_keys() -> None:
    known = [*KEYS, *(key.split(".")[0] for key in KEYS)]
    assert {*COMPARED, *NOT_COMPARED, *SHAPE} <= set(known)


def test_json_changes_nothing() -> None:
    """Numbers as they are written, tuples for lists, an int for a float."""
    recipe = parse_recipe(
        [
            "--optim.learning_rate",
            "3e-3",
            "--optim.weight_decay",
            "1",
            "--data.mixture",
            "[{path: a, data_files: [x]}, {path: b, weight: 2}]",
        ]
    )
    assert recipe_changes(as_saved(recipe), recipe) == []
    assert recipe_changes(recipe_to_dict(recipe), recipe) == []
    files = with_key(Recipe(), "data.data_files", ("a", "b"))
    assert recipe_changes(as_saved(files), files) == []
    saved = as_saved(recipe)
    saved["optim"]["weight_decay"], saved["optim"]["learning_rate"] = 1, 0.003
    assert recipe_changes(saved, recipe) == []


@given(st.floats(1e-12, 1e3))
def test_a_number_survives(rate: float) -> None:
    recipe = Recipe(optim=OptimConfig(learning_rate=rate))
    assert recipe_changes(as_saved(recipe), recipe) == []


def test_keys_of_another_version() -> None:
    recipe = Recipe(data=replace(Recipe().data, mixture=[SourceConfig(path="a", weight=2.0)]))
    saved = as_saved(recipe)
    del saved["train"]["spike_factor"], saved["model"]["rope_parameters"], saved["data"]["mixture"][0]["split"]
    assert recipe_changes(saved, recipe) == []
    now = with_key(with_key(recipe, "train.spike_factor", 3.0), "model.rope_parameters.rope_theta", 1e4)
    assert recipe_changes(saved, now) == [
        Change("model.rope_parameters.rope_theta", 500_000.0, 1e4),
        Change("train.spike_factor", None, 3.0),
    ]
    saved["optim"] |= {"nesterov": False, "lookahead": None}
    saved["logging"]["colour"] = "red"
    assert recipe_changes(saved, recipe) == []
    saved["optim"]["nesterov"] = True
    assert recipe_changes(saved, recipe) == [Change("optim.nesterov", True, None)]


def test_a_changed_recipe_is_refused_with_its_diff() -> None:
    """R07 for the recipe: nothing changes in silence."""
    saved = as_saved(Recipe())
    now = replace(
        with_key(with_key(Recipe(), "model.hidden_size", 512), "optim.learning_rate", 1e-3),
        output_dir="elsewhere",
        train=TrainConfig(max_steps=5, micro_batch_size=4, max_time=60.0),
    )
    with pytest.raises(UserError) as error:
        check_changes(saved, now, folder="runs/x/checkpoints/step_00000100")
    assert str(error.value) == (
        "runs/x/checkpoints/step_00000100: saved with another recipe: model.hidden_size: 256 -> 512; optim.learning_rate: 0.003 -> 0.001; "
        "change back, go on with --checkpoint.allow_changes '[model.hidden_size, optim.learning_rate]', "
        "or begin anew with --checkpoint.resume never"
    )
    partly = with_key(now, "checkpoint.allow_changes", ["optim"])
    with pytest.raises(UserError, match=r"model\.hidden_size: 256 -> 512; optim\.learning_rate: 0\.003 -> 0\.001 \(allowed\); ") as error:
        check_changes(saved, partly, folder="x")
    assert "--checkpoint.allow_changes '[optim, model.hidden_size]'" in str(error.value)


@pytest.mark.parametrize(
    "allowed", [["model.rope_parameters", "optim.beta2"], ["model", "optim"], ["model.rope_parameters.rope_theta", "optim"]]
)
def test_what_is_allowed_is_told(allowed: list[str]) -> None:
    now = with_key(with_key(Recipe(), "model.rope_parameters.rope_theta", 1e4), "optim.beta2", 0.99)
    changes = check_changes(as_saved(Recipe()), with_key(now, "checkpoint.allow_changes", allowed), folder="x")
    assert [str(change) for change in changes] == ["model.rope_parameters.rope_theta: 500000.0 -> 10000.0", "optim.beta2: 0.95 -> 0.99"]
    check_recipe(with_key(now, "checkpoint.allow_changes", allowed))


def test_a_name_is_not_the_beginning_of_another() -> None:
    assert not covers(["data.path"], "data.path_x")
    assert not covers(["data.pat"], "data.path")
    assert covers(["data"], "data.path")
    assert not covers([], "seed")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optim.learning_rat", "did you mean optim.learning_rate?"),
        ("learning_rate", "did you mean optim.learning_rate?"),
        ("timeout_seconds", "did you mean data.timeout_seconds or train.timeout_seconds?"),
        ("optm", "did you mean optim?"),
        ("sources", "name keys, such as optim.learning_rate, or sections, such as optim"),
        ("", "name keys, such as optim.learning_rate, or sections, such as optim"),
        ("*", "name keys, such as optim.learning_rate, or sections, such as optim"),
    ],
)
def test_a_permission_for_no_key_is_a_mistake(name: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        parse_recipe(["--checkpoint.allow_changes", json.dumps(["data", name])])
    value = json.dumps(["data", name])
    assert str(error.value) == f"command line: --checkpoint.allow_changes: {value}: {name} is no key of the recipe; {fix}"


# The schedule ------------------------------------------------------------------------------------------------------------------------

SHAPES = [
    OptimConfig(schedule="cosine", warmup_steps=2),
    OptimConfig(schedule="linear", warmup_steps=2, min_learning_rate_ratio=0.0),
    OptimConfig(schedule="wsd", warmup_steps=2, decay_steps=3),
    OptimConfig(schedule="constant", warmup_steps=2),
    OptimConfig(schedule="cosine", warmup_steps=0, min_learning_rate_ratio=1.0),
    OptimConfig(schedule="cosine", warmup_steps=10),
    OptimConfig(schedule="wsd", warmup_steps=8, decay_steps=2),
]


@pytest.mark.parametrize("optim", SHAPES, ids=lambda optim: optim.schedule)
def test_beyond_its_end_a_schedule_stays(optim: OptimConfig) -> None:
    """The cosine would rise again, the line fall below 0."""
    last = learning_rate_factor(10, optim=optim, max_steps=10)
    assert all(learning_rate_factor(step, optim=optim, max_steps=10) == last for step in range(11, 60))


def resumed(
    optim: OptimConfig, *, step: int, saved: int = 8, now: int, allow: tuple[str, ...] = (), changes: tuple[Change, ...] = ()
) -> tuple[int, str | None]:
    recipe = Recipe(train=TrainConfig(max_steps=now), optim=optim, checkpoint=CheckpointConfig(allow_changes=[*allow]))
    return schedule_steps(recipe, step=step, saved_steps=saved, saved_max_steps=saved, changes=changes)


def test_o10_the_same_length() -> None:
    assert resumed(SHAPES[0], step=3, now=8) == (8, None)


@pytest.mark.parametrize(
    ("optim", "step", "length", "rates"),
    [
        (SHAPES[0], 3, 8, "0.00233 at step 4, 0.0003 at step 12"),  # cosine: its decay is under way
        (SHAPES[0], 8, 8, "0.0003 at step 9, 0.0003 at step 12"),  # and over
        (SHAPES[1], 3, 8, "0.002 at step 4, 0 at step 12"),
        (SHAPES[0], 2, 12, "0.00293 at step 3, 0.0003 at step 12"),  # in warmup
        (SHAPES[2], 5, 12, "0.003 at step 6, 0.0003 at step 12"),  # wsd: before its decay
        (SHAPES[2], 6, 8, "0.0012 at step 7, 0.0003 at step 12"),  # within
        (SHAPES[3], 8, 12, "0.003 at step 9, 0.003 at step 12"),
        (SHAPES[4], 8, 12, "0.003 at step 9, 0.003 at step 12"),
    ],
)
def test_o10_a_longer_run_changes_no_rate_that_was_and_never_jumps_up(optim: OptimConfig, step: int, length: int, rates: str) -> None:
    found, line = resumed(optim, step=step, now=12)
    assert found == length
    how = "is laid out anew over them" if length == 12 else "stays laid out over 8, the steps after them run at its floor"
    assert line is not None
    assert line.startswith(f"train.max_steps is 12, was 8: the schedule {how}: learning rate {rates}")
    assert ("checkpoint.allow_changes: [train.max_steps]" in line) is (length == 8)


@settings(max_examples=300)
@given(st.sampled_from(SHAPES), st.integers(1, 30), st.integers(11, 60), st.integers(11, 60))
def test_o10_after_warmup_no_rate_rises(optim: OptimConfig, step: int, saved: int, now: int) -> None:
    """Whatever the schedule, the length and the moment: rates done stay as they were, and those to come are not above the last one."""
    step = min(step, saved, now - 1)
    length, line = resumed(optim, step=step, saved=saved, now=now)
    assert length in (saved, now)
    assert (line is None) is (saved == now)
    before = [learning_rate_factor(n, optim=optim, max_steps=saved) for n in range(1, step + 1)]
    after = [learning_rate_factor(n, optim=optim, max_steps=length) for n in range(1, now + 1)]
    assert after[:step] == before
    falling = after[max(optim.warmup_steps, step) - 1 :]
    assert falling == sorted(falling, reverse=True)


def test_o10_a_shorter_run() -> None:
    length, line = resumed(SHAPES[0], step=3, now=6)
    assert length == 8
    assert line is not None
    assert "stays laid out over 8, the run ends before it: learning rate 0.00233 at step 4, 0.000975 at step 6" in line
    assert resumed(SHAPES[2], step=3, now=6)[0] == 6


def test_o10_a_new_layout_on_request() -> None:
    for allow in (("train.max_steps",), ("train",)):
        length, line = resumed(SHAPES[0], step=8, now=12, allow=allow)
        assert length == 12
        assert (
            line
            == "train.max_steps is 12, was 8: the schedule is laid out anew over them: learning rate 0.000856 at step 9, 0.0003 at step 12"
        )
    assert resumed(SHAPES[0], step=8, now=12, allow=("optim",))[0] == 8
    # Another shape that was allowed is one that is asked for; another peak is not.
    assert resumed(SHAPES[2], step=8, now=12, changes=(Change("optim.schedule", "constant", "wsd"),))[0] == 12
    assert resumed(SHAPES[2], step=8, now=12, changes=(Change("optim.learning_rate", 1.0, 2.0),))[0] == 8


def test_o10_what_was_told_once_holds() -> None:
    """Killed again on the longer way: the checkpoint has max_steps 12 and a schedule of 8."""
    recipe = Recipe(train=TrainConfig(max_steps=12), optim=SHAPES[0])
    assert schedule_steps(recipe, step=10, saved_steps=8, saved_max_steps=12) == (8, None)
    allowed = with_key(recipe, "checkpoint.allow_changes", ["train.max_steps"])
    assert schedule_steps(allowed, step=10, saved_steps=8, saved_max_steps=12)[0] == 12
    longer = with_key(recipe, "train.max_steps", 20)
    assert schedule_steps(longer, step=10, saved_steps=8, saved_max_steps=12)[0] == 8


def test_without_torch() -> None:
    program = "import sys, fullshard.recipe.changes; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG_S, check=False).returncode == 0
