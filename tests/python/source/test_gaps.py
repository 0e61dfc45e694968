"""Reading neighbours together must not read many times what is wanted."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest

import nostall
from nostall_bench.slowfs import SlowFS, missing


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_few_small_records_of_many_on_slow_storage(tmp_path: Path) -> None:
    many, few = 10_000, 600
    backing = tmp_path / "db"
    with (
        lmdb.open(str(backing), map_size=1 << 28, sync=False) as environment,
        environment.begin(write=True) as writing,
    ):
        for i in range(many):
            writing.put(b"%08d" % i, bytes(3_073))
    order = np.random.default_rng(0).permutation(many)[:few]
    # Bytes cost so much that a request of a busy machine, ten times as long, is cheap beside them.
    with SlowFS(backing, tmp_path / "mnt", 6.6e6, 6.6e6, 0.5e-3) as slow:
        reading = nostall.ReadOptions(direct="always")
        store = nostall.LMDB(tmp_path / "mnt", index=False, reading=reading)
        before = slow.served_bytes
        with nostall.DataLoader(
            store, 50, order=order, tiers=[], output="numpy", peers="off", rank=0, world_size=1,
            local_rank=0, local_world_size=1, job=f"gaps-{os.getpid()}", staging="8MiB",
        ) as loader:  # fmt: skip
            assert sum(len(batch) for batch, _ in loader) == few
        # A page of 4096 bytes for each record; between two lie 16 others.
        assert slow.served_bytes - before < 6 * 4096 * few
        del store, loader
