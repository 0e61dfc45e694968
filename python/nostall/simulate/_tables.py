"""Reading tables of TOML so that every mistake is named with its file and key."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nostall.errors import UsageError

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Place:
    """The place of a value in a file; makes the errors about it."""

    file: str
    key: str = ""

    def __truediv__(self, key: str | int) -> Place:
        return Place(self.file, f"{self.key}.{key}" if self.key else str(key))

    def error(self, what: str) -> UsageError:
        """`file: key: what`."""
        return UsageError(
            f"{self.file}: {self.key}: {what}" if self.key else f"{self.file}: {what}"
        )

    def number(
        self, value: Any, *, above: float | None = None, least: float | None = None
    ) -> float:
        """A finite number in the range.

        Raises:
            UsageError: it is none.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:  # of whole numbers
            number = math.inf
        if not math.isfinite(number):
            raise self.error(f"must be finite, not {value!r:.60}")
        if above is not None and number <= above:
            raise self.error(f"must be above {above:g}, not {value!r}")
        if least is not None and number < least:
            raise self.error(f"must be at least {least:g}, not {value!r}")
        return number

    def integer(self, value: Any, *, least: int, most: int = 2**31 - 1) -> int:
        """A whole number in the range.

        Raises:
            UsageError: it is none.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"must be a whole number from {least} to {most}, not {value!r:.60}")
        return value

    def table(self, value: Any, known: Iterable[str]) -> dict[str, Any]:
        """A table with no other keys than these.

        Raises:
            UsageError: it is none, or has others.
        """
        if not isinstance(value, Mapping):
            raise self.error(f"must be a table, not {value!r}")
        names = list(known)
        for key in value:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, 1)
                hint = f': did you mean "{close[0]}"?' if close else f" ({', '.join(names)})"
                raise (self / str(key)).error("unknown key" + hint)
        return dict(value)

    def curve(self, value: Any, *, zero: bool = False) -> Curve:
        """Values by threads or clients, as throughputs: {1 = 66, 2 = 86} or [66, 86], MB/s.

        Raises:
            UsageError: it is none, or a value is negative, or 0 without `zero`.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, (list, tuple)):
            value = {str(i + 1): v for i, v in enumerate(value)}
        if not isinstance(value, Mapping) or not value:
            raise self.error(f"must be throughputs by threads, {{1 = 66, 2 = 86}}, not {value!r}")
        points = []
        for key, speed in value.items():
            try:
                at = float(key)
            except ValueError:
                raise self.error(f"{key!r} is not a number of threads or clients") from None
            (self / key).number(at, above=0)
            limit = {"least": 0.0} if zero else {"above": 0.0}
            points.append((at, (self / key).number(speed, **limit)))
        points.sort()
        if any(a[0] == b[0] for a, b in itertools.pairwise(points)):
            raise self.error("names one number of threads twice")
        return tuple(points)
