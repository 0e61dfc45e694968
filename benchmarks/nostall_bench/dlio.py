"""``nostall bench dlio``: DLIO itself on emulated hosts, with its own loader and nostall's, in turns.

As MLPerf Storage demands of a submission: the unmodified benchmark, its own data, data of five times
the memory of all hosts, five runs. A host is a control group with `--memory` bytes, page cache
included, and a mount of its own of one slowed storage (`hosts.Hosts`, `SlowFS`), whose bandwidth is
`--storage` times what all accelerators need and whose own count says how many bytes it gave.
Utilisation is DLIO's own number. nostall's loader knows the seed: its results are of the OPEN division.

`--scale` makes the workload's records smaller, and with them what an accelerator needs: such a run is
no submission.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nostall.base._sizes import parse_size
from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.accelerator import Profile, allowed
from nostall_bench.hosts import Hosts
from nostall_bench.programs import child_environment
from nostall_bench.slowfs import SlowFS

_PLUGINS = (
    "++workload.reader.data_loader_classname=nostall.plugins.dlio.DataLoader",
    "++workload.reader.data_loader_sampler=index",
)
# Name in the table -> options of DLIO.
LOADERS: dict[str, tuple[str, ...]] = {"nostall": _PLUGINS, "DLIO's own": ()}
_TRAIN = ("++workload.workflow.generate_data=False", "++workload.workflow.train=True")
_GENERATE = ("++workload.workflow.generate_data=True", "++workload.workflow.train=False")
_TIMEOUT = 3600.0
_SLOWEST = 10e6  # bytes a second at which DLIO still generates its data


@dataclass(frozen=True)
class Workload:
    """What is measured of a workload of DLIO's own: its name, and what its file says."""

    name: str
    profile: Profile
    epochs: int
    spread: float  # of the records' size, standard deviation in bytes
    samples: int  # of a file
    length: str = "record_length"  # the option's name

    def overrides(self, folder: Path, files: int, out: Path, scale: float) -> list[str]:
        """The options of DLIO for `files` files in `folder`; records as in the workload at scale 1."""
        given = {
            "dataset.data_folder": folder, "dataset.num_files_train": files,
            "train.epochs": self.epochs, "workflow.checkpoint": False, "output.folder": out,
            # DLIO makes the state of a model in memory even where it writes no checkpoints.
            "checkpoint.model_size": 1,
        }  # fmt: skip
        if scale != 1:
            given |= {
                f"dataset.{self.length}": self.profile.record,
                f"dataset.{self.length}_stdev": int(self.spread),
                f"dataset.{self.length}_resize": 4096,
            }
        return [f"workload={self.name}", *(f"++workload.{k}={v}" for k, v in given.items())]

    def files(self, size: float, ranks: int) -> int:
        """How many files have `size` bytes, and whole batches for all ranks."""
        batches = math.ceil(size / self.profile.record / (self.profile.batch * ranks))
        return math.ceil(batches * self.profile.batch * ranks / self.samples)


def read_workload(name: str, scale: float, epochs: int | None) -> Workload:
    """The workload in the installed DLIO.

    Raises:
        UsageError: there is no DLIO, or no such workload in it.
    """
    found = importlib.util.find_spec("dlio_benchmark")
    if found is None or found.origin is None:
        raise UsageError(
            "nostall bench dlio runs DLIO: install dlio-benchmark, or `make dlio-bench`"
        )
    import yaml  # type: ignore[import-untyped]

    known = Path(found.origin).parent / "configs" / "workload"
    path = known / f"{name}.yaml"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in known.glob("*.yaml")))
        raise UsageError(f"DLIO has no workload {name}; it has: {names}")
    said = yaml.safe_load(path.read_text())
    data, train = said["dataset"], said["train"]
    length = next(n for n in ("record_length_bytes", "record_length") if n in data)
    profile = Profile(
        record=max(1, round(data[length] * scale)),
        batch=said["reader"]["batch_size"],
        compute=train["computation_time"],
        goal=said.get("metric", {}).get("au", 0.9),
    )
    return Workload(
        name, profile, epochs or train["epochs"], data.get(f"{length}_stdev", 0) * scale,
        data.get("num_samples_per_file", 1), length,
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench dlio``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the data goes")
    parser.add_argument("--workload", default="unet3d_h100", help="of DLIO's own, by name")
    parser.add_argument("--scale", type=float, default=1.0, help="of the records' size")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--accelerators", type=int, default=1, help="of each host")
    parser.add_argument("--memory", default="8GiB", help="of each host")
    parser.add_argument("--data", type=float, default=5.0, help="times the memory of all hosts")
    parser.add_argument("--epochs", type=int, help="instead of the workload's")
    parser.add_argument(
        "--storage", type=float, default=1.1, help="its bandwidth over all accelerators' need"
    )
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    parser.add_argument("--loaders", nargs="+", help="names or parts of names; all if not given")
    harness.add_repeats(parser, 5)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    workload = read_workload(arguments.workload, arguments.scale, arguments.epochs)
    memory, ranks = parse_size(arguments.memory), arguments.hosts * arguments.accelerators
    files = workload.files(arguments.data * arguments.hosts * memory, ranks)
    rate = arguments.storage * ranks * workload.profile.need
    chosen = harness.matching(LOADERS, arguments.loaders)
    home = Path(arguments.dir).absolute()
    data = _generated(home, workload, files, arguments.scale)
    size = sum(p.stat().st_size for p in (data / "train").rglob("*") if p.is_file())
    rows: list[dict[str, Any]] = []
    result = {
        "workload": asdict(workload), "scale": arguments.scale, "hosts": arguments.hosts,
        "accelerators": ranks, "memory": memory, "data_bytes": size, "files": files,
        "storage_bytes_per_second": rate, "rows": rows,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="nostall-dlio-") as name,
        SlowFS(
            data,
            Path(name) / "mounts",
            rate,
            rate,
            arguments.latency_ms / 1e3,
            clients=arguments.hosts,
            keep_cache=True,
        ) as storage,
    ):
        result["ceiling"] = storage.measure()[-1]
        for loader in harness.turns(chosen, arguments.repeats):
            measured = _job(loader, workload, files, storage, memory, Path(name), arguments)
            rows.append({"loader": loader, **measured})
            harness.write(arguments.json, **result)
    harness.console().print(_table(result, workload))
    return 0


