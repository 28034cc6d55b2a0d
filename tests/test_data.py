"""The data order belongs to the recipe: same global batch at any world size, every token once an epoch, mistakes in one line."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from fullshard.assets.train_tokenizer import VOCAB_SIZE, bytes_per_token, train_tokenizer
from fullshard.data.batches import Batches, train_batches, weighed
from fullshard.data.dealing import deal
from fullshard.data.held_out import evaluation_rows
from fullshard.data.sources import list_corpus, stdlib_files
from fullshard.data.tokenizer import BUNDLED_TOKENIZER, END_OF_TEXT, load_tokenizer
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig

NUM_STREAMS = 12


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled")


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    """40 training and 5 held-out files of distinct content and uneven length; one is empty, one is longer than many rows."""
    for kind, count in (("train", 40), ("held_out", 5)):
        (tmp_path / kind).mkdir()
        for number in range(count):
            repeats = {3: 0, 7: 400}.get(number, (5 + number) * (1 if kind == "train" else 10))
            (tmp_path / kind / f"{number}.txt").write_text(f"{kind} {number} é\n" * repeats, encoding="utf-8")
    return DataConfig(
        path="text",
        data_files=[f"{tmp_path}/train/*.txt"],
        evaluation_files=[f"{tmp_path}/held_out"],
        sequence_length=32,
        num_streams=NUM_STREAMS,
        num_workers=0,
    )


def rows(data: DataConfig, tokenizer, *, rank: int = 0, world_size: int = 1, global_batch_size: int = 24, seed: int = 0) -> Batches:
    return train_batches(
        data=data,
        tokenizer=tokenizer,
        corpus=list_corpus(data, held_out=False),
        seed=seed,
        rank=rank,
        world_size=world_size,
        global_batch_size=global_batch_size,
    )


def held_out_rows(data: DataConfig, tokenizer, *, rank: int = 0, world_size: int = 1, max_rows: int = 7) -> torch.Tensor:
    corpus = list_corpus(data)
    return evaluation_rows(data=data, tokenizer=tokenizer, corpus=corpus, rank=rank, world_size=world_size, max_rows=max_rows)


def documents(data: DataConfig, tokenizer, *, count: int, stream: int = 0, seed: int = 0) -> list[str]:
    """The first `count` documents that one stream yields, decoded from its rows."""
    tokens: list[int] = []
    steps = rows(data, tokenizer, rank=stream, world_size=data.num_streams, global_batch_size=data.num_streams, seed=seed)
    for step in itertools.islice(steps, 2000):
        tokens += step.flatten().tolist()
        if tokens.count(tokenizer.eos_token_id) >= count:
            return tokenizer.decode(tokens).split(END_OF_TEXT)[:count]
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(("world_size", "batch"), [(2, 24), (3, 24), (4, 24), (12, 24), (4, 8), (2, 10)])
def test_global_batch_does_not_depend_on_world_size(corpus, tokenizer, world_size, batch):
    """Also where the batch is no multiple of the 12 streams: a step then goes on at the stream where the one before stopped."""
    alone = rows(corpus, tokenizer, global_batch_size=batch)
    ranks = [rows(corpus, tokenizer, rank=rank, world_size=world_size, global_batch_size=batch) for rank in range(world_size)]
    for _ in range(20):  # More than one epoch of most streams.
        parts = [next(rank) for rank in ranks]
        assert all(part.shape == (batch // world_size, 33) and part.dtype == torch.int64 for part in parts)
        # Row j of the global batch is row j // world_size of rank j % world_size.
        assert torch.equal(next(alone), torch.stack(parts, dim=1).reshape(batch, 33))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_held_out_rows_do_not_depend_on_world_size(corpus, tokenizer, world_size):
    parts = [held_out_rows(corpus, tokenizer, rank=rank, world_size=world_size) for rank in range(world_size)]
    alone = held_out_rows(corpus, tokenizer)
    assert alone.shape == (7, 33)
    for j, row in enumerate(alone):
        assert torch.equal(row, parts[j % world_size][j // world_size])
    assert sum(len(part) for part in parts) == 7
    files = [tokenizer.decode(row).split(" ")[1] for row in alone[:4]]
    assert sorted(files) == ["0", "1", "2", "4"], "the first rows are of one file; number 3 is empty"
    assert held_out_rows(corpus, tokenizer, rank=3, world_size=4, max_rows=2).shape == (0, 33)


def test_each_epoch_reads_every_document_once_in_another_order(corpus, tokenizer):
    data = replace(corpus, num_streams=2)
    files = {path.read_text(encoding="utf-8") for path in Path(corpus.data_files[0]).parent.glob("*.txt")}
    twice = [documents(data, tokenizer, count=2 * 40, stream=stream) for stream in range(2)]
    seen: list[str] = []
    for stream in twice:
        size = next(n for n in range(1, 80) if sorted(stream[:n]) == sorted(stream[n : 2 * n]) and len(set(stream[:n])) == n)
        first, second = stream[:size], stream[size : 2 * size]
        assert first != second  # Of about 20! orders.
        seen += first
    assert sorted(seen) == sorted(files)  # Exactly once: as many documents, so as many end-of-text tokens, as files.


def test_row_stream_is_the_documents_and_one_end_of_text_each(corpus, tokenizer):
    """Rows laid end to end are encode(document) + [eos], one after the other: nothing dropped or doubled at a border of rows or epochs."""
    data = replace(corpus, num_streams=1, num_workers=0)
    read = documents(data, tokenizer, count=90)
    expected = list(
        itertools.chain.from_iterable([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in read)
    )
    steps = itertools.islice(rows(data, tokenizer, global_batch_size=1), len(expected) // 33)
    assert torch.cat([step.flatten() for step in steps]).tolist() == expected[: len(expected) // 33 * 33]


def test_seed_changes_the_order(corpus, tokenizer):
    data = replace(corpus, num_streams=2)
    first = documents(data, tokenizer, count=3, stream=1)
    assert first == documents(data, tokenizer, count=3, stream=1)
    assert first != documents(data, tokenizer, count=3, stream=1, seed=1)


def test_end_of_text_written_in_a_document_is_no_border(tmp_path, tokenizer):
    text = f"a {END_OF_TEXT} b " * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = DataConfig(path="text", data_files=[str(tmp_path / "a.txt")], num_streams=1, sequence_length=64)
    assert tokenizer.eos_token_id not in next(rows(data, tokenizer, global_batch_size=4))


def test_a_rank_opens_only_its_own_files(corpus, tokenizer):
    alone = weighed(list_corpus(corpus, held_out=False), data=corpus, tokenizer=tokenizer)  # By the main process, which opens them all.
    assert alone.weights is not None
    dealt = deal(alone.training[0], alone.weights[0], count=NUM_STREAMS, seed=0, row_tokens=33)
    opened: list[set[str]] = []
    listening = True
    sys.addaudithook(lambda event, args: listening and event == "open" and str(args[0]).endswith(".txt") and opened[-1].add(str(args[0])))
    for rank in range(4):
        opened.append(set())
        own = train_batches(data=corpus, tokenizer=tokenizer, corpus=alone, seed=0, rank=rank, world_size=4, global_batch_size=24)
        list(itertools.islice(own, 60))
    listening = False
    for rank in range(4):
        assert opened[rank] == {piece.file.url for stream in range(rank, NUM_STREAMS, 4) for piece in dealt[stream]}
    assert len(set.union(*opened)) == 40
    assert sum(map(len, opened)) <= 40 + NUM_STREAMS  # A stream's first and last file may be another's too.


def test_other_builders_and_local_datasets_take_the_same_path(tmp_path, tokenizer):
    for name in ("train-0", "train-1", "validation-0"):
        lines = [json.dumps({"id": n, "content": f"{name} {n} " * 20}) for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    small = DataConfig(text_column="content", num_streams=2, sequence_length=64, shuffle_window=1, num_workers=0)
    files = replace(small, path="json", data_files=[f"{tmp_path}/train-*.jsonl"], evaluation_files=[f"{tmp_path}/validation-0.jsonl"])
    folder = replace(small, path=str(tmp_path), evaluation_split="validation")
    for data in (files, folder):
        text = tokenizer.decode(next(rows(data, tokenizer, global_batch_size=8)).flatten())
        assert "train-0 0" in text
        assert "train-1 0" in text
        assert "validation" not in text
        assert "validation-0" in tokenizer.decode(held_out_rows(data, tokenizer)[0])


def test_stdlib_is_split(tokenizer):
    training, held_out = stdlib_files()
    assert not set(training) & set(held_out)
    assert len(training) > 10 * len(held_out) > 100
    assert not [path for path in training + held_out if "site-packages" in path.parts]
    first = next(rows(DataConfig(num_streams=4), tokenizer, world_size=2))
    held = held_out_rows(DataConfig(), tokenizer, max_rows=16)
    assert first.shape == (12, 129)
    assert held.shape == (16, 129)


def test_bundled_tokenizer_is_lossless(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE == 4096
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id < 4096
    assert BUNDLED_TOKENIZER.stat().st_size < 400_000
    generator = random.Random(0)
    texts = [
        "",
        " ",
        "\n\n\t  x",
        "\r\n \r",
        "a\u0000b",
        "naïve 你好 🤦🏽‍♀️ e\u0301",
        "\ufeffx\u2028y\u202e",
        "don 't do n't , .",
        "12345",
        END_OF_TEXT,
    ]
    texts += [bytes(generator.randrange(256) for _ in range(200)).decode("latin-1") for _ in range(20)]
    texts += [
        "".join(chr(generator.choice([generator.randrange(0xD800), generator.randrange(0xE000, 0x110000)])) for _ in range(50))
        for _ in range(20)
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_bundled_tokenizer_compresses_held_out_code():
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()[1]]
    # 3.16 on Python 3.11's 99 held-out files; other versions hold other files.
    assert bytes_per_token(Tokenizer.from_file(str(BUNDLED_TOKENIZER)), texts) > 3.0


def test_training_a_tokenizer_is_deterministic():
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()[1][:10]]
    first = train_tokenizer(texts, vocab_size=600)
    assert first.to_str() == train_tokenizer(texts, vocab_size=600).to_str()
    assert first.get_vocab_size() == 600


def test_tokenizer_from_a_folder_and_from_a_file(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "saved")
    expected = tokenizer.encode("def f():\n    return 1\n")
    for name in (tmp_path / "saved", BUNDLED_TOKENIZER):
        loaded = load_tokenizer(str(name))
        assert loaded.encode("def f():\n    return 1\n") == expected
        assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["nowhere/tokenizer.json", "/nowhere/folder", "nobody/no-such-tokenizer"])
def test_missing_tokenizer_is_one_line_soon(name):
    """With a network the Hub says no, without one it is not waited for."""
    with pytest.raises(UserError, match=r"^data\.tokenizer: \S+: not found; .*$") as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)


def test_tokenizer_without_end_of_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BUNDLED_TOKENIZER.read_text(encoding="utf-8").replace(END_OF_TEXT, "<|x|>"), encoding="utf-8")
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_streams": 5}, r"data\.num_streams: 5: not divisible by 2 processes; use \[1, 5\] processes"),
        (
            {"num_streams": 24, "data_files": ["{tmp}/train/1*.txt"]},
            r"data\.num_streams: 24: .* has only 11 files, .* set it to at most 11",
        ),
        ({"data_files": ["{tmp}/train/1*.txt", "{tmp}/nothing/*.txt"]}, r"data\.data_files: \S+/nothing/\*\.txt: no such file"),
        ({"data_files": None}, r"data\.data_files: null: .*list them here"),
        ({"text_column": "body"}, r"data\.text_column: body: no such column; there are text"),
        ({"split": "validation"}, r"data\.split: validation: has no meaning with data\.path: text"),
        ({"path": "json"}, r"\.txt: .*JSON"),
        ({"path": "parquet"}, r"\S+\.txt: Parquet magic bytes not found"),
        ({"path": "nobody/no-such-dataset", "data_files": None}, r"data\.path: nobody/no-such-dataset: not found"),
        ({"path": "stdlib"}, r"data\.data_files: .* has no meaning with data\.path: stdlib"),
    ],
)
def test_mistakes_in_training_data_are_one_line(corpus, tokenizer, tmp_path, changes, message):
    if changes.get("data_files"):
        changes = changes | {"data_files": [pattern.format(tmp=tmp_path) for pattern in changes["data_files"]]}
    with pytest.raises(UserError, match=f"^.*{message}") as error:
        rows(replace(corpus, **changes), tokenizer, world_size=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation_files": None}, r"data\.evaluation_split: None: no held-out text"),
        ({"evaluation_files": ["{tmp}/none"]}, r"data\.evaluation_files: \S+/none: no such file"),
        ({"evaluation_files": ["{tmp}/train/5.txt"]}, r"data\.evaluation_files: \S+/train/5\.txt: also a training file"),
        ({"sequence_length": 100_000}, r"data\.evaluation_files: .*shorter than one row of 100001 tokens"),
    ],
)
def test_mistakes_in_held_out_data_are_one_line(corpus, tokenizer, tmp_path, changes, message):
    if changes.get("evaluation_files"):
        changes = changes | {"evaluation_files": [pattern.format(tmp=tmp_path) for pattern in changes["evaluation_files"]]}
    with pytest.raises(UserError, match=message) as error:
        held_out_rows(replace(corpus, **changes), tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_that_stops_in_the_middle_of_a_stream_ends_in_silence(corpus, workers):
    script = """
