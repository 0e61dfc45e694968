"""A policy of one's own: the samples with the lowest numbers, kept by every node.

python examples/simulate-own-policy.py, or: nostall simulate scenario-3 --policy \
    examples/simulate-own-policy.py:Replicated
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from nostall.simulate import (
    Decision,
    Filling,
    Job,
    Policy,
    load_scenario,
    make_policy,
    simulate,
)


class Replicated(Policy):
    name = "replicated"
    title = "Replicated"
    follows = "each node keeps the same samples, as many as fit, as it reads them"

    def decide(self, job: Job) -> Decision:
        ends = np.cumsum(job.sizes)
        room = np.cumsum([0.0, *(c.capacity for c in job.environment.classes[1:])])
        marks = np.searchsorted(ends, room, side="right")
        ids = np.arange(job.samples, dtype=np.uint32)
        lists = [ids[a:b] for a, b in itertools.pairwise(marks)]
        decision = Decision()
        decision.filling = Filling.reading
        decision.set_kept([lists] * job.nodes)
        return decision


if __name__ == "__main__":
    rivals = (Replicated(), make_policy("hdmlp"), make_policy("nostall"))
    for outcome in simulate(replace(load_scenario("scenario-1"), policies=rivals)):
        print(f"{outcome.title:12} {outcome.mode:13} {outcome.seconds:8.2f} s")
