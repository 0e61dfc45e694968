"""Where databases lie: on the local disk, or on slow storage, which each node mounts for itself."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nostall.errors import UsageError
from nostall_bench.lmdb.cold import make_cold

if TYPE_CHECKING:
    from nostall_bench.slowfs import SlowFS

_PATIENCE = 10.0  # seconds


def add_storage(parser: argparse.ArgumentParser) -> None:
    """What slow storage is like."""
    parser.add_argument("--bandwidth", type=float, default=66, help="of slow storage, MB/s a node")
    parser.add_argument("--aggregate", type=float, default=146, help="of slow storage, MB/s")
    parser.add_argument("--latency-ms", type=float, default=0.5, help="of slow storage")
    parser.add_argument("--servers", type=int, default=0, help="disks of slow storage with heads")
    parser.add_argument("--seek-ms", type=float, default=8, help="of a head that is elsewhere")


class Storage:
    """Where a database lies, how it is made cold, and what is read of it."""

    def __init__(self, folders: list[str], slow: SlowFS | None) -> None:
        self.folders = folders
        self._slow = slow

    def cool(self) -> str:
        """Makes the database cold; how."""
        if self._slow is None:
            return make_cold(Path(self.folders[0]) / "data.mdb")
        # The kernel lets go of what io_uring had open a moment after its process has.
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._slow.drop_caches()
                return "mounted anew"
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @property
    def served(self) -> int | None:
        """Bytes that the storage itself counted; None where only the readers can."""
        return self._slow.served_bytes if self._slow else None

    @property
    def seeks(self) -> int:
        """Seeks of the heads of slow storage."""
        return self._slow.seeks if self._slow else 0

    @property
    def operations(self) -> int | None:
        """Reads that the storage itself counted."""
        return self._slow.operations["read"] if self._slow else None


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, folder: Path, kind: str, nodes: int) -> Iterator[Storage]:
    """The storage of `kind`, disk or slow, for so many nodes."""
    if kind == "disk":
        yield Storage([str(folder)], None)
        return
    from nostall_bench.slowfs import SlowFS

    with (
        tempfile.TemporaryDirectory(prefix="nostall-lmdb-") as mount,
        SlowFS(
            folder,
            Path(mount),
            arguments.bandwidth * 1e6,
            arguments.aggregate * 1e6,
            arguments.latency_ms / 1e3,
            clients=nodes,
            servers=arguments.servers,
            seek=arguments.seek_ms / 1e3,
            keep_cache=True,
        ) as slow,
    ):
        yield Storage([str(m) for m in slow.mounts], slow)
