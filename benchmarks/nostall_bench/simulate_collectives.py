"""Allreduce on simulated clusters: the same algorithm between nodes that the library runs, and its
rivals, under SimGrid's SMPI.

The cluster: every node has one full-duplex link of `link` bytes/s to a switch that blocks nothing
(`latency` seconds a hop, two hops), its ranks reach each other through memory at `memory` bytes/s a
message, adding goes at `add` bytes/s a rank; a message costs its sender and its receiver 0.2 us each.
Times are simulated ones and repeat exactly.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.programs import find_native

# By name: how nostall-smpi is asked, and what SMPI is told.
ENGINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours": ("ours", ()),
    "flat RSA": ("mpi", ("smpi/allreduce:mvapich2_rs",)),
    "round-robin RSA": ("mpi", ("smpi/allreduce:mvapich2_rs",)),
    "ring": ("mpi", ("smpi/allreduce:lr",)),
    "recursive doubling": ("mpi", ("smpi/allreduce:rdb",)),
    "hierarchical": (
        "hierarchical",
        (
            "smpi/allreduce:mvapich2_rs",
            "smpi/reduce:scatter_gather",
            "smpi/bcast:scatter_LR_allgather",
        ),
    ),
    "mvapich2": ("mpi", ("smpi/coll-selector:mvapich2",)),
    "ompi": ("mpi", ("smpi/coll-selector:ompi",)),
    "mpich": ("mpi", ("smpi/coll-selector:mpich",)),
}
# Their neighbouring ranks are on different nodes.
ROUND_ROBIN = ("round-robin RSA",)
# Which ranks are late: a pattern of nostall-smpi and its options. The imbalance is that of
# [Mohammadalizadehbakhtevari 2021, table 3.2] (Horovod, messages of 1 to 64 MB, Cedar): worst case
# 5.85 over all ranks, 1.84 within a node.
PATTERNS: dict[str, tuple[str, ...]] = {
    "balanced": ("balanced",),
    "listing 4.2": ("random", "--imbalance", "5.85"),
    **{f"MIF {most}": ("random", "--imbalance", str(most)) for most in (10, 20, 50)},
    "steps": ("steps", "--imbalance", "6"),
    "horovod": ("random", "--imbalance", "5.85", "--together", "0.5"),
    "one node": ("node", "--imbalance", "3"),
    "one rank": ("rank", "--imbalance", "3"),
}


@dataclass(frozen=True)
class SimulatedCluster:
    """`nodes` x `per_node` ranks; bytes/s and seconds."""

    nodes: int
    per_node: int
    link: float = 12.5e9
    latency: float = 0.5e-6
    memory: float = 12e9
    add: float = 16e9

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise UsageError("a simulated cluster needs a node and a rank on it")

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def platform(self) -> str:
        """The platform in SimGrid's XML."""
        return (
            '<?xml version="1.0"?>\n'
            '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
            '<platform version="4.1">\n'
            f'  <cluster id="cluster" prefix="node-" suffix="" radical="0-{self.nodes - 1}"'
            f' speed="1Gf" core="{self.per_node}" bw="{self.link:g}Bps" lat="{self.latency:g}s"'
            f' sharing_policy="SPLITDUPLEX" loopback_bw="{self.memory:g}Bps"'
            ' loopback_lat="1e-7s"/>\n</platform>\n'
        )

    def bound(self, size: int) -> float:
        """After the last arrival: its message out of its node's link and the result in, seconds.

        0 in one node, where messages do not share what they pass.
        """
        if self.nodes == 1:
            return 0.0
        return 2 * (size / self.link + 2 * self.latency)


@dataclass(frozen=True)
class SimulatedCall:
    """One call; seconds, imbalance factors over alpha, the time of one message."""

    engine: str
    pattern: str
    ranks: int
    per_node: int
    bytes: int
    call: int
    alpha: float
    in_call: float
    after_last: float
    worst: float
    average: float
    right: bool
    bound: float


