"""N steps are k steps, an end of any kind, and N - k steps: bit for bit at the same placement, whatever writes and whoever reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fullshard.checkpoint.manifest import verify
from fullshard.errors import UserError
from fullshard.recipe.fields import CheckpointConfig, Recipe
from support import training
from support.launcher import launch
from support.models import TINY
from support.training import FP32, STEPS, assembled, column, folders, lines, recipe_for, run_steps, saving, with_checkpoint, with_train
from support.wandb_runs import history

DROPOUT = replace(TINY, attention_dropout=0.1)
FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
KEYS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen", "train/bad_steps")


@pytest.mark.parametrize(
    ("config", "world_size", "environment", "async_save"),
    [
        ("fsdp_fp32.yaml", 2, {}, True),
        ("fsdp_fp32.yaml", 2, FULL, True),
        ("fsdp.yaml", 2, {}, False),
        ("fsdp.yaml", 2, FULL, False),
        ("ddp.yaml", 2, FP32, True),
        ("ddp.yaml", 2, BF16, False),
        ("fsdp_fp32.yaml", 1, {}, True),
        ("fsdp1_full_shard.yaml", 2, FP32, True),
        ("fsdp1_full_shard.yaml", 2, FULL | BF16, False),
        ("fsdp_fp16.yaml", 2, {}, True),
    ],
)
def test_bit_for_bit(pool: Any, tmp_path: Path, config: str, world_size: int, environment: dict[str, str], async_save: bool) -> None:
    """R01, R03, R16: with dropout and two micro batches a step, losses, norms, rates, weights and moments are those of the straight run."""
    place = {"config": config, "world_size": world_size, "environment": environment}
    recipe = with_checkpoint(recipe_for(tmp_path / "straight", every=3, model=DROPOUT), async_save=async_save)
    straight = pool.run(run_steps, **place, recipe=recipe)
    checkpoint = tmp_path / "straight" / "checkpoints" / "step_00000003"
    recipe = recipe_for(tmp_path / "continued", resume=str(checkpoint), every=3, model=DROPOUT)
    continued = pool.run(run_steps, **place, recipe=recipe)
    for key in KEYS:
        assert column(tmp_path / "continued", key) == column(tmp_path / "straight", key)[3:], key
    ends = [json.loads((tmp_path / run / "checkpoints/step_00000006/state.json").read_text()) for run in ("straight", "continued")]
    assert ends[0]["scaler"] == ends[1]["scaler"]  # fp16's scale, and the steps since it changed.
    assert (ends[0]["scaler"] is not None) == (config == "fsdp_fp16.yaml")
    for rank in range(world_size):
        assert continued[rank]["state"].keys() == straight[rank]["state"].keys()
        for name, value in straight[rank]["state"].items():
            assert torch.equal(continued[rank]["state"][name], value), (rank, name)
    assert [verdict.line.rpartition(", ")[2] for verdict in verify(checkpoint, hashes=True)] == ["every byte"]
    written = sorted(path.name for path in checkpoint.iterdir())
    whole = environment.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
    assert written == [".metadata", *(f"__{rank}_0.distcp" for rank in range(1 if whole else world_size)), "manifest.json", "state.json"]


def draws(*, recipe: Recipe) -> tuple[list[float], bytes]:
    """(losses, state of the generator that dropout has drawn from) of this rank."""
    run_steps(recipe=recipe)
    return column(Path(recipe.output_dir), "train/loss"), torch.get_rng_state().numpy().tobytes()


def test_dropout_is_seeded_and_differs_between_ranks(pool: Any, tmp_path: Path) -> None:
    plain, first, second, other = (
        pool.run(draws, recipe=replace(recipe_for(tmp_path / name, max_steps=2, model=model), seed=seed))
        for name, model, seed in (("a", TINY, 3), ("b", DROPOUT, 3), ("c", DROPOUT, 3), ("d", DROPOUT, 4))
    )
    assert first[0][0] == second[0][0]
    assert first[0][0] != plain[0][0]
    assert first[0][0] != other[0][0]
    assert first[0][1] != first[1][1]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("fsdp_fp32.yaml", 2, FULL), ("fsdp_fp32.yaml", 2, {})),
        (("fsdp_fp32.yaml", 2, {}), ("fsdp_fp32.yaml", 4, FULL)),
        (("fsdp_fp32.yaml", 1, {}), ("fsdp_fp32.yaml", 2, {})),
        (("fsdp_fp32.yaml", 2, FULL), ("ddp.yaml", 2, FP32)),
        (("fsdp1_full_shard.yaml", 2, FP32), ("fsdp_fp32.yaml", 2, {})),
        (("fsdp_fp32.yaml", 2, {}), ("fsdp1_full_shard.yaml", 2, FP32)),
        (("fsdp1_full_shard.yaml", 2, FULL | FP32), ("fsdp_fp32.yaml", 1, {})),
        (("fsdp_hybrid.yaml", 4, FP32), ("fsdp1_hybrid.yaml", 4, FP32)),
        (("fsdp1_hybrid.yaml", 4, FP32), ("fsdp_fp32.yaml", 2, {})),
    ],
)
def test_either_kind_loads_under_the_other(pool: Any, tmp_path: Path, writer: Any, reader: Any) -> None:
    """R02, R07: the bits that one placement saves are those that another one loads; from there on the losses agree to rounding."""
    names = ("config", "world_size", "environment")
    write, read = (dict(zip(names, place, strict=True)) for place in (writer, reader))
    saved = pool.run(run_steps, **write, recipe=recipe_for(tmp_path / "a", every=2, max_steps=2))[0]["state"]
    checkpoint = str(tmp_path / "a" / "checkpoints" / "step_00000002")
    loaded = pool.run(run_steps, **read, recipe=recipe_for(tmp_path / "b", resume=checkpoint, every=2, max_steps=4))
    assert loaded[0]["loaded"].keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[0]["loaded"][name], value), name
    pool.run(run_steps, **write, recipe=recipe_for(tmp_path / "c", resume=checkpoint, every=2, max_steps=4))
    assert column(tmp_path / "b", "train/learning_rate") == column(tmp_path / "c", "train/learning_rate")
    state = [json.loads((tmp_path / run / "checkpoints" / "step_00000004" / "state.json").read_text()) for run in "bc"]
    assert state[0]["position"] == state[1]["position"]
    assert column(tmp_path / "b", "train/loss") == pytest.approx(column(tmp_path / "c", "train/loss"), abs=1e-5, rel=0)


def full_save(*, recipe: Recipe) -> list[int]:
    """Tensors that each rank would have to hold for a whole checkpoint."""
    from fullshard.checkpoint.save import Saver

    _, parts = assembled(recipe)
    held = []
    with mock.patch.object(Saver, "_write", lambda self, *, tensors, **rest: held.append(len(tensors))):
        saving(recipe, parts)(2)
    return held


def test_only_the_main_process_holds_a_whole_checkpoint(pool: Any, tmp_path: Path) -> None:
    """R22: the other ranks hand over one tensor after the other and keep none."""
    (main,), (other,) = pool.run(full_save, config="fsdp_fp32.yaml", environment=FULL, recipe=recipe_for(tmp_path))
    assert other == 0
    assert main > 40


def damaged(run: Path, step: int, how: str) -> None:
    folder = run / "checkpoints" / f"step_{step:08d}"
    match how:
        case "flipped":
            content = bytearray((folder / "__1_0.distcp").read_bytes())
            content[len(content) // 2] ^= 1
            (folder / "__1_0.distcp").write_bytes(content)
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "no shard":
            (folder / "__0_0.distcp").unlink()
        case "state cut":
            content = (folder / "state.json").read_bytes()
            (folder / "state.json").write_bytes(content[:-9])


@pytest.fixture(scope="module")
def saved_run(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 steps of 6, saved at 2, 4 and, as asked to stop, 5."""
    output_dir = tmp_path_factory.mktemp("saved") / "run"
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(output_dir, every=2, model=DROPOUT))
    return output_dir


