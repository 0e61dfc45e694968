"""Where a store keeps its files, by step and name: what it needs of such a place, and directories.

`_store.py` decides what is written, completed and removed; a `Files` carries that out: in a directory
(`DirectoryFiles`) by calls of the operating system, on an object store (`_objects.py`) by requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nostall import _native
from nostall.checkpoint._format import Part
from nostall.errors import IoError, UsageError

_STEP = re.compile(r"step-(\d{12})")

_log = logging.getLogger("nostall")


class Url(str):
    """The place of an object, with the few names of pathlib that places are used by."""

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.rpartition("/")[0])

    def as_posix(self) -> str:
        return str(self)


Place = Path | Url
# The state of a file when it was read, where others may change it; None: there is no file.
Version = Any


class UnreachableError(IoError):
    """A store does not answer, or refuses to: nothing is known of what is there."""


class UnknownOutcomeError(UnreachableError):
    """Whether a write took place is not known, and it still may: what it names must stay."""


class ConflictError(IoError):
    """Something else is there than was read."""


@dataclass(frozen=True)
class Pacing:
    """How a copy stays out of the training's way (native/checkpoint/pace.h)."""

    rate: int = 0
    priority: _native.Priority = _native.Priority.normal
    gate: _native.Gate | None = None
    gate_patience: float = 1.0
    considerate: bool = False


class Copy(Protocol):
    """A checked copy of a part; hurry and stop come from other threads."""

    def run(self) -> object: ...
    def hurry(self) -> None: ...
    def stop(self) -> None: ...


class CheckedPart(Protocol):
    """A part that is read in runs of blocks (native/checkpoint/transfer.h, CheckedFile)."""

    @property
    def data(self) -> Any: ...
    def read(
        self,
        first: int,
        count: int,
        threads: int,
        progress: _native.Progress | None = None,
        address: int = 0,
    ) -> list[int]: ...


class Files(Protocol):
    """Files by step and name; those of step None belong to the whole store.

    What is written is there as a whole or not at all. Reading raises FileNotFoundError where there is
    no file. `look_seconds` is the time between two looks for what other ranks have left.
    """

    look_seconds: float

    @property
    def root(self) -> Place: ...
    def place(self, step: int) -> Place: ...
    def steps(self) -> list[int]: ...
    def names(self, step: int) -> list[str]: ...
    def sizes(self, step: int, names: Sequence[str]) -> dict[str, int | OSError]: ...
    def read(self, step: int | None, name: str) -> tuple[bytes, Version]: ...
    def write(self, step: int | None, name: str, data: bytes) -> None: ...
    def replace(self, step: int, name: str, data: bytes, before: Version) -> None:
        """Writes if the file is still what was read; raises ConflictError if it is not."""

    def unlink(self, step: int, names: Iterable[str]) -> None:
        """Removes files, all that can be; raises the first error."""

    def put_aside(self, name: str, new: str) -> None: ...
    def make(self) -> None: ...
    def make_step(self, step: int) -> None: ...
    def leave_step(self, step: int) -> None:
        """Removes the step's directory if it is empty."""

    def sync(self, step: int | None) -> None:
        """Makes names durable."""

    def take(self, step: int, word: str, taken: str) -> bytes:
        """Takes a rank's word, which the rank then cannot take back; FileNotFoundError before it is
        there."""

    def withdraw(self, step: int, word: str, taken: str, left: bool) -> bool:
        """Takes the own word back, if it was `left`; False if rank 0 has it, or may have it."""

    def waits(self, step: int, word: str) -> bool:
        """Whether a word has not been taken."""

    def own(self) -> None: ...
    def disown(self) -> None: ...
    def check_owned(self) -> None:
        """Raises PeerError if another job has taken the store since `own`."""

    def abort_uploads(self, ours: Callable[[str], bool]) -> None:
        """Gives up what an interrupted job was uploading to names that are `ours`."""

    def mark(self, token: str) -> None: ...
    def marked(self, tokens: Sequence[str]) -> list[int]:
        """The places of tokens in the list that are marked."""

    def unmark(self) -> None:
        """Removes all marks."""

    def copy(self, source: Path, step: int, name: str, part: Part, pacing: Pacing) -> Copy: ...
    def open(self, step: int, part: Part) -> CheckedPart: ...
    def check(
        self,
        step: int,
        part: Part,
        threads: int,
        progress: _native.Progress | None = None,
        priority: _native.Priority = _native.Priority.normal,
    ) -> list[int]:
        """The damaged blocks of a part."""


