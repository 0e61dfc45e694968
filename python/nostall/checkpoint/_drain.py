"""Copies of complete checkpoints to the durable storage, by a job and by the command."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

from nostall import _native
from nostall.checkpoint._format import Manifest, Part
from nostall.checkpoint._store import Store, part_name
from nostall.errors import IoError, StoppedError


def copy_all(
    durable: Store, manifest: Manifest, copy: Callable[[Part, str], None], attempt: int = 0
) -> None:
    """Copies each part by `copy(part, name)`, then makes the checkpoint complete in `durable`.

    A second attempt uses other names, because other ranks may still be giving up the first. So does
    a copy that takes the place of one with lost parts: until it is complete, nothing that the old
    manifest names is written to, and an interrupted copy is not taken for a whole one.
    """
    before = durable.find(manifest.step, manifest.id)
    taken = {part.name for part in before.parts} if before is not None else set()
    names = {part.name: part.name for part in manifest.parts}
    if before is not None or (attempt > 0 and manifest.world_size > 1):
        for number in itertools.count(max(attempt, 1)):
            names = {p.name: part_name(p.rank, manifest.id, number) for p in manifest.parts}
            if not taken & set(names.values()):
                break
    copies = tuple(dataclasses.replace(p, name=names[p.name]) for p in manifest.parts)
    try:
        durable.prepare(manifest.step)
        for part in manifest.parts:
            copy(part, names[part.name])
        durable.publish(dataclasses.replace(manifest, parts=copies))
    except StoppedError:
        raise
    except Exception:
        now = durable.find(manifest.step, manifest.id)
        if durable.lacks(manifest) if now is None else now == before:
            for part in copies:
                durable.discard(manifest.step, part.name)
        raise
    for name in sorted(taken):
        durable.discard(manifest.step, name)


def read_back(path: Path, part: Part, priority: _native.Priority) -> None:
    """Reads a copy back and compares it with the checksums of its part.

    Raises:
        IoError: blocks of it are damaged.
    """
    bad = _native.check_file(str(path), part.size, list(part.crcs), threads=1, priority=priority)
    if bad:
        raise IoError(f"{path} reads back with {len(bad)} damaged blocks")
