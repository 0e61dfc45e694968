"""The transforms that most trainings use: read without the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.base import _checks as checks
from nostall.errors import UsageError
from nostall.loader._steps import (
    RESAMPLING,
    Interpolation,
    Size,
    Step,
    Transform,
    ascending,
    interpolation_of,
    keep_flag,
    numbers,
    probability,
    sides,
)


@dataclass(frozen=True)
class Decode(Transform):
    """Decodes to RGB; implied when it is absent."""

    def to_step(self) -> Step:
        return "Decode", {}


@dataclass(frozen=True)
class Resize(Transform):
    """Resizes. An int is the shorter edge; the aspect is kept.

    `antialias` is for bilinear and bicubic. Masks are resized with nearest pixels, or with
    nearest_exact if that is the interpolation.
    """

    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        sides(self, self.size)
        keep_flag(self, "antialias")
        interpolation_of(self, RESAMPLING)

    def to_step(self) -> Step:
        height, width = sides(self, self.size)
        pair = isinstance(self.size, (tuple, list)) and len(self.size) == 2
        return "Resize", {
            "height": height,
            "width": width if pair else 0,
            "interpolation": self.interpolation,
            "antialias": self.antialias,
        }


@dataclass(frozen=True)
class CenterCrop(Transform):
    """Cuts the centre out; a smaller image gets black borders."""

    size: Size

    def __post_init__(self) -> None:
        sides(self, self.size)

    def to_step(self) -> Step:
        height, width = sides(self, self.size)
        return "CenterCrop", {"height": height, "width": width}


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Cuts a box of random area and aspect ratio and resizes it to `size`.

    `scale` is the range of the area, a part of the image's; `ratio` that of width over height.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        sides(self, self.size)
        object.__setattr__(self, "scale", ascending(self, "scale", self.scale))
        object.__setattr__(self, "ratio", ascending(self, "ratio", self.ratio))
        keep_flag(self, "antialias")
        interpolation_of(self, RESAMPLING)

    def to_step(self) -> Step:
        height, width = sides(self, self.size)
        return "RandomResizedCrop", {
            "height": height,
            "width": width,
            "scale": list(self.scale),
            "ratio": list(self.ratio),
            "interpolation": self.interpolation,
            "antialias": self.antialias,
        }


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirrors left and right with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomHorizontalFlip", {"p": float(self.p)}


@dataclass(frozen=True)
class ToTensor(Transform):
    """To floating point in [0, 1], channels first."""

    def to_step(self) -> Step:
        return "ToTensor", {}


@dataclass(frozen=True)
class Normalize(Transform):
    """(value - mean) / std for each of the three channels; needs `ToTensor` before it.

    A number is that of all three.
    """

    mean: Sequence[float] | float
    std: Sequence[float] | float

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            values = numbers(given) * (3 if checks.is_number(given) else 1)
            if len(values) != 3 or not all(math.isfinite(v) for v in values):
                raise UsageError(
                    f"Normalize: {name} {given!r} must be three finite numbers, or one for all "
                    "channels, for example Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
                )
            object.__setattr__(self, name, values)
        if min(self._channels("std")) <= 0:
            raise UsageError(f"Normalize: std {self.std} must be above zero")

    def _channels(self, name: str) -> tuple[float, ...]:
        values: tuple[float, ...] = getattr(self, name)
        return values

    def to_step(self) -> Step:
        return "Normalize", {n: list(self._channels(n)) for n in ("mean", "std")}
