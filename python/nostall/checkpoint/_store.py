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
import errno
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.base._garbage import await_all
from nostall.base._paths import path_of, unmounted
from nostall.base._words import words_of
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import Ranges, is_past
from nostall.checkpoint._place import (
    CheckedPart,
    Copy,
    LostStoreError,
    Pacing,
    Place,
    UnreachableError,
    refuse_scarce,
)
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError

_STEP = re.compile(r"step-(\d{12})")
_MANIFEST = "manifest.json"
_BRANCH = "branch.json"
_SEQUENCE = ".sequence"
# What only a checkpointer calls a file; all else in a step's directory is the user's.
_OURS = re.compile(
    r"manifest\.json\.partial|(?:(?:rank|part|taken)-\d{5}\.|aborted\.|manifest-)"
    r"(?P<id>[0-9a-f]{8}-\d{6,})(?:\.\d+)?\.(?:safetensors|json)(?:\.[0-9a-f]{8})?(?:\.partial)?"
)
LARGEST_STEP = 10**12 - 1
# The token in the name of a mark.
MARK = re.compile(r"[0-9a-f]{8}")
# What a rank waits longer for rank 0's decision than rank 0 for the ranks: seconds.
GRACE_SECONDS = 5.0
# A mark that is so much older than those of a job that begins is of one that was killed meanwhile.
_MARK_SECONDS = 24 * 3600.0
# A rank that writes no part looks for newer checkpoints at this interval. Of many ranks the intervals
# are longer, so that all together look so many times a second, and at most so long.
LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 1.0, 30.0
_NEWER_PER_SECOND = 10
# Of the saves of replicated state that rank 0 gave up, so many are still told to late ranks.
_LATE_SAVES = 10
# After a complete save no more is removed once so many removals have failed: these come last next time.
_FAILED_REMOVALS = 2
# Looks of rank 0 for the words of other ranks.
_WORDS_PER_SECOND = 2000
# How often other ranks may find a step's directory empty, and remove it, before a file is in it.
_REMOVALS = 100
# How often rank 0 tries to remove its mark of a complete save, for which the other ranks wait.
_LIFTS = 3

_log = logging.getLogger("nostall")


@dataclass(frozen=True)
class Entry:
    """A checkpoint that was complete once: its manifest, or what is wrong with it.

    `name` is that of the manifest in `path`. One with a manifest and `damage` is known to lack parts.
    `unread`: the number of the error with which the system refused to read the manifest, 0 if it did
    not; whether that is damaged is not known.
    """

    step: int
    path: Place
    manifest: Manifest | None
    damage: str = ""
    name: str = _MANIFEST
    unread: int = 0

    @property
    def id(self) -> str:
        """Of the save; "" if that is not known."""
        return self.manifest.id if self.manifest is not None else ""

    def refuse_unread(self) -> None:
        """Raises IoError where nothing is known of what is there."""
        if self.unread:
            refuse_scarce(self.unread, self.damage)
            failed = IoError(self.damage)
            failed.errno = self.unread
            raise failed


def entry_of(step: int, path: Place, name: str, data: bytes) -> Entry:
    """What the bytes of a manifest say."""
    try:
        manifest = Manifest.from_bytes(data, str(path / name))
        if manifest.step != step:
            raise CorruptionError(f"{path / name} is of step {manifest.step}")
    except CorruptionError as error:
        return Entry(step, path, None, str(error), name)
    return Entry(step, path, manifest, "", name)


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


def is_full(error: OSError) -> bool:
    """Whether there is no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """A directory whose name, and those of the parents that it needs, are durable.

    Raises:
        IoError: this user may not make it.
        OSError: it cannot be made.
    """
    try:
        _make_durably(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        failed = IoError(
            f"cannot make the directory {path}: {error.strerror}: give a directory where this user may "
            "write, or have this one made and given to this user"
        )
        failed.errno = error.errno
        raise failed from error


def _make_durably(path: Path) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        try:
            sync_directory(directory.parent)
        except PermissionError:  # a parent that others may enter and not list
            os.sync()


def refuse_unmounted(path: str | os.PathLike[str]) -> None:
    """Raises IoError for a directory on a disk that is not mounted, as tiers refuse it."""
    if why := unmounted(path):
        raise IoError(f"cannot make the directory {path}: {why}")


def rename(old: Path, new: Path) -> None:
    """A rename; over NFS one that worked may be repeated, and is then reported as failed."""
    before = os.stat(old)
    try:
        os.rename(old, new)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            after = os.stat(new)
            if (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino):
                return
        raise


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
    rename(partial, path)
    sync_directory(path.parent)


def _tell(path: Path, data: bytes) -> None:
    """Writes a file durably into a step's directory, which is made if it is not there."""
    for _ in range(_REMOVALS):
        path.parent.mkdir(exist_ok=True)
        try:
            return _write_durably(path, data)
        except FileNotFoundError as error:
            if error.filename2 is not None:  # of the rename: it may be there and taken
                raise
    raise IoError(f"cannot write {path}: its directory is removed again and again")


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode; of what is not there no device has such."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return found.st_dev, found.st_ino


def _unlink(paths: Iterable[Path]) -> None:
    """Removes files, all that can be.

    Raises:
        OSError: the first that one of them gave.
    """
    failed: OSError | None = None
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _take_away(directory: Path, manifests: Sequence[str], others: Iterable[str]) -> None:
    """Removes manifests first, durably, so that a checkpoint is never half there."""
    _unlink(directory / name for name in manifests)
    if manifests:
        sync_directory(directory)
    _unlink(directory / name for name in sorted(others))


