"""In the time in which a run reads as many tokens as its source has, every document is read once, up to 2 % of the tokens.

Whatever the format, the sizes of the files, what else they hold, how they are compressed, and what of them is held out.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fullshard.data import batches as batches_module
from fullshard.data import weighing
from fullshard.data.batches import weighed
from fullshard.data.dealing import deal
from fullshard.data.describe import describe
from fullshard.data.sources import list_corpus
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig, EvaluationConfig, Recipe, SourceConfig, TrainConfig
from fullshard.terminal import Terminal
from support.launcher import launch
from support.streams import BATCH, TOKENIZER, Leg, Ran, compress, ids_of, ranks, run, small


def text_of(generator: random.Random, words: int) -> str:
    return " ".join(generator.choice(("read", "write", "def", "return", "value", "import", "self", "None")) for _ in range(words))


def write(folder: Path, kind: str, files: list[list[str]], *, blob: list[int]) -> DataConfig:
    """blob: bytes of another column beside each row, by file."""
    folder.mkdir(exist_ok=True)
    for number, (texts, size) in enumerate(zip(files, blob, strict=True)):
        noise = random.Random(number)
        others = [noise.randbytes(size).hex() for _ in texts]
        match kind:
            case "parquet" | "tokens":
                column = (
                    pa.array([ids_of(text)[:-1] for text in texts], pa.list_(pa.int32()))
                    if kind == "tokens"
                    else pa.array(texts, pa.string())
                )
                table = pa.table({"blob": others, "text": column})
                pq.write_table(table, folder / f"{number}.parquet", row_group_size=97)
            case "text":
                for row, text in enumerate(texts):
                    (folder / f"{number}-{row}.txt").write_text(text)
            case "csv" | "csv.gz":
                rows = [f'"{other}","{text}"' for other, text in zip(others, texts, strict=True)]
                content = ("\n".join(["blob,text", *rows]) + "\n").encode()
                (folder / f"{number}.{kind}").write_bytes(gzip.compress(content) if kind == "csv.gz" else content)
            case "json":
                (folder / f"{number}.json").write_text(
                    json.dumps([{"blob": other, "text": text} for other, text in zip(others, texts, strict=True)])
                )
            case _:
                content = b"".join(
                    json.dumps({"blob": other, "text": text}).encode() + b"\n" for other, text in zip(others, texts, strict=True)
                )
                packed = {"": bytes, "gz": gzip.compress, "zst": compress}[kind.partition(".")[2]]
                (folder / f"{number}.{kind.replace('lines', 'jsonl')}").write_bytes(packed(content))
    builder = {"parquet": "parquet", "tokens": "parquet", "text": "text", "csv": "csv", "csv.gz": "csv"}.get(kind, "json")
    data = DataConfig(path=builder, data_files=[f"{folder}/*"], num_workers=0)
    return replace(data, tokens_column="text") if kind == "tokens" else data


def one_pass(data: DataConfig, folder: Path, *, tokens: int, legs: Callable[[int], list[Leg]] = lambda steps: [Leg(steps)]) -> Ran:
    """A run of as many tokens as there are."""
    return run(data, *legs(round(tokens / (data.sequence_length + 1) / BATCH)), log_in=folder)


def missed_share(ran: Ran, lengths: dict[str, int]) -> float:
    """The share of the tokens that were not read. lengths: tokens of each document by its name."""
    read: dict[str, set[int]] = {name: set() for name in lengths}
    for spans in ran.log:
        for name, _, begin, end in spans:
            read[name].update(range(begin, end))
    return sum(length - len(read[name]) for name, length in lengths.items()) / sum(lengths.values())


def shares_of_files(ran: Ran) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for spans in ran.log:
        for name, _, begin, end in spans:
            counts[name.split(":")[0]] += end - begin
    return {name: count / counts.total() for name, count in counts.items()}


def lengths_of(data: DataConfig) -> dict[str, int]:
    """Name of each training document -> its tokens, read without this project's streams: one stream, no shuffling, one epoch."""
    single = small(data, num_streams=1, shuffle_window=1, sequence_length=64)
    lengths: Counter[str] = Counter()
    (batches,) = ranks(single, batch=1)
    reading = batches._plan.readings[0]
    from fullshard.data.pieces import Tally
    from fullshard.data.readers import documents
    from fullshard.data.streams import whole

    for file in reading.source.files:
        for cursor, _, value in documents(whole(file), 0, reading, Tally()):
            lengths[f"{file.name}:{cursor}"] = len(ids_of(value)) if isinstance(value, str) else len(value) + 1
    return dict(lengths)


# The cases of the report ---------------------------------------------------------------------------------------------------------------


