"""`fullshard tokenize`: the same shards whatever the workers and interruptions, exactly the documents; `fullshard data` shows them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from rich.console import Console

from fullshard.__main__ import main
from fullshard.assets.train_tokenizer import train_tokenizer
from fullshard.data import corpus
from fullshard.data.batches import train_batches
from fullshard.data.corpus import enterable
from fullshard.data.held_out import evaluation_rows
from fullshard.data.prepare import _published, _units, tokenize
from fullshard.data.sources import list_corpus
from fullshard.data.streams import reading_of
from fullshard.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer, tokenizer_hash
from fullshard.data.values import TOKENIZER_KEY
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig, SourceConfig
from fullshard.recipe.parsing import parse_recipe
from support import HANG_S

COMMAND = [sys.executable, "-m", "fullshard"]
WORDS = ["the", "of", "shard", "stream", "token", "naïve", "你好", "return", "def", "42", "<|endoftext|>", "\n\t", "", ";"]


@functools.cache
def bundled() -> Any:
    return load_tokenizer("bundled")


def texts(count: int, *, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return ["", "a"] + [f"{seed}/{n} " + " ".join(generator.choices(WORDS, k=generator.randrange(1, 120))) for n in range(2, count)]


def ids(text: str) -> list[int]:
    """A document as it must be in a shard: `<|endoftext|>` written in it is text, and one end-of-text follows."""
    return [*bundled().encode(text, add_special_tokens=False, split_special_tokens=True), bundled().eos_token_id]


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def make(data: DataConfig, output: Path, *, num_workers: int = 1, shard_tokens: int = 2000) -> dict[str, Any]:
    output.mkdir(exist_ok=True)
    console = Console(quiet=True)
    return tokenize(data=data, output=output, num_workers=num_workers, shard_tokens=shard_tokens, console=console)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Exit code of `fullshard ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["fullshard", *words])
    try:
        main()
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def identities(paths: list[Path]) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@dataclass
class Made:
    data: DataConfig
    output: Path
    manifest: dict[str, Any]
    train: list[str]
    validation: list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two files of JSON lines and a held-out one, in several shards."""
    folder = tmp_path_factory.mktemp("made")
    train = [texts(150, seed=0), texts(40, seed=1)]
    held_out = texts(30, seed=2)
    files = [write_lines(folder / f"train_{number}.jsonl", documents) for number, documents in enumerate(train)]
    data = DataConfig(
        path="json",
        data_files=[str(path) for path in files],
        evaluation_files=[str(write_lines(folder / "held_out.jsonl", held_out))],
        num_workers=0,
    )
    manifest = make(data, folder / "output")
    return Made(data, folder / "output", manifest, [*train[0], *train[1]], held_out)


def test_datasets_reads_exactly_the_documents(made: Made) -> None:
    expected = {"train": [ids(text) for text in made.train], "validation": [ids(text) for text in made.validation]}
    loaded: Any = datasets.load_dataset(str(made.output), cache_dir=str(made.output.parent / "cache"))
    streamed: Any = datasets.load_dataset(str(made.output), streaming=True)
    assert set(loaded) == set(streamed) == {"train", "validation"}
    for split, documents in expected.items():
        assert loaded[split].column_names == ["input_ids"]
        assert loaded[split].features["input_ids"].feature.dtype == "int32"
        assert loaded[split]["input_ids"][:] == documents
        assert [row["input_ids"] for row in streamed[split]] == documents


def test_manifest_is_true(made: Made) -> None:
    assert made.manifest == json.loads((made.output / "manifest.json").read_text())
    assert made.manifest["data"]["path"] == "json"
    assert made.manifest["tokenizer"] == {
        "name": "bundled",
        "hash": tokenizer_hash(bundled()),
        "vocab_size": 4096,
        "end_of_text_id": bundled().eos_token_id,
    }
    shards = made.manifest["shards"]
    assert len([shard for shard in shards if shard["split"] == "train"]) > 3
    assert sorted(shard["file"] for shard in shards) == [f"data/{path.name}" for path in sorted((made.output / "data").iterdir())]
    for shard in shards:
        path = made.output / shard["file"]
        parquet = pq.ParquetFile(path)
        column = parquet.read().column("input_ids")
        assert parquet.schema_arrow.metadata[TOKENIZER_KEY].decode() == tokenizer_hash(bundled())
        assert shard["bytes"] == path.stat().st_size
        assert shard["xxh3_128"] == xxhash.xxh3_128_hexdigest(path.read_bytes())
        assert shard["documents"] == len(column)
        assert shard["tokens"] == sum(map(len, column.to_pylist()))
        assert shard["tokens"] < 3000, "shards are of about 2,000 tokens"
    totals = made.manifest["totals"]
    assert totals["train"]["documents"] == len(made.train)
    assert totals["train"]["tokens"] == sum(len(ids(text)) for text in made.train)
    assert totals["validation"]["tokens"] == sum(len(ids(text)) for text in made.validation)
    assert not (made.output / ".progress").exists()


