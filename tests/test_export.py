"""What is exported is the trained model: the same bits and logits in a plain process, whoever trained it, from the run or a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard import __main__
from fullshard.checkpoint import export
from fullshard.checkpoint.export import describe_export, export_checkpoint, exportable
from fullshard.checkpoint.manifest import record_files, write_manifest
from fullshard.data.streams import encoder
from fullshard.data.tokenizer import load_tokenizer
from fullshard.errors import UserError
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.parameters import canonical_parameters, whole_tensor
from fullshard.recipe.fields import DataConfig, ModelConfig, Recipe, ShardingConfig
from support import HANG_S
from support.exports import TIED_HEAD, UNTIED, tokenizer_folder

ROWS = torch.randint(0, 4099, (3, 33), generator=torch.Generator().manual_seed(1))
FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
WRAPPED = {"FSDP_ACTIVATION_CHECKPOINTING": "true", "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}


def trained(model: ModelConfig) -> tuple[Any, Any, Any]:
    """(Accelerator, model, optimizer) after two steps."""
    from fullshard.parallel.accelerator import build_accelerator
    from fullshard.parallel.wrap import prepare_model
    from fullshard.placement.placement import placement_from_environment

    accelerator = build_accelerator(placement=placement_from_environment(), sharding=ShardingConfig(), trackers=[])
    prepared = prepare_model(accelerator, build_on_meta(llama_config(model, tokenizer=load_tokenizer("bundled"))), seed=7)
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(prepared.parameters(), lr=1e-2))
    for _ in range(2):
        accelerator.backward(prepared(input_ids=ROWS, labels=ROWS, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, prepared, optimizer


def save(recipe: Recipe, *, accelerator: Any, model: Any, optimizer: Any) -> None:
    from fullshard.checkpoint.resume import Resume
    from fullshard.checkpoint.save import Saver
    from fullshard.model.bad_steps import BadSteps
    from fullshard.placement.placement import placement_from_environment

    resume = Resume(schedule_steps=recipe.train.max_steps)
    saver = Saver(recipe=recipe, placement=placement_from_environment(), accelerator=accelerator, resume=resume)
    bad_steps = BadSteps(spike_factor=None, device=accelerator.device)
    position = {"rows": 0, "streams": {}, "dealt": {}, "read": {}, "order": {}}
    saver.save(model=model, optimizer=optimizer, bad_steps=bad_steps, step=2, position=position, values={})
    saver.finish()


def run(*, output_dir: Path, model: ModelConfig) -> dict[str, Any]:
    """Trains, saves a checkpoint and exports as the end of a run does; what the trained model is and says."""
    from fullshard.checkpoint.export import export_model
    from fullshard.train.evaluate import evaluate

    recipe = Recipe(output_dir=str(output_dir), model=model, data=DataConfig(sequence_length=32))
    accelerator, prepared, optimizer = trained(model)
    save(recipe, accelerator=accelerator, model=prepared, optimizer=optimizer)
    folder = output_dir / "model"
    export_model(accelerator=accelerator, model=prepared, tokenizer=load_tokenizer("bundled"), folder=folder, dtype="float32")
    config = accelerator.unwrap_model(prepared, keep_torch_compile=False).config
    rows = ROWS[accelerator.process_index :: accelerator.num_processes]
    return {
        "parameters": {name: whole_tensor(parameter).detach().clone() for name, parameter in canonical_parameters(prepared)},
        "logits": prepared(input_ids=ROWS, use_cache=False).logits.detach(),
        "eval_loss": evaluate(accelerator, prepared, rows=rows, micro_batch_size=1),
        "config": (config.use_cache, config.dtype),
    }


def loaded(folder: Path) -> Any:
    """As a user would: nothing said about types. Every weight is found, and every weight is used."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {what: list(names) for what, names in info.items() if names} == {}
    return model.eval()


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As many threads as a rank of the pool: the same sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sharded(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two FSDP ranks in fp32: (its folder, what rank 0 returns)."""
    output_dir = tmp_path_factory.mktemp("sharded")
    return output_dir, pool.run(run, config="fsdp_fp32.yaml", output_dir=output_dir, model=UNTIED)[0]


def test_a_plain_process_has_the_trained_weights_and_logits(sharded: Any) -> None:
    """R23, R24, bit for bit."""
    output_dir, result = sharded
    model = loaded(output_dir / "model")
    own = dict(model.named_parameters())
    assert own.keys() == result["parameters"].keys()
    for name, value in result["parameters"].items():
        assert own[name].dtype == torch.float32
        assert torch.equal(own[name], value), name
    assert torch.equal(model(input_ids=ROWS, use_cache=False).logits, result["logits"])


def test_loss_on_a_fixed_batch_is_the_eval_loss(sharded: Any) -> None:
    """R25."""
    output_dir, result = sharded
    logits = loaded(output_dir / "model")(input_ids=ROWS[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ROWS[:, 1:].flatten())
    assert loss.item() == pytest.approx(result["eval_loss"], abs=1e-6)


def test_folder_has_all_that_a_hugging_face_folder_has(sharded: Any) -> None:
    """R24, R28. The cache is off for training alone, and the export leaves the training config as it is."""
    output_dir, result = sharded
    folder = output_dir / "model"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files(folder)) == names
    assert result["config"][0] is False
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (config["dtype"], config["architectures"], config["use_cache"]) == ("float32", ["LlamaForCausalLM"], True)
    assert config["eos_token_id"] == generation["eos_token_id"] == load_tokenizer("bundled").eos_token_id
    parameters = sum(value.numel() for value in result["parameters"].values())
    assert describe_export(folder).startswith(f"{folder}: {parameters:,} parameters, float32, {parameters * 4 / 1e9:,.3f} GB in 1 file")
    assert sorted(path.name for path in output_dir.iterdir()) == ["checkpoints", "model"]


def test_what_other_versions_read_is_where_they_look(sharded: Any) -> None:
    """transformers 4 knows neither rope_parameters nor the class TokenizersBackend. tests/transformers_4.py asks it."""
    folder = sharded[0] / "model"
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert (config["rope_scaling"], config["torch_dtype"]) == (None, "float32")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(("adds", "told"), [("begin", "<|begin|>"), ("begin and end", "<|begin|> and <|endoftext|>"), ("nothing", None)])
def test_tokenizer_adds_what_training_saw(
    sharded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], adds: str, told: str | None
) -> None:
    """Nothing but a document's own tokens: the end-of-text is between documents. Of the folder that was opened nothing else is left."""
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", adds=adds)
    folder = copied_run(sharded, tmp_path, (2,)) / "checkpoints" / "step_00000002"
    state = json.loads((folder / "state.json").read_text())
    state["recipe"]["data"]["tokenizer"] = str(tokenizer)
    (folder / "state.json").write_text(json.dumps(state))
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    write_manifest(folder, step=2, files=record_files(folder, names, checksums=True))
    assert command(folder) is None
    exported = tmp_path / "run" / "model"
    line = f"{exported}: its tokenizer leaves out {told}, which data.tokenizer adds to a text: training tokenized without"
    assert ([line] if told else []) == capsys.readouterr().out.splitlines()[:-1]
    trained_with, theirs = load_tokenizer(str(tokenizer)), AutoTokenizer.from_pretrained(exported)
    texts = ["def f(x):", "", " é漢字 "]
    assert [theirs(text).input_ids for text in texts] == [tokens[:-1].tolist() for tokens in encoder(trained_with)(texts)]
    assert theirs("def", "return").input_ids == theirs("def").input_ids + theirs("return").input_ids
    config = json.loads((exported / "tokenizer_config.json").read_text())
    assert config.keys().isdisjoint({"local_files_only", "is_local", "add_bos_token", "add_eos_token", "extra_special_tokens"})
    assert theirs.bos_token == "<|begin|>"
    assert theirs.extra_special_tokens == ["<|im|>"]
    assert theirs.chat_template == "{{ x }}"


def test_tokenizer_comes_back(sharded: Any) -> None:
    ours, theirs = load_tokenizer("bundled"), AutoTokenizer.from_pretrained(sharded[0] / "model")
    texts = ["def f(x):\n    return x  # é 漢字 🙂\n", " leading", "", "a<|endoftext|>b", "\ttabs  and   spaces \n\n"]
    assert [theirs(text).input_ids for text in texts] == [ours(text).input_ids for text in texts]
    assert [theirs.decode(theirs(text).input_ids) for text in texts] == texts
    assert (theirs.eos_token_id, theirs.eos_token, len(theirs)) == (ours.eos_token_id, ours.eos_token, len(ours))


@pytest.mark.parametrize(
    ("config", "world_size", "environment", "model"),
    [
        ("fsdp_fp32.yaml", 2, {}, UNTIED),
        ("fsdp_fp32.yaml", 2, {**WRAPPED, **FULL}, TIED_HEAD),
        ("fsdp.yaml", 3, {}, UNTIED),
        ("fsdp.yaml", 1, {}, TIED_HEAD),
        ("fsdp1_full_shard.yaml", 2, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, TIED_HEAD),
        ("fsdp1_full_shard.yaml", 3, FULL, UNTIED),
        ("ddp.yaml", 2, {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}, replace(TIED_HEAD, num_hidden_layers=1)),
    ],
)
def test_run_and_checkpoint_export_the_same_bytes(
    pool: Any, tmp_path: Path, config: str, world_size: int, environment: dict[str, str], model: ModelConfig
) -> None:
    """R23, R25, R27: the offline export of a checkpoint has the files of the export at the end of training, whoever wrote it."""
    result = pool.run(run, config=config, world_size=world_size, environment=environment, output_dir=tmp_path, model=model)[0]
    checkpoint, folder = exportable(tmp_path)
    assert (checkpoint, folder) == (tmp_path / "checkpoints" / "step_00000002", tmp_path / "model")
    other = export_checkpoint(checkpoint, folder=tmp_path / "other", dtype="float32")
    assert files(other) == files(folder)
    own = dict(loaded(other).named_parameters())
    assert own.keys() == result["parameters"].keys()
    assert all(torch.equal(own[name], value) for name, value in result["parameters"].items())
    assert ("lm_head.weight" in own) != model.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_type_is_obeyed_recorded_and_opened_as_it_is(sharded: Any, tmp_path: Path, dtype: str) -> None:
    """R28: half the bytes, and from_pretrained opens them in the type that they have. The logits are those of the cast weights."""
    output_dir, result = sharded
    export_checkpoint(exportable(output_dir)[0], folder=tmp_path / "model", dtype=dtype)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    parameters = sum(value.numel() for value in result["parameters"].values())
    assert f" {dtype}, {parameters * 2 / 1e9:,.3f} GB" in describe_export(tmp_path / "model")
    model, reference = loaded(tmp_path / "model"), loaded(output_dir / "model")
    for name, parameter in reference.named_parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
        assert torch.equal(model.get_parameter(name), parameter), name
    assert torch.equal(model(input_ids=ROWS).logits, reference(input_ids=ROWS).logits)


def export_memory(*, folder: Path, file_bytes: int) -> dict[str, int]:
    """Bytes that a rank holds more than before: at most during the export, and after it."""
    from fullshard.checkpoint.export import export_model
    from fullshard.measure.memory import measure_memory

    accelerator, model, _ = trained(replace(UNTIED, vocab_size=4099, hidden_size=72, num_hidden_layers=40))
    tokenizer = load_tokenizer("bundled")
    with measure_memory(accelerator.device) as before:
        pass
    with mock.patch.object(export, "FILE_BYTES", file_bytes), measure_memory(accelerator.device) as during:
        export_model(accelerator=accelerator, model=model, tokenizer=tokenizer, folder=folder, dtype="float32")
    assert before.use is not None
    assert during.use is not None
    return {
        "peak": during.use.peak_allocated - before.use.allocated,
        "left": during.use.allocated - before.use.allocated,
        "whole": 4 * sum(p.numel() for p in model.parameters()),
        "largest": 4 * max(p.numel() for p in model.parameters()),
    }


def test_one_rank_holds_one_file_and_the_others_nothing(pool: Any, tmp_path: Path) -> None:
    """R22. A gathered parameter passes through on every rank, with the buffers of its all-gather."""
    main, other = pool.run(export_memory, config="fsdp_fp32.yaml", folder=tmp_path / "model", file_bytes=2_000_000)
    assert other["whole"] > 5 * other["largest"]
    assert max(other["left"], main["left"]) < 1.1 * other["largest"]  # gloo's thread may let go of its last buffer a little later.
    assert other["peak"] < 3 * other["largest"]
    assert main["peak"] < 2_000_000 + 3 * main["largest"]
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 3
    loaded(tmp_path / "model")


PLAIN = """
import sys, torch
from fullshard.__main__ import main
main()
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not torch.distributed.is_initialized()
folder = sys.argv[-1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
print(model.dtype, model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=5).shape[1])
"""


def test_command_in_a_process_without_ranks_or_network(sharded: Any, tmp_path: Path) -> None:
    """R24."""
    output_dir, result = sharded
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hf")}
    arguments = ["export", str(output_dir), "--dtype", "bfloat16", "--output", str(tmp_path / "exported")]
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:fullshard", "-c", PLAIN, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    line, last = ended.stdout.splitlines()
    parameters = sum(value.numel() for value in result["parameters"].values())
    expected = f"{output_dir}/checkpoints/step_00000002 -> {tmp_path}/exported: {parameters:,} parameters, bfloat16, "
    assert line == f"{expected}{parameters * 2 / 1e9:.3f} GB in 1 file"
    assert last.startswith("torch.bfloat16 ")
    assert "Warning" not in ended.stderr, ended.stderr


def command(*arguments: str | Path) -> str | None:
    """The error of `fullshard export`."""
    with mock.patch.object(sys, "argv", ["fullshard", "export", *map(str, arguments)]):
        try:
            __main__._export(sys.argv[2:])
        except UserError as error:
            return str(error)
    return None


def copied_run(sharded: Any, tmp_path: Path, steps: tuple[int, ...]) -> Path:
    """A run with the checkpoint's tensors at several steps; no export."""
    for step in steps:
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        source = exportable(sharded[0])[0]
        for path in source.iterdir():
            if path.name != "manifest.json":
                (folder / path.name).write_bytes(path.read_bytes())
        write_manifest(folder, step=step, files=record_files(folder, [path.name for path in folder.iterdir()], checksums=True))
    return tmp_path / "run"


def test_a_run_gives_its_newest_whole_checkpoint_and_says_so(sharded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_dir = copied_run(sharded, tmp_path, (2, 10))
    newest = output_dir / "checkpoints" / "step_00000010"
    assert exportable(output_dir) == (newest, output_dir / "model")
    assert exportable(newest.with_name("step_00000002")) == (newest.with_name("step_00000002"), output_dir / "model")
    os.truncate(newest / "__1_0.distcp", 1000)
    assert command(output_dir) is None
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{newest}: damaged: __1_0.distcp: 1000 bytes")
    assert second.startswith(f"{newest.with_name('step_00000002')} -> {output_dir}/model: ")
    assert f"{command(newest)}".startswith(f"{newest}: damaged: __1_0.distcp: 1000 bytes")


def test_a_wrong_byte_is_found_before_anything_is_written(sharded: Any, tmp_path: Path) -> None:
    """Of a checkpoint that is named; of a run it is passed over as it is when the run is resumed."""
    output_dir = copied_run(sharded, tmp_path, (2, 10))
    path = output_dir / "checkpoints" / "step_00000010" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert command(path.parent) == f"{path.parent}: damaged: __0_0.distcp: not what its checksum says; export another checkpoint"
    assert not (output_dir / "model").exists()
    assert exportable(output_dir) == (path.parent.with_name("step_00000002"), output_dir / "model")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_hidden_layers": 4}, "model.layers.3.self_attn.q_proj.weight: missing instead of (36, 36)"),
        ({"num_hidden_layers": 2}, "model.layers.2.self_attn.q_proj.weight: (36, 36) instead of nothing"),
        ({"intermediate_size": 52}, "model.layers.0.mlp.gate_proj.weight: (50, 36) instead of (52, 36)"),
        ({"tie_word_embeddings": True}, "lm_head.weight: (4099, 36) instead of nothing"),
    ],
)
def test_a_parameter_that_is_missing_or_another_is_never_initialised(
    sharded: Any, tmp_path: Path, change: dict[str, Any], fault: str
) -> None:
    """R16. transformers itself would draw it at random and warn."""
    output_dir = copied_run(sharded, tmp_path, (2,))
    folder = output_dir / "checkpoints" / "step_00000002"
    state = json.loads((folder / "state.json").read_text())
    state["recipe"]["model"] |= change
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(
        folder, step=2, files=record_files(folder, [p.name for p in folder.iterdir() if p.name != "manifest.json"], checksums=True)
    )
    assert command(folder) == f"{folder}: not the model of its recipe: {fault}; export another checkpoint"
    assert not (output_dir / "model").exists()


