"""Power cuts on real file systems: ext4, XFS, btrfs, on a disk that keeps a log of what it was told.

The disk is a loop device over a file of a FUSE file system, whose server (`Disk`, in a process of its
own) notes each write and each flush in their order. A job saves checkpoints on it and notes in the same
log what it was told is safe. A cut then takes a place in that log: what was written before the last
flush is on the disk, and of the later writes any subset, in any order, the last of them torn at a
sector. That image is mounted, as after a power cut, and restored from. A cut passes if the newest
checkpoint that was acknowledged before it, or a newer one, is restored with the right values.

Needs root, loop devices, FUSE, and the three mkfs.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import math
import os
import pickle
import random
import select
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaigns.forked import fork
from campaigns.outcome import Outcome, Task
from campaigns.private import private_storage

FULL = "10,000 cuts: ext4, XFS and btrfs, 20 recorded jobs of 24 saves each"
SMALL = 0.006

SIZE = 64 << 20
SAVES = 24
CUTS = 10_000
RECORDINGS = 20
# What a disk writes whole or not at all; ext4 and btrfs rely on it for their superblocks.
SECTOR = 4096
# Options that let the file systems be as small as the disk; the variables are xfs's own tests'.
MKFS: dict[str, list[str]] = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f", "-M"],
}
SMALL_XFS = {"TEST_DIR": "/", "TEST_DEV": "/", "QA_CHECK_FS": "1"}

libc = ctypes.CDLL(None, use_errno=True)
# An entry of the log: (offset, bytes) of a write, None for a flush, a number for a step that is safe.
Entry = tuple[int, bytes] | int | None


def run(task: Task) -> Outcome:
    # Mounts of its own go with this process, however it ends.
    if missing := lacks() or private_storage([]):
        return Outcome(missing=missing)
    logging.getLogger("nostall").setLevel(logging.ERROR)
    outcome = Outcome()
    recordings = task.count(RECORDINGS)
    each = math.ceil(task.count(CUTS) / (recordings * len(MKFS)))
    unflushed = 0
    for system in MKFS:
        for number in range(recordings):
            seed = task.seed * 1000 + number
            with in_memory() as home:
                log = record(home, system, seed)
                for cut in Cuts(home, system, log, seed).some(each):
                    outcome.cases += 1
                    unflushed += cut.unflushed
                    if cut.problem:
                        outcome.failures.append(
                            f"{system}, recording {number}, place {cut.place} of {len(log)}, seed "
                            f"{task.seed}: {cut.problem}"
                        )
    outcome.figures = {
        "file systems": ", ".join(MKFS),
        "recordings": recordings * len(MKFS),
        "unflushed writes at a cut": round(unflushed / max(1, outcome.cases), 1),
    }
    return outcome


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory whose files cost no disk: what is flushed to an image need not survive."""
    with tempfile.TemporaryDirectory(prefix="nostall-cut-") as name:
        check(libc.mount(b"tmpfs", name.encode(), b"tmpfs", 0, b"size=512m"), "cannot mount tmpfs")
        try:
            yield Path(name)
        finally:
            detach = 2
            check(libc.umount2(name.encode(), detach), "cannot unmount tmpfs")


def lacks() -> str:
    """The component that is missing; or nothing."""
    if os.geteuid() != 0:
        return "root, which may mount file systems"
    for path in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(path):
            return path
    for system, command in MKFS.items():
        if shutil.which(command[0]) is None:
            return command[0]
        if f"\t{system}\n" not in Path("/proc/filesystems").read_text():
            return f"{system} in the kernel"
    return ""


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# ------------------------------------------------------------------------------------ mounting


