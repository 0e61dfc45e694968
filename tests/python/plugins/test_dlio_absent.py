"""DLIO's plug-ins where DLIO is not installed; with it, they are tested by `make dlio-test`."""

from __future__ import annotations

import sys

import pytest


def test_without_dlio_the_plug_ins_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dlio_benchmark", None)
    monkeypatch.delitem(sys.modules, "nostall.plugins.dlio", raising=False)
    with pytest.raises(ImportError, match="install dlio-benchmark"):
        import nostall.plugins.dlio  # noqa: F401
