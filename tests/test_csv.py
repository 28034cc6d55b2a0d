"""A csv file has no types: what stands in it is text, whatever it looks like."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest

from fullshard.data.pieces import Tally
from fullshard.data.readers import documents
from fullshard.data.sources import list_corpus
from fullshard.data.streams import reading_of, whole
from fullshard.data.tokenizer import load_tokenizer
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig

TEXTS = ["null", "NA", "nan", "007", "1.50", "True", 'a, "b"\nc', "2020-01-01", "", "1e5"]


def write(path: Path, texts: list[str], *, separator: str = ",") -> Path:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, delimiter=separator)
        rows.writerows([["number", "text"], *([number, text] for number, text in enumerate(texts))])
    return path


def read(*files: Path, tally: Tally | None = None, **fields: Any) -> list[Any]:
    data = DataConfig(**({"path": "csv", "data_files": list(map(str, files))} | fields))
    (source,) = list_corpus(data, held_out=False).training
    reading = reading_of(source, data, load_tokenizer("bundled"))
    return [value for file in source.files for _, _, value in documents(whole(file), 0, reading, tally or Tally())]


@pytest.mark.parametrize("texts", [TEXTS, ["1", "2", "3"], ["NA", "null"], ["1.5", "NA", "2"]], ids=["mixed", "numbers", "missing", "both"])
def test_every_field_is_text(tmp_path: Path, texts: list[str]) -> None:
    assert read(write(tmp_path / "a.csv", texts)) == texts
    assert read(write(tmp_path / "a.csv.gz", texts)) == texts


def test_tabs_separate_what_ends_with_tsv(tmp_path: Path) -> None:
    """Also beside a csv, and where `datasets` found the files in a folder."""
    files = [
        write(tmp_path / "a.tsv", TEXTS, separator="\t"),
        write(tmp_path / "b.TSV.gz", TEXTS, separator="\t"),
        write(tmp_path / "c.csv", TEXTS),
    ]
    assert read(*files) == 3 * TEXTS
    files[2].unlink()
    files[1].unlink()
    assert read(path=str(tmp_path), data_files=None) == TEXTS


def test_what_a_card_says_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n  na_values: [none]\n---\n"
    )
    write(tmp_path / "a.csv", TEXTS, separator=";")
    assert read(path=str(tmp_path), data_files=None) == TEXTS


def test_what_pandas_makes_of_it_is_an_option(tmp_path: Path) -> None:
    tally = Tally()
    write(tmp_path / "a.csv", ["x", "NA", "007"])
    assert read(tmp_path / "a.csv", csv_as_text=False, on_bad_row="skip", tally=tally) == ["x", "007"]
    assert tally.bad_rows == 1


def test_what_cannot_be_read_is_a_bad_row(tmp_path: Path) -> None:
    """Bytes that are no text, and a row with more fields than the header: the rest of the file."""
    (tmp_path / "a.csv").write_bytes(b"text\ngood\n\xff\xfe\n")
    with pytest.raises(UserError, match=r"a\.csv: .*utf-8.*; set data\.on_bad_row: skip to leave out the rest of it"):
        read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("text\ngood\na,b,c\n")
    tally = Tally()
    read(tmp_path / "b.csv", on_bad_row="skip", tally=tally)
    assert tally.bad_rows == 1


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.text_column: column: no such column; there are number, text"):
        read(write(tmp_path / "a.csv", TEXTS), text_column="column")


def test_token_ids_are_not_text(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["1", "2"])
    with pytest.raises(UserError, match="row 0: int, not a list of token ids"):
        read(tmp_path / "a.csv", tokens_column="number")
