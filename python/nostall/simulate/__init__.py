"""What a training would cost, on which machine, by which policy.

The performance model of [Böhringer 2020, sec. 3.1 and 4.1], run on the loader's own plan:
``load_scenario("scenario-1")``, then ``simulate(scenario)``. The mode "as-published" repeats the
published simulation; "consistent" shares every bandwidth among those that use it at the same time.
See docs/guide/simulate.md.
"""

from __future__ import annotations

from nostall._native import Decision, Filling
from nostall.simulate._dataset import Dataset
from nostall.simulate._environment import Environment, StorageClass
from nostall.simulate._policies import Job, NotApplicable, Policy, make_policy, policies, register
from nostall.simulate._results import points_text
from nostall.simulate._run import MODES, Outcome, Shuffle, read_once_bound, simulate
from nostall.simulate._scenario import (
    Scenario,
    Step,
    Training,
    load_scenario,
    read_scenario,
    scenarios,
)
from nostall.simulate._sweep import Point, cheapest, scaling, sweep

__all__ = [
    "MODES",
    "Dataset",
    "Decision",
    "Environment",
    "Filling",
    "Job",
    "NotApplicable",
    "Outcome",
    "Point",
    "Policy",
    "Scenario",
    "Shuffle",
    "Step",
    "StorageClass",
    "Training",
    "cheapest",
    "load_scenario",
    "make_policy",
    "points_text",
    "policies",
    "read_once_bound",
    "read_scenario",
    "register",
    "scaling",
    "scenarios",
    "simulate",
    "sweep",
]
