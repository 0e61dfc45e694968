"""The ranks find each other under real launchers, and the training's own communication stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import prefork
import pytest
from mpis import MPIS
from nodes import run_by_mpi

SCRIPT = str(Path(__file__).with_name("launched.py"))


def check(directory: Path) -> None:
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    assert [r["place"] for r in results] == [[0, 0], [1, 1]]  # rank, and that on the machine
    assert all(r["seen"] == 3 * 31 for r in results)
    assert all(r["peers"]["nodes"] == 2 and r["peers"]["dropped_ranks"] == 0 for r in results)
    assert all(r["exchanged"] for r in results), results


@pytest.mark.multi
def test_torchrun(image_folder: Path, tmp_path: Path) -> None:
    """With nothing but torchrun's own store, and then with a process group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    words = [SCRIPT, image_folder, tmp_path, "store", "group"]
    subprocess.run([*command, *words], check=True, timeout=400)
    for way in ("store", "group"):
        check(tmp_path / way)


KILLED = '''
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
import nostall

rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
agents = dist.TCPStore(*place, None, False, timeout=timedelta(seconds=60))
data = nostall.ImageFolder(sys.argv[1], index=False)
seeds = []

def kill_in(number):
    """In that start rank 1 is killed when rank 0 has begun to meet it."""
    if start == number and rank == 0:
        agents.set("loaded", "")  # it has removed what its last meeting left
        agents.wait(["begin"])
    elif start == number:
        agents.wait(["loaded"])
        before = agents.num_keys()
        agents.set("begin", "")
        while agents.num_keys() < before + 2:
            time.sleep(0.001)
        for key in ("begin", "loaded"):
            agents.delete_key(key)
        os.kill(os.getpid(), signal.SIGKILL)

def load():
    with nostall.DataLoader(data, 5, seed=None, tiers=["ram:1MiB"], output="numpy") as loader:
        assert sum(len(labels) for _, labels in loader) > 0
        seeds.append(loader.state_dict()["seed"])

load()
kill_in(0)
load()
kill_in(1)
dist.init_process_group("nostall")  # Gloo alone may take the address of a rank that was killed
load()
kill_in(2)
load()
Path(sys.argv[2], f"{rank}.json").write_text(str([start, seeds]))
dist.destroy_process_group()
'''


@pytest.mark.multi
def test_ranks_that_are_killed_at_a_meeting_meet_in_the_next_start(
    image_folder: Path, tmp_path: Path
) -> None:
    """In the store of torchrun, which outlives them: without a process group, as they make one, and
    with it. The seed is another one in each start."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--max-restarts=3", "--monitor-interval=0.1", "--no-python"]
    command += prefork.command(["-c", KILLED, image_folder, tmp_path], torch=True)
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first[0] == 3 and len(set(first[1])) == 4


@pytest.mark.multi
@pytest.mark.parametrize("which", MPIS)
def test_mpi(which: str, image_folder: Path, tmp_path: Path) -> None:
    run_by_mpi(which, SCRIPT, image_folder, tmp_path, "mpi")
    check(tmp_path / "mpi")
