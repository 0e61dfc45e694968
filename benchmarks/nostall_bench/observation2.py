"""``nostall bench observation-2``: how unevenly nodes read samples [Böhringer 2020, eq. 3.8].

Every epoch is shuffled, so a node reads a sample about E/N times in E epochs, and some samples much
more often. This computes the expected number of samples read more than (1 + delta) E/N times from the
binomial distribution, and counts them in the plans of real jobs.
"""

from __future__ import annotations

import argparse
import statistics
from fractions import Fraction
from math import comb, floor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; the defaults are those of [Böhringer 2020, sec. 3.2.1]."""
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--delta", type=Fraction, default=Fraction("0.1"))
    parser.add_argument("--seeds", type=int, default=5)


def expected(nodes: int, epochs: int, samples: int, least: int) -> float:
    """samples * P[X >= least], X ~ B(epochs, 1 / nodes), computed exactly."""
    total = sum(comb(epochs, k) * (nodes - 1) ** (epochs - k) for k in range(least, epochs + 1))
    return float(samples * Fraction(total, nodes**epochs))


def counted(nodes: int, epochs: int, samples: int, more_than: int, seed: int) -> list[int]:
    """Samples that each node reads more than `more_than` times, in the plan of one job."""
    from nostall.plan import Plan

    plan = Plan(samples=samples, batch_size=1, world_size=nodes, epochs=epochs, seed=seed)
    return [int((plan.node_access(n, 1)[0] > more_than).sum()) for n in range(nodes)]


def run(arguments: argparse.Namespace) -> int:
    """Prints the expectation and the counts."""
    nodes, epochs, samples = arguments.nodes, arguments.epochs, arguments.samples
    threshold = (1 + arguments.delta) * epochs / nodes
    more_than = floor(threshold)
    exact = expected(nodes, epochs, samples, more_than + 1)
    print(
        f"N={nodes} E={epochs} F={samples}: a node reads a sample {epochs / nodes:g} times on average"
    )
    print(f"expected with more than {float(threshold):g} reads (equation 3.8): {exact:.1f}")
    if threshold == more_than:
        inclusive = expected(nodes, epochs, samples, more_than)
        print(f"expected with {more_than} reads or more: {inclusive:.1f}")
    # Epoch e of seed s is epoch e - 1 of seed s + 1 in torch's order: jobs that share no epoch.
    counts = [
        c
        for s in range(arguments.seeds)
        for c in counted(nodes, epochs, samples, more_than, s * epochs)
    ]
    print(
        f"counted in the plans of {arguments.seeds} seeds x {nodes} nodes: median "
        f"{statistics.median(counts):g}, {min(counts)} to {max(counts)}, mean "
        f"{statistics.mean(counts):.1f}"
    )
    return 0
