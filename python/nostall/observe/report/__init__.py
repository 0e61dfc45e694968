"""Writes one self-contained HTML page: what a training waited for, and the origins of its samples."""

# _run       a recorded run, read from its directory; _digest: the waits of one rank and their causes
# _run_page  the page: answer, lanes of ranks and devices, tables; _drawing, _parts: its SVG and HTML
# _kept      its sections of resume points and of memory
# _advice    what to change, and the gain of it
# _timeline  the analysis of timelines of other tools (nostall/observe/timelines), as text or page
# _arrivals, _mpi_trace   profiles of MPI programs

from __future__ import annotations

import os
from collections.abc import Sequence

from nostall.errors import UsageError
from nostall.observe._stats import Stats
from nostall.observe.report import _run_page
from nostall.observe.report._run import Loader, Rank, Run, lacks

__all__ = ["page", "write"]


def page(stats: Sequence[Stats]) -> str:
    """The HTML text.

    Raises:
        UsageError: no statistics, or of different jobs.
    """
    return _run_page.page([_of_statistics(stats)])


def write(stats: Sequence[Stats], path: str | os.PathLike[str]) -> None:
    """Writes the page.

    Raises:
        UsageError: no statistics, or of different jobs.
        IoError: the file cannot be written.
    """
    _run_page.save([_of_statistics(stats)], path)


def _of_statistics(stats: Sequence[Stats]) -> Run:
    if not stats:
        raise UsageError("there are no statistics to report")
    ranks = {s.rank: Rank(s.rank) for s in stats}
    for s in stats:
        ranks[s.rank].loaders.append(Loader({}, s))
    found = [ranks[r] for r in sorted(ranks)]
    return Run("", found, None, lacks(found))
