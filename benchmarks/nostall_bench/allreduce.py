"""``nostall bench allreduce``: our collectives against Gloo and MPI, ranks arriving together or not.

With --operation reduce, of a reduce to rank 0, in which the other ranks may leave early; with
--operation allgather, of one in which each rank gives a message of the size; with --operation
reduce_scatter, of one in which each rank gets a message of the size.

[Mohammadalizadehbakhtevari 2021, listings 4.1 and 4.2]: a barrier, a computation of up to MIF times a
message's latency, the allreduce. Times are medians over iterations and repeats: the
mean over ranks in the call, and from the last arrival to the last completion; the table of ratios
has the range over repeats. Engines take turns within one run. The bound is what no engine can be below:
a core reads a message and writes a result of that size, from its caches where they fit, in the fastest
of many turns in the same run. Ranks work only while they are in the call, so the mean time in it is no
less; after the last arrival its message is to be read and all results are to be written, by the cores
together. MPICH comes from an environment of its own (--mpich, made by ``python -m venv V && V/bin/pip
install mpich mpi4py numpy``): one environment holds one MPI. "deepspeed" is the operator over shared
memory behind ``deepspeed.comm.inference_all_reduce`` on CPUs, called without DeepSpeed's Python.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nostall.base._sizes import parse_size
from nostall.errors import PeerError, UsageError
from nostall_bench import harness

_SECONDS_TO_END = 10.0
_RANK = Path(__file__).with_name("allreduce_rank.py")
SIZES = [4, 64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
# Engine -> (kind, options of the rank, extra arguments of mpiexec).
ENGINES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "nostall": ("nostall", {}, []),
    "nostall shared": ("nostall", {"shared": True}, []),
    "nostall fixed": ("nostall", {"fixed": True}, []),
    "arrival_leader": ("nostall", {"algorithm": "arrival_leader"}, []),
    "arrival_chain": ("nostall", {"algorithm": "arrival_chain"}, []),
    "leader": ("nostall", {"algorithm": "leader"}, []),
    "recursive_doubling": ("nostall", {"algorithm": "recursive_doubling"}, []),
    "ring": ("nostall", {"algorithm": "ring"}, []),
    "rsa": ("nostall", {"algorithm": "rsa"}, []),
    "binomial": ("nostall", {"algorithm": "binomial"}, []),
    "gloo": ("gloo", {}, []),
    "openmpi": ("mpi", {}, []),
    "openmpi yield": ("mpi", {}, ["--mca", "mpi_yield_when_idle", "1"]),
    "openmpi sm": ("mpi", {}, ["--mca", "coll_sm_priority", "100"]),  # else "tuned" is chosen
    "mpich": ("mpi", {}, []),
    "deepspeed": ("deepspeed", {}, []),
}
PEERS = ("gloo", "openmpi", "openmpi yield", "openmpi sm", "mpich", "deepspeed")
# What engines of a kind import; the other kinds need what nostall-bench brings.
_IMPORTS = {"gloo": ("torch",), "mpi": ("mpi4py",), "deepspeed": ("torch", "deepspeed", "ninja")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench allreduce``."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--operation",
        choices=("allreduce", "reduce", "allgather", "reduce_scatter"),
        default="allreduce",
    )
    parser.add_argument("--sizes", nargs="+", default=[str(s) for s in SIZES], help="bytes")
    parser.add_argument("--mif", type=float, nargs="+", default=[0, 20], help="0: balanced")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--mpich", default=os.environ.get("NOSTALL_MPICH"), help="environment")
    harness.add_repeats(parser, 3)
    parser.add_argument("--seconds", type=float, default=0.3, help="per size and imbalance")
    parser.add_argument("--most", type=int, default=2000, help="iterations")
    parser.add_argument("--late-ms", type=float, default=0, help="one rank after the other is late")
    parser.add_argument("--busy", type=int, default=0, help="computing processes beside")
    harness.add_files(parser, plot="them")


@dataclass
class Row:
    """One cell of the table; microseconds per call, of one rank, but `busy` (work per second)."""

    engine: str
    ranks: int
    size: int
    mif: float
    in_call: float
    after_last: float
    cpu: float
    switches: float
    busy: float
    late_cpu_share: float
    # The least and the most of the repeats.
    in_call_range: tuple[float, float] = (0.0, 0.0)
    after_last_range: tuple[float, float] = (0.0, 0.0)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints one table per number of ranks and imbalance."""
    engines = arguments.engines or _usual(arguments)
    lacking = [f"{e} ({lacks})" for e in engines if (lacks := missing(e, arguments))]
    if lacking:
        raise UsageError(f"not installed: {', '.join(lacking)}")
    sizes = [parse_size(s) for s in arguments.sizes]
    if any(s < 4 or s % 4 for s in sizes):
        raise UsageError("sizes are multiples of 4 bytes")
    # An allgather has no sums, whose order could be fixed.
    one_way = {"allgather": {"algorithm", "fixed"}, "reduce_scatter": {"algorithm"}}
    refused = one_way.get(arguments.operation, set())
    chosen = [e for e in engines if ENGINES[e][1].keys() & refused]
    if chosen:
        raise UsageError(f"{arguments.operation} has one algorithm: leave out {chosen}")
    if "deepspeed" in engines and arguments.operation != "allreduce":
        raise UsageError(f"deepspeed has no {arguments.operation} of its own: leave it out")
    rows: list[Row] = []
    least = {size: least_times(size) for size in sizes}
    for ranks in arguments.ranks:
        rows += measure(arguments, engines, sizes, ranks)
    console = harness.console()
    for ranks in arguments.ranks:
        for mif in arguments.mif:
            for what in ("in_call", "after_last", "cpu", "switches"):
                console.print(_table(rows, engines, ranks, mif, what))
            console.print(_ratios(rows, ranks, mif, bounds(least, arguments.operation, ranks, mif)))
    if arguments.late_ms or arguments.busy:
        console.print(_beside(rows, engines))
    harness.write(arguments.json, least_s=least, rows=[asdict(row) for row in rows])
    if arguments.plot:
        draw(rows, arguments.operation, arguments.plot)
    return 0


