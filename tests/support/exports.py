"""Models that have rows for the bundled tokenizer, and a tokenizer that adds tokens to a text: what tests export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, processors

from fullshard.data.tokenizer import BUNDLED_TOKENIZER
from support.models import TIED, TINY

# As many rows as the bundled tokenizer needs, and a few: divides by no world size here.
UNTIED = replace(TINY, vocab_size=4099)
TIED_HEAD = replace(TIED, vocab_size=4099)


def tokenizer_folder(folder: Path, *, adds: str) -> Path:
    """A tokenizer of 4,098 tokens, whose post-processor adds `begin`, `begin and end`, or nothing around a text."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_TOKENIZER))
    tokenizer.add_special_tokens(["<|begin|>", "<|im|>"])
    template = {"begin": "<|begin|> $A", "begin and end": "<|begin|> $A <|endoftext|>", "nothing": "$A"}[adds]
    special = [(token, tokenizer.token_to_id(token)) for token in ("<|begin|>", "<|endoftext|>")]
    added = processors.TemplateProcessing(single=template, pair=f"{template} $B", special_tokens=special)
    # Llama 3's, with the byte-level one before it; Llama 2's is the template alone.
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), added]) if adds == "begin" else added
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im|>"], "chat_template": "{{ x }}"}
    flags = {"add_bos_token": "begin" in adds, "add_eos_token": "end" in adds, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | flags))
    return folder
