"""The training loop: one `train()`, one `train_step()`, and the only optimizer step of the project."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fullshard.accelerator import COMPUTE_DTYPE, agree, host_group
from fullshard.checkpoint import save_checkpoint
from fullshard.config import Recipe
from fullshard.document_mask import document_context, document_targets
from fullshard.errors import UserError
from fullshard.evaluate import evaluate
from fullshard.hub import LONGEST_WAIT_S
from fullshard.losses import IGNORED, next_token_loss_sum
from fullshard.memory import GIB, MemoryMeasurement, host_rss_bytes, measure_memory, optimizer_bytes, tensor_bytes
from fullshard.metrics import RunLog, peak_flops, throughput, training_flops_per_token
from fullshard.optim import clip_by_global_norm_
from fullshard.run import Run

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
    measurement: MemoryMeasurement | None = None,
) -> StepResult:
    """One optimizer step on this rank's rows of the global batch. Collective.

    inputs, targets: [rows, sequence_length]; the number of micro batches must be the same on every rank; a target may be IGNORED.
    document_end: token id after which attention and positions restart, and nothing is predicted; None: rows are one context.
    The loss and its gradient are means over all target tokens of all ranks and micro batches, not means of means (PUBLIC_REPORTS O01, O02).
    """
    targets = document_targets(inputs, targets, document_end=document_end)
    target_tokens = accelerator.reduce((targets != IGNORED).sum(), reduction="sum")
    # FSDP and DDP average gradients over ranks; the loss below is to be summed.
    scale = accelerator.num_processes / target_tokens.clamp(min=1)
    loss_sum = torch.zeros((), dtype=torch.float32, device=inputs.device)
    micro_batches = list(zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True))
    for index, (micro_inputs, micro_targets) in enumerate(micro_batches):
        with _gradient_sync(accelerator, model, last=index == len(micro_batches) - 1):
            with measurement.forward() if measurement else nullcontext():
                context = document_context(micro_inputs, document_end=document_end, dtype=COMPUTE_DTYPE[accelerator.mixed_precision])
                logits = model(input_ids=micro_inputs, **context, use_cache=False).logits  # [micro_batch_size, sequence_length, vocab_size]
                micro_loss = next_token_loss_sum(logits, micro_targets)
            del logits, context
            accelerator.backward(micro_loss * scale)
        loss_sum += micro_loss.detach()
    gradient_bytes = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None) if measurement else 0
    accelerator.unscale_gradients()  # Does nothing but under fp16.
    grad_norm = clip_by_global_norm_(model.parameters(), max_norm=max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    learning_rate = float(schedule.get_last_lr()[0])
    # Not prepared: a prepared scheduler steps num_processes times per optimizer step (PUBLIC_REPORTS O03).
    schedule.step()
    return StepResult(accelerator.reduce(loss_sum, reduction="sum") / target_tokens, grad_norm, learning_rate, gradient_bytes)


def _gradient_sync(accelerator: Accelerator, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Under DDP gradients are reduced with the last micro batch only. Under FSDP with each: putting it off keeps a whole fp32 gradient on
    every rank, which is what sharding is there to avoid (PUBLIC_REPORTS O08)."""
    return nullcontext() if last or accelerator.is_fsdp2 else accelerator.no_sync(model)


