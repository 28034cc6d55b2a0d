"""Which module may import which, what may be imported at all, and that nothing is copied between recipes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fullshard.parsing import parse_recipe
from fullshard.sharding import placement_from_yaml
from support import ROOT

LAYERS = [
    {
        "standard_streams",
        "errors",
        "paths",
        "files",
        "config",
        "parsing",
        "sharding",
        "manifest",
        "changes",
        "schedule",
        "preemption",
        "watchdog",
        "estimate",
    },
    {
        "model",
        "sources",
        "readers",
        "streams",
        "dealing",
        "data",
        "shards",
        "prepare",
        "tokenizer",
        "hub",
        "document_mask",
        "losses",
        "optim",
        "fsdp1",
        "tensors",
        "bad_steps",
        "memory",
        "units",
        "communication",
        "cpu_products",
    },
    {"accelerator", "metrics", "evaluate", "terminal", "checkpoint", "describe", "export"},
    {"run", "train"},
    {"__main__"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
MODULES = sorted((ROOT / "src" / "fullshard").glob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=lambda path: path.stem)
def test_imports_point_downward(path: Path) -> None:
    own = LAYER[path.stem]
    used = {name.removeprefix("fullshard.") for name in imports(path) if name.startswith("fullshard.")}
    assert {module: LAYER[module] for module in used if LAYER[module] > own} == {}
    packages = {name.split(".")[0] for name in imports(path)}
    assert "wandb" not in packages, "reached only through Accelerate's trackers"
    if own == 0:
        assert packages.isdisjoint({"torch", "transformers", "accelerate", "datasets"})
    if own <= 1:
        assert "accelerate" not in packages


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_assemble(path: Path) -> None:
    tree = ast.parse(path.read_text())
    guards = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"]
    assert len(guards) == 1
    tree.body.remove(guards[0])
    forbidden = (ast.For, ast.While, ast.If, ast.Try, ast.ListComp, ast.GeneratorExp, ast.IfExp, ast.Lambda, ast.ClassDef)
    assert [type(node).__name__ for node in ast.walk(tree) if isinstance(node, forbidden)] == []


def test_no_test_module_imports_another() -> None:
    """A helper that two of them need lies in tests/support/, where whoever changes it sees that others use it."""
    found = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("*.py")
        for name in imports(path)
        if any(part.startswith("test_") for part in name.split("."))
    }
    assert found == set()


def test_every_recipe_yaml_parses() -> None:
    paths = sorted((ROOT / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        parse_recipe(["--config", str(path)])


def test_every_accelerate_yaml_is_read_as_written() -> None:
    """O17: mixed_precision is a string in each."""
    paths = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    assert paths
    for path in paths:
        written = yaml.safe_load(path.read_text())
        assert isinstance(written["mixed_precision"], str), path
        placement = placement_from_yaml(path)
        assert placement.mixed_precision == written["mixed_precision"]
        assert placement.num_processes == {"single": 1, "fsdp_hybrid": 4, "fsdp1_hybrid": 4}.get(path.stem, 2)
