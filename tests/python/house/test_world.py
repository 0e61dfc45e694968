"""Which rank this is, from every launcher's environment, and from torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall.world import World, find_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "run",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job-1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
LAUNCHERS = [TORCHRUN, OPEN_MPI, MPICH, SLURM]


def place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.world_size, world.local_rank, world.local_world_size


@pytest.mark.parametrize("env", LAUNCHERS)
def test_every_launcher_is_understood(env: dict[str, str]) -> None:
    assert place(find_world(environment=env)) == (5, 8, 1, 4)


@pytest.mark.parametrize("env", LAUNCHERS)
def test_ranks_of_a_job_agree_on_its_name(env: dict[str, str]) -> None:
    rank, _, local, *_ = env
    other = {**env, rank: "4", local: "0"}
    assert find_world(environment=env).job == find_world(environment=other).job


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TORCHRUN, "MASTER_PORT"),
        (TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_STEP_ID"),
    ],
)
def test_other_jobs_have_other_names(env: dict[str, str], name: str) -> None:
    assert find_world(environment=env).job != find_world(environment={**env, name: "99"}).job


def test_without_a_launcher_the_process_is_alone() -> None:
    assert place(find_world(environment={})) == (0, 1, 0, 1)


def test_a_shell_inside_an_allocation_is_no_rank() -> None:
    env = {k: v for k, v in SLURM.items() if "STEP" not in k}
    assert place(find_world(environment={**env, "SLURM_NTASKS": "8"})) == (0, 1, 0, 1)


def test_torchrun_wins_over_the_mpi_that_started_it() -> None:
    mpi = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    assert find_world(environment={**mpi, **TORCHRUN}).rank == 5


@pytest.mark.parametrize("env", LAUNCHERS)
def test_what_is_missing_or_wrong_is_named(env: dict[str, str]) -> None:
    rank, _, local, *_ = env
    with pytest.raises(UsageError, match=local):
        find_world(environment={k: v for k, v in env.items() if k != local})
    with pytest.raises(UsageError, match=f"{rank}=x5"):
        find_world(environment={**env, rank: "x5"})
    with pytest.raises(UsageError, match="rank 8 is not in a world of 8"):
        find_world(environment={**env, rank: "8"})


def test_arguments_win() -> None:
    world = find_world(rank=1, world_size=3, environment=TORCHRUN)
    assert place(world) == (1, 3, 0, 1)
    # Not one of torchrun's job any more: it must not meet its ranks under the same name.
    assert world.job != find_world(environment=TORCHRUN).job
    assert find_world(job="mine", environment=TORCHRUN).job == "mine"
    with pytest.raises(UsageError, match="both rank and world_size"):
        find_world(rank=1, environment=TORCHRUN)
    with pytest.raises(UsageError, match="local rank 4 of 2"):
        find_world(rank=0, world_size=4, local_rank=4, local_world_size=2, environment={})


@pytest.mark.multi
def test_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import dataclasses, json, pathlib, sys\n"
        "from nostall.world import find_world\n"
        "w = find_world()\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / f'{{w.rank}}.json'\n"
        "path.write_text(json.dumps(dataclasses.asdict(w)))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, "--nproc-per-node=2", str(program)],
        check=True,
        timeout=90,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    worlds = [World(**json.loads((tmp_path / f"{r}.json").read_text())) for r in range(2)]
    assert [place(w) for w in worlds] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert worlds[0].job == worlds[1].job
