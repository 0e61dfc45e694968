"""Plug-ins for DLIO: its workloads, unmodified, on this project's loader, reader and checkpoints.

    dlio_benchmark workload=unet3d_h100 \\
        ++workload.reader.data_loader_classname=nostall.plugins.dlio.DataLoader \\
        ++workload.reader.data_loader_sampler=index \\
        ++workload.checkpoint.checkpoint_mechanism_classname=nostall.plugins.dlio.Checkpointing

`DataLoader` computes the order from the random seed ahead of time, so its results belong to the OPEN
division of MLPerf Storage. `Reader` (``reader.reader_classname=nostall.plugins.dlio.Reader``) only
reads a sample when one of DLIO's own loaders asks for it. ``NOSTALL_DLIO_TIERS`` holds the tiers
("auto", or "ram:20GiB,/nvme/cache:400GiB"; by default those of nostall.toml, else "auto"),
``NOSTALL_DLIO_CHECKPOINT`` what a checkpoint waits for ("memory" or "durable", the default).

Formats: npz, npy, jpeg and png with one sample per file; tfrecord, hdf5, parquet, indexed_binary and
mmap_indexed_binary with any number. The columns of Parquet are those that DLIO's own reader takes:
``storage_options.columns``, else all. Importing this module needs dlio-benchmark 2.0 or later.
"""

from __future__ import annotations

import io
import math
import os
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

import nostall
from nostall.base import _options as options
from nostall.errors import UsageError

try:
    from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
    from dlio_benchmark.common.enumerations import CheckpointLocationType, DatasetType, Shuffle
    from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
    from dlio_benchmark.reader.reader_handler import FormatReader
    from dlio_benchmark.utils.utility import DLIOMPI
except ImportError as error:
    raise ImportError(
        f"nostall.plugins.dlio holds plug-ins of DLIO: install dlio-benchmark ({error})"
    ) from error

__all__ = ["Checkpointing", "DataLoader", "Reader"]

# The number of steps per epoch for which a checkpoint's number has room.
_STEPS = 1_000_000


# NumPy has `ast` take a header apart, which in Python 3.11 fails at times where threads do it at once
# ("AST constructor recursion depth mismatch").
_HEADERS = threading.Lock()
_SCRATCH = threading.local()
# Bytes of a member of an archive that are copied at a time.
_PIECE = 1 << 18
# Of a member of an archive, before its name and what is extra, whose lengths are last.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class _File(io.RawIOBase):
    """Bytes in memory as a file, which BytesIO would copy."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = memoryview(data), 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _npz(data: Any) -> Any:
    with zipfile.ZipFile(_File(data)) as archive:
        info = archive.getinfo("x.npy")
        if info.compress_type == zipfile.ZIP_STORED:
            return _npy(_stored(data, info))
        return _unpacked(archive)


def _stored(data: Any, info: zipfile.ZipInfo) -> Any:
    """The bytes of a member where they lie: nothing is copied, and the GIL is not held."""
    head = memoryview(data)[info.header_offset :][: _LOCAL_HEADER.size]
    *_, name, extra = _LOCAL_HEADER.unpack(head)
    begin = info.header_offset + _LOCAL_HEADER.size + name + extra
    member = memoryview(data)[begin : begin + info.file_size]
    if len(member) != info.file_size or zlib.crc32(member) != info.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {info.filename!r}")
    return member


def _unpacked(archive: zipfile.ZipFile) -> Any:
    with archive.open("x.npy") as file:
        shape, order, dtype = _header(file)
        values = _scratch(math.prod(shape) * dtype.itemsize)
        into, at = values.data, 0
        while piece := file.read(_PIECE):
            into[at : at + len(piece)] = piece
            at += len(piece)
        if at != len(into):
            raise ValueError(f"x.npy has {at} bytes of values, its header says {len(into)}")
    return values.view(dtype).reshape(shape, order=order)


def _scratch(size: int) -> Any:
    """Memory of this thread for one sample: DLIO hands out an array of its own, and no other sample is
    parsed meanwhile. What malloc gave and got back for each would not all return to the system."""
    memory = getattr(_SCRATCH, "memory", None)
    if memory is None or memory.size < size:
        memory = _SCRATCH.memory = np.empty(size, np.uint8)
    return memory[:size]


def _npy(data: Any) -> Any:
    file = _File(data)
    shape, order, dtype = _header(file)
    count = math.prod(shape)
    return np.frombuffer(data, dtype, count, offset=file.tell()).reshape(shape, order=order)


def _header(file: Any) -> tuple[tuple[int, ...], Literal["C", "F"], Any]:
    version = npy_format.read_magic(file)
    first = version == (1, 0)
    read = npy_format.read_array_header_1_0 if first else npy_format.read_array_header_2_0
    with _HEADERS:
        shape, fortran, dtype = read(file)
    return shape, "F" if fortran else "C", dtype


def _image(data: Any) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def _numbers(data: Any) -> Any:
    """A mapping of fields is parsed already."""
    return data if isinstance(data, Mapping) else np.frombuffer(data, np.uint8)


def _whole_files(files: list[str], given: Any) -> nostall.source.Source:
    return nostall.FileList(files, root="/")


def _tfrecord(files: list[str], given: Any) -> nostall.source.Source:
    return nostall.TFRecord(files, values="raw", index=False)


def _hdf5(files: list[str], given: Any) -> nostall.source.Source:
    """DLIO 2.0.0 names one dataset "records", later ones number theirs."""
    datasets = getattr(given, "num_dset_per_record", None)
    names = ["records"] if datasets is None else [f"records_{i}" for i in range(datasets)]
    if len(names) > 1:
        return nostall.source.Concat([nostall.HDF5(file, columns=names) for file in files])
    sources = [nostall.HDF5(file, names[0]) for file in files]
    for source in sources:  # of bytes, whose shapes may differ from file to file
        source.pixels, source.pixel_shape = None, ()
    return nostall.source.Concat(sources)


def _parquet(files: list[str], given: Any) -> nostall.source.Source:
    """The columns that DLIO's own reader reads."""
    options = getattr(given, "storage_options", None) or {}
    return nostall.Parquet(files, columns=options.get("columns") or "all")


