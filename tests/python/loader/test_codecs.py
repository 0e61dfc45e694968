"""Kinds of fields of the user's own in worker processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nostall
from nostall import _native
from nostall import fields as f
from nostall.errors import CorruptionError, Error, TransformError, UsageError
from nostall.source._makers import Makers


@dataclass(frozen=True, kw_only=True)
class Fragile(f.Custom):
    """The first byte, the draw and the process; bytes can end it."""

    dtype: str = "uint64"
    shape: tuple[int | None, ...] = (3,)

    def decode(self, stored: bytes, draw: int = 0) -> Any:
        if stored == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if stored == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if stored.startswith(b"hold "):
            gate = Path(stored[5:].decode())
            with open(gate.with_name("begun"), "a") as begun:
                begun.write("1")
            while not gate.exists() and os.getppid() > 1:
                time.sleep(0.01)
        if stored == b"damaged":
            raise CorruptionError("it is damaged \udce9")
        if stored == b"wrong":
            raise ValueError("wrong \udce9")
        return np.array([stored[0], draw, os.getpid()], np.uint64)


def loader(values: list[bytes], **options: Any) -> nostall.DataLoader:
    data = nostall.Files({}, {"x": values}, schema={"x": Fragile()})
    options = {"epochs": 3, "shuffle": False, "seed": 5, "threads": 1, **options}
    return nostall.DataLoader(data, 2, tiers=[], output="numpy", **options)


@pytest.mark.multi
def test_a_codec_that_crashes_ends_its_process_alone() -> None:
    with loader([bytes([i]) for i in range(6)], epochs=1) as threads:
        wanted = np.concatenate([batch["x"] for batch in threads])
    assert len(np.unique(wanted[:, 1])) == 6  # draws
    values = [b"\0", b"damaged", b"\2", b"crash", b"\4", b"\5"]
    with loader(values, on_error="substitute", workers="processes") as apart:
        stand_in = next(i for i in _native.StandIns(apart.plan.native).of(1).tolist() if i != 1)
        assert stand_in != 3
        batches = iter(apart)
        first = next(batches)["x"]
        with pytest.raises(
            TransformError,
            match=r"\(sample 3\): field x: the process that made it was ended by SIGSEGV: .*crash",
        ) as error:
            next(batches)
        assert "Traceback" not in str(error.value)
        assert "memory" not in str(error.value)
        apart.set_epoch(0)
        again = next(iter(apart))["x"]  # of another process
    assert np.array_equal(first[:, :2], wanted[[0, stand_in], :2])
    assert np.array_equal(again[:, :2], first[:, :2])
    assert (wanted[:, 2] == os.getpid()).all()
    assert not {os.getpid(), *first[:, 2]} & {*again[:, 2]}


@pytest.mark.multi
def test_a_codec_that_is_killed_names_what_gives_fewer_processes() -> None:
    with (
        loader([b"killed"] * 2, workers="processes") as apart,
        pytest.raises(
            TransformError, match=r"memory ran out .*; give the loader fewer threads=, or"
        ),
    ):
        next(iter(apart))


def test_a_loader_that_closes_decodes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, close = tmp_path / "gate", Makers.close

    def closing(makers: Makers) -> None:
        def open_gate() -> None:
            while not makers._closed:
                time.sleep(0.001)
            gate.touch()

        threading.Thread(target=open_gate).start()
        close(makers)

    monkeypatch.setattr(Makers, "close", closing)
    values = [b"\0", b"\1", *[f"hold {gate}".encode()] * 20]
    source = loader(values, workers="processes")

    def iterate() -> None:
        # The first batch comes before or with those of values that were asked for with its own.
        with contextlib.suppress(Error, StopIteration):
            next(iter(source))

    consumer = threading.Thread(target=iterate)
    consumer.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    source.close()
    consumer.join(60)
    assert not consumer.is_alive()
    assert (tmp_path / "begun").read_text() == "1"


def test_exceptions_of_a_codec_come_with_their_lines() -> None:
    batches = iter(loader([b"\0", b"wrong"]))
    with pytest.raises(
        TransformError, match=r"(?s)\(sample 1\): field x: .*ValueError: wrong .udce9"
    ):
        next(batches)


def test_kinds_that_cannot_go_to_processes_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Fragile):
        pass

    data = nostall.Files({}, {"x": [b"\0"]}, schema={"x": Local()})
    with pytest.raises(UsageError, match=r"the kinds of fields .*class at the top of a module"):
        nostall.DataLoader(data, 1, workers="processes", output="numpy")
    plain = nostall.Files({}, {"x": [1, 2]})
    with pytest.raises(UsageError, match="goes with a callable, or a kind of fields in Python"):
        nostall.DataLoader(plain, 1, workers="processes", output="numpy")


def test_the_draw_is_that_of_the_format() -> None:
    # docs/formats/order.md
    kind, source = Fragile(), nostall.Files({}, {"x": [b"x"] * 4}, schema={"x": Fragile()})
    program = _native.compile_program([kind.to_native("x", 0)])
    one = _native.unpack_one(source.native, program, b"", 3, seed=7, epoch=1, occurrence=0)
    assert one.output(0)[0, 1] == 0x43CBC7E577F5981B
