"""A slow tier of a node loses to the memory of another one, and to a source that is quicker [Böhringer
2020, eq. 3.5 to 3.7]: in real processes, with speeds that they measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loader_ranks import run_ranks

RANK = """
import json, os, sys, threading, time
import numpy as np
import nostall

s = json.loads(sys.argv[1])
SAMPLES, SIZE, EPOCHS = 40, 4096, s["epochs"]

class Source(nostall.SampleReader):
    def read(self, samples):
        time.sleep(s["source"] * len(samples))
        return [bytes([x]) * SIZE for x in samples]
    def describe(self, sample):
        return f"sample {sample}"

class Disk(nostall.Tier):
    def __init__(self):
        super().__init__(1 << 20)
        self.data, self.gets = {}, 0
    def put(self, key, data):
        self.data[key] = bytes(data)
    def get(self, key):
        self.gets += 1
        time.sleep(s["disk"])
        return self.data.get(key)

disk = Disk()
source = nostall.CustomSource(Source(), np.full(SAMPLES, SIZE), range(SAMPLES), identity="three ways")
loader = nostall.DataLoader(
    source, 2, epochs=EPOCHS, output="numpy", threads=1, sharing="hdmlp", job=s["job"],
    tiers=[disk] if s["rank"] == 0 else ["ram:1MiB"], peers="on" if s["world"] > 1 else "off",
    rank=s["rank"], world_size=s["world"], local_rank=0, local_world_size=1,
)
had, taken = 0, 0  # samples of epochs that began when the disk had them
for epoch in loader.epochs():
    there = {int(key.rsplit("/", 1)[1]) for key in disk.data}
    for data, labels in epoch:
        taken += len(labels)
        had += sum(int(label) in there for label in labels)
        for sample, label in zip(data, labels):
            assert sample.tobytes() == bytes([int(label)]) * SIZE
        time.sleep(s["compute"])
open(os.path.join(s["ended"], str(s["rank"])), "w").close()
deadline = time.monotonic() + 60
while len(os.listdir(s["ended"])) < s["world"] and time.monotonic() < deadline:
    time.sleep(0.005)
loader.close()
origins = [e.origins for e in loader.stats().epochs]
told = {kind: sum(o[kind].samples for o in origins) for kind in ("ram", "file", "peer", "source")}
print(json.dumps({"taken": taken, "had": had, "gets": disk.gets, **told}))
"""


def run(tmp_path: Path, world: int, **settings: Any) -> list[dict[str, int]]:
    for folder in ("met", "ended"):
        (tmp_path / folder).mkdir()
    arguments = []
    for rank in range(world):
        of_rank = {
            **settings, "rank": rank, "world": world, "ended": str(tmp_path / "ended"),
            "job": f"three ways {tmp_path} {rank}",
        }  # fmt: skip
        arguments.append([json.dumps(of_rank)])
    return run_ranks(RANK, arguments, tmp_path / "met")


# In the fixed order of memory, own tiers, other nodes, source the disk is read for all that it has.


@pytest.mark.alone
@pytest.mark.multi
def test_another_nodes_memory_is_read_instead_of_a_slow_disk(tmp_path: Path) -> None:
    beside_a_disk, _ = run(tmp_path, 2, disk=0.03, source=0.04, compute=0.005, epochs=14)
    assert beside_a_disk["had"] > beside_a_disk["taken"] / 2
    assert beside_a_disk["gets"] <= beside_a_disk["had"] / 2
    assert beside_a_disk["peer"] >= beside_a_disk["had"] / 2


@pytest.mark.multi
def test_a_quick_source_is_read_instead_of_a_slow_disk(tmp_path: Path) -> None:
    (alone,) = run(tmp_path, 1, disk=0.1, source=0, compute=0, epochs=6)
    assert alone["had"] > alone["taken"] / 2
    assert alone["gets"] <= alone["had"] / 2
    assert alone["peer"] == 0


@pytest.mark.alone
@pytest.mark.multi
def test_a_disk_that_is_quicker_than_the_source_is_read(tmp_path: Path) -> None:
    (alone,) = run(tmp_path, 1, disk=0.003, source=0.05, compute=0, epochs=3)
    assert alone["gets"] == alone["file"] >= alone["had"] / 2
    assert alone["had"] > alone["taken"] / 2
    assert alone["source"] == alone["taken"] - alone["file"]
