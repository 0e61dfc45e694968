"""Says where training waited: from recorded runs, from statistics, or from timelines.

The directory of a run (NOSTALL_TRACE, nostall profile) becomes one self-contained HTML page; two become
one page side by side. So do statistics (loader.stats().save(file), one file per rank). A Horovod
timeline, or traces of the PyTorch profiler (one per rank), become a table, and the files named with -o.
So does the directory of an MPI profile (nostall run --profile): which rank arrived when at collectives.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nostall.errors import UsageError
from nostall.observe import timelines as analyze
from nostall.observe._stats import Stats
from nostall.observe.report import _arrivals as arrivals
from nostall.observe.report import _run as runs
from nostall.observe.report import _run_page as run_page
from nostall.observe.report import _timeline as timeline_report
from nostall.observe.report import write

_PAGE = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall report``."""
    parser.add_argument(
        "files", nargs="+", help="a run's directory (or two), statistics, or timelines"
    )
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        help="of runs and statistics: the HTML file (nostall-report.html); of timelines: any number "
        "of files, their format by suffix: " + ", ".join(timeline_report.SUFFIXES),
    )
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="PATTERN",
        help="tensors that are not gradients, such as 'metric*'; small ones that few rounds reduce are "
        "found by themselves if this is not given",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the report."""
    _refuse_inputs(arguments.files, arguments.output or [])
    if profiles := arrivals.find(arguments.files):
        _refuse_others(arguments.output, timeline_report.SUFFIXES)
        profile = arrivals.read(profiles)
        print(arrivals.text(profile))
        for path in arguments.output or []:
            _write(lambda path: arrivals.save(profile, path), path)
        return 0
    directories = [Path(f).is_dir() for f in arguments.files]
    if any(directories):
        if not all(directories):
            odd = arguments.files[directories.index(False)]
            raise UsageError(
                f"{odd} is not the directory of a run, but others are: report them one by one"
            )
        _refuse_others(arguments.output, _PAGE)
        run_page.check_count(len(directories))
        found_runs = [runs.read(f) for f in arguments.files]
        for found_run in found_runs:
            print(run_page.text(found_run))
        for path in arguments.output or ["nostall-report.html"]:
            _write(lambda path: run_page.save(found_runs, path), path)
        return 0
    traces = [analyze.is_trace(f) for f in arguments.files]
    if all(traces):
        _refuse_others(arguments.output, timeline_report.SUFFIXES)
        found = analyze.analyze(arguments.files, arguments.exclude)
        print(timeline_report.text(found))
        for path in arguments.output or []:
            _write(lambda path: timeline_report.save(found, path), path)
        return 0
    if any(traces):
        odd = arguments.files[traces.index(False)]
        raise UsageError(f"{odd} is not a timeline, but the others are: report them one by one")
    _refuse_others(arguments.output, _PAGE)
    stats = [Stats.load(f) for f in arguments.files]
    for path in arguments.output or ["nostall-report.html"]:
        _write(lambda path: write(stats, path), path)
    return 0


def _refuse_inputs(files: Sequence[str], outputs: Sequence[str]) -> None:
    for path in outputs:
        there = [f for f in files if os.path.exists(f) and os.path.exists(path)]
        if any(os.path.samefile(f, path) for f in there):
            raise UsageError(
                f"{path} is to be reported and to be written: give another file with -o"
            )


def _refuse_others(outputs: Sequence[str] | None, suffixes: Sequence[str]) -> None:
    """Refuses a name of no format before anything is written."""
    for path in outputs or []:
        if Path(path).suffix.lower() not in suffixes:
            raise UsageError(f"cannot write {path}: its name must end with {', '.join(suffixes)}")


def _write(save: Callable[[str], None], path: str) -> None:
    """Writes one file, and says its name, and whether there was one of that name."""
    replaced = Path(path).exists()
    save(path)
    print(f"written to {path}" + (" (in the place of an older one)" if replaced else ""))
