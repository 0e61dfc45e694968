"""Transforms that move pixels: of images, masks, boxes and keypoints alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nostall.errors import UsageError
from nostall.loader._steps import (
    WARPING,
    Fill,
    Interpolation,
    PaddingMode,
    Size,
    Step,
    Transform,
    ascending,
    between,
    centre,
    fills,
    interpolation_of,
    keep_flag,
    number_or_pair,
    numbers,
    one_of,
    paddings,
    probability,
    sides,
)

_PADDING_MODES = ("constant", "edge", "reflect", "symmetric")


@dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """Mirrors top and bottom with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomVerticalFlip", {"p": float(self.p)}


@dataclass(frozen=True)
class Pad(Transform):
    """Adds borders: one width, (left and right, top and bottom), or (left, top, right, bottom)."""

    padding: int | Sequence[int]
    fill: Fill = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        paddings(self, self.padding)
        fills(self, self.fill)
        one_of(self, "padding_mode", self.padding_mode, _PADDING_MODES)

    def to_step(self) -> Step:
        return "Pad", {
            "padding": paddings(self, self.padding),
            "padding_mode": self.padding_mode,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Cuts out a box of `size` at a random place, after `padding`.

    An image that is smaller is an error, or with `pad_if_needed` padded on both sides.
    """

    size: Size
    padding: int | Sequence[int] | None = None
    pad_if_needed: bool = False
    fill: Fill = 0
    padding_mode: PaddingMode = "constant"

    def __post_init__(self) -> None:
        sides(self, self.size)
        self._paddings()
        keep_flag(self, "pad_if_needed")
        fills(self, self.fill)
        one_of(self, "padding_mode", self.padding_mode, _PADDING_MODES)

    def _paddings(self) -> list[int]:
        return paddings(self, 0 if self.padding is None else self.padding)

    def to_step(self) -> Step:
        height, width = sides(self, self.size)
        return "RandomCrop", {
            "height": height,
            "width": width,
            "padding": self._paddings(),
            "pad_if_needed": self.pad_if_needed,
            "padding_mode": self.padding_mode,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class RandomRotation(Transform):
    """Turns by a random angle, counter-clockwise, about `center` (x, y), or about the middle.

    `degrees` is a range, or one number for minus it to plus it. The size stays.
    """

    degrees: float | Sequence[float]
    interpolation: Interpolation = "nearest"
    center: Sequence[float] | None = None
    fill: Fill = 0

    def __post_init__(self) -> None:
        self._range()
        centre(self, self.center)
        fills(self, self.fill)
        interpolation_of(self, WARPING)

    def _range(self) -> tuple[float, float]:
        return number_or_pair(self, "degrees", self.degrees, low=-36000, high=36000)

    def to_step(self) -> Step:
        return "RandomRotation", {
            "degrees": list(self._range()),
            "interpolation": self.interpolation,
            "center": centre(self, self.center),
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class RandomAffine(Transform):
    """Turns (clockwise), moves, scales and shears about `center` (x, y), or about the middle.

    `translate` is the furthest move, (of the width, of the height), as parts, 0 to 1; `scale` a
    range of factors; `shear` a range of angles along x, or four numbers: along x, then along y; up
    to 89 degrees. One number stands for minus it to plus it.
    """

    degrees: float | Sequence[float]
    translate: Sequence[float] | None = None
    scale: Sequence[float] | None = None
    shear: float | Sequence[float] | None = None
    interpolation: Interpolation = "nearest"
    fill: Fill = 0
    center: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._parameters()
        interpolation_of(self, WARPING)

    def _parameters(self) -> dict[str, Any]:
        translate = (0.0, 0.0) if self.translate is None else numbers(self.translate)
        if len(translate) != 2:
            raise UsageError(
                f"RandomAffine: translate {self.translate!r} must be two parts, of the width and of "
                "the height"
            )
        for part in translate:
            between(self, "translate", part, 0, 1)
        shear = 0.0 if self.shear is None else self.shear
        angles = numbers(shear)
        pairs = [angles[:2], angles[2:]] if len(angles) == 4 else [shear, 0.0]
        ranges = [number_or_pair(self, "shear", pair, low=-89, high=89) for pair in pairs]
        scale = (1.0, 1.0) if self.scale is None else ascending(self, "scale", self.scale)
        return {
            "degrees": list(number_or_pair(self, "degrees", self.degrees, low=-36000, high=36000)),
            "translate": list(translate),
            "scale": list(scale),
            "shear": [*ranges[0], *ranges[1]],
            "center": centre(self, self.center),
            **fills(self, self.fill),
        }

    def to_step(self) -> Step:
        return "RandomAffine", {"interpolation": self.interpolation, **self._parameters()}


@dataclass(frozen=True)
class RandomPerspective(Transform):
    """Moves the four corners inward with probability `p`.

    `distortion_scale`, 0 to 1, is the furthest move of a corner, as a part of half the side.
    """

    distortion_scale: float = 0.5
    p: float = 0.5
    interpolation: Interpolation = "bilinear"
    fill: Fill = 0

    def __post_init__(self) -> None:
        between(self, "distortion_scale", self.distortion_scale, 0, 1)
        probability(self, self.p)
        fills(self, self.fill)
        interpolation_of(self, WARPING)

    def to_step(self) -> Step:
        return "RandomPerspective", {
            "distortion_scale": float(self.distortion_scale),
            "p": float(self.p),
            "interpolation": self.interpolation,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class ClampBoundingBoxes(Transform):
    """Clamps boxes to the image. Crops, pads and warps do it anyway; resizes and flips do not."""

    def to_step(self) -> Step:
        return "ClampBoundingBoxes", {}


@dataclass(frozen=True)
class SanitizeBoundingBoxes(Transform):
    """Takes out boxes that are too small, not inside the image, or no numbers.

    `min_size` is the least width and height in pixels, `min_area` the least area. The rows that
    stay are known, so that labels can follow.
    """

    min_size: float = 1.0
    min_area: float = 1.0

    def __post_init__(self) -> None:
        between(self, "min_size", self.min_size, 0, 65535)
        between(self, "min_area", self.min_area, 0, 1e12)

    def to_step(self) -> Step:
        return "SanitizeBoundingBoxes", {
            "min_size": float(self.min_size),
            "min_area": float(self.min_area),
        }
