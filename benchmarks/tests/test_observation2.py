"""The figure of [Böhringer 2020, eq. 3.8], and the counts of real plans around it."""

from __future__ import annotations

from nostall_bench.observation2 import counted, expected


def test_the_expectation_is_the_seeds_323() -> None:
    assert round(expected(4, 1000, 10_000, 276)) == 323
    assert expected(2, 1, 10, 0) == 10
    assert expected(2, 2, 8, 2) == 2


def test_plans_agree_with_the_expectation() -> None:
    counts = counted(4, 200, 5_000, 60, seed=1)
    mean = expected(4, 200, 5_000, 61)
    # Each count has a standard deviation near the square root of its mean.
    assert all(abs(c - mean) < 5 * mean**0.5 for c in counts)
