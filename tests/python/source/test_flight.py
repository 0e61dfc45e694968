"""Requests in flight: decisions from made-up measurements, and what a server is really asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from nostall.errors import IoError
from nostall.source import _flight
from nostall.source._flight import Climb, Flight, Overloaded

# (bytes/s, requests/s, seconds a request) of a store by the requests in flight.
Store = Callable[[int], tuple[float, float, float]]


def emulated(latency: float, bandwidth: float, size: float) -> Store:
    """Each request takes the latency, or longer where its bytes wait for those of others."""

    def measure(flying: int) -> tuple[float, float, float]:
        seconds = max(latency + size / bandwidth, flying * size / bandwidth)
        return flying * size / seconds, flying / seconds, seconds

    return measure


def climb(climb: Climb, store: Store, measurements: int) -> list[int]:
    numbers = []
    for _ in range(measurements):
        before = climb.requests
        choice = climb.measured(*store(before))
        assert choice.requests == climb.requests
        assert choice.reason
        numbers.append(choice.requests)
    return numbers


@pytest.mark.parametrize("latency", [0.005, 0.03, 0.1])
def test_the_climb_ends_where_the_bandwidth_is_used(latency: float) -> None:
    store, chosen = emulated(latency, 80e6, 95e3), Climb()
    climb(chosen, store, 40)
    best = max(store(n)[0] for n in range(1, 257))
    resting = [n for n in climb(chosen, store, 200) if n == chosen.requests]
    assert len(resting) > 150
    assert store(chosen.requests)[0] >= 0.9 * best
    needed = latency * 80e6 / 95e3 + 1
    assert chosen.requests <= max(32, 2.5 * needed)


def test_more_requests_are_made_while_more_bytes_come() -> None:
    chosen = Climb(start=32, most=256)
    numbers = climb(chosen, emulated(0.1, 1e12, 95e3), 20)
    assert numbers[:5] == [48, 72, 108, 162, 243]
    assert set(numbers[5:]) <= {243, 256}


def test_a_step_that_brings_nothing_is_taken_back_after_a_second_look() -> None:
    chosen = Climb(start=32)
    assert chosen.measured(10e6, 100, 0.3) == (48, "a first measurement")
    assert chosen.measured(10.5e6, 105, 0.4) == (48, "once more")
    assert chosen.measured(10.2e6, 102, 0.4) == (32, "no more bytes came")
    assert chosen.measured(10e6, 100, 0.3) == (32, "resting")


def test_a_slow_first_look_at_a_step_does_not_end_it() -> None:
    chosen = Climb(start=32)
    chosen.measured(10e6, 100, 0.3)
    assert chosen.measured(9e6, 90, 0.5).requests == 48
    assert chosen.measured(15e6, 150, 0.3) == (72, "more bytes came")


def test_a_store_that_has_become_faster_is_found_again() -> None:
    chosen = Climb()
    climb(chosen, emulated(0.03, 20e6, 95e3), 60)
    assert chosen.requests <= 48
    climb(chosen, emulated(0.03, 400e6, 95e3), 120)
    assert chosen.requests >= 100


def test_a_store_that_has_become_slower_is_asked_for_less() -> None:
    chosen = Climb()
    climb(chosen, emulated(0.03, 400e6, 95e3), 120)
    assert chosen.requests >= 100
    climb(chosen, emulated(0.03, 20e6, 95e3), 60)
    assert chosen.requests <= 32


def test_a_moment_without_a_processor_does_not_bring_the_number_down() -> None:
    store, chosen = emulated(0.03, 80e6, 95e3), Climb()
    climb(chosen, store, 10)
    before = chosen.requests
    rate, answers, seconds = store(before)
    for _ in range(2):
        assert chosen.measured(rate / 8, answers / 8, seconds * 8) == (before, "resting")
    chosen.measured(rate, answers, seconds)
    assert chosen.measured(rate / 8, answers / 8, seconds * 8).requests == before


MB = 1e6
CHANGES = {
    "later": [(0.005, 400 * MB, 95e3), (0.06, 400 * MB, 95e3)],
    "a little later": [(0.002, 400 * MB, 95e3), (0.01, 400 * MB, 95e3)],
    "sooner": [(0.06, 400 * MB, 95e3), (0.005, 400 * MB, 95e3)],
    "later and sooner": [(0.03, 80 * MB, 95e3), (0.3, 80 * MB, 95e3), (0.03, 80 * MB, 95e3)],
    "larger": [(0.005, 400 * MB, 9.5e3), (0.005, 400 * MB, 950e3)],
    "larger and smaller": [(0.03, 400 * MB, size) for size in (95e3, 950e3, 9.5e3, 95e3)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_climb_settles_after_a_change(change: str) -> None:
    chosen = Climb()
    for parts in CHANGES[change]:
        store = emulated(*parts)
        settled = climb(chosen, store, 150)[30:]
        assert max(settled) <= 2 * min(settled)
        best = max(store(n)[0] for n in range(1, 257))
        assert min(store(n)[0] for n in settled) >= 0.9 * best


def test_a_store_that_answers_later_is_asked_for_as_much_as_before() -> None:
    chosen = Climb()
    climb(chosen, emulated(0.005, 400e6, 95e3), 20)
    before, later = chosen.requests, emulated(0.06, 400e6, 95e3)
    while (choice := chosen.measured(*later(chosen.requests))).requests >= before:
        assert choice.reason in ("resting", "requests may wait for each other")
    assert choice.reason == "requests wait for each other"
    choice = chosen.measured(*later(chosen.requests))
    assert choice == (before, "fewer requests brought fewer bytes")


def test_no_step_is_kept_while_requests_wait_for_each_other() -> None:
    chosen = Climb(start=32)
    chosen.measured(80e6, 800, 0.05)
    assert chosen.measured(90e6, 300, 0.2) == (48, "once more")


class Busy:
    """Counts calls at once; answers when told to, so that no time decides."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.enough = threading.Event()

    def __call__(self, number: int) -> bytes:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now >= self.wanted:
                self.enough.set()
        assert self.enough.wait(60)
        with self.lock:
            self.now -= 1
        return b"%d" % number


