"""The vector code that runs is the best that the processor has: slower code gives the same bits."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from nostall import _native


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are those of x86-64")
def test_the_best_kernels_of_the_processor_are_chosen() -> None:
    line = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags"))
    flags = set(line.split())
    wide = "AVX2" if "avx2" in flags else "portable"
    checksums = "SSE4.2" if "sse4_2" in flags else "portable"
    if {"sse4_2", "avx512f", "avx512dq", "vpclmulqdq"} <= flags:
        checksums = "VPCLMULQDQ"
    assert _native.kernels() == {
        "checksums": checksums,
        "images": wide,
        "orders": "AVX-512" if {"avx512f", "avx512dq"} <= flags else wide,
        "reductions": wide,
    }
