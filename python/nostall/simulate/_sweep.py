"""Many machines or numbers of nodes: grids of variables, scaling, and the cheapest machine."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nostall._version import __version__
from nostall.base import _checks as checks
from nostall.base import _children as children
from nostall.errors import IoError, UsageError
from nostall.simulate._dataset import Dataset
from nostall.simulate._environment import replace_value
from nostall.simulate._policies import code_of
from nostall.simulate._run import Mode, Outcome, job_of, model_of, read_once_bound, simulate
from nostall.simulate._scenario import Scenario
from nostall.simulate._tables import Place

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Point:
    """One machine: the variables that were set, and the run time of each policy on it.

    `seconds` is by policy's title and mode, "HDMLP/consistent"; NaN where it cannot run.
    """

    values: dict[str, Any]
    seconds: dict[str, float]
    lower_bound: float
    read_once_bound: float

    @property
    def key(self) -> str:
        """Names the point: its variables."""
        return ", ".join(f"{k}={v}" for k, v in self.values.items())


def points_of(grids: Iterable[Grid]) -> list[dict[str, Any]]:
    """All combinations of each grid, in order, each once."""
    found: dict[str, dict[str, Any]] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            found.setdefault(json.dumps(point, sort_keys=True), point)
    return list(found.values())


def with_values(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """The scenario with variables of its environment (d.1, c, N, ...), or E and B, set.

    What does not go together is named when it is run: a sweep may yet set what lacks.

    Raises:
        UsageError: an unknown variable, or an impossible value.
    """
    environment, training = scenario.environment, scenario.training
    for key, value in values.items():
        if key in ("E", "B"):
            number = Place("sweep", key).integer(value, least=1)
            training = replace(training, E=number) if key == "E" else replace(training, B=number)
        else:
            environment = replace_value(environment, key, value)
    return replace(scenario, environment=environment, training=training)


def sweep(
    scenario: Scenario,
    grids: Iterable[Grid],
    modes: Sequence[Mode],
    *,
    state: str | os.PathLike[str] | None = None,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Runs the scenario's policies on every combination of the grids' values.

    Args:
        grids: lists of values by variable; the union of their combinations is run.
        state: a file of finished points, one per line, from which an interrupted sweep continues;
            points of another scenario, of other modes or of other code (nostall's version, the files of
            policies) in it are left alone.
        processes: how many points run at once. An error or Ctrl-C ends them at once, and the state has
            what was finished.
        progress: called with (points done, points in all).

    Raises:
        UsageError: a variable or value that cannot be.
        IoError: the state cannot be read or written.
    """
    if isinstance(grids, Mapping):
        raise UsageError(f"grids must be a list of mappings, not the mapping {grids!r}: [grid]")
    wanted = points_of(grids)
    machines = [with_values(scenario, values) for values in wanted]
    for one in machines:
        model_of(one), job_of(one)  # which name what does not go together
    stamp = _stamp(scenario, modes)
    done = _load(state, stamp) if state else {}
    order = [json.dumps(v, sort_keys=True) for v in wanted]
    todo = [i for i, key in enumerate(order) if key not in done]
    if progress:
        progress(len(order) - len(todo), len(order))

    def finish(i: int, point: Point) -> None:
        done[order[i]] = point
        if state:
            _append(state, stamp, point)
        if progress:
            progress(sum(key in done for key in order), len(order))

    if processes <= 1 or len(todo) <= 1:
        for i in todo:
            finish(i, _point(machines[i], wanted[i], tuple(modes)))
    else:
        calls = ((machines[i], wanted[i], tuple(modes)) for i in todo)
        # Forked, so that policies from the user's own files are available.
        workers = children.results(_point, calls, min(processes, len(todo)), "fork")
        with contextlib.closing(workers):
            for number, point in workers:
                finish(todo[number], point)
    return [done[key] for key in order]


def _point(scenario: Scenario, values: dict[str, Any], modes: tuple[Mode, ...]) -> Point:
    outcomes = simulate(scenario, modes, shuffle=False)
    bound = next((o.seconds / o.ratio for o in outcomes if o.seconds == o.seconds), float("nan"))
    return Point(
        values=values,
        seconds={f"{o.title}/{o.mode}": o.seconds for o in outcomes},
        lower_bound=bound,
        read_once_bound=read_once_bound(scenario),
    )


