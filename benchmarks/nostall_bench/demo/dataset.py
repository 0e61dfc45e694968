"""A synthetic JPEG dataset, made from a seed, that a small network can really learn.

Every image is 1/f colour noise, as natural images have, with several copies of one shape in one
colour on a grating: the class fixes shape, hue and the grating's direction. The sizes follow
ImageNet's training set: 4:2:0, quality 85 to 94, 450 x 375 pixels and 95 KB on average.
"""

from __future__ import annotations

import colorsys
import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.base import _children as children
from nostall.errors import UsageError

_VERSION = 1
_FIELD = 1024
_FIELDS = 4
_CHUNK = 32


@dataclass(frozen=True)
class DatasetSpec:
    """What a dataset is made of; equal specs give equal bytes (with equal Pillow releases).

    `scale` multiplies both dimensions: 1.0 gives about 95 KB per file, 0.5 about 27 KB.
    """

    files: int = 4000
    classes: int = 10
    seed: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.files < 1 or not 1 <= self.classes <= 1000 or self.scale <= 0:
            raise UsageError(
                f"a dataset needs files, 1 to 1000 classes and a scale above 0: {self}"
            )

    def path(self, index: int) -> str:
        """Relative path of file `index`: one folder per class."""
        return f"class_{index % self.classes:03d}/{index:06d}.jpg"


def _noise_fields(seed: int) -> NDArray[np.float32]:
    """`_FIELDS` tiling 1/f noise fields, float32 of shape (fields, 1024, 1024, 3), deviation 1."""
    rng = np.random.default_rng((seed, 0x6E6F6973))
    y = np.fft.fftfreq(_FIELD)[:, None]
    x = np.fft.rfftfreq(_FIELD)[None, :]
    radius = np.hypot(y, x)
    radius[0, 0] = 1.0
    fields = np.empty((_FIELDS, _FIELD, _FIELD, 3), np.float32)
    for field in fields:
        luma, *chroma = (
            np.fft.irfft2(
                np.fft.rfft2(rng.standard_normal((_FIELD, _FIELD), np.float32)) / radius,
                s=(_FIELD, _FIELD),
            )
            for _ in range(3)
        )
        for channel in range(3):
            mixed = luma + 0.35 * (chroma[0] if channel == 0 else chroma[-1] * (channel - 1.5))
            field[..., channel] = (mixed - mixed.mean()) / mixed.std()
    return fields


_fields: NDArray[np.float32] | None = None


def _start_worker(seed: int) -> None:
    global _fields
    children.begin()
    _fields = _noise_fields(seed)


def make_image(spec: DatasetSpec, index: int, fields: NDArray[np.float32]) -> bytes:
    """The JPEG bytes of file `index`; a pure function of its arguments."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng((spec.seed, index))
    label = index % spec.classes
    width = max(16, round(spec.scale * np.clip(rng.normal(450, 60), 280, 640)))
    height = max(16, round(spec.scale * np.clip(rng.normal(375, 50), 240, 540)))
    y, x = (int(v) for v in rng.integers(0, _FIELD, 2))
    field = fields[int(rng.integers(_FIELDS))]
    rows = (np.arange(y, y + height)) % _FIELD
    columns = (np.arange(x, x + width)) % _FIELD
    pixels = field[rows][:, columns] * rng.uniform(34, 48) + rng.uniform(105, 145)

    # The grating: its direction and period belong to the class.
    angle = np.pi * label / spec.classes
    period = spec.scale * (9.0 + 5.0 * (label % 3))
    ramp = (
        np.arange(width, dtype=np.float32)[None, :] * np.cos(angle)
        + np.arange(height, dtype=np.float32)[:, None] * np.sin(angle)
    ) * (2 * np.pi / period)
    pixels += (14.0 * np.sin(ramp + rng.uniform(0, 2 * np.pi)))[..., None].astype(np.float32)
    # Grain, as of a sensor: what makes JPEG files of photographs as large as they are.
    grain = rng.integers(-128, 128, (height, width), np.int8).astype(np.float32)
    pixels += grain[..., None] * np.float32(rng.uniform(0.115, 0.2))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    # The shapes: three to six copies, the class's hue and number of corners.
    draw = ImageDraw.Draw(image)
    hue = (label * 0.618034) % 1.0
    for _ in range(int(rng.integers(3, 7))):
        rgb = colorsys.hsv_to_rgb(
            (hue + rng.uniform(-0.03, 0.03)) % 1, 0.75, rng.uniform(0.6, 0.95)
        )
        colour = tuple(round(255 * c) for c in rgb)
        size = spec.scale * rng.uniform(28, 70)
        centre = (float(rng.uniform(0, width)), float(rng.uniform(0, height)))
        corners = label % 5
        if corners == 0:
            draw.ellipse(
                [centre[0] - size, centre[1] - size, centre[0] + size, centre[1] + size],
                fill=colour,
            )
        else:
            draw.regular_polygon(
                (centre[0], centre[1], size), corners + 2, float(rng.uniform(0, 360)), fill=colour
            )
    out = io.BytesIO()
    image.save(out, "JPEG", quality=int(rng.integers(85, 95)), subsampling="4:2:0")
    return out.getvalue()


def _make_chunk(root: str, spec: DatasetSpec, begin: int) -> int:
    assert _fields is not None
    end = min(begin + _CHUNK, spec.files)
    for index in range(begin, end):
        Path(root, spec.path(index)).write_bytes(make_image(spec, index, _fields))
    return end - begin


def _stamp(spec: DatasetSpec) -> dict[str, Any]:
    return {"version": _VERSION, **asdict(spec)}


def make_dataset(
    root: str | os.PathLike[str],
    spec: DatasetSpec | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    processes: int | None = None,
) -> Path:
    """Writes the dataset under `root`, class per folder; does nothing if it is complete there.

    `progress` is called with (files made, files in all), at first with none.
    About 8 ms of one core per file.

    Raises:
        UsageError: `root` holds something else.
    """
    spec = spec or DatasetSpec()
    root = Path(root)
    # The stamp lies beside the folder, so that the folder holds the classes and nothing else.
    stamp = root.with_name(root.name + ".dataset.json")
    if stamp.exists():
        if json.loads(stamp.read_text()) == _stamp(spec):
            return root
        raise UsageError(
            f"{root} holds a different dataset ({stamp}): remove both, or name another"
        )
    if root.exists() and any(root.iterdir()) and not _is_ours(root):
        raise UsageError(f"{root} is not empty: name a new directory for the dataset")
    for label in range(min(spec.classes, spec.files)):
        (root / f"class_{label:03d}").mkdir(parents=True, exist_ok=True)
    if progress:
        progress(0, spec.files)
    processes = processes or len(os.sched_getaffinity(0))
    calls = ((str(root), spec, begin) for begin in range(0, spec.files, _CHUNK))
    prepare = functools.partial(_start_worker, spec.seed)
    made = children.results(_make_chunk, calls, processes, "spawn", prepare)
    done = 0
    with contextlib.closing(made):
        for _, count in made:
            done += count
            if progress:
                progress(done, spec.files)
    stamp.write_text(json.dumps(_stamp(spec)))
    return root


def _is_ours(root: Path) -> bool:
    """Whether `root` holds what an interrupted run has left: class folders alone."""
    return all(p.is_dir() and p.name.startswith("class_") for p in root.iterdir())


def digest(root: str | os.PathLike[str]) -> str:
    """SHA-256 over the names and bytes of all files under `root`, in the order of their names."""
    root = Path(root)
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.jpg")):
        total.update(str(path.relative_to(root)).encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
