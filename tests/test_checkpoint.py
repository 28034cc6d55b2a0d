"""A run that is saved and continued is the run that was not: at the same number of processes bit for bit, whatever happens while saving."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fullshard.errors import UserError
from fullshard.recipe.fields import CheckpointConfig, ModelConfig, Recipe
from fullshard.train.run import _end_table
from support.models import TIED, TINY, prepared
from support.training import FP32, STEPS, STREAMS, assembled, column, folders, lines, recipe_for, run_steps, saving

CHECKPOINTED = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}


def bytes_of(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def straight(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """6 steps at 2 ranks, saved at 3 and 6."""
    output_dir = tmp_path_factory.mktemp("straight")
    return output_dir, pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(output_dir, every=3))[0]


@pytest.fixture(scope="module")
def at_three(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights and moments after 3 steps of a run that saves nothing."""
    state = pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path_factory.mktemp("three"), max_steps=3))[0]["state"]
    assert isinstance(state, dict)
    return state


def test_saving_changes_nothing(pool: Any, straight: Any, tmp_path: Path) -> None:
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path))
    assert column(tmp_path, "train/loss") == column(straight[0], "train/loss")
    assert not (tmp_path / "checkpoints").exists()
    assert folders(straight[0]) == ["step_00000003", "step_00000006"]


def test_position_and_step_are_plain_json(straight: Any) -> None:
    state = json.loads((straight[0] / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["step"] == 3
    places = {str(s): 3 for s in range(STREAMS)}
    assert state["position"] == {"rows": 24, "streams": places, "dealt": {key: [] for key in places}, "read": places, "order": {}}
    assert (state["recipe"]["seed"], state["num_processes"], state["tokens_seen"]) == (7, 2, 24 * 32)


@pytest.mark.parametrize(
    ("config", "world_size", "environment"),
    [
        ("fsdp_fp32.yaml", 2, {}),
        ("fsdp_fp32.yaml", 1, {}),
        ("fsdp_fp32.yaml", 4, {}),
        ("ddp.yaml", 2, FP32),
        ("fsdp_fp32.yaml", 2, CHECKPOINTED),
    ],
)
def test_a_continued_run_is_the_straight_one(
    pool: Any, straight: Any, at_three: Any, tmp_path: Path, config: str, world_size: int, environment: dict[str, str]
) -> None:
    """What is loaded are the saved bits anywhere. At the same placement the rest is too; elsewhere sums are rounded in another order."""
    output_dir, expected = straight
    recipe = recipe_for(tmp_path, resume=str(output_dir / "checkpoints" / "step_00000003"), every=3)
    results = pool.run(run_steps, config=config, world_size=world_size, environment=environment, recipe=recipe)
    same = (config, world_size, environment) == ("fsdp_fp32.yaml", 2, {})
    assert [line["step"] for line in lines(tmp_path)] == [4, 5, 6]
    assert column(tmp_path, "train/learning_rate") == column(output_dir, "train/learning_rate")[3:]
    assert column(tmp_path, "train/loss") == pytest.approx(column(output_dir, "train/loss")[3:], abs=0 if same else 1e-6, rel=0)
    for result in results:
        assert result["step"] == 3
        assert result["loaded"].keys() == at_three.keys()
        for name, value in at_three.items():
            assert torch.equal(result["loaded"][name], value), name
        for name, value in expected["state"].items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=0, atol=0 if same else 2e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize(
    ("config", "world_size", "environment", "model"),
    [("fsdp_fp32.yaml", 2, {**CHECKPOINTED, **COMPILED}, TIED), ("ddp.yaml", 2, FP32, TINY)],
)
def test_names_are_canonical_whoever_saves(
    pool: Any, tmp_path: Path, config: str, world_size: int, environment: dict[str, str], model: ModelConfig
) -> None:
    """R02, R07: one process continues from what DDP, a compiled and a checkpointed model have saved."""
    saved = pool.run(
        run_steps,
        config=config,
        world_size=world_size,
        environment=environment,
        recipe=recipe_for(tmp_path, every=2, max_steps=2, model=model),
    )[0]["state"]
    (loaded,) = pool.run(
        run_steps, world_size=1, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path, resume="auto", max_steps=3, model=model)
    )
    assert loaded["loaded"].keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(loaded["loaded"][name], value), name


def test_metrics_hold_each_step_once_when_an_earlier_step_is_resumed(pool: Any, straight: Any, tmp_path: Path) -> None:
    """Lines and checkpoints after the step are of steps that are done again; a line that was cut by a kill goes too."""
    output_dir = tmp_path / "run"
    shutil.copytree(straight[0], output_dir)
    with (output_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    recipe = recipe_for(output_dir, resume=str(output_dir / "checkpoints" / "step_00000003"))
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe)
    assert [line["step"] for line in lines(output_dir)] == list(range(1, STEPS + 1))
    assert column(output_dir, "train/loss") == column(straight[0], "train/loss")
    assert folders(output_dir) == ["step_00000003"]
    assert [path.name for path in (output_dir / "previous" / "1").iterdir()] == ["step_00000006"]


def test_a_fresh_run_does_not_inherit_checkpoints(pool: Any, straight: Any, tmp_path: Path) -> None:
    """`auto` would later take them for its own."""
    output_dir = tmp_path / "run"
    shutil.copytree(straight[0], output_dir)
    (output_dir / "documents").mkdir()
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(output_dir, every=2, max_steps=2))
    assert folders(output_dir) == ["step_00000002"]
    earlier = ["checkpoints", "config.yaml", "documents", "metrics.jsonl"]
    assert sorted(path.name for path in (output_dir / "previous" / "1").iterdir()) == earlier


