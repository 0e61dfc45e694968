"""Units of token streams as samples: windows, whole documents, and packed pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall import _native
from nostall.base import _checks as checks
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Schema
from nostall.fields._tokens import PARTS, UnitImages, UnitPart, UnitPlaces
from nostall.source._source import Source
from nostall.source._tokens import LABELS, LOSS_MASK, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIELDS = ("ids", "labels")
_OF_IMAGES = {"images": UnitImages(), "image_places": UnitPlaces()}


class Units(Source):
    """Units of a token stream, planned beforehand: sample i is the pieces of unit i, in their order.

    A piece is a run of tokens of one document, and a segment of its unit. A batch has of n units:

    ==============  ==============================================================================
    `ids`           (n, length)
    `labels`        (n, length): the id after each; -100 behind a document's last one, and where
                    the unit is filled up
    `positions`     (n, length): from 0 in every segment
    `segments`      (n, length): the segment's number in its unit, from 1; 0 where it is filled up
    `cu_seqlens`    (segments + 1,) int32: where segments begin in all ids of the batch, laid end to
                    end, and their number; what fills a unit up is a segment
    a track's name  (n, length): the numbers of that track of the stream, at the places of its ids;
                    0 where the unit is filled up. `loss_mask` stands at the places of the labels
    ==============  ==============================================================================

    Labels are -100 too where the stream has a track `loss_mask` that is 0 for the id; they are those of
    a track `labels` if it has one.

    Args:
        tokens: the stream.
        length: tokens of a unit; shorter ones are filled up. None for any: then a batch has
            `Ragged` values.
        offsets: where the pieces of each unit begin among all, then their number, shape (units + 1,).
        pieces: the document of each piece, its first token there, and its tokens, shape (m, 3).
        fields: what a batch has, of the above.
        dtype: of it, ``"int64"`` or ``"int32"``.
        pad: the id that fills units up.

    Raises:
        UsageError: a piece is not inside its document, a unit has more tokens than `length`, or there
            is no unit.
    """

    _pairs = False
    _units: _native.UnitSource

    def __init__(
        self,
        tokens: Tokens,
        length: int | None,
        offsets: NDArray[Any] | Sequence[int],
        pieces: NDArray[Any],
        *,
        fields: Sequence[str] = _FIELDS,
        dtype: Literal["int64", "int32"] = "int64",
        pad: int = 0,
    ) -> None:
        length = None if length is None else _length(length)
        self._describe(tokens, length, fields, dtype, pad)
        self._arguments |= {"offsets": offsets, "pieces": pieces}
        begins, table = _numbers(offsets, "offsets", 64), _numbers(pieces, "pieces", 32)
        if begins.ndim != 1 or not begins.size or table.ndim != 2 or table.shape[1] != 3:
            raise UsageError(
                f"offsets= of shape {begins.shape} and pieces= of shape {table.shape} must have the "
                "shapes (units + 1,) and (pieces, 3)"
            )
        self._lay(
            _native.token_pieces(
                tokens.native,
                begins.astype(np.uint64),
                np.ascontiguousarray(table, np.uint32),
                self._overlap,
                self._own,
            )
        )
        before = np.concatenate([[0], np.cumsum(table[:, 2], dtype=np.int64)])
        sizes = np.diff(before[begins.astype(np.int64)])
        if length is not None and sizes.max() > length:
            unit = int(sizes.argmax())
            raise UsageError(f"unit {unit} has {sizes[unit]} tokens, more than length={length}")

    def _describe(
        self,
        tokens: Tokens,
        length: int | None,
        fields: Sequence[str],
        dtype: str,
        pad: int,
        *,
        images: bool = False,
    ) -> None:
        """Takes the arguments that all kinds of units have; `images`: the units have some."""
        if not isinstance(tokens, Tokens):
            raise UsageError(
                f"units are of nostall.Tokens, not of {type(tokens).__name__}: open the files by it"
            )
        if dtype not in ("int64", "int32"):
            raise UsageError(f'dtype must be "int64" or "int32", not {dtype!r}')
        if not checks.is_whole(pad) or not np.iinfo(dtype).min <= pad <= np.iinfo(dtype).max:
            raise UsageError(f"pad={pad!r} is no {dtype}")
        tracks = tokens.tracks
        known = [*PARTS, *(name for name in tracks if name not in PARTS)]
        known += _OF_IMAGES if images else ()
        if not fields or not set(fields) <= set(known):
            raise UsageError(f"fields={fields!r}: a unit has {', '.join(known)}")
        if tokens.dtype == "float32" and not isinstance(self, Clips):
            raise UsageError(f"{tokens!r} has no ids, which are whole numbers: it can be a track")
        self.tokens = tokens
        self._arguments = {
            "tokens": tokens,
            "length": length,
            "fields": tuple(fields),
            "dtype": dtype,
            "pad": int(pad),
        }
        # The mask of the labels lies behind the ids, which are number 0.
        # Tokens of images are not learned.
        masked = LABELS in fields and LABELS not in tracks and (LOSS_MASK in tracks or images)
        beside = [LOSS_MASK] if masked else []
        beside += [name for name in fields if name in tracks and name not in beside]
        self._beside = tuple(beside)
        self._overlap = LABELS in fields or LOSS_MASK in fields
        self._own = 1 if beside or images else len(fields)
        self._spans, kinds = [], {}
        for name in fields:
            if images and name in _OF_IMAGES:
                self._spans.append((1 + len(beside), 1 + len(beside)))
                kinds[name] = _OF_IMAGES[name]
                continue
            options: dict[str, Any] = {"dtype": dtype, "length": length, "pad": int(pad)}
            if name in beside:
                stream = tracks[name]
                place = 1 + beside.index(name)
                self._spans.append((place, place))
                options |= {"stored": stream.dtype, "vocabulary": stream.vocabulary, "pad": 0}
                if stream.dtype == "float32":
                    options["dtype"] = stream.dtype
                options["part"] = "labels" if name in (LABELS, LOSS_MASK) else "ids"
                if name == LABELS:
                    options["vocabulary"] = options["vocabulary"] or tokens.vocabulary
                else:
                    options["ignored"] = 0
            else:
                # One field compares all ids with the vocabulary.
                first = name == "ids" or (name == LABELS and "ids" not in fields)
                options |= {"stored": tokens.dtype, "part": name}
                options["vocabulary"] = tokens.vocabulary if first else None
                shaded = masked and name == LABELS
                mask = tracks[LOSS_MASK].dtype if LOSS_MASK in tracks else "uint8"
                options["mask"] = mask if shaded else None
                self._spans.append((0, 1 if shaded else 0))
            kinds[name] = UnitPart(**options)
        self._schema = Schema(kinds)

    def _lay(self, units: _native.UnitSource, images: _native.Source | None = None) -> None:
        """Takes the units of the ids, and lays those of the tracks and their images beside them."""
        self._units = units
        if not self._beside and images is None:
            self.native = units
            return
        others: list[_native.Source] = [self._like(name) for name in self._beside]
        others += [] if images is None else [images]
        self.native = _native.BesideSource([units, *others], self._spans)

    def _like(self, name: str) -> _native.UnitSource:
        """The units of a track; of the mask of images, if there is no such track."""
        if name not in self.tokens.tracks:
            return _native.token_units_like(self._units, self.tokens.native, mask=True)
        ignored = -100 if name == LABELS else 0
        return _native.token_units_like(self._units, self.tokens.tracks[name].native, id=ignored)

    @property
    def token_count(self) -> int:
        """Tokens of all units together."""
        return self._units.tokens

    @property
    def schema(self) -> Schema:
        """The fields that were chosen."""
        return self._schema

    @property
    def over_network(self) -> bool:
        """Whether the files of the stream are objects."""
        return not self.tokens.storage.is_local

    @property
    def extent(self) -> dict[str, int]:
        """How many tokens the stream has."""
        return {"tokens": len(self.tokens)}

    def segments(self, unit: int) -> list[tuple[int, int]]:
        """(first token in the stream, tokens) of each segment of a unit."""
        return self._units.segments(range(len(self))[unit])


def _length(length: Any) -> int:
    return checks.whole("length", length, 1, 2**30 - 1)


def _stride(stride: Any) -> int | None:
    return None if stride is None else checks.whole("stride", stride, 1, 2**62)


def _numbers(values: Any, name: str, bits: int) -> NDArray[Any]:
    found = np.asarray(values)
    if found.size and (
        found.dtype.kind not in "iu" or int(found.min()) < 0 or int(found.max()) >= 2**bits
    ):
        raise UsageError(
            f"{name}= must be whole numbers from 0 to 2**{bits} - 1, not {found.dtype}"
        )
    return found


class Windows(Units):
    """Windows of the same length over a token stream: window w begins at token ``w * stride``.

    With labels, windows overlap by one token: the last label of a window is the first id of the next.

    Args:
        tokens: the stream.
        length: tokens of a window.
        stride: tokens from one beginning to the next; None for `length`.
        documents: divide windows where documents end: labels, positions and segments do not go
            across. Else a window is one segment.
        remainder: what is left over at the end of the stream: ``"drop"`` it, or ``"pad"`` a window.
        fields: as of `Units`, and so are the next two.
        dtype: of the ids.
        pad: the id of places that no token fills.

    Raises:
        UsageError: the stream is shorter than a window.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        *,
        stride: int | None = None,
        documents: bool = False,
        remainder: Literal["drop", "pad"] = "drop",
        fields: Sequence[str] = _FIELDS,
        dtype: Literal["int64", "int32"] = "int64",
        pad: int = 0,
    ) -> None:
        length, stride = _length(length), _stride(stride)
        documents = checks.flag("documents", documents)
        self._describe(tokens, length, fields, dtype, pad)
        if remainder not in ("drop", "pad"):
            raise UsageError(f'remainder must be "drop" or "pad", not {remainder!r}')
        self._arguments |= {"stride": stride, "documents": documents, "remainder": remainder}
        self._lay(
            _native.token_windows(
                stream=tokens.native,
                length=length,
                stride=length if stride is None else stride,
                by_document=documents,
                partial=remainder == "pad",
                overlap=self._overlap,
                fields=self._own,
            )
        )


