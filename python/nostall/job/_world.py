"""The rank of this process and the size of its job, found from the launcher's environment."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nostall.base import _process as process
from nostall.base._words import counted
from nostall.errors import UsageError

AllGather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class World:
    """This process among all of the job, and among those of its node.

    `job` is the same for all ranks of this job on this node, and different for every other job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str


# Launcher: (rank, size, local rank, local size, names that together identify the job).
_LAUNCHERS: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "torchrun": (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    "MPICH": (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        (),  # what Hydra sets are numbers of descriptors: they differ between the ranks of a job
    ),
    "Slurm": (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
}


def find_world(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    job: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> World:
    """This process's place in its job.

    Arguments win over an initialised torch.distributed, that over torchrun's variables, then Open
    MPI's, MPICH's and Slurm's (under srun); without any of them the process is alone. RANK and
    WORLD_SIZE without LOCAL_RANK and LOCAL_WORLD_SIZE, as scripts set them for torch.distributed,
    are completed from the variables of the launcher beside them.

    Raises:
        UsageError: values that are missing or do not go together, with the variable's name.
    """
    env = _given(environment)
    found = _from_environment(env)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = int(distributed.get_world_size())
        same = found.world_size == size
        found = World(
            rank=int(distributed.get_rank()),
            world_size=size,
            local_rank=found.local_rank if same else 0,
            local_world_size=found.local_world_size if same else 1,
            job=found.job,
        )
    if rank is None and world_size is None:
        world = found
    elif rank is None or world_size is None:
        raise UsageError("give both rank and world_size, or neither")
    else:
        same = (rank, world_size) == (found.rank, found.world_size)
        world = World(
            rank=rank,
            world_size=world_size,
            local_rank=found.local_rank if same else 0,
            local_world_size=found.local_world_size if same else 1,
            job=found.job if same else f"{found.job}-rank{rank}",
        )
    world = World(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank if local_rank is None else local_rank,
        local_world_size=world.local_world_size if local_world_size is None else local_world_size,
        job=world.job if job is None else job,
    )
    if not 0 <= world.rank < world.world_size:
        raise UsageError(f"rank {world.rank} is not in a world of {world.world_size}")
    if not 0 <= world.local_rank < world.local_world_size <= world.world_size:
        raise UsageError(
            f"local rank {world.local_rank} of {world.local_world_size} is not possible in a world "
            f"of {world.world_size}"
        )
    return world


def refuse_late_group(world_size: int, what: str) -> None:
    """Refuses what was made for one rank alone, where torch.distributed, later, has several.

    Ranks that each believe to be alone would train on the same samples, and nothing else would say so.

    Raises:
        UsageError: torch.distributed has other ranks beside this process.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
    if world_size == 1 and size > 1:
        raise UsageError(
            f"this {what} was made as rank 0 of 1, and torch.distributed, which was initialised later, "
            f"has rank {rank} of {size} here: make the {what} afterwards (in Lightning, in "
            "train_dataloader), or pass rank=0 and world_size=1 if this is meant"
        )


def find_address(
    world: World, environment: Mapping[str, str] | None = None
) -> tuple[str, int] | None:
    """Where rank 0 can wait for the others, the same on all ranks; None if nothing says its host.

    MASTER_ADDR and MASTER_PORT win. Otherwise the host is this one if all ranks are here, or the
    first of the Slurm step, and the port follows from the job's name.
    """
    env = _given(environment)
    host = env.get("MASTER_ADDR")
    if host is None and world.local_world_size == world.world_size:
        host = "127.0.0.1"
    if host is None and under_srun(env):
        host = _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if host is None:
        return None
    if "MASTER_PORT" in env:
        return host, _number(env, "MASTER_PORT", "the launcher or script that set MASTER_ADDR")
    import hashlib

    # Below the ports that the system assigns to sockets without one.
    return host, 15_000 + int(hashlib.sha256(world.job.encode()).hexdigest(), 16) % 17_000


def _given(environment: Mapping[str, str] | None) -> dict[str, str]:
    """An empty variable counts as one that is not set."""
    env = os.environ if environment is None else environment
    return {name: value for name, value in env.items() if value}


def _first_host(nodes: str) -> str | None:
    """Slurm writes "gpu[07-09,12],login1"; hosts of several numbers are "rack[1-2]n[1-4]"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return None if first is None else re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _from_environment(env: Mapping[str, str]) -> World:
    for launcher, (rank, size, local_rank, local_size, job) in _LAUNCHERS.items():
        if launcher == "Slurm" and not under_srun(env):
            continue
        if rank not in env or size not in env:
            continue
        world_size = _number(env, size, launcher)
        alone = world_size == 1
        missing = [name for name in (local_rank, local_size) if name not in env]
        if launcher == "torchrun" and missing and not alone:
            # Set by hand, for torch.distributed, beside the variables of another launcher.
            beside = _from_environment({k: v for k, v in env.items() if k != rank})
            if beside.world_size != world_size:
                raise UsageError(
                    f"{rank} and {size} are set without {' and '.join(missing)}, and no other "
                    f"launcher's variables are there for {counted(world_size, 'rank')}: set them too, "
                    "or pass rank, world_size, local_rank and local_world_size to the loader"
                )
            return dataclasses.replace(beside, rank=_number(env, rank, launcher))
        names = [f"{name}={env[name]}" for name in job if name in env]
        return World(
            rank=_number(env, rank, launcher),
            world_size=world_size,
            local_rank=0 if alone else _number(env, local_rank, launcher),
            local_world_size=1
            if alone
            else _tasks_here(env, local_size)
            if launcher == "Slurm"
            else _number(env, local_size, launcher),
            # Ranks of a node descend from one process where the launcher names no job.
            job=f"{launcher} " + (" ".join(names) or _launching_process(rank)),
        )
    return World(0, 1, 0, 1, f"single {os.getpid()} {process.stat('self')[19]}")


def under_srun(env: Mapping[str, str]) -> bool:
    """Shells of sbatch and salloc have Slurm's variables too, but srun alone sets a step."""
    return "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    if name not in env:
        raise UsageError(
            f"{launcher} did not set {name}: pass rank, world_size, local_rank and "
            "local_world_size to the loader"
        )
    if not env[name].isdigit():
        raise UsageError(f"{name}={env[name]} is not a number")
    return int(env[name])


def _tasks_here(env: Mapping[str, str], name: str) -> int:
    """Slurm writes "4(x2),3" for two nodes of four tasks each and one of three."""
    runs = []
    for run in env.get(name, "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run)
        if not match:
            raise UsageError(f"{name}={env.get(name)} is not a list of numbers of tasks")
        runs.append((int(match[1]), int(match[2] or 1)))
    if len({tasks for tasks, _ in runs}) == 1:
        return runs[0][0]
    node = _number(env, "SLURM_NODEID", "Slurm")
    for tasks, nodes in runs:
        if node < nodes:
            return tasks
        node -= nodes
    raise UsageError(
        f"SLURM_NODEID={env['SLURM_NODEID']} is beyond the nodes of {name}={env[name]}"
    )


def _launching_process(variable: str) -> str:
    """The nearest ancestor that is not a rank itself, by its pid and start: unique on the node.

    Shells and tracers between the launcher and a rank have the rank's `variable` in their environment.
    """
    pid = os.getppid()
    if pid == 0:
        return f"launched from outside of {os.readlink('/proc/self/ns/pid')}"
    while True:
        fields = process.stat(pid)
        parent = int(fields[1])
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # of another user
            variables = []
        if parent == 0 or not any(v.startswith(f"{variable}=".encode()) for v in variables):
            return f"launched by {pid} {fields[19]}"
        pid = parent
