"""``nostall bench tiers``: every hierarchy holds the data, and its second epoch is read."""

from __future__ import annotations

import json
from pathlib import Path

from nostall.cli import main


def test_hierarchies_are_read_in_the_second_epoch(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    disks = f"{tmp_path / 'a'} {tmp_path / 'b'}"
    words = f"--disks {disks} --samples 90 --sample-bytes 4096 --repeats 1 --json {out}"
    assert main(["bench", "tiers", *words.split()]) == 0
    # What is quicker at that moment serves a sample: of a small file in the page cache, the source.
    runs = json.loads(out.read_text())["runs"]
    assert {name: sum(found[0]["samples"].values()) for name, found in runs.items()} == {
        "memory": 90,
        "disk 1, 2 reads": 90,
        "disk 1": 90,
        "disk 2, 2 reads": 90,
        "disk 2": 90,
        "memory + disk 1": 90,
        "memory + all disks": 90,
    }
    assert runs["memory"][0]["samples"]["file"] == 0
    assert runs["disk 1"][0]["samples"]["ram"] == 0
    assert not any((tmp_path / "a").iterdir())
