"""Notes of a rank that the other ranks of its node read without its help, and without waiting.

A rank has its notes in a memory file without a name, and listens at an abstract socket, of which the
kernel says whose process it is; others open the file through /proc. Both end with the process, however
it ends, so that nothing is left behind and no later start of the job finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nostall.base import _process as process

_JOBS = 8  # of this process whose notes are kept: the newest
_NOTES = 1000  # of a job: later ones are not made
_BACKLOG = 4096
_RETRY_SECONDS = 0.05


class _Notes:
    """Those of this process as a rank of one job."""

    def __init__(self, address: str) -> None:
        """Raises OSError: another process has the address."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._file = -1
        self._left = _NOTES
        try:
            self._file = os.memfd_create(_name(address))
            self._socket.bind(address)
            self._socket.listen(_BACKLOG)
        except OSError:
            self.close()
            raise

    def add(self, note: bytes) -> None:
        # Who asked has its answer, and what it left in the queue would fill that in time.
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
        if self._left > 0:
            self._left -= 1
            os.write(self._file, note)

    def close(self) -> None:
        self._socket.close()
        if self._file >= 0:
            os.close(self._file)


_mine: dict[str, _Notes] = {}
_lock = threading.Lock()
_program = {os.getpid()}  # the processes that have run this program, up to this one


def _begin_anew() -> None:
    """A forked child is no rank: it must not keep the names of its parent."""
    global _lock, _mine
    _lock, former, _mine = threading.Lock(), _mine, {}
    _program.add(os.getpid())
    for notes in former.values():
        notes.close()


os.register_at_fork(after_in_child=_begin_anew)


@dataclass(frozen=True)
class Note:
    """What the process left, and when: seconds since the boot."""

    content: Any
    process: int
    left: float


def note(job: str, local_rank: int, name: str, content: Any) -> None:
    """Leaves `content` (plain values) under `name`, until this process ends.

    Raises:
        OSError: it cannot, as when another process has this local rank.
    """
    address = _address(job, local_rank)
    with _lock:
        notes = _mine.pop(address, None) or _Notes(address)
        _mine[address] = notes
        while len(_mine) > _JOBS:
            _mine.pop(next(iter(_mine))).close()
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        notes.add(json.dumps([name, content, now]).encode() + b"\n")


def noted(job: str, local_rank: int, name: str) -> Note | None:
    """What that rank of the node left under `name`; None if it is not there, or left nothing.

    Raises:
        BlockingIOError: it is there, and more have asked since its last note than it has room for.
    """
    address = _address(job, local_rank)
    try:
        pid = _owner(address)
        text = _read(pid, address)
    except BlockingIOError:
        raise
    except OSError:  # no such rank, another user's, or one that ends now
        return None
    for line in text.split(b"\n")[:-1]:  # the last one may be on its way
        given, content, left = json.loads(line)
        if given == name:
            return Note(content, pid, left)
    return None


def await_change(job: str, local_rank: int, pid: int, seconds: float) -> None:
    """Waits until process `pid` ends or leaves a note as that rank, or something less; for `seconds`
    at most."""
    try:
        with _asking(_address(job, local_rank)) as (asking, owner):
            if owner == pid:
                change = select.poll()
                change.register(asking, 0)  # only the end of the connection
                change.poll(max(0.0, 1000 * seconds))
    except BlockingIOError:  # many wait
        time.sleep(max(0.0, min(_RETRY_SECONDS, seconds)))
    except OSError:  # it has ended
        pass


def starter(job: str, local_rank: int) -> int:
    """The process of that rank, if it started the program that runs here; else 0."""
    try:
        pid = _owner(_address(job, local_rank))
    except OSError:
        return 0
    return pid if pid in process.ancestors() and pid not in _program else 0


def _address(job: str, local_rank: int) -> str:
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    return f"\0nostall-{os.geteuid()}-{digest}-notes-{local_rank}"


def _name(address: str) -> str:
    return address[1:]


def _owner(address: str) -> int:
    with _asking(address) as (_, pid):
        return pid


@contextlib.contextmanager
def _asking(address: str) -> Iterator[tuple[socket.socket, int]]:
    """A connection to the process that has the address, until that leaves a note or ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
        asking.connect(address)
        owner = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, user, _ = struct.unpack("3i", owner)
        if user != os.geteuid():
            raise PermissionError(f"user {user} has @{_name(address)}")
        yield asking, int(pid)


def _read(pid: int, address: str) -> bytes:
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{folder}/{entry}").startswith(f"/memfd:{_name(address)} "):
                with open(f"{folder}/{entry}", "rb") as file:
                    return file.read()
    raise FileNotFoundError(f"process {pid} has no notes")
