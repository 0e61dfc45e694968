"""Samples that only a library can unpack."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RowReader(ABC):
    """Reads samples for a native source; its methods are called by the loader's threads.

    The native source holds the reader, so a reader must not hold its source: neither would ever be
    freed.
    """

    def make_source(
        self,
        *,
        sizes: NDArray[np.uint64],
        labels: NDArray[np.int64],
        group: NDArray[np.uint32] | None,
        identity: Sequence[Any],
        bounded: bool = False,
    ) -> _native.Source:
        """A native source that calls this reader; samples of one group are cheaper together.

        If `bounded`, `sizes` are the most that samples may have: zeros follow a shorter one.
        """
        digest = hashlib.sha256(repr(identity).encode())
        for column in (sizes, labels):
            digest.update(np.ascontiguousarray(column).tobytes())
        return _native.callback_source(
            sizes=np.ascontiguousarray(sizes, np.uint64),
            labels=np.ascontiguousarray(labels, np.int64),
            group=np.ascontiguousarray([] if group is None else group, np.uint32),
            fingerprint=int.from_bytes(digest.digest()[:8], "little"),
            read=self.read,
            describe=self.describe,
            bounded=bounded,
        )

    @abstractmethod
    def read(self, samples: list[int]) -> list[Any]:
        """A buffer or an exception for every sample."""

    @abstractmethod
    def describe(self, sample: int) -> str:
        """The name of the sample in a message."""
