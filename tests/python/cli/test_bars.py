"""Commands that may take long show bars on a terminal, and nothing of them anywhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from terminal import on_terminal

import nostall
from nostall.cli import main

RUN = """
import json, sys
from nostall.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


def commands(images: Path, folder: Path) -> dict[str, list[str]]:
    """By what their bars say."""
    return {
        "listing": ["index", str(images), "--index", str(folder / "listing.idx")],
        "writing": ["convert", str(images), str(folder / "shards"), "--to", "tar"],
        "examined": ["index", str(folder / "shards"), "--index", str(folder / "shards.idx")],
        "step 1 rank 0": ["checkpoints", "verify", str(folder / "saved")],
        "reading step 1": ["checkpoints", "restore-dry-run", str(folder / "saved")],
    }


def test_bars_are_drawn_on_a_terminal_alone(
    image_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = [tmp_path / "terminal", tmp_path / "pipe"]
    for place in places:
        with nostall.Checkpointer(place / "saved") as saving:
            saving.save({"weights": np.ones(10)}, 1)
    capfd.readouterr()
    shown, piped = (commands(image_folder, place) for place in places)
    status, text = on_terminal([sys.executable, "-c", RUN, json.dumps(list(shown.values()))])
    assert status == 0, text
    for words in piped.values():
        assert main(words) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for label in shown:
        assert f"{label} " in text, text
        assert f"{label} " not in out
    assert "━" in text
    assert "━" not in out
