"""Frames of videos, by FFmpeg's libraries, which PyAV brings."""

from __future__ import annotations

import importlib.util
import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from nostall.errors import CorruptionError, UsageError
from nostall.fields._kinds import Custom, Shape, check_choice, keep_number, keep_size

if TYPE_CHECKING:
    import av

# Containers that hold a video themselves: playlists name other files.
_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,flv,asf,ogg"
_MOST_PIXELS = 178_956_970  # of a frame, as of an image
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


@dataclass(frozen=True, kw_only=True)
class Video(Custom):
    """A clip of a video file: MP4, Matroska, WebM, AVI and what else FFmpeg's libraries read.

    A batch has uint8 (n, frames, height, width, 3), or `Ragged` without `size`. What is decoded are the
    frames from the last key frame before the clip to its end; of AVI, which has no times of frames, all
    frames to its end. A rotation that the file asks for is ignored. Of several videos in a file the
    first one is taken.

    Args:
        frames: of each clip.
        step: take every so-many-th frame of the file.
        rate: take so many frames per second instead, each the nearest one in time; frames repeat where
            the file has fewer.
        size: (height, width) in pixels that frames are resized to, bilinear; None keeps theirs.
        begin: "random" draws the first frame by (seed, epoch, sample), "middle" takes the clip in the
            middle; a number is that of seconds from the first frame.
        short: what happens to a file with fewer frames: "refuse" makes it unusable, "last" repeats the
            last frame, "zeros" fills up with black ones.
        fill: the bytes of a file that stands for a missing one.

    Raises:
        UsageError: an argument is not possible, or the package av is not installed.
    """

    frames: int
    step: int = 1
    rate: float | None = None
    size: tuple[int, int] | None = None
    begin: float | Literal["random", "middle"] = "random"
    short: Literal["refuse", "last", "zeros"] = "refuse"
    fill: bytes | None = None

    dtype: ClassVar[str] = "uint8"  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_number(self, "frames", 1)
        keep_number(self, "step", 1)
        if self.rate is not None and (self.step != 1 or not 0 < self.rate < 1e6):
            raise UsageError(
                f"Video: rate {self.rate!r} must be positive, and goes without step: both say which "
                "frames are taken"
            )
        keep_size(self)
        if isinstance(self.begin, str):
            check_choice(self, "begin", self.begin, ("random", "middle"))
        elif not 0 <= self.begin < 1e9:
            raise UsageError(f"Video: begin {self.begin!r} must be seconds, 0 or more")
        check_choice(self, "short", self.short, ("refuse", "last", "zeros"))
        if importlib.util.find_spec("av") is None:
            raise UsageError("Video needs the package av: pip install 'nostall[video]'")

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        height, width = self.size or (None, None)
        return (self.frames, height, width, 3)

    def _is_drawn(self) -> bool:
        return self.begin == "random"

    def decode(self, stored: bytes, draw: int = 0) -> NDArray[np.uint8]:
        import av

        _refuse_cut_off(stored)
        try:
            with av.open(
                io.BytesIO(stored),
                metadata_errors="ignore",
                container_options={"format_whitelist": _FORMATS},
            ) as file:
                return self._clip(file, draw)
        except av.FFmpegError as error:
            raise CorruptionError(f"it is no video that can be decoded: {error.strerror}") from None

    def _clip(self, file: av.container.InputContainer, draw: int) -> NDArray[np.uint8]:
        cover = 0x400  # AV_DISPOSITION_ATTACHED_PIC
        streams = [s for s in file.streams.video if not int(s.disposition) & cover]
        if not streams:
            raise CorruptionError("it has no video stream")
        stream = streams[0]
        context = stream.codec_context
        if context is None:
            raise CorruptionError("FFmpeg has no decoder for its video")
        context.thread_count = 1  # the loader has threads
        context.options = {"err_detect": "explode", "max_pixels": str(_MOST_PIXELS)}
        try:
            packets = [p for p in file.demux(stream) if p.size and not p.is_discard]
        except IndexError:  # PyAV lists streams when it opens a file
            raise CorruptionError("a stream of it begins behind its head") from None
        if not packets or any(packet.is_corrupt for packet in packets):
            raise CorruptionError("it is cut off: frames are missing")
        times = sorted({p.pts for p in packets if p.pts is not None and _is_shown(p, context.name)})
        # Of AVI these are those of decoding.
        counted = file.format.name == "avi" or any(p.pts is None for p in packets)
        if not times and not counted:
            raise CorruptionError("it has no frame that is shown")
        if counted:
            rate = stream.average_rate or 25
            wanted = self._wanted(range(len(packets)), 1 / Fraction(rate), draw)
            return self._taken(wanted, enumerate(_decoded(context, packets)))
        wanted = self._wanted(times, Fraction(stream.time_base or 1), draw)
        keys = [i for i, p in enumerate(packets) if p.is_keyframe and (p.pts or 0) <= wanted[0]]
        found = _decoded(context, packets[keys[-1] if keys else 0 :])
        return self._taken(wanted, ((f.pts, f) for f in found if f.pts is not None))

    def _wanted(self, times: Sequence[int], unit: Fraction, draw: int) -> list[int]:
        """The times of the clip's frames, of which there may be too few; `unit` is in seconds."""
        half = Fraction(times[-1] - times[0], 2 * max(1, len(times) - 1))  # of a frame's time
        end = times[-1] + half
        tick = Fraction(self.step) if self.rate is None else 1 / (Fraction(self.rate) * unit)
        if self.rate is None:
            begins = len(times) - (self.frames - 1) * self.step
        else:
            begins = bisect_right(times, end - (self.frames - 1) * tick)
        if self.begin == "random":
            at = draw % begins if begins > 0 else 0
        elif self.begin == "middle":
            at = max(0, begins - 1) // 2
        else:
            first = times[0] + Fraction(self.begin) / unit
            if first > end:
                raise CorruptionError(
                    f"it has no frame {self.begin} s behind its first: it is "
                    f"{float((end - times[0]) * unit):.3f} s long"
                )
            at = _nearest(times, first)
        if self.rate is None:
            wanted = list(times[at : at + (self.frames - 1) * self.step + 1 : self.step])
        else:
            moments = (times[at] + k * tick for k in range(self.frames))
            wanted = [times[_nearest(times, moment)] for moment in moments if moment <= end]
        if len(wanted) < self.frames and self.short == "refuse":
            raise CorruptionError(
                f"it has {len(wanted)} of the {self.frames} frames of a clip; short= says what takes "
                "the place of the others"
            )
        return wanted

    def _taken(
        self, wanted: list[int], frames: Iterable[tuple[int, av.VideoFrame]]
    ) -> NDArray[np.uint8]:
        """The pixels of frames of these times, in order."""
        from av.video.reformatter import VideoReformatter

        convert = VideoReformatter()
        clip: NDArray[np.uint8] | None = None
        at = 0
        for time, frame in frames:
            if time < wanted[at]:
                continue
            if frame.is_corrupt:
                break
            if clip is None:
                sides = self.size or (frame.height, frame.width)
                clip = np.zeros((self.frames, *sides, 3), np.uint8)
            height, width = clip.shape[1:3]
            clip[at] = convert.reformat(
                frame, width, height, "rgb24", interpolation="BILINEAR"
            ).to_ndarray()
            at += 1
            while at < len(wanted) and wanted[at] <= time:
                clip[at] = clip[at - 1]
                at += 1
            if at == len(wanted):
                if self.short == "last":
                    clip[at:] = clip[at - 1]
                return clip
        raise CorruptionError(f"{at} of the clip's {len(wanted)} frames can be decoded")


