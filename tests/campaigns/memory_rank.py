"""One rank of the campaign of limits: reads, takes memory, reads again, and says what it saw."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall


def main() -> None:
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    source = nostall.ImageFolder(given["data"], extensions=(".bin",), index=False)
    seen: dict[int, list[int]] = {}
    model = []
    with nostall.DataLoader(
        source, 8, epochs=4, tiers=given["tiers"], output="numpy", threads=2,
        rank=given["rank"], world_size=given["ranks"], local_rank=given["rank"],
        local_world_size=given["ranks"], job=given["job"],
    ) as loader:  # fmt: skip
        for epoch in loader.epochs():
            if epoch.index == 2:
                model.append(np.ones(given["model"], np.uint8))
                for _ in range(given["growth"] >> 20):
                    model.append(np.ones(1 << 20, np.uint8))
                    time.sleep(0.02)  # as a training grows, which waits for nothing
            for batch, _ in epoch:
                for sample in batch:
                    words = sample.view(np.uint64)
                    number = int(words[0])
                    expected = np.arange(len(words), dtype=np.uint64)
                    expected *= np.uint64(2 * number + 1)
                    expected += np.uint64(number)
                    if not np.array_equal(words, expected):
                        raise SystemExit(f"sample {number} has wrong bytes")
                    seen.setdefault(epoch.index, []).append(number)
    Path(given["out"]).write_text(json.dumps(seen))


main()
