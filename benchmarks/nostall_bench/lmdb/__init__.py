"""``nostall bench lmdb``: reads one LMDB database by all the strategies of [Pumma 2020, ch. 3 to 5]
and by nostall's, with cold caches and real processes.

    lmdb            liblmdb's cursor in every rank, moved over the records of the others
    lmm             one rank of a node reads for all of them, by shared memory
    lmm-dm          every rank touches the pages that it guesses; the cursor goes from rank to rank
    dio             one rank finds the places; the roots of a node (--roots) read for all of its
                    ranks with O_DIRECT, into memory that they share
    prov            the same, places known beforehand (from nostall's index)
    coal            the same, several iterations in one read
    stag-N          the same, at most N roots (--stagger) at once, neighbours in order
    nostall         nostall.DataLoader without tiers, as where the data set exceeds all memory
    nostall-ram     nostall.DataLoader with a RAM tier for the data set
    py-lmdb         a get for each key, with the kernel's read-ahead; py-lmdb-no-ra without
    fio             the limit: the same ranges (shuffled), or 1 MiB after the other (strided); "raw",
                    our own reader of the same ranges, where fio is not installed

The first four walk through the keys and cannot shuffle. With --train the ranks train a small network
on what they read, and "torch" is py-lmdb in torch's DataLoader.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.base._sizes import parse_size
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.lmdb import blocks, fio, layout, tables
from nostall_bench.lmdb.data import KINDS, Records, make_database
from nostall_bench.lmdb.pool import PARTS, Counters, Pool, Task
from nostall_bench.lmdb.storage import Storage, add_storage, opened

if TYPE_CHECKING:
    from rich.table import Table

WALKING = ("lmdb", "lmm", "lmm-dm", "dio")
TRAINED = (*WALKING, "prov", "coal", "stag", "nostall", "torch")
ALL = (*WALKING, "prov", "coal", "stag", "nostall", "nostall-ram", "py-lmdb", "py-lmdb-no-ra")
# Records of a database, and those read in one run, on the local disk and on slow storage; the
# global batch.
_COUNTS = {"3 KB": (200_000, 16_384, 4_096, 256), "110-190 KB": (10_000, 2_048, 512, 64)}

# Of the losses of two ways: sums are rounded in another order.
_SAME = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench lmdb``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the databases go")
    parser.add_argument(
        "--strategies", nargs="+", choices=[*ALL, "torch"], metavar="STRATEGY",
        help="all if none is named",
    )  # fmt: skip
    parser.add_argument("--sizes", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--orders", nargs="+", choices=["strided", "shuffled"], default=["strided", "shuffled"]
    )
    parser.add_argument("--storage", nargs="+", choices=["disk", "slow"], default=["disk", "slow"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--nodes", type=int, default=1,
        help="that the ranks are spread over, one a rank at most in a training; slow storage only",
    )  # fmt: skip
    parser.add_argument(
        "--train", nargs="+", choices=["strong", "weak"], default=[],
        help="train: with the same global batch (strong) or the same part of it (weak) for each rank",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of torch's DataLoader, a rank"
    )
    parser.add_argument("--records", type=int, help="read in one run")
    parser.add_argument("--window", default="64MiB", help="memory that a node may read ahead into")
    parser.add_argument(
        "--stagger", type=int, nargs="+", default=[2], help="roots that read at once (stag)"
    )
    parser.add_argument(
        "--roots", type=int, default=1,
        help="ranks of a node that read for it (dio, prov, coal, stag); all of them if there are fewer",
    )  # fmt: skip
    parser.add_argument("--depth", type=int, default=16, help="reads in flight of fio, a rank")
    add_storage(parser)
    harness.add_repeats(parser, 5)
    parser.add_argument("--index", action="store_true", help="measure the building of the index")
    parser.add_argument(
        "--blocks", action="store_true", help="measure mmap against pread, by the size of a read"
    )
    parser.add_argument(
        "--layout", action="store_true",
        help="measure the first epoch over records in the order of their source and of the plan",
    )  # fmt: skip
    harness.add_files(parser, plot="records/s and the split of the time")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables."""
    if "torch" in (arguments.strategies or ()) and not arguments.train:
        raise UsageError(
            "the strategy torch is one of trainings: add --train strong or --train weak"
        )
    if arguments.roots < 1:
        raise UsageError("--roots must be at least 1: nobody would read")
    console = harness.console(200)
    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if arguments.layout:
        rows = layout.measure(arguments, home)
        console.print(layout.table(rows))
        harness.write(arguments.json, arguments=vars(arguments), rows=rows)
        return 0
    for size in arguments.sizes:
        folder = make_database(home, Records(_COUNTS[size][0], *KINDS[size]))
        for kind in arguments.storage:
            for found, table in _tables(arguments, folder, size, kind):
                rows += found
                console.print(table)
    harness.write(arguments.json, arguments=vars(arguments), rows=rows)
    if arguments.plot:
        from nostall_bench.lmdb.plot import draw

        draw(rows, Path(arguments.plot))
    return 0


