"""Ranks meet through stores of every kind, with few requests, whatever was left there."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import prefork
import pytest
import torch.distributed as dist
from threads import each

from nostall.errors import PeerError, UsageError
from nostall.job import _meeting as meeting
from nostall.job._meeting import Met, meet, own_connection

RANKS = 16
KINDS = [
    "hash",
    "file",
    "prefix of a file",
    "tcp",
    "prefix of tcp",
    "tcp without libuv",
    "of Python",
]
EXTENDED = {"hash", "tcp", "prefix of tcp", "tcp without libuv"}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ranks whose rank 0 was killed."""
    monkeypatch.setattr(meeting, "_GRACE", 0.05)


class Around:
    """A rank's store that sees all of its requests, and is all that there is."""

    underlying_store = None
    host = ""

    def clone(self) -> Around:
        return self


class Counted(Around):
    """Of a store: how often each of its methods was called."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name != "has_extended_api" and (name, type(self.store)) != ("compare_set", Plain):
            self.calls[name] += 1  # those ask nobody
        return getattr(self.store, name)  # type: ignore[no-any-return]


class Killed(BaseException):
    """Of a rank, in the place of a signal."""


class Mortal(Around):
    """A rank's store, in whose `request`-th request the rank is killed: it leaves what is there."""

    def __init__(self, store: Any, request: int) -> None:
        self.store, self.left = store, request

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":
            self.left -= 1
            if self.left <= 0:
                raise Killed
        return getattr(self.store, name)


class Watched(Around):
    """A rank's store that tells when the rank waits for what is not there, and for which keys."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.waits: list[str] = []
        self.waiting = threading.Condition()
        self.heard = threading.Event()  # the last word is there, and is not read yet
        self.go: threading.Event | None = None  # what the rank reads it after

    def wait(self, keys: list[str], limit: Any) -> None:
        with self.waiting:
            self.waits.append(keys[-1])
            self.waiting.notify_all()
        self.store.wait(keys, limit)
        if keys[-1].endswith("/all"):
            self.heard.set()
            assert self.go is None or self.go.wait(60)

    def await_wait(self, end: str) -> None:
        def waits() -> bool:
            return any(key.rpartition("/")[2].startswith(end) for key in self.waits)

        with self.waiting:
            assert self.waiting.wait_for(waits, 60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Last(Around):
    """Of rank 0: its time limit begins once the ranks beside it that come have come."""

    def __init__(self, store: Any, come: threading.Barrier) -> None:
        self.store, self.come = store, come

    def wait(self, keys: list[str], limit: Any) -> None:
        self.come.wait(60)
        self.store.wait(keys, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Come(Last):
    """Of a rank beside it: it has come when it waits for rank 0's word."""

    def wait(self, keys: list[str], limit: Any) -> None:
        if keys[0].endswith("/all"):
            self.come.wait(60)
        else:  # for rank 0, which may be slow to begin
            limit = timedelta(seconds=60)
        self.store.wait(keys, limit)


class Counting(Around):
    """A rank's store: it counts itself among those that read when `after` is set."""

    def __init__(self, store: Any, after: threading.Event) -> None:
        self.store, self.after = store, after

    def add(self, key: str, number: int) -> int:
        assert self.after.wait(60)
        return self.store.add(key, number)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Paused(Around):
    """A rank's store: after its first call of `method` it waits for `go` with the next request."""

    def __init__(self, store: Any, method: str) -> None:
        self.store, self.method = store, method
        self.called, self.reached, self.go = False, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.called and not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(60)
        self.called = self.called or name == self.method
        return getattr(self.store, name)


