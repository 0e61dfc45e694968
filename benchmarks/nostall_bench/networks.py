"""Networks of hosts by their links: which of them each message takes, by the routing that such
machines have. Rates are bytes/s; links have a direction."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Network(Protocol):
    """Hosts are numbered so that those of a local group follow each other."""

    @property
    def hosts(self) -> int: ...

    @property
    def group(self) -> int:
        """Hosts of one local group."""

    @property
    def rates(self) -> NDArray[np.float64]:
        """Of every link."""

    @property
    def upper(self) -> NDArray[np.bool_]:
        """The links between local groups."""

    def routes(self, source: Numbers, target: Numbers) -> list[Numbers]:
        """Links of each message, one array a hop; -1 where a message has no such hop."""


@dataclass(frozen=True)
class FatTree:
    """Leaf switches with `down` hosts, each with one link to every one of `cores` switches, which
    the target's number chooses (D-mod-k)."""

    leaves: int = 32
    down: int = 16
    cores: int = 16
    link: float = 12.5e9

    @property
    def hosts(self) -> int:
        return self.leaves * self.down

    @property
    def group(self) -> int:
        return self.down

    @property
    def rates(self) -> NDArray[np.float64]:
        return np.full(2 * self.hosts + 2 * self.leaves * self.cores, self.link)

    @property
    def upper(self) -> NDArray[np.bool_]:
        return np.arange(len(self.rates)) >= 2 * self.hosts

    def routes(self, source: Numbers, target: Numbers) -> list[Numbers]:
        here, there = source // self.down, target // self.down
        core, base = target % self.cores, 2 * self.hosts
        far, moves = here != there, source != target
        return [
            np.where(moves, source, -1),
            np.where(far, base + here * self.cores + core, -1),
            np.where(far, base + (self.leaves + there) * self.cores + core, -1),
            np.where(moves, self.hosts + target, -1),
        ]


@dataclass(frozen=True)
class Torus:
    """A host at each place, links to both neighbours in every dimension, dimensions in order. A row of
    the first one is a local group."""

    sides: tuple[int, ...] = (8, 8, 8)
    link: float = 12.5e9

    @property
    def hosts(self) -> int:
        return prod(self.sides)

    @property
    def group(self) -> int:
        return self.sides[0]

    @property
    def rates(self) -> NDArray[np.float64]:
        return np.full(self.hosts * len(self.sides) * 2, self.link)

    @property
    def upper(self) -> NDArray[np.bool_]:
        dimension = np.arange(len(self.rates)) // 2 % len(self.sides)
        return np.asarray(dimension != 0)

    def routes(self, source: Numbers, target: Numbers) -> list[Numbers]:
        found, at, stride = [], source.copy(), 1
        for dimension, side in enumerate(self.sides):
            place = source // stride % side
            ahead = (target // stride - place) % side
            # The shorter way round.
            step = np.where(ahead <= side // 2, 1, -1)
            missing = np.where(step > 0, ahead, side - ahead) * (ahead > 0)
            for hop in range(side // 2):
                moves = hop < missing
                link = (at * len(self.sides) + dimension) * 2 + (step < 0)
                found.append(np.where(moves, link, -1))
                next_place = (place + step) % side
                at = np.where(moves, at + (next_place - place) * stride, at)
                place = np.where(moves, next_place, place)
            stride *= side
        return found


@dataclass(frozen=True)
class Dragonfly:
    """Groups of routers that are all linked to each other, and one link between any two groups;
    minimal routes."""

    groups: int = 16
    routers: int = 8
    down: int = 4
    link: float = 12.5e9

    @property
    def hosts(self) -> int:
        return self.groups * self.routers * self.down

    @property
    def group(self) -> int:
        return self.routers * self.down

    @property
    def _global(self) -> int:
        return 2 * self.hosts + self.groups * self.routers**2

    @property
    def rates(self) -> NDArray[np.float64]:
        return np.full(self._global + self.groups**2, self.link)

    @property
    def upper(self) -> NDArray[np.bool_]:
        return np.arange(len(self.rates)) >= self._global

    def _gate(self, here: Numbers, there: Numbers) -> Numbers:
        """The router of group `here` that has the link to group `there`."""
        return (there - here - 1) % self.groups % self.routers

    def _inside(self, group: Numbers, begin: Numbers, end: Numbers) -> Numbers:
        link = 2 * self.hosts + (group * self.routers + begin) * self.routers + end
        return np.where(begin != end, link, -1)

    def routes(self, source: Numbers, target: Numbers) -> list[Numbers]:
        here, there = source // self.group, target // self.group
        begin, end = source // self.down % self.routers, target // self.down % self.routers
        far, moves = here != there, source != target
        out, into = self._gate(here, there), self._gate(there, here)
        return [
            np.where(moves, source, -1),
            self._inside(here, begin, np.where(far, out, end)),
            np.where(far, self._global + here * self.groups + there, -1),
            np.where(far, self._inside(there, into, end), -1),
            np.where(moves, self.hosts + target, -1),
        ]
