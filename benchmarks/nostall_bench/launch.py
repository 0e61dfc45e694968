"""The environment in which torchrun would start the ranks of one node."""

from __future__ import annotations

import os


def environment(rank: int, ranks: int, job: str) -> dict[str, str]:
    """This process's, and that of one of `ranks` on this node; `job` is what no other job has.

    One thread of OpenMP, since the ranks share the cores.
    """
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": job,
        "OMP_NUM_THREADS": "1",
    }