def started_late(*, recipe: Recipe) -> list[str]:
    """What is in the run folder when `start` returns, where the main process is slow to open it."""
    from unittest import mock

    from fullshard.placement.placement import placement_from_environment
    from fullshard.train import run

    resume, parts = assembled(recipe)
    opens = run._open_run_folder

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(1)
        return opens(*arguments, **options)

    with mock.patch.object(run, "_open_run_folder", late):
        run.start(
            recipe=recipe,
            placement=placement_from_environment(),
            accelerator=parts["accelerator"],
            model=parts["model"],
            resume=resume,
        )
    return sorted(path.name for path in Path(recipe.output_dir).iterdir() if path.name in ("config.yaml", "documents", "previous"))


def test_no_rank_starts_before_the_earlier_run_is_out_of_the_way(pool: Any, tmp_path: Path) -> None:
    """What it wrote to documents/ would be moved away under it."""
    (tmp_path / "documents").mkdir()
    assert pool.run(started_late, recipe=recipe_for(tmp_path)) == [["config.yaml", "previous"]] * 2


def test_tokens_seen_go_on_from_the_rows_read_when_the_batch_changes(pool: Any, straight: Any, tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, resume=str(straight[0] / "checkpoints" / "step_00000003"))
    assert column(straight[0], "train/tokens_seen") == [step * STREAMS * 32 for step in range(1, STEPS + 1)]
    allowed = replace(recipe.checkpoint, allow_changes=["train.global_batch_size"])
    doubled = replace(recipe, train=replace(recipe.train, global_batch_size=2 * STREAMS), checkpoint=allowed)
    pool.run(run_steps, recipe=doubled)
    assert column(tmp_path, "train/tokens_seen") == [(3 + 2 * more) * STREAMS * 32 for more in range(1, 4)]
    ended = dict(_end_table(recipe=doubled, values=lines(tmp_path)[-1], wall_s=1.0, resumed_step=3))
    assert ended["tokens of this launch"] == f"{3 * 2 * STREAMS * 32:,} in 1s"


def start_table(*, recipe: Recipe) -> list[tuple[str, str]]:
    from unittest import mock

    from fullshard.terminal import Terminal

    with mock.patch.object(Terminal, "table", autospec=True) as table:
        run_steps(recipe=recipe)
    rows: list[tuple[str, str]] = table.call_args.args[2]
    return rows


@pytest.mark.parametrize("resumed", [False, True])
def test_the_hash_says_of_which_weights_it_is(pool: Any, straight: Any, tmp_path: Path, resumed: bool) -> None:
    recipe = recipe_for(tmp_path, resume=str(straight[0] / "checkpoints" / "step_00000003") if resumed else "never", max_steps=4)
    hashed = replace(recipe, logging=replace(recipe.logging, weights_hash=True))
    table = pool.run(start_table, recipe=hashed)[0]
    derived = yaml.safe_load((tmp_path / "config.yaml").read_text())["derived"]
    key, name = ("resumed_weights_hash", "weights at step 3") if resumed else ("initial_weights_hash", "initial weights")
    assert [found for found in derived if found.endswith("weights_hash")] == [key]
    assert [(found, value) for found, value in table if "weights" in found] == [(name, f"hash {derived[key]}")]


def host_groups(*, recipe: Recipe) -> list[float]:
    """Timeouts in seconds of the gloo groups that a run makes."""
    from unittest import mock

    import torch.distributed as dist

    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        run_steps(recipe=recipe)
    return [call.kwargs["timeout"].total_seconds() for call in made.call_args_list if call.kwargs.get("backend") == "gloo"]


def test_ranks_wait_for_one_that_retries_as_long_as_the_recipe_says(pool: Any, tmp_path: Path) -> None:
    """Each of 101 tries may last the 30 s of a silent server and the 30 s after it; torch waits 30 minutes, and the
    watchdog as long again. The other group is that of the saves."""
    recipe = recipe_for(tmp_path, max_steps=1)
    patient = replace(recipe, data=replace(recipe.data, max_retries=100, timeout_seconds=30.0))
    assert pool.run(host_groups, recipe=patient) == [[101 * (30 + 30) + 2 * 1800, 2 * 1800]] * 2


