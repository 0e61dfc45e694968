"""Predicts the time of a training, by machine and by policy. SCENARIO is the name of a scenario of
nostall (scenario-1 to scenario-4, environment) or a TOML file; see docs/guide/simulate.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError

if TYPE_CHECKING:
    from nostall.simulate._run import Mode
    from nostall.simulate._scenario import Scenario
    from nostall.simulate._sweep import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate``."""
    parser.add_argument("scenario", nargs="?", help="a name, or a TOML file")
    parser.add_argument("--list", action="store_true", help="list scenarios, machines and policies")
    parser.add_argument(
        "--mode", choices=["both", "as-published", "consistent"], default="both",
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
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--price", action="append", default=[], metavar="KEY=PRICE", help="per unit and node"
    )
    parser.add_argument(
        "--within",
        type=float,
        default=5.0,
        help="with --price: accept points within this %% of the bound",
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

    if arguments.list:
        return _list()
    files = [n for n in ("json", "csv", "html") if getattr(arguments, n)]
    alone = [n for n in ("check", "nodes") if getattr(arguments, n)]
    if files and alone:
        raise UsageError(f"--{files[0]} has no form for --{alone[0]}, which prints a table alone")
    if arguments.check:
        from nostall.simulate import _check as check

        print(check.text(check.check(arguments.check)))
        return 0
    if not arguments.scenario:
        raise UsageError("which scenario? nostall simulate --list names them")
    scenario = _adapted(load_scenario(arguments.scenario), arguments)
    modes: Sequence[Mode] = MODES if arguments.mode == "both" else (arguments.mode,)
    if arguments.nodes:
        print(results.scaling_text(scaling(scenario, arguments.nodes, modes, weak=arguments.weak)))
        return 0
    grids = [_assignments(arguments.sweep, many=True)] if arguments.sweep else list(scenario.sweep)
    points: list[Point] = []
    if grids and not arguments.no_sweep:
        points = sweep(
            scenario,
            grids,
            modes,
            state=arguments.state,
            processes=arguments.processes,
            progress=_progress,
        )
        print(results.points_text(points))
        _answer(scenario, points, arguments)
        outcomes, bound = [], None
    else:
        outcomes, bound = simulate(scenario, modes), read_once_bound(scenario)
        print(results.text(scenario, outcomes, bound))
    if arguments.json:
        results.write(arguments.json, results.to_json(scenario, outcomes, points))
    if arguments.csv:
        results.write(arguments.csv, results.to_csv(outcomes, points))
    if arguments.html:
        results.write(arguments.html, results.page(scenario, outcomes, points, bound))
    return 0


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


def _answer(scenario: Scenario, points: Sequence[Point], arguments: argparse.Namespace) -> None:
    """The cheapest machine within x % of the bound, for each column."""
    from nostall.simulate._sweep import cheapest

    prices = {**scenario.prices, **_assignments(arguments.price)}
    if not prices:
        return
    for key, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or price < 0:
            raise UsageError(f"the price of {key} must be a number from 0 on, not {price!r}")
    for column in points[0].seconds:
        consistent = column.endswith("/consistent")
        bound = min(p.read_once_bound for p in points) if consistent else None
        found = cheapest(
            points,
            prices,
            scenario.environment.N,
            column=column,
            within=arguments.within / 100,
            bound=bound,
        )
        what = "the best read-once bound" if consistent else "the lower bound"
        if found is None:
            print(f"{column}: no machine comes within {arguments.within:g} % of {what}")
        else:
            point, price = found
            print(
                f"{column}: cheapest within {arguments.within:g} % of {what}: {point.key} for "
                f"{price:g}, {point.seconds[column]:.1f} s"
            )
