"""What reading costs: tokenizing on the fly, tokenized data, packing, going on at 90 %, and the wait for data in the debug recipe.

python benchmarks/data.py [--rounds 3] [--gigabytes 2] [--wait_steps 300] [--write]

One core, no loader workers, unless said otherwise; what is compared is measured in turn in one run, since machines drift. The text is the
standard library's, the tokenizer the bundled one. With --write the record goes to benchmarks/records/data.json, which README quotes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "data.json"
MARKED = re.compile(r"<!-- data -->.*?<!-- /data -->", re.S)
sys.path.insert(0, str(ROOT / "tests"))  # support/server.py: the local HTTP server that the tests use too.
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One core, as a loader worker has.

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from fullshard.data.batches import Batches, train_batches  # noqa: E402
from fullshard.data.sources import list_corpus, stdlib_files  # noqa: E402
from fullshard.data.streams import WHOLE, Tokenized, encoder, pack  # noqa: E402
from fullshard.data.tokenizer import load_tokenizer  # noqa: E402
from fullshard.recipe.fields import DataConfig  # noqa: E402
from support.server import Server  # noqa: E402

TOKENIZER = load_tokenizer("bundled")


def batches(data: DataConfig, *, rows: int, position: dict[str, Any] | None = None) -> Batches:
    corpus = list_corpus(data, held_out=False)
    return train_batches(
        data=data, tokenizer=TOKENIZER, corpus=corpus, seed=0, rank=0, world_size=1, global_batch_size=rows, position=position
    )


def tokens_per_second(data: DataConfig, *, tokens: int) -> float:
    """Of packed rows of a batch of 8, from the first to at least `tokens` tokens."""
    start, seen = time.perf_counter(), 0
    for batch in batches(data, rows=8):
        seen += batch.numel()
        if seen >= tokens:
            break
    return seen / (time.perf_counter() - start)


def in_child(function: Callable[[], float]) -> float:
    """Its result from a forked process, as a loader worker is one: what ran before leaves the heap in pieces, which costs up to 15 %."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function()))
    child.start()
    result: float = ours.recv()
    child.join()
    return result


def tokenizing(folder: Path, texts: list[str], *, rounds: int) -> dict[str, Any]:
    """On-the-fly tokenization from parquet to packed rows, against encode_batch on the same texts; packing against tokenizing."""
    path = folder / "text.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=256)
    data = DataConfig(path="parquet", data_files=[str(path)], sequence_length=2048, num_streams=8, num_workers=0)
    backend, encode = TOKENIZER.backend_tokenizer, encoder(TOKENIZER)
    total = sum(len(encoding.ids) + 1 for encoding in backend.encode_batch(texts, add_special_tokens=False))
    streaming, alone, packing = [], [], []

    def encode_alone() -> float:
        start = time.perf_counter()
        backend.encode_batch(texts, add_special_tokens=False)
        return total / (time.perf_counter() - start)

    def pack_after_encoding() -> float:
        start = time.perf_counter()
        documents = encode(texts)
        encoded = time.perf_counter()
        rows = sum(1 for _ in pack(_placed(documents), length=2049, source=0, token=0, carry=True, spans=False))
        assert rows == total // 2049
        return (time.perf_counter() - encoded) / (encoded - start)

    for _ in range(rounds):
        alone.append(in_child(encode_alone))
        streaming.append(in_child(lambda: tokens_per_second(data, tokens=int(total * 0.98))))
        packing.append(in_child(pack_after_encoding))
    return {
        "encode_batch_tokens_per_second": statistics.median(alone),
        "streaming_tokens_per_second": statistics.median(streaming),
        "streaming_over_encode_batch": statistics.median(mine / theirs for mine, theirs in zip(streaming, alone, strict=True)),
        "packing_over_tokenizing": statistics.median(packing),
    }


def _placed(documents: list[np.ndarray]) -> Iterator[Tokenized]:
    return (((0, 0, number, 0), "", tokens, WHOLE) for number, tokens in enumerate(documents))


def write_tokens(path: Path, documents: list[np.ndarray], *, gigabytes: float) -> int:
    """A parquet file of input_ids, 4 bytes each, documents repeated until there is so much; returns the number of tokens."""
    ids = pa.array(documents, type=pa.list_(pa.int32()))
    table = pa.table({"input_ids": ids})
    size = sum(len(document) for document in documents)
    times = max(1, round(gigabytes * 1e9 / 4 / size))
    # Not compressed: the file has the size that it is said to have.
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(times):
            writer.write_table(table, row_group_size=512)
    return size * times


def tokenized(folder: Path, documents: list[np.ndarray], *, rounds: int) -> dict[str, Any]:
    """Packed rows of 2,049 from parquet of token ids."""
    path = folder / "tokens.parquet"
    total = write_tokens(path, documents, gigabytes=0.4)
    data = DataConfig(path="parquet", data_files=[str(path)], tokens_column="input_ids", sequence_length=2048, num_streams=8, num_workers=0)
    return {
        "tokenized_tokens_per_second": statistics.median(in_child(lambda: tokens_per_second(data, tokens=total)) for _ in range(rounds))
    }


