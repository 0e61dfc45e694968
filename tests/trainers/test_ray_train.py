"""The example for Ray Train, with the real package: `make trainers-test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.multi
def test_a_worker_is_killed_and_no_sample_is_missed(tmp_path: Path) -> None:
    for script in ("make-data.py", "train-ray.py"):
        done = subprocess.run(
            [sys.executable, EXAMPLES / script, tmp_path],
            capture_output=True,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "the same batches" in done.stdout
    # Ray says what it sees first: the death, or what the other worker or a poll sees of it.
    told = "actor is dead|actor is temporarily unavailable|connection (closed|reset) by peer"
    assert re.search(told, done.stdout + done.stderr, re.IGNORECASE)
