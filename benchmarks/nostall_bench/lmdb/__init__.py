"""``nostall bench lmdb``: reads one LMDB database by all the strategies of [Pumma 2020, ch. 3 to 5]
and by nostall's, with cold caches and real processes.

    lmdb            liblmdb's cursor in every rank, moved over the records of the others
    lmm             one rank of a node reads for all of them, by shared memory
    lmm-dm          every rank touches the pages that it guesses; the cursor goes from rank to rank
    dio             one rank finds the places, every rank reads its own with O_DIRECT
    prov            places known beforehand (from nostall's index)
    coal            several iterations in one read, by shared memory
    stag-N          the same, at most N ranks (--stagger) at once, neighbours in order
    nostall         nostall.DataLoader without tiers, as where the data set exceeds all memory
    nostall-ram     nostall.DataLoader with a RAM tier for the data set
    py-lmdb         a get for each key, with the kernel's read-ahead; py-lmdb-no-ra without
    fio             the limit: the same ranges (shuffled), or 1 MiB after the other (strided); "raw",
                    our own reader of the same ranges, where fio is not installed

The first four walk through the keys and cannot shuffle.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.base._sizes import parse_size
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.lmdb import blocks, fio, tables
from nostall_bench.lmdb.cold import make_cold
from nostall_bench.lmdb.data import KINDS, Records, make_database
from nostall_bench.lmdb.pool import Counters, Pool, Task

if TYPE_CHECKING:
    from nostall_bench.slowfs import SlowFS

WALKING = ("lmdb", "lmm", "lmm-dm", "dio")
ALL = (*WALKING, "prov", "coal", "stag", "nostall", "nostall-ram", "py-lmdb", "py-lmdb-no-ra")
# Records of a database, and those read in one run, on the local disk and on slow storage; the
# global batch.
_COUNTS = {"3 KB": (200_000, 16_384, 4_096, 256), "110-190 KB": (10_000, 2_048, 512, 64)}

_PATIENCE = 10.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench lmdb``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the databases go")
    parser.add_argument(
        "--strategies", nargs="+", choices=list(ALL), default=list(ALL), metavar="STRATEGY"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--orders", nargs="+", choices=["strided", "shuffled"], default=["strided", "shuffled"]
    )
    parser.add_argument("--storage", nargs="+", choices=["disk", "slow"], default=["disk", "slow"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--nodes", type=int, default=1, help="that the ranks are spread over; slow storage only"
    )
    parser.add_argument("--records", type=int, help="read in one run")
    parser.add_argument("--window", default="64MiB", help="memory that a node may read ahead into")
    parser.add_argument(
        "--stagger", type=int, nargs="+", default=[2], help="ranks that read at once (stag)"
    )
    parser.add_argument("--depth", type=int, default=16, help="reads in flight of fio, a rank")
    parser.add_argument("--bandwidth", type=float, default=66, help="of slow storage, MB/s a node")
    parser.add_argument("--aggregate", type=float, default=146, help="of slow storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=0.5, help="of slow storage")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--index", action="store_true", help="measure the building of the index")
    parser.add_argument(
        "--blocks", action="store_true", help="measure mmap against pread, by the size of a read"
    )
    harness.add_files(parser, plot="records/s and the split of the time")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables."""
    console = harness.console(200)
    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        folder = make_database(home, Records(_COUNTS[size][0], *KINDS[size]))
        for kind in arguments.storage:
            nodes = arguments.nodes if kind == "slow" else 1
            with _storage(arguments, folder, kind, nodes) as storage:
                if arguments.index:
                    found = _index(arguments, folder, size, kind, storage)
                    rows += found
                    console.print(tables.index(found))
                    continue
                if arguments.blocks:
                    found = _blocks(arguments, folder, kind, storage)
                    rows += found
                    console.print(tables.reads(found))
                    continue
                for ranks in arguments.ranks:
                    if ranks % nodes:
                        continue
                    for order in arguments.orders:
                        found = _measure(arguments, folder, size, kind, storage, ranks, order)
                        rows += found
                        console.print(tables.strategies(found))
    harness.write(arguments.json, arguments=vars(arguments), rows=rows)
    if arguments.plot:
        from nostall_bench.lmdb.plot import draw

        draw(rows, Path(arguments.plot))
    return 0


class _Storage:
    """Where a database lies, how it is made cold, and what is read of it."""

    def __init__(self, folders: list[str], slow: SlowFS | None) -> None:
        self.folders = folders
        self._slow = slow

    def cool(self) -> str:
        """Makes the database cold; how."""
        if self._slow is None:
            return make_cold(Path(self.folders[0]) / "data.mdb")
        # The kernel lets go of what io_uring had open a moment after its process has.
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._slow.drop_caches()
                return "mounted anew"
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @property
    def served(self) -> int | None:
        """Bytes that the storage itself counted; None where only the readers can."""
        return self._slow.served_bytes if self._slow else None

    @property
    def operations(self) -> int | None:
        """Reads that the storage itself counted."""
        return self._slow.operations["read"] if self._slow else None


@contextlib.contextmanager
def _storage(
    arguments: argparse.Namespace, folder: Path, kind: str, nodes: int
) -> Iterator[_Storage]:
    if kind == "disk":
        yield _Storage([str(folder)], None)
        return
    from nostall_bench.slowfs import SlowFS

    with (
        tempfile.TemporaryDirectory(prefix="nostall-lmdb-") as mount,
        SlowFS(
            folder,
            Path(mount),
            arguments.bandwidth * 1e6,
            arguments.aggregate * 1e6,
            arguments.latency_ms / 1e3,
            clients=nodes,
            keep_cache=True,
        ) as slow,
    ):
        yield _Storage([str(m) for m in slow.mounts], slow)


