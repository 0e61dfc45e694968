"""Samples as transforms of torchvision take them: its tensors of images, masks and boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError
from nostall.fields import Boxes, Image, Keypoints, Kind, Mask

HOME = "torchvision.transforms."


def is_of_torchvision(transform: Any) -> bool:
    """Also a subclass: it takes what torchvision's take."""
    return any(f"{kind.__module__}.".startswith(HOME) for kind in type(transform).__mro__)


class HandedOver:
    """What transforms of torchvision take, from an array that is none; can be pickled.

    Args:
        kind: what the array becomes: a tensor, or an image of Pillow if it is one of bytes.
        taker: the name of the transform that gets it.
    """

    def __init__(self, kind: Literal["pil", "tensor", "float"], taker: str) -> None:
        self._kind, self._taker = kind, taker

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, np.ndarray) or (self._kind == "pil" and image.dtype != np.uint8):
            return image
        if image.ndim == 1:  # the bytes of a file, which torchvision's v2 would leave as they are
            raise TypeError(f"{self._taker} takes an image, not an array of shape {image.shape}")
        if self._kind == "pil":
            from PIL import Image

            if image.ndim == 3 and image.shape[2] == 1:
                image = image[:, :, 0]
            images = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))
            return Image.fromarray(image) if images else image
        import torch

        tensor = torch.from_numpy(image)
        return tensor.permute(2, 0, 1) if self._kind == "tensor" else tensor


class OnFields:
    """Calls transforms of torchvision with a sample of several fields; can be pickled.

    They get images as images of Pillow or as tensors, masks, boxes and keypoints as torchvision's
    tensors of these names, and other arrays as tensors. Without these they would leave all as it is.

    Args:
        steps: called one after the other.
        kinds: of the fields.
        pil: whether images that are no tensors yet are images of Pillow.
    """

    def __init__(
        self, steps: Sequence[Callable[..., Any]], kinds: Mapping[str, Kind], pil: bool
    ) -> None:
        self.steps = list(steps)
        self._kinds = dict(kinds)
        self._pil = pil
        self.names = [str(getattr(s, "__name__", type(s).__name__)) for s in steps]
        if not any(isinstance(kind, (Image, Mask)) for kind in kinds.values()):
            raise UsageError(
                f"{self.names[0]} is of torchvision, and there is no image among {', '.join(kinds)}: "
                "name the fields together with their image"
            )

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        canvas = self._canvas(sample)
        given = {name: self._wrapped(name, value, canvas) for name, value in sample.items()}
        made: Any = given
        for name, step in zip(self.names, self.steps, strict=True):
            made = step(made)
            if not isinstance(made, Mapping):
                raise UsageError(
                    f"{name} gives {type(made).__name__} for a sample of several fields, and not a "
                    "mapping of those that it changes"
                )
        canvas = self._canvas(made)
        return {
            name: self._plain(name, value, canvas, sample.get(name))
            for name, value in made.items()
            if name not in given or value is not given[name]
        }

    def _canvas(self, sample: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width of the first image, else of the first mask."""
        for kind in (Image, Mask):
            for name, value in sample.items():
                if isinstance(self._kinds.get(name), kind) and value is not None:
                    if hasattr(value, "getbands"):  # of Pillow
                        return value.height, value.width
                    shape = np.shape(value)
                    last = kind is Image and _channels_last(value)
                    height, width = shape[:2] if last else shape[-2:]
                    return height, width
        return 0, 0

    def _wrapped(self, name: str, value: Any, canvas: tuple[int, int]) -> Any:
        from torchvision import tv_tensors

        kind = self._kinds.get(name)
        if isinstance(kind, Image):
            return self._image(value)
        if not isinstance(value, np.ndarray):
            return value
        tensor = _tensor(value)
        if isinstance(kind, Mask):
            return tv_tensors.Mask(tensor)
        if isinstance(kind, Boxes):
            if kind.normalised:
                tensor = tensor * _tensor(_sides(canvas, 2))
            return tv_tensors.BoundingBoxes(
                tensor.reshape(-1, 4), format=kind.format.upper(), canvas_size=canvas
            )
        if isinstance(kind, Keypoints):
            places = tensor[..., :2]
            if kind.normalised:
                places = places * _tensor(_sides(canvas, 1))
            return tv_tensors.KeyPoints(places, canvas_size=canvas)
        return tensor

    def _image(self, value: Any) -> Any:
        from torchvision import tv_tensors

        if not isinstance(value, np.ndarray):
            return tv_tensors.Image(value) if hasattr(value, "permute") else value
        if not _channels_last(value):
            return tv_tensors.Image(_tensor(value))
        if self._pil:
            from PIL import Image as pillow

            return pillow.fromarray(value)
        return tv_tensors.Image(_tensor(value).permute(2, 0, 1))

    def _plain(self, name: str, value: Any, canvas: tuple[int, int], before: Any) -> Any:
        import torch

        if hasattr(value, "getbands"):
            return np.asarray(value)
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.as_subclass(torch.Tensor)
        kind = self._kinds.get(name)
        if isinstance(kind, Image) or name not in self._kinds:
            return tensor
        array: NDArray[Any] = tensor.numpy()
        if isinstance(kind, Boxes) and kind.normalised:
            return array / _sides(canvas, 2)
        if isinstance(kind, Keypoints):
            return _seen(array, kind, canvas, before)
        return array


def _channels_last(image: Any) -> bool:
    """As arrays of bytes have them; tensors, and what ToTensor gives, have channels first."""
    return isinstance(image, np.ndarray) and image.dtype == np.uint8


def _seen(places: NDArray[Any], kind: Keypoints, canvas: tuple[int, int], before: Any) -> Any:
    """Keypoints with the visibility that they had; that of those off the canvas is 0."""
    out = places / _sides(canvas, 1) if kind.normalised else places
    if before.shape[-1] == 2 or before.shape[:-1] != places.shape[:-1]:
        return out
    inside = ((places >= 0) & (places < _sides(canvas, 1))).all(-1)
    return np.concatenate([out, np.where(inside, before[..., 2], 0)[..., None]], -1)


def _sides(canvas: tuple[int, int], times: int) -> NDArray[np.float32]:
    height, width = canvas
    return np.array([width, height] * times, np.float32)


def _tensor(array: NDArray[Any]) -> Any:
    """A view where torch allows one."""
    import torch

    flags = array.flags
    return torch.from_numpy(array if flags.writeable and flags.aligned else array.copy())
