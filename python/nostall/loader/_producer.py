"""A thread that makes things in order, ahead of the one that takes them."""

from __future__ import annotations

import atexit
import collections
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nostall.errors import StoppedError, UsageError

_T = TypeVar("_T")
_SECONDS = 0.1


class Stopped(Exception):
    """The consumer takes no more."""


class Producer(Generic[_T]):
    """A thread that runs `_make`, which puts things there for one other thread to take.

    What fails there is raised by `take` in its turn. A thread that need not wait takes no lock.
    """

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        # Each takes a token for the one thread that may wait there. A thread sets its flag before it
        # looks once more and waits, so that no token is missed; one too many costs a look.
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()  # for the consumer
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # for the thread
        self._ready: collections.deque[_T] = collections.deque()
        self._wanted = False  # the consumer waits
        self._held_up = False  # the thread waits for the consumer
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _begin(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: it cannot be started.
        """
        try:
            self._thread.start()
        except BaseException:  # of a signal, too, while the thread begins
            self._stop = True
            self._room.put(None)
            raise
        _every.add(self)

    # ------------------------------------------------------------------ in the consumer

    def take(self, waited: Callable[[], None] | None = None) -> _T:
        """The next thing; `waited` is called now and then while it is waited for.

        Raises:
            UsageError: in a forked child, which has no such thread.
            StoppedError: another thread has closed this.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"this loader belongs to process {self._process}; a forked child must make its own"
            )
        try:
            return self._ready.popleft()
        except IndexError:
            self._wanted = True
        self._make_room()
        try:
            while not self._ready and self._error is None:
                try:
                    self._arrived.get(timeout=None if waited is None else _SECONDS)
                except queue.Empty:
                    assert waited is not None
                    waited()
        finally:
            self._wanted = False
        if self._ready:
            return self._ready.popleft()
        # Raised, it refers to those who call this: they are not to be kept here.
        error, self._error = self._error, Stopped()
        try:
            if isinstance(error, Stopped):
                raise StoppedError("the loader is closed")
            assert error is not None
            raise error
        finally:
            del error

    @property
    def closed(self) -> bool:
        """Whether the thread was told to end."""
        return self._stop

    def _make_room(self) -> None:
        if self._held_up:
            self._room.put(None)

    def end(self) -> bool:
        """Ends the thread, and waits for its end; False where it does not."""
        if os.getpid() != self._process:
            return False
        self._stop = True
        self._room.put(None)
        if threading.current_thread() is self._thread:
            return False  # it collects an iteration that was dropped, and ends by itself
        self._thread.join()
        return True

    def close(self) -> None:
        """Ends the thread, and drops what it has put there."""
        if not self.end():
            return
        self._ready.clear()
        self._error = Stopped()  # an error that nobody took would keep this
        self._ended()

    def _ended(self) -> None:
        """The thread has been closed."""

    # ------------------------------------------------------------------ in the thread

    def _make(self) -> None:
        """Puts all there is. Raises `Stopped` once `_stop` is set."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self._make()
            self._error = Stopped()
        except BaseException as failed:
            self._error = failed
        self._arrived.put(None)

    def _put(self, thing: _T) -> None:
        self._ready.append(thing)
        if self._wanted:
            self._arrived.put(None)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the consumer has made it true."""
        self._held_up = True
        while not condition():
            self._room.get()
        self._held_up = False


_every: weakref.WeakSet[Producer[Any]] = weakref.WeakSet()


@atexit.register
def _end_with_program() -> None:
    """Ends the threads: without an interpreter one that waits in the core would end the process."""
    for producer in list(_every):
        producer.close()
