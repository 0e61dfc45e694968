"""Unmodified mpi4py programs with libnostall_mpi.so preloaded; what they check is in mpi_rank.py."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpis import MPIS, counted, launcher, library, run
from procfs import OwnSharedMemory

from nostall.cli import _run as mpi
from nostall.cli import main
from nostall.errors import UsageError
from nostall.observe.report import _arrivals as arrivals

pytestmark = pytest.mark.multi
RANK = Path(__file__).with_name("mpi_rank.py")


def launch(
    what: list[str], ranks: int, nodes: int = 1, launched: Sequence[str] = (), **options: object
) -> subprocess.CompletedProcess[str]:
    variables = mpi.environment(mpi.library(), verbose=True, **options)  # type: ignore[arg-type]
    program = [sys.executable, str(RANK), *what]
    words = [*launcher("openmpi"), *launched]
    for node in range(nodes):
        extra = ["-x", f"NOSTALL_NODE={node}"] if nodes > 1 else []
        if node > 0:
            passed = [w for k, v in variables.items() for w in ("-x", f"{k}={v}")]
            words += [":", *passed]
        words += ["-n", str(ranks // nodes), *extra, *program]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        mpi.command(words, variables),
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **root},
    )


def test_what_is_preloaded_already_stays_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/liballocator.so")
    preload = mpi.environment(Path("/x/libnostall_mpi.so"))["LD_PRELOAD"]
    assert preload == "/lib/liballocator.so /x/libnostall_mpi.so"
    monkeypatch.delenv("LD_PRELOAD")
    assert mpi.environment(Path("/x/libnostall_mpi.so"))["LD_PRELOAD"] == "/x/libnostall_mpi.so"


@pytest.mark.parametrize(
    ("version", "given", "joined"),
    [
        ("mpirun (Open MPI) 5.0.11", "-x LD_PRELOAD=a.so", "-x|LD_PRELOAD=a.so /x/ours.so"),
        ("mpirun (Open MPI) 5.0.11", "-x LD_PRELOAD", "-x|LD_PRELOAD=env.so /x/ours.so"),
        ("HYDRA build details:", "-genv LD_PRELOAD a.so", "-genv|LD_PRELOAD|a.so /x/ours.so"),
        ("mpirun (Open MPI) 5.0.11", "p : -x LD_PRELOAD=a.so", None),  # of another program
    ],
)
def test_what_the_launcher_preloads_is_joined_by_the_library(
    version: str, given: str, joined: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{version}'\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("LD_PRELOAD", "env.so")
    variables = {"LD_PRELOAD": "env.so /x/ours.so"}
    words = [str(launcher), *given.split(), "./program"]
    ours = ["-x", "LD_PRELOAD=env.so /x/ours.so", *given.split()]
    expected = ours if joined is None else joined.split("|")
    assert mpi.command(words, variables) == [words[0], *expected, "./program"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_all_types_agree_with_numpy(ranks: int) -> None:
    result = launch(["collectives"], ranks)
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr) == {
        **{"allreduce": 440, "reduce": 220, "bcast": 60, "barrier": 60},
        **{"allgather": 0, "allgatherv": 0, "reduce_scatter": 0, "reduce_scatter_block": 0},
        **{"background": 0, "allocations": 0, "persistent": 0},
        **{"switched-off": 0, "inter-communicator": 0, "not-shared": 0, "type": 0},
        **{"several-nodes": 0, "nonblocking": 0},
    }


def test_operations_types_and_communicators_of_all_kinds() -> None:
    result = launch(["operations", "types", "communicators", "pending", "random_delays"], 4)
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert counts["inter-communicator"] == 2
    assert counts["background"] == 1
    assert counts["allreduce"] > 3000


@pytest.mark.parametrize("which", MPIS)
def test_allgathers_of_all_shapes_by_order_of_arrival(which: str, tmp_path: Path) -> None:
    ranks = 3
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4 * ranks * ranks * 300_000))
    program = [sys.executable, str(RANK), "allgathers", "gathered_early"]
    result = run(which, ranks, program, TEST_SHARED=str(shared))
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert counts["allgather"] == 4 * ranks * 6 + 1 + 1 + 1
    assert counts["allgatherv"] == 4 * ranks * 2 + 2 + 1 + 2
    assert counts["type"] == 0


@pytest.mark.parametrize("which", MPIS)
def test_types_that_change_the_order_of_elements(which: str) -> None:
    program = [sys.executable, str(RANK), "transposed"]
    result = run(which, 3, program, NOSTALL_MPI_NONBLOCKING="1")
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert (counts["bcast"], counts["background"], counts["allgather"]) == (12, 12, 6)


def test_allgathers_between_nodes_are_the_mpis() -> None:
    result = launch(["allgathers"], 4, nodes=2)
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert (counts["allgather"], counts["allgatherv"]) == (0, 0)
    assert counts["several-nodes"] >= 4 * 4 * 8 + 1


@pytest.mark.parametrize("which", MPIS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatters_of_all_shapes(which: str, ranks: int) -> None:
    result = run(which, ranks, [sys.executable, str(RANK), "reduce_scatters"])
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert counts["reduce_scatter"] == 4 * ranks * 5
    assert counts["reduce_scatter_block"] == 4 * ranks * 5 + 3 + 4
    assert counts["type"] == 1


def test_reduce_scatters_between_nodes_are_the_mpis() -> None:
    result = launch(["reduce_scatters"], 4, nodes=2)
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert (counts["reduce_scatter"], counts["reduce_scatter_block"]) == (0, 0)
    assert counts["several-nodes"] >= 4 * 4 * 10 + 4


# Checks that leave the library as they found it, one after the other in one job.
IN_TURN = ("pending", "windows", "background", "freed", "memory", "threads")


@pytest.mark.parametrize("which", MPIS)
def test_messages_windows_background_memory_and_threads(which: str) -> None:
    result = run(which, 2, [sys.executable, str(RANK), *IN_TURN], NOSTALL_MPI_SHARED=str(32 << 20))
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert counts["background"] == 3 * 4 + 2 * 20
    assert counts["nonblocking"] == 1
    assert counts["persistent"] == 1
    assert counts["allocations"] == 1 + 10


@pytest.mark.parametrize("which", MPIS)
def test_nonblocking_calls_are_left_to_the_mpi_on_demand(which: str) -> None:
    # Not "freed" with Open MPI: without any library of ours, too, a communicator that is freed while
    # Open MPI 5.0's own MPI_Iallreduce runs on it is gone, and the next round of messages, in
    # MPI_Wait, ends the process (mca_pml_ob1_isend of a communicator that has no ranks any more).
    programs = ["background"] if which == "openmpi" else ["background", "freed"]
    result = run(which, 2, [sys.executable, str(RANK), *programs], NOSTALL_MPI_NONBLOCKING="off")
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["background"] == 0


@pytest.mark.parametrize("which", MPIS)
def test_a_wait_waits_for_no_later_call(which: str) -> None:
    program = [sys.executable, str(RANK), "started_later"]
    result = run(which, 2, program, NOSTALL_MPI_TIMEOUT="60")
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["background"] == 1000


_LEVELS = """
import os, mpi4py
first = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0"
mpi4py.rc.thread_level = "multiple" if first else "funneled"
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
for comm in (world, world.Dup()):
    for _ in range(2):
        total = np.ones(20_000)
        comm.Iallreduce(MPI.IN_PLACE, total).Wait()
        assert (total == comm.size).all()
        comm.Barrier()
