"""A signal to one rank: all ranks save at the same call of `save`, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nostall
from nostall.checkpoint import _signals
from nostall.checkpoint._signals import Signals
from nostall.checkpoint._store import Store
from nostall.errors import IoError, SignalExit, UsageError

KEY = b"a secret of the test"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for each other however late their threads run."""
    monkeypatch.setattr(_signals, "_ANSWER_SECONDS", 60.0)


def test_signal_saves_a_step_that_is_not_due_durably_and_exits_with_75(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    state = {"w": np.arange(4)}
    with nostall.Checkpointer(durable=tmp_path, every=100, on_signal="SIGUSR1") as checkpoints:
        assert checkpoints.save(state, 1) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SignalExit) as ended:
            checkpoints.save(state, 2)
        assert (ended.value.code, ended.value.signal) == (75, "SIGUSR1")
        assert list(checkpoints.steps()) == [2]
        assert checkpoints.save(state, 3) is None, "a signal ends one save"
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("fast", [True, False])
def test_signal_ends_the_training_if_only_the_fast_directory_takes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast: bool
) -> None:
    prepare = Store.prepare

    def full(store: Store, step: int) -> Path:
        if store.kind == "durable" and step == 2:
            raise IoError("the quota is exceeded")
        return prepare(store, step)

    monkeypatch.setattr(Store, "prepare", full)
    state = {"w": np.arange(4)}
    with nostall.Checkpointer(
        tmp_path / "fast" if fast else None, tmp_path / "durable", on_signal="SIGUSR1",
        on_failure=lambda _: None,
    ) as checkpoints:  # fmt: skip
        checkpoints.save(state, 1, level="durable")
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SignalExit if fast else IoError) as ended:
            checkpoints.save(state, 2)
        if fast:
            assert ended.value.code == 75  # type: ignore[attr-defined]
            assert "SIGUSR1: the training ends, with step 2 safe at level fast" in caplog.text
    assert list(Store(tmp_path / "fast", "fast").steps()) == ([2] if fast else [])


def test_forked_child_is_ended_by_a_signal_that_the_training_waits_for(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path, on_signal="SIGTERM"):
        ready, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.write(tell, b"1")  # Python forgets signals that come before
            for _ in range(600):
                time.sleep(0.1)
            os._exit(1)
        assert os.read(ready, 1) == b"1"
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        os.close(ready)
        os.close(tell)


