"""Deep-learning training that does not wait.

    loader = nostall.DataLoader(nostall.ImageFolder(path), batch_size=256, epochs=90, transforms=...)
    for epoch in loader.epochs():
        for images, labels in epoch:
            ...

Importing this package needs NumPy alone and starts nothing.
"""

from typing import TYPE_CHECKING

from nostall._version import __version__
from nostall.base._lazy import lazy

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


if not TYPE_CHECKING:
    # `nostall.torch` needs torch.
    __getattr__, __dir__ = lazy(
        __name__,
        {
            ".": "checkpoint collective convert errors fields job loader observe plan simulate source "
            "sync torch",
            ".checkpoint": "Checkpointer CheckpointOptions Keep",
            ".fields": "Schema",
            ".loader": "Context DataLoader DynamicBatches LoaderOptions MixedLabels RawBatch "
            "SampleTransform Tier Tiers testing transforms",
            ".observe": "Stats metrics trace",
            ".plan": "Buckets ClassBalanced Plan RepeatedAugmentation SubBatches Weighted",
            ".source": "COCO HDF5 LMDB VOC Arrays ArrowIPC Cached Clips Concat CustomFields "
            "CustomSource Documents FieldReader FileList Files Filter ImageFolder ImageNet "
            "Interleaved Manifest Mixture ObjectFolder Packed Parquet Pixels ReadOptions SampleReader "
            "Source Split Subset TarShards TFRecord Tokens Units Windows tokenize",
        },
    )
