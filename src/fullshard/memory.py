"""Memory: bytes that are allocated, and bytes that will be.

Measured. On CUDA the caching allocator's own counters. On CPU "allocated" is tensor bytes counted by c10's CPU allocator, never RSS: from
`count_cpu_memory()` on, the allocator adds every allocation and subtracts every free, by whatever thread and through whatever path
(temporaries inside kernels, the UntypedStorage.resize_ with which FSDP2 drops gathered parameters, DDP's C++ buckets, compiled code).
Around a measured step the profiler, with all operator events filtered out, hands over the running total at each of those events, whose
maximum is the peak. An allocation of 100 MB raises the peak by 100,000,000 bytes exactly, and torch's own FSDPMemTracker and MemTracker
gave the same rise over a step, byte for byte. Not counted: memory that c10 did not allocate (torch.from_numpy, mmap-ed files, gloo's own).

Predicted. `predict_memory` is arithmetic on the recipe's numbers; its docstring has the formulas.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil
import torch
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.distributed.tensor import DTensor

from fullshard.communication import fsdp_units
from fullshard.config import DEFAULT_SHARDING, ModelConfig, ShardingConfig
from fullshard.sharding import Placement

GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device."""

    allocated: int
    """In live tensors when the measurement ended."""
    peak_allocated: int
    """Largest during the measurement."""
    reserved: int
    """Held by the allocator; on CPU, whose allocator keeps nothing back, the same as peak_allocated."""
    activations: int
    """Largest growth over one `forward()` block: what it left alive at its end, units that FSDP2 leaves gathered included."""
    timeline: tuple[tuple[int, int], ...] = ()
    """CPU only: (nanoseconds since the epoch, bytes allocated) after each allocation and each free."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct local storages behind `tensors`: views and tied weights count once, a DTensor counts its local shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in the optimizer's state (local shards)."""
    return tensor_bytes(value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))


def host_rss_bytes() -> int:
    """Resident set size of this process, without its children."""
    return int(psutil.Process().memory_info().rss)


@functools.cache
def count_cpu_memory() -> bool:
    """Let c10's CPU allocator keep its running total from now on; call it before the model exists: what is older is not counted.

    Costs a hash-table entry, about 1 microsecond, per allocation and per free. False if this torch build has no such switch: then nothing
    is measured.
    """
    # Kineto, which carries the profiler's events, otherwise writes two lines to stderr per measurement. Read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        # No Python binding sets it, and without it frees by threads other than the profiled one (gloo's) are lost.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    except (OSError, ValueError):
        return False
    return True


