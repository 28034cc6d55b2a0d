"""The terminal: tables, a progress bar or plain lines, sample completions. Everything goes through one rich Console."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

# Label in a line, log key, format.
SHOWN = (
    ("loss", "train/loss", "{:.4f}"),
    ("lr", "train/learning_rate", "{:.2e}"),
    ("grad_norm", "train/grad_norm", "{:.3f}"),
    ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
    ("peak_gib", "memory/peak_allocated_gib", "{:.3f}"),
    ("eval", "eval/loss", "{:.4f}"),
)
NARROW = 72  # columns below which the bar and all but loss and ETA are dropped


class Terminal:
    """Prints for the main process; on other ranks the same calls print nothing. Bar in a terminal; plain lines in a file or pipe."""

    def __init__(self, *, main_process: bool, console: Console | None = None) -> None:
        self.console = console or Console()
        if not main_process:
            self.console.quiet = True
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._max_steps = 0
        self._start = (0, 0.0)  # step, monotonic seconds of the first finished step

    def say(self, line: str) -> None:
        """One line, as it is: not wrapped, no markup."""
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Two columns, name and value; long values wrap."""
        if not self._draws():
            self.say(title)
            for name, value in rows:
                self.say(f"  {name}: {value}")
            return
        table = Table(title=Text(title), title_justify="left", show_header=False, pad_edge=False)
        table.add_column(style="bold", overflow="fold")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self.console.print(table)

    @contextmanager
    def progress(self, *, max_steps: int, first_step: int = 0) -> Iterator[None]:
        """Around the training loop: `first_step` steps are done. `advance` and `log` act inside it."""
        self._max_steps = max_steps
        self._start = (first_step, 0.0)
        if not self._draws():
            yield
            return
        columns: list[ProgressColumn] = [
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[shown]}", markup=False),
        ]
        if self.console.width >= NARROW:
            columns.insert(1, BarColumn(bar_width=None))
        with Progress(*columns, console=self.console, expand=self.console.width >= NARROW) as self._progress:
            self._task = self._progress.add_task("", total=max_steps, completed=first_step, shown="")
            try:
                yield
            finally:
                self._progress.refresh()
        self._progress = None

    def advance(self, step: int) -> None:
        """Step `step` is done."""
        if self._start[1] == 0.0:
            # The first step's time (compilation, first touch) says nothing about the others'.
            self._start = (step, time.monotonic())
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, int | float]) -> None:
        """Show the values of a logged step, keys as in metrics.jsonl; those that a line does not show are passed over."""
        shown = [f"{label} {form.format(values[key])}" for label, key, form in SHOWN if key in values]
        eta = f"eta {self._eta(step)}"
        if self._progress is None:
            self.say("  ".join([f"step {step}/{self._max_steps}", *shown, eta]))
        elif "train/loss" in values:
            if self.console.width < NARROW:
                text = f"loss {values['train/loss']:.3f} {eta}"
            else:
                text = "  ".join([item for item in shown if item.split()[0] in ("loss", "tokens/s")] + [eta])
            self._progress.update(self._task, completed=step, shown=text)
        else:
            self.say("  ".join([f"step {step}/{self._max_steps}", *shown]))

    def samples(self, completions: Iterable[tuple[str, str]]) -> None:
        """Prompt and completion pairs: the model's own text, brackets and control characters included, shown literally."""
        for prompt, completion in completions:
            text = Text.assemble((printable(prompt), "bold"), printable(completion))
            self.console.print(Text.assemble(("> ", "dim"), text), soft_wrap=not self._draws())

    def _draws(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet

    def _eta(self, step: int) -> str:
        first, since = self._start
        if step <= first or since == 0.0:
            return "-" if step < self._max_steps else "0s"
        return duration((time.monotonic() - since) / (step - first) * (self._max_steps - step))


def duration(seconds: float) -> str:
    """`45s`, `1m20s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def printable(text: str) -> str:
    # An untrained byte-level model emits any byte; ESC or CR would reach the terminal as a command.
    return "".join(character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}" for character in text)
