"""Ranks of a job that are loaders of one process."""

from __future__ import annotations

import itertools
import os
from typing import Any

_made = itertools.count()


def one_rank(rank: int, world: int) -> dict[str, Any]:
    """Arguments of a DataLoader that is one rank of `world`, on a node of its own without peers."""
    job = f"rank {rank} of {world}: {os.getpid()} {next(_made)}"
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": 0,
        "local_world_size": 1,
        "job": job,
    }
