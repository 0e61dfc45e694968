"""Batches of records: the program that unpacks them, and what the user is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Array, Boxes, Image, Kind, Schema
from nostall.loader.transforms import SanitizeBoundingBoxes, Transform, is_native
from nostall.loader.transforms import compile as compile_transforms
from nostall.source._source import Source

ByField = Mapping[str | tuple[str, ...], Sequence[Transform]]


def one_image(pipeline: _native.Pipeline) -> _native.Program:
    """The program of a source whose records are images."""
    field = _native.Field()
    field.kind = _native.ImageField()
    field.kind.pipeline = pipeline
    return _native.compile_program([field])


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
    ) -> None:
        self._kinds: dict[str, Kind] = dict(schema)
        self._form = form
        pipelines: dict[str, _native.Pipeline] = {}
        _check_rows(source.schema)
        for names, steps in _groups(schema, transforms):
            if any(isinstance(step, SanitizeBoundingBoxes) for step in steps):
                _check_followers(schema, names)
            pipeline = compile_transforms(steps, dtype=dtype, layout=layout, pixels=source.pixels)
            pipelines.update(dict.fromkeys(names, pipeline))
        places = {name: i for i, name in enumerate(source.schema)}
        self.program = _native.compile_program(
            [
                kind.to_native(name, places[name], pipelines.get(name), _boxes_of(schema, name))
                for name, kind in schema.items()
            ]
        )

    def hand_out(self, batch: _native.Batch, array: Callable[[Any], Any]) -> Any:
        """The batch as a mapping by name, or as a tuple in the order of the schema."""
        values = {
            name: kind.hand_out(batch, number, array)
            for number, (name, kind) in enumerate(self._kinds.items())
        }
        return values if self._form == "dict" else tuple(values.values())


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
