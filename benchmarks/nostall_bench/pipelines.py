"""Input pipelines of ``nostall bench io`` and ``nostall bench app``, all doing the same work.

Each is a function from a `Work` to an iterator of batches. "map" is the pipeline of
[Chien 2018, sec. III]: a shuffled list, mapped by a pool of threads, batched, with nothing or one batch
prepared ahead; "tf.data" is TensorFlow's own, which Chien measured; "grain" is Grain with threads;
"torch" is torch's DataLoader with worker processes; "nostall" is this loader. Images that cannot
be read or decoded are left out, or replaced (nostall), and counted.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDE = 224


@dataclass
class Work:
    """The files, and what to do with them.

    `errors` is counted up; `readers` are the threads that read, where they are others than `threads`.
    """

    paths: list[str]
    labels: list[int]
    batch: int
    threads: int
    decode: bool
    prefetch: int = 1
    seed: int = 0
    errors: int = 0
    readers: int = 0


def load(path: str, decode: bool) -> Any:
    """The file's bytes, or a float32 tensor of shape (3, 224, 224); None for a bad file."""
    import torch

    try:
        data = Path(path).read_bytes()
        if not decode:
            return data
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms.v2 import functional

        image = decode_image(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB
        )
        resized = functional.resize(image, [SIDE, SIDE], antialias=True)
        return functional.to_dtype(resized, torch.float32, scale=True)
    except (OSError, RuntimeError, ValueError):
        return None


def _stack(work: Work, samples: list[tuple[Any, int]]) -> tuple[Any, list[int]] | None:
    """The batch of the good ones; None if there are none."""
    good = [(x, y) for x, y in samples if x is not None]
    work.errors += len(samples) - len(good)
    if not good:
        return None
    labels = [y for _, y in good]
    if not work.decode:
        return [x for x, _ in good], labels
    import torch

    return torch.stack([x for x, _ in good]), labels


def mapped(work: Work) -> Iterator[tuple[Any, list[int]]]:
    """Threads map a batch's files when it is asked for, or, with prefetch, one batch ahead."""
    order = list(range(len(work.paths)))
    random.Random(work.seed).shuffle(order)
    groups = [order[i : i + work.batch] for i in range(0, len(order), work.batch)]

    def one(i: int) -> tuple[Any, int]:
        return load(work.paths[i], work.decode), work.labels[i]

    with ThreadPoolExecutor(work.threads) as pool, ThreadPoolExecutor(1) as ahead:

        def make(group: list[int]) -> tuple[Any, list[int]] | None:
            return _stack(work, list(pool.map(one, group)))

        if work.prefetch == 0:
            yield from filter(None, map(make, groups))
            return
        waiting = [ahead.submit(make, g) for g in groups[: work.prefetch]]
        for number in range(len(groups)):
            done = waiting.pop(0).result()
            following = number + work.prefetch
            if following < len(groups):
                waiting.append(ahead.submit(make, groups[following]))
            if done is not None:
                yield done


class Files:
    """A map-style dataset; bad files are None."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return len(self.work.paths)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return load(self.work.paths[i], self.work.decode), self.work.labels[i]


def torch_loader(work: Work) -> Iterator[tuple[Any, list[int]]]:
    """torch's DataLoader with as many worker processes as threads; none without prefetch."""
    import torch
    from torch.utils.data import DataLoader

    dataset: Any = Files(work)
    workers = work.threads if work.prefetch else 0
    loader: Any = DataLoader(
        dataset,
        batch_size=work.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(work.seed),
        num_workers=workers,
        collate_fn=list,
    )
    for samples in loader:
        batch = _stack(work, samples)
        if batch is not None:
            yield batch


def nostall_loader(work: Work) -> Iterator[tuple[Any, list[int]]]:
    """This loader without tiers, for one epoch, with two batches staged: one is ahead."""
    import nostall
    from nostall import transforms as t

    files = nostall.FileList(work.paths, work.labels, root="/")
    sample = 3 * SIDE * SIDE * 4 if work.decode else files.total_bytes // len(files)
    with nostall.DataLoader(
        files,
        work.batch,
        seed=work.seed,
        transforms=[t.Resize((SIDE, SIDE)), t.ToTensor()] if work.decode else None,
        tiers=[],
        staging=2 * work.batch * sample,
        threads=work.threads,
        on_error="substitute",
        rank=0,
        world_size=1,
    ) as loader:
        yield from loader
        found = loader.stats()
        work.errors += sum(len(e.substituted) for e in found.epochs)
        work.readers = found.fetchers


def tensorflow_data(work: Work) -> Iterator[tuple[Any, list[int]]]:
    """TensorFlow's pipeline, as published: shuffle, parallel map, ignore errors, batch, prefetch."""
    import tensorflow as tf
    import torch

    tf.config.set_visible_devices([], "GPU")

    def one(path: Any, label: Any) -> tuple[Any, Any]:
        data = tf.io.read_file(path)
        if not work.decode:
            return data, label
        image = tf.io.decode_image(data, channels=3, expand_animations=False)
        resized = tf.image.resize(image, [SIDE, SIDE], antialias=True) / 255.0
        return tf.transpose(resized, [2, 0, 1]), label

    options = tf.data.Options()
    options.threading.private_threadpool_size = work.threads
    dataset = (
        tf.data.Dataset.from_tensor_slices((work.paths, work.labels))
        .shuffle(len(work.paths), seed=work.seed)
        .map(one, num_parallel_calls=work.threads)
        .ignore_errors()
        .batch(work.batch)
        .with_options(options)
    )
    if work.prefetch:
        dataset = dataset.prefetch(work.prefetch)
    seen = 0
    for images, labels in dataset.as_numpy_iterator():
        seen += len(labels)
        yield (torch.from_numpy(images) if work.decode else list(images)), labels.tolist()
    work.errors += len(work.paths) - seen


def grain_dataset(work: Work) -> Iterator[tuple[Any, list[int]]]:
    """Grain: a shuffled map dataset read by threads; without prefetch one sample at a time is ready."""
    import grain

    def one(i: int) -> tuple[Any, int] | None:
        sample = load(work.paths[i], work.decode)
        return None if sample is None else (sample, work.labels[i])  # None is left out

    ahead = max(1, work.prefetch * work.batch)
    options = grain.ReadOptions(num_threads=work.threads, prefetch_buffer_size=ahead)
    dataset = (
        grain.MapDataset.source(range(len(work.paths)))
        .shuffle(seed=work.seed)
        .map(one)
        .to_iter_dataset(options)
        .batch(work.batch, batch_fn=list)
    )
    seen = 0
    for samples in dataset:
        batch = _stack(work, samples)
        if batch is not None:
            seen += len(batch[1])
            yield batch
    work.errors = len(work.paths) - seen


PIPELINES: dict[str, Callable[[Work], Iterator[tuple[Any, list[int]]]]] = {
    "nostall": nostall_loader,
    "torch": torch_loader,
    "map": mapped,
    "tf.data": tensorflow_data,
    "grain": grain_dataset,
}
_NEEDS = {"tf.data": "tensorflow", "grain": "grain"}


def batches_ahead(pipeline: str, threads: int, prefetch: int) -> int:
    """How many batches a pipeline prepares ahead: a worker of torch makes whole ones, and two ahead."""
    return 2 * threads * prefetch if pipeline == "torch" else prefetch


def installed() -> list[str]:
    """The pipelines that can run here."""
    return [
        name for name in PIPELINES
        if name not in _NEEDS or importlib.util.find_spec(_NEEDS[name]) is not None
    ]  # fmt: skip
