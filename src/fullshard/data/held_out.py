"""The held-out rows of a recipe, the same at any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from fullshard.data.corpus import Corpus
from fullshard.data.pieces import Tally
from fullshard.data.readers import documents
from fullshard.data.streams import Row, encoder, pack, reading_of, shuffled, tokenized, unplaced, whole
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_GROUPS = 32


def evaluation_rows(
    *,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    rank: int,
    world_size: int,
    max_rows: int,
    note: Callable[[str, str], None] | None = None,
) -> torch.Tensor:
    """This rank's held-out rows, int64 [n, sequence_length + 1]: of the first max_rows those with j % world_size == rank.

    n differs by at most one between ranks and may be 0. The order does not depend on the seed. What remains of a group of files after its
    last full row is left out. note: told (subject, line) of what was read again or left out.
    """
    length = data.sequence_length + 1
    if max_rows == 0:
        return torch.empty((0, length), dtype=torch.int64)
    encode, tally = encoder(tokenizer), Tally()
    packed: list[Iterator[Row]] = []
    for source in corpus.held_out:
        reading = reading_of(source, data, tokenizer)
        order = shuffled(range(len(source.files)), "held-out")
        # In turn from groups of files, so that the first max_rows are not those of one long file.
        for group in range(min(HELD_OUT_GROUPS, len(order))):
            pieces = [whole(source.files[index]) for index in order[group::HELD_OUT_GROUPS]]
            windows = (unplaced([value]) for piece in pieces for _, _, value in documents(piece, 0, reading, tally))
            tokens = tokenized(windows, encode=encode, end_of_text=int(tokenizer.eos_token_id))
            packed.append(pack(tokens, length=length, source=0, token=0, carry=True, spans=False))
    in_turn = (row.tokens for turn in itertools.zip_longest(*packed) for row in turn if row is not None)
    rows = list(itertools.islice(in_turn, max_rows))
    if not rows:
        names = ", ".join(source.name for source in corpus.held_out)
        raise UserError(f"{names}: the held-out text is shorter than one row of {length} tokens; give more of it")
    if note is not None:
        for subject, line in tally.take_notes():
            note(f"held-out {subject}", f"held-out {line}")
    return torch.from_numpy(np.stack(rows).astype(np.int64))[rank::world_size]
