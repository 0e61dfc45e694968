"""A job takes its directories: ranks find out which they share, one clears each up, all agree."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nostall.base._words import words_of
from nostall.checkpoint._cleaner import begin_of_branch
from nostall.checkpoint._format import Manifest
from nostall.checkpoint._lineage import Lineage, newest
from nostall.checkpoint._nodes import Held, Nodes, holdings, together
from nostall.checkpoint._retention import Keep, decide
from nostall.checkpoint._store import Store, io_errors
from nostall.errors import Error, PeerError, UsageError
from nostall.job import _secret as secret
from nostall.job._cluster import compare
from nostall.job._rendezvous import exposed
from nostall.job._stream import machine
from nostall.job._world import AllGather

_log = logging.getLogger("nostall")
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Begun:
    """A job that has its directories; `run` is its name, which is part of the ids of its saves.

    `nodes` is set if each node has a fast directory of its own; `held` is what they have together.
    `lineage` numbers the saves, on all ranks alike; `owned` are the directories that this rank
    clears up. `key` is the job's secret, and `several` whether it is on more than one machine.
    """

    run: str
    nodes: Nodes | None
    held: list[Held]
    lineage: Lineage
    owned: list[Store]
    key: bytes = b""
    several: bool = False


def begin(
    fast: Store | None,
    durable: Store | None,
    rank: int,
    world_size: int,
    allgather: AllGather,
    *,
    partner: bool,
    timeout: float,
    alike: Mapping[str, Any],
) -> Begun:
    """Takes the directories; all ranks of the job call it.

    Args:
        alike: arguments that all ranks must have alike, plain values.

    Raises:
        UsageError: another job has them, the ranks do not see the same durable directory or have other
            arguments, or one rank fails otherwise; all ranks raise it.
    """
    with contextlib.ExitStack() as undo:
        for store in (fast, durable):
            if store is not None:
                undo.callback(store.disown)
        begun = _begin(
            fast,
            durable,
            rank,
            world_size,
            allgather,
            undo,
            partner=partner,
            timeout=timeout,
            alike=alike,
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
    alike: Mapping[str, Any],
) -> Begun:
    stores = [store for store in (fast, durable) if store is not None]
    if world_size == 1:
        return _alone(stores, partner)
    gather = _gathering(allgather)
    met = _meet(stores, rank, allgather, gather, alike)
    groups = _groups_of(fast, durable, world_size, met, gather)
    nodes = None
    note: dict[str, Any] = {"address": None, "held": [], "seen": 0}
    owned: list[Store] = []
    with _noting(note):
        if len(groups) > 1 and fast is not None:
            nodes = Nodes(
                fast, rank, groups, met.key, partner=partner, timeout=timeout, several=met.several
            )
            undo.callback(nodes.close)
            note["address"] = nodes.address
        elif partner and rank == 0:
            _log.warning("partner=True has no effect: all ranks share %s", fast and fast.root)
        leads_fast = nodes.leader if nodes is not None else rank == 0
        led = [s for s in stores if (leads_fast if s is fast else rank == 0)]
        for store in led:  # also where another job has one of them
            store.unmark(met.tokens)
        for store in led:
            store.own()
            owned.append(store)
            if store is not fast or nodes is None:
                store.clean()
            else:
                note["held"] = holdings(store)
        note["seen"] = max((store.seen() for store in owned), default=0)
    notes = gather(note)
    seen_by_all = max(int(theirs["seen"]) for theirs in notes)
    if nodes is None:
        lineage = _lineage_on_all(stores, owned, (), seen_by_all, gather)
        return Begun(met.run, None, [], lineage, owned, met.key, met.several)
    nodes.addresses = [tuple(notes[group[0]]["address"]) for group in groups]
    held = together([notes[group[0]]["held"] for group in groups])
    note = {}
    with _noting(note):
        nodes.check_ways()
        if nodes.leader:
            _settle(nodes, held)
    gather(note)  # no rank reads before all nodes have cleared up
    lineage = _lineage_on_all(stores, owned, held, seen_by_all, gather)
    return Begun(met.run, nodes, held, lineage, owned, met.key, met.several)


def _alone(stores: list[Store], partner: bool) -> Begun:
    for store in stores:
        store.own()
        store.clean()
    if partner:
        _log.warning("partner=True has no effect: this job has one rank, so one node")
    return Begun(secrets.token_hex(4), None, [], lineage_of(stores, stores), stores)


def _gathering(allgather: AllGather) -> Gather:
    """An allgather of notes. A rank reports its failure with the next one, so that no other rank
    waits for it."""

    def gather(note: dict[str, Any]) -> list[dict[str, Any]]:
        notes = [json.loads(text) for text in allgather(json.dumps(note).encode())]
        for other, theirs in enumerate(notes):
            if theirs.get("error"):
                raise UsageError(f"rank {other} cannot begin: {theirs['error']}")
        return notes

    return gather


@dataclass(frozen=True)
class _Met:
    """The job's name, the marks of all ranks in their directories, and the job's secret.

    `several`: the ranks are on more than one machine.
    """

    run: str
    tokens: list[str]
    several: bool
    key: bytes


def _meet(
    stores: Sequence[Store],
    rank: int,
    allgather: AllGather,
    gather: Gather,
    alike: Mapping[str, Any],
) -> _Met:
    """Makes the directories, and leaves a mark in each: ranks that see it share the directory."""
    run = secrets.token_hex(4)
    readers = exposed(allgather)
    note: dict[str, Any] = {"token": run, "machine": machine(), "alike": alike}
    note["secret"] = secret.offer(rank, readers)
    with _noting(note):
        for store in stores:
            with io_errors("make the directory", store.root):
                store.make()
                store.mark(run)
    notes = gather(note)
    for other, theirs in enumerate(notes):
        compare(0, notes[0]["alike"], other, theirs["alike"])
    tokens = [str(n["token"]) for n in notes]
    key = secret.settle(rank, [n["secret"] for n in notes], readers)
    return _Met(tokens[0], tokens, len({n["machine"] for n in notes}) > 1, key)


def _groups_of(
    fast: Store | None, durable: Store | None, world_size: int, met: _Met, gather: Gather
) -> list[list[int]]:
    """The ranks of each node that shares a fast directory; one group of all if there is none."""
    note: dict[str, Any] = {}
    with _noting(note):
        for s in (fast, durable):
            if s is not None:
                note[s.kind] = s.marked(met.tokens)
    seen = gather(note)
    everybody = list(range(world_size))
    if durable is not None:
        for other, theirs in enumerate(seen):
            if theirs["durable"] != everybody:
                raise UsageError(
                    f"rank {other} does not see rank 0's {durable.root}: all ranks must share the "
                    "durable directory; the fast one may be each node's own"
                )
    return _groups([theirs["fast"] for theirs in seen]) if fast is not None else [everybody]


def lineage_of(
    stores: Sequence[Store],
    owned: Sequence[Store],
    held: Sequence[Held] = (),
    seen: int | None = None,
) -> Lineage:
    """What the next save in these directories continues.

    `seen` is the highest number of all ranks' directories before any rank has noted its first one;
    without it there is one rank.
    """
    entries = [entry for store in stores for entry in store.entries()]
    found = {e.manifest.id: e.manifest for e in entries if e.manifest is not None}
    found |= {h.manifest.id: h.manifest for h in held}
    if seen is None:
        seen = max((store.seen() for store in stores), default=0)
    lineage = Lineage(list(found.values()), begin_of_branch(*stores), seen)
    for store in owned:
        try:
            store.note_sequence(lineage.first)
        except PeerError:  # another job has it: this one could save nothing
            raise
        except (
            Error,
            OSError,
        ) as error:  # a full disk: it matters only if this job's saves get lost
            _log.warning("%s", error)
    return lineage


def _lineage_on_all(
    stores: Sequence[Store],
    owned: Sequence[Store],
    held: Sequence[Held],
    seen: int,
    gather: Gather,
) -> Lineage:
    """As `lineage_of`, before any rank saves: the numbers of saves are the same on all. Where one rank
    cannot read a store, all fail."""
    note: dict[str, Any] = {}
    with _noting(note):
        lineage = lineage_of(stores, owned, held, seen)
    gather(note)
    for store in stores:
        if store not in owned:
            with contextlib.suppress(Error, OSError):  # then it cannot tell another directory
                store.recognize()
    return lineage


@contextlib.contextmanager
def _noting(note: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (Error, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        note["error"] = words_of(error)


def _groups(seen: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each node, by the marks that each rank finds in its fast directory."""
    for rank, theirs in enumerate(seen):
        if rank not in theirs or any(list(seen[other]) != list(theirs) for other in theirs):
            raise UsageError(
                f"rank {rank} sees the marks of ranks {list(theirs)} in its fast directory, and not "
                "all of them see the same: is it being removed?"
            )
    return [list(group) for group in sorted({tuple(theirs) for theirs in seen})]


