"""What holds for every store: all samples as written, in the plan's order, in any process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import nostall
from nostall.source._source import Source


def check_source(
    source: Source, samples: Sequence[bytes], labels: Sequence[int], fork: bool = True
) -> None:
    """Sizes, labels and bytes, through the source and through two shuffled epochs with a tier that
    holds half of it, through a pickled copy, and in a forked process."""
    assert source.labels.tolist() == list(labels)
    assert source.sizes.tolist() == [len(s) for s in samples]
    assert [source.read(i) for i in range(len(source))] == list(samples)
    check_epochs(source, samples, tiers=["ram:4KiB"])
    check_epochs(source, samples, tiers=[f"ram:{max(4096, sum(map(len, samples)) * 2)}B"])
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert [copy.read(i) for i in range(len(copy))] == list(samples)
    if fork:
        assert in_a_fork(source, samples)


def check_epochs(
    source: Source, samples: Sequence[bytes], **options: Any
) -> nostall.observe._stats.Stats:
    """Two shuffled epochs of raw batches, in the plan's order."""
    plan = nostall.Plan(samples=len(samples), batch_size=7, epochs=2, seed=5)
    options = {"tiers": [], "output": "numpy", "epochs": 2, "seed": 5, **options}
    with nostall.DataLoader(source, 7, **options) as loader:
        for epoch in loader.epochs():
            ids = plan.rank_epoch(epoch.index, 0)[0].tolist()
            for batch, labels in epoch:
                for i, label in enumerate(labels.tolist()):
                    sample = ids.pop(0)
                    assert batch[i].tobytes() == samples[sample]
                    assert label == source.labels[sample]
            assert ids == []
        return loader.stats()


def in_a_fork(source: Source, samples: Sequence[bytes]) -> bool:
    """Whether a process forked off now reads the same."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int([source.read(i) for i in range(len(source))] != list(samples))
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
