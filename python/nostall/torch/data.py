"""A source as torch's map-style dataset."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.utils.data

from nostall.errors import CorruptionError, IoError
from nostall.source import Source

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_pil(data: bytes) -> Image:
    """The encoded image as a Pillow image in RGB, as torchvision's default loader gives it."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


class Dataset(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is untyped here
    """Samples of `source` as (sample, label), read one by one in the process that asks.

    Args:
        source: where samples come from; it is reopened in worker processes that are spawned.
        transform: applied to the decoded sample, for example torchvision's Compose.
        decode: makes the sample of its bytes; None hands the bytes themselves on.
        target_transform: applied to the label.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = decode_pil,
        target_transform: Callable[[int], Any] | None = None,
    ) -> None:
        self.source = source
        self.transform = transform
        self.decode = decode
        self.target_transform = target_transform
        self._labels = source.labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Sample and label number `index`, in [0, len).

        Raises:
            IoError: the file cannot be read, or changed since it was listed, with its path.
            CorruptionError: `decode` failed, with the path.
        """
        if not 0 <= index < len(self.source):
            raise IndexError(f"sample {index} is not among {len(self.source)}")
        sample: Any = self.source.read(index)
        if self.decode is not None:
            try:
                sample = self.decode(sample)
            except IoError:
                raise
            except Exception as error:
                raise CorruptionError(
                    f"{self.source.describe(index)} (sample {index}) cannot be decoded: {error}; "
                    "remove or repair the file"
                ) from error
        if self.transform is not None:
            sample = self.transform(sample)
        label: Any = int(self._labels[index])
        if self.target_transform is not None:
            label = self.target_transform(label)
        return sample, label
