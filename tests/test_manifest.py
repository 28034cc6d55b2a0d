"""What a checkpoint's manifest finds, which checkpoints stay, and `fullshard verify`: on folders made here, without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint import manifest
from fullshard.checkpoint.manifest import (
    MANIFEST,
    STATE,
    FileRecord,
    checkpoint_steps,
    faults,
    outdated,
    read_manifest,
    record_files,
    remove,
    settle,
    verify,
    write_manifest,
)
from fullshard.errors import UserError
from support import HANG_S

NAMES = [".metadata", "__0_0.distcp", "__1_0.distcp", STATE]


def checkpoint(folder: Path, *, step: int = 100, checksums: bool = True) -> Path:
    """Written as a run would: each rank records its files. Returns step_XXXXXXXX in `folder`."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (path / name).write_bytes(bytes([number, step % 256]) * (500 + number))
    (path / STATE).write_text(json.dumps({"step": step, "state_dict_type": "SHARDED_STATE_DICT", "num_processes": 2}))
    files = record_files(path, NAMES[:2], checksums=checksums) | record_files(path, NAMES[2:], checksums=checksums)
    write_manifest(path, step=step, files=files)
    return path


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_whole_checkpoint_has_no_faults(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert faults(path, hashes=True) == []
    assert sorted(read_manifest(path)) == NAMES
    assert read_manifest(path)["__1_0.distcp"].bytes == 1004
    (path / ".nfs0001").write_text("left by a file system")
    assert faults(path, hashes=True) == []


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "missing"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, must be "),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, must be "),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes, must be "),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "not a file"),
}


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_found_by_its_size(name: str, damage: str, checksums: bool, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, checksums=checksums)
    act, line = DAMAGE[damage]
    act(path / name)
    found = faults(path, hashes=False)
    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")
    assert line in found[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_a_file_is_in_its_hash(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever block it is in: blocks of 100 bytes here."""
    monkeypatch.setattr(manifest, "_BLOCK", 100)
    path = checkpoint(tmp_path)
    bits = (path / name).stat().st_size * 8
    for bit in {0, 7, 799, 800, *range(0, bits, 97), bits - 1}:
        if bit < bits:
            flip(path / name, bit)
            assert faults(path, hashes=True) == [f"{name}: not what its checksum says"], bit
            flip(path / name, bit)
    assert faults(path, hashes=True) == []


def test_the_hash_is_xxh3_128_of_the_whole_file(tmp_path: Path) -> None:
    content = b"fullshard" * 1_000_000  # Three blocks.
    (tmp_path / "x").write_bytes(content)
    record = FileRecord(9_000_000, xxhash.xxh128(content).hexdigest())
    assert record_files(tmp_path, ["x"], checksums=True) == {"x": record}


def test_without_checksums_sizes_are_checked(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, checksums=False)
    flip(path / "__0_0.distcp", 5)
    assert faults(path, hashes=True) == []
    (path / "__1_0.distcp").write_bytes(b"")
    assert faults(path, hashes=True) == ["__1_0.distcp: 0 bytes, must be 1004"]


def test_ranks_share_the_files_out(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    for name in NAMES:
        flip(path / name, 0)
    shares = [faults(path, hashes=True, part=(rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 1, 1]
    assert sorted(line for share in shares for line in share) == faults(path, hashes=True)


def test_no_bit_of_the_manifest_can_change_unseen(tmp_path: Path) -> None:
    """All of its bits, one after another: a fault, or the same content (white space of JSON)."""
    path = checkpoint(tmp_path)
    whole, text = read_manifest(path), (path / MANIFEST).read_bytes()
    unseen = 0
    for bit in range(len(text) * 8):
        flip(path / MANIFEST, bit)
        if faults(path, hashes=False):
            with pytest.raises(UserError, match=re.escape(f"{MANIFEST}: ")):
                read_manifest(path)
        else:
            unseen += 1
            assert read_manifest(path) == whole
        (path / MANIFEST).write_bytes(text)
    assert unseen < len(text) / 10


def test_a_manifest_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    text = (path / MANIFEST).read_bytes()
    for length in range(len(text) - 1):  # Without its last byte, the line's end, it is whole.
        (path / MANIFEST).write_bytes(text[:length])
        assert faults(path, hashes=False)[0].startswith(f"{MANIFEST}: damaged: "), length


def rewritten(**values: object) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return act


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (Path.unlink, "missing"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
        (lambda path: path.write_text("[]"), "damaged: "),
        (lambda path: path.write_text("{}"), "damaged: "),
        (lambda path: path.write_bytes(b"\xff"), "damaged: "),
        (rewritten(step=101), "damaged: not what its own checksum says"),
        (rewritten(files={}), "damaged: not what its own checksum says"),
        (rewritten(checksum=None), "damaged: not what its own checksum says"),
        (rewritten(format=3), "format 3, this fullshard reads 2; continue with the version that saved it"),
        (lambda path: shutil.copy(checkpoint(path.parents[1], step=50) / MANIFEST, path), "of step 50, the folder is that of step 100"),
    ],
)
def test_a_manifest_that_is_not_the_checkpoints(act: Callable[[Path], object], line: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    act(path / MANIFEST)
    found = faults(path, hashes=False)
    assert len(found) == 1
    assert found[0].startswith(f"{MANIFEST}: {line}")
    with pytest.raises(UserError) as error:
        read_manifest(path)
    assert str(error.value) == found[0]


def test_the_manifest_of_another_run_at_the_same_step(tmp_path: Path) -> None:
    path, other = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    flip(other / "__0_0.distcp", 0)
    write_manifest(other, step=100, files=record_files(other, NAMES, checksums=True))
    shutil.copy(other / MANIFEST, path / MANIFEST)
    assert faults(path, hashes=True) == ["__0_0.distcp: not what its checksum says"]


def test_the_step_is_that_of_a_checkpoints_name_alone(tmp_path: Path) -> None:
    """While it is written and when a user has copied it elsewhere the folder has another name."""
    path = checkpoint(tmp_path)
    for name in ("step_00000100.tmp", "best"):
        path = path.rename(tmp_path / name)
        assert faults(path, hashes=True) == []


def test_sizes_of_a_thousand_files_take_milliseconds(tmp_path: Path) -> None:
    """Seen: 7 ms. CPU time, and room above it, for a machine that is busy."""
    names = [f"__{number}_0.distcp" for number in range(1000)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    write_manifest(tmp_path, step=1, files=record_files(tmp_path, names, checksums=True))
    start = time.process_time()
    assert faults(tmp_path, hashes=False) == []
    assert time.process_time() - start < 0.2


def test_record_files_raises_what_the_file_system_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record_files(tmp_path, ["absent"], checksums=True)


def test_checkpoints_are_the_folders_with_a_final_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint_steps(tmp_path) == {}
    for step in (100, 20, 123_456_789):
        checkpoint(folder, step=step)
    for name in ("step_00000005.tmp", "step_00000005.old", "step_00000005.removed", "step_5", "best"):
        (folder / name).mkdir()
    (folder / "step_00000006").write_text("a file")
    (folder / "step_00000020" / MANIFEST).unlink()  # Damage: it had one when it got its name.
    assert list(checkpoint_steps(tmp_path)) == [20, 100, 123_456_789]
    assert checkpoint_steps(tmp_path)[100] == folder / "step_00000100"


STEPS = st.sets(st.integers(1, 60))


@given(STEPS, st.none() | st.integers(1, 8), st.none() | st.integers(1, 9), st.sets(st.integers(1, 60), max_size=3))
def test_what_stays_is_what_was_asked_for(steps: set[int], keep_last: int | None, keep_every: int | None, keep: set[int]) -> None:
    gone = outdated(steps, keep_last=keep_last, keep_every=keep_every, keep=keep)
    assert gone == sorted(gone)
    assert set(gone) <= steps - keep
    for step in steps:
        newer = sum(other > step for other in steps)
        wanted = keep_last is None or newer < keep_last or step in keep or (keep_every is not None and step % keep_every == 0)
        assert (step in gone) is not wanted


def test_retention_is_stable() -> None:
    """Saving every 10, newest 2, every 30th: each time one goes, and none comes back into question."""
    steps: set[int] = set()
    for step in range(10, 110, 10):
        steps.add(step)
        steps -= set(outdated(steps, keep_last=2, keep_every=30, keep={10}))
    assert steps == {10, 30, 60, 90, 100}


def test_remove(tmp_path: Path) -> None:
    path, stays = checkpoint(tmp_path), checkpoint(tmp_path, step=200)
    remove(path)
    assert list(tmp_path.iterdir()) == [stays]


def test_a_removal_killed_anywhere_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each of its system calls in turn, the folder is a whole checkpoint or none; `settle` or another removal ends it."""

    class Killed(BaseException):
        pass

    left = -1

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kw: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*args, **kw)

        return wrapper

    for name in ("rename", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for calls in range(40):
        folder = tmp_path / str(calls) / "checkpoints"
        left = 10**6
        path = checkpoint(folder)
        left = calls
        try:
            remove(path)
        except Killed:
            left = 10**6
            steps = checkpoint_steps(folder.parent)
            assert not steps or faults(steps[100], hashes=True) == []
            if calls % 2:
                settle(folder)
            else:
                path = steps[100] if steps else checkpoint(folder)
                remove(path)
        else:
            break
    else:
        raise AssertionError("never ended")
    assert calls >= 6
    for folder in tmp_path.glob("*/checkpoints"):
        assert [path.name for path in folder.iterdir()] in ([], ["step_00000100"])


def test_settle_ends_what_was_interrupted(tmp_path: Path) -> None:
    new, old = checkpoint(tmp_path, step=1), checkpoint(tmp_path, step=2)
    shutil.copytree(new, tmp_path / "step_00000001.old")  # The new one has the name.
    old.rename(tmp_path / "step_00000002.old")  # Nothing has it yet.
    checkpoint(tmp_path, step=3).rename(tmp_path / "step_00000003.removed")
    (tmp_path / "step_00000004.tmp").mkdir()  # Of a save, perhaps a running one: not its business.
    settle(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002", "step_00000004.tmp"]
    assert faults(old, hashes=True) == []


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "fullshard", "verify", *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_verify_says_what_each_checkpoint_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    paths = [checkpoint(folder, step=step, checksums=step != 300) for step in (100, 200, 300)]
    (folder / "step_00000400.tmp").mkdir()
    (folder / "step_00000200.old").mkdir()
    done = cli(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for path, step, line in zip(paths, (100, 200, 300), lines, strict=False):
        assert re.fullmatch(rf"{re.escape(str(path))}: step {step}, 0\.00\d GB, SHARDED, 2 processes, {when}, whole by sizes", line), line
    assert lines[3].startswith(f"{folder}/step_00000200.old: no checkpoint: of a replacement that was killed or still runs")
    assert lines[4].startswith(f"{folder}/step_00000400.tmp: no checkpoint: of a save that was killed or still runs")

    by_hash = [verdict.line.rpartition(", ")[2] for verdict in verify(folder, hashes=True) if verdict.checkpoint]
    assert by_hash == ["every byte", "every byte", "whole by sizes; saved without checksums"]

    flip(paths[0] / "__0_0.distcp", 1000)
    assert cli(tmp_path).returncode == 0
    done = cli("--hashes", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "damaged: __0_0.distcp: not what its checksum says" in done.stdout.splitlines()[0]
    (verdict,) = verify(paths[1], hashes=True)
    assert verdict.whole


def test_verify_of_a_wreck(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    for name in NAMES:
        (path / name).unlink()
    (verdict,) = verify(path, hashes=True)
    assert not verdict.whole
    assert verdict.line.endswith("damaged: .metadata: missing; __0_0.distcp: missing; __1_0.distcp: missing; 1 more")
    (path / STATE).write_text("[1]")
    (path / MANIFEST).unlink()
    (verdict,) = verify(tmp_path, hashes=True)
    assert verdict.line.endswith(f"damaged: {MANIFEST}: missing")
    assert not verdict.whole


def test_verify_beside_a_run_that_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that goes while it is looked at is not damaged."""
    goes, stays = checkpoint(tmp_path), checkpoint(tmp_path, step=200)

    def meanwhile(folder: Path, *, hashes: bool) -> list[str]:
        if folder == goes:
            remove(goes)
        return faults(folder, hashes=hashes)

    monkeypatch.setattr(manifest, "faults", meanwhile)
    assert [(verdict.folder, verdict.whole) for verdict in verify(tmp_path, hashes=True)] == [(stays, True)]


def test_verify_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint(tmp_path))
    (verdict,) = verify(".", hashes=True)
    assert verdict.whole
    assert verdict.line.startswith(".: step 100, ")


def test_mistakes_in_the_call(tmp_path: Path) -> None:
    done = cli(tmp_path / "absent")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: command line: {tmp_path}/absent: no such folder; name a run folder or a checkpoint\n"
    (tmp_path / "step_00000001.tmp").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in it but step_00000001\.tmp; name a run folder or a checkpoint"):
        verify(tmp_path, hashes=False)
    assert cli(tmp_path, "--hash").returncode == 2


def test_verify_needs_no_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    program = (
        f"import sys; sys.argv = ['fullshard', 'verify', '--hashes', {str(tmp_path)!r}]\n"
        "from fullshard.__main__ import main; main()\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
