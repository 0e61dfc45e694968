"""Deep-learning training that does not wait.

    loader = nostall.DataLoader(nostall.ImageFolder(path), batch_size=256, epochs=90, transforms=...)
    for epoch in loader.epochs():
        for images, labels in epoch:
            ...

Importing this package needs NumPy alone and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nostall import errors, fields
from nostall._version import __version__
from nostall.base._options import suggestion
from nostall.checkpoint import Checkpointer, CheckpointOptions, Keep
from nostall.fields import Schema
from nostall.loader import (
    Context,
    DataLoader,
    DynamicBatches,
    LoaderOptions,
    MixedLabels,
    RawBatch,
    transforms,
)
from nostall.observe import Stats, metrics, trace
from nostall.plan import Buckets, ClassBalanced, Plan, RepeatedAugmentation, SubBatches, Weighted
from nostall.source import (
    COCO,
    HDF5,
    LMDB,
    VOC,
    Arrays,
    ArrowIPC,
    Cached,
    Concat,
    FileList,
    Files,
    Filter,
    ImageFolder,
    Manifest,
    Mixture,
    ObjectFolder,
    Parquet,
    Pixels,
    ReadOptions,
    Source,
    Split,
    Subset,
    TarShards,
    TFRecord,
)

if TYPE_CHECKING:
    from nostall import torch as torch

__all__ = [
    "COCO",
    "HDF5",
    "LMDB",
    "VOC",
    "Arrays",
    "ArrowIPC",
    "Buckets",
    "Cached",
    "CheckpointOptions",
    "Checkpointer",
    "ClassBalanced",
    "Concat",
    "Context",
    "DataLoader",
    "DynamicBatches",
    "FileList",
    "Files",
    "Filter",
    "ImageFolder",
    "Keep",
    "LoaderOptions",
    "Manifest",
    "MixedLabels",
    "Mixture",
    "ObjectFolder",
    "Parquet",
    "Pixels",
    "Plan",
    "RawBatch",
    "ReadOptions",
    "RepeatedAugmentation",
    "Schema",
    "Source",
    "Split",
    "Stats",
    "SubBatches",
    "Subset",
    "TFRecord",
    "TarShards",
    "Weighted",
    "__version__",
    "errors",
    "fields",
    "metrics",
    "trace",
    "transforms",
]


def __getattr__(name: str) -> Any:
    """`nostall.torch` is read when it is first asked for: it needs torch."""
    if name == "torch":
        return importlib.import_module("nostall.torch")
    raise AttributeError(f"module 'nostall' has no attribute {name!r}{suggestion(name, __all__)}")
