"""What is minimised."""

from __future__ import annotations

import torch
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that does not count."""


def next_token_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies in nats, in fp32 whatever the logits' type.

    logits: [rows, sequence_length, vocab_size]; targets: [rows, sequence_length], IGNORED where a position does not count.
    A sum, not a mean: the caller divides by the target tokens of the whole global batch, which this rank cannot know.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
