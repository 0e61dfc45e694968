"""Readers of files that may hold anything are total: a value, or the error that they name.

Every value in a file that is whole is replaced by every odd one, with the right checksum, and left out;
every byte is changed, and the file is cut at every place; then a seeded mixture of these.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nostall import _native
from nostall.checkpoint import _format as files
from nostall.checkpoint import _tree as tree
from nostall.errors import CorruptionError, UsageError
from nostall.observe._stats import BatchRecords, EpochStats, OriginStats, Stats
from nostall.observe.report import _arrivals as arrivals
from nostall.observe.report import _run as runs
from nostall.observe.report import _run_page as run_page

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1 << 63, 10**30, 0.5, float("inf"), float("-inf"), float("nan"), "",
    "1", "../x", "x" * 300, [], [0], [[1, 2], [2, 3]], {}, {"$tensor": "a"}, {"a": []},
]  # fmt: skip
MIXTURES = 300


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    whole = [json.loads(json.dumps(value))]
    at: Any = whole
    for key in (path and (0, *path[:-1])) or ():
        at = at[key]
    change(at, path[-1] if path else 0)
    return whole[0] if whole else None


def put(odd: Any) -> Callable[[Any, Any], None]:
    def change(at: Any, key: Any) -> None:
        at[key] = odd

    return change


def leave_out(at: Any, key: Any) -> None:
    del at[key]


def values_like(value: Any) -> Iterator[Any]:
    for path in places(value):
        for odd in ODD:
            yield changed(value, path, put(odd))
        yield changed(value, path, leave_out)
    random_ = random.Random(1)
    for _ in range(MIXTURES):
        mixed = value
        for _ in range(random_.randrange(2, 5)):
            path = random_.choice(list(places(mixed)))
            mixed = changed(mixed, path, put(random_.choice(ODD)))
        yield mixed


def bytes_like(data: bytes) -> Iterator[bytes]:
    for i in range(len(data)):
        yield data[:i]
        yield data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :]


def sealed(values: Any) -> bytes:
    if not isinstance(values, dict):
        return json.dumps(values).encode()
    return files._sealed({k: v for k, v in values.items() if k != "crc32c"})


def total(read: Callable[[Any], Any], tries: Iterator[Any], *errors: type[Exception]) -> None:
    read_, refused = 0, 0
    for one in tries:
        try:
            read(one)
            read_ += 1
        except errors:
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}, of {one!r:.2000}")
    assert read_ and refused > read_ / 10


def manifest() -> files.Manifest:
    block = _native.CHECKPOINT_BLOCK
    parts = tuple(files.Part(r, f"rank-{r}.safetensors", block + 1, (1, 2)) for r in range(2))
    return files.Manifest(
        7, "id", 2, parts, metric=0.5, created=1.0, sequence=9, abandoned=((1, 3), (5, 6))
    )


def test_manifests() -> None:
    data = manifest().to_bytes()
    assert files.Manifest.from_bytes(data, "here") == manifest()

    def read(data: bytes) -> None:
        found = files.Manifest.from_bytes(data, "here")
        assert found.order and found.size >= 0 and (found.part_of(0) or found.extra is not None)

    total(read, (sealed(v) for v in values_like(json.loads(data))), CorruptionError)
    for one in bytes_like(data):
        try:
            assert files.Manifest.from_bytes(one, "here") == manifest()  # white space
        except CorruptionError as error:
            assert str(error).startswith("here is damaged: ")


def test_notes_of_branches() -> None:
    data = files.Branch(9, ((1, 3), (5, 6)), 7, "id").to_bytes()

    def read(data: bytes) -> None:
        files.Branch.from_bytes(data, "here")

    total(read, (sealed(v) for v in values_like(json.loads(data))), CorruptionError)


def test_parts_and_their_trees() -> None:
    state = {
        "w": np.arange(6.0).reshape(2, 3), "same": (1, None, [b"x", 1j, float("inf")]),
        "scalar": np.int32(3), "dates": np.array(["2020-01-01"], "M8[D]"), 3: {"deep": [[True]]},
    }  # fmt: skip
    values, leaves = tree.encode(state)
    ordered = files.layout(leaves)
    head = files.header(values, ordered)
    body = b"".join(np.asarray(leaf.owner).tobytes() for leaf in ordered)
    table = json.loads(head[8:])
    table["__metadata__"]["nostall"] = json.loads(table["__metadata__"]["nostall"])

    def file_of(table: Any) -> bytes:
        metadata = table.get("__metadata__") if isinstance(table, dict) else None
        if isinstance(metadata, dict) and "nostall" in metadata:
            metadata["nostall"] = json.dumps(metadata["nostall"])
        text = json.dumps(table).encode()
        return len(text).to_bytes(8, "little") + text + body

    def read(data: bytes) -> None:
        tree.decode(*files.parse(np.frombuffer(data, np.uint8)))

    read(head + body)
    total(read, (file_of(v) for v in values_like(table)), CorruptionError)
    total(read, bytes_like(file_of(table)), CorruptionError)


def test_profiles_of_mpi_programs(tmp_path: Path) -> None:
    records = np.zeros(2, arrivals._RECORD)
    records["left"] = 5
    header = {
        "nostall": "mpi profile", "version": 2, "rank": 0, "ranks": 1, "node": "a", "records": 2,
        "dropped": 0, "clock": [[0, 0], [10, 1]], "communicators": {"0": [17, 1, 0]},
        "unrecorded": {"early": 0, "persistent": 0}, "alpha": [[8, 300], [1024, 500]],
    }  # fmt: skip
    file = tmp_path / "mpi-0.profile"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        profile = arrivals.read([file])
        arrivals.table(profile)

    def file_of(header: Any) -> bytes:
        return json.dumps(header).encode() + b"\n" + records.tobytes()

    read(file_of(header))
    total(read, (file_of(v) for v in values_like(header)), CorruptionError, UsageError)
    total(read, bytes_like(file_of(header)), CorruptionError, UsageError)


def test_records_of_runs(tmp_path: Path) -> None:
    names = ("ram", "file", "peer", "source")
    origins = {n: OriginStats(4, 4000, 0.5) for n in names}
    epochs = [EpochStats(e, 2.0, 0.5, 2, 16, 16000, origins, 0.1, [3]) for e in range(2)]
    columns = {n: [0.0, 1.0] for n in BatchRecords.__dataclass_fields__}
    pools = ("ram_tier", "file_tier", "staging", "io_buffers", "decoding")
    device = dict.fromkeys(("steps", "seconds", "input", "copy", "gradient", "checkpoint"), 1.0)
    stats = Stats(
        0, 1, epochs, BatchRecords(**columns), 16000, dict.fromkeys(pools, 1 << 20), {"nodes": 1},
        "loader 0", {"a": {"samples": 16, "epoch": 1}}, 7, device,
    )  # fmt: skip
    record = {
        "format": 1, "kind": "run", "host": "a", "command": "train.py", "began": "today",
        "rank_cores": 2, "versions": {"python": "3"}, "memory_bytes": 8 << 30, "storage": "/data, nfs",
        "memory_left": 4 << 30, "threads": 1, "fetchers": 2,
        "rank": 0, "world_size": 1, "local_world_size": 1, "dataset": "ImageFolder",
        "samples": 16, "dataset_bytes": 16000, "batch_size": 8, "staging_bytes": 1 << 20,
        "tiers": [["ram", 4000, ""]], "stats": stats.to_dict(),
    }  # fmt: skip
    file = tmp_path / "rank0.0.run.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        loader = runs._loader(file)
        run = runs.Run("run", [runs.Rank(loader.stats.rank, [loader])], None, [])
        run_page.text(run)
        run_page.page([run])

    whole = json.dumps(record).encode()
    read(whole)
    total(read, (json.dumps(v).encode() for v in values_like(record)), CorruptionError)
    for place, odd, words in (
        (("stats", "rank"), "0", "statistics.rank must be int, not '0'"),
        (("stats", "batches", "wait"), [None, 1.0], r"batches.wait\[0\] must be float, not None"),
        (("tiers",), [["ram"]], r"tiers\[0\] must be tuple"),
        (("threads",), 0, "threads must be at least 1, not 0"),
        (("stats", "epochs", 0, "origins"), {}, "epoch 0 lacks ram"),
    ):
        file.write_text(json.dumps(changed(record, place, put(odd))))
        with pytest.raises(CorruptionError, match=f"{file}.*{words}"):
            runs._loader(file)
        with pytest.raises(UsageError, match="holds no recorded run"):
            runs.read(tmp_path)