@contextlib.contextmanager
def mounted(image: Path, system: str, at: Path) -> Iterator[None]:
    """The file as a disk, its file system mounted; the disk goes with the mount."""
    at.mkdir(exist_ok=True)
    options = b"nouuid" if system == "xfs" else None
    with open(image, "r+b") as file, loop_of(file.fileno()) as device:
        check(
            libc.mount(device.encode(), bytes(at), system.encode(), 0, options),
            f"cannot mount the {system} of {image}",
        )
    try:
        yield
    finally:
        # What a ring or a process that has ended had open is closed by the kernel a moment later.
        end = time.monotonic() + 60
        while (left := libc.umount2(bytes(at), 0)) and time.monotonic() < end:
            time.sleep(0.01)
        check(left, f"cannot unmount {at}")


@contextlib.contextmanager
def loop_of(file: int) -> Iterator[str]:
    """A loop device over an open file, which ends with its last user."""
    for _ in range(100):
        with open("/dev/loop-control", "rb") as control:
            number = fcntl.ioctl(control, 0x4C82)
        device = f"/dev/loop{number}"
        with contextlib.suppress(FileExistsError):
            os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(7, number))
        opened = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        ends_with_last_user = 4
        info = struct.pack("<5Q4I192x", 0, 0, 0, 0, 0, 0, 0, 0, ends_with_last_user)
        try:
            fcntl.ioctl(opened, 0x4C0A, struct.pack("<2I", file, 0) + info + bytes(64))
        except OSError as error:
            os.close(opened)
            if error.errno != errno.EBUSY:  # another process was faster
                raise
            continue
        try:
            yield device
        finally:
            os.close(opened)
        return
    raise OSError(errno.EBUSY, "no loop device is free")


# -------------------------------------------------------------------------------- the recording


class Disk:
    """A FUSE file system of one file, "disk", that logs its writes and flushes.

    Spoken directly (linux/fuse.h), one request at a time: the order of the log is the order in which
    the disk was told.
    """

    def __init__(self, image: Path, at: Path, control: socket.socket) -> None:
        self.memory = bytearray(image.read_bytes())
        self.log: list[Entry] = []
        self.control = control
        self.fuse = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.fuse},rootmode=40000,user_id=0,group_id=0".encode()
        check(libc.mount(b"disk", bytes(at), b"fuse", 0, options), "cannot mount FUSE")

    def serve(self, result: Path) -> None:
        """Until the control socket ends; numbers that come through it are noted in the log."""
        while True:
            control = self.control.fileno()
            for ready in select.select([self.fuse, control], [], [])[0]:
                if ready == self.fuse:
                    self.answer(os.read(self.fuse, (1 << 20) + 8192))
                    continue
                note = self.control.recv(8)
                if not note:
                    result.write_bytes(pickle.dumps(self.log))
                    return
                self.log.append(struct.unpack("<Q", note)[0])
                self.control.send(b"!")

    def attributes(self, node: int) -> bytes:
        mode, size = (stat.S_IFDIR | 0o755, 0) if node == 1 else (stat.S_IFREG | 0o600, SIZE)
        return struct.pack(
            "<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def answer(self, request: bytes) -> None:
        length, operation, unique, node = struct.unpack_from("<2I2Q", request)
        body = request[40:length]
        forever = 1 << 30
        error, reply = 0, b""
        match operation:
            case 1:  # LOOKUP
                if body == b"disk\0":
                    reply = struct.pack("<4Q2I", 2, 1, forever, forever, 0, 0) + self.attributes(2)
                else:
                    error = -errno.ENOENT
            case 2 | 36 | 42:  # FORGET, INTERRUPT, BATCH_FORGET
                return
            case 3 | 4:  # GETATTR, SETATTR
                reply = struct.pack("<Q2I", forever, 0, 0) + self.attributes(node)
            case 14 | 27:  # OPEN, OPENDIR: past the page cache
                reply = struct.pack("<Q2I", 0, 1, 0)
            case 15:  # READ
                offset, size = struct.unpack_from("<8xQI", body)
                reply = bytes(self.memory[offset : offset + size])
            case 16:  # WRITE
                offset, size = struct.unpack_from("<8xQI", body)
                data = body[40 : 40 + size]
                self.memory[offset : offset + size] = data
                self.log.append((offset, data))
                reply = struct.pack("<2I", size, 0)
            case 17:  # STATFS
                reply = struct.pack("<5Q4I24x", SIZE >> 12, 0, 0, 2, 0, 4096, 255, 4096, 0)
            case 18 | 25 | 29:  # RELEASE, FLUSH (a close), RELEASEDIR
                pass
            case 20:  # FSYNC: the disk's flush
                self.log.append(None)
            case 26:  # INIT: writes of up to a MiB
                asynchronous, big_writes, max_pages = 1, 1 << 5, 1 << 22
                reply = struct.pack(
                    "<4I2H2I2H32x",
                    *(7, 31, 1 << 20, asynchronous | big_writes | max_pages),
                    *(16, 12, 1 << 20, 1, 256, 0),
                )
            case _:
                error = -errno.ENOSYS
        os.write(self.fuse, struct.pack("<IiQ", 16 + len(reply), error, unique) + reply)


def record(home: Path, system: str, seed: int) -> list[Entry]:
    """The log of a job on a new file system, whose first image is left as `home`/image."""
    image = home / "image"
    with open(image, "wb") as file:
        file.truncate(SIZE)
    environment = {**os.environ, **SMALL_XFS}
    subprocess.run(
        [*MKFS[system], str(image)], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    ours, theirs = socket.socketpair()
    (home / "fuse").mkdir()

    def serve() -> None:
        ours.close()
        Disk(image, home / "fuse", theirs).serve(home / "log")

    pid = fork(serve)
    theirs.close()
    while not (home / "fuse" / "disk").exists():
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError("the disk's server ended")
        select.select([], [], [], 0.01)

    def tell(step: int) -> None:
        ours.send(struct.pack("<Q", step))
        ours.recv(1)

    try:
        with mounted(home / "fuse" / "disk", system, home / "mount"):
            job = fork(lambda: train(home / "mount", random.Random(seed), tell))
            if status := os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]):
                raise RuntimeError(f"the job that is recorded ended with {status} on {system}")
    finally:
        ours.close()
        os.waitpid(pid, 0)
        detach = 2
        check(libc.umount2(bytes(home / "fuse"), detach), "cannot unmount FUSE")
    log: list[Entry] = pickle.loads((home / "log").read_bytes())
    return log