@pytest.mark.parametrize("how", ["flipped", "no manifest", "no shard", "state cut"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(pool: Any, saved_run: Path, tmp_path: Path, how: str) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    damaged(tmp_path / "run", 4, how)
    recipe = recipe_for(tmp_path / "run", resume="auto", every=2, model=DROPOUT)
    results = pool.run(resumed_notes, config="fsdp_fp32.yaml", recipe=recipe)
    for step, notes in results:
        assert step == 2
        (note,) = notes
        assert note.startswith(f"{tmp_path / 'run' / 'checkpoints' / 'step_00000004'} is damaged and was passed over: ")
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert column(tmp_path / "run", "train/loss") == column(saved_run, "train/loss")
    assert folders(tmp_path / "run") == ["step_00000002", "step_00000004", "step_00000006"]
    assert all(verdict.whole for verdict in verify(tmp_path / "run", hashes=True))
    assert [path.name for path in (tmp_path / "run" / "previous" / "1").iterdir()] == ["step_00000004"], "kept to be looked at"


def resumed_notes(*, recipe: Recipe) -> tuple[int, tuple[str, ...]]:
    from fullshard.checkpoint import resume as module

    seen = []
    read = module.newest_whole

    def spied(*arguments: Any, **options: Any) -> Any:
        seen.append(read(*arguments, **options))
        return seen[-1]

    with mock.patch.object(module, "newest_whole", spied):
        run_steps(recipe=recipe)
    return seen[0].step, seen[0].notes


def finding(*, recipe: Recipe) -> str:
    try:
        return f"step {assembled(recipe)[0].step}"
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def test_nothing_whole_is_not_the_beginning(pool: Any, saved_run: Path, tmp_path: Path) -> None:
    """A run of which all checkpoints are damaged does not begin anew on its own."""
    shutil.copytree(saved_run, tmp_path / "run")
    for step in (2, 4, 6):
        damaged(tmp_path / "run", step, "flipped")
    found = pool.run(finding, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path / "run", resume="auto", model=DROPOUT))
    newest = tmp_path / "run" / "checkpoints" / "step_00000006"
    expected = f"UserError: {newest} is damaged: __1_0.distcp: not what its checksum says; nothing older is whole; "
    assert found == [f"{expected}--checkpoint.resume never begins anew"] * 2


def test_a_named_checkpoint_that_is_damaged_stops(pool: Any, saved_run: Path, tmp_path: Path) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    damaged(tmp_path / "run", 4, "flipped")
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    recipe = recipe_for(tmp_path / "other", resume=str(folder), model=DROPOUT)
    for said in pool.run(finding, config="fsdp_fp32.yaml", recipe=recipe):
        assert said.startswith(f"UserError: {folder} is damaged: __1_0.distcp: not what its checksum says")


def test_a_complete_run_has_nothing_to_do(pool: Any, saved_run: Path) -> None:
    """A loop that starts it again until it succeeds ends."""
    found = pool.run(finding, config="fsdp_fp32.yaml", recipe=recipe_for(saved_run, resume="auto", model=DROPOUT))
    assert all(said.startswith("Complete: ") and "the run is complete" in said for said in found)


def test_a_launch_that_was_started_again_goes_on_whatever_resume_says(pool: Any, saved_run: Path, tmp_path: Path) -> None:
    """`accelerate launch --max_restarts`: `never` and a path are about how the launch began, and hold until it has saved something."""
    environment = {"TORCHELASTIC_RESTART_COUNT": "1"}
    for saved_here in (True, False):
        shutil.copytree(saved_run, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
        state = tmp_path / "run" / "checkpoints" / "step_00000004" / "state.json"
        if not saved_here:
            for path in (state, state.parents[1] / "step_00000002" / "state.json"):
                path.write_text(json.dumps(json.loads(path.read_text()) | {"launch": "another"}))
        for resume, expected in (("never", 0), (str(saved_run / "checkpoints" / "step_00000002"), 2)):
            recipe = recipe_for(tmp_path / "run", resume=resume, model=DROPOUT)
            found = pool.run(finding, config="fsdp_fp32.yaml", environment=environment, recipe=recipe)
            assert found == [f"step {4 if saved_here else expected}"] * 2
        shutil.rmtree(tmp_path / "run")


def without_a_random_state(*, recipe: Recipe) -> str:
    """A save from which rank 1's is missing."""
    from fullshard.checkpoint import save as module

    states = module.collect_random_states
    with mock.patch.object(module, "collect_random_states", lambda accelerator: {} if accelerator.process_index else states(accelerator)):
        run_steps(recipe=recipe)
    return finding(recipe=replace(recipe, checkpoint=CheckpointConfig(resume="auto"), train=replace(recipe.train, max_steps=STEPS)))


def test_a_missing_random_state_is_refused(pool: Any, tmp_path: Path) -> None:
    """R16: dropout would silently be another one."""
    recipe = recipe_for(tmp_path, every=2, max_steps=2, model=DROPOUT)
    for said in pool.run(without_a_random_state, config="fsdp_fp32.yaml", recipe=recipe):
        assert "rng.1.cpu: missing in the checkpoint" in said


def test_retention(pool: Any, tmp_path: Path) -> None:
    """R14: by step number, the one that was resumed from stays, and what stays is not touched."""
    recipe = with_checkpoint(recipe_for(tmp_path, every=1, max_steps=4), keep_last=2, keep_every=None)
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe)
    assert folders(tmp_path) == ["step_00000003", "step_00000004"]
    before = (tmp_path / "checkpoints" / "step_00000003").stat().st_mtime_ns
    resumed = with_train(with_checkpoint(recipe, resume=str(tmp_path / "checkpoints" / "step_00000003"), keep_every=5), max_steps=8)
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=resumed)
    assert folders(tmp_path) == ["step_00000003", "step_00000005", "step_00000007", "step_00000008"]
    assert (tmp_path / "checkpoints" / "step_00000003").stat().st_mtime_ns == before


