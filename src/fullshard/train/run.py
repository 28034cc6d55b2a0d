"""What surrounds the training loop: `start` before it, `finish` after it; the run folder, config.yaml and the tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from fullshard import __version__
from fullshard.checkpoint.export import describe_export, export_model
from fullshard.checkpoint.manifest import checkpoint_steps
from fullshard.checkpoint.resume import Resume
from fullshard.model.parameters import canonical_parameters, sharded_fraction, weights_hash, whole_shape
from fullshard.parallel.agree import on_main
from fullshard.parallel.cpu_products import products_line
from fullshard.parallel.precision import COMPUTE_DTYPE, check_precision, precision_policies
from fullshard.placement.placement import Placement
from fullshard.plan.communication import communication_line
from fullshard.plan.memory import expected_memory, memory_line
from fullshard.recipe.batch import gradient_accumulation_steps
from fullshard.recipe.fields import Recipe
from fullshard.recipe.writing import recipe_to_dict
from fullshard.terminal import Terminal, duration
from fullshard.train.evaluate import complete
from fullshard.train.log import RunLog, open_log

if TYPE_CHECKING:
    from fullshard.data.batches import Batches

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb")


@dataclass(frozen=True)
class Run:
    """What a run writes to."""

    terminal: Terminal
    log: RunLog
    predicted_peak_bytes: int
    """Per rank, of a training step."""
    started: float
    """time.perf_counter() at the first step."""
    resumed_step: int = 0
    """Steps that were done before it."""
    noted: frozenset[str] = frozenset()
    """Subjects of what was said of the data before the first step."""


def start(
    *, recipe: Recipe, placement: Placement, accelerator: Accelerator, model: nn.Module, resume: Resume, batches: Batches | None = None
) -> Run:
    """Check what was prepared against what was asked, open the run folder and the trackers, print what is derived. Collective.

    Call it when the checkpoint is loaded: until then the folder is as it was.
    """
    terminal = Terminal(main_process=accelerator.is_main_process)
    config = _describe(recipe=recipe, placement=placement, accelerator=accelerator, model=model, resume=resume)
    memory = expected_memory(recipe, placement)
    output_dir = Path(recipe.output_dir)
    # The others wait: what a rank writes there from here on is this run's.
    if kept := on_main(accelerator, lambda: _open_run_folder(output_dir, config=config, resume=resume)):
        terminal.say(f"files of the earlier run in {output_dir} are now in {kept}")
    products = products_line(COMPUTE_DTYPE[accelerator.mixed_precision], accelerator.device)
    rows = _start_table(recipe=recipe, placement=placement, config=config, products=products, memory=memory, resume=resume)
    terminal.table("fullshard pretrain", rows)
    notes = batches.notes() if batches is not None and accelerator.is_main_process else {}
    for line in [*resume.notes, *notes.values()]:
        terminal.say(line)
    log = open_log(
        accelerator=accelerator,
        recipe=recipe,
        output_dir=output_dir,
        config=config,
        resumed_step=resume.step,
        wandb_id=resume.wandb_id,
        say=terminal.say,
    )
    return Run(
        terminal=terminal,
        log=log,
        predicted_peak_bytes=memory["peak"],
        started=time.perf_counter(),
        resumed_step=resume.step,
        noted=frozenset(notes),
    )


def finish(
    *,
    recipe: Recipe,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    values: dict[str, float],
) -> None:
    """Export the model, print how it ended and a few completions, close what `start` opened. Collective; nothing collective may follow."""
    wall_s = time.perf_counter() - run.started
    logging = recipe.logging
    run.terminal.table("finished", _end_table(recipe=recipe, values=values, wall_s=wall_s, resumed_step=run.resumed_step))
    try:
        if recipe.checkpoint.export != "never":
            folder = Path(recipe.output_dir) / "model"
            export_model(
                accelerator=accelerator,
                model=model,
                tokenizer=tokenizer,
                folder=folder,
                dtype=recipe.checkpoint.export,
                say=run.terminal.say,
            )
            run.terminal.say(on_main(accelerator, lambda: describe_export(folder)))
        if logging.sample_tokens and logging.sample_prompts:
            completions = complete(
                accelerator, model, tokenizer=tokenizer, prompts=logging.sample_prompts, tokens=logging.sample_tokens, seed=recipe.seed
            )
            run.terminal.samples(zip(logging.sample_prompts, completions, strict=True))
    finally:  # A completion is a bonus: whatever becomes of it, the trackers have the run.
        run.log.close()


def _describe(*, recipe: Recipe, placement: Placement, accelerator: Accelerator, model: nn.Module, resume: Resume) -> dict[str, Any]:
    """What this run is, read off the prepared model where it can be: goes to config.yaml and to the trackers. Collective.

    Raises RuntimeError when the model is not sharded, or not in the precision, that was asked for.
    """
    precision = check_precision(accelerator, model, sharding=recipe.sharding)
    shards = placement.dp_shard_size if placement.distributed_type == "FSDP" else 1
    held, parameters = sharded_fraction(model, shards=shards)
    if held != parameters:
        raise RuntimeError(f"only {held} of {parameters} parameters are held as 1/{shards} by every rank")
    return {
        **recipe_to_dict(recipe),
        "accelerate": asdict(placement),
        "precision": precision,
        "derived": {
            "parameters": sum(whole_shape(p).numel() for _, p in canonical_parameters(model)),
            "sharded": f"every rank holds 1/{shards} of each of {parameters} parameters"
            + (" (FSDP1: of the flat tensors of their units)" if placement.fsdp_version == 1 else ""),
            "fsdp_units": sum(1 for _ in precision_policies(model)),
            "gradient_accumulation_steps": gradient_accumulation_steps(recipe.train, world_size=placement.num_processes),
            _hash_key(resume): weights_hash(model) if recipe.logging.weights_hash else None,
        },
        "versions": {"fullshard": __version__} | {package: version(package) for package in PACKAGES},
        "git_commit": _git_commit(),
    }


def _hash_key(resume: Resume) -> str:
    return "initial_weights_hash" if resume.folder is None else "resumed_weights_hash"


def _open_run_folder(output_dir: Path, *, config: dict[str, Any], resume: Resume) -> Path | None:
    """Write config.yaml. What another run has left here is moved to previous/<n>, which is returned. Main process only.

    Of a run that is continued that is nothing but checkpoints of later steps, which are done again: `auto` would take them for the newest.
    """
    if resume.own:
        earlier = later_checkpoints(output_dir, resume.step)
        earlier += [model] if (model := output_dir / "model").exists() else []  # Of fewer steps: it would pass for this run's.
    else:
        names = ("checkpoints", "config.yaml", "metrics.jsonl", "documents", "model", "hang")
        earlier = [path for name in names if (path := output_dir / name).exists()]
    kept = set_aside(output_dir, earlier)
    (output_dir / "config.yaml").write_text(yaml.safe_dump(_plain(config), sort_keys=False, width=140), encoding="utf-8")
    return kept


def later_checkpoints(output_dir: str | Path, step: int) -> list[Path]:
    """Checkpoints of steps that are done again."""
    return [path for later, path in checkpoint_steps(output_dir).items() if later > step]


def set_aside(output_dir: Path, paths: Sequence[Path]) -> Path | None:
    """Move what a run must not take for its own to previous/<n>, which is returned; None where there is nothing. Main process only."""
    if not paths:
        return None
    taken = [int(path.name) for path in (output_dir / "previous").glob("*") if path.name.isdigit()]
    kept = output_dir / "previous" / str(max(taken, default=0) + 1)
    kept.mkdir(parents=True)
    for path in paths:
        shutil.move(path, kept / path.name)  # checkpoints may be a link to another disk.
    return kept


def _start_table(
    *, recipe: Recipe, placement: Placement, config: dict[str, Any], products: str, memory: Mapping[str, int], resume: Resume
) -> list[tuple[str, str]]:
    """Name and value of what is derived from the two YAML files."""
    train, derived = recipe.train, config["derived"]
    tokens = train.global_batch_size * recipe.data.sequence_length
    mesh = {
        "FSDP": f"dp_replicate_size {placement.dp_replicate_size} x dp_shard_size {placement.dp_shard_size}, "
        f"{derived['fsdp_units']} FSDP units, {'reshard' if placement.reshard_after_forward else 'keep'} after forward",
        "MULTI_GPU": f"DDP over {placement.num_processes} ranks, not sharded",
        "NO": "one process, not sharded",
    }[placement.distributed_type]
    optim = recipe.optim
    rate = f"{optim.schedule}, peak {optim.learning_rate:g} at step {optim.warmup_steps}"
    if optim.warmup_steps > train.max_steps:
        rate += f": not reached in {train.max_steps} steps"
    begins, weights, digest = "from the seed", "initial weights", derived[_hash_key(resume)]
    if resume.folder is not None:
        weights = f"weights at step {resume.step}"
        begins = f"after step {resume.step}, from {resume.folder}, saved by {resume.num_processes} processes"
    return [
        ("parameters", f"{derived['parameters']:,}"),
        ("mesh", mesh),
        ("shards", derived["sharded"]),
        ("precision", ", ".join(f"{what} {dtype}" for what, dtype in config["precision"].items())),
        ("matrix products", products),
        (
            "batch",
            f"{train.global_batch_size} rows = micro_batch_size {train.micro_batch_size} x {placement.num_processes} ranks"
            f" x {derived['gradient_accumulation_steps']} accumulation steps",
        ),
        ("learning rate", rate),
        ("tokens", f"{tokens:,} per step x {train.max_steps:,} steps = {tokens * train.max_steps:,}"),
        ("memory per rank", memory_line(memory)),
        ("communication", communication_line(recipe, placement)),
        ("begins", begins),
        (
            "saves",
            f"every {every} steps, and the last" if (every := recipe.checkpoint.every) else "where it is stopped (checkpoint.every is 0)",
        ),
        (weights, f"hash {digest}" if digest else "not hashed"),
        ("output", os.path.abspath(recipe.output_dir)),
    ]


def _end_table(*, recipe: Recipe, values: dict[str, float], wall_s: float, resumed_step: int) -> list[tuple[str, str]]:
    """Name and value of how the run ended."""
    train = recipe.train
    own = (train.max_steps - resumed_step) * train.global_batch_size * recipe.data.sequence_length  # Tokens since the run was resumed.
    rows = [
        ("train/loss", f"{values['train/loss']:.4f} nats"),
        ("tokens of this launch", f"{own:,.0f} in {duration(wall_s)}"),
        ("tokens/s", f"{own / wall_s:,.0f}, evaluation included"),
        ("files", f"{recipe.output_dir}/config.yaml, {recipe.output_dir}/metrics.jsonl"),
    ]
    if "eval/loss" in values:
        rows.insert(1, ("eval/loss", f"{values['eval/loss']:.4f} nats, perplexity {values['eval/perplexity']:.1f}, on held-out text"))
    if "memory/peak_allocated_gib" in values:
        predicted = values["memory/predicted_peak_gib"]
        rows.insert(-1, ("peak memory", f"{values['memory/peak_allocated_gib']:.3f} GiB on rank 0, {predicted:.3f} expected"))
    return rows


def _git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with -dirty where it differs; None outside of one."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
