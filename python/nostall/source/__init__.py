"""Where samples come from: a folder, a list, or parts of a few large files or objects.

    ImageFolder, FileList              one file per sample
    ImageNet                           the same, with the labels and classes of its devkit
    Files                              several files per sample, and columns
    Manifest, COCO, VOC                the same, described by a table or by annotations
    LMDB, TarShards, TFRecord          places of samples found by one scan of the files, and stored
    HDF5, Parquet, ArrowIPC            through h5py and pyarrow
    Arrays                             rows of arrays of NumPy
    ObjectFolder                       one object per sample
    Tokens, tokenize                   files of token ids, or of texts; no source itself:
    Windows, Documents, Packed, Units  what a training takes of them
    Interleaved                        the same with images
    Clips                              the same of recordings
    Cached                             items of a data set in Python, made once
    CustomSource, CustomFields         samples that a class of the user's reads
    Subset, Filter, Split, Concat      views: samples of other sources, without copies
    Mixture                            the same, in an order by weights

Paths of LMDB, TarShards, TFRecord, HDF5, Parquet, ArrowIPC, Tokens and tokenize may be URLs of an
object store (``s3://bucket/key``).
"""

from typing import TYPE_CHECKING

from nostall.base._lazy import lazy

if TYPE_CHECKING:
    from nostall.source._arrow import ArrowIPC, Parquet
    from nostall.source._cached import Cached
    from nostall.source._custom import CustomFields, CustomSource, FieldReader, SampleReader
    from nostall.source._files import Files
    from nostall.source._hdf5 import HDF5
    from nostall.source._imagenet import ImageNet
    from nostall.source._lmdb import LMDB
    from nostall.source._manifests import COCO, VOC, Manifest
    from nostall.source._mixture import Mixture
    from nostall.source._numpy import Arrays
    from nostall.source._object_folder import ObjectFolder
    from nostall.source._records import ReadOptions
    from nostall.source._source import FileList, ImageFolder, Pixels, Source
    from nostall.source._tar import TarShards
    from nostall.source._tfrecord import TFRecord
    from nostall.source._tokenize import tokenize
    from nostall.source._tokens import Tokens
    from nostall.source._units import Clips, Documents, Interleaved, Packed, Units, Windows
    from nostall.source._views import Concat, Filter, Split, Subset, View

__all__ = [
    "COCO",
    "HDF5",
    "LMDB",
    "VOC",
    "Arrays",
    "ArrowIPC",
    "Cached",
    "Clips",
    "Concat",
    "CustomFields",
    "CustomSource",
    "Documents",
    "FieldReader",
    "FileList",
    "Files",
    "Filter",
    "ImageFolder",
    "ImageNet",
    "Interleaved",
    "Manifest",
    "Mixture",
    "ObjectFolder",
    "Packed",
    "Parquet",
    "Pixels",
    "ReadOptions",
    "SampleReader",
    "Source",
    "Split",
    "Subset",
    "TFRecord",
    "TarShards",
    "Tokens",
    "Units",
    "View",
    "Windows",
    "tokenize",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "._arrow": "ArrowIPC Parquet",
            "._cached": "Cached",
            "._custom": "CustomFields CustomSource FieldReader SampleReader",
            "._files": "Files",
            "._hdf5": "HDF5",
            "._imagenet": "ImageNet",
            "._lmdb": "LMDB",
            "._manifests": "COCO VOC Manifest",
            "._mixture": "Mixture",
            "._numpy": "Arrays",
            "._object_folder": "ObjectFolder",
            "._records": "ReadOptions",
            "._source": "FileList ImageFolder Pixels Source",
            "._tar": "TarShards",
            "._tfrecord": "TFRecord",
            "._tokenize": "tokenize",
            "._tokens": "Tokens",
            "._units": "Clips Documents Interleaved Packed Units Windows",
            "._views": "Concat Filter Split Subset View",
        },
    )
