"""Numbers of things in messages."""

from __future__ import annotations

_HISSED = ("ss", "x", "sh", "tch")


def counted(number: int, thing: str) -> str:
    """As in "1 rank" and "1,000 ranks"; ``thing`` is the noun of one, after its adjectives."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith(_HISSED) else "s")
