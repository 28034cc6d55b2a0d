"""Recipe -> corpus: which files there are to train and to evaluate on, with their sizes and formats. Nothing is read from them.

`datasets` resolves what a Hub name or a folder holds; the list is made once, by the main process, and handed to the others.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fullshard.data.corpus import COMPRESSED, ENDINGS, FILE_BUILDERS, Corpus, File, Source, file_format, sources_of
from fullshard.data.hub import ask_hub, is_transient, open_options, reason, retrying
from fullshard.errors import UserError, one_line
from fullshard.recipe.fields import DataConfig, SourceConfig

HELD_OUT_EVERY = 20  # One file in so many of the standard library is held out.
LISTING_THREADS = 16


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """(training, held-out) Python files of the running interpreter's standard library, sorted by relative path.

    A file is held out by a hash of its relative path, so that it is held out on every machine and in every version of Python that has it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    training: list[Path] = []
    held_out: list[Path] = []
    for relative in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(relative.split("/")) and _is_utf8(root / relative):
            (held_out if zlib.crc32(relative.encode()) % HELD_OUT_EVERY == 0 else training).append(root / relative)
    return training, held_out


def list_corpus(data: DataConfig, *, held_out: bool = True) -> Corpus:
    """The files of the training and, if asked for, the held-out sources.

    Raises UserError for a source that does not exist, for held-out text that is missing or also a training file.
    """
    training = [_list_source(source, key="data_files", data=data) for source in sources_of(data)]
    for source in training:
        if not source.files:
            raise UserError(f"{source.name}: no file that holds anything")
    evaluation: list[Source] = []
    if data.evaluation_documents:
        _check_not_shared(training)
        pairs = [_hold_out_first(source, data.evaluation_documents) for source in training]
        training, evaluation = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        held_out = True
    elif held_out:
        evaluation = _held_out_sources(data)
    if not data.evaluation_documents and not _all_stdlib(data):
        _check_apart(training, evaluation)
    return Corpus(tuple(training), tuple(evaluation) if held_out else ())


def _all_stdlib(data: DataConfig) -> bool:
    return all(source.path == "stdlib" for source in sources_of(data)) and data.evaluation_path in (None, "stdlib")


def _held_out_sources(data: DataConfig) -> list[Source]:
    """The held-out files, the held-out split, or the source of its own that the recipe names."""
    first = sources_of(data)[0]
    if data.evaluation_path:
        source = replace(first, path=data.evaluation_path, name=data.evaluation_name, revision=None, data_files=data.evaluation_files)
        source = replace(source, split=data.evaluation_split or ("train" if data.evaluation_files else first.split))
        return [_list_source(source, key="evaluation_files", path_key="evaluation_path", data=data)]
    if first.path == "stdlib":
        for key in ("evaluation_files", "evaluation_split"):
            if getattr(data, key):
                raise UserError(f"data.{key}: {getattr(data, key)}: has no meaning with data.path: stdlib, which has its own files")
        return [_stdlib(first, held_out=True)]
    if data.evaluation_files and data.evaluation_split:
        raise UserError(f"data.evaluation_split: {data.evaluation_split}: data.evaluation_files is set too; remove one")
    if data.evaluation_files:
        return [_list_source(replace(first, data_files=data.evaluation_files, split="train"), key="evaluation_files", data=data)]
    if data.evaluation_split in (None, first.split):
        fix = "set data.evaluation_files, another data.evaluation_split or data.evaluation_documents, or evaluation.max_rows: 0"
        raise UserError(f"data.evaluation_split: {data.evaluation_split}: no held-out text; {fix}")
    split = replace(first, split=data.evaluation_split or "")
    return [_list_source(split, key="data_files", split_key="evaluation_split", data=data)]


def _check_apart(training: list[Source], held_out: list[Source]) -> None:
    """No file is in both."""
    trained = {_identity(file.url) for source in training for file in source.files}
    for source in held_out:
        for file in source.files:
            if _identity(file.url) in trained:
                key = source.name.split(":")[0]
                raise UserError(f"{key}: {file.url}: also a training file; keep it out of data.data_files")


def _check_not_shared(training: list[Source]) -> None:
    """What one source holds out no other trains on."""
    for source in training:
        first = _identity(source.files[0].url)
        if any(first == _identity(file.url) for other in training if other is not source for file in other.files):
            raise UserError(f"data.evaluation_documents: {source.files[0].url} is in two sources of data.mixture; hold out files instead")


def _identity(url: str) -> str:
    return url if "://" in url else str(Path(url).resolve())


