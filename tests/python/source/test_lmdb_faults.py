"""Databases that are damaged, or written to meanwhile: every sample right, or a clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
from checks import check_epochs

import nostall
from nostall.errors import CorruptionError, Error, IoError, UsageError

SIZES = [0, 10, 900, 2030, 3000, 4080, 5000, 20_000]
PAGE = 4096


def value_of(key: int, size: int | None = None) -> bytes:
    """What the database holds at `key`, told by the key alone."""
    size = SIZES[key % len(SIZES)] if size is None else size
    return np.random.default_rng(key).bytes(size)


NEWER = [value_of(i) for i in range(400)]
OLDER = [value_of(i, 3000) for i in range(400)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with every kind of page, some of them freed again."""
    path = tmp_path_factory.mktemp("sound")
    with lmdb.open(str(path), map_size=1 << 26, sync=False) as env:
        for first in range(0, 400, 50):
            with env.begin(write=True) as t:
                for i in range(first, first + 50):
                    t.put(str(i).encode(), OLDER[i])
        with env.begin(write=True) as t:
            for i in range(400):
                t.put(str(i).encode(), NEWER[i])
    return (path / "data.mdb").read_bytes()


def check(path: Path, may_be_older: bool) -> str:
    """ "right" if all that is served is right, else the error, which says where."""
    try:
        source = nostall.LMDB(path, index=False)
        assert len(source) == 400
        served = [source.read(i) for i in range(len(source))]
    except Error as error:
        text = str(error)
        assert str(path) in text
        assert any(word in text for word in ("offset", "page", "meta", "empty", "bytes")), text
        return text
    assert served == NEWER or (may_be_older and served == OLDER)
    return "right"


