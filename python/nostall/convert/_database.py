"""Samples into an LMDB database, through liblmdb."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nostall.base._sizes import parse_size
from nostall.convert._work import Converted, Progress, Work, forget_cached
from nostall.errors import IoError, UsageError
from nostall.plan import Plan
from nostall.source._lmdb import LABELS_KEY, LMDB
from nostall.source._source import Source

if TYPE_CHECKING:
    import lmdb

Values = Literal["raw", "pickled", "datum"]
Order = Literal["source", "plan"]

_PAGE = 4096
_KEY_DIGITS = 8
_COMMIT_SIZE = "128MiB"
# Room for what the tree adds; the file grows as it is written, so this costs address space only.
_SPARE = 1 << 30
_NO_ROOM = 1 << 20  # bytes


def to_lmdb(
    source: Source,
    dest: str | os.PathLike[str],
    *,
    values: Values = "raw",
    order: Order = "source",
    seed: int = 0,
    commit_size: int | str = _COMMIT_SIZE,
    threads: int = 8,
    progress: Progress | None = None,
) -> Converted:
    """Writes `source` into the new database folder `dest`; a second call continues an interrupted one.

    Keys are decimal numbers of equal length, in the order of the samples. The places of all values
    are stored beside the database once it is complete. liblmdb fixes them at each commit and has no
    call that returns them, so one scan of the tree at the end finds them.

    Args:
        source: the samples, for example an ``ImageFolder``.
        dest: the folder to be made; ``dest.partial`` exists until it is complete.
        values: ``"raw"`` (the sample; its label goes into the value of the key ``__labels__``, which
            ``nostall.LMDB`` reads), ``"pickled"`` ((bytes, int)), ``"datum"`` (Caffe's Datum,
            encoded, with labels of 32 bits). The latter two carry their labels and need ``values=``
            again to be read.
        order: how the samples lie in the file. ``"plan"``: as the first epoch of a loader with this
            `seed` reads them, so that it reads the file from its begin to its end. Their numbers
            stay those of `source`. Samples of less than 2 KB lie in the tree's own pages, by number.
        seed: of the loader, where `order` is "plan".
        commit_size: bytes of one transaction, which is what a killed conversion loses at most.
        threads: threads that read the source ahead.
        progress: called with "writing" or "verifying", and the number of samples.

    Raises:
        UsageError: py-lmdb is missing, `dest` exists or lies in `source`, something else is at
            ``dest.partial``, or an argument cannot be meant.
        IoError: a sample cannot be read, or the disk is full or fails.
        CorruptionError: what was read back is not what was written.
    """
    if values not in ("raw", "pickled", "datum"):
        raise UsageError(f'values must be "raw", "pickled" or "datum", not {values!r}')
    if order not in ("source", "plan"):
        raise UsageError(f'order must be "source" or "plan", not {order!r}')
    limit = parse_size(commit_size)
    liblmdb = _liblmdb()
    options = {"to": "lmdb", "values": values}
    ids: Sequence[int] = range(len(source))
    if order == "plan":
        options["order"] = f"plan of seed {seed}"
        ids = Plan(samples=len(source), batch_size=1, seed=seed).epoch_order(0).tolist()
    with Work(source, dest, threads, options) as work:
        if values == "datum":
            _check_labels(source)
        try:
            resumed_at = _write(liblmdb, work, ids, values, limit, progress)
            forget_cached(work.folder / "data.mdb")
        except liblmdb.Error as error:
            raise work.failure(_as_oserror(liblmdb, error, work.folder)) from error
        except OSError as error:
            if isinstance(error, IoError):
                raise
            raise work.failure(error) from error
        work.verify(LMDB(work.folder, values=values, index=False), progress)
        work.finish(leave_out=["lock.mdb"])
    LMDB(work.dest, values=values)  # stores the places
    size = (work.dest / "data.mdb").stat().st_size
    return Converted(Path(work.dest), len(source), size, resumed_at)


def _write(
    liblmdb: Any,
    work: Work,
    ids: Sequence[int],
    values: Values,
    limit: int,
    progress: Progress | None,
) -> int:
    source = work.source
    n = len(source)
    room = int((source.sizes + 2 * _PAGE).sum()) + 200 * n + _SPARE
    if not (work.folder / "data.mdb").exists():
        work.check_room(0)  # before there is a file
    with liblmdb.open(
        os.fsencode(work.folder), map_size=room // _PAGE * _PAGE, readahead=False, meminit=False
    ) as environment:
        with environment.begin() as transaction:
            complete = transaction.get(LABELS_KEY) is not None
        begin = n if complete else int(environment.stat()["entries"])
        work.check_unchanged(ids[:begin])
        if complete:
            return n
        # What a commit wrote before the disk was full lies behind the last page, and is written again.
        file = os.stat(work.folder / "data.mdb").st_blocks * 512
        rest = file - (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        work.check_room(int(source.sizes[ids[:begin]].sum()) + max(0, rest))
        encode = _encoder(values)
        sorted_keys = isinstance(ids, range)
        labels = source.labels
        writing = environment.begin(write=True)
        pending = 0
        try:
            for done, (sample, data) in enumerate(work.samples(ids[begin:]), begin + 1):
                value = encode(data, int(labels[sample]))
                writing.put(key_of(sample, n), value, append=sorted_keys)
                pending += len(data)
                if pending >= limit:
                    work.sums_written()
                    writing.commit()
                    writing, pending = environment.begin(write=True), 0
                if progress:
                    progress("writing", done)
            writing.put(LABELS_KEY, labels.astype("<i8").tobytes(), append=True)
            work.sums_written()
            writing.commit()
        except BaseException:
            writing.abort()
            raise
        return begin


def _check_labels(source: Source) -> None:
    bounds = np.iinfo(np.int32)
    wrong = np.flatnonzero((source.labels < bounds.min) | (source.labels > bounds.max))
    if wrong.size:
        raise UsageError(
            f"the label {source.labels[wrong[0]]} of {source.describe(int(wrong[0]))} is beyond the 32 "
            'bits of a Datum: pass values="raw"'
        )


def key_of(sample: int, samples: int) -> bytes:
    """The key of a sample: decimal, of one length for all, so that keys sort as numbers."""
    return b"%0*d" % (max(_KEY_DIGITS, len(str(samples - 1))), sample)


def _encoder(values: Values) -> Callable[[bytes, int], bytes]:
    if values == "pickled":
        return lambda data, label: pickle.dumps((data, label), protocol=4)
    return datum if values == "datum" else lambda data, _: data


def datum(data: bytes, label: int) -> bytes:
    """Caffe's Datum of an encoded image, in Protocol Buffers' wire format: field 4 (data), field 5
    (label), field 7 (encoded = true)."""
    return (
        b"\x22" + _varint(len(data)) + data + b"\x28" + _varint(label & (2**64 - 1)) + b"\x38\x01"
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _liblmdb() -> Any:
    try:
        import lmdb
    except ModuleNotFoundError:
        raise UsageError(
            "writing LMDB databases needs py-lmdb: pip install 'nostall[lmdb]'"
        ) from None
    return lmdb


def _as_oserror(liblmdb: Any, error: lmdb.Error, folder: Path) -> OSError:
    # liblmdb takes a write that was cut short, as on a full disk, for an I/O error.
    full = isinstance(error, liblmdb.DiskError) or shutil.disk_usage(folder).free < _NO_ROOM
    return OSError(errno.ENOSPC if full else errno.EIO, str(error))
