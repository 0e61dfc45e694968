"""Runs a function of this test on every rank of a communicator, each a process of its own."""

from __future__ import annotations

import subprocess
import tempfile
import uuid
from pathlib import Path

import prefork

HEADER = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from nostall import errors
from nostall.collective import Communicator, Operation
job, rank, size, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
signals = Path(sys.argv[5])
def tell(what, text=""):
    (signals / f"{what}.new").write_text(text)
    (signals / f"{what}.new").rename(signals / what)
def wait_for(what):
    while not (signals / what).exists():
        time.sleep(0.005)
    return (signals / what).read_text()
def until_asleep(process):  # its main thread, at three looks: as one that waits for a rank
    seen = 0
    while seen < 3:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        seen = seen + 1 if state == "S" else 0
        time.sleep(0.01)
def join(**options):
    return Communicator(job, rank, size, directory=directory, **options)
"""


def run(body: str, size: int, directory: Path, timeout: float = 800) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank that ran `body`."""
    job = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="nostall-test-") as signals:
        processes = [
            prefork.Process(
                ["-c", HEADER + body, job, str(rank), str(size), str(directory), signals],
                stdout=prefork.PIPE,
                stderr=prefork.PIPE,
            )
            for rank in range(size)
        ]
        results = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=timeout)
                results.append((process.wait(), out, err))
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            # One that failed leaves the others waiting: what it says is the reason.
            others = [process.communicate() for process in processes[len(results) + 1 :]]
            raise AssertionError(f"rank {len(results)} waits: {results + others}") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return results


def check(body: str, size: int, directory: Path) -> list[str]:
    """What each rank printed; fails if one failed."""
    results = run(body, size, directory)
    assert all(status == 0 for status, _, _ in results), results
    return [out.strip() for _, out, _ in results]
