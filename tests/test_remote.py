"""Streaming from a server: faults change no row, a server that is gone costs no step, and the recipes for real data run from a Hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fullshard.data.batches import Batches, train_batches, weighed
from fullshard.data.sources import list_corpus
from fullshard.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer
from fullshard.errors import UserError
from fullshard.recipe.fields import DataConfig
from support import ROOT
from support.launcher import launch
from support.server import Server, sometimes

FAULTS = ("503", "429", "reset", "reset_body", "cut", "stall")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three parquet files and two of JSON lines, 300 documents in all."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    documents = [f"document {number} " * (3 + number % 17) for number in range(300)]
    for number in range(3):
        pq.write_table(pa.table({"text": documents[number * 60 : number * 60 + 60]}), folder / f"{number}.parquet", row_group_size=20)
    for number in range(2):
        lines = [json.dumps({"text": text}) for text in documents[180 + 60 * number : 240 + 60 * number]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def read(url: str, kind: str, tokenizer: Any, **changes: Any) -> Batches:
    path, ending, count = {"parquet": ("parquet", "parquet", 3), "json": ("json", "jsonl", 2)}[kind]
    files = [f"{url}/{number}.{ending}" for number in range(count)]
    data = replace(
        DataConfig(
            path=path,
            data_files=files,
            num_streams=4,
            sequence_length=64,
            num_workers=0,
            timeout_seconds=0.3,
            max_retries=20,
        ),
        **changes,
    )
    corpus = list_corpus(data, held_out=False)
    return train_batches(data=data, tokenizer=tokenizer, corpus=corpus, seed=0, rank=0, world_size=1, global_batch_size=8)


@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_faulty_server_gives_the_rows_of_a_clean_one(corpus, tokenizer, kind, workers, monkeypatch):
    """D15: each request fails with probability 0.4 in one of six ways; 20 steps are more than an epoch."""
    monkeypatch.setattr("fullshard.data.hub.LONGEST_WAIT_S", 0.2)
    clean = [batch.tolist() for batch, _ in zip(read(str(corpus), kind, tokenizer), range(20), strict=False)]
    with Server(corpus, faults=sometimes(0.4, *FAULTS, seed=1)) as server:
        faulty = read(server.url, kind, tokenizer, num_workers=workers)
        assert [next(faulty).tolist() for _ in range(20)] == clean
        assert faulty.counts()["retries"] > 0
        assert sum("read again after" in note for note in faulty.notes().values()) == 1  # Once a source.


def test_a_missing_file_is_told_at_once(corpus, tokenizer):
    (corpus / "1.parquet").unlink()
    with Server(corpus) as server, pytest.raises(UserError, match=r"/1\.parquet: ") as error:
        read(server.url, "parquet", tokenizer)
    assert "\n" not in str(error.value)
    assert server.heads["/1.parquet"] + server.gets["/1.parquet"] <= 2  # Not retried: fsspec asks by HEAD, then by GET.


def logged(folder: Path) -> dict[int, list[Any]]:
    """Documents of each row of the run; a row that is logged twice fails."""
    lines = [json.loads(line) for path in sorted((folder / "documents").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert len({line["row"] for line in lines}) == len(lines)
    return {line["row"]: line["documents"] for line in lines}


def test_a_server_that_dies_ends_in_a_checkpoint_and_the_run_goes_on_from_it(tmp_path, tokenizer):
    """The documents and the losses of both parts together are those of a run that was not stopped. The second part runs at one process and
    reads from another address."""
    folder = tmp_path / "served"
    folder.mkdir()
    for number in range(6):
        texts = [f"file {number} document {row} " * 10 for row in range(400)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=4)
    settings = {
        "data__path": "parquet",
        "data__evaluation_documents": 8,
        "data__shuffle_window": 4,
        "data__log_documents": "true",
        "data__max_retries": 2,
        "data__timeout_seconds": 2,
        "logging__every": 1,
        "train__max_steps": 40,
        "placement": "fsdp_fp32.yaml",
    }

    def files(server: Server) -> str:
        return json.dumps([f"{server.url}/{number}.parquet" for number in range(6)])

    def read_from(server: Server) -> DataConfig:
        return DataConfig(path="parquet", data_files=json.loads(files(server)), evaluation_documents=8, num_streams=4)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with Server(folder) as server:  # Before the run a small source is read once.
        weighed(list_corpus(data := read_from(server), held_out=False), data=data, tokenizer=tokenizer)
        before = server.total_gets
    with Server(folder) as server:
        whole = launch(straight, data__data_files=files(server), **settings).check()
        gets = server.total_gets
    with Server(folder, die_after_gets=before + (gets - before) * 3 // 4) as server:
        first = launch(broken, data__data_files=files(server), **settings)
    assert first.returncode != 0
    lines = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, first.stderr
    assert "lost after 2 retries" in lines[0]
    assert "--checkpoint.resume auto" in lines[0]
    assert "Error: " not in first.stderr.split("error: ")[0], "a traceback before the line"
    done = first.metrics[-1]["step"]
    assert 1 <= done < 40
    assert (broken / "checkpoints" / f"step_{done:08}").is_dir()

    with Server(folder) as server:
        resume = {"checkpoint__resume": "auto", "launcher": ["--num_processes", "1"]}
        second = launch(broken, data__data_files=files(server), **resume, **settings).check()
    assert [line["step"] for line in second.metrics] == list(range(1, 41))
    assert logged(broken) == logged(straight)
    for mine, theirs in zip(second.column("train/loss"), whole.column("train/loss"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)  # Another world size: sums in another order.


@pytest.mark.parametrize("recipe", ["pretrain_llama3_160m.yaml", "pretrain_llama3_1b.yaml"])
def test_the_recipes_for_real_data_run_from_a_hub(recipe, tmp_path):
    """The YAML as it is but for the model's size and the length of the run: dataset, configuration, split, column and tokenizer by name."""
    dataset, tokenizer = tmp_path / "dataset", tmp_path / "tokenizer"
    for folder in (dataset / "sample" / "10BT", dataset / "sample" / "100BT"):
        folder.mkdir(parents=True)
        for number in range(3):
            texts = [f"{folder.name} file {number} document {row} " * 40 for row in range(200)]
            columns = {"text": texts, "id": [f"{row}" for row in range(200)], "score": [3.5] * 200}
            pq.write_table(pa.table(columns), folder / f"{number:03}_00000.parquet", row_group_size=50)
    configs = [f"- config_name: sample-{size}\n  data_files:\n  - split: train\n    path: sample/{size}/*" for size in ("10BT", "100BT")]
    (dataset / "README.md").write_text("---\nconfigs:\n" + "\n".join(configs) + "\n---\n")
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(BUNDLED_TOKENIZER.read_bytes())
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    with Server() as server:
        server.hub.add("datasets", "HuggingFaceFW/fineweb-edu", dataset)
        server.hub.add("models", "HuggingFaceTB/SmolLM2-135M", tokenizer)
        launched = launch(
            tmp_path / "run",
            config=str(ROOT / "recipes" / recipe),
            environment=server.hub.environment(tmp_path / "hf"),
            model__num_attention_heads=4,
            model__num_key_value_heads=2,
            train__max_steps=2,
            optim__warmup_steps=1,
            optim__decay_steps=1,
            data__evaluation_documents=20,
            evaluation__every=0,
            checkpoint__every=0,
        ).check()
    assert len(launched.metrics) == 2
    assert launched.column("eval/loss")
    assert launched.config["data"]["path"] == "HuggingFaceFW/fineweb-edu"
