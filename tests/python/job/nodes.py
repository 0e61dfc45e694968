"""Starts the ranks of a job on nodes that one machine stands for."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpis
import prefork

if TYPE_CHECKING:
    from nostall_bench.slowfs import SlowFS

RANK = Path(__file__).with_name("rank.py")


_taken: list[socket.socket] = []


def free_port() -> int:
    """A port of this machine that no other test gets, and no process that asks for any."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    lowest, highest = map(int, given)  # of those that are given out
    lowest = min(lowest, 15_000)  # from there on ranks find one by the name of their job
    ports = range(max(1024, lowest - 8000), lowest) or range(highest + 1, 65536)
    ports = ports or range(1024, 65536)  # all are
    while True:
        port = secrets.choice(ports)
        with (
            contextlib.suppress(OSError),
            socket.socket() as probe,
            contextlib.ExitStack() as stack,
        ):
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0nostall-test-port-{port}")  # until this process ends
            probe.bind(("127.0.0.1", port))
            _taken.append(name)
            stack.pop_all()
            return port


@dataclass
class Job:
    """`ranks` on each of `nodes`; `commands` go before Python, one per node."""

    data: Path
    nodes: int
    ranks: int = 1
    tiers: list[str] = field(default_factory=lambda: ["ram:1GiB"])
    epochs: int = 3
    global_batch: int = 8
    host: str = "127.0.0.1"
    roots: list[Path] | None = None
    commands: list[list[str]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[int, dict[str, Any]] = field(default_factory=dict)
    # No rank closes its loader before all have their batches: one that has closed is lost to a rank
    # that a busy machine made late.
    together: bool = False

    def start(self) -> Sequence[prefork.Process | subprocess.Popen[str]]:
        port = free_port()
        secret = secrets.token_hex(16)
        world = self.nodes * self.ranks
        files = sorted(
            (str(p.relative_to(self.data)) for p in self.data.rglob("*.jpg")),
            key=lambda p: p.split("/"),
        )
        started: list[prefork.Process | subprocess.Popen[str]] = []
        ended = ""
        if self.together:
            self._ended = tempfile.TemporaryDirectory(prefix="nostall-ended-")
            ended = self._ended.name
        for rank in range(world):
            node = rank // self.ranks
            settings = {
                "root": str(self.roots[node] if self.roots else self.data),
                "truth": str(self.data),
                "files": files,
                "batch": self.global_batch // world,
                "epochs": self.epochs,
                "tiers": self.tiers,
                "rank": rank,
                "world": world,
                "ranks": self.ranks,
                "job": f"cluster test {port}",
                "ended": ended,
                **self.extra,
                **self.per_rank.get(rank, {}),
            }
            words = [str(RANK), json.dumps(settings)]
            environment = {
                **os.environ,
                "NOSTALL_RENDEZVOUS": f"tcp://{self.host}:{port}",
                "NOSTALL_SECRET": secret,
                "NOSTALL_NODE": f"node {node}",
                "NOSTALL_UCX_TLS": "tcp",
                # A machine that does other things must not make a peer look lost.
                "NOSTALL_PEER_TIMEOUT_MS": "60000",
                **self.environment,
            }
            pipe = subprocess.PIPE
            if self.commands:
                words = [*self.commands[node], sys.executable, *words]
                started.append(
                    subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)
                )
            else:
                started.append(prefork.Process(words, env=environment, stdout=pipe, stderr=pipe))
        return started

    def run(self, timeout: float = 800) -> list[dict[str, Any]]:
        """What each rank printed; fails if one failed."""
        results = []
        started = self.start()
        for rank, process in enumerate(started):
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"rank {rank}: {err}"
            results.append(json.loads(out.splitlines()[-1]))
        return results


def reading_at_most(share: float, job: Job, storage: SlowFS) -> list[dict[str, Any]]:
    """What the ranks say that read, and were served, at most this share of the least.

    Once of five times, because no run can be made to: where a rank reads is chosen by measured time. A
    node that does not get to run for eight times as long as a read of this storage takes, or for two
    seconds, is left for the source, and should be. What a run reads beyond that is another matter, and
    so is the same in all five. The choice itself has no clock, and is tested in
    tests/native/stage/origin_test.cc.
    """
    found: list[tuple[float, float]] = []
    while len(found) < 5:
        before = storage.served_bytes
        results = job.run()
        served = (storage.served_bytes - before) / results[0]["lower_bound_bytes"]
        found.append((read_of_bound(results), served))
        if max(found[-1]) <= share:
            return results
    raise AssertionError(f"read and served, of the least: {found}")


def read_of_bound(results: list[dict[str, Any]]) -> float:
    return float(sum(r["source_bytes"] for r in results) / results[0]["lower_bound_bytes"])


def run_by_mpi(which: str, *words: str | Path) -> None:
    """Python with these words as two ranks of one of the MPIs in mpis.py."""
    subprocess.run(
        [*mpis.launcher(which), "-n", "2", sys.executable, *words],
        check=True,
        timeout=400,
        env={**os.environ, **mpis.AS_ROOT, **mpis.environment(which)},
    )
