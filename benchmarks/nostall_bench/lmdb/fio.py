"""The limit: fio (Jens Axboe's I/O tester) on the same file, with the same reads, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from nostall.errors import UsageError
from nostall_bench.lmdb.pool import Task

_PAGE = 4096
_SEQUENTIAL = "1M"


def installed() -> bool:
    """Whether there is a fio."""
    return shutil.which("fio") is not None


def seconds(task: Task, ranks: int, *, sequential: bool) -> float:
    """Seconds that fio takes for the reads of `task`, one job a rank, `task.depth` in flight each,
    past the page cache.

    Shuffled: the very ranges of the records, in their order, replayed. Sequential: the part of the
    file that the records fill, in reads of 1 MiB, by one job for each node.
    """
    offset, length = task.offset.astype(np.int64), task.length.astype(np.int64)
    per_node = ranks // task.nodes
    jobs = []
    with tempfile.TemporaryDirectory(prefix="nostall-fio-") as folder:
        if sequential:
            begin = int(offset[task.order].min()) // _PAGE * _PAGE
            end = int((offset[task.order] + length[task.order]).max())
            each = (end - begin) // task.nodes // _PAGE * _PAGE
            for node in range(task.nodes):
                jobs.append(
                    f"[{node}]\nfilename={task.paths[node]}/data.mdb\nrw=read\nbs={_SEQUENTIAL}\n"
                    f"offset={begin + node * each}\nsize={each}\n"
                )
        else:
            width = task.order.shape[1] // ranks
            for rank in range(ranks):
                path = f"{task.paths[rank // per_node]}/data.mdb"
                records = task.order[:, rank * width : (rank + 1) * width].ravel()
                first = offset[records] // _PAGE * _PAGE
                last = -(-(offset[records] + length[records]) // _PAGE) * _PAGE
                lines = ["fio version 2 iolog", f"{path} add", f"{path} open"]
                lines += [
                    f"{path} read {b} {e - b}"
                    for b, e in zip(first.tolist(), last.tolist(), strict=True)
                ]
                log = Path(folder, f"{rank}.log")
                log.write_text("\n".join([*lines, f"{path} close", ""]))
                jobs.append(f"[{rank}]\nread_iolog={log}\n")
        job = Path(folder, "job.fio")
        job.write_text(
            f"[global]\nioengine=io_uring\niodepth={task.depth}\ndirect=1\nthread=1\n"
            f"invalidate=0\n\n" + "\n".join(jobs)
        )
        done = subprocess.run(
            ["fio", "--output-format=json", "--readonly", str(job)], capture_output=True, text=True
        )
    if done.returncode:
        raise UsageError(f"fio failed: {(done.stderr or done.stdout).strip()[:500]}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return max(float(j["read"]["runtime"]) for j in report["jobs"]) / 1e3
