"""Compute types, and the check that a wrapped model has the precision that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fullshard.model.fsdp1 import flat_units
from fullshard.model.parameters import canonical_name, canonical_parameters
from fullshard.parallel.wrap import fsdp_units
from fullshard.recipe.fields import ShardingConfig

# By Accelerate's `mixed_precision`.
COMPUTE_DTYPE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(accelerator: Accelerator, model: nn.Module, *, sharding: ShardingConfig) -> dict[str, str]:
    """Assert the precision contract on the prepared model and return it: master weights, compute, gradient reduction, loss.

    Raises RuntimeError when the model is not what was promised: that would be a fault of this code or of an upgrade, not of the user.
    """
    contract = {
        "parameters": "float32",
        "compute": str(COMPUTE_DTYPE[accelerator.mixed_precision]).removeprefix("torch."),
        "gradient_reduction": sharding.reduce_dtype,
        "loss": "float32",
    }
    for name, parameter in canonical_parameters(model):
        if parameter.dtype != torch.float32:
            raise RuntimeError(f"{name} is {parameter.dtype}, master weights must be float32")
    for name, policy in precision_policies(model):
        kept = {
            "compute": policy.param_dtype or torch.float32,
            "gradient_reduction": policy.reduce_dtype or policy.param_dtype or torch.float32,
        }
        for key, dtype in kept.items():
            if f"torch.{contract[key]}" != str(dtype):
                raise RuntimeError(f"unit {name or 'root'}: {key} is {dtype}, the contract says {contract[key]}")
    if accelerator.distributed_type == DistributedType.FSDP and next(precision_policies(model), None) is None:
        raise RuntimeError("FSDP was asked for and no module was wrapped")
    # Without FSDP2 there is autocast, of which without FSDP the compute type is; Accelerate keeps the forward that it has wrapped in it.
    if not accelerator.is_fsdp2 and ("_original_forward" in vars(accelerator.unwrap_model(model, keep_torch_compile=False))) != (
        contract["compute"] != "float32"
    ):
        raise RuntimeError(f"the contract says compute in {contract['compute']}, and the forward is not set up for it")
    return contract


def precision_policies(model: nn.Module) -> Iterator[tuple[str, MixedPrecision | MixedPrecisionPolicy]]:
    """(name, policy) of every FSDP unit that owns parameters; a unit of several modules, [final norm, head], once."""
    seen = set()
    for name, module in fsdp_units(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield name, group.mp_policy
    for name, unit, _ in flat_units(model):
        yield canonical_name(f"{name}.").removesuffix("."), unit.mixed_precision
