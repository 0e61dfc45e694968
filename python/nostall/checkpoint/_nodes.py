"""Nodes with a fast directory each: they complete checkpoints together and exchange parts.

Every rank writes its part to its own node, and reports to rank 0 when it is on its device. Then rank 0
lets every node write the manifest. The first of these renames completes the checkpoint, because all
parts are safe by then. A node that misses the manifest copies it from another node at the next start.
With a partner, a part counts as safe when the next node has a copy of it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nostall import _native
from nostall.base._words import words_of
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._store import LARGEST_STEP, Store, rename, sync_directory
from nostall.errors import CorruptionError, Error, IoError, PeerError
from nostall.job._stream import Listener, Stream, connect

_log = logging.getLogger("nostall")
_REMEMBERED = 1000  # saves
_THREADS = 2
# Seconds that a rank waits longer for the answer, in which rank 0 completes the checkpoint.
_PUBLISHING_SECONDS = 20.0
_LATER = "; the next start gives it the manifest"


class Outcome(NamedTuple):
    """The outcome of a save: "" or why it is not a checkpoint, and whether that is certain.

    If it is not, the checkpoint may be complete, and its parts must stay. `manifest` is set if it
    is complete, `missed` are the nodes that may lack it, and `problem` says why.
    """

    reason: str
    certain: bool = True
    manifest: Manifest | None = None
    missed: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Held:
    """A checkpoint as the nodes have it together: `holders` are the nodes that have each part.

    `unread`: a node could not look at its files of the step, so what is lost here may be there.
    """

    manifest: Manifest
    holders: dict[str, list[int]]
    unread: bool = False

    @property
    def lost(self) -> list[int]:
        """Ranks whose part is on no node."""
        return [p.rank for p in self.manifest.parts if not self.holders.get(p.name)]


def allow_connections(count: int) -> None:
    """Raises the process's limit of open files where so many connections would take a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= 4 * count:
        return
    wanted = 4 * count if hard == unlimited else min(4 * count, hard)
    if wanted > soft:
        with contextlib.suppress(OSError, ValueError):  # what is in force is told below
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < 2 * count:
        _log.warning(
            "rank 0 may have %d open files, and needs a connection to each of %d ranks: checkpoints "
            "may fail; start it with `ulimit -n %d` or more (the hard limit is %d)",
            now,
            count,
            4 * count,
            hard,
        )


def holdings(store: Store) -> list[dict[str, Any]]:
    """What a node has: manifests, and the sizes of files; plain values, for an allgather."""
    found = []
    for step in store.steps():
        files: dict[str, int] = {}
        unread = False
        try:
            files = store.files(step)
        except IoError as error:
            _log.warning("the parts of step %d count as lost: %s", step, error)
            unread = True
        texts = [e.manifest.to_bytes().decode() for e in store.saves(step) if e.manifest]
        found.append({"step": step, "manifests": texts, "files": files, "unread": unread})
    return found


def together(per_node: Sequence[Sequence[dict[str, Any]]]) -> list[Held]:
    """The checkpoints of all nodes, newest first."""
    known: dict[str, Manifest] = {}
    for node, found in enumerate(per_node):
        for values in found:
            for text in values["manifests"]:
                manifest = Manifest.from_bytes(text.encode(), f"node {node}")
                known[manifest.id] = manifest
    held = []
    for manifest in sorted(known.values(), key=lambda m: m.order, reverse=True):
        # Names carry the id of their save, so a node's files count whatever manifest it has.
        files = [
            {
                name: size
                for v in found
                if v["step"] == manifest.step
                for name, size in v["files"].items()
            }
            for found in per_node
        ]
        holders = {
            part.name: [i for i, here in enumerate(files) if here.get(part.name) == part.size]
            for part in manifest.parts
        }
        unread = any(v["unread"] for found in per_node for v in found if v["step"] == manifest.step)
        held.append(Held(manifest, holders, unread))
    return held