def _tables(
    arguments: argparse.Namespace, folder: Path, size: str, kind: str
) -> Iterator[tuple[list[dict[str, Any]], Table]]:
    """The rows of each table, and the table."""
    nodes = arguments.nodes if kind == "slow" else 1
    if arguments.train:
        for ranks in (r for r in arguments.ranks if r % min(nodes, r) == 0):
            with opened(arguments, folder, kind, min(nodes, ranks)) as storage:
                for order in arguments.orders:
                    for scaling in arguments.train:
                        work = _Work(folder, size, kind, order, scaling)
                        found = _measure(arguments, work, storage, ranks)
                        yield found, tables.training(found)
        return
    with opened(arguments, folder, kind, nodes) as storage:
        if arguments.index:
            found = _index(arguments, folder, size, kind, storage)
            yield found, tables.index(found)
        elif arguments.blocks:
            found = _blocks(arguments, folder, kind, storage)
            yield found, tables.reads(found)
        else:
            for ranks in arguments.ranks:
                for order in arguments.orders if ranks % nodes == 0 else ():
                    found = _measure(arguments, _Work(folder, size, kind, order), storage, ranks)
                    yield found, tables.strategies(found)


@dataclass(frozen=True)
class _Work:
    """What all strategies of one table read, and whether they train on it."""

    folder: Path
    size: str
    kind: str
    order: str
    scaling: str = ""  # of the training; "" without one

    def task(self, arguments: argparse.Namespace, storage: Storage, ranks: int) -> Task:
        """Without its strategy."""
        import nostall

        count, on_disk, on_slow, batch = _COUNTS[self.size]
        total = arguments.records or (on_disk if self.kind == "disk" else on_slow)
        if self.scaling == "weak":
            most = max(arguments.ranks)
            if most > batch:
                raise UsageError(
                    f"--ranks {most}: a batch has {batch} records, too few for a part each; name at "
                    f"most {batch} ranks"
                )
            batch = batch // most * ranks
        if total % batch or total > count:
            raise UsageError(f"--records must be a multiple of {batch}, and at most {count}")
        index_file = str(self.folder / "bench.records")
        _, offset, length = nostall.LMDB(self.folder, index=index_file).places
        shuffled = np.random.default_rng(3).permutation(count)
        ids = np.arange(total) if self.order == "strided" else shuffled[:total]
        return Task(
            strategy="",
            paths=storage.folders,
            order=ids.reshape(-1, batch).astype(np.int64),
            offset=offset.copy(),
            length=length.copy(),
            index_file=index_file,
            nodes=len(storage.folders),
            window=parse_size(arguments.window),
            stagger=0,
            depth=arguments.depth,
            roots=arguments.roots,
            train=bool(self.scaling),
            workers=arguments.workers,
        )

    def strategies(self, arguments: argparse.Namespace, roots: int) -> list[str]:
        """Those chosen that can do it, with so many roots on all nodes together."""
        every = TRAINED if self.scaling else ALL
        chosen = []
        for name in arguments.strategies or every:
            if name == "stag":
                chosen += [f"stag-{n}" for n in sorted({min(n, roots) for n in arguments.stagger})]
            elif name in every and (self.order == "strided" or name not in WALKING):
                chosen.append(name)
        return chosen


