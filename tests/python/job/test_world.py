"""Ranks are found under every launcher, and half-set environments are named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import prefork
import pytest

from nostall.errors import UsageError
from nostall.job import _world as world_module
from nostall.job._world import Group, World, find_address, find_world, is_launched

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "x",
    "MASTER_PORT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job7",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# Without LOCAL_WORLD_SIZE.
DEEPSPEED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (5, 8, 1, 4)),
        (OPEN_MPI, (2, 4, 0, 2)),
        (MPICH, (3, 4, 1, 2)),
        (SLURM, (6, 8, 2, 4)),
        # srun --mpi=pmi2, and MPICH's mpiexec that starts its own processes by srun.
        ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}, (6, 8, 2, 4)),
        ({**SLURM, **MPICH}, (3, 4, 1, 2)),
        ({}, (0, 1, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}, (0, 1, 0, 1)),
        ({**SLURM, **TORCHRUN}, (5, 8, 1, 4)),
        # As scripts for sbatch set them for torch.distributed.
        ({**SLURM, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, (6, 8, 2, 4)),
        ({**SLURM, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": ""}, (6, 8, 2, 4)),
        ({**OPEN_MPI, "RANK": "2", "WORLD_SIZE": "4"}, (2, 4, 0, 2)),
        ({**MPICH, "RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 1, 2)),
        ({"RANK": "", "WORLD_SIZE": "", **OPEN_MPI}, (2, 4, 0, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
        (DEEPSPEED, (3, 4, 1, 2)),
    ],
)
def test_places(environment: dict[str, str], place: tuple[int, int, int, int]) -> None:
    world = find_world(environment=environment)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == place


def test_jobs_are_told_apart() -> None:
    a = find_world(environment=TORCHRUN)
    assert a.job == find_world(environment={**TORCHRUN, "RANK": "6", "LOCAL_RANK": "2"}).job
    assert a.job != find_world(environment={**TORCHRUN, "MASTER_PORT": "2"}).job
    assert a.job != find_world(environment={**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).job


def test_jobs_of_two_servers_of_open_mpi_that_have_one_name_are_told_apart() -> None:
    """As where mpirun is process 1 of each of two containers with the network of the host."""
    where = "prterun-node-1@0.0;tcp4://127.0.0.1:"
    one, other = ({**OPEN_MPI, "PMIX_SERVER_URI41": f"{where}{port}"} for port in (41001, 41002))
    a = find_world(environment=one)
    assert a.job == find_world(environment={**one, "OMPI_COMM_WORLD_RANK": "3"}).job
    assert a.job != find_world(environment=other).job
    # Other nodes of the job have a server of their own, and the same port.
    ports = [
        find_address(find_world(environment=env), {**env, "MASTER_ADDR": "head"})
        for env in (OPEN_MPI, one, other)
    ]
    assert ports[0] is not None and ports[1:] == ports[:-1]


@pytest.mark.parametrize(
    "shell",
    [
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {},
    ],
)
def test_jobs_of_one_rank_with_the_same_variables_are_told_apart(shell: dict[str, str]) -> None:
    code = "from nostall.job._world import find_world; print(find_world().job)"
    env = {**os.environ, **shell}
    ran = [prefork.run(["-c", code], timeout=60, env=env) for _ in range(2)]
    one, other = (process.stdout.strip() for process in ran)
    assert one and other and one != other, ran
    assert find_world(environment=shell).job == find_world(environment=shell).job
    assert find_world(environment=shell, job="ours").job == "ours"
    # As where the caller says that it is this rank.
    assert str(os.getpid()) in find_world(rank=0, world_size=1, environment=shell).job


@pytest.mark.parametrize(
    "shell",
    [
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_ranks_that_one_task_of_a_launcher_starts_are_one_job(shell: dict[str, str]) -> None:
    code = (
        "import sys; from nostall.job._world import find_world; r = int(sys.argv[1]); "
        "print(find_world(rank=r, world_size=2, local_rank=r, local_world_size=2).job)"
    )
    ran = [prefork.run(["-c", code, r], timeout=60, env={**os.environ, **shell}) for r in "01"]
    one, other = (process.stdout.strip() for process in ran)
    assert one and one == other, ran
    # Ranks of a node each are told apart.
    alone = [
        find_world(rank=r, world_size=2, local_rank=0, local_world_size=1, environment=shell).job
        for r in range(2)
    ]
    assert alone[0] != alone[1]


def test_a_group_of_one_rank_is_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each task of a step trains by itself."""
    monkeypatch.setattr(world_module, "joined_group", lambda: Group("torch.distributed", 0, 1))
    found = find_world(environment=SLURM)
    assert (found.rank, found.world_size) == (0, 1) and str(os.getpid()) in found.job


