"""`measured` counts the memory of a block of code, `memory_of_a_step` that of a training step on a rank of the pool."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from fullshard.measure.memory import MemoryUse, measure_memory, optimizer_bytes, tensor_bytes
from fullshard.model.optim import build_optimizer
from fullshard.recipe.fields import DEFAULT_SHARDING, ModelConfig, ShardingConfig
from support.models import prepared
from support.steps import OPTIM


def measured(block: Callable[[], Any]) -> MemoryUse:
    with measure_memory(torch.device("cpu")) as measurement:
        block()
    assert measurement.use is not None
    return measurement.use


def memory_of_a_step(
    *,
    model: ModelConfig,
    rows: int,
    length: int,
    micro_batches: int = 2,
    document_end: int | None = None,
    sharding: ShardingConfig = DEFAULT_SHARDING,
) -> dict[str, int]:
    """Bytes of this rank, less what was there before the model. "in_last_layer": before its last matrix product, in its last forward."""
    from fullshard.train.step import train_step

    gc.collect()
    base = measured(lambda: None).allocated
    accelerator, built = prepared(model, sharding=sharding)
    optimizer = accelerator.prepare_optimizer(build_optimizer(built.parameters(), optim=OPTIM))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, factor=1.0)
    passed: list[int] = []
    accelerator.unwrap_model(built).model.layers[-1].mlp.down_proj.register_forward_pre_hook(lambda *_: passed.append(time.time_ns()))
    ids = torch.randint(0, model.vocab_size, (micro_batches * rows, length))
    results = []
    for _ in range(5):
        with measure_memory(accelerator.device) as measurement:
            step = train_step(
                accelerator=accelerator,
                model=built,
                optimizer=optimizer,
                schedule=schedule,
                inputs=ids,
                targets=ids,
                micro_batch_size=rows,
                max_grad_norm=1.0,
                document_end=document_end,
                sharding=sharding,
                measurement=measurement,
            )
        use = measurement.use
        assert use is not None
        results.append(
            {
                "allocated": use.allocated - base,
                "peak": use.peak_allocated - base,
                "activations": use.activations,
                "in_last_layer": [size for at, size in use.timeline if at < passed[-1]][-1] - base,
                "parameters": tensor_bytes(built.parameters()),
                "optimizer": optimizer_bytes(optimizer.optimizer),
                "gradients": step.gradient_bytes,
            }
        )
    # The second step rebuilds DDP's buckets. The least of those after it: gloo's thread lets go of the tensors of a collective when it gets
    # to it: on a busy machine 2 % of the steps have one more unit's at the peak.
    return min(results[2:], key=lambda result: result["peak"])
