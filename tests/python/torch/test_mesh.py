"""Ranks that connect over Gloo agree on how it went, or say who is silent."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from threads import each

from nostall.torch import _mesh as mesh

LONG = timedelta(seconds=30)


def stores(kind: str, folder: Path, ranks: int) -> list[Any]:
    if kind == "hash":
        return [dist.HashStore()] * ranks
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), ranks) for _ in range(ranks)]
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", served.port, None, False) for _ in range(ranks - 1)]
    return [dist.PrefixStore("group", store) for store in (served, *others)]


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of tcp"])
def test_all_ranks_agree_on_what_failed(kind: str, tmp_path: Path) -> None:
    ranks = stores(kind, tmp_path, 3)
    good = [dist.PrefixStore("good", store) for store in ranks]
    assert each(3, lambda r: mesh._agree(good[r], r, 3, "", LONG)) == [""] * 3
    bad = [dist.PrefixStore("bad", store) for store in ranks]
    told = each(3, lambda r: mesh._agree(bad[r], r, 3, "refused" if r == 2 else "", LONG))
    assert told == ["rank 2 of 3 could not connect: refused"] * 3


class Together:
    """A rank's store, in which no rank waits before all others have begun to."""

    def __init__(self, store: Any, others: threading.Barrier) -> None:
        self._store, self._others = store, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self._others.wait(60)
        self._store.wait(keys, limit)


@pytest.mark.parametrize("kind", ["hash", "file", "prefix of tcp"])
def test_a_rank_that_dies_while_connecting_is_named(kind: str, tmp_path: Path) -> None:
    here = threading.Barrier(2)
    ranks = [Together(store, here) for store in stores(kind, tmp_path, 3)]
    told = each(2, lambda r: mesh._agree(ranks[r], r, 3, "", timedelta(seconds=0.1)))
    for rank, text in enumerate(told):
        assert f"rank {rank} of 3 waited 0.1 s" in text
        assert "never heard of rank 2:" in text


def test_connections_are_made_between_all(tmp_path: Path) -> None:
    ranks = stores("file", tmp_path, 2)
    made = each(2, lambda r: mesh.connect(ranks[r], r, 2, LONG))
    assert [backend.rank() for backend in made] == [0, 1]
    waiting = made[1].barrier()
    mesh.hang_up(made[0])
    # And not at the timeout. Who writes before it has seen the end is told of a broken pipe.
    with pytest.raises(RuntimeError, match=r"(?i)clos|reset|broken pipe"):
        waiting.wait()
