"""``nostall bench accelerator`` on tiny records: utilisation, and bytes that were really read."""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench import accelerator, slowfs


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    accelerator.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.multi
@pytest.mark.skipif(slowfs.missing() is not None, reason=str(slowfs.missing()))
def test_two_accelerators_read_once_with_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    options = (
        "--dir", str(tmp_path), "--profile", "cosmoflow", "--scale", "0.005", "--batches", "20",
        "--epochs", "2", "--accelerators", "2", "--repeats", "1", "--bandwidth", "20",
        "--loaders", "hold all", "no tiers", "--json", str(out),
    )  # fmt: skip
    assert accelerator.run(parse(*options)) == 0
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["storage_bytes"] == ours["data_bytes"]
    assert theirs["storage_bytes"] == 2 * theirs["data_bytes"]
    for row in (ours, theirs):
        assert 0 < row["au"] <= 1
        assert row["seconds"] > row["allowed"]["seconds"] > 0
        assert 0 < row["au_first"] <= 1
        assert row["samples_per_s"] > 0
    said = " ".join(capsys.readouterr().out.split())
    assert "accelerators fed at 70%" in said
    assert f"nostall's tiers are memory; {slowfs.memory_words(False)}" in said


@pytest.mark.multi
@pytest.mark.skipif(slowfs.missing() is not None, reason=str(slowfs.missing()))
def test_the_page_cache_spares_later_epochs_where_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    options = (
        "--dir", str(tmp_path), "--profile", "cosmoflow", "--scale", "0.005", "--batches", "8",
        "--epochs", "3", "--repeats", "1", "--bandwidth", "20", "--keep-cache",
        "--loaders", "0 workers", "--json", str(out),
    )  # fmt: skip
    assert accelerator.run(parse(*options)) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["storage_bytes"] == row["data_bytes"]
    # Nothing is left to be read in a later epoch.
    assert row["allowed"]["au_later"] == pytest.approx(1)
    assert slowfs.memory_words(True) in " ".join(capsys.readouterr().out.split())


def test_records_are_made_once(tmp_path: Path) -> None:
    home = accelerator.make_records(tmp_path / "r", 3_000_000, 2)
    first = [(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(home.rglob("*.bin"))]
    assert [size for _, _, size in first] == [3_000_000] * 2
    accelerator.make_records(home, 3_000_000, 2)
    again = [(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(home.rglob("*.bin"))]
    assert again == first


def test_an_unknown_loader_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no loader matches"):
        accelerator.run(parse("--dir", str(tmp_path), "--loaders", "none such"))


def test_what_the_storage_allows() -> None:
    profile = accelerator.Profile(record=1000, batch=10, compute=1.0, goal=0.9)
    half = 5000.0  # bytes a second: a batch takes two seconds to read, one to compute
    # Batches come at 2, 4, .. 20; the first wait does not count: 10 busy of 19 seconds.
    alone = accelerator.allowed(profile, 10, 1, half, 1.0)
    assert astuple(alone) == pytest.approx((10 / 19, 10 / 19, 10 / 19, 21))
    # Tiers hold all: the second epoch reads nothing. They hold half: it reads as fast as it computes.
    for share in (1.1, 0.5):
        found = accelerator.allowed(profile, 10, 2, half, share)
        assert astuple(found) == pytest.approx((20 / 29, 10 / 19, 1, 31))
    nothing = accelerator.allowed(profile, 10, 2, half, 0.0)
    assert astuple(nothing) == pytest.approx((20 / 39, 10 / 19, 10 / 20, 41))
    # Two accelerators share the storage.
    assert accelerator.allowed(profile, 10, 1, half, 1.0, 2).au == pytest.approx(10 / 37)


def test_the_profiles_need_what_mlperf_says() -> None:
    needs = {name: p.need / 1e6 for name, p in accelerator.PROFILES.items()}
    of_v2 = {"resnet50": 204.75, "unet3d": 3177.1, "cosmoflow": 808.1}
    of_v3 = {"unet3d-b200": 6334.6, "retinanet-b200": 163.0, "retinanet-mi355": 163.0}
    assert needs == pytest.approx(of_v2 | of_v3, 0.001)
