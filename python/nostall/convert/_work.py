"""The common part of conversions: the unfinished folder, read-ahead, checksums, the final name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nostall.base._locks import free_lock, is_named, take_lock
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._records import CLASSES_FILE
from nostall.source._source import ImageFolder, Source
from nostall.source._views import View

#: Called with "writing" or "verifying" and the number of samples so far.
Progress = Callable[[str, int], object]

_log = logging.getLogger("nostall")

_FORMAT = 2
_STATE = "nostall-convert.json"
_SUMS = "nostall-convert.crc32"
_READ = struct.Struct("<Iq")  # of each sample, in its place: the CRC32, the time of its file
_IN_FLIGHT = 4  # samples a thread

_T = TypeVar("_T")


@dataclass(frozen=True)
class Converted:
    """What a conversion left: the folder, its samples and bytes, and how many samples an earlier
    run that ended early had already written."""

    path: Path
    samples: int
    total_bytes: int
    resumed_at: int


class Work:
    """The folder ``DEST.partial`` of one conversion, held by one process at a time.

    It has the record of what is converted how, and of every sample as it was read from the source the
    CRC32, and the time of its file, written before the sample counts as done.

    Args:
        source: what is converted.
        dest: the folder to be made.
        threads: threads that read ahead.
        options: whatever the bytes written depend on.

    Raises:
        UsageError: `dest` exists or lies in a folder of images that is converted, another process
            works on it, an earlier conversion of something else was left there, `threads` is no
            number of at least 1, or labels are floating-point numbers.
        IoError: the disk has too little room for the samples.
    """

    def __init__(
        self, source: Source, dest: str | os.PathLike[str], threads: int, options: dict[str, Any]
    ) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise UsageError(f"threads must be a number of at least 1, not {threads!r}")
        if len(source) == 0:
            raise UsageError(f"{source!r} has no samples to convert")
        _check_fields(source)
        if source.labels.dtype.kind == "f":
            raise UsageError(
                f"{source!r} has floating-point labels, which the new format cannot hold"
            )
        self.source = source
        self.dest = Path(dest).absolute()
        self._threads = threads
        if isinstance(source, ImageFolder) and self.dest.resolve().is_relative_to(
            Path(source.root).resolve()
        ):
            raise UsageError(
                f"{self.dest} lies in {source.root}, which is converted: convert to another place"
            )
        self.folder = self.dest.with_name(self.dest.name + ".partial")
        # A sample that is a file is described by its path; the others lie in files that have one stamp.
        parts = _parts_of(source)
        others = [part for part in parts if not os.path.isfile(part.describe(0))]
        self._has_files = len(others) < len(parts)
        self._state = {
            **options,
            "format": _FORMAT,
            "source": f"{source.fingerprint:016x}",
            "stamps": _digest([part.native.stamp for part in others]),
            "samples": len(source),
        }
        self._sums = -1
        self._lock = -1
        self._made = False
        self._pool = ThreadPoolExecutor(threads)  # its threads start when samples are read

    def __enter__(self) -> Work:
        self._refuse_existing()
        try:
            self._made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            self._sums = os.open(self.folder / _SUMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._close()
            if isinstance(error, IoError):
                raise
            raise self.failure(error) from error
        except BaseException:
            self._close()
            raise
        return self

    def _refuse_existing(self) -> None:
        if self.dest.exists():
            raise UsageError(f"{self.dest} exists already: remove it, or convert to another place")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._pool.shutdown(cancel_futures=True)
            if kind is not None:
                self._remove_if_unused()
        finally:
            self._close()

    def _remove_if_unused(self) -> None:
        """Of a conversion that was refused before its first sample nothing is left."""
        own = {_STATE, _SUMS}
        with contextlib.suppress(OSError):
            if os.fstat(self._sums).st_size == 0 and set(os.listdir(self.folder)) <= own:
                for name in own:
                    (self.folder / name).unlink()
                self.folder.rmdir()

    def _close(self) -> None:
        if self._lock >= 0:
            free_lock(self._lock)
        for descriptor in (self._sums, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._sums = self._lock = -1

    def _claim(self) -> None:
        path = self.folder / _STATE
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held = take_lock(self._lock)
        if held is None:
            _log.warning(
                "%s: its file system has no locks: no second process may convert to it", self.folder
            )
        elif not held or not is_named(self._lock, path):
            self._refuse_existing()
            raise UsageError(f"another process is converting to {self.dest}")
        text = json.dumps(self._state, sort_keys=True)
        found = os.pread(self._lock, 1 << 16, 0).decode(errors="replace")
        if not found:
            try:
                self._begin(text)
            except (OSError, UsageError):
                # A part of it would be taken for another conversion's. NFS keeps an open file's folder.
                with contextlib.suppress(OSError):
                    path.unlink()
                    if self._made:
                        self.folder.rmdir()
                raise
        elif found != text:
            whose = "of another data set, of another state of this one, or with other options"
            if _format_of(found) != _FORMAT:
                whose = "by another release of nostall"
            raise UsageError(
                f"{self.folder} is left from a conversion {whose}: remove it, then start again"
            )

    def _begin(self, text: str) -> None:
        """Writes the record of a conversion that begins."""
        self._refuse_existing()  # another process may have come to its end meanwhile
        if any(p.name != _STATE for p in self.folder.iterdir()):
            raise UsageError(f"{self.folder} holds something else: remove it, then start again")
        os.pwrite(self._lock, text.encode(), 0)
        os.fsync(self._lock)

    def check_room(self, written: int) -> None:
        """Refuses a conversion for which the disk is too small; `written` bytes are there already.

        Raises:
            IoError: the samples alone need more than the disk has.
        """
        free = shutil.disk_usage(self.folder).free
        needed = self.source.total_bytes - written
        if needed > free:
            raise IoError(
                errno.ENOSPC,
                f"{self.dest} needs {needed} bytes more, its disk has {free}: free some, or convert "
                "to another disk",
            )

    def failure(self, error: OSError) -> IoError:
        """The error to raise where writing failed."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return IoError(
                errno.ENOSPC,
                f"the disk of {self.dest} is full: free some room and start the same conversion "
                f"again, it goes on with what is in {self.folder}",
            )
        return IoError(
            error.errno or errno.EIO, f"cannot write {self.folder}: {error.strerror or error}"
        )

    # ------------------------------------------------------------------ samples

    def samples(self, wanted: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(id, bytes) of the samples, read ahead; their checksums and times are kept."""

        def read(sample: int) -> tuple[int, bytes]:
            time = self._time(sample)  # first: what changes meanwhile counts as changed
            data = self.source.read(sample)
            os.pwrite(self._sums, _READ.pack(zlib.crc32(data), time), _READ.size * sample)
            return sample, data

        return self._ahead(read, wanted)

    def check_unchanged(self, written: Sequence[int]) -> None:
        """Refuses to go on where the file of a sample that is written was changed since.

        Raises:
            UsageError: one was, with its path.
        """
        if not self._has_files or not len(written):
            return

        def check(sample: int) -> None:
            if self._time(sample) != self._kept(sample)[1]:
                raise UsageError(
                    f"{self.source.describe(sample)} has changed since {self.folder} got it: remove "
                    f"{self.folder}, then start again"
                )

        for _ in self._ahead(check, written):
            pass

    def _time(self, sample: int) -> int:
        """When the file that is the sample was changed last; 0 for others."""
        if not self._has_files:
            return 0
        try:
            return os.stat(self.source.describe(sample)).st_mtime_ns
        except OSError:
            return 0

    def _kept(self, sample: int) -> tuple[int, int]:
        """The CRC32 of a sample as it was read, and the time of its file then.

        Raises:
            CorruptionError: they are not there.
        """
        kept = os.pread(self._sums, _READ.size, _READ.size * sample)
        if len(kept) != _READ.size:
            raise CorruptionError(f"{self.folder / _SUMS} was cut: remove {self.folder}")
        crc, time = _READ.unpack(kept)
        return crc, time

    def _ahead(self, work: Callable[[int], _T], items: Sequence[int]) -> Iterator[_T]:
        """work(item) in order, by threads that are a few items ahead."""
        pending: deque[Future[_T]] = deque()
        for item in items:
            pending.append(self._pool.submit(work, item))
            if len(pending) >= _IN_FLIGHT * self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def sums_written(self) -> None:
        """Returns once the checksums so far are on the disk."""
        os.fsync(self._sums)

    def verify(self, result: Source, progress: Progress | None) -> None:
        """Reads every sample of `result` and compares it with what the source had.

        Raises:
            CorruptionError: a sample, a label or the number of samples differs.
        """
        n = len(self.source)
        if len(result) != n:
            raise CorruptionError(f"{self.folder} has {len(result)} samples instead of {n}")
        if not np.array_equal(result.labels, self.source.labels):
            raise CorruptionError(f"{self.folder} has other labels than {self._name()}")

        def check(sample: int) -> int:
            found, read = zlib.crc32(result.read(sample)), self._kept(sample)[0]
            if found != read:
                raise CorruptionError(
                    f"{result.describe(sample)} is not what was read from "
                    f"{self.source.describe(sample)} (CRC32 {found:08x} instead of "
                    f"{read:08x}): the disk or its memory is at fault; remove "
                    f"{self.folder}, then start again"
                )
            return sample

        for done, _ in enumerate(self._ahead(check, range(n)), 1):
            if progress:
                progress("verifying", done)

    def finish(self, leave_out: Iterable[str] = ()) -> None:
        """Gives the folder its final name, then takes the conversion's own files away: one that is cut
        off before the name goes on.

        Raises:
            IoError: it cannot have that name, or the disk is full or fails.
        """
        try:
            if classes := getattr(self.source, "classes", None):
                write_new(self.folder / CLASSES_FILE, json.dumps(list(classes)).encode())
            for name in leave_out:
                (self.folder / name).unlink(missing_ok=True)
            sync_folder(self.folder)
        except OSError as error:
            raise self.failure(error) from error
        try:
            os.rename(self.folder, self.dest)
        except OSError as error:
            first = "move away what is there, then " * os.path.lexists(self.dest)
            raise IoError(
                error.errno or errno.EIO,
                f"{self.folder} is complete, and cannot be named {self.dest}: {error.strerror}: "
                f"{first}start the same conversion again",
            ) from error
        for name in (_SUMS, _STATE):
            (self.dest / name).unlink()
        sync_folder(self.dest.parent)

    def _name(self) -> str:
        return str(getattr(self.source, "root", "the source"))


def _parts_of(source: Source) -> list[Source]:
    """The sources that hold samples of this one."""
    if not isinstance(source, View):
        return [source]
    ends = np.cumsum([len(part) for part in source.parts])
    return [
        source.parts[i] for i in np.unique(np.searchsorted(ends, source.native.numbers, "right"))
    ]


def _digest(stamps: list[int]) -> str:
    """Of fixed length, whatever the number of parts."""
    return hashlib.sha256(np.array(stamps, "<u8").tobytes()).hexdigest()


def _format_of(state: str) -> object:
    """Of the record of a conversion; earlier releases wrote none."""
    try:
        found = json.loads(state)
    except ValueError:
        return _FORMAT  # cut: of no release
    return found.get("format") if isinstance(found, dict) else None


def _check_fields(source: Source) -> None:
    """Refuses samples that are not one field and its label, as a record of images and labels is."""
    if source.item_maker is not None:
        raise UsageError(
            f"{source!r} has items of Python's, which are in no file: not to be written"
        )
    if source.pixels is not None:
        raise UsageError(
            f"{source!r} has pixels without a format of images, whose shape is in no record: not to be "
            "written"
        )
    if source._pairs:
        return
    names = list(source.schema)
    try:
        has_labels = "label" in names and len(source.labels) == len(source)
    except UsageError:  # they are no column
        has_labels = False
    if not has_labels or len(names) != 2 or not source.sizes.any():
        raise UsageError(
            f"{source!r} has samples of {', '.join(names)}: written are one field of files and the "
            'labels, a column named label; .select(["image", "label"]) leaves others of files and '
            "columns out, and record stores open as images and labels without members="
        )


def write_new(path: Path, data: bytes) -> None:
    """Writes a small file and returns once it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Returns once the names in `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no such call
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Drops the kernel's copy of the file, so that it is read back from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
