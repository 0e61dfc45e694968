"""Writes a data set of many small files as few large ones: an LMDB database, or tar shards.

    to_lmdb(ImageFolder(path), "train.lmdb")     # then nostall.LMDB("train.lmdb")
    to_tar(ImageFolder(path), "shards")          # then nostall.TarShards("shards")

Both write beside the destination, read everything back, compare checksums, and only then give the
result its name. A conversion that was killed continues where its last complete part ended.
"""

from nostall.convert._database import to_lmdb
from nostall.convert._shards import to_tar
from nostall.convert._work import Converted

__all__ = ["Converted", "to_lmdb", "to_tar"]
