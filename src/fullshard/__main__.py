"""`fullshard check | tokenize | data | verify | export`: what can be done with a recipe or a run's folder without starting a run.

`check`: are the accelerate YAML and the recipe YAML right? On any machine, without torch, in under a second.
`verify`: is every file of a run's checkpoints there and right? Without torch too.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from fullshard.checkpoint.manifest import verify
from fullshard.errors import COMMAND_LINE, UserError, one_line_errors
from fullshard.paths import path_argument
from fullshard.placement.fit import check_sharding
from fullshard.placement.placement import placement_from_yaml
from fullshard.plan.communication import communication_line
from fullshard.plan.memory import expected_memory, memory_line
from fullshard.recipe.batch import gradient_accumulation_steps, resolve_batch
from fullshard.recipe.checks import check_output_dir
from fullshard.recipe.parsing import DEFAULT_RECIPE, parse_recipe

RECIPE = "[--config RECIPE] [--section.key value ...]"
USAGE = {
    "check": f"fullshard check [--accelerate_config FILE] [--num_processes N] [--quiet] {RECIPE}",
    "tokenize": f"fullshard tokenize --output DIR [--num_workers N] [--shard_tokens N] {RECIPE}",
    "data": f"fullshard data [--rows N] {RECIPE}",
    "verify": "fullshard verify [--hashes] PATH",
    "export": "fullshard export [--dtype float32|bfloat16|float16] [--output DIR] PATH",
}
PURPOSE = {
    "check": "Check an accelerate YAML and a recipe together and print what they mean.",
    "tokenize": "Tokenize a recipe's training and held-out text once, into a dataset that training streams and the Hub takes. "
    "Run again after an interruption it makes what is missing.",
    "data": "Show what a recipe will read: sources, sizes, how files are dealt to streams, epochs, the first packed rows.",
    "verify": "Say of each checkpoint what it is and whether it is whole: each file there and of its size, and with --hashes every byte as "
    "it was written. Leftovers of what was interrupted are named too; they are no failure. "
    "Exit code 0: all are whole; 1: one is damaged; 2: a mistake in the call.",
    "export": "Write a run's newest whole checkpoint, or the one that PATH is, as a Hugging Face folder: weights, configs, tokenizer.",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, command: str) -> None:
        keys = " All keys of the recipe: recipes/pretrain.py --help." if RECIPE in USAGE[command] else ""
        super().__init__(usage=USAGE[command], allow_abbrev=False, description=f"{PURPOSE[command]}{keys}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{COMMAND_LINE}: {message}")


@one_line_errors
def main() -> None:
    """Entry point: a mistake is one line on stderr and exit code 2."""
    match sys.argv[1:]:
        case ["check", *rest]:
            _check(rest)
        case ["tokenize", *rest]:
            _tokenize(rest)
        case ["data", *rest]:
            _data(rest)
        case ["verify", *rest]:
            _verify(rest)
        case ["export", *rest]:
            _export(rest)
        case [] | ["-h" | "--help"]:
            print("\n\n".join(f"usage: {USAGE[command]}\n\n{PURPOSE[command]}" for command in USAGE))
        case [command, *_]:
            raise UserError(f"{COMMAND_LINE}: {command}: no such command; there are {', '.join(USAGE)}")


def _check(argv: list[str]) -> None:
    parser = _Parser("check")
    default = Path(os.path.relpath(DEFAULT_RECIPE.parents[1] / "accelerate_configs" / "fsdp.yaml"))
    parser.add_argument(
        "--accelerate_config", type=path_argument, default=default, metavar="FILE", help="accelerate YAML (default: %(default)s)"
    )
    parser.add_argument("--num_processes", type=int, metavar="N", help="as of accelerate launch: wins over the YAML's")
    parser.add_argument("--quiet", action="store_true", help="print mistakes only")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.num_processes is not None:
        _at_least(1, arguments, "num_processes")

    placement = placement_from_yaml(arguments.accelerate_config, num_processes=arguments.num_processes)
    recipe = resolve_batch(parse_recipe(rest), world_size=placement.num_processes)
    check_sharding(recipe, placement)
    accumulation = gradient_accumulation_steps(recipe.train, world_size=placement.num_processes)
    if arguments.quiet:
        return
    train, tokens = recipe.train, recipe.train.global_batch_size * recipe.data.sequence_length
    print(
        f"{arguments.accelerate_config}: {placement.distributed_type}, {placement.num_processes} processes = dp_replicate_size "
        f"{placement.dp_replicate_size} x dp_shard_size {placement.dp_shard_size}, mixed_precision {placement.mixed_precision}\n"
        f"{recipe.sources.get('', 'recipe')}: {train.global_batch_size} rows per step = micro_batch_size {train.micro_batch_size} x "
        f"{placement.num_processes} processes x gradient_accumulation_steps {accumulation}\n"
        f"{tokens:,} tokens per step x {train.max_steps:,} steps = {tokens * train.max_steps:,} tokens\n"
        f"memory per rank: {memory_line(expected_memory(recipe, placement))}\n"
        f"communication: {communication_line(recipe, placement)}"
    )


def _tokenize(argv: list[str]) -> None:
    parser = _Parser("tokenize")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--output", type=path_argument, required=True, metavar="DIR", help="folder of the dataset; a new one, or one to go on with"
    )
    parser.add_argument("--num_workers", type=int, default=cores, metavar="N", help="processes (default: one a core, here %(default)s)")
    parser.add_argument("--shard_tokens", type=int, default=2**25, metavar="N", help="about so many tokens a file (default: %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    _at_least(1, arguments, "num_workers")
    _at_least(1, arguments, "shard_tokens")
    recipe = parse_recipe(rest)
    try:
        check_output_dir(replace(recipe, output_dir=str(arguments.output), sources={"output_dir": COMMAND_LINE}))
    except UserError as error:
        raise UserError(str(error).replace("--output_dir", "--output")) from None

    # Imported here, as for `data`: they take seconds.
    import yaml
    from rich.console import Console

    from fullshard.data.prepare import tokenize
    from fullshard.data.shards import COLUMN

    manifest = tokenize(
        data=recipe.data,
        output=arguments.output,
        num_workers=arguments.num_workers,
        shard_tokens=arguments.shard_tokens,
        console=Console(),
    )
    for split, total in manifest["totals"].items():
        skipped = f", {total['bad_rows']:,} bad rows skipped" if total["bad_rows"] else ""
        sizes = f"{total['tokens']:,} tokens, {total['shards']:,} files, {total['bytes'] / 1e6:,.1f} MB"
        print(f"{arguments.output}: {split}: {total['documents']:,} documents, {sizes}{skipped}")
    keys = {"path": str(arguments.output), "tokens_column": COLUMN}
    if "validation" in manifest["totals"]:
        keys["evaluation_split"] = "validation"
    if recipe.data.tokenizer != type(recipe.data)().tokenizer:
        keys["tokenizer"] = recipe.data.tokenizer
    print(f"To train from it:\n{yaml.safe_dump({'data': keys}, sort_keys=False)}", end="")


def _data(argv: list[str]) -> None:
    parser = _Parser("data")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="packed rows to show (default: %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    _at_least(0, arguments, "rows")
    recipe = parse_recipe(rest)

    from fullshard.data.describe import describe
    from fullshard.terminal import Terminal

    describe(recipe, rows=arguments.rows, terminal=Terminal(main_process=True))


def _verify(argv: list[str]) -> None:
    parser = _Parser("verify")
    parser.add_argument("path", type=path_argument, metavar="PATH", help="folder of a run, its checkpoints folder, or one checkpoint")
    parser.add_argument("--hashes", action="store_true", help="read every byte and check it against the checksums")
    arguments = parser.parse_args(argv)
    verdicts = verify(arguments.path, hashes=arguments.hashes)
    for verdict in verdicts:
        print(verdict.line)
    if not all(verdict.whole for verdict in verdicts):
        raise SystemExit(1)


def _export(argv: list[str]) -> None:
    parser = _Parser("export")
    parser.add_argument("path", type=path_argument, metavar="PATH", help="folder of a run, or one of its checkpoints")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="type of the weights (default: %(default)s)")
    parser.add_argument(
        "--output", type=path_argument, metavar="DIR", help="folder, an older export there is replaced (default: model/ in the run)"
    )
    arguments = parser.parse_args(argv)

    from fullshard.checkpoint.export import describe_export, export_checkpoint, exportable

    checkpoint, folder = exportable(arguments.path)
    folder = arguments.output or folder
    if folder is None:
        raise UserError(f"{COMMAND_LINE}: {checkpoint}: in no run's folder checkpoints/; name the folder to write by --output")
    written = export_checkpoint(checkpoint, folder=folder, dtype=arguments.dtype)
    print(f"{checkpoint} -> {describe_export(written)}")


def _at_least(least: int, arguments: Any, name: str) -> None:
    if getattr(arguments, name) < least:
        raise UserError(f"{COMMAND_LINE}: --{name}: {getattr(arguments, name)}: must be an integer >= {least}")


if __name__ == "__main__":
    main()
