"""How a job takes its directories: who shares which, one rank clears each up, all agree on a name."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nostall import secret
from nostall.checkpoint.format import Manifest
from nostall.checkpoint.nodes import Held, Nodes, holdings, together
from nostall.checkpoint.retention import Keep, decide
from nostall.checkpoint.store import Store, io_errors
from nostall.checkpoint.stream import machine
from nostall.errors import Error, UsageError
from nostall.rendezvous import AllGather, exposed

_log = logging.getLogger("nostall")


@dataclass(frozen=True)
class Begun:
    """A job that has its directories; `run` is its name, which is in the ids of its saves.

    `nodes` is there if fast directories are the nodes' own, and `held` what they have together.
    """

    run: str
    nodes: Nodes | None
    held: list[Held]


def begin(
    fast: Store | None,
    durable: Store | None,
    rank: int,
    world_size: int,
    allgather: AllGather,
    *,
    partner: bool,
    timeout: float,
) -> Begun:
    """Takes the directories; all ranks of the job call it.

    Raises:
        UsageError: another job has them, the ranks do not see the same durable one, or one of them
            fails otherwise: then all do.
    """
    with contextlib.ExitStack() as undo:
        for store in (fast, durable):
            if store is not None:
                undo.callback(store.disown)
        begun = _begin(
            fast, durable, rank, world_size, allgather, undo, partner=partner, timeout=timeout
        )
        undo.pop_all()
        return begun


def _begin(
    fast: Store | None,
    durable: Store | None,
    rank: int,
    world_size: int,
    allgather: AllGather,
    undo: contextlib.ExitStack,
    *,
    partner: bool,
    timeout: float,
) -> Begun:
    stores = [store for store in (fast, durable) if store is not None]
    run = secrets.token_hex(4)
    if world_size == 1:
        for store in stores:
            store.own()
            store.clean()
        if partner:
            _log.warning("partner=True has no effect: this job has one rank, so one node")
        return Begun(run, None, [])

    def gather(note: dict[str, Any]) -> list[dict[str, Any]]:
        notes = [json.loads(text) for text in allgather(json.dumps(note).encode())]
        for other, theirs in enumerate(notes):
            if theirs.get("error"):
                raise UsageError(f"rank {other} cannot begin: {theirs['error']}")
        return notes

    # What one rank cannot do it says with the next gather, so that no other waits for it.
    note: dict[str, Any] = {"token": run, "machine": machine()}
    readers = exposed(allgather)
    note["secret"] = secret.offer(rank, readers)
    with _noting(note):
        for store in stores:
            with io_errors("make the directory", store.root):
                store.root.mkdir(parents=True, exist_ok=True)
                (store.root / f".run-{run}").touch()
    notes = gather(note)
    tokens, run = [n["token"] for n in notes], str(notes[0]["token"])
    several = len({n["machine"] for n in notes}) > 1
    key = secret.settle(rank, [n["secret"] for n in notes], readers)
    note = {}
    with _noting(note):
        for s in stores:
            note[s.kind] = [r for r, t in enumerate(tokens) if _marker(s, t).exists()]
    seen = gather(note)
    everybody = list(range(world_size))
    if durable is not None:
        for other, theirs in enumerate(seen):
            if theirs["durable"] != everybody:
                raise UsageError(
                    f"rank {other} does not see rank 0's {durable.root}: all ranks must share the "
                    "durable directory; the fast one may be each node's own"
                )
    groups = _groups([theirs["fast"] for theirs in seen]) if fast is not None else [everybody]
    nodes = None
    note = {"address": None, "held": []}
    with _noting(note):
        if len(groups) > 1 and fast is not None:
            nodes = Nodes(
                fast, rank, groups, key, partner=partner, timeout=timeout, several=several
            )
            undo.callback(nodes.close)
            note["address"] = nodes.address
        elif partner and rank == 0:
            _log.warning("partner=True has no effect: all ranks share %s", fast and fast.root)
        leads_fast = nodes.leader if nodes is not None else rank == 0
        for store in stores:
            if leads_fast if store is fast else rank == 0:
                store.own()
                for old in store.root.glob(".run-*"):
                    old.unlink(missing_ok=True)
                if store is not fast or nodes is None:
                    store.clean()
                else:
                    note["held"] = holdings(store)
    notes = gather(note)
    if nodes is None:
        return Begun(run, None, [])
    nodes.addresses = [tuple(notes[group[0]]["address"]) for group in groups]
    held = together([notes[group[0]]["held"] for group in groups])
    note = {}
    with _noting(note):
        nodes.check_ways()
        if nodes.leader:
            _settle(nodes, held)
    gather(note)  # nobody looks before all nodes have settled
    return Begun(run, nodes, held)


@contextlib.contextmanager
def _noting(note: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (Error, OSError) as error:
        note["error"] = str(error)


def _marker(store: Store, token: str) -> Any:
    return store.root / f".run-{token}"


def _groups(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each node, by whose marks each rank sees in its fast directory."""
    for rank, theirs in enumerate(seen):
        if rank not in theirs or any(list(seen[other]) != list(theirs) for other in theirs):
            raise UsageError(
                f"rank {rank} sees the marks of ranks {list(theirs)} in its fast directory, and not "
                "all of them see the same: is it being removed?"
            )
    return [list(group) for group in sorted({tuple(theirs) for theirs in seen})]


def _settle(nodes: Nodes, held: Sequence[Held]) -> None:
    """This node takes over manifests that it missed, and clears up what no manifest names."""
    store = nodes.store
    newest = max((h.manifest.step for h in held if not h.lost), default=-1)
    for h in held:
        step = h.manifest.step
        entry = store.entry(step)
        has_it = entry is not None and entry.manifest is not None
        if h.lost:
            if step < newest and has_it:
                store.remove(step)  # parts of it went with another node
        elif any(nodes.node in at for at in h.holders.values()) and not (
            has_it and entry is not None and entry.manifest == h.manifest
        ):
            store.prepare(step)
            store.publish(h.manifest)
    store.clean()


def undrained(
    fast: Store, durable: Store, keep: Keep, held: Sequence[Held] | None = None
) -> list[Manifest]:
    """Complete checkpoints of the fast tier that should be durable and are not, oldest first.

    `held` is what the nodes have, where each has a fast directory of its own.
    """
    if held is None:
        on_fast = {e.step: e.manifest for e in fast.entries() if e.manifest is not None}
        whole = {s for s, m in on_fast.items() if all(fast.has(s, part) for part in m.parts)}
    else:
        on_fast = {h.manifest.step: h.manifest for h in held}
        whole = {h.manifest.step for h in held if not h.lost}
    there = {e.step: e.manifest for e in durable.entries() if e.manifest is not None}
    # What has lost parts takes no place among those that are kept.
    good = {s: m for s, m in on_fast.items() if s in whole} | there
    stay = decide({s: m.metric for s, m in good.items()}.items(), keep)
    return [
        manifest
        for step, manifest in sorted(on_fast.items())
        if step in whole and step in stay and (step not in there or there[step].id != manifest.id)
    ]
