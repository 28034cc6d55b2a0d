"""FSDP1: the same weights, the same steps and the same checkpoints as every other placement, though it shards flat tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.measure.memory import tensor_bytes
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.fsdp1 import FlatPiece, _row_bounds
from fullshard.model.initialise import materialise
from fullshard.model.optim import build_optimizer, build_schedule
from fullshard.model.parameters import canonical_parameters, sharded_fraction, weights_hash, whole_shape
from fullshard.placement.placement import environment_from_yaml, placement_from_environment
from fullshard.plan.memory import predict_memory
from fullshard.plan.shapes import GIB
from fullshard.recipe.fields import ModelConfig, ShardingConfig
from support import ROOT
from support.launcher import launch
from support.memory import memory_of_a_step
from support.models import GQA, MHA, TIED, TINY, prepared
from support.steps import OPTIM, completions, global_batch, held_out_loss, reference, steps

FSDP1 = "fsdp1_full_shard.yaml"
FP32 = {"ACCELERATE_MIXED_PRECISION": "no"}


def initial_state(model: ModelConfig) -> dict[str, Any]:
    accelerator, wrapped = prepared(model)
    plugin = accelerator.state.fsdp_plugin
    shards = 1 if plugin.sharding_strategy.name == "NO_SHARD" else accelerator.num_processes
    state = {
        "hash": weights_hash(wrapped),
        "held": sharded_fraction(wrapped, shards=shards),
        "held_as_more": sharded_fraction(wrapped, shards=shards + 1),
        "shapes": {name: tuple(whole_shape(parameter)) for name, parameter in canonical_parameters(wrapped)},
        "numel": sum(parameter.numel() for parameter in wrapped.parameters()),
        "bytes": tensor_bytes(wrapped.parameters()),
        "buffers": [buffer.clone() for _, buffer in wrapped.named_buffers()],
    }
    for parameter in wrapped.parameters():  # The same elements, in twice the memory.
        parameter.data = torch.cat([parameter.data, parameter.data])[: len(parameter)]
    return state | {"held_in_more_memory": sharded_fraction(wrapped, shards=shards)}


@pytest.mark.parametrize("model", [TINY, TIED])
@pytest.mark.parametrize(("strategy", "world_size"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 2)])
def test_initial_weights_are_the_same_bits_and_each_rank_holds_its_shard(
    pool: Any, strategy: str, world_size: int, model: ModelConfig
) -> None:
    whole = build_on_meta(llama_config(model))
    materialise(whole, device=torch.device("cpu"), seed=7)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    total = sum(parameter.numel() for parameter in whole.parameters())
    states = pool.run(initial_state, world_size=world_size, config=FSDP1, environment={"FSDP_SHARDING_STRATEGY": strategy}, model=model)
    for state in states:
        assert state["hash"] == weights_hash(whole)
        assert state["shapes"] == shapes
        assert state["held"] == (len(shapes), len(shapes))
        assert state["held_as_more"] == (0, len(shapes))
        for buffer, expected in zip(state["buffers"], whole.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=0, atol=0)
        if strategy == "NO_SHARD":
            assert state["numel"] == total
        else:
            assert state["held_in_more_memory"] == (0, len(shapes))
            # Units are padded: each parameter to 16 bytes, each shard to equal length.
            assert state["bytes"] <= 4 * total / world_size + 16 * len(shapes)
    if strategy != "NO_SHARD":
        assert sum(state["numel"] for state in states) == total


@pytest.mark.parametrize(
    ("strategy", "world_size", "micro_batch_size"),
    [("FULL_SHARD", 2, 1), ("SHARD_GRAD_OP", 4, 2), ("NO_SHARD", 2, 2), ("FULL_SHARD", 1, 8)],
)
def test_steps_equal_plain_pytorch(pool: Any, strategy: str, world_size: int, micro_batch_size: int) -> None:
    """Loss and norm to fp32 rounding, clipped at a global norm of which no rank sees more than its pieces."""
    environment = FP32 | {"FSDP_SHARDING_STRATEGY": strategy}
    expected = reference(max_grad_norm=0.1)
    results = pool.run(
        steps, world_size=world_size, config=FSDP1, environment=environment, micro_batch_size=micro_batch_size, max_grad_norm=0.1
    )
    for result in results:
        assert result["owns_all"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-6)
        for name, parameter in expected["parameters"].items():
            torch.testing.assert_close(result["parameters"][name], parameter, rtol=1e-3, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "environment",
    [
        {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"},
        {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
        {"FSDP_FORWARD_PREFETCH": "true", "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"},
        {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"},
    ],
)
def test_other_settings_of_the_yaml_change_nothing(pool: Any, environment: dict[str, str]) -> None:
    expected = reference()
    for result in pool.run(steps, config=FSDP1, environment=FP32 | environment, micro_batch_size=2):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)


def decaying() -> tuple[set[str], set[str]]:
    _, model = prepared(TINY)
    names = {parameter: name for name, parameter in canonical_parameters(model)}
    decay, rest = build_optimizer(model.parameters(), optim=OPTIM).param_groups
    return {names[p] for p in decay["params"]}, {names[p] for p in rest["params"]}


def test_decay_is_on_matrices_only(pool: Any) -> None:
    """O09: every piece has one dimension, whatever it is a piece of."""
    shapes = {name: p.ndim for name, p in build_on_meta(llama_config(TINY)).named_parameters()}
    for decay, rest in pool.run(decaying, config=FSDP1):
        assert decay == {name for name, ndim in shapes.items() if ndim == 2}
        assert rest == {name for name, ndim in shapes.items() if ndim == 1}


def contract() -> dict[str, Any]:
    from fullshard.parallel.precision import check_precision, precision_policies

    accelerator, model = prepared(TINY)
    policies = {name: (str(p.param_dtype), str(p.reduce_dtype), str(p.buffer_dtype)) for name, p in precision_policies(model)}
    used = {str(unit._handle._reduce_dtype) for unit in model.modules() if getattr(unit, "_handle", None)}
    return {"contract": check_precision(accelerator, model, sharding=ShardingConfig()), "policies": policies, "reduced": used}


def test_every_unit_reduces_gradients_in_fp32(pool: Any) -> None:
    """Accelerate's own policy for bf16 would reduce in bf16 and round the rotary frequencies."""
    for result in pool.run(contract, config=FSDP1):
        assert set(result["policies"]) == {"", *(f"model.layers.{i}" for i in range(TINY.num_hidden_layers))}
        assert set(result["policies"].values()) == {("torch.bfloat16", "torch.float32", "None")}
        assert result["reduced"] == {"torch.float32"}
        assert result["contract"] == {"parameters": "float32", "compute": "bfloat16", "gradient_reduction": "float32", "loss": "float32"}


