"""Plug-ins for DLIO that write down what is read: by DLIO's own readers, and by nostall's plug-ins.

A line for each sample, in a file of each process in the folder RECORD: file, number in it, digest of
its bytes; of `DataLoader` the digest alone, for its parser does not know the number.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from dlio_benchmark.reader.hdf5_reader import HDF5Reader
from dlio_benchmark.reader.image_reader import ImageReader
from dlio_benchmark.reader.indexed_binary_reader import IndexedBinaryReader
from dlio_benchmark.reader.npy_reader import NPYReader
from dlio_benchmark.reader.npz_reader import NPZReader

from nostall.plugins import dlio


def write(*words: Any) -> None:
    with open(Path(os.environ["RECORD"], str(os.getpid())), "a") as file:
        print(*words, file=file)


def digest(parsed: Any) -> str:
    values = parsed.values() if isinstance(parsed, dict) else [parsed]
    return hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values)).hexdigest()


class _Own:
    """Writes down what DLIO's reader has before it for each sample."""

    def get_sample(self, filename: str, sample_index: int) -> None:
        super().get_sample(filename, sample_index)  # type: ignore[misc]
        opened = self.open_file_map[filename]  # type: ignore[attr-defined]
        write(os.path.basename(filename), sample_index, digest(self.taken(opened, sample_index)))

    def taken(self, opened: Any, sample: int) -> Any:
        return opened[..., sample]


class Npz(_Own, NPZReader):
    pass


class Npy(_Own, NPYReader):
    pass


class Image(_Own, ImageReader):
    def taken(self, opened: Any, sample: int) -> Any:
        return opened


class Hdf5(_Own, HDF5Reader):
    def taken(self, opened: Any, sample: int) -> Any:
        return next(opened[name][sample] for name in opened if name.startswith("records"))


class IndexedBinary(_Own, IndexedBinaryReader):
    def taken(self, opened: Any, sample: int) -> Any:
        offset, size = (column[sample] for column in self.file_map[opened.name])
        opened.seek(offset)
        return np.frombuffer(opened.read(size), np.uint8)


class Reader(dlio.Reader):
    def get_sample(self, filename: str, sample_index: int) -> None:
        parse = self._parse
        self._parse = lambda data: write(
            os.path.basename(filename), sample_index, digest(parse(data))
        )
        super().get_sample(filename, sample_index)
        self._parse = parse


class DataLoader(dlio.DataLoader):
    def read(self) -> None:
        kind = str(self.format_type)
        one = dlio._FORMATS[kind]

        def parse(data: Any) -> Any:
            parsed = one.parse(data)
            write(digest(parsed))
            return parsed

        dlio._FORMATS[kind] = one._replace(parse=parse)
        super().read()
