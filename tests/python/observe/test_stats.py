"""Statistics as data: what is saved comes back, ranks add up, tables agree with the numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.errors import CorruptionError, UsageError
from nostall.observe._stats import (
    ORIGINS,
    BatchRecords,
    EpochStats,
    OriginStats,
    Stats,
    by_loader,
    merge,
)

seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**40)
origins = st.fixed_dictionaries(
    {name: st.builds(OriginStats, counts, counts, seconds) for name in ORIGINS}
)
epochs = st.builds(
    EpochStats,
    epoch=st.integers(0, 99),
    seconds=seconds,
    stall_seconds=seconds,
    batches=counts,
    samples=counts,
    bytes=counts,
    origins=origins,
    decode_seconds=seconds,
    substituted=st.lists(counts, max_size=3),
)
memory = st.fixed_dictionaries(
    dict.fromkeys(("ram_tier", "file_tier", "staging", "io_buffers", "decoding"), counts)
)


def stats(rank: int = 0, *, stall: float = 1.0, source: int = 10) -> Stats:
    return Stats(
        rank=rank,
        world_size=2,
        epochs=[
            EpochStats(
                epoch=0,
                seconds=4.0,
                stall_seconds=stall,
                batches=2,
                samples=8,
                bytes=80,
                origins={
                    "ram": OriginStats(6, 60, 0.1),
                    "file": OriginStats(),
                    "peer": OriginStats(),
                    "source": OriginStats(2, source, 0.5),
                },
                decode_seconds=0.3,
                substituted=[rank],
            )
        ],
        batches=BatchRecords(*([float(rank), 1.0] for _ in range(9))),
        lower_bound_bytes=16,
        memory={
            "ram_tier": 100 + rank,
            "file_tier": 5,
            "staging": 7,
            "io_buffers": 1,
            "decoding": 9,
        },
        peers={"fetched": 3 + rank},
    )


@given(st.lists(epochs, max_size=3), counts, memory)
def test_what_is_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    some: list[EpochStats],
    bound: int,
    pools: dict[str, int],
) -> None:
    file = tmp_path_factory.mktemp("stats") / "s.json"
    one = Stats(3, 4, some, BatchRecords(), bound, pools)
    one.save(file)
    assert Stats.load(file) == one


def test_ranks_add_up_and_the_slowest_counts() -> None:
    both = merge([stats(0, stall=1.0, source=10), stats(1, stall=3.0, source=20)])
    assert both.peers == {"fetched": 7}
    assert (both.seconds, both.stall_seconds, both.samples) == (4.0, 3.0, 16)
    assert both.source_bytes == 30
    assert both.excess == pytest.approx(30 / 16)
    assert both.epochs[0].substituted == [0, 1]
    assert both.batches.wait == [0.0, 1.0, 1.0, 1.0]
    # Tiers are shared by the ranks, buffers are each rank's own.
    assert both.memory == {
        "ram_tier": 101,
        "file_tier": 5,
        "staging": 14,
        "io_buffers": 2,
        "decoding": 18,
    }


def test_an_epoch_that_a_rank_began_twice_counts_whole() -> None:
    ranks = [stats(rank, stall=1.0 + rank) for rank in range(2)]
    twice = [replace(s, epochs=[*s.epochs, replace(s.epochs[0], seconds=1.5)]) for s in ranks]
    (epoch,) = merge(twice).epochs
    assert (epoch.seconds, epoch.stall_seconds, epoch.batches) == (5.5, 4.0, 4)
    assert (epoch.samples, epoch.bytes, epoch.substituted) == (32, 320, [0, 1])
    alone = merge(twice[:1])
    assert (alone.seconds, alone.stall_seconds) == (twice[0].seconds, twice[0].stall_seconds)


def test_only_ranks_of_one_job_are_merged() -> None:
    for other in (replace(stats(1), world_size=3), stats(0)):
        with pytest.raises(UsageError, match="different jobs or loaders"):
            merge([stats(0), other])
    # Asked at different epochs of a job without an end.
    assert merge([stats(0), replace(stats(1), lower_bound_bytes=17)]).lower_bound_bytes == 17
    with pytest.raises(UsageError, match="no statistics"):
        merge([])


def test_loaders_of_a_process_are_told_apart() -> None:
    def made(rank: int, number: int) -> Stats:
        return replace(stats(rank), loader=f"loader {number}")

    some = [made(1, 10), made(0, 2), made(0, 10), made(1, 2), made(1, 2)]
    ranked = [(s.rank, s) for s in some]
    groups = [[(s.rank, s.loader) for s in g] for g in by_loader(ranked, lambda s: s)]
    assert groups == [
        [(0, "loader 2"), (1, "loader 2")],
        [(1, "loader 2")],  # of a process that came after it
        [(1, "loader 10"), (0, "loader 10")],
    ]


def test_plain_text_needs_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    lines = str(stats()).splitlines()
    assert len({len(line) for line in lines[:2]}) == 1, "columns are aligned"
    assert lines[1].split()[:4] == ["0", "4.00", "1.00", "25.0"]
    # The bound is that of all ranks: one rank's bytes say nothing against it.
    assert lines[2] == "read from the source 10 B by rank 0 of 2"
    both = str(merge([stats(0), stats(1)])).splitlines()[-2]
    assert both == "read from the source 20 B, lower bound of the job 16 B"


def test_the_rich_table_has_the_same_cells() -> None:
    table = stats().table()
    cells = [tuple(column.cells) for column in table.columns]
    assert list(zip(*cells, strict=True)) == stats().rows()


def test_statistics_of_the_format_before_are_read() -> None:
    data = replace(stats(), threads=0, fetchers=0).to_dict()
    del data["threads"], data["fetchers"]
    assert Stats.from_dict({**data, "format": 7}) == stats()
    with pytest.raises(CorruptionError, match="format 6, this release reads 7 and 8"):
        Stats.from_dict({**data, "format": 6})


@pytest.mark.parametrize("damage", ["format", "epochs", "batches", "memory", "rank"])
def test_damaged_statistics_are_refused(damage: str) -> None:
    data = stats().to_dict()
    del data[damage]
    with pytest.raises(CorruptionError):
        Stats.from_dict(data)


def test_an_empty_epoch_is_no_division_by_zero(tmp_path: Path) -> None:
    nothing = Stats(0, 1, [], BatchRecords(), 0, {})
    assert nothing.excess == 0.0
    assert replace(stats().epochs[0], seconds=0.0).stall_fraction == 0.0


def test_samples_that_were_replaced_are_named() -> None:
    assert "1 sample (0)" in str(stats(0))
    assert "cannot be used" not in str(replace(stats(), epochs=[]))
