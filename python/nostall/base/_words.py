"""What messages are made of: numbers of things, and what an error says."""

from __future__ import annotations

from nostall.errors import Error

_HISSED = ("ss", "x", "sh", "tch")


def counted(number: int, thing: str) -> str:
    """As in "1 rank" and "1,000 ranks"; ``thing`` is the noun of one, after its adjectives."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith(_HISSED) else "s")


def printable(name: str) -> str:
    """The name of a file as text, which goes to logs: bytes that are no UTF-8 as ``\\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def words_of(error: Exception) -> str:
    """The text of an error, with its kind if it is not an expected one."""
    return str(error) if isinstance(error, Error | OSError) else f"{type(error).__name__}: {error}"