class Store:
    """A directory of checkpoints; `kind` ("fast", "durable") is for messages.

    A store elsewhere (`_objects.py`) has the same methods, but for `directory` and `prepare`.
    """

    is_directory = True
    # Whether a job that owns it knows that none before still saves here; not where there are no locks.
    is_exclusive = True
    # A rank looks for what another one has left at this interval, or at rising ones: until all ranks of
    # the job together look so many times a second, or each at so long an interval.
    _look_seconds, _looks_per_second, _longest_look = 0.02, 100, 2.0

    def __init__(self, root: str | os.PathLike[str], kind: str) -> None:
        self._given = path_of(root, kind)
        self._path = Path(os.path.abspath(self._given))
        self.root: Place = self._path
        self.kind = kind
        self._lock: _native.DirectoryLock | None = None
        # What .sequence has since this job has the directory, and the directory's device and inode:
        # they tell it from others. Inodes of some file systems change.
        self._noted: bytes | None = None
        self._identity = (0, 0)
        self._ended = False  # other jobs may have it
        # Manifests change one at a time: one thread publishes, another one removes.
        self._changing = threading.RLock()
        self._in_use: set[int] = set()  # steps whose directory is about to get parts
        # Step and id of saves that rank 0 has given up, by its threads, until what they left goes.
        self._given_up: dict[int, list[tuple[int, str]]] = {}
        # Whether the manifests that this process has renamed are known to be on their device, by ids.
        self._synced: dict[str, bool] = {}
        self._marked: set[str] = set()  # ids of saves whose mark this process may have left
        self._told: Ranges = ()  # what the note of a branch gives up, as far as it is known
        self._untold = False  # whether the last note of a branch could not be made

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.kind!r})"

    # ------------------------------------------------------------------ looking

    def place(self, step: int) -> Place:
        """Where a step's files lie."""
        return self.directory(step)

    def directory(self, step: int) -> Path:
        """The same of a store that is a directory."""
        return self._path / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """Steps with a directory, complete or not, in order."""
        with io_errors("list the checkpoints in", self.root):
            try:
                names = os.listdir(self.root)
            except FileNotFoundError:
                return []
        found = (_STEP.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def read(self, step: int, name: str) -> Entry | None:
        """What the manifest of that name says."""
        path = self.directory(step)
        try:
            data = (path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = f"{path / name} cannot be read: {error.strerror}"
            return Entry(step, path, None, problem, name, unread=error.errno or errno.EIO)
        return entry_of(step, path, name, data)

    def saves(self, step: int) -> list[Entry]:
        """All checkpoints of a step, the newest first: others are of branches that were given up."""
        names: list[str] = []
        with contextlib.suppress(IoError):  # the manifest's own reading says why
            names = self._names(step)
        return self._counting(self._read_each(step, _manifests_in(names)))

    def _read_each(self, step: int, names: Iterable[str]) -> list[Entry]:
        """What those of these manifests say that are there."""
        return [entry for name in names if (entry := self.read(step, name)) is not None]

    def _counting(self, entries: Iterable[Entry], *, sure: bool = False) -> list[Entry]:
        """One manifest of each save, and what is damaged or cannot be read.

        A copy that was made beside a manifest.json of the save that could not be read counts, as it is
        the later one and was read back; but not where that one alone is whole.

        Raises:
            IoError: where one has to be `sure`, since another goes, and a part cannot be looked for.
        """
        found: dict[str, Entry] = {}
        for entry in entries:
            key = entry.id or entry.name
            if (
                key not in found
                or self._is_whole(entry, sure=sure)
                or not self._is_whole(found[key], sure=sure)
            ):
                found[key] = entry
        return list(found.values())

    def _is_whole(self, entry: Entry, *, sure: bool) -> bool:
        """Whether all parts are there; one that cannot be looked for is not, or raises if `sure`."""
        manifest = entry.manifest
        if manifest is None or not sure:
            return manifest is not None and self.has_all(manifest)
        return all(self._size(manifest.step, part.name) == part.size for part in manifest.parts)

    def _names(self, step: int) -> list[str]:
        """What is in a step's directory, in order; nothing if there is none.

        Raises:
            IoError: it cannot be listed.
        """
        with io_errors("list", self.directory(step)):
            try:
                return sorted(os.listdir(self.directory(step)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def find(self, step: int, id: str) -> Manifest | None:
        """The manifest of one save, if it is complete.

        Raises:
            IoError: that is not known, as a manifest that may be its cannot be read.
        """
        found = self._read_each(step, (_MANIFEST, _aside(id)))
        for entry in self._counting(found):
            if entry.id == id:
                return entry.manifest
        for entry in found:
            entry.refuse_unread()
        return None

    def entries(self) -> list[Entry]:
        """Everything that was complete once, by step."""
        return [entry for step in self.steps() for entry in self.saves(step)]

    def manifests(self) -> list[Manifest]:
        """Of the complete checkpoints, by step."""
        return [e.manifest for e in self.entries() if e.manifest is not None and not e.damage]

    def branch(self) -> Branch | None:
        """Where a training went back to, if it has saved nothing since.

        Raises:
            CorruptionError: the note is damaged; what it says is not known.
            IoError: it cannot be read.
        """
        path = self._path / _BRANCH
        with io_errors("read", path):
            try:
                data = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Branch.from_bytes(data, str(path))

    def seen(self) -> int:
        """The highest number of a save, of a branch's begin, or noted by a job; 0 if there is none."""
        numbers = [0, *(m.sequence for m in self.manifests())]
        with contextlib.suppress(OSError, ValueError):
            numbers.append(int(self._number()))
        with contextlib.suppress(CorruptionError):
            branch = self.branch()
            numbers.append(branch.sequence if branch is not None else 0)
        return max(numbers)

    def has(self, step: int, part: Part) -> bool:
        """Whether a part of that name and size is there."""
        with contextlib.suppress(IoError):
            return self._size(step, part.name) == part.size
        return False

    def _size(self, step: int, name: str) -> int | None:
        """Of a part; None if it is not there.

        Raises:
            IoError: that is not known.
        """
        path = self.directory(step) / name
        with io_errors("look for", path):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def has_all(self, manifest: Manifest) -> bool:
        """Whether all its parts are there, by name and size."""
        return all(self.has(manifest.step, part) for part in manifest.parts)

    def files(self, step: int) -> dict[str, int]:
        """Names and sizes of a step's parts, whether a manifest names them or not.

        Raises:
            IoError: they cannot be looked at.
        """
        names = [name for name in self._names(step) if name.endswith(".safetensors")]
        return {name: size for name in names if (size := self._size(step, name)) is not None}

    def lacks(self, manifest: Manifest) -> bool:
        """Whether this save was certainly not made complete here: no manifest of it has its name.

        A damaged manifest.json is of another one, as `publish` puts its own beside that.
        """
        return not any(
            entry.name != _MANIFEST or entry.unread or entry.id == manifest.id
            for entry in self._read_each(manifest.step, (_MANIFEST, _aside(manifest.id)))
        )

    def missing(self, manifest: Manifest) -> str:
        """A part that is gone or of another size, found without reading; or nothing.

        Of a checkpoint that is spread over nodes, any part may be elsewhere.

        Raises:
            IoError: that is not known of a part.
        """
        for part in manifest.parts:
            path = self.directory(manifest.step) / part.name
            size = self._size(manifest.step, part.name)
            if size is None and not manifest.spread:
                return f"{path} does not exist"
            if size not in (None, part.size):
                return f"{path} has {size} bytes, its manifest says {part.size}"
        return ""

    # ------------------------------------------------------------------ owning

    def make(self) -> None:
        """Makes the directory, durably."""
        with io_errors("make the directory", self.root):
            refuse_unmounted(self._given)
            make_directory(self._path)

    def other_owner(self) -> str:
        """From whom `own` takes the store, who may still use it; of a locked directory from nobody."""
        return ""

    def own(self, *, take_over: bool = True) -> None:
        """Makes the directory, and takes it for this job.

        Args:
            take_over: whether it may be taken from a job that may still run. That of a running one
                cannot, as long as it is locked.

        Raises:
            UsageError: another living process has it.
        """
        self.make()
        with io_errors("lock", self.root / ".lock"):
            lock = _native.DirectoryLock(str(self.root / ".lock"))
        got = lock.acquire()
        if got == _native.Locked.elsewhere:
            # It may be a checkpointer of this process that is being closed.
            await_all()
            got = lock.acquire()
        if got == _native.Locked.elsewhere:
            raise UsageError(
                f"{self.root} is used by another running job's checkpointer: give every job a "
                "directory of its own"
            )
        self.is_exclusive = got != _native.Locked.unsupported
        if not self.is_exclusive:
            _log.warning(
                "the file system of %s has no locks: nothing keeps another job from using it at the "
                "same time",
                self.root,
            )
        if got == _native.Locked.failed:
            with io_errors("lock", self.root / ".lock"):
                raise OSError(lock.error_number, os.strerror(lock.error_number))
        self._lock = lock
        self.recognize()
        try:
            self.branch()
        except CorruptionError as error:
            _log.warning("%s; what was saved last counts as the newest", error)
            damaged = self._path / f"{_BRANCH}.damaged"
            with io_errors("put aside", damaged):
                rename(self._path / _BRANCH, damaged)

    def _number(self) -> bytes:
        """What .sequence has; b"" if there is none."""
        try:
            return (self._path / _SEQUENCE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def recognize(self) -> None:
        """From here on `check_owned` tells this directory from others, also on a rank that leaves the
        owning to another one of its job."""
        self._ended = False
        with io_errors("look for", self.root):
            self._noted, self._identity = self._number(), _identity(self._path)

    def disown(self) -> None:
        """Lets other jobs have it: a thread that is late changes nothing there."""
        self._noted, self._ended, self._told = None, True, ()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_owned(self) -> None:
        """Looks whether this job still has what it took.

        Raises:
            PeerError: another job has the store since, or may have it, for good.
            IoError: there is another directory now, or none.
        """
        if self._ended:
            raise LostStoreError(
                f"{self.root} is not this job's any more: the checkpointer is closed"
            )
        self.check_there()

    def check_there(self) -> None:
        """Looks whether the directory is still the one that this job took.

        What is not mounted any more, or was mounted again elsewhere, leaves a directory of the same
        path, in which nothing that is saved would be found again.

        Raises:
            IoError: there is another directory now, or none.
        """
        if self._noted is None:
            return
        path = self._path / _SEQUENCE
        with io_errors("look for", path):
            there = self._number()
            same = not there and self._identity == _identity(self._path)
            if same and self._noted and self._lock is not None:  # somebody has tidied up
                with contextlib.suppress(OSError):  # the disk is full, or another thread does it
                    _write_durably(path, self._noted)
        # A rank that does not own it may see an earlier number: NFS caches names.
        known = there and (there == self._noted or self._lock is None)
        if not same and not known:
            found = f"is of another job ({there[:20]!r})" if there else "is gone"
            raise IoError(
                f"{self.root} is not the directory that this job has taken: its {_SEQUENCE} {found}. "
                "Mount its file system again, or begin the job anew"
            )

    def mark(self, token: str) -> None:
        """Leaves a mark for ranks that share the store."""
        (self._path / f".run-{token}").touch()

    def marked(self, tokens: Sequence[str]) -> list[int]:
        """The places in the list of those whose mark is there."""
        return [i for i, token in enumerate(tokens) if (self._path / f".run-{token}").exists()]

    def unmark(self, tokens: Sequence[str]) -> None:
        """Removes these marks, and those that killed jobs have left.

        A job that begins at the same time still needs its own. The storage's clock says which are old,
        as the machines' may differ.
        """
        made = self._marks()
        old = min((made[t] for t in tokens if t in made), default=0.0) - _MARK_SECONDS
        left = {token for token, seconds in made.items() if seconds < old}
        self._remove_marks(sorted(left.union(tokens)))

    def _marks(self) -> dict[str, float]:
        """The tokens of all marks, and the times at which they were left: seconds."""
        made = {}
        for path in self._path.glob(".run-*"):
            with contextlib.suppress(FileNotFoundError):
                made[path.name.removeprefix(".run-")] = path.stat().st_mtime
        return made

    def _remove_marks(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            (self._path / f".run-{token}").unlink(missing_ok=True)

    def clean(self, named: Collection[str] = ()) -> list[str]:
        """Removes files of ours that no manifest names; their paths.

        What else lies in a step's directory is the user's and stays. So do parts that are `named` by
        manifests elsewhere.
        """
        removed = []
        for step in self.steps():
            stays = f"what an earlier job left in {self.directory(step)} stays"
            try:
                names = self._names(step)
            except IoError as error:
                _log.warning("%s: %s", stays, error)
                continue
            # Of that same list, so that no manifest is missed whose file is then taken for rubbish.
            entries = self._read_each(step, _manifests_in(names))
            if any(entry.manifest is None for entry in entries):
                continue  # damaged: for the user to look at
            keep = {*named}
            try:
                counting = {entry.id: entry for entry in self._counting(entries, sure=True)}
                for entry in entries:
                    counts = counting[entry.id]
                    if entry is counts or not self._is_whole(counts, sure=True):
                        keep |= {entry.name, *_parts_of([entry])}
            except IoError as error:
                _log.warning("%s: %s", stays, error)
                continue
            rubbish = [n for n in names if n not in keep and _OURS.fullmatch(n)]
            for manifest in (entry.manifest for entry in entries if entry.manifest is not None):
                # Without it other ranks would count what this one could not make durable.
                mark = self._taken(manifest, 0).name
                if mark in rubbish and not self.is_durable(manifest):
                    rubbish.remove(mark)
                    self._marked.add(manifest.id)
            try:
                _unlink(self.directory(step) / name for name in rubbish)
            except OSError as error:
                _log.warning("%s: %s", stays, error)
            removed += [str(self.directory(step) / name) for name in rubbish]
            if not entries:
                with contextlib.suppress(OSError):  # the user's files are in it
                    os.rmdir(self.directory(step))
        return removed

    # ------------------------------------------------------------------ changing

    def prepare(self, step: int) -> Path:
        """The directory for a step's parts, durably there."""
        self.check_owned()
        directory = self.directory(step)
        with io_errors("make the directory", directory):
            with self._changing:
                self._in_use.add(step)
                with contextlib.suppress(FileExistsError):
                    directory.mkdir()
            sync_directory(self._path)
        return directory

    def make_step(self, step: int) -> None:
        """Makes what a step's copies need."""
        self.prepare(step)

    def step_is_gone(self, step: int) -> bool:
        """Whether a step's directory is not there: another rank removes one that it finds empty."""
        return not self.directory(step).is_dir()

    def part_name(self, part: Part, id: str) -> str:
        """Of the copy of a part that its own rank makes here, once for each save."""
        return part.name

    def copy_names(self, manifest: Manifest) -> dict[str, str]:
        """By the names of parts, those of their copies that one rank makes here.

        They are new each time: no manifest names them yet, and no attempt before still writes or
        removes them.
        """
        number = 1 + secrets.randbelow(10**16)
        return {p.name: part_name(p.rank, manifest.id, number) for p in manifest.parts}

    def copy(self, source: Path, step: int, name: str, part: Part, pacing: Pacing) -> Copy:
        """A copy of a file to the part of that name, not yet begun."""
        return _native.FileCopy(
            str(source),
            str(self.directory(step) / name),
            part.size,
            list(part.crcs),
            rate=pacing.rate,
            priority=pacing.priority,
            gate=pacing.gate,
            gate_patience=pacing.gate_patience,
            considerate=pacing.considerate,
        )

    def open(self, step: int, part: Part) -> CheckedPart:
        """A part, to be read."""
        path = self.directory(step) / part.name
        return _native.CheckedFile(str(path), part.size, list(part.crcs))

    def check(
        self,
        step: int,
        part: Part,
        threads: int,
        progress: _native.Progress | None = None,
        priority: _native.Priority = _native.Priority.normal,
    ) -> list[int]:
        """The damaged blocks of a part."""
        path, crcs = self.directory(step) / part.name, list(part.crcs)
        return _native.check_file(str(path), part.size, crcs, threads, progress, priority)

    def adopt(self, manifest: Manifest) -> None:
        """Protects a checkpoint, from which the training goes on, from a job that had the store before.
        In a directory the lock does."""

    def publish(self, manifest: Manifest) -> None:
        """Makes the checkpoint complete; its parts are on their device already.

        An earlier save of the step goes, unless it is of a branch that was given up: that one stays
        under a name of its own, so that the training can go back to it. Where the manifest that is
        there is damaged, or cannot be read, it stays, and the new one gets such a name; one of the same
        save that has such a name already, and cannot be read, goes.
        """
        directory = self.directory(manifest.step)
        with self._changing, io_errors("complete the checkpoint in", directory):
            self._in_use.discard(manifest.step)
            self.check_owned()
            found = self._read_each(manifest.step, (_MANIFEST, _aside(manifest.id)))
            self._synced[manifest.id] = False
            sync_directory(directory)
            self.check_owned()  # which may have taken long
            newest = next((entry for entry in found if entry.name == _MANIFEST), None)
            there = newest.manifest if newest is not None else None
            late = there is not None and manifest.order < there.order  # a drain's
            beside, aside = newest is not None and (there is None or late), _aside(manifest.id)
            if beside or any(entry.name == aside and entry.unread for entry in found):
                # What could not be read there would count in place of this copy once it can.
                _write_durably(directory / aside, manifest.to_bytes())
                if beside:
                    self._is_there(manifest)
                    return
                found = self._read_each(manifest.step, (_MANIFEST, aside))
            gone = {manifest.id}  # its copies that have lost parts
            if there is not None and there.id != manifest.id:
                found += self._read_each(manifest.step, (_aside(there.id),))
                if is_past(there.sequence, manifest.sequence, manifest.abandoned):
                    gone.add(there.id)
                else:
                    for entry in found:
                        entry.refuse_unread()  # it may be the copy that is whole
                    counting = self._counting(found, sure=True)
                    stays = next(entry for entry in counting if entry.id == there.id)
                    if stays.name == _MANIFEST:
                        _write_durably(directory / _aside(there.id), there.to_bytes())
            _write_durably(directory / _MANIFEST, manifest.to_bytes())
            self._is_there(manifest)
            old = [entry for entry in found if entry.id in gone]
            others = [entry.name for entry in old if entry.name != _MANIFEST]
            parts = _parts_of(old) - {part.name for part in manifest.parts}
            _take_away(directory, others, parts)

    def publish_alone(self, manifest: Manifest) -> None:
        """`publish` by rank 0 without the others, for which it counts once it is on its device."""
        with self._changing:  # no other thread says meanwhile that a copy of before is
            try:
                self._mark(manifest)
                self.publish(manifest)
            except BaseException as error:
                certain = False
                with contextlib.suppress(Error, OSError):
                    certain = self.lacks(manifest)
                reason = words_of(error) if isinstance(error, Exception) else "interrupted"
                self._settle(manifest, complete=False, reason="" if certain else reason)
                raise
            self._settle(manifest, complete=True)

    def _is_there(self, manifest: Manifest) -> None:
        """Its manifest is on its device."""
        self._synced[manifest.id] = True
        self._note_begin(manifest)

    def _note_begin(self, complete: Manifest) -> None:
        """Notes what a save gives up once more, where that is new: its manifest may be damaged later,
        and a restart would take for the newest what it gave up."""
        if complete.abandoned in ((), self._told):
            return
        try:
            there = self.branch()
            older = there is None or there.sequence < complete.sequence
            if older and (there is None or there.abandoned != complete.abandoned):
                begun = Branch(complete.sequence, complete.abandoned, complete.step, complete.id)
                self.note_branch(dataclasses.replace(begun, before=there))
            self._told, self._untold = complete.abandoned, False
        except (Error, OSError) as error:
            if not self._untold:  # else it was said of a save before
                self._untold = True
                words = "only the manifests of step %d and later ones say where they go on: %s"
                _log.warning(words, complete.step, error)

    def confirm(self, manifest: Manifest) -> None:
        """Makes a manifest that was found durable, which a rename alone does not.

        Its owner writes it anew: where an fsync has failed, another one may succeed and write nothing.

        Raises:
            PeerError, IoError: a power cut may lose it.
        """
        if self._synced.get(manifest.id) and manifest.id not in self._marked:
            return
        directory = self.directory(manifest.step)
        with self._changing, io_errors("sync the checkpoint in", directory):
            if self._synced.get(manifest.id):
                if self._lock is not None:
                    self._settle(manifest, complete=True)
                return
            if self._lock is not None:
                self.check_owned()
                found = self._read_each(manifest.step, (_MANIFEST, _aside(manifest.id)))
                its = (entry.name for entry in self._counting(found) if entry.id == manifest.id)
                path = directory / next(its, _aside(manifest.id))  # gone: the read says so
                self._rewrite(path, manifest.id)
            elif manifest.id in self._synced:
                raise OSError(errno.EIO, "an fsync of it has failed before")
            elif (doubt := self._doubt(manifest)) is not None:
                # This process's fsync may write nothing after one of rank 0's that failed.
                raise OSError(errno.EIO, doubt or "rank 0 has not synced it yet")
            else:
                sync_directory(directory)
            sync_directory(self._path)
            self._synced[manifest.id] = True
            if self._lock is not None:
                self._settle(manifest, complete=True)

    def _rewrite(self, path: Path, id: str) -> None:
        """Makes the rename of a manifest durable by another one.

        Where no new bytes are taken an fsync does, unless one has failed in this process: else nothing
        that is there would count, and no fast copy could make room.
        """
        data, before, failed = path.read_bytes(), _identity(path), id in self._synced
        self._synced[id] = False
        try:
            _write_durably(path, data)
        except OSError as error:
            if failed or not is_full(error) or _identity(path) != before:
                raise
            _sync(path, os.O_RDONLY)
            sync_directory(path.parent)

    def is_durable(self, manifest: Manifest) -> bool:
        """Whether a manifest that was found is, or could be made so."""
        with contextlib.suppress(Error, OSError):
            self.confirm(manifest)
            return True
        return False

    def note_branch(self, branch: Branch) -> None:
        """Makes the begin of a branch durable, unless a later one is noted already.

        The threads of a drain and of a restore may do so at the same time.
        """
        with self._changing, io_errors("note the branch in", self.root):
            self.check_owned()
            there = None
            with contextlib.suppress(Error):  # what cannot be read is of an earlier job
                there = self.branch()
            if there is None or there.sequence < branch.sequence:
                _write_durably(self._path / _BRANCH, branch.to_bytes())

    def note_sequence(self, number: int) -> None:
        """Notes durably that a job numbers its saves from there."""
        with io_errors("note the numbers of this job's saves in", self.root):
            try:
                _write_durably(self._path / _SEQUENCE, b"%d" % number)
            finally:  # what failed may be there all the same
                self._noted = self._number()

    def remove(self, step: int, id: str) -> None:
        """One save: the manifest first, so that a checkpoint is never half there."""
        self.check_owned()
        directory = self.directory(step)
        with self._changing, io_errors("remove the checkpoint in", directory):
            names = self._names(step)
            entries = self._read_each(step, dict.fromkeys([*_manifests_in(names), _aside(id)]))
            for entry in entries:
                entry.refuse_unread()  # it may name the parts
            its = [entry for entry in entries if entry.id == id]
            ours = {m[0] for m in map(_OURS.fullmatch, names) if m and m["id"] == id}
            _take_away(directory, [entry.name for entry in its], _parts_of(its) | ours)
            self._synced.pop(id, None)
            self._marked.discard(id)
            self._leave(step)

    def _begun_by(self, entries: Iterable[Entry]) -> Branch | None:
        """The note of a branch, if one of these saves has left it. That of a restore has a number of
        its own."""
        there = None
        with contextlib.suppress(CorruptionError):
            there = self.branch()
        its = {(e.id, e.manifest.sequence) for e in entries if e.manifest is not None}
        return there if there is not None and (there.id, there.sequence) in its else None

    def _leave(self, step: int) -> None:
        """Removes a step's directory if nothing is in it, and nothing is about to be."""
        with self._changing, contextlib.suppress(OSError):
            if step not in self._in_use:
                os.rmdir(self.directory(step))

    def remove_step(self, step: int) -> None:
        """All saves of a step, damaged ones too, and the note of a branch that one of them has begun:
        this is how they are undone. What else is there stays."""
        directory = self.directory(step)
        with self._changing, io_errors("remove the checkpoint in", directory):
            names = self._names(step)
            entries = self._read_each(step, _manifests_in(names))
            ours = set(filter(_OURS.fullmatch, names))
            if (begun := self._begun_by(entries)) is not None:
                # First: alone it would give up all that it names.
                if begun.before is not None:
                    _write_durably(self._path / _BRANCH, begun.before.to_bytes())
                else:
                    _unlink([self._path / _BRANCH])
                    sync_directory(self._path)
            _take_away(directory, [entry.name for entry in entries], _parts_of(entries) | ours)
            self._leave(step)

    def discard(self, step: int, name: str) -> None:
        """Removes a part that no checkpoint will name, and the directory if nothing else is there."""
        if self._ended:
            return  # the next job may write a part of that name
        directory = self.directory(step)
        with contextlib.suppress(OSError):
            os.unlink(directory / name)
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
        deadline = time.monotonic() + timeout
        if rank == 0:
            return self._gather(manifest, mine, deadline, stopped)
        if mine is not None:
            note = {"failed": mine} if isinstance(mine, str) else mine.to_dict()
            if reason := self._leave_word(manifest, rank, json.dumps(note).encode()):
                return reason
        within, pause, look, listen = f"in {timeout:g} s", self._look_seconds, 0.0, 0.0
        last = False
        while not last:
            if stopped():
                within, last = "before this job's end", True
            now = time.monotonic()
            last = last or now >= deadline + GRACE_SECONDS
            if now >= look or last:  # what was decided by the end counts
                with contextlib.suppress(UnreachableError):
                    if (decided := self._decided(manifest, rank, mine)) is not None:
                        return decided
                    if mine is None and (now >= listen or last):
                        # Rank 0 does not wait for this one: it may have retired the checkpoint since. A
                        # newer one of another job says only that this job has lost the store.
                        run, number = _save_of(manifest.id)
                        saves = (_save_of(m.id) for m in self.manifests())
                        if any(one[0] == run and one[1] > number for one in saves):
                            return ""
                        every = min(_LONGEST_LOOK_SECONDS, manifest.world_size / _NEWER_PER_SECOND)
                        listen = now + max(LOOK_SECONDS, every)
                look, pause = now + pause, min(2 * pause, self._longest_pause(manifest))
            if not last:
                time.sleep(self._look_seconds)
        reason = f"rank 0 did not complete step {manifest.step} in {self.root} {within}"
        reason += self._why_late(manifest, rank)
        return self._give_up(manifest, rank, mine, reason)

    def _gather(
        self,
        manifest: Manifest,
        mine: Part | str | None,
        deadline: float,
        stopped: Callable[[], bool],
    ) -> str:
        """Rank 0's side."""
        writers = [0] if manifest.replicated else list(range(manifest.world_size))
        parts = {0: mine} if isinstance(mine, Part) else {}
        reason = f"rank 0: {mine}" if isinstance(mine, str) else self._hold(manifest)
        away = ""
        while (late := [rank for rank in writers if rank not in parts]) and not reason:
            try:
                for rank, word in self._words(manifest, late):
                    try:
                        note: dict[str, Any] = json.loads(word)
                        if "failed" in note:
                            reason = f"rank {rank}: {note['failed']}"
                            break
                        parts[rank] = Part.from_dict(note)
                    except (ValueError, KeyError, TypeError) as error:
                        reason = f"rank {rank}: its word cannot be read: {error}"
                        break
            except UnreachableError as error:
                away = f": {error}"
            except OSError as error:
                reason = str(error)
            late = [rank for rank in late if rank not in parts]
            if late and not reason:
                if stopped():
                    reason = "stopped"
                elif time.monotonic() > deadline:
                    reason = f"ranks {late} did not finish their part in time{away}"
                    reason += self._why_late(manifest, 0)
                shared = len(late) / _WORDS_PER_SECOND
                time.sleep(min(self._longest_look, max(self._look_seconds, shared)))
        if reason:
            self.abort(manifest, reason)
            return reason
        try:
            self.publish(dataclasses.replace(manifest, parts=tuple(parts[r] for r in writers)))
        except Exception as error:  # the other ranks wait for a decision
            certain, reason = False, words_of(error)
            with contextlib.suppress(Error, OSError):
                certain = self.lacks(manifest)
            if certain:
                self.abort(manifest, reason)
                return reason
            self._decide(manifest, complete=False, certain=False, reason=reason)
            raise
        self._decide(manifest, complete=True, certain=True, reason="")
        with contextlib.suppress(Error, OSError):
            self._forget_words(manifest, [rank for rank in writers if rank])
        self._forget_given_up(manifest)
        return ""

    def _why_late(self, manifest: Manifest, rank: int) -> str:
        """Whether ranks count their saves differently: then no save of another one is this one."""
        run, number = _save_of(manifest.id)
        with contextlib.suppress(Error, OSError):
            found = [m for m in map(_OURS.fullmatch, self._names(manifest.step)) if m is not None]
            # What rank 0 has decided of an earlier save of this step stays a while.
            kind, least = ("part-", 0) if rank == 0 else ("aborted.", number + 1)
            saves = [_save_of(m["id"]) for m in found if m[0].startswith(kind)]
            if any(one == run and other != number and other >= least for one, other in saves):
                return "; it is there by another number of save: all ranks must make the same calls"
        return ""

    def abort(self, manifest: Manifest, reason: str) -> None:
        """Notifies ranks that go on with a checkpoint that it will not be completed."""
        self._decide(manifest, complete=False, certain=True, reason=reason)
        if manifest.world_size > 1:
            given_up = self._given_up.setdefault(threading.get_ident(), [])
            given_up.append((manifest.step, manifest.id))

    def _forget_given_up(self, complete: Manifest) -> None:
        """Removes what saves have left that this thread gave up before this complete one.

        Ranks are past them: they commit in the same order, and have left word of this one. Those
        without a part leave none, so the last few stay for them.
        """
        given_up = self._given_up.get(threading.get_ident(), [])
        stay = _LATE_SAVES if complete.replicated else 0
        due = given_up[: max(0, len(given_up) - stay)]
        again: list[tuple[int, str]] = []
        for save in due:
            if len(again) >= _FAILED_REMOVALS:  # each may take long
                again.append(save)
                continue
            try:
                self._forget(*save)
            except (Error, OSError):
                again.append(save)
        given_up[: len(due)] = again[_FAILED_REMOVALS:] + again[:_FAILED_REMOVALS]

    # How a rank's word gets to rank 0, and what it decides to the others; another store has its own.

    def _longest_pause(self, manifest: Manifest) -> float:
        """Between two looks for rank 0's decision: seconds."""
        shared = manifest.world_size / self._looks_per_second
        return min(self._longest_look, max(self._look_seconds, shared))

    def _leave_word(self, manifest: Manifest, rank: int, word: bytes) -> str:
        """Why it cannot be left, so that rank 0 completes nothing; or "": it is there, or was taken."""
        directory = self.directory(manifest.step)
        try:
            with io_errors("leave word in", directory):
                self.check_owned()
                _tell(self._note(manifest, rank), word)
        except IoError as error:
            return self._take_back(manifest, rank, str(error), left=False)
        return ""

    def _words(self, manifest: Manifest, ranks: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """What those of the ranks say that have left word."""
        for rank in ranks:
            # One of both has the word from here on: rank 0, or the rank that gives up. What is taken
            # already was so by a rename whose answer was lost.
            note, taken = self._note(manifest, rank), self._taken(manifest, rank)
            with io_errors(f"take the word of rank {rank},", note):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(note, taken)
                try:
                    word = taken.read_bytes()
                except FileNotFoundError:
                    continue
            yield rank, word

    def _forget_words(self, manifest: Manifest, ranks: Iterable[int]) -> None:
        _unlink(self._taken(manifest, rank) for rank in ranks)

    def _hold(self, manifest: Manifest) -> str:
        """Leaves the mark by which a manifest counts for no other rank yet, or says why it cannot."""
        try:
            if manifest.world_size > 1:
                self._mark(manifest)
        except (Error, OSError) as error:
            return str(error)
        return ""

    def _mark(self, manifest: Manifest) -> None:
        """It is there before a word is taken, and goes once the manifest is on its device: one rank
        syncs the directory for all of them."""
        mark = self._taken(manifest, 0)
        with io_errors("write", mark):
            self.check_owned()
            self._marked.add(manifest.id)
            mark.write_bytes(b"")

    def _forget(self, step: int, id: str) -> None:
        """Removes the words and the decision of a save; its parts are for others to remove.

        The mark stays beside a copy that was made since: `confirm` removes it.
        """
        notes = "part-", "taken-", "aborted."
        copy = self.find(step, id)
        stays = self._taken(copy, 0).name if copy is not None else ""
        ours = [m for m in map(_OURS.fullmatch, self._names(step)) if m and m["id"] == id]
        _unlink(
            self.directory(step) / m[0] for m in ours if m[0].startswith(notes) and m[0] != stays
        )
        self._leave(step)

    def _decide(self, manifest: Manifest, *, complete: bool, certain: bool, reason: str) -> None:
        """Notifies the other ranks; of a complete checkpoint its manifest does, without the mark."""
        if manifest.world_size > 1:
            if certain and not complete:
                with contextlib.suppress(Error, OSError):
                    self.check_owned()
                    _tell(self._abort(manifest), json.dumps(reason).encode())
                reason = ""
            self._settle(manifest, complete=complete, reason=reason)

    def _settle(self, manifest: Manifest, *, complete: bool, reason: str = "") -> None:
        """Removes the mark of a save that is `complete`, or is not there; else says in it the `reason`
        why that is not known. Where it cannot, `confirm` tries again."""
        mark = self._taken(manifest, 0)
        with self._changing, contextlib.suppress(Error, OSError):
            self._marked.add(manifest.id)  # an earlier job's, it may be
            # What failed after it was on its device, or was made again since, is complete.
            if complete or (reason and self._synced.get(manifest.id)):
                self._lift(mark)
            else:
                self.check_owned()
                if reason:
                    _tell(mark, json.dumps(reason).encode())
                    return
                _unlink([mark])
            self._marked.discard(manifest.id)

    def _lift(self, mark: Path) -> None:
        """Removes the mark of a complete save, or says in it that it is complete."""
        for _ in range(_LIFTS):
            with contextlib.suppress(OSError):
                self.check_owned()
                _unlink([mark])
                return
            time.sleep(self._look_seconds)
        self.check_owned()
        _tell(mark, json.dumps(True).encode())

    def _decided(self, manifest: Manifest, rank: int, mine: Part | str | None) -> str | None:
        """What `commit` returns or raises, once rank 0 has decided."""
        complete = not isinstance(mine, str) and self._completed(manifest, rank, mine is not None)
        return "" if complete else self.aborted(manifest)

    def _completed(self, manifest: Manifest, rank: int, left: bool) -> bool:
        """Whether rank 0 has made the checkpoint complete; `left`: of this rank's word, too.

        Raises:
            PeerError: it does not know.
        """
        try:
            if self.find(manifest.step, manifest.id) is None:
                return False
        except IoError:  # the next look may tell
            return False
        # Rank 0 takes all words first: a manifest beside one is of before, and lacks parts. Opening
        # the file looks on the server, also where a client caches names.
        with contextlib.suppress(FileNotFoundError):
            if left:
                with self._note(manifest, rank).open():
                    return False
        if doubt := self._doubt(manifest):
            raise part_stays(doubt, rank)
        return doubt is None

    def _doubt(self, manifest: Manifest) -> str | None:
        """Why rank 0 does not know whether the manifest is on its device; "" while it is about to see,
        None where it has left no mark, or says in it that the save is complete."""
        try:
            word = self._taken(manifest, 0).read_bytes()
        except FileNotFoundError:
            return None
        said = json.loads(word or b'""')
        return None if said is True else str(said)

    def _give_up(self, manifest: Manifest, rank: int, mine: Part | str | None, reason: str) -> str:
        """The end of a rank's wait: `reason`, or PeerError where rank 0 may still complete it."""
        return self._take_back(manifest, rank, reason, left=mine is not None)

    def _take_back(self, manifest: Manifest, rank: int, reason: str, *, left: bool) -> str:
        """Takes a rank's word back; what rank 0 has taken by then stands.

        Of a word that may not have been left (not `left`) "" says that rank 0 has it: the answer alone
        was lost.
        """
        note, taken = self._note(manifest, rank), self._taken(manifest, rank)
        with io_errors("take a word back from", note.parent):
            try:
                os.unlink(note)
            except FileNotFoundError:
                # Rank 0 has it, or over NFS the answer was lost: a word that was left is not there
                # by itself. A listing is newer than what a client has cached of a single name.
                if left:
                    raise part_stays(reason, rank) from None
                if taken.name in self._names(manifest.step):
                    return ""
                # Rank 0 removes what it has taken once the checkpoint is complete.
                found = self.find(manifest.step, manifest.id)
                if found is not None and any(part.rank == rank for part in found.parts):
                    return ""
        return reason

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


def _aside(id: str) -> str:
    """The manifest of a save whose step was saved again on another branch."""
    return f"manifest-{id}.json"


def _manifests_in(names: Iterable[str]) -> list[str]:
    """Of what is in a step's directory the names that manifests have, that of the newest save first."""
    aside = [n for n in names if n.startswith("manifest-") and n.endswith(".json")]
    return [_MANIFEST, *sorted(filter(_OURS.fullmatch, aside))]


def _parts_of(entries: Iterable[Entry]) -> set[str]:
    """The parts that manifests name."""
    return {p.name for e in entries if e.manifest is not None for p in e.manifest.parts}


def _save_of(id: str) -> tuple[str, int]:
    """The job of a save, and the number of the save in that job; -1 of others' ids."""
    run, _, number = id.partition("-")
    return run, int(number) if number.isdecimal() else -1


def part_stays(reason: str, rank: int) -> PeerError:
    """What a rank raises that no longer waits, and whose part may become one of a checkpoint."""
    return PeerError(f"{reason}; it may still, so rank {rank}'s part stays")


def part_name(rank: int, id: str, copy: int = 0) -> str:
    """Of a rank's file in one save, or in a copy of it with that number."""
    more = f".{copy}" if copy else ""
    return f"rank-{rank:05d}.{id}{more}.safetensors"
