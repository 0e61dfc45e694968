"""Ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nostall.errors import PeerError


def each(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run` gave for each rank, or its PeerError's text."""

    def call(rank: int) -> Any:
        try:
            return run(rank)
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(call, range(ranks)))
