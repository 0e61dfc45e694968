"""Batches of the items of a `Cached` data set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, IoError, TransformError, UsageError
from nostall.loader._context import Context
from nostall.loader._in_turn import Composed
from nostall.loader._python_transforms import (
    Failed,
    Items,
    Late,
    PythonStage,
    Substituted,
    Work,
    named,
    waited,
)
from nostall.loader._records import RawBatch
from nostall.observe import trace
from nostall.source._item_record import is_left_out
from nostall.source._items import collate, collate_items, unlike
from nostall.source._source import ItemMaker, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall.loader._feeder import Feeder


def _as_it_is(item: Any) -> Any:
    return item


class ItemStage(PythonStage):
    """Puts items together, after calling `then` of the data set with each.

    Without `then` and the user's own collate= the arrays of a batch are filled from the records: no
    item is made in between.
    """

    def __init__(
        self,
        source: ItemMaker,
        *,
        workers: Literal["threads", "processes"],
        count: int,
        collate: Callable[[list[Any]], Any] | None,
        output: str,
        on_error: str,
    ) -> None:
        super().__init__(
            Composed([source.then or _as_it_is]),
            decode=Items(source.pickles, source.modules),
            workers=workers if source.then else "threads",
            count=count,
            collate=collate or functools.partial(collate_items, output=output),
            output=output,
            on_error=on_error,
        )
        self._source = source
        self._output = output
        self._own_collate = collate is not None
        self._plain = source.then is None and collate is None

    def submit(self, batch: _native.Batch) -> Work:
        pool = self._executor
        threads = pool if isinstance(pool, ThreadPoolExecutor) else None
        if not self._plain or batch.failures or len(batch) == 0 or threads is None:
            return super().submit(batch)
        records = self._samples(batch)
        whole = threads.submit(_together, records, self._output, self._source.pickles)
        return Work(batch, records, whole=whole)

    def result(
        self, work: Work, source: Source, feeder: Feeder
    ) -> tuple[Any, Substituted, dict[int, int]]:
        if work.whole is None:
            return super().result(work, source, feeder)
        try:
            with trace.span("wait for callables", "data"):
                return waited(work.whole), [], {}
        except (CorruptionError, UsageError):
            # One by one, so that the bad one is named or replaced.
            return super().result(super().submit(work.batch), source, feeder)

    def _samples(self, batch: _native.Batch) -> Sequence[NDArray[np.uint8] | Late]:
        raw = RawBatch(batch.data, batch.offsets, batch.lengths)
        records: list[NDArray[np.uint8] | Late] = [raw[i] for i in range(len(raw))]
        for i, sample in enumerate(batch.samples.tolist()):
            if is_left_out(raw[i]):
                records[i] = Late(functools.partial(self._made, sample))
                if self._workers == "processes":
                    records[i] = self._made_here(sample)
        return records

    def _made_here(self, sample: int) -> NDArray[np.uint8] | Late:
        try:
            return self._made(sample)
        except CorruptionError as error:
            return Late(functools.partial(_unmade, str(error)))

    def _together(self, source: Source, batch: _native.Batch, results: list[Any]) -> Any:
        try:
            return self._collate(results)
        except UsageError as error:
            found = None if self._own_collate else unlike(results)
            if found is None:
                raise
            place, how = found
            raise UsageError(
                f"item {int(batch.samples[place])} of the data set {how}, as item "
                f"{int(batch.samples[0])} has: {error}"
            ) from error

    def _made(self, sample: int) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(self._source.make(sample), np.uint8)
        except TransformError as error:
            raise CorruptionError(str(error)) from None

    def _read(self, source: Source, context: Context) -> Any:
        record = super()._read(source, context)
        return self._made(context.sample) if is_left_out(record) else record

    def _refuse_fault(
        self, source: Source, sample: int, raw: NDArray[np.uint8], failed: Failed
    ) -> None:
        self._refuse_killed(source, sample, failed.reason, failed.error)
        super()._refuse_fault(source, sample, raw, failed)

    def _alone(self, source: Source, context: Context) -> tuple[Any, Any]:
        try:
            return super()._alone(source, context)
        except (IoError, CorruptionError) as error:
            self._refuse_killed(source, context.sample, str(error), error)
            raise

    def _refuse_killed(
        self, source: Source, sample: int, reason: str, error: Exception | None
    ) -> None:
        # What a kill would replace follows from the memory that was free, not from the data.
        if self._source.were_killed(sample):
            raise TransformError(f"{named(source, sample)} cannot be made: {reason}") from error


def _unmade(why: str) -> NDArray[np.uint8]:
    raise CorruptionError(why)


def _together(
    records: Sequence[NDArray[np.uint8] | Late], output: str, pickles: frozenset[str]
) -> Any:
    whole = [record.read() if isinstance(record, Late) else record for record in records]
    return collate(whole, output, pickles)
