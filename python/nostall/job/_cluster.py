"""The nodes of a job: which rank is on which node, what each node keeps, how ranks are reached."""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.base import _options as options
from nostall.base import _process as process
from nostall.base._sizes import TierSpec
from nostall.base._words import counted
from nostall.errors import Error, UsageError
from nostall.job import _notes as notes
from nostall.job import _secret as secret
from nostall.job._rendezvous import exposed, initialised_store
from nostall.job._world import SECONDS_TO_MEET, AllGather, World

_log = logging.getLogger("nostall")
LIBRARY = Path(__file__).parents[1] / "nostall_ucx.so"


@dataclass(frozen=True)
class Cluster:
    """All nodes of the job, the same on every rank.

    `node_of_rank` and `addresses` have one entry per rank, `tiers` one per node: kind and capacity in
    bytes of each of its tiers.
    `exchanges` says whether samples could travel, also where no node has tiers for them.
    `transport` is None if they do not; `problem` says why, unless the user asked for it.
    """

    node: int
    node_of_rank: list[int]
    tiers: list[list[tuple[str, int]]]
    addresses: list[bytes]
    secret: bytes
    exchanges: bool
    transport: _native.PeerTransport | None
    problem: str = ""

    @property
    def capacities(self) -> list[int]:
        """Bytes of all tiers of each node."""
        return [sum(capacity for _, capacity in tiers) for tiers in self.tiers]

    def settle(self, world: World) -> World:
        """`world` with this rank's place on its node as found here."""
        mine = [r for r, node in enumerate(self.node_of_rank) if node == self.node]
        return replace(world, local_rank=mine.index(world.rank), local_world_size=len(mine))


def node_identity() -> str:
    """The same for all processes that can share memory, and for no others.

    They find each other in their network namespace. NOSTALL_NODE overrides it, so that one machine
    can stand for several.
    """
    if name := options.value("job.node"):
        return f"named {name}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net")]
    return " ".join((boot, *spaces))


def walls(nodes: Mapping[int, str]) -> str:
    """Describes the namespaces that keep ranks of one machine apart.

    `nodes` has the node_identity of each rank.
    """
    first: dict[str, int] = {}
    for rank, node in nodes.items():
        machine, *spaces = node.split()
        if machine == "named":  # apart by the user's wish
            continue
        other = first.setdefault(machine, rank)
        apart = [one.partition(":")[0] for one in spaces if one not in nodes[other].split()]
        if apart:
            # Those whom the launcher counts on one node find each other by their network.
            share = "share" if "net" in apart else "may share"
            return (
                f"ranks {other} and {rank} are on one machine in other namespaces "
                f"({', '.join(apart)}), and {share} no cache: start one container a node, and the "
                "ranks in it"
            )
    return ""


def ucx() -> tuple[str, str, str]:
    """The library that speaks to UCX, and the transports and devices to use; empty for all."""
    library = options.value("job.ucx_library") or str(LIBRARY)
    return library, options.value("job.ucx_tls"), options.value("job.ucx_devices")


def transport() -> _native.PeerTransport:
    """The way to other nodes; starts nothing.

    Raises:
        UsageError, PeerError: UCX cannot be used, with the reason and the remedy.
    """
    named = options.value("job.ucx_library")
    if "/" in named and not os.path.exists(named):
        raise UsageError(
            f"samples cannot travel between nodes, for NOSTALL_UCX_LIBRARY={named} is not there: name "
            "another file, or leave it empty for nostall_ucx.so of the package"
        )
    return _native.PeerTransport(*ucx())


def spans_nodes(world: World) -> bool:
    """Whether other nodes take part, as far as the launcher says."""
    if world.world_size == 1:
        return False
    return world.local_world_size < world.world_size or bool(options.value("job.node"))


def check_alike(world: World, name: str, settings: Mapping[str, Any]) -> None:
    """Compares `settings` with those of a rank of the node that arrived before, and waits for none.

    Each rank leaves its own in notes, which end with it: torch's store may have those of ranks that
    were killed. Those that are older than this process may be of a program that the ranks ran before,
    which has not ended on all: where they differ, their process gets the time to. Ranks that walls
    part have none in common, and are compared through that store. Ranks of several nodes are compared
    where they meet (`join`). Nothing is compared if notes cannot be left: the comparison helps to find
    mistakes, but must not end a training.

    Args:
        world: of the loader.
        name: the same for the loaders to compare, and for no others of a world of this size.
        settings: what they must have alike, plain values.

    Raises:
        UsageError: they differ, with the first that does and both values.
    """
    if world.processes is not None or world.local_world_size == 1:
        return
    name = f"{name} of {world.world_size}"
    _look_over_walls(world, name, settings)
    try:
        notes.note(world.job, world.local_rank, name, {"rank": world.rank, "settings": settings})
    except OSError as error:
        if pid := notes.starter(world.job, world.local_rank):
            # No error: that process may only wait for this one, its loaders closed.
            _log.warning(
                "rank %d (process %d) made loaders and started this process, which makes some of that "
                "rank too: where both read, pass rank=0 and world_size=1, or another job= if each rank "
                "starts one",
                world.rank,
                pid,
            )
            return
        _log.debug("the settings of the ranks of the node are not compared: %s", error)
        return
    # Its own was left before it looks, so that no two ranks miss each other.
    for local_rank in range(world.local_world_size):
        if local_rank != world.local_rank and _agrees(world, local_rank, name, settings):
            return