def test_shards_do_not_depend_on_workers_or_the_folder(made: Made, tmp_path: Path) -> None:
    moved = [Path(name).rename(Path(name).parent / f"{number}.moved") for number, name in enumerate(made.data.data_files or [])]
    try:
        (tmp_path / "in").mkdir()
        for path, name in zip(moved, made.data.data_files or [], strict=True):
            (tmp_path / "in" / Path(name).name).write_bytes(path.read_bytes())
        data = replace(made.data, data_files=[str(tmp_path / "in" / Path(name).name) for name in made.data.data_files or []])
        make(data, tmp_path / "output", num_workers=3)
    finally:
        for path, name in zip(moved, made.data.data_files or [], strict=True):
            path.rename(name)
    assert contents(tmp_path / "output") == contents(made.output)
    # Finished: nothing is done again, though the files are now elsewhere.
    before = identities(list((tmp_path / "output").rglob("*.*")))
    make(made.data, tmp_path / "output")
    assert identities(list((tmp_path / "output").rglob("*.*"))) == before


def test_a_published_folder_does_not_say_where_files_lay(made: Made, tmp_path: Path) -> None:
    """URLs and Hub names are for all; of what is local the last name is enough."""
    folder = tmp_path / "secret" / "corpus"
    folder.mkdir(parents=True)
    write_lines(folder / "a.jsonl", made.train)
    (tmp_path / "secret" / "mine.json").write_bytes(BUNDLED_TOKENIZER.read_bytes())
    data = DataConfig(path=str(folder), tokenizer=str(tmp_path / "secret" / "mine.json"), evaluation_documents=1)
    manifest = make(data, tmp_path / "output")
    assert (manifest["data"]["path"], manifest["data"]["tokenizer"], manifest["tokenizer"]["name"]) == ("corpus", "mine.json", "mine.json")
    for name in ("manifest.json", "README.md"):
        assert "secret" not in (tmp_path / "output" / name).read_text()
    named = made.manifest["data"]
    assert (named["data_files"], named["evaluation_files"]) == (["train_0.jsonl", "train_1.jsonl"], ["held_out.jsonl"])
    assert _published("hf://datasets/a/b/c.parquet") == "hf://datasets/a/b/c.parquet"


