"""Does the recipe fit the placement? Checked before a model is built."""

from __future__ import annotations

from fullshard.errors import UserError
from fullshard.placement.placement import Placement
from fullshard.recipe.batch import divisors
from fullshard.recipe.fields import Recipe, mistake


def check_sharding(recipe: Recipe, placement: Placement) -> None:
    """Raises UserError where the placement cannot honour what the recipe's `sharding` section asks for: nothing there is ignored.

    Without torch, so that it is told before anything is started.
    """
    sharding, kind = recipe.sharding, placement.distributed_type
    alone = placement.num_processes == 1

    def refuse(key: str, fix: str) -> UserError:
        return mistake(recipe, f"sharding.{key}", fix)

    if kind != "FSDP" and sharding.reduce_dtype != "float32":
        raise refuse("reduce_dtype", f"{kind} reduces gradients in fp32; write float32 or use an FSDP config")
    gathering = {
        "forward_prefetch": sharding.forward_prefetch is not None,
        "backward_prefetch": sharding.backward_prefetch is not None,
        "reshard_after_forward_size": sharding.reshard_after_forward_size is not None,
        "reshard_after_backward": not sharding.reshard_after_backward,
    }
    for key, asked in gathering.items():
        if asked and kind == "FSDP" and alone:
            raise refuse(key, "one process gathers nothing; remove it, or start more")
        if asked and (kind, placement.fsdp_version) != ("FSDP", 2):
            twin = f"fsdp_{key} of the accelerate YAML is FSDP1's" if key.endswith("_prefetch") else "FSDP1 cannot do it"
            raise refuse(key, f"FSDP2 only; {twin if kind == 'FSDP' else f'{kind} gathers no parameters'}; remove it")
        if asked and placement.auto_wrap_policy == "NO_WRAP" and key != "reshard_after_backward":
            raise refuse(key, "fsdp_auto_wrap_policy NO_WRAP leaves all layers in one unit, which stays whole; remove it")
        if asked and not placement.reshard_after_forward and key in ("backward_prefetch", "reshard_after_forward_size"):
            raise refuse(key, "fsdp_reshard_after_forward: false keeps units whole until backward; remove it or write true there")
    if (size := sharding.reshard_after_forward_size) and size not in (fitting := divisors(placement.dp_shard_size)[1:-1]):
        choices = f"choose from {', '.join(map(str, fitting))}" if fitting else "there is none; remove it"
        fix = f"must divide the ranks of a shard, {placement.dp_shard_size}, and be neither 1 nor all of them: {choices}"
        raise refuse("reshard_after_forward_size", fix)
    if placement.activation_checkpointing and sharding.activation_checkpointing is not None:
        fix = "the accelerate YAML checkpoints by itself (fsdp_activation_checkpointing: true); write false there or null here"
        raise refuse("activation_checkpointing", fix)
    if placement.activation_checkpointing and placement.fsdp_version == 2 and recipe.model.attention_dropout:
        fix = "fsdp_activation_checkpointing of the accelerate YAML would drop others when it computes a layer again; write false there"
        raise mistake(recipe, "model.attention_dropout", f"{fix}, and sharding.activation_checkpointing: full")
    checkpointed = placement.activation_checkpointing or sharding.activation_checkpointing not in (None, "none")
    smaller = placement.auto_wrap_policy == "SIZE_BASED_WRAP" or set(placement.transformer_cls_names_to_wrap) - {"LlamaDecoderLayer"}
    if sharding.forward_prefetch and checkpointed and smaller:
        fix = "units in a checkpointed layer would gather ahead in backward too, when it is computed again; remove it or wrap whole layers"
        raise refuse("forward_prefetch", fix)
    if sharding.gradient_sync is not None and alone:
        raise refuse("gradient_sync", "one process has nothing to reduce; remove it")
    if sharding.gradient_sync == "every_step" and kind == "FSDP":
        if placement.fsdp_version == 1 and placement.mixed_precision != "no":
            fix = f"FSDP1 would add micro batches up in {placement.mixed_precision}; write every_micro_batch or use fsdp_version: 2"
            raise refuse("gradient_sync", fix)
        if sharding.reduce_dtype != "float32":
            fix = f"would add micro batches up in {sharding.reduce_dtype}, the reduce_dtype; write every_micro_batch, or float32 there"
            raise refuse("gradient_sync", fix)
    if recipe.model.tie_word_embeddings and (shared := {"Embedding", "Linear"} & set(placement.transformer_cls_names_to_wrap)):
        fix = f"{shared.pop()} of fsdp_transformer_layer_cls_to_wrap cannot be a unit: embedding and head are one tensor; write false"
        raise mistake(recipe, "model.tie_word_embeddings", fix)
