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

Formats: npz, npy, jpeg, png with one sample per file, and tfrecord. Importing this module needs
dlio-benchmark 2.0 or later.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

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


def _npz(data: Any) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)["x"]


def _npy(data: Any) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _image(data: Any) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def _record(data: Any) -> Any:
    return np.frombuffer(data, np.uint8)


# Format -> what DLIO's own reader makes of a sample's bytes.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "npz": _npz, "npy": _npy, "jpeg": _image, "png": _image, "tfrecord": _record,
}  # fmt: skip


def _source(format_type: Any, files: list[str], samples_per_file: int) -> nostall.source.Source:
    """The samples of `files`, in DLIO's numbering.

    Raises:
        UsageError: a format, or samples a file, that these plug-ins do not read.
    """
    kind = str(format_type)
    if kind not in _PARSERS:
        raise UsageError(f"DLIO's format {kind} is not among {', '.join(_PARSERS)}")
    if kind == "tfrecord":
        return nostall.TFRecord(files, values="raw", index=False)
    if samples_per_file != 1:
        raise UsageError(
            f"{kind} files of {samples_per_file} samples: these plug-ins read one sample per file, or "
            "tfrecord"
        )
    return nostall.FileList([os.path.abspath(f) for f in files], root="/")


class _Sample:
    """A sample's bytes, parsed as DLIO's reader does, then DLIO's emulated preprocessing."""

    def __init__(self, format_type: Any, arguments: Any) -> None:
        self._parse = _PARSERS[str(format_type)]
        self._seconds = arguments.preprocess_time
        self._spread = arguments.preprocess_time_stdev
        self._given = arguments.resized_image

    def __call__(self, data: Any) -> Any:
        self._parse(data)
        if self._seconds or self._spread:
            time.sleep(max(0.0, np.random.normal(self._seconds, self._spread)))
        return self._given  # what all of DLIO's loaders hand out


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
        self.loader = nostall.DataLoader(
            _source(self.format_type, files, given.num_samples_per_file),
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
        """Bytes of samples ahead: what DLIO would prefetch, two batches at least."""
        record = max(int(given.record_length + 3 * given.record_length_stdev), 1 << 16)
        return max(2, int(given.prefetch_size)) * int(self.batch_size) * record

    def next(self) -> Iterator[Any]:
        """The batches of the next epoch, of shape (batch, side, side)."""
        super().next()
        assert self.loader is not None
        for batch, _ in self.loader:
            yield batch
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
        self._samples = _source(self._args.format, files, self._args.num_samples_per_file)
        self._parse = _PARSERS[str(self._args.format)]
        self._first = {
            os.path.abspath(f): i * self._args.num_samples_per_file for i, f in enumerate(files)
        }

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
