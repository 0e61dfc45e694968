"""A shared file system as slow as it is told to be, over a directory of real files.

Each client is one mount with its own page cache, served by one ``nostall-slowfs`` daemon. Client i
moves at most `bandwidth` bytes/s; all together move at most `aggregate` bytes/s, through one token
bucket in shared memory. Each getattr, open, readdir and read takes `latency` more.

With `servers`, files are striped over so many disks that share `aggregate` equally, and a read that
does not begin where the last one of its disk ended takes `seek` longer there.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from nostall.errors import UsageError
from nostall_bench.programs import find_native

OPERATIONS = ("getattr", "open", "read", "readdir")
MAX_CLIENTS = 64
MAX_SERVERS = 64

# benchmarks/native/slowfs/page.h: 8 words of head, then 8 per client: its link, bytes, operations;
# then 8 per server: its link, head, seeks.
_WORD = 8
_HEAD = 8 * _WORD
_SLOWDOWN = 3 * _WORD
_CLIENT = 8 * _WORD
_SERVERS = _HEAD + MAX_CLIENTS * _CLIENT
_SERVER = 8 * _WORD
_PAGE_BYTES = _SERVERS + MAX_SERVERS * _SERVER
_START_SECONDS = 60.0
_CLOSED = 60.0  # seconds in which the files of a process that has ended are closed


def find_program() -> Path:
    """Path of ``nostall-slowfs``: beside the installed package, or in the checkout's build/dev.

    Raises:
        UsageError: it was not built, because libfuse3 was missing when nostall-bench was.
    """
    found = find_native("nostall-slowfs")
    if found:
        return found
    raise UsageError(
        "nostall-slowfs is not installed: install nostall-bench again where libfuse3's headers are "
        "(Debian: apt install libfuse3-dev pkg-config)"
    )


def missing() -> str | None:
    """What this machine lacks to mount a SlowFS, in one sentence; None if it has everything."""
    try:
        find_program()
    except UsageError as error:
        return str(error)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return (
            "/dev/fuse is absent or not accessible: load the fuse module, or give the container it"
        )
    if not shutil.which("fusermount3") and os.geteuid() != 0:
        return "fusermount3 is not installed (Debian: apt install fuse3)"
    return None


def add_keep_cache(parser: argparse.ArgumentParser) -> None:
    """The option --keep-cache of a benchmark that reads the same files in several epochs."""
    parser.add_argument(
        "--keep-cache",
        action="store_true",
        help="the kernel keeps what was read, as of data that fit into memory",
    )


def memory_words(keep_cache: bool) -> str:
    """What a result says of the memory that its storage leaves to loaders without one of their own."""
    if keep_cache:
        return "the kernel keeps what was read, as of data that fit into memory"
    return "no page cache, as of data larger than a client's memory (--keep-cache: with one)"


def require() -> None:
    """Raises UsageError if this machine cannot mount a SlowFS."""
    if reason := missing():
        raise UsageError(f"cannot emulate slow storage: {reason}")


def _unmount(mount: Path, lazily: bool) -> bool:
    """Whether the mount is gone; root needs no help of FUSE's program."""
    if shutil.which("fusermount3"):
        command = ["fusermount3", "-u", *(["-z"] if lazily else [])]
    else:
        command = ["umount", *(["-l"] if lazily else [])]
    return subprocess.run([*command, str(mount)], capture_output=True).returncode == 0


