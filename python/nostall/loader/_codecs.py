"""Kinds in Python that decode in worker processes: a codec that crashes ends its process alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._garbage import Closer
from nostall.errors import CorruptionError, TransformError
from nostall.fields import Custom, Kind
from nostall.loader._python_transforms import check_pickles
from nostall.source import _items
from nostall.source._makers import MakeError, Makers

_Asked = tuple[str, bytes, int]  # the name of a field, stored bytes, the draw


class _Kinds:
    """What a process has: the kinds, as a data set whose items are what they decode."""

    def __init__(self, kinds: Mapping[str, Custom]) -> None:
        self._kinds = kinds

    def __getitem__(self, asked: _Asked) -> dict[str, Any]:
        name, stored, draw = asked
        try:
            shape, values = self._kinds[name].decoded(stored, draw)
        except CorruptionError as error:
            return {"damaged": str(error)}
        return {"shape": shape, "values": values}


class Codecs:
    """Processes that decode fields of `Custom` kinds, for any thread; they start with the first value.

    Raises:
        UsageError: a kind cannot be pickled.
    """

    def __init__(self, schema: Mapping[str, Kind], count: int) -> None:
        self._kinds = {name: kind for name, kind in schema.items() if isinstance(kind, Custom)}
        check_pickles(self._kinds, "the kinds of fields", "of a class at the top of a module")
        self._count = count
        self._lock = threading.Lock()
        self._makers: Makers | None = None
        self._closed = False

    def move(self, fields: Iterable[_native.Field]) -> None:
        """Lets those decode in a process whose kinds are these."""
        for field in fields:
            if field.name in self._kinds:
                kind: Any = field.kind
                kind.decoder = _native.python_decoder(functools.partial(self._decoded, field.name))
                field.kind = kind

    def _started(self) -> Makers:
        with self._lock:
            if self._closed:
                raise MakeError("the loader is closed")
            if self._makers is None:
                self._makers = Makers(
                    _Kinds(self._kinds),
                    count=self._count,
                    pickles=(),
                    start_method="spawn",
                    fewer="the loader fewer threads=",
                )
                Closer(self, self._makers.close)
            return self._makers

    def _decoded(
        self, name: str, stored: bytes, draw: int
    ) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
        try:
            record = self._started().make((name, stored, draw))
        except MakeError as error:
            raise TransformError(str(error)) from None
        value = _items.decode(np.frombuffer(record, np.uint8), frozenset())
        if "damaged" in value:
            raise CorruptionError(value["damaged"])
        return value["shape"], value["values"]

    def close(self) -> None:
        """Ends the processes; values that are asked for from now on are refused."""
        with self._lock:
            self._closed = True
        if self._makers is not None:
            self._makers.close()
