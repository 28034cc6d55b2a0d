"""What is reported is what happened, everywhere the same, and reporting never ends a run."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from rich.console import Console

from fullshard.errors import UserError
from fullshard.recipe.fields import LoggingConfig, ModelConfig, Recipe
from fullshard.terminal import Terminal, duration
from fullshard.train.flops import peak_flops, peak_flops_of_gpu, throughput, training_flops_per_token
from fullshard.train.log import RunLog, check_trackers, open_log
from support import HANG_S, ROOT
from support.wandb_runs import history, inspected

BIN = Path(sys.executable).parent
VALUES = {"train/loss": 5.25, "train/tokens_seen": 61440, "throughput/tokens_per_second": 1234.5}
CONFIG = {"train": {"max_steps": 3, "max_grad_norm": None}, "output_dir": "runs/x"}


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        self.finished = False

    @property
    def tracker(self) -> Recorder:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("WANDB_MODE", "WANDB_SILENT"):  # open_log sets them; monkeypatch takes back what it has touched
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def opened(output_dir: Path, *trackers: str | GeneralTracker, recipe: Recipe | None = None, **options: Any) -> tuple[RunLog, list[str]]:
    said: list[str] = []
    accelerator = Accelerator(cpu=True, log_with=list(trackers) or None)
    recipe = recipe or Recipe()
    return open_log(accelerator=accelerator, recipe=recipe, output_dir=output_dir, config=CONFIG, say=said.append, **options), said


def lines(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_jsonl_holds_what_the_trackers_got(tmp_path: Path) -> None:
    recorder = Recorder()
    log, said = opened(tmp_path / "run", recorder)
    log.log(1, VALUES)
    log.log(10, {"train/loss": 4.5})
    assert lines(tmp_path / "run") == [{"step": 1, **VALUES}, {"step": 10, "train/loss": 4.5}]  # before close: each line is flushed
    log.close()
    assert recorder.logged == [(1, VALUES), (10, {"train/loss": 4.5})]
    assert recorder.config == {"train.max_steps": 3, "train.max_grad_norm": "None", "output_dir": "runs/x"}
    assert recorder.finished
    assert said == []


def test_nan_stays_valid_json_and_steps_do_not_go_back(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    log.log(5, {"a": math.nan, "b": math.inf, "c": -math.inf})
    with pytest.raises(ValueError, match="step 4 was logged after step 5"):
        log.log(4, VALUES)
    log.close()
    (line,) = lines(tmp_path)
    assert line == {"step": 5, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert float(line["c"]) == -math.inf


def test_a_continued_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        log, _ = opened(tmp_path)
        log.log(step, VALUES)
        log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_other_trackers_have_each_step_once(tmp_path: Path) -> None:
    """A run that was killed after step 4 and goes on from step 2: they have 3 and 4 already. metrics.jsonl has what was done last."""
    recorders = Recorder(), Recorder()
    for recorder, resumed_step, steps in zip(recorders, (0, 2), ((1, 2, 3, 4), (3, 4, 5)), strict=True):
        log, _ = opened(tmp_path, recorder, resumed_step=resumed_step)
        for step in steps:
            log.log(step, {"process": resumed_step})
        log.close()
    assert [step for recorder in recorders for step, _ in recorder.logged] == [1, 2, 3, 4, 5]
    assert [(line["step"], line["process"]) for line in lines(tmp_path)] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]


ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_PROJECT": "theirs",
    "WANDB_NAME": "named",
    "WANDB_RUN_ID": "abcd1234",
    "WANDB_RUN_GROUP": "group",
    "WANDB_ENTITY": "entity",
    "WANDB_TAGS": "one,two",
    "WANDB_NOTES": "notes",
    "WANDB_JOB_TYPE": "job",
}


@pytest.mark.parametrize("written", [False, True])
def test_what_the_environment_says_to_wandb_holds_unless_the_recipe_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    wandb.teardown()  # It reads its environment once.
    for name, value in (ENVIRONMENT | {"WANDB_DIR": str(tmp_path / "elsewhere")}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "elsewhere").mkdir()
    logging = LoggingConfig(project="ours", run_name="ours too" if written else None)
    recipe = Recipe(logging=logging, sources={"logging.project": "a.yaml"} if written else {})
    log, _ = opened(tmp_path / "run", "wandb", recipe=recipe, resumed_step=1, wandb_id="ofcheckp")
    log.log(1, VALUES)
    log.close()
    wandb.teardown()
    assert log.wandb_dir is not None
    assert log.wandb_dir.parent == tmp_path / "elsewhere" / "wandb"
    (run,) = [record["run"] for record in inspected(log.wandb_dir) if record["type"] == "run"]
    assert (run["project"], run["display_name"]) == (("ours", "ours too") if written else ("theirs", "named"))
    assert (run["run_id"], run["run_group"], run["entity"], run["job_type"]) == ("abcd1234", "group", "entity", "job")
    assert (run["tags"], run["notes"]) == (["one", "two"], "notes")


@pytest.mark.parametrize("written", [False, True])
def test_accelerate_does_not_let_the_environment_beat_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Of MLflow and ClearML, whose variables Accelerate itself prefers to the project that it is given."""
    from accelerate.tracking import MLflowTracker

    for name in ("MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT"):
        monkeypatch.setenv(name, "theirs")
    opened(tmp_path, Recorder(), recipe=Recipe(logging=LoggingConfig(project="ours"), sources={"logging.project": "a"} if written else {}))
    assert MLflowTracker("given").experiment_name == os.environ["CLEARML_PROJECT"] == ("ours" if written else "theirs")


