"""Places by the arithmetic of [Pumma 2020, sec. 5.2.2]: right where its rule holds, else refused."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest

from nostall import _native


def scanned(folder: Path, count: int, size: int, commit_every: int, append: bool) -> object:
    with lmdb.open(str(folder), map_size=1 << 30, sync=False) as environment:
        writing = environment.begin(write=True)
        for i in range(count):
            writing.put(b"%08d" % i, bytes(size), append=append)
            if commit_every and (i + 1) % commit_every == 0:
                writing.commit()
                writing = environment.begin(write=True)
        writing.commit()
    return _native.scan_lmdb(_native.open_storage([str(folder / "data.mdb")], "never"), "")


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("size", [3_073, 20_000])
def test_one_transaction_is_computed_exactly(tmp_path: Path, size: int, append: bool) -> None:
    records = scanned(tmp_path, 1500, size, 0, append)
    assert isinstance(records, _native.LmdbRecords)
    pages, why = records.computed_pages()
    assert why == ""
    assert np.array_equal(np.array(pages) * 4096 + 16, records.offset)


def test_several_transactions_are_refused_whatever_is_recorded(tmp_path: Path) -> None:
    records = scanned(tmp_path, 1500, 3_073, 100, False)
    assert isinstance(records, _native.LmdbRecords)
    right = []
    for commit_every in (0, 100):
        pages, why = records.computed_pages(commit_every)
        assert "right place for" in why
        right.append(int((np.array(pages) * 4096 + 16 == records.offset).sum()))
    # To know when the writer committed helps, until freed pages are used again.
    assert 100 <= right[0] < right[1] < 1500
