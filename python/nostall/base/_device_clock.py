"""What a device waits for, on its own clock, while this process records a trace.

A wait begins and ends with an event on the stream that waits. The time between the two is the
device's: what it had to do before is over, and what comes afterwards has not begun. A thread for each
device waits for the events and records their times, so that the training thread enqueues and goes
on. The beginnings of waits for input also divide the device's time into steps.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from nostall import _native
from nostall.base._streams import awaited

_log = logging.getLogger("nostall")

# What a device can wait for: the host has no batch; a batch, a gradient or a save is still copied.
CAUSES = ("input", "copy", "gradient", "checkpoint")

_ANCHOR = 10.0  # seconds; torch's elapsed times have seven digits
_END = 10.0  # seconds that a record waits for what devices still do
_NOTHING = contextlib.nullcontext()

# None of a device whose events cannot be timed.
_clocks: dict[Any, DeviceClock | None] = {}
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child, which has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _clocks.clear()


os.register_at_fork(after_in_child=_begin_anew)


def waiting(torch: Any, device: Any, cause: str) -> AbstractContextManager[None]:
    """What is enqueued inside a `with` is a wait, as is the time that the host takes.

    Of the stream that is the calling thread's current one on the device. While a graph is captured
    nothing is enqueued, and nothing waits: an event would be the graph's.
    """
    if not _native.trace_on() or _is_captured(torch, device):
        return _NOTHING
    clock = _clock(torch, device)
    return clock.wait(torch.accelerator.current_stream(device), cause) if clock else _NOTHING


def end_step(torch: Any, device: Any) -> None:
    """The last step before a pause ends with what the current stream has got so far."""
    if not _native.trace_on() or _is_captured(torch, device):
        return
    if clock := _clock(torch, device):
        clock.put("", torch.accelerator.current_stream(device))


def _is_captured(torch: Any, device: Any) -> bool:
    """Whether what the calling thread enqueues becomes part of a graph."""
    module = getattr(torch, device.type, None)
    captures = getattr(module, "is_current_stream_capturing", None)
    return captures is not None and bool(captures())


def waits_of(device: Any) -> dict[str, float]:
    """Steps of a device, their seconds together, and the seconds of them that it waited, by cause.

    Empty where nothing was recorded.
    """
    clock = _clocks.get(device)
    return clock.counts() if clock is not None else {}


def begin() -> None:
    """A recording begins: counts from nothing."""
    with _lock:
        _clocks.clear()


def settle(last: bool = False) -> None:
    """Waits for what devices have to do, so that counts have it; `last` ends the recording."""
    with _lock:
        clocks = [clock for clock in _clocks.values() if clock]
    for clock in clocks:
        clock.settle(last)


def _clock(torch: Any, device: Any) -> DeviceClock | None:
    with _lock:
        if device not in _clocks:
            try:
                _clocks[device] = DeviceClock(torch, device)
            except (RuntimeError, NotImplementedError) as error:
                _clocks[device] = None
                _warn(device, error)
        return _clocks[device]


def _warn(device: Any, error: Exception) -> None:
    why = str(error).partition("\n")[0]
    _log.warning("waits of device %s are not recorded: %s", device, why)


class _Item(NamedTuple):
    """A wait, or with the same event twice a moment."""

    cause: str
    begin: Any
    end: Any


class DeviceClock:
    """Of one device; `wait` and `put` from any thread."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._items: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the counts
        self._steps, self._seconds = 0, 0.0
        self._waits: collections.Counter[str] = collections.Counter()
        self._step: Any = None  # the event with which the current one began
        self._in_step: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._run, name="nostall-clock", daemon=True)
        # A stream without work: the event is reached at once.
        self._anchor = self._record(torch.Stream(device=device))
        self._anchor.synchronize()
        self._moment = _native.trace_now()
        self._thread.start()

    @contextlib.contextmanager
    def wait(self, stream: Any, cause: str) -> Iterator[None]:
        before = self._record(stream)
        yield
        self._put(_Item(cause, before, self._record(stream)))

    def put(self, cause: str, stream: Any) -> None:
        moment = self._record(stream)
        self._put(_Item(cause, moment, moment))

    def counts(self) -> dict[str, float]:
        with self._lock:
            if not self._steps:
                return {}
            waits = {cause: self._waits[cause] for cause in CAUSES}
            return {"steps": self._steps, "seconds": self._seconds, **waits}

    def settle(self, last: bool) -> None:
        reached = threading.Event()
        self._items.put(reached)
        if self._thread.is_alive():
            reached.wait(_END)
        if last:
            self._items.put(None)

    def _put(self, item: _Item) -> None:
        if self._thread.is_alive():  # else an error of the device has ended it
            self._items.put(item)

    def _record(self, stream: Any) -> Any:
        event = awaited(self._torch, self._device, enable_timing=True)
        event.record(stream)
        return event

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the name of the lane
            comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
            comm.write_text(str(self._device)[:15])
        try:
            while (item := self._items.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                item.end.synchronize()
                self._take(item)
        except RuntimeError as error:
            _warn(self._device, error)

    def _take(self, item: _Item) -> None:
        if item.cause in ("", "input"):
            self._end_step(item.begin, item.cause == "input")
        if item.cause:
            seconds = item.begin.elapsed_time(item.end) / 1e3
            self._in_step[item.cause] += seconds
            self._write(item.cause, item.begin, item.end)

    def _end_step(self, moment: Any, another: bool) -> None:
        if self._step is not None:
            seconds = self._step.elapsed_time(moment) / 1e3
            with self._lock:
                self._steps += 1
                self._seconds += seconds
                self._waits.update(self._in_step)
            self._write("step", self._step, moment)
        self._step = moment if another else None
        self._in_step.clear()

    def _write(self, name: str, begin: Any, end: Any) -> None:
        from_anchor = self._anchor.elapsed_time(begin) / 1e3
        at = self._moment + round(from_anchor * 1e9)
        length = round(begin.elapsed_time(end) * 1e6)
        kind = _native.trace_kind(f"device {self._device}", name)
        _native.trace_record(kind, at, at + length)
        if from_anchor > _ANCHOR:
            self._anchor, self._moment = begin, at
