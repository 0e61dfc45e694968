"""Batches of records: the program that unpacks them, and what the user is handed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Array, Boxes, Image, Kind, Padded, Ragged, Schema
from nostall.loader._ahead import Finish, Hand, Here, finished_there
from nostall.loader._collected import Collected, forms_of
from nostall.loader._context import Context
from nostall.loader._in_turn import (
    Arranged,
    Composed,
    Function,
    arrange,
    name_of,
    recognised,
    steps_of,
)
from nostall.loader._mixing import BatchTransform, Mix, split
from nostall.loader._steps import Transform
from nostall.loader._tv_tensors import is_of_torchvision
from nostall.source._source import Pixels, Source

if TYPE_CHECKING:
    from nostall.loader._codecs import Codecs

Steps = Sequence[Transform | Callable[..., Any]]
ByField = Mapping[str | tuple[str, ...], Steps | Callable[..., Any]]


class RawBatch:
    """Samples of one batch as they lie in the source, in one buffer.

    `data` is uint8 of shape (bytes,); sample i is ``data[offsets[i] : offsets[i] + lengths[i]]``,
    which is what ``batch[i]`` gives. `offsets` and `lengths` are uint64 of shape (n,).
    """

    __slots__ = ("data", "lengths", "offsets")

    def __init__(
        self, data: NDArray[np.uint8], offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        self.data = data
        self.offsets = offsets
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: int) -> NDArray[np.uint8]:
        begin = int(self.offsets[i])
        return self.data[begin : begin + int(self.lengths[i])]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a RawBatch, of samples as they lie in the source, has no {name}: for tensors pass "
            "transforms= to DataLoader"
        )


class OneImage:
    """Unpacks records that are images; targets of a mix are output 1."""

    def __init__(
        self, pipeline: _native.Pipeline, mix: Mix | None = None, draws_only: bool = False
    ) -> None:
        field = _native.Field()
        field.kind = _native.ImageField()
        field.kind.pipeline = pipeline
        mixed = None if mix is None else mix.of_batch([0], None, draws_only)
        self.program = _native.compile_program([field], mixed)

    def samples(self, batch: _native.Batch) -> Sequence[Any]:
        """The images."""
        images: Sequence[Any] = batch.output(0)
        return images


@dataclass(frozen=True)
class _Encoded:
    """An image of a sample that is decoded when the callables take it."""

    data: NDArray[np.uint8]
    pixels: Pixels | None


def decoded_fields(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with its images decoded.

    Raises:
        CorruptionError: one cannot be, with the field's name.
    """
    out = dict(sample)
    for name, value in sample.items():
        if isinstance(value, _Encoded):
            try:
                pixels = value.pixels
                out[name] = pixels.image(value.data) if pixels else _native.decode_rgb(value.data)
            except CorruptionError as error:
                raise CorruptionError(f"field {name}: {error}") from None
    return out


class _OfFields:
    """Calls what each group of fields has, and gives the fields that changed; can be pickled."""

    def __init__(
        self, groups: list[tuple[tuple[str, ...] | str | None, Composed]], decoded: frozenset[str]
    ) -> None:
        self._groups = groups
        self._decoded = decoded  # what a batch has otherwise is encoded

    def __call__(self, sample: dict[str, Any], context: Context) -> dict[str, Any]:
        out = dict(sample)
        for names, function in self._groups:
            if isinstance(names, str):
                out[names] = function(out[names], context)
            else:
                of = None if names is None else (*names, *function.following)
                given = out if of is None else {name: out[name] for name in of}
                out.update(function(given, context))
        return {
            name: value
            for name, value in out.items()
            if name in self._decoded
            or name not in sample
            or value is not sample[name]
            or isinstance(value, (dict, list))  # of JSON: may be written in place
        }


