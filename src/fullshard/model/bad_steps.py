"""Bad steps: updates that would harm the weights are left out, by all ranks alike and without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch

HISTORY = 128  # Good steps whose gradient norms make the median.
LEAST_HISTORY = 20  # Good steps before which no norm is called a spike.


class BadSteps:
    """Judges each step by its loss and gradient norm, and counts. All state is on the device, in tensors that a checkpoint holds.

    The counts and the history are functions of values that all ranks share, so they are the same on every rank.
    """

    def __init__(self, *, spike_factor: float | None, device: torch.device) -> None:
        self._spike_factor = spike_factor
        self._norms = torch.full((HISTORY,), torch.nan, device=device)
        # Good steps, bad ones in a row up to now, bad ones in all, the longest row since `longest` was asked, steps since its end.
        self._good, self._in_a_row, self._total, self._longest, self._since = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(5)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live state by name, for a checkpoint."""
        return {
            "bad_steps.norms": self._norms,
            "bad_steps.good": self._good,
            "bad_steps.in_a_row": self._in_a_row,
            "bad_steps.total": self._total,
            "bad_steps.longest": self._longest,
            "bad_steps.since": self._since,
        }

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor, *, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        """[left_out, bad], each 1.0 or 0.0. The update is left out where this rank's loss or the gradient norm is not finite, or the norm
        is a spike; that is bad, unless fp16 can still help itself.

        loss_scale: of fp16's gradient scaler, by which the gradients were multiplied. While it is above 1 a norm that is not finite says
        that it was too large, as at the start of every such run, and it is halved. A gradient that overflows unscaled is bad.
        """
        left_out = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        bad = left_out.clone() if loss_scale is None else left_out & ~(torch.isfinite(loss) & (loss_scale > 1))
        if self._spike_factor is not None:
            spike = (grad_norm > self._spike_factor * self._norms.nanmedian()) & (self._good >= LEAST_HISTORY)
            left_out |= spike
            bad |= spike & torch.isfinite(grad_norm)
        return torch.stack([left_out, bad]).float()

    def count(self, left_out: torch.Tensor, bad: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Take in a step. left_out, bad: scalars, > 0 where any rank has judged it so."""
        is_left_out, is_bad = left_out > 0, bad > 0
        place = (self._good % HISTORY).reshape(1)
        kept = torch.where(is_left_out, self._norms[place], grad_norm.reshape(1).float())
        self._norms.index_copy_(0, place, kept)
        self._good += ~is_left_out
        self._total += is_bad
        # An overflow among bad steps does not part them: the weights are still those before the first.
        self._in_a_row.add_(is_bad | (self._in_a_row > 0)).mul_(is_left_out)
        is_longest = self._in_a_row > self._longest
        self._since.add_(1).mul_(~is_longest)
        self._longest.copy_(torch.maximum(self._longest, self._in_a_row))

    def read(self) -> tuple[int, int]:
        """(bad steps in a row up to now, bad steps of the run). Waits for the device."""
        in_a_row, total = torch.stack([self._in_a_row, self._total]).tolist()
        return in_a_row, total

    def longest(self) -> tuple[int, int]:
        """(longest row of bad steps since this was asked last, one that goes on included; steps since its end). Waits for the device."""
        longest, since = torch.stack([self._longest, self._since]).tolist()
        self._longest.copy_(self._in_a_row)
        self._since.zero_()
        return longest, since

    def begin_anew(self, *, total: int) -> None:
        """After a rollback: nothing is bad yet, and `total` steps of the run were."""
        for count in (self._in_a_row, self._longest, self._since):
            count.zero_()
        self._total.fill_(total)


def step_unless(left_out: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step() of a fused AdamW, which leaves weights, moments and its step count as they are where left_out > 0: the kernels look at
    `found_inf` on the device.

    Past Accelerate's wrapper, whose step() would let fp16's gradient scaler overrule this; the caller updates the scaler.
    """
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    device = inner.param_groups[0]["params"][0].device  # Offloaded parameters are in host memory.
    inner.grad_scale, inner.found_inf = None, (left_out > 0).float().to(device)
    inner.step()
