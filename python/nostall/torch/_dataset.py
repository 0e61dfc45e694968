"""A source as torch's map-style dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nostall.errors import UsageError
from nostall.source import Cached, View
from nostall.source._source import Source


class Dataset:
    """Item i is (`transform` of the bytes of sample i, its label); the bytes without a transform.

    Of a `Cached` data set, or a view of one, item i is its item, given to `transform` if there is one;
    `then` is not called.

    It has the protocol of ``torch.utils.data.Dataset`` (`__len__`, `__getitem__`) without needing
    torch, and can be pickled to workers that are spawned.

    Raises:
        UsageError: the samples of the source have several fields.
    """

    def __init__(self, source: Source, transform: Callable[[Any], Any] | None = None) -> None:
        if not source._pairs:
            raise UsageError(
                f"the samples of {source!r} have the fields {', '.join(source.schema)}, not bytes and "
                "a label: give it to nostall.DataLoader, which unpacks them"
            )
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """Raises IoError with the file's path if it cannot be read."""
        if self.source.item_maker is not None:
            item = self._item(index)
            return self.transform(item) if self.transform else item
        data = self.source.read(index)
        label = self.source.as_labels(self.source.native.labels[[index]])[0].item()
        return (self.transform(data) if self.transform else data), label

    def _item(self, index: int) -> Any:
        part: Source = self.source
        if isinstance(part, View):
            part, index = part.origin(index)
        assert isinstance(part, Cached)
        return part[index]
