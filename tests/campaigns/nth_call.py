"""The n-th call fails, for every n: a job of two ranks that loads, saves, drains, restores and reduces.

A library that is preloaded (nth_call.c) counts what a rank asks of the system, by kind: memory that the
core asks for outside of the interpreter's lock, threads, io_uring, and on the job's files open, read,
write, fsync, rename, unlink, mmap, allocation and locks. A point is one call of one rank that fails,
alone or with all later ones of its kind. It passes if both ranks end by themselves within 30 s, and
either with an error that they tell, or with the results of the job that nobody disturbed. A signal, a
hang, and other results with status 0 are failures.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from campaigns.forked import fork
from campaigns.outcome import Outcome, Task

FULL = "every call of a job of two ranks, alone and with all later ones of its kind"
SMALL = 0.015

HERE = Path(__file__).parent
KINDS = (
    *("memory", "thread", "open", "read", "write", "fsync"),
    *("rename", "unlink", "mmap", "allocation", "lock", "io_uring"),
)
PROMISED = 30.0
# Points at a time: most of a point is two ranks that wait for each other's failure.
AT_ONCE = 8
SAMPLES = 24
# How long the job's own parts wait for a rank that has failed; in an undisturbed job one only is slow.
PATIENCE, UNDISTURBED = 4.0, 60.0


@dataclass(frozen=True)
class Point:
    rank: int
    kind: int
    number: int
    forever: bool

    def __str__(self) -> str:
        after = " and all later ones" if self.forever else ""
        return f"rank {self.rank}, call {self.number} of kind {KINDS[self.kind]}{after}"


def run(task: Task) -> Outcome:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        return Outcome(missing=f"a C compiler ({compiler})")
    with tempfile.TemporaryDirectory(prefix="nostall-nth-") as name:
        shim = Path(name) / "nth_call.so"
        flags = ["-O1", "-fexceptions", "-shared", "-fPIC", "-o", str(shim)]
        subprocess.run([compiler, *flags, str(HERE / "nth_call.c"), "-ldl"], check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "NTH_ROOT": str(Path(name) / "root"),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "campaigns.nth_call", json.dumps([task.seed, task.scale])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
        lines = done.stdout.decode().splitlines()
        if done.returncode or not lines:
            return Outcome(failures=[f"the campaign itself ended with {done.returncode}"])
        return Outcome(**json.loads(lines[-1]))


# -------------------------------------------------------------------- the job, in each rank


def job(rank: int, root: Path, ends: tuple[Any, Any], patience: float) -> str:
    """What one rank does; a digest of all that it got."""
    import numpy as np

    import nostall
    from nostall.collective import Communicator
    from nostall.errors import PeerError

    def gather(mine: bytes) -> list[bytes]:
        ends[rank].send_bytes(mine)
        if not ends[rank].poll(patience):
            raise PeerError("the other rank does not come")
        other = ends[rank].recv_bytes()
        return [mine, other] if rank == 0 else [other, mine]

    digest = hashlib.sha256()
    source = nostall.ImageFolder(root / "data", extensions=(".bin",))
    loader = nostall.DataLoader(
        source,
        batch_size=4,
        epochs=2,
        output="numpy",
        tiers=["ram:24KB", f"{root}/tier:1MB"],
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        job=root.name,
        reader="io_uring",
        peers="off",
        threads=1,
    )
    for epoch in loader.epochs():
        for batch, labels in epoch:
            for sample in batch:
                digest.update(sample.tobytes())
            digest.update(labels.tobytes())
    loader.close()

    def checkpointer() -> Any:
        return nostall.Checkpointer(
            root / "fast",
            root / "durable",
            keep=1,
            rank=rank,
            world_size=2,
            gather=gather,
            job=root.name,
            timeout=patience,
            patience=patience,
            threads=2,
            priority="normal",
        )

    states = [{"w": np.arange(5000) * (step + rank), "step": step} for step in (1, 2)]
    ckpt = checkpointer()
    ckpt.save(states[0], 1, level="durable")
    saved = ckpt.save(states[1], 2)
    saved.wait("durable", patience)
    ckpt.close(patience)
    ckpt = checkpointer()
    found = ckpt.restore()
    if found is None:
        raise RuntimeError("nothing to restore")
    digest.update(str(found.step).encode() + found.state["w"].tobytes())
    ckpt.close(patience)

    with Communicator(root.name, rank, 2, timeout=patience, window_bytes=1 << 16) as node:
        values = np.arange(1000, dtype=np.float32) + rank
        node.allreduce(values)
        digest.update(values.tobytes())
    return digest.hexdigest()


def rank_process(rank: int, root: Path, ends: tuple[Any, Any], point: Point | None) -> None:
    """Ends the process: 0 with the digest in a file, 3 with an error told."""
    shim = ctypes.CDLL(None)
    mine = point if point is not None and point.rank == rank else None
    ends[1 - rank].close()
    log = os.open(root.with_suffix(f".{rank}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 3
    try:
        if mine is None:
            shim.nth_arm(-1, ctypes.c_long(0), 0)
        else:
            shim.nth_arm(mine.kind, ctypes.c_long(mine.number), int(mine.forever))
        digest = job(rank, root, ends, UNDISTURBED if point is None else PATIENCE)
        shim.nth_disarm()
        counts = [shim.nth_count(kind) for kind in range(len(KINDS))]
        root.with_suffix(f".{rank}.json").write_text(
            json.dumps({"digest": digest, "calls": counts})
        )
        status = 0
    except BaseException:
        shim.nth_disarm()
        traceback.print_exc()
    finally:
        # As a program ends, but for the interpreter's own clean-up, which is the parent's.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ------------------------------------------------------------------------------ the points


def point_process(root: Path, point: Point | None, seconds: float) -> None:
    """One job; its ranks are children of a process of its own, so that no pipe is another job's."""
    os.setsid()
    (root / "data" / "a").mkdir(parents=True)
    for i in range(SAMPLES):
        (root / "data" / "a" / f"{i:02}.bin").write_bytes(bytes([i]) * (2000 + i))
    ends = Pipe()
    pids = [fork(lambda rank=rank: rank_process(rank, root, ends, point)) for rank in range(2)]
    for end in ends:
        end.close()
    end_at = time.monotonic() + seconds
    statuses: dict[int, int | None] = {}
    for rank, pid in enumerate(pids):
        descriptor = os.pidfd_open(pid)
        if not select.select([descriptor], [], [], max(0.0, end_at - time.monotonic()))[0]:
            statuses[rank] = None
            os.kill(pid, signal.SIGABRT)
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        statuses.setdefault(rank, status)
    root.with_suffix(".status").write_text(json.dumps([statuses[0], statuses[1]]))
    os._exit(0)


