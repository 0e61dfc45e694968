"""All members of a key as one sample: which of them are fields, of which kind, and where they lie."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._words import counted
from nostall.errors import UsageError
from nostall.fields import Audio, Bytes, Image, Json, Kind, Scalar, Schema, Text
from nostall.source._parts import NO_PART, array_of, refuse_likely_mask
from nostall.source._source import IMAGE_EXTENSIONS

_MOST_FIELDS = 1024
_TOLD = 5  # endings in a message

#: Of members, as the scan says it (native/records/tar.h).
FILE, HARD_LINK, UNREAD_LINK = range(3)

_KINDS: dict[str, Kind] = {
    **dict.fromkeys((ending[1:] for ending in IMAGE_EXTENSIONS), Image()),
    **dict.fromkeys(("txt", "text", "transcript"), Text()),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), Scalar(codec="decimal")),
    **dict.fromkeys(("json", "jsn"), Json()),
    **dict.fromkeys(("wav", "flac"), Audio()),
}

#: By the name of the field, the endings of its members.
Endings = dict[str, tuple[str, ...]]


def parse_members(
    members: Mapping[str, str | Sequence[str]] | Sequence[str],
) -> Endings | None:
    """The endings of every field, in lower case; None for "all". A list names fields by endings.

    Raises:
        UsageError: there is no field, a field has no ending, or an ending is that of two fields.
    """
    if members == "all":
        return None
    if isinstance(members, str) or not isinstance(members, Mapping | Sequence):
        raise UsageError(f'members must be "all", {{field: ending}} or a list, not {members!r}')
    if not isinstance(members, Mapping):
        if any(not isinstance(ending, str) or ";" in ending for ending in members):
            raise UsageError(f"members: a list has one ending for each field, not {members!r}")
        if len(set(members)) < len(members):
            raise UsageError(f"members: an ending is named twice in {members!r}")
        members = {ending.strip().removeprefix("."): ending for ending in members}
    fields: Endings = {}
    owner: dict[str, str] = {}
    for name, given in members.items():
        fields[name] = endings_of(given)
        if not all(fields[name]) or not fields[name]:
            raise UsageError(f"members: field {name!r} needs endings, for example jpg;png")
        for ending in fields[name]:
            if ending in owner:
                raise UsageError(f"members: .{ending} is named twice ({owner[ending]}, {name})")
            owner[ending] = name
    if not fields or len(fields) > _MOST_FIELDS:
        raise UsageError(f"members must name 1 to {_MOST_FIELDS} fields, not {len(fields)}")
    return fields


def endings_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """A list, or a text with ``;`` between them: in lower case, as `split_name` gives them."""
    listed = given.split(";") if isinstance(given, str) else given
    return tuple(ending.strip().removeprefix(".").lower() for ending in listed)


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: a sample's name, and its member's ending in lower case; the ending starts
    after the first dot of the last part of the path."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def split_members(names: Sequence[str]) -> list[tuple[str, str] | None]:
    """`split_name` of every member; None of those without a name before the dot, or nothing behind
    it."""
    found: list[tuple[str, str] | None] = []
    for name in names:
        key, ending = split_name(name)
        found.append((key, ending) if ending and key and not key.endswith("/") else None)
    return found


def refuse_links(
    paths: Sequence[str],
    file: NDArray[np.uint32],
    names: Sequence[str],
    links: NDArray[np.bool_],
    endings: Container[str] | None,
) -> None:
    """`links` says which members have no bytes of their own here.

    Raises:
        UsageError: one of them has one of the endings; None: any.
    """
    unread = []
    for i in np.flatnonzero(links).tolist():
        ending = split_name(names[i])[1]
        if ending and (endings is None or ending in endings):
            unread.append(i)
    if unread:
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        raise UsageError(
            f"{paths[int(file[unread[0]])]}: member {names[unread[0]]!r}{more} is a link, whose bytes "
            "lie elsewhere: make the archive with tar --dereference --hard-dereference"
        )


def refuse_none(paths: Sequence[str], names: Sequence[str], endings: Iterable[str]) -> NoReturn:
    """
    Raises:
        UsageError: always; no member has one of the endings.
    """
    there = list(dict.fromkeys(ending for _, ending in map(split_name, names) if ending))
    found = f"the first endings there are .{', .'.join(there[:_TOLD])}" if there else "none has one"
    raise UsageError(
        f"{paths[0]} has no samples: no member ends with .{', .'.join(endings)}; {found}"
    )


def all_endings(split: Sequence[tuple[str, str] | None]) -> Endings:
    """A field for every ending, named by it, in the order in which they come first.

    Raises:
        UsageError: there are too many.
    """
    endings = dict.fromkeys(member[1] for member in split if member is not None)
    if len(endings) > _MOST_FIELDS:
        raise UsageError(
            f'{len(endings)} different endings are too many for members="all": name the fields'
        )
    return {ending: (ending,) for ending in endings}


def group_members(
    paths: Sequence[str],
    file: NDArray[np.uint32],
    offset: NDArray[np.uint64],
    split: Sequence[tuple[str, str] | None],
    fields: Endings,
) -> NDArray[np.int64]:
    """The member of every sample and field, shape (samples, fields), -1 for none.

    Raises:
        UsageError: a key has two members for a field, or its members do not follow each other.
    """
    place_of = {ending: i for i, endings in enumerate(fields.values()) for ending in endings}
    none = array("q", [-1] * len(fields))
    rows = array("q")
    ended: set[str] = set()  # keys of this file with members that were chosen
    shard, key, row = -1, "", -1  # the row of `key`, -1 while none of its members was chosen
    for i, (number, member) in enumerate(zip(file.tolist(), split, strict=True)):
        if member is None:
            continue
        if number != shard:
            ended.clear()
            shard, key, row = number, member[0], -1
        elif member[0] != key:
            if row >= 0:
                ended.add(key)
            before, key, row = key, member[0], -1
        place = place_of.get(member[1])
        if place is None:
            continue
        if key in ended:
            raise UsageError(
                f"{paths[shard]}: the members of {key!r} do not follow each other: "
                f".{member[1]} at offset {int(offset[i])} comes after a member of {before!r}; "
                "write the archive sorted by name"
            )
        if row < 0:
            row = len(rows)
            rows.extend(none)
        if rows[row + place] >= 0:
            first = split[rows[row + place]]
            raise UsageError(
                f"{paths[shard]}: {key!r} has two members for field {list(fields)[place]}: "
                f".{first[1] if first else ''} and .{member[1]}, the second at offset "
                f"{int(offset[i])}"
            )
        rows[row + place] = i
    return np.frombuffer(rows, np.int64).reshape(-1, len(fields))


def schema_of(
    native: _native.RecordSource, fields: Endings, given: Mapping[str, Kind] | None
) -> Schema:
    """The kind of every field: the one given, else that of its endings.

    Raises:
        UsageError: `given` names another field, the endings of a field have several kinds, arrays
            differ in type or dimensions, or a key lacks a field that has no fill.
        CorruptionError: a .npy member is none.
    """
    given = given or {}
    if unknown := given.keys() - fields.keys():
        raise UsageError(
            f"schema names the field {min(unknown)}, which has no members: there are "
            f"{', '.join(fields)}"
        )
    table = native.table
    present = table.part_offset.reshape(-1, table.parts) != NO_PART
    kinds: dict[str, Kind] = {}
    for place, (name, endings) in enumerate(fields.items()):
        has = present[:, place]
        kind = given.get(name)
        missing = int(np.argmin(has))
        if not has[missing] and (kind is None or kind.fill is None):
            raise UsageError(
                f"{native.describe(missing)}: its key has no member .{' or .'.join(endings)} (field "
                f"{name}), which holds for {counted(int((~has).sum()), 'key')} in all: give the "
                "schema's field a fill="
            )
        kinds[name] = kind or _kind_of(native, name, endings, place)
    return Schema(kinds)


def _kind_of(native: _native.RecordSource, name: str, endings: tuple[str, ...], place: int) -> Kind:
    last = {ending.rpartition(".")[2] for ending in endings}
    for ending in last:
        refuse_likely_mask(name, ending)
    if last == {"npy"}:
        return array_of(native, name, place)
    kinds = {_KINDS.get(ending, Bytes()) for ending in last}
    if len(kinds) > 1 or (len(last) > 1 and "npy" in last):
        raise UsageError(
            f"the members of field {name} (.{', .'.join(endings)}) are of several kinds: give "
            f"schema={{{name!r}: ...}}"
        )
    return kinds.pop()
