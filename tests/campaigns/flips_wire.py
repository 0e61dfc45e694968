"""Nodes that exchange samples over TCP while bits of these are flipped on their way.

Ranks of one machine stand for nodes; a library that is preloaded (flips_wire.c) flips bits of samples
that they send. Each rank compares every sample that it is given with what the source has. A flip that
is found costs its link, which is taken up again after a second or more, so that few can be made in a
second. Arguments: the seed, and a folder for what the ranks say.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import nostall
from campaigns.forked import fork

HERE = Path(__file__).parent
MARK = b"nostall on wire:"
NODES, SAMPLES, BATCH, MOST = 4, 256, 8, 1500
SECONDS = 0.002  # of a read from the source: an exchange between nodes is faster
LIMIT = 240.0
AFTER = 2  # epochs after the last flip, which give what was pushed before


def contents(seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    sizes = random.integers(len(MARK) + 4, MOST, SAMPLES)
    return [
        MARK + int(size).to_bytes(4, "little") + random.bytes(int(size) - len(MARK) - 4)
        for size in sizes
    ]


class Slow(nostall.SampleReader):
    def __init__(self, samples: list[bytes]) -> None:
        self.samples = samples

    def read(self, samples: list[int]) -> list[bytes]:
        time.sleep(SECONDS * len(samples))
        return [self.samples[sample] for sample in samples]

    def describe(self, sample: int) -> str:
        return f"sample {sample}"


def flips_in(shared: Path) -> tuple[int, int]:
    """How many are wanted and how many were made."""
    wanted, made = np.fromfile(shared, np.int64)
    return int(wanted), int(made)


def rank(number: int, seed: int, folder: Path) -> None:
    os.environ["NOSTALL_NODE"] = f"node {number}"
    truth = contents(seed)
    source = nostall.CustomSource(
        Slow(truth), np.array([len(sample) for sample in truth]), range(SAMPLES), identity="wire"
    )
    wrong: list[str] = []
    deadline = time.monotonic() + LIMIT
    with nostall.DataLoader(
        source,
        BATCH,
        seed=seed,
        tiers=[f"ram:{source.total_bytes}"],
        rank=number,
        world_size=NODES,
        local_rank=0,
        local_world_size=1,
        job=f"{folder} {number}",
        peers="on",
        output="numpy",
        threads=1,
        staging=1,
    ) as loader:
        epoch, left = 0, AFTER
        while left and time.monotonic() < deadline:
            wanted, made = flips_in(folder / "shared")
            left -= made >= wanted
            for batch, labels in loader:
                for sample, label in zip(batch, labels, strict=True):
                    if bytes(sample) != truth[int(label)]:
                        wrong.append(f"wire: sample {label} was given with other bytes in {epoch=}")
            epoch += 1
    (folder / f"{number}.json").write_text(json.dumps(wrong))


def nodes(seed: int, folder: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    children = [fork(lambda number=number: rank(number, seed, folder)) for number in range(NODES)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f"ranks ended with {statuses}")


def run(flips: int, seed: int, compiler: str) -> tuple[int, int, list[str]]:
    """Flips that were made, how often one was named, and what went wrong.

    A sample that is named costs its link, and with it other flips that are on their way there.
    """
    with tempfile.TemporaryDirectory(prefix="nostall-wire-") as name:
        folder = Path(name)
        library = folder / "flips_wire.so"
        words = [compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "flips_wire.c", "-ldl"]
        subprocess.run(words, check=True)
        np.array([flips, 0]).tofile(folder / "shared")
        done = subprocess.run(
            [sys.executable, "-m", "campaigns.flips_wire", str(seed), str(folder)],
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "WIRE_SHARED": str(folder / "shared"),
                "NOSTALL_RENDEZVOUS": str(folder / "meet"),
                "NOSTALL_UCX_TLS": "tcp",
            },
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            return 0, 0, [f"wire: the ranks did not end: {done.stderr[-1000:]}"]
        said = [json.loads((folder / f"{number}.json").read_text()) for number in range(NODES)]
        _, made = flips_in(folder / "shared")
    wrong = [problem for one in said for problem in one]
    if made < flips:
        wrong.append(f"wire: {made} of {flips} flips were made in {LIMIT:g} s")
    found = done.stderr.count("do not match their CRC32C")
    if not found:
        wrong.append("wire: no flip was found")
    return made, found, wrong


if __name__ == "__main__":
    nodes(int(sys.argv[1]), Path(sys.argv[2]))
