"""``nostall bench servers``: a training with parameter servers, asynchronous, beside allreduce.

The demo's network learns the demo's pictures, kept in memory at --side pixels, on processes of two
nodes that this machine stands for, each a worker and a server of its part of the parameters:

    allreduce    DistributedOptimizer: synchronous, two levels
    flat         ParameterServers, every worker with every server
    proxies      ParameterServers, one proxy for the workers of each node

with the staleness that is behind the name. All take the same batches, epochs and learning rates;
weight decay is divided by the updates that a step of all workers makes. In every step --late-ms is
the delay of one rank, drawn anew from the seed. --mbit makes the nodes network namespaces with a link
of that rate (root). Rates count from the first step to the end of the last rank. Bytes are those that
the kernel counted on the connections between ranks of different nodes; accuracy is that of other
pictures with rank 0's network, percent. Median [least-most] over the random seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nostall.errors import UsageError
from nostall.plan import Plan
from nostall_bench import harness, namespaces
from nostall_bench.launch import environment
from nostall_bench.reuse import pictures

_RATE, _MOMENTUM, _DECAY = 0.05, 0.9, 1e-4
_NODES = 2
_ALLREDUCE = "allreduce"
_GROUPS: dict[str, Literal["flat", "node"]] = {"flat": "flat", "proxies": "node"}
# In the kernel's struct tcp_info: tcpi_bytes_acked.
_ACKNOWLEDGED = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench servers``."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[4], help="half of them on each node"
    )
    parser.add_argument("--ways", nargs="+", choices=[_ALLREDUCE, *_GROUPS], help="all")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--files", type=int, default=1600, help="a quarter of them to test with")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank")
    parser.add_argument("--late-ms", type=float, default=0, help="of one rank in each step")
    parser.add_argument("--mbit", type=float, default=0, help="of the link between nodes, Mbit/s")
    parser.add_argument("--seeds", type=int, default=3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains every way with every seed; prints a table for each number of ranks."""
    _check(arguments)
    ways = list(_ways(arguments))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nostall-servers-") as folder:
        images, labels = pictures(Path(folder), arguments.files, arguments.side)
        np.savez(Path(folder, "pictures.npz"), images=images, labels=labels)
        for ranks in arguments.ranks:
            turns = list(harness.turns(range(len(ways)), arguments.seeds))
            seen: Counter[int] = Counter()
            runs = []
            for way in turns:
                runs.append({**ways[way], "seed": seen[way]})
                seen[way] += 1
            for settings, found in zip(runs, _measure(arguments, folder, ranks, runs), strict=True):
                rows.append({"ranks": ranks, **settings, **found})
            harness.console().print(_table(arguments, [r for r in rows if r["ranks"] == ranks]))
    harness.write(arguments.json, late_ms=arguments.late_ms, mbit=arguments.mbit, rows=rows)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if min(arguments.epochs, arguments.seeds, arguments.batch) < 1:
        raise UsageError("--epochs, --seeds and --batch must be at least 1")
    if min(arguments.late_ms, arguments.mbit, *arguments.staleness) < 0:
        raise UsageError("--late-ms, --mbit and --staleness must be 0 or more")
    for ranks in arguments.ranks:
        if ranks < _NODES or ranks % _NODES:
            raise UsageError(f"--ranks {ranks}: half of them are on each of two nodes")
        if arguments.files * 3 // 4 < arguments.batch * ranks:
            raise UsageError(f"--files {arguments.files} is less than a batch of {ranks} ranks")


