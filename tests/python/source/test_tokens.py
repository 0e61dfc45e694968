"""Token files of every format give the same stream; damage is named."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import Answer, Proxy, Request, error, upload

import nostall
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source import _objects, _tokens
from nostall.source._objects import store_identity

pytest_plugins = ["object_fixtures"]

IDS = np.random.default_rng(0).integers(1, 900, 5000).astype(np.uint16)
ENDS = (700, 701, 2048, 4999)  # where the id 0 ends a document
IDS[list(ENDS)] = 0


def megatron(path: Path, documents: list[np.ndarray], dtype: Any = np.uint16) -> None:
    """Writes path.bin and path.idx, as Megatron's IndexedDatasetBuilder does."""
    codes = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
    lengths = np.array([len(d) for d in documents], np.int32)
    size = np.dtype(dtype).itemsize
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * size, out=pointers[1:])
    Path(f"{path}.bin").write_bytes(b"".join(d.astype(dtype).tobytes() for d in documents))
    Path(f"{path}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, codes[np.dtype(dtype).name], len(lengths), len(lengths) + 1)
        + lengths.tobytes()
        + pointers.tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    )


def documents() -> list[np.ndarray]:
    return np.split(IDS, [end + 1 for end in ENDS[:-1]])


def nanogpt(folder: Path) -> nostall.Tokens:
    IDS.tofile(folder / "train.bin")
    return nostall.Tokens(folder / "train.bin", dtype="uint16", end=0)


def wide(folder: Path) -> nostall.Tokens:
    IDS.astype(np.uint32).tofile(folder / "train.bin")
    return nostall.Tokens(folder / "train.bin", dtype="uint32", end=0, vocabulary=900)


def numpy_file(folder: Path) -> nostall.Tokens:
    np.save(folder / "train.npy", IDS.astype(np.int32))
    return nostall.Tokens(folder / "train.npy", end=0)


def olmo(folder: Path) -> nostall.Tokens:
    IDS.tofile(folder / "train.npy")  # raw, whatever its name says
    return nostall.Tokens(folder / "train.npy", dtype="uint16", end=0)


def megatron_file(folder: Path) -> nostall.Tokens:
    megatron(folder / "train", documents(), np.int32)
    return nostall.Tokens(folder / "train.bin")


