"""Arrays of other frameworks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sync_ranks import run_ranks

from nostall import sync
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
def test_arrays_of_many_shapes_take_bounded_room() -> None:
    code = """
import os
import numpy as np
from nostall import sync
from nostall.sync import reduce_gradients
sync._KEPT = 8
def ends(thread):  # one that was joined is in /proc for a moment more (PF_EXITING)
    try:
        stat = open(f"/proc/self/task/{thread}/stat").read()
    except OSError:
        return True
    return bool(int(stat.rpartition(")")[2].split()[6]) & 4)
def held():
    with open("/proc/self/maps") as maps:
        shared = sum("nostall" in line for line in maps)
    threads = sum(not ends(thread) for thread in os.listdir("/proc/self/task"))
    return threads, len(os.listdir("/proc/self/fd")), shared
def reduce(count):
    mean = reduce_gradients({"x": np.full(count, float(rank)), "kept": np.float32([rank])})
    assert (mean["x"] == 0.5).all() and len(mean["x"]) == count
result = []
for count in range(1, 25):
    reduce(count)
    reduce(1)  # used in every step, so it stays
    result.append(held())
reduce(2)  # it was closed
"""
    for result in run_ranks(2, code):
        assert result[0][0] < result[1][0]  # each engine has a thread, which is seen
        assert all(now == result[8] for now in result[8:]), result


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
def test_errors_and_warnings_of_a_process_set_say_whose_numbers_they_have() -> None:
    code = """
import logging, time
import numpy as np
from nostall.errors import PeerError
from nostall.sync import GradientReducer, SyncOptions
result = []
told = logging.Handler()
told.emit = lambda record: result.append(record.getMessage())
logging.getLogger("nostall").addHandler(told)
if rank:
    options = SyncOptions(warn=0.3, timeout=8)
    reducer = GradientReducer({"x": np.zeros(2)}, options, process_set=[1, 2])
    if rank == 1:
        time.sleep(12)
    else:
        try:
            reducer({"x": np.zeros(2)})
        except PeerError as error:
            result.append(str(error))
"""
    _, _, (*_, warned, failed) = run_ranks(3, code)
    whose = "(in numbers of this process_set, whose ranks are 1, 2 of the job)"
    assert warned.startswith("rank 1 has waited for 0 s for rank 0, which has not"), warned
    assert warned.endswith(whose) and "ranks that have not arrived: 0;" in failed, failed
    assert failed.endswith(whose), failed


@pytest.mark.multi
def test_a_leader_may_be_late_because_it_waits_for_other_nodes(tmp_path: Path) -> None:
    code = f"""
import logging, os, time
os.environ.update(NOSTALL_NODE=f"node {{rank // 2}}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
import numpy as np
import torch.distributed as dist
import nostall.torch
from nostall.sync import GradientReducer, SyncOptions
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=4)
result = []
told = logging.Handler()
told.emit = lambda record: result.append(record.getMessage())
logging.getLogger("nostall").addHandler(told)
reducer = GradientReducer({{"x": np.zeros(2)}}, SyncOptions(warn=0.3))
if rank > 1:
    time.sleep(2)
reducer({{"x": np.zeros(2)}})
dist.barrier()
"""
    _, (*_, warned), *_ = run_ranks(4, code)
    late = "rank 1 has waited for 0 s for rank 0, which has not submitted all of x"
    assert warned == f"{late}, or waits for other nodes"


@pytest.mark.multi
def test_several_nodes_reduce_in_two_levels(tmp_path: Path) -> None:
    code = f"""
import json, os
os.environ.update(NOSTALL_NODE=f"node {{rank // 2}}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
import numpy as np
import torch, torch.distributed as dist
import nostall.torch as nt
from nostall.errors import PeerError
from nostall.sync import GradientReducer, SyncOptions, reduce_gradients
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=4)
torch.set_default_device("meta")  # nothing of the host's lies where the program's tensors do
out = []

# Ranks add 1, 10, 100, 1000; several parts, and a type that rounds.
big = np.full(3 << 20, 10.0**rank)
got = reduce_gradients({{"big": big, "half": np.full(5, rank, np.float16)}})
out.append([np.unique(got["big"]).tolist(), np.unique(got["half"]).tolist()])

# Between nodes, within one, and of a rank alone.
for mine in ([0, 3], [1, 2]), ([0, 1], [2, 3]), ([0], [1, 2, 3]):
    mine = next(m for m in mine if rank in m)
    reducer = GradientReducer({{"x": np.zeros(2)}}, process_set=mine)
    out.append(reducer({{"x": np.full(2, float(rank))}})["x"].tolist())