@pytest.mark.parametrize("mode", ["", "online", "offline"])
def test_without_a_key_wandb_is_offline_and_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """W04: no key and WANDB_MODE=online was a UsageError that killed the ranks."""
    monkeypatch.setenv("WANDB_MODE", mode)
    recorder = Recorder()
    log, said = opened(tmp_path, "wandb", recorder)
    log.log(1, VALUES)
    log.log(10, {"train/loss": math.nan})
    log.close()
    (line,) = said
    assert log.wandb_dir is not None
    assert log.wandb_dir.parent == tmp_path / "wandb"
    assert f"`wandb leet {log.wandb_dir}`" in line
    assert f"`wandb sync {log.wandb_dir}`" in line
    assert ("no API key" in line) == (mode != "offline")
    assert history(log.wandb_dir) == lines(tmp_path)
    (run,) = [record["run"] for record in inspected(log.wandb_dir) if record["type"] == "run"]
    assert (run["project"], run["display_name"]) == ("fullshard", tmp_path.name)
    assert recorder.logged[0] == (1, VALUES)


def test_a_key_that_wandb_refuses_falls_back_to_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    wandb.teardown()  # an earlier test's settings say offline
    recorder = Recorder()
    log, said = opened(tmp_path, "wandb", recorder)
    log.log(1, VALUES)
    log.close()
    assert len(said) == 1
    assert "AuthenticationError" in said[0]
    assert log.wandb_dir is not None
    assert history(log.wandb_dir) == lines(tmp_path)
    assert recorder.logged == [(1, VALUES)]


def test_a_key_in_netrc_or_settings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.train.log import _wandb_credentials_exist

    environment = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_DIR": str(tmp_path / "none")}
    assert not _wandb_credentials_exist(environment)
    (tmp_path / "netrc").write_text("machine api.example.org\n  login user\n  password 0123\n")
    assert not _wandb_credentials_exist(environment)
    (tmp_path / "settings").write_text("[default]\nbase_url = https://api.example.org\n")
    assert _wandb_credentials_exist(environment)
    assert _wandb_credentials_exist({"WANDB_API_KEY": "k"})


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")])
def test_wandb_disabled_is_respected_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    log, said = opened(tmp_path, "wandb")
    log.log(1, VALUES)
    log.close()
    assert said == []
    assert not (tmp_path / "wandb").exists()
    assert lines(tmp_path) == [{"step": 1, **VALUES}]


def test_trackers_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.tracking

    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["wandb", "tensorboard"])
    assert check_trackers([]) == []
    assert check_trackers(["tensorboard", "wandb", "tensorboard"]) == ["wandb", "tensorboard"]
    with pytest.raises(UserError, match=r"^logging\.trackers: wandbb: unknown tracker; Accelerate knows aim, .*wandb$"):
        check_trackers(["wandbb"])
    with pytest.raises(
        UserError, match=r"^logging\.trackers: mlflow: not installed \(installed: tensorboard, wandb; Accelerate knows aim, .*\)$"
    ):
        check_trackers(["mlflow"])


LAUNCHED = """
import sys
from pathlib import Path
from accelerate import Accelerator
from accelerate.state import PartialState
from fullshard.recipe.fields import Recipe
from fullshard.train.log import check_trackers, open_log
PartialState(cpu=True)
accelerator = Accelerator(log_with=check_trackers(["wandb"]))
assert accelerator.num_processes == 2
log = open_log(accelerator=accelerator, recipe=Recipe(), output_dir=Path(sys.argv[1]), config={"seed": 0})
for step in range(3):
    log.log(step, {"train/loss": 1.0 / (step + 1)})
if sys.argv[2] == "crash" and accelerator.is_main_process:
    raise SystemExit(3)
log.close()
"""