@pytest.mark.parametrize(("every", "world_size", "lost_ranks"), [(0, 2, (1,)), (2, 4, (2, 3)), (0, 1, (0,))])
def test_a_lost_source_ends_in_a_checkpoint_and_one_line(
    pool: Any, straight: Any, tmp_path: Path, every: int, world_size: int, lost_ranks: tuple[int, ...]
) -> None:
    """D15. Ranks that did get their rows must not save them as done, nor wait in a collective that the others never enter."""
    results = pool.run(
        run_steps,
        config="fsdp_fp32.yaml",
        world_size=world_size,
        recipe=recipe_for(tmp_path, every=every),
        lost_at=4,
        lost_ranks=lost_ranks,
    )
    folder = tmp_path / "checkpoints" / "step_00000003"
    expected = f"data.path: here: rank {lost_ranks[0]} gets nothing any more; saved {folder}, continue with --checkpoint.resume auto"
    assert [result["error"] for result in results] == [expected] * world_size
    state = json.loads((folder / "state.json").read_text())
    places = {str(s): 3 for s in range(STREAMS)}
    assert state["position"] == {"rows": 24, "streams": places, "dealt": {key: [] for key in places}, "read": places, "order": {}}
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path, resume="auto"))
    assert column(tmp_path, "train/loss") == pytest.approx(column(straight[0], "train/loss"), abs=1e-6)


def test_lost_before_the_first_step_says_so_without_a_checkpoint(pool: Any, tmp_path: Path) -> None:
    results = pool.run(run_steps, recipe=recipe_for(tmp_path), lost_at=1)
    expected = "data.path: here: rank 1 gets nothing any more; nothing was trained yet"
    assert [result["error"] for result in results] == [expected] * 2
    assert not (tmp_path / "checkpoints").exists()


def test_counts_and_notes_are_those_of_all_ranks(straight: Any) -> None:
    output_dir, result = straight
    assert set(column(output_dir, "data/retries")) == {3}
    assert set(column(output_dir, "data/bad_rows")) == {10}
    assert set(column(output_dir, "data/epochs_min")) == {0.5}
    assert set(column(output_dir, "data/epochs_max")) == {2.5}
    # What they have to say about the same thing is said once.
    assert [line for line in result["said"] if "note" in line] == ["of rank 0, a note", "a note of rank 0", "a note of rank 1"]


