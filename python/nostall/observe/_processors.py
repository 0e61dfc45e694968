"""Who had the cores of a process while it recorded, as the record of a run has it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from nostall.base import _process as process
from nostall.job._cores import quota

_TICKS = os.sysconf("SC_CLK_TCK")
# Of the columns of /proc/stat: all but those of guests, which are in the first two, and those of
# programs. Interrupts may serve anybody, this process too.
_ALL, _OF_PROGRAMS = 8, 3


@dataclass
class Processors:
    """Of the `cores` that a process may use, seconds: `whole`, `busy` with programs, and its `own`,
    also of what it started. Of the tightest CPU limit of its control groups, `limit` in cores (0 for
    none): `periods`, and those in which it held processes back, `throttled`."""

    cores: list[int] = field(default_factory=list)
    whole: float = 0.0
    busy: float = 0.0
    own: float = 0.0
    limit: float = 0.0
    periods: int = 0
    throttled: int = 0

    def since(self, begin: Processors) -> Processors:
        """What was added since `begin`, of its cores."""
        return Processors(
            begin.cores,
            self.whole - begin.whole,
            self.busy - begin.busy,
            max(0.0, self.own - begin.own),  # a process that ended unseen takes its own along
            self.limit,
            max(0, self.periods - begin.periods),
            max(0, self.throttled - begin.throttled),
        )


def count(cores: list[int] | None = None, proc: str = "/proc") -> Processors:
    """The counters of these cores, or of those that this process may use; zeros where nothing tells."""
    found = Processors(sorted(os.sched_getaffinity(0)) if cores is None else cores)
    with contextlib.suppress(OSError, ValueError, IndexError):
        wanted = {f"cpu{core}" for core in found.cores}
        for name, *columns in map(str.split, Path(proc, "stat").read_text().splitlines()):
            if name in wanted:
                wanted.discard(name)
                ticks = [int(column) for column in columns[:_ALL]]
                found.whole += sum(ticks) / _TICKS
                found.busy += sum(ticks[:_OF_PROGRAMS]) / _TICKS
        if wanted:  # a container that numbers its cores anew
            found.whole = found.busy = 0.0
    found.own = _own(os.getpid())
    if (tightest := quota(proc)) is not None:
        found.limit = tightest[0]
        with contextlib.suppress(OSError, ValueError):
            text = (tightest[1].parent / "cpu.stat").read_text()
            told = dict(line.split() for line in text.splitlines())
            found.periods = int(told.get("nr_periods", 0))
            found.throttled = int(told.get("nr_throttled", 0))
    return found


def _own(pid: int) -> float:
    """Seconds of a process, and of those that it started and that run or that it waited for."""
    try:
        ticks, started = sum(map(int, process.stat(pid)[11:15])), process.children(pid)
    except (OSError, ValueError):  # it has ended, or there is no /proc
        return 0.0
    return ticks / _TICKS + sum(map(_own, started))