@dataclass
class MemoryMeasurement:
    """What `measure_memory` yields; `use` is set when its block ends, and stays None where nothing was measured."""

    use: MemoryUse | None = None
    _device: torch.device | None = None
    _marks: list[int] = field(default_factory=list)  # CUDA: bytes at each mark
    _markers: list[torch.Tensor] = field(default_factory=list)  # CPU: one byte, kept alive so that its address names one event

    def _mark(self) -> None:
        match self._device:
            case None:
                pass
            case torch.device(type="cuda"):
                self._marks.append(torch.cuda.memory_allocated(self._device))
            case _:
                self._markers.append(torch.empty(1, dtype=torch.uint8))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap one forward pass, loss included: its growth is a candidate for `activations`."""
        self._mark()
        yield
        self._mark()


class measure_memory:  # noqa: N801 - used as a function: with measure_memory(device, enabled=...) as measurement
    """Measure the memory of a block on `device`: a MemoryMeasurement. With enabled=False it does nothing and costs nothing.

    CUDA: counters of the caching allocator (no test reaches this branch: there is no GPU in CI). Resets the peak statistics.
    CPU: see the module's docstring. Ending it takes about 7 microseconds per allocation event, 30 ms for a step of the debug recipe.
    Events come from the calling thread (which runs autograd's CPU backward too); other threads' bytes are in the running total that the
    next event reports. Raises RuntimeError inside another torch profiler.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._measurement = MemoryMeasurement()
        if enabled and (device.type == "cuda" or count_cpu_memory()):
            self._measurement._device = device

    def __enter__(self) -> MemoryMeasurement:
        match self._measurement._device:
            case None:
                pass
            case torch.device(type="cuda") as device:
                torch.cuda.reset_peak_memory_stats(device)
            case _:
                activities = {ProfilerActivity.CPU}
                # Without profile_all_threads: its global callbacks carry no memory events.
                config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
                torch._C._autograd._prepare_profiler(config, activities)
                # A scope that no operator has: memory events alone are recorded, which keeps the overhead at 1 to 2 % of the step.
                enable = torch._C._autograd._enable_profiler  # Its type stub lacks the third argument.
                enable(config, activities, {RecordScope.LITE_INTERPRETER})  # type: ignore[call-arg]
                self._measurement._mark()
        return self._measurement

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        measurement = self._measurement
        match measurement._device:
            case None:
                return
            case torch.device(type="cuda") as device:
                measurement.use = MemoryUse(
                    allocated=torch.cuda.memory_allocated(device),
                    peak_allocated=torch.cuda.max_memory_allocated(device),
                    reserved=torch.cuda.memory_reserved(device),
                    activations=_largest_growth(measurement._marks),
                )
            case _:
                measurement._mark()
                result = torch._C._autograd._disable_profiler()
                measurement.use = _cpu_use(result.experimental_event_tree(), [marker.data_ptr() for marker in measurement._markers])
                measurement._markers.clear()
        measurement._device = None


def _largest_growth(marks: list[int]) -> int:
    return max((after - before for before, after in zip(marks[::2], marks[1::2], strict=False)), default=0)


def _cpu_use(events: list, addresses: list[int]) -> MemoryUse:
    """Totals from allocation events in time order. `addresses`: the one-byte markers', first at the start, last at the end."""
    events = sorted(events, key=lambda event: event.start_time_ns)
    # The last ones there: markers stay alive, and an earlier byte, of a boolean of the program's, may have had the address of one.
    last = {event.extra_fields.ptr: number for number, event in enumerate(events) if event.extra_fields.alloc_size == 1}
    markers = {last[address] for address in addresses}
    marks: list[int] = []
    timeline: list[tuple[int, int]] = []
    for number, event in enumerate(events):
        total = event.extra_fields.total_allocated
        if number in markers:
            # `len(marks)` earlier ones and this one are no tensors of the program's.
            marks.append(total - len(marks) - 1)
        timeline.append((event.start_time_ns, total - len(marks)))
    peak = max(0, *(size for _, size in timeline))
    return MemoryUse(
        allocated=marks[-1],
        peak_allocated=peak,
        reserved=peak,
        activations=_largest_growth(marks[1:-1]),
        timeline=tuple(timeline),
    )


def parameter_counts(model: ModelConfig) -> dict[Literal["embedding", "layer", "tail", "total"], int]:
    """Parameters of the units that FSDP gathers: input embedding, a decoder layer, tail (final norm and untied head); and of the model."""
    hidden, head = model.hidden_size, model.head_dim or model.hidden_size // model.num_attention_heads
    query, key = model.num_attention_heads * head, model.num_key_value_heads * head
    layer = 2 * hidden * (query + key) + 3 * hidden * model.intermediate_size + 2 * hidden
    layer += model.attention_bias * (query + 2 * key + hidden) + model.mlp_bias * (2 * model.intermediate_size + hidden)
    embedding = model.vocab_size * hidden
    tail = hidden + (0 if model.tie_word_embeddings else embedding)
    return {"embedding": embedding, "layer": layer, "tail": tail, "total": embedding + model.num_hidden_layers * layer + tail}


def activation_bytes_per_token(
    model: ModelConfig, *, compute_bytes: int, autocast: bool = False, document_mask: bool = False
) -> dict[Literal["layer", "head", "logits"], int]:
    """Bytes per token that autograd keeps between forward and backward, from transformers 5.24's Llama with sdpa.

    c = compute_bytes, H = hidden_size, I = intermediate_size, A = num_attention_heads, Q = A x head_dim, V = vocab_size,
    K = num_key_value_heads x head_dim. Per layer:
      each of two RMSNorms   4 H + 2 c H + 4   fp32 input, normalised values, output as the linears' input, 1 / rms
      attention              c (2 Q + 2 K) + 4 A   rotated q and k, v, output; fp32 logsumexp
      MLP                    4 c I   gate, silu(gate), up, their product
    Head: a norm, fp32 log-probabilities (4 V) and the logits (c V; also by themselves: nothing but the model's output keeps them).
    autocast (DDP; FSDP2 casts the parameters instead): residual and normalised values stay fp32, each linear keeps its own cast input, and
    Accelerate returns the logits in fp32 (4 V).
    document_mask: under a mask transformers repeats k and v for every query head, so 2 Q for 2 K; the mask itself is no token's.
    Leaves out the rotary cos and sin (once per model 2 c head_dim per position; with document_mask per token) and the loss's per-token
    scalars.
    """
    hidden, head = model.hidden_size, model.head_dim or model.hidden_size // model.num_attention_heads
    query, key = model.num_attention_heads * head, model.num_key_value_heads * head
    key = query if document_mask else key
    c = compute_bytes
    cast = autocast and c < 4
    normalised = 4 * hidden + (4 if cast else c) * hidden + 4  # fp32 input, values before the weight, 1 / rms
    inputs_of_linears = c * hidden * (5 if cast else 2)  # q, k, v and gate, up: one tensor for each group unless cast separately
    layer = 2 * normalised + inputs_of_linears + c * (2 * query + 2 * key) + 4 * model.num_attention_heads + 4 * c * model.intermediate_size
    logits = (4 if cast else c) * model.vocab_size
    return {"layer": layer, "head": normalised + c * hidden + logits + 4 * model.vocab_size, "logits": logits}


def predict_memory(
    *,
    model: ModelConfig,
    placement: Placement,
    micro_batch_size: int,
    sequence_length: int,
    gradient_accumulation_steps: int = 1,
    document_mask: bool = False,
    sharding: ShardingConfig = DEFAULT_SHARDING,
) -> dict[str, int]:
    """Bytes per rank of one training step (eager, AdamW, fp32 masters and reduction, gradients freed by zero_grad).

    P = parameters, s = dp_shard_size (1 without FSDP), c = 2 under mixed precision, else 4, T = micro_batch_size x sequence_length tokens;
    U = parameters of the largest of the units (`communication.fsdp_units`), R of the root's own, K of those that stay gathered.
    parameters 4 P / s; gradients 4 P / s; optimizer 8 P / s.
    gathered: FSDP2 holds the root's, the unit in use and the next one: c (R + 2 U); without reshard after forward c P. Without sharding the
      casts of the linear weights that autocast keeps, and under DDP the reduction buckets, 4 P.
    activations: T x activation_bytes_per_token at the end of the forward; with checkpointing a layer keeps its input (c H; DDP 4 H).
      document_mask adds its mask, c x micro_batch_size x sequence_length^2, which all layers share.
    peak = parameters + optimizer + the largest of
      the loss's backward: activations, logits dropped, + 8 V T (gradients of log-probabilities and logits, fp32) + c K
      a layer's backward: layers' activations (one recomputed) + gathered + one unit's unsharded gradient (c) and its fp32 reduction input
      the last backward: gradients + c (R + 2 U), under DDP the buckets + the same two
    with, from the second micro batch on, the gradients under each, and at the last backward the shard of a unit's that is to be added to
    them, 4 U / s; with replicas, whose shards wait for the end of the backward, all of them.
    Shards are padded to equal rows, which is left out.
    FSDP1: see `_flat_peak`.
    sharding: what the recipe's section changes of that.
      activation_checkpointing (full where the placement says it): `_kept_by_layers`. Its offload is left out.
      forward_prefetch, backward_prefetch: so many units beside the one in use instead of one.
      reshard_after_forward_size r: from forward to backward 1/r of each unit but the tail, in the compute type.
      reshard_after_backward false: all that is gathered is still there at the last backward, from the second micro batch on.
      gradient_sync every_step: the whole gradient, 4 P (2 P in bfloat16), in place of the gradients of earlier micro batches.
    """
    c = 4 if placement.mixed_precision == "no" else 2
    counts = parameter_counts(model)
    tokens = micro_batch_size * sequence_length
    sharded = placement.distributed_type == "FSDP"
    flat = sharded and placement.fsdp_version == 1
    local = -(-counts["total"] // placement.dp_shard_size) if sharded else counts["total"]
    parameters, gradients, optimizer = 4 * local, 4 * local, 8 * local

    whole = c * counts["total"]
    units = {unit.name: sum(math.prod(shape) for shape in unit.shapes) for unit in fsdp_units(model, placement)}
    kept = sum(units[unit.name] for unit in fsdp_units(model, placement) if not unit.resharded)
    root = units.pop("", 0)
    if sharded:
        ahead = max(1, sharding.forward_prefetch or 1, sharding.backward_prefetch or 1)
        at_last = min(whole, c * (root + (1 + ahead) * max(units.values(), default=0)))
        gathered = at_last if placement.reshard_after_forward else whole
    else:
        casts = c * (counts["total"] - (0 if model.tie_word_embeddings else counts["embedding"])) if c < 4 else 0
        at_last = 4 * counts["total"] if placement.distributed_type == "MULTI_GPU" else 0
        gathered = at_last + casts

    per_token = activation_bytes_per_token(model, compute_bytes=c, autocast=not sharded, document_mask=document_mask)
    if flat:  # Accelerate returns FSDP1's logits in fp32.
        per_token |= {"head": per_token["head"] + (4 - c) * model.vocab_size, "logits": 4 * model.vocab_size}
    layers, recomputed = _kept_by_layers(
        model,
        kind=sharding.activation_checkpointing or ("full" if placement.activation_checkpointing else "none"),
        every=sharding.activation_checkpointing_every or 1,
        layer=per_token["layer"],
        layer_input=(c if sharded else 4) * model.hidden_size,
        compute_bytes=c,
    )
    mask = c * tokens * sequence_length if document_mask else 0
    activations = mask + tokens * (layers + per_token["head"])
    several = gradient_accumulation_steps > 1
    late = sharded and several and sharding.gradient_sync == "every_step"
    summed = {"float32": 4, "bfloat16": 2}[sharding.reduce_dtype] * counts["total"] if late else gradients
    earlier = summed if several else 0
    loss = activations + tokens * (8 * model.vocab_size - per_token["logits"])
    if flat:
        gathered, peak = _flat_peak(
            root=root,
            layer=max(units.values(), default=0),
            total=counts["total"],
            tail=counts["tail"] if units else 0,
            compute_bytes=c,
            shard_size=placement.dp_shard_size,
            keep=not placement.reshard_after_forward,
            gradients=gradients,
            earlier=earlier,
            loss=loss,
            layers=mask + tokens * layers,
            last_layer=tokens * (layers // model.num_hidden_layers - recomputed),
        )
    else:
        largest = max([root, *units.values()])
        reducing = (c + 4) * largest if sharded else 0
        added = gradients if placement.dp_replicate_size > 1 else 4 * largest // placement.dp_shard_size
        smaller = 0
        if sharding.reshard_after_forward_size is not None:
            smaller = c * (counts["total"] - kept) // sharding.reshard_after_forward_size
        if not sharding.reshard_after_backward and several:
            at_last = whole
        peak = max(
            earlier + loss + (c * kept if sharded else gathered) + smaller,
            earlier + mask + tokens * (layers + recomputed) + gathered + smaller + reducing,
            summed + at_last + reducing + (added if sharded and several and not late else 0),
        )
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": gathered,
        "activations": activations,
        "peak": parameters + optimizer + peak,
    }


def _kept_by_layers(model: ModelConfig, *, kind: str, every: int, layer: int, layer_input: int, compute_bytes: int) -> tuple[int, int]:
    """Bytes per token (that all layers keep from forward to backward, that are there beyond them where a layer's backward takes most).

    layer: what autograd keeps of a layer; layer_input: its input. A checkpointed layer keeps its input, and has all of `layer` again in
    its backward. every_n: layers 0, n, 2 n, ...; those after the last of them are gone by then. selective: the input and the outputs of
    the seven linear layers and of attention, c (2 Q + 2 K + 2 H + 2 I) + 4 A; again come the rest of `layer`, of which v, the attention's
    output, gate and up are among what was kept.
    """
    c, count, hidden = compute_bytes, model.num_hidden_layers, model.hidden_size
    head = model.head_dim or hidden // model.num_attention_heads
    query, key = model.num_attention_heads * head, model.num_key_value_heads * head
    match kind:
        case "full":
            return count * layer_input, layer
        case "every_n":
            checkpointed = -(-count // every)
            kept = checkpointed * layer_input + (count - checkpointed) * layer
            return kept, max(0, layer - (count - 1) % every * layer)
        case "selective":
            scores = 4 * model.num_attention_heads
            kept = layer_input + c * (2 * query + 2 * key + 2 * hidden + 2 * model.intermediate_size) + scores
            return count * kept, layer - c * (query + key + 2 * model.intermediate_size) - scores
        case _:
            return count * layer, 0


def _flat_peak(
    *,
    root: int,
    layer: int,
    total: int,
    tail: int,
    compute_bytes: int,
    shard_size: int,
    keep: bool,
    gradients: int,
    earlier: int,
    loss: int,
    layers: int,
    last_layer: int,
) -> tuple[int, int]:
    """(bytes that FSDP1 gathers, peak without parameters and optimizer state). root, layer, total, tail: parameters.

    Embedding, norm and head are one unit, the root, which stays gathered from the forward to the end of the backward. Beside it two layers
    are gathered, one in use and one prefetched (BACKWARD_PRE), at the loss the latter; SHARD_GRAD_OP (keep) has all; NO_SHARD in fp32 none,
    in bf16 casts of the same.
    A unit's gradient exists three times when it is reduced: by parameter, as one flat tensor, and that in fp32 (not where it is already).
    loss: activations and what the loss's backward adds; layers: the layers' activations, of which last_layer is gone when the last one's
    gradient is reduced.
    """
    c = compute_bytes
    cast = 4 if c < 4 else 0
    held = 0 if shard_size == 1 and c == 4 else c
    gathered = held * (total if keep and shard_size > 1 else root + 2 * layer)
    return gathered, max(
        earlier + loss + (gathered if keep and shard_size > 1 else held * (root + layer)),
        earlier + layers + gathered + c * tail,
        earlier + layers - last_layer + gathered + c * tail + (2 * c + cast) * layer,
        gradients + (held + 2 * c + cast) * root + (4 * root // shard_size if earlier and shard_size > 1 else 0),
    )
