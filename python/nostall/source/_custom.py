"""Samples that Python reads: sources of the user's own, and stores that only a library can unpack."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.fields import Kind
from nostall.source._composite import NO_PART, Composite, make_column
from nostall.source._source import Source, arguments_of, as_numbers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class SampleReader(ABC):
    """Reads the samples of a `CustomSource`.

    The loader's threads call it, several at a time: what a call changes needs a lock. It must not refer
    to its source. To be pickled with the source it must be picklable; open files belong into `read`.
    """

    @abstractmethod
    def read(self, samples: list[int]) -> Sequence[Any]:
        """For each sample its bytes (`bytes`, or a contiguous array of uint8), or an exception.

        What is raised counts for all of `samples`.
        """

    @abstractmethod
    def describe(self, sample: int) -> str:
        """The name of the sample in a message: a path, and the place in it."""


class FieldReader(ABC):
    """Reads the fields of the samples of a `CustomFields`; as `SampleReader` otherwise."""

    @abstractmethod
    def read(self, parts: list[tuple[int, str]]) -> Sequence[Any]:
        """For each (sample, name of a field) its bytes, as they are stored, or an exception.

        What is raised counts for all of `parts`.
        """

    @abstractmethod
    def describe(self, sample: int) -> str:
        """The name of the sample in a message: a path, and the place in it."""


def native_source(
    reader: SampleReader,
    *,
    sizes: NDArray[np.uint64],
    labels: NDArray[np.int64],
    group: NDArray[np.uint32] | None,
    identity: Any,
    bounded: bool = False,
    made_at_once: int = 0,
    stamp: int = 0,
) -> _native.Source:
    """A native source that calls the reader; samples of one group are cheaper together.

    If `bounded`, `sizes` are the most that samples may have: zeros follow a shorter one.
    `made_at_once` is how many the reader makes side by side, where each takes its time. `stamp` is
    another one where the data lies elsewhere, or was changed since: what a tier has kept is then not
    used. 0 where that is not known.
    """
    digest = hashlib.sha256(repr(identity).encode())
    for column in (sizes, labels):
        digest.update(np.ascontiguousarray(column).tobytes())
    return _native.callback_source(
        sizes=np.ascontiguousarray(sizes, np.uint64),
        labels=np.ascontiguousarray(labels, np.int64),
        group=np.ascontiguousarray([] if group is None else group, np.uint32),
        fingerprint=int.from_bytes(digest.digest()[:8], "little"),
        read=reader.read,
        describe=reader.describe,
        bounded=bounded,
        made_at_once=made_at_once,
        stamp=stamp,
    )


def _whole(name: str, given: ArrayLike, least: int, most: int = 2**63 - 1) -> NDArray[np.int64]:
    """The numbers, int64 of shape (n,), from `least` to `most`."""
    found = np.asarray(given)
    whole = found.ndim == 1 and found.size and found.dtype.kind in "iu"
    if not whole or int(found.min()) < least or int(found.max()) > most:
        raise UsageError(
            f"{name} must be whole numbers, {least} or more and at most {most}, one for each sample, "
            f"and of one sample or more; not {given!r}"
        )
    return found.astype(np.int64)


class CustomSource(Source):
    """Samples of an image and a label each, or of any bytes, that a class of the user's reads.

    Args:
        reader: reads samples. A copy in another process reads what this one reads.
        sizes: bytes of each sample, exactly; known before anything is read.
        labels: one number for each sample, integers or floating-point; 0 for all if None.
        identity: a text that is another one whenever samples, or their bytes, are others: a path with
            its time and size, or a version. Kept tiers and saved states are of this identity.
        groups: a rising number for each sample: those of one group are cheaper to read together, and
            what was read with the sample that was asked for goes to the tiers.

    Raises:
        UsageError: sizes, labels or groups are no such numbers, or differ in length.
    """

    def __init__(
        self,
        reader: SampleReader,
        sizes: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        identity: str,
        groups: ArrayLike | None = None,
    ) -> None:
        self._arguments = arguments_of(locals())
        if not isinstance(reader, SampleReader):
            raise UsageError(
                f"{type(reader).__name__} is no nostall.SampleReader: derive its class from that"
            )
        self._name = type(reader).__name__
        numbers = as_numbers(labels)
        self._label_type = numbers.dtype
        found = _whole("sizes", sizes, 0)
        if numbers.dtype.kind == "f":
            numbers = numbers.astype(np.float64).view(np.int64)
        self.native = native_source(
            reader,
            sizes=found.astype(np.uint64),
            labels=numbers if labels is not None else np.zeros(len(found), np.int64),
            group=None
            if groups is None
            else _whole("groups", groups, 0, 2**32 - 1).astype(np.uint32),
            identity=["custom", self._name, identity],
        )

    def __repr__(self) -> str:
        samples = counted(len(self), "sample")
        return f"<CustomSource {self._name}: {samples}, {self.total_bytes / 1e6:.1f} MB>"


class _Parts(SampleReader):
    """The fields of all samples as samples, those of sample 0 first."""

    def __init__(self, reader: FieldReader, names: Sequence[str]) -> None:
        self._reader, self._names = reader, tuple(names)

    def read(self, samples: list[int]) -> Sequence[Any]:
        fields = len(self._names)
        return self._reader.read([(s // fields, self._names[s % fields]) for s in samples])

    def describe(self, sample: int) -> str:
        return self._reader.describe(sample // len(self._names))


class CustomFields(Composite):
    """Samples of several fields that a class of the user's reads, and columns.

    Args:
        reader: reads fields. A copy in another process reads what this one reads.
        sizes: by the name of the field, its bytes in each sample, -1 where the sample has none.
        columns: by the name of the field, one value for each sample (None where it has none); as of
            `Files`. They stay in memory.
        schema: the kind of every field of `sizes`, and of those columns that it names.
        identity: as of `CustomSource`.

    Raises:
        UsageError: sizes are no such numbers or differ in length, a field has no kind, or is missing
            without a ``fill`` in the schema.
    """

    def __init__(
        self,
        reader: FieldReader,
        sizes: Mapping[str, ArrayLike],
        columns: Mapping[str, Any] | None = None,
        *,
        schema: Mapping[str, Kind],
        identity: str,
    ) -> None:
        self._arguments = arguments_of(locals())
        if not isinstance(reader, FieldReader):
            raise UsageError(
                f"{type(reader).__name__} is no nostall.FieldReader: derive its class from that"
            )
        self._arguments |= {"sizes": dict(sizes), "schema": dict(schema)}
        given = dict({} if columns is None else columns)
        if missing := sizes.keys() - schema.keys():
            raise UsageError(f"schema does not say of which kind the field {min(missing)} is")
        if unknown := schema.keys() - sizes.keys() - given.keys():
            raise UsageError(f"schema names the field {min(unknown)}, which has no sizes or values")
        if both := sizes.keys() & given.keys():
            raise UsageError(f"field {min(both)} is named among the sizes and among the columns")
        found = {name: _whole(f"sizes of {name}", s, -1) for name, s in sizes.items()}
        lengths = {name: len(values) for name, values in {**found, **given}.items()}
        if not found or len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items()) or "there are none"
            raise UsageError(f"fields need one size for each sample: {told}")
        table = np.stack(list(found.values()), axis=1)
        if table.size >= NO_PART:
            raise UsageError(f"{table.size} fields of all samples are more than {NO_PART - 1}")
        parts = native_source(
            _Parts(reader, tuple(found)),
            sizes=np.maximum(table, 0).reshape(-1).astype(np.uint64),
            labels=np.zeros(table.size, np.int64),
            group=None,
            identity=["custom fields", type(reader).__name__, identity, tuple(found)],
        )
        self._compose(
            parts,
            np.where(table < 0, NO_PART, np.arange(table.size).reshape(table.shape)),
            {name: schema[name] for name in found},
            {name: make_column(name, v, schema.get(name)) for name, v in given.items()},
            len(table),
        )
