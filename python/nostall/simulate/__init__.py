"""What a training would cost, on which machine, by which policy.

The performance model of the seed clairvoyant-prefetching (3.1, 4.1), run on the loader's own plan:
``load_scenario("scenario-1")``, then ``simulate(scenario)``. Two modes: "as-published" repeats the
seed's simulation, "consistent" shares every bandwidth truly. See docs/guide/simulate.md.
"""

from __future__ import annotations

from nostall.simulate.dataset import Dataset
from nostall.simulate.environment import Environment, StorageClass
from nostall.simulate.policies import (
    Job,
    NotApplicable,
    Policy,
    make_policy,
    policies,
    register,
)
from nostall.simulate.run import MODES, Outcome, Shuffle, read_once_bound, simulate
from nostall.simulate.scenario import Scenario, Step, Training, load_scenario, scenarios

__all__ = [
    "MODES",
    "Dataset",
    "Environment",
    "Job",
    "NotApplicable",
    "Outcome",
    "Policy",
    "Scenario",
    "Shuffle",
    "Step",
    "StorageClass",
    "Training",
    "load_scenario",
    "make_policy",
    "policies",
    "read_once_bound",
    "register",
    "scenarios",
    "simulate",
]
