"""Ranks of a job: loaders of one process, or processes of a test's own program."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prefork

_made = itertools.count()
_run = secrets.token_hex(8)


def own_job(job: str) -> str:
    """The name of a job, by which ranks meet, that no other run of the tests has."""
    return f"{job} of {_run}"


def one_rank(rank: int, world: int) -> dict[str, Any]:
    """Arguments of a DataLoader that is one rank of `world`, on a node of its own without peers."""
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": 0,
        "local_world_size": 1,
        "job": own_job(f"rank {rank} of {world}: {next(_made)}"),
    }


def run_ranks(
    program: str, arguments: Sequence[Sequence[str]], met: Path | None
) -> list[dict[str, Any]]:
    """What each rank printed: processes of a program, one for each list of arguments.

    With `met`, a folder, each is a node of its own that exchanges samples with the others.
    """
    nodes = {
        "NOSTALL_RENDEZVOUS": str(met),
        "NOSTALL_SECRET": secrets.token_hex(16),
        "NOSTALL_UCX_TLS": "tcp",
        "NOSTALL_PEER_TIMEOUT_MS": "60000",
    }
    started, told = [], []
    try:
        for rank, words in enumerate(arguments):
            more = {**nodes, "NOSTALL_NODE": f"node {rank}"} if met else {}
            pipes = {"stdout": prefork.PIPE, "stderr": prefork.PIPE}
            process = prefork.Process(["-c", program, *words], env={**os.environ, **more}, **pipes)
            started.append(process)
        for process in started:
            out, errors = process.communicate(timeout=800)
            assert process.returncode == 0, errors
            told.append(json.loads(out))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return told
