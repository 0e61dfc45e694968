"""Sizes and tiers as people write them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall.base._sizes import (
    TierSpec,
    defaults,
    format_bytes,
    parse_size,
    parse_tiers,
    warn_of_tiers,
    within,
)
from nostall.errors import UsageError


def tiers(spec: str | list[str], dataset: int = 1000) -> list[TierSpec]:
    return parse_tiers(spec, dataset_bytes=dataset, local_world_size=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("512k", 2**19),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


def test_a_tier_that_looks_like_an_unmounted_disk_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_tiers([TierSpec("file", 1 << 20, str(tmp_path / "new"))], [], 1 << 60)
    assert not caplog.text
    warn_of_tiers([TierSpec("file", 1 << 20, str(tmp_path / "nvme" / "cache"))], [], 1 << 60)
    assert f"is made in {tmp_path}, because {tmp_path}/nvme is not there" in caplog.text
    caplog.clear()
    for path in ("/nostall-unmounted", "/nostall-unmounted/job"):
        warn_of_tiers([TierSpec("file", 1 << 59, path)], [], 1 << 60)
    assert not caplog.text  # it is refused where it is opened
    warn_of_tiers([TierSpec("file", 1 << 59, str(tmp_path))], [], 1 << 20)
    assert not caplog.text
    warn_of_tiers([TierSpec("file", 1 << 59, str(tmp_path))], [], 1 << 60)
    assert "is a disk not mounted?" in caplog.text


def test_a_tier_larger_than_the_free_memory_is_told(caplog: pytest.LogCaptureFixture) -> None:
    limits = [Left("machine", 9 << 30)]
    warn_of_tiers([TierSpec("ram", 9 << 30)], limits, 1 << 40)
    warn_of_tiers([TierSpec("ram", 10 << 30)], limits, 9 << 30)
    warn_of_tiers([TierSpec("ram", 10 << 30, modest=True)], limits, 1 << 40)
    assert not caplog.text
    warn_of_tiers([TierSpec("ram", 10 << 30)], limits, 1 << 40)
    assert "asks for 10.0 GiB of memory and 9.0 GiB are free" in caplog.text


def test_sizes_are_written_in_decimal_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**12)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "2000.0 GB"),
    ]
    assert format_bytes(12.345, 2, "/s") == "12.35 B/s"
    assert format_bytes(2e9, 0, "/s") == "2 GB/s"


@pytest.mark.parametrize("text", ["", "GiB", "20 parsecs", "-1", "1e9", "1.GB", -1, True, 1.5])
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(str(text)) or "is not a size"):
        parse_size(text)


def test_auto_in_a_list_is_refused() -> None:
    with pytest.raises(UsageError, match='pass tiers="auto"'):
        tiers(["auto"])


def test_tiers() -> None:
    assert tiers(["ram:20GiB", "/nvme/cache:400GiB:keep"]) == [
        TierSpec("ram", 20 * 2**30),
        TierSpec("file", 400 * 2**30, "/nvme/cache", True),
    ]
    assert tiers(["/nvme:1GiB:keep:readers=4", "/sata:1GiB:readers=1"]) == [
        TierSpec("file", 2**30, "/nvme", True, readers=4),
        TierSpec("file", 2**30, "/sata", readers=1),
    ]
    assert tiers("./a:b:1kB") == [TierSpec("file", 1000, str(Path.cwd() / "a:b"))]
    assert tiers([]) == []
    assert tiers("ram:0") == [TierSpec("ram", 0)]


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert tiers("~/cache:1kB:keep") == [TierSpec("file", 1000, "/somebody/cache", True)]
    assert tiers("./~/cache:1kB") == [TierSpec("file", 1000, str(Path.cwd() / "~" / "cache"))]


def test_a_tier_of_some_bytes_was_meant_in_another_unit() -> None:
    with pytest.raises(
        UsageError, match=r'"ram:20": 20 are bytes; write a unit, for example 20GiB'
    ):
        tiers("ram:20")


@pytest.mark.parametrize(
    "text",
    [
        *("ram", "20GiB", ":20GiB", "ram:", "ram:x", "ram:1GiB:keep", "/nvme:keep", "rom:1GiB"),
        *("ram:1GiB:readers=2", "/nvme:1GiB:readers=0", "/nvme:1GiB:readers=", "/nvme:readers=2"),
    ],
)
def test_what_is_no_tier_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=text.removeprefix("ram:") or "is not a size"):
        tiers([text])


@dataclass(frozen=True)
class Left:
    kind: str
    left: int
    what: str = "a limit"
    most: int = 2**50


@pytest.mark.parametrize(
    ("left", "ram", "staging", "reason"),
    [
        ([], 1000, 256 << 20, "the size of the data set"),
        ([Left("machine", 2**40)], 1000, 256 << 20, "the size of the data set"),
        ([Left("machine", 2**40), Left("cgroup", 1600, "c")], 800, 200, "half of what c leaves"),
        ([Left("machine", 1600), Left("shared_memory", 0, "s")], 0, 200, "half of what s leaves"),
        ([Left("address_space", 80, "v"), Left("machine", 90)], 40, 10, "half of what v leaves"),
    ],
)
def test_defaults_follow_the_limit_that_leaves_least(
    left: list[Left], ram: int, staging: int, reason: str
) -> None:
    chosen = defaults(left, dataset_bytes=1000, local_world_size=1)
    assert (chosen.ram, chosen.staging, chosen.reason) == (ram, staging, reason)
    assert chosen.reading <= chosen.staging


def test_ranks_of_a_node_plan_the_same_tier_whatever_is_in_use_when_they_start() -> None:
    for left in (0, 700, 1600):
        limits = [Left("machine", left, most=1800), Left("shared_memory", 9, most=2000)]
        chosen = defaults(limits, dataset_bytes=1000, local_world_size=4)
        assert chosen.ram == 900
        assert chosen.staging == left // 4 // 8


def test_a_stated_size_that_cannot_be_had_is_filled_with_modesty() -> None:
    limits = [Left("cgroup", 500), Left("shared_memory", 100)]
    given = [TierSpec("ram", 500), TierSpec("ram", 501), TierSpec("file", 1000, "/nvme")]
    sizes = {"dataset_bytes": 2000, "memory": 1000}
    assert [t.modest for t in within(given, limits, **sizes)] == [False, True, False]
    assert within(given, [], **sizes) == given


def test_a_tier_larger_than_the_machine_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    given = [TierSpec("ram", 20 << 30), TierSpec("file", 400 << 30, "/nvme")]
    memory = 16 << 30
    (small, file) = within(given, [], dataset_bytes=1000, memory=memory)
    assert small == TierSpec("ram", 1000) and file == given[1]
    assert not caplog.records
    limits = [Left("machine", 9 << 30)]
    for _ in range(2):
        (large, _) = within(given, limits, dataset_bytes=1 << 40, memory=memory)
        assert large == TierSpec("ram", memory, modest=True)
    (told,) = caplog.records
    assert "asks for 20.0 GiB of memory and this machine has 16.0 GiB" in told.getMessage()
    with pytest.raises(UsageError, match="which no machine has"):
        within([TierSpec("ram", 2**50 + 1)], [], dataset_bytes=1000, memory=memory)


def test_auto_takes_no_more_than_the_data_set_and_half_of_what_is_left() -> None:
    (small,) = tiers("auto", dataset=1000)
    assert small == TierSpec("ram", 1000, modest=True)
    (large,) = tiers("auto", dataset=2**60)
    status = os.statvfs("/dev/shm")
    assert 0 < large.capacity <= status.f_blocks * status.f_frsize // 2


def test_a_size_may_be_a_number_of_numpy() -> None:
    assert type(parse_size(np.int64(4096))) is int  # type: ignore[arg-type]
