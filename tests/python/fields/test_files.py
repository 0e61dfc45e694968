"""A source of several fields, end to end: files side by side and columns, with and without tiers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from samples import wav

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import CorruptionError, IoError, UsageError

SAMPLES = 11
SCHEMA = {"mask": f.Mask(dtype="uint8"), "depth": f.Array(dtype="float32", shape=(None, 2))}
BOXES = f.Boxes(fill=np.zeros((0, 4)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("several")
    rng = np.random.default_rng(0)
    for name in ("images", "masks", "texts", "sounds", "depths"):
        (root / name / "part").mkdir(parents=True)
    for i in range(SAMPLES):
        stem = f"part/{i:02}" if i % 2 else f"{i:02}"
        size = (20 + i, 30)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(
            root / "images" / f"{stem}.png"
        )
        Image.fromarray(rng.integers(0, 21, size, dtype=np.uint8)).save(
            root / "masks" / f"{stem}.png", optimize=True
        )
        (root / "texts" / f"{stem}.txt").write_text(f"sample {i} \u00e9")
        (root / "sounds" / f"{stem}.wav").write_bytes(wav(5 + i))
        np.save(root / "depths" / f"{stem}.npy", rng.random((i, 2), dtype=np.float32))
    return root


def columns() -> dict[str, Any]:
    boxes = [np.full((i % 3, 4), i, np.float32) for i in range(SAMPLES)]
    return {
        "label": np.arange(SAMPLES) * 10,
        "boxes": [None if i == 4 else b for i, b in enumerate(boxes)],
        "target": np.arange(SAMPLES * 6, dtype=np.float64).reshape(SAMPLES, 2, 3),
        "caption": [f"caption {i}" for i in range(SAMPLES)],
        "about": [{"id": i} for i in range(SAMPLES)],
    }


def open_all(root: Path) -> nostall.Files:
    names = {
        "image": "images",
        "mask": "masks",
        "text": "texts",
        "sound": "sounds",
        "depth": "depths",
    }
    return nostall.Files(
        names, columns(), schema={**SCHEMA, "boxes": BOXES, "about": f.Json()}, root=root
    )


def numbers(source: nostall.Files) -> list[int]:
    return [int(name.rsplit("/", maxsplit=1)[-1]) for name in source.names]


@pytest.mark.parametrize("tiers", [[], ["ram:4MiB"]])
def test_every_field_of_every_sample_is_what_is_stored(root: Path, tiers: list[str]) -> None:
    source = open_all(root)
    assert source.names == sorted(source.names) and len(source) == SAMPLES
    number = numbers(source)
    given = columns()
    with nostall.DataLoader(source, 4, epochs=2, seed=3, tiers=tiers, output="numpy") as loader:
        for epoch in loader.epochs():
            order, _ = loader.plan.rank_epoch(epoch.index, 0)
            seen = 0
            for batch in epoch:
                samples = order[seen : seen + 4].tolist()
                assert list(batch) == list(source.schema)
                for place, sample in enumerate(samples):
                    i, stem = number[sample], source.names[sample]
                    image = (root / "images" / f"{stem}.png").read_bytes()
                    assert batch["image"].sample(place).tobytes() == image
                    mask = np.asarray(Image.open(root / "masks" / f"{stem}.png"))
                    np.testing.assert_array_equal(batch["mask"].sample(place), mask)
                    assert batch["text"][place] == f"sample {i} \u00e9"
                    wanted = np.arange(5 + i, dtype=np.float32) / 32768
                    np.testing.assert_array_equal(batch["sound"].sample(place), wanted)
                    depth = np.load(root / "depths" / f"{stem}.npy")
                    np.testing.assert_array_equal(batch["depth"].sample(place), depth)
                    assert batch["label"][place] == sample * 10
                    np.testing.assert_array_equal(batch["target"][place], given["target"][sample])
                    assert batch["caption"][place] == f"caption {sample}"
                    assert batch["about"][place] == {"id": sample}
                    boxes = given["boxes"][sample]
                    count = 0 if boxes is None else len(boxes)
                    assert batch["boxes"].sample(place).shape == (count, 4)
                    assert (batch["boxes"].sample(place) == sample).all()
                    seen += 1
            assert seen == SAMPLES


def test_images_and_sizes_that_differ_are_padded(root: Path) -> None:
    source = nostall.Files(
        {"image": "images", "mask": "masks"},
        schema={"mask": f.Mask(padded=True)},
        root=root,
    )
    with nostall.DataLoader(
        source, SAMPLES, epochs=1, shuffle=False, tiers=[], batch="tuple", output="torch"
    ) as loader:
        ((images, (masks, sizes)),) = list(loader)
    torch = pytest.importorskip("torch")
    assert masks.shape == (SAMPLES, 20 + SAMPLES - 1, 30)
    assert sizes.dtype == torch.int64
    assert sizes[:, 0].tolist() == [20 + i for i in numbers(source)]
    assert len(images.offsets) == SAMPLES + 1


def test_transforms_apply_to_every_image_with_one_draw(root: Path) -> None:
    source = nostall.Files({"left": "images", "right": "images"}, root=root)
    steps = [t.RandomResizedCrop(16), t.RandomHorizontalFlip()]
    with nostall.DataLoader(
        source, 4, epochs=1, transforms=steps, tiers=[], output="numpy"
    ) as loader:
        for batch in loader:
            assert batch["left"].shape[1:] == (16, 16, 3)
            np.testing.assert_array_equal(batch["left"], batch["right"])
    with nostall.DataLoader(
        source, 4, epochs=1, transforms={"left": steps}, tiers=[], output="numpy"
    ) as loader:
        assert isinstance(next(iter(loader))["right"], f.Ragged)


def detection(root: Path) -> nostall.Files:
    boxes = [np.array([[5, 5, 15, 15], [0, 0, 3, 3], [7, 7, 7, 9]], np.float32)] * SAMPLES
    return nostall.Files(
        {"image": "images", "mask": "masks"},
        {"boxes": boxes, "classes": [np.array([1, 2, 3])] * SAMPLES},
        schema={
            "mask": f.Mask(dtype="int64"),
            "boxes": f.Boxes(),
            "classes": f.Array(dtype="int64", rows_of="boxes"),
        },
        root=root,
    )


def test_masks_and_boxes_move_with_their_image(root: Path) -> None:
    source = detection(root)
    steps = [
        t.RandomHorizontalFlip(1.0),
        t.CenterCrop(16),
        t.SanitizeBoundingBoxes(min_size=1),
    ]
    with nostall.DataLoader(
        source, 4, epochs=1, shuffle=False, transforms=steps, tiers=[], output="numpy"
    ) as loader:
        batches = list(loader)
    sample = 0
    for batch in batches:
        for place in range(len(batch["mask"])):
            stem = source.names[sample]
            mask = np.asarray(Image.open(root / "masks" / f"{stem}.png"))[:, ::-1]
            image = np.asarray(Image.open(root / "images" / f"{stem}.png"))[:, ::-1]
            top, left = round((mask.shape[0] - 16) / 2), round((mask.shape[1] - 16) / 2)
            np.testing.assert_array_equal(
                batch["mask"][place], mask[top : top + 16, left : left + 16]
            )
            np.testing.assert_array_equal(
                batch["image"][place], image[top : top + 16, left : left + 16]
            )
            # The second is cut off, the third has no width.
            (box,) = batch["boxes"].sample(place)
            assert box.tolist() == [
                max(0, 30 - 15 - left),
                max(0, 5 - top),
                min(16, 30 - 5 - left),
                min(16, 15 - top),
            ]
            assert batch["classes"].sample(place).tolist() == [1]
            sample += 1
    assert sample == SAMPLES


def test_which_fields_are_transformed_together_is_checked(root: Path) -> None:
    source, steps = detection(root), [t.CenterCrop(16)]
    together: Any = {("image", "mask", "boxes"): steps}
    with nostall.DataLoader(source, 4, epochs=1, transforms=together, tiers=[]) as loader:
        assert tuple(next(iter(loader))["mask"].shape) == (4, 16, 16)
    wrongly: list[tuple[Any, str]] = [
        ({"image": steps}, "field mask: transforms do not name it"),
        ({"mask": steps}, "there is none among mask"),
        ({"classes": steps}, "which is no image, mask, boxes or keypoints"),
        ({("image", "mask", "boxes"): steps, "image": steps}, "'image' twice"),
    ]
    for transforms, words in wrongly:
        with pytest.raises(UsageError, match=words):
            nostall.DataLoader(source, 4, transforms=transforms)
    wrong = nostall.Files({}, {"a": [[1], [2]]}, schema={"a": f.Array(dtype="int64", rows_of="a")})
    with pytest.raises(UsageError, match="rows_of='a' is no field of Boxes"):
        nostall.DataLoader(wrong, 1)
    kind = f.Array(dtype="int64", rows_of="bboxes")
    boxes = [np.zeros((1, 4))] * 2
    wrong = nostall.Files(
        {}, {"a": [[1], [2]], "boxes": boxes}, schema={"a": kind, "boxes": f.Boxes()}
    )
    for chosen in (None, ["a"]):
        with pytest.raises(UsageError, match="field a: rows_of='bboxes' is no field of Boxes"):
            nostall.DataLoader(wrong, 1, fields=chosen)


def test_boxes_of_negative_size_are_refused_unless_transforms_take_them_out(root: Path) -> None:
    source = nostall.Files(
        {"image": "images"},
        {"boxes": [np.array([[5, 5, 2, 9]], np.float32)] * SAMPLES},
        schema={"boxes": f.Boxes()},
        root=root,
    )
    cut: list[t.Transform] = [t.Resize((8, 8))]
    with nostall.DataLoader(
        source, SAMPLES, epochs=1, transforms=[*cut, t.SanitizeBoundingBoxes(0)], tiers=[]
    ) as loader:
        assert len(next(iter(loader))["boxes"].values) == 0
    for more in ({"fields": ["boxes"]}, {"transforms": cut}):
        with (
            nostall.DataLoader(source, SAMPLES, epochs=1, tiers=[], **more) as loader,
            pytest.raises(CorruptionError, match=r"\(sample \d+\).*boxes: box 0 has a size of -3"),
        ):
            list(loader)


def test_rows_must_be_as_many_as_boxes() -> None:
    source = nostall.Files(
        {},
        {"boxes": [np.zeros((2, 4)), np.zeros((1, 4))], "classes": [[1, 2], [3, 4]]},
        schema={"boxes": f.Boxes(), "classes": f.Array(dtype="int64", rows_of="boxes")},
    )
    with (
        nostall.DataLoader(source, 2, epochs=1, tiers=[]) as loader,
        pytest.raises(CorruptionError, match=r"sample 1.*field classes: 2 rows for 1 boxes"),
    ):
        list(loader)


def test_columns_of_a_frame(tmp_path: Path) -> None:
    class Frame(dict[str, Any]):
        """A data frame refuses to be true or false."""

        def __bool__(self) -> bool:
            raise ValueError("The truth value of a DataFrame is ambiguous")

    (tmp_path / "a.txt").write_text("a")
    source = nostall.Files(Frame(x=[tmp_path / "a.txt"]), Frame(label=[3]))
    assert source.labels.tolist() == [3]


def test_fields_that_are_not_chosen_are_not_read(root: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    others = [tmp_path / f"{i}.json" for i in range(4)]
    for i in range(4):
        paths[i].write_text(str(i))
        others[i].write_text("[]")
    source = nostall.Files({"text": paths, "other": others}, {"number": [7, 8, 9, 10]})
    chosen = source.select(["number", "text"])
    again = pickle.loads(pickle.dumps(chosen))
    assert again.fingerprint == chosen.fingerprint != source.fingerprint
    for path in others:
        path.unlink()
    assert chosen.total_bytes == 4 and list(chosen.schema) == ["text", "number"]
    with nostall.DataLoader(
        source, 4, epochs=1, shuffle=False, tiers=[], fields=["number", "text"], output="numpy"
    ) as loader:
        (batch,) = list(loader)
    assert list(batch) == ["number", "text"]
    assert batch["number"].tolist() == [7, 8, 9, 10] and batch["text"] == list("0123")
    with nostall.DataLoader(
        source, 4, epochs=1, shuffle=False, fields=["number"], output="numpy"
    ) as loader:
        assert [b["number"].tolist() for b in loader] == [[7, 8, 9, 10]]


def test_a_state_of_other_fields_is_refused_with_a_hint() -> None:
    source = nostall.Files({}, {"a": [1, 2, 3], "b": [4, 5, 6]})
    with nostall.DataLoader(source, 1, epochs=1, tiers=[]) as loader:
        state = loader.state_dict()
    with (
        nostall.DataLoader(source, 1, epochs=1, tiers=[], fields=["a"]) as other,
        pytest.raises(UsageError, match=r"with dataset=\d+, but .* with other options or fields="),
    ):
        other.load_state_dict(state)


def test_a_bad_field_fails_with_the_sample_or_is_replaced_with_its_record(tmp_path: Path) -> None:
    texts = [tmp_path / f"{i}.txt" for i in range(6)]
    values = [tmp_path / f"{i}.json" for i in range(6)]
    for i in range(6):
        texts[i].write_text(str(i))
        values[i].write_text(json.dumps(i))
    values[3].write_text("{")  # of the same size
    source = nostall.Files({"text": texts, "value": values}, {"number": np.arange(6)})
    arguments: dict[str, Any] = {"epochs": 1, "tiers": [], "output": "numpy"}
    with (
        nostall.DataLoader(source, 6, **arguments) as loader,
        pytest.raises(CorruptionError, match=r"3\.txt.*field value: it is not JSON at byte 1"),
    ):
        list(loader)
    with nostall.DataLoader(source, 6, on_error="substitute", **arguments) as loader:
        (batch,) = list(loader)
        (epoch,) = loader.stats().epochs
    assert batch["text"] == [str(n) for n in batch["value"]]
    assert batch["number"].tolist() == batch["value"]
    assert len(batch["value"]) == 6 and {0, 1, 2, 4, 5} == set(batch["value"])
    assert 3 not in batch["value"] and list(epoch.substituted) == [3]


def test_files_that_vanish_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.txt" for i in range(2)]
    others = [tmp_path / f"{i}.json" for i in range(2)]
    for path in (*paths, *others):
        path.write_text("1")
    source = nostall.Files({"text": paths, "other": others})
    others[1].unlink()
    with (
        nostall.DataLoader(source, 2, epochs=1, tiers=[]) as loader,
        pytest.raises((IoError, CorruptionError), match=r"1\.json: No such file"),
    ):
        list(loader)


def test_folders_that_cannot_be_listed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "closed").mkdir(parents=True)
    (tmp_path / "a" / "1.txt").write_text("1")
    listed = os.scandir

    def scandir(path: Any) -> Any:  # the superuser's tests list folders that nobody can read
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(IoError, match="a/closed: Permission denied"):
        nostall.Files({"text": "a"}, root=tmp_path)


@pytest.mark.parametrize("slash", ["", "/"])
def test_links_are_followed_unless_they_have_no_end(tmp_path: Path, slash: str) -> None:
    for name in ("a/b", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.txt").write_text("1")
    (tmp_path / "a" / "b" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "a" / "again").symlink_to("b")
    source = nostall.Files({"text": f"a{slash}"}, root=tmp_path)
    assert source.names == ["again/1", "again/link/1", "b/1", "b/link/1"]
    for target in (tmp_path / "a", tmp_path / "a" / "b", tmp_path):
        loop = tmp_path / "a" / "b" / "loop"
        loop.symlink_to(target)
        with pytest.raises(UsageError, match=r"loop.* is a link to .*it has no end"):
            nostall.Files({"text": f"a{slash}"}, root=tmp_path)
        loop.unlink()


def test_missing_files_are_refused_or_filled(root: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("one")
    with pytest.raises(UsageError, match=r"sample 1 has no text, which holds for 1 sample in all"):
        nostall.Files({"text": [one, None]})
    source = nostall.Files({"text": [one, None]}, schema={"text": f.Text(fill="none")})
    with nostall.DataLoader(source, 2, epochs=1, shuffle=False, tiers=[]) as loader:
        assert [batch["text"] for batch in loader] == [["one", "none"]]
    with pytest.raises(UsageError, match=r"sample 0 has no mask, which holds for 11 samples"):
        nostall.Files(
            {"image": "images", "mask": "masks/part"}, schema={"mask": f.Mask()}, root=root
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"a": []},), "fields need one value for each sample"),
        (({}, {"a": [1, 2], "b": [1]}), "a has 2, b has 1"),
        (({}, {"a": [1, "x"]}), "column a is neither of numbers"),
        (({}, {"a": [1, None]}), "sample 1 has no value"),
        (({}, {"a": [[1], [[2]]]}), "column a is neither of numbers"),
        (({"a": ["x.npy"]},), r"give schema=\{'a': nostall.fields.Array"),
        (({"a": ["x.MP3"]},), r"give schema=\{'a': nostall.fields.SoundFile\(\)\}"),
        (({"a": ["x.xyz"]},), r"give schema=\{'a': nostall.fields.Bytes\(\)\}"),
        (
            ({"mask": ["x.PNG"]},),
            r"labels or of pictures: give schema=\{'mask': nostall.fields.Mask",
        ),
        (({"a": ["x.txt"]}, {"a": [1]}), "among the files and among the columns"),
        (({"a": ["x.txt"], "b": "/tmp"},), "either lists of paths or folders"),
        (({"a": "/no/such/folder"},), "is not a folder"),
    ],
)
def test_what_makes_no_data_set_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nostall.Files(*arguments)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        *((name, True) for name in ("masks", "gtMask", "seg_map", "label", "labelIds", "gt.seg")),
        *((name, False) for name in ("unmasked", "masked_image", "target", "segue", "labeller")),
    ],
)
def test_fields_that_are_named_as_masks_need_their_kind(
    tmp_path: Path, name: str, refused: bool
) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    if refused:
        with pytest.raises(UsageError, match=f"field {name} has .png files, of labels or of pict"):
            nostall.Files({name: ["a.png"]}, root=tmp_path)
        nostall.Files({name: ["a.png"]}, root=tmp_path, schema={name: f.Image()})
    else:
        assert nostall.Files({name: ["a.png"]}, root=tmp_path).schema[name] == f.Image()


def test_rows_that_do_not_follow_their_boxes_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    classes = f.Array(dtype="int64", shape=(None,))
    columns = {"boxes": [[[1, 1, 9, 9], [0, 0, 1, 0]]], "classes": [[3, 4]], "e": np.zeros((1, 2))}
    sanitized = [t.CenterCrop(20), t.SanitizeBoundingBoxes(), t.ToTensor()]
    told = "boxes out, and classes keeps all rows"
    for rows_of, steps, warned in (
        (None, sanitized, True),
        ("boxes", sanitized, False),
        (None, [t.CenterCrop(20), t.ToTensor()], False),
    ):
        caplog.clear()
        schema = {"boxes": f.Boxes(), "classes": dataclasses.replace(classes, rows_of=rows_of)}
        source = nostall.Files({"image": [tmp_path / "a.png"]}, columns, schema=schema)
        with nostall.DataLoader(source, 1, epochs=1, transforms=steps, output="numpy") as loader:
            (batch,) = loader
        assert (told in caplog.text) == warned
        assert len(batch["classes"].values) == (1 if rows_of else 2)


@pytest.mark.parametrize("empty", [[], np.zeros(0, np.float32), np.zeros((0, 4))])
def test_a_sample_without_boxes_may_have_an_empty_list(empty: Any) -> None:
    schema = {"boxes": f.Boxes(), "words": f.Array(dtype="int64", shape=(None, 2, None))}
    values = {"boxes": [[[1, 2, 3, 4]], empty], "words": [[[[7], [8]]], []]}
    source = nostall.Files({}, values, schema=schema)
    with nostall.DataLoader(source, 2, epochs=1, shuffle=False, output="numpy") as loader:
        (batch,) = loader
    assert batch["boxes"].values.tolist() == [[1, 2, 3, 4]]
    assert batch["boxes"].offsets.tolist() == [0, 1, 1]
    assert batch["words"].sample(0).tolist() == [[[7], [8]]]
    assert batch["words"].sample(1).shape == (0, 2, 0)


def test_kinds_of_columns(tmp_path: Path) -> None:
    source = nostall.Files(
        {},
        {
            "whole": [1, 2],
            "real": [0.5, 1],
            "flag": np.array([True, False]),
            "points": [[[1, 2]], [[3, 4], [5, 6]]],
            "planes": [np.zeros((1, 2), np.int8), np.zeros((2, 1), np.int8)],
            "raw": [b"a", b"bc"],
        },
    )
    assert source.schema == nostall.Schema(
        whole=f.Scalar(dtype="int64"),
        real=f.Scalar(dtype="float64"),
        flag=f.Scalar(dtype="bool"),
        points=f.Array(dtype="int64", shape=(None, 2), codec="raw"),
        planes=f.Array(dtype="int8", shape=(None, None)),
        raw=f.Bytes(),
    )
    with pytest.raises(UsageError, match=r"column a: .*not all of type uint8"):
        nostall.Files({}, {"a": np.array([300])}, schema={"a": f.Scalar(dtype="uint8")})
    with pytest.raises(UsageError, match=r"column a: sample 0: Scalar: 1\.5 is no int64"):
        nostall.Files({}, {"a": [1.5]}, schema={"a": f.Scalar()})
    with pytest.raises(
        UsageError, match=r"column a: some of its numbers are too large for float16"
    ):
        nostall.Files({}, {"a": np.array([1e6])}, schema={"a": f.Scalar(dtype="float16")})
    infinite = {"a": np.array([np.inf, 1.0])}
    assert len(nostall.Files({}, infinite, schema={"a": f.Scalar(dtype="float16")})) == 2