def test_jobs_of_slurm_that_set_the_same_port_are_told_apart() -> None:
    by_hand = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_PORT": "29500", **SLURM}
    other = find_world(environment={**by_hand, "SLURM_JOB_ID": "78"})
    assert find_world(environment=by_hand).job != other.job
    by_pmi2 = {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "8"}
    assert find_world(environment=by_pmi2).job == find_world(environment=SLURM).job


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-09,12],login1"}, "gpu07"),
        ({**SLURM, "SLURM_STEP_NODELIST": "rack[1-2]n[3,5],a"}, "rack1n3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "one,two"}, "one"),
        ({**SLURM, "MASTER_ADDR": "here"}, "here"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
    ],
)
def test_addresses_are_found(environment: dict[str, str], address: str) -> None:
    world = find_world(environment=environment)
    found = find_address(world, environment)
    assert found is not None
    assert found[0] == address
    assert 15_000 <= found[1] < 32_000
    assert find_address(world, {**environment, "MASTER_PORT": "77"}) == (address, 77)


def test_a_single_rank_has_an_address_and_is_told_from_no_launcher() -> None:
    alone = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    world = find_world(environment=alone)
    found = find_address(world, alone)
    assert found is not None and found[0] == "127.0.0.1"
    with socket.socket() as listening:
        listening.bind(found)
    assert find_address(world, {**alone, "MASTER_PORT": "77"}) == ("127.0.0.1", 77)
    assert is_launched(alone) and not is_launched({})


def test_without_a_host_there_is_no_address() -> None:
    assert find_address(find_world(environment=OPEN_MPI), OPEN_MPI) is None


def test_nodes_that_know_no_common_name_get_no_port_from_it() -> None:
    """MPICH names no job: each node has the name of a process of its own."""
    there = {**MPICH, "MASTER_ADDR": "head"}
    assert find_address(find_world(environment=there), there) is None
    with_port = {**there, "MASTER_PORT": "77"}
    assert find_address(find_world(environment=with_port), with_port) == ("head", 77)
    assert find_address(find_world(environment=there, job="ours"), there) is not None
    on_one = {**MPICH, "MPI_LOCALNRANKS": "4"}
    assert find_address(find_world(environment=on_one), on_one) is not None


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE=many"):
        find_world(environment={**TORCHRUN, "WORLD_SIZE": "many"})
    with pytest.raises(UsageError, match="rank 9"):
        find_world(rank=9, world_size=8, environment={})
    with pytest.raises(UsageError, match="both"):
        find_world(rank=0, environment={})
    with pytest.raises(UsageError, match="local rank 2 of 2"):
        find_world(rank=0, world_size=4, local_rank=2, local_world_size=2, environment={})


