"""Parameter servers: staleness that is bounded, gradients that count once, proxies, and faults.

Four ranks stand for two nodes of two.
"""

from __future__ import annotations

import inspect
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_ranks import run_ranks

from nostall.errors import PeerError, UsageError
from nostall.job._stream import Stream
from nostall.torch import ParameterServers, _parameter_servers, _parameter_shard
from nostall.torch._parameter_shard import ENDED, Link, Shard

SETUP = """
import json, os, signal, time
import numpy as np, torch, torch.distributed as dist, nostall.torch as nt
from nostall.errors import PeerError, UsageError
torch.set_num_threads(1)
os.environ["NOSTALL_NODE"] = f"node {rank // 2}"
dist.init_process_group("gloo", init_method="file://PATH/store", rank=rank, world_size=4)
GROUPS = {"flat": "flat", "node": "node", "across nodes": [[3, 0, 1], [2]]}
def sgd(**named):
    return lambda parameters: torch.optim.SGD(parameters, **named)
def tell(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
def shared(name, count=4):  # of all ranks, each of which may be the first
    with open(f"PATH/{name}", "ab") as file:
        os.ftruncate(file.fileno(), 8 * count)
    return np.memmap(f"PATH/{name}", np.int64, "r+", shape=count)
"""


def ranks(code: str, folder: Path, **named: Any) -> list[Any]:
    return run_ranks(4, SETUP.replace("PATH", str(folder)) + inspect.cleandoc(code), **named)


SYNCHRONOUS = """
def make():
    torch.manual_seed(rank)  # rank 0's parameters count
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
def loss(model, who, step):
    generator = torch.Generator().manual_seed(100 * who + step)
    return model(torch.randn(5, 6, generator=generator)).square().mean()
optimizers = {
    "momentum": sgd(lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
result = {"weights": {}, "optimizers": 0}
for name, make_optimizer in optimizers.items():
    # The mean of all ranks' gradients, in one process.
    model = make()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = make_optimizer(model.parameters())
    for step in range(8):
        optimizer.zero_grad()
        (sum(loss(model, who, step) for who in range(4)) / 4).backward()
        optimizer.step()
    result["weights"][name] = [p.tolist() for p in model.parameters()]
    for groups in GROUPS if name == "momentum" else ["node"]:
        for chosen in (None, [2])[:2 if (name, groups) == ("momentum", "node") else 1]:
            model = make()
            servers = nt.ParameterServers(
                model, make_optimizer, staleness=0, groups=GROUPS[groups], servers=chosen)
            result["optimizers"] += servers.optimizer is not None
            for step in range(8):
                model.zero_grad()
                loss(model, rank, step).backward()
                servers.step()
            before = [p.tolist() for p in model.parameters()]
            servers.finish()
            assert before == [p.tolist() for p in model.parameters()]
            assert servers.stats()["staleness"] == {0: 8}
            assert servers.stats()["updates"] == (8 if chosen is None or rank == 2 else 0)
            result["weights"][f"{name} {groups} {chosen}"] = before
"""


@pytest.mark.multi
def test_without_staleness_it_is_synchronous_training(tmp_path: Path) -> None:
    results = ranks(SYNCHRONOUS, tmp_path)
    assert [r["optimizers"] for r in results] == [4, 4, 5, 4]
    weights = results[0]["weights"]
    for name, found in weights.items():
        assert all(r["weights"][name] == found for r in results)  # the same bits on all ranks
        for mine, right in zip(found, weights[name.split()[0]], strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(right), rtol=1e-4, atol=1e-5
            )
    assert len(weights) == 7


BOUND = """
S, STEPS = 2, 12
result = {}
for groups in ("flat", "node"):
    model = torch.nn.Linear(4, 4)
    servers = nt.ParameterServers(model, sgd(lr=0.0), staleness=S, groups=groups)
    begun = shared(f"begun {groups}")
    dist.barrier()
    ahead = {"flat": [0, 1, 2], "node": [0, 1]}[groups]
    distance = 0
    for step in range(STEPS):
        if rank == 3 and step == 0:  # until no other may go on
            while any(begun[r] != S + 1 for r in ahead):
                time.sleep(0.001)
        model.weight.grad = torch.ones(4, 4)
        begun[rank] = step + 1
        servers.step()
        distance = max(distance, step + 1 - int(begun.min()))
    servers.finish()
    result[groups] = {"distance": distance, "staleness": servers.stats()["staleness"]}
"""