assert world.gather(MPI.Query_thread()) in (None, [MPI.THREAD_MULTIPLE, MPI.THREAD_FUNNELED])
if world.rank == 0:
    print("all right", flush=True)
"""


@pytest.mark.parametrize("which", MPIS)
def test_ranks_may_ask_for_different_levels_of_threads(which: str) -> None:
    result = run(which, 2, [sys.executable, "-c", _LEVELS], timeout=400)
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["background"] == 0


def test_nonblocking_calls_complete_where_the_system_gives_no_thread() -> None:
    result = run("mpich", 2, [sys.executable, str(RANK), "threadless"])
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["background"] == 2
    for rank in range(2):
        assert result.stderr.count(f"nostall: rank {rank} gets no thread for nonblocking") == 1
    assert "or leave them to the MPI by NOSTALL_MPI_NONBLOCKING=off" in result.stderr


def test_a_setting_that_is_none_is_told_once() -> None:
    settings = {"NOSTALL_MPI_BETWEEN": "exchange", "NOSTALL_MPI": "on"}
    result = run("mpich", 2, [sys.executable, str(RANK), "random_delays"], **settings)
    assert "all right" in result.stdout, result.stderr
    old = (
        'nostall: NOSTALL_MPI_BETWEEN=exchange is neither "allreduce" nor "arrival": it is taken as '
        '"allreduce"; "arrival" was called "exchange"\n'
    )
    assert result.stderr.count(old) == 1
    words = 'nostall: NOSTALL_MPI=on is neither "replace" nor "off": it is taken as "replace"\n'
    assert result.stderr.count(words) == 1


def test_two_nodes_reduce_in_two_levels() -> None:
    result = launch(["collectives", "operations", "types", "pending"], 4, nodes=2)
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["allreduce"] > 400


@pytest.mark.parametrize("ranks", [3, 4])
def test_nodes_share_by_arrival(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_MPI_BETWEEN", "arrival")
    result = launch(["by_arrival"], ranks, nodes=3 if ranks == 3 else 2)
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["allreduce"] > 40


def test_a_killed_rank_is_an_error_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(told))
    # Else the launcher may kill the others before they see it.
    result = launch(["killed"], 3, launched=["--enable-recovery"])
    assert result.returncode != 0
    lines = told.read_text().splitlines()
    assert len(lines) == 2, lines
    for line in lines:
        assert "rank 1 (process" in line
        assert "died before it finished allreduce (call 2)" in line


@pytest.mark.parametrize("which", MPIS)
def test_a_death_or_an_absence_ends_the_job_and_leaves_no_memory(
    which: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    for what, ranks in (("killed_with_child", 3), ("absent", 2)):
        with OwnSharedMemory() as memory:
            settings = {"NOSTALL_MPI_TIMEOUT": "3", "TOLD": str(told)} if what == "absent" else {}
            program = [sys.executable, str(RANK), what]
            result = run(which, ranks, program, within=memory.within, **settings)
            assert result.returncode != 0
            # MPICH leaves files of its own.
            assert not {name for name in memory.names() if not name.startswith("mpich_shm_")}
            memory.await_end_of_processes()
            assert memory.unnamed_bytes_that_stay() == 0
    words = told.read_text()
    assert "in allreduce (call 1) for ranks that have not arrived: 1" in words
    assert "rank 0 was told of an error of class MPI_ERR_OTHER" in words


@pytest.mark.parametrize("which", MPIS)
def test_ranks_that_call_different_things_are_told_both(which: str) -> None:
    result = run(which, 3, [sys.executable, str(RANK), "mismatched"])
    assert "all right" in result.stdout, result.stderr
    for told in (
        "allreduce of 70 float32 elements, sum",
        "allreduce of 100 float32 elements, max",
        "rank 1 calls allreduce of 100 int32 elements, sum",
        "rank 1 calls broadcast of 400 bytes, from rank 0",
        "rank 1 calls barrier",
    ):
        assert told in result.stderr
    assert counted(result.stderr)["allreduce"] == 1


@pytest.mark.parametrize("which", MPIS)
def test_buffers_types_and_children_that_are_not_ordinary(which: str) -> None:
    # All nonblocking calls are ours: the MPIs refuse one buffer as both.
    programs = [sys.executable, str(RANK), "buffers", "gaps", "forked"]
    result = run(which, 2, programs, NOSTALL_MPI_NONBLOCKING="0")
    assert "all right" in result.stdout, result.stderr
    counts = counted(result.stderr)
    assert counts["type"] == 1
    assert counts["allreduce"] == 3 * 5 + 3
    assert counts["background"] == 3 * 4 + 3


def test_a_revoked_communicator_ends_for_those_who_wait() -> None:
    result = run("openmpi", 2, [sys.executable, str(RANK), "revoked"])
    assert "all right" in result.stdout, result.stderr


@pytest.mark.parametrize("which", MPIS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_error_between_nodes_is_returned_on_all_ranks(which: str, ranks: int) -> None:
    program = [sys.executable, str(RANK), "disagreeing_nodes"]
    result = run(which, ranks, program, TEST_NODES="2")
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "the MPI's part of bcast between nodes failed: " in result.stderr


@pytest.mark.parametrize("which", MPIS)
def test_an_error_in_the_allreduce_by_arrival_is_returned_on_all_ranks(which: str) -> None:
    settings = {"TEST_NODES": "2", "NOSTALL_MPI_BETWEEN": "arrival"}
    program = [sys.executable, str(RANK), "disagreeing_by_arrival"]
    result = run(which, 4, program, **settings)
    assert "all right" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("which", MPIS)
def test_an_absence_on_one_node_ends_the_waiting_on_the_other(which: str) -> None:
    program = [sys.executable, str(RANK), "absent_elsewhere"]
    result = run(which, 4, program, TEST_NODES="2")
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "on the node of rank" in result.stderr


@pytest.mark.parametrize("between", ["allreduce", "arrival"])
@pytest.mark.parametrize(("which", "ranks"), [("openmpi", 2), ("mpich", 4)])
def test_a_node_that_does_not_come_is_an_error(which: str, ranks: int, between: str) -> None:
    settings = {"TEST_NODES": "2", "NOSTALL_MPI_BETWEEN": between, "NOSTALL_MPI_TIMEOUT": "6"}
    result = run(which, ranks, [sys.executable, str(RANK), "absent_node"], **settings)
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "rank 0 waited 6.0000 s for other nodes in allreduce" in result.stderr


def test_a_revocation_reaches_those_who_wait_on_other_nodes() -> None:
    program = [sys.executable, str(RANK), "revoked_elsewhere"]
    result = run("openmpi", 6, program, TEST_NODES="2")
    assert "all right" in result.stdout, result.stdout + result.stderr
    program = [sys.executable, str(RANK), "revoked_by_mpi"]
    ulfm = ("--with-ft", "ulfm")
    result = run("openmpi", 4, program, launched=ulfm, TEST_NODES="2")
    assert "all right" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("which", MPIS)
def test_what_the_mpi_refuses_is_its_error(which: str) -> None:
    result = run(which, 3, [sys.executable, str(RANK), "refused"])
    assert "all right" in result.stdout, result.stdout + result.stderr
    counts = counted(result.stderr)
    assert counts["type"] == 3 * 7 + 1
    assert counts["allreduce"] == 6


def test_a_limit_of_file_sizes_leaves_a_program_to_the_mpi() -> None:
    program = [sys.executable, str(RANK), "duplicate_alone"]
    limited = ["sh", "-c", 'ulimit -f 65536 && exec "$@"', "sh"]
    result = run("openmpi", 2, program, within=limited)
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "the MPI's own collectives are used" in result.stderr
    assert "(ulimit -f)" in result.stderr


@pytest.mark.parametrize("which", MPIS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_collectives_and_memory_in_what_finalize_calls(which: str, nodes: int) -> None:
    result = run(which, 3, [sys.executable, str(RANK), "at_the_end"], TEST_NODES=str(nodes))
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert counted(result.stderr)["allocations"] == 1


# A program may call MPI for communicators of sessions alone.
_SESSION = """
import time
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
from mpi4py import MPI
session = MPI.Session.Init()
group = session.Create_group("mpi://WORLD")
comm = MPI.Intracomm.Create_from_group(group, "nostall.test")
column = MPI.DOUBLE.Create_vector(8, 1, 5).Commit()
for _ in range(2):
    total = np.ones(100_000)
    if comm.rank == 1:
        time.sleep(0.1)  # others wait
    comm.Allreduce(MPI.IN_PLACE, total)
    assert (total == comm.size).all()
    grid = np.full((8, 5), float(comm.rank))
    comm.Bcast([grid, 1, column], 1)
    assert (grid[:, 0] == 1).all() and (grid[:, 1:] == comm.rank).all()
