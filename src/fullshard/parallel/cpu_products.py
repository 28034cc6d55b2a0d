"""Matrix products and attention in bf16 and fp16 on a CPU that is slow at them.

Torch has fast ones where the CPU has AVX-512 (fp16: AVX512-FP16), or ARM's like; elsewhere it takes a plain loop, 100 times slower than
fp32. There they are computed as the hardware does that has them: operands widened to fp32, summed in fp32, rounded once.

Torch's CPU kernels are replaced in its dispatcher, below autograd, autocast, checkpointing and compiled graphs, which all see the same
operators as before. What is in any other type goes to torch's own kernel.

The widened operands and the sum before it is rounded lie in memory of their own, one buffer per thread that is as large as the largest
product so far has asked for. It is not c10's, and so not in what `measure/memory.py` counts and `plan/memory.py` predicts: it is this
CPU's, not the placement's, and other devices do without it. The process's resident memory, `memory/host_rss_gib`, has it. Only the
gradients of attention pass through c10 in fp32; they are rounded and gone before the layer's backward is at its peak.
"""

from __future__ import annotations

import math
import mmap
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ALIGNMENT = 16  # Elements of 4 bytes: a cache line.

_engaged: tuple[torch.dtype, torch.library.Library] | None = None


class _Buffer(threading.local):
    fp32 = torch.empty(0)


_buffer = _Buffer()


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this type on this CPU by anything but its plain loop."""
    match dtype:
        case torch.bfloat16:
            return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        case torch.float16:
            return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
        case _:
            return True


def widen_products(dtype: torch.dtype) -> None:
    """From now on compute CPU products in `dtype`, and in no other type, by way of fp32; nothing where torch has fast ones. Per process."""
    global _engaged
    if _engaged is not None:
        if _engaged[0] == dtype:
            return
        _engaged[1]._destroy()  # Torch's own kernels are back.
        _engaged, _buffer.fp32 = None, torch.empty(0)
    if has_fast_products(dtype):
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)Warning only once for all operators.*Overriding a previously registered kernel")
        for name, kernel in _kernels(dtype).items():
            # Torch calls this from C++, in code that dynamo has compiled too: it is not to be compiled itself.
            library.impl(name, torch._disable_dynamo(kernel), "CPU", with_keyset=True)
    _engaged = dtype, library


def products_line(dtype: torch.dtype, device: torch.device) -> str:
    """What computes matrix products and attention of a run on `device`."""
    if device.type == "cpu" and _engaged is not None and _engaged[0] == dtype:
        return f"{_SHORT[dtype]} operands widened to fp32, summed there, rounded once: torch has no fast {_SHORT[dtype]} for this CPU"
    return f"torch's, in {_SHORT.get(dtype, 'fp32')}"


def _kernels(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """By operator; the first argument of each is the dispatcher's, for torch's own kernel."""
    products = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "bmm", "addmm", "baddbmm")}
    into = {name: torch.library.get_kernel(f"aten::{name}.out", "CPU") for name in products}
    attention, attention_backward = (
        torch.library.get_kernel(f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}", "CPU") for suffix in ("", "_backward")
    )

    def product(name: str) -> Callable[..., torch.Tensor]:
        def kernel(keyset: Any, *operands: torch.Tensor, **scalars: Any) -> torch.Tensor:
            if (shape := _shape(operands)) is None or any(operand.dtype != dtype for operand in operands):
                return products[name].call_boxed(keyset, *operands, **scalars)
            *widened, total = _widened(operands, shape)
            return into[name].call_boxed(keyset, *widened, **scalars, out=total).to(dtype)

        return kernel

    def product_into(name: str) -> Callable[..., torch.Tensor]:
        def kernel(keyset: Any, *operands: torch.Tensor, out: torch.Tensor, **scalars: Any) -> torch.Tensor:
            shape = _shape(operands)
            if shape is None or out.shape != shape or any(tensor.dtype != dtype for tensor in (*operands, out)):
                return into[name].call_boxed(keyset, *operands, **scalars, out=out)
            *widened, total = _widened(operands, shape)
            return out.copy_(into[name].call_boxed(keyset, *widened, **scalars, out=total))

        return kernel

    def flash(
        keyset: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *settings: Any,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = (query, key, value)
        if any(tensor.dtype != dtype for tensor in tensors):
            return attention.call_boxed(keyset, *tensors, *settings, attn_mask=attn_mask, **options)
        widened, mask = _widened_with_mask(tensors, attn_mask)
        output, logsumexp = attention.call_boxed(keyset, *widened, *settings, attn_mask=mask, **options)
        return output.to(dtype), logsumexp

    def flash_backward(
        keyset: Any,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        *settings: Any,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        tensors = (gradient, query, key, value, output)
        if any(tensor.dtype != dtype for tensor in tensors):
            return attention_backward.call_boxed(keyset, *tensors, *settings, attn_mask=attn_mask, **options)
        widened, mask = _widened_with_mask(tensors, attn_mask)
        gradients = attention_backward.call_boxed(keyset, *widened, *settings, attn_mask=mask, **options)
        return tuple(each.to(dtype) for each in gradients)

    return {
        **{name: product(name) for name in products},
        **{f"{name}.out": product_into(name) for name in into},
        "_scaled_dot_product_flash_attention_for_cpu": flash,
        "_scaled_dot_product_flash_attention_for_cpu_backward": flash_backward,
    }


def _shape(operands: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Of the product of the last two; None where they have none and torch is to say why."""
    left, right = operands[-2:]
    if left.dim() != right.dim() or left.dim() < 2:
        return None
    return (*left.shape[:-1], right.shape[-1])


def _widened_with_mask(tensors: Sequence[torch.Tensor], mask: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """`tensors` and a mask of their type in fp32; another mask as it is."""
    if mask is None or mask.dtype != tensors[0].dtype:
        return _widened(tensors), mask
    *widened, widened_mask = _widened((*tensors, mask))
    return widened, widened_mask


def _widened(tensors: Sequence[torch.Tensor], *shapes: Sequence[int]) -> list[torch.Tensor]:
    """`tensors` in fp32, in the order in memory that they have, and room for tensors of `shapes`. Valid until the next call."""
    # The dimensions from the outermost in memory to the innermost: a transposed operand stays transposed, and is copied in one go.
    orders = [sorted(range(tensor.dim()), key=lambda dim, tensor=tensor: -tensor.stride(dim)) for tensor in tensors]  # type: ignore[misc]
    sizes = [*([tensor.shape[dim] for dim in order] for tensor, order in zip(tensors, orders, strict=True)), *shapes]
    rooms = [-(-math.prod(size) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    if _buffer.fp32.numel() < sum(rooms):
        pages = mmap.mmap(-1, 4 * sum(rooms), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(False):  # It will be written in training too.
            _buffer.fp32 = torch.frombuffer(pages, dtype=torch.float32)
    pieces, start = [], 0
    for size, room in zip(sizes, rooms, strict=True):
        pieces.append(_buffer.fp32[start : start + math.prod(size)].view(size))
        start += room
    for index, (tensor, order) in enumerate(zip(tensors, orders, strict=True)):
        pieces[index] = pieces[index].permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)
    return pieces
