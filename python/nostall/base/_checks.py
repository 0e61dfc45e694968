"""Checks of arguments: numbers of Python and of NumPy, and flags.

Neither a flag nor a text is a number: True would be taken for 1, and "0.5" is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat, TypeGuard

import numpy as np

from nostall.errors import UsageError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, NaN and infinity too; also a scalar of torch."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        return False
    return isinstance(value, SupportsFloat) and not getattr(value, "shape", ())


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The number as one of Python.

    Raises:
        UsageError: it is no whole number from `least` to `most`.
    """
    if not is_whole(value) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return int(value)


def number(name: str, value: Any, low: float, high: float) -> float:
    """The number as one of Python.

    Raises:
        UsageError: it is no number from `low` to `high`.
    """
    try:
        if is_number(value) and low <= value <= high:
            return float(value)
    except OverflowError:  # a whole number that no float can be
        pass
    raise UsageError(f"{name} must be a number from {low} to {high}, not {value!r}")


def flag(name: str, value: Any) -> bool:
    """The flag as one of Python.

    Raises:
        UsageError: it is neither True nor False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """The texts of a sequence; one text alone is no sequence of its letters.

    Raises:
        UsageError: it is no sequence of texts.
    """
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    listed = tuple(value) if several else ()
    if not several or not all(isinstance(text, str) for text in listed):
        raise UsageError(f"{name} must be a list of texts, not {value!r}")
    return listed
