"""Batches of records: the program that unpacks them, and what the user is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Array, Boxes, Image, Kind, Schema
from nostall.loader._mixing import Mix, split
from nostall.loader.transforms import SanitizeBoundingBoxes, Transform, is_native
from nostall.loader.transforms import compile as compile_transforms
from nostall.source._source import Source

ByField = Mapping[str | tuple[str, ...], Sequence[Transform]]


def one_image(pipeline: _native.Pipeline, mix: Mix | None = None) -> _native.Program:
    """The program of a source whose records are images; targets of a mix are its output 1."""
    field = _native.Field()
    field.kind = _native.ImageField()
    field.kind.pipeline = pipeline
    return _native.compile_program([field], None if mix is None else mix.of_batch([0], None))


class Records:
    """Unpacks the chosen fields of a source, and hands them out as a mapping or a tuple.

    `transforms` is a list for all images, masks, boxes and keypoints of a sample as one, or a mapping
    from a field, or a tuple of fields that are transformed as one, to such a list.
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
    ) -> None:
        self._kinds: dict[str, Kind] = dict(schema)
        self._form = form
        self._mix: Mix | None = None
        mixed: _native.BatchMix | None = None
        pipelines: dict[str, _native.Pipeline] = {}
        _check_rows(source.schema)
        for names, every_step in _groups(schema, transforms):
            steps, for_batches = split(every_step)
            if for_batches is not None:
                if self._mix is not None:
                    raise UsageError(
                        "two lists of transforms mix batches, whose labels are one: one can"
                    )
                self._mix = Mix(for_batches, shift)
                self._labels = self._mix.labels_in(schema)
                fields = list(schema)
                mixed = self._mix.of_batch(
                    _to_mix(schema, names, self._mix), fields.index(self._labels)
                )
            if any(isinstance(step, SanitizeBoundingBoxes) for step in steps):
                _check_followers(schema, names)
            pipeline = compile_transforms(steps, dtype=dtype, layout=layout, pixels=source.pixels)
            pipelines.update(dict.fromkeys(names, pipeline))
        places = {name: i for i, name in enumerate(source.schema)}
        self.program = _native.compile_program(
            [
                kind.to_native(name, places[name], pipelines.get(name), _boxes_of(schema, name))
                for name, kind in schema.items()
            ],
            mixed,
        )

    def hand_out(self, batch: _native.Batch, array: Callable[[Any], Any]) -> Any:
        """The batch as a mapping by name, or as a tuple in the order of the schema."""
        values = {
            name: kind.hand_out(batch, number, array)
            for number, (name, kind) in enumerate(self._kinds.items())
            if self._mix is None or name != self._labels
        }
        if self._mix is not None:
            labels = np.asarray(batch.output(list(self._kinds).index(self._labels)))
            targets = batch.output(len(self._kinds)) if self._mix.native.classes else None
            mixed = self._mix.labelled(batch.lam, targets, labels, array)
            values = {name: values.get(name, mixed) for name in self._kinds}
        return values if self._form == "dict" else tuple(values.values())


def _to_mix(schema: Schema, names: Sequence[str], mix: Mix) -> list[int]:
    """The places of the images that are mixed."""
    for name in names:
        if not isinstance(schema[name], Image):
            raise UsageError(
                f"{type(mix.step).__name__} mixes images, and {name!r}, which is transformed with "
                f"them, is of {type(schema[name]).__name__}: leave it out by fields="
            )
    return [list(schema).index(name) for name in names]


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


def _check_followers(schema: Schema, names: Sequence[str]) -> None:
    """Refuses what says something of boxes, and cannot lose what boxes that are taken out lose."""
    for name, kind in schema.items():
        boxes = getattr(kind, "rows_of", None)
        if boxes in names and not isinstance(kind, Array):
            raise UsageError(
                f"field {name}: SanitizeBoundingBoxes takes out rows of {boxes!r}, and a field of "
                f"{type(kind).__name__} cannot follow: leave {name!r} out by fields="
            )


def _groups(schema: Schema, transforms: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Which fields are transformed as one, and by which steps."""
    if transforms is None:
        return []
    together = tuple(name for name, kind in schema.items() if kind.transformed)
    groups: list[tuple[tuple[str, ...], Any]] = [(together, transforms)]
    if isinstance(transforms, Mapping):
        groups = [
            ((names,) if isinstance(names, str) else tuple(names), steps)
            for names, steps in transforms.items()
        ]
    seen: set[str] = set()
    for names, steps in groups:
        if callable(steps) or isinstance(steps, str) or not is_native(steps):
            raise UsageError(
                f"batches of the fields {', '.join(schema)} take lists of nostall.transforms, and no "
                "callables: call them on the batch, or in collate="
            )
        for name in names:
            if name not in together:
                raise UsageError(
                    f"transforms names the field {name!r}, which is no image, mask, boxes or "
                    f"keypoints of this loader: there are {', '.join(together) or 'none'}"
                )
            if name in seen:
                raise UsageError(f"transforms names the field {name!r} twice")
            seen.add(name)
        if not any(isinstance(schema[name], Image) for name in names):
            raise UsageError(
                f"transforms are for images, and there is none among {', '.join(names or schema)}: "
                "name an image with them, or leave transforms out"
            )
    for name in together:
        if name not in seen and not isinstance(schema[name], Image):
            raise UsageError(
                f"field {name}: transforms do not name it, so that it would not lie on its image: "
                f"name them together, as in transforms={{('image', {name!r}): [...]}}"
            )
    return groups
