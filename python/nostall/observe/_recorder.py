"""Records the last batches and epochs of a loader, and sums of the earlier ones."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nostall import _native
from nostall.base._words import counted, printable
from nostall.observe._stats import (
    ORIGINS,
    BatchRecords,
    EpochStats,
    OriginStats,
    Stats,
    add_up,
    as_one,
)

_log = logging.getLogger("nostall")

# Held from reading a clock until what follows from it is there, so that sums never fall, whoever asks.
# The consumer may ask too, in a handler of a signal.
_lock = threading.RLock()


def _begin_anew() -> None:
    """In a forked child, whose parent's other threads may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)

_POOLS = ("ram_tier", "file_tier", "staging", "io_buffers", "decoding")

# Batches and epochs that are kept one by one: at most twice as many batches, 72 bytes each.
_BATCHES = 1 << 15
_EPOCHS = 500


class Recorder:
    """Collects the consumer's waits and the batches' origins of one rank.

    At the end of an epoch it warns of samples whose place others took; `describe` names a sample.
    """

    def __init__(self, rank: int, world_size: int, describe: Callable[[int], str]) -> None:
        self._rank = rank
        self._describe = describe
        self._world_size = world_size
        self._start, self._made = time.perf_counter(), time.time()
        # The epochs that have ended, and the one under way: replaced together, for other threads.
        self._state: tuple[list[EpochStats], _Running | None] = [], None
        self.epochs_begun: list[range] = []  # their numbers, each once
        self._record = _native.Record(_BATCHES)
        # Since when the consumer waits, and for which batch of the epoch: for other threads.
        self._waiting: tuple[float, int] | None = None
        self._batches = 0
        # When it got the newest batch; the longest step between two of this epoch, and of one before.
        self._got = self._longest = self._longest_before = 0.0
        # When the epoch's last step is taken to be over: who knows the length never asks for more.
        self._until = math.inf
        self.live: Callable[[Recorder, int, int, int], None] | None = None
        self.device: Callable[[], dict[str, float]] = dict  # what its device waited for

    def totals(self) -> tuple[EpochStats, dict[str, int]]:
        """All epochs added up, and the most memory seen by pool. From any thread."""
        return add_up(self._all()), self.memory()

    def recent(self) -> list[EpochStats]:
        """The newest epoch, after all those before it as one (as of `add_up`). From any thread."""
        epochs = self._all()
        earlier = epochs[:-1]
        return [*([add_up(earlier)] if len(earlier) > 1 else earlier), *epochs[-1:]]

    def _all(self) -> list[EpochStats]:
        with _lock:
            epochs, current = self._state
            return list(epochs) if current is None else [*epochs, self._frozen(current)]

    def memory(self) -> dict[str, int]:
        """The most memory seen, by pool."""
        return dict(zip(_POOLS, self._record.most, strict=True))

    def _frozen(self, running: _Running, over: bool = False) -> EpochStats:
        waiting, now = self._waiting, time.perf_counter()
        if not over:
            now = min(now, self._until)
        number, batches, samples, stall, decode, origins, substituted = self._record.taken
        if waiting is not None and waiting[1] == batches:  # else that batch counts already
            stall += max(0.0, now - waiting[0])
        return EpochStats(
            epoch=number,
            seconds=now - running.start,
            stall_seconds=stall,
            batches=batches,
            samples=samples,
            bytes=sum(size for _, size, _ in origins),
            origins={
                name: OriginStats(*counts) for name, counts in zip(ORIGINS, origins, strict=True)
            },
            decode_seconds=decode,
            substituted=substituted,
        )

    def begin_epoch(self, epoch: int, batches: int) -> _Running:
        """Ends the epoch before, if its iterator has not ended it; `batches` are to be handed out."""
        epochs, current = self._state
        if current is not None:
            self.end_epoch(current)
            epochs, _ = self._state
        with _lock:
            self._waiting, self._batches = None, 0
            self._longest_before, self._longest = self._longest or self._longest_before, 0.0
            self._until = math.inf
            self._record.begin(epoch)
            running = _Running(time.perf_counter(), batches)
            self._state = epochs, running
        self._note_begun(epoch)
        return running

    def _note_begun(self, epoch: int) -> None:
        runs = self.epochs_begun
        if any(epoch in run for run in runs):
            return
        if runs and runs[-1].stop == epoch:
            runs[-1] = range(runs[-1].start, epoch + 1)
        else:
            runs.append(range(epoch, epoch + 1))

    def wait(self) -> float:
        """The consumer asks for a batch."""
        began = time.perf_counter()
        if self._batches:
            self._longest = max(self._longest, began - self._got)
        self._waiting = began, self._batches
        return began

    def batch(
        self, batch: _native.Batch, began: float, substituted: Sequence[tuple[int, int, str]]
    ) -> None:
        """The consumer, which asked for it at `began`, has got a batch."""
        with _lock:
            now = self._got = time.perf_counter()
            self._batches += 1
            self._record.add(batch, now - self._start, now - began)
            for bad, _, _ in substituted:
                self._record.substitute(bad)
            running, step = self._state[1], self._longest or self._longest_before
            # Of epochs of one batch no step is known.
            if running is not None and self._batches == running.batches and step > 0.0:
                self._until = now + step
        if self.live is not None:
            self.live(self, batch.epoch, batch.index, batch.queue)

    def end_epoch(self, running: _Running, over: bool = False) -> None:
        """Ends the epoch if it is still the current one: an abandoned iterator may end late.

        `over`: the consumer has asked for more, so that its last step has ended too.
        """
        with _lock:
            if not self.is_current(running):
                return
            ended = self._frozen(running, over)
            epochs = [*self._state[0], ended]
            if len(epochs) > 2 * _EPOCHS:
                epochs = [as_one(epochs[:-_EPOCHS]), *epochs[-_EPOCHS:]]
            self._state = epochs, None
        if ended.substituted:
            self._warn_of(ended)

    def _warn_of(self, epoch: EpochStats) -> None:
        first = epoch.substituted[0]
        try:
            name = printable(self._describe(first))
        except Exception:  # a user's source may fail there too, and the epoch has ended well
            name = "one of the source"
        _log.warning(
            "epoch %d: %d of %s could not be used, and others took their place; the first one is %s "
            '(sample %d): remove or repair it (on_error="raise" says why); the entry of this epoch in '
            "stats().epochs has all as `substituted`",
            epoch.epoch,
            len(epoch.substituted),
            counted(epoch.samples, "sample"),
            name,
            first,
        )

    def is_current(self, running: _Running) -> bool:
        """Whether no other iteration has begun."""
        return self._state[1] is running

    def stats(
        self,
        loader: str,
        lower_bound: Callable[[], int],
        peers: dict[str, int] | None = None,
        sources: dict[str, dict[str, int]] | None = None,
        seed: int | None = None,
        threads: int = 0,
        fetchers: int = 0,
    ) -> Stats:
        return Stats(
            rank=self._rank,
            world_size=self._world_size,
            epochs=self._all(),
            batches=BatchRecords(*self._record.columns),
            lower_bound_bytes=lower_bound(),
            memory=self.memory(),
            peers=peers or {},
            loader=loader,
            sources=sources or {},
            seed=seed,
            device=self.device(),
            made=self._made,
            threads=threads,
            fetchers=fetchers,
        )


@dataclass(frozen=True, eq=False)
class _Running:
    """An iteration of one epoch."""

    start: float
    batches: int
