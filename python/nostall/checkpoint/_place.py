"""What a store of checkpoints gives to those that use it, wherever it lies: places, copies, reads.

`_store.py` is the store that is a directory; `_objects.py` is the one below a URL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nostall import _native
from nostall.errors import Error, IoError, PeerError, UsageError

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
_URL = re.compile(r"([a-z][a-z0-9+.-]*):(/{1,2})(.*)", re.DOTALL)


class Url(str):
    """The place of an object, with the few names of pathlib that places are used by."""

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.rpartition("/")[0])

    def as_posix(self) -> str:
        return str(self)


Place = Path | Url


def url_of(root: str) -> Url | None:
    """The URL that a place of checkpoints is; None if it is a path.

    Raises:
        UsageError: it is a URL of which a Path was made, or of what keeps no checkpoints.
    """
    match = _URL.fullmatch(root)
    if match is None:
        return None
    scheme, slashes, rest = match.groups()
    if slashes == "/" and scheme in _SCHEMES:
        raise UsageError(
            f"{root} was the URL {scheme}://{rest} before a Path was made of it: give it as a string"
        )
    if slashes == "/":
        return None
    if scheme not in _SCHEMES or not re.fullmatch(r"[^/?#]+(/[^/?#]+)*/*", rest):
        why = ", for the Hugging Face Hub is only read, for data sets" if scheme == "hf" else ""
        why = ", for a name in it is empty" if "//" in rest.rstrip("/") else why
        raise UsageError(
            f"{root} is not a place for checkpoints{why}: give a directory, or a bucket and a prefix "
            f"in it as s3://bucket/run1 ({', '.join(f'{s}://' for s in _SCHEMES)})"
        )
    return Url(root.rstrip("/"))


class UnreachableError(IoError):
    """A store does not answer, or refuses to: nothing is known of what is there."""


# What this process or its machine lacks, which says nothing of what it wanted to read; and the remedy.
_SCARCE = {
    errno.ENOMEM: "give the job more memory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.EAGAIN: "raise the limits of this job (ulimit -a), or try again",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise the quota",
}


def refuse_scarce(number: int | None, words: str) -> None:
    """Raises UnreachableError for such an error's number."""
    if number in _SCARCE:
        raise UnreachableError(f"{words}: {_SCARCE[number]}")


@contextlib.contextmanager
def scarce_is_away(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises UnreachableError where memory, descriptors or room are too little to read what is there.

    What the system said counts also where an error of ours hides it as its cause.
    """
    try:
        yield
    except UnreachableError:
        raise
    except (Error, OSError) as error:
        cause: BaseException | None = error
        while cause is not None:
            number = getattr(cause, "errno", None)
            refuse_scarce(number, f"{os.fspath(path)} cannot be read now: {error}")
            cause = cause.__cause__
        raise


class UnknownOutcomeError(UnreachableError):
    """Whether a write took place is not known, and it still may: what it names must stay."""


class LostStoreError(PeerError):
    """The store is not this job's any more, and will not be: it can change nothing there."""


@dataclass(frozen=True)
class Pacing:
    """How a copy stays out of the training's way (native/checkpoint/pace.h)."""

    rate: int = 0
    priority: _native.Priority = _native.Priority.normal
    gate: _native.Gate | None = None
    gate_patience: float = 1.0
    considerate: bool = False


class Copy(Protocol):
    """A checked copy of a part; hurry and stop come from other threads."""

    def run(self) -> object: ...
    def hurry(self) -> None: ...
    def stop(self) -> None: ...


class CheckedPart(Protocol):
    """A part that is read in runs of blocks (native/checkpoint/transfer.h, CheckedFile)."""

    @property
    def data(self) -> Any: ...
    def read(
        self,
        first: int,
        count: int,
        threads: int,
        progress: _native.Progress | None = None,
        address: int = 0,
    ) -> list[int]: ...
