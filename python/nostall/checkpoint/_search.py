"""The newest checkpoint that all ranks can restore: fast tiers first, of all nodes, then durable."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from nostall.base._words import words_of
from nostall.checkpoint._format import Manifest
from nostall.checkpoint._landing import Landing
from nostall.checkpoint._lineage import Ranges, checked
from nostall.checkpoint._nodes import Held, Nodes, holdings, together
from nostall.checkpoint._place import UnreachableError, scarce_is_away
from nostall.checkpoint._restore import Choice, Restored, View, in_order, on_branch, read_part, view
from nostall.checkpoint._store import Store
from nostall.errors import CorruptionError, Error, PeerError, UsageError
from nostall.job._world import AllGather

_log = logging.getLogger("nostall")
Progress = Callable[[int, int], None] | None
# Seconds before each look for checkpoints that some rank does not see: together more than file systems
# keep the names of a directory, 60 s by NFS's default.
_PAUSES = 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0


class Search:
    """One restore of one rank; all ranks do the same.

    Args:
        stores: fast, durable, or one of them.
        nodes: where each node has a fast directory of its own.
        damaged: gets the ids of what cannot be used.
        landing: sends arrays to devices as they are read.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        nodes: Nodes | None,
        rank: int,
        world_size: int,
        threads: int,
        allgather: AllGather,
        damaged: set[str],
        landing: Landing | None = None,
        newest: int = -1,
    ) -> None:
        self._stores, self._nodes = stores, nodes
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._allgather, self._damaged = allgather, damaged
        self._landing = landing
        self._newest = newest  # number of the newest save of this process's line
        self._held: dict[str, Held] = {}
        self._gone: list[str] = []  # directories that are not the job's any more: why
        self._top: tuple[int, Ranges] | None = None

    def run(self, step: int | None, progress: Progress) -> Restored | None:
        """The best one, or None if there never was any.

        Raises:
            CorruptionError: there are checkpoints, and all are damaged.
            UsageError: there is none of that step, or it is of another number of ranks.
            UnreachableError: a store does not answer, or cannot be listed, or memory, descriptors or
                room are too little to read a checkpoint that no other store has whole, or a store is
                not the job's any more and may have a newer checkpoint than the others; all ranks raise
                it.
        """
        choices, problems = self._choices(step)
        for problem in problems:
            _log.warning("passing over a checkpoint: %s", problem)
        superseded = [c for c in choices if not on_branch(c, self._top)]
        unread: dict[str, str] = {}  # why, by the ids of what may be whole
        for number, choice in enumerate(choices):
            if step is None and choice in superseded:
                break
            self._refuse_gone(step, choices[number:])
            store = next(s for s in self._stores if s.kind == choice.kind)
            restored, problem, away = self._try(store, choice.step, choice.id, progress)
            if restored is not None:
                return restored
            if away:
                unread[choice.id] = problem
            elif choice.id in unread:
                problem = f"{unread[choice.id]}; {problem}"
            if choice.id in unread:
                # An older one would be restored although this one may be whole, but for its other copy.
                if choice.id not in [other.id for other in choices[number + 1 :]]:
                    raise UnreachableError(problem)
            else:
                self._damaged.add(choice.id)
            problems.append(problem)
            _log.warning("passing over a checkpoint: %s", problem)
        self._refuse_gone(step, [])
        if step is None and superseded:
            steps = sorted({c.step for c in superseded})
            problems.append(
                f"steps {steps} are of branches that were given up: restore(step=...) goes back to one"
            )
        if problems:
            raise CorruptionError(
                "no checkpoint can be restored: " + "; ".join(dict.fromkeys(problems))
            )
        if step is not None:
            places = ", ".join(str(store.root) for store in self._stores)
            raise UsageError(
                f"there is no checkpoint of step {step} in {places}: `nostall checkpoints ls` "
                "lists those that there are"
            )
        return None

    def _choices(self, step: int | None) -> tuple[list[Choice], list[str]]:
        if self._world_size == 1:
            found, _ = self._look(step)
            self._top, self._gone = found.top, found.away
            return found.choices, found.problems
        for again, pause in enumerate(_PAUSES):
            time.sleep(pause)
            found, mine = self._look(step)
            views = [json.loads(v) for v in self._allgather(json.dumps(mine).encode())]
            if aways := [f"rank {r}: {v['away']}" for r, v in enumerate(views) if v["away"]]:
                raise UnreachableError("; ".join(aways))
            tops = [(int(t[0]), checked(t[1])) for v in views for t in v["tops"] if t is not None]
            self._top = max(tops, default=None)
            common = set.intersection(*({tuple(c[:3]) for c in v["choices"]} for v in views))
            choices = [c for c in found.choices if c[:3] in common]
            held: list[Held] = []
            if self._nodes is not None:
                held = together([views[group[0]]["held"] for group in self._nodes.groups])
            whole = [h for h in held if not h.lost and step in (None, h.manifest.step)]
            choices += [
                Choice(h.manifest.step, "fast", h.manifest.id, h.manifest.order, "") for h in whole
            ]
            choices = in_order(choices, self._top)
            unseen = self._unseen(choices, views, step)
            if not unseen:
                break
            if not again:
                _log.warning("%s: looking again", unseen)
        else:
            raise UnreachableError(
                f"{unseen}, and an older one is not restored: is it the same directory on all nodes?"
            )
        self._held = {h.manifest.id: h for h in whole}
        problems = _of_ranks([v["problems"] for v in views])
        self._gone = [
            f"rank {rank}: {'; '.join(v['gone'])}" for rank, v in enumerate(views) if v["gone"]
        ]
        self._newest = max(v["newest"] for v in views)
        last = max((c.sequence for c in choices), default=None)
        there = {choice.id for choice in choices}
        for h in held:
            if step is None and h.lost and h.manifest.id not in there:
                self._damaged.add(h.manifest.id)  # it takes no place among those that are kept
            # Older ones go by the rule of retention, node by node.
            newer = last is None or h.manifest.sequence > last
            if h.lost and newer and step in (None, h.manifest.step):
                problems.append(
                    f"step {h.manifest.step}: no node has the parts of ranks {h.lost} in its fast "
                    "directory any more; partner=True keeps a second copy"
                )
        return choices, problems

    def _look(self, step: int | None) -> tuple[View, dict[str, Any]]:
        """What this rank finds, and its note of that to the others."""
        own = self._nodes.store if self._nodes is not None else None
        found, here, away = View([], [], None), View([], [], None), ""
        leads = own is not None and self._nodes is not None and self._nodes.leader
        held_here = []
        try:
            found = view([s for s in self._stores if s is not own], step)
            if own is not None and leads:
                here, held_here = view([own], step), holdings(own)
                # Parts that are on other nodes are nothing wrong.
                here.problems = [
                    entry.damage
                    for entry in own.entries()
                    if entry.manifest is None and entry.damage and step in (None, entry.step)
                ]
        except Exception as error:
            if self._world_size == 1:
                raise
            away = words_of(error)  # the other ranks wait for this one's note
        return found, {
            "away": away,
            "gone": [*found.away, *here.away],
            "newest": self._newest,
            "choices": found.choices,
            "passed": found.passed,
            "tops": [found.top, here.top],
            "held": held_here,
            "problems": [*found.problems, *here.away, *here.problems],
        }

    def _unseen(
        self, choices: Sequence[Choice], views: Sequence[dict[str, Any]], step: int | None
    ) -> str:
        """Which ranks do not see a checkpoint that is better than all that they have in common; or "".

        A network file system shows a file late to a machine that has looked for it before. A rank that
        says what is wrong with its manifest, or with the directory, has seen what is there.
        """
        seen = {Choice(c[0], c[1], c[2], tuple(c[3]), c[4]) for v in views for c in v["choices"]}
        for choice in in_order(seen.union(choices), self._top):
            if choices and choice.id == choices[0].id:
                break
            if step is None and not on_branch(choice, self._top):
                break
            without = [
                rank
                for rank, v in enumerate(views)
                if not v["gone"]
                and [choice.kind, choice.step, choice.name] not in v["passed"]
                and choice.id not in [c[2] for c in v["choices"] if c[1] == choice.kind]
            ]
            if without:
                root = next(s.root for s in self._stores if s.kind == choice.kind)
                return f"ranks {without} do not see the checkpoint of step {choice.step} in {root}"
        return ""

    def _refuse_gone(self, step: int | None, choices: Sequence[Choice]) -> None:
        """Goes back to no older checkpoint where a directory is gone that may have the newest."""
        last = max((choice.sequence for choice in choices), default=-1)
        if step is None and self._gone and last < self._newest:
            raise UnreachableError(
                f"{'; '.join(self._gone)}: the newest checkpoint of this job is nowhere else"
            )

    def _try(
        self, store: Store, step: int, id: str, progress: Progress
    ) -> tuple[Restored | None, str, bool]:
        """What is restored, or why not on some rank, and whether what is there may be whole."""
        restored, problem, away, wrong = None, "", False, ""
        failed: Exception | None = None  # what says nothing of the checkpoint
        held = self._held.get(id) if self._nodes and store is self._nodes.store else None
        manifest = held.manifest if held is not None else None
        try:
            if manifest is None:
                manifest = manifest_of(store, step, id)
            wrong = self._other_world(manifest, store)
            if held is not None and manifest.replicated:
                self._fetch_once(held)
        except (Error, OSError) as error:
            problem, away = words_of(error), isinstance(error, UnreachableError)
        except Exception as error:
            failed = error
        if held is not None and held.manifest.replicated:
            self._allgather(b"")  # no rank reads before it is there
        if manifest is not None and not (wrong or problem or failed):
            try:
                if held is not None:
                    restored = self._read_spread(held, progress)
                else:
                    restored = self._read(store, manifest, progress)
            except (Error, OSError) as error:
                problem, away = words_of(error), isinstance(error, UnreachableError)
            except Exception as error:
                failed = error
        unsure = failed is not None
        if failed is not None:
            problem = words_of(failed)
        if self._world_size > 1:
            note = json.dumps([problem, away, wrong, unsure]).encode()
            notes = [json.loads(n) for n in self._allgather(note)]
            told = [f"rank {rank}: {n[0]}" for rank, n in enumerate(notes) if n[0]]
            problem, away = "; ".join(told), any(n[1] for n in notes)
            wrong = next((n[2] for n in notes if n[2]), "")
            unsure = any(n[3] for n in notes)
        if failed is not None:
            raise failed
        if wrong:
            raise UsageError(wrong)
        if unsure:
            raise PeerError(f"step {step} in {store.root} cannot be restored: {problem}")
        if problem:
            return None, problem, away
        leads = held is not None and self._nodes is not None and self._nodes.leader
        if held is not None and leads:
            # A node that is new has its ranks' parts now.
            try:
                if store.find(step, id) is None:
                    store.prepare(step)
                    store.publish(held.manifest)
            except (Error, OSError) as error:  # the state is restored all the same
                _log.warning("%s has no manifest of step %d: %s", store.root, step, error)
        return restored, problem, False

    def _other_world(self, manifest: Manifest, store: Store) -> str:
        if manifest.replicated or manifest.world_size == self._world_size:
            return ""
        return (
            f"the checkpoint of step {manifest.step} in {store.root} was saved by "
            f"{manifest.world_size} ranks, this job has {self._world_size}: save state that is the "
            "same on all ranks with replicated=True, and sharded state with "
            "torch.distributed.checkpoint and nostall.torch.checkpoint.StorageWriter"
        )

    def _fetch_once(self, held: Held) -> None:
        """State that all ranks have in common comes to a node once, by its first rank."""
        nodes, manifest = self._nodes, held.manifest
        part = manifest.part_of(self._rank)
        assert nodes is not None and part is not None
        holders = held.holders[part.name]
        if not nodes.leader or nodes.node in holders:
            return
        for node in nodes.nearest_first(holders):
            try:
                path = nodes.store.prepare(manifest.step) / part.name
                nodes.fetch(manifest.step, part, node, path)
                return
            except (Error, OSError) as error:
                _log.warning("a copy of a part cannot be used: %s", error)

    def _read_spread(self, held: Held, progress: Progress) -> Restored:
        """This rank's part, from its own node or the next best that has it."""
        nodes, manifest = self._nodes, held.manifest
        part = manifest.part_of(self._rank)
        assert nodes is not None and part is not None
        problems: list[Exception] = []
        holders = set(held.holders[part.name])
        if nodes.store.has(manifest.step, part):
            holders.add(nodes.node)
        for node in nodes.nearest_first(sorted(holders)):
            try:
                with scarce_is_away(nodes.store.root):
                    if node != nodes.node:
                        path = nodes.store.prepare(manifest.step) / part.name
                        nodes.fetch(manifest.step, part, node, path)
                    return self._read(nodes.store, manifest, progress)
            except (Error, OSError) as error:
                problems.append(error)
                _log.warning("a copy of a part cannot be used: %s", error)
        words = "; ".join(map(str, problems))
        if any(isinstance(problem, UnreachableError) for problem in problems):
            raise UnreachableError(words)  # that copy may be whole
        raise CorruptionError(words)

    def _read(self, store: Store, manifest: Manifest, progress: Progress) -> Restored:
        return read_part(store, manifest, self._rank, self._threads, progress, self._landing)


def _of_ranks(problems: Sequence[Sequence[str]]) -> list[str]:
    """What each rank has found wrong, as all of them tell it."""
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(problems):
        for problem in found:
            ranks.setdefault(problem, []).append(rank)
    return [
        problem if len(of) == len(problems) else f"ranks {of}: {problem}"
        for problem, of in ranks.items()
    ]


def manifest_of(store: Store, step: int, id: str) -> Manifest:
    """The manifest of one save.

    Raises:
        CorruptionError: it is gone.
        IoError: that is not known.
    """
    manifest = store.find(step, id)
    if manifest is None:
        raise CorruptionError(f"step {step} in {store.root} is gone")
    return manifest
