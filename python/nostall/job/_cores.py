"""The cores that one rank of a node may use, by its affinity mask and the quotas of control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nostall.base import _process as process
from nostall.base._disks import mounts
from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.job._world import from_environment


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
    around = divided(mine, ranks_here)
    sharing = ranks_here if around is None else sharers(ranks_here, mine, around, cpuset(proc))
    count = len(mine) // sharing
    why = ""
    if count < (machine := os.cpu_count() or count):
        why = f"{len(mine)} of the machine's {counted(machine, 'core')} may be used"
        why += f", by {counted(sharing, 'rank')}" if sharing > 1 else ""
        why += "; the launcher bound this rank to them" if around and ranks_here > 1 else ""
    if (limit := quota(proc)) is not None and math.ceil(limit[0]) // ranks_here < count:
        count = math.ceil(limit[0]) // ranks_here
        why = f"{limit[1]} allows {limit[0]:g} CPU{'' if limit[0] == 1 else 's'}"
        why += f", for {counted(ranks_here, 'rank')}" if ranks_here > 1 else ""
    return Cores(max(1, count), why)


def sharers(ranks_here: int, mine: Set[int], around: Set[int], own: Set[int]) -> int:
    """How many ranks use the cores `mine`, if a launcher divided those `around` evenly among all.

    Of those it could use no others than the cpuset's, `own`, which is empty if it is not known.
    """
    whole = len(around & own) or len(around)
    return max(1, min(ranks_here, int(ranks_here * len(mine) / whole + 0.5)))


def divided(mine: Set[int], ranks_here: int) -> Set[int] | None:
    """The cores of which each rank was given a part; None if the ranks inherited what they have.

    The nearest ancestor with more cores was the last to choose. Was it for a rank, so has its child
    a rank's environment, or is this process; else the child is what started the ranks.
    """
    pid = os.getpid()
    try:
        while (parent := int(process.stat(pid)[1])) > 0:
            around = os.sched_getaffinity(parent)
            if len(around) > len(mine):
                return around if pid == os.getpid() or _is_rank(pid, ranks_here) else None
            pid = parent
    except OSError:  # no /proc, or not all of it
        pass
    return None


def _is_rank(pid: int, ranks_here: int) -> bool:
    """Whether a launcher started a process as one of so many ranks of this node."""
    try:
        return from_environment(process.environment(pid)).most_here == ranks_here
    except UsageError:
        return False


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