def _agrees(world: World, local_rank: int, name: str, settings: Mapping[str, Any]) -> bool:
    """Whether that rank of the node is there, with the same settings; raises if it has others."""
    deadline = time.monotonic() + SECONDS_TO_MEET
    first: notes.Note | None = None
    while True:
        try:
            first = notes.noted(world.job, local_rank, name)
        except BlockingIOError as error:  # what was read before is there still
            _log.debug("the settings of local rank %d are not read: %s", local_rank, error)
        if first is None:
            return False
        try:
            compare(first.content["rank"], first.content["settings"], world.rank, settings)
            return True
        except UsageError as error:
            if first.left >= process.began():
                raise
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{error}; or end process {first.process}, which has not ended in "
                    f"{SECONDS_TO_MEET:g} s, if it is of a program that the ranks ran before"
                ) from error
        notes.await_change(world.job, local_rank, first.process, deadline - time.monotonic())


def _look_over_walls(world: World, name: str, settings: Mapping[str, Any]) -> None:
    """Ranks that the launcher counts on one node do not meet, so nothing else brings this to light."""
    store = None if spans_nodes(world) else initialised_store(world.world_size)
    if store is None:
        return
    mine: dict[str, Any] = {"rank": world.rank, "node": node_identity(), "job": world.job}
    mine["settings"] = settings
    try:
        first = json.loads(store.compare_set(f"nostall/{name}/node", "", json.dumps(mine)))
    except Exception as error:  # whatever a store raises
        _log.debug("the nodes of the ranks are not compared: %s", error)
        return
    if words := walls({first["rank"]: first["node"], world.rank: mine["node"]}):
        _log.warning("%s", words)
        if first["job"] == world.job:  # and not of a start before
            compare(first["rank"], first["settings"], world.rank, settings)


def compare(first: int, theirs: Mapping[str, Any], rank: int, settings: Mapping[str, Any]) -> None:
    """Compares the settings of two ranks.

    Raises:
        UsageError: they differ, with the first that does and both values.
    """
    for key, value in settings.items():
        if theirs.get(key) != value:
            raise UsageError(
                f"the ranks of the job disagree: {key} is {theirs.get(key)!r} on rank {first} and "
                f"{value!r} on rank {rank}; give all ranks the same arguments"
            )


def join(
    world: World,
    tiers: Sequence[TierSpec],
    allgather: AllGather,
    settings: Mapping[str, Any] | None = None,
    *,
    alone: bool = False,
) -> Cluster:
    """Meets the other ranks; every rank of the job must call it.

    If one of them cannot exchange samples (no UCX) or is to stay alone, none does, and rank 0 logs
    the reason. Where no node has tiers there is nothing to exchange.

    Args:
        world: this rank's place.
        tiers: of this node.
        allgather: of the job.
        settings: what all ranks must have alike, plain values.
        alone: this rank is not to exchange samples.

    Raises:
        PeerError: ranks are missing.
        UsageError: the ranks do not agree.
    """
    way: _native.PeerTransport | None = None
    problem = ""
    if not alone:
        # A peer that disconnects is not an error here, and has a message of its own.
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        try:
            way = transport()
        except Error as error:
            problem = str(error)
    mine: dict[str, Any] = {
        "rank": world.rank,
        "node": node_identity(),
        "tiers": [(t.kind, t.capacity) for t in tiers],
        "address": base64.b64encode(way.address if way else b"").decode(),
        "problem": problem,
        "alone": alone,
        "settings": settings or {},
    }
    readers = exposed(allgather)
    mine["secret"] = secret.offer(world.rank, readers)
    parts = [json.loads(part) for part in allgather(json.dumps(mine).encode())]
    if len(parts) != world.world_size or [p["rank"] for p in parts] != list(range(len(parts))):
        raise UsageError(
            f"the rendezvous brought {counted(len(parts), 'rank')} together, not the "
            f"{world.world_size} of this job: its allgather must return one entry per rank, "
            "in rank order"
        )
    for part in parts[1:]:
        compare(0, parts[0]["settings"], part["rank"], part["settings"])
    if world.rank == 0 and (words := walls({p["rank"]: p["node"] for p in parts})):
        _log.warning("%s", words)
    names = list(dict.fromkeys(p["node"] for p in parts))
    node_of_rank = [names.index(p["node"]) for p in parts]
    kept: list[list[tuple[str, int]]] = [[]] * len(names)
    for node, part in zip(node_of_rank, parts, strict=True):
        kept[node] = [(kind, capacity) for kind, capacity in part["tiers"]]
    many = len(names) > 1 and any(capacity for tiers in kept for _, capacity in tiers)
    apart = {p["rank"]: 'it has peers="off"' if p["alone"] else p["problem"] for p in parts}
    problems = [f"rank {rank}: {why}" for rank, why in apart.items() if why]
    reason = problems[0] if many and problems and not all(p["alone"] for p in parts) else ""
    if reason and world.rank == 0:
        _log.warning("samples do not travel between nodes: %s", reason)
    return Cluster(
        node=node_of_rank[world.rank],
        node_of_rank=node_of_rank,
        tiers=kept,
        addresses=[base64.b64decode(p["address"]) for p in parts],
        secret=secret.settle(world.rank, [p["secret"] for p in parts], readers),
        exchanges=not problems,
        transport=way if many and not problems else None,
        problem=reason,
    )
