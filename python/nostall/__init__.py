"""Deep-learning training that does not wait.

    loader = nostall.DataLoader(nostall.ImageFolder(path), batch_size=256, epochs=90, transforms=...)
    for epoch in loader.epochs():
        for images, labels in epoch:
            ...

Importing this package needs NumPy alone and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nostall._version import __version__

if TYPE_CHECKING:
    from nostall import errors, fields
    from nostall import torch as torch
    from nostall.checkpoint import Checkpointer, CheckpointOptions, Keep
    from nostall.fields import Schema
    from nostall.loader import (
        Context,
        DataLoader,
        DynamicBatches,
        LoaderOptions,
        MixedLabels,
        RawBatch,
        SampleTransform,
        Tier,
        Tiers,
        testing,
        transforms,
    )
    from nostall.observe import Stats, metrics, trace
    from nostall.plan import (
        Buckets,
        ClassBalanced,
        Plan,
        RepeatedAugmentation,
        SubBatches,
        Weighted,
    )
    from nostall.source import (
        COCO,
        HDF5,
        LMDB,
        VOC,
        Arrays,
        ArrowIPC,
        Cached,
        Clips,
        Concat,
        CustomFields,
        CustomSource,
        Documents,
        FieldReader,
        FileList,
        Files,
        Filter,
        ImageFolder,
        ImageNet,
        Interleaved,
        Manifest,
        Mixture,
        ObjectFolder,
        Packed,
        Parquet,
        Pixels,
        ReadOptions,
        SampleReader,
        Source,
        Split,
        Subset,
        TarShards,
        TFRecord,
        Tokens,
        Units,
        Windows,
        tokenize,
    )

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
    "Clips",
    "Concat",
    "Context",
    "CustomFields",
    "CustomSource",
    "DataLoader",
    "Documents",
    "DynamicBatches",
    "FieldReader",
    "FileList",
    "Files",
    "Filter",
    "ImageFolder",
    "ImageNet",
    "Interleaved",
    "Keep",
    "LoaderOptions",
    "Manifest",
    "MixedLabels",
    "Mixture",
    "ObjectFolder",
    "Packed",
    "Parquet",
    "Pixels",
    "Plan",
    "RawBatch",
    "ReadOptions",
    "RepeatedAugmentation",
    "SampleReader",
    "SampleTransform",
    "Schema",
    "Source",
    "Split",
    "Stats",
    "SubBatches",
    "Subset",
    "TFRecord",
    "TarShards",
    "Tier",
    "Tiers",
    "Tokens",
    "Units",
    "Weighted",
    "Windows",
    "__version__",
    "errors",
    "fields",
    "metrics",
    "testing",
    "tokenize",
    "trace",
    "transforms",
]


# Each name is read from its room when it is first asked for, as a program needs but some of them.
_NAMES = {
    "checkpoint": "Checkpointer CheckpointOptions Keep",
    "fields": "Schema",
    "loader": "Context DataLoader DynamicBatches LoaderOptions MixedLabels RawBatch SampleTransform "
    "Tier Tiers testing transforms",
    "observe": "Stats metrics trace",
    "plan": "Buckets ClassBalanced Plan RepeatedAugmentation SubBatches Weighted",
    "source": "COCO HDF5 LMDB VOC Arrays ArrowIPC Cached Clips Concat CustomFields CustomSource "
    "Documents FieldReader FileList Files Filter ImageFolder ImageNet Interleaved Manifest Mixture "
    "ObjectFolder Packed Parquet Pixels ReadOptions SampleReader Source Split Subset TarShards "
    "TFRecord Tokens Units Windows tokenize",
}
_ROOM = {name: room for room, names in _NAMES.items() for name in names.split()}
_ROOMS = {*_NAMES, "collective", "convert", "errors", "job", "simulate", "sync", "torch"}


def __getattr__(name: str) -> Any:
    """What is not read yet; `nostall.torch` needs torch."""
    if name in _ROOMS:
        return importlib.import_module(f"nostall.{name}")
    if name in _ROOM:
        value = getattr(importlib.import_module(f"nostall.{_ROOM[name]}"), name)
        globals()[name] = value
        return value
    from nostall.base._options import suggestion

    raise AttributeError(f"module 'nostall' has no attribute {name!r}{suggestion(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
