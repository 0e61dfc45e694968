"""The torch.distributed backend, under torchrun; the checks themselves are in torch_rank.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpis import launcher

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


def fork(what: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same without torchrun, of ranks that read torch together: quicker."""
    return subprocess.run(
        [sys.executable, str(RANK), what, str(ranks)],
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


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"nostall-{os.getuid()}-*-collective")}


def test_the_death_of_a_rank_in_backward_is_an_error_on_the_others() -> None:
    before = left_in_shared_memory()
    result = launch("killed_in_backward", 3)
    assert result.stdout.count("was told") == 2, result.stderr
    left = left_in_shared_memory() - before
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:  # another program's, whose ranks are joining
        time.sleep(0.05)
        left &= left_in_shared_memory()
    assert not left


def test_tensors_in_shared_memory_give_the_same_bits() -> None:
    result = launch("shared", 2)
    assert result.returncode == 0, result.stderr


def test_a_refused_connection_is_tried_again() -> None:
    result = launch("unconnected", 2)
    assert result.stdout.count("was told") == 2, result.stderr
    assert "connecting over Gloo failed (rank 1 of 2 could not" in result.stderr


def test_messages_have_the_timeout_of_their_group() -> None:
    result = fork("message_later", 2)
    assert result.returncode == 0, result.stderr


def test_messages_need_only_the_ranks_that_exchange_them() -> None:
    result = launch("pair_of_three", 3)
    assert result.returncode == 0, result.stderr


def test_groups_are_used_by_several_threads() -> None:
    result = launch("threads", 2)
    assert result.returncode == 0, result.stderr


def test_a_forked_child_is_refused() -> None:
    result = launch("forked", 2)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_calls_that_differ_are_named_on_all_ranks(debug: str) -> None:
    result = launch("mismatched", 2, TORCH_DISTRIBUTED_DEBUG=debug)
    assert result.stdout.count("named") == 2, result.stderr


def test_models_that_differ_are_named_on_all_ranks() -> None:
    result = fork("models_that_differ", 3)
    assert result.returncode == 0, result.stderr


def test_timeouts_of_waits_and_operations() -> None:
    result = launch("limits", 2)
    assert "limited" in result.stdout, result.stderr


def test_a_group_is_made_again_on_the_store_of_an_aborted_one() -> None:
    result = launch("made_again", 2)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (2, 2), (4, 2)])
def test_abort_ends_the_group_on_all_ranks(ranks: int, nodes: int) -> None:
    result = launch("aborted", ranks, NODES=str(nodes))
    assert result.stdout.count("ended") == ranks, result.stderr


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_abort_ends_what_waits_over_gloo(nodes: int) -> None:
    result = fork("aborted_delegated", 3, NODES=str(nodes))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended") == 3, result.stderr


@pytest.mark.parametrize("what", ["threads", "forked", "fully_sharded"])
def test_mpirun_launches_it_too(what: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = subprocess.run(
        [*launcher("openmpi"), "-n", "2", sys.executable, str(RANK), what],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    )
    assert result.returncode == 0, result.stderr


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    result = launch("late", 2)
    assert "have not arrived: 1" in result.stdout, result.stderr


def test_the_timeout_holds_between_nodes() -> None:
    result = launch("late", 2, NODES="2")
    assert "limited: " in result.stdout, result.stderr


@pytest.mark.parametrize("memory", ["torch.ones(1000)", "nostall.torch.empty_shared(1000)"])
def test_a_group_that_nobody_destroyed_ends_without_warnings_of_leaks(
    memory: str, tmp_path: Path
) -> None:
    program = (
        "import torch, torch.distributed as dist, nostall.torch\n"
        f"dist.init_process_group('nostall', rank=0, world_size=1, init_method='file://{tmp_path}/s')\n"
        f"tensor = {memory}\n"
        "dist.all_reduce(tensor)\n"
        "print('done')\n"
    )
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert result.stdout == "done\n", result.stderr
    assert "leaked" not in result.stderr