if comm.rank == 0:
    print("all right", flush=True)  # a launcher may kill a rank that has finalized
comm.Free()
group.Free()
session.Finalize()
"""


@pytest.mark.parametrize("which", MPIS)
def test_a_program_of_sessions_alone_is_the_mpis(which: str) -> None:
    result = run(which, 2, [sys.executable, "-c", _SESSION])
    assert result.returncode == 0, result.stderr
    assert "all right" in result.stdout, result.stderr


# A tool that counts something, say, and is preloaded before ours.
_TOOL = """
int PMPI_Init(int *count, char ***words);
int PMPI_Init_thread(int *count, char ***words, int required, int *provided);
int PMPI_Finalize(void);
int MPI_Init(int *count, char ***words) { return PMPI_Init(count, words); }
int MPI_Init_thread(int *count, char ***words, int required, int *provided) {
  return PMPI_Init_thread(count, words, required, provided);
}
int MPI_Finalize(void) { return PMPI_Finalize(); }
"""


def shared_object(name: str, source: str, directory: Path, *options: str) -> Path:
    text, made = directory / f"{name}.c", directory / name
    text.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", str(made), str(text)], check=True)
    return made


@pytest.mark.parametrize("which", MPIS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_another_library_answers_init_and_finalize(which: str, nodes: int, tmp_path: Path) -> None:
    tool = shared_object("tool.so", _TOOL, tmp_path)
    settings = {
        "LD_PRELOAD": f"{tool} {library(which)}",
        "NOSTALL_MPI_PROFILE": str(tmp_path),
        "NOSTALL_MPI_BETWEEN": "sometimes",
        "TEST_NODES": str(nodes),
    }
    result = run(which, 3, [sys.executable, str(RANK), "at_the_end"], **settings)
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "NOSTALL_MPI_BETWEEN=sometimes is neither" in result.stderr
    counts = counted(result.stderr)
    # What MPI_Finalize calls for the program comes before the end of ours.
    assert (counts["allreduce"], counts["allocations"]) == (2, 2)
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert [call.operation for call in profile.calls].count("allreduce") == 2


@pytest.mark.parametrize("which", MPIS)
def test_a_profile_needs_no_call_on_the_world_itself(which: str, tmp_path: Path) -> None:
    tool = shared_object("tool.so", _TOOL, tmp_path)
    settings = {
        "LD_PRELOAD": f"{tool} {library(which)}",
        "NOSTALL_MPI_PROFILE": str(tmp_path),
        "NOSTALL_MPI_BETWEEN": "sometimes",
    }
    result = run(which, 3, [sys.executable, str(RANK), "duplicate_alone"], **settings)
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert "NOSTALL_MPI_BETWEEN=sometimes is neither" in result.stderr
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert "allreduce" in [call.operation for call in profile.calls]


# Exit handlers run behind the destructors of what was made since they were registered.
_AT_EXIT = """
#include <stdio.h>
#include <stdlib.h>
int MPI_Allreduce(const void *in, void *out, int count, long type, long op, long comm);
int MPI_Comm_dup(long comm, long *made);
int MPI_Finalize(void);
static long type, op, comm;
void remember(long t, long o, long c) { type = t, op = o, comm = c; }
static void last(void) {
  int one = 1, sum = 0, again = 0;
  long made = 0;
  int failed = MPI_Allreduce(&one, &sum, 1, type, op, comm) || MPI_Comm_dup(comm, &made) ||
               MPI_Allreduce(&sum, &again, 1, type, op, made);
  printf("failed %d, sum %d\\n", failed, again);
  fflush(stdout);
  MPI_Finalize();
}
__attribute__((constructor)) static void first(void) { atexit(last); }
"""


@pytest.mark.parametrize("which", MPIS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_exit_handlers_communicate_and_finalize(which: str, nodes: int, tmp_path: Path) -> None:
    handler = shared_object("handler.so", _AT_EXIT, tmp_path)
    settings = {
        "LD_PRELOAD": f"{library(which)} {handler}",
        "NOSTALL_MPI_NONBLOCKING": "0",
        "MPI4PY_RC_FINALIZE": "0",
        "TEST_NODES": str(nodes),
        "TOLD": str(tmp_path / "told"),
    }
    result = run(which, 3, [sys.executable, str(RANK), "exits"], **settings)
    told = (tmp_path / "told").read_text()
    # MPICH's launcher may kill (9) who has finalized and is not gone yet.
    ended = (0, 9) if which == "mpich" else (0,)
    assert result.returncode in ended, result.stderr + told
    assert told.count("failed 0, sum 9") == 3, result.stderr + told
    assert counted(told)["allreduce"] == 4 + 2


_DRIVER = """
#include <stddef.h>
#include <stdint.h>
static uintptr_t begin, end;
static unsigned is_managed;
void pretend(size_t address, size_t bytes, int managed) {
  begin = address, end = address + bytes, is_managed = (unsigned)managed;
}
int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
  if (address < begin || address >= end) return 1;
  *(unsigned *)value = attribute == 8 ? is_managed : 2;
  return 0;
}
"""


@pytest.mark.parametrize("which", MPIS)
def test_buffers_on_a_device_are_refused_on_all_ranks(which: str, tmp_path: Path) -> None:
    driver = shared_object("libcuda.so.1", _DRIVER, tmp_path, "-Wl,-soname,libcuda.so.1")
    settings = {"NOSTALL_MPI_NONBLOCKING": "0", "TEST_CUDA": str(driver)}
    result = run(which, 2, [sys.executable, str(RANK), "on_device"], **settings)
    assert "all right" in result.stdout, result.stdout + result.stderr
    told = "rank 1 calls a collective with a buffer in memory of a GPU"
    assert f"{told}, which nostall does not read: set NOSTALL_MPI=off on all ranks" in result.stderr


def test_more_than_two_gigabytes_in_one_call() -> None:
    result = run("mpich", 2, [sys.executable, str(RANK), "huge"])
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["allreduce"] == 1
    assert counted(result.stderr)["bcast"] == 0


def test_switched_off_it_only_watches(tmp_path: Path) -> None:
    result = launch(["random_delays"], 2, replace=False, profile=str(tmp_path))
    assert "all right" in result.stdout, result.stderr
    assert counted(result.stderr)["switched-off"] == 3000
    for rank in range(2):
        header, _, records = (tmp_path / f"mpi-{rank}.profile").read_bytes().partition(b"\n")
        told = json.loads(header)
        assert (told["rank"], told["ranks"], told["records"]) == (rank, 2, 3000)
        assert len(records) == 3000 * 40
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert [(c.operation, c.bytes) for c in profile.calls] == [("allreduce", 24)] * 3000
    # A rank that sleeps is late, and nobody leaves before the last has come.
    assert max(c.worst for c in profile.calls) > 100_000
    assert all(c.left.min() >= c.arrived.max() for c in profile.calls)


@pytest.mark.parametrize("which", MPIS)
def test_a_profile_has_every_collective(which: str, tmp_path: Path) -> None:
    program = [sys.executable, str(RANK), "every_kind"]
    result = run(which, 3, program, NOSTALL_MPI_PROFILE=str(tmp_path))
    assert "all right" in result.stdout, result.stderr
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    given = {
        "allgather": 20, "allgatherv": 12, "gather": 20, "gatherv": 12, "scatter": 20,
        "scatterv": 12, "alltoall": 60, "alltoallv": 24, "reduce_scatter": 24,
        "reduce_scatter_block": 60, "scan": 20, "exscan": 20,
    }  # fmt: skip
    found = [(call.operation, call.bytes) for call in profile.calls if call.bytes]
    blocking = [*given.items(), ("alltoallw", 12), ("allgather", 20)]
    later = {**given, "alltoallw": 12, "allreduce": 20, "reduce": 20, "bcast": 20}
    assert found == blocking + [(f"i{name}", size) for name, size in later.items()]
    assert [call.operation for call in profile.calls].count("ibarrier") == 1
    # The wait is part of a call that waits for a late rank, whichever function waits.
    waits = (
        "allgather",
        "allgatherv",
        "alltoall",
        "alltoallv",
        "alltoallw",
        "allreduce",
        "scatter",
    )
    for call in profile.calls:
        if call.operation in [f"i{name}" for name in waits]:
            assert call.left[1:].min() >= call.arrived[0]
    assert profile.left_out == {
        "nonblocking calls on communicators without a blocking call before": 1
    }
    # How the times compare is the machine's affair: on a busy one short messages may take longer.
    sizes, times = zip(*profile.alpha.measured, strict=True)
    assert sizes == (8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
    assert min(times) > 0


@pytest.mark.parametrize("which", MPIS)
def test_a_profile_leaves_messages_to_the_program(which: str, tmp_path: Path) -> None:
    program = [sys.executable, str(RANK), "left_receive"]
    result = run(which, 2, program, NOSTALL_MPI_PROFILE=str(tmp_path))
    assert "all right" in result.stdout, result.stdout + result.stderr
    assert arrivals.read(arrivals.find([str(tmp_path)])).alpha.measured


def test_a_profile_keeps_communicators_between_groups_apart(tmp_path: Path) -> None:
    result = launch(["between_groups"], 4, profile=str(tmp_path))
    assert "all right" in result.stdout, result.stderr
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    found = [(call.operation, call.bytes, len(call.arrived)) for call in profile.calls]
    assert found == [*[("allreduce", 0, 4)] * 3, ("barrier", 0, 4), ("allgather", 0, 4)]
    assert not profile.left_out


@pytest.mark.parametrize(("most", "kept"), [(1 << 20, 600), (150, 150)])
def test_records_of_several_threads_are_in_order_and_on_the_kernels_clock(
    most: int, kept: int, tmp_path: Path
) -> None:
    program = [sys.executable, str(RANK), "threads"]
    settings = {"NOSTALL_MPI_PROFILE": str(tmp_path), "NOSTALL_MPI_PROFILE_RECORDS": str(most)}
    began = time.monotonic_ns()
    result = run("openmpi", 2, program, **settings)
    ended = time.monotonic_ns()
    assert "all right" in result.stdout, result.stderr
    for rank in range(2):
        header, _, records = (tmp_path / f"mpi-{rank}.profile").read_bytes().partition(b"\n")
        told = json.loads(header)
        assert (told["records"], told["dropped"]) == (kept, 600 - kept)
        times = np.frombuffer(records, "<i8").reshape(kept, 5)[:, :2]
        assert (np.diff(times[:, 0]) >= 0).all()
        assert (times[:, 1] > times[:, 0]).all()
        assert began < times.min() and times.max() < ended


_NO_MEMORY = """
import pathlib, resource
from mpi4py import MPI
limits = resource.getrlimit(resource.RLIMIT_AS)
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))
for _ in range(160_000):
    MPI.COMM_SELF.Barrier()
