"""`make campaign` in short: a few kills, all the damages, and what the long form has found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from campaign import FILES, LAUNCHER, OPTIONS, TREE, WAYS, Kill, damaged_runs, damages, differences, killed_run, schedule
from fullshard.checkpoint.manifest import checkpoint_steps
from fullshard.parallel import accelerator
from support import HANG_S
from support.launcher import launch


def test_a_run_that_is_killed_again_and_again_is_the_straight_one(tmp_path: Path) -> None:
    """The launcher starts the ranks again, or the same command is given again. Then, that a difference of a bit would be seen."""
    options = OPTIONS | {"train__max_steps": 24}
    launch(tmp_path / "straight", **options).check()
    kills = [
        Kill("rank 1", "save", 3, delay_s=0.01),
        Kill(TREE, "save", 6, delay_s=0.03),
        Kill(LAUNCHER, "step", 12, delay_s=0.05),
    ]
    tally = killed_run(tmp_path / "killed", kills, **options)
    assert (tally.kills, tally.launches, tally.restarts, tally.passed_over) == (3, 3, 1, 0)
    assert tally.in_saves >= 1
    assert differences(tmp_path / "straight", tmp_path / "killed") == []

    metrics, weights = tmp_path / "killed" / "metrics.jsonl", tmp_path / "killed" / "model" / "model.safetensors"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[7]["train/grad_norm"] *= 1 + 2**-50
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    shutil.rmtree(max(checkpoint_steps(tmp_path / "killed").items())[1])
    found = [line.partition(":")[0] for line in differences(tmp_path / "straight", tmp_path / "killed")]
    assert found[:2] == ["metrics.jsonl", "model.safetensors"]
    assert "model.model.norm.weight" in found


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_has_kills_of_every_kind(seed: int) -> None:
    kills = schedule(seed=seed, kills=50, max_steps=120)
    assert kills == schedule(seed=seed, kills=50, max_steps=120)
    assert kills != schedule(seed=seed + 1, kills=50, max_steps=120)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert Counter(kill.target for kill in kills).keys() == {"rank 0", "rank 1", "ranks", LAUNCHER, TREE}
    assert Counter(kill.moment for kill in kills)["save"] >= 20


def test_every_damage_is_told_and_the_checkpoint_before_is_taken(pool: Any, tmp_path: Path) -> None:
    """One of each kind of file goes on to the end."""
    inflicted = damages(seed=0)
    assert len({(damage.name, damage.way) for damage in inflicted}) == len(FILES) * len(WAYS) == 50
    assert damaged_runs(tmp_path, inflicted, pool=pool, go_on=lambda number: number % 11 == 0) == []


def test_the_ranks_of_a_new_start_do_not_meet_those_of_the_last_one() -> None:
    """The launcher keeps one store for all its starts: an address of a dead rank is not to be found in it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    stores = []
    for start in ("0", "1", "1"):
        environment = place | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": start}
        with mock.patch.dict(os.environ, environment):
            stores.append(next(rendezvous(accelerator.RENDEZVOUS))[0])
    stores[0].set("address", "of the first start")
    assert not stores[1].check(["address"])
    stores[1].set("address", "of the second one")
    assert stores[2].get("address") == b"of the second one"


def test_a_rank_that_has_not_begun_to_train_ends_with_its_launcher() -> None:
    """Of a kill -9 too. It would wait for the launcher's store, for longer than an hour."""
    call = "from fullshard.process.preemption import end_with_launcher; end_with_launcher(); print('ready', flush=True)"
    rank = f"import os, time; print(os.getpid(), flush=True); {call}; time.sleep({4 * HANG_S})"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"]
    with subprocess.Popen(command, env=os.environ | {"TORCHELASTIC_RUN_ID": "none"}, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        process = psutil.Process(int(launcher.stdout.readline()))
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert psutil.wait_procs([process], timeout=HANG_S)[1] == []
