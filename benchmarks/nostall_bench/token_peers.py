"""Loaders of token sequences for ``nostall bench tokens``: each gives batches of int64 without end.

Each is a generator of (places, count) of its batches: the places that a batch has, and a function that
counts which of them hold a token of a document.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END = 0  # the id that ends every document
Counted = Iterator[tuple[int, Callable[[], int]]]


@dataclass(frozen=True)
class Job:
    """What every loader is to do: batches of `batch` sequences of `length` ids of `data`."""

    data: Path
    length: int
    batch: int
    threads: int


def make(path: Path, tokens: int, *, median: float = 404, mean: float = 738) -> None:
    """Ids of 16 bits in documents of log-normal length, and Megatron's index of the same bytes."""
    if path.exists() and path.stat().st_size == 2 * tokens:
        return
    draw = np.random.default_rng(0)
    sigma = float(np.sqrt(2 * np.log(mean / median)))
    lengths = draw.lognormal(np.log(median), sigma, int(1.2 * tokens / mean) + 9).astype(np.int64)
    ends = np.cumsum(lengths + 1)
    ends = np.append(ends[ends < tokens], tokens)
    ids = draw.integers(1, 50_000, tokens, np.uint16)
    ids[ends - 1] = END
    ids.tofile(path)
    megatron = path.with_name("megatron.bin")
    megatron.unlink(missing_ok=True)
    megatron.hardlink_to(path)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    begins = 2 * (ends - sizes)
    with megatron.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
        for part in (sizes, begins.astype(np.int64), np.arange(len(sizes) + 1, dtype=np.int64)):
            part.tofile(index)


def _limit_to_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _used(segments: Any) -> int:
    return int((segments > 0).sum())


def nanogpt(job: Job) -> Counted:
    """nanoGPT's get_batch: random offsets into a memory map, one copy and one stack a batch."""
    import torch

    _limit_to_one_thread()
    while True:
        # A new map for each batch, as it does against a leak.
        data = np.memmap(job.data, np.uint16, "r")
        offsets = torch.randint(len(data) - job.length, (job.batch,))
        ids = torch.stack(
            [torch.from_numpy(data[i : i + job.length].astype(np.int64)) for i in offsets]
        )
        yield ids.numel(), ids.numel


class _Windows:
    """A map-style dataset of the windows of a memory map."""

    def __init__(self, job: Job) -> None:
        self._data = np.memmap(job.data, np.uint16, "r")
        self._length = job.length

    def __len__(self) -> int:
        return len(self._data) // self._length

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        return self._data[i * self._length : (i + 1) * self._length].astype(np.int64)


class _Megatron:
    """Megatron's GPT dataset, re-read from the format: documents shuffled, laid end to end and cut."""

    def __init__(self, job: Job) -> None:
        path = job.data.with_name("megatron.bin")
        raw = np.memmap(path.with_suffix(".idx"), np.uint8, "r")
        count = int(struct.unpack_from("<Q", raw[18:26].tobytes())[0])
        self._sizes = raw[34 : 34 + 4 * count].view(np.int32)
        self._begins = raw[34 + 4 * count : 34 + 12 * count].view(np.int64)
        self._data = np.memmap(path, np.uint8, "r")
        self._order = np.random.default_rng(0).permutation(count)
        self._ends = np.cumsum(self._sizes[self._order], dtype=np.int64)
        self._length = job.length

    def __len__(self) -> int:
        return int(self._ends[-1]) // self._length

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        at, left, parts = i * self._length, self._length, []
        k = int(np.searchsorted(self._ends, at, side="right"))
        while left:
            document = int(self._order[k])
            skip = at - (int(self._ends[k]) - int(self._sizes[document]))
            taken = min(left, int(self._sizes[document]) - skip)
            offset = int(self._begins[document]) + 2 * skip
            parts.append(np.frombuffer(self._data, np.uint16, taken, offset))
            at, left, k = at + taken, left - taken, k + 1
        return np.concatenate(parts).astype(np.int64)


def _torch(dataset: Callable[[Job], Any], shuffle: bool, workers: bool) -> Callable[[Job], Counted]:
    """torch's loader, in process or with as many workers as the others have threads."""

    def batches(job: Job) -> Counted:
        from torch.utils.data import DataLoader

        _limit_to_one_thread()
        loader = DataLoader(
            dataset(job),
            job.batch,
            shuffle=shuffle,
            num_workers=job.threads if workers else 0,
            drop_last=True,
            persistent_workers=workers,
        )
        while True:
            for ids in loader:
                wide = ids.long()
                yield wide.numel(), wide.numel

    return batches


