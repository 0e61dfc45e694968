"""Counts the threads that are in native code for a process group.

If a thread returns from native code while Python shuts down, Python ends it there, inside of C++, and
the process aborts (SIGABRT). So all threads have to return before.
"""

from __future__ import annotations

import threading

from nostall.errors import UsageError


class Calls:
    """The calls of one group: `with calls:` encloses each."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._is_over = False

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over:
                raise UsageError("the process group ended with the program and takes no more calls")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._is_over:
                self._changed.notify_all()

    def refuse(self) -> bool:
        """Refuses further calls; returns whether one is under way."""
        with self._changed:
            self._is_over = True
            return self._inside > 0

    def wait(self, seconds: float) -> bool:
        """Whether all of them returned in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, seconds)