@pytest.fixture
def told() -> Iterator[list[int]]:
    """What handled SIGUSR1 before."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_signal_does_not_end_the_process_while_the_last_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    checkpoints = nostall.Checkpointer(durable=tmp_path, level="memory", on_signal="SIGUSR1")
    wait = checkpoints._background.wait

    def interrupted(**more: Any) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return wait(**more)

    # Of this one alone: those that earlier tests left end whenever they are collected.
    monkeypatch.setattr(checkpoints._background, "wait", interrupted)
    checkpoints.save({"w": np.arange(4)}, 1)
    checkpoints._closer()  # the end of the program
    assert told == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [signal.SIGUSR1]
    assert list(nostall.Checkpointer(durable=tmp_path).steps()) == [1]


def test_signals_have_their_effect_once_all_checkpointers_are_closed(
    tmp_path: Path, told: list[int]
) -> None:
    names = "SIGUSR1 SIGUSR1"
    first = nostall.Checkpointer(durable=tmp_path / "first", on_signal=names)
    with nostall.Checkpointer(durable=tmp_path / "second", on_signal=names):
        first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [signal.SIGUSR1]


@pytest.mark.parametrize("names", ["", "USR1", "SIGKILL", 10])
def test_what_is_no_signal_is_refused(tmp_path: Path, names: object) -> None:
    with pytest.raises(UsageError, match=r'on_signal.*must be names as "SIGUSR1 SIGTERM"'):
        nostall.Checkpointer(durable=tmp_path, on_signal=names)


def test_not_in_the_main_thread(tmp_path: Path) -> None:
    told: list[str] = []

    def make() -> None:
        try:
            nostall.Checkpointer(durable=tmp_path, on_signal="SIGUSR1")
        except UsageError as error:
            told.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(told) == 1 and "main thread" in told[0]


class Ranks:
    """Ranks in threads of this process, each with its own signal; gathers between them."""

    def __init__(self, names: list[str]) -> None:
        self.parts = [b""] * len(names)
        self.barrier = threading.Barrier(len(names))
        self.ranks = [Signals(name) for name in names]
        self.run(
            lambda rank: self.ranks[rank].meet(rank, KEY, False, lambda m: self.gather(rank, m))
        )

    def gather(self, rank: int, mine: bytes) -> list[bytes]:
        self.parts[rank] = mine
        self.barrier.wait()
        return list(self.parts)

    def run(self, work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [
            threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(self.ranks))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)

    def close(self) -> None:
        for one in self.ranks:
            one.close()


@pytest.mark.usefixtures("patient")
def test_ranks_agree_on_one_call_that_none_has_begun() -> None:
    """Rank 2 gets the signal; rank r has begun r calls more than the slowest."""
    ranks = Ranks(["SIGUSR1", "SIGUSR2", "SIGHUP"])
    ended = [0, 0, 0]
    begun = threading.Barrier(4, timeout=60)

    def train(rank: int) -> None:
        calls = 0
        for _ in range(1 + rank):
            calls += 1
            assert not ranks.ranks[rank].due()
        begun.wait()
        while not (name := ranks.ranks[rank].due()):
            calls += 1
            time.sleep(0.001)  # the threads that greet each other within 10 s need Python's lock
        assert name == "SIGHUP"
        ended[rank] = calls + 1

    def send() -> None:
        begun.wait()
        ranks.ranks[2]._handle(signal.SIGHUP, None)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        ranks.run(train)
    finally:
        sender.join()
        ranks.close()
    assert len(set(ended)) == 1 and ended[0] > 3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("late", [True, False])
def test_a_signal_that_comes_once_its_rank_has_ended_does_not_change_the_exit_code(
    late: bool,
) -> None:
    """Slurm signals the nodes one after the other: the ranks of the first may have ended by then.
    Launchers send SIGTERM to the rest when the first rank has ended, also if they sent it before."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    # The last one made has the signals of the process, as every rank has in a process of its own.
    ranks = Ranks(["SIGUSR1 SIGUSR2 SIGTERM"] * 2)
    came, ended = ranks.ranks[0], ranks.ranks[1]

    def train(rank: int) -> None:
        while not ranks.ranks[rank].due():
            time.sleep(0.001)

    try:
        came._handle(signal.SIGUSR1, None)
        if not late:
            for number in (signal.SIGUSR1, signal.SIGTERM):
                ended._handle(number, None)
        ranks.run(train)
        ended.close()
        assert signal.getsignal(signal.SIGUSR1) == (signal.SIG_IGN if late else came._handle)
        for number in (signal.SIGUSR2, signal.SIGTERM):
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        ranks.close()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.usefixtures("patient")
def test_all_ranks_are_asked_at_once() -> None:
    """One that has answered does not wait for the call while rank 0 waits for the next one's answer."""
    ranks = Ranks(["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGWINCH"])
    asked = threading.Barrier(3, timeout=60)

    def hold(one: Signals) -> Callable[[], int]:
        def held() -> int:
            asked.wait()
            return Signals._hold(one)

        return held

    try:
        for one in ranks.ranks[1:]:
            one._hold = hold(one)  # type: ignore[method-assign]
        ranks.ranks[0]._agree("SIGUSR1")
        assert not asked.broken
        assert ranks.ranks[0]._stop == (1, "SIGUSR1")
    finally:
        ranks.close()


def test_a_rank_is_not_waited_for_anew_at_each_step_of_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, left = [0.0], 20.0 - 9.0 - 8.0

    class Slow:
        timeout = 0.0

        def __init__(self, seconds: float) -> None:
            assert seconds == 20.0
            now[0] += 9.0

        def set_timeout(self, seconds: float) -> None:
            self.timeout = seconds

        def send(self, message: dict[str, Any]) -> None:
            if "hold" in message:
                assert self.timeout == 20.0 - 9.0
                now[0] += 8.0

        def receive(self) -> dict[str, Any]:
            assert self.timeout == left
            return {"calls": 4}

        def close(self) -> None:
            pass

    monkeypatch.setattr(_signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = Ranks(["SIGUSR1", "SIGUSR2"])
    try:
        monkeypatch.setattr(ranks.ranks[0], "_connect", lambda _, seconds: Slow(seconds))
        ranks.ranks[0]._agree("SIGUSR1")
        assert ranks.ranks[0]._stop == (5, "SIGUSR1")
    finally:
        ranks.close()


def test_a_process_that_ends_does_not_wait_for_ranks_that_it_asks() -> None:
    program = """
import threading
from nostall.checkpoint import _signals
from nostall.job._stream import Listener

_signals._ANSWER_SECONDS = 3600.0
asked = threading.Semaphore(0)

def is_silent(question, stream):
    asked.release()
    threading.Event().wait()

silent = [Listener(is_silent, bytes(32), 3600.0) for _ in range(2)]
signals = _signals.Signals("SIGUSR1")
signals._key = bytes(32)
signals._addresses = [("", 0), *(one.address for one in silent)]
threading.Thread(target=signals._decide, daemon=True).start()
signals._came.put("SIGUSR1")
for _ in silent:
    asked.acquire()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_ranks_go_on_where_one_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(["SIGUSR1", "SIGUSR2", "SIGHUP"])
    try:
        ranks.ranks[2]._listener.close()
        ranks.ranks[0]._agree_or_warn("SIGUSR1")
        assert not any(one.due() for one in ranks.ranks)
        assert "rank 2 does not answer" in caplog.text
    finally:
        ranks.close()