def test_bf16_is_close_to_fp32(pool: Any) -> None:
    expected = reference()
    for result in pool.run(steps, config=FSDP1, micro_batch_size=2):
        assert result["losses"] == pytest.approx(expected["losses"], abs=2e-2)
        assert result["losses"] != pytest.approx(expected["losses"], abs=1e-7), "computed in fp32: bf16 was not engaged"
        assert all(p.dtype == torch.float32 for p in result["parameters"].values())


def test_rows_are_dealt_as_dtensor_deals_them() -> None:
    """5 rows of 3 over 4 ranks: 2, 2, 1, 0."""
    piece = FlatPiece(torch.Size((5, 3)), ((0, 0),) * 4, 0, None)  # type: ignore[arg-type]
    assert _row_bounds(piece) == [(0, 6), (6, 12), (12, 15), (15, 15)]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_held_out_loss_and_completions(pool: Any, strategy: str) -> None:
    """O18: generate() calls the inner model, whose embedding and head only the wrapper's forward gathers."""
    model = replace(TIED, vocab_size=4096)
    (alone,) = pool.run(completions, world_size=1, config="fsdp_fp32.yaml", model=model)
    (loss,) = pool.run(held_out_loss, world_size=1, config="fsdp_fp32.yaml", rows_per_rank=[7], micro_batch_size=7)
    environment = FP32 | {"FSDP_SHARDING_STRATEGY": strategy}
    assert pool.run(completions, config=FSDP1, environment=environment, model=model) == [alone, alone]
    losses = pool.run(held_out_loss, config=FSDP1, environment=environment, rows_per_rank=[4, 3], micro_batch_size=2)
    assert losses == pytest.approx([loss] * 2, rel=1e-6)


def left_after_evaluation() -> dict[str, Any]:
    from fullshard.train.evaluate import evaluate

    accelerator, model = prepared(TINY)
    before = tensor_bytes(model.parameters())
    ids, _ = global_batch()
    evaluate(accelerator, model, rows=ids[:2], micro_batch_size=2)
    gathered = [
        unit._handle.flat_param._full_param_padded.untyped_storage().nbytes() for unit in model.modules() if getattr(unit, "_handle", None)
    ]
    return {"bytes": tensor_bytes(model.parameters()) - before, "gathered": sum(gathered), "hash": weights_hash(model)}