resource.setrlimit(resource.RLIMIT_AS, limits)
print("all right")
"""


def test_a_program_without_memory_for_records_goes_on(tmp_path: Path) -> None:
    program = [sys.executable, "-c", _NO_MEMORY]
    result = run("openmpi", 1, program, NOSTALL_MPI_PROFILE=str(tmp_path))
    assert "all right" in result.stdout, result.stderr
    header, records = arrivals.read_file(tmp_path / "mpi-0.profile")
    assert len(records) >= 3 * 50_000  # what was ready at the beginning
    assert header["dropped"] == 160_000 - len(records) > 0


_GIVES_BACK = """
import os, threading, time
from mpi4py import MPI
first, second, third = (MPI.COMM_SELF.Dup() for _ in range(3))
called, may_end = threading.Event(), threading.Event()
def work():
    for _ in range(100):
        first.Barrier()
    called.set()
    may_end.wait()
worker = threading.Thread(target=work)
worker.start()
called.wait()
for _ in range(2000):
    second.Barrier()
may_end.set()
worker.join()
while os.path.exists(f"/proc/self/task/{worker.native_id}"):  # Python's thread ends before the system's
    time.sleep(0.001)
for _ in range(50):
    second.Barrier()
for _ in range(10):
    third.Barrier()
"""


def test_what_a_communicator_lacks_is_its_end(tmp_path: Path) -> None:
    settings = {"NOSTALL_MPI_PROFILE": str(tmp_path), "NOSTALL_MPI_PROFILE_RECORDS": "6000"}
    result = run("openmpi", 1, [sys.executable, "-c", _GIVES_BACK], **settings)
    assert result.returncode == 0, result.stderr
    _, records = arrivals.read_file(tmp_path / "mpi-0.profile")
    _, calls = np.unique(records["communicator"], return_counts=True)
    # The second thread's part of the memory is full; that of the first comes too late for it.
    assert calls.tolist() == [100, 6000 - 4369, 10]


_MANY_COMMUNICATORS = """
import os, resource
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
may = 256 if world.rank == 0 else 1024  # one rank gets there first
resource.setrlimit(resource.RLIMIT_NOFILE, (may, most))
here = len(os.listdir("/proc/self/fd"))
comms = [world.Dup() for _ in range(160)]
for comm in comms:
    total = np.array([world.rank + 1.0])
    comm.Allreduce(MPI.IN_PLACE, total)
    assert total[0] == 3.0