class Plain(dist.Store):
    """Of Python, which has what torch's EtcdStore has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, number: int) -> int:
        return self.inner.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *limit: Any) -> None:
        self.inner.wait(keys, *limit)


def stores(kind: str, folder: Path, ranks: int = RANKS) -> list[Any]:
    """One for each rank."""
    if kind == "hash":
        return [dist.HashStore()] * ranks
    if kind == "of Python":
        return [Plain()] * ranks
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), ranks) for _ in range(ranks)]
    if kind == "prefix of a file":
        return [dist.PrefixStore("group", store) for store in stores("file", folder, ranks)]
    tcp: list[Any] = []
    for rank in range(ranks):
        port = tcp[0].port if tcp else 0
        options: dict[str, Any] = {"use_libuv": False} if kind == "tcp without libuv" else {}
        tcp.append(
            dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False, **options)
        )
    return [dist.PrefixStore("group", store) for store in tcp] if "prefix" in kind else tcp


def gather(ranks: list[Any], size: int, timeout: float = 60.0, start: str = "") -> list[Any]:
    """What each rank got, or its error."""
    return meet_with(ranks, expected(size, start), timeout)


def meet_with(ranks: list[Any], parts: list[bytes], timeout: float = 60.0) -> list[Any]:
    def run(rank: int) -> Any:
        return meet(ranks[rank], rank, len(parts), "test", parts[rank], timeout)

    return each(len(ranks), run)


def expected(size: int, start: str = "") -> list[bytes]:
    return [f"{start}{rank}".encode() for rank in range(size)]


def same(told: list[Met], size: int, start: str = "") -> None:
    assert [met.parts for met in told] == [expected(size, start)] * size, told
    assert len({met.number for met in told}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_sends_few_requests_however_many_there_are(kind: str, tmp_path: Path) -> None:
    counted = [Counted(store) for store in stores(kind, tmp_path)]
    same(gather(counted, RANKS), RANKS)
    removed = [c.calls.pop("delete_key", 0) for c in counted]
    # Who reads last removes what there is: the answers, the last entry and the count of readers.
    assert sorted(r - (rank == 0) for rank, r in enumerate(removed))[-2:] == [0, RANKS + 1]
    first = counted[0].calls
    reads = first.pop("get", 0) + first.pop("multi_get", 0)
    assert reads <= (1 if kind in EXTENDED else RANKS)
    assert first.total() <= 10, first
    for c in counted[1:]:
        assert c.calls.total() <= 8, c.calls
    if kind == "hash":
        assert counted[0].store.num_keys() == 1
    for store in counted:
        store.calls.clear()
    same(gather(counted, RANKS), RANKS)
    for c in counted:
        del c.calls["delete_key"]
    assert max(c.calls.total() for c in counted[1:]) <= 10
    if kind == "hash":
        assert counted[0].store.num_keys() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_come_before_rank_0_meet(kind: str, tmp_path: Path) -> None:
    ranks = stores(kind, tmp_path, 3)
    for _ in range(2):
        early = [Watched(store) for store in ranks[1:]]
        with ThreadPoolExecutor(3) as pool:
            others = [started(pool, early[n], 1 + n, f"{1 + n}".encode()) for n in range(2)]
            for store in early:
                store.await_wait("bell")
            same([f.result(60) for f in (started(pool, ranks[0], 0, b"0"), *others)], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_any_length_meet(kind: str, tmp_path: Path) -> None:
    """Together and alone longer than what torch's server takes in one value."""
    ranks = stores(kind, tmp_path, 4)
    for lengths in ([3_000_000] * 4, [0, 10_000_000, 1, 0], [10_000_000, 0, 4 << 20, 2]):
        parts = [bytes([rank, 255, 0, 10]) * (n // 4 + 1) for rank, n in enumerate(lengths)]
        parts = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        assert [met.parts == parts for met in meet_with(ranks, parts)] == [True] * 4
    if kind == "hash":
        assert ranks[0].num_keys() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_store_raises_is_told(rank: int) -> None:
    with pytest.raises(PeerError, match=rf"^rank {rank} .* for \"test\""):
        meet(dist.Store(), rank, 2, "test", b"", 1)


def test_who_is_alone_asks_nobody() -> None:
    alone = Counted(dist.HashStore())
    assert meet(alone, 0, 1, "test", b"here", 1).parts == [b"here"]
    assert not alone.calls


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of tcp"])
def test_ranks_that_do_not_come_are_named_on_all(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_GRACE", 60.0)
    come = threading.Barrier(4)
    first, *others = stores(kind, tmp_path, 4)
    told = gather([Last(first, come), *(Come(store, come) for store in others)], 6, 2)
    assert len(set(told)) == 1, told
    assert '2 of 6 ranks have not come in 2 s to meet for "test": 4, 5; see their' in told[0]
    if kind == "hash":  # nothing that was said, but the word of rank 0
        assert first.num_keys() == 3


class Waiting(Around):
    """A rank's store, which tells when the rank waits, by any of its connections."""

    def __init__(self, store: Any, waits: threading.Event) -> None:
        self.store, self.waits = store, waits

    def clone(self) -> Waiting:
        return Waiting(self.store.clone(), self.waits)

    def wait(self, keys: list[str], limit: Any) -> None:
        self.waits.set()
        self.store.wait(keys, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_meetings_of_threads_wait_beside_each_other(tmp_path: Path) -> None:
    """Rank 0 begins with one and rank 1 with the other: while one waits the other must go on."""
    ranks = [Waiting(store, threading.Event()) for store in stores("tcp", tmp_path, 2)]

    def begin(pool: ThreadPoolExecutor, rank: int, name: str) -> Future[Met]:
        return pool.submit(meet, ranks[rank], rank, 2, name, f"{name}{rank}".encode(), 20)

    with ThreadPoolExecutor(4) as pool:
        first = begin(pool, 0, "a"), begin(pool, 1, "b")
        assert all(rank.waits.wait(60) for rank in ranks)
        second = begin(pool, 1, "a"), begin(pool, 0, "b")
        told = [meeting.result().parts for meeting in (*first, *second)]
    assert told == [[b"a0", b"a1"], [b"b0", b"b1"]] * 2


def test_a_long_name_is_short_in_keys_and_messages() -> None:
    store, name = dist.HashStore(), "places of " + "-".join(map(str, range(4000)))
    first, other = Watched(store), Watched(store)

    def run(rank: int) -> Met:
        return meet((first, other)[rank], rank, 2, name, b"", 60)

    assert [met.parts for met in each(2, run)] == [[b"", b""]] * 2
    assert max(map(len, first.waits + other.waits)) < 200
    with pytest.raises(PeerError) as told:
        meet(store, 1, 2, name, b"", 0.05)
    assert '"places of 0-1-2-' in str(told.value) and len(str(told.value)) < 400


def test_a_store_that_fails_at_once_is_no_rank_that_is_missing() -> None:
    class Untimed(Plain):
        def wait(self, keys: list[str]) -> None:  # type: ignore[override]
            raise AssertionError(keys)

    with pytest.raises(PeerError, match=r"rank 0 could not meet the others for \"test\": .*wait"):
        meet(Untimed(), 0, 2, "test", b"", 60)


def test_without_rank_0_the_others_say_so() -> None:
    with pytest.raises(PeerError, match=r"rank 1 waited 0\.2 s in vain for rank 0 of 2, to meet"):
        meet(dist.HashStore(), 1, 2, "test", b"", 0.2)


def killed(ranks: list[Any], size: int, request: list[int]) -> None:
    """A start whose ranks are each killed in one of their requests, unless they came to the end."""

    def run(rank: int) -> None:
        with contextlib.suppress(Killed, PeerError):
            meet(Mortal(ranks[rank], request[rank]), rank, size, "test", b"dead", 0.05)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of tcp"])
def test_nothing_is_taken_of_ranks_that_were_killed(kind: str, tmp_path: Path) -> None:
    """In each of their requests; and of one start after another, as torchrun has them."""
    ranks = stores(kind, tmp_path, 3)
    for request in range(1, 11, 3 if kind == "file" else 1):
        killed(ranks, 3, [request, 11 - request, 8])
        killed(ranks, 3, [11, request, request])
        same(gather(ranks, 3, start=f"{request} "), 3, f"{request} ")


@pytest.mark.parametrize("other", [2, 4])
def test_nothing_is_taken_of_a_start_of_more_or_fewer_ranks(other: int, tmp_path: Path) -> None:
    ranks = stores("tcp", tmp_path, 4)
    for request in range(1, 11):
        killed(ranks[:other], other, [request] * other)
    same(gather(ranks[:3], 3), 3)


def started(pool: ThreadPoolExecutor, store: Any, rank: int, part: bytes) -> Future[Met]:
    return pool.submit(meet, store, rank, 3, "test", part, 60)


def test_who_comes_before_rank_0_leaves_what_is_there(tmp_path: Path) -> None:
    """Ranks answer to the rank 0 of a killed start, until theirs comes."""
    ranks = stores("tcp", tmp_path, 5)
    killed(ranks[2:], 3, [3, 6, 1])  # rank 0 waits for rank 2, which does not come to answer
    early = [Watched(store) for store in ranks[1:3]]
    with ThreadPoolExecutor(3) as pool:
        others = [started(pool, early[n], 1 + n, f"{1 + n}".encode()) for n in range(2)]
        for store in early:
            store.await_wait("all")  # for the last word of the rank 0 that is dead
        first = started(pool, ranks[0], 0, b"0")
        same([f.result(60) for f in (first, *others)], 3)


def test_a_rank_that_met_the_rank_0_of_its_start_answers_to_no_other(tmp_path: Path) -> None:
    """One that outlives its start, as where the agent of its node was killed."""
    ranks = stores("tcp", tmp_path, 5)
    late = Watched(ranks[4])
    with ThreadPoolExecutor(5) as pool:
        outlived = started(pool, late, 1, b"late")
        late.await_wait("bell")
        with pytest.raises(Killed):  # as it waits
            meet(Mortal(ranks[3], 3), 0, 3, "test", b"dead", 60)
        late.await_wait("all")
        now = [started(pool, ranks[rank], rank, f"{rank}".encode()) for rank in range(3)]
        with pytest.raises(PeerError, match=r"came in its place: the job was started again"):
            outlived.result(60)
        same([f.result(60) for f in now], 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_processes_of_one_rank_the_second_meets(rank: int, tmp_path: Path) -> None:
    ranks = stores("tcp", tmp_path, 4)
    with ThreadPoolExecutor(4) as pool:
        now = [started(pool, ranks[0], 0, b"0")] if rank else []
        first = Watched(ranks[3])
        twice = started(pool, first, rank, b"first")
        first.await_wait("all" if rank else "2")
        second = Watched(Counting(ranks[rank], first.heard) if rank else ranks[rank])
        now.append(started(pool, second, rank, str(rank).encode()))
        second.await_wait("all" if rank else "2")
        now += [started(pool, ranks[r], r, f"{r}".encode()) for r in range(1 + rank, 3)]
        same([f.result(60) for f in now], 3)
        words = rf"process \d+ of .* both are rank {rank} of 3 where the ranks meet for \"test\""
        with pytest.raises(UsageError, match=words):
            twice.result(60)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_who_is_not_of_a_meeting_waits_for_nothing_that_is_gone(kind: str, tmp_path: Path) -> None:
    ranks = stores(kind, tmp_path, 4)
    with ThreadPoolExecutor(4) as pool:
        first, slow = started(pool, ranks[0], 0, b"0"), Watched(ranks[3])
        slow.go = threading.Event()
        twice = started(pool, slow, 1, b"first")
        slow.await_wait("all")
        answers = Watched(Counting(ranks[1], slow.heard))
        second = started(pool, answers, 1, b"1")
        answers.await_wait("all")  # in the place of the first one's answer
        same([f.result(60) for f in (first, second, started(pool, ranks[2], 2, b"2"))], 3)
        slow.go.set()
        with pytest.raises(UsageError, match="and another process both are rank 1 of 3"):
            twice.result(60)


SERVER = """
import signal
from torch.distributed import TCPStore

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
signal.pause()
"""


@pytest.fixture
def server() -> Iterator[tuple[prefork.Process, Any]]:
    """A process with torch's server, and a store of it whose time limit is long."""
    with prefork.Process(
        ["-c", SERVER], stdout=prefork.PIPE, stderr=prefork.PIPE, torch=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=10))
            yield process, dist.PrefixStore("in", dist.PrefixStore("of", store))
        finally:
            process.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_is_gone_is_told(
    rank: int, server: tuple[prefork.Process, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(_: object) -> None:
        raise AssertionError("this waits for the store's own time limit")

    process, store = server
    process.kill()
    process.wait()
    monkeypatch.setattr(dist.PrefixStore, "clone", clone)
    with pytest.raises(PeerError, match=r'rank \d .* for "test"'):
        meet(store, rank, 2, "test", b"", 60)


def test_the_server_warns_of_no_connection(server: tuple[prefork.Process, Any]) -> None:
    process, store = server
    own_connection(store, 60).set("key", "")
    assert store.check(["key"])
    process.kill()
    assert process.communicate(timeout=60)[1] == ""


class Answering(Around):
    """Of a rank that is killed when it has answered."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def wait(self, keys: list[str], limit: Any) -> None:
        if keys[0].endswith("/all"):
            raise Killed
        self.store.wait(keys, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("method", ["multi_get", "check"])
def test_a_rank_0_that_was_taken_over_leaves_the_next_one_alone(
    method: str, tmp_path: Path
) -> None:
    """Where all had answered to it, and where it gave up."""
    ranks = stores("tcp", tmp_path, 4)
    former, now = Paused(ranks[0], method), Watched(ranks[1])
    with ThreadPoolExecutor(3) as pool:
        limit = 0.05 if method == "check" else 60
        gone = pool.submit(meet, former, 0, 2, "test", b"gone", limit)
        if method == "multi_get":
            with pytest.raises(Killed):
                meet(Answering(ranks[2]), 1, 2, "test", b"dead", 60)
        assert former.reached.wait(60)
        first = pool.submit(meet, now, 0, 2, "test", b"0", 60)
        now.await_wait("1")
        former.go.set()
        with pytest.raises(UsageError, match="both are rank 0 of 2"):
            gone.result(60)
        same([meet(ranks[3], 1, 2, "test", b"1", 60), first.result(60)], 2)


@pytest.mark.parametrize("kind", ["hash", "tcp", "tcp without libuv"])
def test_ranks_that_a_killed_rank_0_did_not_wake_meet_the_next_one(
    kind: str, tmp_path: Path
) -> None:
    ranks = stores(kind, tmp_path, 3)
    early = Watched(ranks[2])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, early, 1, 2, "test", b"1", 60)
        early.await_wait("bell")
        for _ in range(2):
            with pytest.raises(Killed):  # between its first two requests
                meet(Mortal(ranks[1], 2), 0, 2, "test", b"dead", 60)
        same([meet(ranks[0], 0, 2, "test", b"0", 60), other.result(60)], 2)
