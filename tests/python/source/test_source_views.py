"""Views show samples of other sources: the right ones, read once, on every way a loader has."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checks import check_source
from samples import noise
from test_tar import webdataset

import nostall
from nostall.errors import CorruptionError, UsageError
from nostall.source import View

N = 23


def folder(root: Path, contents: list[bytes]) -> nostall.Source:
    for i, content in enumerate(contents):
        (root / f"{i:03d}").write_bytes(content)
    return nostall.FileList([f"{i:03d}" for i in range(len(contents))], range(N), root=root)


def tar(root: Path, contents: list[bytes]) -> nostall.Source:
    webdataset(root / "a-0.tar", contents[:9])
    webdataset(root / "a-1.tar", contents[9:], 9)
    return nostall.TarShards(root)


def database(root: Path, contents: list[bytes]) -> nostall.Source:
    with lmdb.open(str(root), map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for i, content in enumerate(contents):
            transaction.put(str(i).encode(), content)
    return nostall.LMDB(root, label=range(len(contents)))


def parquet(root: Path, contents: list[bytes]) -> nostall.Source:
    table = pa.table({"image": contents, "label": list(range(len(contents)))})
    pq.write_table(table, root / "a.parquet", row_group_size=6)
    return nostall.Parquet(root / "a.parquet", image="image", label="label")


def hdf5(root: Path, contents: list[bytes]) -> nostall.Source:
    with h5py.File(root / "a.h5", "w") as file:
        data = np.zeros((len(contents), 100), np.uint8)
        for row, content in zip(data, contents, strict=True):
            row[: min(len(content), 100)] = np.frombuffer(content[:100], np.uint8)
        file.create_dataset("x", data=data, chunks=(4, 100), compression="gzip")
    return nostall.HDF5(root / "a.h5", "x", labels=list(range(len(contents))))


STORES = [folder, tar, database, parquet, hdf5]


@pytest.mark.parametrize("store", STORES)
def test_every_store(tmp_path: Path, store: Callable[[Path, list[bytes]], nostall.Source]) -> None:
    source = store(tmp_path, noise(N))
    samples, labels = [source.read(i) for i in range(N)], source.labels.tolist()
    ids = [22, 3, 4, 5, 3, 17, 9, 8, 0]
    check_source(
        nostall.Subset(source, ids), [samples[i] for i in ids], [labels[i] for i in ids], fork=False
    )
    both = nostall.Concat([nostall.Subset(source, ids), source])
    check_source(both, [samples[i] for i in ids] + samples, [labels[i] for i in ids] + labels)
    assert both.describe(0) == source.describe(22)
    assert both.native.sums.tolist()[9:] == source.native.sums.tolist()


class Numbers:
    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return np.float32(self.first + i), "x" * i


def double(item: Any) -> Any:
    return item[0] * 2, item[1]


def test_items_of_data_sets_in_python() -> None:
    one, two = (nostall.Cached(Numbers(f), then=double, makers=1, max_bytes=512) for f in (0, 100))
    both = nostall.Concat([nostall.Subset(one, [4, 2]), two])
    both = pickle.loads(pickle.dumps(both))
    try:
        for then, factor in ((double, 2), (None, 1)):
            both.then = then
            with nostall.DataLoader(both, 5, shuffle=False, tiers="ram:1MiB") as loader:
                found = list(loader)
            values = np.concatenate([np.asarray(value) for value, _ in found])
            wanted = [4, 2, *range(100, 100 + N)]
            assert values.tolist() == [factor * w for w in wanted]
            assert [t for _, texts in found for t in texts][:3] == ["xxxx", "xx", ""]
        with pytest.raises(UsageError, match="items and bytes"):
            nostall.Concat([one, nostall.FileList([__file__], root="/")])
        with pytest.raises(UsageError, match=r"first source has then=.*source 1 has then=None"):
            two.then = None
            nostall.Concat([one, two])
    finally:
        for part in (one, two, *both.parts):
            assert isinstance(part, nostall.Cached)
            part.close()


def test_views_of_views_are_one_view(tmp_path: Path) -> None:
    source = folder(tmp_path, noise(N))
    train, validation = nostall.Split(nostall.Subset(source, range(20)), 0.75)
    again = nostall.Concat(
        [nostall.Subset(validation, [1, 0]), nostall.Filter(train, labels=[7, 9])]
    )
    assert again.parts == (source,)
    wanted = [
        *validation.labels[[1, 0]].tolist(),
        *(v for v in train.labels.tolist() if v in (7, 9)),
    ]
    assert again.labels.tolist() == again.native.numbers.tolist() == wanted
    assert again.origin(-1) == (source, wanted[-1])
    assert repr(again).startswith(f"<Concat of {source!r}: ")


def test_records_of_several_fields(tmp_path: Path) -> None:
    def make(first: int) -> nostall.Source:
        for i in range(first, first + 4):
            (tmp_path / f"{i}.txt").write_text("ab" * i)
        texts = [tmp_path / f"{i}.txt" for i in range(first, first + 4)]
        return nostall.Files({"text": texts}, {"number": np.arange(first, first + 4)})

    one, two = make(0), make(4)
    view = nostall.Subset(nostall.Concat([one, two]), [6, 1, 3])
    assert view.schema == one.schema
    for fields in (None, ["number"]):
        chosen = pickle.loads(pickle.dumps(view))
        with nostall.DataLoader(chosen, 8, shuffle=False, fields=fields, output="numpy") as loader:
            (batch,) = loader
            assert batch["number"].tolist() == [6, 1, 3]
            assert fields or batch["text"] == ["ab" * 6, "ab", "ab" * 3]
            assert loader.totals()[0].bytes == (0 if fields else view.total_bytes)
    with pytest.raises(UsageError, match=r"has schema Schema\(image=.*1 has schema Schema\(text="):
        nostall.Concat([folder(tmp_path, noise(N)), one])
    with pytest.raises(UsageError, match="changes labels"):
        nostall.Concat([one, two], offset_labels=True)
    for apart in ((one, two), (one,)):
        with pytest.raises(UsageError, match=r"takes a list of sources: Concat\(\[a, b\]\)"):
            nostall.Concat(*apart)


def test_views_keep_names_of_samples(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("x")
    source = nostall.Files({"text": tmp_path})
    view = nostall.Subset(nostall.Subset(source, [3, 2, 0]), [0, 2])
    assert pickle.loads(pickle.dumps(view)).names == ["3", "0"]
    assert nostall.Concat([view, source]).names == ["3", "0", "0", "1", "2", "3"]


def test_concat_compares_fills(tmp_path: Path) -> None:
    def make(fill: Any) -> nostall.Files:
        kind = nostall.fields.Array(dtype="float32", shape=(2,), fill=fill)
        value = [[1.0, 2.0], [1.0, 2.0] if fill is None else None]
        return nostall.Files({}, {"value": value}, schema={"value": kind}, root=tmp_path)

    zeros = make([0.0, 0.0])
    assert len(nostall.Concat([zeros, make(np.zeros(2))])) == 4
    for other in (make([0.0, 1.0]), make(None)):
        for pair in ([zeros, other], [other, zeros]):
            with pytest.raises(
                UsageError, match=r"field value of the first source has fill=.*1 has"
            ):
                nostall.Concat(pair)


def test_labels_of_samples_with_several_fields(tmp_path: Path) -> None:
    def make(**columns: Any) -> nostall.Files:
        return nostall.Files({}, columns, root=tmp_path)

    labelled = make(value=np.arange(6), label=[0, 0, 0, 0, 1, 1])
    assert labelled.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert make(label=np.arange(3, dtype=np.uint8)).labels.tolist() == [0, 1, 2]
    assert labelled.select(["value"]).labels.tolist() == [0, 0, 0, 0, 1, 1]
    chosen = pickle.loads(pickle.dumps(nostall.Filter(labelled, labels=[1])))
    assert (chosen.native.numbers.tolist(), chosen.labels.tolist()) == ([4, 5], [1, 1])
    assert nostall.Concat([chosen, labelled]).labels.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    train, rest = nostall.Split(labelled, 0.5, stratify=True)
    assert sorted(train.labels.tolist()) == sorted(rest.labels.tolist()) == [0, 0, 1]
    with nostall.DataLoader(
        labelled, 2, order=nostall.ClassBalanced(), fields=["value"], output="numpy"
    ) as loader:
        same = nostall.ClassBalanced([0, 0, 0, 0, 1, 1]).weighted()
        assert loader.plan.epoch_order(0).tolist() == order_of(same)


def order_of(order: Any) -> list[int]:
    return nostall.Plan(samples=6, batch_size=2, epochs=1, order=order).epoch_order(0).tolist()


def test_samples_without_labels_are_not_chosen_by_them(tmp_path: Path) -> None:
    gap = {"label": nostall.fields.Scalar(fill=0)}
    items = nostall.Cached(Numbers(0), makers=1, max_bytes=512)
    try:
        for source in (
            nostall.Files({}, {"value": np.arange(6)}, root=tmp_path),
            nostall.Files({}, {"label": ["a", "b", "c"]}, root=tmp_path),
            nostall.Files({}, {"label": [1, None, 2]}, schema=gap, root=tmp_path),
            items,
        ):
            for shown in (source, nostall.Subset(source, range(3))):
                choices: list[Callable[[Any], Any]] = [
                    lambda s: s.labels,
                    lambda s: nostall.Filter(s, labels=[0]),
                    lambda s: nostall.Split(s, 0.5, stratify=True),
                    lambda s: nostall.DataLoader(s, 2, order=nostall.ClassBalanced()),
                ]
                for choose in choices:
                    with pytest.raises(
                        UsageError, match=r"no labels of its own: pass labels= .*mask="
                    ):
                        choose(shown)
                named = nostall.ClassBalanced([0] * len(shown))
                nostall.DataLoader(shown, 2, order=named, epochs=1).close()
    finally:
        items.close()


# ---------------------------------------------------------------------------------------- training


def samples_of(loader: nostall.DataLoader) -> list[int]:
    return [label for epoch in loader.epochs() for _, labels in epoch for label in labels.tolist()]


def test_train_and_validation_side_by_side(tmp_path: Path) -> None:
    source = folder(tmp_path, noise(N))
    train, validation = nostall.Split(source, 0.8, seed=1)
    # What is read ahead counts with the batch that it was read for, so all batches are taken.
    options: dict[str, Any] = {"output": "numpy", "seed": 2, "tiers": "auto", "epochs": 3}
    with (
        nostall.DataLoader(train, 4, **options) as first,
        nostall.DataLoader(validation, 2, shuffle=False, **options) as second,
    ):
        for epoch in first.epochs():
            seen = []
            for _, labels in epoch:
                seen += labels.tolist()
            assert sorted(seen) == train.labels.tolist()
            assert [
                v for _, labels in second for v in labels.tolist()
            ] == validation.labels.tolist()
        # Each byte of the data set leaves the disk once, whichever loader needs it.
        read = [s[0].origins["source"].bytes for s in (first.totals(), second.totals())]
        assert read == [train.total_bytes, validation.total_bytes]
        assert sum(read) == source.total_bytes
        planned = [loader.settings()["tiers"][0][1] for loader in (first, second)]
        assert planned == [train.total_bytes, validation.total_bytes]


def test_a_break_and_another_number_of_ranks(tmp_path: Path) -> None:
    source = nostall.Subset(folder(tmp_path, noise(N)), range(22, 2, -1))

    def loader(batch: int, rank: int = 0, world: int = 1) -> nostall.DataLoader:
        return nostall.DataLoader(
            source, batch, epochs=2, rank=rank, world_size=world, tiers=[], seed=3
        )

    with loader(4) as whole:
        wanted = samples_of(whole)
    with loader(4) as begun:
        batches = iter(begun)
        taken = [v for _ in range(3) for v in next(batches)[1].tolist()]
        state = begun.state_dict()
    halves = []
    for rank in (0, 1):
        with loader(2, rank, 2) as half:
            half.load_state_dict(state)
            halves.append(samples_of(half))
    assert taken == wanted[:12]
    assert [v for pair in zip(*halves, strict=True) for v in pair] == wanted[12:]
    with loader(4) as other:
        other.dataset = nostall.Subset(source, range(20))  # the same samples: the same data set
        other.load_state_dict(state)
        other.dataset = nostall.Subset(source, range(19, -1, -1))
        with pytest.raises(UsageError, match="dataset="):
            other.load_state_dict(state)


def test_a_kept_tier_and_kept_checksums(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    for i, content in enumerate(noise(N)):
        (tmp_path / "data" / "a" / f"{i:03d}.jpg").write_bytes(content)
    tiers = f"{tmp_path / 'tier'}:1MiB:keep"

    def read(loaded: Any) -> int:
        with nostall.DataLoader(loaded, 5, epochs=1, tiers=tiers, output="numpy") as loader:
            samples_of(loader)
            return loader.totals()[0].origins["source"].bytes

    def chosen() -> nostall.Source:
        return nostall.Subset(nostall.ImageFolder(tmp_path / "data"), range(3, 15))

    assert read(chosen()) == chosen().total_bytes
    assert read(chosen()) == 0
    sums = nostall.ImageFolder(tmp_path / "data").native.sums
    assert np.flatnonzero(sums).tolist() == list(range(3, 15))
    # One that changed is named with the file that holds its checksum.
    path = tmp_path / "data" / "a" / "004.jpg"
    path.write_bytes(bytes(len(path.read_bytes())))
    view = nostall.Subset(chosen(), [1])
    view.parts[0].native.learn_sums(sums)
    with pytest.raises(CorruptionError, match=r"004\.jpg: .*\.nostall-index\.sums"):
        view.read(0)


# ------------------------------------------------------------------------------------------ choices


def test_a_split_is_exact_seeded_and_the_same_in_every_release(image_folder: Path) -> None:
    source = nostall.ImageFolder(image_folder, index=False)
    for fraction, first in ((0.5, 31), (0.9, 55), (0.01, 1), (0.99, 60)):
        train, validation = nostall.Split(source, fraction)
        assert (len(train), len(validation)) == (first, 61 - first)
        numbers = [*train.native.numbers.tolist(), *validation.native.numbers.tolist()]
        assert sorted(numbers) == list(range(61))
    _, golden = nostall.Split(source, 0.9, seed=7)
    assert golden.native.numbers.tolist() == GOLDEN
    assert nostall.Split(source, 0.9, seed=8)[1].native.numbers.tolist() != GOLDEN
    assert nostall.Split(source, 0.9, seed=7)[1].fingerprint == golden.fingerprint
    half = nostall.Split(source, np.float32(0.5), np.int64(7))  # type: ignore[arg-type]
    assert half[0].fingerprint == nostall.Split(source, 0.5, 7)[0].fingerprint
    assert golden.classes == source.classes
    assert golden.class_to_idx == source.class_to_idx


# docs/formats/order.md
GOLDEN = [0, 4, 11, 27, 30, 38]


def test_a_stratified_split_takes_its_share_of_each_label(tmp_path: Path) -> None:
    labels = [0] * 10 + [5] * 7 + [2] * 5 + [9]
    for i in range(N):
        (tmp_path / str(i)).write_bytes(b"x")
    source = nostall.FileList([str(i) for i in range(N)], labels, root=tmp_path)
    for seed in range(5):
        train, validation = nostall.Split(source, 0.6, seed, stratify=True)
        # 6, 3, 4.2 and 0.6 of them; the one that is missing goes to the largest remainder.
        assert np.bincount(train.labels).tolist() == [6, 0, 3, 0, 0, 4, 0, 0, 0, 1]
        assert len(train) + len(validation) == N


def test_filters(image_folder: Path) -> None:
    source = nostall.ImageFolder(image_folder, index=False)
    by_number = nostall.Filter(source, labels=[2, 0])
    by_name = nostall.Filter(source, labels=["class0", "class2"])
    by_mask = nostall.Filter(source, mask=source.labels != 1)
    assert by_number.fingerprint == by_name.fingerprint == by_mask.fingerprint
    assert set(by_number.labels.tolist()) == {0, 2}
    assert by_number.classes == source.classes
    floats = nostall.FileList(sorted(image_folder.rglob("*.jpg"))[:3], [0.5, 1.5, 2.5])
    assert nostall.Filter(floats, labels=[1.5]).labels.tolist() == [1.5]
    for labels in ({0, 2}, [[0], [2]], np.array([0.0, 2.0]), [np.int8(0), 2]):
        assert set(nostall.Filter(source, labels=labels).labels.tolist()) == {0, 2}  # type: ignore[arg-type]
    assert set(nostall.Filter(source, labels="class1").labels.tolist()) == {1}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_filters_find_labels_that_are_no_sums_of_powers_of_two(
    image_folder: Path, kind: Any
) -> None:
    labels = np.array([0.1, 0.5, 0.1, 0.3], kind)
    data = nostall.FileList(sorted(image_folder.rglob("*.jpg"))[:4], labels)
    assert nostall.Filter(data, labels=[0.1, 0.5]).labels.tolist() == labels[:3].tolist()


def test_concat_of_classes(tmp_path: Path) -> None:
    def make(name: str, *classes: str) -> nostall.ImageFolder:
        for label in classes:
            (tmp_path / name / label).mkdir(parents=True)
            (tmp_path / name / label / "0.png").write_bytes(b"x")
        return nostall.ImageFolder(tmp_path / name, index=False)

    one, same, other = (
        make("a", "cat", "dog"),
        make("b", "cat", "dog"),
        make("c", "ant", "dog", "x"),
    )
    assert nostall.Concat([one, same]).labels.tolist() == [0, 1, 0, 1]
    assert nostall.Concat([one, same]).classes == ["cat", "dog"]
    with pytest.raises(UsageError, match="label 0 is 'cat' in the first and 'ant' in source 1"):
        nostall.Concat([one, other])
    bare = nostall.FileList([tmp_path / "b" / "cat" / "0.png"], [0])
    with pytest.raises(
        UsageError, match=r"source 1 has no classes, the other has; where they do, set"
    ):
        nostall.Concat([one, bare])
    bare.classes = one.classes  # type: ignore[attr-defined]
    named = nostall.Concat([one, bare])
    assert named.labels.tolist() == [0, 1, 0]
    assert pickle.loads(pickle.dumps(named)).classes == ["cat", "dog"]
    apart = nostall.Concat([other, nostall.Subset(one, [1])], offset_labels=True)
    assert apart.labels.tolist() == [0, 1, 2, 4]
    assert apart.classes == ["ant", "dog", "x", "cat", "dog"]
    twice = nostall.Concat([apart, one], offset_labels=True)
    assert twice.labels.tolist() == [0, 1, 2, 4, 5, 6]
    copy = pickle.loads(pickle.dumps(twice))
    assert isinstance(copy, View)
    assert (copy.labels.tolist(), copy.classes) == (twice.labels.tolist(), twice.classes)


def test_labels_alone_of_sources_that_have_their_own(tmp_path: Path) -> None:
    pairs = {"image": [b"a", b"bb", b"ccc"], "label": [0, 1, 2]}
    pq.write_table(pa.table(pairs), tmp_path / "a.parquet")
    parts = [nostall.Parquet(tmp_path / "a.parquet") for _ in range(2)]
    both = nostall.Concat(parts, offset_labels=True)
    options: dict[str, Any] = {"shuffle": False, "tiers": [], "output": "numpy", "batch": "dict"}
    with nostall.DataLoader(both, 6, fields=["label"], **options) as loader:
        (batch,) = loader
    assert {name: values.tolist() for name, values in batch.items()} == {
        "label": [0, 1, 2, 3, 4, 5]
    }


# ---------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    source = folder(tmp_path, noise(N))
    floats = nostall.FileList(["000"], [0.5], root=tmp_path)
    pixels = folder(tmp_path, noise(N))
    pixels.pixels = nostall.Pixels(2, 3)
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "0.jpg").touch()
    classes = nostall.ImageFolder(tmp_path / "classes", index=False)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: nostall.Subset(source, []), "empty"),
        (lambda: nostall.Subset(source, [0, 23]), "sample 23, .* has samples 0 to 22"),
        (lambda: nostall.Subset(source, [-1]), "sample -1"),
        (lambda: nostall.Subset(source, [0.5]), "integers, not float64"),
        (lambda: nostall.Subset(source, [True] * N), "pass a mask to Filter"),
        (lambda: nostall.Subset([1, 2], [0]), "not list: .*Cached"),  # type: ignore[arg-type]
        (lambda: nostall.Split(source, 0.0), "between 0 and 1, both excluded: 0.0"),
        (lambda: nostall.Split(source, 1), "excluded: 1"),
        (lambda: nostall.Split(source, float("nan")), "nan"),
        (lambda: nostall.Split(source, 0.001), "leaves a part empty"),
        (lambda: nostall.Split(source, 0.5, seed=-1), "seed must be"),
        (lambda: nostall.Split(source, "0.5"), "excluded: '0.5'"),  # type: ignore[arg-type]
        (lambda: nostall.Split(source, 0.5, seed=True), "seed must be"),
        (
            lambda: nostall.Split(source, 0.5, stratify="no"),  # type: ignore[arg-type]
            "stratify must be True or False, not 'no'",
        ),
        (
            lambda: nostall.Concat([source, source], offset_labels="no"),  # type: ignore[arg-type]
            "offset_labels must be True or False, not 'no'",
        ),
        (lambda: nostall.Filter(source), "either labels= or mask="),
        (
            lambda: nostall.Filter(source, mask=[True] * 22),
            r"23 samples, not bool of shape \(22,\)",
        ),
        (lambda: nostall.Filter(source, mask=[1] * N), "not int64"),
        (lambda: nostall.Filter(source, labels=[77]), r"labels=\[77\] leaves no sample"),
        (lambda: nostall.Filter(source, labels=["cat"]), "no class 'cat'"),
        (lambda: nostall.Filter(source, labels=77), "leaves no sample"),  # type: ignore[arg-type]
        (lambda: nostall.Filter(source, labels=[0, 2**70]), "and none is 1180591620717411303424"),
        (lambda: nostall.Filter(source, labels=(i for i in [0])), "none is <generator"),  # type: ignore[arg-type]
        (lambda: nostall.Filter(classes, labels="ab"), "no class 'ab'"),
        (lambda: nostall.Filter(source, labels=[0.5]), "type int64, and none is 0.5"),
        (lambda: nostall.Filter(source, labels=[None]), "none is None"),  # type: ignore[list-item]
        (lambda: nostall.Filter(classes, labels=[0, 99]), "has 2 classes, and none is 99"),
        (lambda: nostall.Concat([]), "at least one"),
        (
            lambda: nostall.Concat([source, floats]),
            "type int64, source 1 has labels of type float64",
        ),
        (lambda: nostall.Concat([source, pixels]), r"pixels None, source 1 has pixels Pixels\("),
        (lambda: nostall.Concat([floats, floats], offset_labels=True), "floating-point"),
    ]
    for make, why in refused:
        with pytest.raises(UsageError, match=why):
            make()
