"""What a process and /dev/shm hold over time, as the record of a run has it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_MOMENTS = 600
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Held:
    """Columns: seconds since 1970, bytes of the process that it shares with none, bytes in /dev/shm."""

    time: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)


class Watch:
    """Fills a `Held` at the moments of its calls; of many, at every second one, and so on."""

    def __init__(self) -> None:
        self.held = Held()
        self._every, self._calls = 1, 0

    def __call__(self) -> bool:
        """Whether a moment was added."""
        self._calls += 1
        if self._calls % self._every:
            return False
        try:
            resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
            there = os.statvfs("/dev/shm")
        except OSError:  # none here
            return False
        columns = self.held.time, self.held.own, self.held.shared
        used = (there.f_blocks - there.f_bfree) * there.f_frsize
        row = round(time.time(), 1), (resident - shared) * _PAGE, used
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        if len(self.held.time) > _MOMENTS:
            self._every *= 2
            for column in columns:
                del column[::2]
        return True
