"""Nodes that are cut off, stopped or unplugged for a while, in a training that goes on.

Nodes are network namespaces on a switch of this campaign, over which each frame is lost with a
probability of 0 or 1 %; their clocks are up to an hour apart, and the source is slow. In a running
job one node after the other is cut off without a word, has its link taken down, or is stopped, for
0.1 to 60 s at scale 1. A case fails if the share of reads from the source is not back within 5 % of
what it was before, on all ranks, in 30 s after the fault has ended, if a rank that is not stopped has
no batch for longer than the time limit and 10 s, or if it is given other bytes than the file's.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.outcome import Outcome, Task
from nostall_bench import slowfs

FULL = "100 faults of 0.1 to 60 s in jobs of 3 and 8 nodes"
SMALL = 0.02

HEALED = 30.0
CLOSE = 0.05
FEW = 60  # of which one is less than CLOSE
TIME_LIMIT = 2.0
GAP = TIME_LIMIT + 10
FILES = 96
RANK = Path(__file__).with_name("partitions_rank.py")
TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
# Shifts the wall clock of a process.
SHIFT = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) { const char* s = getenv("CLOCK_SHIFT"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t clock, struct timespec* t) {
  const int result = syscall(SYS_clock_gettime, clock, t);
  if (clock == CLOCK_REALTIME) t->tv_sec += shift();
  return result;
}
int gettimeofday(struct timeval* t, void* zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""


def missing() -> str:
    for program in ("ip", "unshare", "cc"):
        if shutil.which(program) is None:
            return f"the program {program}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK) or os.geteuid() != 0:
        return "leave to make network namespaces and devices (root, /dev/net/tun)"
    lacks = slowfs.missing()
    return f"a slow file system ({lacks})" if lacks else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Switch:
    """An Ethernet switch between network namespaces, which loses what it is told to lose."""

    def __init__(self, nodes: int, seed: str) -> None:
        self.loss = 0.0
        self.cut: set[int] = set()
        self._rng = random.Random(seed)
        self._ports: list[int] = []
        self._known: dict[bytes, int] = {}
        self._ended = threading.Event()
        self.hosts = [f"nsp{os.getpid()}n{i}" for i in range(nodes)]
        for i, host in enumerate(self.hosts):
            port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._ports.append(port)
            device = f"nsp{os.getpid() % 10**6}p{i}"
            fcntl.ioctl(
                port, TUNSETIFF, struct.pack("16sH22x", device.encode(), TAP_WITHOUT_HEADER)
            )
            ip("netns", "add", host)
            ip("link", "set", device, "netns", host, "name", "eth0")
            ip("-n", host, "addr", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "mtu", "9000", "up")
            ip("-n", host, "link", "set", "lo", "up")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poll = select.epoll()
        for port in self._ports:
            poll.register(port, select.EPOLLIN)
        numbers = {port: i for i, port in enumerate(self._ports)}
        while not self._ended.is_set():
            for port, _ in poll.poll(0.1):
                with contextlib.suppress(OSError):  # the port is down
                    for _ in range(64):
                        self._pass(numbers[port], os.read(port, 65536))
        poll.close()

    def _pass(self, source: int, frame: bytes) -> None:
        self._known[frame[6:12]] = source
        target = self._known.get(frame[:6])
        for i, port in enumerate(self._ports):
            if i == source or (target is not None and i != target):
                continue
            if source in self.cut or i in self.cut or self._rng.random() < self.loss:
                continue
            with contextlib.suppress(OSError):
                os.write(port, frame)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
        for port in self._ports:
            os.close(port)


@dataclass
class Rank:
    process: subprocess.Popen[str]
    # (time, samples so far, of these from the source, nodes that are reached, epoch, its own time)
    said: list[tuple[float, int, int, int, int, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            s = json.loads(line)
            told = s["samples"], s["source"], s["nodes"], s["epoch"], s["at"]
            self.said.append((time.monotonic(), *told))

    def read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def share(self, begin: float) -> float | None:
        """Of what it has read since then, the part from the source; None if it has read nothing."""
        return part([said for said in self.said if said[0] >= begin])

    def recent(self, seconds: float) -> float | None:
        """The same of the last seconds, and of as many before that there are FEW samples."""
        begin = time.monotonic() - seconds
        since: list[tuple[float, int, int, int, int]] = []
        for said in reversed(self.said):
            if said[0] < begin and since and since[0][1] - said[1] > FEW:
                break
            since.append(said)
        return part(since[::-1])


def part(said: list[tuple[float, int, int, int, int, float]]) -> float | None:
    if len(said) < 2 or said[-1][1] == said[0][1]:
        return None
    return (said[-1][2] - said[0][2]) / (said[-1][1] - said[0][1])


class Job:
    def __init__(self, nodes: int, folder: Path, seed: str) -> None:
        self._undo = contextlib.ExitStack()
        rng = random.Random(seed)
        data = folder / "data"
        for i in range(FILES):
            path = data / f"class{i % 2}" / f"{i:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.randbytes(rng.randint(2_000, 20_000)))
        total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
        shift = folder / "shift.so"
        source = folder / "shift.c"
        source.write_text(SHIFT)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shift, source], check=True)
        self.stop = folder / "stop"
        self.switch = Switch(nodes, seed)
        self._undo.callback(self.switch.close)
        self.ranks: list[Rank] = []
        storage = slowfs.SlowFS(data, folder / "mounts", 20e6, 40e6, 2e-3, clients=nodes)
        self._undo.enter_context(storage)
        files = sorted(str(p.relative_to(data)) for p in data.rglob("*.jpg"))
        secret = secrets.token_hex(16)
        for rank, host in enumerate(self.switch.hosts):
            settings = {
                "root": str(storage.mounts[rank]),
                "truth": str(data),
                "files": files,
                "tiers": [f"ram:{total * 3 // (2 * nodes)}"],
                "rank": rank,
                "world": nodes,
                "job": f"{folder} {rank}",
                "stop": str(self.stop),
            }
            apart = rng.randint(-1800, 1800)
            words = [
                "ip",
                "netns",
                "exec",
                host,
                "unshare",
                "--time",
                "--monotonic",
                str(apart + 1800),
            ]
            process = subprocess.Popen(
                [*words, sys.executable, str(RANK), json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "LD_PRELOAD": str(shift),
                    "CLOCK_SHIFT": str(apart),
                    "NOSTALL_RENDEZVOUS": "tcp://10.78.0.1:29555",
                    "NOSTALL_SECRET": secret,
                    "NOSTALL_NODE": f"node {rank}",
                    "NOSTALL_UCX_TLS": "tcp",
                    "NOSTALL_UCX_DEVICES": "eth0",
                    "NOSTALL_PEER_TIMEOUT_MS": str(int(TIME_LIMIT * 1000)),
                },
            )
            self.ranks.append(Rank(process))
            for read in (self.ranks[-1].read, self.ranks[-1].read_errors):
                threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        self.stop.touch()
        self.switch.cut.clear()
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(60)
            rank.process.kill()
            rank.process.wait()
        self._undo.close()

    def ended(self) -> str:
        """Which rank has ended, and why; "" if none has."""
        for number, rank in enumerate(self.ranks):
            if rank.process.poll() is not None:
                return f"rank {number} ended with {rank.process.returncode}: {rank.errors[-3:]}"
        return ""

    def settle(self) -> str:
        """Waits until all nodes have read all once and read nothing from the source any more."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if why := self.ended():
                return why
            shares = [rank.recent(3) for rank in self.ranks]
            late = [rank for rank in self.ranks if not rank.said or rank.said[-1][4] < 2]
            if not late and all(share is not None and share < CLOSE for share in shares):
                return ""
            time.sleep(0.25)
        return f"the job did not settle: shares of the source {shares}"

    @contextlib.contextmanager
    def fault(self, kind: str, node: int) -> Iterator[None]:
        host, process = self.switch.hosts[node], self.ranks[node].process
        if kind == "cut off":
            self.switch.cut.add(node)
        elif kind == "unplugged":
            ip("-n", host, "link", "set", "eth0", "down")
        else:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if kind == "cut off":
                self.switch.cut.discard(node)
            elif kind == "unplugged":
                ip("-n", host, "link", "set", "eth0", "up")
            else:
                process.send_signal(signal.SIGCONT)