def step_name(step: int) -> str:
    """Of the directory of a step."""
    return f"step-{step:012d}"


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps whose directories are among the names, in order."""
    found = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


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


def make_directory(path: Path) -> None:
    """A directory whose name, and those of the parents that it needs, are durable."""
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


class DirectoryFiles:
    """A directory; its lock keeps other jobs away."""

    look_seconds = 0.02

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self._lock: _native.DirectoryLock | None = None

    def place(self, step: int | None) -> Path:
        return self.root if step is None else self.root / step_name(step)

    def steps(self) -> list[int]:
        with io_errors("list the checkpoints in", self.root):
            try:
                return steps_of(os.listdir(self.root))
            except FileNotFoundError:
                return []

    def names(self, step: int) -> list[str]:
        try:
            return sorted(os.listdir(self.place(step)))
        except OSError:  # none, or the manifest's own reading says why
            return []

    def sizes(self, step: int, names: Sequence[str]) -> dict[str, int | OSError]:
        found: dict[str, int | OSError] = {}
        for name in names:
            try:
                found[name] = (self.place(step) / name).stat().st_size
            except OSError as error:
                found[name] = error
        return found

    def read(self, step: int | None, name: str) -> tuple[bytes, Version]:
        try:
            return (self.place(step) / name).read_bytes(), None
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from None

    def write(self, step: int | None, name: str, data: bytes) -> None:
        _write_durably(self.place(step) / name, data)

    def replace(self, step: int, name: str, data: bytes, before: Version) -> None:
        self.write(step, name, data)  # the lock keeps others away

    def unlink(self, step: int, names: Iterable[str]) -> None:
        failed: OSError | None = None
        for name in names:
            try:
                os.unlink(self.place(step) / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def put_aside(self, name: str, new: str) -> None:
        with io_errors("put aside", self.root / new):
            rename(self.root / name, self.root / new)

    def make(self) -> None:
        with io_errors("make the directory", self.root):
            make_directory(self.root)

    def make_step(self, step: int) -> None:
        self.place(step).mkdir(exist_ok=True)

    def leave_step(self, step: int) -> None:
        with contextlib.suppress(OSError):  # the user's files are in it
            os.rmdir(self.place(step))

    def sync(self, step: int | None) -> None:
        sync_directory(self.place(step))

    def take(self, step: int, word: str, taken: str) -> bytes:
        # What is taken already was so by a rename whose answer was lost.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.place(step) / word, self.place(step) / taken)
        return (self.place(step) / taken).read_bytes()

    def withdraw(self, step: int, word: str, taken: str, left: bool) -> bool:
        try:
            os.unlink(self.place(step) / word)
        except FileNotFoundError:
            # Rank 0 has it, or over NFS the answer was lost: a word that was left is not there
            # by itself. A listing is newer than what a client has cached of a single name.
            return not (left or taken in self.names(step))
        return True

    def waits(self, step: int, word: str) -> bool:
        try:
            # Opening the file looks on the server, also where a client caches names.
            with (self.place(step) / word).open():
                return True
        except FileNotFoundError:
            return False

    def own(self) -> None:
        with io_errors("lock", self.root / ".lock"):
            lock = _native.DirectoryLock(str(self.root / ".lock"))
        got = lock.acquire()
        if got == _native.Locked.elsewhere:
            raise UsageError(
                f"{self.root} is used by another running job's checkpointer: give every job a "
                "directory of its own"
            )
        if got == _native.Locked.unsupported:
            _log.warning(
                "the file system of %s has no locks: nothing keeps another job from using it at the "
                "same time",
                self.root,
            )
        if got == _native.Locked.failed:
            with io_errors("lock", self.root / ".lock"):
                raise OSError(lock.error_number, os.strerror(lock.error_number))
        self._lock = lock

    def disown(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_owned(self) -> None:
        pass

    def abort_uploads(self, ours: Callable[[str], bool]) -> None:
        pass

    def mark(self, token: str) -> None:
        (self.root / f".run-{token}").touch()

    def marked(self, tokens: Sequence[str]) -> list[int]:
        return [i for i, token in enumerate(tokens) if (self.root / f".run-{token}").exists()]

    def unmark(self) -> None:
        for old in self.root.glob(".run-*"):
            old.unlink(missing_ok=True)

    def copy(self, source: Path, step: int, name: str, part: Part, pacing: Pacing) -> Copy:
        return _native.FileCopy(
            str(source),
            str(self.place(step) / name),
            part.size,
            list(part.crcs),
            rate=pacing.rate,
            priority=pacing.priority,
            gate=pacing.gate,
            gate_patience=pacing.gate_patience,
            considerate=pacing.considerate,
        )

    def open(self, step: int, part: Part) -> CheckedPart:
        return _native.CheckedFile(str(self.place(step) / part.name), part.size, list(part.crcs))

    def check(
        self,
        step: int,
        part: Part,
        threads: int,
        progress: _native.Progress | None = None,
        priority: _native.Priority = _native.Priority.normal,
    ) -> list[int]:
        path, crcs = self.place(step) / part.name, list(part.crcs)
        return _native.check_file(str(path), part.size, crcs, threads, progress, priority)
