"""Batches of records: the program that unpacks them, and what the user is handed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Boxes, Image, Keypoints, Kind, Mask, Schema
from nostall.loader.transforms import Transform, is_native
from nostall.loader.transforms import compile as compile_transforms
from nostall.source._source import Pixels, Source

ByField = Mapping[str, Sequence[Transform]]


def one_image(pipeline: _native.Pipeline) -> _native.Program:
    """The program of a source whose records are images."""
    field = _native.Field()
    field.kind = _native.ImageField()
    field.kind.pipeline = pipeline
    return _native.compile_program([field])


class Records:
    """Unpacks the chosen fields of a source, and hands them out as a mapping or a tuple.

    `transforms` apply to every image, or, as a mapping, to the images that it names.
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
        steps = _by_field(schema, transforms)
        places = {name: i for i, name in enumerate(source.schema)}
        fields = []
        for name, kind in self._kinds.items():
            field = kind.to_native(name, places[name])
            if name in steps:
                field.kind = _image(steps[name], dtype, layout, source.pixels)
            fields.append(field)
        self.program = _native.compile_program(fields)

    def hand_out(self, batch: _native.Batch, array: Callable[[Any], Any]) -> Any:
        """The batch as a mapping by name, or as a tuple in the order of the schema."""
        values = {
            name: kind.hand_out(batch, number, array)
            for number, (name, kind) in enumerate(self._kinds.items())
        }
        return values if self._form == "dict" else tuple(values.values())


def _image(
    steps: Sequence[Transform], dtype: str | None, layout: str | None, pixels: Pixels | None
) -> _native.ImageField:
    field = _native.ImageField()
    field.pipeline = compile_transforms(steps, dtype=dtype, layout=layout, pixels=pixels)
    return field


def _by_field(schema: Schema, transforms: Any) -> dict[str, Sequence[Transform]]:
    """The steps of every image that has some."""
    images = [name for name, kind in schema.items() if isinstance(kind, Image)]
    if transforms is None:
        return {}
    each = transforms.values() if isinstance(transforms, Mapping) else [transforms]
    if any(callable(steps) or not is_native(steps) for steps in each):
        raise UsageError(
            f"batches of the fields {', '.join(schema)} take lists of nostall.transforms, and no "
            "callables: call them on the batch, or in collate="
        )
    if isinstance(transforms, Mapping):
        for name in transforms:
            if name not in images:
                raise UsageError(
                    f"transforms names the field {name!r}, which is no image of this loader"
                    + (f": its images are {', '.join(images)}" if images else "")
                )
        steps = dict(transforms)
    else:
        if not images:
            raise UsageError(
                f"transforms are for images, and the fields {', '.join(schema)} have none: leave "
                "transforms out"
            )
        steps = dict.fromkeys(images, transforms)
    _refuse_targets(schema, steps.values())
    return steps


def _refuse_targets(schema: Schema, steps: Iterable[Sequence[Transform]]) -> None:
    """Masks, boxes and points that would no longer lie on their images."""
    if not any(steps):
        return
    for name, kind in schema.items():
        if isinstance(kind, (Mask, Boxes, Keypoints)):
            raise UsageError(
                f"field {name}: transforms move images alone, so that its {type(kind).__name__} would "
                "not lie on them: leave transforms out, or the field (fields=)"
            )
