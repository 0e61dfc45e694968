"""Transforms written in Python, run ahead of the consumer in threads or worker processes."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import io
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from nostall import _native
from nostall.base import _children as children
from nostall.base._words import printable
from nostall.errors import CorruptionError, IoError, StoppedError, TransformError, UsageError
from nostall.loader._context import Context
from nostall.loader._feeder import Feeder
from nostall.loader._processes import Answer, Processes
from nostall.loader._records import RawBatch, Records, decoded_fields
from nostall.observe import trace
from nostall.source import _items
from nostall.source._source import Pixels, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

Substituted = list[tuple[int, int, str]]
_BATCHES_AHEAD = 2
_NOTHING: tuple[list[int], Sequence[Answer]] = [], []  # at work: samples, and the parts of them
# What the process has too little of, whatever is read.
_LACKING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class Items:
    """Samples are records of items (source/_items.py).

    Their pickles may hold the classes `pickles`; their named tuples are of `modules`.
    """

    pickles: frozenset[str]
    modules: frozenset[str]


class Late:
    """In the place of a sample's bytes: what gives them."""

    def __init__(self, read: Callable[[], NDArray[np.uint8]]) -> None:
        self.read = read


# False: raw samples; True: decoded; Pixels: unpacked as pixels; Items: unpacked as items; None: they
# are unpacked already.
Decode = bool | Pixels | Items | None


class Unpacked(Protocol):
    """Gives samples of batches that a native program unpacked."""

    program: _native.Program

    def samples(self, batch: _native.Batch) -> Sequence[Any]: ...


@dataclass
class Work:
    """A batch that callables are at work on, and its samples as they get them."""

    batch: _native.Batch
    samples: Sequence[Any]
    parts: Sequence[Future[list[Any]] | Answer] = ()  # results of some samples each
    whole: Future[Any] | None = None  # all of it, put together

    def release(self) -> None:
        """Gives the memory of the samples back, as far as nothing else refers to it."""
        self.samples, self.parts, self.whole = (), (), None
        self.batch.release()

    def cancel(self) -> None:
        for part in self.parts if self.whole is None else [self.whole]:
            part.cancel()

    def is_done(self, seconds: float) -> bool:
        """Whether all results are there; waits for them for so many seconds at most."""
        parts = self.parts if self.whole is None else [self.whole]
        until = time.monotonic() + seconds
        for part in parts:
            left = max(0.0, until - time.monotonic())
            if isinstance(part, Future):
                wait([part], left)
            else:
                part.wait(left)
        return all(part.done() for part in parts)  # cancelled, too


class Unanswered(Exception):
    """Work was given up, for another thread closes the stage or the program ends; or a process died."""


def waited(part: Future[Any] | Answer) -> Any:
    """What a part of the work gives.

    Raises:
        Unanswered: there is no result. Errors of the executor's own kinds may also come from collate=,
            which is not called here.
    """
    try:
        return part.result()
    except (BrokenExecutor, CancelledError) as error:
        raise Unanswered from error


def _begin_as_of_the_program() -> None:
    """In a thread that calls, which a daemon has started: the end of the program waits for threads
    that callables start, as it does elsewhere."""
    threading.current_thread()._daemonic = False  # type: ignore[attr-defined]


def _decoded(raw: Any, decode: Decode) -> Any:
    if decode is None:
        return decoded_fields(raw) if isinstance(raw, dict) else raw
    if isinstance(raw, Late):
        raw = raw.read()
    if isinstance(decode, Pixels):
        return decode.image(raw)
    if isinstance(decode, Items):
        _items.admit(decode.modules)  # another process may not have them
        return _items.decode(raw, decode.pickles)
    return _native.decode_rgb(raw) if decode else raw


@dataclass
class Failed:
    """Takes the place of a sample that gave no result.

    `damaged` says that the sample is bad, not the callable. An exception may not be picklable, so
    another process sends only its text.
    """

    reason: str
    damaged: bool
    error: Exception | None = None
    trace: str = ""


@dataclass
class _Tries:
    """Samples of a batch that were read to stand in for others."""

    made: int = 0
    failed: int = 0


