"""Trains under limits of memory that are smaller than the data, and in shared memory of all odd kinds.

A case is a job of one or two ranks that reads a data set twice, then takes memory of its own as a model
does, and reads it twice more: in a control group whose limit is a part of what the job needs where it
may take all it wants, or with a /dev/shm that is absent, of 4 KB, of 64 MB, read-only or nearly full.
In some control groups the model grows, bit by bit, into memory that the tier has taken. The promise:
every epoch has every sample once with the right bytes, no rank is killed, and none meets a
signal. Needs root, for control groups and mounts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from campaigns.outcome import Outcome, Task

FULL = "50 cases: 20 of a control group (twice where v2 has the controller), 30 of /dev/shm"
SMALL = 0.1

FRACTIONS = (0.25, 0.5, 0.9, 1.1)
SHARED_MEMORY = ("absent", "4k", "64m", "read-only", "99% full")
SAMPLE = 256 << 10
MODEL = 16 << 20
RANK = Path(__file__).parent / "memory_rank.py"

# What makes /dev/shm what the case wants it to be, in a mount namespace of its own.
MOUNTS = {
    "": "mount -t tmpfs -o size=8g tmpfs /dev/shm",
    "4k": "mount -t tmpfs -o size=4k tmpfs /dev/shm",
    "64m": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "99% full": "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
    "head -c 66437775 /dev/zero > /dev/shm/others",
    "absent": "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/zero c 1 5 && "
    "mknod /dev/urandom c 1 9 && mknod /dev/random c 1 8",
}


@dataclass(frozen=True)
class Case:
    ranks: int
    tiers: str  # "auto", "ram" or "file"
    shm: str = ""
    version: int = 0  # of the control group; 0: none
    fraction: float = 0.0
    grows: bool = False  # by half of the data, after two epochs

    def __str__(self) -> str:
        where = (
            f"control group v{self.version} of {self.fraction} of the need"
            + (", growing" if self.grows else "")
            if self.version
            else f"/dev/shm {self.shm}"
        )
        return f"{where}, {self.ranks} ranks, tiers {self.tiers}"


class ControlGroup:
    """One that is removed at the end; of this process's own group where that can have children."""

    def __init__(self, version: int, limit: int) -> None:
        self.version = version
        self.path = hierarchy(version) / f"nostall-campaign-{os.getpid()}"
        self.path.mkdir()
        if limit:
            (self.path / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(
                str(limit)
            )

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def peak(self) -> int:
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text())

    def kills(self) -> int:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def remove(self) -> None:
        self.path.rmdir()


def hierarchy(version: int) -> Path:
    return Path("/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup")


def versions() -> list[int]:
    found = []
    if (hierarchy(1) / "memory.limit_in_bytes").exists():
        found.append(1)
    delegated = hierarchy(2) / "cgroup.subtree_control"
    if delegated.exists() and "memory" in delegated.read_text().split():
        found.append(2)
    return found


def cases(found: list[int]) -> Iterator[Case]:
    for ranks in (1, 2):
        for tiers in ("auto", "ram", "file"):
            for shm in SHARED_MEMORY:
                yield Case(ranks, tiers, shm=shm)
            if tiers != "file":
                for version in found:
                    for fraction in FRACTIONS:
                        yield Case(ranks, tiers, version=version, fraction=fraction)
                    yield Case(ranks, tiers, version=version, fraction=0.6, grows=True)


def write_data(root: Path, samples: int) -> None:
    words = np.arange(SAMPLE // 8, dtype=np.uint64)
    for i in range(samples):
        path = root / f"class{i % 4}" / f"{i:06}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        (words * np.uint64(2 * i + 1) + np.uint64(i)).tofile(path)


def play(case: Case, data: Path, limit: int, directory: Path) -> tuple[list[str], int]:
    """What went wrong, and the most memory that was in use."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    size = sum(p.stat().st_size for p in data.rglob("*.bin"))
    tiers: str | list[str] = {
        "auto": "auto",
        "ram": [f"ram:{size}"],
        "file": [f"{directory}/tier:{size + size // 8}"],
    }[case.tiers]
    script = [MOUNTS[case.shm]]
    group = ControlGroup(case.version, limit) if case.version else None
    for rank in range(case.ranks):
        settings = {
            "data": str(data), "rank": rank, "ranks": case.ranks, "tiers": tiers, "model": MODEL,
            "growth": size // 2 // case.ranks if case.grows else 0,
            "group": str(group.path) if group else "", "version": case.version,
            "job": f"memory {directory.name} {os.getpid()}", "out": f"{directory}/{rank}.json",
        }  # fmt: skip
        (directory / f"{rank}.settings").write_text(json.dumps(settings))
        script.append(
            f"({sys.executable} {RANK} {directory}/{rank}.settings >{directory}/{rank}.log 2>&1; "
            f"echo $? >{directory}/{rank}.status) &"
        )
    script.append("wait")
    enter = "" if group is None else f"echo $$ >{group.procs}; "
    command = ["unshare", "-m", "--propagation", "private", "bash", "-c", enter + "\n".join(script)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wrong = []
    peak = kills = 0
    if group is not None:
        peak, kills = group.peak(), group.kills()
        group.remove()
    if kills:
        wrong.append(f"{kills} processes were killed for memory")
    seen: dict[str, list[int]] = {}
    for rank in range(case.ranks):
        status = directory / f"{rank}.status"
        code = status.read_text().strip() if status.exists() else "none"
        if code != "0":
            log = (directory / f"{rank}.log").read_text().strip().splitlines()
            wrong.append(f"rank {rank} ended with status {code}: {log[-1] if log else ''}")
            continue
        for epoch, samples in json.loads((directory / f"{rank}.json").read_text()).items():
            seen.setdefault(epoch, []).extend(samples)
    expected = list(range(len(list(data.rglob("*.bin")))))
    if not wrong and ([sorted(s) for s in seen.values()] != [expected] * 4):
        wrong.append("an epoch did not have every sample once")
    return wrong, peak


def run(task: Task) -> Outcome:
    if os.geteuid() != 0:
        return Outcome(missing="root")
    found = versions()
    if not found:
        return Outcome(missing="a control group with the memory controller")
    outcome = Outcome(figures={"control groups": " and ".join(f"v{v}" for v in found)})
    every = list(cases(found))
    random = np.random.default_rng(task.seed)
    # Of both kinds, as many as their share.
    kinds = [[i for i, c in enumerate(every) if bool(c.version) == limited] for limited in (0, 1)]
    chosen = [i for kind in kinds for i in random.permutation(kind)[: task.count(len(kind), 3)]]
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        samples = {1: 1024, 2: 2048}
        needs: dict[int, int] = {}
        for index in sorted(chosen):
            case = every[index]
            data = base / f"data{case.ranks}"
            if not data.exists():
                write_data(data, samples[case.ranks])
            if case.version and case.ranks not in needs:
                free = Case(case.ranks, "ram", version=case.version)
                wrong, needs[case.ranks] = play(free, data, 0, base / "need")
                outcome.failures += [f"without a limit: {w}" for w in wrong]
            limit = int(case.fraction * needs.get(case.ranks, 0)) & ~4095
            wrong, _ = play(case, data, limit, base / f"case{index}")
            shutil.rmtree(base / f"case{index}")
            outcome.cases += 1
            outcome.failures += [f"seed {task.seed}, {case}: {w}" for w in wrong]
        for ranks, need in needs.items():
            outcome.figures[f"need of {ranks} ranks, MB"] = need // 10**6
    return outcome
