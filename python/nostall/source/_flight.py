"""Requests in flight at an object store: how many, and the threads that make them.

A store answers late and many at once, so a reader that waits for few answers leaves it idle, and one
that asks for too many makes its own requests wait for each other. `Climb` finds the number between
from measurements; `Flight` makes the requests and measures.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from nostall.errors import IoError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_log = logging.getLogger("nostall")

# As many as two threads of a loader ask for; each more costs a thread of this process.
_START, _LEAST, _MOST = 32, 8, 256
_STEP = 1.5
# A step upwards must bring this much more. If the store answers more at once it brings half as much
# again, and nothing if its bandwidth is used.
_GAIN = 1.1
# Measurements of a step before it is given up, and at a number before the next step is tried.
_TRIES, _REST = 2, 12
# Requests in flight, over those that the bandwidth needs, from which on they only wait for each other;
# how many measurements must say so, for a processor that is busy elsewhere looks alike for a moment;
# and the measurements before the next step up, should that have been so.
_TOO_MANY, _SURE, _DOUBT = 2.0, 3, 3
# Measurements among which the shortest time of an answer is looked for.
_LATELY = 50
# The rest after the store asked for fewer requests is doubled so often at most.
_MOST_DOUBLED = 5
# A measurement has at least this many answers per request in flight, and takes so long.
_ANSWERS, _SECONDS = 2, 0.2
# Of the number allowed, what must have been in flight for a measurement to say something about it.
_USED = 0.7
# That requests in flight ask for together: memory beside that of the stage.
_FLYING_BYTES = 32 << 20
# Between two looks whether the answers of a call are still of use.
_LOOK_SECONDS = 0.1


class Choice(NamedTuple):
    """A number of requests, and why."""

    requests: int
    reason: str


class Climb:
    """Climbs to the number of requests in flight from which on more bring no more bytes.

    It goes up by half as long as the bytes per second rise by a tenth, then rests at the last number
    that brought more, and tries again from time to time. It comes down where the requests in flight
    are, in several measurements, more than twice those that the rate of answers needs, at the shortest
    time that an answer has taken lately; and goes back, should that cost bytes, for then the store has
    become slower. A decision follows from the measurements alone.
    """

    def __init__(self, start: int = _START, least: int = _LEAST, most: int = _MOST) -> None:
        self.requests = start
        self._least, self._most = least, most
        self._base = start
        self._base_rate = 0.0  # bytes/s at the base; 0: not measured
        self._best = 0.0  # of the measurements of the present step
        self._tries = self._rests = 0
        self._times: deque[float] = deque(maxlen=_LATELY)  # seconds, means of the measurements
        # By the last measurements, where each said that fewer are needed: those, and bytes/s.
        self._needed: list[tuple[int, float]] = []
        # The base before it came down, and its bytes/s.
        self._above: tuple[int, float] | None = None
        self._overloads = 0

    def measured(self, bytes_per_s: float, answers_per_s: float, seconds: float) -> Choice:
        """What to do after a measurement at `requests` in flight: rates, and the mean time of one."""
        self._times.append(seconds)
        if self._above is not None:
            return self._came_down(bytes_per_s)
        needed = max(self._least, math.ceil(_TOO_MANY * answers_per_s * min(self._times)))
        if needed < self.requests:
            self._needed.append((needed, bytes_per_s))
        else:
            self._needed = []
        if len(self._needed) == _SURE:
            fewer = max(needed for needed, _ in self._needed)
            self._above = self._base, min(rate for _, rate in self._needed)
            self._needed = []
            self._times.clear()  # should the store have become slower, they say nothing
            return self._go(min(fewer, self._base), fewer, "requests wait for each other")
        if self.requests > self._base:
            return self._stepped(bytes_per_s)
        rate = self._base_rate
        self._base_rate = bytes_per_s if rate == 0 else (rate + bytes_per_s) / 2
        if self._rests:
            self._rests -= 1
            return self._go(self._base, self._base, "resting")
        if self._needed:
            return self._go(self._base, self._base, "requests may wait for each other")
        self._overloads = 0
        return self._up("a first measurement" if rate == 0 else "time to try more")

    def overloaded(self) -> Choice:
        """What to do where the store asks for fewer requests: half, for longer each time."""
        self._above, self._needed, self._base_rate = None, [], 0.0
        self._rests = _REST << min(self._overloads, _MOST_DOUBLED)
        self._overloads += 1
        half = max(self._least, self._base // 2)
        return self._go(half, half, "the store asks for fewer")

    def _came_down(self, bytes_per_s: float) -> Choice:
        assert self._above is not None
        base, rate = self._above
        self._above = None
        if _GAIN * bytes_per_s < rate:
            self._base_rate, self._rests = rate, 0
            return self._go(base, base, "fewer requests brought fewer bytes")
        self._base_rate, self._rests = bytes_per_s, _DOUBT
        return self._go(self._base, self._base, "resting")

    def _stepped(self, bytes_per_s: float) -> Choice:
        self._best = max(self._best, bytes_per_s)
        self._tries += 1
        if self._best >= _GAIN * self._base_rate and not self._needed:
            self._base, self._base_rate = self.requests, self._best
            return self._up("more bytes came")
        if self._tries < _TRIES:
            return self._go(self._base, self.requests, "once more")
        self._rests = _REST
        return self._go(self._base, self._base, "no more bytes came")

    def _up(self, reason: str) -> Choice:
        self._best, self._tries = 0.0, 0
        if self._base >= self._most:
            self._rests = _REST
            return self._go(self._base, self._base, "at the limit")
        more = min(self._most, math.ceil(_STEP * self._base))
        return self._go(self._base, more, reason)

    def _go(self, base: int, requests: int, reason: str) -> Choice:
        self._base, self.requests = base, requests
        return Choice(requests, reason)


class Overloaded(IoError):
    """A store that asks for fewer requests, or gives no answer in time."""


def never() -> bool:
    return False


class _Call(Generic[Asked, Answer]):
    """What one call of `Flight.ask` waits for."""

    def __init__(
        self,
        ask: Callable[[Asked], Answer],
        asked: Sequence[Asked],
        sizes: Sequence[int] | None,
        stopped: Callable[[], bool],
    ) -> None:
        self.ask, self.asked, self.stopped = ask, asked, stopped
        self.sizes = [0] * len(asked) if sizes is None else sizes
        self.answers: list[Any] = [None] * len(asked)
        self.left = len(asked)
        self.done = threading.Event()


class Flight:
    """Makes requests, as many at a time as `Climb` says, or as `pinned` does, in the order asked for.

    Thread-safety: any number of threads may ask; requests in flight ask for 32 MiB together, or one for
    more.
    """

    def __init__(self, name: str, pinned: int | None = None) -> None:
        self._name = name
        self._climb = None if pinned else Climb()
        self.requests = pinned or _START
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[_Call[Any, Any], int]] = deque()
        self._flying = 0  # threads that make requests, or are being started for one
        self._tickets: set[object] = set()  # of those that are being started
        self._threads = math.inf  # that the system gave, should it have refused one
        self._bytes_flying = 0
        self._rest = 0  # answers to requests that began before the number was changed
        self._measure_anew(time.monotonic())

    def _measure_anew(self, now: float) -> None:
        self._since = self._counted = now
        self._answers = self._bytes = 0
        self._seconds = self._flown = 0.0

    def ask(
        self,
        ask: Callable[[Asked], Answer],
        asked: Sequence[Asked],
        sizes: Sequence[int] | None = None,
        stopped: Callable[[], bool] = never,
    ) -> list[Any]:
        """The answers of `ask` to all that is asked, or what it raised, in order.

        Args:
            sizes: bytes of the answers; without, nothing is learned from them.
            stopped: whether the answers are of no use any more. Requests that have not begun then get
                an `IoError` instead.
        """
        if os.getpid() != self._process:  # threads and locks do not survive a fork
            self._begin()
        if not asked:
            return []
        call = _Call(ask, asked, sizes, stopped)
        try:
            with self._lock:
                self._waiting.extend((call, i) for i in range(len(asked)))
                if sizes is not None and not self._flying:
                    self._measure_anew(time.monotonic())
            self._start()
            while not call.done.wait(_LOOK_SECONDS):
                if stopped():
                    self._drop(call)
        finally:
            if call.left:  # interrupted
                self._drop(call)
        return call.answers

    def _drop(self, call: _Call[Any, Any]) -> None:
        """Answers those requests of a call that have not begun."""
        with self._lock:
            others = [entry for entry in self._waiting if entry[0] is not call]
            mine = [number for of, number in self._waiting if of is call]
            self._waiting = deque(others)
            for number in mine:
                self._answer(call, number, self._closed())
        self._start()

    def _closed(self) -> IoError:
        return IoError(f"{self._name} is read no further: its reader was closed")

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        call, number = self._waiting[0]
        held = self._bytes_flying
        return not held or held + call.sizes[number] <= _FLYING_BYTES

    def _reserve(self, tickets: list[object]) -> None:
        """Under the lock: a ticket for each thread that is to be started, which counts from here on."""
        if not self._may_begin():
            return
        most = int(min(self.requests, self._threads)) - self._flying
        tickets += [object() for _ in range(min(most, len(self._waiting)))]
        if tickets:
            self._tickets.update(tickets)
            self._fly(len(tickets), time.monotonic())

    def _start(self) -> None:
        """Without the lock, for a thread is waited for until it runs."""
        tickets: list[object] = []
        started = 0
        try:
            with self._lock:
                self._reserve(tickets)
            for ticket in tickets:
                threading.Thread(target=self._work, args=(ticket,), name="nostall objects").start()
                started += 1
        except BaseException as error:
            with self._lock:
                # A thread that was interrupted while it started may have taken its ticket; those before
                # it take theirs, though perhaps not yet.
                unused = self._tickets.intersection(tickets[started:])
                self._tickets -= unused
                self._fly(-len(unused), time.monotonic())
                # Without one more thread, or at the interpreter's end.
                refused = isinstance(error, RuntimeError)
                if refused:
                    self._threads = max(1, self._flying)
                    if not self._flying:
                        self._refuse(error)
            if not refused:
                raise

    def _refuse(self, error: BaseException) -> None:
        self._threads = math.inf  # the next call tries again
        while self._waiting:
            call, number = self._waiting.popleft()
            self._answer(call, number, error)

    def _fly(self, change: int, now: float) -> None:
        self._flown += self._flying * (now - self._counted)
        self._counted = now
        self._flying += change

    def _work(self, ticket: object) -> None:
        """Makes requests one after the other while there are some, and not too many in flight."""
        with self._lock:
            if ticket not in self._tickets:  # whoever started this thread was interrupted
                return
            self._tickets.remove(ticket)
        while True:
            with self._lock:
                if not threading.main_thread().is_alive():  # the interpreter waits for this thread
                    self._refuse(self._closed())
                if self._flying > self.requests or not self._may_begin():
                    self._fly(-1, time.monotonic())
                    if not self._flying:
                        self._threads = math.inf
                    return
                call, number = self._waiting.popleft()
                size = call.sizes[number]
                self._bytes_flying += size
            began = time.monotonic()
            answer: Any
            try:
                answer = self._closed() if call.stopped() else call.ask(call.asked[number])
            except BaseException as error:  # whoever asked must not wait for ever
                answer = error
            with self._lock:
                now = time.monotonic()
                self._bytes_flying -= size
                self._answer(call, number, answer)
                self._fly(0, now)
                self._learn(now, now - began, answer)
            self._start()

    @staticmethod
    def _answer(call: _Call[Any, Any], number: int, answer: Any) -> None:
        call.answers[number] = answer
        call.left -= 1
        if not call.left:
            call.done.set()

    def _learn(self, now: float, seconds: float, answer: Any) -> None:
        if self._climb is None:
            return
        if isinstance(answer, Overloaded) and not self._rest:
            self._change(self._climb.overloaded(), now)
            return
        if self._rest:  # one that failed too is one that began before
            self._rest -= 1
            if not self._rest:
                self._measure_anew(now)
            return
        if not isinstance(answer, (bytes, memoryview)):
            return
        self._answers += 1
        self._bytes += len(answer)
        self._seconds += seconds
        took = now - self._since
        if self._answers < _ANSWERS * self.requests or took < _SECONDS:
            return
        if self._flown >= _USED * self.requests * took:
            choice = self._climb.measured(
                self._bytes / took, self._answers / took, self._seconds / self._answers
            )
            self._change(choice, now)
        self._measure_anew(now)

    def _change(self, choice: Choice, now: float) -> None:
        if choice.requests == self.requests:
            return
        took = max(1e-9, now - self._since)
        _log.debug(
            "%s: %d requests in flight after %d: %s (%.1f MB/s, %.0f ms a request)",
            *(self._name, choice.requests, self.requests, choice.reason),
            *(self._bytes / took / 1e6, 1e3 * self._seconds / max(1, self._answers)),
        )
        self._rest = self._flying
        self.requests = choice.requests
