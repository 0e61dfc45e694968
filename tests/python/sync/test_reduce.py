"""Arrays of other frameworks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sync_ranks import run_ranks

from nostall.errors import UsageError
from nostall.job._world import World
from nostall.sync import SyncOptions, find_ranks, reduce_gradients


@pytest.mark.multi
def test_named_arrays_are_averaged_over_ranks() -> None:
    code = """
import numpy as np
from nostall.sync import reduce_gradients
out = []
for step in range(3):
    got = reduce_gradients({"w": np.full((3, 2), float(rank + step)), "b": np.float32([rank, -rank])})
    out.append([got["w"].tolist(), got["b"].tolist()])
result = out
"""
    for result in run_ranks(3, code):
        for step, (w, b) in enumerate(result):
            assert w == [[1.0 + step] * 2] * 3
            assert b == [1.0, -1.0]


@pytest.mark.multi
def test_a_process_set_is_a_world_of_its_own() -> None:
    code = """
import numpy as np
from nostall.sync import GradientReducer
mine = [0, 2] if rank != 1 else [1]
reducer = GradientReducer({"x": np.zeros(2)}, process_set=mine)
result = reducer({"x": np.full(2, float(rank))})["x"].tolist()
"""
    assert run_ranks(3, code) == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.multi
def test_ranks_that_differ_are_told_where() -> None:
    code = """
import numpy as np
from nostall.sync import reduce_gradients
reduce_gradients({"a": np.zeros(3), "b": np.zeros(4 + rank)})
"""
    for error in run_ranks(2, code, check=False):
        assert "PeerError" in error and "b (" in error


@pytest.mark.multi
def test_shapes_of_as_many_elements_differ_all_the_same() -> None:
    code = """
import numpy as np
from nostall.sync import reduce_gradients
reduce_gradients({"a": np.zeros(3), "b": np.zeros((2, 6) if rank else (3, 4))})
"""
    first, second = run_ranks(2, code, check=False)
    assert "gradient b (12 x float64) of shape [3, 4] where rank 1 has" in first
    assert "of shape [2, 6]" in second


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError, match='mode must be "planned" or "negotiated"'):
        SyncOptions(mode="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="negotiated"):
        SyncOptions(nonblocking=True)
    with pytest.raises(UsageError, match="int32"):
        reduce_gradients({"a": np.zeros(3, np.int32)})
    with pytest.raises(UsageError, match=r"torch\.distributed"):
        find_ranks(world=World(0, 4, 0, 2, "job"))
    with pytest.raises(UsageError, match="process_set"):
        find_ranks([0, 9], World(0, 2, 0, 2, "job"))


def test_an_engine_that_reduces_through_python_can_be_dropped_at_any_time() -> None:
    code = """
import threading, time
import numpy as np
from nostall import _native

class Alone:
    rank, ranks = 0, 1
    def __init__(self):
        self.entered = threading.Event()
    def allreduce(self, data, kind):
        self.entered.set()
        time.sleep(0.2)
    def all_gather(self, data):
        self.entered.set()
        return [data]
    def broadcast(self, data, root):
        return data

for mode in (_native.SyncMode.planned, _native.SyncMode.negotiated):
    options, transport = _native.GradientOptions(), Alone()
    options.mode = mode
    array = np.zeros(4, np.float32)
    engine = _native.GradientEngine(
        [("w", 4, "float32", "float32")], options, "job", 0, 1, transport, False
    )
    transport.entered.clear()
    engine.submit(0, array.ctypes.data, True)
    assert transport.entered.wait(60)
    del engine
print("dropped")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "dropped\n", done.stderr