def _measure(
    arguments: argparse.Namespace, work: _Work, storage: Storage, ranks: int
) -> list[dict[str, Any]]:
    """A row for each strategy; the repeats go round all of them, so that drift hits all alike."""
    task = work.task(arguments, storage, ranks)
    needed = int(task.length[task.order].sum())
    roots = min(arguments.roots, ranks // task.nodes)
    limit = "" if work.scaling else "fio" if fio.installed() else "raw"
    ways = [*([limit] if limit else []), *work.strategies(arguments, task.nodes * roots)]
    if not ways:
        raise UsageError(f"no training reads {work.order} records by any of the --strategies")
    runs: dict[str, list[dict[str, Any]]] = {s: [] for s in ways}
    how = ""
    with Pool(ranks) as pool:
        for strategy in harness.turns(runs, arguments.repeats):
            how = storage.cool()
            served, operations, seeks = storage.served, storage.operations, storage.seeks
            if strategy == "fio":
                took = fio.seconds(task, ranks, sequential=work.order == "strided")
                one: dict[str, Any] = {"seconds": took}
            else:
                task.strategy, _, stagger = strategy.partition("stag-")
                if stagger:
                    task.strategy, task.stagger = "stag", int(stagger)
                one = _summed(pool.run(task))
            if served is not None and operations is not None:
                one["read_bytes"] = (storage.served or 0) - served
                one["operations"] = (storage.operations or 0) - operations
                one["seeks"] = storage.seeks - seeks
            runs[strategy].append(one)
    if work.scaling:
        _agree(runs)
    return [
        {
            "size": work.size,
            "storage": work.kind,
            "nodes": len(storage.folders),
            "ranks": ranks,
            "roots": roots,
            "order": f"{work.order}, {work.scaling} scaling" if work.scaling else work.order,
            "strategy": strategy,
            "batch": task.order.shape[1],
            "records": task.order.size,
            "needed": needed,
            "cold": how,
            **(
                {"limit": limit, "limit_seconds": harness.median(runs[limit], "seconds")}
                if limit
                else {}
            ),
            "runs": found,
        }
        for strategy, found in runs.items()
    ]


def _agree(runs: dict[str, list[dict[str, Any]]]) -> None:
    """All ways of reading train alike: the same batches give the same loss.

    Raises:
        UsageError: they do not; no measurement counts then.
    """
    losses = {name: [one["loss"] for one in found] for name, found in runs.items()}
    every = np.array([loss for found in losses.values() for loss in found])
    if not np.ptp(every) <= _SAME * every.max():  # so that NaN is no agreement
        raise UsageError(f"the ways of reading did not train on the same batches: loss {losses}")


def _summed(counters: list[Counters]) -> dict[str, Any]:
    """One run out of its ranks: the slowest one's wall time, the mean split, sums of the costs."""
    n = len(counters)
    return {
        "seconds": max(c.wall for c in counters),
        **{k: sum(getattr(c, k) for c in counters) / n for k in (*PARTS, "asleep", "queued")},
        **{
            k: sum(getattr(c, k) for c in counters)
            for k in ("switches", "faults", "read_bytes", "cpu")
        },
        "missed": sum(sum(c.extra.get("missed", ())) for c in counters),
        "redundant": sum(sum(c.extra.get("redundant", ())) for c in counters),
        **{k: counters[0].extra[k] for k in ("loss",) if k in counters[0].extra},
        "ranks": [asdict(c) for c in counters],
    }


def _index(
    arguments: argparse.Namespace, folder: Path, size: str, kind: str, storage: Storage
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
    arguments: argparse.Namespace, folder: Path, kind: str, storage: Storage
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
