"""Flips single bytes wherever samples lie, and leaves kept tiers of other versions of a data set.

A case is one byte, drawn with its place from the seed and flipped while a job runs or between two
jobs: in a file of the source (and so in the page cache), in the RAM tier, in a file tier (headers of
records too), in a kept tier between the jobs that use it, or in a sample on its way between nodes. It
is found if the batches that follow have the bits of an undisturbed job, or if the sample is named as
unusable. A stale case is a job over
a kept tier and an index that an earlier version of the data set left, with the same names, sizes and
times: it is found if all batches are of the new version.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import nostall
from campaigns import flips_wire
from campaigns.outcome import Outcome, Task
from nostall.errors import Error
from nostall.job import _cluster as cluster

FULL = "10,000 flipped bytes where samples lie, 200 between nodes, 100 stale kept tiers"
SMALL = 0.1

SAMPLES, BATCH = 256, 16
PLACES = ("source", "ram", "file", "kept")
LEAST, MOST = 64, 1500
# Samples of the least size, which stay as they are in the source: one of them stands in for a bad one.
SOUND = 32


def contents(random: np.random.Generator) -> list[bytes]:
    sizes = random.integers(LEAST, MOST, SAMPLES)
    sizes[:SOUND] = LEAST
    return [random.bytes(int(n)) for n in sizes]


def write(path: Path, samples: list[bytes]) -> None:
    """A shard whose members lie at the same places for the same sizes."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, content in enumerate(samples):
            member = tarfile.TarInfo(f"{i:04}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_files(root: Path, samples: list[bytes]) -> None:
    (root / "class").mkdir(parents=True)
    for i, content in enumerate(samples):
        (root / "class" / f"{i:04}.jpg").write_bytes(content)


@contextmanager
def loader(source: nostall.Source, tiers: list[str], epochs: int) -> Iterator[nostall.DataLoader]:
    with nostall.DataLoader(
        source,
        BATCH,
        epochs=epochs,
        tiers=tiers,
        on_error="substitute",
        staging=1,
        output="numpy",
        seed=1,
    ) as made:
        yield made


class Round:
    """One data set and its jobs."""

    def __init__(self, place: str, folder: Path, random: np.random.Generator) -> None:
        self.place, self.random = place, random
        self.samples = contents(random)
        # A shard that is written to while it is read ends a job, flipped or not: files of their own.
        self.path = folder / ("files" if place == "source" else "a.tar")
        (write_files if place == "source" else write)(self.path, self.samples)
        self.tiers = {
            "source": [],
            "ram": ["ram:4MiB"],
            "file": [f"{folder / 'tier'}:4MiB"],
            "kept": [f"{folder / 'tier'}:4MiB:keep"],
        }[place]
        self.folder = folder
        self.named = 0
        self.read_anew = 0
        self.failures: list[str] = []

    def epoch(self, jobs: nostall.DataLoader, epoch: int) -> None:
        jobs.set_epoch(epoch)
        order = [int(s) for s in jobs.plan.epoch_order(epoch)]
        at = 0
        got = []
        for batch, _ in jobs:
            got += [(order[at + i], bytes(sample)) for i, sample in enumerate(batch)]
            at += len(batch)
        bad = set(jobs.stats().epochs[-1].substituted)
        self.named += len(bad)
        self.read_anew += jobs.stats().epochs[-1].origins["source"].samples
        for sample, data in got:
            if sample not in bad and data != self.samples[sample]:
                self.failures.append(f"{self.place}: sample {sample} was served with other bytes")

    def open(self) -> nostall.Source:
        if self.place == "source":
            return nostall.ImageFolder(self.path)
        return nostall.TarShards(self.path, label=None)

    def flip(self, count: int) -> int:
        """Flips a byte in so many samples, where they lie now; how many were there."""
        if self.place == "source":
            for sample in SOUND + self.random.permutation(SAMPLES - SOUND)[:count]:
                with (self.path / "class" / f"{sample:04}.jpg").open("r+b") as file:
                    self.flip_in(file, int(self.random.integers(len(self.samples[sample]))))
            return min(count, SAMPLES - SOUND)
        flipped = 0
        with open(self.memory(), "r+b") as file:
            held = file.read()
            for sample in self.random.permutation(SAMPLES)[:count]:
                begin = held.find(self.samples[sample])
                if begin < 0:
                    continue
                # Headers of records lie in front: magic, length, sample, checksum, zero.
                head = 0 if self.place == "ram" else 24
                size = head + len(self.samples[sample])
                self.flip_in(file, begin - head + int(self.random.integers(size)))
                flipped += 1
        return flipped

    def flip_in(self, file: io.BufferedRandom, at: int) -> None:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << int(self.random.integers(8)))]), at)

    def memory(self) -> str:
        """The file that samples lie in: what this process has open of the tiers, or the kept one."""
        if self.place == "kept":
            return str(next(self.folder.rglob("*.tier")))
        # They have no names, but say where they were made.
        where = "/dev/shm/" if self.place == "ram" else str(self.folder / "tier")
        return next(
            f"/proc/self/fd/{fd}"
            for fd in os.listdir("/proc/self/fd")
            if link(fd).startswith(where) and os.path.isfile(f"/proc/self/fd/{fd}")
        )

    def run(self, count: int) -> int:
        if self.place == "kept":
            with loader(self.open(), self.tiers, 1) as jobs:
                self.epoch(jobs, 0)
            before = self.read_anew
            flipped = self.flip(count)
            with loader(self.open(), self.tiers, 1) as jobs:
                self.epoch(jobs, 0)
            self.read_anew -= before
            return flipped
        with loader(self.open(), self.tiers, 3) as jobs:
            self.epoch(jobs, 0)
            before = self.read_anew
            flipped = self.flip(count)
            # What was staged before the flip is of epoch 1 at most.
            self.epoch(jobs, 1)
            self.epoch(jobs, 2)
            self.read_anew -= before
        return flipped


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def stale(folder: Path, random: np.random.Generator) -> str:
    """One job on a new version with what an older one left; what went wrong."""
    old = contents(random)
    path = folder / "a.tar"
    write(path, old)
    tiers = [f"{folder / 'tier'}:4MiB:keep"]
    with loader(nostall.TarShards(path, label=None), tiers, 1) as jobs:
        list(jobs)
    time = path.stat().st_mtime_ns
    new = [random.bytes(len(content)) for content in old]
    write(path, new)
    os.utime(path, ns=(time, time))
    source = nostall.TarShards(path, label=None)
    with nostall.DataLoader(source, BATCH, tiers=tiers, shuffle=False, output="numpy") as jobs:
        got = [bytes(sample) for batch, _ in jobs for sample in batch]
    wrong = sum(a != b for a, b in zip(got, new, strict=True))
    return f"{wrong} of {SAMPLES} samples of a stale kept tier were served" if wrong else ""