def judge(root: Path, expected: list[str]) -> tuple[str, str]:
    """How a point ended, and what is wrong with it, if anything."""
    statuses = json.loads(root.with_suffix(".status").read_text())

    def said(rank: int) -> str:
        lines = root.with_suffix(f".{rank}").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    for rank, status in enumerate(statuses):
        if status is None:
            return "hang", f"rank {rank} did not end in time: {said(rank)}"
        if status not in (0, 3):
            return "abort", f"rank {rank} ended with {status}: {said(rank)}"
    for rank, status in enumerate(statuses):
        if status == 0 and expected:
            result = json.loads(root.with_suffix(f".{rank}.json").read_text())
            if result["digest"] != expected[rank]:
                return "silent", f"rank {rank} has other results and status 0: {said(rank)}"
    return ("error told" if 3 in statuses else "same results"), ""


def remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for path in root.parent.glob(f"{root.name}.*"):
        path.unlink()


def inside(seed: int, scale: float) -> Outcome:
    # Before the forks, once for all points.
    for module in ("nostall.checkpoint", "nostall.collective"):
        importlib.import_module(module)
    home = Path(os.environ["NTH_ROOT"])
    home.mkdir()

    seconds = Task(seed, scale).patience(PROMISED)
    calls: list[list[int]] = []
    expected: list[str] = []
    for again in range(2):
        root = home / f"first{again}"
        os.waitpid(fork(lambda root=root: point_process(root, None, seconds)), 0)
        how, wrong = judge(root, expected)
        if how != "same results":
            told = "".join(root.with_suffix(f".{r}").read_text() for r in range(2))
            return Outcome(failures=[f"the undisturbed job fails: {wrong} {told[-2000:]}"])
        results = [json.loads(root.with_suffix(f".{r}.json").read_text()) for r in range(2)]
        expected = [result["digest"] for result in results]
        calls = [result["calls"] for result in results]
        remove(root)
    points = [
        Point(rank, kind, number, forever)
        for rank in range(2)
        for kind in range(len(KINDS))
        for number in range(1, calls[rank][kind] + 1)
        for forever in (False, True)
    ]
    wanted = max(1, round(len(points) * min(1.0, scale)))
    step = len(points) / wanted
    chosen = [points[int((i + seed % 97 / 97) * step) % len(points)] for i in range(wanted)]

    outcome = Outcome()
    counts: Counter[str] = Counter()
    running: dict[int, tuple[int, Point, Path]] = {}
    waiting = list(reversed(list(enumerate(chosen))))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, point = waiting.pop()
            root = home / f"point{number}"
            pid = fork(lambda root=root, point=point: point_process(root, point, seconds))
            running[os.pidfd_open(pid)] = (pid, point, root)
        for descriptor in select.select(list(running), [], [])[0]:
            pid, point, root = running.pop(descriptor)
            os.close(descriptor)
            os.waitpid(pid, 0)
            how, wrong = judge(root, expected)
            counts[how] += 1
            outcome.cases += 1
            if wrong:
                outcome.failures.append(f"{point}: {wrong}")
            remove(root)
    outcome.figures = dict(sorted(counts.items()))
    outcome.figures |= {
        "calls": ", ".join(f"{KINDS[k]} {calls[0][k]}+{calls[1][k]}" for k in range(len(KINDS)))
    }
    return outcome


if __name__ == "__main__":
    print(json.dumps(vars(inside(*json.loads(sys.argv[1])))), flush=True)