class SlowFS:
    """Mounts of one emulated shared file system; a context manager.

    Args:
        backing: directory with the real files; only read.
        mountpoint: directory made if absent; with several clients, their mounts are
            ``mountpoint/0``, ``mountpoint/1``, ...
        bandwidth: bytes/s of each client's link; 0 for no limit.
        aggregate: bytes/s of all clients together; 0 for no limit.
        latency: seconds added to every getattr, open, readdir and read.
        clients: number of mounts, at most 64.
        operations_per_second: of all clients together; 0 for no limit.
        servers: disks with a head each, at most 64; 0 for storage on which no read costs a seek.
        seek: seconds that a read takes longer if the head is elsewhere.
        stripe: bytes of a file on one server, before those on the next.
        keep_cache: let the kernel keep a file's pages between opens. Off by default: then each open
            forgets them, as if the data were larger than the memory of a client.
        ttl: seconds for which the kernel may reuse names and attributes.

    Raises:
        UsageError: the program, /dev/fuse or fusermount3 is missing, or a mount does not come up.
    """

    def __init__(
        self,
        backing: str | os.PathLike[str],
        mountpoint: str | os.PathLike[str],
        bandwidth: float = 0,
        aggregate: float = 0,
        latency: float = 0.0,
        clients: int = 1,
        *,
        operations_per_second: float = 0,
        servers: int = 0,
        seek: float = 0.0,
        stripe: int = 1 << 20,
        keep_cache: bool = False,
        ttl: float = 1.0,
    ) -> None:
        if not 1 <= clients <= MAX_CLIENTS:
            raise UsageError(f"clients must be 1 to {MAX_CLIENTS}, not {clients}")
        if not 0 <= servers <= MAX_SERVERS or stripe < 1:
            raise UsageError(
                f"servers must be 0 to {MAX_SERVERS} and stripe at least 1, not {servers}, {stripe}"
            )
        if min(bandwidth, aggregate, latency, operations_per_second, seek, ttl) < 0:
            raise UsageError(
                "bandwidth, aggregate, latency, operations, seek and ttl must not be negative"
            )
        self.backing = Path(backing).resolve()
        if not self.backing.is_dir():
            raise UsageError(f"{self.backing} is not a directory")
        self.mountpoint = Path(mountpoint).absolute()
        self.mounts = (
            [self.mountpoint]
            if clients == 1
            else [self.mountpoint / str(i) for i in range(clients)]
        )
        self.bandwidth = bandwidth
        self.aggregate = aggregate
        self.latency = latency
        self.keep_cache = keep_cache
        self._operations_per_second = operations_per_second
        self._servers, self._seek, self._stripe = servers, seek, stripe
        self._ttl = ttl
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._page: mmap.mmap | None = None
        self._page_path = Path()

    def __enter__(self) -> SlowFS:
        require()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="nostall-slowfs-", dir=memory)
        self._page_path = Path(name)
        os.ftruncate(handle, _PAGE_BYTES)
        self._page = mmap.mmap(handle, _PAGE_BYTES)
        os.close(handle)
        try:
            self._mount()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmounts everything, also where a daemon has died or files are still open."""
        self._unmount()
        if self._page is not None:
            self._page.close()
            self._page = None
            self._page_path.unlink(missing_ok=True)

    @property
    def daemons(self) -> list[int]:
        """Process ids of the daemons, in the order of `mounts`."""
        return [daemon.pid for daemon in self._daemons]

    @property
    def served_bytes(self) -> int:
        """Bytes handed to all clients since the start, read-ahead included."""
        return sum(self._word(_HEAD + i * _CLIENT + _WORD) for i in range(len(self.mounts)))

    @property
    def operations(self) -> dict[str, int]:
        """Operations of all clients since the start, by name."""
        return {
            name: sum(
                self._word(_HEAD + i * _CLIENT + (2 + op) * _WORD) for i in range(len(self.mounts))
            )
            for op, name in enumerate(OPERATIONS)
        }

    @property
    def seeks(self) -> int:
        """Reads of all clients since the start that found a head elsewhere."""
        return sum(self._word(_SERVERS + i * _SERVER + 2 * _WORD) for i in range(self._servers))

    def drop_caches(self) -> None:
        """Makes all client caches cold by mounting anew; the counters go on.

        Raises:
            UsageError: files are still open on a mount.
        """
        for mount in self.mounts:
            # The system closes files of io_uring a moment after their process has ended.
            deadline = time.monotonic() + _CLOSED
            while not _unmount(mount, lazily=False):
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{mount} is in use: close its files before dropping its caches"
                    )
                time.sleep(0.02)
        self._unmount()
        self._mount()

    def measure(self, clients: int | None = None, seconds: float = 0.4) -> list[float]:
        """The measured curve t(1..clients): bytes/s delivered to g clients that read at once.

        Real files are read whole in turn, by four threads per client, for `seconds` per point.
        """
        files = sorted(
            str(p.relative_to(self.backing)) for p in self.backing.rglob("*") if p.is_file()
        )
        if not files:
            raise UsageError(f"{self.backing} has no files to measure with")
        return [
            self._measure(g, files, seconds) for g in range(1, (clients or len(self.mounts)) + 1)
        ]

    def _measure(self, clients: int, files: list[str], seconds: float) -> float:
        stop = threading.Event()

        def read(mount: Path, start: int) -> None:
            buffer = bytearray(1 << 20)
            for i in range(start, sys.maxsize):
                with (mount / files[i % len(files)]).open("rb", buffering=0) as file:
                    while not stop.is_set() and file.readinto(buffer):
                        pass
                if stop.is_set():
                    return

        threads = [
            threading.Thread(target=read, args=(self.mounts[c], len(files) * (4 * c + k) // 32))
            for c in range(clients)
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(min(0.1, seconds / 4))
            began, before = time.perf_counter(), self.served_bytes
            time.sleep(seconds)
            served, took = self.served_bytes - before, time.perf_counter() - began
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        return served / took

    def slow_down(self, factor: int) -> None:
        """Makes every transfer take `factor` times as long from now on; 1 is as configured."""
        if self._page is None:
            raise UsageError("this SlowFS is not mounted")
        if factor < 1:
            raise UsageError(f"a slowdown must be at least 1, not {factor}")
        struct.pack_into("<Q", self._page, _SLOWDOWN, factor)

    def _word(self, offset: int) -> int:
        if self._page is None:
            raise UsageError("this SlowFS is not mounted")
        return int(struct.unpack_from("<Q", self._page, offset)[0])

    def _mount(self) -> None:
        program = find_program()
        for i, mount in enumerate(self.mounts):
            mount.mkdir(parents=True, exist_ok=True)
            command = [
                str(program),
                f"--backing={self.backing}",
                f"--page={self._page_path}",
                f"--client={i}",
                f"--bandwidth={int(self.bandwidth)}",
                f"--aggregate={int(self.aggregate)}",
                f"--ops={int(self._operations_per_second)}",
                f"--latency-us={round(self.latency * 1e6)}",
                f"--ttl-ms={round(self._ttl * 1e3)}",
                f"--servers={self._servers}",
                f"--seek-us={round(self._seek * 1e6)}",
                f"--stripe={self._stripe}",
                "--die-with-parent",
                "-f",
                "-o",
                "ro,max_read=1048576,fsname=nostall-slowfs",
                str(mount),
            ]
            if self.keep_cache:
                command.insert(1, "--keep-cache")
            # A session of its own: Ctrl-C reaches the benchmark first, which then unmounts.
            self._daemons.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
            )
        deadline = time.monotonic() + _START_SECONDS
        for daemon, mount in zip(self._daemons, self.mounts, strict=True):
            while not os.path.ismount(mount):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    daemon.kill()
                    message = daemon.communicate()[1].decode(errors="replace").strip()
                    raise UsageError(
                        f"nostall-slowfs did not mount {self.backing} at {mount}: "
                        f"{message or 'no answer in time'}"
                    )
                time.sleep(0.005)

    def _unmount(self) -> None:
        for mount in self.mounts:
            # Lazily: the mount disappears even if its daemon died or a reader hangs on to a file.
            _unmount(mount, lazily=True)
        for daemon in self._daemons:
            with contextlib.suppress(ProcessLookupError):
                daemon.terminate()
            try:
                daemon.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.communicate()
        self._daemons = []
