"""A small sample of a source: how many characters and tokens its documents have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullshard.data.corpus import Source, file_format
from fullshard.data.pieces import Reading, Tally
from fullshard.data.readers import documents
from fullshard.data.shape import row_count
from fullshard.data.streams import tokenized, unplaced, whole

SAMPLE_CHARACTERS = 2**20
SAMPLED_FILES = {"text": 64}  # Where a file is a document; of other files 4 are opened.


@dataclass(frozen=True)
class Sample:
    """Some documents of a source, tokenized, to estimate from."""

    documents: int
    tokens: int
    """One end-of-text a document included."""
    text_bytes: int
    """0 where the source holds tokens."""
    stored_bytes: float | None
    """What they take of their files; None where that cannot be known."""


def take_sample(source: Source, reading: Reading, encode: Callable[[list[str]], list[np.ndarray]], end_of_text: int) -> Sample:
    """The first documents of files spread evenly over the source; rows that cannot be used are passed over, for the reading to come."""
    reading = replace(reading, skip_bad_rows=True)
    count = min(len(source.files), SAMPLED_FILES.get(source.builder, 4))
    number = tokens = text_bytes = 0
    stored: float | None = 0.0
    for index in range(count):
        file = source.files[index * len(source.files) // count]
        held: list[Any] = []
        characters, first, after = 0, 0, None
        exhausted = True
        for place, after, value in documents(whole(file), 0, reading, Tally()):
            first = first if held else place
            held.append(value)
            characters += len(value)
            if characters >= SAMPLE_CHARACTERS // count:
                exhausted = after is None
                break
        number += len(held)
        tokens += sum(len(ids) for _, _, ids, _ in tokenized([unplaced(held)], encode=encode, end_of_text=end_of_text))
        text_bytes += sum(len(value.encode()) for value in held if isinstance(value, str))
        match file_format(source.builder, file.url):
            case "parquet" | "arrow":
                part: float | None = len(held) * file.size / max(row_count(file, reading) or 0, 1)
            case "lines":
                part = (file.size if after is None else after) - first if held else file.size
            case _:
                part = file.size if exhausted and not file.skip and file.take is None else None
        stored = None if stored is None or part is None else stored + part
    return Sample(number, tokens, text_bytes, stored)