def test_one_large_compressed_file_beside_small_ones(tmp_path):
    """Each of the four gave a quarter of the tokens: the small ones were read 96 times in one pass, the large one a quarter."""
    generator = random.Random(0)
    files = [[text_of(generator, 40) for _ in range(count)] for count in (4000, 10, 10, 10)]
    data = small(write(tmp_path / "data", "lines.gz", files, blob=[0] * 4), num_streams=4, sequence_length=128)
    lengths = lengths_of(data)
    assert missed_share(ran := one_pass(data, tmp_path, tokens=sum(lengths.values())), lengths) < 0.02
    assert shares_of_files(ran)["0.jsonl.gz"] == pytest.approx(4000 / 4030, abs=0.01)


def test_a_launched_run_reads_the_large_compressed_file(tmp_path):
    """And logs in metrics.jsonl that each of its streams has made one pass."""
    generator = random.Random(0)
    files = [[text_of(generator, 40) for _ in range(count)] for count in (1000, 10, 10, 10)]
    write(tmp_path / "data", "lines.gz", files, blob=[0] * 4)
    tokens = sum(len(ids_of(text)) for texts in files for text in texts)
    options = {
        "data__path": "json",
        "data__data_files": f"[{tmp_path}/data/*.gz]",
        "data__log_documents": "true",
        "evaluation__max_rows": 0,
    }
    launched = launch(
        tmp_path / "run", placement="fsdp_fp32.yaml", train__max_steps=round(tokens / 65 / 8), logging__every=20, **options
    ).check()
    read: Counter[str] = Counter()
    for path in (tmp_path / "run" / "documents").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            for name, _, begin, end in json.loads(line)["documents"]:
                read[name.split(":")[0]] += end - begin
    assert read["0.jsonl.gz"] / read.total() == pytest.approx(1000 / 1030, abs=0.01)
    assert launched.column("data/epochs_min")[-1] == pytest.approx(1, abs=0.03)
    assert launched.column("data/epochs_max")[-1] == pytest.approx(1, abs=0.03)
    assert launched.column("data/epochs_max")[0] < 0.1


@pytest.mark.parametrize("counted", [True, False])
def test_a_wide_column_beside_the_text_of_one_file(tmp_path, monkeypatch, counted):
    """The file without it was half of the text and 3 % of the tokens."""
    if not counted:
        monkeypatch.setattr(weighing, "COUNTED_BYTES", 0)
    generator = random.Random(0)
    files = [[text_of(generator, 30 + row % 7) for row in range(2000)] for _ in range(2)]
    data = small(write(tmp_path / "data", "parquet", files, blob=[2000, 0]), num_streams=64, sequence_length=64)
    lengths = lengths_of(data)
    ran = one_pass(data, tmp_path, tokens=sum(lengths.values()))
    assert shares_of_files(ran)["1.parquet"] == pytest.approx(0.5, abs=0.02)
    assert missed_share(ran, lengths) < 0.02


@pytest.mark.parametrize("kind", ["parquet", "lines", "lines.gz", "csv"])
@pytest.mark.parametrize("held_out", [900, 150])
def test_held_out_documents_at_the_head_of_a_file(tmp_path, kind, held_out):
    """The stream with what remained of the head repeated it, and where a stream's whole part was held out the run was refused."""
    generator = random.Random(0)
    files = [[text_of(generator, 20) for _ in range(1000)]]
    data = small(write(tmp_path / "data", kind, files, blob=[0]), num_streams=4, sequence_length=32, evaluation_documents=held_out)
    lengths = dict(
        sorted(lengths_of(replace(data, evaluation_documents=0)).items(), key=lambda item: int(item[0].split(":")[1]))[held_out:]
    )
    assert missed_share(one_pass(data, tmp_path, tokens=sum(lengths.values())), lengths) < 0.02


