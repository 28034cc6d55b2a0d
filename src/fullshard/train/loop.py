"""The training loop."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fullshard.checkpoint.resume import Resume
from fullshard.checkpoint.save import Saver
from fullshard.data.hub import LONGEST_WAIT_S
from fullshard.errors import UserError
from fullshard.measure.memory import measure_memory
from fullshard.model.bad_steps import BadSteps
from fullshard.parallel.agree import agree, dump_collectives, host_group
from fullshard.placement.placement import Placement
from fullshard.process.preemption import stop_signals
from fullshard.process.watchdog import Watchdog
from fullshard.recipe.fields import Recipe
from fullshard.train.evaluate import evaluate
from fullshard.train.leave import Progress, closed_by_user_error, leave, next_rows, roll_back, save_together
from fullshard.train.run import Run
from fullshard.train.step import train_step
from fullshard.train.values import loader_values, memory_values, step_values, throughput_values

if TYPE_CHECKING:
    from fullshard.data.batches import Batches


def train(
    *,
    recipe: Recipe,
    placement: Placement,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    bad_steps: BadSteps,
    batches: Batches,
    held_out: torch.Tensor,
    run: Run,
    resume: Resume,
    document_end: int | None = None,
) -> dict[str, float]:
    """Train from where `resume` is to max_steps; returns the last logged values. Collective.

    batches yields this rank's rows of each global batch, [rows, sequence_length + 1]; held_out is [n, sequence_length + 1]; document_end as
    in train_step. Where a rank is asked to stop or max_time is over, all save the steps done and raise Preempted; where one gets no data
    any more all save and raise its UserError. The log is closed before one leaves.
    """
    train, device = recipe.train, accelerator.device
    assert train.micro_batch_size is not None  # resolve_batch has filled it in.
    values: dict[str, float] = {}
    noted = set(run.noted)
    # How long a rank may read before it has rows, or a reason why not: each try a silent server, then the wait for the next.
    longest_read_s = (recipe.data.max_retries + 1) * (recipe.data.timeout_seconds + LONGEST_WAIT_S)
    group = host_group(accelerator, longest_wait_s=longest_read_s + train.timeout_seconds)
    saver = Saver(recipe=recipe, placement=placement, accelerator=accelerator, resume=resume, say=run.terminal.say)
    now = Progress(resume.step, resume.tokens_seen, resume.rollbacks)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "bad_steps": bad_steps}

    def save(position: dict[str, Any]) -> None:
        watchdog.phase("save", step=now.step)
        save_together(saver.finish, recipe=recipe, run=run)  # What came of the save before is told as its own.
        run.log.sync()
        extra = {"tokens_seen": now.tokens_seen, "rollbacks": now.rollbacks, "wandb_id": run.log.wandb_id}
        # Amid bad steps the checkpoint before them is the one to go back to.
        saver.save(**state, step=now.step, position=position, values=extra, retain_all=bad_steps.read()[0] > 0)

    def asked_to_stop(phase: str) -> bool:
        watchdog.phase(phase, step=now.step)
        return agree(group, failure=None, stop=stop.requested()).stop != 0

    model.train()
    window_start, window_steps, data_wait_s = time.perf_counter(), 0, 0.0
    with (
        run.terminal.progress(max_steps=train.max_steps, first_step=resume.step),
        closed_by_user_error(run.log, saver),
        stop_signals(grace_seconds=recipe.checkpoint.grace_seconds, max_time=train.max_time) as stop,
        Watchdog(
            output_dir=recipe.output_dir,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            timeout_s=train.timeout_seconds,
            also=functools.partial(dump_collectives, accelerator),
        ) as watchdog,
    ):
        while now.step < train.max_steps:
            step = now.step + 1
            stop.step, stop.saved_step = now.step, saver.saved_step
            saves = recipe.checkpoint.every > 0 and (step == train.max_steps or step % recipe.checkpoint.every == 0)
            logged = saves or step in (1, train.max_steps) or step % recipe.logging.every == 0
            # Of the steps done. A rank that does get its rows is one step further in the data when another's do not come.
            position = batches.position()
            watchdog.phase("load", step=step, extra_s=longest_read_s)
            waiting = time.perf_counter()
            rows, failure = next_rows(batches, stop)  # [rows, sequence_length + 1]
            data_wait_s += time.perf_counter() - waiting
            agreed = agree(group, failure=failure or run.log.failure, stop=stop.requested(), save_failed=saver.failed())
            if agreed.save_failed:
                save_together(saver.finish, recipe=recipe, run=run)
            if rows is None or agreed.failure is not None or agreed.stop:
                loader_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
                leave(agreed, now=now, resume=resume, saver=saver, stop=stop, save=functools.partial(save, position))
            assert rows is not None
            rows = rows.to(device)
            with measure_memory(device, enabled=logged) as measurement:
                result = train_step(
                    accelerator=accelerator,
                    model=model,
                    optimizer=optimizer,
                    schedule=schedule,
                    inputs=rows[:, :-1],
                    targets=rows[:, 1:],
                    micro_batch_size=train.micro_batch_size,
                    max_grad_norm=train.max_grad_norm,
                    document_end=document_end,
                    sharding=recipe.sharding,
                    bad_steps=bad_steps,
                    measurement=measurement if logged else None,
                    phase=functools.partial(watchdog.phase, step=step),
                )
            now.step = step
            now.tokens_seen += train.global_batch_size * recipe.data.sequence_length
            run.terminal.advance(step)
            window_steps += 1
            evaluated = recipe.evaluation.max_rows > 0 and (
                step == train.max_steps or (recipe.evaluation.every > 0 and step % recipe.evaluation.every == 0)
            )
            # At fixed steps, whatever is logged: it decides what is trained on.
            longest, since = bad_steps.longest() if step % train.max_bad_steps == 0 or step == train.max_steps else (0, 0)
            diverged = longest >= train.max_bad_steps
            if not (logged or evaluated or diverged):
                continue
            values = step_values(result)  # Waits for the device, so that the clock below has the whole step.
            wall_s = time.perf_counter() - window_start
            data_values, data_wait_s = loader_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
            values |= {
                "train/tokens_seen": now.tokens_seen,
                "train/bad_steps": bad_steps.read()[1],
                "train/rollbacks": now.rollbacks,
                **({} if (scaler := accelerator.scaler) is None else {"train/loss_scale": scaler.get_scale()}),
                **throughput_values(recipe, accelerator, steps=window_steps, wall_s=wall_s, data_wait_s=data_wait_s),
                **data_values,
                **memory_values(model, optimizer, run, measurement=measurement, result=result),
            }
            if evaluated:
                held_out_loss = evaluate(
                    accelerator,
                    model,
                    rows=held_out,
                    micro_batch_size=train.micro_batch_size,
                    document_end=document_end,
                    break_off=lambda: asked_to_stop("evaluate"),
                )
                if held_out_loss is not None:
                    # Above 700 nats exp() overflows a float; such a model is noise anyway.
                    values |= {"eval/loss": held_out_loss, "eval/perplexity": math.exp(min(held_out_loss, 700.0))}
            run.log.log(step, values)
            run.terminal.log(step, values)
            if diverged:
                watchdog.phase("save", step=step)
                what = f"step {step}: {longest} updates in a row, up to that of step {step - since}, were left out"
                roll_back(
                    what,
                    first_bad=step - since - longest + 1,
                    recipe=recipe,
                    accelerator=accelerator,
                    run=run,
                    saver=saver,
                    resume=resume,
                    now=now,
                    state=state | {"schedule": schedule},
                )
            elif saves:
                save_together(functools.partial(save, batches.position()), recipe=recipe, run=run)
            # After evaluation and checkpoint: their time is not training time.
            window_start, window_steps, data_wait_s = time.perf_counter(), 0, 0.0
        if asked_to_stop("save") and saver.step != now.step:  # What comes after the loop may not be waited for.
            save_together(functools.partial(save, batches.position()), recipe=recipe, run=run)
        save_together(saver.finish, recipe=recipe, run=run)
        if failure := agree(group, failure=run.log.failure).failure:
            raise UserError(failure)
    return values