def failing_saves(*, recipe: Recipe, steps: tuple[int, ...]) -> dict[str, Any]:
    """run_steps where rank 1's disk is full at some steps."""
    from fullshard.checkpoint import save as module

    call = module.call_dcp

    def full(function: Any, tensors: Any, *, place: str, **options: Any) -> Any:
        if function is module.dcp.save and any(f"step_{step:08d}" in place for step in steps) and "rng.1.cpu" in tensors:
            tensors = tensors | {"rng.1.cpu": Unwritable(torch.zeros(1))}
        return call(function, tensors, place=place, **options)

    with mock.patch.object(module, "call_dcp", full):
        return run_steps(recipe=recipe)


class Unwritable(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_a_save_that_fails_is_told_and_ends_or_does_not_end_the_run(
    pool: Any, tmp_path: Path, saved_run: Path, async_save: bool, on_failure: str
) -> None:
    """All ranks alike, at one step, though only rank 1 could not write; the checkpoint before is as it was."""
    recipe = with_checkpoint(recipe_for(tmp_path, every=2, model=DROPOUT), async_save=async_save, on_failure=on_failure)
    results = pool.run(failing_saves, config="fsdp_fp32.yaml", recipe=recipe, steps=(4,))
    line = f"{tmp_path / 'checkpoints' / 'step_00000004'}: cannot be saved: rank 1: [Errno 28] No space left on device"
    if on_failure == "stop":
        assert [result["error"] for result in results] == [line] * 2
        assert folders(tmp_path) == ["step_00000002"]
        assert all(verdict.whole for verdict in verify(tmp_path, hashes=True))
    else:
        assert [result["error"] for result in results] == [None] * 2
        assert f"{line}; training goes on" in results[0]["said"]
        assert column(tmp_path, "train/loss") == column(saved_run, "train/loss")
        assert folders(tmp_path) == ["step_00000002", "step_00000006"]


def broken_saves(*, recipe: Recipe) -> dict[str, Any]:
    """run_steps in which step 4 cannot be saved."""
    from torch.distributed.checkpoint.api import CheckpointException

    from fullshard.checkpoint import save as module

    save = module.dcp.save

    def broken(tensors: Any, *, storage_writer: Any, **options: Any) -> Any:
        index = save(tensors, storage_writer=storage_writer, **options)
        if "step_00000004" not in str(storage_writer.path):
            return index
        # What a disk that is full amid a record ends in.
        error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        raise CheckpointException("write", {1: (error, None)})  # type: ignore[dict-item]

    with mock.patch.object(module.dcp, "save", broken):
        return run_steps(recipe=recipe)


@pytest.mark.parametrize("environment", [{}, FULL])
def test_a_disk_that_is_full_amid_a_record_is_one_line_too(pool: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    recipe = with_checkpoint(recipe_for(tmp_path, every=2), on_failure="warn")
    results = pool.run(broken_saves, config="fsdp_fp32.yaml", environment=environment, recipe=recipe)
    line = f"{tmp_path / 'checkpoints' / 'step_00000004'}: cannot be saved: rank 1: [enforce fail at inline_container.cc:672]"
    assert [said for said in results[0]["said"] if said.startswith(line)]
    assert folders(tmp_path) == ["step_00000002", "step_00000006"]


def forgotten(*, recipe: Recipe) -> dict[str, Any]:
    """run_steps in which rank 1 does not say what it has written."""
    from fullshard.checkpoint import save as module

    record = module.record_files

    def records(folder: Path, names: list[str], **options: Any) -> Any:
        return record(folder, [name for name in names if not name.startswith("__1_")], **options)

    with mock.patch.object(module, "record_files", records):
        return run_steps(recipe=recipe)


def test_a_manifest_that_lacks_a_file_of_the_index_is_not_written(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"RuntimeError: .*the index has .* written are"):
        pool.run(forgotten, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path, every=2))
    assert folders(tmp_path) == []


def with_a_folder_that_stays(*, recipe: Recipe) -> dict[str, Any]:
    from fullshard.checkpoint import save as module

    with mock.patch.object(module, "remove", side_effect=OSError(16, "Device or resource busy")):
        return run_steps(recipe=recipe)


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failed_save(pool: Any, tmp_path: Path) -> None:
    recipe = with_checkpoint(recipe_for(tmp_path, every=2), keep_last=1, on_failure="stop")
    result = pool.run(with_a_folder_that_stays, config="fsdp_fp32.yaml", recipe=recipe)[0]
    assert result["error"] is None
    line = f"{tmp_path / 'checkpoints' / 'step_00000002'}: cannot be deleted: [Errno 16] Device or resource busy"
    assert line in result["said"]
    assert folders(tmp_path) == ["step_00000002", "step_00000004", "step_00000006"]


def test_the_export_of_fewer_steps_is_set_aside(pool: Any, saved_run: Path, tmp_path: Path) -> None:
    """A run that goes on and is killed before its own export would pass for exported."""
    shutil.copytree(saved_run, tmp_path / "run")
    (tmp_path / "run" / "model").mkdir()
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path / "run", resume="auto", model=DROPOUT, max_steps=7))
    assert not (tmp_path / "run" / "model").exists()
    assert [path.name for path in (tmp_path / "run" / "previous" / "1").iterdir()] == ["model"]


