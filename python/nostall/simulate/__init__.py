"""What a training would cost, on which machine, by which policy.

The performance model of the seed clairvoyant-prefetching (3.1, 4.1), run on the loader's own plan:
``load_scenario("scenario-1")``, then ``simulate(scenario)``. Two modes: "as-published" repeats the
seed's simulation, "consistent" shares every bandwidth truly. See docs/guide/simulate.md.
"""

from __future__ import annotations

from nostall.simulate._dataset import Dataset
from nostall.simulate._environment import Environment, StorageClass
from nostall.simulate._policies import Job, NotApplicable, Policy, make_policy, policies, register
from nostall.simulate._run import MODES, Outcome, Shuffle, read_once_bound, simulate
from nostall.simulate._scenario import Scenario, Step, Training, load_scenario, scenarios

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
