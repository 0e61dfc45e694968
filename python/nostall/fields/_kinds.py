"""The kinds of fields: frozen descriptions, which the native core compiles and runs.

Every kind says what the stored bytes must be, and what a batch of n samples has of them. A sample
whose bytes are not so is unusable: the loader raises, or replaces it (`on_error`).
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import reprlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from nostall import _native
from nostall.base import _checks as checks
from nostall.errors import UsageError
from nostall.fields._batch import Padded, Ragged

Shape = tuple[int | None, ...]
ArrayCodec = Literal["raw", "npy", "varint", "msgpack"]


def check_choice(kind: object, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(f'"{c}"' for c in choices)
        raise UsageError(f"{type(kind).__name__}: {name} {value!r} is not one of {known}")


def check_number(kind: object, name: str, value: object, least: int) -> int:
    """The number as one of Python."""
    if not checks.is_whole(value) or not least <= value < 2**31:
        raise UsageError(
            f"{type(kind).__name__}: {name} {value!r} must be a whole number, {least} or more"
        )
    return int(value)


def keep_number(kind: object, name: str, least: int) -> None:
    """Checks a parameter, and keeps it as a number of Python."""
    object.__setattr__(kind, name, check_number(kind, name, getattr(kind, name), least))


def keep_size(kind: Any) -> None:
    """As `keep_number`, of the parameter `size`, which may be None."""
    given = kind.size
    if given is None:
        return
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise UsageError(f"{type(kind).__name__}: size {given!r} must be (height, width)")
    sides = tuple(check_number(kind, "size", side, 1) for side in given)
    object.__setattr__(kind, "size", sides)


def dtype_name(given: Any) -> Any:
    """NumPy's name of a type of NumPy's; anything else stays, for `check_choice` to refuse."""
    if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
        found = np.dtype(given)
        return found.name if found.isnative else given
    return given


def keep_dtype(kind: object, name: str, choices: tuple[str, ...]) -> None:
    """Checks a parameter that is a type, and keeps the name of it."""
    given = getattr(kind, name)
    check_choice(kind, name, dtype_name(given), choices)
    if not isinstance(given, str):
        object.__setattr__(kind, name, dtype_name(given))


def _varint(number: int) -> bytes:
    """An integer as protocol buffers have it."""
    rest, out = int(number) & 2**64 - 1, bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def _msgpack(value: Any) -> bytes:
    """A number, or lists of them, as MessagePack has them, each at its full width."""
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(_msgpack, value))
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    return struct.pack(">Bq", 0xD3, value) if value < 2**63 else struct.pack(">BQ", 0xCF, value)


class Kind(ABC):
    """Base of the kinds of fields; that of kinds of the user's own is `Custom`."""

    fill: Any = None
    padded: bool = False

    #: Whether transforms apply to it, together with the images of its sample.
    transformed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the flags; what overrides it calls it."""
        self._keep_flag("padded")

    def _keep_flag(self, name: str) -> None:
        given = getattr(self, name, False)
        if checks.flag(f"{type(self).__name__}: {name}", given) is not given:
            object.__setattr__(self, name, bool(given))

    def _is_drawn(self) -> bool:
        """Whether random bits decide what a value is."""
        return False

    def to_native(
        self,
        name: str,
        index: int,
        pipeline: _native.Pipeline | None = None,
        rows_of: int | None = None,
    ) -> _native.Field:
        """The field as the native core takes it; `index` is its place in the source.

        `pipeline` is that of its group, `rows_of` the place of the boxes that its rows go with.
        """
        native = _native.Field()
        native.name = name
        native.index = index
        kind = self._native_kind()
        if pipeline is not None:
            kind = self._in_group(kind, pipeline)
        if rows_of is not None:
            kind.rows_of = rows_of
        native.kind = kind
        native.padded = self.padded
        if self.fill is not None:
            native.fill = self.encode(self.fill)
        return native

    @abstractmethod
    def _native_kind(self) -> Any:
        """What the core is to do."""

    def _in_group(self, kind: Any, pipeline: _native.Pipeline) -> Any:
        kind.pipeline = pipeline
        return kind

    def encode(self, value: Any) -> bytes:
        """The value as it is stored, for columns and for `fill`.

        Raises:
            UsageError: it is no value of this kind.
        """
        if not isinstance(value, bytes):
            raise UsageError(
                f"{type(self).__name__}: a value is the bytes of a file, not {type(value).__name__}"
            )
        return value

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        """What a batch has of output `number`; `array` makes the kind of array that batches have."""
        value = batch.output(number)
        if not isinstance(value, tuple):
            return array(value)
        parts = [array(part) for part in value]
        return Padded(*parts) if self.padded else Ragged(*parts)


@dataclass(frozen=True, kw_only=True)
class Image(Kind):
    """An encoded image: JPEG, PNG, WebP, BMP, PNM or TIFF.

    With transforms an array (n, 3, height, width) or (n, height, width, 3); without, its bytes as
    they are: `Ragged`, uint8. Images that are transformed together have one size and the same draws.

    Args:
        fill: the bytes of an image file that stands for a missing one.
    """

    fill: bytes | None = None

    transformed: ClassVar[bool] = True
    _single: ClassVar[bool] = True  # a sample has one

    def _native_kind(self) -> Any:
        return _native.BytesField()

    def _in_group(self, kind: Any, pipeline: _native.Pipeline) -> Any:
        image = _native.ImageField()
        image.pipeline = pipeline
        return image


@dataclass(frozen=True, kw_only=True)
class Mask(Kind):
    """A label for each pixel: a PNG image of one channel, grey of 1 to 16 bits or with a palette.

    Labels are kept exactly: grey values unscaled, or the indices of the palette. An array
    (n, height, width) if it is transformed with its image (by nearest pixels; labels of at most 16
    bits in uint8, uint16, int16, int32 or int64) or `size` is given, else `Ragged` or `Padded`.

    Args:
        dtype: of the labels; one that it cannot hold makes the sample unusable.
        size: (height, width) in pixels that every mask must have, where it is not transformed.
        padded: fill up to the largest of the batch, where sizes differ.
        fill: the bytes of a PNG file that stands for a missing one.
    """

    dtype: str = "uint8"
    size: tuple[int, int] | None = None
    padded: bool = False
    fill: bytes | None = None

    transformed: ClassVar[bool] = True
    _TYPES: ClassVar[tuple[str, ...]] = (
        "uint8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_dtype(self, "dtype", self._TYPES)
        keep_size(self)

    def _native_kind(self) -> Any:
        kind = _native.MaskField()
        kind.type = self.dtype
        if self.size is not None:
            kind.height, kind.width = self.size
        return kind


DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


def exact(value: Any, dtype: Any) -> np.ndarray:
    """The array of this type; fractions are rounded to floating point, and nothing else.

    Raises:
        ValueError, TypeError, OverflowError: the type cannot hold it.
    """
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return np.ascontiguousarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        array = np.asarray(value, dtype, order="C")
    given = np.asarray(value)
    whole = array.dtype.kind in "biu"
    if given.dtype.kind in "SU" and given.size:
        raise ValueError("texts are no numbers")
    if whole and not np.array_equal(array, given):
        raise ValueError("it has numbers that the type cannot hold")
    if not whole and np.isinf(array).any() and not np.array_equal(np.isinf(given), np.isinf(array)):
        raise ValueError("it has numbers that are too large")
    return array


class _Numbers(Kind):
    """What kinds of arrays have in common."""

    dtype: str = "float32"
    codec: str = "npy"
    _MEANING: ClassVar[str] = "none"

    @abstractmethod
    def _dimensions(self) -> Shape: ...

    def _meaning(self) -> str:
        return self._MEANING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep_flag("normalised")
        keep_dtype(self, "dtype", DTYPES)
        check_choice(self, "codec", self.codec, ("raw", "npy", "varint", "msgpack"))
        if not isinstance(self._dimensions(), tuple):
            raise UsageError(
                f"{type(self).__name__}: shape {self._dimensions()!r} must be a tuple, with None "
                "where samples differ"
            )
        for side in self._dimensions():
            if side is not None:
                check_number(self, "shape", side, 0)

    def _native_kind(self) -> Any:
        kind = _native.ArrayField()
        kind.type = self.dtype
        kind.shape = [-1 if side is None else side for side in self._dimensions()]
        kind.codec = _native.ArrayCodec[self.codec]
        kind.meaning = _native.ArrayMeaning[self._meaning()]
        kind.normalised = bool(getattr(self, "normalised", False))
        return kind

    def encode(self, value: Any) -> bytes:
        try:
            array = exact(value, self.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{type(self).__name__}: no array of {self.dtype}: {error}") from None
        wanted = self._dimensions()
        if array.shape == (0,) and len(wanted) > 1 and wanted[0] is None:
            array = array.reshape([side or 0 for side in wanted])  # the empty list
        if len(wanted) != array.ndim or any(
            w is not None and w != s for w, s in zip(wanted, array.shape, strict=True)
        ):
            raise UsageError(
                f"{type(self).__name__}: a value has the shape {array.shape}, not {wanted}"
            )
        if self.codec == "raw":
            return array.tobytes()
        if self.codec == "varint":
            return b"".join(_varint(number) for number in array.ravel().tolist())
        if self.codec == "msgpack":
            return _msgpack(array.tolist())
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Array(_Numbers):
    """Numbers of one type: an array (n, \\*shape), or `Ragged` or `Padded` where a side is None.

    Args:
        dtype: NumPy's name of the type; stored numbers must have it, in little-endian order.
        shape: of one sample; None is a side that differs from sample to sample.
        codec: "npy" for .npy files (pickled objects are refused); "raw" for the numbers alone, and
            "varint" for integers as protocol buffers have them, of which one side at most can differ;
            or "msgpack" for lists of MessagePack.
        padded: fill up to the largest of the batch, where sizes differ.
        fill: an array that stands for a missing one.
        rows_of: the name of the field of `Boxes` that it says something of, such as their classes: one
            row for each box, which goes when the box goes (``SanitizeBoundingBoxes``).
    """

    dtype: str = "float32"
    shape: Shape = (None,)
    codec: ArrayCodec = "npy"
    padded: bool = False
    fill: Any = field(default=None, compare=False)  # arrays have no one comparison
    rows_of: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = tuple(None if side is None else int(side) for side in self.shape)
        object.__setattr__(self, "shape", sides)
        if self.rows_of is not None and (not self.shape or self.shape[0] is not None):
            raise UsageError("Array: the first side of rows_of boxes is None: as many as boxes")

    def _dimensions(self) -> Shape:
        return self.shape


@dataclass(frozen=True, kw_only=True)
class Boxes(_Numbers):
    """Boxes of one sample, float32 (k, 4): `Ragged` of shape (boxes of all, 4), or `Padded`.

    A sample is unusable if a number is NaN or infinite, or the size of a box is negative, unless
    ``SanitizeBoundingBoxes`` takes such boxes out. Boxes without an area are kept. Transforms move
    boxes with their image, by torchvision's rules.

    Args:
        format: "xyxy" (left, top, right, bottom), "xywh" (left, top, width, height) or "cxcywh"
            (centre, width, height), in pixels.
        normalised: parts of the image's width and height instead of pixels; numbers outside 0 to 1
            make the sample unusable.
        codec: as of `Array`.
        padded: fill up with boxes of zeros to the most of the batch.
        fill: an array that stands for missing boxes: ``numpy.zeros((0, 4))`` for none.
    """

    format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy"
    normalised: bool = False
    codec: ArrayCodec = "npy"
    padded: bool = False
    fill: Any = field(default=None, compare=False)  # arrays have no one comparison

    transformed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "format", self.format, ("xyxy", "xywh", "cxcywh"))
        super().__post_init__()

    def _dimensions(self) -> Shape:
        return (None, 4)

    def _meaning(self) -> str:
        return self.format


@dataclass(frozen=True, kw_only=True)
class Keypoints(_Numbers):
    """Points of one sample, float32: (k, values), or (k, points, values) for k objects.

    `Ragged` or `Padded`. A sample is unusable if a number is NaN or infinite. Transforms move points
    with their image.

    Args:
        points: points per object; None if the points of a sample are no objects.
        values: 2 (x, y) or 3 (x, y, visibility), in pixels.
        normalised: parts of the image's width and height instead of pixels.
        codec: as of `Array`.
        padded: fill up with zeros to the most of the batch.
        fill: an array that stands for missing points.
        rows_of: the name of the field of `Boxes` of the same objects. Points cannot lose what boxes
            lose: ``SanitizeBoundingBoxes`` is refused beside them.
    """

    points: int | None = None
    values: Literal[2, 3] = 2
    normalised: bool = False
    codec: ArrayCodec = "npy"
    padded: bool = False
    fill: Any = field(default=None, compare=False)  # arrays have no one comparison
    rows_of: str | None = None

    transformed: ClassVar[bool] = True
    _MEANING: ClassVar[str] = "keypoints"

    def __post_init__(self) -> None:
        if not checks.is_whole(self.values) or self.values not in (2, 3):
            raise UsageError(f"Keypoints: values {self.values!r} must be 2 or 3")
        super().__post_init__()
        keep_number(self, "values", 2)
        if self.points is not None:
            keep_number(self, "points", 0)

    def _dimensions(self) -> Shape:
        return (None, self.values) if self.points is None else (None, self.points, self.values)


@dataclass(frozen=True, kw_only=True)
class Scalar(Kind):
    """One number: an array (n,).

    Args:
        dtype: NumPy's name of the type.
        codec: "raw" for its bytes, little-endian, "decimal" for text as in .cls files, "varint" for
            an integer as protocol buffers have it, or "msgpack" for a number of MessagePack.
        stored: the type of the raw bytes, where it is another one; a number that `dtype` cannot hold
            makes the sample unusable.
        fill: the number that stands for a missing one.
    """

    dtype: str = "int64"
    codec: Literal["raw", "decimal", "varint", "msgpack"] = "raw"
    stored: str | None = None
    fill: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_dtype(self, "dtype", DTYPES)
        check_choice(self, "codec", self.codec, ("raw", "decimal", "varint", "msgpack"))
        if self.stored is not None:
            keep_dtype(self, "stored", DTYPES)

    def _native_kind(self) -> Any:
        kind = _native.ScalarField()
        kind.type = self.dtype
        kind.codec = _native.ScalarCodec[self.codec]
        if self.stored is not None:
            kind.stored = self.stored
        return kind

    def encode(self, value: Any) -> bytes:
        try:
            number = exact([value], self.stored or self.dtype)
        except (OverflowError, TypeError, ValueError):
            raise UsageError(f"Scalar: {value!r} is no {self.stored or self.dtype}") from None
        if self.codec == "raw":
            return number.tobytes()
        plain = number[0].item()
        if self.codec == "decimal":
            return str(plain).encode()
        return _varint(plain) if self.codec == "varint" else _msgpack(plain)


@dataclass(frozen=True, kw_only=True)
class Bytes(Kind):
    """Bytes as they are: `Ragged`, uint8, or `Padded` with zeros.

    Args:
        padded: fill up to the longest of the batch.
        fill: the bytes that stand for missing ones.
    """

    padded: bool = False
    fill: bytes | None = None

    def _native_kind(self) -> Any:
        return _native.BytesField()


@dataclass(frozen=True, kw_only=True)
class Text(Kind):
    """Text in UTF-8, without byte order mark: a list of n texts.

    Args:
        fill: the text that stands for a missing one.
    """

    fill: str | None = None

    def _native_kind(self) -> Any:
        return _native.TextField()

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise UsageError(f"Text: a value is text, not {type(value).__name__}")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"Text: {error}") from None

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        """A list of texts."""
        return batch.texts(number)


@dataclass(frozen=True, kw_only=True)
class Json(Text):
    """A JSON value in UTF-8: a list of n values, as ``json.loads`` gives them.

    Args:
        fill: the value that stands for a missing one; None: there is none.
        rows_of: the name of the field of `Boxes` that it lists something of. It cannot lose what they
            lose: ``SanitizeBoundingBoxes`` is refused beside it.
    """

    fill: Any = None
    rows_of: str | None = None

    def _native_kind(self) -> Any:
        kind = _native.TextField()
        kind.json = True
        return kind

    def encode(self, value: Any) -> bytes:
        try:
            # NaN and infinity are no JSON: who reads them back takes them for damage.
            return json.dumps(value, allow_nan=False).encode()
        except (RecursionError, TypeError, ValueError) as error:
            raise UsageError(f"Json: no value of JSON: {error}: {reprlib.repr(value)}") from None

    def hand_out(self, batch: _native.Batch, number: int, array: Callable[[Any], Any]) -> Any:
        """A list of values."""
        return [json.loads(text) for text in batch.texts(number)]


@dataclass(frozen=True, kw_only=True)
class Sound(Kind):
    """What kinds of sound have in common.

    Frames are (frames,) if `channels` is 1, else (frames, channels): an array if `frames` is given,
    else `Ragged` or `Padded`.

    Args:
        dtype: "float32", 1 for full scale, which decoded MP3 and Ogg may pass, or "int16", clipped.
        channels: 1 mixes all to their mean; another number is what every file must have.
        rate: frames per second that every file must have; None takes any.
        frames: each sample is cut after so many, or filled up with zeros.
        padded: fill up with zeros to the longest of the batch, where lengths differ.
        fill: the bytes of a file that stands for a missing one.
    """

    dtype: Literal["float32", "int16"] = "float32"
    channels: int = 1
    rate: int | None = None
    frames: int | None = None
    padded: bool = False
    fill: bytes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_dtype(self, "dtype", ("float32", "int16"))
        for name in ("channels", "rate", "frames"):
            if name == "channels" or getattr(self, name) is not None:
                keep_number(self, name, 1)


@dataclass(frozen=True, kw_only=True)
class Audio(Sound):
    """Sound in a WAV file (PCM of 8, 16, 24 or 32 bits, float32), or in a FLAC file (4 to 24 bits).

    Arguments are those of `Sound`.
    """

    def _native_kind(self) -> Any:
        kind = _native.AudioField()
        kind.type = self.dtype
        kind.channels = self.channels
        kind.rate = self.rate or 0
        kind.frames = self.frames or 0
        return kind


@functools.lru_cache(maxsize=64)
def _draws(kind: type[Custom]) -> bool:
    return "draw" in inspect.signature(kind.decode).parameters


class Custom(Kind):
    """Base of kinds of the user's own: stored bytes that Python decodes to numbers.

    A subclass is a frozen dataclass at the top of a module, so that it can be compared and pickled. The
    loader's transform threads call `decode`, several at a time and ahead of need; as it holds the GIL,
    it pays where it calls a library that gives it up, or where there is little to do.

    Attributes:
        dtype: NumPy's name of the type of the numbers.
        shape: of one sample; None is a side that differs from sample to sample. A batch has an array
            (n, \\*shape), or `Ragged` or `Padded` where a side is None.
        padded: fill up with zeros to the longest of the batch, where sizes differ.
        fill: the value that stands for a missing one, as `encode` takes it; None: there is none.
    """

    dtype: str = "float32"
    shape: Shape = ()

    @abstractmethod
    def decode(self, stored: bytes) -> Any:
        """The array that the stored bytes stand for, of `dtype` and `shape`.

        One with a second parameter, ``draw: int = 0``, gets 64 random bits there, which depend on
        (seed, epoch, sample) alone: all kinds of a sample have the same.

        Raises:
            CorruptionError: they are damaged: the sample is unusable. Any other exception ends the
                iteration with a TransformError.
        """

    def _is_drawn(self) -> bool:
        return _draws(type(self))

    def decoded(self, stored: bytes, draw: int) -> tuple[tuple[int, ...], np.ndarray]:
        """The shape of what `decode` gives, and its bytes.

        Raises:
            TypeError: it is of another type than `dtype`.
        """
        given = (stored, draw) if _draws(type(self)) else (stored,)
        array = np.asarray(self.decode(*given))
        if array.dtype != self.dtype:
            raise TypeError(
                f"{type(self).__name__}.decode gives {array.dtype}, and its dtype is {self.dtype}"
            )
        return array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _native_kind(self) -> Any:
        check_choice(self, "dtype", name := dtype_name(self.dtype), DTYPES)
        kind = _native.CustomField()
        kind.type = name
        kind.shape = [-1 if side is None else side for side in self.shape]
        kind.decoder = _native.python_decoder(self.decoded)
        return kind