def _is_shown(packet: av.Packet, codec: str) -> bool:
    """VP8 has frames that others are made of."""
    return codec != "vp8" or bool(bytes(packet)[0] & 0x10)


def _decoded(
    context: av.VideoCodecContext, packets: Iterable[av.Packet]
) -> Iterator[av.VideoFrame]:
    """Frames in the order in which they are shown."""
    for packet in packets:
        yield from context.decode(packet)
    yield from context.decode(None)


def _nearest(times: Sequence[int], moment: Fraction) -> int:
    """The place of the time that is nearest; the later one if two are."""
    at = bisect_left(times, moment)
    if at == len(times) or (at > 0 and moment - times[at - 1] < times[at] - moment):
        at -= 1
    return at


def _refuse_cut_off(data: bytes) -> None:
    """Compares the length that a container states with its own: FFmpeg reads what is there.

    Raises:
        CorruptionError: there is less.
    """
    stated = _stated_length(data)
    if stated > len(data):
        raise CorruptionError(f"it is cut off: it has {len(data)} of {stated} bytes")


def _stated_length(data: bytes) -> int:
    """By the outermost parts of RIFF, MP4 and Matroska; 0 if none is stated."""
    at = 0
    if data[:4] == b"RIFF":
        while data[at : at + 4] == b"RIFF" and at + 8 <= len(data):
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            at += at % 2 if at < len(data) else 0
    elif data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"):
        while at < len(data):
            size = int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "big")
            if size == 1:
                size = int.from_bytes(data[at + 8 : at + 16].ljust(8, b"\0"), "big")
            if size < 8:  # to the end, or no part
                break
            at += size
    elif data[:4] == _EBML:
        at, size = _sized(data, 4)
        at += size
        if data[at : at + 4] == _SEGMENT:
            at, size = _sized(data, at + 4)
            at += size
    return at


def _sized(data: bytes, at: int) -> tuple[int, int]:
    """Where the content of an element of EBML begins, and its size; 0 if that is not stated."""
    width = 9 - data[at].bit_length() if at < len(data) and data[at] else 8
    size = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return at + width, 0 if size == (1 << 7 * width) - 1 else size