def train(
    *,
    recipe: Recipe,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
    batches: Batches,
    held_out: torch.Tensor,
    run: Run,
    resumed_step: int = 0,
    document_end: int | None = None,
) -> dict[str, float]:
    """Train from step resumed_step, which is done, to max_steps; returns the last logged values. Collective.

    batches yields this rank's rows of each global batch, [rows, sequence_length + 1]; held_out is [n, sequence_length + 1]; document_end as
    in train_step. Where a rank gets no data any more all save the steps done and raise its UserError. The log is closed before one leaves.
    """
    train, device = recipe.train, accelerator.device
    assert train.micro_batch_size is not None  # resolve_batch has filled it in.
    batch_tokens = train.global_batch_size * recipe.data.sequence_length
    device_peak = peak_flops(device, COMPUTE_DTYPE[accelerator.mixed_precision], recipe.logging.peak_tflops)
    values: dict[str, float] = {}
    noted: set[str] = set()
    save = functools.partial(save_checkpoint, recipe=recipe, accelerator=accelerator, model=model, optimizer=optimizer)
    # How long a rank may read before it has rows, or a reason why not: each try a silent server, then the wait for the next.
    longest_read_s = (recipe.data.max_retries + 1) * (recipe.data.timeout_seconds + LONGEST_WAIT_S)
    group = host_group(accelerator, longest_wait_s=longest_read_s)
    model.train()
    window_start, window_steps, data_wait_s = time.perf_counter(), 0, 0.0
    with run.terminal.progress(max_steps=train.max_steps, first_step=resumed_step), _closed_by_user_error(run.log):
        for step in range(resumed_step + 1, train.max_steps + 1):
            saves = recipe.checkpoint.every > 0 and (step == train.max_steps or step % recipe.checkpoint.every == 0)
            logged = saves or step in (1, train.max_steps) or step % recipe.logging.every == 0
            # Of the steps done. A rank that does get its rows is one step further in the data when another's do not come.
            position = batches.position()
            waiting = time.perf_counter()
            rows, failure = _next(batches)  # [rows, sequence_length + 1]
            data_wait_s += time.perf_counter() - waiting
            failure = agree(group, failure=failure)
            if rows is None or failure is not None:
                _data_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
                if step - 1 > resumed_step:
                    failure = f"{failure}; {_outcome(functools.partial(save, step=step - 1, position=position))}"
                raise UserError(f"{failure}")
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
                    measurement=measurement if logged else None,
                )
            run.terminal.advance(step)
            window_steps += 1
            evaluated = recipe.evaluation.max_rows > 0 and (
                step == train.max_steps or (recipe.evaluation.every > 0 and step % recipe.evaluation.every == 0)
            )
            if not logged and not evaluated:
                continue
            loss = result.loss.item()  # Waits for the device, so that the clock below has the whole step.
            wall_s = time.perf_counter() - window_start
            data_values, data_wait_s = _data_values(accelerator, batches, run, wait_s=data_wait_s, noted=noted)
            values = {
                "train/loss": loss,
                "train/grad_norm": result.grad_norm.item(),
                "train/learning_rate": result.learning_rate,
                # Not step x batch: the batch may have been another before the run was resumed.
                "train/tokens_seen": batches.position()["rows"] * recipe.data.sequence_length,
                **throughput(
                    steps=window_steps,
                    tokens=window_steps * batch_tokens,
                    wall_s=wall_s,
                    data_wait_s=data_wait_s,
                    flops_per_token=training_flops_per_token(model=recipe.model, sequence_length=recipe.data.sequence_length),
                    peak_flops_per_s=None if device_peak is None else device_peak * accelerator.num_processes,
                ),
                **data_values,
                "memory/host_rss_gib": host_rss_bytes() / GIB,
                "memory/predicted_peak_gib": run.predicted_peak_bytes / GIB,
            }
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
            if evaluated:
                held_out_loss = evaluate(
                    accelerator, model, rows=held_out, micro_batch_size=train.micro_batch_size, document_end=document_end
                )
                # Above 700 nats exp() overflows a float; such a model is noise anyway.
                values |= {"eval/loss": held_out_loss, "eval/perplexity": math.exp(min(held_out_loss, 700.0))}
            run.log.log(step, values)
            run.terminal.log(step, values)
            if not math.isfinite(values["train/loss"]) or not math.isfinite(values["train/grad_norm"]):
                # Both are the same on every rank, so all stop here.
                fix = "weights are lost; lower optim.learning_rate or raise optim.warmup_steps"
                raise UserError(f"step {step}: train/loss {values['train/loss']}, train/grad_norm {values['train/grad_norm']}: {fix}")
            if saves:
                save(step=step, position=batches.position())
            # After evaluation and checkpoint: their time is not training time.
            window_start, window_steps, data_wait_s = time.perf_counter(), 0, 0.0
    return values


def _next(batches: Batches) -> tuple[torch.Tensor | None, str | None]:
    """The next rows, or why there are none: another rank has to hear it before anybody stops."""
    try:
        return next(batches), None
    except UserError as error:
        return None, str(error)


def _data_values(accelerator: Accelerator, batches: Batches, run: Run, *, wait_s: float, noted: set[str]) -> tuple[dict[str, float], float]:
    """(the data/* keys, summed over ranks; the longest wait of a rank in seconds). Says what the loaders have to say, once. Collective."""
    counts, notes = batches.counts(), list(batches.notes().items())
    own = torch.tensor([[counts["retries"], counts["bad_rows"], len(notes), wait_s * 1e6]], dtype=torch.int64, device=accelerator.device)
    gathered = accelerator.gather(own)  # [ranks, 4]
    retries, bad_rows, said, _ = gathered.sum(dim=0).tolist()
    if said:
        for subject, line in gather_object(notes):
            if subject not in noted:  # Another rank, or another worker, may have said it.
                noted.add(subject)
                run.terminal.say(line)
    return {"data/retries": retries, "data/bad_rows": bad_rows}, int(gathered[:, 3].max()) / 1e6


def _outcome(save: Callable[[], Path]) -> str:
    try:
        return f"saved {save()}, continue with --checkpoint.resume auto"
    except UserError as error:
        return str(error)


@contextmanager
def _closed_by_user_error(log: RunLog) -> Iterator[None]:
    """In the loop a UserError is every rank's, and the process ends with it."""
    try:
        yield
    except UserError:
        log.close()
        raise
