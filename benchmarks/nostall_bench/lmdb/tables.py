"""The tables of ``nostall bench lmdb``: medians over the runs, with the least and the most."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from nostall_bench import harness
from nostall_bench.lmdb.blocks import SIZES, WAYS
from nostall_bench.lmdb.pool import PARTS

if TYPE_CHECKING:
    from rich.table import Table


def strategies(rows: list[dict[str, Any]]) -> Table:
    """A row for each strategy of one size, order, storage and number of ranks."""
    first = rows[0]
    where = first["storage"] + (f", {first['nodes']} nodes" if first["nodes"] > 1 else "")
    table = harness.table(
        f"{first['records']} records of {first['size']}, {first['order']}, {where}, "
        f"{first['ranks']} rank(s), cold ({first['cold']}), {len(first['runs'])} runs",
        *("strategy", "records/s", f"of {first['limit']}", "seek / read / skew", "read / needed"),
        *("asleep / no core", "switches a record", "major faults a record", "CPU us a record"),
        *("pages missed, redundant", "seeks a MB"),
    )
    for row in rows:
        rates = [row["records"] / r["seconds"] for r in row["runs"]]
        seconds = middle_of(row, "seconds")
        cells = [
            row["strategy"],
            harness.spread(rates, "{:,.0f}"),
            f"{row['limit_seconds'] / seconds:.2f}",
        ]
        if "seek" in row["runs"][0]:
            split = [middle_of(row, k) for k in ("seek", "read", "skew")]
            whole = max(1e-9, sum(split))
            cells += [
                " / ".join(f"{s / whole:.0%}" for s in split),
                f"{middle_of(row, 'read_bytes') / row['needed']:.3f}",
                _idle(row),
                f"{middle_of(row, 'switches') / row['records']:.3f}",
                f"{middle_of(row, 'faults') / row['records']:.2f}",
                f"{middle_of(row, 'cpu') / row['records'] * 1e6:.0f}",
            ]
            walked = f"{middle_of(row, 'missed'):.0f}, {middle_of(row, 'redundant'):.0f}"
            cells.append(walked if row["strategy"] == "lmm-dm" else "")
        if "seeks" in row["runs"][0]:
            cells += [""] * (10 - len(cells))
            cells.append(f"{middle_of(row, 'seeks') / row['needed'] * 1e6:.2f}")
        table.add_row(*cells)
    return table


def _idle(row: dict[str, Any]) -> str:
    """The shares of seeking and reading in which a rank slept, and in which it waited for a core."""
    spent = [max(1e-9, run["seek"] + run["read"]) for run in row["runs"]]
    return " / ".join(
        f"{median(run[key] / all_ for run, all_ in zip(row['runs'], spent, strict=True)):.0%}"
        for key in ("asleep", "queued")
    )


def middle_of(row: dict[str, Any], key: str) -> float:
    """The median over a row's runs."""
    return harness.median(row["runs"], key)


def index(rows: list[dict[str, Any]]) -> Table:
    """A row for each way to find all records."""
    names = {
        "index": "nostall's scan",
        "keys": "py-lmdb, keys only",
        "keys-no-ra": "py-lmdb, keys only, no read-ahead",
    }
    first = rows[0]
    table = harness.table(
        f"finding the {first['runs'][0]['records']} records of {first['size']}, "
        f"{first['storage']}, cold, {len(first['runs'])} runs",
        *("way", "ms", "times the scan", "pages / branch and leaf pages", "MB read"),
    )
    scan = middle_of(rows[0], "seconds")
    for row in rows:
        pages = row["runs"][0].get("pages")
        table.add_row(
            names[row["strategy"]],
            harness.spread((1e3 * r["seconds"] for r in row["runs"]), "{:.1f}"),
            f"{middle_of(row, 'seconds') / scan:.1f}",
            f"{pages} / {row['tree_pages']} = {pages / row['tree_pages']:.3f}" if pages else "",
            f"{middle_of(row, 'read_bytes') / 1e6:.2f}",
        )
    return table


def reads(rows: list[dict[str, Any]]) -> Table:
    """MB/s by way and by size of a read."""
    table = harness.table(
        f"one reader, on and on, {rows[0]['storage']}, cold: MB/s",
        "way",
        *(f"{size >> 10} KiB a read" for size in SIZES),
    )
    for way in WAYS:
        table.add_row(
            way, *(harness.spread(r["rates"], "{:,.0f}") for r in rows if r["way"] == way)
        )
    return table


def training(rows: list[dict[str, Any]]) -> Table:
    """A row for each way of reading of one training."""
    first = rows[0]
    base = next((r for r in rows if r["strategy"] == "lmdb"), first)
    table = harness.table(
        f"training on {first['records']} records of {first['size']}, {first['order']}, batches of "
        f"{first['batch']}, {first['storage']}, {first['ranks']} rank(s) on {first['nodes']} "
        f"node(s), cold ({first['cold']}), {len(first['runs'])} runs",
        *("way", "images/s", f"times {base['strategy']}", " / ".join(PARTS), "read / needed"),
    )
    for row in rows:
        split = [middle_of(row, k) for k in PARTS]
        whole = max(1e-9, sum(split))
        # Where the storage does not count, the workers of a DataLoader are not seen.
        counted = row["storage"] == "slow"
        table.add_row(
            row["strategy"],
            harness.spread((row["records"] / r["seconds"] for r in row["runs"]), "{:,.0f}"),
            f"{middle_of(base, 'seconds') / middle_of(row, 'seconds'):.2f}",
            " / ".join(f"{s / whole:.0%}" for s in split),
            f"{middle_of(row, 'read_bytes') / row['needed']:.2f}" if counted else "",
        )
    return table
