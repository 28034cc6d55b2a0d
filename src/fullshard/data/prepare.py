"""Tokenize a source once: its documents -> a dataset of token ids, continued where a kill left it.

The work is cut by bytes of the source, one unit a shard, so that what a shard holds depends on the recipe and the files alone. While it is
under way `.progress/` says what the finished shards were made with and of; in the end the manifest takes that over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fullshard import __version__
from fullshard.data.corpus import COMPRESSED, File, Source, sources_of
from fullshard.data.pieces import Piece, Reading, Tally
from fullshard.data.sample import take_sample
from fullshard.data.shards import COLUMN, Show, Unit, make_shards
from fullshard.data.sources import list_corpus
from fullshard.data.streams import encoder, reading_of, whole
from fullshard.data.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from fullshard.errors import UserError, first_line
from fullshard.files import write_whole
from fullshard.recipe.fields import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FIX = "name another --output, or remove it"


def tokenize(*, data: DataConfig, output: Path, num_workers: int, shard_tokens: int, console: Console) -> dict[str, Any]:
    """Writes the shards that `output` lacks, the manifest and the card; returns the manifest.

    output: a folder that is empty or that this function left. Raises UserError for a source that cannot be read, and where finished shards
    were made with another tokenizer, other files or other settings; what is finished stays.
    """
    _check_data(data)
    _check_folder(output)
    corpus = list_corpus(data, held_out=_has_held_out(data))
    tokenizer = load_tokenizer(data.tokenizer)
    sources = {"train": corpus.training[0]} | ({"validation": corpus.held_out[0]} if corpus.held_out else {})
    readings = {split: reading_of(source, data, tokenizer) for split, source in sources.items()}

    old = _read_json(output / "manifest.json") or {}
    made_with = old.get("made_with") or _read_json(output / ".progress" / "made_with.json")
    settings: dict[str, Any] = {
        "data.tokenizer": tokenizer_hash(tokenizer),
        "data.text_column": data.text_column,
        "data.path": {split: source.builder for split, source in sources.items()},
        "--shard_tokens": shard_tokens,
    }
    _check_settings(output, made_with, settings, tokenizer_name=data.tokenizer)
    if made_with is None:
        encode = encoder(tokenizer)
        made_with = settings | {
            "shard_bytes": {split: _shard_bytes(source, readings[split], encode, shard_tokens) for split, source in sources.items()}
        }
        write_whole(output / ".progress" / "made_with.json", json.dumps(made_with))
    units = [unit for split, source in sources.items() for unit in _units(source, split, readings[split], made_with["shard_bytes"][split])]
    records = {entry["file"]: entry for entry in old.get("shards", [])}
    for sidecar in (output / ".progress").glob("*-*.json"):
        entry = json.loads(sidecar.read_text(encoding="utf-8"))
        records[entry["file"]] = entry
    _check_records(output, records, units, sources)
    missing = [unit for unit in units if not _is_finished(output, records.get(unit.file))]

    total = sum(unit.bytes for unit in units)
    done = total - sum(unit.bytes for unit in missing)
    bytes_per_token = made_with["shard_bytes"]["train"] / shard_tokens
    tally = Tally()
    with _bar(console, total=total, done=done, bytes_per_token=bytes_per_token) as show:
        for entry in make_shards(missing, output=output, tokenizer=tokenizer, num_workers=num_workers, tally=tally, show=show):
            records[entry["file"]] = entry
            for _, line in tally.take_notes():
                console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
    shards = [records[unit.file] for unit in units]
    manifest = _manifest(data, tokenizer, made_with, shards)
    if not manifest["totals"]["train"]["documents"]:
        raise UserError(f"{sources['train'].name}: holds no document")
    if missing or not old:
        write_whole(output / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    if not (output / "README.md").exists():
        write_whole(output / "README.md", _card(manifest))
    shutil.rmtree(output / ".progress", ignore_errors=True)
    return manifest


def _check_data(data: DataConfig) -> None:
    if data.mixture:
        fix = "tokenize each on its own, into a folder of its own; a mixture can then name the folders"
        raise UserError(f"data.mixture: {len(data.mixture)} sources: {fix}")
    if data.tokens_column:
        raise UserError(f"data.tokens_column: {data.tokens_column}: holds tokens already; name a data.text_column")


def _has_held_out(data: DataConfig) -> bool:
    named = data.evaluation_files or data.evaluation_path or data.evaluation_documents
    return bool(named) or data.evaluation_split not in (None, data.split) or sources_of(data)[0].path == "stdlib"


def _check_folder(output: Path) -> None:
    if (output / "manifest.json").is_file() or (output / ".progress").is_dir():
        return
    others = [entry.name for entry in output.iterdir() if not entry.name.startswith(".")]
    if others:
        raise UserError(f"--output: {output}: holds {others[0]}, which `fullshard tokenize` did not write; name an empty folder")


def _check_settings(output: Path, made_with: dict[str, Any] | None, settings: dict[str, Any], *, tokenizer_name: str) -> None:
    for key, value in settings.items():
        if made_with is not None and made_with.get(key) != value:
            shown = f"{tokenizer_name} ({value})" if key == "data.tokenizer" else value
            raise UserError(f"{key}: {shown}: the shards in {output} were made with {made_with.get(key)}; {FIX}")


def _check_records(output: Path, records: dict[str, Any], units: Sequence[Unit], sources: dict[str, Source]) -> None:
    """Every finished shard is one that would be made now."""
    expected = {unit.file: unit.source for unit in units}
    for file, entry in sorted(records.items()):
        if entry["source"] != expected.get(file):
            was = entry["source"]
            name = sources[entry["split"]].name if entry["split"] in sources else "data.evaluation_split: null"
            files = was["first"] if was["files"] == 1 else f"{was['first']} to {was['last']}"
            raise UserError(f"{name}: other files or sizes than those that {output / file} was made of, {files}; {FIX}")


def _is_finished(output: Path, record: dict[str, Any] | None) -> bool:
    if record is None or not record["documents"]:
        return record is not None
    path = output / record["file"]
    return path.is_file() and path.stat().st_size == record["bytes"]


def _shard_bytes(source: Source, reading: Reading, encode: Callable[[list[str]], list[np.ndarray]], shard_tokens: int) -> int:
    """Bytes of the source that make about shard_tokens tokens."""
    sample = take_sample(source, reading, encode, 0)
    if sample.stored_bytes and sample.tokens:
        return max(1, round(shard_tokens * sample.stored_bytes / sample.tokens))
    # Of English, 4 bytes or one compressed byte make a token.
    return shard_tokens * (1 if source.files and source.files[0].url.lower().endswith(COMPRESSED) else 4)


def _units(source: Source, split: str, reading: Reading, shard_bytes: int) -> Iterator[Unit]:
    """The source in its files' order, cut into units of at most shard_bytes where files can be entered anywhere, else at files' borders.

    A file that changes changes no unit of the files before it.
    """
    groups: list[list[Piece]] = []
    filled = shard_bytes
    splittable = source.splittable  # Looks at all files.
    for file in source.files:
        parts = -(-file.size // shard_bytes) if splittable and file.take is None else 1
        if parts > 1:
            groups += [[Piece(file, file.size * part // parts, file.size * (part + 1) // parts)] for part in range(parts)]
            filled = shard_bytes
        elif filled + file.size > shard_bytes or not groups:
            groups.append([whole(file)])
            filled = file.size
        else:
            groups[-1].append(whole(file))
            filled += file.size
    root = _root(source.files)
    reading = replace(reading, source=replace(source, files=()))  # It goes to the workers with each unit.
    for number, pieces in enumerate(groups):
        yield Unit(
            split=split,
            file=f"data/{split}-{number:05}.parquet",
            source=_described(pieces, root),
            bytes=sum(piece.end - piece.begin for piece in pieces),
            pieces=tuple(pieces),
            reading=reading,
        )


def _root(files: Sequence[File]) -> str:
    """Folder that holds all local files: where they lie on this machine is nobody's business, nor a reason to begin anew."""
    local = [str(Path(file.url).absolute().parent) for file in files if "://" not in file.url]
    return os.path.commonpath(local) if local else ""


