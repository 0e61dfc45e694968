"""Runs campaigns, each in a process of its own, and prints their figures.

    python -m campaigns [NAME ...] [--scale 0.01] [--seed 0] [--json FILE]

A campaign is a module of this folder with `FULL`, its cases at scale 1 in words, `SMALL`, the
scale that takes half a minute, `SECONDS`, its limit of time at that scale, and
`run(task) -> Outcome`.
Exit status: 0 if no case failed and nothing was missing, 1 otherwise, 2 for a name that is not known.
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
from pathlib import Path

from campaigns.outcome import Outcome, Task
from campaigns.serving import serve

HERE = Path(__file__).parent
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="campaigns to run (default: all)")
    parser.add_argument(
        "--scale", type=float, help="1 for the published size (default: each campaign's small one)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures and the machine to this file")
    arguments = parser.parse_args()
    known = names()
    for name in arguments.name:
        if name not in known:
            print(f"no campaign is named {name!r}; there are: {', '.join(known)}", file=sys.stderr)
            return 2
    outcomes: dict[str, dict[str, object]] = {}
    failed = 0
    for name in arguments.name or known:
        module = importlib.import_module(f"campaigns.{name}")
        scale = arguments.scale if arguments.scale is not None else module.SMALL
        limit = module.SECONDS * max(1.0, scale / module.SMALL)
        begin = time.monotonic()
        outcome = run(name, Task(arguments.seed, scale), limit)
        seconds = time.monotonic() - begin
        if not (outcome.cases or outcome.failures or outcome.missing):
            outcome.failures.append("no case was run")
        failed += bool(outcome.failures) or bool(outcome.missing)
        numbers = "".join(f", {k} {v}" for k, v in outcome.figures.items())
        word = (
            f"not run: {outcome.missing} is missing"
            if outcome.missing
            else f"{len(outcome.failures)} failed"
        )
        print(
            f"{name}: {outcome.cases} cases, {word}{numbers} ({seconds:.0f} s, scale {scale:g})",
            flush=True,
        )
        for failure in outcome.failures[:20]:
            print(f"  {failure}", flush=True)
        outcomes[name] = {
            **dataclasses.asdict(outcome),
            "seconds": seconds,
            "scale": scale,
            "full": module.FULL,
        }
    if arguments.json:
        machine = {
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        arguments.json.write_text(json.dumps({"machine": machine, "campaigns": outcomes}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
