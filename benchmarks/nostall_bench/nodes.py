"""``nostall bench nodes``: a job on 1, 2, 4 nodes that share what they keep, against nodes alone.

Every node is a mount of its own on one emulated shared file system (`SlowFS`, all mounts behind one
aggregate bandwidth) with tiers of its own; ranks "compute" for a fixed time per batch. The bytes
that left the file system are the storage daemons' own count, held against the exact lower bound.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.slowfs import SlowFS

if TYPE_CHECKING:
    from rich.table import Table

# How nodes share: not at all; by the rule of HDMLP; owners that read for themselves; the rank that
# needs a sample first reads it for all.
WAYS = ("alone", "hdmlp", "owners-read", "push")
# Tiers of one node, as a share of the dataset: S < D, D < S < N*D, S > N*D for 2 and more nodes.
REGIMES = {"S < D": 1.1, "D < S < N*D": 0.6, "S > N*D": 0.2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench nodes``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the dataset goes")
    parser.add_argument("--data", help="measure this folder of files instead of a synthetic one")
    parser.add_argument("--files", type=int, default=1500, help="synthetic files (95 KB each)")
    parser.add_argument("--epochs", type=int, default=4, action=harness.AtLeastOne)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ranks", type=int, default=1, help="per node")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--bandwidth", type=float, default=66, help="of a node to storage, MB/s")
    parser.add_argument("--aggregate", type=float, default=146, help="of the storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    parser.add_argument(
        "--compute", type=float, default=1.2, help="per epoch, of the time to read it"
    )
    parser.add_argument(
        "--regimes", nargs="+", choices=list(REGIMES), default=list(REGIMES), metavar="REGIME"
    )
    harness.add_repeats(parser, 3)
    harness.add_files(parser)
    parser.add_argument(
        "--record", help="a directory for records that nostall simulate --check predicts"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    data = harness.dataset(arguments.dir, arguments.files, given=arguments.data)
    total = sum(p.stat().st_size for p in data.rglob("*") if p.is_file())
    rows: list[dict[str, Any]] = []
    for nodes in arguments.nodes:
        rows += _of_nodes(arguments, data, total, nodes)
    table = harness.table(
        f"{total / 1e6:.0f} MB, {arguments.epochs} epochs, {arguments.ranks} rank(s)",
        *_HEADINGS,
        left=0,
    )
    for row in rows:
        table.add_row(*_cells(row))
    console = harness.console(200)
    console.print(table)
    if 1 in arguments.nodes and len(arguments.nodes) > 1:
        console.print(_scaling(rows))
    harness.write(arguments.json, rows=rows)
    return 0


def _of_nodes(
    arguments: argparse.Namespace, data: Path, total: int, nodes: int
) -> list[dict[str, Any]]:
    """A row for each regime and way of so many nodes."""
    ways = [(r, w) for r in arguments.regimes for w in (WAYS if nodes > 1 else ("alone",))]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    with (
        tempfile.TemporaryDirectory(prefix="nostall-nodes-") as mount,
        SlowFS(
            data,
            Path(mount),
            arguments.bandwidth * 1e6,
            arguments.aggregate * 1e6,
            arguments.latency_ms / 1e3,
            clients=nodes,
        ) as storage,
    ):
        curve = storage.measure(nodes)
        for regime, way in harness.turns(ways, arguments.repeats):
            measured = job(arguments, storage, total, nodes, REGIMES[regime], way, curve[-1])
            runs[regime, way].append(measured)
        for (regime, way), found in runs.items():
            if len({r["stream"] for r in found}) != 1:
                raise UsageError("two runs gave different samples: please report this")
            # Nodes that share by another rule or not at all are not what it predicts.
            if arguments.record and (way == "push" or nodes == 1):
                _record(arguments, storage, nodes, regime, curve, total, found)
    return [
        {"nodes": nodes, "regime": regime, "way": way, "runs": found, "bandwidth": curve[-1]}
        for (regime, way), found in runs.items()
    ]


_HEADINGS = (
    *("nodes", "t(n), MB/s", "tiers", "sharing", "epoch 1, s", "later, s", "stall later"),
    *("read / bound", "from peers", "fetch, ms", "serving, CPU s", "too early"),
)


def _record(
    arguments: argparse.Namespace,
    storage: SlowFS,
    nodes: int,
    regime: str,
    curve: list[float],
    total: int,
    runs: list[dict[str, Any]],
) -> None:
    """Keeps the runs for the simulator (nostall.simulate._check)."""
    import nostall
    from nostall.simulate._check import SUFFIX, machine_of_run, record_run

    sizes = nostall.ImageFolder(str(storage.backing), index=False).sizes
    machine = machine_of_run(
        nodes=nodes,
        source=curve,
        link=arguments.bandwidth * 1e6,
        tiers=[int(total * REGIMES[regime])],
        staging=arguments.ranks * (256 << 20),
    )
    for i, run in enumerate(runs):
        case = f"{nodes}-nodes-tiers-{REGIMES[regime]:g}-{i}"
        record_run(
            Path(arguments.record) / f"{case}{SUFFIX}",
            environment=machine,
            sizes=sizes.tolist(),
            training={"E": arguments.epochs, "B": arguments.global_batch, "seed": 0},
            step_seconds=run["consumer_seconds"],
            epoch_seconds=run["epoch_seconds"],
            origin_bytes=run["origin_bytes"],
        )


def _scaling(rows: list[dict[str, Any]]) -> Table:
    """Strong scaling as in [Böhringer 2020, tables 5.7 and 5.8]: S_p = t_1 / t_p, and S_p / p."""
    table = harness.table(
        "strong scaling of the time for all epochs",
        *("nodes", "tiers", "sharing", "all epochs, s", "speedup", "efficiency"),
        left=0,
    )
    times = {
        (r["nodes"], r["regime"], r["way"]): harness.median(r["runs"], "total_seconds")
        for r in rows
    }
    for (nodes, regime, way), seconds in times.items():
        speedup = times[1, regime, "alone"] / seconds
        cells = (f"{seconds:.2f}", f"{speedup:.3f}", f"{speedup / nodes:.3f}")
        table.add_row(str(nodes), regime, way, *cells)
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    def spread(key: str, form: str) -> str:
        found = [r[key] for r in row["runs"] if r[key] is not None]
        return harness.spread(found, form) if found else ""

    shared = row["way"] != "alone"
    return [
        str(row["nodes"]),
        f"{row['bandwidth'] / 1e6:.0f}",
        row["regime"],
        row["way"],
        spread("first_seconds", "{:.2f}"),
        spread("later_seconds", "{:.2f}"),
        spread("later_stall", "{:.1%}"),
        spread("read_of_bound", "{:.4f}"),
        spread("peer_share", "{:.0%}") if shared else "",
        spread("fetch_ms", "{:.2f}") if shared else "",
        spread("serving_seconds", "{:.2f}") if shared else "",
        spread("too_early", "{:.2%}") if shared else "",
    ]


def job(
    arguments: argparse.Namespace,
    storage: SlowFS,
    total: int,
    nodes: int,
    share: float,
    way: str,
    rate: float,
) -> dict[str, Any]:
    """One training on `nodes` virtual nodes; what it took and what it read."""
    storage.drop_caches()
    before = storage.served_bytes
    world = nodes * arguments.ranks
    if arguments.global_batch % world:
        raise UsageError(f"--global-batch {arguments.global_batch} is not a multiple of {world}")
    files = sum(1 for p in storage.backing.rglob("*") if p.is_file())
    batches = -(-files // arguments.global_batch)
    settings = {
        "world": world,
        "ranks": arguments.ranks,
        "epochs": arguments.epochs,
        "batch_size": arguments.global_batch // world,
        "tier": int(total * share),
        "compute": arguments.compute * total / rate / batches,
        "way": way,
    }
    stats = launch("nostall_bench.nodes", settings, [str(m) for m in storage.mounts])
    epoch_seconds = [max(s["epochs"][e]["seconds"] for s in stats) for e in range(arguments.epochs)]
    later = [e for s in stats for e in s["epochs"][1:]]
    counts = {k: sum(s["peers"].get(k, 0) for s in stats) for k in stats[0]["peers"]}
    fetched = counts.get("fetched", 0)
    asked = fetched + counts.get("asked_too_early", 0) + counts.get("asked_in_vain", 0)
    every = [e for s in stats for e in s["epochs"]]
    return {
        "epoch_seconds": epoch_seconds,
        "origin_bytes": {
            o: sum(e["origins"][o]["bytes"] for e in every) for o in every[0]["origins"]
        },
        "consumer_seconds": sum(e["seconds"] - e["stall_seconds"] for e in every)
        / sum(e["batches"] for e in every),
        "total_seconds": max(sum(e["seconds"] for e in s["epochs"]) for s in stats),
        "first_seconds": epoch_seconds[0],
        "later_seconds": statistics.median(epoch_seconds[1:]) if later else None,
        "later_stall": harness.stalled(later),
        "read_bytes": storage.served_bytes - before,
        "read_of_bound": (storage.served_bytes - before) / stats[0]["lower_bound_bytes"],
        "peer_share": fetched / sum(e["samples"] for s in stats for e in s["epochs"]),
        "fetch_ms": counts.get("fetch_nanoseconds", 0) / max(1, fetched) / 1e6,
        "serving_seconds": counts.get("thread_nanoseconds", 0) / 1e9,
        "too_early": counts.get("asked_too_early", 0) / max(1, asked),
        "peers": counts,
        "stream": _joined(stats),
    }


def _joined(stats: list[dict[str, Any]]) -> str:
    return hashlib.sha256("".join(s["stream"] for s in stats).encode()).hexdigest()


def launch(
    module: str, settings: dict[str, Any], roots: list[str], *, together: bool = False
) -> list[Any]:
    """Runs `module` as all ranks of a job, `settings["ranks"]` on each of the nodes whose dataset is
    at `roots`; what each measured. With `together` as in `harness.children`."""
    nodes = [rank // settings["ranks"] for rank in range(settings["world"])]
    with tempfile.TemporaryDirectory(prefix="nostall-nodes-") as meet:
        meeting = {"NOSTALL_RENDEZVOUS": meet, "NOSTALL_SECRET": secrets.token_hex(16)}
        return harness.children(
            module,
            [
                {**settings, "rank": rank, "root": roots[node], "job": Path(meet).name}
                for rank, node in enumerate(nodes)
            ],
            together=together,
            environments=[{**meeting, "NOSTALL_NODE": f"node {node}"} for node in nodes],
        )


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank: loads raw samples, and computes by waiting, as an accelerator does for its host."""
    import nostall

    local = settings["rank"] % settings["ranks"]
    node = settings["rank"] // settings["ranks"]
    stream = hashlib.sha256()
    with nostall.DataLoader(
        nostall.ImageFolder(settings["root"], index=False),
        settings["batch_size"],
        epochs=settings["epochs"],
        tiers=[f"ram:{settings['tier']}"],
        rank=settings["rank"],
        world_size=settings["world"],
        local_rank=local,
        local_world_size=settings["ranks"],
        job=f"{settings['job']} node {node}",
        peers="off" if settings["way"] == "alone" else "on",
        sharing="push" if settings["way"] == "alone" else settings["way"],
        output="numpy",
    ) as loader:
        for epoch in loader.epochs():
            for batch, labels in epoch:
                stream.update(labels.tobytes())
                stream.update(batch.data.tobytes())
                time.sleep(settings["compute"])
        stats = loader.stats().to_dict()
        stats.pop("batches")
        return {**stats, "stream": stream.hexdigest()}


if __name__ == "__main__":
    harness.answer(_work)
