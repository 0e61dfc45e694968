"""Kills checkpointing processes at random calls of save, drain and clean-up, and looks at what stays.

    python tests/python/checkpoint/campaign.py --points 1000

In six modes: one rank; two ranks; two ranks on nodes with fast directories of their own, that keep
copies of each other's parts; each of them killed, and cut off from power, where only what was fsynced
stays (faults.c). Each point kills one rank, at its n-th counted call or, if it makes fewer, at its
end, and continues on what the one before has left. A point passes if the newest checkpoint that was
acknowledged, or a newer one, is restored with the right values, and nothing is left over after the
next start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

from campaigns.forked import fork  # noqa: E402

SAVES = 3


def build_shim(directory: Path) -> Path:
    """The preloaded library, compiled."""
    shim = directory / "faults.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(shim)]
    subprocess.run([*command, str(HERE / "faults.c"), "-ldl", "-lpthread"], check=True)
    return shim


def run(
    points: int | Sequence[tuple[int, float]],
    *,
    ranks: int,
    power_cut: bool,
    seed: int,
    timeout: float,
    nodes: bool = False,
) -> dict[str, Any]:
    """One campaign in a process of its own; what it counted.

    `points` are drawn, so many, or given: the rank to be killed, and where in its calls (0 to 1).
    """
    with tempfile.TemporaryDirectory(prefix="nostall-faults-") as name:
        home = Path(name)
        (home / "shadow").mkdir()
        environment = {
            **os.environ,
            "LD_PRELOAD": str(build_shim(home)),
            "NOSTALL_FAULT_ROOT": str(home / "root"),
            "NOSTALL_HOST": "127.0.0.1",
        }
        if power_cut:
            environment["NOSTALL_FAULT_SHADOW"] = str(home / "shadow")
        settings = {
            "points": points,
            "ranks": ranks,
            "power_cut": power_cut,
            "seed": seed,
            "nodes": nodes,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "campaign.py"), "--inside", json.dumps(settings)],
            env=environment,
            stdout=subprocess.PIPE,
            timeout=timeout,
            text=True,
        )
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise RuntimeError(f"the campaign ended with {done.returncode}: {done.stdout[-3000:]}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


# ---------------------------------------------------------------------- inside


def _state(step: int, rank: int, size: int) -> dict[str, Any]:
    import numpy as np

    return {"w": np.full(size, step * 10 + rank, np.int64), "step": step}


class Campaign:
    """The points of one campaign, one after another."""

    def __init__(
        self,
        points: int | Sequence[Sequence[float]],
        ranks: int,
        power_cut: bool,
        seed: int,
        nodes: bool,
    ) -> None:
        self.ranks, self.power_cut = ranks, power_cut
        self.nodes = nodes
        self.random = random.Random(seed)
        self.points = (
            [(self.random.randrange(ranks), 1.1 * self.random.random()) for _ in range(points)]
            if isinstance(points, int)
            else [(int(victim), share) for victim, share in points]
        )
        self.root = Path(os.environ["NOSTALL_FAULT_ROOT"])
        self.shadow = Path(os.environ.get("NOSTALL_FAULT_SHADOW", "/nonexistent"))
        self.shim = ctypes.CDLL(None)
        self.counts: Counter[str] = Counter()
        self.safe = 0  # newest step that somebody was told is safe
        self.step = 0
        self.failures: list[str] = []

    def run(self) -> dict[str, Any]:
        # Once, before the forks: a point takes a tenth of the time.
        import nostall.checkpoint._store  # noqa: F401

        self.root.mkdir(parents=True, exist_ok=True)
        # What a rank certainly makes: levels and what lies there move the count.
        calls: dict[int, int] = {}
        for _ in range(2):
            for rank, made in self._train(None, 0).items():
                calls[rank] = min(made, calls.get(rank, made))
        for i, (victim, share) in enumerate(self.points):
            if i and i % 50 == 0:
                print(f"{i} points: {dict(self.counts)}", file=sys.stderr, flush=True)
            self._train(victim, 1 + int(calls[victim] * share))
            if self.power_cut:
                self._rebuild()
            self._look()
            if self.failures:
                break
        return {
            "counts": dict(self.counts), "failures": self.failures, "calls": list(calls.values())
        }  # fmt: skip

    def _make(self, rank: int, ends: list[Connection], **options: Any) -> Any:
        import nostall

        def gather(mine: bytes) -> list[bytes]:
            if self.ranks == 1:
                return [mine]
            ends[rank].send_bytes(mine)
            other = ends[rank].recv_bytes()
            return [mine, other] if rank == 0 else [other, mine]

        return nostall.Checkpointer(
            self.root / (f"fast-{rank}" if self.nodes else "fast"),
            self.root / "durable",
            partner=self.nodes,
            keep=nostall.Keep(2, every=7),
            rank=rank,
            world_size=self.ranks,
            gather=gather,
            job="campaign",
            timeout=60,
            priority="normal",
            **options,
        )

    def _train(self, victim: int | None, at: int) -> dict[int, int]:
        """A training of SAVES saves; `victim` is killed at its call `at`, or at its end. The calls
        that each rank made, if none is to be killed."""
        size = 1_400_000 if self.random.random() < 0.05 else self.random.choice([1, 5000])
        first = self.step + 1 - self.random.randint(0, 1)  # now and then an old step again
        levels = ["memory", "fast", "durable"]
        if victim is not None:
            levels = self.random.choices(levels, k=SAVES)
        report, tell = os.pipe()
        left, right = Pipe()

        def rank_work(rank: int) -> None:
            self.shim.fault_arm(ctypes.c_long(at if rank == victim else 0))
            ckpt = self._make(rank, [left, right])
            for i in range(SAVES):
                step = first + i
                os.write(tell, b"began %d\n" % step)
                ckpt.save(_state(step, rank, size), step, level=levels[i])
                if levels[i] != "memory" and rank == 0:
                    os.write(tell, b"safe %d\n" % step)
            ckpt.close()
            if rank == victim:
                os.write(tell, b"ended %d\n" % rank)
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                os.write(tell, b"safe %d\n" % (first + SAVES - 1))
            os.write(tell, b"calls %d %d\n" % (rank, int(self.shim.fault_count())))

        pids = [fork(lambda r=rank: rank_work(r)) for rank in range(self.ranks)]
        os.close(tell)
        if victim is not None:
            status = os.waitstatus_to_exitcode(os.waitpid(pids[victim], 0)[1])
            if status != -signal.SIGKILL:
                self.failures.append(f"rank {victim} ended with {status} by itself (call {at})")
            self.counts["killed"] += status == -signal.SIGKILL
            for pid in pids:
                if pid != pids[victim]:  # the whole tree goes
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        elif any(statuses := [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids]):
            self.failures.append(f"a training that nobody disturbed ended with {statuses}")
        left.close()
        right.close()
        calls: dict[int, int] = {}
        with os.fdopen(report) as lines:
            for line in lines:
                word, *numbers = line.split()
                if word == "calls":
                    calls[int(numbers[0])] = int(numbers[1])
                elif word == "ended":
                    self.counts["of them at the end"] += 1
                elif word == "began":
                    self.step = max(self.step, int(numbers[0]))
                else:
                    self.safe = max(self.safe, int(numbers[0]))
        return calls

    def _rebuild(self) -> None:
        """The directories as a power cut leaves them: names and bytes of the last fsync."""

        def key(path: Path) -> str:
            fd = os.open(path, os.O_RDONLY)
            try:
                self.shim.fault_key(fd, buffer)
                return buffer.value.decode()
            finally:
                os.close(fd)

        def copy(name: str, target: Path) -> None:
            target.mkdir(parents=True, exist_ok=True)
            names = self.shadow / f"{name}.names"
            for line in names.read_text().splitlines() if names.exists() else ():
                kind, inner, called = line.split(" ", 2)
                if kind == "d":
                    copy(inner, target / called)
                elif (self.shadow / inner).exists():
                    shutil.copyfile(self.shadow / inner, target / called)
                else:
                    (target / called).touch()
                    self.counts["files that lost their bytes"] += 1

        buffer = ctypes.create_string_buffer(5000)
        after = self.root.with_name("after")
        for tier in ("fast", "fast-0", "fast-1", "durable"):
            if (self.root / tier).exists():
                copy(key(self.root / tier), after / tier)
        shutil.rmtree(self.root)
        shutil.rmtree(self.shadow)
        self.shadow.mkdir()
        if after.exists():
            shutil.copytree(after, self.root)
            shutil.rmtree(after)
        self.root.mkdir(exist_ok=True)
        # What is there now is on the disk: directories and files count as synced.
        for path in [*self.root.rglob("*"), self.root]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def _look(self) -> None:
        """The next start: restores, checks values and rubbish."""
        report, tell = os.pipe()
        left, right = Pipe()
        safe, step = self.safe, self.step

        def rank_work(rank: int) -> None:
            self.shim.fault_arm(ctypes.c_long(0))
            ckpt = self._make(rank, [left, right])
            found = ckpt.restore()
            problem = ""
            if found is None:
                problem = f"nothing found, step {safe} was safe" if safe else ""
            else:
                values = set(found.state["w"].tolist())
                if not safe <= found.step <= step:
                    problem = f"found step {found.step}, step {safe} was safe"
                elif values != {found.step * 10 + rank} or found.state["step"] != found.step:
                    problem = f"step {found.step} holds {values} on rank {rank}"
            ckpt.close()
            if rank == 0 and not problem:
                problem = rubbish(self.root)
            note = {"problem": problem, "tier": found.tier if found else "none"}
            if rank == 0 or problem:
                os.write(tell, json.dumps(note).encode() + b"\n")

        pids = [fork(lambda r=rank: rank_work(r)) for rank in range(self.ranks)]
        os.close(tell)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        left.close()
        right.close()
        if any(statuses):
            self.failures.append(f"restoring ended with {statuses}")
        with os.fdopen(report) as lines:
            for line in lines:
                note = json.loads(line)
                self.counts[f"restored from {note['tier']}"] += 1
                if note["problem"]:
                    self.failures.append(note["problem"])


def rubbish(root: Path) -> str:
    """What lies in a job's directories without a manifest that names it; or nothing."""
    from nostall.checkpoint._store import Store

    left = []
    for tier in (d for d in root.iterdir() if d.is_dir()):
        store = Store(tier, tier.name)
        named = {tier / ".lock", tier / ".sequence"}
        for entry in store.entries():
            if entry.manifest is None:
                return entry.damage
            named |= {entry.path, entry.path / "manifest.json"}
            named |= {entry.path / part.name for part in entry.manifest.parts}
        left += [
            str(p) for p in tier.rglob("*") if p not in named and not p.name.startswith(".run-")
        ]
    return f"left over: {left}" if left else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="modes at a time")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(Campaign(**json.loads(arguments.inside)).run()))
        return 0

    def campaign(mode: tuple[int, bool, bool]) -> bool:
        ranks, nodes, power_cut = mode
        began = time.monotonic()
        result = run(
            arguments.points,
            ranks=ranks,
            power_cut=power_cut,
            seed=arguments.seed,
            timeout=24 * 3600,
            nodes=nodes,
        )
        kind = "power cut" if power_cut else "kill -9"
        where = " on two nodes" if nodes else ""
        print(
            f"{ranks} rank(s){where}, {kind}: {result['counts']}, {result['calls']} calls of "
            f"each rank, {time.monotonic() - began:.0f} s; failures: {result['failures'] or 'none'}",
            flush=True,
        )
        return not result["failures"]

    kinds = ((1, False), (2, False), (2, True))
    modes = [(ranks, nodes, cut) for ranks, nodes in kinds for cut in (False, True)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        return int(not all(list(pool.map(campaign, modes))))


if __name__ == "__main__":
    sys.exit(main())
