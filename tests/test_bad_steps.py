"""A bad step leaves everything as it was, on all ranks alike; too many in a row go back to before them and leave their data out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fullshard.model.bad_steps import HISTORY, LEAST_HISTORY, BadSteps
from fullshard.recipe.fields import Recipe
from support.training import STREAMS, FakeBatches, column, folders, lines, recipe_for, run_steps, with_checkpoint, with_train

ROWS = STREAMS  # Of a global batch.


def with_faults(*, recipe: Recipe, fault: str, rows: list[int], rank: int = 1) -> dict[str, Any]:
    """run_steps where the loss of one rank is broken in the steps that begin at these rows of the run's data."""
    from accelerate import PartialState

    from fullshard.train import step

    reading: dict[str, int] = {}
    read = FakeBatches.__next__
    loss_sum = step.next_token_loss_sum

    def tracked(self: FakeBatches) -> torch.Tensor:
        reading["row"] = self.rows
        return read(self)

    def broken(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_sum(logits, targets)
        if PartialState().process_index == rank and reading["row"] in rows:
            return loss * {"nan": torch.nan, "inf": torch.inf, "spike": 1e4}[fault]
        return loss

    with mock.patch.object(FakeBatches, "__next__", tracked), mock.patch.object(step, "next_token_loss_sum", broken):
        return run_steps(recipe=recipe)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("fsdp_fp32.yaml", "inf"),
        ("fsdp_fp32.yaml", "nan"),
        ("fsdp.yaml", "inf"),
        ("ddp.yaml", "nan"),
        ("fsdp1_full_shard.yaml", "inf"),
        ("fsdp_fp16.yaml", "nan"),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(pool: Any, tmp_path: Path, config: str, fault: str) -> None:
    """The weights, the moments and their step count are those of a run that has the steps before it alone."""
    bad = pool.run(with_faults, config=config, recipe=recipe_for(tmp_path / "bad", max_steps=3), fault=fault, rows=[2 * ROWS])
    good = pool.run(run_steps, config=config, recipe=recipe_for(tmp_path / "good", max_steps=2))
    for rank in range(2):
        for name, value in good[rank]["state"].items():
            assert torch.equal(bad[rank]["state"][name], value), name
    assert column(tmp_path / "bad", "train/loss")[:2] == column(tmp_path / "good", "train/loss")
    assert column(tmp_path / "bad", "train/bad_steps") == [0, 0, 1]
    assert column(tmp_path / "bad", "train/tokens_seen") == [step * ROWS * 32 for step in (1, 2, 3)]


def test_training_goes_on_after_it(pool: Any, tmp_path: Path) -> None:
    results = pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path), fault="nan", rows=[ROWS])
    losses = [float(loss) for loss in column(tmp_path, "train/loss")]
    assert [loss == loss for loss in losses] == [True, False, True, True, True, True]
    assert losses[-1] < losses[0]
    assert all(value.isfinite().all() for result in results for value in result["state"].values())


def judged(
    norms: list[float], *, spike_factor: float | None, loss: float = 1.0, loss_scales: list[float] | None = None
) -> tuple[list[float], BadSteps]:
    """(whether each update is left out, the counts)."""
    bad_steps = BadSteps(spike_factor=spike_factor, device=torch.device("cpu"))
    verdicts = []
    for index, norm in enumerate(norms):
        scale = None if loss_scales is None else torch.tensor(loss_scales[index])
        left_out, bad = bad_steps.judge(torch.tensor(loss), torch.tensor(norm), loss_scale=scale)
        bad_steps.count(left_out, bad, torch.tensor(norm))
        verdicts.append(float(left_out))
    return verdicts, bad_steps


