"""Nodes in network namespaces, joined by links of their own, each with its own mount."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import Job, read_of_bound

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
    with SlowFS(data, tmp_path / "mounts", 20e6, 40e6, 0.5e-3, clients=NODES) as storage:
        before = storage.served_bytes
        results = Job(
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
        ).run(timeout=100)
        served = storage.served_bytes - before
    assert read_of_bound(results) <= 1.02
    assert served / results[0]["lower_bound_bytes"] <= 1.02
    assert sum(r["peers"]["fetched"] for r in results) > 100
    assert sum(r["peers"]["dropped_ranks"] for r in results) == 0


@pytest.mark.multi
@pytest.mark.parametrize("hosts", ["32mbit"], indirect=True)
def test_traffic_moves_to_peers_while_the_source_is_slow_and_back(
    hosts: list[list[str]], tmp_path: Path
) -> None:
    """Links of 4 MB/s beside a source of 60 MB/s: the source is the better origin, until it is slowed
    tenfold."""
    if reason := missing():
        pytest.skip(f"slow storage: {reason}")
    data = make_data(tmp_path / "data", 120)
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    with SlowFS(data, tmp_path / "mounts", 60e6, 0, 0.0, clients=NODES) as storage:
        job = Job(
            data,
            NODES,
            tiers=[f"ram:{int(0.4 * total)}"],
            epochs=40,
            global_batch=12,
            host="10.77.0.1",
            roots=storage.mounts,
            commands=hosts,
            extra={"compute": 0.04, "staging": "1MB", "timeline": True},
            environment={"NOSTALL_UCX_DEVICES": "eth0"},
        )
        begun = time.monotonic()
        started = job.start()
        time.sleep(6)
        storage.slow_down(10)
        slowed = time.monotonic() - begun
        time.sleep(6)
        storage.slow_down(1)
        restored = time.monotonic() - begun
        results = []
        for process in started:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    # The loaders' clocks begin a little later than ours: windows well inside the phases.
    before = peer_share(results, 2.5, slowed - 1.5)
    during = peer_share(results, slowed + 2.0, restored - 1.5)
    after = peer_share(results, restored + 3.0, restored + 60)
    # How much comes from peers at other times depends on how fast this machine lets the source be.
    assert during > 0.6, (before, during, after)
    assert max(before, after) < during - 0.2, (before, during, after)


def peer_share(results: list[dict[str, Any]], begin: float, end: float) -> float:
    """Of what did not come from the node itself, the part that came from other nodes."""
    peer = source = 0.0
    for result in results:
        timeline = result["timeline"]
        rows = zip(timeline["time"], timeline["peer"], timeline["source"], strict=True)
        for moment, from_peers, from_source in rows:
            if begin <= moment <= end:
                peer += from_peers
                source += from_source
    assert peer + source > 0, (begin, end)
    return peer / (peer + source)