@pytest.mark.multi
def test_staleness_reaches_its_bound_and_does_not_exceed_it(tmp_path: Path) -> None:
    results = ranks(BOUND, tmp_path)
    for groups, ahead in (("flat", 3), ("node", 2)):
        for rank, result in enumerate(results):
            assert result[groups]["distance"] <= 2
            counted = {int(k): v for k, v in result[groups]["staleness"].items()}
            assert sum(counted.values()) == 12
            assert max(counted) <= 2
            assert rank >= ahead or counted[2] > 0


ONCE = """
STEPS = 6
result = {}
for groups in GROUPS:
    for staleness in (0, 3):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        model.unused = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        model.fixed = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        servers = nt.ParameterServers(model, sgd(lr=4.0), staleness=staleness, groups=GROUPS[groups])
        for step in range(STEPS + rank):  # others go on without those that have finished
            model.weight.grad = torch.full((1000,), 100.0**rank, dtype=torch.float64)
            servers.step()
        servers.finish()
        servers.finish()
        assert servers.stats()["steps"] == STEPS + {"flat": [0, 1, 2, 3], "node": [1, 1, 3, 3],
            "across nodes": [3, 3, 2, 3]}[groups][rank]
        result[f"{groups} {staleness}"] = {
            "values": sorted({*model.weight.tolist()}), "unused": model.unused.abs().max().item(),
            "fixed": model.fixed.tolist(), "again": tell(servers.step), **servers.stats()}
"""


@pytest.mark.multi
def test_every_gradient_counts_once_and_proxies_send_a_group_less(tmp_path: Path) -> None:
    results = ranks(ONCE, tmp_path)
    given = [6, 7, 8, 9]
    for way in results[0]:
        for result in (r[way] for r in results):
            assert result["values"] == [-float(sum(n * 100**r for r, n in enumerate(given)))]
            assert result["unused"] == 0
            assert result["fixed"] == [7.0] * 3
            assert result["gradients"] == sum(given)  # on each server
            assert "UsageError: finish() ended this training" in result["again"]
    sent = {
        way: {key: sum(r[way][key] for r in results) for key in ("messages", "bytes")}
        for way in results[0]
    }
    for staleness in (0, 3):
        flat, node = sent[f"flat {staleness}"], sent[f"node {staleness}"]
        # To two servers and back: gradients, the first parameters (rank 0 gives them), the last.
        assert flat["messages"] == 2 * sum(2 * n + 2 for n in given) + 2
        assert node["messages"] == 2 * sum(2 * n + 2 for n in (7, 9)) + 2
        values = 500 * 8
        assert 0 < flat["bytes"] - values * flat["messages"] < 50 * flat["messages"]
        assert 0 < node["bytes"] - values * node["messages"] < 50 * node["messages"]


ENDS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
model = torch.nn.Linear(50, 50)
servers = nt.ParameterServers(model, sgd(lr=0.1), staleness=1, groups="WAY")
for step in range(9):
    if rank == VICTIM and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    model.zero_grad()
    model(torch.ones(2, 50)).sum().backward()
    servers.step()
"""


@pytest.mark.multi
@pytest.mark.parametrize(
    ("way", "victim", "names"),
    [("flat", 3, ["rank 3"]), ("node", 2, ["rank 2", "[2, 3]"]), ("node", 3, ["rank 3", "[2, 3]"])],
)
def test_the_death_of_a_rank_is_told_to_all(
    way: str, victim: int, names: list[str], tmp_path: Path
) -> None:
    code = ENDS.replace("WAY", way).replace("VICTIM", str(victim))
    told = ranks(code, tmp_path, check=False)
    assert told[victim] == ""
    for rank in {0, 1, 2, 3} - {victim}:
        assert "PeerError" in told[rank], told
        assert any(name in told[rank] for name in names), told


STUCK = """
model = torch.nn.Linear(50, 50)
ended, pids = shared("ended"), shared("pids")
servers = nt.ParameterServers(model, sgd(lr=0.1), groups="flat", servers=[2])
model.weight.grad = torch.ones_like(model.weight)
servers.step()
while servers._links[0].answered < 2:  # no wait has begun with the long limit
    time.sleep(0.001)
