"""Record stores: samples that are parts of a few large files or objects.

    LMDB, TarShards, TFRecord          places of samples found by a pass over the files, and kept
    HDF5, Parquet, ArrowIPC            through h5py and pyarrow
    ObjectFolder                       one object a sample

Every path may also be a URL of an object store (``s3://bucket/key``; see `objects`).
"""

from nostall.stores.arrow import ArrowIPC, Parquet
from nostall.stores.hdf5 import HDF5
from nostall.stores.lmdb import LMDB
from nostall.stores.object_folder import ObjectFolder
from nostall.stores.tar import TarShards
from nostall.stores.tfrecord import TFRecord

__all__ = ["HDF5", "LMDB", "ArrowIPC", "ObjectFolder", "Parquet", "TFRecord", "TarShards"]
