"""One rank of the campaign of partitions: compares every sample with its file, and tells twice a second
what it has read from where. Argument: JSON, see `start` in partitions.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import nostall

EPOCHS = 8_000


def main(s: dict) -> None:
    truth = {p.name: p.read_bytes() for p in Path(s["truth"]).rglob("*.jpg")}
    dataset = nostall.ImageFolder(s["root"], index=False)
    names = [Path(path).name for path in s["files"]]
    plan = nostall.Plan(
        samples=len(dataset), batch_size=4, world_size=s["world"], epochs=EPOCHS, seed=7
    )
    loader = nostall.DataLoader(
        dataset,
        4,
        epochs=EPOCHS,
        seed=7,
        tiers=s["tiers"],
        staging="200kB",
        threads=1,
        rank=s["rank"],
        world_size=s["world"],
        local_rank=0,
        local_world_size=1,
        job=s["job"],
        peers="on",
        output="numpy",
    )
    told = 0.0
    for epoch in loader.epochs():
        ids = iter(plan.rank_epoch(epoch.index, s["rank"])[0])
        for samples, _ in epoch:
            for i in range(len(samples)):
                if bytes(samples[i]) != truth[names[int(next(ids))]]:
                    raise SystemExit(
                        f"rank {s['rank']} was given wrong bytes in epoch {epoch.index}"
                    )
            if time.monotonic() - told > 0.5:
                told = time.monotonic()
                total, _ = loader.totals()
                peers = loader.stats().peers
                said = {
                    "at": told,
                    "epoch": epoch.index,
                    "source": total.origins["source"].samples,
                    "samples": total.samples,
                    "nodes": peers["nodes_alive"],
                    "returned": peers["returned_ranks"],
                }
                print(json.dumps(said), flush=True)
            if Path(s["stop"]).exists():
                loader.close()
                return
            time.sleep(0.01)


main(json.loads(sys.argv[1]))