def asked_to_stop(*, recipe: Recipe, where: str, at: int) -> dict[str, Any]:
    """run_steps in which rank 1 gets a SIGTERM at step `at`: in evaluation, or while the step is trained."""
    import os
    import signal

    from accelerate import PartialState

    from fullshard.train import loop

    calls = {"train_step": 0, "evaluate": 0}

    def hit(name: str, call: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            if name == where and calls[name] == at and PartialState().process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return call(*arguments, **options)

        return mock.patch.object(loop, name, wrapped)

    with hit("train_step", loop.train_step), hit("evaluate", loop.evaluate):
        return run_steps(recipe=recipe)


@pytest.mark.parametrize(
    ("where", "at", "step", "evaluations"), [("evaluate", 2, 2, 1), ("train_step", 4, 4, 3), ("train_step", 6, 6, 5), ("evaluate", 6, 6, 5)]
)
def test_a_signal_on_one_rank_saves_the_step_that_is_done(
    pool: Any, tmp_path: Path, where: str, at: int, step: int, evaluations: int
) -> None:
    """R18, R20: nobody else would save, and an evaluation is broken off. After the last step the run is done, and saved all the same."""
    recipe = with_train(recipe_for(tmp_path, every=0), max_steps=6)
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, every=1, max_rows=4))
    results = pool.run(asked_to_stop, config="fsdp_fp32.yaml", recipe=recipe, where=where, at=at)
    folder = tmp_path / "checkpoints" / f"step_{step:08}"
    said = f"stopped after step {step} by SIGTERM; saved {folder}, continue with --checkpoint.resume auto"
    assert [result["error"] for result in results] == [said if step < 6 else None] * 2
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, step + 1))
    assert sum("eval/loss" in line for line in lines(tmp_path)) == evaluations
    assert folders(tmp_path) == [f"step_{step:08}"]