def test_mistakes_in_the_call_are_one_line(sharded: Any, tmp_path: Path) -> None:
    moved = copied_run(sharded, tmp_path, (2,)) / "checkpoints" / "step_00000002"
    moved = moved.rename(tmp_path / "step_00000002")
    expected = f"command line: {moved}: in no run's folder checkpoints/; name the folder to write by --output"
    assert command(moved) == expected
    assert command(moved, "--output", tmp_path / "model") is None
    assert f"{command(tmp_path)}" == f"{tmp_path}: has no whole checkpoint; name a run folder, or a checkpoint in its folder checkpoints/"
    assert f"{command(tmp_path, '--dtype', 'int8')}".startswith("command line: argument --dtype: invalid choice: 'int8'")
    assert f"{command()}".startswith("command line: the following arguments are required: PATH")


def test_nothing_but_an_export_is_replaced(sharded: Any, tmp_path: Path) -> None:
    """`--output` may name any folder of the user's."""
    folder = tmp_path / "home"
    folder.mkdir()
    assert command(sharded[0], "--output", folder) is None
    (folder / "thesis.tex").write_text("all of it")
    before = files(folder)
    expected = f"{folder}: holds thesis.tex, which is no part of an export; move it away or name another folder"
    assert command(sharded[0], "--output", folder, "--dtype", "bfloat16") == expected
    assert files(folder) == before
    (folder / "thesis.tex").unlink()
    (folder / "model-00001-of-00002.safetensors").write_text("of an older one that was larger")
    assert command(sharded[0], "--output", folder, "--dtype", "bfloat16") is None
    assert (json.loads((folder / "config.json").read_text())["dtype"], len(files(folder))) == ("bfloat16", 5)
    assert command(sharded[0], "--output", folder / "config.json") == f"{folder}/config.json: a file; name a folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(sharded: Any, tmp_path: Path) -> None:
    """Every call that changes names or waits for the disk is the last one once. What the next export finds is whole and goes."""
    checkpoint, folder = exportable(sharded[0])[0], tmp_path / "model"
    old, new = (files(export_checkpoint(checkpoint, folder=folder, dtype=dtype)) for dtype in ("bfloat16", "float32"))
    moments = set()
    for last in range(1, 100):
        export_checkpoint(checkpoint, folder=folder, dtype="bfloat16")
        count = 0

        def counted(call: Any, name: str, last: int = last) -> Any:
            def wrapper(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == last:
                    moments.add(name)
                    raise Killed
                return call(*arguments, **options)

            return wrapper

        with (
            mock.patch.object(export, "sync", counted(export.sync, "sync")),
            mock.patch.object(export, "save_file", counted(export.save_file, "save_file")),
            mock.patch.object(Path, "rename", counted(Path.rename, "rename")),
            mock.patch.object(export.shutil, "rmtree", counted(export.shutil.rmtree, "rmtree")),
        ):
            try:
                export_checkpoint(checkpoint, folder=folder, dtype="float32")
                break
            except Killed:
                pass
        there = [path for path in (folder, tmp_path / "model.old") if path.exists()]
        assert files(there[0]) in (old, new), f"killed at call {last}"
    assert moments == {"sync", "save_file", "rename", "rmtree"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def failing_export(*, folder: Path, what: str) -> str:
    """The error, as this rank sees it."""
    import resource

    from fullshard.checkpoint.export import export_model

    accelerator, model, _ = trained(UNTIED)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    match what:
        case "full" if accelerator.is_main_process:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        case "overflow":
            model.model.norm.weight.data.fill_(1e6)
    try:
        dtype = "float16" if what == "overflow" else "float32"
        export_model(accelerator=accelerator, model=model, tokenizer=load_tokenizer("bundled"), folder=folder, dtype=dtype)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "none"


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("full", "cannot be written: Error while serializing: I/O error: File too large (os error 27)"),
        ("overflow", "not exported: model.norm.weight has values that are not finite in float16; choose another type"),
    ],
)
def test_a_failure_is_one_line_on_all_ranks_and_leaves_what_was_there(
    pool: Any, sharded: Any, tmp_path: Path, what: str, fault: str
) -> None:
    folder = export_checkpoint(exportable(sharded[0])[0], folder=tmp_path / "model", dtype="bfloat16")
    before = files(folder)
    assert pool.run(failing_export, config="fsdp_fp32.yaml", folder=folder, what=what) == [f"{folder}: {fault}"] * 2
    assert files(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
