"""Tables, COCO and Pascal VOC as sources: the values of the files, in their order."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import CorruptionError, IoError, UsageError

N = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(N):
        Image.new("RGB", (8 + i, 6), (i, 2 * i, 3 * i)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def samples(source: nostall.Source, **options: Any) -> dict[str, list[Any]]:
    """The values of every field, of all samples in the order of the source."""
    found: dict[str, list[Any]] = {name: [] for name in source.schema}
    with nostall.DataLoader(
        source, 2, shuffle=False, output="numpy", tiers=["ram:1MiB"], **options
    ) as loader:
        for batch in loader:
            for name, values in batch.items():
                if isinstance(values, f.Ragged):
                    values = [values.sample(i) for i in range(len(values.offsets) - 1)]
                found[name] += list(values)
    return found


def as_lists(values: list[Any]) -> list[Any]:
    return [np.asarray(value).tolist() for value in values]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_a_table_gives_a_sample_a_row(root: Path, ending: str) -> None:
    rows = [
        {"path": f"images/{i}.png", "price": i / 4, "rank": i - 2, "title": f'a "{i}", é'}
        for i in range(N)
    ]
    table = root / f"train.{ending}"
    if ending == "jsonl":
        table.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        mark = "," if ending == "csv" else "\t"
        quoted = ['"' + str(r["title"]).replace('"', '""') + '"' for r in rows]
        lines = [
            mark.join([str(r["path"]), str(r["price"]), str(r["rank"]), q])
            for r, q in zip(rows, quoted, strict=True)
        ]
        table.write_text("\ufeff" + "\r\n".join([mark.join(rows[0]), *lines]) + "\r\n")
    source = nostall.Manifest(table, {"image": "path"})
    found = samples(source)
    assert [bytes(image) for image in found["image"]] == [
        (root / "images" / f"{i}.png").read_bytes() for i in range(N)
    ]
    assert found["price"] == [r["price"] for r in rows]
    assert found["rank"] == [r["rank"] for r in rows]
    assert np.asarray(found["rank"]).dtype == np.int64
    assert found["title"] == [r["title"] for r in rows]
    copy = pickle.loads(pickle.dumps(source.select(["rank"])))
    assert samples(copy) == {"rank": found["rank"]}


def test_a_cell_may_be_as_long_as_the_table(root: Path) -> None:
    limit = csv.field_size_limit()
    (root / "a.csv").write_text(f"text,number\n{'x' * 140_000},1\n")
    assert samples(nostall.Manifest(root / "a.csv"))["text"] == ["x" * 140_000]
    assert csv.field_size_limit() == limit


def test_the_index_of_a_frame_is_no_field(root: Path) -> None:
    (root / "a.csv").write_text(",rank\n0,7\n1,8\n")
    assert samples(nostall.Manifest(root / "a.csv")) == {"rank": [7, 8]}


def test_cells_are_what_the_schema_says(root: Path) -> None:
    table = root / "a.csv"
    table.write_text(
        'image,boxes,code,about,mask\nimages/0.png,"[[1,2,3,4],[0,0,1,1]]",007,"{""a"": 1}",\n'
        "images/1.png,[],008,null,images/1.png\n"
    )
    source = nostall.Manifest(
        table,
        ["image", "mask"],
        {"box": "boxes", "code": "code", "about": "about"},
        schema={
            "box": f.Boxes(),
            "code": f.Text(),
            "about": f.Json(fill=[]),
            "mask": f.Bytes(fill=b""),
        },
    )
    found = samples(source)
    assert as_lists(found["box"]) == [[[1, 2, 3, 4], [0, 0, 1, 1]], []]
    assert found["code"] == ["007", "008"]
    assert found["about"][0] == {"a": 1}
    assert found["mask"][0].size == 0
    assert found["mask"][1].size > 0


def column(root: Path, name: str, text: str, kind: f.Kind | None = None) -> list[Any]:
    """The values of the column x of a table of two rows."""
    (root / name).write_text(text)
    schema = None if kind is None else {"x": kind}
    source = nostall.Manifest(root / name, columns=["x"], schema=schema)
    return samples(source)["x"]


@pytest.mark.parametrize("number", ["7", "-.5e1", str(2**63 + 1)])
def test_an_empty_cell_among_numbers_is_a_missing_value(root: Path, number: str) -> None:
    with pytest.raises(UsageError, match=r"column x: sample 1 has no value: give its kind a fill="):
        column(root, "a.csv", f"x,y\n{number},\n,\n")


BIG = 2**63 + 1


@pytest.mark.parametrize(
    ("cells", "kind", "values", "dtype"),
    [
        (["7", str(BIG)], None, [7, BIG], "uint64"),
        (["7", str(BIG)], f.Scalar(dtype="uint64"), [7, BIG], "uint64"),
        (["-7", str(BIG)], None, ["-7", str(BIG)], None),
        (["7", str(2**64)], None, ["7", str(2**64)], None),
        (["7" * 5000, "1"], None, ["7" * 5000, "1"], None),
        (["7", "-8"], None, [7, -8], "int64"),
        (["007", " +8"], None, [7, 8], "int64"),
        (["7", "-.5e1"], None, [7, -5], "float64"),
        (["7", "1_0"], None, ["7", "1_0"], None),
        (["7", "\u0661"], None, ["7", "\u0661"], None),
        (["7", "nan"], None, ["7", "nan"], None),
        (["7", "inf"], f.Scalar(dtype="float32"), [7, np.inf], "float32"),
        (["007", ""], f.Scalar(fill=-1), [7, -1], "int64"),
        (["", str(BIG)], f.Scalar(dtype="uint64", fill=0), [0, BIG], "uint64"),
        (["true", "false"], f.Scalar(dtype="bool"), [True, False], "bool"),
        (["007", "8"], f.Text(), ["007", "8"], None),
        (["7", ""], f.Text(), ["7", ""], None),
        (["a", ""], None, ["a", ""], None),
        (["", ""], None, ["", ""], None),
    ],
)
def test_cells_keep_their_values(
    root: Path, cells: list[str], kind: f.Kind | None, values: list[Any], dtype: str | None
) -> None:
    found = column(root, "a.tsv", "x\ty\n" + "".join(f"{c}\t\n" for c in cells), kind)
    assert found == values
    assert dtype is None or all(value.dtype == dtype for value in found)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["007", "008"], None),
        (["1", ""], None),
        ([7, BIG], "uint64"),
        ([7, -8], "int64"),
        ([[7, BIG], [1, 2]], "uint64"),
        ([[7, 2.5], [1, 2]], "float64"),
        ([2**53, 0.5], "float64"),
        ([True, 3], "int64"),
    ],
)
def test_json_lines_keep_their_types(root: Path, values: list[Any], dtype: str | None) -> None:
    found = column(root, "a.jsonl", "".join(json.dumps({"x": v}) + "\n" for v in values))
    assert as_lists(found) == values
    assert dtype is None or all(value.dtype == dtype for value in found)


@pytest.mark.parametrize(
    ("name", "cells", "kind", "message"),
    [
        ("a.csv", ["7", "1_0"], f.Scalar(), "line 3, column x"),
        ("a.csv", ["7", "1.5"], f.Scalar(), r"column x: sample 1: .* 1\.5 is no int64"),
        ("a.csv", ["7", str(2**64)], f.Scalar(), "column x: sample 1: .* is no int64"),
        ("a.csv", ["[7]", "[1.5]"], f.Array(dtype="int64"), "column x: sample 1: .* cannot hold"),
        ("a.csv", ["[7]", "[1e99]"], f.Array(), "column x: sample 1: .* too large"),
        ("a.jsonl", ['"7"', '"8"'], f.Scalar(dtype="float64"), "column x: sample 0: .* '7' is no"),
        ("a.jsonl", ['["7"]', '["8"]'], f.Array(), "column x: sample 0: .* texts are no numbers"),
        ("a.jsonl", ["-7", str(BIG)], None, "column x is neither of numbers"),
        ("a.jsonl", [f"[-7, {BIG}]", "[1, 2]"], None, "column x is neither of numbers"),
        ("a.jsonl", ['"a"', '"\\ud800"'], None, "column x: sample 1: Text: .*surrogates"),
    ],
)
def test_values_that_a_type_cannot_hold_are_refused(
    root: Path, name: str, cells: list[str], kind: f.Kind | None, message: str
) -> None:
    lines = [f'{{"x": {cell}}}' if name == "a.jsonl" else cell for cell in cells]
    head = [] if name == "a.jsonl" else ["x"]
    with pytest.raises((UsageError, CorruptionError), match=message):
        column(root, name, "\n".join([*head, *lines]) + "\n", kind)


def test_empty_boxes_of_json_lines_have_their_shape(root: Path) -> None:
    found = column(root, "a.jsonl", '{"x": []}\n{"x": [[1, 2, 3, 4]]}\n', f.Boxes())
    assert as_lists(found) == [[], [[1, 2, 3, 4]]]
    with pytest.raises(
        UsageError, match=r"sample 0: Array: a value has the shape \(0,\), not \(3,\)"
    ):
        column(root, "b.jsonl", '{"x": []}\n{"x": [1, 2, 3]}\n', f.Array(shape=(3,)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "image,x\nimages/0.png\n", "line 2: 1 cells for 2 columns"),
        ("a.csv", 'image\n"images/0.png', "line 2"),
        ("a.csv", "image,image\na,b\n", "names a column twice"),
        ("a.csv", "image\n", "no rows"),
        ("a.csv", "", "no rows"),
        ("a.csv", "picture\na\n", "no column 'image'; it has: picture"),
        ("a.txt", "image\na\n", r"ends neither with \.csv"),
        ("a.jsonl", '\n{"image": 3}\n', "line 2, column image: 3 is no path"),
        ("a.jsonl", '{"image": "images/0.png"}\nnonsense\n', "line 2"),
        ("a.jsonl", "[1]\n", "line 1: not an object"),
        ("a.jsonl", '{"image": "\\ud800.png"}\n', "line 1, column image: .* is no path"),
        ("a.jsonl", '{"image": ' + "[" * 100_000 + "\n", "line 1"),
        ("a.csv", "image\nimages/7.png\n", r"line 2: .*7\.png: No such file"),
        ("a.csv", 'image,x\nimages/0.png,"a\nb"\n\nimages,c\n', "line 5: .*images is not a file"),
        ("a.csv", "image\nimages/0.png\ns3://b/1.png\n", "line 3: s3://b/1.png is no file"),
        (
            "a.jsonl",
            '{"image": "images/0.png"}\n\n{"image": "images/0.png2"}',
            r"line 3: .*0\.png2:",
        ),
        ("a.csv", 'image,box\nimages/0.png,"[[1,2"\n', "line 2, column box"),
    ],
)
def test_bad_tables_are_named_with_the_place(
    root: Path, name: str, text: str, message: str
) -> None:
    (root / name).write_text(text)
    schema = {"box": f.Boxes()} if "box" in text else None
    with pytest.raises((UsageError, CorruptionError, IoError), match=message):
        nostall.Manifest(root / name, ["image"], schema=schema)


def test_a_table_that_is_not_text_is_refused(root: Path) -> None:
    (root / "a.csv").write_bytes(b"image\n\xff\xfe\n")
    with pytest.raises(CorruptionError, match="not UTF-8"):
        nostall.Manifest(root / "a.csv", ["image"])
    with pytest.raises(IoError, match=r"b\.csv"):
        nostall.Manifest(root / "b.csv", ["image"])
    with pytest.raises(UsageError, match="as a list or a mapping"):
        nostall.Manifest(root / "a.csv", "image")


def annotations(**more: Any) -> dict[str, Any]:
    """Of five images, numbered backwards; the third has no annotation."""
    found = []
    for i in range(N):
        for k in range(0 if i == 2 else 1 + i % 2):
            found.append(
                {
                    "id": len(found) + 7,
                    "image_id": 100 - i,
                    "category_id": 3 + k,
                    "bbox": [i, k, 2.5, 3],
                    "area": 7.5,
                    "iscrowd": k,
                    "segmentation": [[0, 0, 1, k]],
                }
            )
    return {
        "images": [{"id": 100 - i, "file_name": f"{i}.png"} for i in range(N)],
        "annotations": found,
        "categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "dog"}],
        **more,
    }


def coco(root: Path, data: Any, **options: Any) -> nostall.COCO:
    (root / "coco.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return nostall.COCO(root / "images", root / "coco.json", **options)


def test_coco_is_what_the_file_says_in_torchvisions_order(root: Path) -> None:
    source = coco(root, annotations(), segmentation=True)
    assert source.categories == {3: "cat", 4: "dog"}
    found = samples(source)
    assert found["image_id"] == [96, 97, 98, 99, 100]
    assert as_lists(found["labels"]) == [[3], [3, 4], [], [3, 4], [3]]
    assert as_lists(found["boxes"])[1] == [[3, 0, 2.5, 3], [3, 1, 2.5, 3]]
    assert found["boxes"][2].shape == (0, 4)
    assert as_lists(found["iscrowd"])[3] == [0, 1]
    assert found["segmentation"][3] == [[[0, 0, 1, 0]], [[0, 0, 1, 1]]]
    assert "segmentation" not in coco(root, annotations()).schema


def test_views_keep_categories_and_refuse_others(root: Path) -> None:
    source = coco(root, annotations())
    view = pickle.loads(pickle.dumps(nostall.Subset(source, [3, 1])))
    assert view.categories == source.categories == nostall.Concat([view, source]).categories
    other = coco(root, annotations(categories=[{"id": 3, "name": "cat"}, {"id": 4, "name": "cow"}]))
    with pytest.raises(UsageError, match=r"4 is 'dog' in the first and 'cow' in source 1"):
        nostall.Concat([source, other])


def test_a_copy_of_coco_in_the_users_home_reads_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = coco(root, annotations())
    monkeypatch.setenv("HOME", str(root))
    source = nostall.COCO("~/images", "~/coco.json")
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert copy.fingerprint == whole.fingerprint and copy.describe(0) == whole.describe(0)


def test_captions_and_keypoints(root: Path) -> None:
    data = annotations()
    for i, annotation in enumerate(data["annotations"]):
        annotation["caption"] = f"caption {i} é"
        annotation["keypoints"] = [i] * 6
    found = samples(coco(root, data))
    numbers = [[5], [3, 4], [], [1, 2], [0]]
    assert found["captions"] == [[f"caption {i} é" for i in row] for row in numbers]
    assert as_lists(found["keypoints"])[0] == [[[5, 5, 5], [5, 5, 5]]]
    assert found["keypoints"][2].shape == (0, 2, 3)


@pytest.mark.parametrize("key", ["keypoints", "caption", "area", "iscrowd", "bbox", "category_id"])
def test_what_not_all_annotations_have_is_left_out(
    root: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    data = annotations()
    for annotation in data["annotations"]:
        annotation["caption"], annotation["keypoints"] = "a", [1, 2, 2]
    whole = coco(root, data)
    assert not caplog.messages
    data["annotations"][1].pop(key)
    source = coco(root, data)
    told = f"coco.json: 1 of 6 annotations, the first of image 99, have no {key}: field "
    (message,) = caplog.messages
    assert told in message
    left_out = {message.split(told)[1].removesuffix(" is left out")}
    assert set(whole.schema) - set(source.schema) == left_out
    assert len(samples(source)["image_id"]) == N


def test_empty_keypoints_are_none(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = annotations()
    for annotation in data["annotations"]:
        annotation["keypoints"] = []
    source = coco(root, data)
    assert "keypoints" not in source.schema and not caplog.messages
    assert len(samples(source)["labels"]) == N


SANITIZED: list[t.Transform] = [t.CenterCrop(6), t.SanitizeBoundingBoxes(min_size=1)]


def test_what_is_said_of_boxes_goes_with_them(root: Path) -> None:
    data = annotations()
    for annotation in data["annotations"]:  # the first box of each image has no width
        annotation["bbox"] = [2, 1, 3 * annotation["iscrowd"], 3]
    found = samples(coco(root, data), transforms=SANITIZED)
    assert as_lists(found["labels"]) == [[], [4], [], [4], []]
    assert as_lists(found["ids"]) == [[], [11], [], [9], []]
    assert as_lists(found["iscrowd"]) == [[], [1], [], [1], []]
    assert [len(boxes) for boxes in found["boxes"]] == [0, 1, 0, 1, 0]
    alone = samples(coco(root, data).select(["labels"]))
    assert as_lists(alone["labels"]) == [[3], [3, 4], [], [3, 4], [3]]
    for annotation in data["annotations"]:
        del annotation["bbox"]
    assert as_lists(samples(coco(root, data))["labels"]) == as_lists(alone["labels"])


def test_labels_of_voc_go_with_their_boxes(tmp_path: Path) -> None:
    voc(tmp_path, {"a": OBJECT.format("person", 1) + OBJECT.format("cat", 6)})
    source = nostall.VOC(tmp_path)
    found = samples(source, transforms=SANITIZED)
    assert as_lists(found["labels"]) == [[source.classes.index("cat")]]
    assert [len(found[name][0]) for name in ("boxes", "difficult", "truncated")] == [1, 1, 1]


@pytest.mark.parametrize("field", ["captions", "keypoints", "segmentation"])
def test_what_cannot_go_with_boxes_is_refused(root: Path, field: str) -> None:
    data = annotations()
    for annotation in data["annotations"]:
        annotation["caption"], annotation["keypoints"] = "a", [1] * 6
    source = coco(root, data, segmentation=True)
    with pytest.raises(UsageError, match=f"field {field}: .* by fields="):
        samples(source.select(["image", "boxes", "labels", field]), transforms=SANITIZED)
    with nostall.DataLoader(
        source, 2, transforms=SANITIZED, fields=["image", "boxes", "labels"], tiers=[], epochs=1
    ) as loader:
        assert len(list(loader)) == 3
    with nostall.DataLoader(
        source, 2, transforms=SANITIZED[:1], fields=["image", "boxes", field], tiers=[], epochs=1
    ) as loader:
        assert len(list(loader)) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "not a file of COCO"),
        ("[]", "not a file of COCO"),
        ({"images": [{"id": 1}]}, "KeyError 'file_name'"),
        (annotations(images=[{"id": 100, "file_name": "0.png"}] * 2), "two images of one number"),
        (annotations(images=[{"id": 100, "file_name": "0.png"}]), "of image 96, and no such image"),
        (
            annotations(annotations=[{"image_id": 100, "bbox": [1, 2, 3]}]),
            "annotations of image 100: no boxes",
        ),
        (
            annotations(annotations=[{"image_id": 100, "category_id": 1.9}]),
            "annotations of image 100: no labels .*cannot hold",
        ),
        (annotations(annotations=[{"image_id": 99.5}]), "99.5 is no whole number"),
        (annotations(images=[{"id": 100, "file_name": "\ud800.png"}]), "is no path"),
        (
            annotations(annotations=[{"image_id": 100, "keypoints": [1, 2]}]),
            "no equal keypoints",
        ),
    ],
)
def test_bad_annotations_are_named_with_the_place(root: Path, data: Any, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        coco(root, data)


OBJECT = (
    "<object><name>{}</name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>2</ymin>"
    "<xmax>{}</xmax><ymax>4.5</ymax></bndbox></object>"
)


def voc(root: Path, objects: dict[str, str]) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "Segmentation").mkdir(exist_ok=True)
    for name, inner in objects.items():
        Image.new("RGB", (9, 7), (200, 3, 4)).save(root / "JPEGImages" / f"{name}.jpg")
        mask = Image.fromarray(np.full((7, 9), 12, np.uint8), "L").convert("P")
        mask.putdata([5] * 63)
        mask.save(root / "SegmentationClass" / f"{name}.png")
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{inner}</annotation>")
    for sets in ("Main", "Segmentation"):
        (root / "ImageSets" / sets / "train.txt").write_text("".join(f"{n}\n" for n in objects))


def test_voc_is_what_its_files_say(tmp_path: Path) -> None:
    voc(tmp_path, {"b": OBJECT.format("person", 9) + OBJECT.format("cat", 3), "a": ""})
    source = nostall.VOC(tmp_path)
    assert source.names == ["b", "a"]
    found = samples(source)
    person, cat = source.classes.index("person"), source.classes.index("cat")
    assert as_lists(found["labels"]) == [[person, cat], []]
    assert as_lists(found["boxes"]) == [[[1, 2, 9, 4.5], [1, 2, 3, 4.5]], []]
    assert as_lists(found["difficult"]) == [[1, 1], []]
    masks = samples(nostall.VOC(tmp_path, task="segmentation"))["mask"]
    assert as_lists(masks) == [[[5] * 9] * 7] * 2
    assert pickle.loads(pickle.dumps(source)).fingerprint == source.fingerprint
    assert nostall.Subset(source, [1]).classes == source.classes
    assert nostall.Concat([source, nostall.Subset(source, [1])]).names == ["b", "a", "a"]
    other = nostall.VOC(tmp_path, classes=("cat", "person"))
    with pytest.raises(UsageError, match=r"label 0 is 'aeroplane' .* and 'cat' in source 1$"):
        nostall.Concat([source, other])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (OBJECT.format("unicorn", 3), "names the class 'unicorn'"),
        (OBJECT.format("cat", "wide"), "no annotation of Pascal VOC"),
        ("<object>", "no annotation of Pascal VOC"),
        ("<object><name>cat</name></object>", "no annotation of Pascal VOC"),
    ],
)
def test_bad_voc_is_named(tmp_path: Path, inner: str, message: str) -> None:
    voc(tmp_path, {"a": inner})
    with pytest.raises(CorruptionError, match=rf"a\.xml.*{message}"):
        nostall.VOC(tmp_path)


def test_voc_without_its_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"val\.txt"):
        nostall.VOC(tmp_path, "val")
    with pytest.raises(UsageError, match="task must be"):
        nostall.VOC(tmp_path, task="boxes")  # type: ignore[arg-type]