def evaluated_before_loading(*, recipe: Recipe) -> dict[str, Any]:
    """R06: a forward without backward between wrapping and loading."""
    from fullshard.train.evaluate import evaluate

    make = training.prepared

    def prepared(*arguments: Any, **options: Any) -> Any:
        accelerator, model = make(*arguments, **options)
        evaluate(accelerator, model, rows=torch.ones(2, 33, dtype=torch.int64), micro_batch_size=2)
        return accelerator, model

    with mock.patch.object(training, "prepared", prepared):
        return run_steps(recipe=recipe)


@pytest.mark.parametrize("config", ["fsdp_fp32.yaml", "fsdp1_full_shard.yaml"])
def test_loading_after_a_forward_counts(pool: Any, tmp_path: Path, config: str) -> None:
    place = {"config": config, "environment": FP32}
    pool.run(run_steps, **place, recipe=recipe_for(tmp_path / "a", every=2, max_steps=4))
    recipe = recipe_for(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoints" / "step_00000002"), max_steps=4)
    pool.run(evaluated_before_loading, **place, recipe=recipe)
    assert column(tmp_path / "b", "train/loss") == column(tmp_path / "a", "train/loss")[2:]


def test_a_run_is_resumed_made_longer_and_complete(tmp_path: Path) -> None:
    """Through the launcher. W02, O22: one W&B run with the right steps, each step once and in order in metrics.jsonl. O10: the steps beyond
    the end of the schedule run at its floor, nothing jumps up. R18: it ends at max_steps."""
    options = {
        "checkpoint__every": 2,
        "logging__trackers": "[wandb]",
        "model__attention_dropout": 0.1,
        "evaluation__every": 4,
        "optim__warmup_steps": 1,
    }
    straight = launch(tmp_path, train__max_steps=4, **options).check().metrics
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004")
    longer = launch(tmp_path, train__max_steps=6, **options).check()
    assert "train.max_steps is 6, was 4: the schedule stays laid out over 4" in longer.stdout
    identity = json.loads((tmp_path / "checkpoints" / "step_00000002" / "state.json").read_text())["wandb_id"]
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in runs] == [identity] * 2
    assert [[point["step"] for point in history(run)] for run in runs] == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert [line["step"] for line in longer.metrics] == [1, 2, 3, 4, 5, 6]
    for key in (*KEYS, "eval/loss"):
        assert [line.get(key) for line in longer.metrics[:4]] == [line.get(key) for line in straight], key
    rates = longer.column("train/learning_rate")
    assert rates[4:] == [rates[3]] * 2
    # Nothing is left to do but what a kill at the very end has left out.
    shutil.rmtree(tmp_path / "model")
    complete = launch(tmp_path, train__max_steps=6, **options).check()
    assert "has done 6 steps, train.max_steps is 6: the run is complete, its model is now in" in complete.stderr
    assert complete.metrics == longer.metrics
    assert (tmp_path / "model" / "model.safetensors").is_file()
