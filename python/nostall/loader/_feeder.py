"""Gives batches to callables as they arrive, while the consumer computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nostall import _native
from nostall.errors import StoppedError
from nostall.loader._producer import Producer, Stopped

if TYPE_CHECKING:
    from nostall.loader._python_transforms import PythonStage, Work


class Feeder(Producer["Work"]):
    """A thread that submits the next `count` batches of a loader to a stage, as it wants them.

    It also gives their memory back, which takes milliseconds where it is much.
    """

    def __init__(self, loader: _native.Loader, stage: PythonStage, count: int) -> None:
        super().__init__("nostall-feeder")
        self._loader = loader
        self._stage = stage
        self._count = count
        self._at_work: deque[Work] = deque()
        self._spent: deque[Work] = deque()
        self._left = count
        self._begin()

    def done(self) -> None:
        """The results of the batch that was taken are there, and nothing else of it is needed.

        Raises:
            StoppedError: another thread has closed this; the results may be those of no samples.
        """
        if self._stop:
            raise StoppedError("the loader is closed")
        work = self._at_work.popleft()
        self._left -= 1
        if self._error is not None:  # the thread has ended
            work.release()
            return
        self._spent.append(work)
        self._make_room()

    @property
    def at_work(self) -> Sequence[Work]:
        """All batches that are not done, the oldest first."""
        return self._at_work.copy()

    def _ended(self) -> None:
        while True:
            try:
                work = self._at_work.popleft()
            except IndexError:  # so that two threads may close this at the same time
                return
            work.cancel()
            work.release()

    def _make(self) -> None:
        try:
            for _ in range(self._count):
                self._wait_until(self._has_room)
                work = self._stage.submit(self._arrival())
                self._at_work.append(work)
                self._put(work)
                del work
            self._wait_until(self._is_over)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        while self._spent:
            self._spent.popleft().release()

    def forget_sum(self, sample: int) -> None:
        """Whoever repairs a sample that cannot be decoded gives it another checksum."""
        self._loader.forget_sum(sample)

    def _is_over(self) -> bool:
        self._give_back()
        return self._stop or self._left == 0

    def _has_room(self) -> bool:
        self._give_back()
        return self._stop or self._stage.wants_more(self.at_work)

    def _arrival(self) -> _native.Batch:
        while not self._stop:
            self._give_back()
            # To give up the GIL may cost milliseconds where callables run.
            batch = self._loader.next_if_ready()
            if batch is None:
                batch = self._loader.next_soon()
            if batch is not None:
                return batch
        raise Stopped
