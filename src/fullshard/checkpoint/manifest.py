"""What files a checkpoint has and whether they are whole; which checkpoints a run has, and which of them go.

`manifest.json` is written last, before the folder gets its final name: size and xxh3_128 of every file, and a checksum of itself. A folder
with a final name was whole once, so whatever is missing there now is damage. Without torch: `fullshard verify` answers at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from fullshard.errors import COMMAND_LINE, UserError, first_line
from fullshard.files import settle_folder, sync, write_whole

FORMAT = 2  # Of the folder: manifest.json, state.json and the tensors' names.
STATE = "state.json"
MANIFEST = "manifest.json"
LEFTOVERS = {
    ".tmp": "of a save that was killed or still runs; the next save removes it",
    ".old": "of a replacement that was killed or still runs; the next start or save ends it",
    ".removed": "of a deletion that was killed or still runs; the next start or save ends it",
}
"""Names that are no checkpoint's, by suffix."""
_BLOCK = 2**22  # Bytes read at once.
_SHOWN = 3  # Faults per line of `fullshard verify`.


@dataclass(frozen=True)
class FileRecord:
    """What a file of a checkpoint is to be."""

    bytes: int
    xxh3_128: str | None
    """Hex digest; None where checkpoint.checksums is false."""


@dataclass(frozen=True)
class Verdict:
    """What `fullshard verify` says of one folder."""

    folder: Path
    line: str
    checkpoint: bool = True
    """False: a leftover, which is no failure."""
    whole: bool = True


def record_files(folder: Path, names: Iterable[str], *, checksums: bool) -> dict[str, FileRecord]:
    """Sizes and hashes of files in `folder`. Raises OSError."""
    return {
        name: FileRecord(bytes=(folder / name).stat().st_size, xxh3_128=_hash(folder / name) if checksums else None)
        for name in sorted(names)
    }


def write_manifest(folder: Path, *, step: int, files: Mapping[str, FileRecord]) -> None:
    """On disk when it returns. Raises OSError."""
    rest = {"format": FORMAT, "step": step, "files": {name: asdict(record) for name, record in sorted(files.items())}}
    write_whole(folder / MANIFEST, f"{json.dumps(rest | {'checksum': _checksum(rest)}, indent=1)}\n")


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Of a checkpoint: file name -> record. Raises UserError, which does not name the folder, where the manifest is missing, damaged, of
    another format, or not that of the step in the folder's name."""
    try:
        tree = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise UserError(f"{MANIFEST}: format {tree['format']}, this fullshard reads {FORMAT}; continue with the version that saved it")
        if tree.pop("checksum") != _checksum(tree):
            raise UserError(f"{MANIFEST}: damaged: not what its own checksum says")
        files = {name: FileRecord(**record) for name, record in tree["files"].items()}
    except FileNotFoundError:
        raise UserError(f"{MANIFEST}: missing") from None
    except OSError as error:
        raise UserError(f"{MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{MANIFEST}: damaged: {first_line(error)}") from None
    if (step := _step_of(folder)) not in (None, tree["step"]):
        raise UserError(f"{MANIFEST}: of step {tree['step']}, the folder is that of step {step}")
    return files


