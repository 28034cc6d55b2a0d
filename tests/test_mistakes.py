"""A user's mistake, through the launcher: one line with file, key, value, fix; a non-zero exit before step 1, within 30 s; nothing lost."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.launcher import Launched, launch

FSDP = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()


@dataclass(frozen=True)
class Mistake:
    line: str
    """Part of the one line; {tmp} is the test's folder."""
    overrides: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    """Content of the recipe YAML."""
    accelerate: str | None = None
    """Content of the accelerate YAML."""
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


# One for each way to the line: what parse_recipe says is in test_config.py, what a YAML's rules say in test_sharding.py.
MISTAKES = {
    "unknown key in the recipe": Mistake(
        "{tmp}/x.yaml: data.sequence_lenght: unknown key; did you mean sequence_length?", recipe="data: {sequence_lenght: 8}"
    ),
    "wrong type": Mistake("command line: --train.max_steps: ten: must be an integer > 0", {"train__max_steps": "ten"}),
    "streams not divisible by the processes": Mistake(
        "data.num_streams: 1: must be a multiple of the number of processes, 2; it fits 1 processes", {"data__num_streams": 1}
    ),
    "vocabulary smaller than the tokenizer": Mistake(
        "model.vocab_size: 4000: smaller than the tokenizer, 4096 tokens", {"model__vocab_size": 4000}
    ),
    "unknown activation": Mistake("model.hidden_act: sillu: unknown activation; choose one of", {"model__hidden_act": "sillu"}),
    "output folder not writable": Mistake("--output_dir: /proc/fullshard: cannot be written", {"output_dir": "/proc/fullshard"}),
    "unknown tracker": Mistake("logging.trackers: wandbb: unknown tracker; Accelerate knows", {"logging__trackers": "[wandbb]"}),
    "tracker not installed": Mistake("logging.trackers: aim: not installed", {"logging__trackers": "[aim]"}),
    "no such tokenizer": Mistake("data.tokenizer: {tmp}/nothing: not found", {"data__tokenizer": "{tmp}/nothing"}),
    "no such data file": Mistake(
        "data.data_files: {tmp}/nothing.txt: no such file", {"data__path": "text", "data__data_files": "[{tmp}/nothing.txt]"}
    ),
    "no held-out data": Mistake(
        "no held-out text; set data.evaluation_files", {"data__path": "text", "data__data_files": f"[{ROOT}/src/fullshard/*.py]"}
    ),
    "unknown key in fsdp_config": Mistake(
        "{tmp}/a.yaml: fsdp_config.fsdp_reshard_after_fwd: unknown key; did you mean fsdp_reshard_after_forward?",
        accelerate=FSDP.replace("fsdp_reshard_after_forward", "fsdp_reshard_after_fwd"),
    ),
    "a number that YAML takes for another one": Mistake(
        "{tmp}/a.yaml: fsdp_config.fsdp_min_num_params: 010: YAML reads it as 8; write 10, or put quotes around text",
        accelerate=f"{FSDP}  fsdp_min_num_params: 010\n",
    ),
    "units of a size that no part of a layer has": Mistake(
        "fsdp_config.fsdp_min_num_params: 100000000: no part of a layer has so many, a layer has ",
        launcher=("--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
    ),
    "diverges": Mistake(
        "step 3: 2 updates in a row, up to that of step 3, were left out; no checkpoint to go back to",
        {"optim__learning_rate": 1e30, "train__max_steps": 3, "train__max_bad_steps": 2},
        launcher=("--mixed_precision", "no"),
    ),
    "offload without a GPU": Mistake(
        "fsdp_offload_params: true: needs a GPU", accelerate=(ROOT / "accelerate_configs" / "fsdp_cpu_offload.yaml").read_text()
    ),
    "accumulation in the environment": Mistake(
        "environment: ACCELERATE_GRADIENT_ACCUMULATION_STEPS: 4: derived from", environment={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    ),
}

# `accelerate launch` itself dies of these before it starts a rank, with a traceback of its own. `fullshard check`, which `make train` runs
# first, says the line.
LAUNCHER_DIES = {
    "unquoted no": Mistake(
        "{tmp}/a.yaml: mixed_precision: false: ", accelerate=FSDP.replace("mixed_precision: bf16", "mixed_precision: no")
    ),
    "unknown top-level key": Mistake(
        "{tmp}/a.yaml: mixed_precison: unknown key; did you mean mixed_precision?",
        accelerate=FSDP.replace("mixed_precision", "mixed_precison", 1),
    ),
}


def files(mistake: Mistake, folder: Path) -> dict[str, Any]:
    """Writes the YAMLs of a case; arguments for `launch`."""
    overrides = {key: value.format(tmp=folder) if isinstance(value, str) else value for key, value in mistake.overrides.items()}
    if mistake.recipe is not None:
        (folder / "x.yaml").write_text(mistake.recipe)
        overrides["config"] = folder / "x.yaml"
    arguments: dict[str, Any] = {"launcher": list(mistake.launcher), "environment": mistake.environment}
    if mistake.accelerate is not None:
        (folder / "a.yaml").write_text(mistake.accelerate)
        arguments["placement"] = folder / "a.yaml"
    return arguments | {"train__max_steps": 2} | overrides


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Launched, Path]]:
    """All cases, three at a time: most of a launch is imports."""

    def run(mistake: Mistake) -> tuple[Launched, Path]:
        folder = tmp_path_factory.mktemp("mistake")
        return launch(folder / "out", **files(mistake, folder)), folder

    tmp_path_factory.getbasetemp()  # Made once, not by three threads at a time.
    with ThreadPoolExecutor(3) as executor:
        everything = MISTAKES | LAUNCHER_DIES
        return dict(zip(everything, executor.map(run, everything.values()), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_and_nothing_lost(launched: dict[str, tuple[Launched, Path]], name: str) -> None:
    result, folder = launched[name]
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert MISTAKES[name].line.format(tmp=folder) in lines[0]
    assert result.returncode != 0
    if name != "diverges":  # Which only training can tell.
        assert "step 1/" not in result.stdout
        assert not (folder / "out" / "metrics.jsonl").exists()
    # The launcher's own report of a rank that exited may follow; a rank's traceback may not.
    assert result.stderr.count("Traceback (most recent call last)") <= 1
    assert "[rank" not in result.stderr


@pytest.mark.parametrize("name", LAUNCHER_DIES)
def test_mistakes_that_kill_the_launcher_are_told_by_check(launched: dict[str, tuple[Launched, Path]], name: str) -> None:
    result, folder = launched[name]
    assert result.returncode != 0
    assert not (folder / "out").exists()
    check = subprocess.run(
        [sys.executable, "-m", "fullshard", "check", "--accelerate_config", folder / "a.yaml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert check.returncode == 2
    assert check.stderr.count("\n") == 1
    assert LAUNCHER_DIES[name].line.format(tmp=folder) in check.stderr
