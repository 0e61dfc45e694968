"""The rank of this process and the size of its job, found from the launcher's environment."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nostall.base import _process as process
from nostall.errors import UsageError

_log = logging.getLogger("nostall")

SECONDS_TO_MEET = 120.0  # that ranks wait for the others when they begin

AllGather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class World:
    """This process among all of the job, and among those of its node.

    `job` is the same for all ranks of this job on this node, and different for every other job.
    `unknown` is empty, or says why nothing tells which ranks share the node: then the local rank is
    0 of 1 and stands for any (nostall.job._place finds it).
    `processes` is None, or the number of processes of the job where the caller names other ranks than
    theirs, as with tensor parallelism: several may have one, so the local rank is of processes.
    `of_node`: the end of `job` that other nodes of the job do not have, which names a process here.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str
    unknown: str = ""
    processes: int | None = None
    of_node: str = ""

    @property
    def most_here(self) -> int:
        """Ranks of the node, or processes; as many as there can be where nothing tells."""
        if self.unknown:
            return self.processes or self.world_size
        return self.local_world_size


# Launcher: (rank, size, local rank, local size, names that together identify the job on all nodes).
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


# Names the launcher's server on this node: two of Open MPI 5 that have one number, each in a container
# of its own, call their jobs by one name.
_SERVERS = {"Open MPI": "PMIX_SERVER_URI41"}


