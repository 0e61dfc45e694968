"""Checks of sources, kinds of fields, transforms and tiers that users write.

    nostall.testing.check_source(MyArchive("/data/a"))
    nostall.testing.check_field(MyKind(), [one, another])
    nostall.testing.check_transform(my_step, [image])
    nostall.testing.check_tier(MyTier(capacity), start_methods=["fork"])

Each call returns if all holds, and raises an AssertionError that says what does not. nostall's own
sources, kinds and transforms pass the same checks.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from nostall.base import _checks as checks
from nostall.base import _children as children
from nostall.base._tier import Tier
from nostall.errors import CorruptionError, IoError, TransformError, UsageError
from nostall.fields import Kind, Padded, Ragged, Schema
from nostall.loader._context import Context, takes_context
from nostall.loader._loader import DataLoader
from nostall.loader._records import RawBatch
from nostall.loader._tiers import Tiers
from nostall.loader.transforms import Transform
from nostall.loader.transforms import compile as compile_transforms
from nostall.source import CustomFields, CustomSource, FieldReader, SampleReader, Source

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["check_field", "check_source", "check_tier", "check_transform"]

_THREADS = 4
_BATCH = 5
_WAIT_S = 120
_SPARE = 1 << 20  # bytes of a tier beside its samples


def _fail(subject: object, what: str) -> NoReturn:
    raise AssertionError(f"{subject!r}: {what}")


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal: arrays with type and shape, and what is made of them."""
    if isinstance(one, RawBatch) and isinstance(other, RawBatch):
        parts = [[batch[i] for i in range(len(batch))] for batch in (one, other)]
        return _same(*parts)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__array__") and hasattr(one, "dtype"):
        one, other = np.asarray(one), np.asarray(other)
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other)


def _methods(given: Any) -> tuple[str, ...]:
    methods = checks.texts("start_methods", given)
    for method in methods:
        children.check_method("each of start_methods", method)
    return methods


# ------------------------------------------------------------------------------------ sources


