"""Reads the file that `nostall calibrate` wrote."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from typing import Any

from nostall.errors import IoError, UsageError

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """Measured speeds, bytes/s.

    `source` has t(1), t(2), ... of all nodes together; `tiers` maps a tier's name ("ram" or its
    path) to r(1), r(2), ... threads of a node; `network` is b_c, 0 if there is one node.
    """

    nodes: int
    source: list[float]
    source_threads: int
    tiers: dict[str, list[float]]
    network: float
    beta: float

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads the file.

        Raises:
            IoError: it cannot be read.
            UsageError: it is not such a file; the message names the key.
        """
        try:
            with open(path, "rb") as file:
                data = tomllib.load(file)
        except OSError as error:
            raise IoError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not TOML: {error}") from error
        if data.get("format") != FORMAT:
            raise UsageError(f"{path}: format is {data.get('format')!r}, not {FORMAT}")
        try:
            return cls(
                nodes=int(data["environment"]["N"]),
                source=_speeds(data["source"]["t"]),
                source_threads=int(data["source"]["threads"]),
                tiers={str(t["name"]): _speeds(t["r"]) for t in data.get("tiers", [])},
                network=float(data["environment"].get("b_c", 0.0)),
                beta=float(data["environment"].get("beta", 0.0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def _speeds(values: Any) -> list[float]:
    speeds = [float(v) for v in values]
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"speeds must be positive: {values}")
    return speeds