@pytest.mark.parametrize("requests", [1, 5, 40])
def test_as_many_requests_are_in_flight_as_were_pinned(requests: int) -> None:
    flight, busy = Flight("store", requests), Busy(requests)
    begun = []

    def ask(number: int) -> bytes:
        begun.append(flight._flying)  # those that have a thread, whether it runs yet or not
        return busy(number)

    answers = flight.ask(ask, range(100), [1] * 100)
    assert answers == [b"%d" % n for n in range(100)]
    assert busy.most == max(begun) == requests


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come so far")


class Stuck:
    """Requests that are answered when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[int] = []

    def __call__(self, number: int) -> bytes:
        self.begun.append(number)
        assert self.go_on.wait(60)
        return b""


def test_a_call_waits_for_its_own_answers_alone() -> None:
    flight, slow = Flight("store", 2), Stuck()
    stuck = threading.Thread(target=flight.ask, args=(slow, [0], [1]), daemon=True)
    stuck.start()
    try:
        wait_for(lambda: slow.begun)
        answers = flight.ask(lambda n: bytes(n), [1, 2, 3], [1, 2, 3])
        assert answers == [bytes(1), bytes(2), bytes(3)]
        assert stuck.is_alive()
    finally:
        slow.go_on.set()
        stuck.join()


@pytest.mark.parametrize("looked", [False, True])
def test_once_stopped_no_request_begins_and_those_in_flight_are_waited_for(looked: bool) -> None:
    flight, slow, stop = Flight("store", 2), Stuck(), threading.Event()
    answers: list[object] = []
    call = threading.Thread(
        target=lambda: answers.extend(flight.ask(slow, range(100), [1] * 100, stop.is_set))
    )
    call.start()
    wait_for(lambda: len(slow.begun) == 2)
    stop.set()
    if looked:
        wait_for(lambda: not flight._waiting)
        assert call.is_alive()
    slow.go_on.set()
    call.join(60)
    assert sorted(slow.begun) == [0, 1]
    assert answers[:2] == [b"", b""]
    assert all(isinstance(a, IoError) and "was closed" in str(a) for a in answers[2:])


def test_a_call_that_is_interrupted_takes_its_requests_with_it() -> None:
    flight, slow = Flight("store", 1), Stuck()

    def interrupt() -> bool:
        if slow.begun and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        flight.ask(slow, range(50), [1 << 20] * 50, interrupt)
    assert not flight._waiting
    slow.go_on.set()
    assert flight.ask(bytes, [1, 2], [1 << 25, 2]) == [bytes(1), bytes(2)]
    assert slow.begun == [0]
    wait_for(lambda: (flight._flying, flight._bytes_flying) == (0, 0))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("granted", [0, 1, 3])
def test_the_threads_that_start_are_enough(
    monkeypatch: pytest.MonkeyPatch, granted: int, late: bool
) -> None:
    """`late`: they get no processor until the system has refused one."""
    flight, busy = Flight("store", 8), Busy(granted)
    given, refused, start = [], [], threading.Thread.start
    work = flight._work

    def begin_late(ticket: object) -> None:
        wait_for(lambda: flight._flying <= granted)  # the refusal was dealt with
        work(ticket)

    def refuse(thread: threading.Thread) -> None:
        if len(given) == granted:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        given.append(thread)
        start(thread)

    def ask(number: int) -> bytes:
        wait_for(lambda: refused)
        return busy(number)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if late:
            patch.setattr(flight, "_work", begin_late)
        answers = flight.ask(ask, range(40), [1] * 40)
    if granted:
        assert answers == [b"%d" % n for n in range(40)]
        assert busy.most == granted
    else:
        assert all(isinstance(a, RuntimeError) for a in answers)
    assert len(refused) == 1
    wait_for(lambda: flight._flying == 0)
    all_again = Busy(8)
    assert flight.ask(all_again, range(40), [1] * 40) == [b"%d" % n for n in range(40)]
    assert all_again.most == 8


def test_an_overloaded_store_is_asked_for_half_at_once() -> None:
    flight = Flight("store")
    answer: list[bytes | Exception] = [Overloaded("503")]

    def ask(_: int) -> bytes:
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    flight.ask(ask, range(1), [1])
    assert flight.requests == 16
    answer[0] = b"1"
    flight.ask(ask, range(40), [1] * 40)
    assert flight.requests == 16


def test_rests_grow_while_the_store_is_overloaded() -> None:
    chosen, store, rests = Climb(start=128), emulated(0.1, 1e12, 95e3), []
    for half in (64, 32):
        assert chosen.overloaded() == (half, "the store asks for fewer")
        rests.append(0)
        while chosen.measured(*store(chosen.requests)).reason == "resting":
            rests[-1] += 1
        chosen._overloads, chosen.requests = len(rests), half
        chosen._base = half
    assert rests == [12, 24]


def test_what_a_request_raises_is_its_answer() -> None:
    def ask(number: int) -> bytes:
        if number == 1:
            raise ValueError("no")
        return bytes(number)

    first, second, third = Flight("store").ask(ask, [0, 1, 2], [0, 1, 2])
    assert (first, third) == (b"", bytes(2))
    assert isinstance(second, ValueError)


def test_requests_in_flight_ask_for_bytes_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the requests, not of the calls: one call's begin while another waits for its last answer."""
    monkeypatch.setattr(_flight, "_FLYING_BYTES", 10)
    flight, slow, quick = Flight("store", 8), Stuck(), []
    first = threading.Thread(target=flight.ask, args=(slow, [0, 1], [4, 4]), daemon=True)
    first.start()
    wait_for(lambda: len(slow.begun) == 2)
    second = threading.Thread(target=flight.ask, args=(quick.append, [2, 3], [2, 8]), daemon=True)
    second.start()
    wait_for(lambda: quick == [2])
    wait_for(lambda: flight._flying == 2 or 3 in quick)
    assert quick == [2]
    slow.go_on.set()
    second.join(60)
    assert quick == [2, 3]
    flight.ask(quick.append, [4], [11])
    assert quick[-1] == 4  # larger than the limit
    first.join(60)
