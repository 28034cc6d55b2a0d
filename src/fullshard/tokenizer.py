"""Tokenizers: the one that this project trained and ships, or any of Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fullshard.errors import UserError, first_line, one_line
from fullshard.hub import ask_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BUNDLED_TOKENIZER = Path(__file__).parent / "assets" / "tokenizer.json"


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


def end_every_document(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """The document's ids, [n], with exactly one end-of-text at their end, whether they had none, one or several."""
    kept = len(tokens)
    while kept > 1 and tokens[kept - 1] == end_of_text == tokens[kept - 2]:
        kept -= 1
    return tokens[:kept] if kept and tokens[kept - 1] == end_of_text else np.append(tokens, end_of_text)
