"""Nodes in network namespaces, joined by links of their own, each with its own mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes import Job, reading_at_most

from nostall_bench.slowfs import SlowFS, missing

pytestmark = pytest.mark.alone

NODES = 3


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


# What each link carries; a test may ask for another rate.
RATE = "200mbit"


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    """Three namespaces on a bridge in a fourth one; each link carries RATE or the parameter."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces: ip and tc (Debian: iproute2) are not installed")
    tag = f"nst{os.getpid() % 100000}"
    names = [f"{tag}n{i}" for i in range(NODES)]
    switch = f"{tag}s"
    made = ip("netns", "add", switch)
    if made.returncode != 0:
        pytest.skip(f"network namespaces: this user may not make them ({made.stderr.strip()})")
    try:
        commands = [["-n", switch, "link", "add", "br0", "type", "bridge"]]
        commands += [["-n", switch, "link", "set", "br0", "up"]]
        for i, name in enumerate(names):
            veth = f"{tag[:6]}{os.getpid() % 1000}v{i}"
            commands += [
                ["netns", "add", name],
                ["-n", switch, "link", "add", veth, "type", "veth", "peer", "eth0", "netns", name],
                ["-n", switch, "link", "set", veth, "master", "br0"],
                ["-n", switch, "link", "set", veth, "up"],
                ["-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0"],
                ["-n", name, "link", "set", "eth0", "up"],
                ["-n", name, "link", "set", "lo", "up"],
            ]
        for command in commands:
            done = ip(*command)
            assert done.returncode == 0, (command, done.stderr)
        for name in names:
            limit = f"rate {getattr(request, 'param', RATE)} burst 256kb latency 200ms"
            words = f"ip netns exec {name} tc qdisc add dev eth0 root tbf {limit}".split()
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (*names, switch):
            ip("netns", "del", name)


def make_data(root: Path, count: int) -> Path:
    random = np.random.default_rng(6)
    for i in range(count):
        path = root / f"class{i % 2}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.bytes(int(random.integers(5_000, 150_000))))
    return root


@pytest.mark.multi
@pytest.mark.parametrize("share", [1.2, 0.5], ids=["S<D", "D<S<ND"])
def test_samples_travel_between_hosts(hosts: list[list[str]], tmp_path: Path, share: float) -> None:
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    data = make_data(tmp_path / "data", 120)
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    with SlowFS(data, tmp_path / "mounts", 20e6, 40e6, 15e-3, clients=NODES) as storage:
        job = Job(
            data,
            NODES,
            tiers=[f"ram:{int(share * total)}"],
            global_batch=12,
            host="10.77.0.1",
            roots=storage.mounts,
            commands=hosts,
            extra={"compute": 0.02},
            environment={"NOSTALL_UCX_DEVICES": "eth0"},
            together=True,
        )
        results = reading_at_most(1.02, job, storage)
    assert sum(r["peers"]["fetched"] for r in results) > 100
    assert sum(r["peers"]["dropped_ranks"] for r in results) == 0


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.parametrize("hosts", ["8mbit"], indirect=True)
def test_traffic_moves_to_peers_while_the_source_is_slow_and_back(
    hosts: list[list[str]], tmp_path: Path
) -> None:
    """Links of 1 MB/s beside a source of 60 MB/s: the source is the better origin, until it is slowed
    to 1.5 MB/s. Peers are left for one that is eight times as fast: it is, on a busy machine too."""
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    data = make_data(tmp_path / "data", 120)
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    with SlowFS(data, tmp_path / "mounts", 60e6, 0, 0.0, clients=NODES) as storage:
        job = Job(
            data,
            NODES,
            tiers=[f"ram:{int(0.4 * total)}"],
            epochs=10_000,  # it ends when all has been seen
            global_batch=12,
            host="10.77.0.1",
            roots=storage.mounts,
            commands=hosts,
            extra={
                "compute": 0.04,
                "staging": "1MB",
                "counts": str(tmp_path),
                "until": str(tmp_path / "until"),
            },
            environment={"NOSTALL_UCX_DEVICES": "eth0"},
        )
        started = job.start()
        try:
            storage.slow_down(40)
            during = await_share(tmp_path, lambda share: share > 0.6)
            storage.slow_down(1)
            # How much comes from peers depends on how fast this machine lets the source be.
            await_share(tmp_path, lambda share: share < during - 0.2)
            (tmp_path / "until").touch()
            for process in started:
                _, err = process.communicate(timeout=800)
                assert process.returncode == 0, err
        finally:
            for process in started:
                process.kill()
                process.communicate()


def await_share(home: Path, holds: Callable[[float], bool]) -> float:
    """Of what does not come from a node itself, the part that comes from other nodes: once it is
    as wanted, of 100 samples that follow each other."""
    seen: list[float] = []
    before, deadline = counted(home), time.monotonic() + 100
    while not seen or not holds(seen[-1]):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
        peer, source = (now - then for now, then in zip(counted(home), before, strict=True))
        if peer + source >= 100:
            seen.append(peer / (peer + source))
            before = counted(home)
    return seen[-1]


def counted(home: Path) -> tuple[int, int]:
    """Samples that all ranks have had so far from other nodes, and from the source."""
    lines = [path.read_text().split() for path in home.glob("counts-*[0-9]")]
    return sum(int(peer) for peer, _ in lines), sum(int(source) for _, source in lines)