def save_at(*, step: int, recipes: list[Recipe], full: bool = False) -> str | None:
    """Saves by rank's recipe; the error. full: the disk has room for part of rank 1's shards."""
    import resource

    _, parts = assembled(recipes[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full and parts["accelerator"].process_index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        saving(recipes[parts["accelerator"].process_index], parts)(step)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


@pytest.mark.parametrize("broken", ["rank 1 cannot write", "rank 0 cannot write", "rank 1 is full", "not a shared folder"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_older_one(pool: Any, tmp_path: Path, broken: str) -> None:
    """R11, R12, R15."""
    good = recipe_for(tmp_path / "run")
    (tmp_path / "file").write_text("")
    other = recipe_for(tmp_path / ("other" if broken == "not a shared folder" else "file"))
    assert pool.run(save_at, recipes=[good, good], step=2) == [None, None]
    before = bytes_of(tmp_path / "run")
    recipes, said = {
        "rank 0 cannot write": ([other, good], "Not a directory"),
        "rank 1 cannot write": ([good, other], "rank 1: [Errno 20] Not a directory"),
        "rank 1 is full": ([good, good], "rank 1: "),
        "not a shared folder": ([good, other], "output_dir must be one folder that all machines share"),
    }[broken]
    results = pool.run(save_at, recipes=recipes, step=4, full=broken == "rank 1 is full")
    for error in results:
        assert said in error
        assert "\n" not in error
    assert bytes_of(tmp_path / "run") == before
    assert folders(tmp_path / "run") == ["step_00000002"]


class Killed(BaseException):
    """No handler of the code is meant for it, so that the disk is left as by kill -9."""


def killed_while_saving(*, recipe: Recipe) -> list[tuple[str, list[str], int, list[str]]]:
    """Ends a second save at some points: (point, folders left, step that is found then, folders after the next save)."""
    from unittest import mock

    from fullshard.checkpoint import resume as resume_module
    from fullshard.checkpoint import save as save_module

    _, parts = assembled(recipe)
    accelerator = parts["accelerator"]
    output_dir = Path(recipe.output_dir)
    auto = replace(recipe, checkpoint=CheckpointConfig(resume="auto"))
    rename = Path.rename

    save = saving(recipe, parts)

    def half_a_shard(*_: Any, storage_writer: Any, **__: Any) -> None:
        (Path(storage_writer.path) / "__0_0.distcp").write_bytes(b"half")
        raise Killed

    def dies_at(name: str) -> Any:
        def patched(self: Path, target: Path) -> Path:
            if target.name == name:
                raise Killed
            return rename(self, target)

        return mock.patch.object(Path, "rename", patched)

    points = [
        ("in shards", mock.patch.object(save_module.dcp, "save", half_a_shard), 4),
        ("before state", mock.patch.object(save_module.json, "dump", side_effect=Killed), 4),
        ("before rename", dies_at("step_00000004"), 4),
        ("between the renames of a replacement", dies_at("step_00000002"), 2),
    ]
    found = []
    for point, patch, step in points:
        shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
        save(2)
        with patch, pytest.raises(Killed):
            save(step)
        left, resume = folders(output_dir), resume_module.find_checkpoint(recipe=auto, accelerator=accelerator)
        save(6)
        found.append((point, left, resume.step, folders(output_dir)))
    return found


def test_a_kill_while_saving_leaves_no_half_checkpoint(pool: Any, tmp_path: Path) -> None:
    """Whenever it comes, the older one is found, and the next save clears what was left."""
    (found,) = pool.run(killed_while_saving, world_size=1, recipe=recipe_for(tmp_path, max_steps=8))
    half, after = ["step_00000002", "step_00000004.tmp"], ["step_00000002", "step_00000006"]
    assert found == [
        ("in shards", half, 2, after),
        ("before state", half, 2, after),
        ("before rename", half, 2, after),
        ("between the renames of a replacement", ["step_00000002.old", "step_00000002.tmp"], 2, after),
    ]


def loading(*, recipe: Recipe) -> str:
    try:
        assembled(recipe)
    except UserError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": replace(TINY, intermediate_size=52)}, "(50, 36) in the checkpoint, (52, 36) in this run"),
        ({"model": replace(TINY, num_hidden_layers=4)}, "model.layers.3.self_attn.q_proj.weight: missing in the checkpoint"),
        ({"model": replace(TINY, num_hidden_layers=2)}, "missing in this run"),
        ({"max_steps": 3}, "train.max_steps: 3: {folder} has done 3 steps, the run is complete; raise it to go on"),
        ({"resume": "{folder}/.."}, ": not a checkpoint; name a folder <output_dir>/checkpoints/step_*, auto or never"),
    ],
)
def test_what_does_not_fit_stops_all_ranks_in_one_line(pool: Any, straight: Any, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = straight[0] / "checkpoints" / "step_00000003"
    arguments = {"resume": "{folder}"} | change
    arguments["resume"] = arguments["resume"].format(folder=folder)
    recipe = recipe_for(tmp_path, **arguments)
    allowed = replace(recipe.checkpoint, allow_changes=["model"])  # What the recipes' difference says comes first: tests/test_changes.py.
    results = pool.run(loading, recipe=replace(recipe, checkpoint=allowed))
    for error in results:
        assert said.format(folder=folder) in error
        assert "\n" not in error
    assert len(set(results)) == 1


@pytest.mark.parametrize("damage", ["a shard cut off", "a shard missing", "index cut off", "index missing", "state cut off"])
def test_a_damaged_checkpoint_stops_all_ranks_in_one_line(pool: Any, straight: Any, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "step_00000003"
    shutil.copytree(straight[0] / "checkpoints" / "step_00000003", folder)
    path = folder / {"a shard": "__1_0.distcp", "index": ".metadata", "state": "state.json"}[damage.rpartition(" ")[0].removesuffix(" cut")]
    if damage.endswith("missing"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    results = pool.run(loading, recipe=recipe_for(tmp_path, resume=str(folder)))
    assert len(set(results)) == 1
    assert results[0].startswith(str(folder))
    assert "\n" not in results[0]


def asked_on_main(*, error: Exception | None) -> tuple[str, Any]:
    from fullshard.parallel.agree import on_main

    accelerator, _ = prepared(TINY)

    def function() -> dict[str, int]:
        assert accelerator.is_main_process
        if error:
            raise error
        return {"pid": os.getpid()}

    try:
        return "result", on_main(accelerator, function)
    except Exception as caught:
        return type(caught).__name__, str(caught)


def test_on_main_ends_alike_on_all_ranks(pool: Any) -> None:
    good = pool.run(asked_on_main, error=None)
    assert good[0] == good[1]
    assert pool.run(asked_on_main, error=UserError("data.path: x: no")) == [("UserError", "data.path: x: no")] * 2
    other = pool.run(asked_on_main, error=ZeroDivisionError("broken"))
    assert other == [("ZeroDivisionError", "broken"), ("RuntimeError", "rank 0: broken")]
