"""Samples into tar shards, as WebDataset lays them out."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from nostall.base._sizes import parse_size
from nostall.convert._work import Converted, Progress, Work, forget_cached, sync_folder
from nostall.errors import IoError, UsageError
from nostall.source._source import IMAGE_EXTENSIONS, Source
from nostall.source._tar import TarShards

_SHARD_SIZE = "256MiB"
_BLOCK = 512


def to_tar(
    source: Source,
    dest: str | os.PathLike[str],
    *,
    shard_size: int | str = _SHARD_SIZE,
    threads: int = 8,
    progress: Progress | None = None,
) -> Converted:
    """Writes `source` into archives in the new folder `dest`; a second call continues it.

    Sample i is the members ``i.jpg`` (or its own ending) and ``i.cls`` (the label as text) of
    ``shard-NNNNNN.tar``. Equal sources give equal archives.

    Args:
        source: an ``ImageFolder`` or ``FileList`` whose names end as images do.
        dest: the folder to be made; ``dest.partial`` exists until it is complete.
        shard_size: bytes of an archive at most, unless one sample is larger.
        threads: threads that read the source ahead.
        progress: called with "writing" or "verifying", and the number of samples.

    Raises:
        UsageError: `dest` exists or lies in `source`, something else is at ``dest.partial``, an
            argument cannot be meant, or a sample's name does not say its format.
        IoError: a sample cannot be read, or the disk is full or fails.
        CorruptionError: what was read back is not what was written.
    """
    limit = parse_size(shard_size)
    if limit < 1:
        raise UsageError(f"an archive cannot have {shard_size} bytes: give shard_size=, as 256MiB")
    with Work(source, dest, threads, {"to": "tar", "shard_size": limit}) as work:
        for sample in range(len(source)):  # before hours of work
            _ending(source, sample)
        shards = list(_split(source, limit))
        try:
            resumed_at = _write(work, shards, progress)
        except OSError as error:
            if isinstance(error, IoError):
                raise
            raise work.failure(error) from error
        work.verify(TarShards(work.folder, index=False), progress)
        work.finish()
    size = sum(p.stat().st_size for p in work.dest.glob("*.tar"))
    TarShards(work.dest)  # stores the places
    return Converted(Path(work.dest), len(source), size, resumed_at)


def _split(source: Source, limit: int) -> Iterator[range]:
    """The samples of each shard: a function of the sizes alone, so that a later run gets the same."""
    label_bytes = np.array([len(str(x)) for x in source.labels], np.uint64)
    blocks = -(-source.sizes // _BLOCK) + -(-label_bytes // _BLOCK) + 2
    sizes = (blocks * _BLOCK).astype(np.int64).tolist()
    begin, total = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield range(begin, i)
            begin, total = i, 0
        total += size
    yield range(begin, len(sizes))


def _write(work: Work, shards: list[range], progress: Progress | None) -> int:
    """Writes the shards that are not there; returns the first sample that was not."""
    names = [work.folder / f"shard-{k:06d}.tar" for k in range(len(shards))]
    done = next((k for k, name in enumerate(names) if not name.exists()), len(names))
    begin = shards[done].start if done < len(shards) else len(work.source)
    work.check_unchanged(range(begin))
    for left in work.folder.glob("shard-*.tar.partial"):
        left.unlink()  # is written again, in its room
    work.check_room(int(work.source.sizes[:begin].sum()))
    samples = work.samples(range(begin, len(work.source)))
    for name, part in zip(names[done:], shards[done:], strict=True):
        unfinished = name.with_name(name.name + ".partial")
        with unfinished.open("wb") as file:
            with _archive(file) as archive:
                for _ in part:
                    sample, data = next(samples)
                    key = f"{sample:08d}"
                    _add(archive, key + _ending(work.source, sample), data)
                    _add(archive, f"{key}.cls", str(int(work.source.labels[sample])).encode())
                    if progress:
                        progress("writing", sample + 1)
            file.flush()
            os.fsync(file.fileno())
        work.sums_written()
        forget_cached(unfinished)
        unfinished.rename(name)
        sync_folder(work.folder)
    return begin


def _archive(file: IO[bytes]) -> tarfile.TarFile:
    """Members are USTAR's, but of 8 GiB or more, whose size that cannot hold."""
    return tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _ending(source: Source, sample: int) -> str:
    name = source.describe(sample)
    ending = os.path.splitext(name)[1].lower()
    if ending not in IMAGE_EXTENSIONS:
        raise UsageError(
            f"{name} does not end as an image does ({', '.join(IMAGE_EXTENSIONS)}): tar shards tell "
            "samples and labels apart by the endings of their names"
        )
    return ending