def test_a_spike_is_so_many_medians_of_the_good_steps() -> None:
    """Bad norms are not taken into the median, nor anything that is older than the history."""
    quiet = [1.0, 2.0, 3.0] * 10
    verdicts, bad_steps = judged([*quiet, 19.9, 20.1, 500.0, 19.9], spike_factor=10)
    assert verdicts == [0.0] * 31 + [1.0, 1.0, 0.0]
    assert bad_steps.read() == (0, 2)
    verdicts, _ = judged([*quiet, *[100.0] * (HISTORY + 1)], spike_factor=None)
    assert verdicts[-1] == 0.0
    verdicts, _ = judged([100.0] * 30 + [1.0] * HISTORY + [11.0], spike_factor=10)
    assert verdicts[-1] == 1.0


def test_no_spike_before_there_is_a_history() -> None:
    verdicts, _ = judged([*[1.0] * (LEAST_HISTORY - 1), 99.0, 99.0], spike_factor=10)
    assert verdicts == [0.0] * LEAST_HISTORY + [1.0]


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_what_is_not_finite_is_bad_from_the_first_step(loss: float, norm: float) -> None:
    verdicts, bad_steps = judged([norm, norm], spike_factor=None, loss=loss)
    assert verdicts == [1.0, 1.0]
    assert bad_steps.read() == (2, 2)


def test_an_overflow_is_bad_when_there_is_no_scale_left_to_halve() -> None:
    """Every fp16 run begins with some; at a scale of 1 the gradient itself is too large, and that is divergence."""
    inf = float("inf")
    verdicts, bad_steps = judged([inf, inf, 1.0], spike_factor=10, loss_scales=[4.0, 2.0, 1.0])
    assert verdicts == [1.0, 1.0, 0.0]
    assert bad_steps.read() == (0, 0)
    assert judged([inf, inf, inf], spike_factor=None, loss_scales=[2.0, 1.0, 0.5])[1].read() == (2, 2)
    # What is not the scale's: a loss that is not finite, a spike.
    assert judged([inf], spike_factor=None, loss=torch.nan, loss_scales=[4.0])[1].read() == (1, 1)
    assert judged([*[1.0] * 30, 11.0], spike_factor=10, loss_scales=[4.0] * 31)[1].read() == (1, 1)
    # An overflow among bad steps: the weights are those from before all three. It is left out, and no norm of a good step.
    verdicts, bad_steps = judged([*[1.0] * 30, 11.0, inf, 11.0], spike_factor=10, loss_scales=[4.0] * 33)
    assert verdicts == [0.0] * 30 + [1.0] * 3
    assert bad_steps.read() == (3, 2)
    assert bad_steps.tensors()["bad_steps.norms"].nan_to_num(0.0).max() == 1.0


def test_a_spike_is_left_out_by_all_ranks(pool: Any, tmp_path: Path) -> None:
    """With a history of 2: the first is judged by the second step's norm, clipped or not."""
    recipe = with_train(recipe_for(tmp_path / "bad", max_steps=4), spike_factor=50.0)
    with_short_history = pool.run(short_history, config="fsdp_fp32.yaml", recipe=recipe, fault="spike", rows=[3 * ROWS])
    good = pool.run(run_steps, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path / "good", max_steps=3))
    assert column(tmp_path / "bad", "train/bad_steps") == [0, 0, 0, 1]
    for name, value in good[0]["state"].items():
        assert torch.equal(with_short_history[0]["state"][name], value), name


def short_history(**arguments: Any) -> dict[str, Any]:
    from fullshard.model import bad_steps

    with mock.patch.object(bad_steps, "LEAST_HISTORY", 2):
        return with_faults(**arguments)


