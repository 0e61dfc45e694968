"""LMDB databases as liblmdb writes them are read as liblmdb reads them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nostall
from nostall.errors import UsageError
from nostall.source._lmdb import LABELS_KEY, SPECIAL_KEYS

_SIZES = [0, 1, 100, 1000, 2024, 2030, 2100, 4080, 4081, 9000, 70_000]


def write(path: Path, records: dict[bytes, bytes], name: bytes | None = None) -> None:
    with lmdb.open(str(path), map_size=1 << 30, max_dbs=4, sync=False) as env:
        database = env.open_db(name) if name else None
        with env.begin(write=True, db=database) as transaction:
            for key, value in records.items():
                transaction.put(key, value)


def as_liblmdb(path: Path, name: bytes | None = None) -> dict[bytes, bytes]:
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=4) as env:
        database = env.open_db(name, create=False) if name else None
        with env.begin(db=database) as transaction:
            return {bytes(k): bytes(v) for k, v in transaction.cursor()}


@given(
    operations=st.lists(
        st.tuples(
            # The value of LABELS_KEY has a form of its own; hypothesis draws constants of the code.
            st.binary(min_size=1, max_size=40).filter(lambda key: key != LABELS_KEY)
            | st.integers(0, 500).map(lambda i: str(i).encode()),
            st.sampled_from(_SIZES) | st.none(),  # None deletes
            st.booleans(),  # commits before it
        ),
        max_size=120,
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_reads_what_liblmdb_reads(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[bytes, int | None, bool]],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("db")
    random = np.random.default_rng(seed)
    with lmdb.open(str(path), map_size=1 << 28, sync=False) as env:
        transaction = env.begin(write=True)
        for key, size, commit in operations:
            if commit:
                transaction.commit()
                transaction = env.begin(write=True)
            if size is None:
                transaction.delete(key)
            else:
                transaction.put(key, random.bytes(size))
        transaction.commit()
    expected = {k: v for k, v in as_liblmdb(path).items() if k not in SPECIAL_KEYS}
    if not expected:
        with pytest.raises(UsageError, match="no samples"):
            nostall.LMDB(path, order="key", index=False)
        return
    source = nostall.LMDB(path, order="key", index=False)
    assert [source.read(i) for i in range(len(source))] == list(expected.values())


def test_decimal_keys_are_places_and_special_keys_are_left_out(tmp_path: Path) -> None:
    values = [str(i).encode() * 3 for i in range(300)]
    records = {str(i).encode(): v for i, v in enumerate(values)}
    write(tmp_path, {**records, b"__len__": b"300", b"__keys__": b"x"})
    source = nostall.LMDB(tmp_path)
    assert [source.read(i) for i in range(300)] == values
    by_key = nostall.LMDB(tmp_path, order="key")
    assert [by_key.read(i) for i in range(300)] == [records[k] for k in sorted(records)]


def test_number_order_needs_numbers(tmp_path: Path) -> None:
    write(tmp_path, {b"1": b"x", b"two": b"y"})
    with pytest.raises(UsageError, match="two"):
        nostall.LMDB(tmp_path, order="number")


def test_stored_places_hold_until_the_next_commit(tmp_path: Path) -> None:
    write(tmp_path, {str(i).encode(): bytes(3000) for i in range(2000)})
    first = nostall.LMDB(tmp_path)
    assert not first.index_reused
    again = nostall.LMDB(tmp_path)
    assert again.index_reused and again.fingerprint == first.fingerprint
    assert again.index_bytes < 12 * len(again)
    write(tmp_path, {b"2000": b"new"})
    changed = nostall.LMDB(tmp_path)
    assert not changed.index_reused
    assert changed.read(2000) == b"new"


def test_places_are_not_those_of_another_database_of_the_same_shape(tmp_path: Path) -> None:
    images = {b"%d" % i: bytes([i]) * 3000 for i in range(40)}
    write(tmp_path, {k: pickle.dumps((v, 1)) for k, v in images.items()})
    assert set(nostall.LMDB(tmp_path, values="pickled").labels) == {1}
    for name in ("data.mdb", "lock.mdb"):
        (tmp_path / name).unlink()
    write(tmp_path, {k: pickle.dumps((v, 2)) for k, v in images.items()})
    os.utime(tmp_path / "data.mdb", (1, 1))  # both may be of one tick of the file system's clock
    again = nostall.LMDB(tmp_path, values="pickled")
    assert not again.index_reused
    assert set(again.labels) == {2}


def test_named_databases(tmp_path: Path) -> None:
    write(tmp_path, {b"0": b"a", b"1": b"b" * 5000}, b"train")
    write(tmp_path, {b"0": b"c"}, b"val")
    assert nostall.LMDB(tmp_path, database="train").read(1) == b"b" * 5000
    assert nostall.LMDB(tmp_path, database="val").read(0) == b"c"
    with pytest.raises(UsageError, match="train, val"):
        nostall.LMDB(tmp_path)
    with pytest.raises(UsageError, match="train, val"):
        nostall.LMDB(tmp_path, database="test")


def test_several_values_a_key_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        database = env.open_db(b"dup", dupsort=True)
        with env.begin(write=True, db=database) as transaction:
            transaction.put(b"k", b"1")
            transaction.put(b"k", b"2")
    with pytest.raises(UsageError, match="DUPSORT"):
        nostall.LMDB(tmp_path, database="dup")


def test_pickled_pairs_and_labels_by_key(tmp_path: Path) -> None:
    images = [bytes([i]) * (100 + 1000 * i) for i in range(20)]
    write(tmp_path, {b"%d" % i: pickle.dumps((v, i * 7)) for i, v in enumerate(images)})
    source = nostall.LMDB(tmp_path, values="pickled")
    assert [source.read(i) for i in range(20)] == images
    assert source.labels.tolist() == [i * 7 for i in range(20)]
    by_key = nostall.LMDB(tmp_path, values="pickled", label=lambda key: int(key) + 1)
    assert by_key.labels.tolist() == list(range(1, 21))


def test_batches_come_with_the_right_bytes_and_labels(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    values = [random.bytes(int(random.choice(_SIZES[1:]))) for _ in range(400)]
    write(tmp_path, {b"%d" % i: v for i, v in enumerate(values)})
    source = nostall.LMDB(tmp_path, label=list(range(400)))
    plan = nostall.Plan(samples=400, batch_size=16, epochs=2, seed=5)
    with nostall.DataLoader(
        source, 16, epochs=2, seed=5, tiers=["ram:1MiB"], output="numpy"
    ) as loader:
        for epoch in loader.epochs():
            seen = []
            for batch, labels in epoch:
                for i, label in enumerate(labels):
                    assert batch[i].tobytes() == values[label]
                seen.extend(labels.tolist())
            assert seen == plan.rank_epoch(epoch.index, 0)[0].tolist()


def test_other_labels_are_another_index(tmp_path: Path) -> None:
    write(tmp_path, {b"%d" % i: b"x" for i in range(5)})
    first = nostall.LMDB(tmp_path, label=[5, 6, 7, 8, 9])
    assert nostall.LMDB(tmp_path, label=[5, 6, 7, 8, 9]).index_reused
    assert nostall.LMDB(tmp_path, label=[1, 2, 3, 4, 5]).labels.tolist() == [1, 2, 3, 4, 5]
    assert nostall.LMDB(tmp_path).labels.tolist() == [0] * 5
    index = tmp_path / "index"
    by_key = nostall.LMDB(tmp_path, label=lambda key: int(key) * 2, index=index)
    assert by_key.labels.tolist() == [0, 2, 4, 6, 8]
    assert nostall.LMDB(tmp_path, index=index).labels.tolist() == [0] * 5
    odd = nostall.LMDB(tmp_path, keep=lambda key: int(key) % 2 == 1, index=index)
    assert len(odd) == 2 and len(nostall.LMDB(tmp_path, index=index)) == 5
    assert first.labels.tolist() == [5, 6, 7, 8, 9]


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, {b"%d" % i: b"x" for i in range(5)})
    for _ in range(2):
        with pytest.raises(UsageError, match="3 labels were given for 5 samples"):
            nostall.LMDB(tmp_path, label=[1, 2, 3])