class Records:
    """Unpacks the chosen fields of a source, and hands them out as a mapping or a tuple.

    `transforms` is a list for all images, masks, boxes and keypoints of a sample as one, or a mapping
    from a field, or a tuple of fields that are transformed as one, to such a list. Callables of the
    one list take the whole sample, those of a tuple its fields as a mapping, those of a field its
    value. With `decode` they get images decoded, if no native step did it. `tensors`: whether `array`
    makes tensors of torch.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        transforms: Any,
        *,
        dtype: str | None,
        layout: str | None,
        form: Literal["dict", "tuple"],
        shift: int,
        decode: bool,
        array: Callable[[Any], Any],
        finishes: Callable[[bool], bool],
        tensors: bool = False,
        codecs: Codecs | None = None,
    ) -> None:
        self._kinds: dict[str, Kind] = dict(schema)
        self._form = form
        self._here = Here(array)
        self._pixels = source.pixels
        self._mix: Mix | None = None
        self._mixed: list[str] = []
        self.arranged: list[Arranged] = []
        self.of_device: list[str] = []  # names of steps
        self.staying: list[str] = []  # fields that keep their rows where boxes are taken out
        pipelines: dict[str, _native.Pipeline] = {}
        called: list[tuple[tuple[str, ...] | str | None, Composed]] = []
        stated: dict[str, Kind] = {}
        _check_rows(source.schema)
        self._finishes: dict[str, Finish] = {}
        groups = []
        for group in _groups(schema, transforms, source.pixels, decode):
            steps, for_batches = split(group.steps)
            if for_batches is not None:
                self._mix_by(for_batches, schema, group, shift)
            groups.append((group, steps, for_batches is not None))
        native = all(isinstance(step, Transform) for _, steps, _ in groups for step in steps)
        for group, steps, is_mixed in groups:
            types = dtype, layout or group.layout
            images = {n: k for n in group.names if isinstance(k := schema[n], Image)}
            # Of samples with any number of images, each batch has another shape.
            if native and finishes(is_mixed) and all(kind._single for kind in images.values()):
                every = steps
                steps, finish = finished_there(steps, *types)
                if finish is not None:
                    types = "uint8", "hwc"
                    self.of_device += [name_of(step) for step in every if step not in steps]
                    self._finishes.update(dict.fromkeys(images, finish))
            following = self._following(schema, group, steps)
            (of, way), pixels, kinds = types, source.pixels, group.kinds
            made = arrange(
                steps, dtype=of, layout=way, pixels=pixels, kinds=kinds, following=following
            )
            self.arranged.append(made)
            if made.pipeline is not None:
                pipelines |= {n: made.pipeline for n in group.names if schema[n].transformed}
            if made.called:
                drawn = called[-1][1].drawn if called else 0
                merges = kinds is not None
                called.append((group.key, Composed(made.called, merges, drawn, following)))
            for step in steps:
                stated.update(step.schema if isinstance(step, Function) else {})
        self._find_taken(called, pipelines, decode)
        places = {name: i for i, name in enumerate(source.schema)}
        mixed = None
        if self._mix is not None and self.function is None:
            fields = list(schema)
            mixed = self._mix.of_batch(
                [fields.index(name) for name in self._mixed],
                fields.index(self._labels),
                draws_only=all(name in self._finishes for name in self._mixed),
            )
        natives = [
            kind.to_native(name, places[name], pipelines.get(name), _boxes_of(schema, name))
            for name, kind in schema.items()
        ]
        if codecs is not None:
            codecs.move(natives)
        self.program = _native.compile_program(natives, mixed)
        self._collected = Collected(forms_of(self._kinds, self.program), stated, tensors)

    def _mix_by(self, step: BatchTransform, schema: Schema, group: _Group, shift: int) -> None:
        if self._mix is not None:
            raise UsageError("two lists of transforms mix batches, whose labels are one: one can")
        self._mix = Mix(step, shift)
        self._labels = self._mix.labels_in(schema)
        self._mixed = list(group.names)
        _check_mixed(schema, self._mixed, self._mix)

    def _following(self, schema: Schema, group: _Group, steps: Sequence[Any]) -> dict[str, Kind]:
        """Fields beside those of a group whose rows go with boxes that its steps take out."""
        if not any(map(_takes_boxes_out, steps)):
            return {}
        _check_followers(schema, group.names)
        self.staying += _staying(schema)
        taken = group.kinds or {}
        return {
            name: kind
            for name, kind in schema.items()
            if getattr(kind, "rows_of", None) in taken and name not in taken
        }

    def _find_taken(
        self,
        called: list[tuple[tuple[str, ...] | str | None, Composed]],
        pipelines: Mapping[str, Any],
        decode: bool,
    ) -> None:
        """What callables take, and the function for a sample of it; None if there are none."""
        every = any(names is None for names, _ in called)
        named = {
            n
            for names, function in called
            if names
            for n in ([names] if isinstance(names, str) else (*names, *function.following))
        }
        self._taken = [name for name in self._kinds if every or name in named]
        self._encoded = frozenset(
            name
            for name in self._taken
            if decode and isinstance(self._kinds[name], Image) and name not in pipelines
        )
        self.function = _OfFields(called, self._encoded) if called else None

    # ------------------------------------------------------------------ samples for callables

    def samples(self, batch: _native.Batch) -> Sequence[dict[str, Any]]:
        """What the callables take of each sample; encoded images wait to be decoded."""
        columns = {name: self._column(batch, name) for name in self._taken}
        return [{name: at(i) for name, at in columns.items()} for i in range(len(batch))]

    def whole(self, batch: _native.Batch) -> dict[str, Any]:
        """All fields of a batch of one sample, as they are stored or natively transformed."""
        return {name: self._column(batch, name, encoded=True)(0) for name in self._kinds}

    def _column(
        self, batch: _native.Batch, name: str, encoded: bool = False
    ) -> Callable[[int], Any]:
        """The values of a field, by the sample's place."""
        values = self._kinds[name].hand_out(batch, list(self._kinds).index(name), _same)
        if isinstance(values, Ragged):
            if name in self._encoded and not encoded:
                return lambda i: _Encoded(values.sample(i), self._pixels)
            return values.sample
        if isinstance(values, Padded):
            return lambda i: values.values[i][
                tuple(map(slice, np.atleast_1d(values.lengths[i]).tolist()))
            ]
        at: Callable[[int], Any] = values.__getitem__
        return at

    # ------------------------------------------------------------------ batches

    @property
    def names(self) -> list[str]:
        """Of what batches have, in their order."""
        return self._collected.names()

    @property
    def cumulative(self) -> list[str]:
        """Fields that count what a batch has from 0 on: where segments end, places of images."""
        return [
            name
            for name, kind in self._kinds.items()
            if getattr(kind, "part", "") in ("cu_seqlens", "image_places")
        ]

    def learn(self, changes: dict[str, Any]) -> None:
        """Takes the forms of fields from what callables gave for a sample."""
        self._collected.learn(changes)

    def together(
        self,
        batch: _native.Batch,
        results: Sequence[dict[str, Any]],
        seed: int,
        describe: Callable[[int], str],
    ) -> Any:
        """The batch as a mapping or a tuple, with what callables changed in each sample."""
        for changes in results:
            self._collected.learn(changes)
        self._collected.check_left_out(results, describe)
        values: dict[str, Any] = {}
        for name in self._collected.names():
            changed = any(name in changes for changes in results)
            if (
                name in self._kinds
                and not changed
                and (results or not self._collected.is_known(name))
            ):
                number = list(self._kinds).index(name)
                values[name] = self._kinds[name].hand_out(batch, number, self._here.array)
                continue
            at = self._column(batch, name, encoded=True) if name in self._kinds else None
            values[name] = self._collected.collect(name, results, at, self._here.array, describe)
        if self._mix is not None:
            self._mix_together(values, batch, seed)
        return values if self._form == "dict" else tuple(values.values())

    def _mix_together(self, values: dict[str, Any], batch: _native.Batch, seed: int) -> None:
        assert self._mix is not None
        for name in (self._labels, *self._mixed):
            if name not in values:
                raise UsageError(
                    f"{type(self._mix.step).__name__} needs the field {name!r}, which the callables "
                    "leave out"
                )
        shapes = {name: tuple(np.shape(values[name]))[1:] for name in self._mixed}
        if len(set(shapes.values())) > 1:  # the boxes of CutMix, and so the labels, would differ
            raise UsageError(
                f"{type(self._mix.step).__name__} mixes images of one shape, and those of the "
                f"callables differ: {', '.join(f'{n} has {s}' for n, s in shapes.items())}"
            )
        labels = np.asarray(values[self._labels])
        lam, targets = 1.0, None
        for name in self._mixed:
            lam, targets = self._mix.images_of(values[name], labels, seed, batch.epoch, batch.index)
        values[self._labels] = self._mix.labelled(lam, targets, labels, self._here)

    @functools.cached_property
    def _dense(self) -> list[bool]:
        """Of each field, whether a batch has it as one array."""
        return [form == "dense" for _, _, _, form in self.program.outputs]

    @functools.cached_property
    def _arrays(self) -> list[tuple[int, str]] | None:
        """All outputs, if each is an array that is handed out as it is.

        Most batches are a few of them, and what is done for each batch counts.
        """
        plain = self._mix is None and not self._finishes
        return list(enumerate(self._kinds)) if plain and all(self._dense) else None

    def hand_out(self, batch: _native.Batch, to: Hand) -> Any:
        """The batch as a mapping by name, or as a tuple in the order of the schema."""
        values: dict[str, Any]
        if self._arrays is not None:
            values = to.outputs(batch, self._arrays)
            return values if self._form == "dict" else tuple(values.values())
        mix = self._mix
        mixed = None if mix is None else mix.mixed(batch)
        values = {}
        for number, (name, kind) in enumerate(self._kinds.items()):
            if mix is not None and name == self._labels:
                lam, labels = batch.mixture[1], np.asarray(batch.output(number))
                targets = batch.output(len(self._kinds)) if mix.native.classes else None
                values[name] = mix.labelled(lam, targets, labels, to)
            elif (finish := self._finishes.get(name)) is not None:
                of_name = mixed if name in self._mixed else None
                values[name] = to.images(batch, number, finish, of_name)
            elif self._dense[number]:
                values[name] = to.output(batch, number)
            else:
                values[name] = kind.hand_out(batch, number, to.array)
        return values if self._form == "dict" else tuple(values.values())


