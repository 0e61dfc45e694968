"""Callables begin with batches as they arrive; what is left early, fails or ends meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import nostall
from nostall.errors import UsageError


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
        [sys.executable, "-c", LEFT, where, output], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