def test_evaluation_leaves_nothing_gathered(pool: Any) -> None:
    """A forward without backward leaves the root unit whole, and under SHARD_GRAD_OP every unit."""
    (expected,) = pool.run(left_after_evaluation_hash, world_size=1, config="fsdp_fp32.yaml")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for state in pool.run(left_after_evaluation, config=FSDP1, environment={"FSDP_SHARDING_STRATEGY": strategy}):
            assert state == {"bytes": 0, "gathered": 0, "hash": expected}


def left_after_evaluation_hash() -> str:
    return weights_hash(prepared(TINY)[1])


@pytest.mark.parametrize(
    ("strategy", "precision", "model", "rows", "length", "tolerance"),
    [
        ("FULL_SHARD", "bf16", GQA, 4, 128, 0.03),
        ("FULL_SHARD", "no", GQA, 4, 128, 0.05),
        ("SHARD_GRAD_OP", "bf16", GQA, 4, 128, 0.03),
        ("NO_SHARD", "bf16", GQA, 4, 128, 0.03),
        # The root unit's gradient decides the peak.
        ("FULL_SHARD", "bf16", MHA, 1, 8, 0.01),
        ("SHARD_GRAD_OP", "no", MHA, 1, 8, 0.01),
        ("NO_SHARD", "no", MHA, 1, 8, 0.05),
    ],
)
def test_predicted_memory_is_the_memory_of_a_step(
    pool: Any, strategy: str, precision: str, model: ModelConfig, rows: int, length: int, tolerance: float
) -> None:
    environment = {"FSDP_SHARDING_STRATEGY": strategy, "ACCELERATE_MIXED_PRECISION": precision}
    told = environment_from_yaml(ROOT / "accelerate_configs" / FSDP1) | environment
    predicted = predict_memory(
        model=model,
        placement=placement_from_environment(told),
        micro_batch_size=rows,
        sequence_length=length,
        gradient_accumulation_steps=2,
    )
    for rank in pool.run(memory_of_a_step, config=FSDP1, environment=environment, model=model, rows=rows, length=length):
        for category in ("parameters", "gradients", "optimizer"):
            assert rank[category] == pytest.approx(predicted[category], rel=0.001)
        assert rank["peak"] == pytest.approx(predicted["peak"], rel=tolerance)


