"""``nostall bench objects``: trainings that read an object store, this loader and its peers in turns.

The store is emulated (`nostall_bench.object_store`): each answer begins after a stated time and flows
at stated bandwidths. Each measurement is a fresh process with empty caches that reads three epochs: the
first comes from the store, the later ones from what the loader has kept. One more is planned, so that
a loader that works ahead also works for what does not count. The store's own counts say what was asked
for, and how many requests were in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nostall_bench import harness
from nostall_bench.object_store import Counts, ObjectStore, counts

_EPOCHS = 3
# The bucket of each module's objects; of others, that of one object a sample.
_BUCKETS = {
    "webdataset_loader": "tar",
    "litdata_loader": "litdata",
    "streaming_loader": "streaming",
}
_SAMPLES = "samples"
PLAIN = "plain clients"
UNLIMITED = "plain clients, no latency, no limit"
# Connections of the plain clients.
_CLIENTS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench objects``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the dataset goes")
    parser.add_argument("--data", help="class folders of JPEG files; synthetic ones if not given")
    parser.add_argument("--files", type=int, default=2000, help="synthetic files (95 KB each)")
    parser.add_argument("--mode", choices=("read", "transform"), default="read")
    parser.add_argument("--loaders", nargs="+", help="names or parts of names; all if not given")
    parser.add_argument(
        "--latency-ms", type=float, nargs="+", default=[30.0], help="to a first byte"
    )
    parser.add_argument("--bandwidth", type=float, default=80, help="of all connections, MB/s")
    parser.add_argument("--connection", type=float, default=40, help="of one connection, MB/s")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="of the latencies")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process")
    harness.add_repeats(parser, 3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table for each latency, writes JSON."""
    from nostall_bench import peers

    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    data = harness.dataset(home, arguments.files, given=arguments.data)
    every = [name for name, loader in peers.LOADERS.items() if peers.OBJECTS in loader.modes]
    lacking, ways = {}, []
    for name in harness.matching([PLAIN, UNLIMITED, *every], arguments.loaders):
        if name in every and (missing := peers.absent(name)):
            lacking[name] = {"missing": f"not installed: {', '.join(missing)}"}
        else:
            ways.append(name)
    made = harness.made_of(data, home)
    prepared = {name: _prepared(name, data, made) for name in ways if name in every}
    folders = {_SAMPLES: data} | dict(prepared.values())
    files = [f"/{_SAMPLES}/{Path(f).relative_to(data)}" for f, _ in peers.listing(data)]
    size = sum(Path(f).stat().st_size for f, _ in peers.listing(data))
    result: dict[str, Any] = {
        "dataset": {"files": len(files), "bytes": size},
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("json", "dir")},
        "latencies": {},
    }
    for latency in arguments.latency_ms:
        rows: dict[str, dict[str, Any]] = {name: {"runs": []} for name in ways} | lacking
        for name in harness.turns(ways, arguments.repeats):
            limits = {
                "latency": latency / 1e3,
                "connection": arguments.connection * 1e6,
                "total": arguments.bandwidth * 1e6,
            }
            if name == UNLIMITED:
                limits = dict.fromkeys(limits, 0.0)
            with ObjectStore(folders, seed=arguments.seed, **limits) as store:
                measure = functools.partial(_plain, store, files)
                if name in every:
                    measure = functools.partial(
                        _loader, name, store, data, *prepared[name], size, arguments
                    )
                harness.attempt(rows[name], measure)
        harness.console().print(
            table(f"{latency:g} ms to the first byte", rows, size, arguments.bandwidth)
        )
        result["latencies"][f"{latency:g}"] = {"rows": rows}
    harness.write(arguments.json, **result)
    return 0


def _prepared(name: str, data: Path, made: Path) -> tuple[str, Path]:
    """The bucket that a loader reads, and its folder."""
    from nostall_bench import peers

    module, variant, _ = peers.LOADERS[name]
    if variant == "tar objects":
        module = "webdataset_loader"  # whose shards it reads
    if (bucket := _BUCKETS.get(module, _SAMPLES)) == _SAMPLES:
        return bucket, data
    maker = importlib.import_module(f"nostall_bench.peers.{module}")
    return bucket, maker.prepare(data, made)


