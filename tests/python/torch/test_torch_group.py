"""The torch.distributed backend; the checks themselves are in torch_rank.py, run by each rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mpis import launcher
from procfs import OwnSharedMemory
from torch_server import Ended, run

pytestmark = pytest.mark.multi
RANK = Path(__file__).with_name("torch_rank.py")


def check(what: str, ranks: int, **environment: str) -> Ended:
    """Every rank ends with status 0; skips what this release of torch lacks."""
    ended = run(what, ranks, **environment)
    if lacks := re.search(r"^torch lacks (.*)$", ended.stdout, re.M):
        pytest.skip(f"torch lacks {lacks[1]}")
    assert ended.statuses == [0] * ranks, ended.stderr
    return ended


@pytest.mark.parametrize("nodes", [1, 2])
def test_gives_what_gloo_gives(nodes: int) -> None:
    check("same_as_gloo", 3, NODES=str(nodes))


def test_an_allgather_has_the_early_ranks_data_before_the_last_arrives(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4 * 3 * 3 * 300_000))
    check("gathered_early", 3, TEST_SHARED=str(shared))


@pytest.mark.parametrize("nodes", [1, 2])
def test_reduce_scatters_give_each_rank_its_block(nodes: int) -> None:
    check("scattered", 3, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_inputs_and_outputs_share_memory(nodes: int) -> None:
    check("overlapping", 2, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_tensors_begin_at_any_byte(nodes: int) -> None:
    check("unaligned", 2, NODES=str(nodes))


def test_tensors_that_do_not_fit_on_one_rank_end_no_wait() -> None:
    assert check("misfitting", 3).stdout.count("was told") == 2


def test_delegates_what_is_not_ours() -> None:
    check("delegates", 2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_asynchronous_work_keeps_its_order(nodes: int) -> None:
    check("asynchronous", 3, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_barrier_ends_what_was_begun_before_it(nodes: int) -> None:
    check("barred", 2, NODES=str(nodes))


def test_a_barrier_is_well_after_what_failed_over_gloo() -> None:
    check("barred_after_an_error", 2, NODES="2")


def test_groups_of_some_ranks_have_the_options_of_all() -> None:
    check("inherited", 2)


def test_groups_of_some_ranks_leave_the_names_of_others_alone() -> None:
    check("counted_apart", 3)


def test_ranks_meet_in_a_store_written_in_python() -> None:
    check("met_in_python", 2)


def test_a_destroyed_group_is_aborted() -> None:
    check("aborted_late", 2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_work_is_asked_whether_it_is_complete(nodes: int) -> None:
    check("polled", 2, NODES=str(nodes))


@pytest.mark.parametrize(
    ("call", "then"), [("watched", "exits"), ("queued", "exits"), ("queued", "returns")]
)
def test_a_signals_handler_destroys_the_group_amid_a_call(call: str, then: str) -> None:
    ended = run("terminated", 2, CALL=call, THEN=then, limit=120)
    assert ended.statuses == [8, 8], ended.stderr


def test_a_group_is_not_split() -> None:
    check("unsplit", 2)


def test_callbacks_wait_for_other_operations_of_their_group() -> None:
    check("called_back", 2)


def test_hooks_of_torch_wait_in_callbacks() -> None:
    check("compressed_data_parallel", 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_trains_to_the_bits_of_one_process(ranks: int) -> None:
    check("data_parallel", ranks)


def test_a_trace_has_what_ddp_waits_for_and_not_what_is_reduced_meanwhile(tmp_path: Path) -> None:
    check("waits_of_ddp", 2, TEST_TRACE=str(tmp_path))


def test_a_trace_has_no_wait_at_the_end_of_an_inner_backward_pass(tmp_path: Path) -> None:
    check("waits_of_checkpointed_ddp", 2, TEST_TRACE=str(tmp_path))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_trace_has_the_waits_for_asynchronous_work(nodes: int, tmp_path: Path) -> None:
    check("waits_of_works", 2, TEST_TRACE=str(tmp_path), NODES=str(nodes))


def test_fully_sharded_training_works() -> None:
    check("fully_sharded", 2)


def test_the_death_of_a_rank_is_an_error_on_the_others() -> None:
    ended = run("killed", 3)
    assert ended.stdout.count("was told") == 2, ended.stderr
    assert ended.statuses == [0, -signal.SIGKILL, 0]


def test_the_death_of_a_rank_in_backward_is_an_error_on_the_others() -> None:
    with OwnSharedMemory() as memory:
        ended = run("killed_in_backward", 3, mounts_of=memory.holder)
        assert ended.stdout.count("was told") == 2, ended.stderr
        assert (memory.names(), memory.unnamed_bytes_that_stay()) == (set(), 0)


def test_ranks_lost_between_nodes_are_named() -> None:
    ended = run("lost_over_gloo", 3, NODES="3")
    assert ended.statuses == [0, 0, -signal.SIGKILL], ended.stderr


def test_errors_name_ranks_by_their_numbers_in_the_job() -> None:
    ended = run("numbered", 4, NODES="2")
    assert ended.statuses == [0, 0, -signal.SIGKILL, 0], ended.stderr


def test_tensors_in_shared_memory_give_the_same_bits() -> None:
    check("shared", 2)


def test_ranks_share_memory_where_its_directory_has_room_for_nothing() -> None:
    with OwnSharedMemory("64k") as memory:
        ended = run("shared", 2, mounts_of=memory.holder)
        assert ended.statuses == [0, 0], ended.stderr
        # Of the backend, and of the optimizer.
        told = re.findall(
            r"no memory for .* in /dev/shm: No space .* in no directory", ended.stderr
        )
        assert len(told) >= 2, ended.stderr
        assert (memory.names(), memory.unnamed_bytes_that_stay()) == (set(), 0)


def test_a_refused_connection_is_tried_again() -> None:
    ended = check("unconnected", 2)
    assert ended.stdout.count("was told") == 2, ended.stderr
    assert "connecting over Gloo failed (rank 1 of 2 could not" in ended.stderr


def test_messages_have_the_timeout_of_their_group() -> None:
    check("message_later", 2)


def test_messages_need_only_the_ranks_that_exchange_them() -> None:
    check("pair_of_three", 3)


def test_groups_are_used_by_several_threads() -> None:
    check("threads", 2)


def test_a_forked_child_is_refused() -> None:
    check("forked", 2)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_calls_that_differ_are_named_on_all_ranks(debug: str) -> None:
    ended = check("mismatched", 2, TORCH_DISTRIBUTED_DEBUG=debug)
    assert ended.stdout.count("named") == 2, ended.stderr


def test_types_and_orders_that_differ_are_named_on_all_ranks() -> None:
    check("mistyped", 2)


def test_models_that_differ_are_named_on_all_ranks() -> None:
    check("models_that_differ", 3)


def test_timeouts_of_waits_and_operations() -> None:
    ended = check("limits", 2)
    assert "limited" in ended.stdout, ended.stderr


def test_a_group_is_made_again_on_the_store_of_an_aborted_one() -> None:
    check("made_again", 2)


def test_groups_of_other_sizes_are_made_on_one_store() -> None:
    check("resized", 3)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (2, 2), (4, 2)])
def test_abort_ends_the_group_on_all_ranks(ranks: int, nodes: int) -> None:
    ended = check("aborted", ranks, NODES=str(nodes))
    assert ended.stdout.count("ended") == ranks, ended.stderr


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_abort_ends_what_waits_over_gloo(nodes: int) -> None:
    ended = check("aborted_delegated", 3, NODES=str(nodes))
    assert ended.stdout.count("ended") == 3, ended.stderr


def test_torchrun_launches_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["2", str(RANK), "delegates"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    assert result.returncode == 0, result.stderr


def test_mpirun_launches_it_too() -> None:
    environment = {name: value for name, value in os.environ.items() if "MASTER_" not in name}
    environment.update(
        OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
    )
    command = [*launcher("openmpi"), "-n", "2", sys.executable, str(RANK), "forked"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_srun_is_found(ranks: int) -> None:
    check("launched", ranks)


@pytest.mark.parametrize("nodes", [1, 2])
def test_averages_of_integers(nodes: int) -> None:
    check("averages", 2, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_sums_of_shorts(nodes: int) -> None:
    check("shorts", 2, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_tensors_that_are_negated_when_they_are_read(nodes: int) -> None:
    check("negated", 2, NODES=str(nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_sums_of_booleans(nodes: int) -> None:
    check("sums_of_booleans", 2, NODES=str(nodes))


def test_compiled_programs_use_it() -> None:
    check("compiled", 2)


def test_nothing_is_left_of_a_destroyed_group() -> None:
    check("destroyed", 2)


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout() -> None:
    ended = check("late", 2)
    assert "have not arrived: 1" in ended.stdout, ended.stderr


def test_the_timeout_holds_between_nodes() -> None:
    ended = check("late", 2, NODES="2")
    assert "limited: " in ended.stdout, ended.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_program_ends_while_its_daemon_threads_wait(nodes: int) -> None:
    ended = run("end", 2, ENDING="daemons wait", SEED="1", NODES=str(nodes))
    assert ended.statuses == [8, 8], ended.stderr


def test_a_program_ends_while_a_daemon_thread_asks_why_its_call_failed() -> None:
    ended = run("end", 2, ENDING="daemon asks", SEED="1")
    assert ended.statuses == [8, 8], ended.stderr


def test_a_program_ends_while_a_daemon_thread_drops_what_it_waited_for() -> None:
    ended = run("end", 2, ENDING="daemon drops", SEED="1")
    assert ended.statuses == [8, 8], ended.stderr


def test_a_program_ends_while_daemon_threads_are_in_native_code_of_torch() -> None:
    ended = run("end", 2, ENDING="daemons compute", SEED="1")
    assert ended.statuses == [8, 8], ended.stderr


def test_a_program_ends_while_a_thread_swaps_tensors() -> None:
    ended = run("end", 2, ENDING="swapping", SEED="1")
    assert ended.statuses == [8, 8], ended.stdout + ended.stderr


def test_a_rank_that_ends_in_a_call_leaves_the_calls_before_it_whole() -> None:
    ended = run("end", 2, ENDING="early", SEED="1")
    assert ended.statuses == [8, 8], ended.stderr


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
    result = subprocess.run(words, capture_output=True, text=True, timeout=800)
    # Some releases of Gloo print a line of their own.
    assert result.stdout.splitlines()[-1] == "done", result.stderr
    assert "leaked" not in result.stderr
