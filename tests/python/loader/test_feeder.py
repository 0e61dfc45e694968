"""Callables begin with batches as they arrive; what is left early, fails or ends meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import BrokenExecutor, CancelledError, Future
from typing import Any
from unittest import mock

import numpy as np
import pytest

import nostall
from nostall.errors import UsageError
from nostall.loader import _processes, _producer, _python_transforms
from nostall.loader._ahead import Ahead
from nostall.loader._feeder import Feeder
from nostall.loader._python_transforms import PythonStage, Work
from nostall.observe import _live


class Gated(nostall.SampleReader):
    """Only the first 16 samples are there, until the gate opens."""

    def __init__(self) -> None:
        self.gate, self.opened = threading.Event(), True

    def read(self, samples: list[int]) -> list[Any]:
        if samples[0] >= 16 and not self.gate.wait(60):
            self.opened = False
        return [bytes([sample]) for sample in samples]

    def describe(self, sample: int) -> str:
        return f"number {sample}"


class Failing(Gated):
    """The third 16 samples cannot be read."""

    def read(self, samples: list[int]) -> list[Any]:
        if any(32 <= sample < 48 for sample in samples):
            raise OSError("no such disk")
        return [bytes([sample]) for sample in samples]


def test_a_batch_of_callables_does_not_wait_for_the_reads_of_the_next() -> None:
    reader = Gated()
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="gated")
    options: dict[str, Any] = {"transforms": lambda raw: np.array(raw), "output": "numpy"}
    with nostall.DataLoader(source, 16, epochs=1, shuffle=False, tiers=[], **options) as loader:
        batches = iter(loader)
        first = next(batches)
        reader.gate.set()
        rows = [first, *batches]
    assert reader.opened
    assert [row for data, _ in rows for row in data.tolist()] == [[i] for i in range(64)]


def test_callables_begin_with_a_batch_when_it_arrives() -> None:
    """The training computes meanwhile, and asks for no batch."""
    reader, begun = Gated(), threading.Event()

    def seen(raw: Any) -> Any:
        if raw[0] == 16:
            begun.set()
        return np.array(raw)

    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="gated")
    with nostall.DataLoader(
        source, 16, epochs=1, shuffle=False, tiers=[], transforms=seen, output="numpy"
    ) as loader:
        batches = iter(loader)
        next(batches)
        reader.gate.set()
        assert begun.wait(60)
        assert [data[0, 0] for data, _ in batches] == [16, 32, 48]


@pytest.mark.parametrize("end", ["close", "keep"])
def test_an_iteration_that_was_left_takes_no_batch_of_the_next(end: str) -> None:
    reader = Gated()
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="gated")
    with nostall.DataLoader(
        source, 16, epochs=2, shuffle=False, tiers=[], transforms=np.array, output="numpy"
    ) as loader:
        left = iter(loader)
        next(left)  # the next batch is being waited for
        if end == "close":
            del left
        following = iter(loader)
        reader.gate.set()
        assert [data[0, 0] for data, _ in following] == [0, 16, 32, 48]
        if end == "keep":
            with pytest.raises(UsageError, match="another iteration"):
                next(left)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_fails_ahead_is_raised_in_its_turn(workers: Any) -> None:
    reader = Failing()
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="failing")
    with nostall.DataLoader(
        source, 16, epochs=1, shuffle=False, tiers=[], transforms=np.array, workers=workers,
        output="numpy",
    ) as loader:  # fmt: skip
        batches = iter(loader)
        assert [next(batches)[0][0, 0] for _ in range(2)] == [0, 16]
        with pytest.raises(nostall.errors.CorruptionError, match="number 3"):
            next(batches)


def of_batches(reader: nostall.SampleReader, **options: Any) -> nostall.DataLoader:
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="of batches")
    return nostall.DataLoader(
        source, 16, epochs=2, shuffle=False, tiers=[], output="numpy", **options
    )


def stage_of(loader: nostall.DataLoader) -> PythonStage:
    stage = loader._recipe.stage
    assert stage is not None
    return stage


def ones(raw: Any) -> Any:
    return np.full(100_000, raw[0], np.uint8)


def test_results_come_while_the_next_batch_is_being_sent_to_processes() -> None:
    reader = Gated()
    reader.gate.set()
    take, taken = _processes._Memory.take, []

    def learns(memory: Any, size: int) -> Any:
        taken.append(size)
        if len(taken) == 4:  # the slot for results of the second batch, whose size is given
            stage_of(loader)._executor.learn(100_000)  # type: ignore[union-attr]
        return take(memory, size)

    with (
        mock.patch.object(_processes._Memory, "take", learns),
        of_batches(reader, transforms=ones, workers="processes", threads=1) as loader,
    ):
        assert [data[0, 0] for data, _ in loader] == [0, 16, 32, 48]
    assert len(taken) >= 4


@pytest.mark.parametrize("end", ["whole", "left", "failed", "read"])
def test_a_loader_that_is_dropped_is_gone_at_once(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads too, without the collector."""
    # `nostall top` of another test process asks all processes: a thread would have the loader then.
    monkeypatch.setattr(_live, "add", lambda loader: None)

    def fails(raw: Any) -> Any:
        if end == "failed" and raw[0] == 17:
            raise ValueError("no such number")
        return np.array(raw)

    reader = Failing() if end == "read" else Gated()
    reader.gate.set()
    gc.collect()
    gc.disable()
    before = set(threading.enumerate())
    try:
        loader = of_batches(reader, transforms=fails)
        gone = weakref.ref(loader)
        batches = iter(loader)
        next(batches)
        if end == "whole":
            list(batches)
        elif end != "left":
            with pytest.raises(nostall.errors.Error):
                list(batches)
        feeder = stage_of(loader)._feeder()
        assert feeder is None or end == "left"
        del batches, loader, feeder
        assert gone() is None
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            assert not thread.is_alive(), thread
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["cancelled", "whole", "failed"])
def test_closing_ends_the_wait_for_a_callable(end: str) -> None:
    """Also where all calls of the batch have begun, and go on."""
    reader, ends = Gated(), threading.Event()
    reader.gate.set()
    threads = 1 if end == "cancelled" else 16
    begun = threading.Barrier(threads + 1)
    first = set(range(threads))

    def waits(raw: Any) -> Any:
        if raw[0] in first:
            begun.wait(60)
        assert ends.wait(60)
        if end == "failed":
            raise ValueError("too late")
        return np.array(raw)

    loader = of_batches(reader, transforms=waits, threads=threads)

    def close() -> None:
        begun.wait(60)
        while (feeder := stage_of(loader)._feeder()) is None:
            time.sleep(0.001)
        closing = threading.Thread(target=loader.close)
        closing.start()
        while not feeder.closed or feeder.at_work:
            time.sleep(0.001)
        ends.set()
        closing.join()

    other = threading.Thread(target=close)
    other.start()
    with pytest.raises(nostall.errors.StoppedError, match="the loader is closed"):
        list(loader)
    other.join()


