"""Memory per rank by category, predicted; the docstrings have the formulas.

`measure/memory.py` measures the same, and tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fullshard.placement.placement import Placement
from fullshard.plan.shapes import GIB, fsdp_units, parameter_counts
from fullshard.recipe.batch import gradient_accumulation_steps
from fullshard.recipe.fields import DEFAULT_SHARDING, ModelConfig, Recipe, ShardingConfig


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
    hidden, query = model.hidden_size, model.query_width
    key = query if document_mask else model.key_width
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

    P = parameters, s = dp_shard_size (1 without FSDP), c = 2 under mixed precision, else 4, T = micro_batch_size x sequence_length tokens.
    parameters 4 P / s; gradients 4 P / s; optimizer 8 P / s. With offload_params they are in host memory, and not in the peak.
    gathered: what FSDP holds whole at a time, see `_sharded_peak` and `_flat_peak`. Without it the casts of the linear weights that
      autocast keeps, and under DDP the reduction buckets, 4 P.
    activations: T x activation_bytes_per_token at the end of the forward; with checkpointing a layer keeps its input (c H; DDP 4 H).
      document_mask adds its mask, c x micro_batch_size x sequence_length^2, which all layers share.
    peak = parameters + optimizer + the largest of
      the loss's backward: activations, logits dropped, + 8 V T (gradients of log-probabilities and logits, fp32) + gathered
      a layer's backward: layers' activations (one recomputed) + gathered
      the last backward: gradients, and under DDP the buckets; tied, the gradients that embedding and head have of one tensor, 8 V H
    with, from the second micro batch on, the gradients under each. FSDP's are in `_sharded_peak` and `_flat_peak`.
    Shards are padded to equal rows, which is left out; so are the offload of checkpoints, and of an asynchronous save the copy of the
    shards that a CPU has in the same memory.
    sharding: what the recipe's section changes of that.
      activation_checkpointing (full where the placement says it): `_kept_by_layers`.
      gradient_sync every_step: the whole gradient, 4 P, in place of the gradients of earlier micro batches.
      The others are FSDP2's: `_sharded_peak`.
    """
    counts = parameter_counts(model)
    sharded = placement.distributed_type == "FSDP"
    local = -(-counts["total"] // placement.dp_shard_size) if sharded else counts["total"]
    parameters, gradients, optimizer = 4 * local, 4 * local, 8 * local
    several = gradient_accumulation_steps > 1
    late = sharded and several and sharding.gradient_sync == "every_step"
    summed = 4 * counts["total"] if late else 0 if placement.offload_params else gradients
    step = _bytes_of_step(
        model,
        placement=placement,
        sharding=sharding,
        tokens=micro_batch_size * sequence_length,
        mask_row=sequence_length if document_mask else 0,
        gradients=summed,
        earlier=summed if several else 0,
    )
    if not sharded:
        gathered, peak = _replicated_peak(step, model=model, placement=placement)
    elif placement.fsdp_version == 1:
        gathered, peak = _flat_peak(step, model=model, placement=placement)
    else:
        gathered, peak = _sharded_peak(step, model=model, placement=placement, sharding=sharding, late=late)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": gathered,
        "activations": step.activations,
        "peak": peak if placement.offload_params else parameters + optimizer + peak,
    }


@dataclass(frozen=True)
class _Step:
    """Bytes of a training step that do not depend on how the model is cut."""

    compute_bytes: int
    earlier: int
    """Gradients of earlier micro batches."""
    gradients: int
    """At the end, before they are reduced for good."""
    activations: int
    """At the end of the forward."""
    loss: int
    """Activations and what the loss's backward adds."""
    layers: int
    """Activations of the layers, mask included."""
    recomputed: int
    """Activations of a checkpointed layer, computed again in its backward."""
    last_layer: int
    """Activations of the layers that are gone when the last one's gradient is reduced."""
    tied: int
    """Parameters that embedding and head share."""


