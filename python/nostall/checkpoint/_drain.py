"""Copies of complete checkpoints to the durable storage, by a job and by the command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from nostall import _native
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._place import UnreachableError
from nostall.checkpoint._store import Store
from nostall.errors import IoError


def find_copy(durable: Store, manifest: Manifest) -> Manifest | None:
    """The manifest of a copy; None also where what is there cannot be read: one is made beside it.

    Raises:
        UnreachableError: `durable` does not answer, or what it takes to read it is missing.
    """
    try:
        return durable.find(manifest.step, manifest.id)
    except UnreachableError:
        raise
    except IoError:
        return None


def copy_all(durable: Store, manifest: Manifest, copy: Callable[[Part, str], None]) -> None:
    """Copies each part by `copy(part, name)`, then makes the checkpoint complete in `durable`."""
    before = find_copy(durable, manifest)
    taken = {part.name for part in before.parts} if before is not None else set()
    names = durable.copy_names(manifest)
    copies = tuple(dataclasses.replace(p, name=names[p.name]) for p in manifest.parts)
    begun: list[str] = []
    copied = False
    try:
        durable.make_step(manifest.step)
        for part in manifest.parts:
            begun.append(names[part.name])
            copy(part, names[part.name])
        copied = True
        durable.publish_alone(dataclasses.replace(manifest, parts=copies))
    except BaseException:
        with contextlib.suppress(IoError):  # then they may be named
            if not copied or _is_as(before, durable, manifest):
                for name in begun:
                    durable.discard(manifest.step, name)
        raise
    for name in sorted(taken):
        durable.discard(manifest.step, name)


def _is_as(before: Manifest | None, durable: Store, manifest: Manifest) -> bool:
    """Whether certainly no other copy is complete than before."""
    now = durable.find(manifest.step, manifest.id)
    return durable.lacks(manifest) if now is None else now == before


def read_back(durable: Store, step: int, part: Part, name: str, priority: _native.Priority) -> None:
    """Reads a copy back and compares it with the checksums of its part.

    Raises:
        IoError: blocks of it are damaged.
    """
    copy = dataclasses.replace(part, name=name)
    if bad := durable.check(step, copy, threads=1, priority=priority):
        raise IoError(f"{durable.place(step) / name} reads back with {len(bad)} damaged blocks")
