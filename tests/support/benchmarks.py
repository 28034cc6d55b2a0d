"""`benchmark` imports a program of benchmarks/ by its name."""

from __future__ import annotations

import importlib.util
from typing import Any

from support import ROOT


def benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