pids[rank] = os.getpid()
while not pids.all():
    time.sleep(0.001)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
for link in servers._links:  # meeting has longer
    link._stream.set_timeout(2.0)
def go_on():
    while True:
        servers.step()
result = tell(go_on)
ended[rank] = 1
while rank == 0 and ended.sum() < 3:
    time.sleep(0.01)
if rank == 0:
    os.kill(int(pids[2]), signal.SIGKILL)
"""


@pytest.mark.multi
def test_a_stuck_server_is_told_to_all(tmp_path: Path) -> None:
    told = ranks(STUCK, tmp_path, check=False)
    for rank in (0, 1, 3):
        assert "PeerError: rank 2 " in told[rank], told


WRONG = """
class Wrong(torch.optim.SGD):
    def step(self):
        raise ValueError("the user's optimizer failed")
def late():
    servers = nt.ParameterServers(model, sgd(lr=0.1), staleness=0)
    model.weight.grad = torch.ones_like(model.weight)
    dist.barrier()  # meeting has longer, on all ranks
    servers._shard._timeout = 5.0
    if rank < 2:
        told = tell(servers.step)
        ended[rank] = 1
        return told
    while not ended[:2].all():
        time.sleep(0.001)
    return tell(servers.step)
def wrong():
    servers = nt.ParameterServers(model, lambda p: (Wrong if rank == 1 else torch.optim.SGD)(p, lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    while True:
        servers.step()
def gone():
    from nostall.torch import _parameter_servers as module
    connect = module.connect
    def refused(address, *others):
        raise RuntimeError("nobody listens")
    if rank == 2:  # a proxy, for which another one waits
        module.connect = refused
    try:
        nt.ParameterServers(model, sgd(lr=0.1))
    finally:
        module.connect = connect
ended = shared("ended")
dist.barrier()
model = torch.nn.Linear(8, 8)
result = {
    "gone": tell(gone),
    "alike": tell(lambda: nt.ParameterServers(model, sgd(lr=0.1), staleness=rank)),
    "models": tell(lambda: nt.ParameterServers(torch.nn.Linear(8, 8 + rank), sgd(lr=0.1))),
    "few": tell(lambda: nt.ParameterServers(torch.nn.Linear(3, 1, bias=False), sgd(lr=0.1))),
    "nobody": tell(lambda: nt.ParameterServers(model, sgd(lr=0.1), groups=[[0, 1], [2]])),
    "twice": tell(lambda: nt.ParameterServers(model, sgd(lr=0.1), groups=[[0, 1], [1, 2, 3]])),
    "make": tell(lambda: nt.ParameterServers(model, sgd(lr=-1.0 if rank == 2 else 0.1))),
    "wrong": tell(wrong),
    "late": late(),
}
"""


@pytest.mark.multi
def test_what_one_rank_does_wrong_is_told_to_all(tmp_path: Path) -> None:
    results = ranks(WRONG, tmp_path)
    for rank, told in enumerate(results):
        assert told["gone"] == "PeerError: rank 2 cannot reach a server: nobody listens"
        assert "the ranks of the job disagree: staleness is 0 on rank 0 and 1" in told["alike"]
        assert "the ranks of the job disagree: model is" in told["models"]
        assert "3 parameters cannot be split among 4 servers" in told["few"]
        assert "rank 3 is in no group" in told["nobody"]
        assert "rank 1 is in two groups" in told["twice"]
        assert "Invalid learning rate: -1.0" in told["make"]
        assert ("rank 2 cannot serve its parameters" in told["make"]) == (rank != 2)
        assert "the optimizer of a server failed: ValueError" in told["wrong"]
        # The ranks that were late learn of it from servers, if these have not ended by then.
        words = "PeerError" if rank >= 2 else "rank 2 has not given gradient 0 for 5 s"
        assert words in told["late"]


LEAVES = """
class Wrong(torch.optim.SGD):
    def step(self):
        raise ValueError("the user's optimizer failed")
def train(optimizer, breaks):
    servers = nt.ParameterServers(model, lambda p: optimizer(p, lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    if breaks and rank == 3:
        servers._among.abort()
    while True:
        servers.step()
def held():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
model = torch.nn.Linear(8, 8)
dist.barrier()
before = held()
result = []
for optimizer, breaks in ((Wrong if rank == 1 else torch.optim.SGD, False), (torch.optim.SGD, True)):
    result.append(tell(lambda: train(optimizer, breaks)))
    deadline = time.monotonic() + 60
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    result.append(held() == before)
    dist.barrier()
"""


@pytest.mark.multi
def test_nothing_is_held_after_an_error(tmp_path: Path) -> None:
    for told, is_left, of_broken, is_left_broken in ranks(LEAVES, tmp_path):
        assert "the optimizer of a server failed: ValueError" in told
        assert of_broken.startswith("PeerError: ")
        assert is_left and is_left_broken, (told, of_broken)


def linear(kind: torch.dtype = torch.float32, device: str = "cpu") -> torch.nn.Module:
    return torch.nn.Linear(2, 2, dtype=kind, device=device)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"staleness": -1}, "staleness=-1 is not a number of steps"),
        ({"staleness": True}, "staleness=True is not a number of steps"),
        ({"staleness": 0.5}, "staleness=0.5 is not a number of steps"),
        ({"timeout": 0}, "timeout=0 is not a number of seconds"),
        ({"timeout": float("nan")}, "timeout=nan is not a number of seconds"),
        ({"timeout": float("inf")}, "timeout=inf: a rank that died needs a limit"),
        ({"groups": "rack"}, "groups='rack' is neither"),
        ({"groups": 2}, "groups=2 is not a list of lists of ranks"),
        ({"groups": [0]}, "a list of groups=0 is not a list of ranks"),
        ({"groups": [[1]]}, r"a list of groups=\[1\] is not a set of ranks below 1"),
        ({"servers": []}, r"servers=\[\] is not a set of ranks below 1"),
        ({"servers": [0, 0]}, r"servers=\[0, 0\] is not a set of ranks below 1"),
        ({"servers": "all"}, "servers='all' is not a list of ranks"),
        ({"model": linear().parameters()}, "takes a module of torch, not a generator"),
        ({"model": torch.nn.Tanh()}, "no parameter of the model requires a gradient"),
        ({"model": linear(device="meta")}, "parameter weight is on meta"),
        (
            {"model": torch.nn.Sequential(linear(), linear(torch.float64))},
            "1.weight is torch.float",
        ),
        ({"make_optimizer": lambda _: None}, "make_optimizer returned a NoneType"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], words: str) -> None:
    given = {"model": linear(), "make_optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **change}
    with pytest.raises(UsageError, match=words):
        ParameterServers(**given)


def test_a_rank_alone_trains_as_its_optimizer_does() -> None:
    model, alone = linear(), linear()
    model.load_state_dict(alone.state_dict())
    servers = ParameterServers(
        model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), staleness=0
    )
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    scheduler, other = (
        torch.optim.lr_scheduler.StepLR(one, 2)
        for one in (servers.optimizer, optimizer)
        if one is not None
    )
    for step in range(5):
        for one in (model, alone):
            one.zero_grad()
            one(torch.full((3, 2), float(step))).square().sum().backward()
        servers.step()
        optimizer.step()
        scheduler.step()
        other.step()
    servers.finish()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, right)


def test_a_device_that_is_the_default_and_any_time_limit_do_no_harm() -> None:
    model = linear()
    with torch.no_grad():
        model.weight.fill_(1.0)
    torch.set_default_device("meta")
    try:
        servers = ParameterServers(model, lambda p: torch.optim.SGD(p, lr=1.0), timeout=1e12)
        model.weight.grad = torch.full((2, 2), 3.0, device="cpu")
        servers.step()
        servers.finish()
    finally:
        torch.set_default_device(None)
    assert model.weight.tolist() == [[-2.0] * 2] * 2


def test_every_error_fits_behind_the_parameters() -> None:
    letters = _parameter_servers._NOTE_LETTERS
    note = {"wait": False, "clock": ENDED, "error": "\U0001f600" * letters}
    assert len(json.dumps(note)) <= _parameter_servers._NOTE


@pytest.fixture
def streams() -> Iterator[Any]:
    made: list[Stream] = []

    def pair() -> list[Stream]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            ends = [Stream(one, 60.0) for one in (near, server.accept()[0])]
        made.extend(ends)
        return ends

    yield pair
    for one in made:
        one.close()


class Proxies:
    """A server's conversations, whose other sides a test plays."""

    def __init__(self, streams: Any, optimizer: Any = torch.optim.SGD) -> None:
        self.shard = Shard(
            2,
            torch.float32,
            lambda p: optimizer(p, lr=0.1),
            [0, 1],
            workers=2,
            staleness=0,
            timeout=60.0,
        )
        self.ends = []
        for group in (0, 1):
            near, far = streams()
            question = {"group": group, "initial": group == 0}
            threading.Thread(target=self.shard.answer, args=(question, far), daemon=True).start()
            self.ends.append(near)
        self.ends[0].send_bytes(memoryview(bytearray(8)))
        for end in self.ends:
            assert end.receive() == {"clock": 0}
            end.receive_into(memoryview(bytearray(8)))

    def push(self, group: int) -> None:
        self.ends[group].send({"clock": 0, "workers": 1})
        self.ends[group].send_bytes(memoryview(bytearray(8)))


def test_a_server_that_waits_says_so(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = Proxies(streams)
    # From here on: the servers' first answers may wait for parameters too.
    monkeypatch.setattr(_parameter_shard, "_PARTS", 600)
    proxies.push(0)
    assert [proxies.ends[0].receive() for _ in range(2)] == [{"wait": True}] * 2
    proxies.shard._timeout = 0.2
    while (answer := proxies.ends[0].receive()) == {"wait": True}:
        pass
    assert "rank 1 has not given gradient 0 for 0.2 s" in answer["error"]


def test_a_server_hears_why_a_proxy_gave_up(streams: Any) -> None:
    proxies = Proxies(streams)
    proxies.push(0)
    proxies.ends[0].send({"error": "rank 7 is late"})  # it is not its turn
    proxies.ends[0].close()
    assert proxies.shard.wait_for_end(0.0) is False
    with proxies.shard._changed:
        assert proxies.shard._changed.wait_for(lambda: proxies.shard.error, 60.0)
    assert proxies.shard.error == "rank 7 is late"
    proxies.push(1)
    assert proxies.ends[1].receive() == {"error": "rank 7 is late"}


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise FileNotFoundError("the user's file")


def test_the_error_of_an_optimizer_is_told_as_its_own(streams: Any) -> None:
    proxies = Proxies(streams, Broken)
    for group in (0, 1):
        proxies.push(group)
    for end in proxies.ends:
        answer = end.receive()
        assert "the optimizer of a server failed: FileNotFoundError" in answer["error"]


def begin(stream: Stream, changed: threading.Condition) -> Link:
    link = Link(5, 0, 2, torch.float32, stream, changed, far=False)
    link.start(0, None)
    return link


def test_a_proxy_that_waits_for_an_answer_says_why_it_gives_up(streams: Any) -> None:
    near, far = streams()
    changed = threading.Condition()
    link = begin(near, changed)
    assert far.receive() == {"group": 0, "initial": False}
    for _ in range(3):
        far.send({"wait": True})
    far.send({"clock": 0})
    far.send_bytes(memoryview(bytearray(8)))
    with changed:
        assert changed.wait_for(lambda: link.answered == 1, 60.0)
    link.push(0, 1, torch.ones(2))
    assert far.receive() == {"clock": 0, "workers": 1}
    far.receive_into(memoryview(bytearray(8)))
    deadline = time.monotonic() + 60
    while link.messages < 2 and time.monotonic() < deadline:  # until it waits for the answer
        time.sleep(0.001)
    link.give_up("rank 7 is late")
    link.close(0.0)
    assert far.receive() == {"error": "rank 7 is late"}


def test_what_a_server_told_comes_before_what_broke(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_parameter_servers, "_LAST_WORDS", 60.0)
    servers = ParameterServers(linear(), lambda p: torch.optim.SGD(p, lr=0.1))
    pairs = [streams() for _ in range(2)]
    links = [begin(near, servers._changed) for near, _ in pairs]
    servers._links = links + servers._links
    pairs[0][1].close()
    with servers._changed:
        assert servers._changed.wait_for(lambda: links[0].error, 60.0)
    assert links[0].error.startswith("rank 5 is gone")
    pairs[1][1].send({"error": "rank 7 is late"})
    listener = servers._listener
    assert listener is not None
    with pytest.raises(PeerError, match="rank 7 is late"):
        servers.step()
    assert listener._closed.is_set()
