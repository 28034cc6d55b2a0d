"""YAML file and command line -> Recipe, strictly: an unknown key at any depth, a wrong type, a number out of range is a UserError.

jsonargparse supplies the types and the help; the one-line messages are ours.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from fullshard.errors import COMMAND_LINE, UserError, check_printed, error_line
from fullshard.paths import expanded, path_argument
from fullshard.recipe.checks import check_recipe
from fullshard.recipe.fields import PATH_KEYS, Recipe
from fullshard.recipe.strict_yaml import Misread, StrictLoader, load_yaml
from fullshard.recipe.writing import recipe_to_yaml

DEFAULT_RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "pretrain_llama3_debug.yaml"  # In a checkout: beside src/.


def _keys(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every key."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint):
            keys |= _keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif f"{prefix}{name}" != "sources":
            keys[f"{prefix}{name}"] = hint
    return keys


KEYS = _keys(Recipe)
SECTIONS = {key[: end.start()] for key in KEYS for end in re.finditer(r"\.", key)}


def parse_recipe(argv: Sequence[str] | None = None) -> Recipe:
    """Recipe from the command line: `--config FILE`, then `--section.key value` overrides. Default file: DEFAULT_RECIPE, if there is one.

    Raises UserError for the first mistake. `--help` and `--print_config` print (on local rank 0) and exit with 0.
    """
    file, overrides, switches = _read_command_line(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if "help" in switches:
        _print_and_exit(parser.format_help())
    if file is None and DEFAULT_RECIPE.is_file():
        file = os.path.relpath(DEFAULT_RECIPE) if DEFAULT_RECIPE.is_relative_to(Path.cwd()) else str(DEFAULT_RECIPE)

    written = [(key, value, file) for key, value in _leaves(load_yaml(file), file)] if file is not None else []
    values: dict[str, Any] = {}
    sources = {"": file} if file is not None else {}
    for key, value, source in [*written, *((key, value, COMMAND_LINE) for key, value in overrides)]:
        item = _item_class(KEYS[key])
        typed = _typed_list(item, key, value, source) if item else _typed(parser, key, value, source)
        values[key] = _with_paths(key, typed, source)
        sources[key] = source
    recipe = _build(Recipe, values, sources=sources)
    check_recipe(recipe)
    if "print_config" in switches:
        _print_and_exit(recipe_to_yaml(recipe))
    return recipe


def _with_paths(key: str, value: Any, source: str) -> Any:
    """The value of `key` with its paths as a shell would read them."""

    def path(text: str, place: str = key) -> str:
        try:
            return expanded(text)
        except ValueError as error:
            raise UserError(error_line(source, place, text, str(error))) from None

    if key == "data.mixture":
        sources = []
        for number, one in enumerate(value):
            files = None if one.data_files is None else [path(name, f"{key}[{number}].data_files") for name in one.data_files]
            sources.append(replace(one, path=path(one.path, f"{key}[{number}].path"), data_files=files))
        return sources
    if key not in PATH_KEYS or value is None:
        return value
    return [path(name) for name in value] if isinstance(value, list) else path(value)


def _read_command_line(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], set[str]]:
    """(--config, overrides in order, switches). Every name must be whole: an abbreviation could come to mean another key."""
    file: str | None = None
    overrides: list[tuple[str, str]] = []
    switches: set[str] = set()
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        key, equals, value = token.removeprefix("--").partition("=")
        if token in ("-h", "--help", "--print_config"):
            switches.add("help" if token == "-h" else key)
            continue
        if not token.startswith("--"):
            raise UserError(f"{COMMAND_LINE}: {token}: not an option; write --section.key value")
        if key != "config" and key not in KEYS:
            raise _unknown_key(COMMAND_LINE, key)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{COMMAND_LINE}: --{key}: no value: {'name a file' if key == 'config' else _allowed(KEYS[key])}")
            value = rest.pop(0)
        if key == "config":
            if file is not None:
                raise UserError(f"{COMMAND_LINE}: --config: {value}: given twice")
            file = str(path_argument(value))
        else:
            overrides.append((key, value))
    return file, overrides, switches


def _leaves(tree: Mapping[Any, Any], source: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a file says. An empty section says nothing."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if "." in str(name) and key in KEYS:
            section, _, leaf = key.rpartition(".")
            raise UserError(f"{source}: {key}: unknown key: dots are for the command line; write {leaf} under {section}")
        if key in KEYS:
            yield key, value
        elif key not in SECTIONS:
            raise _unknown_key(source, key)
        elif isinstance(value, dict):
            yield from _leaves(value, source, f"{key}.")
        elif value is not None:
            raise UserError(error_line(source, key, value, f"must be a section with keys {', '.join(_children(key))}"))


def _unknown_key(source: str, key: str) -> UserError:
    shown = f"--{key}" if source == COMMAND_LINE else key
    if key in SECTIONS:
        return UserError(f"{source}: {shown}: a section; write --{key}.{_children(key)[0]} value")
    section, _, name = key.rpartition(".")
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == name]
    near = difflib.get_close_matches(name, _children(section), 1)
    if not elsewhere and near:
        elsewhere = [f"{section}.{near[0]}" if section and source == COMMAND_LINE else near[0]]
    if not elsewhere:
        by_name = {known.rpartition(".")[2]: known for known in KEYS}
        elsewhere = [by_name[match] for match in difflib.get_close_matches(name, by_name, 1)]
    if elsewhere:
        return UserError(f"{source}: {shown}: unknown key; did you mean {' or '.join(elsewhere)}?")
    section = section if section in SECTIONS else ""
    return UserError(f"{source}: {shown}: unknown key; {section or 'the recipe'} has {', '.join(_children(section))}")


def _children(section: str) -> list[str]:
    prefix = f"{section}." if section else ""
    return list(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in KEYS if key.startswith(prefix)))


@functools.cache
def _parser() -> Any:
    """jsonargparse's parser of all keys: their types, and the help."""
    from argparse import SUPPRESS

    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        exit_on_error=False,
        usage="%(prog)s [--config FILE] [--section.key value ...] [--print_config]",
        description="Every key of the recipe with its unit. Each can be set in the recipe YAML and on the command line, which wins.",
    )
    parser.add_argument("--config", metavar="FILE", default=SUPPRESS, help=f"Recipe YAML; {DEFAULT_RECIPE.name} if not given.")
    parser.add_argument("--print_config", action="store_true", default=SUPPRESS, help="Print the resolved recipe as YAML and exit.")
    parser.add_class_arguments(Recipe, as_group=True, skip={"sources"})
    for action in parser._actions:
        if action.dest in SECTIONS:
            action.help = SUPPRESS  # jsonargparse's `--section FILE`, which we do not take.
    for name, group in (parser.groups or {}).items():
        group.title = f"{name}: {group.title}" if name in SECTIONS else group.title
    return parser