def test_a_thread_that_begins_while_another_one_begins_anew_is_ended() -> None:
    reader = Gated()
    reader.gate.set()
    with of_batches(reader, transforms=np.array) as loader:
        stage = stage_of(loader)

        def dropped_meanwhile(*given: Any) -> Feeder:
            feeder = Feeder(*given)
            dropping = threading.Thread(target=stage.drop)
            dropping.start()
            dropping.join()
            return feeder

        with mock.patch.object(_python_transforms, "Feeder", dropped_meanwhile):
            assert stage.start(loader._stage(), 4).closed
        assert len(list(loader)) == 4


def test_two_threads_may_close_at_the_same_time() -> None:
    class Shared(deque[Work]):
        def popleft(self) -> Work:
            super().popleft()  # by the other thread, which has looked before
            return super().popleft()

    reader = Gated()
    reader.gate.set()
    with of_batches(reader, transforms=np.array) as loader:
        batches = iter(loader)
        next(batches)
        feeder = stage_of(loader)._feeder()
        assert feeder is not None
        feeder._at_work = Shared([Work(mock.Mock(), ())])
        feeder.close()
        assert not feeder.at_work


def test_a_batch_that_another_iteration_has_dropped_calls_nothing() -> None:
    reader, callers, others = Gated(), set(), []
    reader.gate.set()

    def seen(raw: Any) -> Any:
        callers.add(threading.current_thread())
        return np.array(raw)

    result = PythonStage.result

    def iterate() -> None:
        others.append(iter(loader))
        next(others[0])

    def iterating_meanwhile(*given: Any) -> Any:
        with mock.patch.object(PythonStage, "result", result):
            iterating = threading.Thread(target=iterate)
            iterating.start()
            iterating.join()
        return result(*given)

    with of_batches(reader, transforms=seen) as loader:
        batches = iter(loader)
        with (
            mock.patch.object(PythonStage, "result", iterating_meanwhile),
            pytest.raises(nostall.errors.StoppedError, match="the loader is closed"),
        ):
            next(batches)
        assert len(list(others[0])) == 3
    assert callers and threading.current_thread() not in callers


def test_a_device_takes_what_is_at_work_and_no_more_when_it_closes() -> None:
    samples, called = 1600, []
    gate, reader = threading.Event(), Gated()
    reader.gate.set()

    def counted(raw: Any) -> Any:
        called.append(raw)
        assert raw[0] < 16 or gate.wait(60)
        return np.array(raw)

    source = nostall.CustomSource(reader, [1] * samples, [0] * samples, identity="of many batches")
    with nostall.DataLoader(
        source, 16, epochs=1, shuffle=False, tiers=[], transforms=counted, output="jax"
    ) as loader:
        batches = iter(loader)
        next(batches)
        ahead = loader._ahead
        assert ahead is not None
        closing = threading.Thread(target=loader.close)
        closing.start()
        while not ahead.closed:
            time.sleep(0.001)
        gate.set()
        closing.join()
    assert len(called) <= 10 * 16