def check_source(
    source: Source,
    *,
    unreadable: Sequence[int] = (),
    start_methods: Sequence[str] = (),
    most: int = 64,
) -> None:
    """Checks that a source does what loaders rely on.

    Its sizes are those of what is read; samples are the same when they are read again, by several
    threads at once, through tiers, from a pickled copy, and with some of the fields left out; numbers
    out of range are refused; every sample has a name; and what cannot be read is an error with it.

    Args:
        source: that has been opened.
        unreadable: samples that cannot be read, if it has any: their errors must name them.
        start_methods: as ``multiprocessing`` has them: processes that are started so must read the
            same.
        most: samples that are read, spread over the source.

    Raises:
        AssertionError: it does not; the message says what.
        UsageError: start methods that there are not, or no sample is to be read.
    """
    most, methods = checks.whole("most", most, 1, 2**63 - 1), _methods(start_methods)
    _check_listing(source)
    readable = sorted(set(range(len(source))) - set(unreadable))
    chosen = readable[:: max(1, -(-len(readable) // most))]
    found = {sample: source.read(sample) for sample in chosen}
    names: dict[str, bytes] = {}
    for sample, data in found.items():
        name = source.describe(sample)
        if data and names.setdefault(name, data) != data:
            _fail(source, f"two samples that differ have one name, {name!r}")
        if len(data) != source.sizes[sample]:
            _fail(source, f"{name} has {len(data)} bytes, and its size is {source.sizes[sample]}")
    _check_reads(source, found)
    for sample in unreadable:
        _check_unreadable(source, sample)
    copy = pickle.loads(pickle.dumps(source))
    _check_copy(source, copy, found)
    for method in methods:
        _check_process(source, method, found)
    if chosen:
        _check_batches(source, chosen)


def _check_listing(source: Source) -> None:
    n = len(source)
    if n < 1:
        _fail(source, "it has no samples")
    sizes = source.sizes
    if sizes.shape != (n,) or sizes.dtype != np.uint64 or int(sizes.sum()) != source.total_bytes:
        _fail(source, f"sizes are not {n} of uint64 that add up to {source.total_bytes} bytes")
    if (labels := _labels_of(source)) is not None and labels.shape != (n,):
        _fail(source, f"labels have the shape {labels.shape}, not ({n},)")
    if not isinstance(source.schema, Schema):
        _fail(source, f"schema is {type(source.schema).__name__}, not nostall.Schema")
    for sample in {0, n - 1}:
        if not isinstance(source.describe(sample), str) or not source.describe(sample):
            _fail(source, f"sample {sample} has no name: describe gives none")
    for call in (source.read, source.describe):
        for sample in (n, n + 1000):
            try:
                call(sample)
            except (LookupError, UsageError):
                continue
            _fail(source, f"it has {n} samples, and {call.__name__}({sample}) is not refused")


def _labels_of(source: Source) -> Any:
    try:
        return source.labels
    except UsageError:
        return None


def _check_reads(source: Source, found: dict[int, bytes]) -> None:
    """The same bytes again, in other orders, by several threads at once."""

    def read_all(seed: int) -> list[int]:
        order = list(found)
        random.Random(seed).shuffle(order)
        return [sample for sample in order if source.read(sample) != found[sample]]

    with ThreadPoolExecutor(_THREADS) as pool:
        for wrong in pool.map(read_all, range(_THREADS)):
            if wrong:
                name = source.describe(wrong[0])
                _fail(source, f"{name} has other bytes when {_THREADS} threads read at once")


def _check_unreadable(source: Source, sample: int) -> None:
    name = source.describe(sample)

    def load() -> None:
        with _loader(source, [sample], batch_size=1) as loader:
            list(loader)

    for how, call in (("read", lambda: source.read(sample)), ("a loader", load)):
        try:
            call()
        except (IoError, CorruptionError) as error:
            if name in str(error):
                continue
            _fail(source, f"the error of {how} does not name {name!r}: {error}")
        except Exception as error:
            _fail(source, f"{how} raises {type(error).__name__} for {name}, not IoError: {error}")
        _fail(source, f"{how} gives {name}, which should not be readable")


def _check_copy(source: Source, copy: Any, found: dict[int, bytes]) -> None:
    if not isinstance(copy, Source) or len(copy) != len(source):
        _fail(source, f"a pickled copy of it is {copy!r}")
    if not _same(copy.sizes, source.sizes) or not _same(_labels_of(copy), _labels_of(source)):
        _fail(source, "a pickled copy of it has other sizes or labels")
    if copy.schema != source.schema:
        _fail(source, f"a pickled copy of it has the schema {copy.schema!r}, not {source.schema!r}")
    if copy.fingerprint != source.fingerprint:
        _fail(source, "a pickled copy of it has another fingerprint")
    for sample, data in found.items():
        if copy.read(sample) != data:
            _fail(source, f"a pickled copy of it has other bytes of {source.describe(sample)}")


def _sums(source: Source, samples: list[int], answer: Connection) -> None:
    answer.send([zlib.crc32(source.read(sample)) for sample in samples])


def _in_process(method: str, function: Callable[..., None], *arguments: Any) -> Any:
    """What a process that is started so sends, as the function's last argument; None if nothing."""
    start: Any = multiprocessing.get_context(method)
    here, there = start.Pipe(duplex=False)
    process = start.Process(target=function, args=(*arguments, there))
    process.start()
    there.close()
    sent = None
    try:
        if here.poll(_WAIT_S):
            sent = here.recv()
    except EOFError:
        pass
    finally:
        process.kill() if sent is None else None
        process.join()
    return sent


def _check_process(source: Source, method: str, found: dict[int, bytes]) -> None:
    sums = _in_process(method, _sums, source, list(found))
    if sums is None:
        _fail(source, f"a process that was started by {method} could not read it")
    if sums != [zlib.crc32(data) for data in found.values()]:
        _fail(source, f"a process that was started by {method} reads other bytes")


def _loader(source: Source, order: Sequence[int], **options: Any) -> DataLoader:
    options = {"batch_size": _BATCH, "tiers": [], "output": "numpy", "epochs": 1, **options}
    return DataLoader(source, order=order, rank=0, world_size=1, local_rank=0,
                      local_world_size=1, **options)  # fmt: skip


def _check_batches(source: Source, chosen: list[int]) -> None:
    """Batches from the source, and twice through a tier, with another number of threads."""
    maker = source.item_maker
    if maker is not None and maker.then is not None:
        return  # its results are the user's
    with _loader(source, chosen, threads=1) as loader:
        plain = list(loader)
        pairs = loader.gives_pairs
    room = 2 * sum(int(source.sizes[sample]) for sample in chosen) + _SPARE
    options: dict[str, Any] = {"threads": _THREADS, "epochs": 2, "tiers": [f"ram:{room}B"]}
    with _loader(source, chosen, **options) as loader:
        for epoch in loader.epochs():
            for number, (one, other) in enumerate(zip(plain, epoch, strict=True)):
                if not _same(one, other):
                    _fail(source, f"batch {number} is another one in epoch {epoch.index} of a tier")
    if not pairs and maker is None:
        _check_selection(source, chosen, plain)


def _check_selection(source: Source, chosen: list[int], plain: list[Any]) -> None:
    """One field at a time, where the others are not needed."""
    for name in source.schema:
        with _loader(source, chosen, fields=[name]) as loader:
            for number, batch in enumerate(loader):
                if not _same(batch[name], plain[number][name]):
                    _fail(source, f"field {name} is another one where it alone is selected")


# ------------------------------------------------------------------------------------- fields


class _Stored(FieldReader):
    """Values in memory."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values

    def read(self, parts: list[tuple[int, str]]) -> Sequence[Any]:
        return [self._values[sample] for sample, _ in parts]

    def describe(self, sample: int) -> str:
        return f"value {sample}"


def _batches(kind: Kind, stored: Sequence[bytes | None], **options: Any) -> Iterator[Any]:
    """What batches have of these values."""
    source = CustomFields(
        _Stored([b"" if value is None else value for value in stored]),
        {"value": [-1 if value is None else len(value) for value in stored]},
        schema={"value": kind},
        identity=str(zlib.crc32(b"\n".join(value or b"" for value in stored))),
    )
    with _loader(source, range(len(stored)), **options) as loader:
        for batch in loader:
            yield batch["value"]


def _value_of(batch: Any, i: int) -> Any:
    """That of one sample, without what fills it up."""
    if isinstance(batch, Ragged):
        return batch.sample(i)
    if isinstance(batch, Padded):
        sides = np.atleast_1d(batch.lengths[i]).tolist()
        return batch.values[i][tuple(slice(0, side) for side in sides)]
    return batch[i]


def check_field(
    kind: Kind,
    values: Sequence[Any],
    *,
    gives: Sequence[Any] | None = None,
    damaged: Sequence[bytes] = (),
    refused: Sequence[Any] = (),
) -> None:
    """Checks that a kind of fields does what loaders rely on.

    It can be compared, hashed and pickled; values are stored the same each time; a batch has the same
    of a value whatever stands beside it and whichever thread decodes it, of the type and shape that the
    kind says; damaged bytes are a CorruptionError that names the sample and the field, and no bytes are
    anything worse; a missing value has the kind's `fill`.

    Args:
        kind: with its parameters.
        values: two or more that are not all equal, as `encode` takes them.
        gives: what a batch has of each; not compared if None.
        damaged: stored bytes that are no value.
        refused: what `encode` must refuse, with a UsageError.

    Raises:
        AssertionError: it does not; the message says what.
        UsageError: fewer than two values, or all are equal.
    """
    if not isinstance(kind, Kind):
        _fail(kind, "it is no kind: derive its class from nostall.fields.Custom")
    if len(values) < 2 or all(_same(value, values[0]) for value in values):
        raise UsageError(f"values must be two or more that are not all equal, not {values!r}")
    copy = pickle.loads(pickle.dumps(kind))
    if copy != kind or hash(copy) != hash(kind):
        _fail(kind, "a pickled copy of it is not equal to it: make it a frozen dataclass")
    stored = [kind.encode(value) for value in values]
    if not all(isinstance(value, bytes) for value in stored):
        _fail(kind, "encode does not give bytes")
    if [kind.encode(value) for value in values] != stored:
        _fail(kind, "encode gives other bytes the second time")
    for value in refused:
        try:
            kind.encode(value)
        except UsageError:
            continue
        _fail(kind, f"encode does not refuse {value!r} with a UsageError")
    (together,) = _batches(kind, stored, batch_size=len(stored), threads=1)
    found = [_value_of(together, i) for i in range(len(stored))]
    for i, one in enumerate(_batches(kind, stored, batch_size=1, threads=_THREADS)):
        if not _same(_value_of(one, 0), found[i]):
            _fail(kind, f"value {i} is another one in a batch of its own")
    for i, value in enumerate(found):
        _check_form(kind, i, value)
        if gives is not None and not _same(value, _like(gives[i], value)):
            _fail(kind, f"value {i} is {value!r} in a batch, not {gives[i]!r}")
    _check_damage(kind, stored[0], damaged)
    if kind.fill is not None:
        batches = list(_batches(kind, [None, kind.encode(kind.fill)], batch_size=1))
        if not _same(_value_of(batches[0], 0), _value_of(batches[1], 0)):
            _fail(kind, f"a missing value is not its fill, {kind.fill!r}")


def _like(wanted: Any, value: Any) -> Any:
    """What is wanted, as an array where the value is one."""
    return np.asarray(wanted, value.dtype)[()] if hasattr(value, "dtype") else wanted


def _check_form(kind: Kind, i: int, value: Any) -> None:
    dtype, shape = getattr(kind, "dtype", None), getattr(kind, "shape", None)
    if dtype is not None and value.dtype != dtype:
        _fail(kind, f"value {i} is of {value.dtype} in a batch, and its dtype is {dtype}")
    if shape is not None and (
        len(shape) != value.ndim
        or any(s not in (None, v) for s, v in zip(shape, value.shape, strict=True))
    ):
        _fail(kind, f"value {i} has the shape {value.shape} in a batch, and its shape is {shape}")


def _check_damage(kind: Kind, good: bytes, damaged: Sequence[bytes]) -> None:
    draw = random.Random(0)
    others = [good[: len(good) * cut // 4] for cut in range(4)]
    others += [draw.randbytes(size) for size in (1, 8, len(good))]
    for number, stored in enumerate(itertools.chain(damaged, others)):
        known = number < len(damaged)
        try:
            list(_batches(kind, [good, stored], batch_size=1))
        except CorruptionError as error:
            if "value 1" not in str(error) or "field value" not in str(error):
                _fail(kind, f"an error does not name the sample and the field: {error}")
            continue
        except TransformError as error:
            _fail(kind, f"{stored[:32]!r} is damaged, and no CorruptionError but: {error}")
        if known:
            _fail(kind, f"{stored[:32]!r} is damaged, and no CorruptionError")


# --------------------------------------------------------------------------------- transforms


def check_transform(
    step: Callable[..., Any] | Sequence[Transform],
    samples: Sequence[Any],
    *,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    pickled: bool = True,
) -> None:
    """Checks that a transform's results depend on the sample and its context alone.

    They are the same when it is called again, in another order, by several threads at once, and by a
    pickled copy; of one type and shape, so that they make a batch.

    Args:
        step: a callable, with a parameter named `context` or without, or a list of native transforms.
        samples: what it is given, for example images as arrays; of native ones, bytes of files.
        dtype: of the results, if they are arrays or tensors; that of the first if None.
        shape: of the results; that of the first if None.
        pickled: whether it must be picklable, as ``workers="processes"`` needs it.

    Raises:
        AssertionError: they are not; the message says what.
        UsageError: there are no samples, or dtype or shape is none.
    """
    if not len(samples):
        raise UsageError(f"samples must be one or more, not {samples!r}")
    asked = _form_asked(dtype, shape)
    call = _callable_of(step)
    places = list(enumerate(samples)) * 2
    contexts = [Context(i, epoch, 7) for epoch in range(2) for i in range(len(samples))]

    def apply(
        order: Sequence[int], function: Callable[[Any, Context], Any] = call
    ) -> dict[int, Any]:
        # Each call has a sample of its own, for it may change it.
        return {i: function(pickle.loads(pickle.dumps(places[i][1])), contexts[i]) for i in order}

    forward = list(range(len(places)))
    first = apply(forward)
    hint = "all that is random must come from the generators of its context"
    _compare(step, first, apply(forward[::-1]), f"when it is called again: {hint}")
    with ThreadPoolExecutor(_THREADS) as pool:
        for again in pool.map(apply, [forward, forward[::-1]] * 2):
            _compare(step, first, again, "when several threads call it at once")
    if pickled and callable(step):
        try:
            copy = pickle.loads(pickle.dumps(step))
        except Exception as error:
            _fail(step, f"it cannot be pickled, as workers='processes' needs it: {error}")
        _compare(step, first, apply(forward, _callable_of(copy)), "from a pickled copy")
    found = _form_of(first[0])
    wanted = tuple(own if one is None else one for one, own in zip(asked, found, strict=True))
    for i, result in first.items():
        if _form_of(result) != wanted:
            _fail(step, f"result {i} is of type and shape {_form_of(result)}, not {wanted}")


def _callable_of(step: Any) -> Callable[[Any, Context], Any]:
    if not callable(step):
        if not all(isinstance(one, Transform) for one in step):
            raise UsageError(f"{step!r} is neither a callable nor a list of nostall.transforms")
        pipeline = compile_transforms(step)
        return lambda sample, context: pipeline.apply(
            sample, seed=context.seed, epoch=context.epoch, sample=context.sample
        )
    if takes_context(step):
        return lambda sample, context: step(sample, context=context)
    return lambda sample, context: step(sample)


def _compare(step: Any, first: dict[int, Any], again: dict[int, Any], when: str) -> None:
    for i, result in again.items():
        if not _same(result, first[i]):
            _fail(step, f"the result of sample {i % (len(first) // 2)} is another one {when}")


def _form_asked(dtype: Any, shape: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """As `_form_of`, None for what was not asked for."""
    if shape is not None and not (
        isinstance(shape, (tuple, list)) and all(map(checks.is_whole, shape))
    ):
        raise UsageError(f"shape must be a tuple of whole numbers, not {shape!r}")
    sides = None if shape is None else tuple(shape)
    if dtype is None or isinstance(dtype, str):
        return dtype, sides
    if type(dtype).__module__ == "torch":
        return str(dtype), sides
    try:
        return np.dtype(dtype).name, sides
    except TypeError:
        raise UsageError(f"dtype must be a type of NumPy or torch, not {dtype!r}") from None


def _form_of(result: Any) -> tuple[str, tuple[int, ...]]:
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        return str(result.dtype), tuple(result.shape)
    return type(result).__name__, ()


# -------------------------------------------------------------------------------------- tiers

_LENGTHS = (0, 1, 4095, 70_001)


def _value(key: str, length: int) -> bytes:
    return random.Random(key).randbytes(length)


def check_tier(tier: Tier, *, start_methods: Sequence[str] = ()) -> None:
    """Checks that a tier of the user's own does what loaders rely on.

    A key that was never put has nothing; what was put is had again, of any length, in its newest state,
    from several threads, from a pickled copy, and in other processes, which put what is had here; and
    batches of a loader that uses it are those of one that does not.

    Args:
        tier: with room for a MiB or more. Keys of the check stay in it.
        start_methods: as ``multiprocessing`` has them: how processes are started that use a copy.

    Raises:
        AssertionError: it does not; the message says what.
        UsageError: start methods that there are not.
    """
    methods = _methods(start_methods)
    if not isinstance(tier, Tier):
        _fail(tier, "it is no nostall.Tier: derive its class from that")
    if tier.capacity < _SPARE:
        _fail(
            tier, f"its capacity is {tier.capacity}: give it {_SPARE} bytes or more for the check"
        )
    prefix = f"nostall/check-{random.SystemRandom().getrandbits(64):016x}"
    keys = {f"{prefix}/{length}": length for length in _LENGTHS}
    for key, length in keys.items():
        if tier.get(key) is not None:
            _fail(tier, f"get({key!r}) gives something that was never put: it must give None")
        tier.put(key, b"earlier")
        tier.put(key, _value(key, length))
    _check_had(tier, tier, keys, "what was put")

    def use(number: int) -> None:
        mine = {f"{prefix}/thread {number} {i}": 1000 + i for i in range(8)}
        for key, length in mine.items():
            tier.put(key, _value(key, length))
        _check_had(tier, tier, {**mine, **keys}, f"what was put while {_THREADS} threads use it")

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(use, range(_THREADS)))
    for method in methods:
        theirs = {f"{prefix}/{method} {i}": 500 + i for i in range(4)}
        sent = _in_process(method, _use_tier, tier, keys, theirs)
        if sent != "":
            _fail(tier, f"in a process that was started by {method}, {sent or 'it ended early'}")
        _check_had(tier, tier, theirs, f"what a process that was started by {method} put")
    _check_loading(tier)


def _check_had(tier: Tier, copy: Tier, keys: dict[str, int], what: str) -> None:
    for key, length in keys.items():
        found = copy.get(key)
        if found is None:
            _fail(tier, f"{what} is not there: get({key!r}) gives None")
        if bytes(memoryview(found)) != _value(key, length):
            _fail(tier, f"{what} is not what get({key!r}) gives")


def _use_tier(tier: Tier, keys: dict[str, int], mine: dict[str, int], answer: Connection) -> None:
    try:
        _check_had(tier, tier, keys, "what another process put")
        for key, length in mine.items():
            tier.put(key, _value(key, length))
        answer.send("")
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


class _Counted(SampleReader):
    """Random bytes, and how often they were read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, samples: list[int]) -> Sequence[Any]:
        self.reads += len(samples)
        return [_value(str(sample), 1000) for sample in samples]

    def describe(self, sample: int) -> str:
        return f"random bytes {sample}"


def _check_loading(tier: Tier) -> None:
    """Samples are read from the source once, and batches have the same bytes."""
    reader = _Counted()
    identity = str(random.SystemRandom().getrandbits(64))
    source = CustomSource(reader, [1000] * 20, identity=identity)
    values = [_value(str(sample), 1000) for sample in range(len(source))]
    with Tiers(source, [tier]) as tiers:
        for _ in range(2):
            if tiers.read(range(len(source))) != values:
                _fail(tier, "samples that were kept in it have other bytes")
    if reader.reads > len(source):
        again = reader.reads - len(source)
        _fail(tier, f"{again} of {len(source)} samples that it kept are read from the source again")
    with _loader(source, range(len(source)), threads=2, epochs=2, tiers=[tier]) as loader:
        for epoch in loader.epochs():
            if [sample.tobytes() for batch, _ in epoch for sample in batch] != values:
                _fail(tier, f"a loader that uses it has other bytes in epoch {epoch.index}")
