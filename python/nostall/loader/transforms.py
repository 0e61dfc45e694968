"""Image transforms with torchvision's names and parameters, run by the native pipeline.

Each transform is a frozen dataclass that only describes a step; `compile` turns a sequence of them
into a `Pipeline`, which decodes and transforms an encoded image (JPEG, PNG, WebP) in one pass.
Random draws depend on (seed, epoch, sample) alone. Sizes are in pixels, (height, width).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError

if TYPE_CHECKING:
    from nostall import _native
    from nostall.source._source import Pixels

__all__ = [
    "CenterCrop",
    "Decode",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToTensor",
    "Transform",
    "compile",
    "is_native",
]

Size = int | tuple[int, int]
Step = tuple[str, dict[str, Any]]


class Transform:
    """Base of the transforms that the native pipeline can run."""

    def to_step(self) -> Step:
        """The step's name and its parameters, as the native pipeline takes them."""
        raise NotImplementedError(f"{type(self).__name__} defines no native step")


def _side(owner: object, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise UsageError(
            f"{type(owner).__name__}: size {value!r} must be a whole number from 1 to 65535"
        )
    return value


def _sides(owner: object, size: object) -> tuple[int, int]:
    if isinstance(size, (tuple, list)):
        if len(size) not in (1, 2):
            raise UsageError(f"{type(owner).__name__}: size {size!r} must be (height, width)")
        return _side(owner, size[0]), _side(owner, size[-1])
    return _side(owner, size), _side(owner, size)


def _ascending(owner: object, name: str, value: Iterable[float]) -> tuple[float, float]:
    pair = tuple(float(v) for v in value)
    if len(pair) != 2 or not 0 < pair[0] <= pair[1] < math.inf:
        raise UsageError(
            f"{type(owner).__name__}: {name} {pair} must be two positive numbers, ascending"
        )
    return pair[0], pair[1]


def _probability(owner: object, p: float) -> None:
    if not 0 <= p <= 1:
        raise UsageError(f"{type(owner).__name__}: p = {p} must be between 0 and 1")


@dataclass(frozen=True)
class Decode(Transform):
    """Decodes to RGB; implied when it is absent."""

    def to_step(self) -> Step:
        return "Decode", {}


@dataclass(frozen=True)
class Resize(Transform):
    """Resizes, antialiased bilinear. An int is the shorter edge; the aspect is kept."""

    size: Size

    def __post_init__(self) -> None:
        _sides(self, self.size)

    def to_step(self) -> Step:
        height, width = _sides(self, self.size)
        pair = isinstance(self.size, (tuple, list)) and len(self.size) == 2
        return "Resize", {"height": height, "width": width if pair else 0}


@dataclass(frozen=True)
class CenterCrop(Transform):
    """Cuts the centre out; a smaller image gets black borders."""

    size: Size

    def __post_init__(self) -> None:
        _sides(self, self.size)

    def to_step(self) -> Step:
        height, width = _sides(self, self.size)
        return "CenterCrop", {"height": height, "width": width}


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Cuts a box of random area and aspect ratio and resizes it to `size`."""

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)

    def __post_init__(self) -> None:
        _sides(self, self.size)
        object.__setattr__(self, "scale", _ascending(self, "scale", self.scale))
        object.__setattr__(self, "ratio", _ascending(self, "ratio", self.ratio))

    def to_step(self) -> Step:
        height, width = _sides(self, self.size)
        return "RandomResizedCrop", {
            "height": height,
            "width": width,
            "scale": list(self.scale),
            "ratio": list(self.ratio),
        }


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirrors left and right with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomHorizontalFlip", {"p": float(self.p)}


@dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """Mirrors top and bottom with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomVerticalFlip", {"p": float(self.p)}


@dataclass(frozen=True)
class ToTensor(Transform):
    """To floating point in [0, 1], channels first."""

    def to_step(self) -> Step:
        return "ToTensor", {}


@dataclass(frozen=True)
class Normalize(Transform):
    """(value - mean) / std for each of the three channels; needs `ToTensor` before it."""

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = tuple(float(v) for v in getattr(self, name))
            if len(values) != 3 or not all(math.isfinite(v) for v in values):
                raise UsageError(f"Normalize: {name} {values} must be three finite numbers")
            object.__setattr__(self, name, values)
        if min(self.std) <= 0:
            raise UsageError(f"Normalize: std {self.std} must be above zero")

    def to_step(self) -> Step:
        return "Normalize", {"mean": list(self.mean), "std": list(self.std)}


def is_native(transforms: Iterable[object]) -> bool:
    """Whether every one of `transforms` can run in the native pipeline."""
    return all(isinstance(transform, Transform) for transform in transforms)


def compile(
    transforms: Sequence[Transform],
    *,
    dtype: str | None = None,
    layout: str | None = None,
    pixels: Pixels | None = None,
) -> _native.Pipeline:
    """Compiles `transforms` into one native pipeline, to be shared by threads.

    It takes encoded images, or with `pixels` samples that are pixels as it says.

    dtype is "uint8", "float16" or "float32", layout "chw" or "hwc"; the defaults are float32 chw
    with `ToTensor` and uint8 hwc without. Raises UsageError if the images would differ in size.
    """
    from nostall import _native

    for transform in transforms:
        if not isinstance(transform, Transform):
            raise UsageError(f"{transform!r} is not a transform of nostall.transforms")
    steps = [transform.to_step() for transform in transforms]
    if pixels is None:
        return _native.compile_pipeline(steps, dtype, layout)
    described = {
        "height": pixels.height,
        "width": pixels.width,
        "channels": pixels.channels,
        "channels_first": pixels.layout == "chw",
        "bgr": pixels.order == "bgr",
    }
    return _native.compile_pipeline(steps, dtype, layout, pixels=described)
