"""Plain data in files: read as the types that annotations name (another type is refused, with its
place), and written so that a reader finds all of it."""

from __future__ import annotations

import json
import math
import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nostall.errors import CorruptionError

MOMENT = "%Y-%m-%d %H:%M:%S %z"  # as people read it
_LARGEST = 2**64 - 1  # of any number: no sum of those in a file overflows


def read(kind: Any, value: Any, place: str) -> Any:
    """A value of plain data as a dataclass, list, tuple, dictionary, text, truth or number.

    Args:
        kind: what it must be, as an annotation; ``T | None`` may be None.
        place: its name, for the error.

    Raises:
        CorruptionError: it is something else.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else read(of[0], value, place)
    if is_dataclass(kind):
        hints, given = get_type_hints(kind), read(dict[str, Any], value, place)
        lacking = [name for name in hints if name not in given]
        if lacking:
            raise CorruptionError(f"{place} lacks {lacking[0]}")
        make: Any = kind
        return make(**{n: read(hint, given[n], f"{place}.{n}") for n, hint in hints.items()})
    if origin is dict and isinstance(value, dict):
        return {k: read(of[1], v, f"{place}.{k}") for k, v in value.items()}
    if origin is list and isinstance(value, list):
        return [read(of[0], v, f"{place}[{i}]") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(of):
        return tuple(read(k, v, place) for k, v in zip(of, value, strict=True))
    if kind is Any or (kind in (str, bool) and isinstance(value, kind)):
        return value
    number = isinstance(value, int | float if kind is float else int) and not isinstance(
        value, bool
    )
    if kind in (int, float) and number and math.isfinite(value) and abs(value) <= _LARGEST:
        return value
    name = kind.__name__ if origin is None else str(kind).replace("typing.", "")
    raise CorruptionError(f"{place} must be {name}, not {value!r:.60}")


def write(path: Path, data: dict[str, Any]) -> None:
    """Plain data as JSON: a reader finds all of it, or what was there before.

    Raises:
        OSError, TypeError, ValueError: it cannot be written.
    """
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(data))
    beside.replace(path)
