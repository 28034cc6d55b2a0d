"""What a reader is asked for and what it gives: a piece of a file, how to read it, and a count of what was left out.

A cursor is one integer: the row of the next document (parquet, arrow and what is read from the beginning) or its byte offset (JSON lines).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fullshard.data.corpus import File, Source

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: its multiples, modulo 2**64, fill the unit interval evenly.


@dataclass(frozen=True)
class Extent:
    """The documents of a piece whose ends lie at documents, or within them."""

    first: int
    """Cursor of the first document."""
    last: int | None
    """Cursor of the last one; None: all that follow, to the end of the file."""
    first_from: float = 0.0
    """The share of the first document's tokens that is not this piece's."""
    last_to: float = 1.0
    """The share of the last document's tokens with which the piece ends."""


@dataclass(frozen=True)
class Piece:
    """What one logical stream reads of a file."""

    file: File
    begin: int
    """Byte of the file as stored. Rows are cut in the same ratio."""
    end: int
    drawn: tuple[float, float] = (0.0, 1.0)
    """Only documents whose `point` lies in this part of the unit interval."""
    extent: Extent | None = None
    """Only these documents, whatever `begin` and `end` say."""
    tokens: float = 0.0
    """About so many; 0: not estimated."""

    @property
    def is_drawn(self) -> bool:
        """Whether the piece is every so-manieth document of the file, which is read from its beginning."""
        return self.drawn != (0.0, 1.0)

    def draws(self, number: int) -> bool:
        """Whether document number `number` of the file is in the part that is drawn."""
        low, high = self.drawn
        return low <= point(number) < high

    def share_of(self, cursor: int) -> tuple[float, float]:
        """(from, to) in shares of its tokens: what the piece has of the document at `cursor`."""
        if self.extent is None:
            return 0.0, 1.0
        begin = self.extent.first_from if cursor == self.extent.first else 0.0
        return begin, self.extent.last_to if cursor == self.extent.last else 1.0


def point(number: int, offset: int = 0) -> float:
    """Of the unit interval, [0, 1), which the points of consecutive numbers fill evenly."""
    return (number * GOLDEN + offset) % 2**64 / 2**64


@dataclass(frozen=True)
class Reading:
    """How to read a source."""

    source: Source
    tokenizer_hash: str
    vocab_size: int
    """Token ids are less than this."""
    max_retries: int
    timeout_seconds: float
    skip_bad_rows: bool


@dataclass
class Tally:
    """What went wrong on the way, for the log."""

    retries: int = 0
    bad_rows: int = 0
    _notes: dict[str, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def note(self, subject: str, line: str) -> None:
        """A line for the user, once per subject: a source that was retried, a file of which rows were skipped."""
        if subject not in self._taken:
            self._notes.setdefault(subject, line)

    def take_notes(self) -> list[tuple[str, str]]:
        """(subject, line) of what is new."""
        notes = list(self._notes.items())
        self._taken |= self._notes.keys()
        self._notes.clear()
        return notes


@dataclass(frozen=True)
class Bad:
    """In the place of a document that cannot be used."""

    reason: str


Entry = tuple[int, int | None, Any]
"""(the document's row or byte offset in its file, cursor after it or None where the piece ends with it, text or token ids or Bad)"""
