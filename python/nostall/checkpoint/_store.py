"""One store of checkpoints: what is complete, what is rubbish, and the commit between them.

``<root>/step-000000000120/manifest.json`` makes the files that it names a checkpoint; it appears by
one rename, after all of them are on their device, and it is the first thing to go when a checkpoint
is removed. Names of parts carry the id of their save, so that saving a step again leaves the old
checkpoint untouched until the rename. Where the files lie, and how each of them is written, is in
`_files.py`; docs/formats/checkpoint.md lists all in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.checkpoint._files import (
    DirectoryFiles,
    Files,
    Place,
    UnknownOutcomeError,
    UnreachableError,
    Version,
    io_errors,
)
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import is_past
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError

_MANIFEST = "manifest.json"
_BRANCH = "branch.json"
_SEQUENCE = ".sequence"
# What only a checkpointer calls a file; all else in a step's directory is the user's.
_OURS = re.compile(
    r"manifest\.json\.partial|(?:(?:rank|part|taken)-\d{5}\.|aborted\.|manifest-)"
    r"(?P<id>[0-9a-f]{8}-\d{6,})(?:\.\d+)?\.(?:safetensors|json)(?:\.[0-9a-f]{8})?(?:\.partial)?"
)
LARGEST_STEP = 10**12 - 1
# What a rank waits longer for rank 0's decision than rank 0 for the ranks: seconds.
_GRACE_SECONDS = 5.0
# A rank that writes no part looks for newer checkpoints at this interval.
_LOOK_SECONDS = 1.0

_log = logging.getLogger("nostall")


@dataclass(frozen=True)
class Entry:
    """A checkpoint that was complete once: its manifest, or what is wrong with it.

    `name` is that of the manifest in `path`, and `version` its state when it was read.
    """

    step: int
    path: Place
    manifest: Manifest | None
    damage: str = ""
    name: str = _MANIFEST
    version: Version = None


class Store:
    """A directory of checkpoints; `kind` ("fast", "durable") is for messages."""

    def __init__(self, root: str | os.PathLike[str], kind: str) -> None:
        self.files: Files = DirectoryFiles(root)
        self.kind = kind
        # Manifests change one at a time: one thread publishes, another one removes.
        self._changing = threading.RLock()
        self._in_use: set[int] = set()  # steps whose directory is about to get parts

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.kind!r})"

    # ------------------------------------------------------------------ looking

    @property
    def root(self) -> Place:
        """Where it lies."""
        return self.files.root

    def place(self, step: int) -> Place:
        """Where a step's files lie."""
        return self.files.place(step)

    def directory(self, step: int) -> Path:
        """The same of a store that is a directory."""
        place = self.files.place(step)
        if not isinstance(place, Path):
            raise UsageError(f"{self.root} is no directory")
        return place

    def steps(self) -> list[int]:
        """Steps with a directory, complete or not, in order."""
        return self.files.steps()

    def entry(self, step: int) -> Entry | None:
        """The newest checkpoint of a step; None if none is complete, or it is being removed."""
        return self.read(step, _MANIFEST)

    def read(self, step: int, name: str) -> Entry | None:
        """What the manifest of that name says."""
        path = self.place(step)
        try:
            data, version = self.files.read(step, name)
        except FileNotFoundError:
            return None
        except UnreachableError:
            raise
        except OSError as error:
            problem = f"{path / name} cannot be read: {error.strerror}"
            return Entry(step, path, None, problem, name)
        try:
            manifest = Manifest.from_bytes(data, str(path / name))
            if manifest.step != step:
                raise CorruptionError(f"{path / name} is of step {manifest.step}")
        except CorruptionError as error:
            return Entry(step, path, None, str(error), name, version)
        return Entry(step, path, manifest, "", name, version)

    def saves(self, step: int) -> list[Entry]:
        """All checkpoints of a step, the newest first: others are of branches that were given up."""
        names = [name for name in self.files.names(step) if name.startswith("manifest-")]
        aside = [name for name in names if _OURS.fullmatch(name) and name.endswith(".json")]
        found: dict[str, Entry] = {}
        for name in (_MANIFEST, *sorted(aside)):
            entry = self.read(step, name)
            if entry is not None:
                found.setdefault(entry.manifest.id if entry.manifest else name, entry)
        return list(found.values())

    def find(self, step: int, id: str) -> Manifest | None:
        """The manifest of one save, if it is complete."""
        for name in (_MANIFEST, _aside(id)):
            entry = self.read(step, name)
            if entry is not None and entry.manifest is not None and entry.manifest.id == id:
                return entry.manifest
        return None

    def entries(self) -> list[Entry]:
        """Everything that was complete once, by step."""
        return [entry for step in self.steps() for entry in self.saves(step)]

    def manifests(self) -> list[Manifest]:
        """Of the complete checkpoints, by step."""
        return [entry.manifest for entry in self.entries() if entry.manifest is not None]

    def branch(self) -> Branch | None:
        """Where a training went back to, if it has saved nothing since.

        Raises:
            CorruptionError: the note is damaged; what it says is not known.
            IoError: it cannot be read.
        """
        path = self.root / _BRANCH
        with io_errors("read", path):
            try:
                data, _ = self.files.read(None, _BRANCH)
            except FileNotFoundError:
                return None
        return Branch.from_bytes(data, str(path))

    def seen(self) -> int:
        """The highest number of a save, of a branch's begin, or noted by a job; 0 if there is none."""
        numbers = [0, *(m.sequence for m in self.manifests())]
        try:
            numbers.append(int(self.files.read(None, _SEQUENCE)[0]))
        except UnreachableError:
            raise
        except (OSError, ValueError):
            pass
        with contextlib.suppress(CorruptionError):
            branch = self.branch()
            numbers.append(branch.sequence if branch is not None else 0)
        return max(numbers)

    def has(self, step: int, part: Part) -> bool:
        """Whether a part of that name and size is there."""
        return self.files.sizes(step, [part.name])[part.name] == part.size

    def has_all(self, manifest: Manifest) -> bool:
        """Whether all its parts are there, by name and size."""
        found = self.files.sizes(manifest.step, [part.name for part in manifest.parts])
        return all(found[part.name] == part.size for part in manifest.parts)

    def part_sizes(self, step: int) -> dict[str, int]:
        """Names and sizes of a step's parts, whether a manifest names them or not."""
        names = [name for name in self.files.names(step) if name.endswith(".safetensors")]
        found = self.files.sizes(step, names)
        return {name: size for name, size in found.items() if isinstance(size, int)}

    def lacks(self, manifest: Manifest) -> bool:
        """Whether this save certainly is no checkpoint here: no manifest of it has its name."""
        entries = [self.read(manifest.step, name) for name in (_MANIFEST, _aside(manifest.id))]
        return all(e is None or (e.manifest and e.manifest.id != manifest.id) for e in entries)

    def missing(self, manifest: Manifest) -> str:
        """A part that is gone or of another size, found without reading; or nothing.

        Of a checkpoint that is spread over nodes, any part may be elsewhere.
        """
        sizes = self.files.sizes(manifest.step, [part.name for part in manifest.parts])
        for part in manifest.parts:
            path, size = self.place(manifest.step) / part.name, sizes[part.name]
            if isinstance(size, OSError):
                if manifest.spread and isinstance(size, FileNotFoundError):
                    continue
                return f"{path}: {size.strerror}"
            if size != part.size:
                return f"{path} has {size} bytes, its manifest says {part.size}"
        return ""

    # ------------------------------------------------------------------ owning

    def make(self) -> None:
        """Makes the directory, durably."""
        self.files.make()

    def own(self) -> None:
        """Makes the directory, and takes it for this job.

        Raises:
            UsageError: another living process has it.
        """
        self.make()
        self.files.own()
        try:
            self.branch()
        except CorruptionError as error:
            _log.warning("%s; what was saved last counts as the newest", error)
            self.files.put_aside(_BRANCH, f"{_BRANCH}.damaged")

    def disown(self) -> None:
        """Lets other jobs have it."""
        self.files.disown()

    def clean(self) -> list[str]:
        """Removes files of ours that no manifest names; their paths.

        What else lies in a step's directory is the user's and stays.
        """
        removed = []
        self.files.abort_uploads(lambda name: _OURS.fullmatch(name) is not None)
        for step in self.steps():
            entries = self.saves(step)
            if any(entry.manifest is None for entry in entries):
                continue  # damaged: for the user to look at
            keep = {entry.name for entry in entries}
            for entry in entries:
                assert entry.manifest is not None
                keep |= {part.name for part in entry.manifest.parts}
            rubbish = [n for n in self.files.names(step) if n not in keep and _OURS.fullmatch(n)]
            try:
                self.files.unlink(step, rubbish)
            except OSError as error:
                _log.warning("what an earlier job left in %s stays: %s", self.place(step), error)
            removed += [str(self.place(step) / name) for name in rubbish]
            if not entries:
                self.files.leave_step(step)
        return removed

    # ------------------------------------------------------------------ changing

    def prepare(self, step: int) -> Place:
        """The place for a step's parts, durably there."""
        place = self.place(step)
        with io_errors("make the directory", place):
            with self._changing:
                self._in_use.add(step)
                self.files.make_step(step)
            self.files.sync(None)
        return place

    def publish(self, manifest: Manifest) -> None:
        """Makes the checkpoint complete; its parts are on their device already.

        An earlier save of the step goes, unless it is of a branch that was given up: that one stays
        under a name of its own, so that the training can go back to it.
        """
        step, files, data = manifest.step, self.files, manifest.to_bytes()
        with self._changing, io_errors("complete the checkpoint in", self.place(step)):
            self._in_use.discard(step)
            files.check_owned()
            before = self.entry(step)
            files.sync(step)
            there = before.manifest if before is not None else None
            if there is not None and there.id != manifest.id and manifest.order < there.order:
                files.write(step, _aside(manifest.id), data)  # a drain that comes late
                files.check_owned()
                return
            goes = there if there is not None and there.id != manifest.id else None
            if goes and not is_past(goes.sequence, manifest.sequence, manifest.abandoned):
                files.write(step, _aside(goes.id), goes.to_bytes())
                goes = None
            files.replace(step, _MANIFEST, data, before.version if before is not None else None)
            # A job that has taken the store since may have removed the parts first.
            files.check_owned()
            if goes is not None:
                named = {part.name for part in manifest.parts}
                files.unlink(step, [p.name for p in goes.parts if p.name not in named])

    def note_branch(self, branch: Branch) -> None:
        """Makes the begin of a branch durable."""
        with io_errors("note the branch in", self.root):
            self.files.check_owned()
            self.files.write(None, _BRANCH, branch.to_bytes())

    def note_sequence(self, number: int) -> None:
        """Notes durably that a job numbers its saves from there."""
        with io_errors("note the numbers of this job's saves in", self.root):
            self.files.write(None, _SEQUENCE, b"%d" % number)

    def remove(self, step: int, id: str) -> None:
        """One save: the manifest first, so that a checkpoint is never half there."""
        files = self.files
        with self._changing, io_errors("remove the checkpoint in", self.place(step)):
            files.check_owned()
            entries = [e for e in self.saves(step) if e.manifest and e.manifest.id == id]
            parts = {p.name for e in entries if e.manifest for p in e.manifest.parts}
            files.unlink(step, [entry.name for entry in entries])
            if entries:
                files.unlink(step, [_aside(id)])
                files.sync(step)
            for name in files.names(step):
                match = _OURS.fullmatch(name)
                if match and match["id"] == id:
                    parts.add(name)
            files.unlink(step, sorted(parts))
            self._leave(step)

    def _leave(self, step: int) -> None:
        """Removes a step's directory if nothing is in it, and nothing is about to be."""
        with self._changing:
            if step not in self._in_use:
                self.files.leave_step(step)

    def remove_step(self, step: int) -> None:
        """All saves of a step, damaged ones too; a user's files stay."""
        files = self.files
        with io_errors("remove the checkpoint in", self.place(step)):
            entries = self.saves(step)
            parts = {p.name for e in entries if e.manifest for p in e.manifest.parts}
            files.unlink(step, [entry.name for entry in entries])
            if entries:
                files.sync(step)
            parts |= {name for name in files.names(step) if _OURS.fullmatch(name)}
            files.unlink(step, sorted(parts))
            self._leave(step)

    def discard(self, step: int, name: str) -> None:
        """Removes a part that no checkpoint will name, and the directory if nothing else is there."""
        with contextlib.suppress(OSError):
            self.files.unlink(step, [name])
        with self._changing:
            self._in_use.discard(step)
            self._leave(step)

    # ------------------------------------------------------------------ agreeing

    def commit(
        self,
        manifest: Manifest,
        rank: int,
        mine: Part | str | None,
        *,
        timeout: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> str:
        """The second phase: all ranks' parts become one checkpoint, or none does.

        Args:
            manifest: step, id and world; its parts are filled in by rank 0.
            rank: this process.
            mine: its part, why it has none, or nothing if it writes none.
            timeout: seconds to wait for the other ranks.
            stopped: asked while waiting.

        Returns:
            "" if the checkpoint is complete, or was and gave way to a newer one, else why it is not,
            and will not be.

        Raises:
            PeerError, IoError: it may be complete, now or soon: the part must stay. Of rank 0 only
                where `lacks` denies it.
        """
        writers = [0] if manifest.replicated else list(range(manifest.world_size))
        if manifest.world_size == 1:
            if isinstance(mine, str):
                return mine
            assert mine is not None
            self.publish(dataclasses.replace(manifest, parts=(mine,)))
            return ""
        left = False
        if mine is not None:
            note = {"failed": mine} if isinstance(mine, str) else mine.to_dict()
            try:
                with io_errors("leave word in", self.place(manifest.step)):
                    self.files.make_step(manifest.step)
                    word = _word(manifest, rank)
                    self.files.write(manifest.step, word, json.dumps(note).encode())
                left = True
            except IoError as error:
                left = isinstance(error, UnknownOutcomeError)
                return self._give_up(manifest, rank, str(error), left)
        deadline = time.monotonic() + timeout
        if rank == 0:
            return self._gather(manifest, writers, deadline, stopped)
        within, look = f"in {timeout:g} s", 0.0
        while time.monotonic() < deadline + _GRACE_SECONDS:
            if not isinstance(mine, str) and self._completed(manifest, rank, left):
                return ""
            if (reason := self.aborted(manifest)) is not None:
                return reason
            if mine is None and time.monotonic() >= look:
                # Rank 0 does not wait for this one: it may have retired the checkpoint since.
                if any(newer.order > manifest.order for newer in self.manifests()):
                    return ""
                look = time.monotonic() + _LOOK_SECONDS
            if stopped():
                within = "before this job's end"
                break
            time.sleep(self.files.look_seconds)
        reason = f"rank 0 did not complete step {manifest.step} in {self.root} {within}"
        return self._give_up(manifest, rank, reason, left)

    def _completed(self, manifest: Manifest, rank: int, left: bool) -> bool:
        """Whether rank 0 has made the checkpoint complete; `left`: of this rank's word, too."""
        if self.find(manifest.step, manifest.id) is None:
            return False
        if not left:
            return True
        # Rank 0 takes all words first: a manifest beside one is of before, and lacks parts.
        return not self.files.waits(manifest.step, _word(manifest, rank))

    def _give_up(self, manifest: Manifest, rank: int, reason: str, left: bool) -> str:
        """Takes a rank's word back; what rank 0 has taken by then stands."""
        if rank == 0:
            self.abort(manifest, reason)
            return reason
        step, word, taken = manifest.step, _word(manifest, rank), _taken(manifest, rank)
        with io_errors("take a word back from", self.place(step)):
            if not self.files.withdraw(step, word, taken, left):
                raise PeerError(f"{reason}; it may still, so rank {rank}'s part stays")
        return reason

    def _gather(
        self,
        manifest: Manifest,
        writers: list[int],
        deadline: float,
        stopped: Callable[[], bool],
    ) -> str:
        parts: dict[int, Part] = {}
        reason = ""
        while len(parts) < len(writers) and not reason:
            for rank in writers:
                if rank in parts or reason:
                    continue
                try:
                    # One of both has the word from here on: rank 0, or the rank that gives up.
                    names = _word(manifest, rank), _taken(manifest, rank)
                    note: dict[str, Any] = json.loads(self.files.take(manifest.step, *names))
                    if "failed" in note:
                        reason = f"rank {rank}: {note['failed']}"
                    else:
                        parts[rank] = Part.from_dict(note)
                except FileNotFoundError:
                    pass
                except (OSError, ValueError, KeyError, TypeError) as error:
                    reason = f"rank {rank}: its word cannot be read: {error}"
            late = [rank for rank in writers if rank not in parts]
            if late and not reason:
                if stopped():
                    reason = "stopped"
                elif time.monotonic() > deadline:
                    reason = f"ranks {late} did not finish their part in time"
                time.sleep(self.files.look_seconds)
        if reason:
            self.abort(manifest, reason)
            return reason
        try:
            self.publish(dataclasses.replace(manifest, parts=tuple(parts[r] for r in writers)))
        except (Error, OSError) as error:
            if isinstance(error, UnknownOutcomeError) or not self.lacks(manifest):
                raise
            return self._give_up(manifest, 0, str(error), False)
        with contextlib.suppress(OSError):
            self.files.unlink(manifest.step, [_taken(manifest, rank) for rank in writers])
        return ""

    def abort(self, manifest: Manifest, reason: str) -> None:
        """Notifies ranks that go on with a checkpoint that it will not be completed."""
        with contextlib.suppress(OSError):
            self.files.make_step(manifest.step)
            self.files.write(manifest.step, _aborted(manifest), json.dumps(reason).encode())

    def aborted(self, manifest: Manifest) -> str | None:
        """Why rank 0 gave this checkpoint up, if it did."""
        try:
            return str(json.loads(self.files.read(manifest.step, _aborted(manifest))[0]))
        except (OSError, ValueError):
            return None


def _word(manifest: Manifest, rank: int) -> str:
    return f"part-{rank:05d}.{manifest.id}.json"


def _taken(manifest: Manifest, rank: int) -> str:
    return f"taken-{rank:05d}.{manifest.id}.json"


def _aborted(manifest: Manifest) -> str:
    return f"aborted.{manifest.id}.json"


def _aside(id: str) -> str:
    """The manifest of a save whose step was saved again on another branch."""
    return f"manifest-{id}.json"


def part_name(rank: int, id: str, attempt: int = 0) -> str:
    """Of a rank's file in one save, or in a further attempt to copy it."""
    more = f".{attempt}" if attempt else ""
    return f"rank-{rank:05d}.{id}{more}.safetensors"
