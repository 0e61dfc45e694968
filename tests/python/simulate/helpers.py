"""Small scenarios for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from nostall.simulate._scenario import Scenario, read_scenario
from nostall.simulate._tables import Place


def tables(**changes: Any) -> dict[str, Any]:
    """A scenario's tables, small and fast; `changes` by table, as environment={"c": 50}."""
    base: dict[str, Any] = {
        "environment": {
            "N": 4,
            "c": 100,
            "beta": 200,
            "b_c": 10000,
            "b_fs": 2000,
            "t": {"1": 66, "2": 86, "3": 129, "4": 146},
            "p": [2, 2, 2],
            "d": [20, 100, 200],
            "r": [{"1": 16550, "2": 21164}, {"1": 16550, "2": 21164}, {"1": 66, "2": 86}],
        },
        "dataset": {
            "samples": 1200,
            "distribution": "norm",
            "loc": 0.4,
            "scale": 0.1,
        },
        "training": {"E": 3, "B": 40},
    }
    for name, change in changes.items():
        if isinstance(change, dict):
            base[name] = {**base.get(name, {}), **change}
        else:
            base[name] = change
    return base


def scenario(**changes: Any) -> Scenario:
    """The scenario of `tables`."""
    return read_scenario(tables(**changes), Place("small.toml"))
