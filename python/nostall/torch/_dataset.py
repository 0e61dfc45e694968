"""A source as torch's map-style dataset, over the tiers of the node."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Image
from nostall.loader import Tiers
from nostall.loader._records import Records
from nostall.loader._tiers import TierList
from nostall.source._item_record import is_left_out
from nostall.source._items import admit, decode
from nostall.source._source import Source, way_from


class Dataset:
    """The samples of a source for ``torch.utils.data.DataLoader``, kept by the tiers of the node.

    Item i is the pair of the bytes of sample i and its label; of a source with several fields it is a
    mapping from their names to values: arrays, numbers, texts. Of a `Cached` data set, or a view of
    one, it is its item; `then` is not called. Worker processes make those that the tiers lack.

    A sample is read from the source once on this node, as far as its tiers have room: worker
    processes, forked or spawned, the ranks of the job, and data sets over other views of the source
    share what was read. It stays while one of these processes lives, and the one that makes the data
    set counts: workers may end after every epoch.

    Kinds that draw, such as a video that begins at random, draw from the module ``random``, which torch
    seeds in each worker.

    The order is that of any sampler; `BatchSampler` has nostall's. It has the protocol of
    ``torch.utils.data.Dataset`` (`__len__`, `__getitem__`, `__getitems__`) without needing torch, and
    can be pickled.

    Args:
        source: where samples come from.
        transform: called with the sample (of a pair with its first half) in the worker; what it
            gives takes the sample's place.
        decode: images are decoded first, to uint8 arrays of shape (height, width, 3).
        fields: the fields that are wanted of a source that has several; all of them if None.
        tiers: storage classes of this node, as of ``nostall.DataLoader``, `Tiers` that loaders
            share, or ``[]`` for none. The same in all ranks of a node.

    Raises:
        UsageError: `source` is none, `transform` is no function, a field is not there, or `tiers` are
            not such.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: bool = False,
        fields: Sequence[str] | None = None,
        tiers: Tiers | TierList | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise UsageError(
                f"the first argument is {type(source).__name__}, not a dataset of nostall: "
                f"{way_from(source)}"
            )
        if transform is not None and not callable(transform):
            raise UsageError(
                f"transform must be a function of the sample, not {type(transform).__name__}: steps of "
                "nostall.transforms go to transforms= of nostall.DataLoader"
            )
        self.source = source if fields is None else source.select(fields)
        self.transform = transform
        self._decode = decode
        self._schema = source.schema if fields is None else source.schema.select(fields)
        self._is_drawn = any(kind._is_drawn() for kind in self._schema.values())
        self._pairs = source._pairs and fields is None
        self._records: tuple[int, Records] | None = None
        self.tiers = tiers if isinstance(tiers, Tiers) else Tiers(self.source, tiers)
        self._numbers = self.tiers.numbers_of(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """Item `index`.

        Raises:
            IoError: it cannot be read, with its path.
            CorruptionError: its bytes are damaged, or not those that were read first.
            UsageError: `index` is a slice.
        """
        if isinstance(index, slice):
            raise UsageError(
                "an item has an integer as its index: nostall.Subset(source, range(...)) takes a part"
            )
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch; those that no tier has are read together."""
        each = range(len(self))
        samples = [each[index] for index in indices]
        kept = samples if self._numbers is None else self._numbers[samples].tolist()
        given: list[Any] = self.tiers.read(kept)
        values = [self._value(*one) for one in zip(samples, given, strict=True)]
        if self.transform is not None:
            values = list(map(self.transform, values))
        if not self._pairs or self.source.item_maker is not None:
            return values
        labels = self.source.as_labels(self.source.native.labels[samples]).tolist()
        return list(zip(values, labels, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": None}

    def _value(self, sample: int, record: bytes) -> Any:
        """What the transform is given."""
        if (maker := self.source.item_maker) is not None:
            data = np.frombuffer(record, np.uint8)
            if is_left_out(data):
                data = np.frombuffer(maker.make(sample), np.uint8)
            admit(maker.modules)
            return decode(data, maker.pickles)
        if self._pairs and not self._decode:
            return record
        try:
            if self._pairs:
                return self._image(np.frombuffer(record, np.uint8))
            return self._fields(sample, record)
        except CorruptionError as error:
            raise CorruptionError(f"{self.source.describe(sample)}: {error}") from None

    def _image(self, data: Any) -> Any:
        pixels = self.source.pixels
        return pixels.image(data) if pixels else _native.decode_rgb(data)

    def _fields(self, sample: int, record: bytes) -> dict[str, Any]:
        records = self._unpacking()
        # Torch seeds this generator in each worker, anew in each epoch.
        seed = random.getrandbits(64) if self._is_drawn else 0
        batch = _native.unpack_one(
            self.source.native, records.program, record, sample, seed=seed, epoch=0, occurrence=0
        )
        values = records.whole(batch)
        for name, kind in self._schema.items():
            if self._decode and isinstance(kind, Image) and values[name].ndim == 1:
                values[name] = self._image(values[name])
        return values

    def _unpacking(self) -> Records:
        """What unpacks samples; each process has its own."""
        if self._records is None or self._records[0] != os.getpid():
            records = Records(
                self.source,
                self._schema,
                None,
                dtype=None,
                layout=None,
                form="dict",
                shift=1,
                decode=False,
                array=np.asarray,
                finishes=lambda _: False,
            )
            self._records = os.getpid(), records
        return self._records[1]
