"""The ranks find each other under real launchers, and the training's own communication stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    subprocess.run([*command, *words], check=True, timeout=110)
    for way in ("store", "group"):
        check(tmp_path / way)


@pytest.mark.multi
@pytest.mark.parametrize("which", MPIS)
def test_mpi(which: str, image_folder: Path, tmp_path: Path) -> None:
    run_by_mpi(which, SCRIPT, image_folder, tmp_path, "mpi")
    check(tmp_path / "mpi")
