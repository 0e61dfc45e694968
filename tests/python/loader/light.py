"""What processes that are spawned are given: they import this module, which reads no torch.

They would take seconds to read it, once each.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

import nostall
from nostall.errors import CorruptionError

DAMAGED, FATAL, UNSENT = 1, 2, 3


def damaged_and_fatal(values: Any, context: nostall.Context) -> Any:
    kind = int(values[0])
    if kind == DAMAGED:
        raise CorruptionError("it is damaged")
    if kind == FATAL:
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == UNSENT:
        return lambda: None
    return np.array([context.sample, os.getpid(), np.random.randint(2**31)])


def first_three(item: Any) -> Any:
    return item[:3]


class Five:
    """Items that are their numbers, and five."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        return i


class FromAnother(Five):
    """Items, or results, for which another source is asked."""

    def __init__(self, other: nostall.Cached) -> None:
        self.other = other

    def __getitem__(self, i: int) -> Any:
        return self.other[i] + 1

    def __call__(self, item: Any) -> Any:
        return self[int(item)]