def resuming(folder: Path, documents: list[np.ndarray], *, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Time to the first batch, from the beginning and from 90 % of a corpus of 20 files on a local HTTP server, and what it asked for."""
    served = folder / "served"
    served.mkdir()
    files, total = 20, 0
    for number in range(files):
        total += write_tokens(served / f"{number:02}.parquet", documents[number::2], gigabytes=gigabytes / files)
    size = sum(path.stat().st_size for path in served.iterdir())
    local = DataConfig(
        path="parquet",
        data_files=[str(served)],
        tokens_column="input_ids",
        sequence_length=2048,
        num_streams=8,
        num_workers=0,
    )
    run = batches(local, rows=64)
    steps = int(total * 0.9) // (64 * 2049)
    for _ in itertools.islice(run, steps):
        pass
    position = json.loads(json.dumps(run.position()))
    fresh, resumed, opened = [], [], []
    with Server(served) as server:
        remote = replace(local, data_files=[f"{server.url}/{number:02}.parquet" for number in range(files)])
        for _ in range(rounds):
            start = time.perf_counter()
            next(batches(remote, rows=64))
            fresh.append(time.perf_counter() - start)
            before = dict(server.gets)
            start = time.perf_counter()
            next(batches(remote, rows=64, position=position))
            resumed.append(time.perf_counter() - start)
            opened.append(sum(1 for path, count in server.gets.items() if count > before.get(path, 0)))
    return {
        "corpus_gb": size / 1e9,
        "fresh_first_batch_s": statistics.median(fresh),
        "resumed_first_batch_s": statistics.median(resumed),
        "files": files,
        "files_opened_at_resume": max(opened),
        "streams": 8,
    }


def waiting(*, steps: int) -> dict[str, Any]:
    """Share of the step in which the debug recipe waits for data, two ranks with a loader worker each on this machine's cores."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/fsdp.yaml", "recipes/pretrain.py"),
            *(f"--output_dir={folder}", f"--train.max_steps={steps}", "--logging.trackers=[]", "--logging.sample_tokens=0"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    values = [line["throughput/data_wait_pct"] for line in lines[1:]]
    return {"data_wait_pct_mean": statistics.mean(values), "data_wait_pct_max": max(values), "wait_steps": steps}


def table(record: dict[str, Any]) -> str:
    """The record as README's Markdown."""
    wait = f"{record['data_wait_pct_mean']:.1f} % of the step (at most {record['data_wait_pct_max']:.1f} %)"
    extra = record["resumed_first_batch_s"] - record["fresh_first_batch_s"]
    lines = [
        "| what reading costs | |",
        "|---|---|",
        f"| tokenizing on the way, text to packed rows, one core | {record['streaming_over_encode_batch']:.2f} of `encode_batch` alone |",
        f"| packing | {record['packing_over_tokenizing']:.1%} of tokenizing |",
        f"| tokenized data to packed rows, one core | {record['tokenized_tokens_per_second'] / 1e6:.0f} M tokens/s |",
        f"| first batch at 90 % of {record['corpus_gb']:.1f} GB over HTTP | {extra:+.2f} s against a fresh start; "
        f"{record['files_opened_at_resume']} of {record['files']} files opened for {record['streams']} streams |",
        f"| waiting for data, debug recipe | {wait} |",
    ]
    note = f"{record['hardware']}, commit {record['git_commit'][:12]}, `{record['command']}`."
    return "\n".join(["<!-- data -->", *lines, "", note, "<!-- /data -->"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--wait_steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="update the record and README.md")
    arguments = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()[0]]
    # Of the length of web pages: what is measured is the cost per token and per document of such.
    texts = [text[start : start + 4000] for text in texts for start in range(0, len(text), 4000)]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {
        "command": f"python benchmarks/data.py --rounds {arguments.rounds} --gigabytes {arguments.gigabytes:g} "
        f"--wait_steps {arguments.wait_steps}",
        "hardware": f"{psutil.cpu_count()} CPU cores, {platform.machine()}, shared machine",
        "git_commit": commit,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = encoder(TOKENIZER)(texts)
        record |= tokenizing(folder, texts, rounds=arguments.rounds)
        record |= tokenized(folder, documents, rounds=arguments.rounds)
        record |= resuming(folder, documents, gigabytes=arguments.gigabytes, rounds=arguments.rounds)
    record |= waiting(steps=arguments.wait_steps)
    print(json.dumps(record, indent=1))
    print(table(record))
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        readme = ROOT / "README.md"
        readme.write_text(MARKED.sub(lambda _: table(record), readme.read_text()))


if __name__ == "__main__":
    main()