def _apply(
    function: Callable[[Any, Context], Any],
    decode: Decode,
    samples: Sequence[Any],
    contexts: Sequence[Context],
    remote: bool = False,
) -> list[Any]:
    """The results of some samples, a `Failed` in the place of each that failed.

    In a process of its own also draws from the process's generators are those of the sample.
    """
    results: list[Any] = []
    for raw, context in zip(samples, contexts, strict=True):
        if remote:
            _protect(raw)
        try:
            sample = _decoded(raw, decode)
        except CorruptionError as error:
            results.append(Failed(str(error), True))
            continue
        try:
            if remote:
                context.seed_all()
            results.append(function(sample, context))
        except CorruptionError as error:
            results.append(Failed(str(error), True))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc() if remote else ""
            results.append(Failed(reason, False, None if remote else error, trace))
    return results


def _protect(sample: Any) -> None:
    """Lets writing to the fields of a sample fail where it would be lost: in another process.

    What is decoded for callables comes back from there, and may be written to.
    """
    for value in sample.values() if isinstance(sample, dict) else ():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


# Formats that the native decoder reads, so that it can find whether a sample is damaged.
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def _is_image(name: str, raw: NDArray[np.uint8]) -> bool:
    """Whether the sample is one by its name or its first bytes."""
    head = raw[:12].tobytes()
    webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
    return webp or head.startswith(_BEGINNINGS) or name.lower().endswith(_ENDINGS)


def _damaged(name: str, raw: NDArray[np.uint8]) -> bool:
    """Whether the sample is an image that cannot be decoded."""
    if not _is_image(name, raw):
        return False
    try:
        _native.decode_rgb(raw)
    except CorruptionError:
        return True
    return False


def named(source: Source, sample: int) -> str:
    """A sample as messages name it."""
    return f"{printable(source.describe(sample))} (sample {sample})"


def takes_images(transforms: Any) -> bool:
    """Whether a callable, or the first step of it, is an image transform of a library.

    Those of torchvision.transforms and albumentations take images, never the bytes of a file. A
    user's function, also inside ``Compose`` or ``Lambda``, may take either.
    """
    steps = getattr(transforms, "transforms", transforms)
    if isinstance(steps, (list, tuple)) or type(steps).__name__ == "Sequential":
        first = next(iter(steps), None)
        return first is not None and takes_images(first)
    kind = transforms if hasattr(transforms, "__name__") else type(transforms)
    home = f"{getattr(kind, '__module__', '')}."
    return home.startswith(("torchvision.transforms.", "albumentations.")) and (
        getattr(kind, "__name__", "") != "Lambda"
    )


def check_pickles(
    given: Any,
    what: str = "the callable",
    remedy: str = "a function of a module, not a lambda or a function within one",
) -> None:
    """Spawned processes get it by pickle."""
    try:
        pickler = _Pickler(io.BytesIO())
        pickler.dump(given)
    except Exception as error:
        raise UsageError(
            f'workers="processes" cannot send {what} to its processes: {error}. Make it '
            f'{remedy}, or use workers="threads"'
        ) from error
    typed = getattr(sys.modules["__main__"], "__file__", "<").startswith("<")
    if typed and pickler.of_main:
        raise UsageError(
            f'workers="processes" cannot send {what} to its processes: it was typed into a notebook or '
            'an interpreter, which they cannot import. Put it into a module, or use workers="threads"'
        )


class _Pickler(pickle.Pickler):
    """Notes whether a function or class of the main program is looked up by its name."""

    of_main = False

    def persistent_id(self, given: Any) -> None:
        if isinstance(given, (type, types.FunctionType)):
            self.of_main |= given.__module__ == "__main__"