used = len(os.listdir("/proc/self/fd")) - here
if world.rank == 0:
    print("kept", used, "of", may, flush=True)
files = [open(__import__("sys").executable) for _ in range(may - here - used - 2)]
"""


@pytest.mark.parametrize("which", ["openmpi", "mpich"])
def test_many_communicators_leave_descriptors_to_the_program(which: str) -> None:
    result = run(which, 2, [sys.executable, "-c", _MANY_COMMUNICATORS])
    assert result.returncode == 0, result.stderr
    said = re.search(r"kept (\d+) of 256", result.stdout)
    assert said and 2 <= int(said[1]) <= 128, result.stdout
    words = (
        "collectives are used: a rank has more than half of the files open that it may: raise the"
    )
    assert result.stderr.count(words) == 1


_MANY_THREADS = """
import threading
from mpi4py import MPI
comms = [MPI.COMM_SELF.Dup() for _ in range(12)]
together = threading.Barrier(12)
def work(comm):
    for _ in range(100):
        comm.Barrier()
    together.wait()
workers = [threading.Thread(target=work, args=(comm,)) for comm in comms]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""


def test_many_threads_share_the_memory_for_records(tmp_path: Path) -> None:
    settings = {"NOSTALL_MPI_PROFILE": str(tmp_path), "NOSTALL_MPI_PROFILE_RECORDS": "52428"}
    result = run("openmpi", 1, [sys.executable, "-c", _MANY_THREADS], **settings)
    assert result.returncode == 0, result.stderr
    profile = arrivals.read(arrivals.find([str(tmp_path)]))
    assert (len(profile.calls), profile.dropped) == (1200, 0)