def one(
    job: Job, kind: str, node: int, seconds: float, patience: float
) -> tuple[str, float, float]:
    """What is wrong, the seconds until all was as before, and the greatest share in between."""
    before = [rank.recent(3) for rank in job.ranks]
    begun = time.monotonic()
    with job.fault(kind, node):
        time.sleep(seconds)
    healed = time.monotonic()
    most = max((rank.share(begun) or 0.0) for rank in job.ranks)
    while time.monotonic() < healed + patience + 2:
        if why := job.ended():
            return why, 0, most
        now = time.monotonic()
        if now > healed + 2:
            shares = [rank.recent(2) for rank in job.ranks]
            back = all(
                share is not None and share <= (old or 0.0) + CLOSE
                for share, old in zip(shares, before, strict=True)
            )
            if back and all(rank.said[-1][3] == len(job.ranks) for rank in job.ranks):
                break
        time.sleep(0.1)
    else:
        nodes = [rank.said[-1][3] for rank in job.ranks]
        last = [rank.errors[-4:] for rank in job.ranks]
        return f"shares {shares}, before {before}; nodes reached {nodes}; {last}", 0, most
    for number, rank in enumerate(job.ranks):
        if kind == "stopped" and number == node:
            continue
        times = [said[5] for said in rank.said if said[0] >= begun - 1]
        gap = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        if gap > GAP + min(5.0, patience - HEALED):
            return f"rank {number} had no batch for {gap:.1f} s", 0, most
    return "", time.monotonic() - 2 - healed, most


