"""A document in a packed row is computed as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.document_mask import document_context, document_targets
from fullshard.model.initialise import materialise
from fullshard.model.losses import IGNORED
from fullshard.model.parameters import canonical_parameters
from support.models import TINY, prepared

END = 0
LENGTH = 24


def packed_rows() -> torch.Tensor:
    """4 rows of LENGTH + 1: documents of several lengths, of END alone, one that fills a row, and a row that ends with END."""
    rows = torch.randint(1, TINY.vocab_size, (4, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    for row, ends in enumerate(([6, 13], [0, 1, 9, 24], [], [3, 4, 23])):
        rows[row, ends] = END
    return rows


def documents(row: torch.Tensor) -> list[torch.Tensor]:
    """A row's documents, each with its END but the last, which the row may cut."""
    stops = [index + 1 for index, token in enumerate(row.tolist()) if token == END]
    return [part for part in torch.tensor_split(row, stops) if len(part)]


@pytest.mark.parametrize("seed", range(20))
def test_a_token_sees_its_own_document_up_to_itself(seed: int) -> None:
    """Against the definition, token by token."""
    inputs = torch.randint(0, 4, (3, 11), generator=torch.Generator().manual_seed(seed))  # every 4th token ends a document
    context = document_context(inputs, document_end=END, dtype=torch.bfloat16)
    assert context["attention_mask"].dtype == torch.bfloat16
    for row, tokens in enumerate(inputs):
        lengths = [len(part) for part in documents(tokens)]
        assert context["position_ids"][row].tolist() == [position for length in lengths for position in range(length)]
        sees = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths))
        assert torch.equal(context["attention_mask"][row, 0], torch.zeros(11, 11, dtype=torch.bfloat16).masked_fill(sees == 0, -torch.inf))


def test_without_document_end_a_row_is_one_context() -> None:
    rows = packed_rows()
    assert document_context(rows, document_end=None, dtype=torch.float32) == {}
    assert torch.equal(document_targets(rows[:, :-1], rows[:, 1:], document_end=None), rows[:, 1:])


def test_targets_are_the_pairs_inside_documents() -> None:
    """D19: a row's last token counts as a target, the first of a document does not, whatever it is."""
    rows = packed_rows()
    targets = document_targets(rows[:, :-1], rows[:, 1:], document_end=END)
    assert [row[row != IGNORED].tolist() for row in targets] == [
        [token for part in documents(row) for token in part[1:].tolist()] for row in rows
    ]


def isolation(*, length: int) -> dict[str, Any]:
    """Logits of a row's second half, after an END, with different first halves."""
    from fullshard.parallel.precision import COMPUTE_DTYPE

    torch._dynamo.utils.counters.clear()
    accelerator, model = prepared(TINY)
    half = length // 2
    rows = torch.randint(1, TINY.vocab_size, (2, length), generator=torch.Generator().manual_seed(accelerator.process_index))
    rows[:, half - 1] = END
    others = {"tokens": rows.clone(), "short": rows.clone(), "borders": rows.clone(), "neighbours": rows.clone(), "joined": rows.clone()}
    others["tokens"][:, : half - 1] = rows[:, : half - 1].flip(1)
    others["short"][:, : half - 1] = END
    others["borders"][:, : half - 1 : 3] = END
    others["neighbours"][1] = 5  # The whole batch's other row, now without a border.
    others["joined"][:, half - 1] = 1  # No border: must change what follows.

    def logits(inputs: torch.Tensor) -> torch.Tensor:
        context = document_context(inputs, document_end=END, dtype=COMPUTE_DTYPE[accelerator.mixed_precision])
        output = model(input_ids=inputs, **context, use_cache=False).logits
        accelerator.backward(output.float().square().mean())
        return output.detach().float()

    expected = logits(rows)
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    with torch.compiler.set_stance("fail_on_recompile"):
        found = {name: logits(inputs) for name, inputs in others.items()}
    return {
        "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0,
        "finite": finite and bool(expected.isfinite().all()),
        "differences": {name: (output - expected)[0, half:].abs().max().item() for name, output in found.items()},
        "first_half": (found["tokens"] - expected)[0, : half - 1].abs().max().item(),
    }


COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
CHECKPOINTED = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}


