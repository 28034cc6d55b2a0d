"""transformers 4 reads from an export what the pinned version reads: logits, configs, token ids. `make test-transformers-4` runs this.

Not collected by `make test`: it needs the packages of transformers_4.txt, in a folder that only the other process looks into.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fullshard.checkpoint.export import _export
from fullshard.data.streams import encoder
from fullshard.data.tokenizer import load_tokenizer
from fullshard.model.build import build_on_meta, llama_config
from fullshard.model.initialise import materialise
from fullshard.recipe.fields import ModelConfig, RopeParameters
from support.exports import TIED_HEAD, UNTIED, tokenizer_folder
from support.launcher import launch

TEXTS = ["def f(x):\n    return x  # é 漢字 🙂\n", " leading", "", "a<|im|>b", "\ttabs  and   spaces \n\n"]
ROWS = torch.randint(0, 4099, (2, 80), generator=torch.Generator().manual_seed(1))  # Longer than max_position_embeddings below.
ROPES = {
    "default": RopeParameters(rope_theta=500_000.0),
    "default of another base": RopeParameters(rope_theta=10_000.0),
    "linear": RopeParameters("linear", factor=4.0),
    "dynamic": RopeParameters("dynamic", factor=4.0),
    "yarn": RopeParameters("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3": RopeParameters("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
}
# The ends of the same sums in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

OTHER = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

assert transformers.__version__.startswith("4.57."), transformers.__version__
asked = json.load(sys.stdin)
rows = load_file(asked["rows"])["rows"]
said, logits = {}, {}
for folder in asked["folders"]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text).input_ids for text in asked["texts"]]
    prompt = tokenizer("def f", return_tensors="pt")
    logits[folder] = model.eval()(input_ids=rows).logits.detach()
    said[folder] = {
        "config": model.config.to_dict() | {"dtype": str(model.dtype)},
        "generation": GenerationConfig.from_pretrained(folder).to_dict(),
        "tokenizer": type(tokenizer).__name__,
        "ids": ids,
        "decoded": [tokenizer.decode(tokens) for tokens in ids],
        "special": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.additional_special_tokens, tokenizer.chat_template],
        "generated": model.generate(**prompt, max_new_tokens=4, do_sample=False)[0].tolist(),
    }
save_file(logits, asked["logits"])
print(json.dumps(said))
"""


def read_by_transformers_4(folders: list[Path], tmp_path: Path) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
    """(what it says of each folder, its logits of ROWS)."""
    from safetensors.torch import save_file

    packages = os.path.abspath(os.environ.get("TRANSFORMERS_4", ""))
    assert (Path(packages) / "transformers").is_dir(), "run `make test-transformers-4`, which installs it"
    save_file({"rows": ROWS}, tmp_path / "rows.safetensors")
    asked = {"folders": list(map(str, folders)), "texts": TEXTS, "rows": f"{tmp_path}/rows.safetensors", "logits": f"{tmp_path}/logits"}
    ended = subprocess.run(
        [sys.executable, "-c", OTHER],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": packages, "HF_HUB_OFFLINE": "1", "USE_TORCH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    for complaint in ("nrecognized", "not used", "arning"):
        assert complaint not in ended.stderr, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), load_file(tmp_path / "logits")