def _settings() -> tuple[str, ...]:
    # The defaults describe a Gigabit cluster with TCP; links here are as the platform says. Messages
    # up to 1 KB leave before their receiver asks.
    return (
        "smpi/simulate-computation:no",
        "smpi/shared-malloc:global",
        "network/crosstraffic:0",
        "smpi/bw-factor:0:1",
        "smpi/lat-factor:0:1",
        "smpi/os:0:2e-7:0",
        "smpi/or:0:2e-7:0",
        "smpi/ois:0:2e-7:0",
        "smpi/async-small-thresh:1024",
        "smpi/send-is-detached-thresh:1024",
        "smpi/test:1e-8",
        "smpi/iprobe:1e-8",
        "smpi/grow-injected-times:no",
        "smpi/wtime:0",
        "smpi/init:0",
    )


def missing() -> str | None:
    """What a simulation needs and this machine lacks; None if all is there."""
    if shutil.which("smpirun") is None:
        return "simulated collectives need SimGrid's smpirun (Debian: libsimgrid-dev)"
    if find_native("nostall-smpi") is None:
        return (
            "nostall-bench was built without SimGrid: install libsimgrid-dev, then "
            "`pip install ./benchmarks` in a checkout of nostall"
        )
    return None


def simulate(
    cluster: SimulatedCluster,
    engine: str,
    pattern: str,
    sizes: Sequence[int],
    *,
    calls: int = 1,
    seed: int = 1,
    redraw: bool = False,
    check: bool = False,
    options: Sequence[str] = (),
) -> list[SimulatedCall]:
    """Calls of allreduce on float32 messages of `sizes` bytes.

    Args:
        check: carry real data and verify every sum; else only time passes, and memory is not needed.
        options: passed to nostall-smpi, for instance ("--chunks", "4").

    Raises:
        UsageError: an unknown engine or pattern, or SimGrid is missing.
        RuntimeError: the simulation failed.
    """
    if engine not in ENGINES or pattern not in PATTERNS:
        what = engine if engine not in ENGINES else pattern
        known = [*ENGINES] if engine not in ENGINES else [*PATTERNS]
        raise UsageError(f'there is no "{what}"; there are: {", ".join(known)}')
    if (lacks := missing()) is not None:
        raise UsageError(lacks)
    program = find_native("nostall-smpi")
    kind, told = ENGINES[engine]
    with tempfile.TemporaryDirectory(prefix="nostall-smpi-") as folder:
        platform, hosts = Path(folder) / "platform.xml", Path(folder) / "hosts"
        platform.write_text(cluster.platform())
        nodes = list(range(cluster.nodes)) * cluster.per_node
        hosts.write_text(
            "".join(f"node-{n}\n" for n in (nodes if engine in ROUND_ROBIN else sorted(nodes)))
        )
        command = [
            "smpirun", "-np", str(cluster.ranks), "-platform", str(platform),
            "-hostfile", str(hosts), "-no-privatize", "--log=root.thres:error",
            *[f"--cfg={s}" for s in (*_settings(), *told)],
            str(program), "--engine", kind, "--per-node", str(cluster.per_node),
            "--add", str(cluster.add), "--calls", str(calls), "--seed", str(seed),
            *[word for size in sizes for word in ("--bytes", str(size))],
            "--pattern", *PATTERNS[pattern], *options,
            *(["--check"] if check else []), *(["--redraw"] if redraw else []),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env={**os.environ, "LC_ALL": "C"}
        )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(rows) != len(sizes) * calls:
        said = [
            line for line in done.stderr.splitlines() if line and not line.startswith("declare")
        ]
        raise RuntimeError(
            f"the simulation of {engine} on {cluster.ranks} ranks ended with status "
            f"{done.returncode}: {' '.join(said[-3:]) or 'no message'}"
        )
    return [
        SimulatedCall(
            **{**row, "engine": engine, "pattern": pattern, "bound": cluster.bound(row["bytes"])}
        )
        for row in rows
    ]


def table(rows: Sequence[SimulatedCall]) -> str:
    """One line a size and engine: mean time in the call, from the last arrival to the last
    completion, and that over the bound."""
    lines = [
        f"{'ranks':>5} {'node':>4} {'bytes':>9}  {'pattern':<12} {'engine':<18} {'in call us':>11}"
        f" {'after last us':>14} {'over bound':>10}"
    ]
    for r in _means(rows):
        lines.append(
            f"{r.ranks:>5} {r.per_node:>4} {r.bytes:>9}  {r.pattern:<12} {r.engine:<18}"
            f" {r.in_call * 1e6:>11.1f} {r.after_last * 1e6:>14.1f}"
            f" {f'{r.after_last / r.bound:.2f}' if r.bound else '-':>10}"
            + ("" if r.right else "  WRONG")
        )
    return "\n".join(lines)


