"""Two nodes on one machine: network namespaces with a link of a given rate between them (root)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from nostall.errors import UsageError

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Node:
    """A namespace, and its address on the link."""

    name: str
    address: str

    def enter(self) -> None:
        """This thread's connections, and those of its later threads, are the node's from now on."""
        namespace = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.name}")
        finally:
            os.close(namespace)


@contextlib.contextmanager
def linked(mbit: float) -> Iterator[list[Node]]:
    """Two nodes whose link carries `mbit` Mbit/s each way.

    Raises:
        UsageError: this user or machine cannot make them.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise UsageError("an emulated link needs ip and tc (Debian: iproute2)")
    nodes = [Node(f"nsb{os.getpid()}{side}", f"10.78.0.{side + 1}") for side in range(2)]
    ends = [f"nsb{os.getpid() % 10**9}{side}" for side in "ab"]
    burst = max(16_000, int(mbit * 1e6 / 8 / 250))  # of the kernel's ticks, at 250 Hz
    try:
        for node in nodes:
            _do("ip", "netns", "add", node.name)
        first, second = (node.name for node in nodes)
        pair = ("type", "veth", "peer", ends[1], "netns", second)
        _do("ip", "-n", first, "link", "add", ends[0], *pair)
        for node, end in zip(nodes, ends, strict=True):
            there = ("-n", node.name)
            _do("ip", *there, "addr", "add", f"{node.address}/24", "dev", end)
            _do("ip", *there, "link", "set", end, "name", "eth0", "up")
            _do("ip", *there, "link", "set", "lo", "up")
            limit = ("rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "50ms")
            _do("tc", *there, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield nodes
    finally:
        for node in nodes:  # and the link with them
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{' '.join(command)} failed: {done.stderr.strip()}; is this user root?")
