"""Devices whose events do not serve as a clock: a record goes on without their waits."""

from __future__ import annotations

import logging
import os
import types
from typing import Any

import pytest

from nostall.base import _device_clock


class Card:
    """A device."""

    type = "card"

    def __str__(self) -> str:
        return "card:0"


class Torch:
    """As much of torch as the clock asks for; the `fails`-th use of events fails."""

    def __init__(self, fails: int) -> None:
        self.left = fails
        self.captures = False
        self.recorded = 0
        self.accelerator = types.SimpleNamespace(current_stream=lambda device: None)
        self.card = types.SimpleNamespace(is_current_stream_capturing=lambda: self.captures)

    def Stream(self, device: Any) -> None:
        return None

    def Event(self, **options: Any) -> Any:
        event = types.SimpleNamespace(record=self.record)
        event.synchronize = self.use
        event.elapsed_time = lambda end: 0.0
        return event

    def record(self, stream: Any) -> None:
        assert not self.captures
        self.recorded += 1

    def use(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("events of this device have no time\nmore")


def record(monkeypatch: pytest.MonkeyPatch) -> None:
    native = types.SimpleNamespace(
        trace_on=lambda: True,
        trace_now=lambda: 0,
        trace_kind=lambda lane, name: 0,
        trace_record=lambda kind, begin, end: None,
    )
    monkeypatch.setattr(_device_clock, "_native", native)
    monkeypatch.setattr(_device_clock, "_clocks", {})


@pytest.mark.parametrize("fails", [1, 2], ids=["at once", "later"])
def test_a_device_without_times_is_said_once(
    fails: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(monkeypatch)
    torch, card = Torch(fails), Card()
    with caplog.at_level(logging.WARNING, "nostall"):
        for _ in range(3):
            with _device_clock.waiting(torch, card, "copy"):
                pass
            for clock in _device_clock._clocks.values():
                if clock:
                    clock._thread.join(60)  # it ends by the error
                    assert not clock._thread.is_alive()
                    assert clock._items.empty()  # no thread takes what would be put there
    said = [r.getMessage() for r in caplog.records]
    assert said == ["waits of device card:0 are not recorded: events of this device have no time"]


def test_nothing_is_enqueued_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch)
    torch, card = Torch(fails=1000), Card()
    try:
        for captures in (True, False, True):
            torch.captures = captures
            with _device_clock.waiting(torch, card, "gradient"):
                pass
            _device_clock.end_step(torch, card)
            # The anchor, the two ends of the wait, and the end of the step.
            assert torch.recorded == (0 if not _device_clock._clocks else 4)
        assert _device_clock._clocks
    finally:
        _device_clock.settle(last=True)


def test_a_forked_child_waits_for_no_lock_of_its_parent() -> None:
    with _device_clock._lock:
        child = os.fork()
        if child == 0:
            os._exit(not _device_clock._lock.acquire(blocking=False))
    assert os.waitpid(child, 0)[1] == 0
