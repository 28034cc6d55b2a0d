"""bf16 and fp16 products on a CPU that is slow at them are the widened ones, to the bit; nothing else is touched."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from fullshard.measure.memory import measure_memory
from fullshard.model.build import llama_config
from fullshard.model.losses import next_token_loss_sum
from fullshard.parallel import cpu_products
from fullshard.parallel.cpu_products import has_fast_products, products_line, widen_products
from fullshard.parallel.units import checkpoint_layers
from fullshard.recipe.fields import ModelConfig, ShardingConfig
from support import ROOT
from support.launcher import Launched

CPU = torch.device("cpu")
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SMALL = ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """Engaged, whatever this CPU is fast at."""
    monkeypatch.setattr(cpu_products, "has_fast_products", lambda dtype: dtype == torch.float32)
    widen_products(request.param)
    yield request.param
    widen_products(torch.float32)


def operands(dtype: torch.dtype, *shape: int) -> dict[str, torch.Tensor]:
    """The same matrices, or batches of them, in several orders in memory."""
    padded = torch.randn(*shape[:-2], shape[-2] + 3, shape[-1] + 5).to(dtype)
    plain = padded[..., 2:-1, 4:-1].clone(memory_format=torch.contiguous_format)
    return {"contiguous": plain, "transposed": plain.mT.contiguous().mT, "sliced": padded[..., 2:-1, 4:-1]}


@pytest.mark.parametrize("inner", [0, 40, 700])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["mm", "bmm"])
def test_products_are_widened_summed_and_rounded_once(dtype: torch.dtype, batch: tuple[int, ...], inner: int) -> None:
    multiply = torch.bmm if batch else torch.mm
    add = torch.baddbmm if batch else torch.addmm
    for left in operands(dtype, *batch, 24, inner).values():
        for right in operands(dtype, *batch, inner, 56).values():
            expected = (left.float() @ right.float()).to(dtype)
            assert torch.equal(left @ right, expected)
            for out in (left.new_full(expected.shape, 7), left.new_full(expected.mT.shape, 7).mT):
                assert multiply(left, right, out=out) is out
                assert torch.equal(out, expected)
            for bias in (torch.randn(56), torch.randn(24, 1), torch.randn(24, 56).T.contiguous().T):
                for scalars in ({}, {"alpha": 0.5}, {"beta": -2.0, "alpha": 3.0}, {"beta": 0.0}):
                    bias = bias.to(dtype)
                    expected = add(bias.float(), left.float(), right.float(), **scalars).to(dtype)
                    assert torch.equal(add(bias, left, right, **scalars), expected)
                    assert torch.equal(add(bias, left, right, **scalars, out=torch.empty_like(expected)), expected)
    assert torch.allclose(left.double() @ right.double(), (left @ right).double(), atol=0.25, rtol=1e-2), "the reference itself"


def test_an_operand_may_be_the_output(dtype: torch.dtype) -> None:
    left, right = torch.randn(2, 16, 16).to(dtype)
    expected = (left.float() @ right.float()).to(dtype)
    assert torch.equal(torch.mm(left, right, out=left), expected)


def test_empty_products(dtype: torch.dtype) -> None:
    assert torch.mm(torch.empty(0, 4, dtype=dtype), torch.empty(4, 3, dtype=dtype)).shape == (0, 3)
    assert torch.bmm(torch.empty(0, 2, 4, dtype=dtype), torch.empty(0, 4, 3, dtype=dtype)).shape == (0, 2, 3)
    assert (
        torch.addmm(torch.ones(3, dtype=dtype), torch.empty(2, 0, dtype=dtype), torch.empty(0, 3, dtype=dtype)).tolist() == [[1.0] * 3] * 2
    )


def test_other_types_are_torchs_own() -> None:
    """Bit for bit as before, and with torch's own word for what does not go together."""
    torch.manual_seed(0)
    left, right, bias = torch.randn(24, 700), torch.randn(700, 56), torch.randn(56)
    heads = [torch.randn(1, 2, 32, 16) for _ in range(3)]

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        a, b, c = left.to(dtype), right.to(dtype), bias.to(dtype)
        return [a @ b, torch.addmm(c, a, b), torch.bmm(a[None], b[None]), torch.baddbmm(c, a[None], b[None], alpha=2), *ATTENTION(*heads)]

    other_short = torch.float16
    before = [result for dtype in (torch.float32, torch.float64, other_short) for result in results(dtype)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_products, "has_fast_products", lambda dtype: False)
        widen_products(torch.bfloat16)
    try:
        after = [result for dtype in (torch.float32, torch.float64, other_short) for result in results(dtype)]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(left.bfloat16(), right)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(left.bfloat16(), right.bfloat16()[:-1])
        with pytest.raises(RuntimeError, match="must be a matrix"):
            torch.mm(left.bfloat16(), right.bfloat16()[0])
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(left.bfloat16(), right.bfloat16(), out=torch.empty(24, 56))
    finally:
        widen_products(torch.float32)


