"""A folder of image files on an object store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.errors import UsageError
from nostall.source._objects import list_objects, open_objects
from nostall.source._records import ReadOptions, RecordStore
from nostall.source._source import IMAGE_EXTENSIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ObjectFolder(RecordStore):
    """One object per sample, one folder per class: ``ImageFolder`` on an object store.

    Labels, classes and order are those of ``ImageFolder`` of the same files, which passes over files
    beside the class folders. Where there are no folders, all objects are of one class, "".

    Args:
        url: for example ``s3://bucket/train``.
        extensions: of names that count, lower case with the dot.
        store: an ``obstore.store`` to use instead of what the environment says.

    Raises:
        IoError: the listing fails, or an object disappears.
        UsageError: there is no such object.
    """

    def __init__(
        self,
        url: str,
        *,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        store: Any = None,
    ) -> None:
        self._arguments = {"url": url, "extensions": extensions, "store": store}
        base = url.rstrip("/") + "/"
        listed = [
            (u.removeprefix(base), u, meta)
            for u, meta in list_objects(base, store=store)
            if PurePosixPath(u).suffix.lower() in set(extensions)
        ]
        if not listed:
            raise UsageError(f"{url} has no object that ends with {', '.join(extensions)}")
        listed = [one for one in listed if "/" in one[0]] or listed
        listed.sort(key=lambda one: _place(one[0]))
        keys, urls, metas = zip(*listed, strict=True)
        self.storage = open_objects(urls, store, metas)
        labels, self.classes = _labels_of(keys)
        sizes = np.asarray(self.storage.sizes)
        self._open(
            kind="objects",
            stamp=lambda: "",
            scan=lambda: self._table(
                "objects",
                "",
                offset=np.zeros(len(sizes), np.uint64),
                length=sizes,
                label=labels,
                file=np.arange(len(sizes), dtype=np.uint32),
            ),
            index=False,
            reading=ReadOptions(coalesce=False),
        )


def _place(key: str) -> tuple[str, str, str]:
    """The class, folder and name of an object: by these ``ImageFolder`` sorts."""
    folder, _, name = key.rpartition("/")
    return folder.split("/", 1)[0], folder, name


def _labels_of(keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """One class per folder right below the root."""
    folders = [_place(key)[0] for key in keys]
    classes = sorted(set(folders))
    number = {name: i for i, name in enumerate(classes)}
    return np.array([number[f] for f in folders], np.int64), classes
