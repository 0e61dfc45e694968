"""Samples of several fields for ``nostall bench loader``: files, and the same in tar shards.

Beside each JPEG file of a data set lie a mask, boxes, a caption, an array and a sound, whose contents
depend on its place alone.
"""

from __future__ import annotations

import io
import os
import tarfile
import wave
from pathlib import Path

import numpy as np

# What a sample of each mode has: (field, ending), the image first.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "image + mask": (("image", "jpg"), ("mask", "png")),
    "image + boxes": (("image", "jpg"), ("boxes", "npy")),
    "image + text": (("image", "jpg"), ("text", "txt")),
    "array": (("array", "npy"),),
    "wav": (("sound", "wav"),),
}
# Of the array; frames of a sound that a batch has, of 2 to 4 seconds.
SHAPE = (80, 250)
RATE, FRAMES = 16_000, 48_000
_PER_SHARD = 250
_LABELS = 21
_WORDS = (
    "a",
    "the",
    "red",
    "green",
    "blue",
    "large",
    "small",
    "striped",
    "shape",
    "lies",
    "beside",
)


def paths(data: Path, images: list[str], mode: str) -> list[dict[str, str]]:
    """The files of every sample, by field; `data` is what `make` has filled."""
    return [
        {
            field: image if field == "image" else str(data / field / f"{i:06d}.{ending}")
            for field, ending in FIELDS[mode]
        }
        for i, image in enumerate(images)
    ]


def make(data: Path, images: list[str]) -> Path:
    """Writes what is missing beside the images; `data`."""
    if (data / "done").exists():
        return data
    for mode in FIELDS:
        for field, _ in FIELDS[mode]:
            (data / field).mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        _make_one(data, i, image)
    (data / "done").touch()
    return data


def _make_one(data: Path, i: int, image: str) -> None:
    from PIL import Image, ImageDraw

    rng = np.random.default_rng((0x6669656C, i))
    with Image.open(image) as opened:
        width, height = opened.size
    corners = rng.integers(0, [width, height], (1 + i % 8, 2, 2))
    boxes = np.concatenate([corners.min(1), corners.max(1) + 1], axis=1)
    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    for box in boxes.tolist():
        draw.ellipse(box, fill=int(rng.integers(1, _LABELS)))
    mask.save(data / "mask" / f"{i:06d}.png")
    np.save(data / "boxes" / f"{i:06d}.npy", boxes.astype(np.float32))
    caption = " ".join(rng.choice(_WORDS, int(rng.integers(8, 24))))
    (data / "text" / f"{i:06d}.txt").write_text(caption)
    np.save(data / "array" / f"{i:06d}.npy", rng.standard_normal(SHAPE, np.float32))
    frames = int(rng.integers(2 * RATE, 4 * RATE))
    sound = rng.integers(-(2**15), 2**15, frames, np.int16)
    with wave.open(str(data / "sound" / f"{i:06d}.wav"), "wb") as file:
        file.setparams((1, 2, RATE, frames, "NONE", "not compressed"))
        file.writeframes(sound.tobytes())


def shards(data: Path, images: list[str], mode: str) -> list[str]:
    """The samples in tar shards of 250, by the rules of WebDataset; made once."""
    folder = data / "shards" / mode.replace(" + ", "-")
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        samples = paths(data, images, mode)
        for begin in range(0, len(samples), _PER_SHARD):
            with tarfile.open(folder / f"{begin // _PER_SHARD:06d}.tar", "w") as tar:
                for i, sample in enumerate(samples[begin : begin + _PER_SHARD], begin):
                    for field, ending in FIELDS[mode]:
                        body = Path(sample[field]).read_bytes()
                        info = tarfile.TarInfo(f"{i:08d}.{ending}")
                        info.size = len(body)
                        tar.addfile(info, io.BytesIO(body))
        (folder / "done").touch()
    return sorted(os.fspath(path) for path in folder.glob("*.tar"))
