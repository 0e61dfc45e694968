"""The command that runs campaigns (tests/campaigns): what it says of one that cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ci", "options", "status"), [("", [], 0), ("true", [], 1), ("true", ["--lacking", "1"], 0)]
)
def test_what_a_campaign_lacks_fails_continuous_integration_alone(
    ci: str, options: list[str], status: int
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CI"} | {"CC": "no-such-compiler"}
    environment["PYTHONPATH"] = os.pathsep.join([str(CAMPAIGNS), os.environ.get("PYTHONPATH", "")])
    if ci:
        environment["CI"] = ci
    done = subprocess.run(
        [sys.executable, "-m", "campaigns", "nth_call", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.splitlines()[-1] == "  nth_call lacks a C compiler (no-such-compiler)"
    assert "0 campaigns ran, 0 failed; 1 could not run" in done.stdout
    assert done.returncode == status, done.stdout + done.stderr