def test_an_unmodified_program_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    home = tmp_path / "run"
    words = [*launcher("openmpi"), "-n", "2", sys.executable, str(RANK), "random_delays"]
    assert main(["profile", "--mpi", "-o", str(home), "--", *words]) == 0
    assert "% for peers" in capsys.readouterr().out
    profile = arrivals.read(arrivals.find([str(home / "mpi")]))
    for rank in range(2):
        with gzip.open(home / f"rank{rank}.mpi.trace.json.gz", "rt") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        calls = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert {e["name"] for e in calls} == {"MPI_Allreduce"}
        assert [e["args"]["seq"] for e in calls] == list(range(3000))
        assert {e["args"]["bytes"] for e in calls} == {24}
        seen = [c.arrived[rank] / 1000 for c in profile.calls]
        assert [e["ts"] for e in calls] == pytest.approx(seen)


@pytest.mark.parametrize(
    ("version", "passed"),
    [("mpirun (Open MPI) 5.0.11", "-x {}={}"), ("HYDRA build details: MPICH 5.0.2", "-genv {} {}")],
)
def test_settings_reach_the_ranks_of_other_hosts(
    version: str, passed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{version}'\n")
    launcher.chmod(0o755)
    for name in mpi.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NOSTALL_NODE", "0")  # is of this host alone

    def line(*words: str, **options: Any) -> str:
        variables = mpi.environment(Path("/x/library.so"), **options)
        del variables["LD_PRELOAD"]
        return " ".join(mpi.command([str(launcher), *words, "./program"], variables)[1:])

    def passing(**variables: str) -> str:
        return "".join(passed.format(k, v) + " " for k, v in variables.items())

    assert line() == "./program"
    own = passing(NOSTALL_MPI="off")
    assert line(*own.split()) == own + "./program"
    settings = {
        "NOSTALL_COLLECTIVES": "off",
        "NOSTALL_MPI": "off",
        "NOSTALL_MPI_BETWEEN": "arrival",
    }
    settings |= {"NOSTALL_MPI_NONBLOCKING": "off", "NOSTALL_MPI_TIMEOUT": "9"}
    settings |= {"NOSTALL_MPI_PROFILE": "/old", "NOSTALL_MPI_PROFILE_RECORDS": "9"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    ordered = {name: settings[name] for name in mpi.SETTINGS if name in settings}
    assert line() == passing(**ordered) + "./program"
    assert (
        line(profile="/new") == passing(**ordered | {"NOSTALL_MPI_PROFILE": "/new"}) + "./program"
    )
    # What the line says itself stands, for the program that it says it of.
    own = passing(NOSTALL_MPI_TIMEOUT="1").split()
    others = {k: v for k, v in ordered.items() if k != "NOSTALL_MPI_TIMEOUT"}
    assert line(*own) == passing(**others) + " ".join(own) + " ./program"
    assert line("a", ":", *own) == passing(**ordered) + "a : " + " ".join(own) + " ./program"
    monkeypatch.setenv("NOSTALL_MPI", "replace")
    assert passing(NOSTALL_MPI="off") in line(replace=False)


def test_the_program_begins_with_the_signals_that_python_ignores(tmp_path: Path) -> None:
    (tmp_path / "library.so").touch()
    words = ["run", "--library", str(tmp_path / "library.so"), "--", "cat", "/proc/self/status"]
    done = subprocess.run([sys.executable, "-m", "nostall", *words], capture_output=True, text=True)
    ignored = int(re.findall(r"SigIgn:\s*(\w+)", done.stdout)[0], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_the_launcher_passes_the_variables_on() -> None:
    words = ["srun", "-n", "2", "./program"]
    assert mpi.command(words, {"A": "1"}) == ["env", "A=1", *words]
    with pytest.raises(UsageError, match="there is no program to run"):
        mpi.run(argparse.Namespace(words=[], library=None, build=False, mpicxx=None))
