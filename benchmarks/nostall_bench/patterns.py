"""``nostall bench patterns``: the collectives of trainings in Horovod's manner, by kind, size and time.

Real trainings under mpirun, one after the other, with libnostall_mpi.so's profile of every call of MPI
[Mohammadalizadehbakhtevari 2021, sec. 3.2]: a broadcast of each tensor of the model, then steps whose
gradients nostall's engine negotiates as Horovod does, fuses and reduces, all by MPI. Each network has a
row of shares for each figure, and the published ones below it (ResNet-50, VGG-16 and DenseNet with
TensorFlow on 64 GPUs). What a step has of small allreduces is its length over the length of a cycle, so
that a step that takes longer than a GPU's has more; --cycle-ms sets it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nostall.cli import _run as mpi
from nostall.errors import PeerError, UsageError
from nostall.observe.report import _arrivals as arrivals
from nostall_bench import harness

NETWORKS = ("resnet50 small images", "vgg16 narrow", "densenet121")
_SIZES = ("0-1 KB", "1 KB-1 MB", "larger")
# Of each figure: its columns, and the published percentages by network, in words where only a limit is
# given. Figures 3.1, 3.3, 3.5 and 3.7 are of the cluster Beluga; 3.2, 3.4, 3.6 and 3.8 are of ResNet-50
# on Cedar and Helios.
_KINDS = ("allreduce", "bcast", "others")
PUBLISHED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, str, str]]]] = {
    "calls by kind (figures 3.1 and 3.2)": (
        _KINDS,
        {
            NETWORKS[0]: ("84", "11", "5"),
            NETWORKS[1]: ("93", "4", "3"),
            NETWORKS[2]: ("79", "17", "4"),
            "ResNet-50, 256 GPUs (Cedar)": ("75", "17", "8"),
            "ResNet-50, 16 GPUs (Helios)": ("96", "3", "1"),
        },
    ),
    "time by kind (figures 3.3 and 3.4)": (
        _KINDS,
        {
            NETWORKS[0]: ("95", "to 5", "below 1"),
            NETWORKS[1]: ("96", "to 5", "below 1"),
            NETWORKS[2]: ("97", "to 5", "below 1"),
            "ResNet-50, 256 GPUs (Cedar)": ("96", "to 4", "below 1"),
            "ResNet-50, 16 GPUs (Helios)": ("98", "to 4", "below 1"),
        },
    ),
    "allreduces by size (figures 3.5 and 3.6)": (
        _SIZES,
        {
            NETWORKS[0]: ("93", "below 1", "7"),
            NETWORKS[1]: ("88", "4", "8"),
            NETWORKS[2]: ("96", "below 1", "4"),
            "ResNet-50, 256 GPUs (Cedar)": ("89", "1", "10"),
            "ResNet-50, 16 GPUs (Helios)": ("95", "3", "2"),
        },
    ),
    "time of allreduces by size (figures 3.7 and 3.8)": (
        _SIZES,
        {
            NETWORKS[0]: ("78", "below 1", "22"),
            NETWORKS[1]: ("36", "below 1", "63"),
            NETWORKS[2]: ("92", "below 1", "8"),
            "ResNet-50, 256 GPUs (Cedar)": ("65", "below 1", "35"),
            "ResNet-50, 16 GPUs (Helios)": ("80", "below 1", "19"),
        },
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench patterns``."""
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, "mlp"], default=NETWORKS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--per-node",
        type=int,
        default=0,
        help="ranks that are declared a node (0: this machine is one)",
    )
    parser.add_argument("--batch", type=int, default=4, help="samples a rank and step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cycle-ms", type=float, default=5, help="of the negotiation")
    parser.add_argument("--fusion-mb", type=int, default=64, help="most bytes of a reduction, MiB")
    parser.add_argument("--keep-mpi", action="store_true", help="the MPI's own collectives")
    parser.add_argument("--profiles", help="keep each network's profile in a folder of this one")
    harness.add_files(parser, plot="the shares")


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the shares, the sizes and the imbalance of every network."""
    if arguments.ranks < 2 or arguments.steps < 1 or arguments.batch < 1 or arguments.per_node < 0:
        raise UsageError(
            "--ranks must be at least 2, --steps and --batch at least 1, --per-node 0 or more"
        )
    found: dict[str, tuple[dict[str, Any], arrivals.Profile]] = {}
    console = harness.console()
    with tempfile.TemporaryDirectory(prefix="nostall-patterns-") as folder:
        for network in arguments.networks:
            home = Path(arguments.profiles or folder).absolute() / network.replace(" ", "-")
            home.mkdir(parents=True, exist_ok=True)
            found[network] = train(arguments, network, home)
    for network, (told, profile) in found.items():
        console.print(_tables(network, told, profile, arguments.steps))
    measured = {network: shares(profile) for network, (_, profile) in found.items()}
    for figure, (columns, published) in PUBLISHED.items():
        table = harness.table(f"{figure}, %", "", *columns)
        for network in measured:
            table.add_row(network, *(f"{100 * v:.1f}" for v in measured[network][figure]))
        for network, values in published.items():
            table.add_row(f"published: {network}", *values)
        console.print(table)
    harness.write(
        arguments.json,
        settings={
            name: getattr(arguments, name) for name in ("ranks", "per_node", "batch", "steps")
        },
        networks={
            network: {
                **told, "shares": measured[network], "left_out": profile.left_out,
                "rows": [vars(row) for row in arrivals.table(profile)],
                "alpha": profile.alpha.measured,
            }
            for network, (told, profile) in found.items()
        },
    )  # fmt: skip
    if arguments.plot:
        draw(measured, arguments.plot)
    return 0


def train(
    arguments: argparse.Namespace, network: str, home: Path
) -> tuple[dict[str, Any], arrivals.Profile]:
    """One training; what it tells, and its profile, which is left in `home`.

    Raises:
        PeerError: a rank failed.
    """
    answer = home / "answer.json"
    settings = home / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "network": network, "batch": arguments.batch, "steps": arguments.steps,
                "cycle": arguments.cycle_ms / 1000, "threshold": arguments.fusion_mb << 20,
                "answer": str(answer),
            }
        )
    )  # fmt: skip
    variables = mpi.environment(mpi.library(), str(home), replace=not arguments.keep_mpi)
    launcher = Path(sys.executable).with_name("mpiexec")
    words = [str(launcher), "-n", str(arguments.ranks), "--oversubscribe", "--bind-to", "none"]
    words += ["--mca", "mpi_yield_when_idle", "1"]
    if arguments.per_node:
        names = f"NOSTALL_NODE=node$((OMPI_COMM_WORLD_RANK / {arguments.per_node}))"
        words += ["sh", "-c", f'{names} exec "$@"', "sh"]
    words += [sys.executable, "-m", "nostall_bench.patterns_rank", str(settings)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        mpi.command(words, variables),
        env={**os.environ, **root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode or not answer.exists():
        raise PeerError(f"the training of {network} failed: {done.stderr.strip()[-500:]}")
    return json.loads(answer.read_text()), arrivals.read(arrivals.find([str(home)]))


def shares(profile: arrivals.Profile) -> dict[str, list[float]]:
    """Of each figure the share of its columns; barriers, which Horovod has none of, do not count."""
    rows = [row for row in arrivals.table(profile) if row.operation != "barrier"]
    whole = {row.operation: row for row in rows if row.size == "all"}
    sizes = {row.size: row for row in rows if row.operation == "allreduce"}

    def by_kind(field: str) -> list[float]:
        total = sum(getattr(row, field) for row in whole.values())
        named = [getattr(whole[kind], field) if kind in whole else 0 for kind in _KINDS[:2]]
        return [value / total for value in (*named, total - sum(named))]

    def by_size(field: str) -> list[float]:
        small, middle = (getattr(sizes[n], field) if n in sizes else 0.0 for n in _SIZES[:2])
        return [small, middle, 1 - small - middle]

    values = (by_kind("calls"), by_kind("seconds"), by_size("call_share"), by_size("time_share"))
    return dict(zip(PUBLISHED, values, strict=True))


def _tables(network: str, told: dict[str, Any], profile: arrivals.Profile, steps: int) -> Any:
    table = harness.table(
        f"{network}: {told['parameters'] / 1e6:.1f} million parameters",
        *("operation", "size", "calls", "MB", "time, s", "worst / alpha", "average / alpha"),
        *("worst / alpha, node", "average / alpha, node"),
        left=2,
        caption=f"{1000 * told['seconds'] / steps:.0f} ms a step, "
        f"{told['cycles'] / steps:.0f} cycles a step; alpha: {profile.alpha}",
    )
    for row in arrivals.table(profile):
        table.add_row(
            row.operation, row.size, str(row.calls), f"{row.bytes / (1 << 20):.1f}",
            f"{row.seconds:.3f}", f"{row.worst_factor:.1f}", f"{row.average_factor:.1f}",
            f"{row.node_worst_factor:.1f}", f"{row.node_average_factor:.1f}",
        )  # fmt: skip
    return table


def draw(measured: dict[str, dict[str, list[float]]], path: str) -> None:
    """A panel for each pair of figures: a bar a network, ours and the published one side by side."""
    with harness.figure(path, 1, len(PUBLISHED), (4.2 * len(PUBLISHED), 4)) as (_, axes):
        for axis, (figure, (columns, published)) in zip(axes[0], PUBLISHED.items(), strict=True):
            bars = {}
            for network, of_figures in measured.items():
                bars[network] = [100 * value for value in of_figures[figure]]
                if network in published:
                    numbers = [float(v.split()[-1]) for v in published[network]]
                    bars[f"{network}\n(published)"] = numbers
            under = [0.0] * len(bars)
            for place, column in enumerate(columns):
                heights = [bar[place] for bar in bars.values()]
                axis.bar(list(bars), heights, bottom=under, label=column)
                under = [low + high for low, high in zip(under, heights, strict=True)]
            axis.set(title=figure.replace(" (", "\n("), ylabel="%")
            axis.tick_params(axis="x", labelrotation=75, labelsize=7)
            axis.legend(fontsize=7, loc="lower left")
