"""The engine on a connection that Python gives: its calls, and what they do wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nostall.errors import Error
from nostall.sync import Network, Ranks, SyncOptions, make_engine


class Doubled(Network):
    """Two ranks of which the other one gives the same as this one."""

    rank, ranks, node, nodes, job = 0, 2, [0, 1], 2, "doubled"

    def __init__(self, fails: str = "", shortens: bool = False) -> None:
        self.calls: list[str] = []
        self._fails, self._shortens = fails, shortens

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise RuntimeError("the wire is cut")

    def set_timeout(self, seconds: float) -> None:
        pass

    def allreduce(self, address: int, count: int, type: str) -> None:
        self._called("allreduce")
        assert type == "float32"
        memory = (ctypes.c_float * count).from_address(address)
        np.ctypeslib.as_array(memory)[:] *= 2

    def all_and(self, data: bytes) -> bytes:
        self._called("all_and")
        return data[:-1] if self._shortens else data

    def all_min(self, value: int) -> int:
        self._called("all_min")
        return value

    def all_gather(self, data: bytes) -> list[bytes]:
        self._called("all_gather")
        return [data, data]

    def broadcast(self, data: bytes, root: int) -> bytes:
        self._called("broadcast")
        return data


@pytest.mark.parametrize("mode", ["planned", "negotiated"])
def test_sums_go_through_the_connection(mode: str) -> None:
    network = Doubled()
    options = SyncOptions(mode=mode, cycle=0.001, mean=False)  # type: ignore[arg-type]
    engine, _ = make_engine([("w", 5, "float32")], options, Ranks(0, 2, "doubled", network))
    if mode == "planned":
        engine.set_plan([[0]])
    gradient = np.arange(5, dtype="f4")
    engine.submit(0, gradient.ctypes.data, True)
    engine.wait()
    assert gradient.tolist() == [0, 2, 4, 6, 8]
    assert "allreduce" in network.calls
    assert ("all_and" in network.calls) == (mode == "negotiated")
    if mode == "planned":
        assert engine.all_gather(b"mine") == [b"mine", b"mine"]
        assert engine.broadcast(b"mine", 0) == b"mine"


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Doubled(fails="allreduce"), "the wire is cut"),
        (Doubled(fails="all_and"), "the wire is cut"),
        (Doubled(shortens=True), "not bytes"),
    ],
)
def test_what_the_connection_raises_ends_the_step(network: Doubled, words: str) -> None:
    options = SyncOptions(mode="negotiated", cycle=0.001)
    gradient = np.ones(5, "f4")
    engine, _ = make_engine([("w", 5, "float32")], options, Ranks(0, 2, "doubled", network))
    with pytest.raises(Error, match=words):
        engine.submit(0, gradient.ctypes.data, True)
        engine.wait()