class Clips(Units):
    """Clips of one length out of longer recordings: one-dimensional signals, each a document.

    A batch has the field `clip`, (n, length): the numbers as they are stored, those of 16 bits from
    -32768 to 32767. A clip is of one recording.

    Args:
        recordings: a stream of sounds (``.wav``) or of arrays (``.npy``, raw files).
        length: numbers of a clip.
        stride: from one beginning to the next in a recording; None for `length`.
        remainder: what is left over at the end of a recording: ``"drop"`` it, or ``"pad"`` a clip with
            silence: 128 where recordings are of 8 bits, else zeros.
        dtype: of the batch.

    Raises:
        UsageError: no recording is as long as a clip.
    """

    def __init__(
        self,
        recordings: Tokens,
        length: int,
        *,
        stride: int | None = None,
        remainder: Literal["drop", "pad"] = "drop",
        dtype: Literal["float32", "int64", "int32"] = "float32",
    ) -> None:
        if remainder not in ("drop", "pad"):
            raise UsageError(f'remainder must be "drop" or "pad", not {remainder!r}')
        length, stride = _length(length), _stride(stride)
        step = length if stride is None else stride
        self._describe(recordings, length, ("ids",), "int64", 0)
        if dtype not in ("float32", "int64", "int32") or (recordings.dtype == "float32" != dtype):
            raise UsageError(f"dtype={dtype!r} is none for recordings of {recordings.dtype}")
        self._arguments = {
            "recordings": recordings,
            "length": length,
            "stride": stride,
            "remainder": remainder,
            "dtype": dtype,
        }
        silence = 128 if recordings.dtype == "uint8" else 0
        part = UnitPart(
            part="ids", stored=recordings.dtype, dtype=dtype, length=length, pad=silence
        )
        self._schema = Schema({"clip": part})
        lengths = recordings.lengths.astype(np.int64)
        beyond = lengths - length
        counts = beyond // step + 1 if remainder == "drop" else -(-beyond // step) + 1
        counts = np.maximum(counts, int(remainder == "pad"))
        counts = np.minimum(counts, -(-lengths // step))  # strides may pass a recording's end
        self.recordings = np.repeat(np.arange(len(lengths), dtype=np.uint32), counts)
        number = np.arange(len(self.recordings)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = number * step
        sizes = np.minimum(length, lengths[self.recordings] - begins)
        pieces = np.stack([self.recordings, begins, sizes], 1)
        if not len(pieces):
            raise UsageError(f"no recording has {length} numbers, as a clip has")
        # Without offsets each piece is a unit.
        offsets = np.zeros(0, np.uint64)
        table = np.ascontiguousarray(pieces, np.uint32)
        self._lay(_native.token_pieces(recordings.native, offsets, table, False, 1))


class Documents(Units):
    """Whole documents of a token stream, one a unit; those without tokens are left out.

    Args:
        tokens: the stream.
        length: tokens of every unit, filled up; None leaves documents as long as they are.
        longer: what becomes of a document of more than `length` tokens: ``"cut"``, ``"split"`` into
            several units, or ``"refuse"``.
        fields: as of `Units`, and so are the next two.
        dtype: of the ids.
        pad: the id of places that no token fills.

    Raises:
        UsageError: there is no document, or one is too long and refused.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int | None = None,
        *,
        longer: Literal["cut", "split", "refuse"] = "cut",
        fields: Sequence[str] = _FIELDS,
        dtype: Literal["int64", "int32"] = "int64",
        pad: int = 0,
    ) -> None:
        length = None if length is None else _length(length)
        self._describe(tokens, length, fields, dtype, pad)
        self._arguments |= {"longer": longer}
        self._lay(
            _native.token_documents(
                stream=tokens.native,
                length=length or 0,
                longer=longer,
                overlap=self._overlap,
                fields=self._own,
            )
        )


class Packed(Units):
    """Documents packed into units of one length, planned over all of them before the run.

    The packing is a function of the lengths of all documents and of these arguments
    (docs/formats/units.md), so it is the same on all ranks and in every epoch; what an epoch changes
    is the order of the units.

    Args:
        tokens: the stream.
        length: tokens of a unit.
        packing: ``"best-fit"`` (best-fit decreasing: documents stay whole), or ``"concatenate"``
            (documents in a random order, end to end, cut every `length` tokens).
        longer: what becomes of a document of more than `length` tokens: ``"split"``, ``"cut"`` or
            ``"refuse"``.
        seed: which documents of the same length come first; the order of ``"concatenate"``.
        fields: as of `Units`, and so are the next two.
        dtype: of the ids.
        pad: the id of places that no token fills.

    Raises:
        UsageError: there is no document, or one is too long and refused.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        *,
        packing: Literal["best-fit", "concatenate"] = "best-fit",
        longer: Literal["split", "cut", "refuse"] = "split",
        seed: int = 0,
        fields: Sequence[str] = _FIELDS,
        dtype: Literal["int64", "int32"] = "int64",
        pad: int = 0,
    ) -> None:
        length, seed = _length(length), checks.whole("seed", seed, 0, 2**64 - 1)
        self._describe(tokens, length, fields, dtype, pad)
        self._arguments |= {"packing": packing, "longer": longer, "seed": seed}
        self._lay(
            _native.token_packed(
                stream=tokens.native,
                capacity=length,
                packing=packing,
                longer=longer,
                seed=seed,
                overlap=self._overlap,
                fields=self._own,
            )
        )

    @property
    def waste(self) -> float:
        """The share of all positions that are filled up."""
        return self._units.waste


class Interleaved(Units):
    """Documents of text and images, packed into units of one length by their cost in tokens.

    The stream has one id wherever an image stands: image k of the source is at the k-th of them. In a
    unit the id is repeated, as many times as the image costs. Documents are packed by best fit over all
    of them (docs/formats/units.md), as in `Packed`. Beside the fields of `Units` a batch has

    ==============  ==============================================================================
    `images`        (images, ...): all images of the batch as transforms make them, in the order of
                    the units; `Ragged` bytes as they are stored if there are no transforms
    `image_places`  (images, 3): the unit in the batch, the image's first token there, its tokens
    ==============  ==============================================================================

    Labels are -100 where the next token is of an image. Positions and segments are those of documents.

    Args:
        tokens: the stream.
        images: a source of images: files, members of archives, values of record stores.
        length: tokens of a unit.
        image: the id that stands for an image.
        cost: tokens of an image; one number, or one for each image.
        longer: what becomes of a document that costs more than `length` tokens: ``"refuse"``;
            ``"drop"``, which leaves it out; or ``"split"`` into pieces, each as long as can be, with
            whole images. A label goes on from one piece to the next.
        seed: which documents of the same cost come first.
        fields: as of `Units`, and so are the next two.
        dtype: of the ids.
        pad: the id of places that no token fills.

    Raises:
        UsageError: a cost is no whole number of 1 or more, or a document costs too much.
        CorruptionError: there are not as many ids for images as images.
    """

    def __init__(
        self,
        tokens: Tokens,
        images: Source,
        length: int,
        *,
        image: int,
        cost: int | Sequence[int] | NDArray[Any],
        longer: Literal["refuse", "drop", "split"] = "refuse",
        seed: int = 0,
        fields: Sequence[str] = (*_FIELDS, *_OF_IMAGES),
        dtype: Literal["int64", "int32"] = "int64",
        pad: int = 0,
    ) -> None:
        if not isinstance(images, Source) or "image" not in getattr(images, "schema", ()):
            raise UsageError(f"images must be a source with the field image, not {images!r}")
        if longer not in ("refuse", "drop", "split"):
            raise UsageError(f'longer must be "refuse", "drop" or "split", not {longer!r}')
        length, seed = _length(length), checks.whole("seed", seed, 0, 2**64 - 1)
        self._describe(tokens, length, fields, dtype, pad, images=True)
        self._arguments |= {"images": images, "image": image, "cost": cost}
        self._arguments |= {"longer": longer, "seed": seed}
        self.images = images = images.select(["image"])
        if tokens.tracks.get(LABELS) and tokens.tracks[LABELS].dtype.startswith("u"):
            raise UsageError(f"the track {LABELS} has no -100 for images: its numbers have no sign")
        at = tokens.places(image)
        if len(at) != len(images):
            raise CorruptionError(
                f"{tokens!r} has the id {image} {len(at)} times, and {images!r} has {len(images)} "
                "images: they do not go together"
            )
        costs = self._costs(cost)
        cuts = np.zeros(0, np.uint64)
        if longer == "split":
            self._refuse_image(costs, length)
            cuts = _native.token_cuts(tokens.native, at, costs.astype(np.uint32), length)
        # What is packed: documents, or the pieces of them.
        stored = (cuts[1:] - cuts[:-1] if len(cuts) else tokens.lengths).astype(np.int64)
        begins = np.cumsum(stored) - stored
        document = np.searchsorted(begins, at.astype(np.int64), side="right") - 1
        added = np.cumsum(costs - 1) - (costs - 1)  # before each image
        first = np.searchsorted(document, np.arange(len(stored) + 1))
        lengths = stored + np.diff(np.append(added, (costs - 1).sum())[first])
        self._refuse(lengths, document, costs, length, longer)
        lengths[lengths > length] = 0
        units = _native.token_interleaved(
            stream=tokens.native,
            begins=cuts,
            lengths=lengths.astype(np.uint32),
            places=at,
            costs=costs.astype(np.uint32),
            id=image,
            capacity=length,
            seed=seed,
        )
        # Of each piece, which is a document: its place in its unit, and its images.
        offsets, packed = units.pieces()
        sizes = lengths[packed]
        begin = np.cumsum(sizes) - sizes
        begin -= np.repeat(begin[offsets[:-1]], np.diff(offsets).astype(np.int64))
        counts = first[packed + 1] - first[packed]
        ends = np.append(0, np.cumsum(counts))
        which = np.arange(ends[-1]) - np.repeat(ends[:-1] - first[packed], counts)
        inside = at.astype(np.int64) - begins[document] + added - added[first[document]]
        members = np.stack([which, np.repeat(begin, counts) + inside[which], costs[which]], 1)
        self._lay(
            units,
            _native.GatherSource(
                images.native, ends[offsets].astype(np.uint64), members.astype(np.uint32).ravel()
            ),
        )

    def _costs(self, cost: Any) -> NDArray[np.int64]:
        found = np.asarray(cost)
        if found.dtype.kind not in "iu" or found.shape not in ((), (len(self.images),)):
            raise UsageError(
                f"cost= must be a whole number, or one for each of {len(self.images)} images, not "
                f"{found.dtype} of shape {found.shape}"
            )
        costs = np.broadcast_to(found, len(self.images)).astype(np.int64)
        if costs.size and costs.min() < 1:
            k = int(costs.argmin())
            raise UsageError(
                f"image {k} ({self.images.describe(k)}) costs {costs[k]} tokens: one is the least"
            )
        return costs

    def _refuse_image(self, costs: NDArray[np.int64], length: int) -> None:
        if costs.size and costs.max() > length:
            k = int(costs.argmax())
            raise UsageError(
                f"image {k} ({self.images.describe(k)}) costs {costs[k]} tokens, more than "
                f"length={length}, and images are not cut: pass a larger length"
            )

    def _refuse(
        self,
        lengths: NDArray[np.int64],
        document: NDArray[np.int64],
        costs: NDArray[np.int64],
        length: int,
        longer: str,
    ) -> None:
        if longer == "drop" and (lengths[lengths > 0] <= length).any():
            return
        if not lengths.size or lengths.max() <= length:
            return
        d = int(np.argmax(lengths > length))
        mine = np.flatnonzero(document == d)
        image = next((int(k) for k in mine if costs[k] > length), None)
        why = f"document {d} costs {lengths[d]} tokens with its {len(mine)} images"
        if image is not None:
            why = f"image {image} ({self.images.describe(image)}) costs {costs[image]} tokens"
        raise UsageError(
            f'{why}, more than length={length}: pass a larger length, longer="split", or longer='
            '"drop", which leaves such documents out, if there are others'
        )