import sys
from fullshard.recipe.fields import DataConfig
from fullshard.data.batches import train_batches
from fullshard.data.sources import list_corpus
from fullshard.data.tokenizer import load_tokenizer
data = DataConfig(path="text", data_files=[sys.argv[1]], num_streams=2, sequence_length=32, num_workers=int(sys.argv[2]))
corpus = list_corpus(data, held_out=False)
batches = train_batches(
    data=data, tokenizer=load_tokenizer("bundled"), corpus=corpus, seed=0, rank=0, world_size=1, global_batch_size=2
)
next(batches)
"""
    ended = subprocess.run([sys.executable, "-c", script, corpus.data_files[0], str(workers)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_bad_bytes_are_named(tmp_path, tokenizer):
    (tmp_path / "[bad].txt").write_bytes(b"\xff\xfe" * 40)
    data = DataConfig(path="text", data_files=[str(tmp_path / "[bad].txt")], num_streams=1, sequence_length=8, num_workers=0)
    with pytest.raises(UserError, match=r"\[bad\]\.txt: row 0: 'utf-8' codec can't decode"):
        rows(data, tokenizer)


def test_source_without_documents_ends(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("text\n", encoding="utf-8")
    data = DataConfig(path="csv", data_files=[str(tmp_path / "a.csv")], num_streams=1, num_workers=0)
    with pytest.raises(UserError, match="stream 0 of 1 has no document"):
        rows(data, tokenizer)