def check(folders: list[Path], tmp_path: Path, *, trained_with: str) -> None:
    """Each folder means the same to both versions, and its tokenizer makes of a text what training saw of it."""
    said, logits = read_by_transformers_4(folders, tmp_path)
    seen = [tokens[:-1].tolist() for tokens in encoder(load_tokenizer(trained_with))(TEXTS)]
    for folder in folders:
        model, tokenizer, other = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), said[str(folder)]
        dtype = str(model.dtype).removeprefix("torch.")
        assert (logits[str(folder)] - model(input_ids=ROWS).logits).abs().max() <= TOLERANCE[dtype], folder
        assert other["config"]["dtype"] == f"torch.{dtype}"
        assert other["ids"] == [tokenizer(text).input_ids for text in TEXTS]
        assert [ids for ids, text in zip(other["ids"], TEXTS, strict=True) if "<|" not in text] == [
            ids for ids, text in zip(seen, TEXTS, strict=True) if "<|" not in text
        ]  # `<|im|>` in a document is text; to who types it to the model it is the token.
        assert other["decoded"] == [tokenizer.decode(tokens) for tokens in other["ids"]]
        assert other["tokenizer"] == "PreTrainedTokenizerFast"
        assert other["special"] == [tokenizer.bos_token, tokenizer.eos_token, tokenizer.extra_special_tokens, tokenizer.chat_template]
        generated = model.generate(**tokenizer("def f", return_tensors="pt"), max_new_tokens=4, do_sample=False)
        assert other["generated"] == generated[0].tolist()
        ours = json.loads(json.dumps(model.config.to_dict(), default=str))
        common = (ours.keys() & other["config"].keys()) - {"dtype", "transformers_version"}
        assert {"vocab_size", "head_dim", "use_cache", "attention_bias", "bos_token_id"} < common
        assert {key: other["config"][key] for key in common} == {key: ours[key] for key in common}
        assert other["config"]["rope_theta"] == ours["rope_parameters"]["rope_theta"]
        generation = GenerationConfig.from_pretrained(folder)
        assert other["generation"]["eos_token_id"] == generation.eos_token_id == tokenizer.eos_token_id
        assert other["generation"]["bos_token_id"] == generation.bos_token_id == tokenizer.bos_token_id


def exported(folder: Path, model: ModelConfig, *, tokenizer: str, dtype: str) -> Path:
    """As the end of a run does, of a model at its initial weights."""
    loaded = load_tokenizer(tokenizer)
    config = llama_config(model, tokenizer=loaded)
    built = build_on_meta(config)
    materialise(built, device=torch.device("cpu"), seed=3)
    weights = {name: parameter.detach().to(getattr(torch, dtype)) for name, parameter in built.named_parameters()}
    return _export(
        folder=folder,
        config=config,
        tokenizer=loaded,
        dtype=dtype,
        collect=lambda names: {name: weights[name] for name in names},
        main=lambda function: function(),
        say=print,
    )


def test_every_rope_type_every_type_tied_and_not(tmp_path: Path) -> None:
    """Before, transformers 4 took 10,000 for the base and no scaling, in silence."""
    models = [replace(UNTIED, max_position_embeddings=64, initializer_range=0.2, rope_parameters=rope) for rope in ROPES.values()]
    models.append(replace(TIED_HEAD, max_position_embeddings=64, head_dim=16))
    folders = [
        exported(tmp_path / f"{number}_{dtype}", model, tokenizer="bundled", dtype=dtype)
        for number, model in enumerate(models)
        for dtype in TOLERANCE
    ]
    check(folders, tmp_path, trained_with="bundled")


@pytest.mark.parametrize("adds", ["begin", "begin and end"])
def test_a_run_and_its_checkpoint(tmp_path: Path, adds: str) -> None:
    """Through the launcher and the command, with a tokenizer whose post-processor adds tokens that training never saw."""
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", adds=adds)
    run = launch(
        tmp_path / "out",
        placement="fsdp_fp32.yaml",
        train__max_steps=2,
        checkpoint__every=2,
        model__vocab_size=4100,
        model__rope_parameters__rope_theta=500_000,
        data__tokenizer=tokenizer,
        data__sequence_length=64,
    ).check()
    command = [sys.executable, "-m", "fullshard", "export", run.output_dir, "--output", tmp_path / "command", "--dtype", "bfloat16"]
    subprocess.run(command, check=True, timeout=300)
    check([run.output_dir / "model", tmp_path / "command"], tmp_path, trained_with=str(tokenizer))
