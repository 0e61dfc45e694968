"""Writes a class-per-folder dataset as an LMDB database or as tar shards. If it was interrupted, run
it again to continue."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nostall.base._words import counted
from nostall.cli._bars import Bars
from nostall.errors import UsageError
from nostall.source._source import ImageFolder

if TYPE_CHECKING:
    from nostall.convert import Converted
    from nostall.convert._work import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall convert``."""
    parser.add_argument("source", help="the dataset: one folder per class")
    parser.add_argument("dest", help="the folder to make")
    parser.add_argument("--to", choices=["lmdb", "tar"], default="lmdb")
    parser.add_argument(
        "--values",
        choices=["raw", "pickled", "datum"],
        help="lmdb: the image alone (raw, the default), a pickled (image, label), or Caffe's Datum",
    )
    parser.add_argument(
        "--order",
        choices=["source", "plan"],
        help="lmdb: plan lays the samples as the first epoch of a loader with --seed reads them",
    )
    parser.add_argument("--seed", type=int, help="lmdb: of --order plan, 0 if not given")
    parser.add_argument("--commit-size", help="lmdb: bytes of samples per transaction (128MiB)")
    parser.add_argument("--shard-size", help="tar: greatest size of an archive (256MiB)")
    parser.add_argument(
        "--threads", type=int, default=8, help="threads that read the dataset ahead"
    )


def run(arguments: argparse.Namespace) -> int:
    """Converts, with a progress bar on a terminal."""
    folder = ImageFolder(arguments.source, allow_empty=True)
    # Nothing is drawn of a conversion that is refused before it begins.
    with Bars() as bars:
        result = _convert(
            arguments, folder, lambda phase, done: bars.show(phase, done, len(folder))
        )
    before = f", {result.resumed_at} of them by an earlier run" if result.resumed_at else ""
    print(
        f"{result.path}: {counted(result.samples, 'sample')}{before}, "
        f"{counted(result.total_bytes, 'byte')}, read back and compared"
    )
    return 0


def _convert(arguments: argparse.Namespace, folder: ImageFolder, progress: Progress) -> Converted:
    from nostall.convert import to_lmdb, to_tar

    of = {"lmdb": ("values", "order", "seed", "commit_size"), "tar": ("shard_size",)}
    given = {
        kind: {name: value for name in names if (value := getattr(arguments, name)) is not None}
        for kind, names in of.items()
    }
    own = given.pop(arguments.to)
    for kind, others in given.items():
        for name in others:
            raise UsageError(
                f"--{name.replace('_', '-')} is of --to {kind}: leave it out of --to {arguments.to}"
            )
    if "seed" in own and own.get("order") != "plan":
        raise UsageError("--seed is of --order plan: leave it out, or pass both")
    write = to_tar if arguments.to == "tar" else to_lmdb
    return write(folder, arguments.dest, threads=arguments.threads, progress=progress, **own)
