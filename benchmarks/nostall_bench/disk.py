"""Disks: forgetting what is cached, watching activity each second, and how fast they are at most."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_SECTOR = 512


def device_of(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """The block device that a path lies on; None for one without (FUSE, NFS, memory)."""
    number = Path(path).stat().st_dev
    device = os.major(number), os.minor(number)
    return device if _counters(device) is not None else None


def _counters(device: tuple[int, int]) -> tuple[int, int] | None:
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == device:
            return int(fields[5]) * _SECTOR, int(fields[9]) * _SECTOR
    return None


def cgroup_of() -> Path | None:
    """The file that counts the bytes of this process's cgroup by device; None where there is none.

    Version 2's ``io.stat`` or version 1's ``blkio.throttle.io_service_bytes``.
    """
    version_2 = version_1 = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version_2 = group
        elif "blkio" in controllers.split(","):
            version_1 = group
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if version_2 is not None:
            file = Path(mount + version_2.rstrip("/"), "io.stat")
            if file.is_file():
                return file
    if version_1 is not None:
        home = "/sys/fs/cgroup/blkio" + version_1.rstrip("/")
        file = Path(home, "blkio.throttle.io_service_bytes")
        if file.is_file():
            return file
    return None


def cgroup_counters(file: Path, device: tuple[int, int]) -> tuple[int, int]:
    """Bytes that the cgroup has read from and written to the device."""
    name = f"{device[0]}:{device[1]}"
    read = wrote = 0
    for line in file.read_text().splitlines():
        fields = line.split()
        if len(fields) < 2 or fields[0] != name:
            continue
        if fields[1] == "Read":
            read = int(fields[2])
        elif fields[1] == "Write":
            wrote = int(fields[2])
        values = dict(f.split("=", 1) for f in fields[1:] if "=" in f)
        read, wrote = int(values.get("rbytes", read)), int(values.get("wbytes", wrote))
    return read, wrote


class Activity:
    """Samples what a disk reads and writes, as dstat does; a context manager.

    `rows` holds (seconds since the start, bytes read a second, bytes written a second, the same two of
    this process's cgroup or None). The first two count the whole machine: others' work on the disk is
    in them; the cgroup's count this container's alone, where the kernel counts by cgroup.
    """

    def __init__(self, device: tuple[int, int], period: float = 1.0) -> None:
        self.rows: list[tuple[float, float, float, float | None, float | None]] = []
        self._device = device
        self._cgroup = cgroup_of()
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Activity:
        self._before = self._counters()
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _counters(self) -> tuple[int, ...] | None:
        disk = _counters(self._device)
        if disk is None or self._cgroup is None:
            return disk
        try:
            return (*disk, *cgroup_counters(self._cgroup, self._device))
        except OSError:
            return disk

    def _watch(self) -> None:
        began = last = self._began
        before = self._before
        while before is not None:
            done = self._stop.wait(self._period)
            now, after = time.monotonic(), self._counters()
            if after is None:
                return
            length = max(now - last, 1e-9)
            rates = [(a - b) / length for a, b in zip(after, before, strict=False)]
            own = (rates[2], rates[3]) if len(rates) == 4 else (None, None)
            self.rows.append((now - began, rates[0], rates[1], *own))
            last, before = now, after
            if done:
                return


def forget(files: Iterable[str | os.PathLike[str]], drop_caches: bool = False) -> str:
    """Makes the next reads of the files come from the device, as far as this process may.

    Returns:
        How it was done, in words.
    """
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages are kept otherwise
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not drop_caches:
        return "posix_fadvise(DONTNEED) on every file"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError as error:
        return f"posix_fadvise(DONTNEED); drop_caches is not allowed ({error.strerror})"
    return "posix_fadvise(DONTNEED) and drop_caches"


def sequential(
    directory: str | os.PathLike[str], size: int = 256 << 20, runs: int = 6
) -> tuple[float, float]:
    """Bytes a second of one large file written, and read, from its beginning to its end, past the page
    cache, in pieces of 1 MiB; written ones until they are on the device.

    Medians of `runs` - 1, because the first is warm-up [Chien 2018, table I]. Where the
    file system has no direct access, the cache is told to forget the file instead.
    """
    path = Path(directory, f".nostall-sequential-{os.getpid()}")
    block = 1 << 20
    wrote, read = [], []
    try:
        with mmap.mmap(-1, block) as buffer:
            buffer.write(os.urandom(block))
            for _ in range(runs):
                handle = _direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                began = time.perf_counter()
                for at in range(0, size, block):
                    os.pwritev(handle, [buffer], at)
                os.fsync(handle)
                wrote.append(size / (time.perf_counter() - began))
                os.close(handle)
            for _ in range(runs):
                forget([path])
                handle = _direct(path, os.O_RDONLY)
                began = time.perf_counter()
                got = 0
                while n := os.readv(handle, [buffer]):
                    got += n
                read.append(got / (time.perf_counter() - began))
                os.close(handle)
        return statistics.median(wrote[1:] or wrote), statistics.median(read[1:] or read)
    finally:
        path.unlink(missing_ok=True)


def _direct(path: Path, flags: int) -> int:
    """The file opened past the page cache, where its file system can."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
