"""The recipe: what is accepted, and that every mistake is one line that names where, key, value and fix."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fullshard.errors import UserError
from fullshard.recipe.batch import gradient_accumulation_steps, resolve_batch
from fullshard.recipe.checks import ROPE_FIELDS
from fullshard.recipe.fields import DataConfig, ModelConfig, Recipe, TrainConfig
from fullshard.recipe.parsing import DEFAULT_RECIPE, KEYS, parse_recipe
from fullshard.recipe.writing import recipe_to_dict, recipe_to_yaml
from support import HANG_S, ROOT

TRAIN_KEYS = ", ".join(entry.name for entry in dataclasses.fields(TrainConfig))

# (content of x.yaml, the line without "x.yaml: ")
WRONG_FILES = [
    ("data: {sequence_lenght: 8}", "data.sequence_lenght: unknown key; did you mean sequence_length?"),
    ("model: {rope_parameters: {rope_tipe: default}}", "model.rope_parameters.rope_tipe: unknown key; did you mean rope_type?"),
    ("model: {rope_theta: 1.0}", "model.rope_theta: unknown key; did you mean model.rope_parameters.rope_theta?"),
    ("train: {learning_rate: 1.0}", "train.learning_rate: unknown key; did you mean optim.learning_rate?"),
    ("trian: {max_steps: 3}", "trian: unknown key; did you mean train?"),
    ("train.max_steps: 3", "train.max_steps: unknown key: dots are for the command line; write max_steps under train"),
    (
        "sources: {}",
        "sources: unknown key; the recipe has output_dir, seed, model, data, train, optim, sharding, evaluation, checkpoint, logging",
    ),
    ("train: {zzz: 3}", f"train.zzz: unknown key; train has {TRAIN_KEYS}"),
    ("train: 3", f"train: 3: must be a section with keys {TRAIN_KEYS}"),
    ("train: {max_steps: -3}", "train.max_steps: -3: must be an integer > 0"),
    ("train: {max_steps: 2.5}", "train.max_steps: 2.5: must be an integer > 0"),
    ("train: {max_steps: true}", "train.max_steps: true: must be an integer > 0"),
    ("train: {max_steps: null}", "train.max_steps: null: must be an integer > 0"),
    ("train: {max_grad_norm: 0}", "train.max_grad_norm: 0: must be a number > 0 or null"),
    ("optim: {learning_rate: fast}", "optim.learning_rate: fast: must be a number > 0"),
    ("optim: {learning_rate: .inf}", "optim.learning_rate: Infinity: must be a number > 0"),
    ("optim: {min_learning_rate_ratio: 1.5}", "optim.min_learning_rate_ratio: 1.5: must be a number >= 0 and <= 1"),
    ("optim: {beta1: 1}", "optim.beta1: 1: must be a number >= 0 and < 1"),
    ("optim: {schedule: cosin}", "optim.schedule: cosin: must be one of cosine, wsd, linear, constant"),
    ("model: {tie_word_embeddings: maybe}", "model.tie_word_embeddings: maybe: must be true or false"),
    ("data: {revision: 2024}", "data.revision: 2024: must be text (put quotes around it) or null"),
    ("logging: {trackers: wandb}", "logging.trackers: wandb: must be a list of texts, such as [a, b]"),
    ("data: {mixture: 3}", "data.mixture: 3: must be a list of sections, such as [{path: text, data_files: [a.txt]}]"),
    ("data: {mixture: [{pth: text}]}", "data.mixture[0].pth: unknown key; did you mean path?"),
    ("data: {mixture: [{path: text, weight: 0}]}", "data.mixture[0].weight: 0: must be a number > 0"),
    ("seed: 0\nseed: 1", "line 2: seed: written twice"),
    ("train:\n  max_steps: 1\n  max_steps: 2", "line 3: max_steps: written twice"),
    ("train:\n\tmax_steps: 1", "line 2: not YAML: found character '\\t' that cannot start any token"),
    # Numbers that YAML 1.1 turns into others.
    ("train: {max_steps: 0100}", "train.max_steps: 0100: YAML reads it as 64; write 100, or put quotes around text"),
    ("seed: 0042", "seed: 0042: YAML reads it as 34; write 42, or put quotes around text"),
    ("seed: +0_10", "seed: +0_10: YAML reads it as 8; write 10, or put quotes around text"),
    ("optim: {weight_decay: -0100}", "optim.weight_decay: -0100: YAML reads it as -64; write -100, or put quotes around text"),
    ("train: {max_steps: 1:30}", "train.max_steps: 1:30: YAML reads it as 90; write 90, or put quotes around text"),
    ("train: {max_time: 1:30.5}", "train.max_time: 1:30.5: YAML reads it as 90.5; write 90.5, or put quotes around text"),
    ('train: {max_steps: !!int "0100"}', "train.max_steps: 0100: YAML reads it as 64; write 100, or put quotes around text"),
    ("data: {name: 0100}", "data.name: 0100: YAML reads it as 64; write 100, or put quotes around text"),
    ("data: {data_files: [a, 0100]}", "data.data_files[1]: 0100: YAML reads it as 64; write 100, or put quotes around text"),
    ("data: {mixture: [{path: a, weight: 010}]}", "data.mixture[0].weight: 010: YAML reads it as 8; write 10, or put quotes around text"),
    ("data: {name: no}", "data.name: false: must be text (put quotes around it) or null"),
    ("data: {name: 2024-01-01}", 'data.name: "2024-01-01": must be text (put quotes around it) or null'),
    ("train: {max_steps: 0o10}", "train.max_steps: 0o10: must be an integer > 0"),
    ("train: {max_steps: 1e3}", "train.max_steps: 1e3: must be an integer > 0"),
    ("output_dir: ~", "output_dir: null: must be text (put quotes around it)"),
    ("? [a]\n: b", "line 1: not YAML: found unhashable key"),
    ("data: {data_files: &a [*a]}", "line 1: not YAML: an anchor within itself"),
    ("- train", 'top level is ["train"]: must be `key: value` lines'),
    # Values that contradict each other.
    ("model: {num_attention_heads: 3, num_key_value_heads: 3}", "model.num_attention_heads: 3: must divide model.hidden_size, 256"),
    ("model: {num_key_value_heads: 3}", "model.num_key_value_heads: 3: must divide model.num_attention_heads, 4"),
    ("model: {head_dim: 33}", "model.head_dim: 33: a head is 33 wide; the rotary embedding needs an even width"),
    ("model: {hidden_size: 12}", "model.hidden_size: 12: a head is 3 wide; the rotary embedding needs an even width"),
    (
        "model: {rope_parameters: {rope_type: llama3, factor: 8}}",
        "model.rope_parameters.low_freq_factor: null: must be set with rope_type llama3",
    ),
    (
        "model: {rope_parameters: {factor: 8}}",
        "model.rope_parameters.factor: 8.0: not used by rope_type default; remove it or choose another",
    ),
    ("model: {rope_parameters: {theta: 8}}", "model.rope_parameters.theta: unknown key; did you mean rope_theta?"),
    ("seed: 4294967296", "seed: 4294967296: must be less than 2**32, which NumPy's generator takes"),
    ("logging: {sample_prompts: ['', x]}", 'logging.sample_prompts: ["", "x"]: a prompt must not be empty'),
    ("train: [3", "line 1: not YAML: expected ',' or ']', but got '<stream end>'"),
    ("data: {sequence_length: 4096}", "data.sequence_length: 4096: must be at most model.max_position_embeddings, 2048"),
    (
        "train: {global_batch_size: 26, micro_batch_size: 4}",
        "train.global_batch_size: 26: must be a multiple of train.micro_batch_size, 4; nearest that fit: 24 or 28",
    ),
    ("optim: {decay_steps: 5}", "optim.decay_steps: 5: not used by optim.schedule cosine; remove it or choose wsd"),
    ("optim: {schedule: wsd}", "optim.decay_steps: null: wsd needs 1 to 880: train.max_steps - optim.warmup_steps"),
    ("optim: {schedule: wsd, decay_steps: 890}", "optim.decay_steps: 890: wsd needs 1 to 880: train.max_steps - optim.warmup_steps"),
]

# (arguments, the line)
WRONG_COMMANDS = [
    (["--train.max_step", "3"], "command line: --train.max_step: unknown key; did you mean train.max_steps?"),
    (["--max_steps=3"], "command line: --max_steps: unknown key; did you mean train.max_steps?"),
    (["--every", "3"], "command line: --every: unknown key; did you mean evaluation.every or checkpoint.every or logging.every?"),
    (["--data.mixture", "[{path: a, weight: 010}]"], "command line: --data.mixture[0].weight: 010: YAML reads it as 8; write 10"),
    (["--data.mixture", "[{path: a, path: b}]"], "command line: --data.mixture: line 1: path: written twice"),
    (["--conf", "x.yaml"], "command line: --conf: unknown key; the recipe has output_dir, seed, model, data, train"),
    (["--train", "x.yaml"], "command line: --train: a section; write --train.max_steps value"),
    (["--train.max_steps", "-3"], "command line: --train.max_steps: -3: must be an integer > 0"),
    (["--optim.learning_rate=-1e-3"], "command line: --optim.learning_rate: -1e-3: must be a number > 0"),
    (["--optim.learning_rate", "nan"], "command line: --optim.learning_rate: nan: must be a number > 0"),
    (["--train.max_steps"], "command line: --train.max_steps: no value: must be an integer > 0"),
    (["--train.max_steps", "--seed=1"], "command line: --train.max_steps: no value: must be an integer > 0"),
    (["train.max_steps=3"], "command line: train.max_steps=3: not an option; write --section.key value"),
    (["--data.sequence_length", "4096"], "command line: --data.sequence_length: 4096: must be at most model.max_position_embeddings, 2048"),
    (
        ["--config", "recipes/pretrain_lama3_debug.yaml"],
        "recipes/pretrain_lama3_debug.yaml: no such file; did you mean recipes/pretrain_llama3_debug.yaml?",
    ),
    (["--config", "recipes"], "recipes: cannot be read: Is a directory"),
    (["--config", "a.yaml", "--config", "b.yaml"], "command line: --config: b.yaml: given twice"),
]


def line_of(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse_recipe(argv)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("content", "line"), WRONG_FILES)
def test_a_mistake_in_the_file_is_one_line(content: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(content)
    assert line_of(["--config", "x.yaml"]) == f"x.yaml: {line}"


@pytest.mark.parametrize(("argv", "line"), WRONG_COMMANDS)
def test_a_mistake_on_the_command_line_is_one_line(argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert line_of(argv).startswith(line)


def test_binary_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert line_of(["--config", str(tmp_path / "x.yaml")]).endswith("x.yaml: not a YAML file: not UTF-8 text")


def test_default_recipe_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe([])
    assert recipe.sources[""] == str(DEFAULT_RECIPE)
    assert recipe.model.tie_word_embeddings is True  # Said by the recipe; LlamaConfig's default, and ours, is False.
    assert Recipe().model.tie_word_embeddings is False


def test_every_recipe_parses() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        parse_recipe(["--config", str(path)])


def test_printed_recipe_parses_back_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--optim.learning_rate", "1e-5", "--logging.trackers", "[]", "--logging.run_name", "0123", "--data.data_files", "[a, b]"]
    with pytest.raises(SystemExit) as exit_:
        parse_recipe([*argv, "--print_config"])
    assert exit_.value.code == 0
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    recipe = parse_recipe(argv)
    assert (recipe.optim.learning_rate, recipe.logging.trackers, recipe.logging.run_name) == (1e-5, [], "0123")
    assert parse_recipe(["--config", str(tmp_path / "x.yaml")]) == recipe
    assert yaml.safe_load(recipe_to_yaml(recipe)) == recipe_to_dict(recipe)


def test_command_line_wins_and_spellings_of_numbers(tmp_path: Path) -> None:
    # 1e-3 without a dot is text to YAML 1.1.
    # What both read alike: a leading 0 that changes nothing, what YAML 1.1 takes for text, a BOM, Windows' line ends.
    (tmp_path / "x.yaml").write_text(
        "\ufefftrain: {max_steps: 1_000}\r\noptim: {learning_rate: 1e-3, warmup_steps: 5, weight_decay: .5, eps: 5E-4}\r\n"
        "model:\r\nseed: 07\r\n"
    )
    recipe = parse_recipe(["--config", str(tmp_path / "x.yaml"), "--optim.warmup_steps=7"])
    assert (recipe.train.max_steps, recipe.optim.learning_rate, recipe.optim.warmup_steps) == (1000, 1e-3, 7)
    assert (recipe.seed, recipe.optim.weight_decay, recipe.optim.eps) == (7, 0.5, 5e-4)
    assert parse_recipe(["--seed", "0042", "--train.max_steps", "0100"]).train.max_steps == 100  # No YAML there.
    assert recipe.sources["optim.warmup_steps"] == "command line"


def test_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert parse_recipe(["--config", str(tmp_path / "x.yaml")]) == Recipe()


def test_help_shows_every_key_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_recipe(["--help"])
    text = capsys.readouterr().out
    for key in KEYS:
        assert f"--{key} " in text
    assert "Rows per device per forward;" in text
    assert "SUPPRESS" not in text


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "resolved", "steps", "line"),
    [
        (1, 4, 4, 6, None),
        (2, 4, 4, 3, None),
        (6, 4, 4, 1, None),
        (1, None, 24, 1, None),
        (8, None, 3, 1, None),
        (
            4,
            4,
            0,
            0,
            "train.global_batch_size: 24: must be a multiple of micro_batch_size x processes, 4 x 4 = 16; nearest that fit: 16 or 32",
        ),
        (
            16,
            None,
            0,
            0,
            "train.global_batch_size: 24: must be a multiple of micro_batch_size x processes, 1 x 16 = 16; nearest that fit: 16 or 32",
        ),
        (
            5,
            None,
            0,
            0,
            "data.num_streams: 48: must be a multiple of the number of processes, 5; it fits 1, 2, 3, 4, 6, 8, 12, 16, 24, 48 processes",
        ),
        (48, None, 0, 0, "train.global_batch_size: 24: fewer rows than processes, 48; start at most 24"),
    ],
)
def test_batch_arithmetic(world_size: int, micro_batch_size: int | None, resolved: int, steps: int, line: str | None) -> None:
    recipe = Recipe(data=DataConfig(num_streams=48), train=TrainConfig(global_batch_size=24, micro_batch_size=micro_batch_size))
    if line is None:
        train = resolve_batch(recipe, world_size=world_size).train
        assert train.micro_batch_size == resolved
        assert gradient_accumulation_steps(train, world_size=world_size) == steps
        return
    with pytest.raises(UserError) as caught:
        resolve_batch(recipe, world_size=world_size)
    assert str(caught.value) == f"recipe: {line}"


def test_model_section_is_llama_config() -> None:
    from transformers import LlamaConfig

    llama = {field.name for field in dataclasses.fields(LlamaConfig)}
    ours = {field.name for field in dataclasses.fields(ModelConfig)}
    assert ours <= llama
    # What is left is no architecture: token ids come from the tokenizer, the cache is for generation, pretraining_tp is not read.
    own = set(LlamaConfig.__annotations__)
    assert own - ours == {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp"}


def test_scaled_rope_types_need_what_transformers_needs(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig

    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    for rope_type, names in ROPE_FIELDS.items():
        argv = [f"--model.rope_parameters.{name}={values[name]}" for name in names]
        rope = parse_recipe([*argv, f"--model.rope_parameters.rope_type={rope_type}"]).model.rope_parameters
        LlamaConfig(rope_parameters={key: value for key, value in dataclasses.asdict(rope).items() if value is not None})
        assert [record for record in caplog.records if "nrecognized" in record.message] == []


# What a rank has registered at exit is run, though it does not take the interpreter down.
STOP = """
import atexit, sys
from fullshard.errors import UserError, one_line_errors, stop
@one_line_errors
def main():
    raise UserError("x.yaml: a.b: 1: must be\\n2")
