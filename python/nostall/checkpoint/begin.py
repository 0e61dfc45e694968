"""How a job takes its directories: one rank clears them up, all agree on a name for this run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from nostall.checkpoint.format import Manifest
from nostall.checkpoint.retention import Keep, decide
from nostall.checkpoint.store import Store
from nostall.errors import Error, UsageError
from nostall.rendezvous import AllGather


def begin(stores: Sequence[Store], rank: int, world_size: int, allgather: AllGather) -> str:
    """The name of this run, which is in the ids of its saves.

    Raises:
        UsageError: another job has the directories, or not all ranks see the same ones.
    """
    run = secrets.token_hex(4)
    note: dict[str, Any] = {"run": run, "error": ""}
    if rank == 0:
        try:
            for store in stores:
                store.own()
                store.clean()
                for old in store.root.glob(".run-*"):
                    old.unlink(missing_ok=True)
                if world_size > 1:
                    (store.root / f".run-{run}").touch()
        except (Error, OSError) as error:
            if world_size == 1:
                raise
            note["error"] = str(error)
    if world_size == 1:
        return run
    first = json.loads(allgather(json.dumps(note).encode())[0])
    if first["error"]:
        raise UsageError(f"rank 0 cannot begin: {first['error']}")
    run = str(first["run"])
    unseen = [str(s.root) for s in stores if not (s.root / f".run-{run}").exists()]
    notes = allgather(json.dumps(unseen).encode())
    for other, text in enumerate(notes):
        for root in json.loads(text):
            raise UsageError(
                f"rank {other} does not see rank 0's {root}: checkpoints of several nodes need "
                "directories that all of them share; leave fast= out where it is not"
            )
    return run


def undrained(fast: Store, durable: Store, keep: Keep) -> list[Manifest]:
    """Complete checkpoints of the fast tier that should be durable and are not, oldest first."""
    on_fast = {e.step: e.manifest for e in fast.entries() if e.manifest is not None}
    there = {e.step: e.manifest for e in durable.entries() if e.manifest is not None}
    stay = decide({s: m.metric for s, m in (on_fast | there).items()}.items(), keep)
    return [
        manifest
        for step, manifest in sorted(on_fast.items())
        if step in stay
        and (step not in there or there[step].id != manifest.id)
        and not fast.missing(manifest)
    ]
