"""Ranks that need not read torch: forked from one process that has read it.

torch_server.run("delegates", ranks=2)  # a function of torch_rank.py, on each rank
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import prefork

JOB = Path(__file__).with_name("torch_job.py")


@dataclass(frozen=True)
class Ended:
    """What the ranks left: their exit statuses (negative: a signal) and what they wrote."""

    statuses: list[int]
    stdout: str
    stderr: str


def run(
    what: str,
    ranks: int,
    limit: float = 800.0,
    mounts_of: int | None = None,
    **environment: str,
) -> Ended:
    """Ranks that run for longer than `limit` seconds are killed."""
    with tempfile.TemporaryDirectory(prefix="nostall-ranks-") as folder:
        request = {
            "what": what,
            "ranks": ranks,
            "limit": limit,
            "environment": environment,
            "folder": folder,
        }
        # The ranks, which it forks, end as Python ends.
        done = prefork.run([JOB, json.dumps(request)], torch=True, whole=True, mounts_of=mounts_of)
        assert done.returncode == 0, done.stderr
        return Ended(
            json.loads(Path(folder, "statuses").read_text()),
            Path(folder, "1").read_text(),
            Path(folder, "2").read_text(),
        )
