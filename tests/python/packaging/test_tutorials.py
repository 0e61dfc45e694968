"""The notebooks of the tutorials hold: all their cells run, in order, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import prefork
import pytest

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"


@pytest.mark.parametrize("name", sorted(path.name for path in TUTORIALS.glob("*.ipynb")))
def test_every_cell_runs(name: str, tmp_path: Path) -> None:
    cells = json.loads((TUTORIALS / name).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    run = prefork.run(["-c", "\n".join(code)], torch=True, cwd=tmp_path, timeout=800)
    assert run.returncode == 0, run.stderr
