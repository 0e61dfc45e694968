"""Counts the threads that are in native code for a process group.

At the end of the program they are to return before what they use is closed, and to say why they did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nostall.errors import PeerError, UsageError


def ended_with_program() -> PeerError:
    """What a wait raises that the end of this rank's program leaves without an end."""
    return PeerError(
        "the program ended while an operation was under way: wait for it before, or let all ranks meet "
        "in a barrier()"
    )


class Calls:
    """The calls of one group: `with calls:` encloses each, `with calls.waiting():` a wait for one."""

    def __init__(self) -> None:
        self.is_over = False
        self.renew()

    def renew(self) -> None:
        """In a forked child, where no thread is inside: one may have held the lock at the fork."""
        # That a thread may take again: a signal's handler may make a call meanwhile.
        self._changed = threading.Condition(threading.RLock())
        self._inside = 0

    def __enter__(self) -> None:
        if not self._enter():
            raise UsageError("the process group ended with the program and takes no more calls")

    def __exit__(self, *_: object) -> None:
        self._leave()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Encloses a wait for an operation that has begun."""
        if not self._enter():
            raise ended_with_program()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def if_open(self) -> Iterator[bool]:
        """Encloses what is left out after the end of the group; yields whether it may be done."""
        is_open = self._enter()
        try:
            yield is_open
        finally:
            if is_open:
                self._leave()

    def _enter(self) -> bool:
        with self._changed:
            self._inside += not self.is_over
            return not self.is_over

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self.is_over:
                self._changed.notify_all()

    def refuse(self) -> bool:
        """Refuses further calls; returns whether one is under way."""
        with self._changed:
            self.is_over = True
            return self._inside > 0

    def wait(self, seconds: float) -> bool:
        """Whether all of them returned in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, seconds)
