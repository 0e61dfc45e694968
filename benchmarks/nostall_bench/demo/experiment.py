"""Runs the demo: a dataset, slow storage, two trainings, one table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.demo.dataset import DatasetSpec, make_dataset
from nostall_bench.programs import child_environment
from nostall_bench.slowfs import SlowFS, add_keep_cache, memory_words, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

MB = 1e6

_BANDWIDTH = 20  # of the slow storage, MB/s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall demo``."""
    parser.add_argument("--dir", default="nostall-demo", help="where dataset and results go")
    parser.add_argument("--files", type=int, default=2000, help="JPEG files (95 KB each)")
    parser.add_argument("--classes", type=int, default=10, help="of the images")
    parser.add_argument("--epochs", type=int, default=4, help="of each training")
    parser.add_argument("--ranks", type=int, default=2, help="training processes")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and batch")
    parser.add_argument("--size", type=int, default=96, help="side of the training images, pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the images")
    parser.add_argument(
        "--bandwidth",
        type=float,
        help="of the slow storage, MB/s: 20; for tokens four times what the training consumes",
    )
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    add_keep_cache(parser)
    parser.add_argument(
        "--workers", type=int, help="torch's, per rank; the cores divided by the ranks"
    )
    parser.add_argument("--tiers", nargs="*", help="nostall's; RAM for the whole data set")


def run(arguments: argparse.Namespace) -> int:
    """Runs both trainings on cold storage; prints the table, writes JSON and PNG."""
    console = harness.console()
    require()
    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    spec = DatasetSpec(arguments.files, arguments.classes, arguments.seed)
    data = _dataset(home / "data", spec, console)
    total = sum(p.stat().st_size for p in data.rglob("*.jpg"))
    tiers = arguments.tiers
    if tiers is None:
        tiers = [f"ram:{int(total * 1.1) // (1 << 20) + 64}MiB"]
    workers = arguments.workers
    if workers is None:
        workers = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="nostall-demo-") as mount,
        SlowFS(
            data,
            mount,
            bandwidth=(arguments.bandwidth or _BANDWIDTH) * MB,
            aggregate=(arguments.bandwidth or _BANDWIDTH) * MB,
            latency=arguments.latency_ms / 1e3,
            keep_cache=arguments.keep_cache,
        ) as storage,
    ):
        speed = storage.measure()[0]
        console.print(
            f"storage: {total / MB:.0f} MB in {spec.files} files, {speed / MB:.1f} "
            f"MB/s measured, {arguments.latency_ms} ms per operation; "
            f"{memory_words(arguments.keep_cache)}"
        )
        for loader in ("torch", "nostall"):
            storage.drop_caches()
            before = storage.served_bytes
            record = _train(loader, mount, home, arguments, tiers, workers, console)
            record["storage_bytes"] = storage.served_bytes - before
            results[loader] = record
    _record(home, data, speed, arguments, tiers)
    results["dataset_bytes"] = total
    results["settings"] = {**vars(arguments), "tiers": tiers, "workers": workers}
    results["settings"].pop("run", None)
    harness.write(home / "demo.json", **results)
    console.print(summary(results))
    _plot(results, home / "demo.png")
    console.print(f"plot {home / 'demo.png'}, numbers {home / 'demo.json'}")
    return 0


def _record(
    home: Path, data: Path, speed: float, arguments: argparse.Namespace, tiers: list[str]
) -> None:
    """Keeps nostall's run for ``nostall simulate --check``."""
    import nostall
    from nostall.base._sizes import parse_tiers
    from nostall.observe._stats import Stats, merge
    from nostall.simulate._check import SUFFIX, machine_of_run, record_run

    whole = merge(
        [Stats.load(home / f"nostall.rank{r}.stats.json") for r in range(arguments.ranks)]
    )
    sizes = nostall.ImageFolder(str(data), index=False).sizes
    capacities = [
        t.capacity
        for t in parse_tiers(
            tiers, dataset_bytes=int(sizes.sum()), local_world_size=arguments.ranks
        )
    ]
    machine = machine_of_run(
        nodes=1,
        source=[speed],
        link=speed,
        tiers=capacities,
        staging=arguments.ranks * (256 << 20),
    )
    decode = sum(e.decode_seconds for e in whole.epochs)
    if decode > 0:
        machine["beta"] = sum(e.bytes for e in whole.epochs) / decode / MB
        machine["p"][0] = len(os.sched_getaffinity(0))
    batches = sum(e.batches for e in whole.epochs)
    record_run(
        home / f"demo{SUFFIX}",
        environment=machine,
        sizes=sizes.tolist(),
        training={
            "E": arguments.epochs,
            "B": arguments.batch_size * arguments.ranks,
            "seed": arguments.seed,
        },
        step_seconds=(whole.seconds - whole.stall_seconds) / batches,
        epoch_seconds=[e.seconds for e in whole.epochs],
        origin_bytes={
            o: sum(e.origins[o].bytes for e in whole.epochs) for o in whole.epochs[0].origins
        },
    )


