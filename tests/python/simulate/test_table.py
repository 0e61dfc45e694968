"""[Böhringer 2020, table 5.1], and what the text says of the other scenarios."""

from __future__ import annotations

import pytest

from nostall.simulate import load_scenario, read_once_bound, simulate
from nostall.simulate._run import Outcome

# Seconds of Table 5.1.
PUBLISHED = {
    "Lower bound": 7.30,
    "Naive": 27.78,
    "HDMLP": 7.78,
    "Staging pool": 10.24,
    "DeepIO (ordered)": 8.41,
    "DeepIO (opportunistic)": 8.40,
    "Parallel data staging": 10.11,
    "LBANN store (dynamic)": 7.71,
    "LBANN store (preloading)": 8.41,
    "Locality-aware loading": 8.41,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Outcome]:
    return {(o.title, o.mode): o for o in simulate(load_scenario("scenario-1"))}


@pytest.mark.parametrize("title", PUBLISHED)
def test_scenario_1_as_published(outcomes: dict[tuple[str, str], Outcome], title: str) -> None:
    found = outcomes[title, "as-published"]
    assert found.ratio == pytest.approx(PUBLISHED[title] / 7.30, rel=0.01)
    assert found.seconds == pytest.approx(PUBLISHED[title], rel=0.02)


def test_nostall_reads_once_and_is_at_the_bound(
    outcomes: dict[tuple[str, str], Outcome],
) -> None:
    ours, theirs = outcomes["nostall", "consistent"], outcomes["HDMLP", "consistent"]
    size = load_scenario("scenario-1").dataset.total
    assert ours.source_mb == pytest.approx(size, rel=1e-6)
    assert theirs.source_mb > 1.5 * size
    assert ours.seconds <= 1.03 * read_once_bound(load_scenario("scenario-1"))
    assert ours.seconds < theirs.seconds


def test_the_published_model_takes_more_than_the_source_gives(
    outcomes: dict[tuple[str, str], Outcome],
) -> None:
    found = outcomes["Staging pool", "as-published"]
    assert found.source_mb / found.seconds > 1.5 * 146
    true = outcomes["Staging pool", "consistent"]
    assert true.source_mb / true.seconds <= 146 * (1 + 1e-9)
