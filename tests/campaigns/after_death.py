"""Jobs of 1, 2 and 8 ranks are killed with SIGKILL at random points; nothing of them may stay.

Every rank of a job attaches to tiers in memory and on disk, reads, and joins collectives. The job is
killed when one of its ranks has got so far: before it attaches, while ranks join, in the middle of
an epoch. The campaign has a /dev/shm and a disk of its own, so that every byte on them is the job's.
A case is a rank that was killed. It fails if, one second after the last death of its job, a byte or a
name is left in /dev/shm or in the tier's directory, or the name of a socket.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from campaigns.outcome import Outcome, Task
from campaigns.private import SHM, bytes_in, private_storage

FULL = "1,000 kills of ranks"
SMALL = 0.03

SAMPLES = 64
BYTES = 20_000
# What a rank says while it lives; the last one is said at every batch.
STEPS = 14


def sockets() -> list[str]:
    mine = f"@nostall-{os.geteuid()}-"
    return [
        name
        for line in Path("/proc/net/unix").open()
        if (name := line.split()[-1]).startswith(mine)
    ]


def left(disk: Path) -> str:
    found = [f"{bytes_in(place)} bytes in {place}" for place in (SHM, disk) if bytes_in(place) > 0]
    found += [str(path) for place in (SHM, disk) for path in place.iterdir()]
    found += sockets()
    return ", ".join(found)


def work(rank: int, ranks: int, job: str, data: Path, disk: Path, said: int) -> None:
    import numpy as np

    import nostall
    from nostall.collective import Communicator

    def say() -> None:
        os.write(said, b".")

    say()
    loader = nostall.DataLoader(
        nostall.ImageFolder(data, index=False),
        4,
        epochs=1000,
        tiers=["ram:600KiB", f"{disk}:1MiB"],
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        job=job,
    )
    say()
    with Communicator(job, rank, ranks, timeout=60) as together:
        say()
        values = np.ones(1 << 16, np.float32)
        for epoch in loader.epochs():
            for _ in epoch:
                together.allreduce(values, "max")
                say()


def warm_up(data: Path) -> None:
    """Loads what ranks need: they are forked from here."""
    import nostall
    from nostall.collective import Communicator

    with nostall.DataLoader(nostall.ImageFolder(data, index=False), 4, tiers=[]) as loader:
        next(iter(loader))
    Communicator("warm up", 0, 1).close()


def start(rank: int, ranks: int, job: str, data: Path, disk: Path) -> tuple[int, int]:
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hears)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        # Ranks are told of the deaths of others, and end or not: all are killed.
        with contextlib.suppress(BaseException):
            work(rank, ranks, job, data, disk, says)
        signal.pause()
    os.close(says)
    return pid, hears


def wait_for(hears: int, steps: int, seconds: float) -> bool:
    """Whether the rank got that far."""
    os.set_blocking(hears, False)
    deadline = time.monotonic() + seconds
    while steps > 0 and time.monotonic() < deadline:
        try:
            steps -= len(os.read(hears, steps))
        except BlockingIOError:
            time.sleep(0.002)
    return steps <= 0


def run(task: Task) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="nostall-after-death-") as name:
        data, disk = Path(name, "data"), Path(name, "disk")
        (data / "class").mkdir(parents=True)
        disk.mkdir()
        for i in range(SAMPLES):
            (data / "class" / f"{i:03}.jpg").write_bytes(random.Random(i).randbytes(BYTES))
        if missing := private_storage([SHM, disk], network=True):
            return Outcome(missing=missing)
        warm_up(data)
        wanted = task.count(1000, least=11)
        slowest, patience = 0.0, task.patience(1)
        jobs = [0, 0, 0]
        while outcome.cases < wanted:
            number = sum(jobs)
            draw = random.Random(f"{task.seed} {number}")
            kind = number % 3
            ranks = (1, 2, 8)[kind]
            jobs[kind] += 1
            steps = draw.randrange(STEPS)
            case = f"seed {task.seed}, job {number}, {ranks} ranks, killed after step {steps}"
            begun = [start(r, ranks, f"after death {number}", data, disk) for r in range(ranks)]
            if not wait_for(begun[draw.randrange(ranks)][1], steps, 60):
                outcome.failures.append(f"{case}: it did not get that far")
            draw.shuffle(begun)
            for pid, hears in begun:
                time.sleep(draw.choice([0, 0, draw.random() * 0.01]))
                os.kill(pid, signal.SIGKILL)
                os.close(hears)
            for pid, _ in begun:
                os.waitpid(pid, 0)
            died = time.monotonic()
            while (rest := left(disk)) and time.monotonic() < died + patience:
                time.sleep(0.005)
            slowest = max(slowest, time.monotonic() - died)
            if rest:
                outcome.failures.append(f"{case}: left {rest}")
                for place in (SHM, disk):
                    for path in place.iterdir():
                        path.unlink()
            outcome.cases += ranks
        outcome.figures = {
            "jobs of 1, 2 and 8 ranks": " ".join(map(str, jobs)),
            "longest until nothing was left, ms": round(slowest * 1000),
        }
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    return outcome