atexit.register(print, "cleaned up")
main() if len(sys.argv) == 1 else stop(UserError("x.yaml: a.b: 1: must be 2"), wait_s=float(sys.argv[1]))
"""


def stopped(*argv: str, rank: int, error_file: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    return subprocess.Popen([sys.executable, "-c", STOP, *argv], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_local_rank_0_stops_without_waiting_and_with_one_line(tmp_path: Path) -> None:
    for wait_s in ([], [f"{4 * HANG_S}"]):
        process = stopped(*wait_s, rank=0, error_file=tmp_path / "error.json")
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, err, out) == (2, "error: x.yaml: a.b: 1: must be 2\n", "cleaned up\n")
    # What torch's agent reads (torch.distributed.elastic.multiprocessing.errors.ProcessFailure).
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "x.yaml: a.b: 1: must be 2"
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


def test_other_ranks_speak_if_nobody_ends_them(tmp_path: Path) -> None:
    process = stopped("0.3", rank=1, error_file=tmp_path / "error.json")
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (2, "error: x.yaml: a.b: 1: must be 2\n")
    assert (tmp_path / "error.json").exists()


def test_other_ranks_are_silent_if_the_launcher_ends_them(tmp_path: Path) -> None:
    process = stopped(f"{4 * HANG_S}", rank=1, error_file=tmp_path / "error.json")
    time.sleep(2)  # Long enough to have reached the wait.
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out, err) == (-signal.SIGTERM, "", "")


def test_check_needs_no_torch_and_little_else(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.argv = ['fullshard', *sys.argv[1:]]; runpy.run_module('fullshard', run_name='__main__')\n"
    code += "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
    code += "assert len(sys.modules) < 400, len(sys.modules)"  # 275: what takes its time is imports. torch alone has 1,000.
    command = [
        sys.executable,
        "-c",
        code,
        "check",
        "--num_processes",
        "4",
        "--train.micro_batch_size",
        "2",
        "--train.global_batch_size",
        "16",
    ]
    result = subprocess.run(command, text=True, capture_output=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert "micro_batch_size 2 x 4 processes x gradient_accumulation_steps 2" in result.stdout


def test_check_ends_a_mistake_in_one_line() -> None:
    command = [sys.executable, "-m", "fullshard", "check", "--num_processes", "7"]
    result = subprocess.run(command, text=True, capture_output=True, cwd=ROOT, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: recipes/pretrain_llama3_debug.yaml: data.num_streams: 384: must be a multiple")
    assert result.stderr.count("\n") == 1