def gains(rows: Sequence[SimulatedCall], base: str = "flat RSA") -> str:
    """As [Mohammadalizadehbakhtevari 2021, table 6.1]: by how much each engine's mean time in the
    call is below that of `base`, on average over sizes, at most and at least; "" without `base`."""
    rows = _means(rows)
    times = {(r.ranks, r.per_node, r.pattern, r.engine, r.bytes): r.in_call for r in rows}
    lines = []
    for ranks, per_node, pattern, engine in dict.fromkeys(key[:4] for key in times):
        found = []
        for key, time in times.items():
            reference = times.get((*key[:3], base, key[4]))
            if key[:4] == (ranks, per_node, pattern, engine) and reference and engine != base:
                found.append((100 * (1 - time / reference), key[4]))
        if found:
            average = sum(gain for gain, _ in found) / len(found)
            (most, at_most), (least, at_least) = max(found), min(found)
            lines.append(
                f"{ranks:>5} {per_node:>4}  {pattern:<12} {engine:<18} {average:>8.1f} %"
                f" {most:>8.1f} % at {at_most:<9} {least:>8.1f} % at {at_least}"
            )
    if not lines:
        return ""
    return "\n".join(["", f"time in the call, gain over {base}: average, most, least", *lines])


def _means(rows: Sequence[SimulatedCall]) -> list[SimulatedCall]:
    """Calls of one point become one row."""
    points: dict[tuple[Any, ...], list[SimulatedCall]] = {}
    for r in rows:
        points.setdefault((r.ranks, r.per_node, r.pattern, r.bytes, r.engine), []).append(r)
    means = []
    for group in points.values():
        mean = {
            key: sum(getattr(r, key) for r in group) / len(group)
            for key in ("in_call", "after_last", "worst", "average")
        }
        right = all(r.right for r in group)
        means.append(SimulatedCall(**{**asdict(group[0]), **mean, "right": right}))
    return means


def to_csv(rows: Sequence[SimulatedCall]) -> str:
    """All calls, a line each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(SimulatedCall.__dataclass_fields__))
    writer.writeheader()
    writer.writerows(asdict(r) for r in rows)
    return text.getvalue()


def draw(rows: Sequence[SimulatedCall], path: str) -> None:
    """A panel for every pattern and cluster: time from the last arrival over message size, with the
    bound."""
    rows = _means(rows)
    patterns = list(dict.fromkeys(r.pattern for r in rows))
    clusters = sorted({(r.ranks, r.per_node) for r in rows})
    size = (5.2 * len(patterns), 0.8 + 3.4 * len(clusters))
    with harness.figure(path, len(clusters), len(patterns), size, sharey=True) as (drawn, axes):
        for line, (ranks, per_node) in zip(axes, clusters, strict=True):
            for axis, pattern in zip(line, patterns, strict=True):
                place = (pattern, ranks, per_node)
                _panel(axis, [r for r in rows if (r.pattern, r.ranks, r.per_node) == place])
                axis.set(yscale="log", title=f"{ranks} ranks, {per_node} a node, {pattern}")
            line[0].set_ylabel("us after the last arrival")
        for axis in axes[-1]:
            axis.set_xlabel("bytes")
        axes[0][-1].legend(fontsize=8)
        drawn.suptitle("allreduce, simulated, 100 Gb/s links")


def _panel(axis: Any, rows: Sequence[SimulatedCall]) -> None:
    for engine in dict.fromkeys(r.engine for r in rows):
        points = sorted((r.bytes, r.after_last * 1e6) for r in rows if r.engine == engine)
        axis.plot(
            *zip(*points, strict=True), marker="o", markersize=4, label=engine,
            linewidth=2.4 if engine == "ours" else 1.2,
        )  # fmt: skip
    bounds = sorted({(r.bytes, r.bound * 1e6) for r in rows})
    axis.plot(*zip(*bounds, strict=True), "k:", label="one message out and in")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
