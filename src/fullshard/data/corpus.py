"""Files, sources and the corpus that they make up; which formats there are."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from fullshard.recipe.fields import DataConfig, SourceConfig, SourcePlace

if TYPE_CHECKING:
    from fullshard.data.weighing import Weights

FILE_BUILDERS = ("text", "json", "csv", "parquet", "arrow")  # Builders of `datasets` that read files.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
ENDINGS = {"json": (".jsonl", ".ndjson", ".json"), "csv": (".csv", ".tsv"), "parquet": (".parquet",), "arrow": (".arrow",)}


@dataclass(frozen=True)
class File:
    """A file of a source."""

    url: str
    """Local path, or URL as fsspec opens it."""
    size: int
    """Bytes, as stored."""
    skip: int = 0
    """So many documents at its beginning are not this source's: they are held out."""
    take: int | None = None
    """Only so many documents at its beginning are this source's; null: all."""
    name: str = ""
    """Within the source: its path from the folder that all its files are in."""
    immutable: bool = False
    """Whether the URL names a version: a commit of the Hub's."""


@dataclass(frozen=True)
class Source:
    """Files of one format, and how a document is found in them."""

    name: str
    """`key: value` of the recipe, for messages."""
    builder: str
    """The builder of `datasets` that reads such files: parquet, arrow, json, text, csv, ..."""
    files: tuple[File, ...]
    text_column: str
    tokens_column: str | None
    weight: float
    options: dict[str, Any] = field(default_factory=dict)
    """Of the builder: those that make text of a csv's fields, and those that a dataset's card sets (a csv's separator)."""

    @property
    def column(self) -> str:
        """The column that is read."""
        return self.tokens_column or self.text_column

    @property
    def column_key(self) -> str:
        return "data.tokens_column" if self.tokens_column else "data.text_column"

    @property
    def splittable(self) -> bool:
        """Whether a reader can begin in the middle of each file at no cost."""
        return all(enterable(self.builder, file.url) for file in self.files)


@dataclass(frozen=True)
class Corpus:
    """What a recipe reads."""

    training: tuple[Source, ...]
    held_out: tuple[Source, ...]
    weights: tuple[Weights, ...] | None = None
    """Where the tokens of each training source are; None: not weighed."""


def file_format(builder: str, url: str) -> str:
    """How a file is read: `parquet`, `arrow` and `lines` (JSON lines) from any place in it; `compressed lines`, `text` (a file is a
    document) and `other` (whatever else `datasets` reads) from the beginning."""
    name = url.lower()
    compressed = name.endswith(COMPRESSED)
    stem = name.rsplit(".", 1)[0] if compressed else name
    # A compressed .json is taken for lines, as C4's are: `datasets` would parse all of it before the cursor, and lists are not kept so.
    if builder == "json" and stem.endswith((".jsonl", ".ndjson", *((".json",) if compressed else ()))):
        return "compressed lines" if compressed else "lines"
    if builder == "arrow":
        return "other" if "://" in url else "arrow"  # Memory-mapped.
    return builder if builder in ("parquet", "text") else "other"


def enterable(builder: str, url: str) -> bool:
    """Whether a reader can begin in the middle of the file at no cost."""
    return file_format(builder, url) in ("parquet", "arrow", "lines")


def sources_of(data: DataConfig) -> list[SourceConfig]:
    """The training sources: those of the mixture, or the single one that `data` itself describes."""
    return list(data.mixture) or [SourceConfig(**{entry.name: getattr(data, entry.name) for entry in fields(SourcePlace)})]
