"""What a loader makes of the fields of a source, sample by sample."""

from __future__ import annotations

from typing import Any

import nostall
from nostall.fields import Padded, Ragged


def rows_in_a_loader(source: nostall.Source, **options: Any) -> list[dict[str, Any]]:
    """Every sample of one epoch, as its values by name."""
    options = {"tiers": [], "shuffle": False, "output": "numpy", "batch": "dict", **options}
    rows: list[dict[str, Any]] = []
    with nostall.DataLoader(source, 4, **options) as loader:
        for batch in loader:
            size = next(iter(batch.values()))
            count = len(size.offsets) - 1 if isinstance(size, Ragged) else len(size)
            rows += [
                {name: _value(values, i) for name, values in batch.items()} for i in range(count)
            ]
    return rows


def _value(values: Any, sample: int) -> Any:
    if isinstance(values, Ragged):
        return values.sample(sample).copy()
    assert not isinstance(values, Padded)
    return values[sample] if isinstance(values, list) else values[sample].copy()
