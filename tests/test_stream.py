"""The data order is the recipe's: the same documents, each once an epoch, at any world size, with any workers, however often stopped.

Ranks are simulated in this process, one Batches each; a stop is a position that went through JSON and new Batches.
"""

from __future__ import annotations

import errno
import functools
import gzip
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import fullshard
from fullshard.data import lines, loader, order, other, pieces, readers, shape, streams, tables, values
from fullshard.data.batches import merge_positions, train_batches
from fullshard.data.held_out import evaluation_rows
from fullshard.data.sources import list_corpus
from fullshard.data.tokenizer import tokenizer_hash
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig, SourceConfig
from support.streams import BATCH, EOS, TOKENIZER, Leg, Ran, compress, ids_of, ranks, run, small

# A corpus on disk, and what a run must make of it ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    data: DataConfig
    expected: dict[str, list[int]]
    """Name of each document in the log -> its tokens, end-of-text included."""


def write_parquet(folder: Path, files: Sequence[Sequence[str]], *, tokens: bool = False, row_group_size: int = 3) -> Written:
    expected = {}
    for number, texts in enumerate(files):
        # Some of the token lists end with an end-of-text already.
        rows = [ids_of(text)[: None if row % 3 == 0 else -1] for row, text in enumerate(texts)]
        kind = pa.list_(pa.int32()) if tokens else pa.string()
        table = pa.table({"column": pa.array(rows if tokens else list(texts), kind), "other": pa.array(range(len(texts)))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=row_group_size)
        expected |= {f"{number}.parquet:{row}": ids_of(text) for row, text in enumerate(texts)}
    return Written(DataConfig(path="parquet", data_files=[f"{folder}/*.parquet"], **column(tokens)), expected)


def write_arrow(folder: Path, files: Sequence[Sequence[str]]) -> Written:
    """What `datasets` saves a tokenized dataset as: some shards, row borders its own."""
    texts = [text for file in files for text in file]
    shards = max(1, min(len(files), len(texts)))
    dataset = Dataset.from_dict({"column": pa.array([ids_of(text)[:-1] for text in texts], pa.list_(pa.int64()))})
    dataset.save_to_disk(folder / "saved", num_shards=shards)
    expected, first = {}, 0
    for path in sorted((folder / "saved").glob("*.arrow")):
        rows = pa.ipc.open_stream(path.read_bytes()).read_all().num_rows
        expected |= {f"{path.name}:{row}": ids_of(texts[first + row]) for row in range(rows)}
        first += rows
    assert first == len(texts)
    return Written(DataConfig(path=str(folder / "saved"), **column(True)), expected)


def write_lines(folder: Path, files: Sequence[Sequence[str]], *, ending: str = "") -> Written:
    """JSON lines, with an empty line here and there and no newline at the very end."""
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[ending]
    expected = {}
    for number, texts in enumerate(files):
        content, name = b"", f"{number}.jsonl{ending}"
        for row, text in enumerate(texts):
            expected[f"{name}:{len(content)}"] = ids_of(text)
            content += json.dumps({"id": row, "column": text}).encode() + (b"\n\n" if row % 4 == 2 else b"\n")
        (folder / name).write_bytes(compress(content[:-1]) if content else b"")
    return Written(DataConfig(path="json", data_files=[f"{folder}/*.jsonl{ending}"], **column(False)), expected)


def zstd(content: bytes) -> bytes:
    """In two frames, as `pzstd` and `cat` leave them."""
    half = len(content) // 2
    return b"".join(compress(part) for part in (content[:half], content[half:]))


def write_text(folder: Path, files: Sequence[Sequence[str]]) -> Written:
    texts = [text for file in files for text in file]
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    data = DataConfig(path="text", data_files=[f"{folder}/*.txt"])
    return Written(data, {f"{number:03}.txt:0": ids_of(text) for number, text in enumerate(texts)})


def write_csv(folder: Path, files: Sequence[Sequence[str]]) -> Written:
    expected = {}
    for number, texts in enumerate(files):
        texts = [text or "no empty text in CSV" for text in texts]
        (folder / f"{number}.csv").write_text("\n".join(["id,column", *(f'{row},"{text}"' for row, text in enumerate(texts))]))
        expected |= {f"{number}.csv:{row}": ids_of(text) for row, text in enumerate(texts)}
    return Written(DataConfig(path="csv", data_files=[f"{folder}/*.csv"], **column(False)), expected)


def column(tokens: bool) -> dict[str, Any]:
    return {"tokens_column": "column"} if tokens else {"text_column": "column"}


WRITERS: dict[str, Callable[[Path, Sequence[Sequence[str]]], Written]] = {
    "tokens in parquet": lambda folder, files: write_parquet(folder, files, tokens=True),
    "tokens saved to disk": write_arrow,
    "text in parquet": write_parquet,
    "jsonl": write_lines,
    "jsonl.gz": lambda folder, files: write_lines(folder, files, ending=".gz"),
    "jsonl.zst": lambda folder, files: write_lines(folder, files, ending=".zst"),
    "text files": write_text,
    "csv": write_csv,
}


def texts(*lengths: int, mark: str = "") -> list[str]:
    """One distinct text for each length, in words."""
    return [" ".join(f"{mark}{number}.{word}" for word in range(length)) for number, length in enumerate(lengths)]


def numbered(folder: Path, *, files: int, documents: int, row_group_size: int = 5) -> DataConfig:
    """Parquet files of tokenized documents that are one row of 4 tokens each: rows are document numbers, see `numbers`."""
    each = documents // files
    for file in range(files):
        ids = [[number // 1000 + 1, number % 1000 + 1, 7, EOS] for number in range(file * each, (file + 1) * each)]
        table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"{file:02}.parquet", row_group_size=row_group_size)
    data = DataConfig(path="parquet", data_files=[f"{folder}/*.parquet"], tokens_column="input_ids")
    return small(data, sequence_length=3, log_documents=False, num_streams=2)


def numbers(rows: list[list[int]]) -> list[int]:
    assert all(row[2:] == [7, EOS] for row in rows)
    return [(row[0] - 1) * 1000 + row[1] - 1 for row in rows]


# Running it --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def hash_once() -> Iterator[None]:
    """The tokenizer is always the same one, and its hash costs 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(tokenizer_hash)
        for module in (order, streams):
            patch.setattr(module, "tokenizer_hash", cached)
        yield


def check_exact(ran: Ran, written: Written, data: DataConfig, *, epochs: int) -> None:
    """Rows are the documents' tokens end to end, each with one end-of-text; each token once an epoch, for so many epochs.

    Two streams may share a document. Then the one that has its beginning reads on to the end of its row: of these tokens alone there are
    two in an epoch, and no other document follows them.
    """
    for row, spans in zip(ran.rows, ran.log, strict=True):
        assert row == [token for name, _, begin, end in spans for token in written.expected[name][begin:end]]
    seen: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for stream in range(data.num_streams):
        own = [(span, place == len(row) - 1) for row in ran.log[stream :: data.num_streams] for place, span in enumerate(row)]
        for (name, epoch, begin, end), ends_row in own:
            assert ends_row or end == len(written.expected[name]), "another document follows one that is cut"
            seen.setdefault(epoch, {}).setdefault(name, []).append((begin, end))
        assert own[-1][0][1] >= epochs, "the test ends too early"
    for epoch in range(epochs):
        assert sorted(seen[epoch]) == sorted(written.expected), f"epoch {epoch}"
        doubled = 0
        for name, spans in seen[epoch].items():
            reached = 0
            for begin, end in sorted(spans):
                assert begin <= reached, f"epoch {epoch}: {name}: tokens {reached} to {begin} are lost"
                doubled += reached - begin if begin < reached else 0
                reached = max(reached, end)
            assert reached == len(written.expected[name])
        assert doubled <= data.num_streams * data.sequence_length


# The promise -------------------------------------------------------------------------------------------------------------------------

GOOD = texts(*range(4, 19))
CORPUS = [
    texts(3, 9, 1, 0, 30, 2, 5, mark="a"),
    [],
    texts(4, mark="b"),  # One row.
    texts(60, 6, 7, mark="c"),  # The first is longer than many rows.
    texts(*range(1, 9), mark="d"),
    texts(2, 2, 2, 2, mark="e"),
]
FEW_FILES = [texts(3, 9, 1, 60, 2, 5, mark="a"), texts(4, 8, 6, 2, 7, mark="b")]  # Each read by two streams where it cannot be cut.
RUNS = {
    "4 ranks, one stream each": [Leg(60, world_size=4)],
    "3 workers": [Leg(60, workers=3)],
    "2 ranks, 1 worker each": [Leg(60, world_size=2, workers=1)],
    "stopped twice": [Leg(7), Leg(1, world_size=4), Leg(52, world_size=2, workers=1)],
    "stopped at each of the first steps": [*(Leg(1, world_size=2 ** (n % 3)) for n in range(9)), Leg(51)],
    "other batch sizes after stops": [Leg(3, batch=6), Leg(5, 2, batch=10), Leg(1, batch=1), Leg(1, batch=5), Leg(50)],
}
SHAPES = {"many files": CORPUS, "few files": FEW_FILES}
CASES = [(kind, "many files") for kind in WRITERS if kind != "csv"] + [("jsonl.gz", "few files"), ("csv", "few files")]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_same_documents_at_any_world_size_with_any_workers_and_stops(tmp_path, kind, shape):
    written = WRITERS[kind](tmp_path, SHAPES[shape])
    data = small(written.data, shuffle_window=5 if shape == "many files" else 2)  # 2: windows that begin within a stream's share of a file.
    straight = run(data, Leg(60), log_in=tmp_path)
    check_exact(straight, written, data, epochs=3)
    for name, legs in RUNS.items():
        if kind == "csv" and name not in ("3 workers", "stopped twice"):
            continue  # Reading through `datasets` costs 30 ms a file.
        other = run(data, *legs, log_in=tmp_path)
        assert len(other.rows) > 450
        assert other.log == straight.log[: len(other.log)], name
        assert other.rows == straight.rows[: len(other.rows)], name


@pytest.mark.parametrize("num_streams", [16, 24, 44])
def test_same_rows_where_a_rank_has_more_streams_than_fit_a_chunk(tmp_path, num_streams):
    """A worker hands over 8 rows at a time: what does not divide, and stops in the middle of all of it."""
    data = replace(numbered(tmp_path, files=5, documents=1100), num_streams=num_streams)
    straight = numbers(run(data, Leg(30, batch=60), log_in=tmp_path).rows)
    for legs in (
        [Leg(1, 2, 3), Leg(2, 1, 1, batch=30), Leg(4, 4, 2), Leg(15, batch=60)],
        [Leg(7, 1, 3, batch=13), Leg(13, 2, 1, batch=58)],
    ):
        seen = numbers(run(data, *legs, log_in=tmp_path).rows)
        assert seen == straight[: len(seen)]


def test_files_that_can_be_entered_anywhere_beside_others(tmp_path):
    """A source of .jsonl and .jsonl.gz, fewer files than streams."""
    parts = []
    for ending in ("", ".gz"):
        (tmp_path / f"x{ending}").mkdir()
        parts.append(write_lines(tmp_path / f"x{ending}", [texts(*range(1, 15), mark=f"m{ending}")], ending=ending))
    both = replace(parts[0].data, data_files=[f"{tmp_path}/x*/*"])
    data = small(both, shuffle_window=2)
    named = {f"{folder}/{name}": ids for folder, part in zip(("x", "x.gz"), parts, strict=True) for name, ids in part.expected.items()}
    written = Written(data, named)
    straight = run(data, Leg(60), log_in=tmp_path)
    check_exact(straight, written, data, epochs=2)
    assert run(data, *[Leg(2, 2)] * 30, log_in=tmp_path).log == straight.log


def test_compressed_text_files(tmp_path):
    for number, text in enumerate(GOOD):
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    data = small(DataConfig(path="text", data_files=[f"{tmp_path}/*.gz"]))
    written = Written(data, {f"{number}.txt.gz:0": ids_of(text) for number, text in enumerate(GOOD)})
    check_exact(run(data, Leg(20), log_in=tmp_path), written, data, epochs=1)


corpora = st.lists(st.lists(st.sampled_from([0, 1, 2, 5, 12, 70]), max_size=9), min_size=1, max_size=6)
stops = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 12])), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([kind for kind in WRITERS if kind != "csv"]),
    files=corpora,
    legs=stops,
    window=st.sampled_from([1, 3, 1000]),
    length=st.sampled_from([1, 6, 40]),
    carry=st.booleans(),
)
def test_same_documents_whatever_the_corpus(tmp_path_factory, kind, files, legs, window, length, carry):
    """Empty files, files of one row, documents longer than a row, fewer files than streams, windows larger than the corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    lengths = files if any(files) else [[3]]
    written = WRITERS[kind](folder, [texts(*file, mark=f"f{number}.") for number, file in enumerate(lengths)])
    data = small(written.data, shuffle_window=window, sequence_length=length, carry_remainder=carry)
    plan = [Leg(steps, world_size, batch=batch) for steps, world_size, batch in legs]
    straight = Leg(sum(leg.steps * leg.batch for leg in plan) // 4, batch=4)
    try:
        expected = run(data, straight, log_in=folder)
    except UserError as error:
        reason = str(error)  # A corpus that is too small for its streams.
    else:
        reason = ""
    if reason:
        assert re.search("has no document|shorter than a row|has only|no file that holds", reason)
        with pytest.raises(UserError):
            run(data, replace(straight, world_size=4), log_in=folder)
        return
    if carry:
        check_exact(expected, written, data, epochs=0)
    other = run(data, *plan, log_in=folder)
    assert (other.log, other.rows) == (expected.log, expected.rows)


def test_a_document_of_50_rows_is_continued_inside(tmp_path):
    written = write_lines(tmp_path, [texts(5, 200, 3), texts(2, 2)])
    data = small(written.data, num_streams=1)
    straight = run(data, Leg(130, batch=1), log_in=tmp_path)
    assert max(end for row in straight.log for *_, end in row) > 50 * 17
    check_exact(straight, written, data, epochs=1)
    stopped = run(data, *[Leg(3, batch=1)] * 43, log_in=tmp_path)
    assert stopped.rows == straight.rows[:129]


def test_position_is_small_json_whatever_is_held(tmp_path):
    data = replace(numbered(tmp_path, files=2, documents=2000), shuffle_window=1000)
    ran = run(data, Leg(20), log_in=tmp_path)
    assert len(json.dumps(ran.position["streams"])) < 100


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("seed", {"seed": 1}),
        ("data.num_streams", {"num_streams": 8}),
        ("data.sequence_length", {"sequence_length": 7}),
        ("data.shuffle_window", {"shuffle_window": 6}),
        ("data.carry_remainder", {"carry_remainder": False}),
        ("data.tokenizer", {"tokenizer": "other"}),
        ("the files of data", {"data_files": ["{folder}/0[0-2].parquet"]}),
    ],
)
def test_position_of_another_recipe_is_refused(tmp_path, monkeypatch, key, changes):
    data = numbered(tmp_path, files=4, documents=80)
    position = run(data, Leg(1), log_in=tmp_path).position
    changes = dict(changes)
    seed = changes.pop("seed", 0)
    if changes.get("tokenizer"):
        monkeypatch.setattr(order, "tokenizer_hash", lambda tokenizer: "another")
    if changes.get("data_files"):
        changes["data_files"] = [pattern.format(folder=tmp_path) for pattern in changes["data_files"]]
    with pytest.raises(UserError, match=rf"^{key}\b.*: the checkpoint was made with [^\n]+$"):
        ranks(replace(data, **changes), seed=seed, position=position, allow_changes=["optim", "data.num_workers"])


FILES = "the files of data (names, sizes, columns, weights)"


@pytest.mark.parametrize(
    ("allowed", "told", "changes"),
    [
        ("seed", "seed: ", {"seed": 1}),
        ("data", "data.sequence_length: ", {"sequence_length": 7}),
        ("data.shuffle_window", "data.shuffle_window: ", {"shuffle_window": 6}),
        ("data.num_streams", "data.num_streams: ", {"num_streams": 8}),
        ("data.data_files", f"{FILES}: ", {"data_files": ["{folder}/0[0-2].parquet"]}),
        ("data", f"{FILES}, data.carry_remainder: ", {"evaluation_documents": 3, "carry_remainder": False}),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_data_that_may_change_begin_anew(tmp_path, allowed, told, changes, world_size):
    """As a run of their own, also across a further stop, with the rows counted on. The rows before are a multiple of the streams."""
    data = numbered(tmp_path, files=4, documents=80)
    old = run(data, Leg(2, 2), log_in=tmp_path).position
    changes = {key: [f.format(folder=tmp_path) for f in value] if key == "data_files" else value for key, value in changes.items()}
    seed = changes.pop("seed", 0)
    new = replace(data, **changes)
    fresh = run(new, Leg(4), seed=seed, log_in=tmp_path)

    running = ranks(new, world_size, seed=seed, position=old, allow_changes=[allowed])
    taken = [[next(batches).tolist() for batches in running] for _ in range(2)]
    rows = [row for step in taken for turn in zip(*step, strict=True) for row in turn]
    assert rows == fresh.rows[: 2 * BATCH]
    note = f"{told}not what the checkpoint was made with, as allowed; the data begin anew after 16 rows"
    assert running[0].notes()["data position"] == note
    position = merge_positions([batches.position() for batches in running])
    assert position["rows"] == 4 * BATCH
    # What was allowed once may stay in the recipe: from here on nothing has changed.
    (again,) = ranks(new, seed=seed, position=json.loads(json.dumps(position)), allow_changes=[allowed])
    assert [row for _ in range(2) for row in next(again).tolist()] == fresh.rows[2 * BATCH :]
    assert "data position" not in again.notes()


def test_each_stream_begins_anew_in_the_middle_of_a_round(tmp_path):
    data = replace(numbered(tmp_path, files=4, documents=80), num_streams=4)
    fresh = run(replace(data, shuffle_window=6), Leg(4, batch=4), log_in=tmp_path)
    old = run(data, Leg(1, batch=6), log_in=tmp_path).position
    (batches,) = ranks(replace(data, shuffle_window=6), batch=8, position=old, allow_changes=["data"])
    rows = next(batches).tolist()  # Rows 6 to 13 of the run: of streams 2, 3, 0, 1, 2, 3, 0, 1.
    assert rows == [fresh.rows[n] for n in (2, 3, 0, 1, 6, 7, 4, 5)]


def test_a_permission_that_was_not_needed_keeps_the_position(tmp_path):
    """The same files in another folder: data.data_files is another, what is read is not."""
    data = numbered(tmp_path, files=4, documents=80)
    straight = run(data, Leg(4), log_in=tmp_path)
    position = run(data, Leg(2), log_in=tmp_path).position
    (batches,) = ranks(data, position=position, allow_changes=["data", "seed"])
    assert [row for _ in range(2) for row in next(batches).tolist()] == straight.rows[2 * BATCH :]
    assert "data position" not in batches.notes()


def test_position_is_good_for_the_same_files_in_another_folder(tmp_path):
    data = numbered(tmp_path, files=4, documents=80)
    straight = run(data, Leg(6), log_in=tmp_path)
    position = run(data, Leg(2), log_in=tmp_path).position
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("*.parquet"):
        path.rename(tmp_path / "moved" / path.name)
    moved = replace(data, data_files=[f"{tmp_path}/moved/*.parquet"])
    assert run(moved, Leg(4), log_in=tmp_path, position=position).rows == straight.rows[2 * BATCH :]


# Public reports, by their ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_d02_rows_after_a_stop_follow_without_a_gap(tmp_path, workers):
    data = replace(numbered(tmp_path, files=1, documents=5000, row_group_size=1000), num_streams=1, shuffle_window=1)
    assert numbers(run(data, Leg(25, 1, workers), Leg(25), log_in=tmp_path).rows) == list(range(400))


def test_d04_shuffle_window_is_not_lost_at_a_stop(tmp_path):
    data = replace(numbered(tmp_path, files=1, documents=200), num_streams=1, shuffle_window=50)
    seen = numbers(run(data, Leg(3, batch=10), Leg(17, batch=10), log_in=tmp_path).rows)
    assert sorted(seen) == list(range(200))
    assert seen != sorted(seen)


@pytest.mark.parametrize("files", [1, 3])
def test_d06_fewer_files_than_ranks_or_no_multiple_of_them(tmp_path, monkeypatch, files):
    """All rows once, no rank without data, each rank decodes its own row groups only, and the amplification is told."""
    data = numbered(tmp_path, files=files, documents=120, row_group_size=10)
    decoded: list[tuple[str, int]] = []
    opened = tables.open_parquet

    def watched(file: Any) -> Any:
        parquet = opened(file)
        iterate = parquet.iter_batches
        monkeypatch.setattr(parquet, "iter_batches", lambda *args, row_groups, **kwargs: (
            decoded.extend((file.name, group) for group in row_groups) or iterate(*args, row_groups=row_groups, **kwargs)
        ), raising=False)  # fmt: skip
        return parquet

    monkeypatch.setattr(tables, "open_parquet", watched)
    seen, groups = [], []
    for batches in ranks(data, 2, batch=2):
        decoded.clear()
        rank_rows = torch.cat([next(batches) for _ in range(60)]).tolist()
        assert len(set(numbers(rank_rows))) == 60, "this rank has half of the rows"
        seen += numbers(rank_rows)
        groups.append(set(decoded))
        assert not batches.notes()
    assert sorted(seen) == list(range(120))
    assert len(groups[0] & groups[1]) <= 1, "the one in which the streams meet"

    (whole,) = ranks(replace(numbered(tmp_path, files=files, documents=120, row_group_size=1000), num_streams=8))
    times = 8 / files if files == 1 else 4.0
    (note,) = whole.notes().values()
    assert f"{files} files for 8 streams: what is read is decoded" in note
    assert float(note.split("decoded ")[1].split()[0]) == pytest.approx(times, rel=0.2)


def test_d06_json_lines_of_one_file_are_not_read_by_every_rank(tmp_path, monkeypatch):
    written = write_lines(tmp_path, [texts(*[9] * 4000)])
    size = (tmp_path / "0.jsonl").stat().st_size
    data = small(written.data, log_documents=False, sequence_length=64)
    read = 0

    class Counted:
        def __init__(self, file: Any) -> None:
            self.file, self.seek = file, file.seek

        def readline(self) -> bytes:
            nonlocal read
            line = self.file.readline()
            read += len(line)
            return line

    opened = tables.open_listed

    @contextmanager
    def counted(file: Any, reading: Any, **options: Any) -> Iterator[Any]:
        with opened(file, reading, **options) as handle:
            yield Counted(handle)

    for module in (tables, lines, other, shape):
        monkeypatch.setattr(module, "open_listed", counted)
    for batches in ranks(data, 4):
        read = 0
        while batches.position()["streams"].popitem()[1][0][0] == 0:  # An epoch.
            next(batches)
        assert size / 4 * 0.9 < read < size / 4 * 1.3


def test_d08_d23_no_dispatcher_and_constant_shapes(tmp_path, monkeypatch):
    """Each rank reads its own; Accelerate's loaders, through which rank 0 would read for all, are not there."""
    import accelerate.data_loader

    for name in ("prepare_data_loader", "DataLoaderDispatcher", "DataLoaderShard"):
        monkeypatch.setattr(accelerate.data_loader, name, None)
        source = Path(fullshard.__file__).parent
        assert not [path for path in source.rglob("*.py") if name in path.read_text(encoding="utf-8")]
    data = small(write_lines(tmp_path, CORPUS).data, log_documents=False)
    for batches in ranks(replace(data, num_workers=1), 2):
        assert {next(batches).shape for _ in range(20)} == {(BATCH // 2, 17)}


@pytest.mark.parametrize("stop", [2, 3])
def test_d09_order_after_a_stop_at_the_end_of_an_epoch_and_within_the_next(tmp_path, stop):
    data = numbered(tmp_path, files=1, documents=16)
    straight = numbers(run(data, Leg(8), log_in=tmp_path).rows)
    assert sorted(straight[:16]) == sorted(straight[16:32]) == list(range(16))
    assert numbers(run(data, Leg(stop, world_size=2), Leg(8 - stop), log_in=tmp_path).rows) == straight


def test_d10_epochs_after_a_stop_are_whole(tmp_path):
    data = replace(numbered(tmp_path, files=1, documents=24), num_streams=1)
    seen = numbers(run(data, Leg(20, batch=1), Leg(52, batch=1), log_in=tmp_path).rows)
    assert [sorted(seen[epoch * 24 :][:24]) for epoch in range(3)] == [list(range(24))] * 3


@pytest.mark.parametrize(("workers", "num_streams"), [(0, 1), (1, 1), (0, 40)])
def test_d11_resume_opens_only_what_it_reads(tmp_path, monkeypatch, workers, num_streams):
    """At 90 % of 20 files. With 40 streams a batch of 4 rows is of 4 files at most."""
    data = replace(numbered(tmp_path, files=20, documents=400), num_streams=num_streams)
    position = run(data, Leg(90, batch=4), log_in=tmp_path).position
    opens = tmp_path / "opens"
    opened = tables.open_listed

    def counted(file: Any, reading: Any, **options: Any) -> Any:
        with open(opens, "a") as log:  # A worker's opens too.
            log.write(f"{file.url}\n")
        return opened(file, reading, **options)

    for module in (tables, lines, other, shape):
        monkeypatch.setattr(module, "open_listed", counted)
    monkeypatch.setattr(loader, "CHUNK_ROWS", 1)
    monkeypatch.setattr(loader, "PREFETCHED_CHUNKS", 1)
    (batches,) = ranks(replace(data, num_workers=workers), batch=4, position=position)
    next(batches)
    assert 1 <= len(opens.read_text().splitlines()) <= (3 if num_streams == 1 else 4)


@pytest.mark.parametrize(("files", "window"), [(1, 5), (8, 1)])  # The windows' order differs, and the files'.
def test_d12_order_differs_between_epochs_and_is_the_seeds(tmp_path, files, window):
    data = replace(numbered(tmp_path, files=files, documents=64), num_streams=2, shuffle_window=window)
    once, again, other = (numbers(run(data, Leg(16, 1, 2), seed=seed, log_in=tmp_path).rows) for seed in (0, 0, 1))
    assert sorted(once[:64]) == sorted(once[64:]) == list(range(64))
    assert once[:64] != once[64:]
    assert once == again
    assert once != other


def test_d13_restarts_go_on(tmp_path):
    data = numbered(tmp_path, files=4, documents=64)
    seen = numbers(run(data, Leg(2), Leg(2), Leg(2), log_in=tmp_path).rows)
    assert len(set(seen)) == 6 * BATCH
    assert seen == numbers(run(data, Leg(6), log_in=tmp_path).rows)


@pytest.mark.parametrize("kind", ["tokens in parquet", "tokens saved to disk", "text in parquet", "jsonl", "jsonl.gz", "text files", "csv"])
@pytest.mark.parametrize("num_streams", [1, 2])
def test_d14_first_documents_are_held_out(tmp_path, kind, num_streams):
    written = WRITERS[kind](tmp_path, [texts(*range(3, 23), mark="a"), texts(4, 5, mark="b")][: 1 + (kind != "jsonl.gz")])
    names = sorted(written.expected, key=lambda name: (name.split(":")[0], int(name.split(":")[1])))
    if kind == "tokens saved to disk":
        names = [name for name in names if name.startswith(names[0].split(":")[0])] + names
    held_out = dict.fromkeys(names[:8])
    data = small(written.data, evaluation_documents=8, sequence_length=4, num_streams=num_streams)
    legs = [Leg(40), Leg(100, world_size=num_streams)]
    trained = {span[0] for row in run(data, *legs, log_in=tmp_path).log for span in row if span[1] < 2}
    assert trained == written.expected.keys() - held_out.keys()
    rows = evaluation_rows(data=data, tokenizer=TOKENIZER, corpus=list_corpus(data), rank=0, world_size=1, max_rows=10_000)
    tokens = sum(len(written.expected[name]) for name in held_out)
    assert tokens // 5 - 7 <= len(rows) <= tokens // 5  # Text files: a remainder for each.
    possible = {tuple(written.expected[name][:5]) for name in held_out if len(written.expected[name]) >= 5}
    assert tuple(rows[0].tolist()) in possible


class Breaks:
    """readers._open whose iterator raises at a document, so many times. Not while the source is weighed, which passes over bad rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, times: int) -> None:
        self.times, self.at, self.open = times, at, readers._open
        monkeypatch.setattr(readers, "_open", self)

    def __call__(self, *args: Any) -> Iterator[list[pieces.Entry]]:
        for batch in self.open(*args):
            for entry in batch:
                if entry[0] == self.at and self.times and not args[2].skip_bad_rows:
                    self.times -= 1
                    raise ConnectionError("the cable was pulled")
                yield [entry]


@pytest.mark.parametrize("workers", [0, 1])
def test_d15_a_broken_connection_loses_and_repeats_nothing(tmp_path, monkeypatch, workers):
    data = replace(numbered(tmp_path, files=1, documents=20), num_streams=1, shuffle_window=1)
    Breaks(monkeypatch, at=7, times=2)
    ran = run(data, Leg(5, 1, workers, batch=4), log_in=tmp_path)
    assert numbers(ran.rows) == list(range(20))
    assert ran.counts["retries"] == 2
    assert [note for note in ran.notes if "the cable was pulled" in note] == ran.notes
    assert len(ran.notes) == 1


@pytest.mark.parametrize(("num_streams", "workers"), [(1, 0), (1, 1), (4, 3)])  # 3: the others are ahead of the worker that fails.
def test_d15_a_lost_source_stops_at_the_last_batch(tmp_path, monkeypatch, num_streams, workers):
    data = replace(numbered(tmp_path, files=1, documents=20), num_streams=num_streams, shuffle_window=1, max_retries=2)
    straight = run(data, Leg(10, batch=2), log_in=tmp_path)
    faulty = Breaks(monkeypatch, at=7, times=3)
    (batches,) = ranks(replace(data, num_workers=workers), batch=2)
    seen = []
    for _ in range(2):  # It stays lost.
        with pytest.raises(UserError, match=r"^\S+/00.parquet: lost after 2 retries: ConnectionError: the cable was pulled$"):
            seen.extend(batches)
    assert len(seen) == (3 if num_streams == 1 else 4)
    faulty.times = 0
    goes_on = run(data, Leg(10 - len(seen), batch=2), position=merge_positions([batches.position()]), log_in=tmp_path)
    assert torch.cat(seen).tolist() + goes_on.rows == straight.rows


def test_d17_nothing_is_dropped_but_the_last_remainder(tmp_path):
    """100 documents of 7 tokens and an end-of-text, rows of 16: an epoch is 50 rows; of 15: 53 rows and a remainder of 5."""
    ids = [[number % 50 + 1] * 7 for number in range(100)]
    pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / "a.parquet", row_group_size=9)
    plain = DataConfig(path="parquet", data_files=[f"{tmp_path}/a.parquet"], tokens_column="ids")
    data = small(plain, num_streams=1, sequence_length=15, carry_remainder=False)
    rows = run(data, Leg(50, batch=1), log_in=tmp_path).rows
    assert sorted(token for row in rows for token in row) == sorted([token for row in ids for token in row] + [EOS] * 100)
    for carry, rows_of_3_epochs in ((True, 3 * 100 * 8 / 15), (False, 3 * (100 * 8 // 15))):
        ran = run(replace(data, sequence_length=14, carry_remainder=carry), Leg(170, batch=1), log_in=tmp_path)
        first_of_fourth = next(number for number, row in enumerate(ran.log) if row[-1][1] == 3)
        assert first_of_fourth == int(rows_of_3_epochs), carry
        assert sum(len(row) for row in ran.rows[:first_of_fourth]) == first_of_fourth * 15
        stopped = run(replace(data, sequence_length=14, carry_remainder=carry), *[Leg(17, batch=1)] * 10, log_in=tmp_path)
        assert stopped.log == ran.log


def test_d22_weights_hold_in_tokens(tmp_path):
    """3:1 although the documents of one source are 20 times as long: in all, in each stream, in each batch."""
    mixture = []
    for name, words, weight in (("long", 40, 3.0), ("short", 2, 1.0)):
        (tmp_path / name).mkdir()
        source = write_parquet(tmp_path / name, [texts(*[words] * 60, mark=name)], tokens=True).data
        mixture.append(SourceConfig(path="parquet", data_files=source.data_files, tokens_column="column", weight=weight))
    data = small(DataConfig(mixture=mixture), num_streams=8, log_documents=False)
    ran = run(data, Leg(50, 1, batch=20), Leg(50, 4, batch=20), log_in=tmp_path)
    assert ran.rows == run(data, Leg(100, 2, 1, batch=20), log_in=tmp_path).rows
    is_long = np.array(["long" in TOKENIZER.decode(row) for row in ran.rows])
    assert is_long.mean() == pytest.approx(0.75, abs=0.02)
    for stream in range(8):
        assert is_long[stream::8].mean() == pytest.approx(0.75, abs=0.02)
    assert np.abs(is_long.reshape(100, 20).sum(1) - 15).max() <= 3  # Of 20 rows over 8 streams; at random it would be 7 or more.
    assert np.abs(is_long[: 3 * 512].reshape(3, 512).mean(1) - 0.75).max() < 0.01


# What goes wrong -------------------------------------------------------------------------------------------------------------------

BAD_LINES = {
    "cut JSON": (b'{"column": "a', "not JSON"),
    "null": (b'{"column": null}', "column holds null, not text"),
    "a number": (b'{"column": 3}', "column holds int, not text"),
    "no object": (b"[1, 2]", "list, not a JSON object"),
    "no column": (b'{"text": "x"}', "data.text_column: column: no such column; there are text"),
    "not UTF-8": (b'{"column": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    "half a surrogate pair": (rb'{"column": "\ud83d"}', "surrogates not allowed"),
}
BAD_TOKENS = {
    "out of vocabulary": ([1, 4096, 2], "token 4096 is not in the tokenizer's 4096"),
    "negative": ([1, -1], "token -1 is not in the tokenizer's 4096"),
    "null tokens": (None, "not a list of token ids"),
    "null in tokens": ([1, None], "not a list of token ids"),
}
BAD_TEXTS = {"null text": (None, "null, not text"), "text not UTF-8": (b"\xff", "'utf-8' codec can't decode")}


def with_a_bad_row(folder: Path, case: str) -> tuple[DataConfig, str]:
    """Fifteen documents of which number 5 is bad, and where it is."""
    if case in BAD_LINES:
        lines = [json.dumps({"column": text}).encode() for text in GOOD]
        lines[5] = BAD_LINES[case][0]
        (folder / "a.jsonl").write_bytes(b"\n".join(lines))
        return DataConfig(path="json", data_files=[f"{folder}/a.jsonl"], **column(False)), f"byte {len(b' '.join(lines[:5])) + 1}"
    if case in BAD_TEXTS:
        values = [text.encode() for text in GOOD]
        values[5] = BAD_TEXTS[case][0]  # type: ignore[call-overload]
        raw = pa.array(values, pa.binary())
        array: Any = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    else:
        tokens: list[Any] = [ids_of(text) for text in GOOD]
        tokens[5] = BAD_TOKENS[case][0]
        array = pa.array(tokens, pa.list_(pa.int32()))
    pq.write_table(pa.table({"column": array}), folder / "a.parquet", row_group_size=4)
    return DataConfig(path="parquet", data_files=[f"{folder}/a.parquet"], **column(case in BAD_TOKENS)), "row 5"


@pytest.mark.parametrize("case", [*BAD_LINES, *BAD_TEXTS, *BAD_TOKENS])
def test_a_bad_row_stops_the_run_or_is_left_out(tmp_path, case):
    """Stops in one line that names file and place; or is counted, and the order is as independent as ever."""
    plain, where = with_a_bad_row(tmp_path, case)
    reason = (BAD_LINES | BAD_TEXTS | BAD_TOKENS)[case][1]  # type: ignore[operator]
    data = small(plain, num_streams=2)
    with pytest.raises(UserError) as error:
        run(data, Leg(20), log_in=tmp_path)
    message = str(error.value)
    assert f"/a.{'jsonl' if case in BAD_LINES else 'parquet'}: {where}: " in message
    assert reason in message
    assert message.endswith("; set data.on_bad_row: skip to leave it out")
    assert "\n" not in message

    skipping = replace(data, on_bad_row="skip")
    straight = run(skipping, Leg(20), log_in=tmp_path)
    names = {span[0] for row in straight.log for span in row}
    assert len(names) == 14
    assert where.split()[1] not in {name.split(":")[1] for name in names}
    assert straight.counts["bad_rows"] >= 1
    notes = [note for note in straight.notes if "is decoded" not in note]  # Two streams share a row group.
    assert [note for note in notes if f"{where}: skipped: " in note and reason in note] == notes
    assert notes
    for legs in ([Leg(20, 2, 1)], [Leg(1)] * 20):
        assert run(skipping, *legs, log_in=tmp_path).log == straight.log


def broken_files(folder: Path, case: str) -> tuple[DataConfig, str]:
    """A good file and a broken one, and the name of that."""
    kind = case.split()[1]
    written = WRITERS[{"parquet": "text in parquet"}.get(kind, kind)](folder, [texts(*[5] * 300, mark="a"), texts(*[4] * 200, mark="b")])
    path = next(folder.glob(f"1.{kind}"))
    content = path.read_bytes()
    if case == "damaged parquet":  # Pages in the middle; the footer is whole.
        middle = len(content) // 3
        content = content[:middle] + bytes(200) + content[middle + 200 :]
    else:
        content = content[: len(content) * 2 // 3]
    path.write_bytes(content)
    return small(written.data, num_streams=2), path.name


@pytest.mark.parametrize("case", ["cut parquet", "damaged parquet", "cut jsonl.gz", "cut jsonl.zst"])
def test_a_broken_file_stops_the_run_or_its_rest_is_left_out(tmp_path, case):
    data, name = broken_files(tmp_path, case)
    with pytest.raises(UserError, match=rf"^\S+/{name}: [^\n]+; set data\.on_bad_row: skip to leave out the rest of it$"):
        run(data, Leg(200), log_in=tmp_path)
    skipping = replace(data, on_bad_row="skip")
    straight = run(skipping, Leg(130), log_in=tmp_path)
    assert straight.counts["bad_rows"] >= 1
    assert straight.notes
    read = {span[0] for row in straight.log for span in row}
    assert len([document for document in read if document.startswith("0.")]) == 300
    if case != "cut parquet":  # Without its footer nothing is found in it.
        assert 20 < len([document for document in read if document.startswith("1.")]) < 180
    for legs in ([Leg(130, 2, 1)], [Leg(3, 1 + n % 2) for n in range(43)]):
        assert run(skipping, *legs, log_in=tmp_path).log == straight.log[: len(legs) * legs[0].steps * BATCH]


@pytest.mark.parametrize("kind", ["tokens in parquet", "tokens saved to disk", "jsonl", "jsonl.gz", "text files", "csv"])
def test_a_file_that_changes_under_the_run_is_named(tmp_path, kind):
    written = WRITERS[kind](tmp_path, [GOOD])
    data = small(written.data, num_streams=1)
    corpus = list_corpus(data, held_out=False)
    with open(corpus.training[0].files[0].url, "ab") as file:
        file.write(b"\n")
    arguments = {"rank": 0, "world_size": 1, "global_batch_size": 1}
    with pytest.raises(UserError, match=r"^\S+: has \d+ bytes, had \d+ when the run listed it; files must not change under a run$"):
        list(itertools.islice(train_batches(data=data, tokenizer=TOKENIZER, corpus=corpus, seed=0, **arguments), 99))


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "text files"])
def test_a_missing_column_is_named(tmp_path, kind):
    data = small(WRITERS[kind](tmp_path, [GOOD]).data, num_streams=1)
    key = "tokens_column" if data.tokens_column else "text_column"
    with pytest.raises(UserError, match=rf"\bdata\.{key}: body: no such column; there are [^\n]*\bcolumn\b") as error:
        ranks(replace(data, **{key: "body"}))
    assert "\n" not in str(error.value)


def test_text_is_not_taken_for_tokens_nor_tokens_for_text(tmp_path):
    for tokens, message in ((False, r"^data\.tokens_column: column: \S+: holds string, not lists of token ids$"),
                            (True, r"^data\.text_column: column: \S+: holds list<.*>, not text$")):  # fmt: skip
        data = small(write_parquet(tmp_path, [GOOD], tokens=tokens).data, num_streams=1)
        with pytest.raises(UserError, match=message):
            ranks(replace(data, tokens_column="column" if not tokens else None, text_column="column"))


def test_lists_of_a_fixed_size_are_token_ids_too(tmp_path):
    """As packed datasets have them. Two row groups of three: batches do not begin at the column's first value."""
    ids = np.arange(6 * 16, dtype=np.int32).reshape(6, 16) % 1000 + 1
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), 16)
    pq.write_table(pa.table({"ids": column}), tmp_path / "a.parquet", row_group_size=3)
    data = DataConfig(path="parquet", data_files=[str(tmp_path / "a.parquet")], tokens_column="ids")
    (batches,) = ranks(replace(small(data), num_streams=1, shuffle_window=1, sequence_length=16))
    rows = torch.cat([next(batches) for _ in range(2)])[:6]
    assert rows.tolist() == [[*row, EOS] for row in ids.tolist()]


def test_a_compressed_json_is_lines(tmp_path):
    """As C4's .json.gz: a cursor is a byte of what it holds."""
    with gzip.open(tmp_path / "c4.json.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": f"document {number}"}) for number in range(9)))
    data = small(DataConfig(path="json", data_files=[str(tmp_path / "c4.json.gz")]), num_streams=1, shuffle_window=1)
    (batches,) = ranks(data)
    text = TOKENIZER.decode(torch.cat([next(batches) for _ in range(4)]).flatten()).split("<|endoftext|>")
    assert text[:9] == [f"document {number}" for number in range(9)]
    assert batches.position()["streams"]["0"][0][2] % len('{"text": "document 0"}\n') == 0


