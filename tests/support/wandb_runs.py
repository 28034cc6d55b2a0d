"""These read what W&B has recorded of an offline run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import HANG_S

BIN = Path(sys.executable).parent


def inspected(wandb_dir: Path) -> list[dict[str, Any]]:
    """Records of an offline run, as `wandb leet` reads them."""
    shown = subprocess.run(
        [BIN / "wandb", "leet", "inspect", "--json", wandb_dir], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    return [json.loads(line) for line in shown.stdout.splitlines()]


def history(wandb_dir: Path) -> list[dict[str, Any]]:
    items = [record["history"]["item"] for record in inspected(wandb_dir) if record["type"] == "history"]
    return [
        {("step" if key == "_step" else key): value for key, value in item.items() if key not in ("_runtime", "_timestamp")}
        for item in items
    ]
