"""Tokenizers: the one that this project trained and ships, or any of Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fullshard.data.hub import ask_hub
from fullshard.errors import UserError, first_line, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BUNDLED_TOKENIZER = Path(__file__).parent.parent / "assets" / "tokenizer.json"


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """`bundled`, a folder, a tokenizer.json or a Hub name. UserError when there is none, or when it lacks an end-of-text token."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any
    path = BUNDLED_TOKENIZER if name == "bundled" else Path(name).expanduser()
    with one_line(f"data.tokenizer: {name}"):
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            # A bare tokenizer.json does not say which of its special tokens ends a document.
            names = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
            tokenizer.eos_token = next((token for token in names if token in tokenizer.get_vocab()), None)
        elif path.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            reachable = ask_hub(name, repo_type="model", key="data.tokenizer")
            try:
                tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not reachable)  # Unreachable: it may be in the cache.
            except (OSError, ValueError) as error:
                reason = first_line(error) if reachable else "no such file here and the Hub cannot be reached"
                fix = "use `bundled`, a folder, a tokenizer.json or a Hub name"
                raise UserError(f"data.tokenizer: {name}: not found; {reason}; {fix}") from error
    if not tokenizer.is_fast:
        raise UserError(f"data.tokenizer: {name}: has no fast version; use one with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"data.tokenizer: {name}: has no end-of-text token; use a folder whose tokenizer_config.json sets eos_token")
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Largest id + 1, the rows that an embedding needs: more than len(tokenizer) where the vocabulary has holes."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Equal exactly when two tokenizers turn texts into the same ids, end-of-text included: vocabulary, merges, normaliser, splitting."""
    parts: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    for unused in ("version", "truncation", "padding", "post_processor", "decoder"):  # No part in how documents are encoded here.
        parts.pop(unused, None)
    return xxhash.xxh3_128_hexdigest(json.dumps([parts, tokenizer.eos_token_id], sort_keys=True).encode())


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Write the tokenizer as training used it, so that transformers 4 and 5 open it. Returns the tokens that it adds to a text no more.

    Documents are tokenized without what a post-processor adds, a beginning-of-text for one. With it a text would begin with a token that
    the model has never seen, with an end-of-text the model would begin another one.
    """
    from tokenizers import Tokenizer

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    left_out = _added_tokens(parts["post_processor"])
    if left_out:
        parts["post_processor"] = _without_added_tokens(parts["post_processor"])
        Tokenizer.from_str(json.dumps(parts)).save(str(path))
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for unused in ("is_local", "local_files_only", "add_bos_token", "add_eos_token"):  # How it was opened here; what was left out.
        config.pop(unused, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 does not know 5's name of it.
    config["model_input_names"] = ["input_ids", "attention_mask"]  # transformers 4 has token_type_ids too, which no Llama takes.
    if "extra_special_tokens" in config:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")  # In transformers 4 the former is something else.
    pre_tokenizer = parts["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:
        config["add_prefix_space"] = pre_tokenizer["add_prefix_space"]  # transformers 4 would set it to false in the pre-tokenizer.
    path.write_text(f"{json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)}\n", encoding="utf-8")
    return left_out


def _added_tokens(post_processor: dict[str, Any] | None) -> list[str]:
    """Special tokens that the post-processor of a tokenizer.json adds, each once."""
    match post_processor:
        case {"type": "Sequence", "processors": processors}:
            added = [token for processor in processors for token in _added_tokens(processor)]
        case {"type": "TemplateProcessing", "single": single, "pair": pair}:
            added = [piece["SpecialToken"]["id"] for piece in [*single, *pair] if "SpecialToken" in piece]
        case {"cls": [first, _], "sep": [last, _]}:  # BERT's and RoBERTa's.
            added = [first, last]
        case _:
            added = []
    return list(dict.fromkeys(added))


def _without_added_tokens(post_processor: dict[str, Any]) -> dict[str, Any] | None:
    """What is left of a post-processor without those that add tokens."""
    if post_processor["type"] == "Sequence":
        kept = [processor for processor in map(_without_added_tokens, post_processor["processors"]) if processor]
        return {**post_processor, "processors": kept} if kept else None
    return None if _added_tokens(post_processor) else post_processor


def end_every_document(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """The document's ids, [n], with exactly one end-of-text at their end, whether they had none, one or several."""
    kept = len(tokens)
    while kept > 1 and tokens[kept - 1] == end_of_text == tokens[kept - 2]:
        kept -= 1
    return tokens[:kept] if kept and tokens[kept - 1] == end_of_text else np.append(tokens, end_of_text)
