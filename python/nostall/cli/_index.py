"""Builds, checks or shows the index of a dataset: the listing of a class-per-folder dataset, or the
places of the records of an LMDB database, tar shards or TFRecord files."""

from __future__ import annotations

import argparse
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nostall import _native
from nostall.base._words import counted
from nostall.cli._bars import Bars
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source import LMDB, TarShards, TFRecord
from nostall.source._objects import is_url
from nostall.source._records import RecordStore, examine_index
from nostall.source._source import (
    IMAGE_EXTENSIONS,
    LISTING_THREADS,
    ImageFolder,
    Source,
    listing_of,
)

_BATCH = 16  # of --damaged
_ENDINGS = {
    "lmdb": (".mdb",),
    "tar": (".tar",),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrec"),
}
_OPTIONS = {
    "folder": ("extensions",),
    "lmdb": ("database", "values", "order"),
    "tar": ("image", "label"),
    "tfrecord": ("values", "image", "label"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall index``."""
    parser.add_argument("root", help="the dataset: a folder, a file, a pattern or a URL")
    parser.add_argument("--index", help="file of the index; beside the dataset if not given")
    parser.add_argument("--check", action="store_true", help="only check whether it is still valid")
    parser.add_argument(
        "--damaged",
        action="store_true",
        help="of images: then decode every one; list those that cannot be, and why",
    )
    parser.add_argument(
        "--kind",
        choices=["folder", *_ENDINGS],
        help="derived from the names of the files if not given",
    )
    parser.add_argument(
        "--extensions", help="folder: endings of files, with commas; of images if not given"
    )
    parser.add_argument("--database", help="lmdb: a named database in the file")
    parser.add_argument("--values", help="lmdb, tfrecord: format of the values, as for the class")
    parser.add_argument("--order", help="lmdb: order of the samples: auto, key or number")
    parser.add_argument("--image", help="tar: endings of samples, with commas; tfrecord: feature")
    parser.add_argument("--label", help="tar: ending of labels; tfrecord: feature; '' for none")


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 if the index is not valid (--check) or an image is damaged (--damaged)."""
    if arguments.check and arguments.damaged:
        raise UsageError("--check looks at the index alone: leave it out, or --damaged")
    kind = arguments.kind or kind_of(arguments.root)
    for name in sorted({name for names in _OPTIONS.values() for name in names}):
        if getattr(arguments, name) is not None and name not in _OPTIONS.get(kind, ()):
            raise UsageError(f"--{name} does not go with a dataset of kind {kind}")
    if kind == "folder":
        return _folder(arguments)
    bars = Bars()
    opens = _opener(kind, arguments, bars)
    if arguments.check:
        path, reason = examine_index(opens)
        print(f"{path or arguments.root}: {reason or 'holds'}")
        return 1 if reason else 0
    begun = time.perf_counter()
    with bars:
        store = opens()
    seconds = time.perf_counter() - begun
    if arguments.index and store.index_problem:
        raise IoError(f"{store.index_problem}; give another file, that can be written")
    how = "held" if store.index_reused else f"made in {seconds:.2f} s"
    print(
        f"{store.index_file or 'kept nowhere'}: {kind}, {counted(len(store), 'sample')} of "
        f"{counted(store.total_bytes, 'byte')} in {counted(len(store.storage.paths), 'file')}, "
        f"index of {store.index_bytes} bytes ({store.index_bytes / len(store):.1f} per sample), "
        f"fingerprint {store.fingerprint:016x}, {how}"
    )
    return _damaged(store) if arguments.damaged else 0


def kind_of(root: str) -> str:
    """What a dataset is, by the names of its files."""
    path = Path(root)
    names = [root.rstrip("/")]
    if path.is_dir():
        names = [p.name for p in path.iterdir() if p.is_file()]
    for kind, endings in _ENDINGS.items():
        if found := [name for name in names if name.endswith(endings)]:
            if path.is_dir() and _has_folders(path):
                raise UsageError(
                    f"{root} has files of kind {kind}, such as {min(found)}, and folders: pass --kind "
                    f"{kind} or --kind folder"
                )
            return kind
    if path.is_dir():
        return "folder"
    if names[0].endswith((".parquet", ".arrow", ".h5", ".hdf5")):
        raise UsageError(
            f"{root}: Parquet, Arrow and HDF5 files have no index, nothing is to be done"
        )
    if not (path.exists() or is_url(root) or any(c in root for c in "*?[")):
        raise UsageError(f"there is no {root}: give a folder, a file, a pattern or a URL")
    raise UsageError(f"{root}: the name does not show what kind of dataset it is: pass --kind")


def _has_folders(path: Path) -> bool:
    return any(p.is_dir() and not p.name.startswith(".") for p in path.iterdir())


def _opener(kind: str, arguments: argparse.Namespace, bars: Bars) -> Callable[[], RecordStore]:
    options: dict[str, Any] = {"index": arguments.index or True}
    if not arguments.check:
        options["progress"] = lambda done: bars.show("examined", done)
    for name in _OPTIONS[kind]:
        if (value := getattr(arguments, name)) is not None:
            options[name] = value
    if kind == "lmdb":
        return lambda: LMDB(arguments.root, **options)
    if options.get("label") == "":
        options["label"] = None
    if kind == "tar":
        if "image" in options:
            options["image"] = options["image"].split(",")
        return lambda: TarShards(arguments.root, **options)
    return lambda: TFRecord(arguments.root, **options)


def _folder(arguments: argparse.Namespace) -> int:
    extensions = list(IMAGE_EXTENSIONS)
    if arguments.extensions is not None:
        extensions = arguments.extensions.lower().split(",")
    path = listing_of(arguments.root, arguments.index or True, extensions)
    options: dict[str, Any] = {"extensions": extensions, "class_per_folder": True}
    with Bars() as bars:
        bars.show("looking at folders and files")
        reason = _native.check_index(root=arguments.root, index_path=path, **options)
        # That looks at folders alone, as the start of a training does; this at all files.
        rewritten = "" if reason else _rewritten(arguments.root, path, options)
    if reason and not os.path.exists(path):
        reason = f"there is none yet: nostall index {arguments.root} makes it"
    if arguments.check:
        print(f"{path}: {reason or rewritten or 'holds'}")
        return 1 if reason or rewritten else 0
    if rewritten:
        print(f"{path}: {rewritten}; listing the folder again")
    with Bars() as bars:
        bars.show("listing")
        if rewritten:
            _replace(arguments.root, path, options)
        elif arguments.index:
            _list(arguments.root, path, options, must_store=True)
        folder = ImageFolder(
            arguments.root, index=arguments.index or True, allow_empty=True, extensions=extensions
        )
    # Without --index an older one may be there that cannot be replaced.
    stored = arguments.index or not _native.check_index(
        root=arguments.root, index_path=path, **options
    )
    kept = path if stored else "kept nowhere"
    print(
        f"{kept}: {counted(len(folder), 'sample')} of {counted(len(folder.classes), 'class')}, "
        f"{counted(folder.total_bytes, 'byte')}, fingerprint {folder.fingerprint:016x}"
    )
    return _damaged(folder) if arguments.damaged else 0


def _damaged(dataset: Source) -> int:
    """Lists the samples that a training cannot use, and why; 1 if there are any."""
    from nostall import DataLoader, transforms

    def loader(samples: range) -> DataLoader:
        # Small, for a JPEG costs less then; all of its bytes are decoded all the same.
        steps = [transforms.Resize((8, 8)), transforms.ToTensor()]
        options: dict[str, Any] = {"transforms": steps, "tiers": [], "output": "numpy", "epochs": 1}
        # Alone, also in the shell of a node where a training runs.
        options |= {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
        return DataLoader(dataset, _BATCH, order=samples, **options)

    done, damaged, total = 0, 0, len(dataset)
    with Bars() as bars:
        while done < total:
            try:
                with loader(range(done, total)) as batches:
                    for images, *_ in batches:
                        done += len(images)
                        bars.show("decoding", done, total)
            except (CorruptionError, IoError):  # in the next batch: which of its samples
                for sample in range(done, min(done + _BATCH, total)):
                    try:
                        with loader(range(sample, sample + 1)) as one:
                            next(iter(one))
                    except (CorruptionError, IoError) as error:
                        damaged += 1
                        print(error)
                done = min(done + _BATCH, total)
    print(f"{damaged} of {counted(total, 'sample')} cannot be used")
    return 1 if damaged else 0


def _replace(root: str, path: str, options: dict[str, Any]) -> None:
    """Lists the folder anew; what is stored stays until the new listing takes its place."""
    fresh = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        _list(root, fresh, options, must_store=True)
        os.replace(fresh, path)
    except IoError as error:
        raise IoError(str(error).replace(fresh, path)) from error
    finally:
        Path(fresh).unlink(missing_ok=True)


def _list(
    root: str, path: str, options: dict[str, Any], must_store: bool = False
) -> _native.FolderSource:
    return _native.open_folder(
        root=root,
        index_path=path,
        allow_empty=True,
        threads=LISTING_THREADS,
        must_store=must_store,
        **options,
    )


def _rewritten(root: str, path: str, options: dict[str, Any]) -> str:
    """Which files have another size than the stored listing says; empty if none has."""
    kept, now = _list(root, path, options), _list(root, "", options)
    if kept.fingerprint == now.fingerprint:
        return ""
    others = np.flatnonzero(kept.sizes != now.sizes) if len(kept) == len(now) else np.zeros(0, int)
    if not len(others):
        return "the folder has changed"
    first = int(others[0])
    return (
        f"{len(others)} of {len(now)} files have another size than was listed, such as "
        f"{now.describe(first)} ({now.sizes[first]} bytes, not {kept.sizes[first]})"
    )