def _loader(
    name: str,
    store: ObjectStore,
    data: Path,
    bucket: str,
    prepared: Path,
    size: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nostall-bench-") as cache:
        settings = {
            "loader": name,
            "mode": arguments.mode,
            "data": str(data),
            "prepared": str(prepared),
            "remote": f"s3://{bucket}",
            "endpoint": store.endpoint,
            "cache": cache,
            "threads": arguments.threads,
            # Room for all, as the peers have on disk.
            "tiers": [f"ram:{max(1, int(1.2 * size) >> 20)}MiB"],
            "warm": 0,
            "measured": _EPOCHS,
            "ahead": 1,
        }
        found = harness.child(
            "nostall_bench.objects",
            settings,
            name=name,
            timeout=arguments.timeout,
            OMP_NUM_THREADS="1",
            **store.environment,
        )
    return _run(found)


def _run(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What one process measured, by epoch; requests in flight are means over time."""
    return {
        "epochs": [
            {**epoch, "samples_per_s": epoch["samples"] / epoch["seconds"]} for epoch in found
        ]
    }


def _between(before: Counts, after: Counts, seconds: float) -> dict[str, float]:
    requests = after.requests - before.requests
    return {
        "requests": requests,
        "bytes": after.bytes - before.bytes,
        "in_flight": (after.flight_seconds - before.flight_seconds) / seconds,
        "peak": after.peak,
        "latency_s": (after.latency_seconds - before.latency_seconds) / max(1, requests),
    }


def _plain(store: ObjectStore, paths: list[str]) -> dict[str, Any]:
    """Plain connections that read all objects and drop them: what the store can do."""
    before, began = store.counts(), time.perf_counter()
    asyncio.run(_read_all(store.endpoint, paths))
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "samples": len(paths)}
    return _run([{**found, **_between(before, store.counts(), seconds)}])


async def _read_all(endpoint: str, paths: list[str]) -> None:
    split = urlsplit(endpoint)
    left = iter(paths)

    async def client() -> None:
        reader, writer = await asyncio.open_connection(split.hostname, split.port, limit=1 << 20)
        try:
            for path in left:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {split.netloc}\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        finally:
            writer.close()

    await asyncio.gather(*(client() for _ in range(min(_CLIENTS, len(paths)))))


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The epochs of one loader."""
    from nostall_bench import worker

    # nostall's client; worker.measure imports what every peer needs.
    if importlib.util.find_spec("obstore"):
        importlib.import_module("obstore")
    looks = [counts(settings["endpoint"])]
    rows: list[dict[str, Any]] = worker.measure(
        settings, after_epoch=lambda: looks.append(counts(settings["endpoint"]))
    )
    for row, before, after in zip(rows, looks, looks[1:], strict=False):
        row.update(_between(before, after, row["seconds"]))
    return rows


def _mean(epochs: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("samples", "seconds", "requests", "bytes")
    return {key: sum(e[key] for e in epochs) / len(epochs) for key in keys}


def table(title: str, rows: dict[str, dict[str, Any]], size: int, bandwidth: float) -> Any:
    """The runs at one latency as a rich table, the fastest first epoch first.

    "of the bandwidth" is the time that the data take at the store's bandwidth over the epoch's;
    "waiting" the share of a request's time in which nothing had come of it yet. Of later epochs it has
    the mean of a run.
    """
    out = harness.table(
        title,
        *("loader", "samples/s", "of the bandwidth", "requests", "MB", "in flight", "peak"),
        *("waiting", "later epochs", "requests", "MB", "CPU ms/sample"),
    )
    first = {
        name: [run["epochs"][0] for run in row["runs"]]
        for name, row in rows.items()
        if row.get("runs")
    }
    for name, epochs in sorted(
        first.items(), key=lambda item: -harness.median(item[1], "samples_per_s")
    ):
        least = size / (bandwidth * 1e6)
        waiting = [
            e["requests"] * e["latency_s"] / max(1e-9, e["in_flight"] * e["seconds"])
            for e in epochs
        ]
        cells = [
            harness.named(name, rows[name]),
            harness.spread((e["samples_per_s"] for e in epochs), "{:.0f}"),
            "" if name == UNLIMITED else harness.spread(least / e["seconds"] for e in epochs),
            f"{harness.median(epochs, 'requests'):.0f}",
            harness.megabytes(harness.median(epochs, "bytes")),
            harness.spread((e["in_flight"] for e in epochs), "{:.0f}"),
            f"{max(e['peak'] for e in epochs)}",
            harness.spread(waiting),
        ]
        later = [_mean(run["epochs"][1:]) for run in rows[name]["runs"] if len(run["epochs"]) > 1]
        if later:
            cells += [
                harness.spread((e["samples"] / e["seconds"] for e in later), "{:.0f}"),
                f"{harness.median(later, 'requests'):.0f}",
                harness.megabytes(harness.median(later, "bytes")),
                f"{1e3 * harness.median(epochs, 'cpu_seconds') / epochs[0]['samples']:.2f}",
            ]
        out.add_row(*cells)
    for name, row in rows.items():
        if name not in first:
            out.add_row(harness.named(name, row), row.get("missing"))
    return out


if __name__ == "__main__":
    harness.answer(measure)
    # Peers may hang while they shut their workers down; the parent ends the process group.
    os._exit(0)
