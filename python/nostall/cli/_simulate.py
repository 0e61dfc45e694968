"""Predicts the time of a training, by machine and by policy. SCENARIO is the name of a scenario of
nostall (scenario-1 to scenario-4, environment) or a TOML file; see docs/guide/simulate.md."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError
from nostall.job._cores import cores_of_rank

if TYPE_CHECKING:
    from nostall.simulate._run import Mode
    from nostall.simulate._scenario import Scenario
    from nostall.simulate._sweep import Grid, Point


_WITHIN = 5.0

# The options that each way of running uses beside its own one: what it does not use is refused.
_MACHINES = {"scenario", "mode", "policy", "set"}
_FILES = {"json", "csv", "html"}
_USES = {
    "list": set[str](),
    "check": set[str](),
    "nodes": _MACHINES | {"weak", "no_sweep"},
    "sweep": _MACHINES | _FILES | {"state", "processes", "price", "within"},
    "": _MACHINES | _FILES | {"no_sweep"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate``."""
    parser.add_argument("scenario", nargs="?", help="a name, or a TOML file")
    parser.add_argument("--list", action="store_true", help="list scenarios, machines and policies")
    parser.add_argument(
        "--mode", choices=["both", "as-published", "consistent"],
        help="the published model, the one that conserves bandwidth, or both",
    )  # fmt: skip
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[,OPTION=VALUE]",
        help="only these policies; file.py:Class for your own",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="N, c, d.1, t, E, B, ..."
    )
    parser.add_argument("--nodes", type=int, nargs="+", help="strong scaling over these N")
    parser.add_argument("--weak", action="store_true", help="with --nodes: data and batch grow too")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V1,V2", help="all combinations"
    )
    parser.add_argument("--no-sweep", action="store_true", help="ignore the scenario's own sweep")
    parser.add_argument(
        "--state", help="file of the finished points of a sweep, to continue it later"
    )
    parser.add_argument("--processes", type=int, help="points of a sweep that run at once")
    parser.add_argument(
        "--price", action="append", default=[], metavar="KEY=PRICE", help="per unit and node"
    )
    parser.add_argument(
        "--within",
        type=float,
        help=f"with prices: accept points within this %% of the bound; {_WITHIN:g}",
    )
    parser.add_argument(
        "--check", metavar="RUN", help="predict the runs recorded in this directory, and compare"
    )
    parser.add_argument("--json", help="write everything to this file")
    parser.add_argument("--csv", help="write the table to this file")
    parser.add_argument("--html", help="write a page with plots to this file")


def run(arguments: argparse.Namespace) -> int:
    """Simulates, prints tables, writes files."""
    from nostall.simulate import _results as results
    from nostall.simulate._run import MODES, read_once_bound, simulate
    from nostall.simulate._scenario import load_scenario
    from nostall.simulate._sweep import scaling, sweep

    way = next((w for w in ("list", "check", "nodes") if getattr(arguments, w)), "")
    if way == "list":
        _refuse_unused(arguments, way)
        return _list()
    if way == "check":
        from nostall.simulate import _check as check

        _refuse_unused(arguments, way)
        print(check.text(check.check(arguments.check)))
        return 0
    if not arguments.scenario:
        raise UsageError("which scenario? nostall simulate --list names them")
    scenario = load_scenario(arguments.scenario)
    grids = [_assignments(arguments.sweep, many=True)] if arguments.sweep else list(scenario.sweep)
    if not way and (arguments.sweep or (grids and not arguments.no_sweep)):
        way = "sweep"
    _refuse_unused(arguments, way)
    scenario = _adapted(scenario, arguments)
    modes: Sequence[Mode] = MODES if arguments.mode in (None, "both") else (arguments.mode,)
    if way == "nodes":
        print(results.scaling_text(scaling(scenario, arguments.nodes, modes, weak=arguments.weak)))
        for line in results.assumed(scenario, [{"N": n} for n in arguments.nodes]):
            print(line)
        return 0
    points: list[Point] = []
    outcomes, bound, prices = [], None, {}
    if way == "sweep":
        prices = _prices(scenario, grids, arguments.price)
        points = sweep(
            scenario,
            grids,
            modes,
            state=arguments.state,
            processes=cores_of_rank(1) if arguments.processes is None else arguments.processes,
            progress=_progress,
        )
        print(results.points_text(points))
        for line in results.assumed(scenario, [p.values for p in points]):
            print(line)
    else:
        outcomes, bound = simulate(scenario, modes), read_once_bound(scenario)
        print(results.text(scenario, outcomes, bound))
    if arguments.json:
        results.write(arguments.json, results.to_json(scenario, outcomes, points))
    if arguments.csv:
        results.write(arguments.csv, results.to_csv(outcomes, points))
    if arguments.html:
        results.write(arguments.html, results.page(scenario, outcomes, points, bound))
    if prices:
        _answer(scenario, points, prices, _WITHIN if arguments.within is None else arguments.within)
    return 0


