"""SPDL: a pipeline of threads; images are demuxed, decoded, cut and resized by FFmpeg, as its I/O does.

Its wheel brings no FFmpeg: the libraries (libavcodec, libavfilter, libavdevice) must be installed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall_bench.peers import MEAN, SIDE, STD, Job, listing, sized

REQUIRES = ("spdl.io", "spdl.pipeline", "torch")


def _window(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Width, height and corner of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return w, h, draw.randint(0, width - w), draw.randint(0, height - h)
    side = min(width, height)
    return side, side, (width - side) // 2, (height - side) // 2


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """A pipeline for each epoch, as its examples build them: samples one by one, then batches."""
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    torch.set_num_threads(1)
    items = listing(job.data)
    spdl.io.demux_image(items[0][0])  # names missing libraries: its pipeline drops what fails
    draw = random.Random(job.seed)
    mean = 255 * torch.tensor(MEAN).view(3, 1, 1)
    scale = 1 / (255 * torch.tensor(STD).view(3, 1, 1))

    def read(item: tuple[str, int]) -> tuple[Any, int]:
        return Path(item[0]).read_bytes(), item[1]

    def decode(item: tuple[str, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(item[0])
        w, h, x, y = _window(packets.width, packets.height, draw)
        steps = [f"crop={w}:{h}:{x}:{y}:exact=1", f"scale={SIDE}:{SIDE}:flags=bilinear"]
        if draw.random() < 0.5:
            steps.append("hflip")
        steps.append("format=pix_fmts=rgb24")
        return spdl.io.decode_packets(packets, filter_desc=",".join(steps)), item[1]

    def join(samples: list[tuple[Any, int]]) -> tuple[Any, list[int]]:
        labels = [label for _, label in samples]
        if job.mode == "read":
            return [data for data, _ in samples], labels
        buffer = spdl.io.convert_frames([frames for frames, _ in samples])
        pixels = spdl.io.to_torch(buffer).permute(0, 3, 1, 2)
        return (pixels.float() - mean) * scale, labels

    for _ in range(job.epochs):
        order = draw.sample(items, len(items))
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(read if job.mode == "read" else decode, concurrency=job.threads)
            .aggregate(job.batch_size)
            .pipe(join)
            .add_sink(3)
            .build(num_threads=job.threads)
        )
        with pipeline.auto_stop():
            yield sized((len(batch[1]) for batch in pipeline.get_iterator()), len(items))
