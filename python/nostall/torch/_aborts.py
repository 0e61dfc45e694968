"""Finds which rank aborted a process group, through its store, while other ranks wait over Gloo."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.futures import Future

from nostall.errors import PeerError
from nostall.job._meeting import own_connection
from nostall.torch import _ends as ends

_KEY = "nostall aborted"
# Seconds: a wait that lasts longer than _LOOK is checked at this interval; the thread that does it
# ends after _IDLE without a wait.
_LOOK = 0.2
_IDLE = 2.0
_ANSWER = 5.0
_NAMED = 8  # ranks in an error


@dataclass(frozen=True)
class Doing:
    """An operation, and the rank of the group at the other end of a message."""

    name: str
    other: int | None = None


class Aborts:
    """The aborts of one group, on one rank. `end` ends the waits here; any thread calls it, once.

    One thread watches all long waits: it reads the store, and calls `end` if a rank has aborted the
    group. Short waits cost no request.

    `end` and `name` (the number of a rank in the job) are methods of the group, held weakly, so that
    the thread keeps no group alive. `seconds` limits the wait for a connection to the store.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        end: Callable[[], None],
        name: Callable[[int], int],
        seconds: float,
    ) -> None:
        # Where it cannot be apart, an abort is detected later.
        self._store = own_connection(store, seconds)
        self._rank, self._size = rank, size
        self._end = weakref.WeakMethod(end)
        self._name_of = weakref.WeakMethod(name)
        self._lock = threading.RLock()  # a signal's handler may close the group inside
        self._changed = threading.Condition(self._lock)
        self._since: dict[int, float] = {}  # of each wait under way, by its number
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None  # the last one
        self._is_serving = False
        self._is_closed = False
        self.by: int | None = None  # the rank that aborted, once it is known here

    def announce(self, rank: int) -> None:
        """Notes in the store, if it is still there, that this rank aborts."""
        with self._lock:
            ended, self.by = self.by is not None, rank if self.by is None else self.by
        store = self._store
        if not ended:
            if store is not None:
                with suppress(RuntimeError):  # waits get Gloo's error
                    store.set(_KEY, str(rank))
            self._end_waiting()

    def close(self) -> None:
        """Ends the thread; later calls do not ask the store."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_ANSWER)  # it may have asked a store that does not answer
        self._store = None

    def is_waiting(self) -> bool:
        """Whether a wait is under way."""
        return bool(self._since)

    def refuse(self) -> None:
        """Raises PeerError if a rank is known to have aborted; does not ask the store."""
        if self.by is not None:
            raise PeerError(f"rank {self._name(self.by)} aborted the group; make a new one")

    def learn(self) -> None:
        """Reads the store. If a rank has aborted, ends the waits here and raises PeerError."""
        store = self._store
        if self.by is None and store is not None:
            with suppress(RuntimeError):  # the store is gone: it is not known
                if store.check([_KEY]):
                    by = int(store.get(_KEY))
                    with self._lock:
                        first, self.by = self.by is None, by if self.by is None else self.by
                    if first:
                        self._end_waiting()
        self.refuse()

    def fail(self, error: RuntimeError, doing: Doing, *, asks: bool = True) -> NoReturn:
        """Raises PeerError if a rank aborted, or if the connection to one failed while `doing`, with
        the rank; else the error. Without `asks` the store, which may know that rank, is left alone."""
        if asks:
            self.learn()
        else:
            self.refuse()
        told = ends.transport_error(error)
        if told is None:
            raise error
        store = self._store if asks else None
        # Among a node's ranks only the leader is connected; it gives the others its error.
        here = (
            f"{'the node of ' if isinstance(error, PeerError) else ''}rank {self._name(self._rank)}"
        )
        what = self._words(doing)
        other = None if store is None else ends.rank_at(told, store, self._size)
        if other is None:
            raise PeerError(f"{here} failed in {what}: {told}") from error
        there = self._name(other)
        raise PeerError(
            f"{here} lost its connection to rank {there} in {what}: {told}; see what rank {there} "
            "says"
        ) from error

    @contextmanager
    def watching(self, doing: Doing) -> Iterator[None]:
        """Encloses a wait that `end` can end; its errors go through `fail`."""
        number = self._begin()
        try:
            yield
        except RuntimeError as error:
            self.fail(error, doing)
        finally:
            self._finish(number)

    def watch(self, future: Future[Any]) -> None:
        """Until it is done."""
        number = self._begin()
        future.add_done_callback(lambda _: self._finish(number))

    def _begin(self) -> int:
        with self._lock:
            number = next(self._numbers)
            if not self._is_serving and not self._is_over():
                thread = threading.Thread(target=self._serve, daemon=True)
                with suppress(RuntimeError):  # no more threads: this wait is not watched
                    thread.start()
                    self._thread, self._is_serving = thread, True
            self._since[number] = time.monotonic()
            if len(self._since) == 1:
                self._changed.notify()
        return number

    def _finish(self, number: int) -> None:
        del self._since[number]

    def _end_waiting(self) -> None:
        end = self._end()
        if end is not None:
            end()

    def _name(self, rank: int) -> int:
        name = self._name_of()
        return rank if name is None else name(rank)

    def _words(self, doing: Doing) -> str:
        if doing.other is not None:
            to = "to" if doing.name == "send" else "from"
            return f"{doing.name} {to} rank {self._name(doing.other)}"
        ranks = ", ".join(str(self._name(rank)) for rank in range(min(self._size, _NAMED)))
        return f"{doing.name} of ranks {ranks}{', ...' if self._size > _NAMED else ''}"

    def _is_over(self) -> bool:
        return self._is_closed or self.by is not None

    def _serve(self) -> None:
        while True:
            with self._lock:
                wanted = self._changed.wait_for(lambda: self._since or self._is_closed, _IDLE)
                if not wanted or self._changed.wait_for(self._is_over, _LOOK):
                    self._is_serving = False
                    return
                now = time.monotonic()
                longest = now - min(list(self._since.values()), default=now)
            if longest >= _LOOK:
                with suppress(PeerError):  # raised where the wait is
                    self.learn()
