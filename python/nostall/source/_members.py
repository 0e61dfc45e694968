"""Named values inside records: which of them are fields, of which kind, and where they lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._words import counted
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Array, Boxes, Keypoints, Kind, Scalar, Schema, Text
from nostall.source._columns import Names, check_fields, chosen_columns, kind_of_bytes
from nostall.source._parts import NO_PART, PartsStore, Places, array_of, as_text, cover
from nostall.source._records import FOUND, RULES, Progress

_THREADS = 8
_NO_MEMBER = np.uint64(2**64 - 1)
_DTYPES = {"floats": "float32", "varints": "int64", "boolean": "bool", "integer": "int64"}


class Member(NamedTuple):
    """What all values of one name are: `type` and `is_list` as of native/records/members.h."""

    field: str
    name: str
    type: str
    is_list: bool
    least: int
    most: int


def members_stamp(names: Names, kind: str) -> str:
    """What the places depend on, for a table's stamp."""
    stamp = f"members={as_text('all' if names == 'all' else _chosen(names))}"
    # The second refuses lists of features of a tf.train.SequenceExample.
    return f"{stamp}{RULES}2" if kind == "example" else stamp


def _chosen(names: Names) -> dict[str, str]:
    return chosen_columns(names, list) if names != "all" else {}


def names_in_first(
    storage: _native.Storage,
    kind: Literal["example", "npz", "msgpack"],
    file: NDArray[np.uint32],
    offset: NDArray[np.uint64],
    length: NDArray[np.uint64],
) -> str:
    """The names of the values of the first record, as a message has them."""
    try:
        told, _, _ = _native.find_members(
            storage=storage,
            file=file[:1],
            offset=np.ascontiguousarray(offset[:1]),
            length=np.ascontiguousarray(length[:1]),
            kind=_native.MembersKind[kind],
            names=[],
            threads=1,
            progress=None,
        )
    except (CorruptionError, UsageError, UnicodeDecodeError):
        return "nothing that can be named"
    return ", ".join(name for name, *_ in told)


def find_fields(
    store: PartsStore,
    kind: Literal["example", "npz", "msgpack"],
    names: Names,
    file: NDArray[np.uint32],
    offset: NDArray[np.uint64],
    length: NDArray[np.uint64],
    progress: Progress | None,
    given: Mapping[str, Kind] | None,
) -> tuple[str, Places]:
    """What is to be added to the table's stamp, and where records and fields lie.

    Raises:
        UsageError: values of one name are of several types, or of one that is not read, or no record
            has a name, and the kind that is given for it has no ``fill``.
        CorruptionError: a record cannot be taken apart.
    """
    chosen = _chosen(names)

    try:
        told, begin, size = _native.find_members(
            storage=store.storage,
            file=file,
            offset=np.ascontiguousarray(offset),
            length=np.ascontiguousarray(length),
            kind=_native.MembersKind[kind],
            names=list(dict.fromkeys(chosen.values())),
            threads=_THREADS,
            progress=progress,
        )
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{store.storage.paths[0]}: a value has the name {error.object!r}, which is not UTF-8: "
            "name the other fields"
        ) from None
    if not told:
        raise UsageError(f"{store.storage.paths[0]}: the first record has no values")
    place = {name: i for i, (name, *_) in enumerate(told)}
    fields = chosen or {name: name for name in place}
    columns = [place[name] for name in fields.values()]
    begin, size = (x.reshape(len(length), -1)[:, columns] for x in (begin, size))
    nowhere = (begin == _NO_MEMBER).all(axis=0)
    for (field, name), lacks in zip(chosen.items(), nowhere, strict=False):
        if lacks and getattr((given or {}).get(field), "fill", None) is None:
            there = names_in_first(store.storage, kind, file, offset, length)
            raise UsageError(
                f"{store.storage.paths[0]}: no record has a value of {name!r}; names in the first one: "
                f"{there}"
            )
    found = [[field, *told[i]] for field, i in zip(fields, columns, strict=True)]
    return FOUND + as_text(found), cover(begin, size, begin != _NO_MEMBER, offset)


def fields_of(store: PartsStore, given: Mapping[str, Kind] | None) -> Schema:
    """The kind of every field: the given one if its values can be it, else the one that follows.

    Raises:
        UsageError: they cannot, or a record lacks one that has no ``fill``.
    """
    table = store.native.table
    members = [Member(*member) for member in json.loads(table.stamp.split(FOUND)[1])]
    kinds = check_fields(given, [member.field for member in members])
    present = table.part_offset.reshape(-1, table.parts) != NO_PART
    schema: dict[str, Kind] = {}
    for place, member in enumerate(members):
        wanted = kinds.get(member.field)
        missing = int(np.argmin(present[:, place]))
        if not present[missing, place] and (wanted is None or wanted.fill is None):
            raise UsageError(
                f"{store.native.describe(missing)} has no value of {member.name!r}, which holds for "
                f"{counted(int((~present[:, place]).sum()), 'record')} in all: give the schema's field "
                "a fill="
            )
        if member.type == "none" and wanted is not None:
            schema[member.field] = wanted
        else:
            schema[member.field] = _kind_of(store, member, place, wanted)
    return Schema(schema)


def _kind_of(store: PartsStore, member: Member, place: int, given: Kind | None) -> Kind:
    if member.type in ("bytes", "text"):
        if given is not None:
            return given
        return Text() if member.type == "text" else kind_of_bytes(_value(store, place))
    codec: Any = {"npy": "npy", "floats": "raw", "varints": "varint"}.get(member.type, "msgpack")
    if given is None:
        if member.type == "npy":
            return array_of(store.native, member.field, place)
        dtype = _DTYPES.get(member.type, "float64")
        if not member.is_list or (codec != "msgpack" and member.least == member.most == 1):
            return Scalar(dtype=dtype, codec=codec)
        sides: list[int | None] = [None] * _depth(codec, _value(store, place, longest=True))
        if len(sides) == 1 and member.least == member.most:
            sides = [member.least]
        return Array(dtype=dtype, shape=tuple(sides), codec=codec)
    if isinstance(given, Scalar) and member.type != "npy" and member.least == member.most == 1:
        stored = "float32" if member.type == "floats" else None
        return dataclasses.replace(given, codec=codec, stored=stored)
    arrays = isinstance(given, (Array, Boxes, Keypoints)) and (member.is_list or codec == "npy")
    if arrays and (member.type != "floats" or given.dtype == "float32"):  # type: ignore[attr-defined]
        return dataclasses.replace(given, codec=codec)  # type: ignore[type-var]
    lists = f"lists of {member.least} to {member.most} " if member.is_list else ""
    raise UsageError(
        f"{store.storage.paths[0]}: {member.name!r} has {lists}{member.type}, which field "
        f"{member.field} is not: {given!r}"
    )


def _value(store: PartsStore, place: int, longest: bool = False) -> bytes:
    """The first value of a field that is not empty, or the longest one: an empty list has no depth."""
    table = store.native.table
    inside = table.part_offset.reshape(-1, table.parts)[:, place]
    sizes = table.part_length.reshape(-1, table.parts)[:, place]
    sample = int(np.argmax(sizes if longest else sizes > 0))
    begin, size = int(inside[sample]), int(sizes[sample])
    return store.native.read(sample)[begin : begin + size]


def _depth(codec: str, value: bytes) -> int:
    """How many dimensions a value has."""
    at = depth = 0
    while codec == "msgpack" and at < len(value) and value[at] in (*range(0x90, 0xA0), 0xDC, 0xDD):
        at += {0xDC: 3, 0xDD: 5}.get(value[at], 1)
        depth += 1
    return max(1, depth)
