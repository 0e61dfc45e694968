"""What messages are made of: numbers of things, and what an error says."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import sys

from nostall.errors import Error

_HISSED = ("ss", "x", "sh", "tch")


def counted(number: int, thing: str) -> str:
    """As in "1 rank" and "1,000 ranks"; ``thing`` is the noun of one, after its adjectives."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith(_HISSED) else "s")


def printable(name: str) -> str:
    """The name of a file as text, which goes to logs: bytes that are no UTF-8 as ``\\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What takes the place of characters that a stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
    return re.sub(r"\\udc([89a-f])", r"\\x\1", text), error.end


def print_any_name() -> None:
    """From here on all text can be printed, names of files as `printable` gives them."""
    codecs.register_error("nostall.escaped", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a pipe has taken the place of a file
                stream.reconfigure(errors="nostall.escaped")


def words_of(error: Exception) -> str:
    """The text of an error, with its kind if it is not an expected one; never empty."""
    text, kind = str(error), type(error).__name__
    if not text:
        return kind
    return text if isinstance(error, Error | OSError) else f"{kind}: {text}"
