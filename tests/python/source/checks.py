"""What holds for every store: all samples as written, in the plan's order, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nostall
from nostall.source._source import Source


def check_source(
    source: Source, samples: Sequence[bytes], labels: Sequence[int], fork: bool = True
) -> None:
    """Sizes, labels and bytes, through the source and through two shuffled epochs with a tier that
    holds half of it; and what anybody can check of a source."""
    assert source.labels.tolist() == list(labels)
    assert source.sizes.tolist() == [len(s) for s in samples]
    assert [source.read(i) for i in range(len(source))] == list(samples)
    check_epochs(source, samples, tiers=["ram:4KiB"])
    nostall.testing.check_source(source, start_methods=["fork"] if fork else [])


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