class PythonStage:
    """Applies a function to every sample and makes batches of the results.

    The order of samples is that of the native batches. The function gets a sample and its context: the
    sample's bytes, uint8 of shape (bytes,), with `decode` the image, uint8 of shape (height, width, 3),
    or what `unpacked` has of it. With ``workers="processes"`` it must be picklable; processes are
    spawned, never forked. Its exceptions become a TransformError, unless the sample is damaged: it
    raised CorruptionError, or the sample is a JPEG, PNG or WebP image that cannot be decoded. With
    `tells_of_bytes` errors about such images say that the function is given bytes.
    """

    def __init__(
        self,
        function: Callable[[Any, Context], Any],
        *,
        decode: Decode,
        workers: Literal["threads", "processes"],
        count: int,
        collate: Callable[[list[Any]], Any] | None,
        output: str,
        on_error: str,
        unpacked: Unpacked | None = None,
        tells_of_bytes: bool = False,
    ) -> None:
        self._function = function
        self._tells_of_bytes = tells_of_bytes and decode is False and unpacked is None
        if workers == "processes":
            check_pickles(function)
        self._unpacked = unpacked
        self._decode = decode
        self._workers = workers
        self._count = count
        self._own_collate = collate is not None
        self._collate = collate or (_stack_torch if output == "torch" else _stack_numpy)
        self._substitute = on_error == "substitute"
        self._single = _NOTHING  # what is called for one sample alone
        self.staging = 0  # bytes of raw batches at work; 0: no limit
        self._executor: ThreadPoolExecutor | Processes | None = None
        # Of the iteration that has begun last, which keeps it.
        self._feeder: Callable[[], Feeder | None] = lambda: None
        self._drops = 0  # calls of drop()
        self._closed = False

    def follow(self, job: _native.JobSpec) -> None:
        """Takes the job whose batches this gets."""
        self._seed = job.seed
        self._stand_ins = functools.cache(functools.partial(_native.StandIns, job))

    def start(self, loader: _native.Loader, count: int) -> Feeder:
        """Begins with the next `count` batches of a loader.

        Raises:
            StoppedError: another thread has closed this.
        """
        self._refuse_closed()
        drops = self._drops
        self._end_feeder()
        if self._executor is None:
            if self._workers == "threads":
                self._executor = ThreadPoolExecutor(
                    self._count, "nostall-python", _begin_as_of_the_program
                )
            else:
                work = functools.partial(_apply, self._function, self._decode, remote=True)
                self._executor = Processes(self._count, work)
        feeder = Feeder(loader, self, count)
        self._feeder = weakref.ref(feeder)
        if self._drops != drops:  # by another thread, which may not have found this feeder
            feeder.close()
        self._refuse_closed()
        return feeder

    def _refuse_closed(self) -> None:
        if self._closed:
            self._end_work()  # what has begun since then
            raise StoppedError("the loader is closed")

    def wants_more(self, works: Sequence[Work]) -> bool:
        """Whether there is to be one more batch at work: two are, others as `staging` allows where
        samples are raw; three at most."""
        count = len(works)
        if count < 2 or count > _BATCHES_AHEAD or not self.staging or self._unpacked is not None:
            return count <= _BATCHES_AHEAD
        held = sum(work.batch.data.nbytes for work in works)
        return held + held // count <= self.staging

    def submit(self, batch: _native.Batch) -> Work:
        """Starts the work on a batch; returns at once."""
        if self._executor is None:
            raise UsageError("the stage of Python transforms was not started")
        share = max(1, -(-len(batch) // (2 * self._count)))
        records, contexts = self._samples(batch), self._contexts(batch)
        parts: Sequence[Future[list[Any]] | Answer]
        if isinstance(self._executor, Processes):
            parts = self._executor.submit(records, contexts, share)
        else:
            parts = [
                self._executor.submit(
                    _apply,
                    self._function,
                    self._decode,
                    records[begin : begin + share],
                    contexts[begin : begin + share],
                )
                for begin in range(0, len(batch), share)
            ]
        return Work(batch, records, parts)

    def _contexts(self, batch: _native.Batch) -> list[Context]:
        samples, again = batch.samples.tolist(), batch.occurrences.tolist()
        return [
            Context(sample, batch.epoch, self._seed, occurrence)
            for sample, occurrence in zip(samples, again or [0] * len(samples), strict=True)
        ]

    def _samples(self, batch: _native.Batch) -> Sequence[Any]:
        if self._unpacked is not None:
            return self._unpacked.samples(batch)
        raw = RawBatch(batch.data, batch.offsets, batch.lengths)
        return [raw[i] for i in range(len(raw))]

    def _alone(self, source: Source, context: Context) -> tuple[Any, Any]:
        """A sample that is read for itself, and what the function gives for it.

        Raises:
            IoError, CorruptionError: it cannot be read.
        """
        sample = self._read(source, context)
        return sample, self._called(sample, context)

    def _called(self, sample: Any, context: Context) -> Any:
        executor = self._executor
        if executor is None:
            raise Unanswered  # another thread closes this
        if isinstance(executor, Processes):
            answers = executor.submit([sample], [context], 1)
            self._single = [context.sample], answers
            (value,) = waited(answers[0])
        else:
            (value,) = _apply(self._function, self._decode, [sample], [context])
        return value

    def _read(self, source: Source, context: Context) -> Any:
        if self._unpacked is not None:
            return self._unpacked.samples(self._unpack(self._unpacked.program, source, context))[0]
        return np.frombuffer(source.native.read(context.sample), dtype=np.uint8)

    def _unpack(self, program: _native.Program, source: Source, context: Context) -> _native.Batch:
        return _native.unpack_one(
            source.native,
            program,
            source.native.read(context.sample),
            context.sample,
            seed=context.seed,
            epoch=context.epoch,
            occurrence=context.occurrence,
        )

    def result(
        self, work: Work, source: Source, feeder: Feeder
    ) -> tuple[Any, Substituted, dict[int, int]]:
        """Waits for a batch that `feeder` gave and returns its data, collated.

        Beside them: (bad sample, replacement, reason) of each substitution, and
        by place in the batch the replacement sample, whose label is used too.

        Raises:
            TransformError: the callable failed for a sample, with its path; or a process of
                ``workers="processes"`` died.
            CorruptionError: a sample is damaged, with its path, and on_error is "raise"; or no
                sample is good enough to stand in for it.
            Unanswered: another thread closes the stage, or the program ends.
            Exception: any, where another thread closes the stage meanwhile.
        """
        try:
            return self._result(work, source, feeder)
        except Unanswered as error:
            if self._is_ending(feeder) or not isinstance(error.__cause__, BrokenExecutor):
                raise
            raise self._worker_died(source, feeder) from error.__cause__
        finally:
            self._single = _NOTHING

    def _result(
        self, work: Work, source: Source, feeder: Feeder
    ) -> tuple[Any, Substituted, dict[int, int]]:
        batch = work.batch
        with trace.span("wait for callables", "data"):
            results = [result for part in work.parts for result in waited(part)]
        if self._is_ending(feeder):
            raise Unanswered
        samples = batch.samples
        unread = dict(batch.failures)
        for place, result in enumerate(results):
            if place in unread:
                results[place] = Failed(unread[place], True)
            elif isinstance(result, Failed) and result.damaged:
                feeder.forget_sum(int(samples[place]))
        tries = _Tries()
        substituted: Substituted = []
        places: dict[int, int] = {}
        for i, result in enumerate(results):
            if not isinstance(result, Failed):
                continue
            bad = int(samples[i])
            self._refuse_fault(source, bad, work.samples[i], result)
            message = f"{named(source, bad)} cannot be used: {result.reason}"
            if not self._substitute:
                raise CorruptionError(
                    message + '; remove or repair the file, or pass on_error="substitute"'
                ) from result.error
            replacement, value = self._stand_in(source, self._contexts(batch)[i], message, tries)
            results[i] = value
            substituted.append((bad, replacement, message))
            places[i] = replacement
        if not results:
            return self.nothing(source, batch), substituted, places
        return self._together(source, batch, results), substituted, places

    def _is_ending(self, feeder: Feeder) -> bool:
        """Whether another thread closes this or iterates anew, or the program ends."""
        executor = self._executor
        return feeder.closed or (isinstance(executor, Processes) and executor.ended)

    def is_of_an_end(self, error: Exception, feeder: Feeder) -> bool:
        """Whether it failed as another thread has taken the batch away, or the program has ended."""
        if isinstance(error, TransformError):
            return False
        return feeder.closed or isinstance(error, Unanswered)

    def _worker_died(self, source: Source, feeder: Feeder) -> TransformError:
        """Drops the processes: the next iteration starts others."""
        executor = self._executor
        feeder.end()  # it may be sending the batch whose sample it was
        works = [(work.batch.samples.tolist(), work.parts) for work in feeder.at_work]
        works.append(self._single)
        self._end_work()
        codes = executor.crashed() if isinstance(executor, Processes) else {}
        code, at_work = next(iter(codes.values()), 0), ""
        for samples, parts in works:
            for answer in parts:
                found = answer.worked_on(codes) if isinstance(answer, Answer) else None
                if found is None:
                    continue
                sample, code = samples[found[1]], codes[found[0]]
                at_work = named(source, sample)
                if code != -signal.SIGKILL:
                    return TransformError(
                        f"transforms failed for {at_work}: their process "
                        f"{children.ended_by(code)}, as a library that they call crashed"
                    )
        if code == -signal.SIGKILL:
            why = (
                "most often memory ran out and the system killed it (dmesg says so); give fewer "
                'threads=, a smaller batch_size, or workers="threads"'
            )
        elif code < 0:
            why = "most often a library in it crashed"
        elif code == children.UNGUARDED:
            why = children.WHY_UNGUARDED
        else:
            why = "most often a module that it imports ended it; what it printed is above"
        return TransformError(
            f"one of the {self._count} worker processes of transforms {children.ended_by(code)}"
            f"{at_work and f' at work on {at_work}'}: {why}"
        )

    def _refuse_fault(
        self, source: Source, sample: int, raw: NDArray[np.uint8], failed: Failed
    ) -> None:
        """Raises TransformError unless it is the sample that is damaged."""
        name = source.describe(sample)
        if failed.damaged or (self._decode is False and _damaged(name, raw)):
            return
        hint = (
            "; a callable that finds a sample damaged raises nostall.errors.CorruptionError"
            if self._substitute
            else ""
        )
        raise TransformError(
            f"transforms failed for {named(source, sample)}: {failed.reason}"
            f"{self._of_bytes(name, raw)}{hint}" + (f"\n\n{failed.trace}" if failed.trace else "")
        ) from failed.error

    def _of_bytes(self, name: str, raw: NDArray[np.uint8]) -> str:
        """The end of an error of a function that may have been meant for images."""
        if not (self._tells_of_bytes and _is_image(name, raw)):
            return ""
        return "; it is given the bytes of the file: decode=True gives it the image"

    def _together(self, source: Source, batch: _native.Batch, results: list[Any]) -> Any:
        samples = batch.samples
        if self._own_collate:
            return self._collate(results)
        for i, result in enumerate(results):
            if result is None or isinstance(result, _NO_ARRAYS):
                raise UsageError(
                    f"the callable gives {type(result).__name__} for {named(source, int(samples[i]))}, "
                    "which makes no array: pass collate=, which gets the list of such results"
                )
        try:
            return self._collate(results)
        except (TypeError, ValueError, RuntimeError) as error:
            first = named(source, int(samples[0]))
            for what, of in (("shape", _shape), ("type", _type)):
                said = [of(result) for result in results]
                other = next((i for i, s in enumerate(said) if s != said[0]), None)
                if other is not None:
                    raise UsageError(
                        f"the callable gives {what} {said[0]} for {first} but {said[other]} for "
                        f"{named(source, int(samples[other]))}: give one {what}, or pass collate="
                    ) from error
            raise UsageError(
                f"the callable gives {_type(results[0])} for {first}, which makes no array ({error}): "
                "pass collate=, which gets the list of such results"
            ) from error

    def nothing(self, source: Source, batch: _native.Batch) -> Any:
        """A batch without samples, in the form of others: a rank's share of the last may be empty."""
        one, *two = (self._any(source, batch.epoch) for _ in range(3))  # collate= may change them
        try:
            return _without_rows(self._collate([one]), self._collate(two))
        except Exception as error:
            reason = error
        try:  # collate= may know what no samples of its kind are
            return self._collate([])
        except Exception:
            raise UsageError(
                "a rank has no sample of the last batch, and what collate= gives cannot be cut to none "
                f"({reason}): give arrays, or take an empty list"
            ) from reason

    def _any(self, source: Source, epoch: int) -> Any:
        """What the function gives for some sample of the order."""
        none = Context(len(source), epoch, self._seed)  # in whose place any sample can stand
        message = "the shape of an empty batch is not known"
        return self._stand_in(source, none, message, _Tries())[1]

    def _stand_in(
        self, source: Source, bad: Context, message: str, tries: _Tries
    ) -> tuple[int, Any]:
        drawn = self._stand_ins().of(bad.sample).tolist()
        candidates = [candidate for candidate in drawn if candidate != bad.sample]
        for candidate in candidates[: _native.STAND_IN_READS]:
            tries.made += 1
            try:
                sample, value = self._alone(source, dataclasses.replace(bad, sample=candidate))
            except (IoError, CorruptionError) as error:
                # Another candidate would make the data depend on what this process lacks.
                if isinstance(error, IoError) and error.errno in _LACKING:
                    raise
                tries.failed += 1
                continue
            if not isinstance(value, Failed):
                return candidate, value
            self._refuse_fault(source, candidate, sample, value)
            tries.failed += 1
        raise CorruptionError(message + _native.none_stands_in(tries.failed, tries.made))

    def drop(self) -> None:
        """Drops pending work; threads or processes stay for the next epoch."""
        self._drops += 1
        self._end_feeder()

    def _end_feeder(self) -> None:
        feeder = self._feeder()
        if feeder is not None:
            feeder.close()

    def close(self) -> None:
        """Drops pending work and ends threads or processes."""
        self._closed = True
        self._end_work()

    def _end_work(self) -> None:
        self.drop()
        executor = self._executor
        if isinstance(executor, Processes):
            executor.close()
        elif executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        self._executor = None


class RecordStage(PythonStage):
    """The same for samples of several fields, of which the function gives those that it changes."""

    def __init__(self, records: Records, function: Callable[..., Any], **more: Any) -> None:
        super().__init__(function, decode=None, unpacked=records, **more)
        self._of = records

    def _alone(self, source: Source, context: Context) -> tuple[Any, Any]:
        batch = self._unpack(self._of.program, source, context)
        sample = self._of.samples(batch)[0]
        value = self._called(sample, context)
        # All fields: in a batch of others the sample is not among those of the program.
        return sample, value if isinstance(value, Failed) else {**self._of.whole(batch), **value}

    def nothing(self, source: Source, batch: _native.Batch) -> Any:
        self._of.learn(self._any(source, batch.epoch))
        return self._together(source, batch, [])

    def _together(self, source: Source, batch: _native.Batch, results: list[Any]) -> Any:
        def describe(place: int) -> str:
            return named(source, int(batch.samples[place]))

        data = self._of.together(batch, results, self._seed, describe)
        return self._collate(data) if self._own_collate else data


class UncalledStage(PythonStage):
    """Where nothing is called but collate=: makes the batch without samples alone."""

    def _called(self, sample: Any, context: Context) -> Any:
        return self._function(sample, context)


def _without_rows(one: Any, two: Any) -> Any:
    """What a batch of no samples would be, from those of one sample and of two like it.

    What the second has more is one sample's, be it a row, a member of a list or a part of a count.
    """
    if isinstance(one, MutableMapping):
        none = copy.copy(one)
        none.update({key: _without_rows(value, two[key]) for key, value in one.items()})
        return none
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*map(_without_rows, one, two))
    if isinstance(one, list | tuple):
        return type(one)(map(_without_rows, one[: max(0, 2 * len(one) - len(two))], two))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        whole = copy.copy(one)
        for name in (field.name for field in dataclasses.fields(one)):
            object.__setattr__(whole, name, _without_rows(getattr(one, name), getattr(two, name)))
        return whole
    if one is None or isinstance(one, str | bytes | bool):
        return one
    if isinstance(one, int | float) or tuple(one.shape) == ():
        return one if "bool" in str(getattr(one, "dtype", "")) else 2 * one - two
    sides = zip(one.shape, two.shape, strict=True)
    return one[tuple(slice(max(0, 2 * of_one - of_two)) for of_one, of_two in sides)]


# Results that stacking would change, or cannot stack.
_NO_ARRAYS = (dict, tuple, set, str, bytes)


def _shape(result: Any) -> str:
    try:
        return str(tuple(np.shape(result)))
    except ValueError:
        return "lists of several lengths"


def _type(result: Any) -> str:
    name, dtype = type(result).__name__, getattr(result, "dtype", None)
    return name if dtype is None else f"{name} of {dtype}"


def _stack_numpy(results: list[Any]) -> Any:
    stacked = np.stack([np.asarray(r) for r in results])
    if stacked.dtype == object:
        raise TypeError("objects make no array of numbers")
    return stacked


def _stack_torch(results: list[Any]) -> Any:
    import torch

    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return torch.from_numpy(_stack_numpy(results))
