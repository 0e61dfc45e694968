"""``nostall bench accelerator``: how busy storage and loader keep emulated accelerators.

As DLIO and MLPerf Storage measure it: an accelerator takes a batch, "computes" for the profile's time,
and takes the next one. Its utilisation (AU) is computing time over all time, the first step excluded.
Records are real files of the profile's size, on slowed storage (`SlowFS`) whose own ceiling is measured
beside it; bytes really read from it are counted, for a cache in front of it inflates utilisation. What
the storage allows (`allowed`) follows from the bytes that it must give by each step. nostall's tiers
are memory of this machine; torch has none of it unless --keep-cache leaves it the page cache.

Profiles are those of MLPerf Storage. Of v2.0, for one H100: ResNet-50 (114,660 bytes a record, 400 a
batch, 0.224 s), 3D U-Net (146.6 MB, 7, 0.323 s), CosmoFlow (2.83 MB, 1, 3.5 ms). Of v3.0: 3D U-Net for
one B200 (0.162 s), RetinaNet (322,957 bytes) for one B200 (24, 47.55 ms) and one MI355 (32, 63.4 ms).
--scale makes records smaller, and with them the bandwidth that an accelerator needs. By its OPEN rules
a loader may know the seed in advance; by its CLOSED rules it may not: these are not CLOSED results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall_bench import harness
from nostall_bench.slowfs import SlowFS, add_keep_cache, memory_words


@dataclass(frozen=True)
class Profile:
    """A workload: bytes a record, records a batch, seconds of compute a batch, the AU to reach."""

    record: int
    batch: int
    compute: float
    goal: float

    @property
    def need(self) -> float:
        """Bytes a second of one accelerator that never waits."""
        return self.record * self.batch / self.compute


PROFILES = {
    "resnet50": Profile(114_660, 400, 0.224, 0.9),
    "unet3d": Profile(146_600_628, 7, 0.323, 0.9),
    "cosmoflow": Profile(2_828_486, 1, 0.0035, 0.7),
    # v3.0
    "unet3d-b200": Profile(146_600_628, 7, 0.162, 0.9),
    "retinanet-b200": Profile(322_957, 24, 0.04755, 0.85),
    "retinanet-mi355": Profile(322_957, 32, 0.0634, 0.85),
}
# Name in the table -> (loader, share of the data that the tiers hold, worker processes).
LOADERS = {
    "nostall, tiers hold all": ("nostall", 1.1, 0),
    "nostall, tiers hold half": ("nostall", 0.5, 0),
    "nostall, no tiers": ("nostall", 0.0, 0),
    "torch, 4 workers": ("torch", 0.0, 4),
    "torch, 0 workers": ("torch", 0.0, 0),
}
_FOLDERS = 64
_MEASURES = ("au", "au_first", "au_later")


@dataclass(frozen=True)
class Allowed:
    """What the storage allows a job: utilisation over all epochs, in the first, in the later ones;
    and the least seconds from its start to its end."""

    au: float
    au_first: float
    au_later: float
    seconds: float


def allowed(
    profile: Profile, batches: int, epochs: int, rate: float, share: float, accelerators: int = 1
) -> Allowed:
    """Of a loader that hands out batches as soon as an always busy storage has given their bytes.

    Step k cannot begin before the storage has given all bytes of steps 0..k that no tier holds: every
    byte in the first epoch, those beyond the tiers' `share` later. Accelerators share `rate` (bytes
    per second). As MLPerf Storage measures utilisation, the first step's wait does not count in it, so
    that a loader that hands out its first batch late shows more in a short first epoch; `seconds`
    count that wait, and no loader beats them.
    """
    step = accelerators * profile.record * profile.batch / rate
    read = now = 0.0
    seconds = []
    for epoch in range(epochs):
        begin = now
        for k in range(batches):
            read += step * (1 if epoch == 0 else max(0.0, 1 - share))
            if epoch == k == 0:
                begin = read
            now = max(now, read) + profile.compute
        seconds.append(now - begin)
    busy = batches * profile.compute
    later = (epochs - 1) * busy / sum(seconds[1:]) if epochs > 1 else busy / seconds[0]
    return Allowed(epochs * busy / sum(seconds), busy / seconds[0], later, now)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall bench accelerator``."""
    parser.add_argument("--dir", default="nostall-bench", help="where the records go")
    parser.add_argument("--profile", choices=list(PROFILES), default="resnet50")
    parser.add_argument("--scale", type=float, default=1.0, help="of the records' size")
    parser.add_argument("--batches", type=int, default=10, help="a rank and epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--accelerators", type=int, nargs="+", default=[1])
    parser.add_argument("--loaders", nargs="+", help="names or parts of names; all if not given")
    parser.add_argument(
        "--storage", type=float, default=0.5, help="its bandwidth over one accelerator's need"
    )
    parser.add_argument(
        "--bandwidth", type=float, help="of the storage, MB/s, instead of --storage"
    )
    parser.add_argument("--latency-ms", type=float, default=1.0, help="per operation")
    add_keep_cache(parser)
    harness.add_repeats(parser, 3)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table."""
    console = harness.console()
    profile = PROFILES[arguments.profile]
    profile = Profile(
        max(1, round(profile.record * arguments.scale)), profile.batch, profile.compute, profile.goal
    )  # fmt: skip
    chosen = harness.matching(LOADERS, arguments.loaders)
    most = max(arguments.accelerators)
    data = make_records(
        Path(arguments.dir).absolute() / f"records-{profile.record}",
        profile.record,
        arguments.batches * profile.batch * most,
    )
    rate = arguments.bandwidth * 1e6 if arguments.bandwidth else arguments.storage * profile.need
    result: dict[str, Any] = {
        "profile": {"name": arguments.profile, "scale": arguments.scale, **vars(profile)},
        "storage_bytes_per_second": rate,
        "rows": [],
    }
    with (
        tempfile.TemporaryDirectory(prefix="nostall-accelerator-") as mount,
        SlowFS(
            data,
            Path(mount),
            rate,
            rate,
            arguments.latency_ms / 1e3,
            keep_cache=arguments.keep_cache,
        ) as storage,
    ):
        result["ceiling"] = storage.measure()[0]
        for count in arguments.accelerators:
            for name in harness.turns(chosen, arguments.repeats):
                measured = _job(name, count, profile, storage, rate, Path(mount), arguments)
                result["rows"].append({"loader": name, "accelerators": count, **measured})
                harness.write(arguments.json, **result)
            console.print(_table(result, count, arguments))
    console.print(_fed(result, profile.goal))
    return 0


def _record(i: int) -> str:
    """Where record i lies. A kernel looks names up one by one in a folder, but not in many."""
    return f"{i % _FOLDERS:02d}/{i:07d}.bin"


def make_records(home: Path, size: int, count: int) -> Path:
    """At least `count` files of `size` incompressible bytes, in folders; those there are kept."""
    for folder in range(_FOLDERS):
        (home / f"{folder:02d}").mkdir(parents=True, exist_ok=True)
    noise = os.urandom(min(size, 1 << 20))
    for i in range(count):
        path = home / _record(i)
        if path.exists() and path.stat().st_size == size:
            continue
        with path.open("wb") as file:
            left = size
            while left > 0:
                piece = noise[i % 4096 : i % 4096 + left] or noise[:left]
                file.write(piece)
                left -= len(piece)
    return home


def _job(
    name: str,
    count: int,
    profile: Profile,
    storage: SlowFS,
    rate: float,
    mount: Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One job of `count` accelerators on one node, caches cold."""
    storage.drop_caches()
    before = storage.served_bytes
    loader, share, workers = LOADERS[name]
    held = 1.0 if arguments.keep_cache else share  # in tiers, or in the page cache
    total = arguments.batches * profile.batch * count
    settings = {
        "loader": loader, "workers": workers, "record": profile.record, "files": total,
        "root": str(mount),
        "tier": int(share * total * profile.record), "batch": profile.batch,
        "compute": profile.compute, "epochs": arguments.epochs, "world": count,
        "job": f"accelerator-{os.getpid()}-{time.monotonic_ns()}",
    }  # fmt: skip
    reports = harness.children(
        "nostall_bench.accelerator",
        [{**settings, "rank": r} for r in range(count)],
        name=repr(name),
        timeout=1800,
        together=True,
        environments=[{"OMP_NUM_THREADS": "1"}] * count,
    )
    epochs = [
        {
            "au": statistics.fmean(
                r["epochs"][e]["busy"] / r["epochs"][e]["seconds"] for r in reports
            )
        }
        for e in range(arguments.epochs)
    ]
    later = [e for r in reports for e in r["epochs"][1:]] or [
        e for r in reports for e in r["epochs"]
    ]
    every = [e for r in reports for e in r["epochs"]]
    seconds = max(sum(e["seconds"] for e in r["epochs"]) for r in reports)
    return {
        "epochs": epochs,
        "au_first": epochs[0]["au"],
        "au_later": sum(e["busy"] for e in later) / sum(e["seconds"] for e in later),
        "au": sum(e["busy"] for e in every) / sum(e["seconds"] for e in every),
        "samples_per_s": sum(r["samples"] for r in reports) / seconds,
        "seconds": max(r["seconds"] for r in reports),
        "allowed": vars(allowed(profile, arguments.batches, arguments.epochs, rate, held, count)),
        "storage_bytes": storage.served_bytes - before,
        "data_bytes": total * profile.record,
    }


