"""One module per loader that ``nostall bench loader`` compares, all doing the same work.

A module offers ``REQUIRES`` (import names; in ``IMPORTS`` those that it uses where they are installed),
``epochs(job)``, an iterator over epochs, each of which
is an iterator over the number of samples per batch, and, where a loader needs a format of its own,
``prepare(data, work)``, which converts the class folders once and returns where the result lies. With
`Job.remote` the loader reads what lies there from an object store instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from nostall_bench.records import FIELDS

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIDE = 224
# Of MixUp in the recipe.
ALPHA, CLASSES = 0.2, 1000


@dataclass(frozen=True)
class Job:
    """The work; `mode` is "read" (raw bytes), "transform" (float32, 3 x 224 x 224), "recipe" (the
    same, with the augmentation of ResNet's recipe A1), "cached" (uint8, 3 x 224 x 224: a data set in
    Python without random parts) or one of `FIELDS`, whose files lie in `prepared`."""

    data: Path
    prepared: Path
    mode: str
    epochs: int
    batch_size: int = 64
    seed: int = 0
    threads: int = 2
    tiers: tuple[str, ...] = ()
    variant: str = ""
    remote: str = ""  # s3://bucket, with what lies in `prepared` or `data`
    cache: str = ""  # an empty folder for what a loader keeps of it


class Loader(NamedTuple):
    """The module of a loader, the variant that `Job` gets, and the modes that it has."""

    module: str
    variant: str
    modes: tuple[str, ...]


_IMAGES = ("read", "transform", "cold")
_PICTURES = tuple(mode for mode in FIELDS if mode.startswith("image"))
_OTHERS = tuple(mode for mode in FIELDS if not mode.startswith("image"))

# Of `nostall bench objects`, not of `nostall bench loader`.
OBJECTS = "objects"

# By the name in the tables. "workers": as many processes as `Job.threads`.
LOADERS = {
    "nostall": Loader("nostall_loader", "", (*_IMAGES, "cached", "recipe", *FIELDS)),
    "nostall, tar shards": Loader("nostall_loader", "tar", tuple(FIELDS)),
    "nostall, an object a sample": Loader("nostall_loader", "objects", (OBJECTS,)),
    "nostall, tar objects": Loader("nostall_loader", "tar objects", (OBJECTS,)),
    "fsspec, workers": Loader("fsspec_loader", "", (OBJECTS,)),
    "fsspec, 16 workers": Loader("fsspec_loader", "16", (OBJECTS,)),
    "torch, 0 workers, PIL": Loader("torch_loader", "0 pil", (*_IMAGES, "cached")),
    "torch, workers, PIL": Loader(
        "torch_loader", "all pil", (*_IMAGES, "cached", "recipe", *_PICTURES)
    ),
    "torch, 0 workers, decode_jpeg": Loader("torch_loader", "0 tv", (*_IMAGES, "cached")),
    "torch, workers, decode_jpeg": Loader(
        "torch_loader", "all tv", (*_IMAGES, "cached", "recipe", *_PICTURES)
    ),
    "torch, workers, NumPy": Loader("torch_loader", "all tv", _OTHERS),
    "DALI, CPU": Loader("dali", "", (*_IMAGES, "recipe", *FIELDS)),
    "Grain": Loader("grain_loader", "", _IMAGES),
    "WebDataset, workers": Loader("webdataset_loader", "", ("read", "transform", *FIELDS, OBJECTS)),
    "MosaicML Streaming, workers": Loader("streaming_loader", "", ("read", "transform", OBJECTS)),
    "litdata, workers": Loader("litdata_loader", "", ("read", "transform", OBJECTS)),
    "FFCV": Loader("ffcv_loader", "", ("transform",)),
    "SPDL, threads": Loader("spdl_loader", "", _IMAGES),
    "TensorSocket, workers": Loader("tensorsocket_loader", "", ("transform", "cold")),
}


def module(name: str) -> ModuleType:
    """The module of the loader called `name` in `LOADERS`."""
    return importlib.import_module(f"nostall_bench.peers.{LOADERS[name].module}")


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