@pytest.mark.parametrize("async_save", [True, False])
def test_divergence_goes_back_and_leaves_the_data_out(pool: Any, tmp_path: Path, async_save: bool) -> None:
    """Steps 3 and 4 are bad: the run goes back to step 2 and does 3 to 8 with the rows that come after those of step 4."""
    recipe = with_train(recipe_for(tmp_path / "run", every=2, max_steps=8), max_bad_steps=2)
    recipe = with_checkpoint(recipe, async_save=async_save)
    result = pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe, fault="inf", rows=[2 * ROWS, 3 * ROWS])[0]
    assert result["error"] is None
    (said,) = [line for line in result["said"] if "rollback" in line]
    assert said.startswith("step 4: 2 updates in a row, up to that of step 4, were left out; back to ")
    assert said.endswith("step_00000002, the data since are left out: rollback 1 of 3")
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 9))
    assert column(tmp_path / "run", "train/tokens_seen") == [step * ROWS * 32 for step in range(1, 9)]
    assert column(tmp_path / "run", "train/bad_steps") == [0, 0, 2, 2, 2, 2, 2, 2]
    assert column(tmp_path / "run", "train/rollbacks") == [0, 0, 1, 1, 1, 1, 1, 1]
    # The same as a run that is told to leave these rows out.
    pool.run(leaving_out, config="fsdp_fp32.yaml", recipe=recipe_for(tmp_path / "other", max_steps=8), after=2 * ROWS, steps=2)
    assert column(tmp_path / "run", "train/loss") == column(tmp_path / "other", "train/loss")
    assert folders(tmp_path / "run") == ["step_00000004", "step_00000006", "step_00000008"]


def leaving_out(*, recipe: Recipe, after: int, steps: int) -> dict[str, Any]:
    read = FakeBatches.__next__

    def jumping(self: FakeBatches) -> torch.Tensor:
        if self.rows == after:
            for _ in range(steps):
                read(self)
        return read(self)

    with mock.patch.object(FakeBatches, "__next__", jumping):
        return run_steps(recipe=recipe)


def test_a_rollback_is_part_of_the_checkpoints(pool: Any, tmp_path: Path) -> None:
    """A run that is resumed after one counts on: tokens, rollbacks, bad steps."""
    recipe = with_train(recipe_for(tmp_path, every=2, max_steps=6), max_bad_steps=2)
    pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe, fault="inf", rows=[2 * ROWS, 3 * ROWS])
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=with_train(with_checkpoint(recipe, resume="auto"), max_steps=8))
    assert column(tmp_path, "train/tokens_seen") == [step * ROWS * 32 for step in range(1, 9)]
    assert column(tmp_path, "train/rollbacks")[-1] == 1
    assert column(tmp_path, "train/bad_steps")[-1] == 2


NONE, FIRST_TWO = "no checkpoint to go back to (checkpoint.every is 0)", "2 updates in a row, "


@pytest.mark.parametrize(
    ("options", "every", "rows", "said"),
    [
        ({"on_divergence": "stop"}, 2, [2, 3], "up to that of step 4, were left out; stopped; lower optim.learning_rate"),
        ({}, 0, [0, 1], NONE),
        ({"max_rollbacks": 1}, 2, [2, 3, 6, 7, 8, 9], "stopped after 1 rollbacks (train.max_rollbacks)"),
    ],
)
def test_divergence_that_cannot_be_undone_stops_in_one_line(
    pool: Any, tmp_path: Path, options: dict[str, Any], every: int, rows: list[int], said: str
) -> None:
    recipe = with_train(recipe_for(tmp_path, every=every, max_steps=9), max_bad_steps=2, **options)
    results = pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe, fault="nan", rows=[row * ROWS for row in rows])
    assert results[0]["error"] == results[1]["error"]
    assert said in results[0]["error"]
    assert FIRST_TWO in results[0]["error"]
    assert "\n" not in results[0]["error"]


def test_the_checkpoint_before_bad_steps_outlives_those_among_them(pool: Any, tmp_path: Path) -> None:
    """keep_last 1 would have deleted it before the divergence is called one."""
    recipe = with_train(with_checkpoint(recipe_for(tmp_path, every=1, max_steps=6), keep_last=1), max_bad_steps=3)
    result = pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe, fault="inf", rows=[2 * ROWS, 3 * ROWS, 4 * ROWS])[0]
    assert result["error"] is None
    (said,) = [line for line in result["said"] if "rollback" in line]
    assert "step_00000002" in said
    assert folders(tmp_path) == ["step_00000006"]


