"""Reads the file that `nostall calibrate` wrote."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nostall.base._sizes import TierSpec
from nostall.base._toml import read_toml
from nostall.errors import UNREADABLE, UsageError

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """Measured speeds, bytes/s.

    `source` has t(1), t(2), ... of all nodes together; `tiers` maps a tier's name ("ram" or its
    path) to r(1), r(2), ... threads of a node, `tier_writes` to w(1), w(2), ..., and `tier_threads` to
    the number beyond which another brings little; `network` is b_c, 0 if there is one node.
    """

    nodes: int
    source: list[float]
    source_threads: int
    tiers: dict[str, list[float]]
    tier_writes: dict[str, list[float]]
    tier_threads: dict[str, int]
    network: float
    beta: float

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads the file.

        Raises:
            IoError: it cannot be read.
            UsageError: it is not such a file; the message names the key.
        """
        data = read_toml(path)
        if data.get("format") != FORMAT:
            raise UsageError(f"{path}: format is {data.get('format')!r}, not {FORMAT}")
        try:
            tiers, environment = data.get("tiers", []), data["environment"]
            nodes = int(environment["N"])
            if nodes < 1:
                raise ValueError(f"N must be at least 1, not {nodes}")
            return cls(
                nodes=nodes,
                source=_speeds(data["source"]["t"]),
                source_threads=int(data["source"]["threads"]),
                tiers={str(t["name"]): _speeds(t["r"]) for t in tiers},
                tier_writes={str(t["name"]): _speeds(t["w"]) for t in tiers if "w" in t},
                tier_threads={str(t["name"]): int(t["threads"]) for t in tiers},
                network=_speed(environment, "b_c"),
                beta=_speed(environment, "beta"),
            )
        except UNREADABLE as error:
            raise UsageError(f"{path} is not a calibration: {error!r}") from error

    def seconds_per_byte(self, origin: str, readers: int) -> float:
        """The speed of one reader among `readers` on each node; 0 if nothing was measured.

        `origin` is "source", "peer", or the name of a tier: "ram", or its path.
        """
        if origin == "source":
            speed = self.source[min(self.nodes, len(self.source)) - 1] / self.nodes
        elif origin == "peer":
            speed = self.network
        else:
            known = self.tiers.get(origin, [0.0])
            speed = known[min(readers, len(known)) - 1]
        return readers / speed if speed > 0 else 0.0

    def with_readers(self, tiers: Sequence[TierSpec], ranks: int) -> list[TierSpec]:
        """The tiers of a node of so many ranks, which share the best number of threads of each
        directory among them as their reads in flight; a tier's own ":readers=N" stays.

        Where all threads that were measured were worth having there is no limit.
        """
        out = []
        for tier in tiers:
            best = self.tier_threads.get(tier.path, 0)
            if tier.path and not tier.readers and best < len(self.tiers.get(tier.path, [])):
                tier = replace(tier, readers=max(1, best // ranks))
            out.append(tier)
        return out


def _speeds(values: Any) -> list[float]:
    speeds = [float(v) for v in values]
    if not speeds or not all(0 < s < math.inf for s in speeds):
        raise ValueError(f"speeds must be positive: {values}")
    return speeds


def _speed(table: dict[str, Any], key: str) -> float:
    """0 if it was not measured."""
    return _speeds([table[key]])[0] if key in table else 0.0