def _indexed_binary(files: list[str], given: Any) -> nostall.source.Source:
    kinds = {"record": nostall.fields.Array(dtype="uint8", shape=(None,))}
    maps = [_rows(file, given.num_samples_per_file) for file in files]
    return nostall.source.Concat([nostall.Arrays({"record": m}, schema=kinds) for m in maps])


def _rows(file: str, samples: int) -> Any:
    """The samples that the two index files beside `file` tell of: a map of rows.

    Raises:
        UsageError: they are other than `samples`, or not of one size, one after the other, or the
            file is shorter.
    """
    begin, size = (np.fromfile(file + end, np.int64) for end in (".off.idx", ".sz.idx"))
    if len(begin) != samples or len(size) != samples:
        raise UsageError(
            f"{file}: its index has {len(size)} samples and not {samples}: set num_samples_per_file to "
            "what the files were made with"
        )
    if not size.size or (size != size[0]).any() or (begin != size[0] * np.arange(samples)).any():
        raise UsageError(
            f"{file}: its index tells of samples that are not of one size, one after the other; these "
            "plug-ins read no other indexed_binary files"
        )
    if os.path.getsize(file) < size.sum():
        raise UsageError(f"{file} is cut off: it is shorter than its index says; generate it again")
    return np.memmap(file, np.uint8, "r", shape=(samples, int(size[0])))


class _Format(NamedTuple):
    """How samples of a format are read.

    Attributes:
        open: the source of the samples in these files, in DLIO's numbering, by DLIO's arguments.
        parse: what DLIO's own reader makes of a sample.
        several: whether a file may hold more than one.
    """

    open: Callable[[list[str], Any], nostall.source.Source]
    parse: Callable[[Any], Any]
    several: bool = True


_FORMATS = {
    "npz": _Format(_whole_files, _npz, several=False),
    "npy": _Format(_whole_files, _npy, several=False),
    "jpeg": _Format(_whole_files, _image, several=False),
    "png": _Format(_whole_files, _image, several=False),
    "tfrecord": _Format(_tfrecord, _numbers),
    "hdf5": _Format(_hdf5, _numbers),
    "parquet": _Format(_parquet, _numbers),
    "indexed_binary": _Format(_indexed_binary, _numbers),
    "mmap_indexed_binary": _Format(_indexed_binary, _numbers),
}


