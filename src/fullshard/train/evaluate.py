"""Held-out loss and sample completions, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from fullshard.model.document_mask import document_context, document_targets
from fullshard.model.losses import IGNORED, next_token_loss_sum
from fullshard.parallel.precision import COMPUTE_DTYPE
from fullshard.parallel.wrap import reshard, root_gathered


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    rows: torch.Tensor,
    micro_batch_size: int,
    document_end: int | None = None,
    break_off: Callable[[], bool] | None = None,
) -> float | None:
    """Mean loss in nats over all target tokens of all ranks' rows; nan when there is none. Collective.

    rows: this rank's, [n, sequence_length + 1]; n may differ between ranks and be 0. Ranks that run out go on with ignored rows, since
    the forward of a sharded model is a collective. So the mean is over the tokens, whatever the batch size and the world size.
    document_end: token id after which attention and positions restart, and nothing is predicted; None: rows are one context. break_off is
    asked before each micro batch; where it says yes, on all ranks alike, the result is None.
    """
    most = int(accelerator.gather(torch.tensor([len(rows)], device=accelerator.device)).max())
    inputs = F.pad(rows[:, :-1], (0, 0, 0, most - len(rows)))  # [most, sequence_length]
    targets = F.pad(rows[:, 1:], (0, 0, 0, most - len(rows)), value=IGNORED)
    targets = document_targets(inputs, targets, document_end=document_end)
    loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    broken_off = False
    model.eval()
    for inputs_part, targets_part in zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True):
        if broken_off := break_off is not None and break_off():
            break
        inputs_part = inputs_part.to(accelerator.device)
        context = document_context(inputs_part, document_end=document_end, dtype=COMPUTE_DTYPE[accelerator.mixed_precision])
        logits = model(input_ids=inputs_part, **context, use_cache=False).logits
        loss_sum += next_token_loss_sum(logits, targets_part.to(accelerator.device))
    model.train()
    reshard(model)
    if broken_off:
        return None
    tokens = (targets != IGNORED).sum().to(loss_sum)
    loss_sum, tokens = accelerator.reduce(torch.stack([loss_sum, tokens.to(accelerator.device)]), reduction="sum").tolist()
    return loss_sum / tokens if tokens else float("nan")


@torch.no_grad()
def complete(
    accelerator: Accelerator, model: nn.Module, *, tokenizer: PreTrainedTokenizerBase, prompts: list[str], tokens: int, seed: int
) -> list[str]:
    """What the model writes after each prompt: `tokens` tokens, sampled at temperature 0.8. Collective, same arguments on every rank.

    The number of forwards is fixed, so ranks that sample different tokens still meet in every all-gather (PUBLIC_REPORTS O18).
    """
    whole = accelerator.unwrap_model(model, keep_torch_compile=False)
    whole.eval()
    completions: list[str] = []
    # Eager: every new length would be compiled anew.
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), root_gathered(model):
        torch.manual_seed(seed)
        for prompt in prompts:
            input_ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(accelerator.device)
            output = whole.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                use_cache=True,
                do_sample=True,
                temperature=0.8,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=tokenizer.eos_token_id,
            )
            completions.append(str(tokenizer.decode(output[0, input_ids.shape[1] :])))
    whole.train()
    reshard(model)
    return completions
