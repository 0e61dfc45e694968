"""``nostall bench tokens``: sequences of token ids, this loader and its peers on the same file.

Each measurement is a fresh process that takes batches of int64 for some seconds, after the first ones.
The modes: "windows" (shuffled windows of one length, in the page cache), "packed" (documents packed
into sequences, with segments and positions), "cold" (windows on slowed storage, against its bandwidth).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError
from nostall_bench import harness, token_scale
from nostall_bench.programs import find_native
from nostall_bench.slowfs import SlowFS
from nostall_bench.token_peers import LOADERS, Job, make, prepare_litdata
from nostall_bench.worker import cpu_seconds, pss_bytes

if TYPE_CHECKING:
    from rich.table import Table

LOOP = "C++ loop"
_COUNTED = 50  # batches whose waste is counted before the time begins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench tokens``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the tokens go")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of 16 bits, synthetic")
    parser.add_argument("--cold-tokens", type=int, default=16_000_000, help="of the mode cold")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--modes", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--loaders", nargs="+", help="names or parts of names; all if not given")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="or worker processes"
    )
    parser.add_argument("--seconds", type=float, default=3, help="of one measurement")
    parser.add_argument("--bandwidth", type=float, default=20, help="of cold storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="of cold storage")
    harness.add_repeats(parser, 5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one process")
    scale = parser.add_argument_group("many files and documents, instead of the modes")
    scale.add_argument("--scale", action="store_true", help="measure index, packing and resuming")
    scale.add_argument("--files", type=int, default=1000)
    scale.add_argument("--documents", type=int, default=100_000_000, help="of all files")
    scale.add_argument("--document-tokens", type=int, default=16, help="on average")
    scale.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64], help="that resume")
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints a table for each mode, or one for `--scale`."""
    if arguments.scale:
        return token_scale.run(arguments)
    home = Path(arguments.dir).absolute()
    rows: dict[str, dict[str, Any]] = {}
    for mode in arguments.modes:
        tokens = arguments.cold_tokens if mode == "cold" else arguments.tokens
        folder = home / f"tokens-{tokens}"
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / "tokens.bin", tokens)
        names = harness.matching(LOADERS[mode], arguments.loaders)
        if "litdata" in map(_package, names) and importlib.util.find_spec("litdata"):
            settings = _settings("litdata", mode, folder, arguments, prepare=True)
            harness.child("nostall_bench.tokens", settings, name="litdata's chunks")
        if mode == "cold":
            rows[mode] = _cold(folder, names, arguments)
        else:
            (folder / "tokens.bin").read_bytes()
            rows[mode] = _warm(mode, folder, names, arguments)
        harness.console().print(table(mode, rows[mode], arguments))
        harness.write(arguments.json, modes=rows, settings=_plain(arguments))
    return 0


def _settings(
    name: str, mode: str, folder: Path, arguments: argparse.Namespace, *, prepare: bool = False
) -> dict[str, Any]:
    own = {"loader": name, "mode": mode, "folder": str(folder), "prepare": prepare}
    return {**_plain(arguments), **own}


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "run"}


