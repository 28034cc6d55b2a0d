"""Checks of a recipe that go beyond one value: keys that contradict each other, and an output folder that another run uses."""

from __future__ import annotations

import difflib
import fcntl
import os
import tempfile
from dataclasses import fields
from pathlib import Path

from fullshard.errors import COMMAND_LINE
from fullshard.recipe.batch import nearest_multiples
from fullshard.recipe.fields import Recipe, SourcePlace, mistake
from fullshard.recipe.writing import flat, recipe_to_dict

# Fields that each rope_type needs; it may have no others.
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def check_recipe(recipe: Recipe) -> None:
    """Raises UserError where two values contradict each other, whatever the machine."""
    model, data, train, optim, rope = recipe.model, recipe.data, recipe.train, recipe.optim, recipe.model.rope_parameters
    if not recipe.output_dir.strip():
        raise mistake(recipe, "output_dir", "name a folder")
    if recipe.seed >= 2**32:
        raise mistake(recipe, "seed", "must be less than 2**32, which NumPy's generator takes")
    if "" in recipe.logging.sample_prompts:
        raise mistake(recipe, "logging.sample_prompts", "a prompt must not be empty")
    if recipe.evaluation.every and not recipe.evaluation.max_rows:
        raise mistake(recipe, "evaluation.every", "nothing to evaluate: evaluation.max_rows is 0")
    if model.hidden_size % model.num_attention_heads:
        # transformers insists on it even where head_dim is set.
        raise mistake(recipe, "model.num_attention_heads", f"must divide model.hidden_size, {model.hidden_size}")
    if model.num_attention_heads % model.num_key_value_heads:
        raise mistake(recipe, "model.num_key_value_heads", f"must divide model.num_attention_heads, {model.num_attention_heads}")
    if model.head_width % 2:
        key = "model.head_dim" if model.head_dim else "model.hidden_size"
        raise mistake(recipe, key, f"a head is {model.head_width} wide; the rotary embedding needs an even width")
    for name in ROPE_FIELDS["llama3"]:
        needed, given = name in ROPE_FIELDS[rope.rope_type], getattr(rope, name) is not None
        if needed and not given:
            raise mistake(recipe, f"model.rope_parameters.{name}", f"must be set with rope_type {rope.rope_type}")
        if given and not needed:
            raise mistake(recipe, f"model.rope_parameters.{name}", f"not used by rope_type {rope.rope_type}; remove it or choose another")
    if rope.low_freq_factor and rope.high_freq_factor and rope.low_freq_factor >= rope.high_freq_factor:
        raise mistake(recipe, "model.rope_parameters.low_freq_factor", f"must be less than high_freq_factor, {rope.high_freq_factor}")
    _check_data(recipe)
    if data.sequence_length > model.max_position_embeddings:
        raise mistake(recipe, "data.sequence_length", f"must be at most model.max_position_embeddings, {model.max_position_embeddings}")
    if train.global_batch_size % (micro := train.micro_batch_size or 1):
        near = nearest_multiples(train.global_batch_size, micro)
        raise mistake(recipe, "train.global_batch_size", f"must be a multiple of train.micro_batch_size, {micro}; nearest that fit: {near}")
    if optim.schedule != "wsd" and optim.decay_steps is not None:
        raise mistake(recipe, "optim.decay_steps", f"not used by optim.schedule {optim.schedule}; remove it or choose wsd")
    if optim.schedule == "wsd":
        room = max(0, train.max_steps - optim.warmup_steps)
        if optim.decay_steps is None or optim.decay_steps > room:
            fix = f"wsd needs 1 to {room}: train.max_steps - optim.warmup_steps"
            if not room:
                fix = f"no room after optim.warmup_steps, {optim.warmup_steps}, in train.max_steps, {train.max_steps}"
            raise mistake(recipe, "optim.decay_steps", fix)
    _check_checkpointing(recipe)
    _check_allowed_changes(recipe)


def _check_checkpointing(recipe: Recipe) -> None:
    sharding = recipe.sharding
    kind, every = sharding.activation_checkpointing or "null", sharding.activation_checkpointing_every
    if kind == "every_n" and every is None:
        raise mistake(recipe, "sharding.activation_checkpointing_every", "must be set with sharding.activation_checkpointing every_n")
    if kind == "every_n" and every is not None and every > recipe.model.num_hidden_layers:
        fix = f"more than model.num_hidden_layers, {recipe.model.num_hidden_layers}: the first layer alone would be checkpointed; lower it"
        raise mistake(recipe, "sharding.activation_checkpointing_every", fix)
    if kind != "every_n" and every is not None:
        fix = f"not used by sharding.activation_checkpointing {kind}; remove it or choose every_n"
        raise mistake(recipe, "sharding.activation_checkpointing_every", fix)
    if sharding.activation_checkpointing_offload and kind not in ("full", "every_n"):
        fix = f"not used by sharding.activation_checkpointing {kind}; remove it or choose full or every_n"
        raise mistake(recipe, "sharding.activation_checkpointing_offload", fix)


def _check_allowed_changes(recipe: Recipe) -> None:
    keys = list(flat(recipe_to_dict(recipe)))
    known = {key[:end] for key in keys for end in range(len(key) + 1) if key[end : end + 1] in ("", ".")}
    for name in recipe.checkpoint.allow_changes:
        if name not in known:
            near = [key for key in keys if key.endswith(f".{name}")] or difflib.get_close_matches(name, sorted(known), 1)
            fix = f"did you mean {' or '.join(near)}?" if near else "name keys, such as optim.learning_rate, or sections, such as optim"
            raise mistake(recipe, "checkpoint.allow_changes", f"{name} is no key of the recipe; {fix}")


def _check_data(recipe: Recipe) -> None:
    data = recipe.data
    for number, source in enumerate(data.mixture):
        if not source.path:
            raise mistake(recipe, "data.mixture", f"source {number + 1} has no path")
    if data.mixture:
        for entry in fields(SourcePlace):
            key = f"data.{entry.name}"
            over_the_file = recipe.sources.get("data.mixture") == COMMAND_LINE != recipe.sources.get(key)
            if key in recipe.sources and getattr(data, entry.name) != entry.default and not over_the_file:
                raise mistake(recipe, key, "has no meaning beside data.mixture; write it into each of its sources")
        if data.evaluation_split and not data.evaluation_path:
            raise mistake(recipe, "data.evaluation_split", "of which source of data.mixture? Name it in data.evaluation_path")
    for name in ("evaluation_files", "evaluation_split", "evaluation_path"):
        if data.evaluation_documents and getattr(data, name):
            raise mistake(recipe, "data.evaluation_documents", f"data.{name} is set too; remove one")
    if data.evaluation_name and not data.evaluation_path:
        raise mistake(recipe, "data.evaluation_name", "has no meaning without data.evaluation_path")


def check_output_dir(recipe: Recipe) -> None:
    """Raises UserError where the run could not write its files, or another run does. Makes the folder; leaves what is in it alone."""
    folder = Path(recipe.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0" and not _lock(folder):
            raise mistake(recipe, "output_dir", "another run is writing there; choose another folder")
        # Asking for permission is no proof: a read-only or full file system, a quota, root.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"fullshard")
    except OSError as error:
        raise mistake(recipe, "output_dir", f"cannot be written: {error.strerror}; choose another folder") from None


def _lock(folder: Path) -> bool:
    """Keep `folder` for this process as long as it lives; False if another process has it. True where the file system knows no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)  # Never closed: the lock is the process's.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