def _source(format_type: Any, files: list[str], given: Any) -> nostall.source.Source:
    """The samples of `files`, in DLIO's numbering, by DLIO's arguments.

    Raises:
        UsageError: a format, or samples a file, that these plug-ins do not read, or files with other
            numbers of samples than DLIO says.
    """
    kind, each = str(format_type), given.num_samples_per_file
    if kind not in _FORMATS:
        raise UsageError(f"DLIO's format {kind} is not among {', '.join(_FORMATS)}")
    if each != 1 and not _FORMATS[kind].several:
        several = ", ".join(name for name, one in _FORMATS.items() if one.several)
        raise UsageError(
            f"{kind} files of {each} samples: these plug-ins read one sample per file, or {several}"
        )
    source = _FORMATS[kind].open([os.path.abspath(f) for f in files], given)
    if len(source) != each * len(files):
        raise UsageError(
            f"{len(files)} {kind} files have {len(source)} samples, not {each} each: say "
            "dataset.num_samples_per_file as they were generated"
        )
    return source


class _Sample:
    """A sample's bytes, parsed as DLIO's reader does, then DLIO's emulated preprocessing."""

    def __init__(self, format_type: Any, arguments: Any) -> None:
        self._parse = _FORMATS[str(format_type)].parse
        self._seconds = arguments.preprocess_time
        self._spread = getattr(arguments, "preprocess_time_stdev", 0)
        self._given = arguments.resized_image

    def __call__(self, data: Any) -> Any:
        self._parse(data)
        self._preprocess()
        # What all of DLIO's loaders hand out, in the place of the fields where there are several.
        if isinstance(data, Mapping):
            return {**dict.fromkeys(data), "given": self._given}
        return self._given

    def _preprocess(self) -> None:
        if isinstance(self._seconds, Mapping):  # a distribution, since DLIO 2.0.1
            from dlio_benchmark.utils.utility import sleep

            sleep(self._seconds)
        elif self._seconds or self._spread:
            time.sleep(max(0.0, np.random.normal(self._seconds, self._spread)))


class DataLoader(BaseDataLoader):
    """`nostall.DataLoader` in place of DLIO's loaders: all epochs planned, tiers, reading ahead.

    The shuffle is global, over all ranks; DLIO's own loaders shuffle each rank's fixed share.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, "nostall")
        self.loader: nostall.DataLoader | None = None

    def read(self) -> None:
        """Plans the job; reading begins with the first epoch."""
        given, mpi = self._args, DLIOMPI.get_instance()
        train = self.dataset_type is DatasetType.TRAIN
        files = list(given.file_list_train if train else given.file_list_eval)
        # Those of all ranks: since DLIO 3 each knows its own share alone.
        files = sorted({file for some in mpi.comm().allgather(files) for file in some})
        self.loader = nostall.DataLoader(
            _source(self.format_type, files, given),
            self.batch_size,
            epochs=given.epochs,
            seed=given.seed,
            shuffle=given.sample_shuffle is not Shuffle.OFF,
            drop_last=True,
            transforms=_Sample(self.format_type, given),
            tiers=_tiers(options.value("dlio.tiers")),
            staging=self._staging(given),
            threads=max(1, given.read_threads),
            rank=given.my_rank,
            world_size=given.comm_size,
            local_rank=mpi.local_rank(),
            local_world_size=mpi.npernode(),
            peers=mpi.comm().allgather if mpi.nnodes() > 1 else "auto",
            output="numpy",
        )

    def _staging(self, given: Any) -> int:
        """Bytes of samples ahead: what DLIO's own loader would prefetch, two batches at least."""
        batch = int(self.batch_size)
        # Three standard deviations of a batch's bytes, not of each sample's.
        spread = 3 * given.record_length_stdev * math.sqrt(batch)
        size = max(int(batch * given.record_length + spread), batch << 16)
        workers = max(1, int(given.read_threads))
        each = math.ceil(int(given.prefetch_size) / workers) or 2  # as torch's loader is told
        return max(2, workers * each) * size

    def next(self) -> Iterator[Any]:
        """The batches of the next epoch, of shape (batch, side, side)."""
        super().next()
        assert self.loader is not None
        for batch in self.loader:
            yield batch["given"] if isinstance(batch, Mapping) else batch[0]
        self.epoch_number += 1

    def finalize(self) -> None:
        """Called after every epoch; the loader ends with its last one."""
        if self.loader is not None and self.epoch_number > self._args.epochs:
            self.loader.close()