def _settle(nodes: Nodes, held: Sequence[Held]) -> None:
    """Removes files that no node's manifest names, then gives this node the manifests that it missed:
    a disk may be full of what is removed. What fails here is tried again by the next start."""
    store, here = nodes.store, nodes.node
    whole = newest(h.manifest for h in held if not h.lost)

    def trying(change: Callable[[Manifest], None], manifest: Manifest) -> None:
        try:
            change(manifest)
        except OSError as error:
            _log.warning("the checkpoint of step %d in %s: %s", manifest.step, store.root, error)

    def remove(manifest: Manifest) -> None:
        if store.find(manifest.step, manifest.id) is not None:
            store.remove(manifest.step, manifest.id)

    def complete(manifest: Manifest) -> None:
        if store.find(manifest.step, manifest.id) != manifest:
            store.prepare(manifest.step)
            store.publish(manifest)

    for h in held:
        older = whole is not None and h.manifest.sequence < whole.sequence
        if h.lost and older and not h.unread:
            trying(remove, h.manifest)  # parts of it went with another node
    missed = [h for h in held if not h.lost and any(here in at for at in h.holders.values())]
    unread = {part.name for h in held if h.unread for part in h.manifest.parts}
    store.clean(unread | {name for h in missed for name, at in h.holders.items() if here in at})
    for h in missed:
        trying(complete, h.manifest)


def undrained(
    fast: Store, durable: Store, keep: Keep, held: Sequence[Held] | None = None
) -> list[Manifest]:
    """Complete checkpoints of the fast tier that should be durable and are not, oldest first.

    `held` is what the nodes have, where each has a fast directory of its own.
    """
    if held is None:
        on_fast = fast.manifests()
        whole = {m.id for m in on_fast if fast.has_all(m)}
    else:
        on_fast = [h.manifest for h in held]
        whole = {h.manifest.id for h in held if not h.lost}
    there = {m.id: m for m in durable.manifests()}
    # A checkpoint with lost parts, or that a power cut may lose, does not count among those that are
    # kept.
    there = {
        id: m
        for id, m in there.items()
        if id not in whole or (durable.has_all(m) and durable.is_durable(m))
    }
    good = {m.id: m for m in on_fast if m.id in whole} | there
    stay = decide(good.values(), keep, begin_of_branch(fast, durable))
    waiting = [m for m in on_fast if m.id in whole and m.id in stay and m.id not in there]
    return sorted(waiting, key=lambda m: m.order)