class Nodes:
    """This rank among the nodes of a job.

    Args:
        store: the node's own fast directory.
        rank: this process.
        groups: the ranks of each node, in order.
        secret: the job's.
        partner: whether parts are copied to the next node.
        timeout: seconds of silence that end a conversation.
        several: whether the nodes are on several machines.

    `addresses`, of each node's first rank, which listens, are set once they are known.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        groups: Sequence[Sequence[int]],
        secret: bytes,
        *,
        partner: bool,
        timeout: float,
        several: bool = False,
    ) -> None:
        self.store, self.rank, self.groups = store, rank, groups
        self.node = next(i for i, group in enumerate(groups) if rank in group)
        self.leader = groups[self.node][0] == rank
        self.partner = (self.node + 1) % len(groups) if partner else None
        self.addresses: list[tuple[str, int]] = []
        self._secret, self._timeout = secret, timeout
        self._changed = threading.Condition()
        self._notes: OrderedDict[str, dict[int, Any]] = OrderedDict()
        self._publishing: set[str] = set()  # what rank 0 may have completed already
        self._decided: OrderedDict[str, Outcome] = OrderedDict()
        if rank == 0:  # it has a connection to each rank that waits for its outcome
            allow_connections(sum(len(group) for group in groups))
        self._listener = (
            Listener(self._answer, secret, timeout + 30, several) if self.leader else None
        )

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this rank listens."""
        return self._listener.address if self._listener is not None else None

    def close(self) -> None:
        """Stops answering other nodes."""
        if self._listener is not None:
            self._listener.close()

    def check_ways(self) -> None:
        """Checks that listening ranks reach rank 0 and their partners, and rank 0 all nodes.

        Raises:
            PeerError: one cannot be reached; with the remedy.
        """
        if not self.leader:
            return
        others = {0, self.partner or 0} if self.rank != 0 else set(range(len(self.groups)))
        for node in sorted(others - {self.node}):
            try:
                connect(self.addresses[node], self._secret, self._timeout).close()
            except (Error, OSError) as error:
                raise PeerError(
                    f"node {node} of the job cannot be reached from {socket.gethostname()}: {error}; "
                    "NOSTALL_HOST, set on each node, is the address that it gives the others"
                ) from error

    # ------------------------------------------------------------------ answering

    def _answer(self, question: dict[str, Any], stream: Stream) -> None:
        answers: dict[str, Callable[[dict[str, Any], Stream], None]] = {
            "note": self._hear_note,
            "publish": self._hear_publish,
            "put": self._hear_put,
            "get": self._hear_get,
            "drop": self._hear_drop,
        }
        try:
            answers[str(question["ask"])](question, stream)
        except (KeyError, TypeError, ValueError) as error:
            stream.send({"error": f"a question that cannot be understood: {error}"})
        except (Error, OSError) as error:
            with contextlib.suppress(OSError):
                stream.send({"error": words_of(error), "errno": getattr(error, "errno", None)})

    def _hear_note(self, question: dict[str, Any], stream: Stream) -> None:
        id, rank = str(question["id"]), int(question["rank"])
        self._take_note(id, rank, question["note"])
        with self._changed:
            self._changed.wait_for(lambda: id in self._decided, self._timeout)
            if id in self._publishing:
                self._changed.wait_for(lambda: id in self._decided, _PUBLISHING_SECONDS)
            outcome = self._decided.get(id)
            if outcome is None:
                reason = "rank 0 did not decide in time"
                outcome = Outcome(reason, id not in self._publishing)
                if outcome.certain:  # and this stays so: the rank removes its part
                    self._notes.setdefault(id, {})[rank] = {"failed": reason}
        answer: dict[str, Any] = {"reason": outcome.reason, "certain": outcome.certain}
        if outcome.manifest is not None and any(rank in self.groups[n] for n in outcome.missed):
            answer["manifest"] = outcome.manifest.to_bytes().decode()
        stream.send(answer)

    def _hear_publish(self, question: dict[str, Any], stream: Stream) -> None:
        manifest = Manifest.from_bytes(str(question["manifest"]).encode(), "rank 0's manifest")
        _checked(manifest.step)
        error, certain = self._publish_here(manifest)
        stream.send({"error": error, "certain": certain})

    def _hear_put(self, question: dict[str, Any], stream: Stream) -> None:
        step, part = _checked(question["step"]), Part.from_dict(question["part"])
        path = self.store.prepare(step) / part.name
        status = os.statvfs(path.parent)
        if status.f_bavail * status.f_frsize < part.size:
            raise IoError(f"{self.store.root} has no room for a partner's {part.size} bytes")
        stream.send({"error": ""})
        _receive(stream, path, part)
        stream.send({"error": ""})

    def _hear_get(self, question: dict[str, Any], stream: Stream) -> None:
        step, part = _checked(question["step"]), Part.from_dict(question["part"])
        path = self.store.directory(step) / part.name
        if not self.store.has(step, part):
            raise IoError(f"{path} is not there")
        with path.open("rb") as file:
            stream.send({"error": ""})
            stream.send_file(file, part.size)

    def _hear_drop(self, question: dict[str, Any], stream: Stream) -> None:
        part = Part.from_dict(question["part"])
        self.store.discard(_checked(question["step"]), part.name)
        stream.send({"error": ""})

    # ------------------------------------------------------------------ asking

    def _ask(self, node: int, question: dict[str, Any]) -> Stream:
        """The stream, after an answer without error. The caller closes it."""
        stream = connect(self.addresses[node], self._secret, self._timeout + 10)
        try:
            stream.send(question)
            answer = stream.receive()
            if error := answer.get("error", ""):
                failed = IoError(f"node {node}: {error}")
                failed.errno = answer.get("errno")
                raise failed
        except BaseException:
            stream.close()
            raise
        return stream

    def nearest_first(self, holders: Sequence[int]) -> list[int]:
        """The nodes to ask: this one first if it is among them; each node begins elsewhere."""
        start = self.node % len(holders) if holders else 0
        turned = [*holders[start:], *holders[:start]]
        return sorted(turned, key=lambda node: node != self.node)

    def held(self, manifest: Manifest) -> Held:
        """Where the parts of a checkpoint lie that this job has just completed."""
        holders = {}
        for part in manifest.parts:
            node = next(i for i, group in enumerate(self.groups) if part.rank in group)
            copy = [(node + 1) % len(self.groups)] if self.partner is not None else []
            holders[part.name] = [node, *copy]
        return Held(manifest, holders)

    def fetch(
        self,
        step: int,
        part: Part,
        node: int,
        path: Path,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """Fetches a part of another node into the file `path`, checked, at the rate of `pace`.

        Raises:
            PeerError, IoError: the node does not have it any more.
            CorruptionError: its copy is damaged.
        """
        question = {"ask": "get", "step": step, "part": part.to_dict()}
        try:
            with contextlib.closing(self._ask(node, question)) as stream:
                _receive(stream, path, part, pace)
        except OSError as error:
            if isinstance(error, Error):
                raise
            raise IoError(f"cannot fetch {path} from node {node}: {error}") from error

    def give_partner(self, step: int, part: Part) -> str:
        """Copies this rank's part to the next node; returns why that failed, or ""."""
        if self.partner is None:
            return ""
        question = {"ask": "put", "step": step, "part": part.to_dict()}
        try:
            with (
                (self.store.directory(step) / part.name).open("rb") as file,
                contextlib.closing(self._ask(self.partner, question)) as stream,
            ):
                stream.send_file(file, part.size)
                error = str(stream.receive().get("error", ""))
        except (Error, OSError) as failed:
            error = words_of(failed)
        return error

    def take_back(self, step: int, part: Part) -> None:
        """Removes the partner's copy of a part that no checkpoint will name."""
        if self.partner is not None:
            with contextlib.suppress(Error, OSError):
                self._ask(
                    self.partner, {"ask": "drop", "step": step, "part": part.to_dict()}
                ).close()

    # ------------------------------------------------------------------ completing

    def commit(
        self,
        manifest: Manifest,
        mine: Part | str | None,
        stopped: Callable[[], bool],
        waiting: Callable[[float], None] = lambda seconds: None,
    ) -> Outcome:
        """As `Store.commit`: all ranks' parts become one checkpoint, or none does.

        `waiting` is told for how many seconds at most the call now waits for rank 0's answer alone; 0:
        it does so no more.
        """
        if isinstance(mine, Part):  # its name is to survive a power cut too, once it is reported
            try:
                sync_directory(self.store.directory(manifest.step))
            except OSError as error:
                mine = f"{self.store.directory(manifest.step)} cannot be synced: {error.strerror}"
        note = {"failed": mine} if isinstance(mine, str) else mine and mine.to_dict()
        if self.rank != 0:
            return self._ask_for_outcome(manifest, note, waiting)
        self._take_note(manifest.id, 0, note)
        try:
            outcome = self._decide(manifest, stopped)
        except Exception as error:  # the other ranks wait for an outcome
            outcome = Outcome(words_of(error), manifest.id not in self._publishing)
        with self._changed:
            self._decided[manifest.id] = outcome
            self._publishing.discard(manifest.id)
            self._notes.pop(manifest.id, None)
            while len(self._decided) > _REMEMBERED:
                self._decided.popitem(last=False)
            self._changed.notify_all()
        return outcome

    def _ask_for_outcome(
        self, manifest: Manifest, note: Any, waiting: Callable[[float], None]
    ) -> Outcome:
        told, limit = False, self._timeout + 40
        try:
            waiting(limit)
            try:
                with contextlib.closing(connect(self.addresses[0], self._secret, limit)) as stream:
                    told = True
                    stream.send({"ask": "note", "id": manifest.id, "rank": self.rank, "note": note})
                    answer = stream.receive()
            finally:
                waiting(0.0)
            if "reason" not in answer:
                raise PeerError(f"rank 0 answers {answer}")
            if "manifest" not in answer:
                return Outcome(str(answer["reason"]), bool(answer.get("certain")))
            whole = Manifest.from_bytes(str(answer["manifest"]).encode(), "rank 0's manifest")
            if whole.id != manifest.id:
                raise PeerError(f"rank 0 answers of save {whole.id}, not of {manifest.id}")
        except (Error, OSError) as error:
            if (there := self.store.find(manifest.step, manifest.id)) is not None:
                self.store.confirm(there)
                return Outcome("")  # complete: the answer alone was lost
            return Outcome(f"rank 0 cannot be asked: {error}", not told)
        problem = self._publish_here(whole)[0] if self.leader else ""  # once more
        if problem:
            problem = f"node {self.node} has no manifest of step {whole.step}: {problem}{_LATER}"
        return Outcome("", manifest=whole, problem=problem)

    def _take_note(self, id: str, rank: int, note: Any) -> None:
        with self._changed:
            if id not in self._decided:
                self._notes.setdefault(id, {})[rank] = note
                while len(self._notes) > _REMEMBERED:
                    self._notes.popitem(last=False)
            self._changed.notify_all()

    def _decide(self, manifest: Manifest, stopped: Callable[[], bool]) -> Outcome:
        """Waits for all ranks, then lets the nodes complete the checkpoint."""
        writers = [0] if manifest.replicated else list(range(manifest.world_size))
        deadline = time.monotonic() + self._timeout
        notes: dict[int, Any] = {}
        while True:
            with self._changed:
                notes = dict(self._notes.get(manifest.id, {}))
                failed = [(r, n["failed"]) for r, n in notes.items() if n and "failed" in n]
                late = [r for r in writers if r not in notes]
                if failed:
                    return Outcome(f"rank {failed[0][0]}: {failed[0][1]}")
                if not late:
                    self._publishing.add(manifest.id)
                    break
                if stopped():
                    return Outcome("stopped")
                if time.monotonic() > deadline:
                    return Outcome(f"ranks {late} did not finish their part in time")
                self._changed.wait(0.1)
        try:
            parts = tuple(Part.from_dict(notes[r]) for r in writers)
        except (KeyError, TypeError, ValueError) as error:
            return Outcome(f"a rank's report cannot be read: {error}")
        whole = dataclasses.replace(manifest, parts=parts, spread=True)
        return self._publish_everywhere(whole)

    def _publish_everywhere(self, manifest: Manifest) -> Outcome:
        problems, certain, missed = [], True, []
        for node in range(len(self.groups)):
            if node == self.node:
                problem, surely = self._publish_here(manifest)
            else:
                problem, surely = self._publish_there(manifest, node)
            if problem:
                problems.append(f"node {node}: {problem}")
                missed.append(node)
                certain = certain and surely
        if len(missed) == len(self.groups):
            return Outcome("; ".join(problems), certain)
        problem = ""
        if problems:
            nodes = "; ".join(problems)
            problem = f"step {manifest.step} is complete, but not all nodes know: {nodes}{_LATER}"
        return Outcome("", manifest=manifest, missed=tuple(missed), problem=problem)

    def _publish_here(self, manifest: Manifest) -> tuple[str, bool]:
        """Why this node has no manifest, or "", and whether it certainly has none."""
        try:
            self.store.prepare(manifest.step)
            self.store.publish(manifest)
        except (Error, OSError) as error:
            return words_of(error), self.store.lacks(manifest)
        return "", True

    def _publish_there(self, manifest: Manifest, node: int) -> tuple[str, bool]:
        """As `_publish_here`, on another node, which may have acted although its answer is lost."""
        told = False
        try:
            with contextlib.closing(
                connect(self.addresses[node], self._secret, self._timeout + 10)
            ) as stream:
                told = True
                stream.send({"ask": "publish", "manifest": manifest.to_bytes().decode()})
                answer = stream.receive()
        except (Error, OSError) as error:
            return words_of(error), not told
        return str(answer.get("error", "")), bool(answer.get("certain"))


def _checked(step: Any) -> int:
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise PeerError(f"{step!r} is not a step")
    return step


def _receive(
    stream: Stream, path: Path, part: Part, pace: Callable[[int], None] | None = None
) -> None:
    """Receives a part into the file `path`: complete, checked and on its device, or not at all."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        stream.receive_file(partial, part.size, pace)
        bad = _native.check_file(str(partial), part.size, list(part.crcs), _THREADS)
        if bad:
            raise CorruptionError(f"{path} arrived with {len(bad)} damaged blocks")
        rename(partial, path)
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
