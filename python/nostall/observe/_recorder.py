"""Records the last batches and epochs of a loader, and sums of the earlier ones."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from nostall.observe._stats import (
    ORIGINS,
    BatchRecords,
    EpochStats,
    OriginStats,
    Stats,
    add_up,
)

if TYPE_CHECKING:
    from nostall import _native

_POOLS = ("ram_tier", "file_tier", "staging", "io_buffers", "decoding")

# Batches and epochs that are kept one by one: at most twice as many batches, 72 bytes each.
_BATCHES = 1 << 15
_EPOCHS = 500


class Recorder:
    """Collects the consumer's waits and the batches' origins of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._start = time.perf_counter()
        self._epochs: list[EpochStats] = []
        self.epochs_begun = 0  # one more than the last number
        self._current: _Running | None = None
        self._columns = {
            name: array("d") for name in ("epoch", "batch", "time", "wait", *ORIGINS, "queue")
        }
        self._memory = [0] * len(_POOLS)
        self.live: Callable[[Recorder, int, int, int], None] | None = None

    def totals(self) -> tuple[EpochStats, dict[str, int]]:
        """All epochs added up, and the most memory seen by pool. From any thread."""
        epochs = list(self._epochs)
        current = self._current
        if current is not None:
            epochs.append(current.freeze())
        memory = dict(zip(_POOLS, self._memory, strict=True))
        return add_up(epochs), memory

    def begin_epoch(self, epoch: int) -> _Running:
        """Ends the epoch before, if its iterator has not ended it."""
        if self._current is not None:
            self.end_epoch(self._current)
        self._current = _Running(epoch)
        self.epochs_begun = max(self.epochs_begun, epoch + 1)
        return self._current

    def batch(
        self,
        batch: _native.Batch,
        wait: float,
        memory: tuple[int, ...],
        substituted: list[tuple[int, int, str]],
    ) -> None:
        running = self._current
        if running is None:
            return
        running.stall += wait
        running.batches += 1
        running.samples += len(batch)
        origins = batch.origins
        for i, origin in enumerate(origins):
            for j, value in enumerate(origin):
                running.origins[i][j] += value
        running.decode += batch.transform_seconds
        running.substituted += [bad for bad, _, _ in (*batch.substitutions, *substituted)]
        self._memory = [max(pair) for pair in zip(self._memory, memory, strict=True)]
        row = (
            batch.epoch,
            batch.index,
            time.perf_counter() - self._start,
            wait,
            *(origin[0] for origin in origins),
            batch.queue,
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
            if len(column) > 2 * _BATCHES:
                del column[:-_BATCHES]
        if self.live is not None:
            self.live(self, batch.epoch, batch.index, batch.queue)

    def end_epoch(self, running: _Running) -> None:
        """Ends the epoch if it is still the current one: an abandoned iterator may end late."""
        if self._current is running:
            self._epochs.append(running.freeze())
            self._current = None
            if len(self._epochs) > 2 * _EPOCHS:
                self._epochs = [_summed(self._epochs[:-_EPOCHS]), *self._epochs[-_EPOCHS:]]

    def is_current(self, running: _Running) -> bool:
        """Whether no other iteration has begun."""
        return self._current is running

    def stats(
        self,
        loader: str,
        lower_bound: Callable[[], int],
        peers: dict[str, int] | None = None,
        sources: dict[str, dict[str, int]] | None = None,
        seed: int | None = None,
    ) -> Stats:
        epochs = list(self._epochs)
        if self._current is not None:
            epochs.append(self._current.freeze())
        return Stats(
            rank=self._rank,
            world_size=self._world_size,
            epochs=epochs,
            batches=BatchRecords(**{name: list(c) for name, c in self._columns.items()}),
            lower_bound_bytes=lower_bound(),
            memory=dict(zip(_POOLS, self._memory, strict=True)),
            peers=peers or {},
            loader=loader,
            sources=sources or {},
            seed=seed,
        )


def _summed(epochs: list[EpochStats]) -> EpochStats:
    """Adds epochs up into one, whose size does not grow with their number."""
    total = add_up(epochs)
    return dataclasses.replace(total, substituted=sorted(set(total.substituted)))


class _Running:
    """Sums of the epoch under way."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.start = time.perf_counter()
        self.stall = 0.0
        self.decode = 0.0
        self.batches = 0
        self.samples = 0
        self.origins = [[0, 0, 0.0] for _ in ORIGINS]
        self.substituted: list[int] = []

    def freeze(self) -> EpochStats:
        return EpochStats(
            epoch=self.epoch,
            seconds=time.perf_counter() - self.start,
            stall_seconds=self.stall,
            batches=self.batches,
            samples=self.samples,
            bytes=int(sum(o[1] for o in self.origins)),
            origins={
                name: OriginStats(samples=int(o[0]), bytes=int(o[1]), seconds=o[2])
                for name, o in zip(ORIGINS, self.origins, strict=True)
            },
            decode_seconds=self.decode,
            substituted=list(self.substituted),
        )