def _stamp(scenario: Scenario, modes: Sequence[Mode]) -> str:
    parts = [
        __version__,
        repr(scenario.environment),
        repr(scenario.training),
        repr(scenario.step),
        hashlib.sha256(scenario.dataset.sizes.tobytes()).hexdigest(),
        repr([(type(p).__name__, vars(p), code_of(p)) for p in scenario.policies]),
        repr(tuple(modes)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _load(state: str | os.PathLike[str], stamp: str) -> dict[str, Point]:
    try:
        lines = Path(state).read_text().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise IoError(f"cannot read {state}: {error.strerror}") from error
    found = {}
    for line in lines:
        try:
            entry = json.loads(line)
            if entry.pop("stamp") == stamp:
                point = Point(**entry)
                found[json.dumps(point.values, sort_keys=True)] = point
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # the last line of a killed sweep: its point is run again
    return found


def _append(state: str | os.PathLike[str], stamp: str, point: Point) -> None:
    try:
        with open(state, "a+b") as file:
            line = json.dumps({"stamp": stamp, **asdict(point)}).encode() + b"\n"
            if end := file.tell():
                file.seek(end - 1)
                # A sweep that was killed may have left a part of a line.
                line = line if file.read() == b"\n" else b"\n" + line
            file.write(line)
    except OSError as error:
        raise IoError(f"cannot write {state}: {error.strerror}") from error


def scaling(
    scenario: Scenario, nodes: Sequence[int], modes: Sequence[Mode], *, weak: bool = False
) -> dict[int, list[Outcome]]:
    """The scenario on several numbers of nodes. Strong scaling keeps data and batch; weak scaling
    keeps each node's share of both.

    Raises:
        UsageError: a number of nodes that cannot be.
    """
    found = {}
    for count in nodes:
        if count < 1:
            raise UsageError(f"a training needs at least one node, not {count}")
        one = with_values(scenario, {"N": count})
        if weak:
            factor = count / scenario.environment.N
            sizes = scenario.dataset.sizes
            grown = np.resize(sizes, max(1, round(len(sizes) * factor)))
            one = replace(
                one,
                dataset=Dataset(grown, 0, scenario.dataset.source),
                training=replace(one.training, B=max(1, round(scenario.training.B * factor))),
            )
        found[count] = simulate(one, modes, shuffle=False)
    return found


def price_of(values: Mapping[str, Any], prices: Mapping[str, float], nodes: int) -> float:
    """The price of a machine: each priced variable's value times its price, on every node. The price
    of N is that of one node.

    Raises:
        UsageError: a price of something that the point does not set.
    """
    count = values.get("N", nodes)
    total = 0.0
    for key, price in prices.items():
        if key == "N":
            total += price * count
        elif key in values and isinstance(values[key], (int, float)):
            total += price * float(values[key]) * count
        else:
            raise UsageError(
                f"there is a price for {key}, which the sweep does not set to numbers: sweep it too, "
                "or leave its price out"
            )
    return total


def cheapest(
    points: Sequence[Point],
    prices: Mapping[str, float],
    nodes: int,
    *,
    column: str,
    within: float,
    bound: float | None = None,
) -> tuple[Point, float] | None:
    """The point of the least price whose run time is within `within` (0.05: 5 %) of the bound, and
    its price; None if there is none. Of equal prices the faster one.

    Args:
        column: which run time, "HDMLP/consistent".
        bound: seconds to compare with; by default the lower bound of the fastest machine.

    Raises:
        UsageError: the points have no such column, a price cannot be used, or `within` is negative.
    """
    within = checks.number("within", within, 0, math.inf)
    for key, price in prices.items():
        checks.number(f"the price of {key}", price, 0, sys.float_info.max)
    if bound is None:
        bounds = [p.lower_bound for p in points if not math.isnan(p.lower_bound)]
        bound = min(bounds, default=math.nan)
    best: tuple[float, float, Point] | None = None
    for point in points:
        if column not in point.seconds:
            raise UsageError(f"there is no {column}: {', '.join(point.seconds)}")
        seconds = point.seconds[column]
        if not seconds <= (1 + within) * bound:
            continue
        candidate = (price_of(point.values, prices, nodes), seconds, point)
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    return (best[2], best[0]) if best else None
