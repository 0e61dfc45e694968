"""Sizes and tiers as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall.sizes import TierSpec, parse_size, parse_tiers


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


@pytest.mark.parametrize("text", ["", "GiB", "20 parsecs", "-1", "1e9", "1.GB", -1])
def test_what_is_no_size_is_named(text: int | str) -> None:
    with pytest.raises(UsageError, match=re.escape(str(text)) or "is not a size"):
        parse_size(text)


def test_tiers() -> None:
    assert tiers(["ram:20GiB", "/nvme/cache:400GiB:keep"]) == [
        TierSpec("ram", 20 * 2**30),
        TierSpec("file", 400 * 2**30, "/nvme/cache", True),
    ]
    assert tiers("./a:b:1kB") == [TierSpec("file", 1000, str(Path.cwd() / "a:b"))]
    assert tiers([]) == []
    assert tiers("ram:0") == [TierSpec("ram", 0)]


@pytest.mark.parametrize(
    "text", ["ram", "20GiB", ":20GiB", "ram:", "ram:x", "ram:1GiB:keep", "/nvme:keep", "rom:1GiB"]
)
def test_what_is_no_tier_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=text.removeprefix("ram:") or "is not a size"):
        tiers([text])


def test_auto_takes_no_more_than_the_data_set_and_half_of_what_is_free() -> None:
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize
    (small,) = tiers("auto", dataset=1000)
    assert small == TierSpec("ram", 1000)
    (large,) = tiers("auto", dataset=2**60)
    assert 0 < large.capacity <= free // 2 + 2**24
