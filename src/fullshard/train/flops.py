"""The arithmetic behind the throughput keys."""

from __future__ import annotations

import re

import torch

from fullshard.plan.shapes import parameter_counts
from fullshard.recipe.fields import ModelConfig

# Dense TFLOP/s of the tensor cores from NVIDIA's data sheets, (bf16, fp16); the first pattern found in the device's name counts.
PEAK_TFLOPS: tuple[tuple[str, float | None, float], ...] = (
    (r"\bGB200\b", 2500, 2500),
    (r"\bB200\b", 2250, 2250),
    (r"\bG?H200\b", 989, 989),
    (r"\bH100 PCIe\b", 756, 756),
    (r"\bH100 NVL\b", 835, 835),
    (r"\bH[18]00\b", 989, 989),
    (r"\bA[18]00\b", 312, 312),
    (r"\bL40S\b", 362, 362),
    (r"\bL4\b", 121, 121),
    (r"\bA10\b", 125, 125),
    (r"\bV100\b", None, 125),
)


def throughput(
    *,
    steps: int,
    tokens: int,
    wall_s: float,
    data_wait_s: float,
    flops_per_token: float,
    peak_flops_per_s: float | None,
) -> dict[str, float]:
    """The throughput/* keys of a window of `steps` optimizer steps: `tokens` of all devices in `wall_s` s, `data_wait_s` without data.

    `peak_flops_per_s` is that of all devices together; mfu_pct is left out when it is None.
    """
    values = {
        "throughput/tokens_per_second": tokens / wall_s,
        "throughput/step_time_s": wall_s / steps,
        "throughput/data_wait_pct": 100 * data_wait_s / wall_s,
    }
    if peak_flops_per_s is not None:
        values["throughput/mfu_pct"] = 100 * tokens / wall_s * flops_per_token / peak_flops_per_s
    return values


def training_flops_per_token(*, model: ModelConfig, sequence_length: int) -> int:
    """Training FLOPs per token, forward + backward, no recompute: 6 N + 12 L H Q T (PaLM, arXiv:2204.02311, app. B).

    N: parameters that multiply, which is all but an untied input embedding (a lookup); a tied one counts once, as the head. L: layers,
    H: query heads, Q: head_dim, T: sequence_length; attention counts in full, as in the paper, though the causal half is enough.
    """
    counts = parameter_counts(model)
    multiplying = counts["total"] - (0 if model.tie_word_embeddings else counts["embedding"])
    return 6 * multiplying + 12 * model.num_hidden_layers * model.query_width * sequence_length


def peak_flops(device: torch.device, dtype: torch.dtype, peak_tflops: float | None) -> float | None:
    """Peak FLOP/s of one device at `dtype`: `peak_tflops` x 1e12 where given, else by the GPU's name, else None (CPU, unknown, fp32)."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return peak_flops_of_gpu(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_flops_of_gpu(name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s from PEAK_TFLOPS; None for an unknown name or a type without a tensor-core entry."""
    for pattern, bfloat16, float16 in PEAK_TFLOPS:
        if re.search(pattern, name):
            tflops = {torch.bfloat16: bfloat16, torch.float16: float16}.get(dtype)
            return None if tflops is None else tflops * 1e12
    return None