@pytest.mark.parametrize("masked", ["causal", "documents", "in fp32"])
def test_attention_is_widened_and_rounded_once(dtype: torch.dtype, masked: str) -> None:
    """Forward and backward; queries, keys and values are views of [rows, tokens, heads, head_dim], as a Llama's are."""
    query, key, value, gradient = (torch.randn(2, 70, 4, 24).to(dtype).transpose(1, 2) for _ in range(4))
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    mask = None if masked == "causal" else torch.zeros(2, 1, 70, 70).masked_fill(hidden, -torch.inf)
    widened = {"attn_mask": mask}
    options = {"attn_mask": mask if mask is None or masked == "in fp32" else mask.to(dtype)}
    forward, wide = (
        ATTENTION(*heads, 0.0, mask is None, **own)
        for heads, own in (
            ((query, key, value), options),
            ((query.float(), key.float(), value.float()), widened),
        )
    )
    assert torch.equal(forward[0], wide[0].to(dtype))
    assert forward[0].stride() == wide[0].stride()
    assert torch.equal(forward[1], wide[1])
    tensors = (gradient, query, key, value, forward[0])
    backward = ATTENTION_BACKWARD(*tensors, forward[1], 0.0, mask is None, **options)
    wide = ATTENTION_BACKWARD(*(tensor.float() for tensor in tensors), forward[1], 0.0, mask is None, **widened)
    for one, other in zip(backward, wide, strict=True):
        assert torch.equal(one, other.to(dtype))
        assert one.stride() == other.stride()


