"""Tar shards as WebDataset writes them: members with the same name up to the first dot are one
sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall import _native
from nostall.errors import CorruptionError, UsageError
from nostall.source._records import (
    PathLike,
    Progress,
    ReadOptions,
    RecordStore,
    absolute,
    open_storage,
    reading_of,
    shard_paths,
)
from nostall.source._source import IMAGE_EXTENSIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = 8


class TarShards(RecordStore):
    """Images in tar archives, read member by member where they lie.

    Args:
        shards: a list of archives, a pattern (``train-*.tar``), a folder, or a URL of them.
        image: endings of the members that are samples, from the first dot on, without it; the
            image formats if None.
        label: ending of the members that hold the label as text (``"cls"``), or a function of the
            sample's name, or None for 0. With a function the places are not kept, unless `index`
            names a file.
        index: True keeps the places beside the first shard, or in the user's cache folder where
            that is read-only; a path keeps them there; False nowhere.
        reading: how the files are read.
        progress: called with the number of shards examined.

    Raises:
        CorruptionError: a damaged or cut archive, or a label that is not a number, with the offset.
        UsageError: there is no sample, no sample has a label, a member is sparse, an archive is
            compressed, or a sample has two images.
        IoError: a shard cannot be read.
    """

    def __init__(
        self,
        shards: PathLike | Sequence[PathLike],
        *,
        image: Sequence[str] | None = None,
        label: str | Callable[[str], int] | None = "cls",
        index: bool | PathLike = True,
        reading: ReadOptions | None = None,
        progress: Progress | None = None,
        store: Any = None,
    ) -> None:
        paths = absolute(shard_paths(shards, (".tar",), store))
        chosen = reading_of(reading)
        self._arguments = {
            "shards": paths,
            "image": image,
            "label": label,
            "index": index,
            "reading": reading,
            "store": store,
        }
        self._image = (
            tuple(image)
            if image is not None
            else tuple(e.removeprefix(".") for e in IMAGE_EXTENSIONS)
        )
        self._label = label
        self.storage = open_storage(paths, direct=chosen.direct, store=store)
        named = label if isinstance(label, str) else "(function)" if label else ""
        stamp = f"image={','.join(self._image)} labels={named}"
        self._open(
            kind="tar",
            stamp=lambda: stamp,
            scan=lambda: self._scan(stamp, progress),
            index=False if index is True and callable(label) else index,
            reading=chosen,
        )

    def _scan(self, stamp: str, progress: Progress | None) -> _native.RecordTable:
        keep = f".{self._label}" if isinstance(self._label, str) else ""
        file, offset, size, names, contents = _native.scan_tar(
            storage=self.storage, keep=keep, threads=_THREADS, progress=progress
        )
        chosen: list[int] = []
        keys: list[tuple[int, str]] = []
        texts: dict[tuple[int, str], tuple[int, bytes]] = {}
        for i, name in enumerate(names):
            key, ending = split_name(name)
            if ending in self._image:
                if keys and keys[-1] == (int(file[i]), key):
                    raise UsageError(
                        f"{self.storage.paths[int(file[i])]}: sample {key!r} has two images, the "
                        f"second at offset {int(offset[i])}; name the one to read: image="
                    )
                chosen.append(i)
                keys.append((int(file[i]), key))
            elif keep and ending == self._label:
                texts[int(file[i]), key] = int(offset[i]), contents[i]
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
            return np.array([function(key) for _, key in keys], np.int64)
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


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: a sample's name, and its member's ending in lower case; the ending starts
    after the first dot of the last part of the path."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()