def least_times(size: int) -> tuple[float, float]:
    """Seconds in which one core reads and writes so many bytes, and in which it only writes them, each
    the fastest of many turns, less what a call for no bytes takes."""

    def aligned(length: int) -> Any:
        memory = np.ones(length + 4096, np.uint8)
        begin = -memory.ctypes.data % 4096
        return memory[begin : begin + length]

    source, target, nothing = aligned(size), aligned(size), aligned(0)
    words, no_words, address = target.view(np.int32), nothing.view(np.int32), target.ctypes.data
    passed = min(
        _less_the_call(lambda: np.copyto(target, source), lambda: np.copyto(nothing, nothing)),
        _less_the_call(
            lambda: np.negative(words, out=words), lambda: np.negative(no_words, out=no_words)
        ),
    )
    written = _less_the_call(
        lambda: ctypes.memset(address, 1, size), lambda: ctypes.memset(address, 1, 0)
    )
    return max(passed, written), written


def _less_the_call(way: Callable[[], Any], empty: Callable[[], Any]) -> float:
    """The fastest turn of one less that of the other. They take turns, for what else the processor
    does slows them by the same then."""
    fastest = [math.inf, math.inf]
    begin, turns = time.perf_counter(), 0
    last = begin
    # A process that had no core for most of the time goes on until some turns were undisturbed.
    while last - begin < 0.06 or (turns < 1000 and last - begin < 0.6):
        for number, call in enumerate((way, empty)):
            call()
            now = time.perf_counter()
            fastest[number], last = min(fastest[number], now - last), now
        turns += 1
    return max(0.0, fastest[0] - fastest[1])


