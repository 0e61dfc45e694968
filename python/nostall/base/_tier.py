"""A storage class of the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from nostall.errors import UsageError


class Tier(ABC):
    """A tier that a class of the user's keeps: memory of another process, a key-value store.

    It stands in ``tiers=`` beside ``"ram:20GiB"``. The ranks of a node and its worker processes have a
    copy each, which must reach what the others put. The plan says which samples lie in it, so that it
    gets `capacity` bytes at most in a job. The loader compares the checksum of what it gets: wrong
    bytes are never served.

    The loader's threads call both methods, several at a time: what a call changes needs a lock. An
    exception is logged once, and the sample is read from the source. To be used in processes that are
    spawned a tier must be picklable; open connections in `put` and `get`, not before.

    Args:
        capacity: bytes of samples that it takes.
    """

    def __init__(self, capacity: int) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
            raise UsageError(
                f"{type(self).__name__}: capacity {capacity!r} must be bytes, 0 or more"
            )
        self.capacity = capacity

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Keeps the data, in the place of what the key had.

        Keys begin with ``nostall/`` and the fingerprint of the data set, which later jobs over the same
        data use too.
        """

    @abstractmethod
    def get(self, key: str) -> Any:
        """What was put: `bytes`, or anything that has their buffer; None if it is there no more."""
