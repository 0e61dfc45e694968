"""What all tests of benchmarks have."""

from __future__ import annotations

import pytest
from rich.console import Console

from nostall_bench import harness


@pytest.fixture(autouse=True)
def unbroken_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a narrow table breaks its words depends on the numbers that were measured."""
    monkeypatch.setattr(harness, "console", lambda width=0: Console(width=1000))
