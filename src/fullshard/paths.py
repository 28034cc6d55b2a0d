"""Paths as a shell would read them, wherever they are written: `~` and `$VAR` are what they stand for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fullshard.errors import COMMAND_LINE, UserError

VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


def expanded(path: str) -> str:
    """The path with `~`, `~user`, `$VAR` and `${VAR}` replaced; a URL or another name as it is, and what is there under just that name.

    Raises ValueError, which says what is not known: otherwise a folder of that name would be made.
    """
    if "://" in path:
        return path
    unknown = [f"${name}" for pair in VARIABLE.findall(path) if not os.environ.get(name := "".join(pair))]
    replaced = os.path.expanduser(VARIABLE.sub(lambda match: os.environ.get("".join(match.groups("")), ""), path))
    if unknown or replaced.startswith("~"):
        if os.path.lexists(path):
            return path
        home = "the home folder is not known" if path.startswith(("~/", "$")) or path == "~" else f"no such user, {path.split('/')[0]}"
        raise ValueError(f"{unknown[0]} is not set" if unknown else home)
    return replaced


def path_argument(text: str) -> Path:
    """`type` of an argument of argparse. Most shells leave `--output=~/x` as it is."""
    try:
        return Path(expanded(text))
    except ValueError as error:
        raise UserError(f"{COMMAND_LINE}: {text}: {error}") from None