@pytest.mark.launch
@pytest.mark.parametrize("ending", ["close", "crash"])
def test_two_launched_processes_make_one_run_and_exit(tmp_path: Path, ending: str) -> None:
    """W03, W07."""
    (tmp_path / "script.py").write_text(LAUNCHED)
    command = [
        BIN / "accelerate",
        "launch",
        "--config_file",
        ROOT / "accelerate_configs" / "ddp.yaml",
        tmp_path / "script.py",
        tmp_path / "run",
        ending,
    ]
    environment = {**os.environ, "WANDB_MODE": "online", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert (done.returncode == 0) == (ending == "close"), done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "wandb:" not in done.stderr
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert history(runs[0]) == lines(tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 3


def test_throughput_is_tokens_over_time() -> None:
    values = throughput(steps=10, tokens=61_440, wall_s=8.0, data_wait_s=0.4, flops_per_token=2e6, peak_flops_per_s=1e12)
    assert values == {
        "throughput/tokens_per_second": 7680.0,
        "throughput/step_time_s": 0.8,
        "throughput/data_wait_pct": pytest.approx(5.0),
        "throughput/mfu_pct": pytest.approx(100 * 7680 * 2e6 / 1e12),
    }
    assert values["throughput/tokens_per_second"] * 8.0 == 61_440  # O22
    assert "throughput/mfu_pct" not in throughput(steps=1, tokens=1, wall_s=1, data_wait_s=0, flops_per_token=1, peak_flops_per_s=None)


def test_flops_per_token_by_the_palm_formula() -> None:
    """Llama 3 8B: 7,504,924,672 parameters without the input embedding, 32 layers, 32 heads of 128."""
    model = ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    assert training_flops_per_token(model=model, sequence_length=8192) == 6 * 7_504_924_672 + 12 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float16, 989),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("AMD Instinct MI300X", torch.bfloat16, None),
    ],
)
def test_peak_of_a_gpu(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    assert peak_flops_of_gpu(name, dtype) == (None if tflops is None else tflops * 1e12)


def test_peak_of_a_cpu_is_what_the_recipe_says() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32, 0.5) == 0.5e12
    assert peak_flops(torch.device("cpu"), torch.float32, LoggingConfig().peak_tflops) is None


def drawn(*, terminal: bool, width: int = 100, main_process: bool = True, term: str = "xterm") -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, _environ={"TERM": term})
    shown = Terminal(main_process=main_process, console=console)
    shown.table("Derived", [("parameters", "4,999,424"), ("mesh", "dp_shard 2 [x]" + "y" * 60)])
    with shown.progress(max_steps=400, first_step=0):
        for step in (1, 2):
            shown.advance(step)
            shown.log(step, {**VALUES, "train/learning_rate": 3e-3, "train/grad_norm": 1.5})
        shown.log(2, {"eval/loss": 4.0})
    shown.samples([("def ", "f(x):[bold]\n\treturn [/red] \x1b[31m:smile:")])
    return file.getvalue()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_plain_lines_where_there_is_no_terminal(term: str) -> None:
    output = drawn(terminal=term == "dumb", term=term)
    assert "\x1b" not in output
    assert "step 1/400  loss 5.2500  lr 3.00e-03  grad_norm 1.500  tokens/s 1,234  eta -\n" in output
    assert "step 2/400  loss 5.2500" in output
    assert "eval 4.0000" in output
    assert "  parameters: 4,999,424\n" in output


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_gets_a_bar_that_fits(width: int) -> None:
    output = drawn(terminal=True, width=width)
    assert "\x1b[" in output
    assert "2/400" in output
    assert "loss 5.25" in output
    assert "tokens/s 1,234" in output or width < 72
    visible = Console(file=io.StringIO()).render_str("")  # imports rich's ANSI parser through the public API
    for line in output.splitlines():
        visible = type(visible).from_ansi(line)
        assert visible.cell_len <= width or "step" in visible.plain, visible.plain


@pytest.mark.parametrize("terminal", [True, False])
def test_completions_are_shown_literally(terminal: bool) -> None:
    output = drawn(terminal=terminal)
    for literal in ("f(x):[bold]", "return [/red]", ":smile:"):
        assert literal in output
    assert "\x1b[31m" not in output  # the model must not drive the terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_print_nothing(terminal: bool) -> None:
    assert drawn(terminal=terminal, main_process=False) == ""


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59, 80, 3600, 7500, 100_000)] == ["0s", "59s", "1m20s", "1h00m", "2h05m", "1d03h"]


def test_wandb_is_reached_through_accelerate_alone() -> None:
    assert shutil.which("wandb", path=str(BIN)) is not None
    assert [path for path in (ROOT / "src").rglob("*.py") if "import wandb" in path.read_text() or "from wandb" in path.read_text()] == []
