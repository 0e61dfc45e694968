"""What several threads may do with a loader at once, also where Python has no GIL."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nostall
from nostall import _native
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import UsageError


def together(*works: Callable[[], None]) -> None:
    """Calls all of them in threads of their own; raises what the first of them raised."""
    raised: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        begin.wait()
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_the_extension_leaves_the_gil_off() -> None:
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert getattr(sys, "_is_gil_enabled", lambda: True)() is not free


def test_stats_are_of_one_moment_while_batches_come(image_folder: Path) -> None:
    loader = nostall.DataLoader(
        nostall.ImageFolder(image_folder),
        batch_size=2,
        epochs=8,
        transforms=[t.RandomResizedCrop(16), t.ToTensor()],
        output="numpy",
    )
    ended = threading.Event()

    def consume() -> None:
        try:
            for epoch in loader.epochs():
                for images, labels in epoch:
                    assert len(images) == len(labels)
        finally:
            ended.set()

    def watch() -> None:
        while not ended.is_set():
            for epoch in loader.stats().epochs:
                taken = sum(origin.samples for origin in epoch.origins.values())
                assert taken == epoch.samples == min(2 * epoch.batches, 61)

    together(consume, watch, watch)
    assert loader.stats().samples == 8 * 61


@dataclass(frozen=True, kw_only=True)
class Letters(f.Custom):
    dtype: str = "uint8"
    shape: tuple[int | None, ...] = (3,)

    def decode(self, stored: bytes, draw: int = 0) -> Any:
        return np.frombuffer(stored, np.uint8)


def one_batch() -> _native.Batch:
    kind, source = Letters(), nostall.Files({}, {"x": [b"abc"]}, schema={"x": Letters()})
    program = _native.compile_program([kind.to_native("x", 0)])
    return _native.unpack_one(source.native, program, b"", 0, seed=7, epoch=1, occurrence=0)


def test_a_released_batch_has_no_outputs() -> None:
    batch = one_batch()
    kept = batch.output(0)
    expected = kept.copy()
    batch.release()
    assert np.array_equal(kept, expected)
    with pytest.raises(UsageError, match="was given back"):
        batch.output(0)


def test_a_batch_is_released_beside_its_outputs() -> None:
    expected = one_batch().output(0).copy()
    for _ in range(300):
        batch = one_batch()

        def look(batch: _native.Batch = batch) -> None:
            with contextlib.suppress(UsageError):
                for _ in range(20):
                    assert np.array_equal(batch.output(0), expected)

        together(look, look, batch.release)