def test_three_hundred_damages_of_the_structure(sound: bytes, tmp_path: Path) -> None:
    """Bits flipped in meta, branch and leaf pages and in the headers of value pages; cuts."""
    path = tmp_path / "data.mdb"
    random = np.random.default_rng(0)
    path.write_bytes(sound)
    good = nostall.LMDB(path, index=False)
    _, offsets, lengths = good.places
    # Bytes of values, which LMDB has no checksum for; all others are structure.
    in_value = np.zeros(len(sound), bool)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        in_value[offset : offset + length] = True
    in_tree = np.zeros(len(sound), bool)
    tree = {0, 1}
    for page in range(len(sound) // PAGE):
        flags = int.from_bytes(sound[page * PAGE + 10 : page * PAGE + 12], "little")
        number = int.from_bytes(sound[page * PAGE : page * PAGE + 8], "little")
        if number == page and flags & ~0x10 in (1, 2, 4, 8):
            tree.add(page)
    for page in tree:
        in_tree[page * PAGE : (page + 1) * PAGE] = True
    structure = np.flatnonzero(in_tree & ~in_value)
    outcomes = []
    for attempt in range(300):
        damaged = bytearray(sound)
        if attempt % 10 == 0:
            del damaged[int(random.integers(len(sound))) :]
        elif attempt % 10 == 1:
            page = int(random.choice(sorted(tree)))
            damaged[page * PAGE : (page + 1) * PAGE] = random.bytes(PAGE)
        else:
            at = int(random.choice(structure))
            damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        in_meta = damaged[: 2 * PAGE] != sound[: 2 * PAGE] or len(damaged) < len(sound)
        outcomes.append(check(path, in_meta))
    right = outcomes.count("right")
    assert 30 < right < 270, right


def test_a_torn_meta_page_leaves_the_transaction_before(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    transaction = [int.from_bytes(sound[m * PAGE + 144 :][:8], "little") for m in (0, 1)]
    damaged = bytearray(sound)
    newer = int(transaction[1] > transaction[0])
    damaged[newer * PAGE + 16 : newer * PAGE + 20] = b"torn"
    path.write_bytes(damaged)
    source = nostall.LMDB(path, index=False)
    assert [source.read(i) for i in range(len(source))] == OLDER
    damaged[(1 - newer) * PAGE + 16 : (1 - newer) * PAGE + 20] = b"torn"
    path.write_bytes(damaged)
    with pytest.raises((CorruptionError, UsageError), match=r"data\.mdb.*meta"):
        nostall.LMDB(path, index=False)


def test_an_index_does_not_hide_that_the_database_was_cut(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    path.write_bytes(sound)
    assert not nostall.LMDB(path).index_reused
    path.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CorruptionError, match=r"data\.mdb.*(cut|end|inside|page)"):
        nostall.LMDB(path)


def test_a_value_page_that_was_overwritten_is_found_when_it_is_read(
    sound: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "data.mdb"
    path.write_bytes(sound)
    first = nostall.LMDB(path)
    large = 7  # 20,000 bytes, on pages of its own
    start = int(first.places[1][large]) - 16
    damaged = bytearray(sound)
    damaged[start : start + PAGE] = bytes(PAGE)
    before = path.stat()
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a medium forgets without a date
    source = nostall.LMDB(path)
    assert source.index_reused  # the tree says nothing of it
    assert source.read(8) == NEWER[8]
    with pytest.raises(IoError, match=rf'data\.mdb "{large}" at offset {start + 16}: .*page'):
        source.read(large)
    with pytest.raises(CorruptionError, match=r'data\.mdb "\d+" at offset \d+'):
        check_epochs(source, NEWER)


WRITER = """
import sys, lmdb, numpy as np
env = lmdb.open(sys.argv[1], map_size=1 << 28, sync=False)
print("ready", flush=True)
random = np.random.default_rng(1)
turn = 0
while sys.stdin not in __import__("select").select([sys.stdin], [], [], 0.002)[0]:
    turn = turn % int(sys.argv[2]) + 1
    with env.begin(write=True) as t:
        for _ in range(20):
            key = int(random.integers(400))
            t.put(str(key).encode(), np.random.default_rng(key + 1000 * turn).bytes(3000))
"""


def possible(key: int, turns: int) -> set[bytes]:
    return {np.random.default_rng(key + 1000 * turn).bytes(3000) for turn in range(turns + 1)}


def test_a_database_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 28, sync=False) as env, env.begin(write=True) as t:
        for key in range(400):
            t.put(str(key).encode(), np.random.default_rng(key).bytes(3000))
    turns = 50
    answers = {key: possible(key, turns) for key in range(0, 400, 7)}
    outcomes = {"epochs": 0, "errors": 0}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(turns)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        while not outcomes["errors"] or sum(outcomes.values()) < 10:
            assert writer.poll() is None
            try:
                source = nostall.LMDB(tmp_path, label=list(range(400)), index=False)
                with nostall.DataLoader(source, 16, tiers=[], output="numpy") as loader:
                    for batch, labels in loader:
                        for i, key in enumerate(labels.tolist()):
                            assert len(batch[i]) == 3000
                            if key in answers:
                                assert batch[i].tobytes() in answers[key]
                outcomes["epochs"] += 1
            except (IoError, CorruptionError) as error:
                assert str(tmp_path) in str(error)
                assert "written" in str(error) or "changed" in str(error), str(error)
                outcomes["errors"] += 1
        writer.communicate()
        assert writer.returncode == 0
    source = nostall.LMDB(tmp_path, index=False)  # nobody writes any more
    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env, env.begin() as t:
        for key in range(400):
            assert source.read(key) == t.get(str(key).encode())


def test_a_database_that_another_process_maps_larger_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as t:
        for i in range(8):
            t.put(str(i).encode(), OLDER[i])
    source, other = (nostall.LMDB(path, index=False) for _ in range(2))
    assert source.read(0) == OLDER[0]
    os.truncate(path, path.stat().st_size + (1 << 20))
    for opened in (source, other):
        assert [opened.read(i) for i in range(8)] == OLDER[:8]
    with lmdb.open(str(tmp_path), map_size=1 << 25) as env, env.begin(write=True) as t:
        t.put(b"0", NEWER[3])
    with pytest.raises(IoError, match=r"data\.mdb.*changed"):
        source.read(1)