def many(folder: Path) -> nostall.Tokens:
    for number, part in enumerate(documents()):
        megatron(folder / f"part-{number}", [part])
    (folder / "part-1x.bin").write_bytes(b"")
    (folder / "part-1x.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0))
    return nostall.Tokens(str(folder / "part-*.bin"))


def llmc(folder: Path) -> nostall.Tokens:
    """Two files, with the headers that llm.c's data scripts write."""
    for number, part in enumerate((IDS[:2000], IDS[2000:])):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(part)
        (folder / f"{number}.bin").write_bytes(header.tobytes() + part.tobytes())
    # A file's end is a document's end.
    tokens = nostall.Tokens(folder, end=0)
    assert tokens.dtype == "uint16" and 2000 in tokens.lengths.cumsum()
    return tokens


def arrow(folder: Path) -> nostall.Tokens:
    """A data set of `datasets` in two files, with rows that have no ids."""
    datasets = pytest.importorskip("datasets")
    rows = [d.tolist() for d in documents()]
    made = datasets.Dataset.from_dict({"input_ids": rows, "length": [len(r) for r in rows]})
    made.save_to_disk(folder / "set", num_shards=2)
    return nostall.Tokens(folder / "set", column="input_ids")


MADE = [nanogpt, wide, numpy_file, olmo, megatron_file, many, arrow]


@pytest.mark.parametrize("made", MADE)
def test_formats_give_one_stream(made: Callable[[Path], nostall.Tokens], tmp_path: Path) -> None:
    tokens = made(tmp_path)
    assert len(tokens) == len(IDS)
    assert np.array_equal(tokens.read(0, len(IDS)), IDS)
    assert tokens.lengths.tolist() == [len(d) for d in documents()]
    for number, document in enumerate(documents()):
        assert np.array_equal(tokens.document(number), document)
    again = pickle.loads(pickle.dumps(tokens))
    assert again.index_reused and again.fingerprint == tokens.fingerprint
    assert Path(tokens.index_file).stat().st_size < 1000


def test_headers_of_llmc_are_read_and_checked(tmp_path: Path) -> None:
    tokens = llmc(tmp_path)
    assert np.array_equal(tokens.read(0, len(IDS)), IDS)
    whole = (tmp_path / "1.bin").read_bytes()
    for match, data in {
        r"1\.bin has 7022 bytes, its header tells of 3000 ids of uint16: it was cut": whole[:-2],
        r"1\.bin has a header of llm.c of version 2, this release reads 1": (
            whole[:4] + b"\2" + whole[5:]
        ),
    }.items():
        (tmp_path / "1.bin").write_bytes(data)
        with pytest.raises(CorruptionError, match=match):
            nostall.Tokens(tmp_path, index=False)
    with pytest.raises(CorruptionError, match="does not begin with a header"):
        IDS.tofile(tmp_path / "1.bin")
        nostall.Tokens(tmp_path / "1.bin", format="llm.c")


def test_columns_of_arrow_are_streams(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    lists = [[], [5, 6, 7], None, [8], [], [9, 10]]
    table = pa.table(
        {
            "ids": pa.array(lists, pa.list_(pa.int32())),
            "fixed": pa.array([[1, 2]] * 6, pa.list_(pa.uint16(), 2)),
            "text": ["a"] * 6,
        }
    )
    for name, part in (("a", table), ("b", table.slice(3))):
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(part, max_chunksize=4)
    tokens = nostall.Tokens(tmp_path, column="ids", vocabulary=11)
    assert tokens.dtype == "int32"
    assert tokens.lengths.tolist() == [0, 3, 0, 1, 0, 2, 1, 0, 2]
    assert tokens.read(0, len(tokens)).tolist() == [5, 6, 7, 8, 9, 10, 8, 9, 10]
    assert nostall.Tokens(tmp_path, column="ids", vocabulary=11).index_reused
    assert nostall.Tokens(tmp_path, column="fixed").lengths.tolist() == [2] * 9
    for files in (tmp_path, sorted(tmp_path.glob("*.arrow"))[0]):
        with pytest.raises(
            UsageError, match=r"Arrow file.*: name their column|Arrow file: name its"
        ):
            nostall.Tokens(files, dtype="uint16")
    for match, options in {
        "column 'text' is string, no list of ids": {"column": "text"},
        "has no column .none.": {"column": "none"},
        "end=3: the rows of column 'ids'": {"column": "ids", "end": 3},
        "not of format='raw'": {"column": "ids", "format": "raw"},
    }.items():
        with pytest.raises(UsageError, match=match):
            nostall.Tokens(tmp_path, **options)
    with (
        nostall.DataLoader(
            nostall.Windows(nostall.Tokens(tmp_path, column="ids", vocabulary=10), 4),
            1,
            epochs=1,
            tiers=[],
        ) as loader,
        pytest.raises(CorruptionError, match="is 10, outside the vocabulary of 10"),
    ):
        list(loader)
    pa.parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(UsageError, match="tokenize"):
        nostall.Tokens(tmp_path / "c.parquet", column="ids")


def test_tracks_go_with_the_ids(tmp_path: Path) -> None:
    def opened(name: str, values: np.ndarray, **options: Any) -> nostall.Tokens:
        values.tofile(tmp_path / name)
        return nostall.Tokens(tmp_path / name, dtype=values.dtype.name, **options)

    mask = opened("mask.bin", np.ones(4999, np.uint8))
    with pytest.raises(CorruptionError, match="the track loss_mask has 4999 values for 5000 ids"):
        opened("a.bin", IDS, tracks={"loss_mask": mask})
    rows = np.ones((50, 100), np.int8)
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(CorruptionError, match="the track loss_mask has other documents"):
        opened("a.bin", IDS, end=0, tracks={"loss_mask": nostall.Tokens(tmp_path / "rows.npy")})
    weights = opened("weights.bin", np.ones(5000, np.float32))
    with pytest.raises(UsageError, match="track loss_mask is float32"):
        opened("a.bin", IDS, tracks={"loss_mask": weights})
    with pytest.raises(UsageError, match="the track weights must be"):
        opened("a.bin", IDS, tracks={"weights": "weights.bin"})
    with pytest.raises(UsageError, match="has no ids"):
        nostall.Windows(weights, 10)


def test_rows_are_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS.reshape(50, 100))
    tokens = nostall.Tokens(tmp_path / "a.npy")
    assert tokens.lengths.tolist() == [100] * 50
    assert np.array_equal(tokens.document(7), IDS[700:800])


def test_a_header_of_numpy_is_none_of_the_ids_of_any_file(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        np.save(file, IDS)
    for dtype in ("uint16", None):
        tokens = nostall.Tokens(tmp_path / "a.bin", dtype=dtype)
        assert np.array_equal(tokens.read(0, len(tokens)), IDS)
    with pytest.raises(UsageError, match="are of the types uint16, uint32"):
        nostall.Tokens(tmp_path / "a.bin", dtype="uint32")
    raw = nostall.Tokens(tmp_path / "a.bin", dtype="uint16", format="raw")
    assert len(raw) == (tmp_path / "a.bin").stat().st_size // 2
    with pytest.raises(CorruptionError, match="does not begin with a header of llm"):
        nostall.Tokens(tmp_path / "a.bin", format="llm.c")


def test_a_file_with_an_index_that_is_listed_twice_is_read_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        megatron(tmp_path / name, documents())

    def names(*listed: str) -> list[str]:
        tokens = nostall.Tokens([tmp_path / name for name in listed], index=False)
        assert len(tokens) == tokens._files * len(IDS)
        return [Path(path).name for path in tokens.storage.paths[: tokens._files]]

    assert names("a.bin", "b.bin", "a.bin") == ["a.bin", "b.bin", "a.bin"]
    assert names("a.idx", "a.idx") == ["a.bin", "a.bin"]
    assert names("a.bin", "a.idx", "b.idx", "b.bin", "a.bin") == ["a.bin", "b.bin", "a.bin"]


def test_objects_are_read_as_files_are(bucket: Any, proxy: Proxy, tmp_path: Path) -> None:
    megatron(tmp_path / "train", documents())
    upload(bucket, tmp_path)
    here = nostall.Tokens(tmp_path / "train.bin")
    for url in ("/train.bin", "", "/*.bin", "/train.idx"):
        there = nostall.Tokens(f"s3://{bucket.name}{url}", index=False)
        assert there.fingerprint == here.fingerprint
        assert there.documents == len(documents())
    units = [nostall.Windows(tokens, 64, documents=True) for tokens in (there, here)]
    assert len(units[0]) == len(units[1]) == (len(IDS) - 1) // 64
    assert all(units[0].read(u) == units[1].read(u) for u in range(len(units[0])))


def test_raw_ids_on_a_store_have_no_index_there(bucket: Any, proxy: Proxy, tmp_path: Path) -> None:
    megatron(tmp_path / "a", documents())
    IDS.tofile(tmp_path / "b.bin")
    np.save(tmp_path / "c.npy", IDS)
    upload(bucket, tmp_path)
    root = f"s3://{bucket.name}"
    with pytest.raises(UsageError, match=r"b\.bin has no \.idx file, others have one"):
        nostall.Tokens(root + "/*.bin")
    raw = nostall.Tokens(root + "/b.bin", dtype="uint16", index=False)

    def refusing(status: int) -> Callable[[Request, Callable[[], Answer]], Answer]:
        return lambda request, forward: (
            error(status, "AccessDenied") if request.path.endswith(".idx") else forward()
        )

    # The first: so a store that may not be listed answers for what is not there.
    for status in (403, 400, 405, 410):
        proxy.meddle = refusing(status)
        found = nostall.Tokens(root + "/b.bin", dtype="uint16", index=False)
        assert found.fingerprint == raw.fingerprint
    for status in (500, 429):
        proxy.meddle = refusing(status)
        told = r"b\.idx cannot be read: .*; no \.idx is asked for where format="
        with pytest.raises(IoError, match=told):
            nostall.Tokens(root + "/b.bin", dtype="uint16")
    proxy.meddle = None
    bucket.put_object(Key="b.idx", Body=b"<html>There is no such page</html>")
    with pytest.raises(CorruptionError, match=r'b\.idx is no index of .*, pass format="raw"'):
        nostall.Tokens(root + "/b.bin", dtype="uint16")
    nostall.Tokens(root + "/b.bin", dtype="uint16", format="raw")
    nostall.Tokens(root + "/c.npy")


def test_columns_and_headers_are_read_from_objects(
    bucket: Any, proxy: Proxy, tmp_path: Path
) -> None:
    llmc(tmp_path)
    arrow(tmp_path)
    files = sorted((tmp_path / "set").glob("*.arrow"))
    upload(bucket, tmp_path)
    root = f"s3://{bucket.name}"
    for there, here in (
        (nostall.Tokens([f"{root}/0.bin", f"{root}/1.bin"], end=0), llmc(tmp_path)),
        (
            nostall.Tokens([f"{root}/set/{f.name}" for f in files], column="input_ids"),
            nostall.Tokens(files, column="input_ids"),
        ),
    ):
        assert there.fingerprint == here.fingerprint
        assert np.array_equal(there.read(0, len(IDS)), here.read(0, len(IDS)))


def test_the_index_is_that_of_the_files(tmp_path: Path) -> None:
    first = nanogpt(tmp_path)
    assert not first.index_reused
    assert nostall.Tokens(tmp_path / "train.bin", dtype="uint16", end=0).index_reused
    assert not nostall.Tokens(tmp_path / "train.bin", dtype="uint16", end=1).index_reused
    Path(first.index_file).write_bytes(b"nothing")
    assert not nanogpt(tmp_path).index_reused
    IDS[:100].tofile(tmp_path / "train.bin")
    assert len(nostall.Tokens(tmp_path / "train.bin", dtype="uint16", end=0)) == 100


def test_another_reading_of_a_file_has_documents_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tokens, "_SHARED_FROM", 0)
    np.save(tmp_path / "a.npy", IDS)
    size = (tmp_path / "a.npy").stat().st_size
    for index in (tmp_path / "index", False):
        raw = nostall.Tokens(tmp_path / "a.npy", dtype="uint16", format="raw", index=index)
        tokens = nostall.Tokens(tmp_path / "a.npy", index=index)
        assert (len(raw), len(tokens)) == (size // 2, len(IDS))
        assert np.array_equal(tokens.read(0, len(IDS)), IDS)


def test_places_of_an_id_are_not_ends_of_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS.reshape(50, 100))
    places = nostall.Tokens(tmp_path / "a.npy").places(0)
    assert places.tolist() == np.flatnonzero(IDS == 0).tolist()
    with pytest.raises(UsageError, match="leave it out"):
        nostall.Tokens(tmp_path / "a.npy", end=0)


def test_documents_are_found_once_on_a_node_where_an_index_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tokens, "_SHARED_FROM", 0)
    IDS.tofile(tmp_path / "a.bin")

    def opened() -> nostall.Tokens:
        index = tmp_path / "no folder" / "index"
        return nostall.Tokens(tmp_path / "a.bin", dtype="uint16", end=0, index=index)

    one = opened()
    monkeypatch.setattr(nostall.Tokens, "_examine", None)  # what is called no more
    assert opened().lengths.tolist() == one.lengths.tolist()