def test_what_is_logged_does_not_decide_what_is_trained_on(pool: Any, tmp_path: Path) -> None:
    """Two bad steps between two logged ones, and a good one after them."""
    for every in (1, 10):
        recipe = with_train(recipe_for(tmp_path / f"{every}", every=2, max_steps=8), max_bad_steps=2)
        recipe = replace(recipe, logging=replace(recipe.logging, every=every))
        pool.run(with_faults, config="fsdp_fp32.yaml", recipe=recipe, fault="inf", rows=[2 * ROWS, 3 * ROWS])
    losses = [{line["step"]: line["train/loss"] for line in lines(tmp_path / run)} for run in ("1", "10")]
    assert losses[1] == {step: losses[0][step] for step in losses[1]}
    assert lines(tmp_path / "10")[-1]["train/rollbacks"] == 1


def test_a_row_of_bad_steps_is_remembered_until_it_is_asked_for() -> None:
    bad_steps = BadSteps(spike_factor=None, device=torch.device("cpu"))

    def count(norms: list[float]) -> tuple[int, int]:
        for norm in norms:
            bad_steps.count(*bad_steps.judge(torch.tensor(1.0), torch.tensor(norm)), torch.tensor(norm))
        return bad_steps.longest()

    bad = float("inf")
    assert count([1.0, bad, bad, bad, 1.0, 1.0, bad]) == (3, 3)
    assert count([bad, bad, 1.0]) == (3, 1), "one that had begun before"
    assert count([1.0, 1.0])[0] == 0
    assert count([1.0, bad]) == (1, 0)


def test_a_stop_right_after_a_rollback_keeps_it(pool: Any, tmp_path: Path) -> None:
    """Otherwise the next start does the bad steps again, without counting. Also where the checkpoint was another run's."""
    first = recipe_for(tmp_path / "first", every=2, max_steps=2)
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=first)
    resume = str(tmp_path / "first" / "checkpoints" / "step_00000002")
    recipe = with_train(recipe_for(tmp_path / "run", resume=resume, max_steps=6), max_bad_steps=2)
    results = pool.run(stopped_after_rollback, config="fsdp_fp32.yaml", recipe=recipe, rows=[2 * ROWS, 3 * ROWS])
    assert "stopped after step 2 by SIGTERM; saved" in results[0]["error"]
    assert folders(tmp_path / "run") == ["step_00000002"]
    pool.run(run_steps, config="fsdp_fp32.yaml", recipe=with_checkpoint(recipe, resume="auto"))
    assert column(tmp_path / "run", "train/rollbacks") == [1] * 4
    assert column(tmp_path / "run", "train/tokens_seen") == [step * ROWS * 32 for step in (3, 4, 5, 6)]


def stopped_after_rollback(*, recipe: Recipe, rows: list[int]) -> dict[str, Any]:
    import os
    import signal

    from fullshard.train import loop

    roll_back = loop.roll_back

    def then_stopped(*arguments: Any, **options: Any) -> None:
        roll_back(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(loop, "roll_back", then_stopped):
        return with_faults(recipe=recipe, fault="inf", rows=rows)


def test_a_run_that_stops_waits_for_the_save_under_way(pool: Any, tmp_path: Path) -> None:
    """Closing the log destroys the process groups; the save before the bad steps would be lost with them."""
    recipe = with_train(recipe_for(tmp_path, every=2, max_steps=6), max_bad_steps=2, on_divergence="stop")
    results = pool.run(slow_saves, config="fsdp_fp32.yaml", recipe=recipe, rows=[2 * ROWS, 3 * ROWS])
    assert "stopped; lower" in results[0]["error"]
    assert folders(tmp_path) == ["step_00000002"]


def slow_saves(*, recipe: Recipe, rows: list[int]) -> dict[str, Any]:
    import time

    import torch.distributed.checkpoint as dcp

    save = dcp.save

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(3)
        return save(*arguments, **options)

    with mock.patch.object(dcp, "save", slow):
        return with_faults(recipe=recipe, fault="inf", rows=rows)
