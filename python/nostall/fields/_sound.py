"""Sound of formats that a library reads: MP3, Ogg and others."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import CorruptionError, UsageError
from nostall.fields._kinds import Custom, Shape, Sound


@dataclass(frozen=True, kw_only=True)
class SoundFile(Sound, Custom):
    """Sound in a file that libsndfile reads: MP3, Ogg (Vorbis, Opus), AIFF, and what `Audio` reads.

    `Audio` reads WAV and FLAC without a library, and is faster. Arguments are those of `Sound`.

    Raises:
        UsageError: the package soundfile is not installed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("soundfile") is None:
            raise UsageError("SoundFile needs the package soundfile: pip install 'nostall[sound]'")

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return (self.frames,) if self.channels == 1 else (self.frames, self.channels)

    def decode(self, stored: bytes) -> NDArray[Any]:
        import soundfile

        try:
            with soundfile.SoundFile(io.BytesIO(stored)) as file:
                rate, channels = int(file.samplerate), int(file.channels)
                mixes = self.channels == 1 and channels > 1
                if self.rate is not None and rate != self.rate:
                    raise CorruptionError(f"{rate} frames a second, not {self.rate}")
                if not mixes and channels != self.channels:
                    raise CorruptionError(f"{channels} channels, not {self.channels}")
                values: NDArray[Any] = file.read(
                    -1 if self.frames is None else self.frames,
                    dtype="float32",  # of int16, libsndfile lets what is too loud wrap around
                    always_2d=True,
                )
        except soundfile.LibsndfileError as error:
            raise CorruptionError(f"it is no sound that libsndfile reads: {error}") from None
        if mixes:
            values = values.mean(axis=1, keepdims=True, dtype=np.float32)
        if self.dtype == "int16":
            values = np.rint(values * 32768).clip(-32768, 32767).astype(np.int16)
        if self.frames is not None and len(values) < self.frames:
            values = np.pad(values, ((0, self.frames - len(values)), (0, 0)))
        return values[:, 0] if self.channels == 1 else values
