"""A source as torch's map-style dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nostall.source._source import Source


class Dataset:
    """Item i is (`transform` of the bytes of sample i, its label); the bytes without a transform.

    It has the protocol of ``torch.utils.data.Dataset`` (`__len__`, `__getitem__`) without needing
    torch, and can be pickled to workers that are spawned.
    """

    def __init__(self, source: Source, transform: Callable[[bytes], Any] | None = None) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, float]:
        """Raises IoError with the file's path if it cannot be read."""
        data = self.source.read(index)
        label = self.source.as_labels(self.source.native.labels[[index]])[0].item()
        return (self.transform(data) if self.transform else data), label
