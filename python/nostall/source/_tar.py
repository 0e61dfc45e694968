"""Tar shards as WebDataset writes them: members with the same name up to the first dot are one
sample, an image and its label or all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.fields import Kind
from nostall.source._parts import PartsStore, as_text, cover
from nostall.source._records import (
    FOUND,
    RULES,
    PathLike,
    Progress,
    ReadOptions,
    absolute,
    classes_beside,
    open_storage,
    reading_of,
    shard_paths,
)
from nostall.source._source import IMAGE_EXTENSIONS, arguments_of, whole_numbers
from nostall.source._tar_members import (
    FILE,
    UNREAD_LINK,
    Endings,
    all_endings,
    endings_of,
    group_members,
    parse_members,
    refuse_links,
    refuse_none,
    schema_of,
    split_members,
    split_name,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = 8
# The second refuses a key that has images of two endings where labels are not members; the third reads
# hard links, and refuses other links.
_RULES = f"{RULES}3"


class TarShards(PartsStore):
    """Images in tar archives, or samples of several members, read where they lie.

    Args:
        shards: a list of archives, a pattern (``train-*.tar``), a folder, or a URL of them.
        image: endings of the members that are samples, from behind the first dot on; the image
            formats if None. In these and other endings, large and small letters are alike, and a dot
            before them does not count.
        label: ending of the members that hold the label as text (``"cls"``), or a function of the
            sample's name, or None for 0. With a function the places are not kept, unless `index`
            names a file.
        members: fields of several members: by name, the endings of the members of which a key has
            one (``{"image": "jpg;png", "caption": "txt"}``); or a list of endings, which are the
            names too; "all" makes every ending that there is a field. What lies between the members
            of a key is read along. `image` and `label` are not for these.
        schema: the kinds of fields. Those that it does not have follow from the ending: jpg, png
            and the other images of `ImageFolder`; txt, text, transcript; cls, cls2, index, inx, id;
            json, jsn; npy, whose type and shape are those of the first samples; wav, flac; others are
            bytes.
        index: True keeps the places beside the first shard, or in the user's cache folder where
            that is read-only; a path keeps them there; False nowhere.
        reading: how the files are read.
        progress: called with the number of shards examined.

    Attributes:
        classes: the names of the labels, where ``nostall convert`` has left them beside the shards.

    Raises:
        CorruptionError: a damaged or cut archive, or a label that is not a number, with the offset.
        UsageError: there is no sample, no sample has a label, a member is sparse or a link that is
            not followed, an archive is compressed, a sample has two images, a key has two members for
            a field, the members of a key do not follow each other, or one is missing without a
            ``fill`` in the schema.
        IoError: a shard cannot be read.
    """

    classes: list[str] | None = None

    def __init__(
        self,
        shards: PathLike | Sequence[PathLike],
        *,
        image: Sequence[str] | None = None,
        label: str | Callable[[str], int] | None = "cls",
        members: Mapping[str, str | Sequence[str]] | Sequence[str] | None = None,
        schema: Mapping[str, Kind] | None = None,
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        progress: Progress | None = None,
        store: Any = None,
    ) -> None:
        self._arguments = arguments_of(locals(), but="progress")
        self._arguments["shards"] = paths = absolute(shard_paths(shards, (".tar",), store))
        chosen = reading_of(reading)
        self._image = endings_of(IMAGE_EXTENSIONS if image is None else image)
        self._label = endings_of([label])[0] if isinstance(label, str) else label
        self._reading = chosen
        self.storage = open_storage(paths, direct=chosen.direct, store=store)
        if members is not None:
            if image is not None or label != "cls":
                raise UsageError("members= names all fields: image= and label= are not for it")
            self._open_members(members, schema, index, progress)
            return
        if schema is not None:
            raise UsageError("schema= says the kinds of fields, which members= names")
        named = "(function)" if callable(self._label) else self._label or ""
        stamp = f"image={','.join(self._image)} labels={named}{_RULES}"
        self._open(
            kind="tar",
            stamp=lambda: stamp,
            scan=lambda: self._scan(stamp, progress),
            index=False if index is True and callable(label) else index,
            reading=chosen,
        )
        if self._label == "cls":
            self.classes = classes_beside(paths, self.labels)

    def _open_members(
        self,
        members: Mapping[str, str | Sequence[str]] | Sequence[str],
        schema: Mapping[str, Kind] | None,
        index: bool | PathLike,
        progress: Progress | None,
    ) -> None:
        fields = parse_members(members)
        stamp = f"members={as_text('all' if fields is None else fields)}{_RULES}"
        self._pairs = False
        self._open(
            kind="tar",
            stamp=lambda: stamp,
            scan=lambda: self._scan_members(stamp, fields, progress),
            index=index,
            reading=self._reading,
        )
        if fields is None:
            fields = {e: (e,) for e in json.loads(self.native.table.stamp.split(FOUND)[1])}
        self._schema = schema_of(self.native, fields, schema)

    def _scan_members(
        self, stamp: str, fields: Endings | None, progress: Progress | None
    ) -> _native.RecordTable:
        file, offset, size, names, _, kinds = _native.scan_tar(
            storage=self.storage, keep="", threads=_THREADS, progress=progress
        )
        # A record is one range of the archive, so the bytes of a field lie beside those of the others.
        own = kinds == FILE
        wanted = None if fields is None else {e for endings in fields.values() for e in endings}
        refuse_links(self.storage.paths, file, names, ~own, wanted)
        file, offset, size = file[own], offset[own], size[own]
        names = list(itertools.compress(names, own))
        split = split_members(names)
        if fields is None:
            fields = all_endings(split)
            stamp += FOUND + as_text(list(fields))
        at = group_members(self.storage.paths, file, offset, split, fields)
        if len(at) == 0:
            refuse_none(self.storage.paths, names, itertools.chain(*fields.values()))
        first = at.max(axis=1)
        places = cover(offset[at], size[at], at >= 0, offset[first])
        return self._parts_table("tar", stamp, places, file[first])

    def _scan(self, stamp: str, progress: Progress | None) -> _native.RecordTable:
        keep = f".{self._label}" if isinstance(self._label, str) else ""
        file, offset, size, names, contents, kinds = _native.scan_tar(
            storage=self.storage, keep=keep, threads=_THREADS, progress=progress
        )
        wanted = {*self._image, keep[1:]}
        refuse_links(self.storage.paths, file, names, kinds == UNREAD_LINK, wanted)
        chosen: list[int] = []
        keys: list[tuple[int, str]] = []
        texts: dict[tuple[int, str], tuple[int, bytes]] = {}
        images: dict[tuple[int, str], str] = {}  # the endings, by key
        for i, name in enumerate(names):
            key, ending = split_name(name)
            if ending in self._image:
                one = int(file[i]), key
                # Texts are found by the key; without them it may come again, as a sample of its own. A
                # member of another ending is of the same sample.
                if one in images and (keep or keys[-1] == one or images[one] != ending):
                    way = "each key may be there once"
                    if images[one] != ending:
                        way = f"name the one to read, as image=[{ending!r}]"
                        if keys[-1] != one:
                            way += ", or rename the others if they are samples of their own"
                    raise UsageError(
                        f"{self.storage.paths[one[0]]}: sample {key!r} has two images, the "
                        f"second at offset {int(offset[i])}: {way}"
                    )
                chosen.append(i)
                keys.append(one)
                images[one] = ending
            elif keep and ending == self._label:
                if (int(file[i]), key) in texts:
                    raise UsageError(
                        f"{self.storage.paths[int(file[i])]}: sample {key!r} has two labels, the "
                        f"second at offset {int(offset[i])}: each key may be there once"
                    )
                texts[int(file[i]), key] = int(offset[i]), contents[i]
        if not chosen:
            refuse_none(self.storage.paths, names, self._image)
        at = np.array(chosen, np.int64)
        return self._table(
            "tar",
            stamp,
            offset=offset[at],
            length=size[at],
            label=self._labels(keys, texts),
            file=file[at] if len(self.storage.paths) > 1 else None,
        )

    def _labels(
        self, keys: list[tuple[int, str]], texts: dict[tuple[int, str], tuple[int, bytes]]
    ) -> NDArray[np.int64]:
        if callable(self._label):
            function = self._label
            return whole_numbers([function(key) for _, key in keys], "what label= returns")
        labels = np.zeros(len(keys), np.int64)
        if self._label is None:
            return labels
        if keys and not texts:
            file, key = keys[0]
            raise UsageError(
                f"{self.storage.paths[file]}: no sample has a label ({key}.{self._label} and so on are "
                "not there): pass label=None for samples without labels, or the ending of theirs"
            )
        for i, (file, key) in enumerate(keys):
            where = f"{self.storage.paths[file]}: sample {key!r}"
            if (file, key) not in texts:
                raise CorruptionError(f"{where} has no label ({key}.{self._label}), others have")
            at, text = texts[file, key]
            try:
                labels[i] = int(text)
            except (ValueError, OverflowError):
                raise CorruptionError(
                    f"{where} has the label {text[:40]!r} at offset {at}, which is not a number"
                ) from None
        return labels
