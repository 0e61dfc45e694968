"""torch.distributed under srun and mpirun, which do not set its environment variables."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from nostall.errors import UsageError
from nostall.job._world import find_address, find_world, is_launched


def init(**named: Any) -> None:
    """``torch.distributed.init_process_group("nostall", ...)`` under any launcher.

    Rank, world and the address of rank 0 are those of torchrun, srun, or mpirun of Open MPI and MPICH.
    `named` are other arguments of ``init_process_group``.

    Raises:
        UsageError: nothing says where rank 0 is (several nodes under mpirun, without MASTER_ADDR, or
            without MASTER_PORT under MPICH's).
    """
    world = find_world()
    address = find_address(world)
    if address is None:
        raise UsageError(
            f"nothing says where rank 0 of {world.world_size} waits for the others: set MASTER_ADDR "
            "to its host, and MASTER_PORT to a free port there, on all ranks"
        )
    dist.init_process_group(
        "nostall",
        init_method=f"tcp://{address[0]}:{address[1]}",
        rank=world.rank,
        world_size=world.world_size,
        **named,
    )


def fill_environment() -> None:
    """Sets what ``init_process_group("nostall")`` reads, unless RANK or WORLD_SIZE is set.

    Nothing is set if no launcher is found, or if the address of rank 0 is unknown.
    """
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        return
    try:
        if not is_launched():
            return
        world = find_world()
    except UsageError:  # the loader says so where it matters
        return
    address = find_address(world)
    if address is not None:
        os.environ.update(
            RANK=str(world.rank),
            WORLD_SIZE=str(world.world_size),
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
        )
