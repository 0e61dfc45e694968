"""Ranks as processes, as torchrun would start them."""

from __future__ import annotations

import json
import uuid
from typing import Any

import prefork

from nostall_bench.launch import environment


def run_ranks(
    ranks: int, code: str, *, timeout: float = 800, check: bool = True, whole: bool = False
) -> list[Any]:
    """Runs `code` on every rank; what each assigned to `result`, or the last error that it printed."""
    program = (
        "import json, os, sys\nrank = int(os.environ['RANK'])\nresult = None\n"
        + code
        + "\nprint('RESULT ' + json.dumps(result))\n"
    )
    job = uuid.uuid4().hex
    started = [
        prefork.Process(
            ["-c", program],
            env=environment(rank, ranks, job),
            stdout=prefork.PIPE,
            stderr=prefork.PIPE,
            torch=True,
            whole=whole,
        )
        for rank in range(ranks)
    ]
    results: list[Any] = []
    try:
        for process in started:
            out, err = process.communicate(timeout=timeout)
            lines = [x for x in out.splitlines() if x.startswith("RESULT ")]
            if process.returncode == 0 and lines:
                results.append(json.loads(lines[-1].removeprefix("RESULT ")))
                continue
            assert not check, err
            results.append(([x for x in err.splitlines() if "Error" in x] or [""])[-1])
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return results
