"""YAML read strictly: a duplicate key, an anchor or a value that YAML itself would misread is an error with file and line."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from fullshard.errors import UserError, shown


class Misread(yaml.constructor.ConstructorError):
    """What YAML would read in silence as something else than it says."""


class StrictLoader(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error: otherwise the later one wins in silence. So is a number that YAML 1.1 takes
    for another one than is written: 0100 is octal, 64, and 1:30 sexagesimal, 90."""

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        self._check(node, "", ())
        return None if node is None else self.construct_document(node)

    def _check(self, node: yaml.Node | None, key: str, above: tuple[yaml.Node, ...]) -> None:
        if node in above:
            raise yaml.constructor.ConstructorError(problem="an anchor within itself", problem_mark=above[-1].start_mark)
        match node:
            case yaml.MappingNode():
                for name, value in node.value:
                    self._check(value, ".".join(filter(None, (key, str(name.value)))), (*above, node))
            case yaml.SequenceNode():
                for number, value in enumerate(node.value):
                    self._check(value, f"{key}[{number}]", (*above, node))
            case yaml.ScalarNode(tag="tag:yaml.org,2002:int" | "tag:yaml.org,2002:float", value=text):
                digits = text.replace("_", "")
                value = self.construct_object(node)
                if ":" in digits or (digits.lstrip("+-").isdecimal() and int(digits) != value):
                    decimal = value if ":" in digits else int(digits)
                    problem = f"{key}: {text}: YAML reads it as {value}; write {decimal}, or put quotes around text"
                    raise Misread(problem=problem, problem_mark=node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise Misread(problem=f"line {key.start_mark.line + 1}: {key.value}: written twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises UserError for a missing or unreadable file, one that is not YAML, a key written twice, a top level that is no mapping.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except FileNotFoundError:
        beside = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(str(path), beside, 1)
        raise UserError(f"{path}: no such file" + (f"; did you mean {nearest[0]}?" if nearest else "")) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a YAML file: not UTF-8 text") from None
    except Misread as error:
        raise UserError(f"{path}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path}: {line}not YAML: {error.problem or ''}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: top level is {shown(tree)}: must be `key: value` lines")
    return tree
