"""What a batch has of a field whose sizes differ from sample to sample."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Values of n samples, one after the other, without gaps.

    Where the first dimension of a sample differs, `values` has the shape (rows of all, ...), and
    sample i is ``values[offsets[i] : offsets[i + 1]]``. Where others do, `values` is flat, `offsets`
    count values, and `shapes`, int64 of shape (n, dimensions), has the shape of each sample. `sample`
    finds either. `offsets` is int64 of shape (n + 1,).
    """

    values: Any
    offsets: Any
    shapes: Any = None

    def sample(self, i: int) -> Any:
        """The values of sample i, in its own shape: a view."""
        part = self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]
        return part if self.shapes is None else part.reshape(tuple(self.shapes[i].tolist()))


class Padded(NamedTuple):
    """Values of n samples, each filled up with zeros to the longest of the batch.

    `values` has the shape (n, longest...). `lengths` is int64 of shape (n,) where the first dimension
    of a sample differs, else (n, dimensions): the shape of each sample.
    """

    values: Any
    lengths: Any

    def mask(self) -> Any:
        """Where values are those of a sample, and nothing was filled up: an array of bool.

        Its shape is (n, longest) where the first dimension of a sample differs, else that of `values`.
        It is a tensor or array where `lengths` is one, on the same device.
        """
        ends = self.lengths if self.lengths.ndim == 2 else self.lengths[:, None]
        whole: Any = True
        for side, longest in enumerate(self.values.shape[1 : 1 + ends.shape[1]]):
            inside = ends[:, side, None] > _counted(longest, ends)
            missing = (1,) * (ends.shape[1] - 1)
            shape = (len(ends), *missing[:side], longest, *missing[side:])
            whole = whole & inside.reshape(shape)
        return whole


def _counted(longest: int, like: Any) -> Any:
    """0, 1, ... below `longest`, to compare with `like`: JAX takes arrays of NumPy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.arange(longest, device=like.device)
    return np.arange(longest)
