"""A Hugging Face folder of the trained weights, from the live model or from a checkpoint: what `from_pretrained` opens anywhere.

The weights are written file by file, as `save_pretrained` would cut them. A file is what is held at a time, in host memory and on the main
process alone; it takes any number of parameters of any size, gathered one after the other.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import LlamaConfig, PreTrainedTokenizerBase

from fullshard.checkpoint.manifest import MANIFEST, STATE, checkpoint_steps, faults
from fullshard.data.tokenizer import load_tokenizer, save_tokenizer
from fullshard.errors import UserError, one_line
from fullshard.files import put_in_place, settle_folder, sync
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.parameters import canonical_parameters, whole_shape, whole_tensor
from fullshard.parallel.agree import on_main
from fullshard.recipe.fields import ModelConfig, RopeParameters

FILE_BYTES = 5 * 10**9
"""Of a file of weights at most, unless one parameter is larger. transformers takes 50e9: ten times the memory while it is written."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_model(
    *,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: str,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the prepared model's weights as `dtype` into `folder`, an older export there is replaced. Collective.

    say: told on the main process what the exported tokenizer does differently. Raises UserError on every rank where the folder cannot be
    written; what was there before is then as it was.
    """
    parameters = dict(canonical_parameters(model))

    def collect(names: Collection[str]) -> dict[str, torch.Tensor]:
        held = {}
        for name in names:
            whole = whole_tensor(parameters[name]).detach()
            if accelerator.is_main_process:
                held[name] = _held(whole, dtype)
            del whole  # Before the next one is gathered.
        return held

    config = accelerator.unwrap_model(model, keep_torch_compile=False).config
    shapes = {name: tuple(whole_shape(parameter)) for name, parameter in parameters.items()}
    if difference := _difference(config, shapes):
        raise RuntimeError(f"the model is not the one of its config: {difference}")
    main = functools.partial(on_main, accelerator)
    return _export(folder=folder, config=config, tokenizer=tokenizer, dtype=dtype, collect=collect, main=main, say=say)


def export_checkpoint(checkpoint: Path, *, folder: Path, dtype: str, say: Callable[[str], None] = print) -> Path:
    """Write a checkpoint's weights as `dtype` into `folder`, an older export there is replaced. In one process, without torch.distributed.

    For a checkpoint that is whole: `exportable`, and a run that is resumed, have read every byte. Raises UserError where a parameter of the
    recipe's model is not in it, where the recipe's tokenizer is gone, or where the folder cannot be written.
    """
    with one_line(f"{checkpoint / STATE}"):
        recipe = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["recipe"]
        tokenizer = load_tokenizer(recipe["data"]["tokenizer"])
        rope_parameters = RopeParameters(**recipe["model"]["rope_parameters"])
        config = llama_config(ModelConfig(**recipe["model"] | {"rope_parameters": rope_parameters}), tokenizer=tokenizer)
    with one_line(f"{checkpoint}: cannot be read"):  # torch's index is a pickle: a damaged one raises anything.
        entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    saved = {
        key.removeprefix("model."): entry
        for key, entry in entries.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if difference := _difference(config, {name: tuple(entry.size) for name, entry in saved.items()}):
        raise UserError(f"{checkpoint}: not the model of its recipe: {difference}; export another checkpoint")

    def collect(names: Collection[str]) -> dict[str, torch.Tensor]:
        read = {f"model.{name}": torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
        with warnings.catch_warnings(), one_line(f"{checkpoint}: cannot be read"):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # Known: that is what no_dist says.
            try:
                dcp.load(read, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
            except CheckpointException as failed:  # Not an Exception.
                raise RuntimeError(failed.failures[0][0]) from failed
        return {name: _held(read.pop(f"model.{name}"), dtype) for name in names}

    def main(function: Callable[[], Any]) -> Any:
        return function()

    return _export(folder=folder, config=config, tokenizer=tokenizer, dtype=dtype, collect=collect, main=main, say=say)


def exportable(path: Path, *, say: Callable[[str], None] = print) -> tuple[Path, Path | None]:
    """(checkpoint, folder of its run's export) for a run folder or a checkpoint; None for one that lies in no run.

    A run's checkpoint is the newest that is whole, every byte of it where it has checksums. Raises UserError where there is none, or where
    the one that is named is not.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run folder, or a checkpoint in its folder checkpoints/")
    if (path / MANIFEST).is_file() or (path / STATE).is_file():
        if found := faults(path, hashes=True):
            raise UserError(f"{path}: damaged: {found[0]}; export another checkpoint")
        folder = path.resolve().parent
        return path, folder.with_name("model") if folder.name == "checkpoints" else None
    for checkpoint in reversed(checkpoint_steps(path).values()):
        if not (found := faults(checkpoint, hashes=True)):
            return checkpoint, path / "model"
        say(f"{checkpoint}: damaged: {found[0]}; taking the one before")
    raise UserError(f"{path}: has no whole checkpoint; name a run folder, or a checkpoint in its folder checkpoints/")


def describe_export(folder: Path) -> str:
    """Folder, parameters, type and size on one line, read off its files."""
    parameters, files = 0, sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    dtype = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]
    size = sum(path.stat().st_size for path in files) / 1e9
    return f"{folder}: {parameters:,} parameters, {dtype}, {size:,.3f} GB in {len(files)} file{'s' if len(files) > 1 else ''}"