def _table(result: dict[str, Any], count: int, arguments: argparse.Namespace) -> Any:
    rate, ceiling = result["storage_bytes_per_second"], result["ceiling"]
    out = harness.table(
        f"{arguments.profile}, {count} accelerator{'s' if count > 1 else ''}: utilisation on storage "
        f"of {rate / 1e6:.0f} MB/s (measured {ceiling / 1e6:.0f}); of: what it allows",
        *("loader", "AU", "first epoch", "later epochs", "time / least", "read / data"),
        caption=f"nostall's tiers are memory; {memory_words(arguments.keep_cache)}",
    )
    for name in LOADERS:
        rows = [
            r for r in result["rows"] if r["loader"] == name and r["accelerators"] == count
        ]  # fmt: skip
        if rows:
            out.add_row(
                name,
                *(
                    harness.spread((r[k] for r in rows), "{:.1%}")
                    + f"\nof {rows[0]['allowed'][k]:.1%}"
                    for k in _MEASURES
                ),
                harness.spread(r["seconds"] / r["allowed"]["seconds"] for r in rows),
                harness.spread(r["storage_bytes"] / r["data_bytes"] for r in rows),
            )
    return out


def _fed(result: dict[str, Any], goal: float) -> str:
    """How many accelerators each loader keeps at the goal, in the epochs after the first."""
    lines = []
    for name in LOADERS:
        by_count: dict[int, list[float]] = {}
        for row in result["rows"]:
            if row["loader"] == name:
                by_count.setdefault(row["accelerators"], []).append(row["au_later"])
        fed = [n for n, au in by_count.items() if statistics.median(au) >= goal]
        if by_count:
            least = min(by_count)
            said = str(max(fed)) if fed else f"fewer than {least}"
            lines.append(f"{name}: {said} of {max(by_count)} tried")
    return f"accelerators fed at {goal:.0%} after the first epoch: " + "; ".join(lines)