def gradients(model: LlamaForCausalLM, ids: torch.Tensor, context: Callable[[], object]) -> list[torch.Tensor]:
    model.zero_grad()
    with context():
        logits = model(ids, use_cache=False).logits
    next_token_loss_sum(logits, ids).backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointed_layers_compute_the_same(dtype: torch.dtype, checkpointing: str, autocast: bool) -> None:
    """What is computed again is what was computed before, whatever goes on in another thread; inference in between leaves it so."""
    model = LlamaForCausalLM(llama_config(SMALL)).to(torch.float32 if autocast else dtype)
    other = copy.deepcopy(model)
    checkpoint_layers(other, sharding=ShardingConfig(activation_checkpointing=checkpointing))
    ids = torch.randint(0, SMALL.vocab_size, (2, 24))
    stop = threading.Event()

    def disturb() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                torch.ones(300, 300, dtype=dtype) @ torch.ones(300, 300, dtype=dtype)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with torch.inference_mode():
            torch.ones(400, 400, dtype=dtype) @ torch.ones(400, 400, dtype=dtype)

        def context() -> torch.autocast:
            return torch.autocast("cpu", dtype, enabled=autocast)

        for one, two in zip(gradients(model, ids, context), gradients(other, ids, context), strict=True):
            assert torch.equal(one, two)
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="INDUCTOR generates C++")
@pytest.mark.parametrize("dtype", [torch.bfloat16], indirect=True)
def test_compiled_code_computes_widened(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; it calls the operators' out forms."""
    widened = []
    inner = cpu_products._widened
    monkeypatch.setattr(cpu_products, "_widened", lambda *arguments: widened.append(len(arguments)) or inner(*arguments))
    rows, weight = torch.randn(48, 32).to(dtype).requires_grad_(), torch.randn(32, 32).to(dtype).requires_grad_()
    expected = torch.autograd.grad((rows @ weight).sum(), (rows, weight))
    widened.clear()
    torch._dynamo.reset()
    gradients = torch.autograd.grad(torch.compile(torch.mm)(rows, weight).sum(), (rows, weight))
    torch._dynamo.reset()
    assert widened == [2] * 3  # With room for the output of each.
    assert all(torch.equal(one, two) for one, two in zip(gradients, expected, strict=True))


def test_dynamo_leaves_the_kernels_alone(dtype: torch.dtype) -> None:
    """They run inside of frames that it looks at, where a graph breaks."""

    @torch._dynamo.disable(recursive=False)
    def not_compiled(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight

    def frames() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        rows, weight = torch.ones(48, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)
        torch.compile(lambda a, b: not_compiled(a, b) + 1, backend="eager")(rows, weight)
        return torch._dynamo.utils.counters["frames"]["total"]

    with_kernels = frames()
    widen_products(torch.float32)
    assert with_kernels == frames() > 0


def test_widened_operands_are_not_c10s_memory(dtype: torch.dtype) -> None:
    """Measured is what a CPU with fast products would take: the output."""
    left, right = torch.ones(200, 300, dtype=dtype), torch.ones(300, 100, dtype=dtype)
    with measure_memory(CPU) as before:
        pass
    with measure_memory(CPU) as measurement:
        product = left @ right
    assert before.use is not None
    assert measurement.use is not None
    assert measurement.use.peak_allocated - before.use.allocated == product.nbytes == 200 * 100 * 2


def python_kernels() -> set[str]:
    names = ("mm", "bmm", "addmm", "baddbmm", "mm.out", "bmm.out", "addmm.out", "baddbmm.out", ATTENTION._qualified_op_name[6:])
    return {name for name in names if "RegisterCPU" not in repr(torch.library.get_kernel(f"aten::{name}", "CPU"))}


def test_nothing_is_replaced_where_torch_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_products(torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    assert [has_fast_products(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [True, True, False]
    widen_products(torch.bfloat16)
    assert python_kernels() == set()
    assert products_line(torch.bfloat16, CPU) == "torch's, in bf16"


def test_a_process_may_compute_in_one_type_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tests' pool does: the last call counts, and twice is once."""
    monkeypatch.setattr(cpu_products, "has_fast_products", lambda dtype: dtype == torch.float32)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.float16):
        widen_products(dtype)
        assert len(python_kernels()) == (0 if dtype == torch.float32 else 9)
        assert ("widened" in products_line(dtype, CPU)) == (dtype != torch.float32)
        assert products_line(dtype, torch.device("cuda")).startswith("torch's, in ")
    widen_products(torch.float32)
    assert python_kernels() == set()


def test_torch_does_not_warn_of_it() -> None:
    program = (
        "import torch; from fullshard.parallel import cpu_products\n"
        "cpu_products.has_fast_products = lambda dtype: False\n"
        "cpu_products.widen_products(torch.bfloat16)\n"
        "assert (torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()).sum() == 8"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "verrid" not in done.stderr


@pytest.mark.parametrize(("name", "short"), [("fsdp", "bf16"), ("fsdp_fp16", "fp16"), ("fsdp_fp32", "fp32")])
def test_the_start_table_says_what_computes(run: Callable[[str], Launched], name: str, short: str) -> None:
    launched = run(name).check()
    (line,) = [line.strip() for line in launched.stdout.splitlines() if line.startswith("  matrix products: ")]
    fast = has_fast_products({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[short])
    assert line.startswith("matrix products: " + (f"torch's, in {short}" if fast else f"{short} operands widened to fp32"))
    assert "verrid" not in launched.stderr
