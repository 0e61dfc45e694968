"""The fields of a source: their names, in order, and what each is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from nostall.errors import UsageError
from nostall.fields._kinds import Kind


class Schema(Mapping[str, Kind]):
    """The fields of every sample, by name and in order; a mapping that does not change.

    ``Schema(image=Image(), mask=Mask())`` or ``Schema({"image": Image(), "mask": Mask()})``.

    Raises:
        UsageError: there is no field, a name is no text or empty, or a kind is no `Kind`.
    """

    def __init__(self, fields: Mapping[str, Kind] | None = None, /, **named: Kind) -> None:
        if fields is not None and not isinstance(fields, Mapping):
            raise UsageError(f"a schema is a mapping from names to kinds, not {fields!r}")
        self._fields: dict[str, Kind] = {**(fields or {}), **named}
        if not self._fields:
            raise UsageError("a schema needs at least one field")
        for name, kind in self._fields.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"the name of a field must be text, not {name!r}")
            if not isinstance(kind, Kind):
                raise UsageError(
                    f"field {name}: {kind!r} is no kind of nostall.fields, for example "
                    "nostall.fields.Image()"
                )

    def __getitem__(self, name: str) -> Kind:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(tuple(self._fields.items()))

    def __eq__(self, other: object) -> bool:
        """Equal names in the same order, of equal kinds."""
        return isinstance(other, Schema) and list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{name}={kind!r}' for name, kind in self.items())})"

    def select(self, names: Iterable[str]) -> Schema:
        """The schema of these fields alone, in the order of `names`.

        A field whose boxes (`rows_of`) are left out goes with none.

        Raises:
            UsageError: one of them is not there, or is named twice.
        """
        if isinstance(names, str):
            raise UsageError(f"fields must be a list of names, not the text {names!r}")
        chosen: dict[str, Kind] = {}
        for name in names:
            if name not in self._fields:
                raise UsageError(f"there is no field {name!r}: there are {', '.join(self)}")
            if name in chosen:
                raise UsageError(f"field {name!r} is named twice")
            chosen[name] = self._fields[name]
        return Schema({name: _without(kind, self.keys() - chosen) for name, kind in chosen.items()})


def _without(kind: Any, left_out: Set[str]) -> Kind:
    if getattr(kind, "rows_of", None) in left_out:
        kind = dataclasses.replace(kind, rows_of=None)
    return kind  # type: ignore[no-any-return]
