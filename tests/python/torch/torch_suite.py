"""Runs torch's own checks of its backends (those in its wheel) against ours.

    python torch_suite.py --ranks 3 [--backend gloo] [CHECK ...]

The ranks are forked from one process that has read the suite, and run one check after the other,
each in a process group of its own; without names all of the suite. A line of JSON with their names,
and one a check: its name, what became of it ("passed", "skipped", "failed", "died", "left out"), why,
on which rank, and its seconds.
A signal SIGUSR1 to a rank shows where it is.

The suite chooses by the backend's name in places. It is read as if for Gloo, whose operations ours
are.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=3)
parser.add_argument("--backend", default="nostall")
parser.add_argument("--limit", type=float, default=200.0, help="seconds a check may take")
parser.add_argument("--trace", action="store_true", help="failures with their tracebacks")
parser.add_argument("--left-out", type=Path, help="a table of checks that are not run, by reason")
parser.add_argument("checks", nargs="*")
arguments = parser.parse_args()

scratch = tempfile.TemporaryDirectory(prefix="nostall-suite-")
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=str(arguments.ranks),
    INIT_METHOD=f"file://{scratch.name}/shared-by-a-check",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

from nostall.torch._group import register_backend  # noqa: E402


class Alias(str):
    """The backend's name, equal to Gloo's where the suite compares it while it runs."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other)) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


register_backend()
suite.BACKEND = Alias(arguments.backend)
# The one backend of which the suite believes that two of three ranks make a group.
os.environ["BACKEND"] = "mpi"


class Checks(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    within: Barrier

    def _barrier(self, *_: Any, **__: Any) -> None:
        """Of all ranks. The suite's own looks for files, ten times a second, for ten seconds."""
        self.within.wait(arguments.limit)


monitored_barrier = dist.monitored_barrier


def patient(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """For four times as long as a check says: a busy machine may take two seconds."""
    monitored_barrier(group, None if timeout is None else 4 * timeout, wait_all_ranks)


dist.monitored_barrier = patient
new_group = dist.new_group


def patient_group(ranks: Any = None, timeout: Any = None, *more: Any, **named: Any) -> Any:
    """The same: all ranks join within the limit that a check gives its group."""
    return new_group(ranks, None if timeout is None else 4 * timeout, *more, **named)


dist.new_group = patient_group
SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


def outcome_of(check: unittest.TestCase, name: str) -> tuple[str, str]:
    try:
        getattr(check, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", SKIPS[end.code]) if end.code in SKIPS else ("failed", f"exit {end.code}")
    except BaseException as error:
        lines = traceback.format_exception(error) if arguments.trace else [repr(error)]
        return "failed", "".join(lines)
    return "passed", ""


def run_rank(rank: int, names: list[str], meet: Barrier, within: Barrier, report: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ["RANK"] = str(rank)
    for number, name in enumerate(names):
        if rank == 0:
            within.reset()
            Path(scratch.name, "shared-by-a-check").unlink(missing_ok=True)
        meet.wait()
        report.put((name, rank, "began", "", 0.0))
        begin = time.monotonic()
        check = Checks(name)
        check.rank, check.within = rank, within
        check.file_name = f"{scratch.name}/store-{os.getppid()}-{len(names)}-{number}"
        dist.init_process_group(
            arguments.backend,
            init_method=f"file://{check.file_name}",
            world_size=arguments.ranks,
            rank=rank,
            # Also of a check that wants its waits to end soon: all ranks join within it.
            timeout=timedelta(seconds=max(30, suite.CUSTOM_PG_TIMEOUT.get(name, 30))),
        )
        set_rng_seed()
        result = outcome_of(check, name)
        report.put((name, rank, *result, time.monotonic() - begin))
        meet.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        dist.set_debug_level_from_env()


def run(names: list[str]) -> dict[str, dict[int, tuple[str, str, float]]]:
    """Until all are done, or one hangs or ends its process: the rest is the caller's to run."""
    fork = multiprocessing.get_context("fork")
    report = fork.SimpleQueue()
    meet, within = fork.Barrier(arguments.ranks), fork.Barrier(arguments.ranks)
    ranks = [
        fork.Process(target=run_rank, args=(r, names, meet, within, report))
        for r in range(arguments.ranks)
    ]
    for process in ranks:
        process.start()
    results: dict[str, dict[int, tuple[str, str, float]]] = {}
    last, current = time.monotonic(), ""
    while any(process.is_alive() for process in ranks) or not report.empty():
        if report.empty():
            late = time.monotonic() - last > arguments.limit
            if late or any(process.exitcode not in (None, 0) for process in ranks):
                break
            time.sleep(0.005)
            continue
        current, rank, what, why, seconds = report.get()
        results.setdefault(current, {})
        last = time.monotonic()
        if what != "began":
            results[current][rank] = (what, why, seconds)
    for rank, process in enumerate(ranks):
        if process.is_alive():
            process.kill()
        process.join()
        if current and rank not in results[current]:
            results[current][rank] = ("died", f"exit {process.exitcode}", 0.0)
    return results


def left_out(names: list[str]) -> dict[str, str]:
    """Those of the table, with its reasons; a line that is not indented is one."""
    found: dict[str, str] = {}
    if arguments.left_out is None:
        return found
    reason = ""
    for line in arguments.left_out.read_text().splitlines():
        if not line.startswith(" "):
            reason = line
            continue
        for pattern in line.split():
            found |= dict.fromkeys(fnmatch.filter(names, f"test_{pattern}"), reason)
    return found


def main() -> int:
    common_distributed.initialize_temp_directories()
    every = [name for name in sorted(dir(Checks)) if name.startswith("test_")]
    names = arguments.checks or every
    print(json.dumps({"names": names}), flush=True)
    excluded = left_out(names)
    for name, why in excluded.items():
        print(json.dumps({"check": name, "what": "left out", "why": why}), flush=True)
    names = [name for name in names if name not in excluded]
    failed = 0
    while names and failed < 40:
        results = run(names)
        for name, by_rank in results.items():
            worst = max(by_rank, key=lambda r: ORDER.index(by_rank[r][0]))
            what, why, _ = by_rank[worst]
            seconds = max(entry[2] for entry in by_rank.values())
            failed += what in ("failed", "died")
            line = {"check": name, "what": what, "why": why, "rank": worst, "seconds": seconds}
            print(json.dumps(line), flush=True)
        names = [n for n in names if n not in results]
    common_distributed.cleanup_temp_dir()
    return 1 if failed else 0


ORDER = ("passed", "skipped", "failed", "died")
if __name__ == "__main__":
    sys.exit(main())