# The property ---------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["parquet", "tokens", "lines", "lines.gz", "lines.zst", "text"]),
    sizes=st.lists(st.sampled_from([1, 20, 150, 600]), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 150),
    words=st.lists(st.sampled_from([10, 60]), min_size=4, max_size=4),
    blob=st.lists(st.sampled_from([0, 500]), min_size=4, max_size=4),
    streams=st.sampled_from([1, 4, 8]),
    held_out=st.sampled_from([0, 1, 100]),
    long=st.sampled_from([None, 0, -1]),
    seed=st.integers(0, 9),
)
def test_every_document_is_read_once_in_one_pass(tmp_path_factory, kind, sizes, words, blob, streams, held_out, long, seed):
    """long: which document of the largest file is so long that streams share it."""
    folder = tmp_path_factory.mktemp("mix")
    generator = random.Random(seed)
    files = [[text_of(generator, generator.randrange(1, 2 * mean)) for _ in range(size)] for size, mean in zip(sizes, words, strict=False)]
    if long is not None:
        files[sizes.index(max(sizes))][long] = text_of(generator, 4000)
    data = small(write(folder / "data", kind, files, blob=blob[: len(files)]), num_streams=streams, sequence_length=15, log_documents=True)
    if held_out and (kind == "text" or sizes[0] > held_out):
        data = replace(data, evaluation_documents=held_out)
    lengths = {name: length for name, length in lengths_of(data).items() if not _is_held_out(name, data)}
    ran = one_pass(data, folder, tokens=sum(lengths.values()))
    # Of the last step up to a batch of rows is missing, and a stream that shares a document reads up to a row twice.
    rounding = (BATCH + streams) * 16 / sum(lengths.values())
    assert missed_share(ran, lengths) < 0.02 + rounding


_HEADS: dict[str, set[str]] = {}


def _is_held_out(name: str, data: DataConfig) -> bool:
    if not data.evaluation_documents or data.path == "text":  # Of text files the list of files is another.
        return False
    key = f"{data.data_files} {data.evaluation_documents}"
    if key not in _HEADS:
        names = lengths_of(replace(data, evaluation_documents=0))
        first = list_corpus(data, held_out=False).training[0].files[0].name
        own = sorted((other for other in names if other.split(":")[0] == first), key=lambda other: int(other.split(":")[1]))
        _HEADS[key] = set(own[: data.evaluation_documents])
    return name in _HEADS[key]


@pytest.mark.parametrize("kind", ["parquet", "tokens", "lines", "lines.gz", "lines.zst", "csv", "csv.gz", "json"])
def test_shares_of_files_that_are_not_read_before_the_run(tmp_path, monkeypatch, kind):
    """As of a source of more than 16 MiB: from footers, sizes and a sample. A file's documents are alike; files differ in all else."""
    monkeypatch.setattr(weighing, "COUNTED_BYTES", 0)
    generator = random.Random(0)
    files = [[text_of(generator, words) for _ in range(count)] for count, words in ((1200, 40), (300, 40), (300, 160), (30, 40))]
    blob = [0, 0, 0, 0] if kind in ("lines.gz", "lines.zst") else [0, 400, 0, 400]
    data = small(write(tmp_path / "data", kind, files, blob=blob), num_streams=4, sequence_length=64)
    lengths = lengths_of(data)
    whole: Counter[str] = Counter()
    for name, length in lengths.items():
        whole[name.split(":")[0]] += length
    ran = one_pass(data, tmp_path, tokens=sum(lengths.values()))
    for name, share in shares_of_files(ran).items():
        assert share == pytest.approx(whole[name] / whole.total(), abs=0.02), name
    assert missed_share(ran, lengths) < 0.02


def test_the_order_goes_on_at_1_2_4_ranks(tmp_path):
    """Documents that two streams share, and a head that is held out, in a run that is stopped at each step and goes on elsewhere."""
    generator = random.Random(0)
    files = [[text_of(generator, words) for words in (900, 5, 700, 30, 2000)], [text_of(generator, 60) for _ in range(4)]]
    data = small(write(tmp_path / "data", "lines", files, blob=[0, 0]), num_streams=8, sequence_length=16, evaluation_documents=1)
    (batches,) = ranks(data)
    cut = [piece for stream in batches._plan.dealt[0] for piece in stream if piece.extent and piece.extent.last_to < 1]
    assert len(cut) >= 3, "no document is shared"
    straight = run(data, Leg(60), log_in=tmp_path)
    stopped = run(data, *[Leg(1 + number % 3, 2 ** (number % 3), workers=number % 2) for number in range(30)], log_in=tmp_path)
    assert stopped.log == straight.log[: len(stopped.log)]
    assert stopped.rows == straight.rows[: len(stopped.rows)]


def test_each_source_of_a_mixture_is_read_once_in_its_own_time(tmp_path):
    generator = random.Random(0)
    sources = []
    for name, count in (("a", 900), ("b", 300)):
        files = [[text_of(generator, 20) for _ in range(size)] for size in (count, 10)]
        source = write(tmp_path / name, "lines.gz", files, blob=[0, 0])
        sources.append(SourceConfig(path="json", data_files=source.data_files, weight=float(count + 10)))
    data = small(DataConfig(mixture=sources), num_streams=4, sequence_length=32)
    lengths = [lengths_of(DataConfig(path="json", data_files=source.data_files)) for source in sources]
    ran = one_pass(data, tmp_path, tokens=sum(sum(part.values()) for part in lengths))
    rows = Counter(row[0][0].split("/")[-1].split(":")[0] for row in ran.log if row)
    assert rows.total()
    (batches,) = ranks(data)
    for source, weights, dealt in zip(
        batches._plan.readings,
        weighed(list_corpus(data, held_out=False), data=data, tokenizer=TOKENIZER).weights or (),
        batches._plan.dealt,
        strict=True,
    ):
        held = [sum(piece.tokens for piece in pieces) for pieces in dealt]
        assert max(held) / min(held) < 1.03, source.source.name
        assert sum(held) == pytest.approx(weights.tokens)