def _hold_out_first(source: Source, documents: int) -> tuple[Source, Source]:
    """(training, held-out): the first `documents` documents of the first file, or so many files where a file is a document."""
    files = source.files
    if source.builder == "text":
        if documents >= len(files):
            raise UserError(f"data.evaluation_documents: {documents}: {source.name} has only {len(files)} files, each one document")
        return replace(source, files=files[documents:]), replace(source, files=files[:documents])
    rest = replace(source, files=(replace(files[0], skip=documents), *files[1:]))
    return rest, replace(source, files=(replace(files[0], take=documents),))


def _list_source(source: SourceConfig, *, key: str, data: DataConfig, path_key: str = "path", split_key: str = "split") -> Source:
    """The files of one source. `key`, `path_key` and `split_key` are where the recipe says so, for messages."""
    if source.path == "stdlib":
        for unused in ("name", "revision", "data_files", "tokens_column"):
            if getattr(source, unused):
                raise UserError(f"data.{unused}: {getattr(source, unused)}: has no meaning with data.path: stdlib, which has its own files")
        return _stdlib(source, held_out=path_key != "path")
    name = f"data.{path_key}: {source.path}"
    options: dict[str, Any] = {}
    if source.path in FILE_BUILDERS:
        for unused in ("name", "revision"):
            if getattr(source, unused):
                raise UserError(f"data.{unused}: {getattr(source, unused)}: of a Hub dataset, has no meaning with data.path: {source.path}")
        if not source.data_files:
            raise UserError(f"data.{key}: null: data.path: {source.path} reads files; list them here")
        if source.split != "train":
            reason = f"has no meaning with data.path: {source.path}, which reads the files it is given"
            raise UserError(f"data.{split_key}: {source.split}: {reason}")
        name, builder = f"data.{key}: {', '.join(source.data_files)}", source.path
        local = [pattern.removeprefix("file://") for pattern in source.data_files if "://" not in pattern.removeprefix("file://")]
        urls = [str(path) for path in _local_files(key, local, builder)] + _remote_files(
            name, [pattern for pattern in source.data_files if "://" in pattern.removeprefix("file://")], data
        )
    elif (Path(source.path) / "state.json").is_file():
        builder, urls = "arrow", _saved_to_disk(Path(source.path))
    else:
        builder, urls, options = _resolve(source, path_key=path_key, split_key=split_key)
    files = _named(_with_sizes(name, urls, data))
    kept = tuple(file for file in files if file.size or builder == "text")  # An empty text file is an empty document.
    if options and any(file_format(builder, file.url) != "other" for file in kept):
        fix = f"sets {', '.join(options)}, which is not supported for {builder} files; list them in data.data_files"
        raise UserError(f"{name}: its card {fix}")
    if builder == "csv" and data.csv_as_text and not source.tokens_column:
        options = {"keep_default_na": False, "na_filter": False, "converters": {source.text_column: str}} | options
    return Source(name, builder, kept, source.text_column, source.tokens_column, source.weight, options)


def _named(files: list[File]) -> list[File]:
    folder = os.path.commonpath([os.path.dirname(file.url) for file in files]) if files else ""
    return [replace(file, name=os.path.relpath(file.url, folder)) for file in files]


def _stdlib(source: SourceConfig, *, held_out: bool) -> Source:
    files = _named([File(str(path), path.stat().st_size) for path in stdlib_files()[held_out]])
    return Source("data.path: stdlib", "text", tuple(files), source.text_column, None, source.weight)


def _resolve(source: SourceConfig, *, path_key: str, split_key: str) -> tuple[str, list[str], dict[str, Any]]:
    """(builder, files, options that its card sets) of a Hub dataset or a local folder, as `datasets` resolves them."""
    import datasets

    datasets.disable_progress_bars()
    key = f"data.{path_key}"
    if not Path(source.path).exists() and not ask_hub(source.path, repo_type="dataset", key=key, revision=source.revision):
        raise UserError(f"{key}: {source.path}: not found; no such folder here and the Hub cannot be reached")
    with one_line(f"{key}: {source.path}"), _literal_base_path():
        try:
            builder: Any = datasets.load_dataset_builder(source.path, source.name, revision=source.revision, data_files=source.data_files)
        except ValueError as error:  # Its first line names no configuration to choose.
            if "onfig" not in str(error):
                raise
            raise UserError(
                f"data.{path_key.replace('path', 'name')}: {source.name}: {source.path}: {' '.join(str(error).split())}"
            ) from error
    splits = builder.config.data_files or {}
    if source.split not in splits:
        raise UserError(f"data.{split_key}: {source.split}: no such split; {source.path} has {', '.join(map(str, splits)) or 'no files'}")
    described = ("name", "version", "data_dir", "data_files", "description", "features")
    given = {entry.name: getattr(builder.config, entry.name) for entry in fields(builder.config) if entry.name not in described}
    usual = type(builder.config)()
    options = {name: value for name, value in given.items() if value != getattr(usual, name)}
    # Once each: a link to a file is the file.
    urls = {_identity(str(url)): str(url) for url in reversed(splits[source.split])}
    return type(builder).__module__.rpartition(".")[2], list(reversed(urls.values())), options


