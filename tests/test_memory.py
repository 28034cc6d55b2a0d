"""Measured memory is exact to the byte; predicted memory is held against it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from fullshard.measure.memory import _cpu_use, count_cpu_memory, measure_memory, tensor_bytes
from fullshard.model.build import llama_config
from fullshard.model.document_mask import document_context
from fullshard.model.losses import next_token_loss_sum
from fullshard.placement.placement import placement_from_yaml
from fullshard.plan.memory import activation_bytes_per_token, predict_memory
from fullshard.plan.shapes import parameter_counts
from fullshard.recipe.fields import ModelConfig, ShardingConfig
from support import ROOT
from support.memory import measured, memory_of_a_step
from support.models import GQA, MHA

CPU = torch.device("cpu")
TIED = ModelConfig(
    vocab_size=300, hidden_size=64, num_hidden_layers=1, head_dim=24, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
)


def test_this_torch_has_the_switch_that_counts() -> None:
    """If it fails after an upgrade, c10's FLAGS_caffe2_report_cpu_memory_usage is gone and CPU memory is no longer measured."""
    assert count_cpu_memory()


def test_a_known_allocation_is_counted_to_the_byte() -> None:
    held: list[torch.Tensor] = []
    before = measured(lambda: None).allocated
    temporary = measured(lambda: torch.empty(100_000_000, dtype=torch.uint8))
    assert (temporary.allocated - before, temporary.peak_allocated - before) == (0, 100_000_000)
    living = measured(lambda: held.append(torch.empty(1_000_003, dtype=torch.uint8)))
    assert (living.allocated - before, living.peak_allocated - before) == (1_000_003, 1_000_003)
    # Born in one measurement, resized as FSDP2 does and freed in others.
    assert measured(lambda: held[0].untyped_storage().resize_(0)).allocated == before
    assert measured(lambda: held[0].untyped_storage().resize_(4096)).allocated - before == 4096
    freed = measured(held.clear)
    assert (freed.allocated - before, freed.peak_allocated - before) == (0, 4096)


def test_frees_by_other_threads_count() -> None:
    """gloo's threads drop the last reference to FSDP2's communication buffers."""
    held = [torch.empty(500_000, dtype=torch.uint8)]
    before = measured(lambda: None).allocated

    def free_elsewhere() -> None:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()

    assert measured(free_elsewhere).allocated == before - 500_000


def test_activations_are_what_the_largest_forward_leaves_alive() -> None:
    kept = []
    with measure_memory(CPU) as measurement:
        for size in (1000, 30_000, 20_000):
            with measurement.forward():
                torch.empty(90_000, dtype=torch.uint8)
                kept.append(torch.empty(size, dtype=torch.uint8))
            torch.empty(200_000, dtype=torch.uint8)
    assert measurement.use is not None
    assert measurement.use.activations == 30_000


def test_nothing_is_measured_unless_enabled() -> None:
    with measure_memory(CPU, enabled=False) as measurement, measurement.forward():
        assert not torch._C._autograd._profiler_enabled()
    assert measurement.use is None


def test_an_exception_ends_the_measurement() -> None:
    with pytest.raises(ZeroDivisionError), measure_memory(CPU) as measurement, measurement.forward():
        raise ZeroDivisionError
    assert not torch._C._autograd._profiler_enabled()


def test_compiled_code_is_counted_and_stays_compiled() -> None:
    layer = torch.compile(nn.Linear(64, 64), backend="aot_eager", fullgraph=True)
    rows = torch.randn(16, 64)
    layer(rows)
    with measure_memory(CPU) as measurement, torch.compiler.set_stance("fail_on_recompile"), measurement.forward():
        output = layer(rows)
    assert measurement.use is not None
    assert measurement.use.activations == output.nbytes


def test_views_and_ties_count_once() -> None:
    whole = torch.empty(10, 10)
    assert tensor_bytes([whole, whole[2:], whole.T, torch.empty(5, dtype=torch.int64)]) == 440