def _typed(parser: Any, key: str, value: Any, source: str) -> Any:
    """`value` as the type of `key`."""
    from jsonargparse import ArgumentError

    if source != COMMAND_LINE:
        return _typed_value(parser, key, value, KEYS[key], key, source)
    try:
        return _plain(parser.parse_args([f"--{key}={value}"], defaults=False)[key], KEYS[key])
    except (ArgumentError, TypeError, ValueError):
        raise UserError(error_line(source, key, value, _allowed(KEYS[key]))) from None


def _typed_value(parser: Any, key: str, value: Any, hint: Any, shown_key: str, source: str) -> Any:
    """`value`, as YAML gives it, as the type `hint` of the parser's `key`."""
    from jsonargparse import ArgumentError

    tree = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    try:
        return _plain(parser.parse_object(tree, defaults=False)[key], hint)
    except (ArgumentError, TypeError, ValueError):
        raise UserError(error_line(source, shown_key, value, _allowed(hint))) from None


def _plain(result: Any, hint: Any) -> Any:
    """Out of jsonargparse's number classes, which neither yaml nor json can write. ValueError for what it lets pass and should not."""
    # It lets null pass for any type.
    if (result is None and types.NoneType not in get_args(hint)) or (isinstance(result, float) and not math.isfinite(result)):
        raise ValueError(result)
    return next((plain(result) for plain in (int, float) if type(result) is not bool and isinstance(result, plain)), result)


def _item_class(hint: Any) -> type | None:
    """The dataclass of which the key takes a list, if it does."""
    items = get_args(hint) if get_origin(hint) is list else ()
    return items[0] if items and is_dataclass(items[0]) else None  # type: ignore[return-value]


def _typed_list(item_class: type, key: str, value: Any, source: str) -> list[Any]:
    """A list of sections, each as strict as a section of its own."""
    from jsonargparse import ArgumentParser

    if source == COMMAND_LINE:
        try:
            value = yaml.load(value, Loader=StrictLoader)
        except Misread as error:
            place = f"--{key}" if str(error.problem).startswith("[") else f"--{key}: "
            raise UserError(f"{source}: {place}{error.problem}") from None
        except yaml.YAMLError:
            raise UserError(error_line(source, key, value, _allowed(KEYS[key]))) from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(error_line(source, key, value, _allowed(KEYS[key])))
    hints = get_type_hints(item_class)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(item_class)
    items = []
    for number, fields in enumerate(value):
        for name in fields:
            if name not in hints:
                near = difflib.get_close_matches(str(name), hints, 1)
                fix = f"did you mean {near[0]}?" if near else f"a source has {', '.join(hints)}"
                raise UserError(f"{source}: {key}[{number}].{name}: unknown key; {fix}")
        typed = {
            name: _typed_value(parser, name, content, hints[name], f"{key}[{number}].{name}", source) for name, content in fields.items()
        }
        items.append(item_class(**typed))
    return items


def _build(section: type, values: Mapping[str, Any], prefix: str = "", **fields: Any) -> Any:
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint):
            fields[name] = _build(hint, values, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif f"{prefix}{name}" in values:
            fields[name] = values[f"{prefix}{name}"]
    return section(**fields)


def _allowed(hint: Any) -> str:
    """What may be written for a key of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _allowed(next(argument for argument in arguments if argument is not types.NoneType)) + " or null"
    if origin is Literal:
        return f"must be one of {', '.join(arguments)}"
    if _item_class(hint):
        return "must be a list of sections, such as [{path: text, data_files: [a.txt]}]"
    if origin is list:
        return "must be a list of texts, such as [a, b]"
    if hint is bool:
        return "must be true or false"
    if hint is str:
        return "must be text (put quotes around it)"
    kind = "an integer" if issubclass(hint, int) else "a number"
    return f"must be {kind} " + re.sub(r"v(\W+)", r"\1 ", hint._expression)


def _print_and_exit(text: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text.rstrip())
    check_printed()
    raise SystemExit(0)