def test_more_documents_held_out_than_the_file_has(tmp_path):
    """In training too: evaluation may be off, and nobody would miss the file."""
    for kind in ("tokens in parquet", "jsonl", "csv"):
        (tmp_path / kind).mkdir()
        data = replace(small(WRITERS[kind](tmp_path / kind, [GOOD, GOOD]).data, num_streams=1), evaluation_documents=1000)
        with pytest.raises(UserError, match=r"^data\.evaluation_documents: 1000: .*0\.\w+ has "):
            [next(batches) for batches in ranks(data) for _ in range(20)]


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    data = numbered(tmp_path, files=1, documents=10)
    table = pq.read_table(tmp_path / "00.parquet")
    for made_by, fits in ((tokenizer_hash(TOKENIZER), True), ("another", False)):
        pq.write_table(table.replace_schema_metadata({values.TOKENIZER_KEY: made_by}), tmp_path / "00.parquet")
        if fits:
            ranks(data)
        else:
            with pytest.raises(UserError, match=r"^data\.tokenizer: \S+: its tokens are of another tokenizer, another not "):
                ranks(data)


def test_a_bad_row_can_be_left_out_by_the_run_that_goes_on(tmp_path):
    """The row stops it after an exact position, from which the advice of the message must be possible."""
    texts_of = [f"document {number}" for number in range(200)]
    lines = [json.dumps({"text": None if number == 120 else text}) for number, text in enumerate(texts_of)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = small(DataConfig(path="json", data_files=[str(tmp_path / "a.jsonl")]), num_streams=1, num_workers=1)
    (stopped,) = ranks(data, batch=2)
    taken = []
    with pytest.raises(UserError, match=r"a\.jsonl: byte \d+: text holds null, not text; set data\.on_bad_row: skip"):
        taken.extend(stopped)
    (resumed,) = ranks(replace(data, on_bad_row="skip"), batch=2, position=json.loads(json.dumps(stopped.position())))
    (straight,) = ranks(replace(data, on_bad_row="skip"), batch=2)
    both = [*taken, *(next(resumed) for _ in range(20))]
    assert torch.equal(torch.cat(both), torch.cat([next(straight) for _ in both]))


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), FileNotFoundError("gone"), ValueError("no ranges"), ImportError("s3fs")])
def test_no_access_is_no_bad_row(tmp_path, monkeypatch, error):
    """With data.on_bad_row: skip the rest of the file would be missed by nobody."""

    def denied(*_: Any) -> Any:
        raise error

    data = small(numbered(tmp_path, files=4, documents=40), on_bad_row="skip")
    monkeypatch.setattr(readers, "read_parquet", denied)
    with pytest.raises(UserError, match=r"\.parquet: \w+Error: [^\n]+$"):
        ranks(data)


