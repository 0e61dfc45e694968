"""What every transform is made of: its base, its checks, its parameters as the native core has them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from nostall.base import _checks as checks
from nostall.errors import UsageError

Size = int | tuple[int, int]
Step = tuple[str, dict[str, Any]]
# Or a mode of torchvision's, which is an Enum.
Interpolation = Literal["bilinear", "bicubic", "nearest", "nearest_exact"] | Enum
PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Fill = float | Sequence[float] | Mapping[str, Any]


class Transform(ABC):
    """Base of the transforms that the native pipeline can run."""

    @abstractmethod
    def to_step(self) -> Step:
        """The step's name and its parameters, as the native pipeline takes them."""


def _name(owner: object) -> str:
    return type(owner).__name__


def _side(owner: object, value: object) -> int:
    return whole(owner, "size", value, 1, 65535)


def sides(owner: object, size: object) -> tuple[int, int]:
    """(height, width) of a size, which may be one number for both."""
    if isinstance(size, (tuple, list)):
        if len(size) not in (1, 2):
            raise UsageError(f"{_name(owner)}: size {size!r} must be (height, width)")
        return _side(owner, size[0]), _side(owner, size[-1])
    return _side(owner, size), _side(owner, size)


def listed(value: Any) -> list[Any]:
    """The members of a sequence, or the one value."""
    try:
        return list(value)
    except TypeError:
        return [value]


def numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a sequence, or the one number; none if there is anything else among them."""
    given = listed(value)
    try:
        return tuple(map(float, given)) if all(map(checks.is_number, given)) else ()
    except OverflowError:
        return ()


def ascending(owner: object, name: str, value: object) -> tuple[float, float]:
    """Two positive numbers, the lower first."""
    pair = numbers(value)
    if len(pair) != 2 or not 0 < pair[0] <= pair[1] < math.inf:
        raise UsageError(
            f"{_name(owner)}: {name} {value!r} must be two positive numbers, ascending"
        )
    return pair[0], pair[1]


def number_or_pair(
    owner: object,
    name: str,
    value: object,
    *,
    around: float = 0.0,
    low: float = -math.inf,
    high: float = math.inf,
) -> tuple[float, float]:
    """A range: (lowest, highest), or one number for `around` plus and minus it."""
    if checks.is_number(value):
        one = float(value)
        if one < 0:
            raise UsageError(f"{_name(owner)}: {name} {value}, as one number, must not be negative")
        pair: tuple[float, ...] = (max(low, around - one), around + one)
    else:
        pair = numbers(value)
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high or math.inf in pair:
        raise UsageError(
            f"{_name(owner)}: {name} {value!r} must be a number, or two ascending ones, between {low} "
            f"and {high}"
        )
    return pair[0], pair[1]


def between(owner: object, name: str, value: object, low: float, high: float) -> None:
    if not checks.is_number(value) or not low <= value <= high:
        raise UsageError(
            f"{_name(owner)}: {name} = {value!r} must be a number between {low} and {high}"
        )


def whole(owner: object, name: str, value: object, low: int, high: int) -> int:
    if not checks.is_whole(value) or not low <= value <= high:
        raise UsageError(
            f"{_name(owner)}: {name} {value!r} must be a whole number from {low} to {high}"
        )
    return int(value)


def keep_whole(owner: object, name: str, low: int, high: int) -> None:
    """Checks a parameter, and puts a number of Python in the place of one of NumPy."""
    object.__setattr__(owner, name, whole(owner, name, getattr(owner, name), low, high))


def keep_flag(owner: object, name: str) -> None:
    """As `keep_whole`."""
    flag = checks.flag(f"{_name(owner)}: {name}", getattr(owner, name))
    object.__setattr__(owner, name, flag)


def probability(owner: object, p: object) -> None:
    between(owner, "p", p, 0, 1)


def interpolation_of(owner: Any, known: Sequence[str]) -> None:
    """Checks it, and puts its name in the place of a mode of torchvision's."""
    name = getattr(owner.interpolation, "value", owner.interpolation)
    if isinstance(name, str):
        object.__setattr__(owner, "interpolation", name.replace("-", "_"))
    one_of(owner, "interpolation", owner.interpolation, known)


def one_of(owner: object, name: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{_name(owner)}: {name} {value!r} is not one of {', '.join(known)}")


RESAMPLING = ("bilinear", "bicubic", "nearest", "nearest_exact")
WARPING = ("bilinear", "bicubic", "nearest")


def paddings(owner: object, padding: int | Sequence[int]) -> list[int]:
    """[left, top, right, bottom] of one number, of (left and right, top and bottom), or of four."""
    values = listed(padding)
    if len(values) not in (1, 2, 4):
        raise UsageError(f"{_name(owner)}: padding {padding!r} must be one, two or four numbers")
    whole_values = [whole(owner, "padding", value, 0, 65535) for value in values]
    return whole_values * (4 // len(whole_values))


def fills(owner: object, fill: Fill) -> dict[str, Any]:
    """The fill of images and of masks."""
    if isinstance(fill, Mapping):
        unknown = set(fill) - {"image", "mask"}
        if unknown:
            raise UsageError(f"{_name(owner)}: fill has {unknown.pop()!r}, not image or mask")
        image, mask = fill.get("image", 0), fill.get("mask", 0)
    else:
        image, mask = fill, fill if checks.is_number(fill) else 0
    levels = numbers(image)
    levels = levels * 3 if checks.is_number(image) else levels
    if len(levels) != 3 or not all(0 <= v <= 255 and v.is_integer() for v in levels):
        raise UsageError(
            f"{_name(owner)}: fill {fill!r} must be one or three levels, whole numbers 0 to 255"
        )
    label = int(mask) if checks.is_number(mask) and float(mask).is_integer() else mask
    return {
        "fill": [int(v) for v in levels],
        "mask_fill": whole(owner, "fill of masks", label, 0, 65535),
    }


def centre(owner: object, center: Sequence[float] | None) -> list[float] | None:
    if center is None:
        return None
    values = list(numbers(center))
    if len(values) != 2 or not all(math.isfinite(v) for v in values):
        raise UsageError(f"{_name(owner)}: center {center!r} must be (x, y) in pixels")
    return values
