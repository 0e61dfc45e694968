"""Horovod as a peer of ``nostall bench sync``: whether it is there, and one training's part of it.

Controller and reductions by Gloo on the loopback device, which needs no MPI; all else as Horovod 0.28
has it by default. How to build it: docs/reproduce/horovod-sync.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

WAY = "Horovod"
# Its defaults. Not said to it: where they are set, its second start in a process ends in a fault.
CYCLE_MS = 1
FUSION_BYTES = 128 << 20

# Importing horovod.torch succeeds without its native library and leaves the calls out.
_PROBE = """
import horovod.torch
if not hasattr(horovod.torch, "init"):
    raise ImportError("horovod.torch was built without its native library")
if not horovod.torch.gloo_built():
    raise ImportError("Horovod was built without Gloo (HOROVOD_WITH_GLOO=1)")
"""


def lacking() -> str | None:
    """Why Horovod cannot run in this environment; None if it can.

    Tried in a process of its own: a library that was built against another torch may abort.
    """
    if importlib.util.find_spec("horovod") is None:
        return "not installed (docs/reproduce/horovod-sync.md says how to build it)"
    tried = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if tried.returncode == 0:
        return None
    words = tried.stderr.strip().splitlines() or [f"its import ended with {tried.returncode}"]
    return words[-1]


@contextlib.contextmanager
def rendezvous(ranks: int) -> Iterator[list[dict[str, str]]]:
    """Where the ranks of this node find each other: environment of each of them, Horovod's part."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    try:
        server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
        yield [
            {
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(ranks),
                "HOROVOD_LOCAL_RANK": str(rank),
                "HOROVOD_LOCAL_SIZE": str(ranks),
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "1",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            }
            for rank in range(ranks)
        ]
    finally:
        server.stop()


def start(model: Any, optimizer: Any) -> tuple[Any, list[int]]:
    """In a rank: the optimizer that reduces, and the threads Horovod has started for it.

    The first of them is the background thread, which negotiates, fuses, and makes the sums; then
    comes Gloo's, which moves bytes.
    """
    import horovod.torch as hvd

    before = set(os.listdir("/proc/self/task"))
    hvd.init()
    threads = sorted(int(task) for task in set(os.listdir("/proc/self/task")) - before)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), threads


def stop() -> None:
    """In a rank: ends what `start` began; the next training starts anew."""
    import horovod.torch as hvd

    hvd.shutdown()