def test_too_many_open_files_names_the_limit_and_the_key(tmp_path, monkeypatch):
    def refused(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(readers, "read_parquet", refused)
    with pytest.raises(UserError, match=r"\.parquet: [^\n]+; this process may have \d+ open \(ulimit -n\)[^\n]+ data\.num_streams$"):
        ranks(small(numbered(tmp_path, files=4, documents=40)))


def test_a_source_that_is_seldom_chosen_is_looked_into_at_the_start(tmp_path):
    """At weight 0.001 its first row comes after hundreds of steps."""
    for name, content in (("wrong", {"text": list(range(40))}), ("short", {"text": ["a", "b"]})):
        pq.write_table(pa.table(content), tmp_path / f"{name}.parquet")
    (tmp_path / "rest").mkdir()
    rest = write_parquet(tmp_path / "rest", [GOOD, GOOD]).data
    for name, message in (
        ("wrong", r"^data\.text_column: text: \S+: holds int64, not text$"),
        ("short", r"stream \d of 4 has no document"),
    ):
        sources = [
            SourceConfig(path="parquet", data_files=rest.data_files, text_column=rest.text_column),
            SourceConfig(path="parquet", data_files=[str(tmp_path / f"{name}.parquet")], weight=0.001),
        ]
        with pytest.raises(UserError, match=message):
            ranks(small(DataConfig(mixture=sources)))


def test_a_struct_beside_a_column_with_a_dot(tmp_path):
    """pyarrow's `columns` takes `meta` and its fields for a prefix of `meta.text`."""
    table = pa.table({"meta": [{"text": "wrong"}] * 9, "meta.text": [f"right {number}" for number in range(9)]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = DataConfig(path="parquet", data_files=[str(tmp_path / "a.parquet")], text_column="meta.text")
    (batches,) = ranks(small(data, num_streams=1))
    text = TOKENIZER.decode(next(batches).flatten())
    assert "right" in text
    assert "wrong" not in text


def test_what_a_card_says_about_its_csv_holds(tmp_path):
    """And what it says about files that are read without `datasets` is refused, not ignored."""
    head = "---\nconfigs:\n- config_name: default\n  data_files: "
    (tmp_path / "README.md").write_text(f"{head}a.csv\n  column_names: [text]\n  sep: ';'\n---\n")
    (tmp_path / "a.csv").write_text("one\ntwo\nthree\n")
    data = small(DataConfig(path=str(tmp_path)), num_streams=1, shuffle_window=1)
    (batches,) = ranks(data)
    assert TOKENIZER.decode(next(batches).flatten()).split("<|endoftext|>")[:3] == ["one", "two", "three"]
    (tmp_path / "b.parquet").write_bytes(b"")
    pq.write_table(pa.table({"text": ["a"], "b": ["c"]}), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text(f"{head}b.parquet\n  columns: [text]\n---\n")
    with pytest.raises(UserError, match="its card sets columns, which is not supported for parquet files"):
        ranks(data)


def test_a_link_to_a_file_is_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {number}"}) for number in range(9)))
    (tmp_path / "l.jsonl").symlink_to(tmp_path / "a.jsonl")
    for data in (DataConfig(path=str(tmp_path)), DataConfig(path="json", data_files=[str(tmp_path), f"file://{tmp_path}/a.jsonl"])):
        assert len(list_corpus(data, held_out=False).training[0].files) == 1


def test_of_a_folder_hidden_and_other_files_are_left_out(tmp_path):
    for name in ("a.jsonl", ".b.jsonl", "README.md", ".git/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    (source,) = list_corpus(DataConfig(path="json", data_files=[str(tmp_path)]), held_out=False).training
    assert [file.name for file in source.files] == ["a.jsonl"]


def test_an_end_of_text_that_the_tokenizer_makes_of_text_is_no_border(tmp_path, monkeypatch):
    """Unigram models do, whatever encode_special_tokens says."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram([("<unk>", -9.0), ("</s>", -1.0), ("a", -1.0), ("b", -1.0), ("c", -1.0)], unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    end = tokenizer.eos_token_id
    assert [ids.tolist() for ids in streams.encoder(tokenizer)(["ab</s>c", "ab"])] == [[2, 3, 4, end], [2, 3, end]]


def test_a_worker_ends_with_its_rank(tmp_path):
    """After a kill -9 it would hold the lock on the run folder and the rank's sockets for as long as a stalled read takes."""
    script = """
import os, sys
from fullshard.recipe.fields import DataConfig
from fullshard.data.batches import train_batches
from fullshard.data.sources import list_corpus
from fullshard.data.tokenizer import load_tokenizer
data = DataConfig(path="parquet", data_files=[sys.argv[1]], tokens_column="input_ids", num_streams=1, num_workers=1, sequence_length=16)
arguments = dict(tokenizer=load_tokenizer("bundled"), corpus=list_corpus(data, held_out=False), seed=0, rank=0, world_size=1)
batches = train_batches(data=data, global_batch_size=1, **arguments)
import multiprocessing
print(multiprocessing.active_children()[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""
    data = numbered(tmp_path, files=1, documents=4000)
    ended = subprocess.run([sys.executable, "-c", script, data.data_files[0]], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    time.sleep(0.5)
    state = Path(f"/proc/{ended.stdout.strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_log_outlives_a_run_that_does_not_begin(tmp_path):
    data = replace(numbered(tmp_path, files=4, documents=80), log_documents=True)
    log = tmp_path / "log"
    (batches,) = ranks(data, documents_log=log)
    for _ in range(3):
        next(batches)
    before = (log / "rank_00000.jsonl").read_text()
    assert before.count("\n") == 3 * BATCH
    (log / "rank_00000.jsonl").write_text(before + '{"row": 99, "docu')  # A kill in the middle of a line.
    (resumed,) = ranks(data, documents_log=log, position=batches.position())
    assert (log / "rank_00000.jsonl").read_text().startswith(before)
    next(resumed)
    assert [json.loads(line)["row"] for line in (log / "rank_00000.jsonl").read_text().splitlines()] == list(range(4 * BATCH))


def test_a_stream_without_documents_is_one_line(tmp_path):
    data = small(write_parquet(tmp_path, [GOOD[:3]]).data, num_streams=8)
    with pytest.raises(UserError, match=r"^data\.data_files: \S+: stream \d of 8 has no document; lower data\.num_streams$"):
        ranks(data)


def test_a_killed_worker_is_one_line(tmp_path):
    """In the next batch, wherever the training is when it dies."""
    others = set(multiprocessing.active_children())
    (batches,) = ranks(replace(numbered(tmp_path, files=4, documents=4000), num_workers=1))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]
    time.sleep(0.5)
    with pytest.raises(UserError, match=r"^data\.num_workers: 1: DataLoader worker \(pid[^\n]+$"):
        list(itertools.islice(batches, 400))


def test_a_mistake_in_the_code_keeps_its_traceback_in_a_worker(tmp_path, monkeypatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(loader, "pack", broken)
    monkeypatch.setattr(loader, "_source_rows", broken)
    with pytest.raises(RuntimeError, match="a mistake in the code"):
        ranks(replace(numbered(tmp_path, files=4, documents=40), num_workers=1))
