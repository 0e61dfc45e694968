"""The torch.distributed backend, under torchrun; the checks themselves are in torch_rank.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi
RANK = Path(__file__).with_name("torch_rank.py")


def launch(what: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*command, str(ranks), str(RANK), what],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_gives_what_gloo_gives(nodes: int) -> None:
    result = launch("same_as_gloo", 3, NODES=str(nodes))
    assert result.returncode == 0, result.stderr


def test_delegates_what_is_not_ours() -> None:
    result = launch("delegates", 2)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_asynchronous_work_keeps_its_order(nodes: int) -> None:
    result = launch("asynchronous", 3, NODES=str(nodes))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_trains_to_the_bits_of_one_process(ranks: int) -> None:
    result = launch("data_parallel", ranks)
    assert result.returncode == 0, result.stderr


def test_fully_sharded_training_works() -> None:
    result = launch("fully_sharded", 2)
    assert result.returncode == 0, result.stderr


def test_the_death_of_a_rank_is_an_error_on_the_others() -> None:
    result = launch("killed", 3)
    assert result.stdout.count("was told") == 2, result.stderr
    assert "Signal 9" in result.stderr


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    assert "have not arrived: 1" in launch("late", 2).stdout
