"""What the README says is so."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from fullshard.placement.placement import placement_from_yaml
from fullshard.recipe.batch import resolve_batch
from fullshard.recipe.parsing import parse_recipe
from support import ROOT
from support.benchmarks import benchmark

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
LINES = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("accelerate launch")])
def test_launch_commands_are_valid(line: str) -> None:
    words = shlex.split(line)
    at = words.index("recipes/pretrain.py")
    launcher = words[2:at]
    processes = int(launcher[launcher.index("--num_processes") + 1]) if "--num_processes" in launcher else None
    placement = placement_from_yaml(ROOT / launcher[launcher.index("--config_file") + 1], num_processes=processes)
    resolve_batch(parse_recipe(words[at + 1 :]), world_size=placement.num_processes)


def test_other_commands_are_known() -> None:
    known = ("accelerate launch ", "make train", "source .venv/bin/activate", "make campaign", "fullshard ")
    assert [line for line in LINES if not line.startswith(known)] == []


def test_check_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fullshard.__main__ import main

    monkeypatch.chdir(ROOT)
    (line,) = [line for line in LINES if line.startswith("fullshard check")]
    monkeypatch.setattr("sys.argv", shlex.split(line))
    main()
    assert "8 processes" in capsys.readouterr().out


def test_sharding_tables_and_plots_are_the_record() -> None:
    """Every config that runs here stands beside DDP; none of them changes the loss."""
    sharding = benchmark("sharding")
    record = json.loads(sharding.RECORD.read_text())
    configs = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(record["rows"]) == configs - set(sharding.LEFT_OUT)
    for page, table in sharding.pages(record).items():
        assert table in page.read_text(), page
    for plot in (ROOT / "docs").glob("*.png"):
        assert sharding.digest(record).encode() in plot.read_bytes(), plot
    losses = [row["loss"] for row in record["rows"].values()]
    assert max(losses) - min(losses) < 2e-2


def test_data_table_is_the_record_and_keeps_its_promises() -> None:
    """On-the-fly >= 0.9 of encode_batch, tokenized >= 20 M tokens/s, packing < 5 %, resume < 2 s, wait < 2 %."""
    record = json.loads((ROOT / "benchmarks" / "records" / "data.json").read_text())
    assert benchmark("data").table(record) in README
    assert record["streaming_over_encode_batch"] >= 0.9
    assert record["tokenized_tokens_per_second"] >= 20e6
    assert record["packing_over_tokenizing"] < 0.05
    assert record["resumed_first_batch_s"] < record["fresh_first_batch_s"] + 2
    assert record["data_wait_pct_mean"] < 2


def test_checkpoint_table_is_the_record_and_keeps_its_promises() -> None:
    """Asynchronous stall < 25 % of a durable synchronous save; without checksums no slower than save_state."""
    record = json.loads((ROOT / "benchmarks" / "records" / "checkpoint.json").read_text())
    assert benchmark("checkpoint").table(record) in README
    assert record["async_stall_over_sync"] < 0.25
    assert record["without_checksums_over_save_state"] <= 1


def test_precision_table_is_the_record_and_keeps_its_promises() -> None:
    """A CPU that is slow at bf16 and fp16 takes at most 1.25 and 1.5 times as long a step as in fp32, eager and compiled."""
    precision = benchmark("precision")
    record = json.loads(precision.RECORD.read_text())
    assert precision.table(record) in README
    assert record["fast_products"] == []
    for ratios in record["over_fp32"].values():
        assert ratios["bf16"] <= 1.25
        assert ratios["fp16"] <= 1.5
    losses = record["losses"].values()
    assert max(losses) - min(losses) < 2e-2


def test_every_accelerate_config_has_one_row_and_every_row_a_file() -> None:
    table = (ROOT / "accelerate_configs" / "README.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \|(?:[^|\n]+\|){5}$", table, re.M)
    assert sorted(rows) == sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    assert "(accelerate_configs/README.md)" in README


def test_files_named_exist() -> None:
    for name in re.findall(r"`((?:benchmarks|tests|recipes|accelerate_configs)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_versions_are_the_pinned_ones() -> None:
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M))
    for package in ("torch", "accelerate", "transformers", "datasets", "wandb"):
        assert f"{package} {pins[package]}" in README
