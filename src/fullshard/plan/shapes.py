"""Shapes of the parameters, and the units in which FSDP gathers them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fullshard.placement.placement import Placement
from fullshard.placement.rules import WRAPPABLE
from fullshard.recipe.fields import ModelConfig

GIB = 2**30


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together."""

    name: str
    """Of the module; "" is the root. [norm, head] is model.norm."""
    shapes: tuple[tuple[int, ...], ...]
    resharded: bool
    """Freed after its forward and gathered again for its backward."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of transformers' Llama, in its order; a tied head is not listed."""
    hidden, inner, query, key = model.hidden_size, model.intermediate_size, model.query_width, model.key_width
    linears = {
        **{f"self_attn.{name}_proj": (rows, hidden, model.attention_bias) for name, rows in (("q", query), ("k", key), ("v", key))},
        "self_attn.o_proj": (hidden, query, model.attention_bias),
        **{f"mlp.{name}_proj": (inner, hidden, model.mlp_bias) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner, model.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def fsdp_units(model: ModelConfig, placement: Placement) -> list[Unit]:
    """The units into which a Llama is cut.

    A module of a wrapped class, or under SIZE_BASED_WRAP of enough parameters, is a unit of what no unit inside it has; the root has the
    rest. With FSDP2 the embedding and the tail, [final norm, head] and with tied weights the embedding, are units too. Root and tail stay
    gathered from forward to backward.
    """
    shapes = parameter_shapes(model)
    match placement.auto_wrap_policy:
        case "TRANSFORMER_BASED_WRAP":
            classes = placement.transformer_cls_names_to_wrap or ("LlamaDecoderLayer",)
            wrapped = [name for name in _modules(shapes) if any(re.fullmatch(WRAPPABLE[each], name) for each in classes)]
        case "SIZE_BASED_WRAP":
            wrapped = _units_by_size(shapes, min_num_params=placement.min_num_params)
        case _:
            wrapped = []
    tail: list[str] = []
    if placement.fsdp_version == 2:
        tail = [name for name in ("model.norm", "model.embed_tokens" if model.tie_word_embeddings else "lm_head") if name not in wrapped]
        if not model.tie_word_embeddings:
            wrapped.append("model.embed_tokens")
    kept = {"", *tail[:1]}
    members: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        owners = tail[:1] if module in tail else [unit for unit in wrapped if name.startswith(f"{unit}.")]
        members.setdefault(max(owners, key=len, default=""), []).append(shape)
    return [Unit(name, tuple(own), placement.reshard_after_forward and name not in kept) for name, own in members.items()]


def _modules(names: Iterable[str]) -> list[str]:
    """Modules that have parameters of these names, or have modules that do; the innermost first."""
    found = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    return sorted(found, key=lambda module: -module.count("."))


def _units_by_size(shapes: Mapping[str, tuple[int, ...]], *, min_num_params: int) -> list[str]:
    units, left = [], {name: math.prod(shape) for name, shape in shapes.items()}
    for module in _modules(shapes):
        if re.match(r"model\.layers\.\d+", module):
            own = [name for name in left if name.startswith(f"{module}.")]
            if sum(left[name] for name in own) >= min_num_params:
                units.append(module)
                left |= dict.fromkeys(own, 0)
    return units


@functools.cache  # A run asks at each logged step, for its flops.
def parameter_counts(model: ModelConfig) -> Mapping[Literal["embedding", "layer", "tail", "total"], int]:
    """Parameters of the units that FSDP gathers: input embedding, a decoder layer, tail (final norm and untied head); and of the model."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(model).items()}
    embedding = sizes["model.embed_tokens.weight"]
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    return {
        "embedding": embedding,
        "layer": layer,
        "tail": sizes["model.norm.weight"] + sizes.get("lm_head.weight", 0),
        "total": sum(sizes.values()),
    }
