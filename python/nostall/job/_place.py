"""The place of this process on its node, where the launcher does not say it: the ranks meet for it."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from typing import Any

from nostall.errors import PeerError, UsageError
from nostall.job._world import SECONDS_TO_MEET, World, find_world, joined_group

_REMEDY = "pass local_rank=, local_world_size= and job=, the same job for all ranks of a node"

_log = logging.getLogger("nostall")

# A store of torch, and what the ranks said when they met there. Not kept alive: its server has the
# port of the next group. Threads take turns, so that a rank comes once.
_found: tuple[weakref.ref[Any], list[str]] | None = None
_lock = threading.Lock()


def _begin_anew() -> None:
    """The thread that had the lock is not in a forked child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def find_place(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    job: str | None = None,
    one_each: bool = False,
    timeout: float = SECONDS_TO_MEET,
) -> World:
    """`find_world`, with the place on the node found too.

    Where nothing says it, all ranks of torch.distributed call this, and meet: each says what its node
    is. Later calls know it, and wait for none.

    Args:
        one_each: each rank that a caller names is one process, and all processes call this.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: as of `find_world`; or nothing tells which ranks share a node.
        PeerError: other ranks did not come in time.
    """
    world = find_world(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        job=job,
    )
    if one_each:
        world = dataclasses.replace(world, processes=None)
    # Processes that may have one rank share by the node's memory alone, and not all of them come.
    if not world.unknown or world.processes is not None:
        return world
    from nostall.job._cluster import node_identity
    from nostall.job._rendezvous import initialised_store

    group, store = joined_group(), initialised_store()
    if group is not None and store is None:
        if group.rank == 0:
            _log.warning(
                "%s: each process takes the cores and tiers of a node for itself; if several share a "
                "node, %s",
                world.unknown,
                _REMEDY,
            )
        return dataclasses.replace(world, unknown="")
    if group is None or store is None:
        raise UsageError(
            f"{world.unknown}, so that nothing tells which ranks share a node: initialise "
            f"torch.distributed before, or {_REMEDY}"
        )
    nodes = _nodes_of_ranks(store, group.rank, group.world_size, node_identity(), timeout)
    mine = nodes[group.rank]
    here = [other for other, node in enumerate(nodes) if node == mine]
    # Nodes on one machine, by NOSTALL_NODE, do not share memory.
    name = f"{world.job} node {list(dict.fromkeys(nodes)).index(mine)}"
    return dataclasses.replace(
        world,
        local_rank=here.index(group.rank) if local_rank is None else local_rank,
        local_world_size=len(here) if local_world_size is None else local_world_size,
        job=name if job is None else job,
        unknown="",
    )


def _nodes_of_ranks(store: Any, rank: int, size: int, mine: str, timeout: float) -> list[str]:
    from nostall.job._meeting import meet

    global _found
    with _lock:
        if _found is None or _found[0]() is not store:
            try:
                met = meet(store, rank, size, "nodes of ranks", mine.encode(), timeout)
            except PeerError as error:
                raise PeerError(f"{error}; make this on all {size} ranks, or {_REMEDY}") from error
            _found = weakref.ref(store), [part.decode() for part in met.parts]
        return _found[1]
