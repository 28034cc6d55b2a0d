"""A recipe as a nested dict, a flat dict and YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from fullshard.recipe.fields import Recipe


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain nested values, in the order of the fields: what the recipe YAML would hold with every key written out."""
    tree = asdict(recipe)
    del tree["sources"]
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of what recipe_to_dict gives."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def recipe_to_yaml(recipe: Recipe) -> str:
    """YAML that parses back to the same recipe."""
    return yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False, width=140)