def _warm(
    mode: str, folder: Path, names: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    rows: dict[str, Any] = {name: {"runs": []} for name in (LOOP, *names)}
    for name in harness.turns(rows, arguments.repeats):
        _one(rows[name], name, mode, folder, arguments)
    return rows


def _cold(folder: Path, names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {name: {"runs": []} for name in names}
    rate = arguments.bandwidth * 1e6
    with (
        tempfile.TemporaryDirectory(prefix="nostall-bench-") as scratch,
        SlowFS(folder, Path(scratch, "mount"), rate, rate, arguments.latency_ms / 1e3) as storage,
    ):
        for name in harness.turns(names, arguments.repeats):
            storage.drop_caches()
            _one(rows[name], name, "cold", storage.mountpoint, arguments)
    return rows


def _one(
    row: dict[str, Any], name: str, mode: str, folder: Path, arguments: argparse.Namespace
) -> None:
    """Adds one measurement to the row of a loader, or of the C++ loop."""
    measure: Callable[[], Any] = functools.partial(_loop, mode, folder, arguments)
    if name != LOOP:
        settings = _settings(name, mode, folder, arguments)
        measure = functools.partial(
            harness.child,
            "nostall_bench.tokens",
            settings,
            name=name,
            timeout=arguments.timeout,
        )
    harness.attempt(row, measure)


def _loop(mode: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    program = find_native("nostall-limit-tokens")
    if program is None:
        raise UsageError("nostall-limit-tokens is not built")
    work = "packed" if mode == "packed" else "windows"
    settings = (arguments.length, arguments.batch_size, arguments.threads, arguments.seconds, work)
    done = subprocess.run(
        [str(program), str(folder / "tokens.bin"), *map(str, settings)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UsageError(done.stderr.strip())
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(mode: str, rows: dict[str, Any], arguments: argparse.Namespace) -> Table:
    """Speeds, and their share of that of the C++ loop in this run, or of the storage's."""
    of, whole = "of the storage", arguments.bandwidth * 1e6 / 2 / 1e6  # ids of 16 bits
    if mode != "cold":
        of = "of the C++ loop"
        whole = _millions(rows[LOOP]["runs"]) if rows[LOOP]["runs"] else 0.0
    out = harness.table(
        f"tokens, {mode}: sequences of {arguments.length}, batches of {arguments.batch_size}, "
        f"{arguments.threads} threads or workers",
        *("loader", "M tokens/s", of, "wasted", "CPU ns a token", "memory MB"),
    )
    for name, row in rows.items():
        runs = row["runs"]
        if not runs:
            out.add_row(harness.named(name, row))
            continue
        speeds = [r["tokens_per_s"] / 1e6 for r in runs]
        measured = name != LOOP
        out.add_row(
            harness.named(name, row),
            harness.spread(speeds, "{:.1f}"),
            f"{_millions(runs) / whole:.3f}" if whole else "",
            harness.spread((r["waste"] for r in runs), "{:.3%}")
            if mode == "packed" and measured
            else "",
            harness.spread((r["cpu_ns"] for r in runs), "{:.2f}"),
            harness.spread((r["pss_bytes"] / 1e6 for r in runs), "{:.0f}") if measured else "",
        )
    return out


def _millions(runs: list[dict[str, float]]) -> float:
    return harness.median(runs, "tokens_per_s") / 1e6


def _package(name: str) -> str:
    """The package that a loader needs; it is read before the time begins."""
    return next((p for p in ("grain", "litdata") if p in name.lower()), "torch")


def _measure(settings: dict[str, Any]) -> dict[str, float]:
    """Takes batches of one loader for some seconds; on cold storage from its very first one."""
    job = Job(
        Path(settings["folder"], "tokens.bin"),
        settings["length"],
        settings["batch_size"],
        settings["threads"],
    )
    mode, name, root = settings["mode"], settings["loader"], os.getpid()
    if settings["prepare"]:
        prepare_litdata(job)
        return {}
    needed = _package(name)
    if importlib.util.find_spec(needed) is None:
        raise UsageError(f"{needed} is not installed")
    __import__(needed)
    before = pss_bytes(root)
    batches = LOADERS[mode][name](job)
    # Counted beforehand: it takes longer than most loaders do.
    counted = [
        (n, count()) for n, count in itertools.islice(batches, 0 if mode == "cold" else _COUNTED)
    ]
    waste = 1 - sum(n for _, n in counted) / sum(n for n, _ in counted) if counted else 0.0
    # A cold measurement ends with the epoch: what comes again is no work of the storage.
    most = settings["cold_tokens"] // (job.length * job.batch) if mode == "cold" else 1 << 62
    places, seconds, cpu = 0, 0.0, cpu_seconds(root)
    began = time.perf_counter()
    for positions, _ in itertools.islice(batches, most):
        places += positions
        seconds = time.perf_counter() - began
        if seconds >= settings["seconds"]:
            break
    tokens = places * (1 - waste)
    return {
        "tokens_per_s": tokens / seconds,
        "waste": waste,
        "cpu_ns": (cpu_seconds(root) - cpu) * 1e9 / tokens,
        "pss_bytes": pss_bytes(root) - before,
    }


if __name__ == "__main__":
    harness.answer(_measure)
    os._exit(0)