def test_places_are_found_once_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tokens, "_SHARED_FROM", 0)
    IDS.tofile(tmp_path / "a.bin")
    one, other = (
        nostall.Tokens(tmp_path / "a.bin", dtype="uint16", end=0, index=False) for _ in range(2)
    )
    places = one.places(7)
    assert places.tolist() == np.flatnonzero(IDS == 7).tolist()
    monkeypatch.setattr(nostall.Tokens, "_examine", None)  # what is called no more
    for tokens in (
        other,
        one,
        nostall.Tokens(tmp_path / "a.bin", dtype="uint16", end=0, index=False),
    ):
        assert np.array_equal(tokens.places(7), places)


def test_one_url_in_two_stores_is_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    store = pytest.importorskip("obstore.store")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one.example")
    one, given = store_identity(), store_identity(store.S3Store("b", region="eu-1"))
    assert given == store_identity(store.S3Store("b", region="eu-1"))
    other = [store.S3Store("b", endpoint="http://two.example"), store.LocalStore("/tmp")]
    assert len({one, given, *map(store_identity, other)}) == 4
    assert store_identity(store.LocalStore("/tmp")) != store_identity(store.LocalStore("/"))
    assert store_identity(store.MemoryStore()) is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://two.example")
    assert store_identity() != one