@pytest.mark.parametrize(
    ("environment", "without", "words"),
    [
        (TORCHRUN, "LOCAL_RANK", "RANK and WORLD_SIZE are set without LOCAL_RANK"),
        (DEEPSPEED, "LOCAL_SIZE", "RANK and WORLD_SIZE are set without LOCAL_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "without OMPI_COMM_WORLD_LOCAL_SIZE"),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE", "set without SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_without_the_place_on_the_node_the_rank_is_known(
    environment: dict[str, str], without: str, words: str
) -> None:
    whole = find_world(environment=environment)
    world = find_world(environment={k: v for k, v in environment.items() if k != without})
    assert world.unknown.endswith(words)
    assert (world.rank, world.world_size) == (whole.rank, whole.world_size)
    assert world.most_here == world.world_size
    assert not whole.unknown and whole.most_here == whole.local_world_size


def test_arguments_suffice_whatever_the_variables_say() -> None:
    place = {"rank": 1, "world_size": 4, "local_rank": 1, "local_world_size": 2}
    assert not find_world(**place, environment={"RANK": "1", "WORLD_SIZE": "4"}).unknown
    world = find_world(**place, job="mine", environment={"RANK": "x", "WORLD_SIZE": "y"})
    assert world == World(1, 4, 1, 2, "mine")


def test_ranks_of_a_part_of_the_processes_keep_the_places_of_these() -> None:
    """Two processes of a node that have one rank have two places there, and one job."""
    twins = [
        find_world(rank=1, world_size=4, environment={**TORCHRUN, "LOCAL_RANK": local})
        for local in "01"
    ]
    assert [(w.rank, w.world_size, w.processes) for w in twins] == [(1, 4, 8)] * 2
    assert [(w.local_rank, w.local_world_size) for w in twins] == [(0, 4), (1, 4)]
    assert twins[0].job == twins[1].job == find_world(environment=TORCHRUN).job
    # Ranks that are only numbered in another way are one process each.
    renamed = find_world(rank=3, world_size=8, environment=TORCHRUN)
    assert renamed.processes is None and renamed.job == twins[0].job
    # Where each rank is one process, which the caller says, the ranks of a node share a job too.
    one, other = (
        find_world(rank=r, world_size=4, local_rank=r, local_world_size=2, environment=TORCHRUN)
        for r in range(2)
    )
    assert one.job == other.job and one.processes is None


def test_mpich_itself() -> None:
    """Ranks behind a shell of their own are of one job on the node, and two jobs are two."""
    mpiexec = Path(__file__).parents[3] / "build" / "mpich" / "bin" / "mpiexec"
    if not mpiexec.exists():
        pytest.skip(f"MPICH: {mpiexec} is missing; scripts/mpi-suite makes it")
    code = (
        "import os; from nostall.job._world import World, find_address, find_world; w = find_world(); "
        "os.write(1, f'{w.rank} {w.local_world_size} {w.job}\\n'.encode())"
    )
    rank = ["sh", "-c", 'set -e; "$0" -c "$1"; :', sys.executable, code]
    jobs = [
        subprocess.Popen([mpiexec, "-n", "2", *rank], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [sorted(job.communicate(timeout=400)[0].splitlines()) for job in jobs]
    for lines in said:
        assert [line.split()[:2] for line in lines] == [["0", "2"], ["1", "2"]]
        assert lines[0].split(" ", 2)[2] == lines[1].split(" ", 2)[2]
    assert said[0][0] != said[1][0]


@pytest.mark.parametrize(
    ("tasks", "node", "here"),
    [("4(x2)", "1", 4), ("4,3", "1", 3), ("3,4(x2)", "0", 3), ("3,4(x2)", "2", 4), ("2", "0", 2)],
)
def test_slurm_nodes_may_have_different_numbers_of_tasks(tasks: str, node: str, here: int) -> None:
    environment = SLURM | {
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": "1",
    }
    assert find_world(environment=environment).local_world_size == here


@pytest.mark.parametrize(("tasks", "node"), [("4,3", "2"), ("4;3", "0")])
def test_slurm_lists_that_make_no_sense_are_named(tasks: str, node: str) -> None:
    environment = SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE"):
        find_world(environment=environment)
