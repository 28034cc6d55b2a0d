"""Tokenizers: the one that this project trained and ships, or any of Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.errors import UserError, first_line, one_line
from fullshard.hub import ask_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
