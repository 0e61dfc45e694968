"""The cores that one rank of a node may use, by its affinity mask and the quotas of control groups."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nostall.base import _process as process
from nostall.base._disks import mounts
from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.job._world import World, from_environment


@dataclass(frozen=True)
class Cores:
    """How many one rank may use, at least one; `why` says what leaves it fewer than the machine has."""

    count: int
    why: str


def cores_of_rank(ranks_here: int) -> int:
    """As many of the node's cores as this one of its ranks may use."""
    return share(ranks_here).count


def share(ranks_here: int, *, proc: str = "/proc") -> Cores:
    """The least of what the affinity mask and the CPU quotas leave to this one of the node's ranks."""
    mine = os.sched_getaffinity(0)
    sharing = sharers(mine, ranks_here, cpuset(proc)) if ranks_here > 1 else 1
    count = len(mine) // sharing
    why = ""
    if count < (machine := os.cpu_count() or count):
        why = f"{len(mine)} of the machine's {counted(machine, 'core')} may be used"
        why += f", by {counted(sharing, 'rank')}" if sharing > 1 else ""
        why += "; the launcher bound this rank to them" if sharing < ranks_here else ""
    if (limit := quota(proc)) is not None and math.ceil(limit[0]) // ranks_here < count:
        count = math.ceil(limit[0]) // ranks_here
        why = f"{limit[1]} allows {limit[0]:g} CPU{'' if limit[0] == 1 else 's'}"
        why += f", for {counted(ranks_here, 'rank')}" if ranks_here > 1 else ""
    return Cores(max(1, count), why)


def sharers(mine: Set[int], ranks_here: int, own: Set[int]) -> int:
    """How many of the node's ranks use cores of `mine`, this one with them.

    They are counted where an ancestor is seen to have started them all, once none has yet to be bound.
    Else the nearest ancestor with other cores than `mine` was the last to choose: if for a rank, which
    its child is, then it is taken to have divided its cores evenly; if for what starts the ranks, or
    if there is none, all of them have `mine`. `own` are the cpuset's cores, none if it is not known.
    """
    pid = os.getpid()
    try:
        while (parent := int(process.stat(pid)[1])) > 0:
            around = os.sched_getaffinity(parent)
            chosen = not around <= mine
            ranks = _started_with(pid, parent)
            settled = not (chosen and any(around <= cores for cores in ranks.values()))
            if settled and len(ranks) == ranks_here:
                return max(1, sum(not mine.isdisjoint(cores) for cores in ranks.values()))
            if chosen:
                is_rank = pid == os.getpid() or _is_this_rank(pid, ranks_here)
                return of_even_parts(ranks_here, mine, around, own) if is_rank else ranks_here
            pid = parent
    except OSError:  # no /proc, or not all of it
        pass
    return ranks_here


def of_even_parts(ranks_here: int, mine: Set[int], around: Set[int], own: Set[int]) -> int:
    """How many ranks share `mine`, if those `around` that may be used were divided evenly among all."""
    whole = (around | mine) & own or around | mine
    return max(1, min(ranks_here, int(ranks_here * len(mine) / len(whole) + 0.5)))


def _started_with(pid: int, parent: int) -> dict[int, Set[int]]:
    """The cores of a job's ranks, as far as it is seen that a process started them with `pid`."""
    found: dict[int, Set[int]] = {}
    me = _place(process.environment(pid))
    for child in process.children(parent):
        with contextlib.suppress(OSError):  # it has ended
            there = _place(process.environment(child))
            if me and there and there.job == me.job:
                found[there.rank] = os.sched_getaffinity(child)
    return found


def _is_this_rank(pid: int, ranks_here: int) -> bool:
    """Whether a launcher started a process as this rank, not as another that started this one."""
    me, it = _place(os.environ), _place(process.environment(pid))
    if not me or not it or it.most_here != ranks_here:
        return False
    return (it.rank, it.world_size) == (me.rank, me.world_size)


def _place(environment: Mapping[str, str]) -> World | None:
    try:
        return from_environment({name: value for name, value in environment.items() if value})
    except UsageError:
        return None


def quota(proc: str = "/proc") -> tuple[float, Path] | None:
    """The least CPU time that a control group, or one above it, allows, in cores, and its file."""
    found = []
    for group in _groups("cpu", proc):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                words = " ".join((group / name).read_text() for name in names).split()
                allowed, period = map(int, words)
            except (OSError, ValueError):  # no such file, or "max"
                continue
            if allowed > 0:
                found.append((allowed / period, group / names[0]))
    return min(found, default=None)


def cpuset(proc: str = "/proc") -> Set[int]:
    """The cores of the control group's cpuset; empty if nothing tells."""
    for group in _groups("cpuset", proc):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            try:
                spans = (group / name).read_text().split(",")
                ends = [span.strip().partition("-") for span in spans]
                return {n for a, _, b in ends for n in range(int(a), int(b or a) + 1)}
            except (OSError, ValueError):  # no such file, or an empty one
                continue
    return set()


def _groups(controller: str, proc: str) -> list[Path]:
    """The control groups of this process that may have a controller (v1, v2), and those above them."""
    try:
        groups, table = (
            os.fsdecode(Path(proc, name).read_bytes()) for name in ("self/cgroup", "self/mountinfo")
        )
        place: dict[str, PurePosixPath] = {}  # in each hierarchy; that of v2 has no name
        for line in filter(None, groups.split("\n")):
            _, names, path = line.split(":", 2)
            place |= dict.fromkeys(names.split(","), PurePosixPath(path))
        mounted = mounts(table)
    except (OSError, ValueError):  # no /proc, or not as Linux writes it
        return []
    found: list[Path] = []
    for mount in mounted:
        unified = mount.kind == "cgroup2"
        if not unified and not (mount.kind == "cgroup" and controller in mount.options.split(",")):
            continue
        own = place.get("" if unified else controller, PurePosixPath("/"))
        # In a container the mount may show a part of the hierarchy only.
        inside = own.is_relative_to(mount.root) and ".." not in own.parts
        top = Path(mount.place)
        group = top / own.relative_to(mount.root) if inside else top
        found += [at for at in (group, *group.parents) if at.is_relative_to(top)]
    return found