def _described(pieces: Sequence[Piece], root: str) -> dict[str, Any]:
    """The pieces by the first and last file's names and bytes, and a checksum of the whole list."""

    def name(file: File) -> str:
        return file.url if "://" in file.url else os.path.relpath(file.url, root)

    listed = [[name(piece.file), piece.file.size, piece.file.skip, piece.file.take, piece.begin, piece.end] for piece in pieces]
    return {
        "files": len(pieces),
        "first": listed[0][0],
        "begin": pieces[0].begin,
        "last": listed[-1][0],
        "end": pieces[-1].end,
        "xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(listed).encode()),
    }


@contextmanager
def _bar(console: Console, *, total: int, done: int, bytes_per_token: float) -> Iterator[Show]:
    """Around the work, of which `done` of `total` bytes are done."""
    columns = (
        TextColumn("{task.fields[megabytes]}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal or console.is_dumb_terminal) as progress:
        task = progress.add_task("", total=total, completed=done, megabytes="", speed="")

        def show(finished_bytes: int, finished_tokens: int, tokens: int) -> None:
            # Units in work are told by their tokens, at the ratio of those that are finished.
            per_token = finished_bytes / finished_tokens if finished_tokens else bytes_per_token
            now = min(total, done + finished_bytes + round((tokens - finished_tokens) * per_token))
            speed = tokens / max(progress.tasks[0].elapsed or 0.0, 1e-9)
            megabytes = f"{now / 1e6:,.0f}/{total / 1e6:,.0f} MB"
            progress.update(task, completed=now, megabytes=megabytes, speed=f"{speed:,.0f} tokens/s")

        yield show


def _manifest(
    data: DataConfig, tokenizer: PreTrainedTokenizerFast, made_with: dict[str, Any], shards: list[dict[str, Any]]
) -> dict[str, Any]:
    kept = [entry for entry in shards if entry["documents"]]
    totals = {
        split: {key: sum(entry[key] for entry in shards if entry["split"] == split) for key in ("documents", "tokens", "bytes", "bad_rows")}
        | {"shards": sum(entry["split"] == split for entry in kept)}
        for split in dict.fromkeys(entry["split"] for entry in shards)
    }
    return {
        "fullshard": __version__,
        "tokenizer": {
            "name": _published(data.tokenizer),
            "hash": made_with["data.tokenizer"],
            "vocab_size": vocabulary_size(tokenizer),
            "end_of_text_id": int(tokenizer.eos_token_id),
        },
        "totals": totals,
        "data": _published_data(data),
        "made_with": made_with,
        "shards": shards,
    }


def _published_data(data: DataConfig) -> dict[str, Any]:
    """The recipe's section without where its files lie on this machine: the folder may be pushed to the Hub."""
    section = asdict(data)
    for key in ("data_files", "evaluation_files"):
        if section[key]:
            section[key] = [_published(name, local=True) for name in section[key]]
    for key in ("path", "evaluation_path", "tokenizer"):
        if section[key]:
            section[key] = _published(section[key])
    return section


def _published(name: str, *, local: bool = False) -> str:
    """URLs and Hub names whole; of what is local, or is found here, the last part."""
    path = Path(name.removeprefix("file://")).expanduser()
    return os.path.basename(os.path.abspath(path)) if "://" not in str(path) and (local or path.exists()) else name


def _card(manifest: dict[str, Any]) -> str:
    """The dataset card: its front matter is what `datasets` and the Hub read."""
    splits = [split for split, total in manifest["totals"].items() if total["documents"]]
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in splits]
    front = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]}, sort_keys=False)
    totals = "\n".join(
        f"| {split} | {total['documents']:,} | {total['tokens']:,} | {total['bytes'] / 1e6:,.1f} |"
        for split, total in manifest["totals"].items()
    )
    tokenizer = manifest["tokenizer"]
    return f"""---
{front}---

A tokenized dataset: one document a row, its token ids in `{COLUMN}`, with one end-of-text (id {tokenizer["end_of_text_id"]}) at the end.

| split | documents | tokens | MB |
|---|---|---|---|
{totals}

Tokenizer: `{tokenizer["name"]}`, {tokenizer["vocab_size"]:,} tokens, hash `{tokenizer["hash"]}`.
Made by `fullshard tokenize` {manifest["fullshard"]}; `manifest.json` says from what, with a checksum of every file.
"""


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: {first_line(error)}; {FIX}") from error
