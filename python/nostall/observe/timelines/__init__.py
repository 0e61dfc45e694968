"""Where synchronous data-parallel training waits, from timelines that other tools wrote.

`analyze(files)` reads Horovod timelines, traces of the PyTorch profiler, plain or gzip, streamed
in bounded memory, and computes the five metrics defined in docs/guide/timeline.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nostall.errors import UsageError
from nostall.observe.timelines import _horovod as horovod
from nostall.observe.timelines import _profiler as profiler
from nostall.observe.timelines._model import (
    Analysis,
    RankMetrics,
    RoundMetrics,
    Spread,
    TensorMetrics,
)
from nostall.observe.timelines._stream import Source

__all__ = [
    "Analysis",
    "RankMetrics",
    "RoundMetrics",
    "Spread",
    "TensorMetrics",
    "analyze",
    "is_trace",
]


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether the file looks like a trace in Chrome's format (and not like saved statistics).

    Raises:
        IoError: the file cannot be read.
    """
    return _kind(Source(path)) is not None


def _kind(source: Source) -> str | None:
    head = source.head().lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"["):
        return "horovod"
    if head.startswith(b"{") and b'"traceEvents"' in head:
        return "profiler"
    # A timeline whose beginning was lost, or that was cut from a larger one.
    return "horovod" if b'"ph"' in head else None


def analyze(
    files: Sequence[str | os.PathLike[str]], exclude: Sequence[str] | None = None
) -> Analysis:
    """The metrics of one training.

    Args:
        files: one Horovod timeline, or one trace per rank.
        exclude: patterns (as in fnmatch) of tensors that are not gradients. If it is not given, these
            are found: small tensors that less than half of the rounds reduce, after all others.

    Raises:
        UsageError: the files do not belong together.
        CorruptionError: a file holds nothing to analyse.
        IoError: a file cannot be read.
    """
    sources = [Source(f) for f in files]
    if not sources:
        raise UsageError("there are no timelines to analyse")
    kinds = [_kind(s) for s in sources]
    if all(k == "profiler" for k in kinds):
        if exclude:
            raise UsageError("traces of the profiler have no names of tensors to exclude")
        return profiler.analyze(sources)
    if len(sources) != 1:
        raise UsageError(
            f"a Horovod timeline covers all ranks: pass one file, not {len(sources)}; "
            "only traces of the profiler come one per rank"
        )
    return horovod.analyze(sources[0], exclude)
