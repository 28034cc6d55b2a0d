"""Paths in the YAMLs and on the command line: what a shell would make of them, and a folder named [a] is that folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fullshard.data.sources import list_corpus
from fullshard.errors import UserError
from fullshard.paths import expanded
from fullshard.recipe.changes import recipe_changes
from fullshard.recipe.fields import PATH_KEYS, DataConfig
from fullshard.recipe.parsing import KEYS, parse_recipe
from fullshard.recipe.writing import recipe_to_dict
from support import ROOT
from support.launcher import launch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.delenv("NOTHING", raising=False)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/x", "{home}/x"),
        ("~", "{home}"),
        ("$DATA/x", "/data/x"),
        ("${DATA}x/$DATA", "/datax//data"),
        ("$HOME/*.txt", "{home}/*.txt"),
        ("a~/b", "a~/b"),
        ("runs/x", "runs/x"),
        ("stdlib", "stdlib"),
        ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb-edu"),
        ("https://host/~user/$x", "https://host/~user/$x"),
        ("hf://datasets/a/$DATA", "hf://datasets/a/$DATA"),
        ("$there", "$there"),  # What is there under just this name.
        ("~there", "~there"),
    ],
)
def test_a_path_is_what_a_shell_makes_of_it(written: str, meant: str, home: Path) -> None:
    for name in ("$there", "~there", "~"):  # The last was made by an older fullshard.
        Path(name).mkdir()
    assert expanded(written) == meant.format(home=home)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("$NOTHING/x", "$NOTHING is not set"),
        ("/a/${NOTHING}", "$NOTHING is not set"),
        ("~no_such_user/x", "no such user, ~no_such_user"),
    ],
)
def test_what_is_not_known_is_a_mistake_in_every_key(written: str, reason: str, tmp_path: Path) -> None:
    for key in PATH_KEYS:
        tree: object = [written] if key.endswith("_files") else written
        for name in reversed(key.split(".")):
            tree = {name: tree}
        Path("x.yaml").write_text(yaml.safe_dump(tree))
        with pytest.raises(UserError) as caught:
            parse_recipe(["--config", "x.yaml"])
        assert str(caught.value) == f"x.yaml: {key}: {written}: {reason}"
    with pytest.raises(UserError) as caught:
        parse_recipe(["--data.mixture", json.dumps([{"path": "text", "data_files": ["a", written]}])])
    assert str(caught.value) == f"command line: --data.mixture[0].data_files: {written}: {reason}"
    with pytest.raises(UserError, match=r"command line: .*: "):
        parse_recipe([f"--config={written}"])


def test_keys_that_hold_paths(home: Path) -> None:
    """A key whose name says that it is a path is one of them."""
    assert set(PATH_KEYS) <= set(KEYS)
    named = {key for key in KEYS if key.endswith(("_dir", "path", "_files"))}
    assert named <= set(PATH_KEYS)
    Path("home").mkdir()
    mixture = [{"path": "~/a", "data_files": ["~/b", "https://c/~"]}]
    tree = {"output_dir": "~/runs/x", "data": {"tokenizer": "$DATA/t", "mixture": mixture}, "checkpoint": {"resume": "~/c"}}
    (home / "x.yaml").write_text(yaml.safe_dump(tree | {"logging": {"sample_prompts": ["~/x costs $NOTHING"]}}))
    recipe = parse_recipe(["--config=~/x.yaml"])
    assert (recipe.output_dir, recipe.data.tokenizer, recipe.checkpoint.resume) == (f"{home}/runs/x", "/data/t", f"{home}/c")
    assert (recipe.data.mixture[0].path, recipe.data.mixture[0].data_files) == (f"{home}/a", [f"{home}/b", "https://c/~"])
    assert recipe.logging.sample_prompts == ["~/x costs $NOTHING"]
    # A checkpoint of an older fullshard has them as they were written.
    saved = json.loads(json.dumps(recipe_to_dict(recipe)))
    saved["data"] |= {"tokenizer": "$DATA/t", "mixture": [saved["data"]["mixture"][0] | mixture[0]]}
    assert recipe_changes(saved, recipe) == []
    saved["data"]["tokenizer"] = "$NOTHING/t"
    assert [change.key for change in recipe_changes(saved, recipe)] == ["data.tokenizer"]


def test_commands_take_them_too(home: Path) -> None:
    def fullshard(*argv: str) -> str:
        command = [sys.executable, "-m", "fullshard", *argv]
        return subprocess.run(command, text=True, capture_output=True, check=False).stderr

    assert fullshard("check", "--accelerate_config=~/a.yaml") == f"error: {home}/a.yaml: no such file\n"
    assert f"{home}/run" in fullshard("verify", "~/run")
    assert fullshard("tokenize", "--output=$NOTHING/x") == "error: command line: $NOTHING/x: $NOTHING is not set\n"


def test_a_working_folder_that_is_gone_is_one_line() -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m fullshard check"
    result = subprocess.run(command, shell=True, text=True, capture_output=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: working folder: it is there no more, and relative paths mean nothing; cd to one that is there\n"


# Each a name that is a pattern too, which does not match itself.
@pytest.mark.parametrize("name", ["[a-b]", "a?[!a]", "ü ö", "-x", "a*[b]"])
def test_what_is_there_under_a_name_is_found_literally(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "sub"
    folder.mkdir(parents=True)
    for file in ("train", "test"):
        (folder.parent / f"{file}.jsonl").write_text('{"text": "a b c"}\n' * 3)
        (folder / f"{file}{name}.jsonl").write_text('{"text": "a b c"}\n' * 3)

    def found(**data: object) -> list[str]:
        corpus = list_corpus(DataConfig(**data))  # type: ignore[arg-type]
        return [os.path.relpath(file.url, folder.parent) for file in corpus.training[0].files]

    assert "train.jsonl" in found(path=str(folder.parent), evaluation_split="test")
    held_out = {"evaluation_files": [f"{folder}/test{name}.jsonl"]}
    assert found(path=str(folder.parent), data_files=["train.jsonl"], evaluation_files=["test.jsonl"]) == ["train.jsonl"]
    assert found(path="json", data_files=[f"{folder}/train{name}.jsonl"], **held_out) == [f"sub/train{name}.jsonl"]
    assert found(path="json", data_files=[f"{folder}/train*.jsonl"], **held_out) == [f"sub/train{name}.jsonl"]
    assert found(path="json", data_files=[f"{folder.parent}/*.jsonl"], **held_out) == ["test.jsonl", "train.jsonl"]


def test_a_run_from_home(home: Path) -> None:
    """The table says where it is, and config.yaml starts it again from anywhere."""
    data = home / "[a]"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text('{"text": "def f(x): return x"}\n' * 2000)
    keys = {"path": "~/[a]", "evaluation_split": "test", "tokenizer": str(ROOT / "src" / "fullshard" / "assets" / "tokenizer.json")}
    recipe = yaml.safe_load((ROOT / "recipes" / "pretrain_llama3_debug.yaml").read_text())
    Path("x.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": "~/runs/é [1]", "data": recipe["data"] | keys}))
    options = {"placement": "fsdp_fp32.yaml", "config": Path("x.yaml").absolute(), "output_dir": None, "train__max_steps": 2}
    run = launch(home / "runs" / "é [1]", **options).check()
    assert f"  output: {home}/runs/é [1]\n" in run.stdout
    assert len(run.column("train/loss")) == 2
    assert (run.config["output_dir"], run.config["data"]["path"]) == (f"{home}/runs/é [1]", f"{home}/[a]")
    assert not Path("~").exists()
    assert not (ROOT / "~").exists()
