"""The engine on a connection that Python gives: its calls, and what they do wrong."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest

from nostall.errors import Error, UsageError
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
            raise RuntimeError("the wire is cut \udce9")

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


def test_memory_may_come_while_a_leader_looks_for_its_own() -> None:
    from nostall.torch._between import GlooNetwork

    class Address(int):
        """Another thread takes memory where this is looked at."""

        def __le__(self, other: int) -> bool:
            network.allocate(8)
            return int(self) <= other

    class Leaders:
        def allreduce(self, parts: list[Any], options: Any) -> Any:
            return parts[0]

    network = object.__new__(GlooNetwork)
    network._memory, network._timeout, network._leaders = {}, timedelta(seconds=60), Leaders()
    address = network.allocate(64)
    network._memory = {Address(address): network._memory[address]}
    assert network.start(address + 16, 4, "float32").data_ptr() == address + 16


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
        (Doubled(fails="allreduce"), r"the wire is cut \\udce9"),
        (Doubled(fails="all_and"), r"the wire is cut \\udce9"),
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


# What keeps a thread in Python while the program ends: every call of the connection takes a while.
ENDING = """
import os, signal, sys, time
import numpy as np
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from test_connection import Doubled
from nostall.sync import Ranks, SyncOptions, make_engine

class Slow(Doubled):
    def _called(self, name):
        super()._called(name)
        for _ in range(200):
            time.sleep(0)

def step(engine):
    for tensor in range(8):
        engine.submit(tensor, gradient.ctypes.data, True)

mode, ending = sys.argv[2:]
gradient = np.ones(5, "f4")
options = SyncOptions(mode=mode, cycle=0.0001)
specs = [(f"w{i}", 5, "float32") for i in range(8)]
engine, _ = make_engine(specs, options, Ranks(0, 2, "slow", Slow()))
if mode == "planned":
    engine.set_plan([[i] for i in range(8)])
step(engine)
if ending == "waited":
    engine.wait()
elif ending == "held":
    import builtins
    builtins.engine = engine  # is not destroyed before the interpreter
elif ending == "exception":
    raise RuntimeError("meant")
elif ending == "exit":
    sys.exit(3)
elif ending == "_exit":
    os._exit(4)
elif ending == "term":
    os.kill(os.getpid(), signal.SIGTERM)
elif ending == "term handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    os.kill(os.getpid(), signal.SIGTERM)
elif ending == "fork":
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
elif ending == "deleted":
    del engine
"""

ENDINGS = {
    "return": 0, "waited": 0, "held": 0, "exception": 1, "exit": 3, "_exit": 4, "term": -15,
    "term handled": 9, "fork": 0, "deleted": 0,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["planned", "negotiated"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_amid_a_step_ends_as_it_meant(ending: str, mode: str) -> None:
    words = ["-c", ENDING, str(Path(__file__).parent), mode, ending]
    ended = prefork.run(words, 800, whole=True)
    assert ended.returncode == ENDINGS[ending], ended.stderr
    assert "terminate" not in ended.stderr


@pytest.mark.parametrize("mode", ["planned", "negotiated"])
def test_a_stop_ends_a_connection_that_waits_for_other_ranks(mode: str) -> None:
    class Silent(Doubled):
        """The other rank does not come."""

        def __init__(self) -> None:
            super().__init__()
            self.waits, self.ended = threading.Event(), threading.Event()

        def _called(self, name: str) -> None:
            if name in ("allreduce", "all_and"):
                self.waits.set()
                self.ended.wait()
                raise RuntimeError("ended")

        def end(self) -> None:
            self.ended.set()

    network = Silent()
    options = SyncOptions(mode=mode)  # type: ignore[arg-type]
    engine, _ = make_engine([("w", 5, "float32")], options, Ranks(0, 2, "silent", network))
    gradient = np.ones(5, "f4")
    engine.submit(0, gradient.ctypes.data, True)
    assert network.waits.wait(60)
    engine.stop()
    with pytest.raises(Error, match="the ranks' connection failed: ended"):
        engine.wait()


def test_a_stopped_engine_says_so() -> None:
    options = SyncOptions(mean=False)
    engine, _ = make_engine([("w", 5, "float32")], options, Ranks(0, 2, "doubled", Doubled()))
    engine.set_plan([[0]])
    gradient = np.ones(5, "f4")
    engine.submit(0, gradient.ctypes.data, True)
    engine.wait()
    engine.stop()
    engine.stop()
    with pytest.raises(UsageError, match=r"submit: the gradient engine was stopped, as all are"):
        engine.submit(0, gradient.ctypes.data, True)
