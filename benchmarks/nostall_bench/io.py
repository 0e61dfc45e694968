"""``nostall bench io``: how fast images come from storage, by pipeline, threads and device.

The STREAM-like benchmark of [Chien 2018, sec. III.A]: a list of images is shuffled, mapped by 1, 2, 4,
8 threads (decode and resize to 224 x 224, or read only) and batched by 64; nothing computes. A
measurement is a process with two runs, of which the first is warm-up; caches are made cold before each.
The bound beside is one large file read in order past the cache (table I), and the same files read by
threads that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.disk import Activity, device_of, forget, sequential
from nostall_bench.programs import find_native, run_limit

WORKS = ("decode", "read")
LIMIT = "threads that only read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench io``."""
    from nostall_bench.pipelines import PIPELINES, installed

    parser.add_argument(
        "--paths", nargs="+", default=["nostall-bench"],
        help="directories, one a device; images are made in each",
    )  # fmt: skip
    parser.add_argument("--data", nargs="+", help="folders of images there already, one a path")
    parser.add_argument("--files", type=int, default=2000, help="synthetic images (95 KB each)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--pipelines", nargs="+", choices=list(PIPELINES), default=installed(),
        help="all that are installed if not given",
    )  # fmt: skip
    harness.add_repeats(parser, 5, "measurements of each, in turns")
    parser.add_argument(
        "--drop-caches", action="store_true", help="of the whole machine, where this user may"
    )
    parser.add_argument("--output", default="nostall-bench/io", help=".json and .png are written")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table a path, writes JSON and a plot."""
    console = harness.console()
    if arguments.data and len(arguments.data) != len(arguments.paths):
        raise UsageError("--data needs one folder for each of --paths")
    measured: dict[str, Any] = {}
    for number, path in enumerate(arguments.paths):
        home = Path(path).absolute()
        home.mkdir(parents=True, exist_ok=True)
        given = arguments.data[number] if arguments.data else None
        data = harness.dataset(home, arguments.files, given=given)
        files = sorted(str(p) for p in data.rglob("*") if p.suffix in _IMAGES)
        if not files:
            raise UsageError(f"{data} holds no images ({', '.join(sorted(_IMAGES))})")
        found = _measure(files, home, arguments)
        measured[str(home)] = found
        for work in arguments.work:
            console.print(_table(str(home), work, found))
        console.print(f"cold caches by {found['cold']}")
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    harness.write(output.with_suffix(".json"), paths=measured)
    _plot(measured, output.with_suffix(".png"))
    console.print(f"numbers {output.with_suffix('.json')}, plot {output.with_suffix('.png')}")
    return 0


_IMAGES = {".jpg", ".jpeg", ".png", ".JPEG", ".JPG"}


def _measure(files: list[str], home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    device = device_of(files[0])
    wrote, read = sequential(home) if os.access(home, os.W_OK) else (None, None)
    program = find_native("nostall-limit")
    limits = [(LIMIT, "read", n) for n in arguments.threads] if program else []
    ways = [*limits, *itertools.product(arguments.pipelines, arguments.work, arguments.threads)]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {way: [] for way in ways}
    for way in harness.turns(ways, arguments.repeats):
        pipeline, work, threads = way
        if pipeline == LIMIT and program:
            forget(files, arguments.drop_caches)
            rate = run_limit(program, files, threads, 1, "read")["samples_per_s"]
            runs[way].append({"images_per_s": rate})
            continue
        settings = {
            "files": files, "pipeline": pipeline, "threads": threads, "work": work,
            "batch": arguments.batch_size, "drop": arguments.drop_caches, "seed": len(runs[way]),
        }  # fmt: skip
        runs[way].append(
            harness.child("nostall_bench.io", settings, name=pipeline, OMP_NUM_THREADS="1")
        )
    rows = []
    for (pipeline, work, threads), found in runs.items():
        rates = [r["images_per_s"] for r in found]
        row = {
            "work": work, "pipeline": pipeline, "threads": threads, **found[-1],
            "images_per_s": rates, "median": statistics.median(rates),
            "least": min(rates), "most": max(rates),
        }  # fmt: skip
        rows.append(row)
    return {
        "files": len(files),
        "bytes": sum(os.stat(f).st_size for f in files),
        "device": f"{device[0]}:{device[1]}" if device else "no block device",
        "cold": forget(files[:1], arguments.drop_caches),
        "sequential": read,
        "sequential_write": wrote,
        "bound": {r["threads"]: r["median"] for r in rows if r["pipeline"] == LIMIT},
        "rows": [r for r in rows if r["pipeline"] != LIMIT],
    }


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """A run of one pipeline in this process, after one that warms up."""
    from nostall_bench.pipelines import PIPELINES, Work

    _quiet(settings["pipeline"])
    files = settings["files"]
    found: dict[str, Any] = {}
    device = device_of(files[0])
    for _ in range(2):
        forget(files, settings["drop"])
        work = Work(
            files, [0] * len(files), settings["batch"], settings["threads"],
            settings["work"] == "decode", seed=settings["seed"],
        )  # fmt: skip
        watch = Activity(device) if device else contextlib.nullcontext()
        with watch as seen:
            began = time.perf_counter()
            images = sum(len(labels) for _, labels in PIPELINES[settings["pipeline"]](work))
            found["images_per_s"] = images / (time.perf_counter() - began)
        found["errors"], found["readers"] = work.errors, work.readers
        found["activity"] = seen.rows if seen is not None else []
    return found


def _quiet(pipeline: str) -> None:
    if pipeline == "nostall":
        return
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
    warnings.filterwarnings("ignore", message=".*NumPy array is not writable.*")  # tf.data's


def _table(path: str, work: str, found: dict[str, Any]) -> Any:
    size = found["bytes"] / found["files"]
    out = harness.table(
        f"{path} ({found['device']}), {work}: {found['files']} images of {size / 1e3:.0f} KB; "
        f"one file in order {_in_order(found)}",
        *("pipeline", "threads", "images/s", "MB/s", "of reading", "errors"),
    )
    for threads, rate in found["bound"].items():
        out.add_row(LIMIT, str(threads), f"{rate:.0f}", f"{rate * size / 1e6:.1f}", "1.00", "")
    for row in (r for r in found["rows"] if r["work"] == work):
        bound = found["bound"].get(row["threads"])
        readers = row["readers"] or row["threads"]
        also = f" ({readers} read)" if readers != row["threads"] else ""
        out.add_row(
            row["pipeline"], f"{row['threads']}{also}",
            harness.spread(row["images_per_s"], "{:.0f}"), f"{row['median'] * size / 1e6:.1f}",
            f"{row['median'] / bound:.2f}" if bound else "", str(row["errors"]),
        )  # fmt: skip
    return out


def _in_order(found: dict[str, Any]) -> str:
    if found["sequential"] is None:
        return "not measured (read-only)"
    return "{:.0f} MB/s read, {:.0f} written".format(
        found["sequential"] / 1e6, found["sequential_write"] / 1e6
    )


def _plot(paths: dict[str, Any], path: Path) -> None:
    with harness.figure(path, len(paths), 2, (11, 3.4 * len(paths))) as (_, axes):
        for (name, found), (rates, disk) in zip(paths.items(), axes, strict=True):
            _draw(name, found, rates, disk)


def _draw(name: str, found: dict[str, Any], rates: Any, disk: Any) -> None:
    styles = {"decode": "-", "read": "--"}
    for key in dict.fromkeys((r["pipeline"], r["work"]) for r in found["rows"]):
        rows = [r for r in found["rows"] if (r["pipeline"], r["work"]) == key]
        rates.plot(
            [r["threads"] for r in rows], [r["median"] for r in rows], styles[key[1]],
            marker="o", label=f"{key[0]}, {key[1]}",
        )  # fmt: skip
        busiest = rows[-1]["activity"]
        disk.plot([a[0] for a in busiest], [a[1] / 1e6 for a in busiest], styles[key[1]],
                  marker=".", label=f"{key[0]}, {key[1]}")  # fmt: skip
        own = [(a[0], a[3] / 1e6) for a in busiest if a[3] is not None]
        if any(rate for _, rate in own):
            disk.plot(*zip(*own, strict=True), ":", color=disk.lines[-1].get_color())
    rates.set(title=name, xlabel="threads", ylabel="images/s", ylim=(0, None))
    disk.set(title=f"the device reads (dotted: this cgroup), {rows[-1]['threads']} threads",
             xlabel="seconds", ylabel="MB/s")  # fmt: skip
    rates.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    harness.answer(_work)