def bounds(
    least: Mapping[int, tuple[float, float]], operation: str, ranks: int, mif: float
) -> dict[int, float]:
    """Microseconds that no engine can be below, by size, of an allreduce: ranks may leave a reduce."""
    if operation != "allreduce":
        return {}
    if not mif:
        return {size: 1e6 * passed for size, (passed, _) in least.items()}
    cores = min(ranks, os.cpu_count() or 1)
    return {
        size: 1e6 * (ranks * written + (passed - written)) / cores
        for size, (passed, written) in least.items()
    }


def missing(engine: str, arguments: argparse.Namespace) -> str | None:
    """What the engine needs and this environment lacks, or None."""
    kind = ENGINES[engine][0]
    if engine == "mpich":
        return None if arguments.mpich else "--mpich, an environment with mpich, mpi4py and numpy"
    lacks = [name for name in _IMPORTS.get(kind, ()) if not importlib.util.find_spec(name)]
    if kind == "mpi" and not _mpiexec(engine, arguments).exists():
        lacks.append("mpiexec")
    if kind == "deepspeed" and not shutil.which(os.environ.get("CXX", "c++")):
        lacks.append("a C++ compiler")
    return ", ".join(lacks) or None


def _usual(arguments: argparse.Namespace) -> list[str]:
    """Ours, and the peers that are installed; says which are not."""
    peers = [e for e in PEERS if e != "deepspeed" or arguments.operation == "allreduce"]
    lacking = {e: lacks for e in peers if (lacks := missing(e, arguments))}
    if lacking:
        absent = ", ".join(f"{engine} ({lacks})" for engine, lacks in lacking.items())
        harness.console().print(f"not installed: {absent}", highlight=False)
    return ["nostall", "nostall shared", *(e for e in peers if e not in lacking)]