def _ways(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = arguments.ways or [_ALLREDUCE, *_GROUPS]
    if _ALLREDUCE in chosen:
        yield {"way": _ALLREDUCE, "staleness": 0}
    for staleness in arguments.staleness:
        for way in _GROUPS:
            if way in chosen:
                yield {"way": way, "staleness": staleness}


def _measure(
    arguments: argparse.Namespace, folder: str, ranks: int, runs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All runs, in the same processes."""
    keys = ("epochs", "batch", "late_ms")
    link: Any = contextlib.nullcontext([])
    if arguments.mbit:
        link = namespaces.linked(arguments.mbit)
    job = f"servers-{os.getpid()}-{time.monotonic_ns()}"
    with link as nodes:
        settings = [
            {
                **{key: vars(arguments)[key] for key in keys},
                "node": vars(nodes[rank * _NODES // ranks]) if nodes else None,
                "pictures": f"{folder}/pictures.npz",
                "store": f"{folder}/store-{ranks}",
                "runs": runs,
            }
            for rank in range(ranks)
        ]
        environments = [
            {
                **environment(rank, ranks, job),
                "LOCAL_RANK": str(rank % (ranks // _NODES)),
                "LOCAL_WORLD_SIZE": str(ranks // _NODES),
                "NOSTALL_NODE": f"node {rank * _NODES // ranks}",
            }
            for rank in range(ranks)
        ]
        found = harness.children(
            "nostall_bench.server_training",
            settings,
            name="the training",
            timeout=3600,
            environments=environments,
        )
    return [_together([each[i] for each in found]) for i in range(len(runs))]


def _together(each: list[dict[str, Any]]) -> dict[str, Any]:
    """One run, from what its ranks measured."""
    ranks = len(each)
    # Both ends name a connection: the kernel gives one local port to several.
    owner = {
        (own, peer): rank for rank, one in enumerate(each) for own, peer, _ in one["connections"]
    }
    between = sum(
        sent
        for rank, one in enumerate(each)
        for own, peer, sent in one["connections"]
        if owner.get((peer, own), rank) * _NODES // ranks != rank * _NODES // ranks
    )
    seconds = max(one["ends"] for one in each) - min(one["begins"] for one in each)
    steps = each[0]["steps"]
    staleness: Counter[int] = Counter()
    for one in each:
        staleness.update({int(k): v for k, v in one["staleness"].items()})
    return {
        "accuracy": each[0]["accuracy"],
        "loss": each[0]["loss"],
        "seconds": seconds,
        "steps": steps,
        "gradients_per_second": ranks * steps / seconds,
        "updates_per_second": max(one["updates"] for one in each) / seconds,
        "bytes_between_per_step": between / steps,
        "messages_between_per_step": sum(one["messages"] for one in each) / steps,
        "staleness_mean": sum(k * v for k, v in staleness.items()) / max(1, staleness.total()),
        "staleness_most": max(staleness, default=0),
    }


def _table(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Any:
    late = f", one {arguments.late_ms:g} ms late" if arguments.late_ms else ""
    link = f", a link of {arguments.mbit:g} Mbit/s" if arguments.mbit else ""
    table = harness.table(
        f"{rows[0]['ranks']} ranks on {_NODES} nodes, {arguments.epochs} epochs{late}{link}",
        *("way", "accuracy", "loss", "gradients/s", "updates/s", "MB between nodes a step"),
        *("messages", "staleness: mean", "most"),
    )
    ways = list(dict.fromkeys((r["way"], r["staleness"]) for r in rows))
    for way, staleness in ways:
        own = [r for r in rows if (r["way"], r["staleness"]) == (way, staleness)]
        table.add_row(
            way if way == _ALLREDUCE else f"{way} {staleness}",
            harness.spread((100 * r["accuracy"] for r in own), "{:.1f}"),
            harness.spread((r["loss"] for r in own), "{:.3f}"),
            harness.spread((r["gradients_per_second"] for r in own), "{:.0f}"),
            harness.spread((r["updates_per_second"] for r in own), "{:.0f}"),
            harness.spread((r["bytes_between_per_step"] / 1e6 for r in own), "{:.2f}"),
            harness.spread((r["messages_between_per_step"] for r in own), "{:.1f}")
            if way != _ALLREDUCE
            else "-",
            harness.spread((r["staleness_mean"] for r in own), "{:.2f}"),
            str(max(r["staleness_most"] for r in own)),
        )
    return table


# ---------------------------------------------------------------------- one rank


def _connections() -> dict[tuple[str, str], int]:
    """This process's TCP connections: their ends, and the bytes sent as the kernel counts them."""
    found: dict[tuple[str, str], int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = _text(one.getsockname()), _text(one.getpeername())
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found[ends] = struct.unpack_from("Q", info, _ACKNOWLEDGED)[0]
        except OSError:  # it listens, is no TCP's, or was closed meanwhile
            continue
    return found


def _text(address: Any) -> str:
    return f"{str(address[0]).removeprefix('::ffff:')} {address[1]}"


def _work(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank, through all runs."""
    if settings["node"] is not None:  # before there are other threads
        node = namespaces.Node(**settings["node"])
        node.enter()
        os.environ.update(NOSTALL_HOST=node.address, GLOO_SOCKET_IFNAME="eth0")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(settings["store"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    with np.load(settings["pictures"]) as pictures:
        images, labels = (torch.from_numpy(pictures[key]) for key in ("images", "labels"))
    found = []
    for one in settings["runs"]:
        dist.barrier()
        found.append(_train(images, labels, {**settings, **one}, rank, ranks))
    dist.destroy_process_group()
    return found


def _train(
    images: Any, labels: Any, settings: dict[str, Any], rank: int, ranks: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from nostall_bench.demo.train import make_model

    seed, count, size = settings["seed"], len(labels) * 3 // 4, settings["batch"]
    plan = Plan(
        samples=count,
        batch_size=size * ranks,
        order_world=ranks,
        epochs=settings["epochs"],
        seed=seed,
        drop_last=True,
    )
    model = make_model(10, seed)
    optimizer = _Optimizer(settings, model)
    late = np.random.default_rng(seed)
    before = _connections()
    dist.barrier()
    begins, steps = time.monotonic(), len(plan) * settings["epochs"]
    for step in range(steps):
        epoch, place = divmod(step, len(plan))
        ids = plan.epoch_order(epoch)[place * size * ranks :][rank : size * ranks : ranks]
        chosen = torch.from_numpy(ids.astype(np.int64))
        if late.integers(ranks) == rank:
            time.sleep(settings["late_ms"] / 1e3)
        optimizer.rate(_RATE * (1 + math.cos(math.pi * step / steps)) / 2)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    connections = [
        (*ends, sent - before.get(ends, 0)) for ends, sent in sorted(_connections().items())
    ]
    dist.barrier()  # A rank that finishes closes connections that others have not counted yet.
    optimizer.finish()
    ends = time.monotonic()
    model.eval()
    with torch.no_grad():
        answers = model(images[count:])
        loss = torch.nn.functional.cross_entropy(answers, labels[count:])
    return {
        "accuracy": (answers.argmax(1) == labels[count:]).float().mean().item(),
        "loss": loss.item(),
        "begins": begins,
        "ends": ends,
        "steps": steps,
        "connections": connections,
        **optimizer.counted(),
    }


class _Optimizer:
    """Either way to train, with one face."""

    def __init__(self, settings: dict[str, Any], model: Any) -> None:
        import torch

        import nostall.torch

        self._steps = 0
        self._servers: Any = None
        self._own: Any = None
        if settings["way"] == _ALLREDUCE:
            own = torch.optim.SGD(
                model.parameters(), lr=_RATE, momentum=_MOMENTUM, weight_decay=_DECAY
            )
            self._own = nostall.torch.DistributedOptimizer(own, model.named_parameters())
            return
        groups = _GROUPS[settings["way"]]
        ranks = int(os.environ["WORLD_SIZE"])
        updates = {"flat": ranks, "node": _NODES}[groups] if settings["staleness"] else 1
        self._servers = nostall.torch.ParameterServers(
            model,
            lambda parameters: torch.optim.SGD(
                parameters, lr=_RATE, momentum=_MOMENTUM, weight_decay=_DECAY / updates
            ),
            staleness=settings["staleness"],
            groups=groups,
        )

    def rate(self, rate: float) -> None:
        used = self._own if self._servers is None else self._servers.optimizer
        used.param_groups[0]["lr"] = rate

    def step(self) -> None:
        (self._own if self._servers is None else self._servers).step()
        self._steps += 1

    def finish(self) -> None:
        if self._servers is None:
            self._own.gradient_sync.close()
        else:
            self._servers.finish()

    def counted(self) -> dict[str, Any]:
        if self._servers is None:
            return {"updates": self._steps, "messages": 0, "staleness": {}}
        stats = self._servers.stats()
        return {key: stats[key] for key in ("updates", "messages", "staleness")}


if __name__ == "__main__":
    harness.answer(_work)
