"""The store of checkpoints at a path or a URL."""

from __future__ import annotations

import os

from nostall.base._paths import path_of
from nostall.checkpoint._place import url_of
from nostall.checkpoint._store import Store
from nostall.errors import UsageError


def open_store(root: str | os.PathLike[str], kind: str) -> Store:
    """A directory, or what lies below a URL such as ``s3://bucket/run1``.

    Raises:
        UsageError: it is a URL that keeps no checkpoints, or of which a Path was made.
    """
    url = url_of(path_of(root, kind))
    if url is None:
        return Store(root, kind)
    from nostall.checkpoint._objects import ObjectStore

    return ObjectStore(url, kind)


def check_places(
    fast: str | os.PathLike[str] | None, durable: str | os.PathLike[str] | None
) -> None:
    """Raises UsageError for places of checkpoints that cannot work together."""
    if fast is None and durable is None:
        raise UsageError("a checkpointer needs fast=, durable= or both")
    fast = path_of(fast, "fast") if fast is not None else None
    durable = path_of(durable, "durable") if durable is not None else None
    if fast is not None and url_of(fast) is not None:
        raise UsageError(f"fast={fast} is not a directory: an object store is for durable=")
    if durable is not None and url_of(durable) is not None:
        if fast is None:
            raise UsageError(
                f"durable={durable} needs fast=, a directory from which checkpoints are uploaded"
            )
        return
    roots = [os.path.realpath(root) for root in (fast, durable) if root is not None]
    if len(roots) > len(set(roots)):
        raise UsageError(f"fast and durable are the same directory, {roots[0]}")
