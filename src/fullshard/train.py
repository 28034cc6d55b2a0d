"""The training loop: one `train()`, one `train_step()`, and the only optimizer step of the project."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType
from accelerate.utils import gather_object
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fullshard.accelerator import COMPUTE_DTYPE, Agreed, agree, dump_collectives, host_group, on_main
from fullshard.bad_steps import BadSteps, step_unless
from fullshard.checkpoint import Resume, Saver, load_checkpoint, newest_whole
from fullshard.config import DEFAULT_SHARDING, Recipe, ShardingConfig
from fullshard.document_mask import document_context, document_targets
from fullshard.errors import Preempted, UserError
from fullshard.estimate import GIB
from fullshard.evaluate import evaluate
from fullshard.hub import LONGEST_WAIT_S
from fullshard.losses import IGNORED, next_token_loss_sum
from fullshard.manifest import checkpoint_steps
from fullshard.memory import MemoryMeasurement, host_rss_bytes, measure_memory, optimizer_bytes, tensor_bytes
from fullshard.metrics import RunLog, peak_flops, throughput, training_flops_per_token
from fullshard.optim import clip_by_global_norm_
from fullshard.preemption import Stop, StopRequested, cause_name, stop_signals
from fullshard.run import Run, later_checkpoints, set_aside
from fullshard.sharding import Placement
from fullshard.watchdog import Watchdog

if TYPE_CHECKING:
    from fullshard.data import Batches


@dataclass(frozen=True)
class StepResult:
    """Scalars of one optimizer step, still on the device: reading them is the loop's choice, since it waits for a GPU."""

    loss: torch.Tensor
    """Mean over all target tokens of the global batch, nats."""
    grad_norm: torch.Tensor
    """L2 norm of the whole gradient before clipping."""
    learning_rate: float
    """At which the step was taken."""
    gradient_bytes: int
    """Of this rank's gradients before they were freed; 0 where nothing was measured."""


def train_step(
    *,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    micro_batch_size: int,
    max_grad_norm: float | None,
    document_end: int | None = None,
    sharding: ShardingConfig = DEFAULT_SHARDING,
    bad_steps: BadSteps | None = None,
    measurement: MemoryMeasurement | None = None,
    phase: Callable[[str], object] = str,
) -> StepResult:
    """One optimizer step on this rank's rows of the global batch. Collective.

    inputs, targets: [rows, sequence_length]; the number of micro batches must be the same on every rank; a target may be IGNORED.
    document_end: token id after which attention and positions restart, and nothing is predicted; None: rows are one context.
    The loss and its gradient are means over all target tokens of all ranks and micro batches, not means of means (PUBLIC_REPORTS O01, O02).
    sharding: when gradients are reduced and units freed, see `_gradient_sync`.
    bad_steps: judges the step and counts it; None: only what is not finite is bad. A bad step leaves weights and moments as they are, on
    all ranks and without waiting for the device. The schedule goes on, as the data do: both are functions of the step, so that a run that
    left steps out ends at the rate it was laid out for. phase: told what comes next.
    """
    bad_steps = bad_steps or BadSteps(spike_factor=None, device=inputs.device)
    targets = document_targets(inputs, targets, document_end=document_end)
    target_tokens = accelerator.reduce((targets != IGNORED).sum(), reduction="sum")
    # FSDP and DDP average gradients over ranks; the loss below is to be summed.
    scale = accelerator.num_processes / target_tokens.clamp(min=1)
    loss_sum = torch.zeros((), dtype=torch.float32, device=inputs.device)
    micro_batches = list(zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True))
    for index, (micro_inputs, micro_targets) in enumerate(micro_batches):
        phase("forward")
        with _gradient_sync(accelerator, model, sharding=sharding, last=index == len(micro_batches) - 1):
            with measurement.forward() if measurement else nullcontext():
                context = document_context(micro_inputs, document_end=document_end, dtype=COMPUTE_DTYPE[accelerator.mixed_precision])
                logits = model(input_ids=micro_inputs, **context, use_cache=False).logits  # [micro_batch_size, sequence_length, vocab_size]
                micro_loss = next_token_loss_sum(logits, micro_targets)
            del logits, context
            phase("backward")
            accelerator.backward(micro_loss * scale)
        loss_sum += micro_loss.detach()
    gradient_bytes = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None) if measurement else 0
    phase("optimizer")
    accelerator.unscale_gradients()  # Does nothing but under fp16.
    grad_norm = clip_by_global_norm_(model.parameters(), max_norm=max_grad_norm)
    scaler = accelerator.scaler
    # Its get_scale() would wait for the device.
    loss_scale = None if scaler is None else scaler.scale(torch.ones_like(grad_norm))
    verdict = bad_steps.judge(loss_sum, grad_norm, loss_scale=loss_scale)
    # The ranks' verdicts are summed with their losses: a norm that differs in its last bit must not part them.
    loss_sum, left_out, bad = accelerator.reduce(torch.cat([loss_sum.reshape(1), verdict]), reduction="sum").unbind()
    step_unless(left_out, optimizer)
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()
    bad_steps.count(left_out, bad, grad_norm)
    learning_rate = float(schedule.get_last_lr()[0])
    # Not prepared: a prepared scheduler steps num_processes times per optimizer step (PUBLIC_REPORTS O03).
    schedule.step()
    return StepResult(loss_sum / target_tokens, grad_norm, learning_rate, gradient_bytes)


