"""Swapping the accelerate YAML changes memory and speed, never what is computed: each file against one process in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.model.bad_steps import BadSteps
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.optim import build_optimizer, build_schedule
from fullshard.parallel.wrap import units_by_size
from fullshard.placement.placement import placement_from_yaml
from fullshard.recipe.schedule import learning_rate_factor
from support import ROOT
from support.launcher import Launched
from support.launches import FILES, LAUNCHER, OTHERS, STEPS
from support.models import TINY, prepared
from support.steps import OPTIM, global_batch, reference, steps, whole_parameters

Run = Callable[[str], Launched]  # See conftest.py.
# Loss in nats, absolute; norm relative. fp32 differs by the order of sums, the others by their rounding.
TOLERANCE = {"no": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
NORM_STEPS = 10  # After some more this small model is on its own way, and so is its norm.


@pytest.mark.parametrize("name", [name for name in [*FILES, *OTHERS] if name != "single in fp32"])
def test_loss_and_norm_are_those_of_one_process_in_fp32(run: Run, name: str) -> None:
    """Micro batches of 2 rows of 8: accumulation is 4 with one process, 2 with two, 1 with four."""
    alone, other = run("single in fp32"), run(name)
    placement = other.config["accelerate"]
    tolerance = TOLERANCE[placement["mixed_precision"]]
    assert [line["step"] for line in other.metrics] == list(range(1, STEPS + 1))
    assert other.column("train/loss") == pytest.approx(alone.column("train/loss"), abs=tolerance, rel=0)
    assert other.column("eval/loss") == pytest.approx(alone.column("eval/loss"), abs=tolerance, rel=0)
    norms = other.column("train/grad_norm")[:NORM_STEPS]
    assert norms == pytest.approx(alone.column("train/grad_norm")[:NORM_STEPS], rel=tolerance)
    if tolerance > 1e-5:
        assert norms != pytest.approx(alone.column("train/grad_norm")[:NORM_STEPS], rel=1e-6), "computed in fp32"
    assert other.config["derived"]["initial_weights_hash"] == alone.config["derived"]["initial_weights_hash"]
    for key in ("learning_rate", "tokens_seen", "bad_steps"):
        assert other.column(f"train/{key}") == alone.column(f"train/{key}")
    assert other.column("train/tokens_seen") == [step * 8 * 64 for step in range(1, STEPS + 1)]
    scales = other.column("train/loss_scale")
    assert len(scales) == (STEPS if placement["mixed_precision"] == "fp16" else 0)
    assert all(1 < scale <= 2**16 and math.log2(scale).is_integer() for scale in scales)
    if name in FILES and not LAUNCHER.get(name):
        asked = asdict(placement_from_yaml(ROOT / "accelerate_configs" / f"{name}.yaml"))
        assert placement == {key: list(value) if isinstance(value, tuple) else value for key, value in asked.items()}


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("single", "fsdp_compile")])
def test_in_fp32_every_placement_takes_the_same_steps(pool: Any, name: str) -> None:
    """Against plain PyTorch, as in test_train_step.py: without mixed precision nothing but the order of sums is left."""
    config = ROOT / "accelerate_configs" / f"{name}.yaml"
    # Of TINY's layers the MLP is larger than that, attention is not.
    environment = {"ACCELERATE_MIXED_PRECISION": "no", "FSDP_MIN_NUM_PARAMS": "5000"}
    expected = reference(max_grad_norm=0.1)
    processes = placement_from_yaml(config).num_processes
    results = pool.run(steps, world_size=processes, config=config, environment=environment, micro_batch_size=2, max_grad_norm=0.1)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5, rel=0)
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
        for parameter, value in expected["parameters"].items():
            torch.testing.assert_close(result["parameters"][parameter], value, rtol=1e-3, atol=2e-5)


def units() -> set[str]:
    from fullshard.parallel.wrap import fsdp_units

    return {name for name, module in fsdp_units(prepared(TINY)[1])}


@pytest.mark.parametrize(
    ("name", "min_num_params", "in_a_layer"),
    [
        ("fsdp", 0, {""}),
        ("fsdp_fine_grained", 0, {".self_attn", ".mlp"}),
        ("fsdp_no_wrap", 0, set()),
        ("fsdp_size_based", 5000, {".mlp"}),  # Attention and norms are left to the root.
        ("fsdp_size_based", 3600, {".mlp", ""}),  # The layer has attention and norms.
        ("fsdp_size_based", 1800, {".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj", ".self_attn"}),
        ("fsdp_size_based", 9000, {""}),
    ],
)
def test_units_are_those_the_file_asks_for(pool: Any, name: str, min_num_params: int, in_a_layer: set[str]) -> None:
    expected = {f"model.layers.{layer}{unit}" for layer in range(TINY.num_hidden_layers) for unit in in_a_layer}
    for found in pool.run(units, config=f"{name}.yaml", environment={"FSDP_MIN_NUM_PARAMS": str(min_num_params)}):
        assert found == expected | {"", "model.embed_tokens", "model.norm", "lm_head"}


def test_units_by_size_are_those_of_torchs_own_policy() -> None:
    """FSDP1's: a module with so many parameters outside of the units in it, containers excepted, which have none of their own."""
    from functools import partial

    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    class Unit(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    for size in (100, 1800, 3600, 5000, 9000, 10_000):
        layer = build_on_meta(llama_config(TINY)).model.layers[0]
        names = {module: name for name, module in layer.named_modules()}
        ours = {names[unit] for unit in units_by_size(layer, min_num_params=size)[0]}
        wrapped, _ = _recursive_wrap(layer, partial(size_based_auto_wrap_policy, min_num_params=size), Unit, set(), set())
        assert ours == {names[unit.module] for unit in wrapped.modules() if isinstance(unit, Unit)}, size


def overflowing(at: int = 2) -> dict[str, Any]:
    """Three steps; before the optimizer of step `at`, an element of one rank's gradient is infinite."""
    from fullshard.train.step import train_step

    accelerator, model = prepared(TINY)
    raw = build_optimizer(model.parameters(), optim=OPTIM)
    schedule = build_schedule(raw, optim=OPTIM, max_steps=8)
    optimizer, bad_steps = accelerator.prepare_optimizer(raw), BadSteps(spike_factor=None, device=accelerator.device)
    inputs, targets = global_batch()
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    seen: dict[str, list[Any]] = {"scales": [], "norms": [], "rates": [], "weights": []}
    for step in (1, 2, 3):

        def broken(phase: str, step: int = step) -> None:
            if phase == "optimizer" and step == at and accelerator.process_index == 0:
                gradient = next(p.grad for p in model.parameters() if p.grad is not None)
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = torch.inf

        result = train_step(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            inputs=inputs[mine],
            targets=targets[mine],
            micro_batch_size=2,
            max_grad_norm=0.1,
            bad_steps=bad_steps,
            phase=broken,
        )
        seen["scales"].append(accelerator.scaler.get_scale())
        seen["norms"].append(result.grad_norm.item())
        seen["rates"].append(result.learning_rate)
        seen["weights"].append(whole_parameters(model))
    return seen | {"bad": bad_steps.read()}


@pytest.mark.parametrize("config", ["fsdp_fp16.yaml", "fsdp1_full_shard.yaml"])
def test_an_overflow_on_one_rank_is_every_ranks(pool: Any, config: str) -> None:
    """fp16: scales that part would give the ranks different gradients for good. The update is left out, the rate goes on."""
    results = pool.run(overflowing, config=config, environment={"ACCELERATE_MIXED_PRECISION": "fp16"})
    expected = reference(max_grad_norm=0.1, count=1)
    for result in results:
        first, second, third = result["scales"]
        assert (second, third) == (first / 2, first / 2)
        assert result["norms"][1] == float("inf")
        assert result["bad"] == (0, 0)
        assert result["rates"] == pytest.approx(
            [OPTIM.learning_rate * learning_rate_factor(step, optim=OPTIM, max_steps=8) for step in (1, 2, 3)]
        )
        assert result["norms"][0] == pytest.approx(expected["grad_norms"][0], rel=5e-3), "not unscaled before the norm"
        before, after, later = result["weights"]
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
            assert not torch.equal(value, later[name]), name
            assert torch.equal(later[name], results[0]["weights"][2][name]), name