def test_units_look_at_each_file_a_few_times(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Not at all files for each of them: a Hub dataset has 100,000."""
    seen: list[str] = []

    def counted(builder: str, url: str) -> bool:
        seen.append(url)
        return enterable(builder, url)

    (source,) = list_corpus(made.data, held_out=False).training
    many = replace(source, files=tuple(replace(source.files[0], url=f"https://here/{number}.jsonl") for number in range(100)))
    reading = reading_of(many, made.data, bundled())
    monkeypatch.setattr(corpus, "enterable", counted)
    assert len(list(_units(many, "train", reading, 2**40))) == 1
    assert len(seen) == 100


@pytest.mark.parametrize("kind", ["parquet", "text", "jsonl.gz"])
def test_sources_of_other_kinds(kind: str, tmp_path: Path) -> None:
    """Shards hold the documents in the order of the files; a file is cut where its format can be entered, at its borders elsewhere."""
    documents = texts(120, seed=3)
    files = tmp_path / "in"
    files.mkdir()
    if kind == "parquet":
        for number in range(2):
            table = pa.table({"id": range(60), "text": documents[60 * number : 60 * number + 60]})
            pq.write_table(table, files / f"{number}.parquet", row_group_size=7)
    elif kind == "text":
        for number, text in enumerate(documents):
            (files / f"{number:03}.txt").write_text(text, encoding="utf-8", newline="")
    else:
        import gzip

        with gzip.open(files / "0.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    data = DataConfig(path={"jsonl.gz": "json"}.get(kind, kind), data_files=[str(files)])
    manifest = make(data, tmp_path / "output")
    read = [pq.read_table(tmp_path / "output" / shard["file"])["input_ids"].to_pylist() for shard in manifest["shards"]]
    assert list(itertools.chain(*read)) == [ids(text) for text in documents]
    assert (len(read) > 2) == (kind != "jsonl.gz")
    assert list(manifest["totals"]) == ["train"]


def test_first_documents_are_held_out_and_an_endless_line_is_one_document(tmp_path: Path) -> None:
    documents = [*texts(40), "word " * 30_000, "last"]
    data = DataConfig(path="json", data_files=[str(write_lines(tmp_path / "a.jsonl", documents))], evaluation_documents=5)
    manifest = make(data, tmp_path / "output")
    loaded: Any = datasets.load_dataset(str(tmp_path / "output"), streaming=True)
    assert [row["input_ids"] for row in loaded["validation"]] == [ids(text) for text in documents[:5]]
    assert [row["input_ids"] for row in loaded["train"]] == [ids(text) for text in documents[5:]]
    # Where the long line runs through whole units nothing begins: no file is written for them.
    empty = [shard for shard in manifest["shards"] if shard["documents"] == 0]
    assert empty
    assert not any((tmp_path / "output" / shard["file"]).exists() for shard in empty)


def test_killed_and_started_again_it_makes_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    documents = [f"{n} " + "some words of a line " * 200 for n in range(600)]
    source = write_lines(tmp_path / "a.jsonl", documents)
    words = ["--data.path", "json", "--data.data_files", f"[{source}]", "--num_workers", "2", "--shard_tokens", "20000"]
    words = ["tokenize", "--output", str(tmp_path / "killed"), *words]
    started = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    progress = tmp_path / "killed" / ".progress"
    deadline = time.monotonic() + HANG_S
    while len(list(progress.glob("train-*.json"))) < 3:
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = psutil.Process(started.pid).children(recursive=True)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert psutil.wait_procs(workers, timeout=HANG_S)[1] == [], "a worker outlives its main process"
    finished = [tmp_path / "killed" / "data" / path.with_suffix(".parquet").name for path in progress.glob("train-*.json")]
    before = identities(finished)
    assert command(monkeypatch, *words) == 0
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "train: 600 documents" in output
    assert f"path: {tmp_path}/killed\n  tokens_column: input_ids\n" in output
    assert 3 <= len(finished) < len(list((tmp_path / "killed" / "data").iterdir()))
    assert identities(finished) == before
    recipe = parse_recipe(words[3:7])
    make(recipe.data, tmp_path / "straight", shard_tokens=20_000)
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


def test_a_bad_row_is_one_line_and_what_is_finished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    documents = texts(150)
    path = write_lines(tmp_path / "a.jsonl", documents)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[140] = b'{"text": "cut\n'
    path.write_bytes(b"".join(lines))
    words = ["--data.path", "json", "--data.data_files", f"[{path}]", "--num_workers", "1", "--shard_tokens", "2000"]
    assert command(monkeypatch, "tokenize", "--output", str(tmp_path / "out"), *words) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith(f"error: {path}: byte {sum(map(len, lines[:140]))}: not JSON: ")
    assert errors.endswith("set data.on_bad_row: skip to leave it out\n")
    assert errors.count("\n") == 1
    before = identities(list((tmp_path / "out" / "data").iterdir()))
    assert len(before) >= 2

    data = DataConfig(path="json", data_files=[str(path)], on_bad_row="skip")
    manifest = make(data, tmp_path / "out")
    assert manifest["totals"]["train"]["bad_rows"] == 1
    loaded: Any = datasets.load_dataset(str(tmp_path / "out"), streaming=True)
    assert [row["input_ids"] for row in loaded["train"]] == [ids(text) for text in documents[:140] + documents[141:]]
    assert before.items() <= identities(list((tmp_path / "out" / "data").iterdir())).items()


def test_refusals_are_one_line(made: Made, tmp_path: Path) -> None:
    train_tokenizer(made.train, vocab_size=300).save(str(tmp_path / "tokenizer.json"))
    shorter = write_lines(tmp_path / "train_1.jsonl", made.train[150:-1])
    data = made.data
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    cases: list[tuple[DataConfig, dict[str, Any], str]] = [
        (
            replace(data, tokenizer=str(tmp_path / "tokenizer.json")),
            {},
            r"data\.tokenizer: \S+ \(\w+\): the shards in \S+ were made with \w+;",
        ),
        (replace(data, text_column="body"), {}, r"data\.text_column: body: the shards in \S+ were made with text; name another --output"),
        (data, {"shard_tokens": 3000}, r"--shard_tokens: 3000: the shards in \S+ were made with 2000;"),
        (
            replace(data, data_files=[data.data_files[0], str(shorter)]),
            {},
            r"data\.data_files: .*: other files or sizes than those that \S+ was",
        ),
        (replace(data, data_files=[data.data_files[0]]), {}, r"data\.data_files: .*: other files or sizes"),
        (replace(data, mixture=[SourceConfig("text"), SourceConfig("json")]), {}, r"data\.mixture: 2 sources: tokenize each on its own"),
        (replace(data, tokens_column="input_ids"), {}, r"data\.tokens_column: input_ids: holds tokens already"),
        (data, {"output": tmp_path / "foreign"}, r"--output: \S+foreign: holds thesis\.tex, which `fullshard tokenize` did not write"),
    ]
    before = contents(made.output)
    for changed, options, message in cases:
        with pytest.raises(UserError, match=f"^{message}") as error:
            make(changed, **{"output": made.output} | options)
        assert "\n" not in str(error.value)
    assert contents(made.output) == before


def rows(data: DataConfig, count: int) -> torch.Tensor:
    corpus = list_corpus(data, held_out=False)
    return next(
        train_batches(
            data=data, tokenizer=load_tokenizer(data.tokenizer), corpus=corpus, seed=0, rank=0, world_size=1, global_batch_size=count
        )
    )


def test_training_reads_the_same_rows_as_from_the_text(made: Made, tmp_path: Path) -> None:
    """One file in one stream, in order: where the documents are dealt alike the rows are alike, over an epoch's end too."""
    data = replace(made.data, data_files=made.data.data_files[1:], num_streams=1, shuffle_window=1, sequence_length=32)
    make(data, tmp_path / "output", shard_tokens=10**6)
    tokenized = replace(data, path=str(tmp_path / "output"), data_files=None, evaluation_files=None)
    tokenized = replace(tokenized, tokens_column="input_ids", evaluation_split="validation")
    count = 2 * sum(len(ids(text)) for text in made.train[150:]) // 33
    assert torch.equal(rows(data, count), rows(tokenized, count))
    held_out = [
        evaluation_rows(data=either, tokenizer=bundled(), corpus=list_corpus(either), rank=0, world_size=1, max_rows=50)
        for either in (data, tokenized)
    ]
    assert torch.equal(*held_out)

    train_tokenizer(made.train, vocab_size=300).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^data\.tokenizer: \S+train-00000\.parquet: its tokens are of another tokenizer, \w+ not \w+;"):
        rows(replace(tokenized, tokenizer=str(tmp_path / "tokenizer.json")), 1)


def test_data_shows_what_will_be_read(made: Made, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--data.path", "json", "--data.data_files", json.dumps(made.data.data_files), "--data.num_streams", "2"]
    words += ["--data.evaluation_files", json.dumps(made.data.evaluation_files), "--data.shuffle_window", "1", "--train.max_steps", "10"]
    ended = subprocess.run(
        [*COMMAND, "data", "--rows", "3", *words], capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = ended.stdout
    stored = sum(Path(name).stat().st_size for name in made.data.data_files or [])
    total = made.manifest["totals"]["train"]["tokens"]
    assert f"files: 2 (lines), {stored / 1e6:,.1f} MB stored; column text (text)" in shown
    assert "documents: 190\n" in shown  # A small source is read.
    tokens = re.search(r"tokens: ~([\d,]+), ", shown)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) == pytest.approx(total, rel=0.02)
    assert "streams: 2 of ~95.0 documents each" in shown
    epochs = re.search(r"epochs: ~([\d.]+) in this run", shown)
    assert epochs is not None
    assert float(epochs[1]) == pytest.approx(10 * 16 * 129 / total, rel=0.02)
    assert f"held out: data.evaluation_files: {made.data.evaluation_files[0]}" in shown
    assert "row 0 (stream 0, 129 tokens)" in shown
    assert "row 1 (stream 1, 129 tokens)" in shown
    assert "row 2 (stream 0, 129 tokens)" in shown
    first, second = shown.partition("row 1 ")[0], shown.partition("row 1 ")[2]
    assert "├─ train_" in first
    assert "⏎" in first + second  # A document that ends ...
    assert "…" in first + second  # ... and one that the row cuts.
    begun = re.findall(r"tokens 0 to \d+\n│ (.*)", shown)  # What stands under a document's name is its own text.
    assert len(begun) > 3
    assert [line for line in begun if not re.match(r"\d/\d+ |a?⏎$", line)] == []
    words = ["--data.path", str(made.output), "--data.tokens_column", "input_ids", "--data.evaluation_split", "validation"]
    words += ["--data.num_streams", "1", "--data.shuffle_window", "1"]
    assert command(monkeypatch, "data", "--rows", "1", *words) == 0
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "documents: 190\n" in output  # Parquet: counted.
    assert "column input_ids (token ids)" in output
