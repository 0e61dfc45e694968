"""``nostall bench dlio`` in DLIO: two emulated hosts, with DLIO's own loader and nostall's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from nostall_bench import dlio, hosts, slowfs

MISSING = hosts.missing() or slowfs.missing()


@pytest.mark.multi
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_both_loaders_are_measured_on_two_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    dlio.add_arguments(parser)
    out = tmp_path / "out.json"
    options = (
        "--dir", str(tmp_path), "--scale", "0.001", "--memory", "2GiB", "--data", "0.001",
        "--epochs", "2", "--repeats", "1", "--json", str(out),
    )  # fmt: skip
    assert dlio.run(parser.parse_args(options)) == 0
    found = json.loads(out.read_text())
    ours, theirs = found["rows"]
    assert (ours["loader"], theirs["loader"]) == ("nostall", "DLIO's own")
    for row in (ours, theirs):
        # All of it in the first epoch; in the second, what another host has read.
        assert 1 <= row["storage_bytes"] / found["data_bytes"] <= 2
        assert len(row["au_epochs"]) == 2
        assert all(0 < au <= 1 for au in row["au_epochs"])
    assert "DLIO unet3d_h100, records x 0.001: 2 hosts" in capsys.readouterr().out
