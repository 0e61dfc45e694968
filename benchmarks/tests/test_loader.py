"""``nostall bench loader --quick`` measures what is installed and names what is not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench import loader, peers
from nostall_bench.records import FIELDS

pytest_plugins = ["forked_children"]


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loader.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.usefixtures("forked")
def test_quick_measures_nostall_and_torch(tmp_path: Path) -> None:
    modes = ("transform", "fields", "recipe", "cached")
    options = ("--quick", "--dir", str(tmp_path), "--threads", "1", "--modes", *modes)
    names = ("nostall", "torch, workers, PIL", "NumPy")
    assert loader.run(parse(*options, "--loaders", *names)) == 0
    result = json.loads((tmp_path / "loader.json").read_text())
    assert [*result["modes"]] == ["transform", *FIELDS, "recipe", "cached"]
    for mode, rows in result["modes"].items():
        torch = "torch, workers, " + ("NumPy" if mode in ("array", "wav") else "PIL")
        assert {"nostall", torch} <= set(rows)
        assert (loader.LOOP in rows) == (mode in loader.LOOPS)
        assert ("nostall, tar shards" in rows) == (loader.IN_MEMORY in rows) == (mode in FIELDS)
        for name, row in rows.items():
            assert "error" not in row, row
            (only,) = row["runs"]
            assert only["samples_per_s"] > 0
            if name not in (loader.LOOP, loader.IN_MEMORY):
                assert only["samples"] == 128
                assert only["pss_bytes"] > 0
    assert result["machine"]["cores"] >= 1


def test_a_loader_that_is_ahead_of_the_loop_is_named() -> None:
    rows = {
        name: {"runs": [{"samples_per_s": rate}], "samples_per_s": {"median": rate}}
        for name, rate in {loader.LOOP: 100.0, loader.IN_MEMORY: 300.0, "nostall": 125.0}.items()
    }
    rows |= {"DALI, CPU": {"missing": "not installed"}}
    assert loader.passed(rows) == {"nostall": 1.25}
    assert loader.passed({"nostall": rows["nostall"]}) == {}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.module("DALI, CPU"), "REQUIRES", ("no_such_package",))
    assert peers.absent("DALI, CPU") == ["no_such_package"]


def test_an_unknown_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no loader matches"):
        loader.run(parse("--quick", "--dir", str(tmp_path), "--loaders", "nonesuch"))