def _same(value: Any) -> Any:
    return value


@dataclass
class _Group:
    """Fields that one list of steps is for."""

    names: tuple[str, ...]
    steps: list[Any]
    kinds: dict[str, Kind] | None  # of what its callables take; None: the value of the one field
    every: bool = False  # they take the whole sample
    layout: str | None = None  # that the steps end with, if it is not the usual one

    @property
    def key(self) -> tuple[str, ...] | str | None:
        return None if self.every else self.names[0] if self.kinds is None else self.names

    def recognised(self, schema: Schema, pixels: Pixels | None) -> _Group:
        """With those of torchvision's transforms as native steps that have equals.

        Raises:
            UsageError: torchvision's would do nothing to the field.
        """
        if self.kinds is None and not isinstance(schema[self.names[0]], Image):
            for step in self.steps:
                if is_of_torchvision(step):
                    raise UsageError(
                        f"field {self.names[0]}: {name_of(step)} of torchvision is for images and what "
                        f"lies on them: name it together with its image, or give a function"
                    )
            return self
        steps, layout = recognised(self.steps, pixels, self.kinds)
        return replace(self, steps=steps, layout=layout)


def _takes_boxes_out(step: Any) -> bool:
    return isinstance(step, Transform) and step.to_step()[0] == "SanitizeBoundingBoxes"


