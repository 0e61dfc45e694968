"""One rank of a job on several nodes: checks each sample against its file, then prints what it saw.

Run with one argument, a JSON object; see `settings` in nodes.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import nostall


def fork_and_forget(loader: nostall.DataLoader) -> None:
    """A forked child lets go of the loader, and must end."""
    child = os.fork()
    if child == 0:
        loader._finalizer.detach()
        loader._loader = None
        os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise SystemExit("a forked child hangs when it lets go of the loader")
        time.sleep(0.01)


def wait_for_all(s: dict) -> None:
    """Until all ranks have come so far, where that is wanted."""
    if not s["ended"]:
        return
    Path(s["ended"], str(s["rank"])).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(s["ended"])) < s["world"]:
        if time.monotonic() > deadline:
            raise SystemExit("other ranks do not end")
        time.sleep(0.005)


def in_step(s: dict, batches: int) -> None:
    """Until every rank has as many batches, where that is wanted: as if they reduced gradients."""
    if not s.get("in_step"):
        return
    at = np.memmap(s["in_step"], dtype=np.uint64, mode="r+", shape=(s["world"],))
    at[s["rank"]] = batches
    deadline = time.monotonic() + 60
    while int(at.min()) < batches:
        if time.monotonic() > deadline:
            raise SystemExit(f"other ranks do not come to batch {batches}")
        time.sleep(0.0002)


def main(s: dict) -> None:
    dataset = nostall.ImageFolder(s["root"], index=False)
    truth = [Path(s["truth"], p).read_bytes() for p in s["files"]]
    loader = nostall.DataLoader(
        dataset,
        s["batch"],
        epochs=s["epochs"],
        seed=7,
        tiers=s["tiers"],
        rank=s["rank"],
        world_size=s["world"],
        local_rank=s["rank"] % s["ranks"],
        local_world_size=s["ranks"],
        job=f"{s['job']} {os.environ.get('NOSTALL_NODE', '')}",
        peers=s.get("peers", "on"),
        sharing=s.get("sharing", "push"),
        copies=s.get("copies", "fixed"),
        assignment=s.get("assignment", "plan"),
        staging=s.get("staging", "256MiB"),
        output="numpy",
    )
    plan = nostall.Plan(
        samples=len(dataset),
        batch_size=s["batch"],
        world_size=s["world"],
        epochs=s["epochs"],
        seed=7,
    )
    if state := s.get("state"):
        loader.load_state_dict(state)
    check = not state and s.get("assignment", "plan") == "plan"
    stream = hashlib.sha256()
    batches = 0
    back: int | None = None  # fetched until then
    for epoch in loader.epochs():
        ids = iter(plan.rank_epoch(epoch.index, s["rank"])[0])
        begun = batches
        for images, _ in epoch:
            for i in range(len(images)):
                # After a resume on another world the plan's own tests check the order.
                if check and bytes(images[i]) != truth[int(next(ids))]:
                    raise SystemExit(f"rank {s['rank']}: wrong bytes in epoch {epoch.index}")
                stream.update(bytes(images[i]))
            batches += 1
            if s.get("die_at") == batches:
                os.kill(os.getpid(), signal.SIGKILL)
            if s.get("hang_at") == batches:
                Path(s["hangs"]).touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            if s.get("wait_at") == batches:
                while not Path(s["hangs"]).exists():
                    time.sleep(0.01)
            if s.get("stop_at") == batches:
                state = loader.state_dict()
                wait_for_all(s)
                loader.close()
                read = loader.stats().source_bytes
                print(json.dumps({"state": state, "source_bytes": read}), flush=True)
                return
            if s.get("counts") and batches % 5 == 0:
                origins = [e.origins for e in loader.stats().epochs]
                told = (sum(o[kind].samples for o in origins) for kind in ("peer", "source"))
                written = Path(s["counts"], f"counts-{s['rank']}.new")
                written.write_text(" ".join(map(str, told)))
                written.replace(written.with_suffix(""))
            if until := s.get("until"):
                counts = loader.stats().peers
                hung = "hangs" in s and Path(s["hangs"]).exists()
                if hung and counts["returned_ranks"] and back is None:
                    back = counts["fetched"]
                if s["rank"] == 0 and back is not None and counts["fetched"] > back:
                    Path(until).touch()
                if Path(until).exists():
                    break
            in_step(s, batches)
            if s.get("leave_at") == batches - begun:
                break
            time.sleep(s.get("compute", 0.0))
        if s.get("until") and Path(s["until"]).exists():
            break
        if s.get("fork_after") == epoch.index:
            fork_and_forget(loader)
    wait_for_all(s)
    loader.close()  # until then the others may fetch from here
    stats = loader.stats().to_dict()
    del stats["batches"]
    stats["exchange"] = loader.settings()["exchange"]
    print(json.dumps({**stats, "stream": stream.hexdigest(), "batches": batches}), flush=True)


main(json.loads(sys.argv[1]))