def _measure(
    arguments: argparse.Namespace,
    folder: Path,
    size: str,
    kind: str,
    storage: _Storage,
    ranks: int,
    order: str,
) -> list[dict[str, Any]]:
    """A row for each strategy; the repeats go round all of them, so that drift hits all alike."""
    import nostall

    count, on_disk, on_slow, batch = _COUNTS[size]
    total = arguments.records or (on_disk if kind == "disk" else on_slow)
    if total % batch or total > count:
        raise UsageError(f"--records must be a multiple of {batch}, and at most {count}")
    index_file = str(folder / "bench.records")
    store = nostall.LMDB(folder, index=index_file)
    _, offset, length = store.places
    del store
    ids = np.arange(total) if order == "strided" else np.random.default_rng(3).permutation(count)
    nodes = len(storage.folders)
    task = Task(
        strategy="",
        paths=storage.folders,
        order=ids[:total].reshape(-1, batch).astype(np.int64),
        offset=offset.copy(),
        length=length.copy(),
        index_file=index_file,
        nodes=nodes,
        window=parse_size(arguments.window),
        stagger=0,
        depth=arguments.depth,
    )
    needed = int(length[task.order].sum())
    chosen = []
    for name in arguments.strategies:
        if name == "stag":
            chosen += [f"stag-{n}" for n in sorted({min(n, ranks) for n in arguments.stagger})]
        elif order == "strided" or name not in WALKING:
            chosen.append(name)
    limit = "fio" if fio.installed() else "raw"
    runs: dict[str, list[dict[str, Any]]] = {s: [] for s in [limit, *chosen]}
    how = ""
    with Pool(ranks) as pool:
        for strategy in harness.turns(runs, arguments.repeats):
            how = storage.cool()
            served, operations = storage.served, storage.operations
            if strategy == "fio":
                took = fio.seconds(task, ranks, sequential=order == "strided")
                one: dict[str, Any] = {"seconds": took}
            else:
                task.strategy, _, stagger = strategy.partition("stag-")
                if stagger:
                    task.strategy, task.stagger = "stag", int(stagger)
                one = _summed(pool.run(task))
            if served is not None and operations is not None:
                one["read_bytes"] = (storage.served or 0) - served
                one["operations"] = (storage.operations or 0) - operations
            runs[strategy].append(one)
    return [
        {
            "size": size,
            "storage": kind,
            "nodes": nodes,
            "ranks": ranks,
            "order": order,
            "strategy": strategy,
            "limit": limit,
            "records": total,
            "needed": needed,
            "cold": how,
            "limit_seconds": harness.median(runs[limit], "seconds"),
            "runs": found,
        }
        for strategy, found in runs.items()
    ]


def _summed(counters: list[Counters]) -> dict[str, Any]:
    """One run out of its ranks: the slowest one's wall time, the mean split, sums of the costs."""
    n = len(counters)
    return {
        "seconds": max(c.wall for c in counters),
        **{k: sum(getattr(c, k) for c in counters) / n for k in ("seek", "read", "skew")},
        **{
            k: sum(getattr(c, k) for c in counters)
            for k in ("switches", "faults", "read_bytes", "cpu")
        },
        "missed": sum(sum(c.extra.get("missed", ())) for c in counters),
        "redundant": sum(sum(c.extra.get("redundant", ())) for c in counters),
        "ranks": [asdict(c) for c in counters],
    }


def _index(
    arguments: argparse.Namespace, folder: Path, size: str, kind: str, storage: _Storage
) -> list[dict[str, Any]]:
    none = np.zeros((1, 1), np.int64)
    empty = np.zeros(1, np.uint64)
    runs: dict[str, list[dict[str, Any]]] = {"index": [], "keys": [], "keys-no-ra": []}
    with Pool(1) as pool:
        for strategy in harness.turns(runs, arguments.repeats):
            storage.cool()
            served = storage.served
            task = Task(strategy, storage.folders, none, empty, empty, "", 1, 0, 1, 1)
            one = pool.run(task)[0]
            read = one.read_bytes if served is None else (storage.served or 0) - served
            runs[strategy].append({"seconds": one.wall, "read_bytes": read, **one.extra})
    pages = runs["keys"][0]["tree_pages"]
    return [
        {
            "index": True,
            "size": size,
            "storage": kind,
            "strategy": s,
            "tree_pages": pages,
            "runs": f,
        }
        for s, f in runs.items()
    ]


def _blocks(
    arguments: argparse.Namespace, folder: Path, kind: str, storage: _Storage
) -> list[dict[str, Any]]:
    """MB/s of one reader that reads on, by way and size; the repeats go round."""
    most = (folder / "data.mdb").stat().st_size // blocks.SIZES[-1] * blocks.SIZES[-1]
    total = min(most, (128 << 20) if kind == "disk" else (32 << 20))
    if total == 0:
        raise UsageError(f"{folder} is too small to be read in pieces of {blocks.SIZES[-1]} bytes")
    runs: dict[tuple[str, int], list[float]] = {
        (way, size): [] for way in blocks.WAYS for size in blocks.SIZES
    }
    path = Path(storage.folders[0]) / "data.mdb"
    for way, size in harness.turns(runs, arguments.repeats):
        storage.cool()
        runs[way, size].append(total / blocks.seconds(path, way, size, total) / 1e6)
    return [
        {"blocks": True, "storage": kind, "way": way, "read": size, "rates": rates}
        for (way, size), rates in runs.items()
    ]
