"""Recipe -> Llama's configuration -> a model on the meta device, which has shapes and no storage."""

from __future__ import annotations

from dataclasses import asdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from fullshard.data.tokenizer import vocabulary_size
from fullshard.errors import UserError
from fullshard.recipe.fields import ModelConfig


def llama_config(model: ModelConfig, *, tokenizer: PreTrainedTokenizerBase | None = None) -> LlamaConfig:
    """transformers' config of a recipe's model section, with the tokenizer's special tokens.

    Raises UserError where transformers refuses the values, or where the tokenizer has more tokens than the embedding has rows.
    """
    if model.hidden_act not in ACT2FN:
        raise UserError(f"model.hidden_act: {model.hidden_act}: unknown activation; choose one of {', '.join(sorted(ACT2FN))}")
    if tokenizer is not None and (needed := vocabulary_size(tokenizer)) > model.vocab_size:
        raise UserError(f"model.vocab_size: {model.vocab_size}: smaller than the tokenizer, {needed} tokens; raise it to that or more")
    fields = asdict(model)
    fields["rope_parameters"] = {key: value for key, value in fields["rope_parameters"].items() if value is not None}
    fields |= {
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "pad_token_id": None,  # Rows are packed: nothing is padded, and a padding row would be initialised to zero.
        "use_cache": False,
    }
    try:
        return LlamaConfig(**fields)
    except Exception as error:  # huggingface_hub's strict dataclasses raise several types, all of them for a bad value
        raise UserError(f"model: {' '.join(str(error).split())}") from error


def build_on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    """The model with fp32 parameters that have shapes but no storage."""
    with torch.device("meta"):
        return LlamaForCausalLM(config)
