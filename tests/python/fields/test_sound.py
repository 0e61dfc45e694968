"""Sound of FLAC files, as libFLAC writes and reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

import nostall
from nostall import _native
from nostall import fields as f
from nostall.errors import CorruptionError, UsageError

RATE = 16000


def flac(values: NDArray[Any], bits: int = 16, **more: Any) -> bytes:
    """A file of values from -1 to 1."""
    out = io.BytesIO()
    soundfile.write(
        out, values, RATE, format="FLAC", subtype=f"PCM_{bits}" if bits > 8 else "PCM_S8", **more
    )
    return out.getvalue()


def waves(frames: int, channels: int, noise: float = 0.1) -> NDArray[np.float64]:
    """Tones with a little noise; channels are alike, so that the encoder joins two."""
    time = np.arange(frames)[:, None] / RATE
    tones = 0.4 * np.sin(2 * np.pi * (220 + 3 * np.arange(channels)) * time)
    return tones + noise * np.random.default_rng(0).uniform(-1, 1, (frames, channels))


def files(root: Path, sounds: list[bytes], **kind: Any) -> nostall.Files:
    names = [f"{i}.flac" for i in range(len(sounds))]
    for name, sound in zip(names, sounds, strict=True):
        (root / name).write_bytes(sound)
    return nostall.Files({"sound": names}, root=root, schema={"sound": f.Audio(**kind)})


def batch_of(root: Path, sounds: list[bytes], **kind: Any) -> Any:
    with nostall.DataLoader(
        files(root, sounds, **kind), 64, shuffle=False, tiers=[], output="numpy"
    ) as loader:
        return next(iter(loader))["sound"]


def test_values_are_those_of_libflac(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for channels in (1, 2, 3, 8):
        sounds = [
            flac(values, bits, **more)
            for values in (
                waves(20000, channels),
                waves(5000, channels, noise=0),
                rng.uniform(-1, 1, (4099, channels)),
                np.zeros((9000, channels)),
                np.full((1, channels), 0.5),
                np.round(waves(3000, channels) * 64) / 128,  # the low bits are not used
                rng.choice([-1.0, 32767 / 32768], (3000, channels)),
            )
            for bits, more in ((16, {}), (24, {}), (8, {"compression_level": 1.0}))
            if bits != 8 or channels < 3
        ]
        found = batch_of(tmp_path, sounds, channels=channels)
        for i, sound in enumerate(sounds):
            wanted, rate = soundfile.read(io.BytesIO(sound), dtype="float32")
            assert rate == RATE and np.array_equal(found.sample(i), wanted), (channels, i)
    # As int16, of one channel, cut and filled up; behind a tag that some programs write.
    stereo = waves(6000, 2)
    mixed = batch_of(tmp_path, [flac(stereo)], frames=7000)
    wanted = soundfile.read(io.BytesIO(flac(stereo)), dtype="float32")[0]
    assert np.array_equal(mixed[0, :6000], wanted.sum(1) / 2) and not mixed[0, 6000:].any()
    tagged = b"ID3\4\0\0\0\0\1\2" + bytes(130) + flac(stereo)
    short = batch_of(tmp_path, [tagged], channels=2, dtype="int16", frames=4500)
    exact = soundfile.read(io.BytesIO(flac(stereo)), dtype="int16")[0]
    assert np.array_equal(short[0], exact[:4500])


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def test_a_file_that_does_not_say_its_length_is_read_twice(tmp_path: Path) -> None:
    sound = flac(waves(10000, 1))
    streamed = changed(sound, 21, bytes([sound[21] & 0xF0, 0, 0, 0, 0]))
    assert np.array_equal(
        batch_of(tmp_path, [streamed]).sample(0), batch_of(tmp_path, [sound]).sample(0)
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x[: len(x) // 2], "a block is damaged or cut off"),
        (lambda x: changed(x, len(x) // 2, b"\xa5\x5a"), "a block is damaged or cut off"),
        (lambda x: x[:20], "description is cut off"),
        (lambda x: changed(x, 4, b"\x01"), "not the first of its parts"),
        (lambda x: changed(x, 22, b"\x00\x00\xff\xff"), "fewer frames than it promises"),
        (lambda x: changed(x, 21, b"\xff\xff\xff\xff\xff"), "fewer frames than it promises"),
        (lambda x: changed(x, 20, b"\x0f\xf0"), "32 bits at 16000.*4 to 24 bits are read"),
        (lambda x: x[1:], "no WAV file"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    with pytest.raises(CorruptionError, match=rf"0\.flac.*field sound.*{message}"):
        batch_of(tmp_path, [damage(flac(waves(20000, 1)))])


@pytest.mark.parametrize("form", ["MP3", "OGG"])
def test_other_formats_are_what_libsndfile_reads(tmp_path: Path, form: str) -> None:
    sounds = []
    for frames in (9000, 4000):
        out = io.BytesIO()
        soundfile.write(out, waves(frames, 2), RATE, format=form)
        sounds.append(out.getvalue())
    (tmp_path / "bad").write_bytes(sounds[0][500:900])
    for i, sound in enumerate(sounds):
        (tmp_path / f"{i}").write_bytes(sound)
    wanted = [soundfile.SoundFile(io.BytesIO(sound)).read(dtype="float32") for sound in sounds]

    def read(paths: list[str], **kind: Any) -> Any:
        schema = {"sound": f.SoundFile(rate=RATE, **kind)}
        data = nostall.Files({"sound": paths}, root=tmp_path, schema=schema)
        with nostall.DataLoader(data, 2, shuffle=False, tiers=[], output="numpy") as loader:
            return next(iter(loader))["sound"]

    stereo = read(["0", "1"], channels=2)
    cut = read(["0", "1"], frames=5000)
    whole = read(["0", "1"], padded=True, dtype="int16")
    for i, values in enumerate(wanted):
        assert np.array_equal(stereo.sample(i), values)
        mean = values.mean(1, dtype=np.float32)
        assert np.array_equal(cut[i, : len(mean)], mean[:5000]) and not cut[i, len(mean) :].any()
        assert whole.lengths[i] == len(mean)
        assert np.array_equal(whole.values[i, : len(mean)], np.rint(mean * 32768))
    loud = np.sign(waves(9000, 2))  # more than full scale, once it is decoded
    soundfile.write(tmp_path / "loud", loud, RATE, format=form)
    stored = io.BytesIO((tmp_path / "loud").read_bytes())
    values = soundfile.SoundFile(stored).read(dtype="float32")
    assert np.abs(values).max() > 1
    clipped = np.rint(values * 32768).clip(-32768, 32767)
    assert np.array_equal(read(["loud"], channels=2, dtype="int16").sample(0), clipped)
    for paths, kind, message in [
        (["bad"], {}, "no sound that libsndfile reads"),
        (["1"], {"channels": 3}, "2 channels, not 3"),
    ]:
        with pytest.raises(CorruptionError, match=f"{paths[0]}.*field sound.*{message}"):
            read(paths, **kind)
    with pytest.raises(UsageError, match="channels 0"):
        f.SoundFile(channels=0)


def test_every_changed_byte_of_a_block_is_found(tmp_path: Path) -> None:
    """Blocks have checksums; the description alone is taken as it is."""
    sound = flac(waves(600, 2))
    source = files(tmp_path, [sound]).native
    program = _native.compile_program([f.Audio(channels=2).to_native("sound", 0)])
    _native.unpack_one(source, program, sound, 0, seed=0, epoch=0, occurrence=0)
    for at in range(sound.index(b"\xff\xf8"), len(sound), 3):
        wrong = changed(sound, at, bytes([sound[at] ^ 0x10]))
        with pytest.raises(CorruptionError, match="damaged or cut off"):
            _native.unpack_one(source, program, wrong, 0, seed=0, epoch=0, occurrence=0)
