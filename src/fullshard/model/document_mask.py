"""Documents that share a row: attention and positions restart at each, so that none of its logits depends on its neighbours.

A document ends with one end-of-text token, `document_end`; the next begins after it, and one begins (or goes on) at the row's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from fullshard.model.losses import IGNORED
from fullshard.recipe.fields import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def masked_document_end(data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The end-of-text token where the recipe asks for data.document_mask, else None: the `document_end` of all below."""
    return int(tokenizer.eos_token_id) if data.document_mask else None


def document_context(inputs: torch.Tensor, *, document_end: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What Llama's forward needs beside `input_ids`; nothing where document_end is None, and a row is one context.

    inputs: [rows, sequence_length]; dtype: in which attention computes.
    position_ids: [rows, sequence_length], 0 at each document's first token.
    attention_mask: [rows, 1, sequence_length, sequence_length], 0 where query (second to last) may see key (last), else -inf; causal.

    Shapes and kernel are the same whatever the packing. Without a mask, transformers finds documents by their position_ids; but a micro
    batch that is one document a row then gets no mask: another kernel, which rounds otherwise, and another graph to compile. And that mask
    is boolean, of which sdpa makes one in the compute type for every layer and keeps it for backward; this one all layers share. Measured
    (4 layers, hidden 256, 2 rows of 1,536, fp32, 2 CPU cores; peak of a step, and time): no mask 289 MiB, 0.68 s; this one 320 MiB, 0.83 s;
    boolean 378 MiB, 0.83 s; transformers' 374 MiB, 0.85 s.
    """
    if document_end is None:
        return {}
    index = torch.arange(inputs.shape[1], device=inputs.device)
    begins = F.pad(inputs[:, :-1] == document_end, (1, 0))  # [rows, sequence_length]; the row's start is 0, whatever is said of it
    first = (begins * index).cummax(dim=1).values  # [rows, sequence_length]: where the token's document begins
    hidden = (index < first[:, :, None]) | (index > index[:, None])  # [rows, sequence_length (query), sequence_length (key)]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=inputs.device).masked_fill_(hidden, -torch.inf)
    return {"attention_mask": mask[:, None], "position_ids": index - first}


def document_targets(inputs: torch.Tensor, targets: torch.Tensor, *, document_end: int | None) -> torch.Tensor:
    """Targets, IGNORED where the input is document_end: what comes next is another document's and cannot be known (PUBLIC_REPORTS D19).

    inputs, targets: [rows, sequence_length]. document_end None: unchanged; a model that sees the whole row learns that it goes on.
    """
    return targets if document_end is None else targets.masked_fill(inputs == document_end, IGNORED)
