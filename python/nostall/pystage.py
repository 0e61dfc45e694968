"""Transforms written in Python, run ahead of the consumer in threads or worker processes."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.source import Pixels, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall.loader import RawBatch

Substituted = list[tuple[int, int, str]]
_BATCHES_AHEAD = 2


class _Composed:
    """Calls one function after the other, as torchvision's Compose does; can be pickled."""

    def __init__(self, steps: Iterable[Callable[[Any], Any]]) -> None:
        self.steps = list(steps)

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


# False: samples as they are; True: decoded; Pixels: taken as such.
Decode = bool | Pixels


def _decoded(raw: NDArray[np.uint8], decode: Decode) -> Any:
    if isinstance(decode, Pixels):
        return decode.image(raw)
    return _native.decode_rgb(raw) if decode else raw


def _apply(function: Callable[[Any], Any], decode: Decode, samples: list[NDArray[np.uint8]]) -> Any:
    """The results of some samples; an exception stands in the place of a sample that failed."""
    results: list[Any] = []
    for raw in samples:
        try:
            results.append(function(_decoded(raw, decode)))
        except Exception as error:
            results.append(error)
    return results


class PythonStage:
    """Applies `transforms` to every sample and makes batches of the results.

    The order of samples is that of the raw batches. A callable gets the sample's bytes, uint8 of
    shape (bytes,), or with `decode` the image, uint8 of shape (height, width, 3). With
    ``workers="processes"`` it must be picklable; processes are spawned, never forked.
    """

    def __init__(
        self,
        transforms: Any,
        *,
        decode: Decode,
        workers: Literal["threads", "processes"],
        count: int,
        collate: Callable[[list[Any]], Any] | None,
        output: str,
        on_error: str,
    ) -> None:
        if isinstance(transforms, str):
            raise UsageError(
                f"transforms is the text {transforms!r}: give steps of nostall.transforms, or a "
                "callable"
            )
        if callable(transforms):
            self._function: Callable[[Any], Any] = transforms
        else:
            steps = list(transforms)
            for step in steps:
                if not callable(step):
                    raise UsageError(
                        f"transforms mixes native steps with Python callables: {step!r} is not "
                        "callable; pass only native ones, or only callables"
                    )
            self._function = _Composed(steps)
        self._decode = decode
        self._workers = workers
        self._count = count
        self._own_collate = collate is not None
        self._collate = collate or (_stack_torch if output == "torch" else _stack_numpy)
        self._substitute = on_error == "substitute"
        self._executor: Executor | None = None
        self._pending: deque[tuple[_native.Batch, list[Future[list[Any]]]]] = deque()

    def start(self) -> PythonStage:
        if self._executor is None:
            self._executor = (
                ThreadPoolExecutor(self._count, "nostall-python")
                if self._workers == "threads"
                else ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"))
            )
        self._pending.clear()
        return self

    def wants_more(self) -> bool:
        return len(self._pending) < 1 + _BATCHES_AHEAD

    def submit(self, batch: _native.Batch, raw: RawBatch) -> None:
        """Starts the work on a batch; returns at once."""
        if self._executor is None:
            raise UsageError("the stage of Python transforms was not started")
        share = max(1, -(-len(raw) // (2 * self._count)))
        futures = [
            self._executor.submit(
                _apply,
                self._function,
                self._decode,
                [raw[i] for i in range(begin, min(begin + share, len(raw)))],
            )
            for begin in range(0, len(raw), share)
        ]
        self._pending.append((batch, futures))

    def result(self, source: Source) -> tuple[_native.Batch, Any, Substituted, dict[int, int]]:
        """The oldest batch, collated; waits for it.

        Beside the batch and its data: (bad sample, replacement, reason) of each substitution, and
        by place in the batch the sample that stands there instead, whose label goes with it.

        Raises:
            CorruptionError: the callable failed for a sample, with its path, and on_error is
                "raise"; or no sample of the batch is good enough to stand in for a bad one.
        """
        batch, futures = self._pending.popleft()
        results = [result for future in futures for result in future.result()]
        samples = batch.samples
        substituted: Substituted = []
        places: dict[int, int] = {}
        for i, result in enumerate(results):
            if not isinstance(result, Exception):
                continue
            bad = int(samples[i])
            message = f"{source.describe(bad)} (sample {bad}) cannot be used: {result}"
            if not self._substitute:
                raise CorruptionError(
                    message + '; remove or repair the file, or pass on_error="substitute"'
                ) from result
            replacement, value = self._stand_in(source, bad, message)
            results[i] = value
            substituted.append((bad, replacement, message))
            places[i] = replacement
        if not results and not self._own_collate:
            return batch, self._nothing(source), substituted, places
        return batch, self._together(source, samples, results), substituted, places

    def _together(self, source: Source, samples: Any, results: list[Any]) -> Any:
        try:
            return self._collate(results)
        except (ValueError, RuntimeError) as error:
            shapes = [np.shape(r) for r in results]
            other = next((i for i, s in enumerate(shapes) if s != shapes[0]), None)
            if self._own_collate or other is None:
                raise
            first, bad = int(samples[0]), int(samples[other])
            raise UsageError(
                f"the callable gives shape {shapes[0]} for {source.describe(first)} (sample {first}) "
                f"but {shapes[other]} for {source.describe(bad)} (sample {bad}): give one shape, or "
                "pass collate="
            ) from error

    def _nothing(self, source: Source) -> Any:
        # A rank's share of the last batch may be empty after a resume on another number of ranks:
        # no samples, in the shape that the callable gives.
        _, value = self._stand_in(source, 0, "the shape of an empty batch is not known")
        return self._collate([value])[:0]

    def _stand_in(self, source: Source, bad: int, message: str) -> tuple[int, Any]:
        # A pure function of the bad sample, so that every rank would choose the same.
        random = np.random.Generator(np.random.Philox(key=bad))
        for _ in range(1024):
            candidate = int(random.integers(len(source)))
            try:
                raw = np.frombuffer(source.native.read(candidate), dtype=np.uint8)
            except OSError:
                continue
            (value,) = _apply(self._function, self._decode, [raw])
            if not isinstance(value, Exception):
                return candidate, value
        raise CorruptionError(
            message + "; and of 1024 candidates none could stand in its place: check the data set"
        )

    def drop(self) -> None:
        """Drops what is pending; threads or processes stay for the next epoch."""
        for _, futures in self._pending:
            for future in futures:
                future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Drops what is pending and ends threads or processes."""
        self.drop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None


def _stack_numpy(results: list[Any]) -> Any:
    return np.stack([np.asarray(r) for r in results])


def _stack_torch(results: list[Any]) -> Any:
    import torch

    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return torch.from_numpy(_stack_numpy(results))
