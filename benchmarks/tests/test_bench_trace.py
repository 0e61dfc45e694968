"""``nostall bench trace`` on the gradient engine: both settings run, and record when they should."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from nostall_bench import trace


@pytest.mark.multi
def test_the_engine_with_and_without_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    out = tmp_path / "t.json"
    options = (
        "--dir", str(tmp_path), "--modes", "engine", "timeline", "--pairs", "1", "--steps", "3",
        "--json", str(out),
    )  # fmt: skip
    assert trace.run(parser.parse_args(options)) == 0
    modes = json.loads(out.read_text())["modes"]
    for mode in ("engine", "timeline"):
        off, on = modes[mode]["pairs"][0]
        assert off["trace_bytes"] == 0
        assert on["trace_bytes"] > 0
        assert on["samples"] == off["samples"] == 3
        assert on["cpu"] > 0
    assert not list(tmp_path.glob("data-*"))  # the engine needs no images
    assert "timeline" in capsys.readouterr().out