@pytest.mark.parametrize(
    ("config", "environment", "length"),
    [
        ("fsdp_fp32.yaml", {}, 32),
        ("fsdp_fp32.yaml", {}, 1200),  # Longer than the blocks in which the CPU kernel goes through keys: some are hidden altogether.
        ("fsdp_fp32.yaml", COMPILED, 32),
        ("fsdp_fp32.yaml", CHECKPOINTED, 32),
        ("fsdp_fp32.yaml", COMPILED | CHECKPOINTED, 32),
        ("fsdp_fp32.yaml", COMPILED | {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "false"}, 32),
        ("fsdp.yaml", {}, 32),
        ("ddp.yaml", COMPILED, 32),
    ],
)
def test_a_document_changes_no_logit_of_another(pool: Any, config: str, environment: dict[str, str], length: int) -> None:
    """To the bit, whatever the other holds, and with the graphs compiled for the first rows (D20)."""
    for result in pool.run(isolation, config=config, environment=environment, length=length):
        assert result["compiled"] == ("ACCELERATE_DYNAMO_BACKEND" in environment)
        assert result["finite"]
        assert result["differences"].pop("joined") > 1e-3
        assert result["first_half"] > 1e-3
        assert result["differences"] == dict.fromkeys(("tokens", "short", "borders", "neighbours"), 0.0)


def packed_step(*, micro_batch_size: int) -> dict[str, Any]:
    from fullshard.train.step import train_step

    accelerator, model = prepared(TINY)
    gradients: dict[str, torch.Tensor] = {}
    raw = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(raw, factor=1.0)

    def keep(*_: Any) -> None:
        for name, p in canonical_parameters(model):
            assert p.grad is not None
            gradients[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()

    raw.register_step_pre_hook(keep)
    rows = packed_rows()[accelerator.process_index :: accelerator.num_processes]
    result = train_step(
        accelerator=accelerator,
        model=model,
        optimizer=accelerator.prepare_optimizer(raw),
        schedule=schedule,
        inputs=rows[:, :-1],
        targets=rows[:, 1:],
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
        document_end=END,
    )
    return {"loss": result.loss.item(), "gradients": gradients}


def apart() -> tuple[Any, torch.Tensor]:
    """The model, and the mean loss over all pairs inside documents, each document in a forward of its own: no mask, no position_ids."""
    model = build_on_meta(llama_config(TINY))
    materialise(model, device=torch.device("cpu"), seed=7)
    parts = [part for row in packed_rows() for part in documents(row) if len(part) > 1]
    losses = [
        torch.nn.functional.cross_entropy(model(input_ids=part[None, :-1], use_cache=False).logits[0], part[1:], reduction="sum")
        for part in parts
    ]
    return model, torch.stack(losses).sum() / sum(len(part) - 1 for part in parts)


@pytest.mark.parametrize(
    ("config", "world_size", "micro_batch_size", "environment"),
    [
        ("fsdp_fp32.yaml", 1, 4, {}),
        ("fsdp_fp32.yaml", 2, 1, {}),
        ("fsdp_fp32.yaml", 2, 1, COMPILED),
        ("fsdp_fp32.yaml", 2, 1, CHECKPOINTED),
        ("fsdp_fp32.yaml", 2, 2, COMPILED | CHECKPOINTED),
        ("ddp.yaml", 2, 1, {"ACCELERATE_MIXED_PRECISION": "no"}),
    ],
)
def test_loss_and_gradient_are_those_of_the_documents_apart(
    pool: Any, config: str, world_size: int, micro_batch_size: int, environment: dict[str, str]
) -> None:
    """D19, to 1e-6 of the gradient; 1e-5 of one parameter's, as a key's bias nearly cancels in the softmax. Sums in another order: 1e-7."""
    model, loss = apart()
    loss.backward()
    results = pool.run(packed_step, world_size=world_size, config=config, environment=environment, micro_batch_size=micro_batch_size)
    for result in results:
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-6)
        norms = {name: (p.grad.norm(), (result["gradients"][name] - p.grad).norm()) for name, p in model.named_parameters()}
        assert {name: float(off / norm) for name, (norm, off) in norms.items() if off > 1e-5 * norm} == {}
        whole, off = torch.tensor(list(norms.values())).norm(dim=0).tolist()
        assert off <= 1e-6 * whole


def held_out(*, rows_per_rank: list[int], micro_batch_size: int) -> float:
    from fullshard.train.evaluate import evaluate

    accelerator, model = prepared(TINY)
    first = sum(rows_per_rank[: accelerator.process_index])
    rows = packed_rows()[first : first + rows_per_rank[accelerator.process_index]]
    return evaluate(accelerator, model, rows=rows, micro_batch_size=micro_batch_size, document_end=END)


def test_held_out_loss_is_that_of_the_documents_apart(pool: Any) -> None:
    """Uneven ranks: the rows that fill up are END throughout, documents of one token, and count for nothing."""
    _, loss = apart()
    for rows, micro in (([3, 1], 2), ([4, 0], 3)):
        losses = pool.run(held_out, config="fsdp_fp32.yaml", rows_per_rank=rows, micro_batch_size=micro)
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-6)
