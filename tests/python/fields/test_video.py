"""Clips of videos, as PyAV writes and reads them."""

from __future__ import annotations

import functools
import importlib.util
import io
import random
import tarfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

import nostall
from nostall import fields as f
from nostall.errors import CorruptionError, UsageError

RATE, SIDES = 25, (32, 48)


@functools.cache
def video(codec: str = "mpeg4", container: str = "mp4", frames: int = 40, **more: Any) -> bytes:
    """A file whose frames are all different, with a key frame every 12th: the same in each run."""
    out = io.BytesIO()
    options = {"fflags": "bitexact"}  # Matroska's numbers are drawn else
    options |= {name: more.pop(name) for name in ("movflags",) if name in more}
    if codec == "libx264":
        more["mbtree"] = "0"  # which gives one of several results
    with av.open(out, "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=RATE)
        stream.height, stream.width = SIDES
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 12
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"g": "12", **more}
        ramp = np.arange(SIDES[0] * SIDES[1] * 3, dtype=np.uint32).reshape(*SIDES, 3) // 37
        for i in range(frames):
            picture = av.VideoFrame.from_ndarray(((ramp + 6 * i) % 251).astype(np.uint8), "rgb24")
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    return out.getvalue()


def every_frame(data: bytes) -> NDArray[np.uint8]:
    with av.open(io.BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def batches(root: Path, videos: list[bytes], epochs: int = 1, **kind: Any) -> list[Any]:
    names = [f"{i}.mp4" for i in range(len(videos))]
    for name, data in zip(names, videos, strict=True):
        (root / name).write_bytes(data)
    data = nostall.Files({"clip": names}, root=root, schema={"clip": f.Video(**kind)})
    with nostall.DataLoader(
        data, 8, epochs=epochs, shuffle=False, seed=3, tiers=[], output="numpy", threads=2
    ) as loader:
        return [batch["clip"] for epoch in loader.epochs() for batch in epoch]


FILES = [
    ("mpeg4", "mp4", {"bf": "2"}),
    ("mpeg4", "avi", {"bf": "2"}),
    ("libx264", "mp4", {"bf": "3"}),
    ("libx264", "matroska", {"bf": "2"}),
    ("libx264", "avi", {"bf": "2"}),
    ("libvpx", "webm", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    ("mpeg1video", "mpegts", {"bf": "2"}),
]


def test_frames_are_those_of_pyav(tmp_path: Path) -> None:
    videos = [video(codec, container, **more) for codec, container, more in FILES]
    whole = [every_frame(data) for data in videos]
    assert all(len(frames) == 40 for frames in whole)
    for begin, first in ((0.0, 0), (0.6, 15), ("middle", 17)):
        (found,) = batches(tmp_path, videos, frames=6, begin=begin)
        for i, frames in enumerate(whole):
            assert np.array_equal(found.sample(i), frames[first : first + 6]), (begin, FILES[i])
    (found,) = batches(tmp_path, videos, frames=4, step=11, begin=0.2, size=SIDES)
    assert found.shape == (len(videos), 4, *SIDES, 3)
    assert all(np.array_equal(found[i], frames[5:39:11]) for i, frames in enumerate(whole))
    # Frames by time: half as many, and twice as many, a second.
    (found,) = batches(tmp_path, videos, frames=5, rate=RATE / 2, begin=0.0, size=SIDES)
    assert all(np.array_equal(found[i], frames[:10:2]) for i, frames in enumerate(whole))
    (found,) = batches(tmp_path, videos, frames=6, rate=2 * RATE, begin=0.0, size=SIDES)
    assert all(
        len(np.unique(found[i].reshape(6, -1), axis=0)) in (3, 4)
        and np.array_equal(found[i][[0, 2, 4]], frames[:3])
        for i, frames in enumerate(whole)
    )
    (small,) = batches(tmp_path, videos, frames=1, begin=0.0, size=(16, 24))
    for clip, frames in zip(small, whole, strict=True):
        means = frames[0].reshape(16, 2, 24, 2, 3).mean((1, 3))
        assert np.abs(clip[0] - means).mean() < 12


def test_beginnings_are_drawn_by_seed_epoch_and_sample(tmp_path: Path) -> None:
    data = video()
    whole = [frame.tobytes() for frame in every_frame(data)]
    once = batches(tmp_path, [data] * 8, epochs=6, frames=3, step=2, size=SIDES)
    again = batches(tmp_path, [data] * 8, epochs=6, frames=3, step=2, size=SIDES)
    assert all(map(np.array_equal, once, again))
    begins = np.array([[whole.index(clip[0].tobytes()) for clip in batch] for batch in once])
    assert begins.max() <= 35 and len(np.unique(begins)) > 15
    assert all(len(np.unique(row)) > 3 for row in (*begins, *begins.T))
    for batch, row in zip(once, begins, strict=True):
        for clip, begin in zip(batch, row, strict=True):
            assert [whole.index(frame.tobytes()) for frame in clip] == [begin, begin + 2, begin + 4]


def test_files_with_fewer_frames(tmp_path: Path) -> None:
    videos = [video(frames=5), video(frames=1)]
    for begin in ("random", "middle", 0.0):
        with pytest.raises(
            CorruptionError, match=r"0\.mp4.*field clip: it has 5 of the 9 frames of a clip"
        ):
            batches(tmp_path, videos[:1], frames=9, begin=begin)
        for by in ({"step": 2}, {"rate": RATE / 2}):
            (last,) = batches(
                tmp_path, videos, frames=9, begin=begin, short="last", size=SIDES, **by
            )
            (black,) = batches(
                tmp_path, videos, frames=9, begin=begin, short="zeros", size=SIDES, **by
            )
            for i, data in enumerate(videos):
                frames = every_frame(data)[::2]
                assert np.array_equal(last[i, : len(frames)], frames)
                assert (last[i, len(frames) :] == frames[-1]).all()
                assert np.array_equal(black[i, : len(frames)], frames)
                assert not black[i, len(frames) :].any()
    with pytest.raises(
        CorruptionError, match=r"no frame 0\.5 s behind its first: it is 0\.1.* long"
    ):
        batches(tmp_path, videos[:1], frames=2, begin=0.5, short="last")


def sound_alone() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.sample_rate = 16000
        file.mux([*stream.encode(silence), *stream.encode(None)])
    return out.getvalue()


def nothing_shown() -> bytes:
    data = bytearray(video("libvpx", "webm", frames=1))
    at = data.index(b"\x9d\x01\x2a") - 3  # the frame's head, before its start code
    data[at] &= ~0x10
    return bytes(data)


FRAGMENTS = "frag_keyframe+empty_moov+default_base_moof"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *(
            (video(codec, container, **more)[:-400], r"cut off: it has \d+ of \d+ bytes")
            for codec, container, more in FILES[:6]
        ),
        (
            video(movflags=FRAGMENTS)[:-400],
            r"cut off: it has \d+ of \d+ bytes",
        ),
        (video()[:6], "no video that can be decoded"),
        (b"", "no video that can be decoded"),
        (sound_alone(), "no video stream"),
        (nothing_shown(), "no frame that is shown"),
        (video()[:600] + bytes(900) + video()[1500:], "can be decoded"),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CorruptionError, match=rf"0\.mp4.*field clip.*{message}"):
        batches(tmp_path, [data], frames=40, begin=0.0)


def test_changed_bytes_give_a_clip_or_an_error() -> None:
    rng = random.Random(1)
    clips, damages = set(), set()
    for codec, container, more in FILES * 40:
        data = bytearray(video(codec, container, **more))
        for _ in range(rng.choice([1, 3, 20])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        kind = f.Video(frames=3, rate=rng.choice([None, 12.0]), short="last")
        try:
            clips.add(kind.decode(bytes(data), rng.getrandbits(64)).shape[0])
        except CorruptionError as error:
            damages.add(str(error).partition(":")[0])
    # Which bytes do harm is the encoder's choice.
    assert clips == {3} and damages


def test_a_list_of_files_opens_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.mp4").write_bytes(video())
    with pytest.raises(CorruptionError, match=r"0\.mp4.*no video that can be decoded"):
        batches(tmp_path, [b"ffconcat version 1.0\nfile a.mp4\n"], frames=2)


def test_arguments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in [
        ({"frames": 0}, "frames 0 must be a whole number"),
        ({"frames": 2, "step": 2, "rate": 5.0}, "both say which frames"),
        ({"frames": 2, "rate": 0.0}, "rate 0.0 must be positive"),
        ({"frames": 2, "begin": "end"}, '"random", "middle"'),
        ({"frames": 2, "begin": -1.0}, "begin -1.0 must be seconds"),
        ({"frames": 2, "short": "drop"}, '"refuse", "last", "zeros"'),
        ({"frames": 2, "size": (0, 4)}, "size 0 must be"),
    ]:
        with pytest.raises(UsageError, match=message):
            f.Video(**arguments)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "av" else found(name, *more),
    )
    with pytest.raises(UsageError, match=r"needs the package av: pip install 'nostall\[video\]'"):
        f.Video(frames=2)


def test_folders_and_archives_hand_out_the_bytes(tmp_path: Path) -> None:
    data = video()
    (tmp_path / "clips").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for ending in ("mp4", "mkv", "webm", "avi"):
            (tmp_path / "clips" / f"{ending}.{ending}").write_bytes(data)
            member = tarfile.TarInfo(f"one.{ending}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    files = nostall.Files({"clip": "clips"}, root=tmp_path)
    assert files.schema == f.Schema(clip=f.Bytes())
    assert [files.read(i) for i in range(4)] == [data] * 4
    members = nostall.TarShards(tmp_path / "a.tar", members="all")
    assert set(members.schema.values()) == {f.Bytes()}
    with nostall.DataLoader(members, 1, tiers=[], output="numpy") as loader:
        batch = next(iter(loader))
    assert list(batch) == ["mp4", "mkv", "webm", "avi"]
    assert all(value.sample(0).tobytes() == data for value in batch.values())
    clips = nostall.TarShards(
        tmp_path / "a.tar", members={"clip": "mp4"}, schema={"clip": f.Video(frames=2, begin=0.0)}
    )
    with nostall.DataLoader(clips, 1, tiers=[], output="numpy") as loader:
        assert np.array_equal(next(iter(loader))["clip"].sample(0), every_frame(data)[:2])