def state_of(step: int) -> dict[str, Any]:
    import numpy as np

    return {"w": np.full(1 + step * 7919 % 60_000, step, np.int64), "step": step}


def checkpointer(root: Path) -> Any:
    import nostall

    return nostall.Checkpointer(
        root / "fast",
        root / "durable",
        keep=nostall.Keep(2, every=7),
        rank=0,
        world_size=1,
        timeout=60,
        priority="normal",
    )


def disturb(root: Path, draw: random.Random) -> None:
    """Writes, renames and removes files that nobody syncs, for ever."""
    root.mkdir()
    for number in itertools.count():
        path = root / f"log-{draw.randrange(20)}"
        match draw.randrange(4):
            case 0:
                path.unlink(missing_ok=True)
            case 1 if path.exists():
                path.rename(root / f"log-{draw.randrange(20)}")
            case _:
                with open(path, "ab") as file:
                    file.write(bytes([number % 256]) * draw.randrange(1, 20_000))
                if path.stat().st_size > 100_000:
                    os.truncate(path, 10)
        time.sleep(0.001)


def train(root: Path, draw: random.Random, tell: Callable[[int], None]) -> None:
    other = random.Random(draw.random())
    threading.Thread(target=disturb, args=(root / "logs", other), daemon=True).start()
    ckpt = checkpointer(root)
    for step in range(1, SAVES + 1):
        level = draw.choice(["memory", "fast", "durable"])
        ckpt.save(state_of(step), step, level=level)
        if level != "memory":
            tell(step)
        if draw.random() < 0.15:  # the job starts again
            ckpt.close()
            tell(step)
            ckpt = checkpointer(root)
    ckpt.close()
    tell(SAVES)