# What cannot be kept is told --------------------------------------------------------------------------------------------------------------


def test_streams_that_are_too_small_are_told_with_numbers(tmp_path):
    generator = random.Random(0)
    files = [[text_of(generator, generator.choice([2, 400])) for _ in range(64)]]
    data = small(write(tmp_path / "data", "lines", files, blob=[0]), num_streams=64, sequence_length=256)
    (batches,) = ranks(data)
    line = batches.notes()[f"data.data_files: {tmp_path}/data/*: shares"]
    assert "64 streams of about 1.0 documents" in line
    assert "of the tokens are read twice, and as many not at all" in line
    fewer = int(line.split("data.num_streams: ")[1].split()[0])
    (calm,) = ranks(replace(data, num_streams=fewer))
    assert not [note for note in calm.notes() if "shares" in note]


def test_fullshard_data_shows_text_shares_and_passes_of_each_file(tmp_path):
    """One pass of the source is one of each file."""
    generator = random.Random(0)
    files = [[text_of(generator, 40) for _ in range(count)] for count in (990, 10)]
    data = small(write(tmp_path / "data", "lines.gz", files, blob=[0, 0]), num_streams=4, sequence_length=64, log_documents=False)
    steps = round(sum(lengths_of(data).values()) / 65 / 8)
    recipe = Recipe(data=data, train=TrainConfig(max_steps=steps, global_batch_size=8), evaluation=EvaluationConfig(max_rows=0))
    out = io.StringIO()
    describe(recipe, rows=0, terminal=Terminal(main_process=True, console=Console(file=out)))
    for name, share in (("0.jsonl.gz", 99), ("1.jsonl.gz", 1)):
        found = re.search(
            rf"^  {name}: ~[\d.]+ MB of text, ([\d.]+)% of the tokens, ([\d.]+)% of those that are read, ~([\d.]+) passes$",
            out.getvalue(),
            re.M,
        )
        assert found is not None, out.getvalue()
        assert [float(value) for value in found.groups()] == pytest.approx([share, share, 1], abs=0.15)


def test_a_checkpoint_that_was_dealt_by_stored_bytes_is_refused(tmp_path):
    data = small(write(tmp_path / "data", "lines", [["a b c"] * 40], blob=[0]), num_streams=2)
    position: dict[str, Any] = run(data, Leg(1), log_in=tmp_path).position
    del position["order"]["dealing"], position["dealt"], position["read"]
    with pytest.raises(
        UserError,
        match=r"^how files are dealt to streams: equal tokens: the checkpoint was made with equal stored bytes, [^\n]+num_streams\]$",
    ):
        ranks(data, position=position)
    (batches,) = ranks(data, position=position, allow_changes=["data.num_streams"])
    assert "begin anew" in batches.notes()["data position"]


def test_a_run_that_goes_on_weighs_nothing(tmp_path, monkeypatch):
    data = small(write(tmp_path / "data", "lines", [["a b c"] * 40], blob=[0]), num_streams=2)
    straight = run(data, Leg(4), log_in=tmp_path)
    position = run(data, Leg(2), log_in=tmp_path).position
    monkeypatch.setattr(batches_module, "weigh", None)
    assert run(data, Leg(2), log_in=tmp_path, position=position).rows == straight.rows[2 * BATCH :]


def test_a_tiny_share_of_files_is_dealt_to_all_streams(tmp_path):
    """What the streams hold adds up to the source, whatever the borders."""
    generator = random.Random(1)
    files = [[text_of(generator, 1 + row) for row in range(count)] for count in (3, 90, 1, 40)]
    data = small(write(tmp_path / "data", "parquet", files, blob=[0] * 4), num_streams=6)
    corpus = weighed(list_corpus(data, held_out=False), data=data, tokenizer=TOKENIZER)
    assert corpus.weights is not None
    for count in (1, 2, 3, 6, 13):
        dealt = deal(corpus.training[0], corpus.weights[0], count=count, seed=0, row_tokens=17)
        assert sum(piece.tokens for pieces in dealt for piece in pieces) == pytest.approx(corpus.weights[0].tokens)
        assert all(pieces for pieces in dealt)
