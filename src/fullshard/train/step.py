"""One training step, and the only optimizer step of the project."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fullshard.measure.memory import MemoryMeasurement, tensor_bytes
from fullshard.model.bad_steps import BadSteps, step_unless
from fullshard.model.document_mask import document_context, document_targets
from fullshard.model.losses import IGNORED, next_token_loss_sum
from fullshard.model.optim import clip_by_global_norm_
from fullshard.parallel.precision import COMPUTE_DTYPE
from fullshard.recipe.fields import DEFAULT_SHARDING, ShardingConfig


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
