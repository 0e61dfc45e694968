"""The job's secret: what a process must know to be accepted as a rank of the job.

The user gives it (NOSTALL_SECRET), or the ranks agree on one at their rendezvous. If strangers can
read the rendezvous, as in the store of torchrun, the secret is made from a random number of rank 0
and a key that only this user can read, provided that all ranks see the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nostall.base import _options as options
from nostall.base import _owned as owned
from nostall.errors import UsageError

_KEY = 32
_NAMED = 8  # of the ranks that have another secret, or none

_log = logging.getLogger("nostall")


def given(environment: Mapping[str, str] | None = None) -> bytes:
    """NOSTALL_SECRET, empty if it is not set.

    Raises:
        UsageError: it is so short that it could be guessed.
    """
    return str(options.value("job.secret", environment)).encode()


def offer(rank: int, exposed: str) -> dict[str, Any]:
    """What a rank writes at the rendezvous.

    Args:
        rank: of the job.
        exposed: which strangers can read it there; empty if none can.
    """
    mine: dict[str, Any] = {"given": bool(given())}
    if exposed and not mine["given"] and (key := _key()):
        mine["key"] = _name(key)
    if rank == 0 and not mine["given"]:
        mine["random"] = secrets.token_hex(32)
    return mine


def settle(rank: int, offers: Sequence[Mapping[str, Any]], exposed: str) -> bytes:
    """The secret that follows from the offers of all ranks, in their order.

    Raises:
        UsageError: some ranks were given one and others not.
    """
    without = [other for other, theirs in enumerate(offers) if not theirs["given"]]
    if not without:
        return given()
    if len(without) < len(offers):
        raise UsageError(_not_everywhere(without))
    random = str(offers[0]["random"]).encode()
    key = _key() if exposed else b""
    if key and all(theirs.get("key") == _name(key) for theirs in offers):
        return hmac.digest(key, random, "sha256")
    if exposed and rank == 0:
        _log.warning(
            "the job's secret was exchanged where %s can read it, and could take part in this job: "
            "set NOSTALL_SECRET, or give all nodes the same home directory",
            exposed,
        )
    return random


def mark() -> str:
    """Distinguishes the secrets that ranks were given where strangers may read it; "" without one.

    It has 16 bits, the same each time, so that a stranger cannot find the secret by trying many.
    """
    key = given()
    return hmac.digest(key, b"mark", "sha256")[:2].hex() if key else ""


def disagreement(marks: Mapping[int, str]) -> str:
    """Says which ranks were given no secret or another one; "" if all have the same, or none.

    `marks` has the mark of each rank.
    """
    without = [rank for rank, theirs in marks.items() if not theirs]
    if without:
        return _not_everywhere(without) if len(without) < len(marks) else ""
    first = next(iter(marks), 0)
    others = [rank for rank, theirs in marks.items() if theirs != marks[first]]
    if not others:
        return ""
    return (
        f"NOSTALL_SECRET is another one on ranks {others[:_NAMED]} than on rank {first}: export it "
        "where the ranks are launched"
    )


def _not_everywhere(without: list[int]) -> str:
    named = without[:_NAMED]
    return f"NOSTALL_SECRET is not set on ranks {named}, but on others: set it on all or none"


def state_folder(environment: Mapping[str, str]) -> Path:
    """What nostall keeps of this user from one job to the next."""
    state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "nostall"


def _name(key: bytes) -> str:
    """A value that distinguishes keys and reveals nothing about them."""
    return hashlib.blake2b(key, digest_size=16, person=b"nostall key").hexdigest()


def _key() -> bytes:
    """The key of this user, made at its first use; empty where there can be none."""
    try:
        folder = state_folder(os.environ)
        with owned.open_directory(folder) as directory:
            with contextlib.suppress(FileNotFoundError):
                return _whole(folder, directory)
            mine = f"key.{secrets.token_hex(8)}"
            owned.write(mine, secrets.token_bytes(_KEY), directory)
            try:
                # If ranks start at the same time, one of them makes it.
                with contextlib.suppress(FileExistsError):
                    os.link(mine, "key", src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                os.unlink(mine, dir_fd=directory)
            return _whole(folder, directory)
    except (OSError, RuntimeError, UsageError) as error:
        _log.debug("there is no key of this user: %s", error)
        return b""


def _whole(folder: Path, directory: int) -> bytes:
    key = owned.read("key", directory)
    if len(key) != _KEY:
        raise UsageError(f"{folder / 'key'} has {len(key)} bytes, not {_KEY}: remove it")
    return key
