"""Transforms of colours and values, and the policies that choose among all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nostall.base import _checks as checks
from nostall.errors import UsageError
from nostall.loader._steps import (
    WARPING,
    Fill,
    Interpolation,
    Step,
    Transform,
    ascending,
    between,
    fills,
    interpolation_of,
    keep_whole,
    listed,
    number_or_pair,
    numbers,
    one_of,
    probability,
    whole,
)

_Range = float | Sequence[float] | None


@dataclass(frozen=True)
class ColorJitter(Transform):
    """Changes brightness, contrast, saturation and hue by random factors, in random order.

    Each is a range of factors, or one number for 1 minus it (at least 0) to 1 plus it; 0 or None
    leaves it. `hue` is a shift in turns of the colour circle, -0.5 to 0.5.
    """

    brightness: _Range = None
    contrast: _Range = None
    saturation: _Range = None
    hue: _Range = None

    def __post_init__(self) -> None:
        self.to_step()

    def _factors(self, name: str, value: _Range, around: float) -> list[float] | None:
        low, high = (0.0, 1e6) if around else (-0.5, 0.5)
        if value is None:
            return None
        pair = number_or_pair(self, name, value, around=around, low=low, high=high)
        return None if pair[0] == pair[1] == around else list(pair)

    def to_step(self) -> Step:
        return "ColorJitter", {
            "brightness": self._factors("brightness", self.brightness, 1.0),
            "contrast": self._factors("contrast", self.contrast, 1.0),
            "saturation": self._factors("saturation", self.saturation, 1.0),
            "hue": self._factors("hue", self.hue, 0.0),
        }


@dataclass(frozen=True)
class Grayscale(Transform):
    """To grey, in all three channels."""

    num_output_channels: Literal[3] = 3

    def __post_init__(self) -> None:
        if not checks.is_whole(self.num_output_channels) or self.num_output_channels != 3:
            raise UsageError(
                f"Grayscale: num_output_channels {self.num_output_channels} must be 3: images of a "
                "batch have three channels"
            )

    def to_step(self) -> Step:
        return "Grayscale", {}


@dataclass(frozen=True)
class GaussianBlur(Transform):
    """Blurs with a kernel of `kernel_size` pixels, odd, one number or (width, height), up to 501.

    `sigma` is its standard deviation in pixels, a number or a range.
    """

    kernel_size: int | Sequence[int]
    sigma: float | Sequence[float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        self.to_step()

    def to_step(self) -> Step:
        given = self.kernel_size
        kernel = [whole(self, "kernel_size", size, 1, 501) for size in listed(given)]
        kernel = kernel * 2 if checks.is_whole(given) else kernel
        if len(kernel) != 2 or not all(size % 2 for size in kernel):
            raise UsageError(f"GaussianBlur: kernel_size {given!r} must be one or two odd numbers")
        both = [self.sigma] * 2 if checks.is_number(self.sigma) else self.sigma
        return "GaussianBlur", {"kernel": kernel, "sigma": list(ascending(self, "sigma", both))}


@dataclass(frozen=True)
class _Chance(Transform):
    p: float = 0.5

    def __post_init__(self) -> None:
        probability(self, self.p)

    def to_step(self) -> Step:
        return type(self).__name__, {"p": float(self.p)}


@dataclass(frozen=True)
class RandomGrayscale(_Chance):
    """To grey with probability `p`."""

    p: float = 0.1


@dataclass(frozen=True)
class RandomInvert(_Chance):
    """To 255 minus each level with probability `p`."""


@dataclass(frozen=True)
class RandomAutocontrast(_Chance):
    """Stretches the levels of each channel to 0 to 255 with probability `p`."""


@dataclass(frozen=True)
class RandomEqualize(_Chance):
    """Makes the levels of each channel equally frequent with probability `p`."""


@dataclass(frozen=True)
class RandomSolarize(Transform):
    """Inverts levels from `threshold` (0 to 256) on with probability `p`."""

    threshold: float
    p: float = 0.5

    def __post_init__(self) -> None:
        between(self, "threshold", self.threshold, 0, 256)
        probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomSolarize", {"threshold": float(self.threshold), "p": float(self.p)}


@dataclass(frozen=True)
class RandomPosterize(Transform):
    """Keeps `bits` (0 to 8) of each level with probability `p`."""

    bits: int
    p: float = 0.5

    def __post_init__(self) -> None:
        keep_whole(self, "bits", 0, 8)
        probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomPosterize", {"bits": self.bits, "p": float(self.p)}


@dataclass(frozen=True)
class RandomAdjustSharpness(Transform):
    """Sharpens by `sharpness_factor` with probability `p`: 0 blurs, 1 leaves, 2 sharpens."""

    sharpness_factor: float
    p: float = 0.5

    def __post_init__(self) -> None:
        between(self, "sharpness_factor", self.sharpness_factor, 0, 1e6)
        probability(self, self.p)

    def to_step(self) -> Step:
        return "RandomAdjustSharpness", {
            "factor": float(self.sharpness_factor),
            "p": float(self.p),
        }


@dataclass(frozen=True)
class RandAugment(Transform):
    """`num_ops` random operations of one magnitude, from 0 to `num_magnitude_bins` - 1."""

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    def __post_init__(self) -> None:
        keep_whole(self, "num_ops", 0, 100)
        keep_whole(self, "num_magnitude_bins", 1, 1000)
        keep_whole(self, "magnitude", 0, self.num_magnitude_bins - 1)
        fills(self, self.fill)
        interpolation_of(self, WARPING)

    def to_step(self) -> Step:
        return "RandAugment", {
            "num_ops": self.num_ops,
            "magnitude": self.magnitude,
            "num_magnitude_bins": self.num_magnitude_bins,
            "interpolation": self.interpolation,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class TrivialAugmentWide(Transform):
    """One random operation of a random magnitude, of `num_magnitude_bins`."""

    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    def __post_init__(self) -> None:
        keep_whole(self, "num_magnitude_bins", 1, 1000)
        fills(self, self.fill)
        interpolation_of(self, WARPING)

    def to_step(self) -> Step:
        return "TrivialAugmentWide", {
            "num_magnitude_bins": self.num_magnitude_bins,
            "interpolation": self.interpolation,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class AutoAugment(Transform):
    """A random one of the 25 learned sub-policies of `policy`, two operations each."""

    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    def __post_init__(self) -> None:
        one_of(self, "policy", self.policy, ("imagenet", "cifar10", "svhn"))
        fills(self, self.fill)
        interpolation_of(self, WARPING)

    def to_step(self) -> Step:
        return "AutoAugment", {
            "policy": self.policy,
            "interpolation": self.interpolation,
            **fills(self, self.fill),
        }


@dataclass(frozen=True)
class RandomErasing(Transform):
    """Overwrites a random box with `value` with probability `p`; needs `ToTensor` before it.

    `scale` is the range of the area, parts of the image's, 0 to 1; `ratio` that of height over
    width. `value` is one number or three, or "random" for normal noise.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | Sequence[float] | Literal["random"] = 0.0

    def __post_init__(self) -> None:
        probability(self, self.p)
        self._scale()
        object.__setattr__(self, "ratio", ascending(self, "ratio", self.ratio))
        self._values()

    def _scale(self) -> tuple[float, float]:
        pair = numbers(self.scale)
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= 1:
            raise UsageError(
                f"RandomErasing: scale {self.scale!r} must be two ascending parts, 0 to 1"
            )
        return pair[0], pair[1]

    def _values(self) -> list[float]:
        if isinstance(self.value, str):
            one_of(self, "value", self.value, ("random",))
            return [0.0] * 3
        given = numbers(self.value)
        if len(given) not in (1, 3) or not all(math.isfinite(v) for v in given):
            raise UsageError(f"RandomErasing: value {self.value!r} must be one or three numbers")
        return list(given) * (3 // len(given))

    def to_step(self) -> Step:
        return "RandomErasing", {
            "p": float(self.p),
            "scale": list(self._scale()),
            "ratio": list(self.ratio),
            "value": self._values(),
            "noise": isinstance(self.value, str),
        }
