"""Copies of complete checkpoints to the durable storage, by a job and by the command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from nostall import _native
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._store import Store
from nostall.errors import IoError, StoppedError


def copy_all(
    durable: Store, manifest: Manifest, copy: Callable[[Part, str], None], attempt: int = 0
) -> None:
    """Copies each part by `copy(part, name)`, then makes the checkpoint complete in `durable`."""
    before = durable.find(manifest.step, manifest.id)
    taken = {part.name for part in before.parts} if before is not None else set()
    names = durable.copy_names(manifest, before, attempt)
    copies = tuple(dataclasses.replace(p, name=names[p.name]) for p in manifest.parts)
    try:
        durable.make_step(manifest.step)
        for part in manifest.parts:
            copy(part, names[part.name])
        durable.publish(dataclasses.replace(manifest, parts=copies))
    except StoppedError:
        raise
    except Exception:
        with contextlib.suppress(IoError):  # then they may be named
            now = durable.find(manifest.step, manifest.id)
            if durable.lacks(manifest) if now is None else now == before:
                for part in copies:
                    durable.discard(manifest.step, part.name)
        raise
    for name in sorted(taken):
        durable.discard(manifest.step, name)


def read_back(durable: Store, step: int, part: Part, name: str, priority: _native.Priority) -> None:
    """Reads a copy back and compares it with the checksums of its part.

    Raises:
        IoError: blocks of it are damaged.
    """
    copy = dataclasses.replace(part, name=name)
    if bad := durable.check(step, copy, threads=1, priority=priority):
        raise IoError(f"{durable.place(step) / name} reads back with {len(bad)} damaged blocks")
