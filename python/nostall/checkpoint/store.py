"""One directory of checkpoints: what is complete, what is rubbish, and the commit between them.

``<root>/step-000000000120/manifest.json`` makes the files that it names a checkpoint; it appears by
one rename, after all of them are on their device, and it is the first thing to go when a checkpoint
is removed. Names of parts carry the id of their save, so that saving a step again leaves the old
checkpoint untouched until the rename. Every step of this is an ordinary call of the operating system
(docs/formats/checkpoint.md lists them in order).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.checkpoint.format import Manifest, Part
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError

_STEP = re.compile(r"step-(\d{12})")
_MANIFEST = "manifest.json"
LARGEST_STEP = 10**12 - 1
# What a rank waits longer for rank 0's decision than rank 0 for the ranks: seconds.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Entry:
    """A checkpoint that was complete once: its manifest, or what is wrong with it."""

    step: int
    path: Path
    manifest: Manifest | None
    damage: str = ""


@contextlib.contextmanager
def io_errors(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the operating system says into an IoError with the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, IoError):
            raise
        failed = IoError(f"cannot {doing} {os.fspath(path)}: {error.strerror or error}")
        failed.errno = error.errno
        raise failed from error


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_durably(path: Path, data: bytes) -> None:
    """The file is there with all its bytes, or as it was before."""
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(partial, path)
    sync_directory(path.parent)


class Store:
    """A directory of checkpoints; `kind` ("fast", "durable") is for messages."""

    def __init__(self, root: str | os.PathLike[str], kind: str) -> None:
        self.root = Path(os.path.abspath(root))
        self.kind = kind
        self._lock: _native.DirectoryLock | None = None

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.kind!r})"

    # ------------------------------------------------------------------ looking

    def directory(self, step: int) -> Path:
        """Where a step's files lie."""
        return self.root / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """Steps with a directory, complete or not, in order."""
        with io_errors("list the checkpoints in", self.root):
            try:
                names = os.listdir(self.root)
            except FileNotFoundError:
                return []
        found = (_STEP.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def entry(self, step: int) -> Entry | None:
        """The checkpoint of a step; None if it never was complete, or is being removed."""
        path = self.directory(step)
        try:
            data = (path / _MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return Entry(step, path, None, f"{path / _MANIFEST} cannot be read: {error.strerror}")
        try:
            manifest = Manifest.from_bytes(data, str(path / _MANIFEST))
            if manifest.step != step:
                raise CorruptionError(f"{path / _MANIFEST} is of step {manifest.step}")
        except CorruptionError as error:
            return Entry(step, path, None, str(error))
        return Entry(step, path, manifest)

    def entries(self) -> list[Entry]:
        """Everything that was complete once, by step."""
        return [entry for step in self.steps() if (entry := self.entry(step)) is not None]

    def has(self, step: int, part: Part) -> bool:
        """Whether a part of that name and size is there."""
        try:
            return (self.directory(step) / part.name).stat().st_size == part.size
        except OSError:
            return False

    def files(self, step: int) -> dict[str, int]:
        """Names and sizes of a step's parts, whether a manifest names them or not."""
        with contextlib.suppress(OSError), os.scandir(self.directory(step)) as found:
            return {f.name: f.stat().st_size for f in found if f.name.endswith(".safetensors")}
        return {}

    def lacks(self, manifest: Manifest) -> bool:
        """Whether this save certainly is no checkpoint here: no manifest of it has its name."""
        entry = self.entry(manifest.step)
        return entry is None or (entry.manifest is not None and entry.manifest.id != manifest.id)

    def missing(self, manifest: Manifest) -> str:
        """What a look without reading tells: a part that is gone or of another size; or nothing.

        Of a checkpoint that is spread over nodes, any part may be elsewhere.
        """
        for part in manifest.parts:
            path = self.directory(manifest.step) / part.name
            try:
                size = path.stat().st_size
            except OSError as error:
                if manifest.spread and isinstance(error, FileNotFoundError):
                    continue
                return f"{path}: {error.strerror}"
            if size != part.size:
                return f"{path} has {size} bytes, its manifest says {part.size}"
        return ""

    # ------------------------------------------------------------------ owning

    def own(self) -> None:
        """Makes the directory, and takes it for this job.

        Raises:
            UsageError: another living process has it.
        """
        with io_errors("make the directory", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = _native.DirectoryLock(str(self.root / ".lock"))
        if not lock.acquire():
            raise UsageError(
                f"{self.root} is used by another running job's checkpointer: give every job a "
                "directory of its own"
            )
        self._lock = lock

    def disown(self) -> None:
        """Lets other jobs have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self, in_flight: Collection[str] = ()) -> list[str]:
        """Removes what no manifest names, except what carries an id of `in_flight`; its paths."""
        removed = []
        for step in self.steps():
            directory = self.directory(step)
            entry = self.entry(step)
            if entry is not None and entry.manifest is None:
                continue  # damaged: for the user to look at
            keep = {_MANIFEST}
            if entry is not None and entry.manifest is not None:
                keep |= {part.name for part in entry.manifest.parts}
            for name in sorted(os.listdir(directory)):
                if name in keep or any(i in name for i in in_flight):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(directory / name)
                    removed.append(str(directory / name))
            if entry is None:
                with contextlib.suppress(OSError):  # not empty: in flight
                    os.rmdir(directory)
        return removed

    # ------------------------------------------------------------------ changing

    def prepare(self, step: int) -> Path:
        """The directory for a step's parts, durably there."""
        directory = self.directory(step)
        with io_errors("make the directory", directory):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
            sync_directory(self.root)
        return directory

    def publish(self, manifest: Manifest) -> None:
        """Makes the checkpoint complete; its parts are on their device already.

        What another save of the same step left is removed afterwards.
        """
        directory = self.directory(manifest.step)
        before = self.entry(manifest.step)
        with io_errors("complete the checkpoint in", directory):
            sync_directory(directory)
            _write_durably(directory / _MANIFEST, manifest.to_bytes())
            if before is not None and before.manifest is not None:
                for part in before.manifest.parts:
                    if part.name not in {p.name for p in manifest.parts}:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(directory / part.name)

    def remove(self, step: int) -> None:
        """The manifest first, so that a checkpoint is never half there."""
        directory = self.directory(step)
        with io_errors("remove the checkpoint in", directory):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / _MANIFEST)
                sync_directory(directory)
            with contextlib.suppress(FileNotFoundError):
                for name in sorted(os.listdir(directory)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(directory / name)
                os.rmdir(directory)

    def discard(self, step: int, name: str) -> None:
        """Removes a part that no checkpoint will name, and the directory if nothing else is there."""
        directory = self.directory(step)
        with contextlib.suppress(OSError):
            os.unlink(directory / name)
        with contextlib.suppress(OSError):
            os.rmdir(directory)

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
            "" if the checkpoint is complete, else why it is not, and will not be.

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
        directory = self.directory(manifest.step)
        if mine is not None:
            note = {"failed": mine} if isinstance(mine, str) else mine.to_dict()
            try:
                with io_errors("leave word in", directory):
                    directory.mkdir(exist_ok=True)
                    _write_durably(self._note(manifest, rank), json.dumps(note).encode())
            except IoError as error:
                return self._give_up(manifest, rank, str(error))
        deadline = time.monotonic() + timeout
        if rank == 0:
            return self._gather(manifest, writers, deadline, stopped)
        while time.monotonic() < deadline + _GRACE_SECONDS and not stopped():
            entry = self.entry(manifest.step)
            if entry is not None and entry.manifest and entry.manifest.id == manifest.id:
                return ""
            if (reason := self.aborted(manifest)) is not None:
                return reason
            time.sleep(0.02)
        reason = f"rank 0 did not complete step {manifest.step} in {self.root} in {timeout:g} s"
        return self._give_up(manifest, rank, reason)

    def _give_up(self, manifest: Manifest, rank: int, reason: str) -> str:
        """Takes a rank's word back; what rank 0 has taken by then stands."""
        if rank == 0:
            self.abort(manifest, reason)
            return reason
        with io_errors("take a word back from", self.directory(manifest.step)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._note(manifest, rank))
            if self._taken(manifest, rank).exists():
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
                    os.rename(self._note(manifest, rank), self._taken(manifest, rank))
                    note: dict[str, Any] = json.loads(self._taken(manifest, rank).read_bytes())
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
                time.sleep(0.02)
        if reason:
            with contextlib.suppress(OSError):
                _write_durably(self._abort(manifest), json.dumps(reason).encode())
            return reason
        try:
            self.publish(dataclasses.replace(manifest, parts=tuple(parts[r] for r in writers)))
        except (Error, OSError) as error:
            if not self.lacks(manifest):
                raise
            return self._give_up(manifest, 0, str(error))
        with contextlib.suppress(OSError):
            for rank in writers:
                os.unlink(self._taken(manifest, rank))
        return ""

    def abort(self, manifest: Manifest, reason: str) -> None:
        """Tells the ranks that go on with a checkpoint that it will not be completed."""
        with contextlib.suppress(OSError):
            self.directory(manifest.step).mkdir(exist_ok=True)
            _write_durably(self._abort(manifest), json.dumps(reason).encode())

    def aborted(self, manifest: Manifest) -> str | None:
        """Why rank 0 gave this checkpoint up, if it did."""
        try:
            return str(json.loads(self._abort(manifest).read_bytes()))
        except (OSError, ValueError):
            return None

    def _note(self, manifest: Manifest, rank: int) -> Path:
        return self.directory(manifest.step) / f"part-{rank:05d}.{manifest.id}.json"

    def _taken(self, manifest: Manifest, rank: int) -> Path:
        return self.directory(manifest.step) / f"taken-{rank:05d}.{manifest.id}.json"

    def _abort(self, manifest: Manifest) -> Path:
        return self.directory(manifest.step) / f"aborted.{manifest.id}.json"


def part_name(rank: int, id: str) -> str:
    """Of a rank's file in one save."""
    return f"rank-{rank:05d}.{id}.safetensors"