def _tiers(text: str) -> Any:
    """None, where nothing is said, leaves it to nostall.toml."""
    if text in ("", "auto"):
        return text or None
    return [t for t in text.split(",") if t]


class Reader(FormatReader):
    """Reads a sample when DLIO's own loader asks for it, through this project's stores."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        files = list(self._file_list)
        self._samples = _source(self._args.format, files, self._args)
        self._parse = _FORMATS[str(self._args.format)].parse
        self._each = self._args.num_samples_per_file
        self._first = {os.path.abspath(f): i * self._each for i, f in enumerate(files)}

    def open(self, filename: str) -> Any:
        """Nothing is held open: the stores read each sample by its place."""
        return self._first[os.path.abspath(filename)]

    def close(self, filename: str) -> None:
        """Nothing is open."""

    def get_sample(self, filename: str, sample_index: int) -> None:
        """Reads and parses the sample; DLIO hands out its own array in its place."""
        self._parse(self._samples.read(self.open_file_map[filename] + sample_index))

    def next(self) -> Iterator[Any]:
        """Batches of this thread's share, for loaders that iterate."""
        yield from super().next()

    def read_index(self, image_idx: int, step: int) -> Any:
        """One sample, for loaders that index."""
        return super().read_index(image_idx, step)

    def iter_epoch(self, files: list[str], batch_size: int) -> Iterator[Any]:
        """One item per batch of the rows of `files`, as DLIO 3 asks of a reader of Parquet."""
        for number in range(len(files) * self._each):
            file, row = divmod(number, self._each)
            self._parse(self._samples.read(self._first[os.path.abspath(files[file])] + row))
            if (number + 1) % batch_size == 0:
                yield self._args.resized_image

    def finalize(self) -> None:
        """Nothing is open."""

    def is_index_based(self) -> bool:
        """DLIO may ask for samples by number."""
        return True

    def is_iterator_based(self) -> bool:
        """DLIO may iterate."""
        return True


class Checkpointing(BaseCheckpointing):
    """`nostall.Checkpointer` in place of torch.save: each rank's state in ``rank<r>`` of the folder.

    Like DLIO's files, the ranks' checkpoints are independent of each other. If they wait for memory
    only, DLIO's clock stops when the state is copied; it is on its device when DLIO ends.
    """

    _instance: Checkpointing | None = None

    @classmethod
    def get_instance(cls) -> Checkpointing:
        """The plug-in of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        super().__init__("nostall")
        rank = self.args.my_rank
        self.checkpointer: nostall.Checkpointer | None = None
        self._state: dict[str, Any] = {}
        if self.args.checkpoint_type == CheckpointLocationType.RANK_ZERO and rank != 0:
            return
        level: Any = options.value("dlio.checkpoint")
        self.checkpointer = nostall.Checkpointer(
            durable=os.path.join(self.args.checkpoint_folder, f"rank{rank}"),
            level=level, keep=2, rank=0, world_size=1, job=f"dlio-{os.getpid()}",
        )  # fmt: skip

    def get_tensor(self, size: int) -> Any:
        """`size` bytes."""
        return np.zeros(size, np.int8)

    def save_state(self, suffix: str, state: Any) -> None:
        """Collects the parts that DLIO names, "model-<epoch>-<step>-<rank>" and so on."""
        self._state[suffix] = state

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """All parts of this rank as one checkpoint, complete or not there."""
        self._state = {}
        super().checkpoint(epoch, step_number)
        if self.checkpointer is not None and self._state:
            self.checkpointer.save(self._state, epoch * _STEPS + step_number)

    def finalize(self) -> None:
        """Waits until everything is on its device."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None
