"""One module per loader that ``nostall bench loader`` compares, all doing the same work.

A module offers ``REQUIRES`` (import names), ``epochs(job)``, an iterator over epochs, each of which
is an iterator over the number of samples per batch, and, where a loader needs a format of its own,
``prepare(data, work)``, which converts the class folders once and returns where the result lies.
The mode "cached" is for those with ``DATASETS``, which take any map-style data set.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIDE = 224


@dataclass(frozen=True)
class Job:
    """The work; `mode` is "read" (raw bytes), "transform" (float32, 3 x 224 x 224) or "cached"
    (uint8, 3 x 224 x 224: a data set in Python without random parts)."""

    data: Path
    prepared: Path
    mode: str
    epochs: int
    batch_size: int = 64
    seed: int = 0
    threads: int = 2
    tiers: tuple[str, ...] = ()
    variant: str = ""


# Name in the tables -> (module, variant).
LOADERS: dict[str, tuple[str, str]] = {
    "nostall": ("nostall_loader", ""),
    "torch, 0 workers, PIL": ("torch_loader", "0 pil"),
    "torch, 2 workers, PIL": ("torch_loader", "2 pil"),
    "torch, 0 workers, decode_jpeg": ("torch_loader", "0 tv"),
    "torch, 2 workers, decode_jpeg": ("torch_loader", "2 tv"),
    "DALI, CPU": ("dali", ""),
    "Grain": ("grain_loader", ""),
    "WebDataset, 2 workers": ("webdataset_loader", "2"),
    "MosaicML Streaming, 2 workers": ("streaming_loader", "2"),
}


def module(name: str) -> ModuleType:
    """The module of the loader called `name` in `LOADERS`."""
    return importlib.import_module(f"nostall_bench.peers.{LOADERS[name][0]}")


def absent(name: str) -> list[str]:
    """The packages that the loader called `name` needs and this environment lacks."""
    missing = []
    for package in module(name).REQUIRES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            missing.append(package)
    return missing


def listing(data: Path) -> list[tuple[str, int]]:
    """(path, label) of every image, in the order of class and file names."""
    classes = sorted(p for p in data.iterdir() if p.is_dir())
    return [(str(f), i) for i, c in enumerate(classes) for f in sorted(c.iterdir())]


def sized(batches: Iterator[int], expected: int) -> Iterator[int]:
    """Passes batch sizes on and checks at the end that no sample was lost or repeated."""
    seen = 0
    for size in batches:
        seen += size
        yield size
    if seen != expected:
        raise RuntimeError(f"the loader gave {seen} samples of {expected}")
