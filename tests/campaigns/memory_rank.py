"""One rank of the campaign of limits: reads, takes memory, reads again, and says what it saw."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nostall

# Bytes that a training which grows leaves free, and seconds that it waits for them. The tiers keep an
# eighth of the limit free, by a thread that looks four times a second and may stand still meanwhile.
FREE, WAITS = 16 << 20, 60.0


def room(group: Path, version: int) -> int:
    """Bytes until the control group is full, after pages of files that were read once have gone."""
    limit, used, cached = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / limit).read_text()) - int((group / used).read_text()) + int(stat[cached])


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
                end = time.monotonic() + WAITS
                for _ in range(given["growth"] >> 20):
                    while (
                        room(Path(given["group"]), given["version"]) < FREE
                        and time.monotonic() < end
                    ):
                        time.sleep(0.02)
                    model.append(np.ones(1 << 20, np.uint8))
                    time.sleep(0.02)
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