def _dataset(root: Path, spec: DatasetSpec, console: Any) -> Path:
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("making the dataset", total=spec.files)

        def made(done: int, files: int) -> None:
            if not done:
                console.print(f"making {files:,} pictures in {root} ...")
            progress.update(task, completed=done)

        return make_dataset(root, spec, progress=made)


def _train(
    loader: str,
    data: str,
    home: Path,
    arguments: argparse.Namespace,
    tiers: list[str],
    workers: int,
    console: Any,
) -> dict[str, Any]:
    from rich.progress import Progress

    out = home / f"{loader}.json"
    out.unlink(missing_ok=True)
    log = home / f"{loader}.log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={arguments.ranks}",
        *("-m", "nostall_bench.demo.train", "--loader", loader, "--data", data, "--out", str(out)),
        *("--epochs", str(arguments.epochs), "--batch-size", str(arguments.batch_size)),
        *("--size", str(arguments.size), "--classes", str(arguments.classes)),
        *("--seed", str(arguments.seed), "--workers", str(workers), "--tiers", *tiers),
    ]
    environment = child_environment(OMP_NUM_THREADS="1")
    console.print(f"training with {loader}: {arguments.epochs} epochs, {arguments.ranks} ranks ...")
    with log.open("w") as errors, Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"training with {loader}", total=arguments.epochs)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("epoch "):
                        progress.advance(task)
                        row = json.loads(line.split(" ", 2)[2])
                        console.print(
                            f"{loader:8} epoch {row['epoch']}: {row['seconds']:6.1f} s, stalled "
                            f"{row['stall_seconds']:6.1f} s, loss {row['loss']:.3f}, accuracy "
                            f"{row['accuracy']:.3f}"
                        )
            except BaseException:
                process.terminate()
                raise
    if process.returncode or not out.exists():
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise UsageError(f"the training with {loader} failed, see {log}:\n{tail}")
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def summary(results: dict[str, Any]) -> Table:
    """The table of both runs."""
    title = "the same training, two loaders"
    table = harness.table(title, "", "torch DataLoader", "nostall", "ratio")
    torch, ours, settings = results["torch"], results["nostall"], results["settings"]

    def row(name: str, value: Any, form: str, unit: float = 1.0, better: str = "less") -> None:
        a, b = value(torch) / unit, value(ours) / unit
        ratio = a / b if better == "less" else b / a
        table.add_row(name, form.format(a), form.format(b), f"{ratio:.2f}x" if better else "")

    def stall(run: dict[str, Any]) -> float:
        return float(sum(e["stall_seconds"] for e in run["epochs"]))

    def samples(run: dict[str, Any]) -> int:
        return int(sum(e["samples"] for e in run["epochs"]))

    row("seconds", lambda r: r["seconds"], "{:.1f}")
    row("seconds stalled, mean of ranks", stall, "{:.1f}")
    row("samples/s", lambda r: samples(r) / r["seconds"], "{:.0f}", better="more")
    row("MB from the storage", lambda r: r["storage_bytes"], "{:.0f}", MB)
    row("final loss", lambda r: r["epochs"][-1]["loss"], "{:.3f}", better="")
    row("final accuracy", lambda r: r["epochs"][-1]["accuracy"], "{:.3f}", better="")
    table.caption = (
        f"lower bound of bytes from the storage: {ours['lower_bound_bytes'] / MB:.0f} MB; "
        f"nostall's tiers: {', '.join(settings['tiers']) or 'none'}; "
        f"{memory_words(settings['keep_cache'])}"
    )
    return table


def _plot(results: dict[str, Any], path: Path) -> None:
    with harness.figure(path, 1, 2, (9, 3.4)) as (_, ((left, right),)):
        draw(results, left, right)


def draw(results: dict[str, Any], left: Axes, right: Axes) -> None:
    """The seconds of each epoch, waits apart, and the loss."""
    colours = {"torch": ("#5f6c7b", "#c3cfdb"), "nostall": ("#0072b2", "#8fc7ea")}
    for i, (loader, (dark, light)) in enumerate(colours.items()):
        epochs = results[loader]["epochs"]
        at = [e["epoch"] + 0.4 * i - 0.2 for e in epochs]
        stall = [e["stall_seconds"] for e in epochs]
        work = [max(0.0, e["seconds"] - e["stall_seconds"]) for e in epochs]
        left.bar(at, work, 0.36, color=dark, label=f"{loader}: training")
        left.bar(at, stall, 0.36, bottom=work, color=light, hatch="///", edgecolor=dark, lw=0,
                 label=f"{loader}: waiting for data")  # fmt: skip
        form = "o--" if i else "s-"  # both are seen where they are alike
        losses = [e["loss"] for e in epochs]
        right.plot([e["epoch"] for e in epochs], losses, form, color=dark, label=loader)
    left.set(xlabel="epoch", ylabel="seconds")
    right.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks([e["epoch"] for e in results["torch"]["epochs"]])
        axes.grid(axis="x", visible=False)
        # Above the axes, where no bar is.
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