@contextlib.contextmanager
def _literal_base_path() -> Iterator[None]:
    """`datasets` makes one glob of a local folder and the pattern in it, and does not find a folder named [a]."""
    from datasets import data_files

    join = data_files.xjoin
    data_files.xjoin = lambda folder, *parts: join(folder if "://" in folder else glob.escape(folder), *parts)
    try:
        yield
    finally:
        data_files.xjoin = join


def _saved_to_disk(folder: Path) -> list[str]:
    """The arrow files of a dataset that `Dataset.save_to_disk` wrote, in its order."""
    import json

    with one_line(f"data.path: {folder}"):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [str(folder / entry["filename"]) for entry in state["_data_files"]]


def _local_files(key: str, patterns: list[str], builder: str) -> list[Path]:
    """Files named by paths, folders and globs, each once, in the order of `patterns` and sorted within one. Of a folder those that are not
    hidden and have the builder's endings, if any have."""
    found: dict[Path, Path] = {}  # By the resolved path: two spellings are one file.
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = sorted(entry for entry in path.rglob("*") if entry.is_file() and not _is_hidden(entry.relative_to(path)))
            files = [file for file in files if _has_ending(file, builder)] or files
        else:
            files = [path] if path.is_file() else sorted(map(Path, glob.glob(_literal_folder(path), recursive=True)))
        if not files:
            raise UserError(f"data.{key}: {pattern}: no such file")
        found |= {file.resolve(): file for file in files if file.is_file() and file.resolve() not in found}
    return list(found.values())


def _literal_folder(pattern: Path) -> str:
    """The glob in which the folder that is there is no pattern, though it may be named [a]."""
    folder = next((parent for parent in pattern.parents if parent.is_dir()), Path())
    return str(Path(glob.escape(str(folder))) / pattern.relative_to(folder))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _has_ending(path: Path, builder: str) -> bool:
    name = path.name.lower()
    stem = name.rsplit(".", 1)[0] if name.endswith(COMPRESSED) else name
    return stem.endswith(ENDINGS.get(builder, ("",)))


def _remote_files(name: str, patterns: Iterable[str], data: DataConfig) -> list[str]:
    """URLs, with globs resolved where the file system can list (not over plain HTTP, which cannot)."""
    import fsspec

    urls: list[str] = []
    for pattern in patterns:
        protocol = pattern.split("://")[0]
        if not glob.has_magic(pattern) or protocol in ("http", "https"):
            urls.append(pattern)
            continue
        with one_line(name):
            system, path = fsspec.url_to_fs(pattern, **open_options(pattern, timeout_seconds=data.timeout_seconds))
            matches = sorted(system.unstrip_protocol(match) for match in system.glob(path))
        if not matches:
            raise UserError(f"{name}: no file matches {pattern}")
        urls += matches
    return list(dict.fromkeys(urls))


def _with_sizes(name: str, urls: list[str], data: DataConfig) -> list[File]:
    """The files with their sizes: stat, the listing that the Hub gave, or a HEAD request each."""

    def with_size(url: str) -> File:
        if "://" not in url:
            return File(url, Path(url).stat().st_size)
        import fsspec

        system, path = fsspec.url_to_fs(url, **open_options(url, timeout_seconds=data.timeout_seconds))
        size = system.info(path).get("size")
        if size is None:
            raise UserError(f"{url}: the server does not tell its size; streaming needs it")
        # The Hub's files are read over plain HTTP: through hf:// each worker would list the repository anew, and a read that fails would be
        # retried for half a minute out of sight.
        return File(system.url(path), int(size), immutable=True) if url.startswith("hf://") else File(url, int(size))

    def listed(url: str) -> File:
        try:
            return retrying(data.max_retries)(with_size, url)
        except (OSError, ImportError, ValueError) as error:
            tried = f" after {data.max_retries} retries" if is_transient(error) else ""
            raise UserError(f"{url}: cannot be opened{tried}: {reason(error)}") from error

    with one_line(name):
        if all("://" not in url for url in urls):
            return [listed(url) for url in urls]
        with ThreadPoolExecutor(LISTING_THREADS) as threads:
            return list(threads.map(listed, urls))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
