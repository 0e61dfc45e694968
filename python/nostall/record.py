"""Keeps what happened to each batch, one small entry a batch, until somebody asks for the stats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nostall.stats import ORIGINS, BatchRecords, EpochStats, OriginStats, Stats, add_up

if TYPE_CHECKING:
    from nostall import _native

_POOLS = ("ram_tier", "file_tier", "staging", "io_buffers")


class Recorder:
    """Collects the consumer's waits and the batches' origins of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._start = time.perf_counter()
        self._epochs: list[EpochStats] = []
        self._epoch_start = 0.0
        self._current: _Running | None = None
        self._columns: dict[str, list[float]] = {
            name: [] for name in ("epoch", "batch", "time", "wait", *ORIGINS, "queue")
        }
        self._memory = (0, 0, 0, 0)
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
        """Ends the epoch before, if its iterator has not."""
        if self._current is not None:
            self.end_epoch(self._current)
        self._current = _Running(epoch)
        return self._current

    def batch(
        self,
        batch: _native.Batch,
        wait: float,
        memory: tuple[int, int, int, int],
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
        self._memory = (
            max(self._memory[0], memory[0]),
            max(self._memory[1], memory[1]),
            max(self._memory[2], memory[2]),
            max(self._memory[3], memory[3]),
        )
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
        if self.live is not None:
            self.live(self, batch.epoch, batch.index, batch.queue)

    def end_epoch(self, running: _Running) -> None:
        """Ends the epoch if it is still the current one: an abandoned iterator may end late."""
        if self._current is running:
            self._epochs.append(running.freeze())
            self._current = None

    def is_current(self, running: _Running) -> bool:
        """Whether no other iteration has begun."""
        return self._current is running

    def stats(self, lower_bound: int, peers: dict[str, int] | None = None) -> Stats:
        epochs = list(self._epochs)
        if self._current is not None:
            epochs.append(self._current.freeze())
        return Stats(
            rank=self._rank,
            world_size=self._world_size,
            epochs=epochs,
            batches=BatchRecords(**{name: list(c) for name, c in self._columns.items()}),
            lower_bound_bytes=lower_bound,
            memory=dict(zip(_POOLS, self._memory, strict=True)),
            peers=peers or {},
        )


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