def find_world(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    job: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> World:
    """This process's place in its job; it meets no other rank.

    Arguments win over an initialised torch.distributed, that over jax.distributed, that over torchrun's
    variables, then Open MPI's, MPICH's and Slurm's (under srun); without any of them the process is
    alone. RANK and WORLD_SIZE without LOCAL_RANK and LOCAL_WORLD_SIZE, as scripts set them for
    torch.distributed, are completed from the variables of the launcher beside them.

    Raises:
        UsageError: values that are missing or do not go together, with the variable's name.
    """
    given = (rank, world_size, local_rank, local_world_size)
    if (rank is None) != (world_size is None):
        raise UsageError("give both rank and world_size, or neither")
    env = _given(environment)
    try:
        world = _found(env)
    except UsageError:
        if None in (*given, job):
            raise
        world = _alone()
    placed = local_rank is not None and local_world_size is not None
    if rank is not None and world_size is not None:
        world = _named(world, rank, world_size, local_world_size, env)
    world = dataclasses.replace(
        world,
        local_rank=world.local_rank if local_rank is None else local_rank,
        local_world_size=world.local_world_size if local_world_size is None else local_world_size,
        job=world.job if job is None else job,
        unknown="" if placed else world.unknown,
        of_node=world.of_node if job is None else "",
    )
    if not 0 <= world.rank < world.world_size:
        raise UsageError(f"rank {world.rank} is not in a world of {world.world_size}")
    processes = world.processes or world.world_size
    if not 0 <= world.local_rank < world.local_world_size <= processes:
        raise UsageError(
            f"local rank {world.local_rank} of {world.local_world_size} is not possible in a world "
            f"of {processes}"
        )
    return world


def _found(env: Mapping[str, str]) -> World:
    """The place by what runs in this process, else by the launcher's variables."""
    group = joined_group()
    if group is None:
        return _apart(from_environment(env))
    try:
        launched = _apart(from_environment(env))
    except UsageError:  # what the variables say does not matter where it does not go with the group
        launched = _alone()
    if (launched.rank, launched.world_size) == (group.rank, group.world_size):
        if not launched.unknown:
            return launched
        return dataclasses.replace(launched, job=_drawn_name() or launched.job)
    if group.world_size == 1:
        return _alone()
    return World(
        rank=group.rank,
        world_size=group.world_size,
        local_rank=0,
        local_world_size=1,
        job=_drawn_name() or launched.job,
        unknown=f"{group.name} has {group.world_size} ranks, and no launcher's variables go with them",
    )


def _named(
    found: World, rank: int, world_size: int, local_world_size: int | None, env: Mapping[str, str]
) -> World:
    """The place of a rank that the caller names, which may be that of a part of the processes."""
    if (rank, world_size) == (found.rank, found.world_size):
        return found
    if local_world_size is not None:
        several = local_world_size > 1
        name = f"{_shared(found, env)} of {world_size}" if several else f"{found.job}-rank{rank}"
        return World(rank, world_size, 0, 1, name)
    if found.world_size > 1 and world_size <= found.world_size:
        processes = found.world_size if world_size < found.world_size else None
        return dataclasses.replace(found, rank=rank, world_size=world_size, processes=processes)
    return World(rank, world_size, 0, 1, f"{found.job}-rank{rank}")


def _shared(found: World, env: Mapping[str, str]) -> str:
    """The job's name that all processes have which one task of a launcher starts."""
    if found.world_size == 1:
        with contextlib.suppress(UsageError):  # variables that do not matter, as in _found
            launched = from_environment(env)
            return found.job if launched is _SINGLE else launched.job
    return found.job


@dataclass(frozen=True)
class Group:
    """The ranks that a library joined in this process, and the library's name."""

    name: str
    rank: int
    world_size: int


def joined_group() -> Group | None:
    """That of torch.distributed or jax.distributed, where one is initialised; neither is imported."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
        return Group("torch.distributed", rank, size)
    jax = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if jax is not None and is_initialized is not None and is_initialized():
        return Group("jax.distributed", int(jax.process_index()), int(jax.process_count()))
    return None


def _drawn_name() -> str:
    """A name for this job alone, which its first rank leaves in torch's store; "" without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    store = distributed.distributed_c10d._get_default_store()
    drawn = f"torch.distributed {os.urandom(8).hex()}"
    try:
        return bytes(store.compare_set("nostall/job", "", drawn)).decode()
    except Exception as error:  # a store that cannot
        _log.debug("the job has no name in the store of torch.distributed: %s", error)
        return ""


def refuse_late_group(world_size: int, what: str) -> None:
    """Refuses what was made for one rank alone, where torch or JAX, later, has several.

    Ranks that each believe to be alone would train on the same samples, and nothing else would say so.

    Raises:
        UsageError: torch.distributed or jax.distributed has other ranks beside this process.
    """
    group = joined_group()
    if world_size == 1 and group is not None and group.world_size > 1:
        raise UsageError(
            f"this {what} was made as rank 0 of 1, and {group.name}, which was initialised later, "
            f"has rank {group.rank} of {group.world_size} here: make the {what} afterwards (in "
            "Lightning, in train_dataloader), or pass rank=0 and world_size=1 if this is meant"
        )


def find_address(
    world: World, environment: Mapping[str, str] | None = None
) -> tuple[str, int] | None:
    """Where rank 0 can wait for the others, the same on all ranks; None if nothing says it.

    MASTER_ADDR and MASTER_PORT win. Otherwise the host is this one if all ranks are here, or the
    first of the Slurm step, and the port follows from the job's name; that of a single rank is any
    free one.
    """
    env = _given(environment)
    all_here = world.local_world_size == world.world_size
    host = env.get("MASTER_ADDR")
    if host is None and all_here:
        host = "127.0.0.1"
    if host is None and under_srun(env):
        host = _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if host is None:
        return None
    if "MASTER_PORT" in env:
        return host, _number(env, "MASTER_PORT")
    if world.world_size == 1:
        import socket

        with socket.socket() as free:
            free.bind(("", 0))
            return host, int(free.getsockname()[1])
    name = world.job if all_here else world.job.removesuffix(world.of_node)
    if not name:
        return None
    import hashlib

    # Below the ports that the system assigns to sockets without one.
    return host, 15_000 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 17_000


def _given(environment: Mapping[str, str] | None) -> dict[str, str]:
    """An empty variable counts as one that is not set."""
    env = os.environ if environment is None else environment
    return {name: value for name, value in env.items() if value}


def _first_host(nodes: str) -> str | None:
    """Slurm writes "gpu[07-09,12],login1"; hosts of several numbers are "rack[1-2]n[1-4]"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return None if first is None else re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def from_environment(env: Mapping[str, str]) -> World:
    """The place that a launcher's variables say, of which none is empty."""
    for launcher, (rank, size, local_rank, local_size, job) in _LAUNCHERS.items():
        if launcher == "Slurm" and not under_srun(env):
            continue
        if launcher == "MPICH" and under_srun(env) and not {local_rank, local_size} <= env.keys():
            continue  # srun itself, which sets the other two for any program (--mpi=pmi2)
        if rank not in env or size not in env:
            continue
        world_size = _number(env, size)
        alone = world_size == 1
        if launcher == "torchrun" and local_size not in env and "LOCAL_SIZE" in env:
            local_size = "LOCAL_SIZE"  # as DeepSpeed's launcher has it
        missing = [] if alone else [name for name in (local_rank, local_size) if name not in env]
        if launcher == "torchrun" and missing:
            # Set by hand, for torch.distributed, beside the variables of another launcher.
            beside = from_environment({k: v for k, v in env.items() if k != rank})
            if beside.world_size == world_size:
                return dataclasses.replace(beside, rank=_number(env, rank))
        names = [f"{name}={env[name]}" for name in job if name in env]
        named = " ".join([launcher, *names]) if names else ""
        if not names:  # ranks of a node descend from one process
            of_node = f"{launcher} {_launching_process(rank)}"
        else:
            server = env.get(_SERVERS.get(launcher, ""))
            of_node = f" {server}" if server else ""
        known = not alone and not missing
        return World(
            rank=_number(env, rank),
            world_size=world_size,
            local_rank=_number(env, local_rank) if known else 0,
            local_world_size=1
            if not known
            else _tasks_here(env, local_size)
            if launcher == "Slurm"
            else _number(env, local_size),
            job=named + of_node,
            unknown=f"{rank} and {size} are set without {' and '.join(missing)}" if missing else "",
            of_node=of_node,
        )
    return _SINGLE


_SINGLE = World(0, 1, 0, 1, "single")


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has started this process, also as its only rank.

    Raises:
        UsageError: a variable is no number.
    """
    return from_environment(_given(environment)) is not _SINGLE


def _alone() -> World:
    return _apart(_SINGLE)


def _apart(world: World) -> World:
    """With a name of this process alone, where it is the only rank: from a shell that a launcher
    started (``srun --pty bash``) several jobs may be started, which all have its variables."""
    if world.world_size > 1:
        return world
    return dataclasses.replace(world, job=f"{world.job} {os.getpid()} {process.stat('self')[19]}")


def under_srun(env: Mapping[str, str]) -> bool:
    """Shells of sbatch and salloc have Slurm's variables too, but srun alone sets a step."""
    return "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdigit():
        raise UsageError(f"{name}={value} is not a number" if value else f"{name} is not set")
    return int(value)


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
    node = _number(env, "SLURM_NODEID")
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
        if parent == 0 or variable not in process.environment(pid):
            return f"launched by {pid} {fields[19]}"
        pid = parent
