"""``nostall bench loader --quick`` measures what is installed and names what is not."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench import loader, peers

pytest_plugins = ["forked_children"]


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loader.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_quick_measures_nostall_and_torch(tmp_path: Path) -> None:
    options = ("--quick", "--dir", str(tmp_path), "--modes", "transform", "cached")
    assert loader.run(parse(*options, "--loaders", "nostall", "torch, 0 workers, PIL")) == 0
    result = json.loads((tmp_path / "loader.json").read_text())
    for mode, name in itertools.product(
        ("transform", "cached"), ("nostall", "torch, 0 workers, PIL")
    ):
        row = result["modes"][mode][name]
        assert "error" not in row
        (only,) = row["runs"]
        assert only["samples"] == loader.MEASURED_EPOCHS[mode] * 128
        assert only["samples_per_s"] > 0
        assert only["pss_bytes"] > 0
    assert result["machine"]["cores"] >= 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.module("DALI, CPU"), "REQUIRES", ("no_such_package",))
    assert peers.absent("DALI, CPU") == ["no_such_package"]


def test_an_unknown_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no loader matches"):
        loader.run(parse("--quick", "--dir", str(tmp_path), "--loaders", "nonesuch"))
