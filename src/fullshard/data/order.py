"""What decides the order of the rows: a checkpoint has it, and a run that would read in another order stops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fullshard.data.corpus import Corpus
from fullshard.data.tokenizer import tokenizer_hash
from fullshard.errors import UserError
from fullshard.recipe.changes import covers
from fullshard.recipe.fields import DataConfig, SourcePlace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE_KEYS = [f"data.{key}" for key in (*(entry.name for entry in fields(SourcePlace)), "mixture", "evaluation_documents")]


def order_of(data: DataConfig, *, corpus: Corpus, seed: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What decides which row is where: a position is good only where all of it is the same. Files may have moved to another folder."""
    files = [
        [source.weight, source.column, [[file.url.rpartition("/")[2], file.size, file.skip] for file in source.files]]
        for source in corpus.training
    ]
    # Not on_bad_row: before the row that stopped a run there was none to skip.
    keys = ("num_streams", "sequence_length", "shuffle_window", "carry_remainder")
    sizes = [file.size for source in corpus.training for file in source.files]
    return {
        "seed": seed,
        "files": f"{len(sizes)} files, {sum(sizes)} bytes, {hashlib.blake2b(json.dumps(files).encode(), digest_size=8).hexdigest()}",
        "tokenizer": tokenizer_hash(tokenizer),
        **{key: getattr(data, key) for key in keys},
        "dealing": "equal tokens",
    }


def order_changes(saved: dict[str, Any], now: dict[str, Any], *, allow_changes: Sequence[str]) -> list[str]:
    """What differs. Raises UserError where allow_changes has no key that it comes from."""
    changed = []
    for key, value in now.items():
        if saved.get(key) != value:
            names = {"files": "the files of data (names, sizes, columns, weights)", "dealing": "how files are dealt to streams"}
            place = ({"seed": "seed"} | names).get(key, f"data.{key}")
            keys = {"seed": ["seed"], "files": FILE_KEYS, "dealing": ["data.num_streams"]}.get(key, [f"data.{key}"])
            if not any(covers(allow_changes, name) for name in keys):
                fix = f"begin the data anew with checkpoint.allow_changes: [{keys[0]}]"
                before = saved.get(key, "equal stored bytes" if key == "dealing" else None)
                line = f"the checkpoint was made with {before}, its data position has no meaning here; {fix}"
                raise UserError(f"{place}: {value}: {line}")
            changed.append(place)
    return changed
