"""What a run reports: metrics.jsonl and Accelerate's trackers."""

from __future__ import annotations

import configparser
import contextlib
import json
import math
import netrc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from fullshard.errors import UserError
from fullshard.files import keep_json_lines
from fullshard.recipe.fields import Recipe

WANDB_INIT_TIMEOUT_S = 20
WANDB_FINISH_TIMEOUT_S = 60  # a network that went away must not keep the ranks; what was not uploaded stays in <output_dir>/wandb

PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME"}
"""Which Accelerate's project name would beat. MLflow's and ClearML's it reads itself."""


def check_trackers(names: Iterable[str]) -> list[str]:
    """`names` without repeats, wandb first, for Accelerator(log_with=...). Raises UserError: unknown to Accelerate, or not installed.

    Accelerate itself drops a tracker that is not installed and trains on without it.
    """
    unique = list(dict.fromkeys(names))
    known = sorted(LOGGER_TYPE_TO_CLASS)
    built_in = {str(kind) for kind in LoggerType}
    available = {str(kind) for kind in get_available_trackers()} | {name for name in known if name not in built_in}
    for name in unique:
        if name not in known:
            raise UserError(f"logging.trackers: {name}: unknown tracker; Accelerate knows {', '.join(known)}")
        if name not in available:
            have = ", ".join(sorted(available)) or "none"
            raise UserError(f"logging.trackers: {name}: not installed (installed: {have}; Accelerate knows {', '.join(known)})")
    # wandb is the one that needs a network: first, so that nothing else has started when it has to be started again.
    return sorted(unique, key=lambda name: name != "wandb")


@dataclass
class RunLog:
    """The same values to metrics.jsonl and to every tracker. Writes on the main process only; call it on every rank."""

    accelerator: Accelerator
    file: TextIO | None
    """metrics.jsonl; None on other ranks."""
    wandb_dir: Path | None = None
    """Folder of the W&B run on the main process."""
    wandb_id: str | None = None
    """Of the W&B run, which a resumed run continues; on the main process."""
    failure: str | None = None
    """Why metrics.jsonl can be written no more, on the main process: the other ranks have to hear it before anybody stops."""
    earlier_step: int = -1
    """Last step that an earlier process of this run has logged; what it sent to the trackers is there."""
    _last_step: int = field(default=-1)
    _sent_step: int = field(default=-1)

    def log(self, step: int, values: Mapping[str, int | float]) -> None:
        """Report `values` at optimizer step `step`, which must not go back: W&B would drop such a point with a warning.

        A line of metrics.jsonl is {"step": step, **values}, in the file when this returns. JSON has no NaN or infinity: they are written as
        the strings "NaN", "Infinity" and "-Infinity", which float() reads; so does W&B in its files.
        """
        if step < self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}")
        self._last_step = step
        if self.file is not None and self.failure is None:
            line = {"step": step, **{key: _json_number(value) for key, value in values.items()}}
            try:
                self.file.write(json.dumps(line, allow_nan=False) + "\n")
                self.file.flush()
            except OSError as error:
                self.failure = f"{self.file.name}: cannot be written: {error.strerror}"
        if step > self._sent_step:
            self._sent_step = step
            for tracker in self.accelerator.trackers:
                # W&B drops a step that it has; it may lack what a killed process had not written yet. The others would show it twice.
                if tracker.name == "wandb" or step > self.earlier_step:
                    tracker.log(dict(values), step=step)

    def sync(self) -> None:
        """Until the lines are on disk: a checkpoint must not be there without them."""
        if self.file is not None and self.failure is None:
            os.fsync(self.file.fileno())

    def rewind(self, step: int) -> None:
        """After a rollback to `step`: the steps after it come again, and their lines are cut.

        What the trackers have of them cannot be taken back, W&B refuses a step that is not new: they go on after the last one they got.
        """
        self._last_step = step
        if self.file is not None:
            self.file.close()
            path = Path(self.file.name)
            _cut(path, after=step)
            self.file = path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Finish the trackers. Last call of a run, on every rank: Accelerate's end_training also destroys the process group."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # Of a line that is told as `failure`.
                self.file.close()
        self.accelerator.end_training()