def run(task: Task) -> Outcome:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        return Outcome(missing=f"a C compiler ({compiler})")
    try:
        cluster.transport()
    except Error as error:
        return Outcome(missing=f"UCX ({error})")
    logging.getLogger("nostall").setLevel(logging.ERROR)
    outcome = Outcome()
    total, stales = task.count(10_000), task.count(100)
    counts = dict.fromkeys(PLACES, 0)
    named = anew = number = found = 0
    root = Path(tempfile.mkdtemp(prefix="nostall-flips-"))
    try:
        while sum(counts.values()) < total:
            place = PLACES[number % len(PLACES)]
            folder = root / str(number)
            folder.mkdir()
            at = Round(place, folder, np.random.default_rng([task.seed, number]))
            counts[place] += at.run(min(SAMPLES // 2, total - sum(counts.values())))
            outcome.failures += [f"seed {task.seed}, round {number}, {f}" for f in at.failures]
            named += at.named
            anew += at.read_anew if place != "source" else 0
            shutil.rmtree(folder)
            number += 1
        for case in range(stales):
            folder = root / f"stale {case}"
            folder.mkdir()
            why = stale(folder, np.random.default_rng([task.seed, case, 1]))
            found += not why
            if why:
                outcome.failures.append(f"seed {task.seed}, stale case {case}: {why}")
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    flips, noticed, wrong = flips_wire.run(task.count(200), task.seed, compiler)
    outcome.failures += [f"seed {task.seed}, {problem}" for problem in wrong]
    outcome.cases = total + flips + stales
    outcome.figures = {
        **{f"flips in {place}": count for place, count in counts.items()},
        "flips between nodes": flips,
        "of these named": noticed,
        "samples named": named,
        "samples of tiers read anew": anew,
        "stale tiers found": found,
    }
    return outcome