def _generated(home: Path, workload: Workload, files: int, scale: float) -> Path:
    """The data, made by DLIO once and kept."""
    data = home / f"dlio-{workload.name}-{workload.profile.record}-{files}"
    if (data / "complete").exists():
        return data
    data.mkdir(parents=True, exist_ok=True)
    size = files * workload.samples * workload.profile.record
    limit = _TIMEOUT + size / _SLOWEST
    with tempfile.TemporaryDirectory(prefix="nostall-dlio-") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlio_benchmark.main",
             *workload.overrides(data, files, Path(out), scale), *_GENERATE],
            cwd=out, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"DLIO did not generate {size / 1e6:.0f} MB in {data} within {limit:.0f} s: give a "
                "folder on faster storage (--dir), or fewer data (--data, --scale)"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started goes with it
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise UsageError(f"DLIO did not generate its data: {said.strip()[-2000:]}")
    (data / "complete").touch()
    return data


def _job(
    loader: str,
    workload: Workload,
    files: int,
    storage: SlowFS,
    memory: int,
    folder: Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One run of DLIO on all hosts, their caches cold."""
    storage.drop_caches()
    before, began = storage.served_bytes, time.perf_counter()
    seen = folder / "data"
    seen.mkdir(exist_ok=True)
    log = Path(arguments.dir).absolute() / "dlio.log"
    with (
        tempfile.TemporaryDirectory(dir=folder) as out,
        Hosts(arguments.hosts, memory, folder) as on,
    ):
        on.run(
            [sys.executable, "-m", "dlio_benchmark.main",
             *workload.overrides(seen, files, Path(out), arguments.scale), *_TRAIN,
             f"hydra.run.dir={out}", *LOADERS[loader]],
            arguments.accelerators, {str(seen): storage.mounts}, log=log, timeout=_TIMEOUT,
        )  # fmt: skip
        said = json.loads((Path(out) / "summary.json").read_text())["metric"]
    return {
        "au": said["train_au_mean_percentage"] / 100,
        "au_epochs": [p / 100 for p in said["train_au_percentage"]],
        "samples_per_s": said["train_throughput_mean_samples_per_second"],
        "seconds": time.perf_counter() - began,
        "storage_bytes": storage.served_bytes - before,
    }


def _table(result: dict[str, Any], workload: Workload) -> Any:
    size, epochs, profile = result["data_bytes"], workload.epochs, workload.profile
    held = result["hosts"] * result["memory"] / size
    steps = result["files"] * workload.samples // (profile.batch * result["accelerators"])
    most = allowed(profile, steps, epochs, result["ceiling"], held, result["accelerators"])
    least = 1 + (epochs - 1) * max(0.0, 1 - held)
    out = harness.table(
        f"DLIO {workload.name}, records x {result['scale']:g}: {result['hosts']} hosts of "
        f"{result['memory'] / 1e6:.0f} MB, {result['accelerators']} accelerators, data "
        f"{size / 1e6:.0f} MB, {epochs} epochs of {steps} steps, storage of "
        f"{result['storage_bytes_per_second'] / 1e6:.0f} MB/s (measured {result['ceiling'] / 1e6:.0f})",
        *("loader", "AU", "AU, worst epoch", "samples/s", "job, s", "read / data"),
        caption=f"AU is to reach {profile.goal:.0%}. With all memory for data, storage allows "
        f"{most.au:.1%}, and {least:.2f} of the data must be read.",
    )
    for name in LOADERS:
        rows = [r for r in result["rows"] if r["loader"] == name]
        if rows:
            out.add_row(
                name,
                harness.spread((r["au"] for r in rows), "{:.1%}"),
                harness.spread((min(r["au_epochs"]) for r in rows), "{:.1%}"),
                harness.spread((r["samples_per_s"] for r in rows), "{:.1f}"),
                harness.spread((r["seconds"] for r in rows), "{:.0f}"),
                harness.spread(r["storage_bytes"] / size for r in rows),
            )
    return out