def _gradient_sync(accelerator: Accelerator, model: nn.Module, *, sharding: ShardingConfig, last: bool) -> AbstractContextManager[None]:
    """Around a micro batch: whether its gradients are reduced over ranks, and whether FSDP2 frees the units after it.

    Unless the recipe says it, under DDP gradients are reduced with the last micro batch only, under FSDP with each: putting it off keeps a
    whole fp32 gradient on every rank, which is what sharding is there to avoid (PUBLIC_REPORTS O08).
    """
    if accelerator.is_fsdp2 and not sharding.reshard_after_backward:
        model.set_reshard_after_backward(last)  # type: ignore[operator]  # The optimizer needs the shards.
    sync = sharding.gradient_sync or ("every_micro_batch" if accelerator.distributed_type == DistributedType.FSDP else "every_step")
    return nullcontext() if last or sync == "every_micro_batch" else accelerator.no_sync(model)


@dataclass
class _Progress:
    """Where a run is, beside its data and its weights."""

    step: int
    """Optimizer steps done; one whose update was left out is done too."""
    tokens_seen: int
    """That the weights have learned from: those of a rollback do not count, and the batch may have been another once."""
    rollbacks: int


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
    now = _Progress(resume.step, resume.tokens_seen, resume.rollbacks)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "bad_steps": bad_steps}

    def save(position: dict[str, Any]) -> None:
        watchdog.phase("save", step=now.step)
        _saved(saver.finish, recipe=recipe, run=run)  # What came of the save before is told as its own.
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
        _closed_by_user_error(run.log, saver),
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
            rows, failure = _next(batches, stop)  # [rows, sequence_length + 1]
            data_wait_s += time.perf_counter() - waiting
            agreed = agree(group, failure=failure or run.log.failure, stop=stop.requested(), save_failed=saver.failed())
            if agreed.save_failed:
                _saved(saver.finish, recipe=recipe, run=run)
            if rows is None or agreed.failure is not None or agreed.stop:
                _data_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
                _leave(agreed, now=now, resume=resume, saver=saver, stop=stop, save=functools.partial(save, position))
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
            values = _step_values(result)  # Waits for the device, so that the clock below has the whole step.
            wall_s = time.perf_counter() - window_start
            data_values, data_wait_s = _data_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
            values |= {
                "train/tokens_seen": now.tokens_seen,
                "train/bad_steps": bad_steps.read()[1],
                "train/rollbacks": now.rollbacks,
                **({} if (scaler := accelerator.scaler) is None else {"train/loss_scale": scaler.get_scale()}),
                **_throughput(recipe, accelerator, steps=window_steps, wall_s=wall_s, data_wait_s=data_wait_s),
                **data_values,
                **_memory_values(model, optimizer, run, measurement=measurement, result=result),
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
                _roll_back(
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
                _saved(functools.partial(save, batches.position()), recipe=recipe, run=run)
            # After evaluation and checkpoint: their time is not training time.
            window_start, window_steps, data_wait_s = time.perf_counter(), 0, 0.0
        if asked_to_stop("save") and saver.step != now.step:  # What comes after the loop may not be waited for.
            _saved(functools.partial(save, batches.position()), recipe=recipe, run=run)
        _saved(saver.finish, recipe=recipe, run=run)
        if failure := agree(group, failure=run.log.failure).failure:
            raise UserError(failure)
    return values


def _next(batches: Batches, stop: Stop) -> tuple[torch.Tensor | None, str | None]:
    """The next rows, or why there are none: another rank has to hear it before anybody stops."""
    try:
        with stop.interruptible():  # A dead server may be asked for minutes.
            return next(batches), None
    except StopRequested:
        return None, None
    except UserError as error:
        return None, str(error)


def _saved(act: Callable[[], None], *, recipe: Recipe, run: Run) -> None:
    """Save, or wait for a save. What comes of it is the same on every rank."""
    try:
        act()
    except UserError as error:
        if recipe.checkpoint.on_failure == "stop":
            raise
        run.terminal.say(f"{error}; training goes on")


def _leave(agreed: Agreed, *, now: _Progress, resume: Resume, saver: Saver, stop: Stop, save: Callable[[], None]) -> NoReturn:
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


def _roll_back(
    what: str,
    *,
    first_bad: int,
    recipe: Recipe,
    accelerator: Accelerator,
    run: Run,
    saver: Saver,
    resume: Resume,
    now: _Progress,
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
    _saved(saver.finish, recipe=recipe, run=run)
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


def _step_values(result: StepResult) -> dict[str, float]:
    loss, grad_norm = torch.stack([result.loss.float(), result.grad_norm.float()]).tolist()
    return {"train/loss": loss, "train/grad_norm": grad_norm, "train/learning_rate": result.learning_rate}


def _throughput(recipe: Recipe, accelerator: Accelerator, *, steps: int, wall_s: float, data_wait_s: float) -> dict[str, float]:
    peak = peak_flops(accelerator.device, COMPUTE_DTYPE[accelerator.mixed_precision], recipe.logging.peak_tflops)
    return throughput(
        steps=steps,
        tokens=steps * recipe.train.global_batch_size * recipe.data.sequence_length,
        wall_s=wall_s,
        data_wait_s=data_wait_s,
        flops_per_token=training_flops_per_token(model=recipe.model, sequence_length=recipe.data.sequence_length),
        peak_flops_per_s=None if peak is None else peak * accelerator.num_processes,
    )


def _memory_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, *, measurement: MemoryMeasurement, result: StepResult
) -> dict[str, float]:
    values = {"memory/host_rss_gib": host_rss_bytes() / GIB, "memory/predicted_peak_gib": run.predicted_peak_bytes / GIB}
    if measurement.use is not None:
        values |= {
            "memory/allocated_gib": measurement.use.allocated / GIB,
            "memory/peak_allocated_gib": measurement.use.peak_allocated / GIB,
            "memory/reserved_gib": measurement.use.reserved / GIB,
            "memory/parameters_gib": tensor_bytes(model.parameters()) / GIB,
            "memory/gradients_gib": result.gradient_bytes / GIB,
            "memory/optimizer_gib": optimizer_bytes(optimizer) / GIB,
            "memory/activations_gib": measurement.use.activations / GIB,
        }
    return values


def _data_values(accelerator: Accelerator, batches: Batches, run: Run, *, wait_s: float, noted: set[str]) -> tuple[dict[str, float], float]:
    """(the data/* keys of all ranks; the longest wait of a rank in seconds). Says what the loaders have to say, once. Collective."""
    counts, notes, (fewest, most) = batches.counts(), list(batches.notes().items()), batches.epochs()
    values = [counts["retries"], counts["bad_rows"], len(notes), *(round(value * 1e6) for value in (fewest, most, wait_s))]
    gathered = accelerator.gather(torch.tensor([values], dtype=torch.int64, device=accelerator.device))  # [ranks, 6]
    retries, bad_rows, said, *_ = gathered.sum(dim=0).tolist()
    epochs = {"data/epochs_min": int(gathered[:, 3].min()) / 1e6, "data/epochs_max": int(gathered[:, 4].max()) / 1e6}
    if said:
        for subject, line in gather_object(notes):
            if subject not in noted:  # Another rank, or another worker, may have said it.
                noted.add(subject)
                run.terminal.say(line)
    return {"data/retries": retries, "data/bad_rows": bad_rows, **epochs}, int(gathered[:, 5].max()) / 1e6


@contextmanager
def _closed_by_user_error(log: RunLog, saver: Saver) -> Iterator[None]:
    """In the loop a UserError is every rank's, and the process ends with it."""
    try:
        yield
    except UserError:
        saver.close()  # Closing the log destroys the process groups.
        log.close()
        raise
