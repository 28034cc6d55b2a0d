"""`steps` takes optimizer steps on a rank of the pool, and `reference` takes the same ones in plain PyTorch.

`held_out_loss` evaluates a model there, `completions` completes prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.initialise import materialise
from fullshard.model.losses import IGNORED
from fullshard.model.optim import build_optimizer, build_schedule
from fullshard.model.parameters import canonical_parameters, whole_tensor
from fullshard.recipe.fields import OptimConfig
from fullshard.recipe.schedule import learning_rate_factor
from support.models import TINY, prepared

OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)


def global_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """8 rows of 32 with 31, 7, 19, 3, 32, 1, 0, 11 target tokens: means of means would be far off (O01)."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 131, (8, 33), generator=generator)
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
    for row, kept in enumerate((31, 7, 19, 3, 32, 1, 0, 11)):
        targets[row, kept:] = IGNORED
    return inputs, targets


def whole_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(p).detach().clone() for name, p in canonical_parameters(model)}


def steps(*, micro_batch_size: int, max_grad_norm: float | None = None, count: int = 3, optim: OptimConfig = OPTIM) -> dict[str, Any]:
    from fullshard.train.step import train_step

    accelerator, model = prepared(TINY)
    raw = build_optimizer(model.parameters(), optim=optim)
    schedule = build_schedule(raw, optim=optim, max_steps=8)
    optimizer = accelerator.prepare_optimizer(raw)
    inputs, targets = global_batch()
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    results = [
        train_step(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            inputs=inputs[mine],
            targets=targets[mine],
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
        )
        for _ in range(count)
    ]
    owned = {id(p) for group in raw.param_groups for p in group["params"]}
    return {
        "losses": [r.loss.item() for r in results],
        "grad_norms": [r.grad_norm.item() for r in results],
        "learning_rates": [r.learning_rate for r in results],
        "parameters": whole_parameters(model),
        "owned": len(owned),
        "owns_all": owned == {id(p) for p in model.parameters()},
        "state_numel": [
            sum(v.to_local().numel() if isinstance(v, DTensor) else v.numel() for v in s.values() if v.ndim) for s in raw.state.values()
        ],
    }


def reference(max_grad_norm: float | None = None, count: int = 3, optim: OptimConfig = OPTIM) -> dict[str, Any]:
    """The same steps in plain PyTorch: one process, one batch, torch's own AdamW, no Accelerate."""
    model = build_on_meta(llama_config(TINY))
    materialise(model, device=torch.device("cpu"), seed=7)
    inputs, targets = global_batch()
    decay, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    losses, norms = [], []
    for step in range(1, count + 1):
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")).item())
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate * learning_rate_factor(step, optim=optim, max_steps=8)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "grad_norms": norms, "parameters": dict(model.named_parameters())}


def held_out_loss(rows_per_rank: list[int], micro_batch_size: int) -> float | None:
    from fullshard.train.evaluate import evaluate

    accelerator, model = prepared(TINY)
    rows = torch.randint(0, 131, (sum(rows_per_rank), 17), generator=torch.Generator().manual_seed(0))
    first = sum(rows_per_rank[: accelerator.process_index])
    return evaluate(
        accelerator, model, rows=rows[first : first + rows_per_rank[accelerator.process_index]], micro_batch_size=micro_batch_size
    )


def completions(model: Any) -> list[str]:
    from fullshard.data.tokenizer import load_tokenizer
    from fullshard.train.evaluate import complete

    accelerator, prepared_model = prepared(model)
    return complete(accelerator, prepared_model, tokenizer=load_tokenizer("bundled"), prompts=["import os", "x"], tokens=5, seed=0)