def run(task: Task) -> Outcome:
    if absent := missing():
        return Outcome(missing=absent)
    outcome = Outcome()
    faults = task.count(100, least=2)
    longest = min(60.0, max(1.5 * GAP, 60.0 * task.scale))
    slowest, most = 0.0, 0.0
    done = 0
    while done < faults:
        rng = random.Random(f"{task.seed} {done}")
        nodes = 8 if done >= faults / 2 and faults >= 20 else 3
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(Job(nodes, Path(folder), f"{task.seed} {done}")) as job,
        ):
            unsettled = wrong = job.settle()
            while not wrong and done < faults:
                kind = ("cut off", "stopped", "unplugged")[done % 3]
                node = rng.randrange(nodes)
                # Every other fault outlasts the time limit, so that ranks are lost; the first one also
                # what a rank may be without a batch.
                least = 0.1 if done % 2 else min(TIME_LIMIT + 1, longest)
                seconds = least * (longest / least) ** (rng.random() if done else 1)
                job.switch.loss = rng.choice((0.0, 0.01))
                wrong, took, share = one(job, kind, node, seconds, task.patience(HEALED))
                slowest, most = max(slowest, took), max(most, share)
                outcome.cases += 1
                done += 1
                if wrong:
                    outcome.failures.append(
                        f"seed {task.seed}, case {done - 1}: node {node} of {nodes} {kind} for "
                        f"{seconds:.1f} s, loss {job.switch.loss:.0%}: {wrong}"
                    )
                if nodes == 3 and faults >= 20 and done >= faults / 2:
                    break
            if unsettled:
                outcome.failures.append(f"seed {task.seed}, case {done}: {unsettled}")
                outcome.cases += 1
                done += 1
    outcome.figures["slowest return"] = f"{slowest:.1f} s"
    outcome.figures["largest share from the source meanwhile"] = f"{most:.2f}"
    return outcome
