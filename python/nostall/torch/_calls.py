"""Threads that are in native code for a process group.

A thread that returns from native code while Python ends is ended there, inside of C++, which ends the
process by SIGABRT. So the threads have to be back before.
"""

from __future__ import annotations

import threading

from nostall.errors import UsageError


class Calls:
    """Those of one group: `with calls:` around each."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._is_over = False

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over:
                raise UsageError("the process group ended with the program; it takes no more calls")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._is_over:
                self._changed.notify_all()

    def refuse(self) -> bool:
        """Further ones, from now on; whether one is under way."""
        with self._changed:
            self._is_over = True
            return self._inside > 0

    def wait(self, seconds: float) -> bool:
        """Whether all of them returned in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, seconds)
