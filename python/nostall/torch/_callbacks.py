"""Threads for the callbacks of one group's futures.

A callback may wait for another operation of its group, as communication hooks of torch do. It runs in a
thread that nothing of the group waits for.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from nostall import _native


def serve(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Calls what comes, up to None."""
    _native.serve_collectives()
    while (call := waiting.get()) is not None:
        call()
        del call  # drops the tensors and the group with it before the next wait


class Callbacks:
    """One thread, and one more whenever all are in callbacks.

    It has no lock, so a signal's handler may end the group at any step.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle: deque[None] = deque()  # an entry for each thread that nothing was given to
        self._threads: list[threading.Thread] = []

    def after(self, future: Future[Any]) -> Future[None]:
        """One that is done after this one, and whose callbacks run in these threads."""
        later: Future[None] = Future()
        future.add_done_callback(lambda _: self._give(lambda: later.set_result(None)))
        return later

    def _give(self, call: Callable[[], None]) -> None:
        try:
            self._idle.pop()
        except IndexError:
            thread = threading.Thread(target=serve, args=(self._waiting,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                call()
                return
            self._threads.append(thread)

        def run() -> None:
            call()
            self._idle.append(None)

        self._waiting.put(run)

    def end(self) -> None:
        """Ends the threads, once their callbacks have returned."""
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, seconds: float) -> None:
        """Waits for each thread at most that long: a callback may wait for what does not come."""
        threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(seconds)