def _bytes_of_step(
    model: ModelConfig, *, placement: Placement, sharding: ShardingConfig, tokens: int, mask_row: int, gradients: int, earlier: int
) -> _Step:
    """tokens: of a micro batch. mask_row: sequence_length where there is a document mask, else 0. gradients, earlier: as in `_Step`."""
    c = 4 if placement.mixed_precision == "no" else 2
    sharded = placement.distributed_type == "FSDP"
    per_token = activation_bytes_per_token(model, compute_bytes=c, autocast=not sharded, document_mask=mask_row > 0)
    if sharded and placement.fsdp_version == 1:  # Accelerate returns FSDP1's logits in fp32.
        per_token |= {"head": per_token["head"] + (4 - c) * model.vocab_size, "logits": 4 * model.vocab_size}
    layers, recomputed = _kept_by_layers(
        model,
        kind=sharding.activation_checkpointing or ("full" if placement.activation_checkpointing else "none"),
        every=sharding.activation_checkpointing_every or 1,
        layer=per_token["layer"],
        layer_input=(c if sharded else 4) * model.hidden_size,
        compute_bytes=c,
    )
    mask = c * tokens * mask_row
    activations = mask + tokens * (layers + per_token["head"])
    return _Step(
        compute_bytes=c,
        earlier=earlier,
        gradients=gradients,
        activations=activations,
        loss=activations + tokens * (8 * model.vocab_size - per_token["logits"]),
        layers=mask + tokens * layers,
        recomputed=tokens * recomputed,
        last_layer=tokens * (layers // model.num_hidden_layers - recomputed),
        tied=parameter_counts(model)["embedding"] if model.tie_word_embeddings else 0,
    )


def _sharded_peak(step: _Step, *, model: ModelConfig, placement: Placement, sharding: ShardingConfig, late: bool) -> tuple[int, int]:
    """FSDP2: (bytes gathered, peak without parameters and optimizer state).

    c and s as above; U = parameters of the largest unit (`fsdp_units`) but the root, L of the largest one in a layer, R of the root's own,
    K of those that stay gathered, which are R and the tail.
    gathered: the root's, the unit in use and the next one, c (R + 2 U), with prefetch more of U; without reshard after forward c P.
    The largest of
      the loss's backward: loss + c K
      a layer's backward: layers' activations (one recomputed) + gathered, with L for U, + the unit's unsharded gradient, c L, and its
        reduction input, 4 L; or as the tail is reduced the same of K with a layer gathered
      the last backward: gradients + c R + c U + 4 U and gloo's copy of that (on a GPU the next unit's); or of the root alone 4 R, twice
      tied: gathered, the gradients of head and embedding, and their sum: 4 c V H
    each with the gradients of earlier micro batches. At the last backward of several there is the shard that is to be added to them,
    4 U / s; with replicas, whose shards wait for the end of the backward, all of them; with gradient_sync every_step (late) none.
    Held against measurements to 5 %, where the embedding is most of the model and layers are not wrapped to 10 %.
    reshard_after_forward_size r: from forward to backward 1/r of each unit but the tail, in the compute type.
    reshard_after_backward false: from the second micro batch on all that is gathered stays so.
    """
    c, counts, cut = step.compute_bytes, parameter_counts(model), fsdp_units(model, placement)
    units = {unit.name: unit.parameters for unit in cut}
    kept = sum(units[unit.name] for unit in cut if not unit.resharded)
    root, whole = units.pop("", 0), c * counts["total"]
    largest = max(units.values())
    inside = max((size for name, size in units.items() if name.startswith("model.layers.")), default=0)
    several = step.earlier > 0
    ahead = max(1, sharding.forward_prefetch or 1, sharding.backward_prefetch or 1)
    gathered, in_layer = (
        min(whole, c * (root + (1 + ahead) * size)) if placement.reshard_after_forward else whole for size in (largest, inside)
    )
    tail = counts["tail"] + step.tied
    at_loss, at_last = c * kept, c * root
    at_tail = c * (kept + inside) if placement.reshard_after_forward else whole
    if several and not sharding.reshard_after_backward:
        at_loss = at_last = whole
    smaller = c * (counts["total"] - kept) // size if (size := sharding.reshard_after_forward_size) else 0
    added = 0
    if several and not late:
        added = step.gradients if placement.dp_replicate_size > 1 else 4 * max(root, largest) // placement.dp_shard_size
    return gathered, max(
        step.earlier + step.loss + at_loss + smaller,
        step.earlier + step.layers + step.recomputed + in_layer + smaller + (c + 4) * inside,
        step.earlier + step.layers + at_tail + smaller + (c + 4) * tail,
        step.gradients + max(at_last + (c + 8) * largest, 8 * root) + added,
        step.earlier + 4 * c * step.tied,
    )


def _replicated_peak(step: _Step, *, model: ModelConfig, placement: Placement) -> tuple[int, int]:
    """(gathered, peak without parameters and optimizer) of DDP and of a single process."""
    counts, c = parameter_counts(model), step.compute_bytes
    casts = c * (counts["total"] - (0 if model.tie_word_embeddings else counts["embedding"])) if c < 4 else 0
    buckets = 4 * counts["total"] if placement.distributed_type == "MULTI_GPU" else 0
    gathered = buckets + casts
    peak = max(
        step.earlier + max(step.loss, step.layers + step.recomputed) + gathered,
        step.gradients + buckets,
        step.earlier + buckets + 8 * step.tied,
    )
    return gathered, peak


def _kept_by_layers(model: ModelConfig, *, kind: str, every: int, layer: int, layer_input: int, compute_bytes: int) -> tuple[int, int]:
    """Bytes per token (that all layers keep from forward to backward, that are there beyond them where a layer's backward takes most).

    layer: what autograd keeps of a layer; layer_input: its input. A checkpointed layer keeps its input, and has all of `layer` again in
    its backward. every_n: layers 0, n, 2 n, ...; those after the last of them are gone by then. selective: the input and the outputs of
    the seven linear layers and of attention, c (2 Q + 2 K + 2 H + 2 I) + 4 A; again come the rest of `layer`, of which v, the attention's
    output, gate and up are among what was kept.
    """
    c, count, hidden, query, key = compute_bytes, model.num_hidden_layers, model.hidden_size, model.query_width, model.key_width
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


def _flat_peak(step: _Step, *, model: ModelConfig, placement: Placement) -> tuple[int, int]:
    """FSDP1: (bytes gathered, peak without parameters and optimizer state).

    Embedding, norm and head are one unit, the root, which stays gathered from the forward to the end of the backward. Beside it two layers
    are gathered, one in use and one prefetched (BACKWARD_PRE), at the loss the latter; SHARD_GRAD_OP has all; NO_SHARD in fp32 none, in
    bf16 casts of the same.
    A unit's gradient exists three times when it is reduced: by parameter, as one flat tensor, and that in fp32 (not where it is already).
    """
    c, shards = step.compute_bytes, placement.dp_shard_size
    units = {unit.name: unit.parameters for unit in fsdp_units(model, placement)}
    root, layer = units.pop(""), max(units.values(), default=0)
    cast = 4 if c < 4 else 0
    held = 0 if shards == 1 and c == 4 else c
    keep = shards > 1 and not placement.reshard_after_forward
    gathered = held * (parameter_counts(model)["total"] if keep else root + 2 * layer)
    head = c * parameter_counts(model)["tail"] if units else 0
    return gathered, max(
        step.earlier + step.loss + (gathered if keep else held * (root + layer)),
        step.earlier + step.layers + gathered + head,
        step.earlier + step.layers - step.last_layer + gathered + head + (2 * c + cast) * layer,
        step.gradients + (held + 2 * c + cast) * root + (4 * root // shards if step.earlier and shards > 1 else 0),
    )


def expected_memory(recipe: Recipe, placement: Placement) -> dict[str, int]:
    """`predict_memory` of a recipe whose batch is resolved."""
    assert recipe.train.micro_batch_size is not None
    return predict_memory(
        model=recipe.model,
        placement=placement,
        micro_batch_size=recipe.train.micro_batch_size,
        sequence_length=recipe.data.sequence_length,
        gradient_accumulation_steps=gradient_accumulation_steps(recipe.train, world_size=placement.num_processes),
        document_mask=recipe.data.document_mask,
        sharding=recipe.sharding,
    )


def memory_line(memory: Mapping[str, int]) -> str:
    """Of what `predict_memory` gives."""
    kinds = ", ".join(f"{name} {memory[name] / GIB:.3f}" for name in ("parameters", "gradients", "optimizer", "gathered", "activations"))
    return f"{memory['peak'] / GIB:.3f} GiB expected at the peak ({kinds})"
