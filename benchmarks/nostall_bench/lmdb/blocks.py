"""Sequential reading by memory map, by pread and by pread past the page cache, for several sizes of
a read [Pumma 2020, sec. 5.1.1 and 5.1.2, fig. 5.1]."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

from nostall_bench.lmdb.pool import aligned

WAYS = ("mmap", "pread", "pread, O_DIRECT")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def seconds(path: Path, way: str, size: int, total: int) -> float:
    """Seconds for the first `total` bytes, in pieces of `size` copied into private memory."""
    buffer = aligned(size)
    flags = os.O_RDONLY | (os.O_DIRECT if way == "pread, O_DIRECT" else 0)
    descriptor = os.open(path, flags)
    try:
        if way == "mmap":
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
                pages = np.frombuffer(mapped, np.uint8)
                began = time.perf_counter()
                for begin in range(0, total, size):
                    buffer[:] = pages[begin : begin + size]
                took = time.perf_counter() - began
                del pages
            return took
        began = time.perf_counter()
        for begin in range(0, total, size):
            os.preadv(descriptor, [buffer.data], begin)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)
