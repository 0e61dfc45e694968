"""The nodes of a group's ranks, exchanged through its store with few requests."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from nostall.errors import PeerError

_NODES = "nostall nodes"
# Rank 0 names the missing ranks when its own wait ends, about when the wait of the others ends.
_GRACE = timedelta(seconds=10)
_NAMED = 8


def nodes_of_ranks(store: Any, rank: int, size: int, mine: str) -> list[str]:
    """The node of each rank; all ranks call this, with the node of their own.

    Rank 0 reads the entries of the others and writes them as one value: three requests per rank in
    all, with each kind of store, not one per pair of ranks. If the store supports it, rank 0 reads
    with one request too.

    Raises PeerError, which names the ranks that are missing, after the timeout of the store.
    """
    if size == 1:  # there is no other rank
        return [mine]
    if rank > 0:
        store.set(_key(rank), mine)
        return _read(store, rank)
    keys = [_key(r) for r in range(1, size)]
    has_multi = hasattr(store, "has_extended_api") and store.has_extended_api()
    try:
        given = store.multi_get(keys) if has_multi else [store.get(key) for key in keys]
    except RuntimeError as error:
        told = _missing(store, size, error)
        store.set(_NODES, json.dumps({"error": told}))
        raise PeerError(told) from error
    nodes = [mine, *(bytes(name).decode() for name in given)]
    names = list(dict.fromkeys(nodes))
    numbers = {name: number for number, name in enumerate(names)}
    store.set(_NODES, json.dumps({"names": names, "of": [numbers[name] for name in nodes]}))
    return nodes


def _key(rank: int) -> str:
    return f"nostall node {rank}"


def _read(store: Any, rank: int) -> list[str]:
    try:
        text = store.get(_NODES)
    except RuntimeError as error:
        try:
            store.wait([_NODES], _GRACE)
            text = store.get(_NODES)
        except RuntimeError:
            raise PeerError(
                f"rank 0 has not told rank {rank} the nodes of the group: {_first_line(error)}; "
                "see its own error, or give init_process_group a longer timeout"
            ) from error
    told = json.loads(bytes(text))
    if "error" in told:
        raise PeerError(told["error"])
    return [told["names"][number] for number in told["of"]]


def _missing(store: Any, size: int, error: RuntimeError) -> str:
    ranks = []
    with suppress(RuntimeError):  # the store itself may be gone
        ranks = [r for r in range(1, size) if not store.check([_key(r)])]
    if not ranks:
        return f"rank 0 could not read the nodes of the group's ranks: {_first_line(error)}"
    named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    return (
        f"{len(ranks)} of {size} ranks have not come to make the group: {named}; see their errors, or "
        "give init_process_group a longer timeout"
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
