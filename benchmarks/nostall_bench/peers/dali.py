"""NVIDIA DALI on the CPU: file readers with a shuffle after each epoch, fused crop-decode.

Readers of several fields shuffle alike, for they have the same seed. What is read beside an image is
cut by the image's own window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nostall_bench.peers import ALPHA, CLASSES, MEAN, SIDE, STD, Job, listing
from nostall_bench.records import FIELDS, FRAMES, paths

REQUIRES = ("nvidia.dali",)


def _normalised(image: Any, flip: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.crop_mirror_normalize(
        image,
        mean=[255 * m for m in MEAN],
        std=[255 * s for s in STD],
        mirror=flip,
        dtype=types.FLOAT,
        output_layout="CHW",
    )


def _erased(image: Any) -> Any:
    """Half of the images lose a part of 2 to 33 %, as torchvision's RandomErasing has it."""
    from nvidia.dali import fn, math, types

    area = fn.random.uniform(range=(0.02, 0.33)) * float(SIDE * SIDE)
    ratio = math.exp(fn.random.uniform(range=(-1.204, 1.194)))
    shape = math.min(fn.stack(math.sqrt(area * ratio), math.sqrt(area / ratio)), float(SIDE))
    return fn.erase(
        image,
        anchor=fn.random.uniform(range=(0.0, 1.0), shape=2) * (float(SIDE) - shape),
        shape=shape * fn.cast(fn.random.coin_flip(), dtype=types.FLOAT),
        axis_names="HW",
    )


def _mixed(image: Any, label: Any) -> tuple[Any, Any]:
    """MixUp, with draws for each sample."""
    from nvidia.dali import fn

    other = fn.batch_permutation()
    share = fn.random.beta(alpha=ALPHA, beta=ALPHA)

    def mix(mine: Any) -> Any:
        return mine * share + fn.permute_batch(mine, indices=other) * (1 - share)

    return mix(image), mix(fn.one_hot(label, num_classes=CLASSES))


def _records(job: Job) -> tuple[Any, ...]:
    """The outputs for a mode of several fields."""
    from nvidia.dali import fn, math, types

    samples = paths(job.prepared, [p for p, _ in listing(job.data)], job.mode)
    files = {field: [s[field] for s in samples] for field, _ in FIELDS[job.mode]}

    def read(field: str, reader: Any = fn.readers.file, **options: Any) -> Any:
        found = reader(
            files=files[field], shuffle_after_epoch=True, seed=job.seed + 1, name=field, **options
        )
        return found[0] if isinstance(found, (list, tuple)) else found

    if job.mode == "array":
        return (read("array", fn.readers.numpy),)
    if job.mode == "wav":
        sound, _ = fn.decoders.audio(read("sound"), dtype=types.FLOAT, downmix=True)
        whole = fn.slice(sound, 0, FRAMES, axes=[0], out_of_bounds_policy="pad")
        return (whole,)
    encoded = read("image")
    flip = fn.random.coin_flip()
    if job.mode == "image + text":
        image = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        return _normalised(fn.resize(image, size=(SIDE, SIDE)), flip), read("text")
    size = fn.peek_image_shape(encoded)[:2]
    start, extent = fn.random_crop_generator(size)
    cut = {"start": start, "shape": extent, "axes": [0, 1]}
    image = fn.decoders.image_slice(encoded, device="cpu", output_type=types.RGB, **cut)
    made = _normalised(fn.resize(image, size=(SIDE, SIDE)), flip)
    if job.mode == "image + mask":
        mask = fn.decoders.image(read("mask"), device="cpu", output_type=types.GRAY)
        mask = fn.resize(fn.slice(mask, **cut), size=(SIDE, SIDE), interp_type=types.INTERP_NN)
        return made, fn.cast(fn.flip(mask, horizontal=flip), dtype=types.INT64)
    boxes = read("boxes", fn.readers.numpy)
    origin = fn.cast(fn.stack(start[1], start[0], start[1], start[0]), dtype=types.FLOAT)
    scale = SIDE / fn.cast(fn.stack(extent[1], extent[0], extent[1], extent[0]), dtype=types.FLOAT)
    moved = math.clamp((boxes - origin) * scale, 0.0, float(SIDE))
    return made, fn.bb_flip(moved / float(SIDE), horizontal=flip, ltrb=True) * float(SIDE)


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """Batches as DALI tensor lists; the last one of an epoch is filled with samples of the next."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.auto_aug import rand_augment

    items = listing(job.data)

    @pipeline_def(
        batch_size=job.batch_size,
        num_threads=job.threads,
        device_id=None,
        seed=job.seed + 1,
        enable_conditionals=True,
    )
    def pipeline() -> Any:
        if job.mode in FIELDS:
            return _records(job)
        data, labels = fn.readers.file(
            files=[p for p, _ in items],
            labels=[c for _, c in items],
            shuffle_after_epoch=True,
            name="reader",
        )
        if job.mode != "read":
            data = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB)
            recipe = job.mode == "recipe"
            interpolation = types.INTERP_CUBIC if recipe else types.INTERP_LINEAR
            data = fn.resize(data, size=(SIDE, SIDE), interp_type=interpolation)
            if recipe:
                data = rand_augment.rand_augment(data, n=2, m=9)
            data = _normalised(data, fn.random.coin_flip())
            if recipe:
                data, labels = _mixed(_erased(data), labels)
        return data, labels

    pipe = pipeline()
    pipe.build()

    for _ in range(job.epochs):
        yield (len(pipe.run()[0]) for _ in range(-(-len(items) // job.batch_size)))
