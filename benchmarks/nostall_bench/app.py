"""``nostall bench app``: what input costs a training, AlexNet with 1 to 8 threads and prefetch 0 or 1.

The mini-application of [Chien 2018, sec. III.B]: images of 224 x 224 x 3, labels one-hot or sparse,
Adam. Each setting trains the same number of steps on files made cold before; the cost of input is its
run time less that of the same steps on one batch that lies in memory [Chien 2018, fig. 6 to 8]. A
measurement is a process that trains twice, the first time to warm up. The disk's activity is sampled
each second. On a GPU where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.disk import Activity, device_of, forget

MEMORY = "memory"
OURS = "nostall"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench app``."""
    from nostall_bench.pipelines import PIPELINES, installed

    parser.add_argument("--dir", default="nostall-bench", help="where the images and results go")
    parser.add_argument("--data", help="class folders of images; synthetic ones if not given")
    parser.add_argument("--files", type=int, default=1280, help="synthetic images")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--prefetch", type=int, nargs="+", choices=(0, 1), default=[0, 1],
        help=f"batches prepared ahead; {OURS} always has one, torch two a worker instead of one",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=20, help="at most what the images give")
    parser.add_argument("--dense", type=int, default=4096, help="units of the dense layers")
    parser.add_argument("--labels", choices=("one-hot", "sparse"), default="one-hot")
    parser.add_argument(
        "--pipelines", nargs="+", choices=list(PIPELINES), default=installed(),
        help="all that are installed if not given",
    )  # fmt: skip
    harness.add_repeats(parser, 5, "measurements of each, in turns")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table, writes ``app.json`` and ``app.png``."""
    from nostall_bench.peers import listing
    from nostall_bench.pipelines import batches_ahead

    home = Path(arguments.dir).absolute()
    home.mkdir(parents=True, exist_ok=True)
    items = listing(harness.dataset(home, arguments.files, given=arguments.data))
    result: dict[str, Any] = {"files": len(items), "rows": []}
    table = harness.table(
        "AlexNet: run time, and the cost of input",
        *("pipeline", "batch", "threads", "batches ahead", "seconds", "input costs", "share"),
    )
    for batch in arguments.batch_size:
        steps = min(arguments.steps, len(items) // batch)
        if steps < 2:
            raise UsageError(f"{len(items)} images are too few for batches of {batch}")
        settings = {
            "items": items[: steps * batch], "batch": batch, "steps": steps,
            "labels": arguments.labels, "dense": arguments.dense,
        }  # fmt: skip
        # The stage of the loader has two batches at least, of which one is ahead.
        ways = [(MEMORY, 1, 0)] + [
            (pipeline, threads, prefetch)
            for pipeline in arguments.pipelines
            for threads in arguments.threads
            for prefetch in ([1] if pipeline == OURS else arguments.prefetch)
        ]
        runs: dict[tuple[str, int, int], list[dict[str, Any]]] = {way: [] for way in ways}
        for way in harness.turns(ways, arguments.repeats):
            chosen = dict(zip(("pipeline", "threads", "prefetch"), way, strict=True))
            chosen["seed"] = len(runs[way])
            found = harness.child(
                "nostall_bench.app", {**settings, **chosen}, name=way[0], OMP_NUM_THREADS="1"
            )
            runs[way].append(found)
            result["device"] = found["device"]
        base = harness.median(runs[ways[0]], "seconds")
        for way, measured in runs.items():
            pipeline, threads, prefetch = way
            seconds = harness.median(measured, "seconds")
            row = {
                "batch": batch, "steps": steps, "pipeline": pipeline, "threads": threads,
                "prefetch": prefetch, "seconds": [r["seconds"] for r in measured],
                "cost": seconds - base, "activity": measured[-1]["activity"],
            }  # fmt: skip
            result["rows"].append(row)
            within = ("", "")
            if pipeline != MEMORY:
                within = (str(threads), str(batches_ahead(pipeline, threads, prefetch)))
            table.add_row(
                "one batch in memory" if pipeline == MEMORY else pipeline, str(batch), *within,
                harness.spread(row["seconds"]),
                f"{seconds - base:.2f}", f"{100 * (seconds - base) / seconds:.0f} %",
            )  # fmt: skip
    console = harness.console()
    console.print(table)
    harness.write(home / "app.json", **result)
    _plot(result, home / "app.png")
    console.print(f"on {result['device']}; numbers {home / 'app.json'}, plot {home / 'app.png'}")
    return 0


def model(classes: int, dense: int = 4096) -> Any:
    """AlexNet: five convolutions, three poolings, three dense layers; logits of shape (n, classes)."""
    from torch import nn

    def convolution(
        inputs: int, outputs: int, size: int, stride: int = 1, pad: int = 0
    ) -> list[Any]:
        return [nn.Conv2d(inputs, outputs, size, stride, pad), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *convolution(3, 96, 11, 4, 2), nn.MaxPool2d(3, 2),
        *convolution(96, 256, 5, 1, 2), nn.MaxPool2d(3, 2),
        *convolution(256, 384, 3, 1, 1), *convolution(384, 384, 3, 1, 1),
        *convolution(384, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Dropout(), nn.Linear(256 * 6 * 6, dense), nn.ReLU(inplace=True),
        nn.Dropout(), nn.Linear(dense, dense), nn.ReLU(inplace=True), nn.Linear(dense, classes),
    )  # fmt: skip


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """A training in this process, after one that warms up."""
    import torch

    from nostall_bench.pipelines import PIPELINES, Work

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = [str(p) for p, _ in settings["items"]]
    labels = [int(y) for _, y in settings["items"]]
    classes = max(labels) + 1
    torch.manual_seed(0)
    net = model(classes, settings["dense"]).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    disk = device_of(paths[0])
    out: dict[str, Any] = {"device": _name(device)}
    for _ in range(2):
        if settings["pipeline"] == MEMORY:
            images = torch.rand(settings["batch"], 3, 224, 224)
            batches: Any = itertools.repeat(
                (images, labels[: settings["batch"]]), settings["steps"]
            )
        else:
            forget(paths)
            work = Work(paths, labels, settings["batch"], settings["threads"], True,
                        settings["prefetch"], settings["seed"])  # fmt: skip
            batches = PIPELINES[settings["pipeline"]](work)
        steps = 0
        with Activity(disk) if disk else contextlib.nullcontext() as seen:
            began = time.perf_counter()
            for images, found in batches:
                target = torch.as_tensor(found, dtype=torch.int64, device=device)
                if settings["labels"] == "one-hot":
                    target = torch.nn.functional.one_hot(target, classes).float()
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(images.to(device)), target)
                loss.backward()
                optimizer.step()
                steps += 1
            if device.type == "cuda":
                torch.cuda.synchronize()
            out["seconds"] = time.perf_counter() - began
        out["steps"] = steps
        out["activity"] = seen.rows if seen is not None else []
    return out


def _name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _plot(result: dict[str, Any], path: Path) -> None:
    rows = [r for r in result["rows"] if r["pipeline"] != MEMORY]
    with harness.figure(path, 1, 2, (11, 3.6)) as (_, ((times, disk),)):
        for key in dict.fromkeys((r["pipeline"], r["prefetch"], r["batch"]) for r in rows):
            line = [r for r in rows if (r["pipeline"], r["prefetch"], r["batch"]) == key]
            label = f"{key[0]}, prefetch {key[1]}, batch {key[2]}"
            style = "--" if key[1] == 0 else "-"
            times.plot([r["threads"] for r in line], [r["cost"] for r in line], style, marker="o",
                       label=label)  # fmt: skip
            activity = line[-1]["activity"]
            disk.plot([a[0] for a in activity], [a[1] / 1e6 for a in activity], style, marker=".")
        times.set(xlabel="threads", ylabel="seconds that input costs")
        disk.set(xlabel="seconds of the last run", ylabel="the disk reads, MB/s")
        times.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    harness.answer(_work)
