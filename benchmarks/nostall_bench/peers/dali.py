"""NVIDIA DALI on the CPU: file reader with a shuffle after each epoch, fused crop-decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nostall_bench.peers import MEAN, SIDE, STD, Job, listing, sized

REQUIRES = ("nvidia.dali",)


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Batches as DALI tensor lists; the last one partial."""
    from nvidia.dali import fn, pipeline_def, types

    items = listing(job.data)

    @pipeline_def(
        batch_size=job.batch_size, num_threads=job.threads, device_id=None, seed=job.seed + 1
    )
    def pipeline() -> Any:
        data, labels = fn.readers.file(
            files=[p for p, _ in items],
            labels=[c for _, c in items],
            shuffle_after_epoch=True,
            name="reader",
        )
        if job.mode == "transform":
            data = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB)
            data = fn.resize(data, size=(SIDE, SIDE))
            data = fn.crop_mirror_normalize(
                data,
                mean=[255 * m for m in MEAN],
                std=[255 * s for s in STD],
                mirror=fn.random.coin_flip(),
                dtype=types.FLOAT,
                output_layout="CHW",
            )
        return data, labels

    pipe = pipeline()
    pipe.build()

    def one_epoch() -> Iterator[int]:
        left = len(items)
        while left > 0:
            pipe.run()
            size = min(left, job.batch_size)
            left -= size
            yield size

    # The reader wraps around inside a batch; as many batches as fit keep its epochs in step.
    for _ in range(job.epochs):
        yield sized(one_epoch(), len(items))
