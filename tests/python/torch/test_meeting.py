"""Ranks learn each other's nodes through stores of every kind, with few requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from threads import each

from nostall.errors import PeerError
from nostall.torch import _meeting as meeting

RANKS = 16
SHORT = timedelta(milliseconds=200)


class Counted:
    """Of a store: how often each of its methods was called."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name != "has_extended_api":  # asks nobody
            self.calls[name] += 1
        return getattr(self.store, name)  # type: ignore[no-any-return]


class Last:
    """Of rank 0: its time limit begins once the ranks beside it that come have come."""

    def __init__(self, store: Any, others: int) -> None:
        self.store = store
        self.keys = [meeting._key(rank) for rank in range(1, 1 + others)]

    def __getattr__(self, name: str) -> Any:
        self.store.wait(self.keys, timedelta(seconds=60))
        return getattr(self.store, name)


def stores(kind: str, folder: Path) -> list[Any]:
    """One for each rank."""
    if kind == "hash":
        return [dist.HashStore()] * RANKS
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), RANKS) for _ in range(RANKS)]
    if kind == "prefix of a file":
        return [dist.PrefixStore("group", store) for store in stores("file", folder)]
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", served.port, None, False) for _ in range(RANKS - 1)]
    tcp = [served, *others]
    return tcp if kind == "tcp" else [dist.PrefixStore("group", store) for store in tcp]


def meet(ranks: list[Any], size: int) -> list[Any]:
    """What each rank got, or its error."""

    def run(rank: int) -> Any:
        return meeting.nodes_of_ranks(ranks[rank], rank, size, f"node {rank // 3}")

    return each(len(ranks), run)


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of a file", "tcp", "prefix of tcp"])
def test_a_rank_sends_few_requests_however_many_there_are(kind: str, tmp_path: Path) -> None:
    counted = [Counted(store) for store in stores(kind, tmp_path)]
    assert meet(counted, RANKS) == [[f"node {r // 3}" for r in range(RANKS)]] * RANKS
    assert all(c.calls == {"set": 1, "get": 1} for c in counted[1:])
    many = {"get": RANKS - 1} if "file" in kind else {"multi_get": 1}
    assert counted[0].calls == {"set": 1, **many}


def test_who_is_alone_asks_nobody() -> None:
    alone = Counted(dist.HashStore())
    assert meeting.nodes_of_ranks(alone, 0, 1, "here") == ["here"]
    assert not alone.calls


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of tcp"])
def test_ranks_that_do_not_come_are_named_on_all(kind: str, tmp_path: Path) -> None:
    ranks = stores(kind, tmp_path)[:4]
    for store in ranks:
        store.set_timeout(timedelta(seconds=2))
    told = meet([Last(ranks[0], 3), *ranks[1:]], 6)
    assert len(set(told)) == 1, told
    assert "2 of 6 ranks have not come to make the group: 4, 5;" in told[0]


def test_without_rank_0_the_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_GRACE", SHORT)
    store = dist.HashStore()
    store.set_timeout(SHORT)
    with pytest.raises(PeerError, match="rank 0 has not told rank 1"):
        meeting.nodes_of_ranks(store, 1, 2, "here")
