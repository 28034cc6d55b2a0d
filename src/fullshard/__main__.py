"""`python -m fullshard check`: are the accelerate YAML and the recipe YAML right? On any machine, without torch, in under a second."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from fullshard.config import gradient_accumulation_steps, resolve_batch
from fullshard.errors import COMMAND_LINE, UserError, one_line_errors
from fullshard.parsing import DEFAULT_RECIPE, parse_recipe
from fullshard.sharding import placement_from_yaml

USAGE = "fullshard check [--accelerate_config FILE] [--num_processes N] [--quiet] [--config RECIPE] [--section.key value ...]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{COMMAND_LINE}: {message}")


@one_line_errors
def main() -> None:
    """Entry point: `check` prints a summary, or one line on stderr and exit code 2."""
    match sys.argv[1:]:
        case ["check", *rest]:
            _check(rest)
        case [] | ["-h" | "--help"]:
            print(f"usage: {USAGE}\n\nCheck an accelerate YAML and a recipe together and print what they mean.")
        case [command, *_]:
            raise UserError(f"{COMMAND_LINE}: {command}: no such command; there is check")


def _check(argv: list[str]) -> None:
    parser = _Parser(usage=USAGE, allow_abbrev=False, description="All keys of the recipe: recipes/pretrain.py --help.")
    default = Path(os.path.relpath(DEFAULT_RECIPE.parents[1] / "accelerate_configs" / "fsdp.yaml"))
    parser.add_argument("--accelerate_config", type=Path, default=default, metavar="FILE", help="accelerate YAML (default: %(default)s)")
    parser.add_argument("--num_processes", type=int, metavar="N", help="as of accelerate launch: wins over the YAML's")
    parser.add_argument("--quiet", action="store_true", help="print mistakes only")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise UserError(f"{COMMAND_LINE}: --num_processes: {arguments.num_processes}: must be an integer > 0")

    placement = placement_from_yaml(arguments.accelerate_config, num_processes=arguments.num_processes)
    recipe = resolve_batch(parse_recipe(rest), world_size=placement.num_processes)
    accumulation = gradient_accumulation_steps(recipe.train, world_size=placement.num_processes)
    if arguments.quiet:
        return
    train, tokens = recipe.train, recipe.train.global_batch_size * recipe.data.sequence_length
    print(
        f"{arguments.accelerate_config}: {placement.distributed_type}, {placement.num_processes} processes = dp_replicate_size "
        f"{placement.dp_replicate_size} x dp_shard_size {placement.dp_shard_size}, mixed_precision {placement.mixed_precision}\n"
        f"{recipe.sources.get('', 'recipe')}: {train.global_batch_size} rows per step = micro_batch_size {train.micro_batch_size} x "
        f"{placement.num_processes} processes x gradient_accumulation_steps {accumulation}\n"
        f"{tokens:,} tokens per step x {train.max_steps:,} steps = {tokens * train.max_steps:,} tokens"
    )


if __name__ == "__main__":
    main()
