"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """The file is this text, on disk, or what it was before. Its folder is made if need be."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a written and synced folder its name; an older one of that name goes. Raises OSError.

    A kill in between leaves the older one under its name or, between the two renames, under <folder>.old: see `settle_folder`.
    """
    replaced = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def settle_folder(folder: Path) -> None:
    """End a `put_in_place` that was interrupted: the new folder has the name, or the old one gets it back. Raises OSError."""
    replaced = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # What cannot go (an open file on NFS) is in nobody's way.
    elif replaced.exists():
        replaced.rename(folder)


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leave the lines that are to be kept. What is no JSON goes too: a kill may have cut the last line."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if keep(value):
            kept.append(f"{line}\n")
    write_whole(path, "".join(kept))