def run_steps(*, first: int, last: int, folder: str = "", load: bool = False, save: bool = False) -> dict[str, Any]:
    """Steps first to last of 4, from `folder` if load, into it if save; all values in whole tensors."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from fullshard.checkpoint.tensors import restore_tensors, training_tensors
    from fullshard.train.step import train_step

    accelerator, model = prepared(TINY, seed=1 if load else 7)
    optimizer = build_optimizer(model.parameters(), optim=OPTIM)
    schedule = build_schedule(optimizer, optim=OPTIM, max_steps=8)
    optimizer = accelerator.prepare_optimizer(optimizer)
    if load:
        for _, parameter in canonical_parameters(model):
            moments = {field: torch.zeros_like(parameter) for field in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] |= {"step": torch.zeros(()), **moments}
        tensors = training_tensors(model, optimizer)
        dcp.load(tensors, checkpoint_id=folder, no_dist=accelerator.num_processes == 1)
        restore_tensors(model, optimizer, tensors)
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": first - 2, "_step_count": first})
        schedule.step()
    inputs, targets = global_batch()
    losses = []
    for _ in range(first, last + 1):
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        result = train_step(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            inputs=inputs[mine],
            targets=targets[mine],
            micro_batch_size=8,
            max_grad_norm=1.0,
        )
        losses.append(result.loss.item())
    tensors = training_tensors(model, optimizer)
    if save:
        dcp.save(tensors, checkpoint_id=folder, no_dist=accelerator.num_processes == 1)
    dist.barrier()
    local = {name: (t.to_local() if isinstance(t, DTensor) else t).numel() for name, t in tensors.items()}
    whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}
    return {"losses": losses, "whole": whole, "local": local, "empty": sum(p.numel() == 0 for p in model.parameters())}


def step_back() -> list[tuple[float, float]]:
    """(loss, norm) of the second step, twice: before and after going back to the state between the steps."""
    from fullshard.checkpoint.tensors import restore_tensors, training_tensors
    from fullshard.train.evaluate import evaluate
    from fullshard.train.step import train_step

    accelerator, model = prepared(TINY)
    optimizer = build_optimizer(model.parameters(), optim=OPTIM)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    inputs, targets = global_batch()

    def step() -> tuple[float, float]:
        result = train_step(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            inputs=inputs[:4],
            targets=targets[:4],
            micro_batch_size=2,
            max_grad_norm=1.0,
        )
        return result.loss.item(), result.grad_norm.item()

    step()
    evaluate(accelerator, model, rows=inputs[:2], micro_batch_size=2)
    between = training_tensors(model, optimizer)
    first = step()
    restore_tensors(model, optimizer, between)
    return [first, step()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_run_goes_back_to_an_earlier_state(pool: Any, strategy: str) -> None:
    """In the middle of training, when FSDP1 has had its parameters gathered and cut again."""
    for first, second in pool.run(step_back, config=FSDP1, environment={"FSDP_SHARDING_STRATEGY": strategy}):
        assert first == second


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape, name
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.ndim else tensor, other[name].view(torch.uint8) if tensor.ndim else other[name]
        ), name


PLACEMENTS = {
    "FSDP1 2": {"config": FSDP1, "world_size": 2},
    "FSDP1 3": {"config": FSDP1, "world_size": 3},
    "FSDP1 1": {"config": FSDP1, "world_size": 1},
    "FSDP1 NO_SHARD 2": {"config": FSDP1, "world_size": 2, "environment": FP32 | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}},
    "FSDP2 2": {"config": "fsdp_fp32.yaml", "world_size": 2},
    "DDP 2": {"config": "ddp.yaml", "world_size": 2},
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("FSDP1 2", ["FSDP1 2", "FSDP1 3", "FSDP1 1", "FSDP1 NO_SHARD 2", "FSDP2 2", "DDP 2"]),
        ("FSDP2 2", ["FSDP1 2"]),
        ("DDP 2", ["FSDP1 2"]),
    ],
)
def test_tensors_are_the_same_bits_in_every_placement(pool: Any, tmp_path: Path, saved: str, loaded: list[str]) -> None:
    """Weights, both moments and the step: what one placement saves another loads exactly, and goes on from there."""

    def run(placement: str, **arguments: Any) -> list[dict[str, Any]]:
        return pool.run(run_steps, folder=str(tmp_path), **({"environment": FP32} | PLACEMENTS[placement]), **arguments)

    for state in (first := run(saved, first=1, last=2, save=True)):
        same_bits(first[0]["whole"], state["whole"])
    uninterrupted = run(saved, first=1, last=4)[0]
    names = {name for name, _ in build_on_meta(llama_config(TINY)).named_parameters()}
    fields = ("exp_avg", "exp_avg_sq", "step")
    assert first[0]["whole"].keys() == {f"model.{n}" for n in names} | {f"optimizer.{n}.{field}" for n in names for field in fields}
    if saved == "FSDP1 2":
        assert all(state["empty"] for state in first), "no rank is without a piece of some parameter: the test shows less than it says"
        total = {name: t.numel() for name, t in first[0]["whole"].items() if t.ndim}
        assert {name: sum(state["local"][name] for state in first) for name in total} == total
    for placement in loaded:
        for state in run(placement, first=3, last=2, load=True):
            same_bits(first[0]["whole"], state["whole"])
        resumed = run(placement, first=3, last=4, load=True)
        assert resumed[0]["losses"] == pytest.approx(uninterrupted["losses"][2:], rel=1e-6)
        if placement == saved:
            assert resumed[0]["losses"] == uninterrupted["losses"][2:]
            same_bits(uninterrupted["whole"], resumed[0]["whole"])


def test_a_launch(tmp_path: Path) -> None:
    """The shipped file from the first step to the completions."""
    launched = launch(tmp_path / "run", placement=FSDP1, train__max_steps=2, logging__sample_prompts='["import os"]').check()
    config = launched.config
    assert (config["accelerate"]["fsdp_version"], config["accelerate"]["sharding_strategy"]) == (1, "FULL_SHARD")
    assert config["derived"]["fsdp_units"] == 3  # The root and two layers.
    (parameters,) = set(launched.column("memory/parameters_gib"))
    assert parameters * GIB == pytest.approx(4 * config["derived"]["parameters"] / 2, rel=0.001)
    assert launched.column("train/loss")[1] < launched.column("train/loss")[0]
    assert "> import os" in launched.stdout
