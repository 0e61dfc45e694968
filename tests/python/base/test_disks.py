"""A tier "local" lies on a disk of this machine: not on the network, not in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nostall.base import _disks as disks
from nostall.base._sizes import parse_tiers
from nostall.errors import UsageError


def line(place: Path | str, kind: str, device: str, number: str = "0:1") -> str:
    where = str(place).replace(" ", r"\040")
    return f"36 35 {number} / {where} rw,noatime shared:1 - {kind} {device} rw"


def known(*lines: str) -> list[disks.Mount]:
    return disks.mounts("\n".join(lines))


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("nvme disk", "spinning", "lustre", "memory", "far")}
    for path in found.values():
        path.mkdir()
    for number, rotates in (("8:1", "0"), ("8:17", "1")):
        queue = tmp_path / "sys" / number / "queue"
        queue.mkdir(parents=True)
        (queue / "rotational").write_text(f"{rotates}\n")
    return found


def table(place: dict[str, Path]) -> list[disks.Mount]:
    return known(
        line("/", "overlay", "overlay"),
        line("/etc", "ext4", "/dev/sda1", "8:1"),
        line(place["spinning"], "ext4", "/dev/sdb1", "8:17"),
        line(place["nvme disk"], "xfs", "/dev/nvme0n1p1", "8:1"),
        line(place["lustre"], "lustre", "10.0.0.1@o2ib:/scratch"),
        line(place["memory"], "tmpfs", "tmpfs"),
        line(place["far"], "ext4", "/dev/rbd0", "252:0"),
    )


def test_a_solid_state_disk_is_chosen_before_others(
    place: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = str(tmp_path / "sys")
    with caplog.at_level("INFO", "nostall"):
        chosen = disks.choose({}, table(place), devices=devices)
    assert chosen == str(place["nvme disk"])
    assert "/dev/nvme0n1p1 (xfs, solid state)" in caplog.text
    (tmp_path / "sys" / "8:17" / "queue" / "rotational").write_text("0\n")
    (tmp_path / "sys" / "8:1" / "queue" / "rotational").write_text("1\n")
    assert disks.choose({}, table(place), devices=devices) == str(place["spinning"])


def test_names_of_mounts_need_not_be_text() -> None:
    names = [b"/media/caf\xe9", "/media/caf\u00e9 \u2028".encode(), b"/media/\x0c\x85"]
    found = known(*(line(os.fsdecode(name), "vfat", "/dev/sdb1") for name in names))
    assert [os.fsencode(m.place) for m in found] == names


def test_what_the_launcher_names_is_chosen_if_it_is_a_disk(
    place: dict[str, Path], tmp_path: Path
) -> None:
    job = place["spinning"] / "job 1"
    job.mkdir()
    devices = str(tmp_path / "sys")
    assert disks.choose({"SLURM_TMPDIR": str(job)}, table(place), devices=devices) == str(job)
    for elsewhere in ("lustre", "memory", "far"):
        environment = {"TMPDIR": str(place[elsewhere])}
        assert disks.choose(environment, table(place), devices=devices) == str(place["nvme disk"])


def test_no_disk_is_an_error_that_says_what_there_is(place: dict[str, Path]) -> None:
    mounts = [m for m in table(place) if not m.is_disk]
    with pytest.raises(UsageError, match=r"name a directory.*lustre \(lustre\)"):
        disks.choose({"TMPDIR": str(place["memory"])}, mounts)


def test_the_tier_lies_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disks, "choose", lambda *_: str(tmp_path))
    disks.local_directory.cache_clear()
    try:
        (tier,) = parse_tiers("local:1GiB:keep", dataset_bytes=0, local_world_size=1)
    finally:
        disks.local_directory.cache_clear()
    assert (tier.kind, tier.path, tier.capacity, tier.keep) == ("file", str(tmp_path), 2**30, True)