# ------------------------------------------------------------------------------------- the cuts


class Cut:
    def __init__(self, place: int, unflushed: int, problem: str) -> None:
        self.place, self.unflushed, self.problem = place, unflushed, problem


class Cuts:
    """Images of a recorded disk at places of its log, each looked at as by the next start."""

    def __init__(self, home: Path, system: str, log: list[Entry], seed: int) -> None:
        self.home, self.system, self.log = home, system, log
        self.random = random.Random(f"{system} {seed}")
        self.flushes = [i for i, entry in enumerate(log) if entry is None]
        self.done = 0  # entries whose writes are in the image

    def some(self, count: int) -> Iterator[Cut]:
        # In order, so that the image of what is flushed is made only once.
        for place in sorted(self.draw() for _ in range(count)):
            begin = self.last_flush(place)
            with open(self.home / "image", "r+b") as file:
                write(file.fileno(), self.log[self.done : begin])
            self.done = max(self.done, begin)
            open_writes = [e for e in self.log[begin:place] if isinstance(e, tuple)]
            copy = self.home / "cut"
            copy_holes(self.home / "image", copy)
            with open(copy, "r+b") as file:
                write(file.fileno(), self.lose(open_writes))
            safe = max((e for e in self.log[:place] if isinstance(e, int)), default=0)
            yield Cut(place, len(open_writes), self.look(copy, safe))

    def draw(self) -> int:
        """A place; half of them among those with the most writes since the last flush."""
        places = [
            self.random.randrange(len(self.log) + 1) for _ in range(self.random.choice([1, 8]))
        ]
        return max(places, key=lambda place: place - self.last_flush(place))

    def last_flush(self, place: int) -> int:
        flushed = bisect.bisect_left(self.flushes, place)
        return self.flushes[flushed - 1] if flushed else 0

    def lose(self, writes: list[tuple[int, bytes]]) -> list[Entry]:
        """What of the writes since the last flush gets to the disk."""
        kind = self.random.randrange(4)
        if kind == 0 or not writes:
            return []
        kept: list[tuple[int, bytes]] = list(writes)
        if kind >= 2:
            share = self.random.random()
            kept = [w for w in writes if self.random.random() < share]
        if kind == 3:
            self.random.shuffle(kept)
        if kept:
            offset, data = kept[-1]
            sectors = self.random.randrange(len(data) // SECTOR + 1)
            kept[-1] = (offset, data[: sectors * SECTOR])
        return list(kept)

    def look(self, image: Path, safe: int) -> str:
        """What is wrong with what the next start finds; or nothing."""
        try:
            with mounted(image, self.system, self.home / "mount"):
                ckpt = checkpointer(self.home / "mount")
                try:
                    found = ckpt.restore()
                    return judge(found, safe)
                finally:
                    ckpt.close()
                    del ckpt
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def judge(found: Any, safe: int) -> str:
    if found is None:
        return f"nothing is there, and step {safe} was safe" if safe else ""
    expected = state_of(found.step)
    if not safe <= found.step <= SAVES:
        return f"step {found.step} is restored, and step {safe} was safe"
    if found.state["step"] != found.step or found.state["w"].tobytes() != expected["w"].tobytes():
        return f"step {found.step} is restored with other values"
    return ""


def write(file: int, entries: list[Entry]) -> None:
    for entry in entries:
        if isinstance(entry, tuple):
            os.pwrite(file, entry[1], entry[0])


def copy_holes(source: Path, target: Path) -> None:
    """A copy that has a hole where the source has one."""
    target.unlink(missing_ok=True)
    with open(source, "rb") as old, open(target, "wb") as new:
        new.truncate(SIZE)
        end = 0
        while True:
            try:
                begin = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError:
                return  # no more data
            end = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            os.lseek(new.fileno(), begin, os.SEEK_SET)
            while begin < end:
                begin += os.sendfile(new.fileno(), old.fileno(), begin, end - begin)