@pytest.mark.parametrize("model", [GQA, MHA, TIED])
def test_parameter_counts_are_those_of_the_model(model: ModelConfig) -> None:
    with torch.device("meta"):
        built = LlamaForCausalLM(llama_config(model))
    assert parameter_counts(model)["total"] == sum(p.numel() for p in built.parameters())
    assert parameter_counts(model)["layer"] == sum(p.numel() for p in built.model.layers[0].parameters())


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize(("model", "rows", "length"), [(GQA, 4, 128), (MHA, 2, 256)])
def test_predicted_activations_are_what_autograd_saves(
    model: ModelConfig, rows: int, length: int, precision: str, document_mask: bool
) -> None:
    """To 1 %: the rotary tables and the loss's per-token scalars are left out. All layers share one document mask.

    A failure: transformers' Llama saves other tensors now.
    """
    built = LlamaForCausalLM(llama_config(model))
    if precision == "bf16":
        built.bfloat16()
    ids = torch.randint(0, model.vocab_size, (rows, length))
    known = {p.untyped_storage()._cdata for p in built.parameters()}
    saved: dict[int, torch.Tensor] = {}
    mask_dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    context = document_context(ids, document_end=0 if document_mask else None, dtype=mask_dtype)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            logits = built(ids, use_cache=False, **context).logits
        if precision == "autocast":
            logits = logits.float()  # as Accelerate returns them
        next_token_loss_sum(logits, ids)
    # The cached casts of the linear weights belong to `gathered`.
    casts = 2 * (parameter_counts(model)["total"] - parameter_counts(model)["embedding"]) if precision == "autocast" else 0
    per_token = activation_bytes_per_token(
        model, compute_bytes=mask_dtype.itemsize, autocast=precision == "autocast", document_mask=document_mask
    )
    predicted = rows * length * (model.num_hidden_layers * per_token["layer"] + per_token["head"])
    predicted += rows * length**2 * mask_dtype.itemsize if document_mask else 0
    assert tensor_bytes([logits, *saved.values()]) - casts == pytest.approx(predicted, rel=0.01)


def test_a_byte_of_the_programs_is_no_marker() -> None:
    """A boolean that is gone may have had the address at which the last marker is."""
    happened = [(1, 1, 1), (7, 1, 9001), (7, -1, 9000), (7, 1, 2)]  # (address, bytes, bytes in all then): marker, boolean, its end, marker.
    events = [
        SimpleNamespace(start_time_ns=time, extra_fields=SimpleNamespace(ptr=ptr, alloc_size=size, total_allocated=total))
        for time, (ptr, size, total) in enumerate(happened)
    ]
    use = _cpu_use(events, [1, 7])
    assert (use.allocated, use.peak_allocated) == (0, 9000)


@pytest.mark.parametrize(
    ("config", "rows", "length", "checkpointing", "document_mask", "tolerance"),
    [
        # Activations decide the peak.
        ("fsdp.yaml", 4, 128, False, False, 0.03),
        ("fsdp.yaml", 4, 128, True, False, 0.05),
        ("fsdp_fp32.yaml", 2, 256, False, False, 0.03),
        ("ddp.yaml", 4, 128, False, False, 0.03),
        # The mask is 3 to 8 % of the peak. Checkpointed rows this long take 6 to 7 % more than predicted with and without it.
        ("fsdp.yaml", 1, 1536, False, True, 0.02),
        ("fsdp.yaml", 1, 1536, True, True, 0.08),
        # Parameters decide the peak: the order in which buffers are freed is not modelled.
        ("fsdp.yaml", 1, 8, False, False, 0.15),
    ],
)
def test_predicted_memory_is_the_memory_of_a_step(
    pool: Any, config: str, rows: int, length: int, checkpointing: bool, document_mask: bool, tolerance: float
) -> None:
    model = MHA if length == 8 else GQA
    sharded = config != "ddp.yaml"
    sharding = ShardingConfig(activation_checkpointing="full" if checkpointing else None)
    predicted = predict_memory(
        model=model,
        placement=placement_from_yaml(ROOT / "accelerate_configs" / config),
        micro_batch_size=rows,
        sequence_length=length,
        gradient_accumulation_steps=2,
        document_mask=document_mask,
        sharding=sharding,
    )
    end = 0 if document_mask else None
    step = {"model": model, "rows": rows, "length": length, "document_end": end, "sharding": sharding}
    for rank in pool.run(memory_of_a_step, config=config, **step):
        assert rank["parameters"] == predicted["parameters"]
        assert rank["gradients"] == predicted["gradients"]
        assert rank["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.001)  # and one step counter per parameter
        held = rank["parameters"] + rank["optimizer"] + (0 if sharded else 4 * parameter_counts(model)["total"])  # DDP's buckets stay
        assert rank["allocated"] == pytest.approx(held, rel=0.01)
        assert rank["peak"] == pytest.approx(predicted["peak"], rel=tolerance)
