"""Bytes of traces, compressed or not, and what the scanner reports about damage."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from nostall.base._words import counted
from nostall.errors import IoError

CHUNK = 4 << 20
# Microseconds, counted from the beginning of the trace's clock or from 1970: no event ends later.
LATEST = 4e15


class Source:
    """A trace's bytes in pieces; `torn` says afterwards why the compressed stream ended early."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.torn: str | None = None

    def head(self, size: int = 64 << 10) -> bytes:
        """The first bytes, uncompressed."""
        out = b""
        for chunk in self.chunks(size):
            out += chunk
            if len(out) >= size:
                break
        self.torn = None
        return out[:size]

    def chunks(self, size: int = CHUNK) -> Iterator[bytes]:
        """All bytes, uncompressed.

        Raises:
            IoError: the file cannot be read.
        """
        try:
            with open(self.path, "rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                yield from (
                    self._inflated(raw, size) if packed else iter(lambda: raw.read(size), b"")
                )
        except OSError as error:
            raise IoError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _inflated(self, raw: BinaryIO, size: int) -> Iterator[bytes]:
        """Reads gzip members one after the other; gives out what precedes a damaged place."""
        member = zlib.decompressobj(31)
        data = raw.read(size)
        while data:
            try:
                chunk = member.decompress(data, size)
            except zlib.error as error:
                self.torn = str(error)
                return
            if chunk:
                yield chunk
            data = member.unconsumed_tail or member.unused_data or raw.read(size)
            if member.eof and data:
                member = zlib.decompressobj(31)
        rest = member.flush()
        if rest:
            yield rest
        if not member.eof:
            self.torn = "it ends early"

    def notes(self) -> list[str]:
        """A sentence if the compressed stream is torn."""
        if self.torn is None:
            return []
        return [f"{self.path}: the compressed stream is damaged or cut off ({self.torn})"]


def bounded(value: Any, most: float) -> float:
    """A number from a file.

    Raises:
        TypeError: it is none.
        OverflowError: it is not finite, or is beyond `most` on either side.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.60} is no number")
    if not -most <= value <= most:
        raise OverflowError(f"{value!r:.60} is beyond all bounds")
    return float(value)


def lasts(ts: Any, dur: Any) -> tuple[float, float]:
    """Begin and end of an event, microseconds.

    Raises:
        TypeError, OverflowError: as `bounded`; or it ends before it begins.
    """
    begin, length = bounded(ts, LATEST), bounded(dur, LATEST)
    if length < 0:
        raise OverflowError(f"an event lasts {dur} us")
    return begin, bounded(begin + length, LATEST)


def began(head: dict[str, Any]) -> int:
    """When a trace's clock began, nanoseconds since 1970; 0 if its head does not say."""
    base = head.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) and -LATEST * 1e3 <= base <= LATEST * 1e3 else 0


def left_out(name: str, count: int, first: int) -> list[str]:
    """A sentence about events whose values cannot be; `first` is the place of the first one."""
    if not count:
        return []
    return [f"{name}: {counted(count, 'unreadable event')} left out, the first at byte {first}"]


def damage_notes(name: str, report: dict[str, Any]) -> list[str]:
    """Sentences about bytes that are not events; offsets count uncompressed bytes."""
    notes = []
    if report["cut_off"] >= 0:
        notes.append(f"{name}: the file is cut off in the event at byte {report['cut_off']}")
    if report["damaged"]:
        notes.append(
            f"{name}: {report['damaged']} damaged places, the first at byte "
            f"{report['first_damage']}; {report['damaged_bytes']} bytes are left out"
        )
    return notes