def _refuse_unused(arguments: argparse.Namespace, way: str) -> None:
    """Raises UsageError if an option is given that this way of running does not use."""
    unused = {*_USES}.union(*_USES.values()) - _USES[way] - {"", way}
    for name in sorted(unused):
        value = getattr(arguments, name)
        if value is None or value is False or value == []:
            continue
        option = "a scenario" if name == "scenario" else "--" + name.replace("_", "-")
        if name == "weak":
            raise UsageError(f"{option} does nothing without --nodes: add --nodes 2 4")
        if way:
            raise UsageError(f"{option} does nothing beside --{way}: leave one of the two out")
        raise UsageError(f"{option} does nothing without a sweep: add --sweep KEY=V1,V2")


def _list() -> int:
    from nostall.simulate import policies, scenarios
    from nostall.simulate._environment import machines

    print("scenarios: " + ", ".join(scenarios()))
    print("machines: " + ", ".join(machines()))
    for name, policy in policies().items():
        print(f"policy {name}: {getattr(policy, 'follows', '')}")
    return 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} points", end="\n" if done == total else "", file=sys.stderr)


def _adapted(scenario: Scenario, arguments: argparse.Namespace) -> Scenario:
    from nostall.simulate._policies import make_policy
    from nostall.simulate._sweep import with_values

    scenario = with_values(scenario, _assignments(arguments.set))
    if arguments.policy:
        made = []
        for words in arguments.policy:
            name, *options = words.split(",")
            made.append(make_policy(name, _assignments(options)))
        scenario = replace(scenario, policies=tuple(made))
    return scenario


def _assignments(words: Sequence[str], many: bool = False) -> dict[str, Any]:
    """{"d.1": 5} of "d.1=5"; with `many`, {"d.1": [5, 6]} of "d.1=5,6"."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise UsageError(f'"{word}" is not KEY=VALUE')
        found[key] = [_value(t) for t in text.split(",")] if many else _value(text)
    return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _prices(scenario: Scenario, grids: Sequence[Grid], words: Sequence[str]) -> dict[str, float]:
    """The scenario's prices with those given.

    Raises:
        UsageError: one is no price, or is of something that not every point sets.
    """
    from nostall.simulate._sweep import points_of, price_of

    prices = {**scenario.prices, **_assignments(words)}
    for key, price in prices.items():
        number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if not number or not 0 <= price < math.inf:
            raise UsageError(f"the price of {key} must be a number from 0 on, not {price!r}")
    for values in points_of(grids):
        price_of(values, prices, scenario.environment.N)
    return prices


def _answer(
    scenario: Scenario, points: Sequence[Point], prices: Mapping[str, float], within: float
) -> None:
    """The cheapest machine within x % of the bound, for each column."""
    from nostall.simulate._sweep import cheapest

    for column in points[0].seconds:
        consistent = column.endswith("/consistent")
        bound = min(p.read_once_bound for p in points) if consistent else None
        found = cheapest(
            points,
            prices,
            scenario.environment.N,
            column=column,
            within=within / 100,
            bound=bound,
        )
        what = "the best read-once bound" if consistent else "the best lower bound"
        if found is None:
            print(f"{column}: no machine comes within {within:g} % of {what}")
        else:
            point, price = found
            print(
                f"{column}: cheapest within {within:g} % of {what}: {point.key} for "
                f"{price:g}, {point.seconds[column]:.1f} s"
            )