def _check_mixed(schema: Schema, names: Sequence[str], mix: Mix) -> None:
    for name in names:
        if not isinstance(schema[name], Image):
            raise UsageError(
                f"{type(mix.step).__name__} mixes images, and {name!r}, which is transformed with "
                f"them, is of {type(schema[name]).__name__}: leave it out by fields="
            )


def _boxes_of(schema: Schema, name: str) -> int | None:
    """The place of the boxes that the rows of a field go with, if they are chosen too."""
    kind = schema[name]
    if not isinstance(kind, Array) or kind.rows_of is None or kind.rows_of not in schema:
        return None
    return list(schema).index(kind.rows_of)


def _check_rows(schema: Schema) -> None:
    for name, kind in schema.items():
        boxes = getattr(kind, "rows_of", None)
        if boxes is not None and not isinstance(schema.get(boxes), Boxes):
            raise UsageError(f"field {name}: rows_of={boxes!r} is no field of Boxes")


def _staying(schema: Schema) -> list[str]:
    """Fields that may be of boxes by their form, and do not say so."""
    return [
        name
        for name, kind in schema.items()
        if type(kind) is Array and kind.rows_of is None and kind.shape[:1] == (None,)
    ]


def _check_followers(schema: Schema, names: Sequence[str]) -> None:
    """Refuses what says something of boxes, and cannot lose what boxes that are taken out lose."""
    for name, kind in schema.items():
        boxes = getattr(kind, "rows_of", None)
        if boxes in names and not isinstance(kind, Array):
            raise UsageError(
                f"field {name}: SanitizeBoundingBoxes takes out rows of {boxes!r}, and a field of "
                f"{type(kind).__name__} cannot follow: leave {name!r} out by fields="
            )


