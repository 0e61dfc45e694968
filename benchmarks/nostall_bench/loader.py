"""``nostall bench loader``: this loader and its peers on the same files, side by side in one run.

Each measurement is a fresh process (`nostall_bench.worker`): one warm epoch, then several measured
ones without a pause; the repeats go round-robin over the loaders, so that drift of the machine hits
all of them. In the mode "cold" the files lie on slowed storage (`SlowFS`) and every epoch from the
first counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall_bench import harness
from nostall_bench.programs import find_native, run_limit
from nostall_bench.records import FIELDS, make, paths
from nostall_bench.slowfs import SlowFS, add_keep_cache, memory_words

if TYPE_CHECKING:
    from rich.table import Table

MODES = ("read", "transform", "fields", "recipe", "cached", "cold")
LOOP = "C++ loop"
# Of fields: no file is opened, as a loader's tiers spare it.
IN_MEMORY = "C++ loop in memory"
_FIELDS = "fields"  # the folder of what lies beside the images
# What nostall-limit calls the modes that it has.
LOOPS = {
    "read": "read",
    "transform": "transform",
    "image + mask": "mask",
    "image + boxes": "boxes",
    "image + text": "text",
    "array": "array",
    "wav": "wav",
}
# Enough that an epoch's start and end, and what a loader has staged, do not decide.
MEASURED_EPOCHS = dict.fromkeys((*MODES, *FIELDS), 2) | {"read": 12, "array": 20, "wav": 12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench loader``."""
    parser.add_argument("--dir", default="nostall-bench", help="where dataset and results go")
    parser.add_argument("--data", help="class folders of JPEG files; synthetic ones if not given")
    parser.add_argument("--files", type=int, default=4000, help="synthetic files (95 KB each)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=(*MODES, *FIELDS),
        default=["read", "transform"],
        help=f'"fields" stands for those of one kind of sample each: {", ".join(FIELDS)}',
    )
    parser.add_argument("--loaders", nargs="+", help="names or parts of names; all if not given")
    harness.add_repeats(parser, 5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--epochs", type=int, default=4, help="of the cold mode")
    parser.add_argument("--bandwidth", type=float, default=40, help="of cold storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="of cold storage")
    add_keep_cache(parser)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process")
    parser.add_argument("--quick", action="store_true", help="few small files, one repeat")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints tables, writes ``loader.json`` and ``loader.png``."""
    from nostall_bench import peers
    from nostall_bench.demo.dataset import DatasetSpec, make_dataset

    console = harness.console()
    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    repeats = 1 if arguments.quick else arguments.repeats
    known = [n for n, loader in peers.LOADERS.items() if loader.modes != (peers.OBJECTS,)]
    chosen = harness.matching(known, arguments.loaders)
    if arguments.quick and not arguments.data:
        data = make_dataset(home / "data-128", DatasetSpec(128, 4, 0, 0.3))
    else:
        data = harness.dataset(home, arguments.files, given=arguments.data)
    files = [path for path, _ in peers.listing(data)]
    made = harness.made_of(data, home)
    modes = [m for given in arguments.modes for m in (FIELDS if given == "fields" else (given,))]
    if any(mode in FIELDS for mode in modes):
        make(made / _FIELDS, files)
    result: dict[str, Any] = {
        "dataset": {"files": len(files), "bytes": sum(Path(f).stat().st_size for f in files)},
        "repeats": repeats,
        "modes": {},
        "passed": {},
    }
    for mode in modes:
        rows = _mode(mode, chosen, data, files, made, arguments, repeats, console)
        result["modes"][mode] = rows
        console.print(table(mode, rows, arguments.keep_cache))
        result["passed"][mode] = ahead = passed(rows)
        if ahead:
            names = ", ".join(f"{name} ({ratio:.2f})" for name, ratio in ahead.items())
            console.print(f"ahead of the C++ loop, which is no bound here: {names}")
        harness.write(home / "loader.json", **result)
    _plot(result["modes"], home / "loader.png")
    console.print(f"plot {home / 'loader.png'}, numbers {home / 'loader.json'}")
    return 0


def measured_epochs(mode: str, quick: bool) -> int:
    """How many epochs of a mode other than "cold" count."""
    return 1 if quick else MEASURED_EPOCHS[mode]


def _mode(
    mode: str,
    chosen: list[str],
    data: Path,
    files: list[str],
    made: Path,
    arguments: argparse.Namespace,
    repeats: int,
    console: Any,
) -> dict[str, dict[str, Any]]:
    from rich.progress import Progress

    from nostall_bench import peers

    rows: dict[str, dict[str, Any]] = {}
    runners = []
    loop = find_native("nostall-limit")
    if mode in LOOPS:
        if loop is None:
            rows[LOOP] = {"missing": "nostall-limit is not built"}
        else:
            runners += [LOOP, IN_MEMORY] if mode in FIELDS else [LOOP]
    for name in chosen:
        if mode not in peers.LOADERS[name].modes:
            continue
        lacking = peers.absent(name)
        if lacking:
            rows[name] = {"missing": f"not installed: {', '.join(lacking)}"}
        else:
            runners.append(name)
            rows[name] = {"runs": []}
    total = sum(Path(f).stat().st_size for f in files)
    with (
        tempfile.TemporaryDirectory(prefix="nostall-bench-") as scratch,
        Progress(console=console, transient=True) as progress,
        contextlib.ExitStack() as stack,
    ):
        where = data
        storage: SlowFS | None = None
        variants: list[tuple[str, str, list[str]]] = [(n, n, []) for n in runners]
        if mode == "cold":
            where = Path(scratch, "mount")
            rate = arguments.bandwidth * 1e6
            storage = stack.enter_context(
                SlowFS(
                    data,
                    where,
                    rate,
                    rate,
                    arguments.latency_ms / 1e3,
                    keep_cache=arguments.keep_cache,
                )
            )
            variants = []
            for name in runners:
                if name != "nostall":
                    variants.append((name, name, []))
                    continue
                del rows[name]
                for share, text in ((1.1, "all"), (0.5, "half")):
                    tier = f"ram:{max(1, int(share * total) >> 20)}MiB"
                    variants.append((name, f"nostall, tiers hold {text}", [tier]))
        task = progress.add_task(f"measuring: {mode}", total=repeats * len(variants))
        for name, label, tiers in harness.turns(variants, repeats):
            progress.update(task, description=f"{mode}: {label}")
            measure = functools.partial(
                _run_worker, name, mode, where, made, arguments, tiers, storage
            )
            if name in (LOOP, IN_MEMORY) and loop is not None:
                fields, kept = made / _FIELDS, name == IN_MEMORY
                measure = functools.partial(_run_loop, loop, files, mode, fields, arguments, kept)
            harness.attempt(rows.setdefault(label, {"runs": []}), measure)
            progress.advance(task)
    for row in rows.values():
        if runs := row.get("runs"):
            row.update({key: harness.extent(r[key] for r in runs) for key in runs[0]})
    return rows


def _run_loop(
    program: Path,
    files: list[str],
    mode: str,
    fields: Path,
    arguments: argparse.Namespace,
    in_memory: bool,
) -> dict[str, float]:
    import random

    samples = (
        ["\t".join(s.values()) for s in paths(fields, files, mode)]
        if mode in FIELDS
        else list(files)
    )
    random.Random(0).shuffle(samples)
    epochs = measured_epochs(mode, arguments.quick)
    line = run_limit(program, samples, arguments.threads, epochs, LOOPS[mode], in_memory=in_memory)
    return {
        "samples_per_s": line["samples_per_s"],
        "cpu_ms_per_sample": line["cpu_ms_per_sample"],
    }


def _run_worker(
    name: str,
    mode: str,
    data: Path,
    made: Path,
    arguments: argparse.Namespace,
    tiers: list[str],
    storage: SlowFS | None,
) -> dict[str, float]:
    from nostall_bench import peers

    module = peers.module(name)
    prepared = data
    if mode in FIELDS:
        prepared = made / _FIELDS
    elif hasattr(module, "prepare"):
        prepared = module.prepare(data, made)
    cold = storage is not None
    settings = {
        "loader": name,
        "mode": "transform" if cold else mode,
        "data": str(data),
        "prepared": str(prepared),
        "threads": arguments.threads,
        "tiers": tiers,
        "warm": 0 if cold else 1,
        "measured": arguments.epochs if cold else measured_epochs(mode, arguments.quick),
        "ahead": 0 if cold else 1,
    }
    before = 0
    if storage is not None:
        storage.drop_caches()
        before = storage.served_bytes
    rows = harness.child(
        "nostall_bench.worker",
        settings,
        name=name,
        timeout=arguments.timeout,
        OMP_NUM_THREADS="1",
    )
    whole = {key: sum(r[key] for r in rows) for key in ("seconds", "samples", "cpu_seconds")}
    whole["pss_bytes"] = max(r["pss_bytes"] for r in rows)
    whole["samples_per_s"] = whole["samples"] / whole["seconds"]
    whole["cpu_ms_per_sample"] = 1e3 * whole["cpu_seconds"] / whole["samples"]
    if storage is not None:
        whole["storage_bytes"] = storage.served_bytes - before
    return whole


def passed(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The loaders that were faster than the C++ loop, and how many times."""
    loop = _rate(rows.get(LOOP, {}))
    ratios = {name: _rate(row) / loop for name, row in rows.items() if loop and name != IN_MEMORY}
    return {name: ratio for name, ratio in ratios.items() if ratio > 1}


def _rate(row: dict[str, Any]) -> float:
    """The median of samples per second; 0 if nothing was measured."""
    return float(row.get("samples_per_s", {}).get("median", 0))


def table(mode: str, rows: dict[str, dict[str, Any]], keep_cache: bool = False) -> Table:
    """One mode as a rich table, the fastest first; `keep_cache` is that of the cold storage."""
    headings = ["loader", "samples/s", "CPU ms/sample", "memory MB"]
    if mode == "cold":
        headings.append("MB from storage")
    ours = next(
        (r for n, r in rows.items() if n.startswith("nostall") and "samples_per_s" in r), None
    )
    loop = _rate(rows.get(LOOP, {}))
    if loop:
        headings.append("of the C++ loop")
    headings += ["nostall / this", "by CPU"]
    memory = memory_words(keep_cache) if mode == "cold" else None
    out = harness.table(f"loaders: {mode}", *headings, caption=memory)
    for name, row in sorted(rows.items(), key=lambda item: -_rate(item[1])):
        rate = row.get("samples_per_s")
        if rate is None:
            out.add_row(harness.named(name, row), row.get("missing"))
            continue
        pss = row.get("pss_bytes")
        cells = [
            harness.named(name, row),
            harness.spread((r["samples_per_s"] for r in row["runs"]), "{:.0f}"),
            f"{row['cpu_ms_per_sample']['median']:.3f}",
            f"{pss['median'] / 1e6:.0f}" if pss else "",
        ]
        if mode == "cold":
            cells.append(f"{row['storage_bytes']['median'] / 1e6:.0f}")
        if loop:
            cells.append(f"{rate['median'] / loop:.2f}")
        ratio = ours["samples_per_s"]["median"] / rate["median"] if ours else None
        spread = (
            f" [{ours['samples_per_s']['min'] / rate['max']:.2f}-"
            f"{ours['samples_per_s']['max'] / rate['min']:.2f}]"
            if ours
            else ""
        )
        cpu = row["cpu_ms_per_sample"]["median"]
        our_cpu = ours["cpu_ms_per_sample"]["median"] if ours else 0  # 0: less than a tick
        by_cpu = f"{cpu / our_cpu:.2f}" if our_cpu else ""
        out.add_row(*cells, f"{ratio:.2f}{spread}" if ratio else "", by_cpu)
    return out


def _plot(modes: dict[str, Any], path: Path) -> None:
    with harness.figure(path, len(modes), 1, (8, 3.2 * len(modes))) as (_, axes):
        for axis, (mode, rows) in zip(axes[:, 0], modes.items(), strict=True):
            drawn = sorted(
                (row["samples_per_s"]["median"], name, [r["samples_per_s"] for r in row["runs"]])
                for name, row in rows.items()
                if "samples_per_s" in row
            )
            middle, ends = harness.error_bars([rates for _, _, rates in drawn])
            axis.barh([name for _, name, _ in drawn], middle, xerr=ends)
            axis.set(title=mode, xlabel="samples/s")
