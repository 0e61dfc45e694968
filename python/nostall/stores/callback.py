"""Samples that only a library of their own can take apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.source import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CallbackStore(Source):
    """A source whose samples a Python method reads.

    Subclasses give `_read` and `_describe`, which the loader's threads call.
    """

    def _serve(
        self,
        *,
        sizes: NDArray[np.uint64],
        labels: NDArray[np.int64],
        group: NDArray[np.uint32] | None,
        identity: Sequence[Any],
    ) -> None:
        """Makes the native source; samples of one group are cheaper together."""
        digest = hashlib.sha256(repr(identity).encode())
        for column in (sizes, labels):
            digest.update(np.ascontiguousarray(column).tobytes())
        self.native = _native.callback_source(
            sizes=np.ascontiguousarray(sizes, np.uint64),
            labels=np.ascontiguousarray(labels, np.int64),
            group=np.ascontiguousarray([] if group is None else group, np.uint32),
            fingerprint=int.from_bytes(digest.digest()[:8], "little"),
            read=self._read,
            describe=self._describe,
        )

    def _read(self, samples: list[int]) -> list[Any]:
        """A buffer or an exception for every sample."""
        raise NotImplementedError

    def _describe(self, sample: int) -> str:
        raise NotImplementedError
