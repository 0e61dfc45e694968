"""``nostall bench scaling``: the time of an epoch by ranks, threads and batch, and its five metrics.

[Li 2019, sec. IV]: the same samples are shared by more ranks (strong scaling), the node's threads by
its ranks, and gradients are reduced by Horovod's protocol (``mode="negotiated"``). A run takes the
whole steps of an epoch, and its seconds are scaled to all samples of it. Two networks: NT3,
of whose weights one tensor has nearly all, on a tenth of its features; ResNet-50 on images of 64 x 64.
Every run is a training of real processes on CPU, runs in turns. The first table is figures 4 and 5; the
second has the metrics of figures 6 and 7, from the timeline that the engine writes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall.observe.timelines import Analysis, analyze
from nostall_bench import harness, sync

NETWORKS = {"nt3": (10, 20, 40), "resnet50": (8, 16, 32)}  # and the batches of a rank and step


@dataclass(frozen=True)
class Setting:
    """One training; `threads` are those of the node, which its ranks share."""

    network: str
    ranks: int
    threads: int
    batch: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench scaling``."""
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, "mlp"], default=list(NETWORKS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help="of the node")
    parser.add_argument("--batch", type=int, nargs="+", help="samples a rank and step")
    parser.add_argument("--samples", type=int, default=160, help="of an epoch, shared by the ranks")
    harness.add_repeats(parser, 3)
    harness.add_files(parser, plot="the epochs")


def run(arguments: argparse.Namespace) -> int:
    """Trains with all settings in turns and prints both tables."""
    if min([*arguments.ranks, *arguments.threads, *(arguments.batch or [1])]) < 1:
        raise UsageError("--ranks, --threads and --batch must be at least 1")
    rows: list[dict[str, Any]] = []
    for network in arguments.networks:
        batches = arguments.batch or NETWORKS.get(network, (8,))
        for ranks in arguments.ranks:
            settings = [
                Setting(network, ranks, threads, batch)
                for threads in arguments.threads
                for batch in batches
                if threads % ranks == 0 and batch * ranks <= arguments.samples
            ]
            rows += measure(settings, arguments.samples, arguments.repeats)
    if not rows:
        raise UsageError(
            "no setting is possible: the threads of the node are a multiple of its ranks, and a step "
            "takes no more than --samples"
        )
    console = harness.console()
    for network in arguments.networks:
        own = [row for row in rows if row["network"] == network]
        console.print(_epochs(network, own, arguments.samples))
        console.print(_metrics(network, [row for row in own if row["metrics"]]))
    harness.write(arguments.json, samples=arguments.samples, rows=rows)
    if arguments.plot:
        draw(rows, arguments.plot)
    return 0


def measure(settings: Sequence[Setting], samples: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each setting, all of one network and number of ranks, in turns."""
    if not settings:
        return []
    with tempfile.TemporaryDirectory(prefix="nostall-scaling-") as folder:
        turns = list(harness.turns(settings, repeats))
        runs = [
            {
                "network": chosen.network, "way": "negotiated", "batch": chosen.batch,
                "steps": samples // (chosen.batch * chosen.ranks), "warm": 1, "delay": 0.0,
                "data": "", "store": f"{folder}/store-{uuid.uuid4().hex}",
                "threads": chosen.threads // chosen.ranks,
                "timeline": f"{folder}/{number}.json",
            }
            for number, chosen in enumerate(turns)
        ]  # fmt: skip
        results = sync.measure(runs, settings[0].ranks)
        rows = []
        for chosen in settings:
            mine = [n for n, turn in enumerate(turns) if turn == chosen]
            trained = samples - samples % (chosen.batch * chosen.ranks)
            found = None
            if chosen.ranks > 1:
                # A process's later engines add their number to the name.
                (trace,) = Path(folder).glob(f"{mine[-1]}.*json")
                found = analyze([trace])
            rows.append(
                {
                    **vars(chosen),
                    "seconds": [
                        max(rank["seconds"] for rank in results[n]) * samples / trained
                        for n in mine
                    ],
                    "trained": trained,
                    "metrics": None if found is None else _plain(found),
                }
            )
    return rows


def _plain(found: Analysis) -> dict[str, Any] | None:
    """The metrics of figures 6 and 7; None of a run that has no round after the first."""
    if not found.rounds or found.reaction is None:
        return None
    bounded = [t.reaction for t in found.tensors if t.reaction not in (None, float("inf"))]
    worst, best = found.immutable_worst, found.immutable_best
    return {
        "feed_forward": found.feed_forward,
        "negotiation_average": found.negotiation_average,
        "negotiation_max": found.negotiation_max,
        "window_average": found.window_average,
        "window_max": found.window_max,
        "reaction_p50": found.reaction.p50,
        "reaction_max_bounded": max(bounded, default=None),
        "immutable_worst_max": None if worst is None else worst.max,
        "immutable_best_max": None if best is None else best.max,
    }


def _epochs(network: str, rows: Sequence[dict[str, Any]], samples: int) -> Any:
    table = harness.table(
        f"{network}: seconds of an epoch of {samples} samples, median (least-most)",
        *("ranks", "threads of the node", "batch", "seconds", "/ 1 rank"),
        left=0,
    )
    for row in rows:
        seconds = statistics.median(row["seconds"])
        alone = next(
            (r for r in rows if r["ranks"] == 1
             and (r["threads"], r["batch"]) == (row["threads"], row["batch"])),
            None,
        )  # fmt: skip
        ratio = "" if alone is None else f"{seconds / statistics.median(alone['seconds']):.2f}"
        table.add_row(
            *(str(row[key]) for key in ("ranks", "threads", "batch")),
            harness.spread(row["seconds"]),
            ratio,
        )
    return table


def _metrics(network: str, rows: Sequence[dict[str, Any]]) -> Any:
    table = harness.table(
        f"{network}: ms, and MB/s",
        *("ranks", "threads", "batch", "feed-forward", "negotiation", "most", "window", "most"),
        *("reaction, p50", "most bounded", "immutable, worst", "best"),
        left=0,
    )
    for row in rows:
        found = row["metrics"]
        times = ["feed_forward", "negotiation_average", "negotiation_max"]
        times += ["window_average", "window_max"]
        rates = (
            "reaction_p50",
            "reaction_max_bounded",
            "immutable_worst_max",
            "immutable_best_max",
        )
        table.add_row(
            *(str(row[key]) for key in ("ranks", "threads", "batch")),
            *(_number(found[key], 1e3) for key in times),
            *(_number(found[key], 1e-6) for key in rates),
        )
    return table


def _number(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.3g}"


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """A panel for each network: seconds of an epoch over ranks, a line for each threads and batch."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    with harness.figure(path, 1, len(networks), (1 + 5 * len(networks), 4.4)) as (_, axes):
        for axis, network in zip(axes[0], networks, strict=True):
            own = [row for row in rows if row["network"] == network]
            for threads, batch in dict.fromkeys((row["threads"], row["batch"]) for row in own):
                line = [r for r in own if (r["threads"], r["batch"]) == (threads, batch)]
                medians, errors = harness.error_bars([row["seconds"] for row in line])
                axis.errorbar(
                    [row["ranks"] for row in line], medians, errors, marker="o", capsize=2,
                    label=f"{threads} threads, batch {batch}",
                )  # fmt: skip
            axis.set(xlabel="ranks", ylabel="seconds of an epoch", title=network)
            axis.set_xscale("log", base=2)
            axis.legend(fontsize=7)