def _batches(settings: dict[str, Any]) -> Iterator[Iterator[int]]:
    """Epochs of the rank's batches; each gives its number of records."""
    paths = [_record(i) for i in range(settings["files"])]
    if settings["loader"] == "nostall":
        import nostall
        from nostall.collective import Communicator

        tier = settings["tier"]
        with nostall.DataLoader(
            nostall.FileList(paths, root=settings["root"]),
            settings["batch"],
            epochs=settings["epochs"],
            tiers=[f"ram:{tier}"] if tier else [],
            staging=4 * settings["batch"] * settings["record"],
            rank=settings["rank"],
            world_size=settings["world"],
            local_rank=settings["rank"],
            local_world_size=settings["world"],
            job=settings["job"],
            output="numpy",
        ) as loader:
            for epoch in loader.epochs():
                yield (len(labels) for _, labels in epoch)
            # As in a training no rank leaves the tiers before all have come.
            with Communicator(settings["job"], settings["rank"], settings["world"]) as ranks:
                ranks.barrier()
        return
    from torch.utils.data import DataLoader, DistributedSampler

    sampler: Any = DistributedSampler(
        paths,
        num_replicas=settings["world"],
        rank=settings["rank"],
        seed=0,
    )
    files: Any = _Files(settings["root"], paths)
    workers = settings["workers"]
    loader_of_torch: Any = DataLoader(
        files,
        batch_size=settings["batch"],
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for number in range(settings["epochs"]):
        sampler.set_epoch(number)
        yield (len(batch) for batch in loader_of_torch)


class _Files:
    """A map-style dataset of whole files, uint8 of shape (bytes,)."""

    def __init__(self, root: str, paths: list[str]) -> None:
        self.root = root
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import torch

        data = Path(self.root, self.paths[index]).read_bytes()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """One accelerator: takes a batch, computes by waiting, takes the next one."""
    if settings["loader"] == "torch":
        import warnings

        import torch

        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
    harness.ready()
    start = time.perf_counter()
    report: dict[str, Any] = {"epochs": [], "samples": 0}
    for number, epoch in enumerate(_batches(settings)):
        began = time.perf_counter()
        busy = 0.0
        for step, size in enumerate(epoch):
            now = time.perf_counter()
            if number == 0 and step == 0:
                began = now  # the first step's wait is not counted
            time.sleep(settings["compute"])
            busy += time.perf_counter() - now
            report["samples"] += size
        report["epochs"].append({"busy": busy, "seconds": time.perf_counter() - began})
        report["seconds"] = time.perf_counter() - start
    return report


if __name__ == "__main__":
    harness.answer(_work)