def open_log(
    *,
    accelerator: Accelerator,
    recipe: Recipe,
    output_dir: Path,
    config: dict[str, Any],
    resumed_step: int = 0,
    wandb_id: str | None = None,
    say: Callable[[str], None] = print,
) -> RunLog:
    """Open metrics.jsonl (appending) and start the trackers that the Accelerator was made with; call it on every rank.

    Lines of metrics.jsonl after resumed_step are cut: the steps are done again. wandb_id: the W&B run to continue. A tracker that has later
    steps already keeps them; they are the same unless the recipe was changed or the run rolled back.
    `config` is shown by the trackers, nested in W&B and flattened to a.b.c elsewhere. `say` prints a line on the main process.
    W&B: without credentials, or when it cannot be reached within 20 s, the run is offline under <output_dir>/wandb and one line says how to
    look at it. What the environment says to a tracker holds unless the recipe says otherwise. Sets WANDB_SILENT, and WANDB_MODE where it
    falls back or WANDB_DISABLED is true, in this process.
    """
    if not accelerator.is_main_process:
        return RunLog(accelerator=accelerator, file=None)
    output_dir.mkdir(parents=True, exist_ok=True)
    earlier_step = _cut(output_dir / "metrics.jsonl", after=resumed_step) if resumed_step else -1
    file = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
    names = [str(name) for name in accelerator.log_with]
    reason = None
    if "wandb" in names:
        os.environ.setdefault("WANDB_SILENT", "true")
        if not os.environ.get("WANDB_MODE"):
            os.environ.pop("WANDB_MODE", None)  # wandb refuses an empty one
            if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
                os.environ["WANDB_MODE"] = "disabled"  # wandb itself knows the other name no more.
        if os.environ.get("WANDB_MODE", "online") == "online" and not _wandb_credentials_exist(os.environ):
            os.environ["WANDB_MODE"] = "offline"
            reason = "no API key"
    try:
        _start_trackers(accelerator, recipe=recipe, output_dir=output_dir, config=config, wandb_id=wandb_id)
    except Exception as error:
        # wandb's errors (UsageError, CommError, ...) cannot be named: it is never imported here. Offline it needs no network and no key.
        if "wandb" not in names or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            raise
        os.environ["WANDB_MODE"] = "offline"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
        accelerator.trackers.clear()
        _start_trackers(accelerator, recipe=recipe, output_dir=output_dir, config=config, wandb_id=wandb_id)
    wandb_dir = None
    if "wandb" in names:
        run = accelerator.get_tracker("wandb", unwrap=True)
        wandb_id = run.id
        if os.environ.get("WANDB_MODE") != "disabled":
            wandb_dir = Path(run.dir).parent
            if wandb_dir.name.startswith("offline-"):
                shown = os.path.relpath(wandb_dir) if wandb_dir.is_relative_to(Path.cwd()) else str(wandb_dir)
                why = f" ({reason})" if reason else ""
                say(f"W&B is offline{why}: look with `wandb leet {shown}`, upload with `wandb sync {shown}`")
            else:
                say(f"W&B: {run.url}")
    return RunLog(accelerator=accelerator, file=file, wandb_dir=wandb_dir, wandb_id=wandb_id, earlier_step=earlier_step)


def _cut(path: Path, *, after: int) -> int:
    """Leave the lines up to step `after`; what a killed run wrote of its last line goes too. Replaced in one go. Returns the last step."""
    last = -1

    def kept(line: dict[str, Any]) -> bool:
        nonlocal last
        last = max(last, line["step"])
        return bool(line["step"] <= after)

    if path.exists():
        keep_json_lines(path, kept)
    return last


def _start_trackers(accelerator: Accelerator, *, recipe: Recipe, output_dir: Path, config: dict[str, Any], wandb_id: str | None) -> None:
    environment = os.environ
    # console off: wandb would wrap the stdout that the progress bar redraws.
    settings = {"console": "off", "init_timeout": WANDB_INIT_TIMEOUT_S, "finish_timeout": WANDB_FINISH_TIMEOUT_S}
    settings = {name: value for name, value in settings.items() if f"WANDB_{name.upper()}" not in environment}
    wandb_arguments: dict[str, Any] = {
        "name": recipe.logging.run_name or environment.get("WANDB_NAME") or output_dir.resolve().name,
        "dir": environment.get("WANDB_DIR") or str(output_dir),
        "settings": {"silent": True, **settings},
    }
    if wandb_id is not None:
        wandb_arguments |= {
            "id": environment.get("WANDB_RUN_ID") or wandb_id,
            "resume": environment.get("WANDB_RESUME") or "allow",
        }
    if mode := os.environ.get("WANDB_MODE"):
        # As an argument too: wandb reads the environment at the first init only, and a failed one counts.
        wandb_arguments["mode"] = mode
    project = recipe.logging.project
    if "logging.project" in recipe.sources:
        environment |= dict.fromkeys(("MLFLOW_EXPERIMENT_NAME", "CLEARML_PROJECT"), project)  # Accelerate would let these win.
    else:
        names = [str(name) for name in accelerator.log_with]
        variables = [variable for name, variable in PROJECT_VARIABLES.items() if name in names and environment.get(variable)]
        project = environment[variables[0]] if variables else project
    accelerator.init_trackers(project, init_kwargs={"wandb": wandb_arguments})
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(config if tracker.name == "wandb" else dict(_flat(config)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, int | float | str | bool]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, int | float | str) else str(value)


def _json_number(value: int | float) -> int | float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _wandb_credentials_exist(environment: Mapping[str, str]) -> bool:
    """Whether wandb 0.31 would find a key without asking: in the environment, in a netrc entry of its host, or in its settings files."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = environment.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        settings.read([Path(folder) / "settings", Path(environment.get("WANDB_DIR") or ".") / "wandb" / "settings"])
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("default", "api_key", fallback=""):
        return True
    url = environment.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    try:
        entry = netrc.netrc(path).authenticators(str(urlsplit(url).netloc))
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(entry and entry[2])