def grain_windows(job: Job) -> Counted:
    """Grain's map dataset of the same windows, shuffled globally."""
    import grain

    dataset = grain.MapDataset.source(_Windows(job)).shuffle(seed=0).repeat().batch(job.batch)
    for ids in dataset.to_iter_dataset(grain.ReadOptions(num_threads=job.threads)):
        yield ids.size, partial(np.size, ids)


def grain_packed(job: Job, bins: int = 64) -> Counted:
    """Grain's first fit over local bins, with segments and positions, of shuffled documents."""
    import grain

    data = np.memmap(job.data, np.uint16, "r")
    ends = np.flatnonzero(data == END) + 1
    begins = np.concatenate(([0], ends[:-1]))

    def document(i: int) -> dict[str, NDArray[np.int64]]:
        return {"ids": data[begins[i] : ends[i]][: job.length].astype(np.int64)}

    dataset = grain.MapDataset.source(range(len(ends))).shuffle(seed=0).repeat().map(document)
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=job.threads)),
        length_struct={"ids": job.length},
        num_packing_bins=bins,
    )
    for batch in packed.batch(job.batch):
        yield batch["ids"].size, partial(_used, batch["ids_segment_ids"])


def _chunks(job: Job) -> Path:
    return job.data.with_name(f"litdata-{job.length}")


def _ids_of(path: str) -> Iterator[Any]:
    import torch

    yield torch.from_numpy(np.fromfile(path, np.uint16))


def prepare_litdata(job: Job) -> None:
    """Writes the ids as litdata's chunks, once."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    if not Path(_chunks(job), "index.json").exists():
        litdata.optimize(
            _ids_of,
            [str(job.data)],
            str(_chunks(job)),
            chunk_size=job.length * 1024,
            item_loader=TokensLoader(job.length),
            num_workers=1,
        )


def _litdata(job: Job) -> Any:
    """litdata's blocks of tokens, which it shuffles among its chunks."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    return litdata.StreamingDataset(
        str(_chunks(job)), item_loader=TokensLoader(job.length), shuffle=True, drop_last=True
    )


def _nostall(job: Job, packed: bool) -> Counted:
    import nostall

    if packed:
        fields = ("ids", "segments", "positions")
        stream = nostall.Tokens(job.data, dtype="uint16", end=END)
        source: Any = nostall.Packed(stream, job.length, longer="cut", fields=fields)
    else:
        stream = nostall.Tokens(job.data, dtype="uint16", format="raw")
        source = nostall.Windows(stream, job.length, fields=("ids",))
    options: dict[str, Any] = {"order": "keyed", "drop_last": True, "tiers": []}
    with nostall.DataLoader(source, job.batch, threads=job.threads, **options) as loader:
        while True:
            for batch in loader:
                ids = batch["ids"]
                if packed:
                    yield ids.numel(), partial(_used, batch["segments"])
                else:
                    yield ids.numel(), ids.numel


def nostall_windows(job: Job) -> Counted:
    """This project's windows."""
    return _nostall(job, packed=False)


def nostall_packed(job: Job) -> Counted:
    """This project's best fit over all documents, with segments and positions."""
    return _nostall(job, packed=True)


#: by mode, by the name in the table
LOADERS: dict[str, dict[str, Callable[[Job], Counted]]] = {
    "windows": {
        "nostall": nostall_windows,
        "nanoGPT's get_batch": nanogpt,
        "torch, memory map": _torch(_Windows, shuffle=True, workers=False),
        "torch, memory map, workers": _torch(_Windows, shuffle=True, workers=True),
        "Megatron's dataset": _torch(_Megatron, shuffle=True, workers=False),
        "Megatron's dataset, workers": _torch(_Megatron, shuffle=True, workers=True),
        "Grain": grain_windows,
        "litdata": _torch(_litdata, shuffle=False, workers=False),
        "litdata, workers": _torch(_litdata, shuffle=False, workers=True),
    },
    "packed": {"nostall": nostall_packed, "Grain, first fit": grain_packed},
}
LOADERS["cold"] = {
    name: way for name, way in LOADERS["windows"].items() if name != "nanoGPT's get_batch"
}
