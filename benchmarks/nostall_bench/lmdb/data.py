"""The databases that are read: synthetic records that name themselves, written by liblmdb."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError

_NAME = 8  # a record begins and ends with its number, little-endian


@dataclass(frozen=True)
class Records:
    """Records of one database: so many, of `least` to `most` bytes, `commit_every` a transaction
    (0: all in one)."""

    count: int
    least: int
    most: int
    commit_every: int = 1000

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of every record, shape (count,)."""
        return np.random.default_rng(7).integers(self.least, self.most + 1, self.count)


#: CIFAR-like and ImageNet-like, as the data sets of [Pumma 2020, sec. 3.1.1].
KINDS = {"3 KB": (3_073, 3_073), "110-190 KB": (110_000, 190_000)}


def liblmdb() -> Any:
    """The module ``lmdb``.

    Raises:
        UsageError: py-lmdb is not installed.
    """
    try:
        import lmdb
    except ModuleNotFoundError:
        raise UsageError("nostall bench lmdb needs py-lmdb: pip install 'nostall[lmdb]'") from None
    return lmdb


def make_database(home: Path, records: Records) -> Path:
    """The folder of the database under `home`, written if it is not there."""
    name = hashlib.sha256(repr(sorted(asdict(records).items())).encode()).hexdigest()[:12]
    folder = home / f"lmdb-{records.count}-{records.most}-{name}"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.mdb").unlink(missing_ok=True)
    sizes = records.sizes()
    random = np.random.default_rng(0).bytes(int(sizes.max()) + 4096)
    room = int((-(-sizes // 4096) + 1).sum()) * 4096 * 2 + (1 << 28)
    with liblmdb().open(str(folder), map_size=room, sync=False, meminit=False) as environment:
        writing = environment.begin(write=True)
        for i, size in enumerate(sizes.tolist()):
            number = i.to_bytes(_NAME, "little")
            start = i % 4096
            body = random[start : start + size - 2 * _NAME]
            writing.put(key(i), number + body + number)
            if records.commit_every and (i + 1) % records.commit_every == 0:
                writing.commit()
                writing = environment.begin(write=True)
        writing.commit()
        environment.sync(True)
    (folder / "lock.mdb").unlink(missing_ok=True)
    (folder / "complete").touch()
    return folder


def key(record: int) -> bytes:
    """The key of a record."""
    return b"%08d" % record


def named(value: NDArray[np.uint8], record: int) -> bool:
    """Whether this is the record of that number, by its first and last bytes."""
    number = np.frombuffer(record.to_bytes(_NAME, "little"), np.uint8)
    return bool((value[:_NAME] == number).all() and (value[-_NAME:] == number).all())


def check(
    buffer: NDArray[np.uint8],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    records: NDArray[np.int64],
) -> None:
    """Looks whether the records named lie in `buffer` at `places`, by their first and last bytes.

    Raises:
        UsageError: they do not; no measurement counts then.
    """
    step = np.arange(_NAME)
    for begin in (places, places + sizes - _NAME):
        found = buffer[begin[:, None] + step].view("<i8")[:, 0]
        wrong = np.flatnonzero(found != records)
        if wrong.size:
            raise UsageError(
                f"record {records[wrong[0]]} was not delivered: {found[wrong[0]]} lies in its place"
            )