def _held(whole: torch.Tensor, dtype: str) -> torch.Tensor:
    """On the host, as the type."""
    return whole.to(device="cpu", dtype=getattr(torch, dtype)).contiguous()


def _difference(config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first parameter that is not as transformers builds it from the config: what from_pretrained would initialise, or leave out."""
    expected = {name: tuple(parameter.shape) for name, parameter in build_on_meta(config).named_parameters()}
    for name in [*expected, *shapes]:
        if expected.get(name) != shapes.get(name):
            return f"{name}: {shapes.get(name, 'missing')} instead of {expected.get(name, 'nothing')}"
    return None


def _export(
    *,
    folder: Path,
    config: LlamaConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    collect: Callable[[Collection[str]], dict[str, torch.Tensor]],
    main: Callable[[Callable[[], Any]], Any],
    say: Callable[[str], None],
) -> Path:
    """Write <folder>.tmp, sync it, give it the name. Collective where `collect` and `main` are."""
    config = copy.deepcopy(config)
    config.use_cache = True  # Off for training alone.
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    whole = build_on_meta(config).to(getattr(torch, dtype))
    files = split_torch_state_dict_into_shards(dict(whole.named_parameters()), max_shard_size=FILE_BYTES)
    target = folder.resolve()  # Of a link, or of ".", the folder itself is replaced.
    partial = target.with_name(f"{target.name}.tmp")
    left_out: list[str] = []

    def begin() -> None:
        settle_folder(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        config.save_pretrained(partial)
        _say_it_as_transformers_4_reads_it(partial / "config.json")
        whole.generation_config.save_pretrained(partial)
        left_out.extend(save_tokenizer(tokenizer, partial))
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (partial / SAFETENSORS_INDEX_FILE).write_text(f"{json.dumps(index, indent=2)}\n", encoding="utf-8")
        _check_replaceable(target, partial)

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise UserError(f"{folder}: not exported: {key} has values that are not finite in {dtype}; choose another type")
        save_file(tensors, partial / name, metadata={"format": "pt"})
        (partial / name).chmod((partial / "config.json").stat().st_mode)  # safetensors lets nobody else read it.
        sync(partial / name)

    def end() -> None:
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        put_in_place(partial, target)
        if left_out:
            tokens = " and ".join(left_out)
            say(f"{folder}: its tokenizer leaves out {tokens}, which data.tokenizer adds to a text: training tokenized without")

    def step(function: Callable[[], None]) -> None:
        """Once a file: ranks wait for one another no longer than one takes."""

        def guarded() -> None:
            try:
                with one_line(f"{folder}: cannot be written"):
                    function()
            except UserError:
                shutil.rmtree(partial, ignore_errors=True)  # A full disk stays full otherwise.
                raise

        main(guarded)

    step(begin)
    for name, keys in files.filename_to_tensors.items():
        held = collect(keys)
        step(functools.partial(write, name, held))
        held.clear()
    step(end)
    return folder


def _say_it_as_transformers_4_reads_it(path: Path) -> None:
    """Add what transformers 4 looks for under other names; without them it takes its defaults in silence. 5 reads both alike."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config["rope_parameters"])
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config["dtype"]  # Before 4.56.
    path.write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")


def _check_replaceable(folder: Path, partial: Path) -> None:
    """Raises UserError where something else than an export would be deleted."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; name a folder")
    new = {path.name for path in partial.iterdir()}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in new and not _WEIGHTS.fullmatch(path.name):
            raise UserError(f"{folder}: holds {path.name}, which is no part of an export; move it away or name another folder")
