"""Files and directories that only this user can have made and can change."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from nostall.errors import UsageError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory, which is made if it is not there.

    Raises:
        UsageError: it cannot be made, is a symlink, belongs to another user, or others may write to it.
    """
    try:
        make(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from error
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{path} is not used: it must be a directory, and no symlink ({error.strerror})"
        ) from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} is not used: it belongs to user {found.st_uid}, not to {os.geteuid()}"
            )
        if found.st_mode & _OTHERS_MAY_WRITE:
            raise UsageError(
                f"{path} is not used: its mode {stat.S_IMODE(found.st_mode):o} lets others write "
                "to it; make it 700"
            )
        yield fd
    finally:
        os.close(fd)


def make(path: Path) -> None:
    """Makes the directory and those above it that are not there, all of mode 0700.

    Raises:
        OSError: one cannot be made.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            with contextlib.suppress(FileExistsError):  # another process was first
                folder.mkdir(mode=0o700)


def check_above(path: Path) -> None:
    """Refuses a path of which another user could exchange a part.

    Raises:
        UsageError: a directory above it belongs to another user, or others may rename what is in it.
    """
    for folder in {*path.absolute().parents, *path.resolve().parents}:
        found = folder.stat()
        shared = found.st_mode & _OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or shared:
            raise UsageError(
                f"{path} is not used: another user may exchange what is in {folder} (user "
                f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"
            )


def read(name: str | Path, directory: int | None = None) -> bytes:
    """The bytes of a regular file of this user that only this user can read.

    Raises:
        FileNotFoundError: it is not there, or was removed meanwhile.
        OSError: it cannot be read.
        UsageError: it is something else.
    """
    try:
        return _read(name, directory)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # A server of NFS 3 does not keep what another client removes while it is open here.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(name)) from error


def _read(name: str | Path, directory: int | None) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_uid != os.geteuid()
            or stat.S_IMODE(found.st_mode) & 0o077
        ):
            raise UsageError(
                f"{name} is not used: it must be a plain file of user {os.geteuid()} with mode 600; "
                f"it is of user {found.st_uid} and has mode {found.st_mode:o}"
            )
        return file.read()


def write(name: str, data: bytes, directory: int, *, sync: bool = False) -> None:
    """Replaces the file of that name, or makes it, in one step, with mode 0600.

    With `sync` a file that is there after a power cut is whole.
    """
    partial = f".{name}.{secrets.token_hex(4)}"
    fd = os.open(
        partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory
    )
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(fd)
        os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=directory)
        raise