# An optimizer's gradients.
torch.manual_seed(0)
model = torch.nn.Linear(3, 2, device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = nt.DistributedOptimizer(optimizer, model.named_parameters())
(model.weight.sum() * rank).backward()
optimizer.synchronize()
out.append(model.weight.grad.unique().tolist())

# One that dies in its step.
reducer = GradientReducer({{"x": np.zeros(2)}}, SyncOptions(timeout=60))
dist.barrier()
if rank == 3:
    os._exit(0)
try:
    reducer({{"x": np.zeros(2)}})
except PeerError as error:
    out.append(str(error))
print("RESULT " + json.dumps(out), flush=True)
os._exit(0)
"""
    results = run_ranks(4, code, check=False)
    assert results[3] == ""
    sets = [1.5, 1.5, 1.5, 1.5], [0.5, 0.5, 2.5, 2.5], [0.0, 2.0, 2.0, 2.0]
    for rank, (big, *of_sets, gradient, told) in enumerate(results[:3]):
        assert big == [[277.75], [1.5]]
        assert of_sets == [pytest.approx([one[rank]] * 2) for one in sets]
        assert gradient == [1.5]
        assert "in the reduction of x" in told
    assert "this node, whose ranks are 2, 3 of all" in results[2][-1]
    assert "connection between nodes failed" in results[0][-1]
    assert "connection between nodes failed" in results[1][-1]


@pytest.mark.multi
def test_a_stop_between_nodes_waits_for_no_rank_that_does_not_come(tmp_path: Path) -> None:
    code = f"""
import os, time
os.environ.update(NOSTALL_NODE=f"node {{rank // 2}}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
import numpy as np
import torch.distributed as dist
import nostall.torch
from nostall.errors import Error
from nostall.sync import GradientReducer, SyncOptions
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=4)
store = dist.distributed_c10d._get_default_store()
engine = GradientReducer({{"x": np.zeros(2)}}, SyncOptions(timeout=3600))._engine
gradient = np.ones(2)
if rank == 3:
    store.wait(["stopped"])
engine.submit(0, gradient.ctypes.data, True)
if rank == 0:
    while engine.stats()["sleep_ns"] == 0:  # until the reduction begins
        time.sleep(0.001)
    engine.stop()
    store.set("stopped", "")
try:
    engine.wait()
except Error as error:
    result = str(error)
"""
    results = run_ranks(4, code)
    assert "has closed its gradient engine" in results[1], results
    assert all("connection between nodes failed" in text for text in results[2:]), results


@pytest.mark.multi
def test_a_death_on_one_node_ends_the_others_though_its_leader_lives_on(tmp_path: Path) -> None:
    code = f"""
import os, signal
os.environ.update(NOSTALL_NODE=f"node {{rank // 2}}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
import numpy as np
import torch.distributed as dist
import nostall.torch
from nostall.errors import PeerError
from nostall.sync import GradientReducer, SyncOptions
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=4)
store = dist.distributed_c10d._get_default_store()
engine = GradientReducer({{"x": np.zeros(2)}}, SyncOptions(timeout=3600))._engine
gradient = np.ones(2)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
engine.submit(0, gradient.ctypes.data, True)
try:
    engine.wait()
except PeerError as error:
    result = str(error)
if store.add("told", 1) == 3:
    store.set("all told", "")
store.wait(["all told"])
"""
    results = run_ranks(4, code, check=False)
    assert results[3] == ""
    assert "rank 1 (process" in results[2] and "died" in results[2], results
    assert all("connection between nodes failed" in text for text in results[:2]), results


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


NOT_FINITE = """
import numpy as np
from nostall.errors import UsageError
from nostall.sync import GradientReducer, SyncOptions
result = []
for more in {}, {"mode": "negotiated", "cycle": 0.001}:
    like = {"a": np.zeros(3), "b": np.zeros((2, 2), np.float32)}
    reducer = GradientReducer(like, SyncOptions(check_finite=True, timeout=60, **more))
    mine = {"a": np.full(3, float(rank)), "b": np.full((2, 2), rank, np.float32)}
    for value in float("nan"), float("inf"), 4.0:
        if rank == 0:
            mine["b"][1, 0] = value
        try:
            result.append(reducer(mine)["b"].tolist())
        except UsageError as error:
            result.append(str(error))
"""


@pytest.mark.multi
def test_what_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, NOT_FINITE)
    mean = [[0.5, 0.5], [2.5, 0.5]]
    assert first == [*["gradient b of rank 0 is not finite at element 2"] * 2, mean] * 2
    told = "a gradient of another rank is not finite: the error of that rank names it"
    assert second == [told, told, mean] * 2


TOO_LARGE = """
import numpy as np
from nostall.errors import UsageError
from nostall.sync import GradientReducer, SyncOptions
like = {"a": np.zeros(3, np.float32)}
reducer = GradientReducer(like, SyncOptions(check_finite=True, compression="fp16", timeout=60))
result = []
for value in 2.0, 1e6, 4.0:
    try:
        result.append(reducer({"a": np.full(3, value, np.float32)})["a"].tolist())
    except UsageError as error:
        result.append(str(error))
"""


@pytest.mark.multi
def test_what_is_too_large_for_fp16_is_an_error_on_all() -> None:
    told = "gradient a is too large for fp16: pass another compression="
    assert run_ranks(2, TOO_LARGE) == [[[2.0] * 3, told, [4.0] * 3]] * 2


@pytest.mark.multi
def test_ranks_of_which_one_adds_up_are_refused() -> None:
    code = """
import numpy as np
from nostall.sync import GradientReducer, SyncOptions
GradientReducer({"a": np.zeros(3)}, SyncOptions(mean=rank == 0, timeout=60))
"""
    first, second = run_ranks(2, code, check=False)
    assert "(means: mean=True) where rank 1 has (sums: mean=False)" in first
    assert "(sums: mean=False) where rank 0 has (means: mean=True)" in second


REFUSED_ON_ONE = """
import numpy as np
from nostall.errors import Error
from nostall.sync import GradientReducer, SyncOptions
reducer = GradientReducer({"a": np.zeros(3)}, SyncOptions(timeout=60))
result = [reducer({"a": np.full(3, 1.0 + rank)})["a"].tolist()]
for _ in range(2):
    try:
        result.append(reducer({"a": np.ones(3 if rank else 4)})["a"].tolist())
    except Error as error:
        result.append(type(error).__name__)
"""


@pytest.mark.multi
def test_a_call_that_is_refused_on_one_rank_is_not_paired_with_its_next() -> None:
    first, second = run_ranks(2, REFUSED_ON_ONE)
    assert first == [[1.5] * 3, "UsageError", "UsageError"]
    assert second == [[1.5] * 3, "PeerError", "PeerError"]


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError, match='mode must be "planned" or "negotiated"'):
        SyncOptions(mode="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="negotiated"):
        SyncOptions(nonblocking=True)
    with pytest.raises(UsageError, match="int32"):
        reduce_gradients({"a": np.zeros(3, np.int32)})
    with pytest.raises(UsageError, match=r"gradient a has type >f4.*astype\('float32'\)"):
        reduce_gradients({"a": np.zeros(3, ">f4")})
    with pytest.raises(UsageError, match=r"torch\.distributed"):
        find_ranks(world=World(0, 4, 0, 2, "job"))
    with pytest.raises(UsageError, match="process_set"):
        find_ranks([0, 9], World(0, 2, 0, 2, "job"))


def test_nodes_that_know_no_common_name_of_the_job_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, where one took the place of another, or under MPICH."""
    names = []

    def connect(name: str, rank: int, ranks: int) -> Any:
        names.append(name)
        return SimpleNamespace(nodes=2)

    monkeypatch.setattr(sync, "_connect", connect)
    for rank in range(2):
        monkeypatch.setattr(sync, "_made", Counter())
        find_ranks(world=World(rank, 2, 0, 1, f"the job as node {rank} has it"))
    assert names[0] == names[1]


def test_an_engine_that_reduces_through_python_can_be_dropped_at_any_time() -> None:
    code = """
import sys, threading, time
import numpy as np
from nostall import _native

main = threading.get_ident()

def drop(held):
    held.clear()

class Alone:
    rank, ranks, node = 0, 1, [0]
    def __init__(self):
        self.entered = threading.Event()
        self.memory, self.submitted = {}, False
    def allocate(self, size):
        memory = np.empty(size, np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data
    def release(self, address):
        del self.memory[address]
    def start(self, address, count, kind):
        return self
    def wait(self):
        self.entered.set()
        while self.submitted and sys._current_frames()[main].f_code is not drop.__code__:
            time.sleep(0.001)  # until the engine is being dropped
    def all_gather(self, data):
        self.entered.set()
        return [data]
    def broadcast(self, data, root):
        return data

for mode in (_native.SyncMode.planned, _native.SyncMode.negotiated):
    options, network = _native.GradientOptions(), Alone()
    options.mode = mode
    array = np.zeros(4, np.float32)
    engines = [
        _native.GradientEngine(
            [("w", 4, "float32", "float32")], options, "job", 0, 1, network, False
        )
    ]
    network.entered.clear()
    network.submitted = True
    engines[0].submit(0, array.ctypes.data, True)
    assert network.entered.wait(60)
    drop(engines)
    assert not network.memory
print("dropped")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.stdout == "dropped\n", done.stderr