def _mpiexec(engine: str, arguments: argparse.Namespace) -> Path:
    if engine == "mpich":
        return Path(arguments.mpich) / "bin" / "mpiexec"
    return Path(shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec")


def measure(
    arguments: argparse.Namespace, engines: list[str], sizes: list[int], ranks: int
) -> list[Row]:
    parts: dict[tuple[str, int, float], list[Row]] = {}
    for engine in harness.turns(engines, arguments.repeats):
        with _busy(arguments.busy) as rate:
            results = _run_engine(engine, arguments, sizes, ranks)
            busy = rate()
        for size in sizes:
            for mif in arguments.mif:
                row = _row(engine, ranks, size, mif, results, arguments, busy)
                parts.setdefault((engine, size, mif), []).append(row)
    rows = []
    for same in parts.values():
        values = {
            name: statistics.median(getattr(row, name) for row in same)
            for name in ("in_call", "after_last", "cpu", "switches", "busy", "late_cpu_share")
        }
        in_call, after_last = ([r.in_call for r in same], [r.after_last for r in same])
        rows.append(
            Row(
                same[0].engine, ranks, same[0].size, same[0].mif, **values,
                in_call_range=(min(in_call), max(in_call)),
                after_last_range=(min(after_last), max(after_last)),
            )
        )  # fmt: skip
    return rows


def _row(
    engine: str,
    ranks: int,
    size: int,
    mif: float,
    results: list[Any],
    arguments: argparse.Namespace,
    busy: float,
) -> Row:
    def column(key: str) -> Any:
        return np.array([r[f"{size} {mif:g} {key}"] for r in results])

    arrive, leave, cpu = column("arrive"), column("leave"), column("cpu")
    share = 0.0
    if arguments.late_ms:
        waits = np.arange(arrive.shape[1])[None, :] % ranks != np.arange(ranks)[:, None]
        share = float((cpu * waits).sum() / (arguments.late_ms * 1e6 * arrive.shape[1]))
    return Row(
        engine,
        ranks,
        size,
        mif,
        float(np.median((leave - arrive).mean(axis=0))) / 1e3,
        float(np.median(leave.max(axis=0) - arrive.max(axis=0))) / 1e3,
        float(np.median(cpu.mean(axis=0))) / 1e3,
        float(column("switches").sum() / arrive.size),
        busy,
        share,
    )


def _run_engine(
    engine: str, arguments: argparse.Namespace, sizes: list[int], ranks: int
) -> list[Any]:
    kind, options, extra = ENGINES[engine]
    if kind == "deepspeed":
        options = {"library": _deepspeed_library()}
    with tempfile.TemporaryDirectory(prefix="nostall-allreduce-") as out:
        settings = {
            "kind": kind,
            "options": options,
            "ranks": ranks,
            "sizes": sizes,
            "mif": arguments.mif,
            "seconds": arguments.seconds,
            "most": arguments.most,
            "late_ms": arguments.late_ms,
            "operation": arguments.operation,
            "out": out,
            "job": uuid.uuid4().hex,
        }
        python = sys.executable
        if kind == "mpi":
            if engine == "mpich":
                python = str(Path(arguments.mpich) / "bin" / "python")
            else:
                extra = [*extra, "--oversubscribe", "--bind-to", "none"]
            launcher = [str(_mpiexec(engine, arguments)), "-n", str(ranks), *extra]
            commands = [[*launcher, python, str(_RANK), json.dumps(settings)]]
        else:
            commands = [
                [python, str(_RANK), json.dumps({**settings, "rank": r})] for r in range(ranks)
            ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        processes = [subprocess.Popen(c, env=environment) for c in commands]
        try:
            if not harness.all_end_well(processes):
                raise PeerError(f"{engine} failed on {ranks} ranks; its output is above")
        finally:
            _end(processes)
        results = []
        for rank in range(ranks):
            with np.load(Path(out) / f"{rank}.npz") as file:
                results.append(dict(file))
        return results


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """By SIGTERM, at which mpiexec ends its ranks and removes its files; by SIGKILL what stays."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@functools.cache
def _deepspeed_library() -> str:
    """DeepSpeed's operator, compiled by the first that needs it, which takes minutes."""
    module = "nostall_bench.deepspeed_operator"
    name = "compiling DeepSpeed's deepspeed_shm_comm"
    # torch looks for the environment's ninja.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    try:
        child = harness.child(module, {}, name=name, timeout=900, DS_ACCELERATOR="cpu", PATH=path)
        return str(child)
    except UsageError as error:
        # torch takes a file for the sign of another process that compiles.
        where = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        raise UsageError(
            f"{error}; if it waited, remove the file lock in {where}, which a killed one leaves"
        ) from None


@contextmanager
def _busy(processes: int) -> Iterator[Any]:
    """Processes that compute; yields a function: their loops per second so far."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    counts = [context.Value("Q", 0) for _ in range(processes)]
    workers = [context.Process(target=_count, args=(c,), daemon=True) for c in counts]
    for worker in workers:
        worker.start()
    while any(c.value == 0 for c in counts):
        time.sleep(0.01)
    begin, first = time.monotonic(), sum(c.value for c in counts)
    try:
        yield lambda: (sum(c.value for c in counts) - first) / (time.monotonic() - begin)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _count(counter: Any) -> None:
    """Computes for ever, in steps of about a tenth of a millisecond."""
    while True:
        sum(range(5000))
        counter.value += 1


def _table(rows: list[Row], engines: list[str], ranks: int, mif: float, what: str) -> Any:
    titles = {
        "in_call": "time in the call, us",
        "after_last": "from the last arrival to the last completion, us",
        "cpu": "CPU time in the call, us per rank",
        "switches": "context switches per call and rank",
    }
    title = f"{titles[what]}; {ranks} ranks, MIF {mif:g}"
    table = harness.table(title, "bytes", *engines, "best peer / nostall", left=0)
    cells = {(r.engine, r.size): getattr(r, what) for r in rows if (r.ranks, r.mif) == (ranks, mif)}
    for size in sorted({size for _, size in cells}):
        peers = [cells[e, size] for e in PEERS if (e, size) in cells]
        ours = cells.get(("nostall", size))
        ratio = f"{min(peers) / ours:.2f}" if peers and ours else ""
        table.add_row(str(size), *(f"{cells[e, size]:.2f}" for e in engines), ratio)
    return table


def _ratios(rows: list[Row], ranks: int, mif: float, bound: Mapping[int, float]) -> Any:
    """How ours and the best peer compare, with their ranges, and how near ours is to the bound."""
    what = "after_last" if mif else "in_call"
    title = "from the last arrival" if mif else "time in the call"
    table = harness.table(
        f"{title}, us [range]; {ranks} ranks, MIF {mif:g}",
        *("bytes", "nostall", "shared", "best peer", "is", "/ nostall", "/ shared", "bound"),
        "share of it",
        left=0,
    )
    cells = {(r.engine, r.size): r for r in rows if (r.ranks, r.mif) == (ranks, mif)}

    def words(row: Row | None) -> str:
        if row is None:
            return ""
        low, high = getattr(row, f"{what}_range")
        return f"{getattr(row, what):.4g} [{low:.4g}-{high:.4g}]"

    for size in sorted({size for _, size in cells}):
        peers = [cells[e, size] for e in PEERS if (e, size) in cells]
        best = min(peers, key=lambda r: float(getattr(r, what)), default=None)
        ours = [cells.get((e, size)) for e in ("nostall", "nostall shared")]
        table.add_row(
            str(size),
            *(words(row) for row in (*ours, best)),
            best.engine if best else "",
            *(f"{getattr(best, what) / getattr(r, what):.2f}" if r and best else "" for r in ours),
            f"{bound[size]:.4g}" if bound else "",
            f"{100 * bound[size] / getattr(ours[0], what):.0f} %" if bound and ours[0] else "",
        )
    return table


def draw(rows: list[Row], operation: str, path: str) -> None:
    """A panel for each number of ranks and imbalance: microseconds over bytes, a line an engine;
    with imbalance from the last arrival to the last completion."""
    panels = sorted({(r.ranks, r.mif) for r in rows})
    with harness.figure(path, 1, len(panels), (1 + 4.6 * len(panels), 4.4)) as (drawn, axes):
        for axis, (ranks, mif) in zip(axes[0], panels, strict=True):
            # Of a reduce most ranks leave early: what it costs them is the time in the call.
            what = "after_last" if mif and operation != "reduce" else "in_call"
            of_panel = [r for r in rows if (r.ranks, r.mif) == (ranks, mif)]
            for engine in dict.fromkeys(r.engine for r in of_panel):
                points = sorted((r.size, r) for r in of_panel if r.engine == engine)
                times = [getattr(r, what) for _, r in points]
                ranges = np.array([getattr(r, f"{what}_range") for _, r in points]).T
                axis.errorbar(
                    [size for size, _ in points], times, abs(ranges - times), label=engine,
                    marker="o", markersize=3, capsize=2,
                    linewidth=2.2 if engine.startswith("nostall") else 1.1,
                )  # fmt: skip
            title = "mean time in the call" if what == "in_call" else "from the last arrival"
            axis.set(xlabel="bytes", title=f"{ranks} ranks, MIF {mif:g}: {title}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("microseconds: median of repeats, their range")
        axes[0][-1].legend(fontsize=8)
        machine = harness.machine()
        drawn.suptitle(f"{operation}, {machine['cores']} cores ({machine['cpu']})")


def _beside(rows: list[Row], engines: list[str]) -> Any:
    table = harness.table(
        "what waiting costs",
        *("engine", "ranks", "CPU of waiting ranks / delay", "work beside, loops/s"),
    )
    for engine in engines:
        for ranks in sorted({r.ranks for r in rows}):
            same = [r for r in rows if (r.engine, r.ranks) == (engine, ranks)]
            share = statistics.median(r.late_cpu_share for r in same)
            table.add_row(engine, str(ranks), f"{share:.3f}", f"{same[0].busy:.0f}")
    return table