def faults(folder: Path, *, hashes: bool, part: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a checkpoint, a line each, without the folder; none: it is whole.

    hashes: read every byte, where the checkpoint has checksums; otherwise sizes alone. part: (rank, world_size); of the files in order of
    their names those with number % world_size == rank are looked at, the manifest itself by each rank. A file that is not in the manifest
    is no fault: nothing reads it.
    """
    try:
        files = read_manifest(folder)
    except UserError as error:
        return [str(error)]
    rank, world_size = part
    mine = [item for number, item in enumerate(sorted(files.items())) if number % world_size == rank]
    return [f"{name}: {fault}" for name, record in mine if (fault := _fault(folder / name, record, hashes=hashes))]


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def checkpoint_steps(output_dir: str | Path) -> dict[int, Path]:
    """Checkpoints of a run by step, in rising order: the folders with a final name, which each got when it was complete.

    One that lost its manifest since is among them: `faults` says so, where leaving it out would pass over it in silence.
    """
    return _steps_in(checkpoints_folder(output_dir))


def settle(folder: Path) -> None:
    """End in a checkpoints folder what was interrupted: a replacement, of which the new checkpoint has the name or the old one gets it
    back, and deletions. For the run that writes there. Raises OSError."""
    for replaced in folder.glob("step_*.old"):
        settle_folder(replaced.with_suffix(""))
    for removed in folder.glob("step_*.removed"):
        shutil.rmtree(removed, ignore_errors=True)


def outdated(steps: Collection[int], *, keep_last: int | None, keep_every: int | None, keep: Collection[int]) -> list[int]:
    """Steps whose checkpoints go, in rising order. What stays: the newest keep_last (None: all), multiples of keep_every, and `keep`."""
    newest = sorted(steps)[-keep_last:] if keep_last is not None else steps
    stay = {*newest, *keep, *(step for step in steps if keep_every is not None and step % keep_every == 0)}
    return sorted(set(steps) - stay)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Interrupted anywhere it leaves no part under a checkpoint's name; `settle` ends it. Raises OSError."""
    removed = folder.with_name(f"{folder.name}.removed")
    if removed.exists():
        shutil.rmtree(removed)
    folder.rename(removed)
    sync(folder.parent)  # The name is gone before the first file is.
    shutil.rmtree(removed)


def verify(path: str | Path, *, hashes: bool) -> list[Verdict]:
    """A verdict for each checkpoint under a run folder or a checkpoints folder, or for the one that `path` is; then the leftovers.

    Reads only, also while a run writes there. Raises UserError where `path` is none of these or holds no checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{COMMAND_LINE}: {path}: no such folder; name a run folder or a checkpoint")
    if (path / MANIFEST).exists() or (path / STATE).exists() or _step_of(path) is not None:
        return [_verdict(path, hashes=hashes)]
    folder = checkpoints_folder(path) if checkpoints_folder(path).is_dir() else path
    leftovers = [
        Verdict(found, f"{found}: no checkpoint: {LEFTOVERS[found.suffix]}", checkpoint=False)
        for found in sorted(folder.glob("step_*.*"))
        if found.suffix in LEFTOVERS
    ]
    steps = _steps_in(folder)
    if not steps:
        also = f" but {', '.join(leftover.folder.name for leftover in leftovers)}" if leftovers else ""
        raise UserError(f"{COMMAND_LINE}: {path}: no checkpoint in it{also}; name a run folder or a checkpoint")
    verdicts = [_verdict(found, hashes=hashes) for found in steps.values()]
    return [verdict for verdict in verdicts if verdict.whole or verdict.folder.exists()] + leftovers  # A running run deletes some.


def _verdict(folder: Path, *, hashes: bool) -> Verdict:
    found = faults(folder, hashes=hashes)
    step = _step_of(folder)
    about = [f"step {step}"] if step is not None else []
    try:
        about.append(f"{sum(entry.stat().st_size for entry in os.scandir(folder)) / 1e9:,.3f} GB")
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        about += [state["state_dict_type"].removesuffix("_STATE_DICT"), f"{state['num_processes']} processes"]
        about.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / MANIFEST).stat().st_mtime)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # A damaged one says what it can.
    if found:
        more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        result = f"damaged: {'; '.join([*found[:_SHOWN], *more])}"
    elif not hashes:
        result = "whole by sizes"
    elif any(record.xxh3_128 is None for record in read_manifest(folder).values()):
        result = "whole by sizes; saved without checksums"
    else:
        result = "whole, every byte"
    return Verdict(folder, f"{folder}: {', '.join([*about, result])}", whole=not found)


def _steps_in(folder: Path) -> dict[int, Path]:
    steps = {step: found for found in folder.glob("step_*") if (step := _step_of(found)) is not None and found.is_dir()}
    return dict(sorted(steps.items()))


def _step_of(folder: Path) -> int | None:
    """By its name; None where that is no checkpoint's."""
    match = re.fullmatch(r"step_(\d{8,})", folder.name or folder.resolve().name)
    return int(match[1]) if match else None


def _checksum(tree: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(tree, sort_keys=True).encode())


def _fault(path: Path, record: FileRecord, *, hashes: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        if status.st_size != record.bytes:
            return f"{status.st_size} bytes, must be {record.bytes}"
        if hashes and record.xxh3_128 is not None and _hash(path) != record.xxh3_128:
            return "not what its checksum says"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _hash(path: Path) -> str:
    """One thread: 10 GiB/s and more from memory, faster than the disks that feed it."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()
