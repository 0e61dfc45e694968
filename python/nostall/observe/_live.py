"""What the loaders of a process do at this moment, for other processes of its user (``nostall top``).

A process with an open loader listens at an abstract Unix socket ``nostall-<uid>-live-1-<random>``, of
which nothing is left once the process has ended, however it ends. Whoever connects gets what
`_doing` gives, as JSON, if the kernel says that it is a process of the same user; nothing is read from
it. The number after ``live`` is that of this form.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nostall.observe._observed import Observed

_log = logging.getLogger("nostall")

_NAME = "nostall-{user}-live-1-"
_LISTENING = 1 << 16  # among the flags of /proc/net/unix
# Seconds that one answer may take: others are asked after it.
_SECONDS = 2.0
# Until the next try, where a connection cannot be accepted.
_PAUSE_SECONDS = 0.5

# A finaliser of a loader may run where the lock is held.
_lock = threading.RLock()
_open: weakref.WeakSet[Observed] = weakref.WeakSet()
_listener: _Listener | None = None


def add(loader: Observed) -> None:
    """Called by loaders that start: this process answers until all of them have ended."""
    global _listener
    with _lock:
        _open.add(loader)
        if _listener is None:
            try:
                _listener = _Listener()
            except (OSError, RuntimeError) as error:  # a failure to observe never ends the training
                _log.info("nostall top cannot see this process: %s", error)


def remove(loader: Observed | None = None) -> None:
    """The loader has ended, or without it one that is gone."""
    global _listener
    with _lock:
        if loader is not None:
            _open.discard(loader)
        if _listener is not None and not any(True for _ in _open):
            _listener.end()
            _listener = None


def running() -> list[Observed]:
    """The loaders that have begun and have not ended."""
    with _lock:
        return list(_open)


def _begin_anew() -> None:
    """In a forked child, which has none of the loaders: its parent alone answers."""
    global _lock, _listener
    _lock = threading.RLock()
    _open.clear()
    if _listener is not None:
        _listener.socket.close()
        _listener = None


os.register_at_fork(after_in_child=_begin_anew)


class _Listener:
    """Answers, in a thread that sleeps until somebody asks."""

    def __init__(self) -> None:
        self._ended = False
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(f"\0{_NAME.format(user=os.geteuid())}{secrets.token_hex(8)}")
            self.socket.listen(8)
            self.thread = threading.Thread(target=self._run, name="nostall-live", daemon=True)
            self.thread.start()
        except BaseException:
            with contextlib.suppress(OSError):  # it is not bound
                self.end()  # the thread may have begun
            self.socket.close()
            raise

    def end(self) -> None:
        self._ended = True
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _run(self) -> None:
        with self.socket:
            while not self._ended:
                try:
                    asker, _ = self.socket.accept()
                except OSError:
                    if not self._ended:
                        time.sleep(_PAUSE_SECONDS)  # no descriptor is free, say
                    continue
                with asker:
                    try:
                        asker.settimeout(_SECONDS)
                        if _other_end(asker)[1] == os.geteuid():
                            asker.sendall(json.dumps(_doing()).encode())
                    except Exception as error:
                        _log.debug("cannot answer nostall top: %s", error)


def _doing() -> list[dict[str, Any]]:
    found = []
    for loader in running():
        total, memory = loader.totals()
        epoch, batch = loader.position
        found.append(
            {
                "rank": loader.world.rank,
                "loader": loader.name,
                "epoch": epoch,
                "batch": max(0, batch - 1),  # the last one, or the first to come
                "seconds": total.seconds,
                "stall_seconds": total.stall_seconds,
                "samples": total.samples,
                "origins": {name: origin.samples for name, origin in total.origins.items()},
                "memory": sum(memory.values()),
            }
        )
    return found


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """The process, in this one's numbers, and the user; of a listening process when it began."""
    form = struct.Struct("iII")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    process, user, _ = form.unpack(found)
    return process, user


def _names() -> Iterator[str]:
    """The sockets of this network namespace that seem to be of this user."""
    begin = f"@{_NAME.format(user=os.geteuid())}"
    for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
        fields = line.decode(errors="replace").split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith(begin) and int(fields[3], 16) & _LISTENING:
            yield fields[7][1:]


def ask() -> dict[int, list[dict[str, Any]]]:
    """What the loaders of this user's processes do, by process.

    A process that does not answer in time, as one that is stopped, has an empty list. Processes of
    another network or process namespace, and so of most containers, are not found.
    """
    from concurrent.futures import ThreadPoolExecutor

    names = list(_names())
    if not names:
        return {}
    with ThreadPoolExecutor(min(32, len(names))) as pool:
        return dict(filter(None, pool.map(_answer, names)))


def _answer(name: str) -> tuple[int, list[dict[str, Any]]] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        process = 0
        try:
            connection.connect(f"\0{name}")
            process, user = _other_end(connection)
            if user != os.geteuid() or process == 0:  # 0: of another process namespace
                return None
            with connection.makefile("rb") as answer:
                return process, json.load(answer)
        except TimeoutError:
            return (process, []) if process else None
        except (OSError, ValueError):  # it ends at this moment
            return None
