"""Which package may import which, what may be imported at all, and that nothing is copied between recipes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from fullshard.placement.placement import placement_from_yaml
from fullshard.recipe.parsing import parse_recipe
from support import ROOT

PACKAGE = ROOT / "src" / "fullshard"
# A module imports from its own package and from those before it.
ORDER = ("recipe", "placement", "plan", "process", "data", "model", "measure", "parallel", "checkpoint", "train")
FIRST_WITH_TORCH, FIRST_WITH_ACCELERATE = "data", "parallel"
# `fullshard verify` answers at once.
WITHOUT_TORCH = {"errors.py", "files.py", "paths.py", "standard_streams.py", "checkpoint/manifest.py"}
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION, LONGEST_MODULE = 70, 350
TOO_LONG = {"train/loop.py: train": 155}
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def place(name: str) -> int:
    """Of a module: -1 for one that lies beside the packages, which all may use; __main__ uses all."""
    package = name.split("/")[0].split(".")[0]
    return {"__main__": len(ORDER)}.get(package, ORDER.index(package) if package in ORDER else -1)


def test_packages_are_those_in_the_order() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*ORDER, "assets"}


@pytest.mark.parametrize("path", [path for path in MODULES if "assets" not in path.parts], ids=name_of)
def test_imports_point_to_earlier_packages(path: Path) -> None:
    name, used = name_of(path), set(imports(path))
    own = place(name)
    places = {module: place(module.removeprefix("fullshard.")) for module in used if module.startswith("fullshard.")}
    assert {module for module, other in places.items() if other > own} == set()
    packages = {module.split(".")[0] for module in used}
    assert "wandb" not in packages, "reached only through Accelerate's trackers"
    if 0 <= own < ORDER.index(FIRST_WITH_TORCH) or name in WITHOUT_TORCH:
        assert packages.isdisjoint({"torch", "transformers", "accelerate", "datasets"})
    if own < ORDER.index(FIRST_WITH_ACCELERATE):
        assert "accelerate" not in packages


def test_no_module_needs_itself() -> None:
    """What is imported when a module is, not within a function or for types: no circle."""
    needs = {}
    for path in MODULES:
        body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        name = "fullshard." + name_of(path).removesuffix(".py").replace("/", ".")
        needs[name] = {f"{node.module}" for node in body if f"{node.module}".startswith("fullshard.")}
    assert list(TopologicalSorter(needs).static_order())


@pytest.mark.parametrize("package", ORDER)
def test_a_package_says_what_it_is_for_and_what_may_come_in(package: str) -> None:
    purpose, *rest = (ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or "").split("\n\n")
    assert purpose
    assert [paragraph.startswith("What may come in: ") for paragraph in rest] == [True]


def test_modules_and_functions_can_be_read() -> None:
    """In lines. TOO_LONG only shrinks."""
    long = {}
    for path in MODULES:
        text = path.read_text()
        if (lines := text.count("\n")) > LONGEST_MODULE:
            long[name_of(path)] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION:
                long[f"{name_of(path)}: {node.name}"] = lines
    assert long == TOO_LONG


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