def test_a_store_that_cannot_be_named_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal objects of two stores in memory: what was found in one is not for the other."""
    obstore = pytest.importorskip("obstore")
    from obstore.store import MemoryStore

    monkeypatch.setattr(_tokens, "_SHARED_FROM", 0)
    monkeypatch.setattr(_objects, "_version", lambda meta: 7)
    opened = []
    for ids in (IDS, np.roll(IDS, 5)):
        store = MemoryStore()
        obstore.put(store, "a.bin", ids.tobytes())
        opened.append(
            nostall.Tokens("s3://b/a.bin", dtype="uint16", end=0, store=store, index=False)
        )
    assert opened[0].lengths.tolist() != opened[1].lengths.tolist()


def test_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(CorruptionError, match=r"odd.bin has 3 bytes, which are no ids of 2 bytes"):
        nostall.Tokens(tmp_path / "odd.bin", dtype="uint16")
    with pytest.raises(UsageError, match="pass their type"):
        nostall.Tokens(tmp_path / "odd.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="has no tokens"):
        nostall.Tokens(tmp_path / "empty.bin", dtype="uint16")
    IDS.tofile(tmp_path / "a.bin")
    with pytest.raises(
        CorruptionError, match=r"a.bin: token \d+ is \d+, outside the vocabulary of 300"
    ):
        nostall.Tokens(tmp_path / "a.bin", dtype="uint16", vocabulary=300)
    for match, options in {
        "end=100257 is none of the ids of uint16, below 65536": {"end": 100257},
        "end=900 is none of the vocabulary, below 900": {"end": 900, "vocabulary": 900},
    }.items():
        with pytest.raises(UsageError, match=match):
            nostall.Tokens(tmp_path / "a.bin", dtype="uint16", **options)
    np.save(tmp_path / "f.npy", IDS.astype(np.float32))
    with pytest.raises(UsageError, match="no ids: they have no end="):
        nostall.Tokens(tmp_path / "f.npy", end=3)
    cut = (tmp_path / "f.npy").read_bytes()[:-3]
    (tmp_path / "f.npy").write_bytes(cut.replace(b"<f4", b"<i4"))
    with pytest.raises(CorruptionError, match="it was cut"):
        nostall.Tokens(tmp_path / "f.npy")


def test_an_index_that_disagrees_is_refused(tmp_path: Path) -> None:
    megatron(tmp_path / "a", documents())
    data, index = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()

    def refused(match: str, data: bytes = data, index: bytes = index) -> None:
        (tmp_path / "a.bin").write_bytes(data)
        (tmp_path / "a.idx").write_bytes(index)
        with pytest.raises(CorruptionError, match=match):
            nostall.Tokens(tmp_path / "a.bin", index=False)

    refused("index and data disagree", data=data[:-2])
    refused("index and data disagree", data=data + b"\0\0")
    refused("fewer than those of 4 sequences", index=index[:-1])
    refused("does not begin with MMIDIDX", index=b"x" + index)
    refused("version 9", index=index[:9] + b"\x09" + index[10:])
    refused("code 6", index=index[:17] + b"\x06" + index[18:])
    refused("do not lie one after the other", index=index[:34] + b"\x01\x00\x00\x00" + index[38:])
    refused("not made of its sequences", index=index[:-1] + b"\x01")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(IoError, match=r"a\.idx"):
        nostall.Tokens(tmp_path / "a.bin", format="megatron")


def test_resume_says_what_changed(tmp_path: Path) -> None:
    def loader() -> nostall.DataLoader:
        tokens = nostall.Tokens(tmp_path / "a.bin", dtype="uint16")
        return nostall.DataLoader(nostall.Windows(tokens, 64), 4, epochs=2, tiers=[])

    IDS.tofile(tmp_path / "a.bin")
    with loader() as before:
        next(iter(before))
        state = before.state_dict()
    with loader() as same:
        same.load_state_dict(state)
    for count, what in ((4000, "shrank by 1000 tokens"), (5000, None), (5001, "grew by 1 tokens")):
        np.resize(IDS, count).tofile(tmp_path / "a.bin")
        with loader() as after:
            if what is None:
                after.load_state_dict(state)
                continue
            with pytest.raises(
                UsageError,
                match=f"tokens=5000, but this loader has tokens={count}: the files {what}",
            ):
                after.load_state_dict(state)


def test_a_file_that_changes_under_a_loader_is_named(tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "a.bin")
    tokens = nostall.Tokens(tmp_path / "a.bin", dtype="uint16")
    with nostall.DataLoader(nostall.Windows(tokens, 64), 4, epochs=1, tiers=[]) as loader:
        with open(tmp_path / "a.bin", "ab") as file:
            file.write(b"ab")
        with pytest.raises(CorruptionError, match=r"a\.bin: its size changed from 10000 to 10002"):
            list(loader)


def test_the_state_is_small(tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "a.bin")
    tokens = nostall.Tokens(tmp_path / "a.bin", dtype="uint16")
    windows, packed = nostall.Windows(tokens, 64), nostall.Packed(tokens, 64)
    mixture = nostall.Mixture({windows: 0.7, packed: 0.3}, at_end="reweight")
    for source in (windows, mixture):
        with nostall.DataLoader(source, 4, epochs=1, tiers=[]) as loader:
            large = {"epoch": 9, "batch": 10**6, "seed": 1234, "global_batch": 4096}
            large |= {"samples": 10**9, "order_world": 512, "dataset": 2**64 - 1}
            large |= {} if source is mixture else {"tokens": 10**12}
            state = loader.state_dict()
            assert large.keys() < state.keys()
            assert len(json.dumps(state | large, separators=(",", ":"))) < 200
