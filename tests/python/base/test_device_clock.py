"""Devices whose events do not serve as a clock: a record goes on without their waits."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

from nostall.base import _device_clock


class Torch:
    """As much of torch as the clock asks for; the `fails`-th use of events fails."""

    def __init__(self, fails: int) -> None:
        self.left = fails
        self.accelerator = types.SimpleNamespace(current_stream=lambda device: None)

    def Stream(self, device: Any) -> None:
        return None

    def Event(self, **options: Any) -> Any:
        event = types.SimpleNamespace(record=lambda stream: None)
        event.synchronize = self.use
        event.elapsed_time = lambda end: 0.0
        return event

    def use(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("events of this device have no time\nmore")


@pytest.mark.parametrize("fails", [1, 2], ids=["at once", "later"])
def test_a_device_without_times_is_said_once(
    fails: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = types.SimpleNamespace(trace_on=lambda: True, trace_now=lambda: 0)
    monkeypatch.setattr(_device_clock, "_native", native)
    monkeypatch.setattr(_device_clock, "_clocks", {})
    torch = Torch(fails)
    with caplog.at_level(logging.WARNING, "nostall"):
        for _ in range(3):
            with _device_clock.waiting(torch, "card:0", "copy"):
                pass
            for clock in _device_clock._clocks.values():
                if clock:
                    clock._thread.join(20)  # it ends by the error
                    assert not clock._thread.is_alive()
                    assert clock._items.empty()  # no thread takes what would be put there
    said = [r.getMessage() for r in caplog.records]
    assert said == ["waits of device card:0 are not recorded: events of this device have no time"]
