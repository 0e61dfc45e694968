"""Compares the simulator with measured runs: `nostall bench nodes --record RUN/`, `nostall demo`.

A record is one JSON file: the machine as it was measured beside the run, the training, and the times
of the run. The consumer's own time per batch is an input, because the loader does not determine it.
The waits and the bytes by origin are predicted, with mode "consistent", the policy nostall and the
run's random seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nostall.errors import UNREADABLE, CorruptionError, IoError, UsageError
from nostall.simulate._dataset import Dataset
from nostall.simulate._environment import read_environment
from nostall.simulate._policies import Nostall
from nostall.simulate._run import simulate
from nostall.simulate._scenario import Scenario, Step, read_training
from nostall.simulate._tables import Place

FORMAT = 1
SUFFIX = ".run.json"
MB = 1e6
# A consumer of the records takes time per batch, not per byte.
_NO_LIMIT = 1e9


@dataclass(frozen=True)
class Checked:
    """One run, measured and predicted. Seconds of all epochs (and by epoch), MB by origin over all
    nodes: "local", "other nodes", "source"."""

    name: str
    measured_seconds: float
    predicted_seconds: float
    measured_epochs: tuple[float, ...]
    predicted_epochs: tuple[float, ...]
    measured_mb: dict[str, float]
    predicted_mb: dict[str, float]

    @property
    def time_error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """The largest difference of an origin, as a share of all bytes; signed."""
        total = sum(self.measured_mb.values())
        errors = [(self.predicted_mb[k] - v) / total for k, v in self.measured_mb.items()]
        return max(errors, key=abs)


def record_run(
    path: str | os.PathLike[str],
    *,
    environment: Mapping[str, Any],
    sizes: Sequence[int],
    training: Mapping[str, Any],
    step_seconds: float,
    epoch_seconds: Sequence[float],
    origin_bytes: Mapping[str, int],
) -> None:
    """Writes a record for `check`.

    Args:
        environment: the keys of `nostall.simulate.Environment`, MB and MB/s.
        sizes: bytes of every sample, in the dataset's order.
        training: E, B (global), seed.
        step_seconds: of the consumer's own work, per batch.
        epoch_seconds: of the slowest rank.
        origin_bytes: by "ram", "file", "peer", "source", over all ranks.

    Raises:
        IoError: it cannot be written.
    """
    data = {
        "format": FORMAT,
        "environment": dict(environment),
        "sizes": [int(s) for s in sizes],
        "training": dict(training),
        "step_seconds": step_seconds,
        "measured": {"epoch_seconds": list(epoch_seconds), "bytes": dict(origin_bytes)},
    }
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data))
    except OSError as error:
        raise IoError(f"cannot write {path}: {error.strerror}") from error


def machine_of_run(
    *, nodes: int, source: Sequence[float], link: float, tiers: Sequence[int], staging: int
) -> dict[str, Any]:
    """A record's environment: the measured source (bytes/s for 1, 2, ... nodes), and memory and
    loopback, which are fast in comparison."""
    memory = 5000.0
    return {
        "N": nodes,
        "c": _NO_LIMIT,
        "beta": _NO_LIMIT,
        "b_c": 1000.0,
        "b_fs": link / MB,
        "t": {str(i + 1): v / MB for i, v in enumerate(source)},
        "p": [4] + [1] * len(tiers),
        "d": [staging / MB, *(t / MB for t in tiers)],
        "r": [memory] * (1 + len(tiers)),
    }


def check(directory: str | os.PathLike[str]) -> list[Checked]:
    """Predicts every run recorded in the directory.

    Raises:
        IoError: it cannot be read.
        UsageError: it holds no records, or those of a loader.
        CorruptionError: a record is damaged; the message names it.
    """
    try:
        files = sorted(p for p in Path(directory).iterdir() if p.name.endswith(SUFFIX))
    except OSError as error:
        raise IoError(f"cannot read {directory}: {error.strerror}") from error
    if not files:
        raise UsageError(
            f"{directory} holds no records (*{SUFFIX}): nostall bench nodes --record {directory}"
        )
    return [check_run(path) for path in files]


def check_run(path: Path) -> Checked:
    """Predicts one recorded run.

    Raises:
        IoError, UsageError, CorruptionError: as check.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise IoError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise CorruptionError(f"{path} is not a record of a run: {error}") from error
    if isinstance(data, dict) and data.get("kind") == "run":
        raise UsageError(
            f"{path} is what one loader of a recorded run left, without a measurement of its machine: "
            "nostall bench nodes --record makes runs to check"
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CorruptionError(f"{path} is not a record of format {FORMAT}")
    try:
        measured = data["measured"]
        epochs = tuple(float(s) for s in measured["epoch_seconds"])
        origins = {k: float(v) / MB for k, v in measured["bytes"].items()}
        scenario = _scenario(path, data)
        if len(epochs) != scenario.training.E or not all(0 < s < math.inf for s in epochs):
            raise ValueError(f"epoch_seconds must be E = {scenario.training.E} positive numbers")
        if not (0 < sum(origins.values()) < math.inf and min(origins.values()) >= 0):
            raise ValueError("bytes must not be negative, and not all 0")
    except UNREADABLE as error:
        if isinstance(error, UsageError):
            raise
        raise CorruptionError(f"{path} is damaged: {error!r}") from error
    try:
        outcome = simulate(scenario, ["consistent"], shuffle=False)[0]
    except UNREADABLE as error:
        raise CorruptionError(f"{path} is damaged: {error}") from error
    staged = dict(outcome.staged)
    other, source = staged.pop("other nodes"), staged.pop("source")
    return Checked(
        name=path.name.removesuffix(SUFFIX),
        measured_seconds=sum(epochs),
        predicted_seconds=sum(outcome.epoch_seconds),
        measured_epochs=epochs,
        predicted_epochs=outcome.epoch_seconds,
        measured_mb={
            "local": origins.get("ram", 0.0) + origins.get("file", 0.0),
            "other nodes": origins.get("peer", 0.0),
            "source": origins.get("source", 0.0),
        },
        predicted_mb={"local": sum(staged.values()), "other nodes": other, "source": source},
    )


def _scenario(path: Path, data: Mapping[str, Any]) -> Scenario:
    place = Place(str(path))
    environment = read_environment(data["environment"], place / "environment")
    sizes = np.asarray(data["sizes"], dtype=np.float64) / MB
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise ValueError("sizes must be numbers from 0 on")
    return Scenario(
        name=path.name,
        environment=environment,
        dataset=Dataset(sizes),
        training=read_training({**data["training"], "drop_last": False}, place / "training"),
        policies=(Nostall(),),
        step=Step(engine=float(data["step_seconds"])),
    )


def text(found: Sequence[Checked]) -> str:
    """One row per run: measured, predicted, errors."""
    lines = []
    for c in found:
        lines.append(
            f"{c.name}: all epochs {c.measured_seconds:.2f} s measured, {c.predicted_seconds:.2f} s "
            f"predicted ({c.time_error:+.1%}); bytes by origin off by {c.bytes_error:+.1%} of all"
        )
        lines.append(
            "  epochs, s: "
            + ", ".join(
                f"{m:.2f}/{p:.2f}"
                for m, p in zip(c.measured_epochs, c.predicted_epochs, strict=False)
            )
            + "; MB: "
            + ", ".join(f"{k} {v:.1f}/{c.predicted_mb[k]:.1f}" for k, v in c.measured_mb.items())
        )
    return "\n".join(lines)