def _given(schema: Schema, transforms: Any) -> Iterator[_Group]:
    """Lists of steps as they are given, with their fields."""
    if not isinstance(transforms, Mapping):
        together = tuple(name for name, kind in schema.items() if kind.transformed)
        yield _Group(together, steps_of(transforms), dict(schema), every=True)
        return
    for given, steps in transforms.items():
        names = (given,) if isinstance(given, str) else tuple(given)
        for name in names:
            if name not in schema:
                raise UsageError(
                    f"transforms names the field {name!r}, which is no field of this loader: there "
                    f"are {', '.join(schema) or 'none'}"
                )
        kinds = None if isinstance(given, str) else {name: schema[name] for name in names}
        yield _Group(names, steps_of(steps), kinds)


def _groups(schema: Schema, transforms: Any, pixels: Pixels | None, decode: bool) -> list[_Group]:
    """Which fields are transformed as one, and by which steps."""
    if transforms is None:
        return []
    together = tuple(name for name, kind in schema.items() if kind.transformed)
    groups: list[_Group] = []
    seen: set[str] = set()
    for group in _given(schema, transforms):
        own = any(isinstance(step, Transform) for step in group.steps)
        for name in group.names:
            if own and name not in together:
                raise UsageError(
                    f"transforms names the field {name!r}, which is no image, mask, boxes or keypoints "
                    f"of this loader: there are {', '.join(together) or 'none'}"
                )
            if name in seen:
                raise UsageError(f"transforms names the field {name!r} twice")
            seen.add(name)
        if decode:
            group = group.recognised(schema, pixels)
        groups.append(group)
        native = any(isinstance(step, Transform) for step in group.steps)
        if native and not any(isinstance(schema[name], Image) for name in group.names):
            raise UsageError(
                f"transforms are for images, and there is none among "
                f"{', '.join(group.names or schema)}: name an image with them, or leave transforms out"
            )
    for name in together:
        native = any(isinstance(step, Transform) for group in groups for step in group.steps)
        if native and name not in seen and not isinstance(schema[name], Image):
            raise UsageError(
                f"field {name}: transforms do not name it, so that it would not lie on its image: "
                f"name them together, as in transforms={{('image', {name!r}): [...]}}"
            )
    return groups