def hangs(raw: Any) -> Any:
    while raw[0] >= 16:
        time.sleep(1)
    return np.array(raw)


@pytest.mark.parametrize("output", ["numpy", "jax"])
def test_a_call_of_a_process_that_hangs_does_not_hold_up_the_closing(
    output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processes.children, "SECONDS_TO_END", 0.2)
    reader = Gated()
    reader.gate.set()
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="of batches")
    with nostall.DataLoader(
        source, 16, epochs=1, shuffle=False, tiers=[], transforms=hangs, workers="processes",
        threads=1, output=output,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        assert next(batches)[0][0, 0] == 0


def test_what_is_submitted_after_the_end_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes.children, "SECONDS_TO_END", 0.2)
    processes = _processes.Processes(1, _hang)
    answers = processes.submit(range(8), range(8), 1)
    deadline = time.monotonic() + 60
    while not any(answer.future.running() for answer in answers) and time.monotonic() < deadline:
        time.sleep(0.001)
    processes._spawn.end_tasks()
    with pytest.raises(RuntimeError):  # the pool had to be killed
        processes.submit([1, 2], [1, 2], 1)
    for answer in answers:
        with pytest.raises((CancelledError, BrokenExecutor)):
            answer.result()
    processes.close()
    assert all(process.exitcode is not None for process in processes._spawn.processes)


def test_what_is_submitted_as_the_program_ends_has_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_processes.children, "SECONDS_TO_END", 0.2)
    processes = _processes.Processes(1, _hang)
    processes._spawn.end_tasks()  # with nothing at work
    (answer,) = processes.submit([1], [1], 1)
    with pytest.raises((CancelledError, BrokenExecutor)):
        answer.result()
    assert processes.ended
    processes.close()


def test_a_batch_whose_calls_were_cancelled_is_waited_for_no_longer() -> None:
    of: Future[Any] = Future()
    work = Work(mock.Mock(), (), [of])
    assert not work.is_done(0)
    work.cancel()
    assert work.is_done(0)


def _hang(*_: Any) -> list[Any]:
    time.sleep(600)
    return []


def test_threads_that_callables_start_are_the_programs() -> None:
    reader = Gated()
    reader.gate.set()
    options: dict[str, Any] = {"transforms": lambda raw: np.array(threading.Thread().daemon)}
    with of_batches(reader, **options) as loader:
        assert not any(data.any() for data, _ in loader)


@pytest.mark.parametrize("where", [Feeder, Ahead])
def test_a_thread_that_cannot_start_leaves_the_others_to_end(where: type) -> None:
    reader = Gated()
    reader.gate.set()
    output = "jax" if where is Ahead else "numpy"
    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="of batches")
    with nostall.DataLoader(
        source, 16, epochs=1, shuffle=False, tiers=[], transforms=np.array, output=output
    ) as loader:
        refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more"))
        before = set(_producer._every)  # keeps those of other tests, which the collector may find
        with refused, pytest.raises(RuntimeError, match="no more") as kept:
            next(iter(loader))
        assert set(_producer._every) == before, kept
        assert len(list(loader)) == 4


@pytest.mark.parametrize("where", [Feeder, Ahead])
def test_a_thread_whose_start_is_interrupted_ends(where: type) -> None:
    reader = Gated()
    reader.gate.set()
    name, output = ("nostall-device", "jax") if where is Ahead else ("nostall-feeder", "numpy")
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name:
            begun.append(thread)
            raise KeyboardInterrupt

    source = nostall.CustomSource(reader, [1] * 64, [0] * 64, identity="of batches")
    with nostall.DataLoader(
        source, 16, epochs=2, shuffle=False, tiers=[], transforms=np.array, output=output
    ) as loader:
        patched = mock.patch.object(threading.Thread, "start", interrupted)
        with patched, pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        (thread,) = begun
        thread.join(60)
        assert not thread.is_alive()
        assert len(list(loader)) == 4


# What main() does when the second batch is being waited for: it returns while the loader is used by a
# daemon thread, and while an iteration is left in the main thread.
LEFT = """
import sys, threading, time
import numpy as np
import nostall


class Slow(nostall.SampleReader):
    def read(self, samples):
        time.sleep(0 if samples[0] < 16 else 0.2)
        return [bytes([sample]) for sample in samples]

    def describe(self, sample):
        return f"number {sample}"


source = nostall.CustomSource(Slow(), [1] * 64, [0] * 64, identity="slow")
loader = nostall.DataLoader(
    source, 16, shuffle=False, tiers=[], transforms=np.array, output=sys.argv[2]
)
begun = threading.Event()


def train():
    for batch in loader:
        begun.set()


if sys.argv[1] == "daemon":
    threading.Thread(target=train, daemon=True).start()
    begun.wait()
else:
    batches = iter(loader)
    next(batches)
"""


@pytest.mark.parametrize("where", ["daemon", "main"])
@pytest.mark.parametrize("output", ["numpy", "jax"])
def test_a_program_may_end_while_callables_are_fed(where: str, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT, where, output], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
