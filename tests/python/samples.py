"""Bytes of small files, as tests of several rooms make them."""

from __future__ import annotations

import io
import tarfile
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def png(picture: Any, **options: Any) -> bytes:
    """Of an image of Pillow, or an array."""
    file = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(file, "png", **options)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def wav(frames: int) -> bytes:
    """The frames 0, 1, 2 and so on."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(np.arange(frames, dtype="<i2").tobytes())
    return file.getvalue()


def noise(count: int, seed: int = 0) -> list[bytes]:
    """Samples of several lengths that no decoder takes."""
    random = np.random.default_rng(seed)
    return [random.bytes(int(n)) for n in random.integers(0, 3000, count)]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def shard(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            add(tar, name, content)
    return path
