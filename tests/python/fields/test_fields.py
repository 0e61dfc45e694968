"""Batches of records: today's sources by the names of their fields, and what is refused."""

from __future__ import annotations

import errno
import io
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import IoError, UsageError

STEPS = [t.RandomResizedCrop(16), t.RandomHorizontalFlip(), t.ToTensor()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    for i in range(10):
        path = root / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(path)
    return root


def batches(source: nostall.Source, **arguments: Any) -> list[Any]:
    with nostall.DataLoader(source, 4, epochs=1, tiers=[], **arguments) as loader:
        return list(loader)


def test_a_mapping_has_the_values_of_images_and_labels(folder: Path) -> None:
    source = nostall.ImageFolder(folder)
    assert list(source.schema) == ["image", "label"]
    pairs = batches(source, transforms=STEPS, output="numpy")
    mappings = batches(source, transforms=STEPS, output="numpy", batch="dict")
    chosen = batches(
        source, transforms=STEPS, output="numpy", fields=["label", "image"], batch="tuple"
    )
    assert len(pairs) == len(mappings) == len(chosen) == 3
    for (images, labels), mapping, (numbers, again) in zip(pairs, mappings, chosen, strict=True):
        assert list(mapping) == ["image", "label"]
        np.testing.assert_array_equal(mapping["image"], images)
        np.testing.assert_array_equal(mapping["label"], labels)
        assert mapping["label"].dtype == labels.dtype
        np.testing.assert_array_equal(numbers, labels)
        np.testing.assert_array_equal(again, images)


def test_floating_labels_keep_their_type(folder: Path) -> None:
    paths = sorted(folder.rglob("*.png"))
    source = nostall.FileList(paths, np.linspace(0, 1, 10, dtype=np.float32))
    for (_, labels), (numbers,) in zip(
        batches(source, transforms=STEPS, output="numpy"),
        batches(source, fields=["label"], batch="tuple", output="numpy"),
        strict=True,
    ):
        assert numbers.dtype == np.float32
        np.testing.assert_array_equal(numbers, labels)


def test_images_without_transforms_are_their_bytes(folder: Path) -> None:
    source = nostall.ImageFolder(folder)
    for batch, (raw, _) in zip(
        batches(source, batch="dict", output="numpy"), batches(source), strict=True
    ):
        images = batch["image"]
        assert images.shapes is None
        for i in range(len(raw)):
            np.testing.assert_array_equal(images.sample(i), raw[i])


def test_tensors_share_the_memory_of_the_batch(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    (batch, *_) = batches(nostall.ImageFolder(folder), batch="dict", output="torch")
    assert isinstance(batch["image"], f.Ragged)
    assert batch["image"].values.dtype == torch.uint8
    assert batch["label"].dtype == torch.int64
    if not torch.cuda.is_available():  # where they are copied to pinned memory
        ragged = batch["image"]
        first, last = ragged.values.data_ptr(), ragged.offsets.data_ptr()
        assert 0 < last - first < ragged.values.numel() + 64


@pytest.mark.parametrize("called", [None, lambda sample: sample])
@pytest.mark.parametrize("dtype", f._kinds.DTYPES)
def test_fields_of_every_type_come_as_tensors(dtype: Any, called: Any) -> None:
    torch = pytest.importorskip("torch")
    one, lines = np.arange(2).astype(dtype), [np.ones(n, dtype) for n in (1, 2)]
    kinds = {
        "one": f.Scalar(dtype=dtype),
        "ragged": f.Array(dtype=dtype, shape=(None,)),
        "padded": f.Array(dtype=dtype, shape=(None,), padded=True),
    }
    source = nostall.Files({}, {"one": one, "ragged": lines, "padded": lines}, schema=kinds)
    for output in ("numpy", "torch"):
        (batch,) = batches(source, transforms=called, output=output)
        for value in (batch["one"], batch["ragged"].values, batch["padded"].values):
            assert value.dtype == (getattr(torch, dtype) if output == "torch" else np.dtype(dtype))
            assert value.sum() in (1, 3)


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_a_mask_says_where_padded_values_are(output: Any) -> None:
    pytest.importorskip(output)
    lines = [np.arange(1, 1 + n) for n in (2, 0, 3)]
    areas = [np.ones(sides, np.int64) for sides in ((1, 3), (2, 1), (2, 2))]
    pairs = [np.ones((n, 2), np.float32) for n in (1, 2, 0)]
    source = nostall.Files(
        {},
        {"line": lines, "area": areas, "pair": pairs},
        schema={
            "line": f.Array(dtype="int64", shape=(None,), padded=True),
            "area": f.Array(dtype="int64", shape=(None, None), padded=True),
            "pair": f.Array(shape=(None, 2), padded=True),
        },
    )
    with nostall.DataLoader(source, 3, epochs=1, shuffle=False, output=output) as loader:
        (batch,) = loader
    for name in ("line", "area"):
        mask = batch[name].mask()
        assert type(mask) is type(batch[name].values)
        assert mask.shape == batch[name].values.shape
        assert mask.tolist() == (batch[name].values != 0).tolist()
    assert batch["pair"].mask().tolist() == [[True, False], [True, True], [False, False]]


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_a_batch_of_zeros_that_no_memory_holds_names_its_sample(on_error: Any) -> None:
    long = 1 << 22
    sides = [(2, 3), (1, long), (long, 1), (3, 2)]
    source = nostall.Files(
        {},
        {"area": [np.ones(side, np.uint8) for side in sides]},
        schema={"area": f.Array(dtype="uint8", shape=(None, None), padded=True)},
    )
    with (
        nostall.DataLoader(
            source, 4, epochs=1, shuffle=False, tiers=[], output="numpy", on_error=on_error
        ) as loader,
        pytest.raises(IoError) as told,
    ):
        list(loader)
    assert told.value.errno == errno.ENOMEM
    assert re.search(
        rf"\(sample 1\): field area: padded to its 1 x {long} values, a batch of 4 needs \d+ bytes, "
        r"of which \d+ are zeros, and .* are in use, .*leave the sample out",
        str(told.value),
    ), told.value


def test_buckets_of_a_field_have_batches_of_its_length(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.permutation(32)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i, length in enumerate(lengths.tolist()):
            for ending, value in (("txt", b"a" * length), ("bin", rng.bytes(1000 - i))):
                member = tarfile.TarInfo(f"{i:02d}.{ending}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    source = nostall.TarShards(tmp_path / "a.tar", members={"image": "bin", "caption": "txt"})
    assert source.select(["caption"]).sizes.tolist() == lengths.tolist()
    order = nostall.Buckets(source.select(["caption"]).sizes, [7, 15, 23])  # 8 captions in each
    for batch in batches(source, order=order):
        assert len({len(caption) // 8 for caption in batch["caption"]}) == 1


def test_collate_gets_the_batch(folder: Path) -> None:
    source = nostall.ImageFolder(folder)
    sums = batches(
        source, fields=["label"], output="numpy", collate=lambda b: int(b["label"].sum())
    )
    assert sum(sums) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fields": ["mask"]}, "there is no field 'mask': there are image, label"),
        ({"fields": ["label", "label"]}, "named twice"),
        ({"fields": "image"}, "must be a list of names"),
        ({"fields": []}, "must be a list of names"),
        ({"fields": ["label"], "transforms": STEPS}, "there is none among label"),
        ({"transforms": {"label": STEPS}}, "which is no image, mask, boxes or keypoints"),
        ({"batch": "dict", "transforms": bytes}, "is the class bytes"),
        ({"batch": "list"}, "dict"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nostall.DataLoader(nostall.ImageFolder(folder), 4, **arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: f.Array(dtype="complex64"), "dtype 'complex64' is not one of"),
        (lambda: f.Array(shape=[3]), "must be a tuple"),  # type: ignore[arg-type]
        (lambda: f.Array(shape=(-1,)), "whole number"),
        (lambda: f.Scalar(codec="text"), "codec 'text'"),  # type: ignore[arg-type]
        (lambda: f.Boxes(format="ltrb"), "format 'ltrb'"),  # type: ignore[arg-type]
        (lambda: f.Keypoints(values=4), "must be 2 or 3"),  # type: ignore[arg-type]
        (lambda: f.Mask(dtype="float32"), "dtype 'float32'"),
        (lambda: f.Audio(channels=0), "channels 0"),
        (lambda: nostall.Schema(), "at least one field"),
        (lambda: nostall.Schema({"": f.Text()}), "must be text"),
        (lambda: nostall.Schema(image=f.Image), "is no kind"),  # type: ignore[arg-type]
        (lambda: f.Scalar(fill="x").to_native("x", 0), "is no int64"),  # type: ignore[arg-type]
        (lambda: f.Scalar(dtype="float16").encode(70000), "70000 is no float16"),
        (lambda: f.Boxes(fill=np.zeros((2, 5))).to_native("x", 0), r"shape \(2, 5\)"),
        (lambda: f.Image(fill=0).to_native("x", 0), "bytes of a file"),  # type: ignore[arg-type]
    ],
)
def test_impossible_kinds_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_schemas_are_values() -> None:
    schema = nostall.Schema(a=f.Text(), b=f.Scalar())
    assert (
        schema
        == pickle.loads(pickle.dumps(schema))
        == nostall.Schema({"a": f.Text(), "b": f.Scalar()})
    )
    assert hash(schema) == hash(nostall.Schema(a=f.Text(), b=f.Scalar()))
    assert schema != nostall.Schema(b=f.Scalar(), a=f.Text())
    assert list(schema.select(["b"])) == ["b"]


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "value", [float("nan"), [1, float("inf")], {"a": {-float("inf")}}, {1, 2}, b"a", CIRCLE]
)
def test_what_json_lacks_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="Json: no value of JSON: "):
        f.Json().encode(value)


def test_kinds_take_numbers_and_types_of_numpy() -> None:
    for given, plain in (
        (f.Array(shape=(np.int64(3), None)), f.Array(shape=(3, None))),  # type: ignore[arg-type]
        (f.Array(dtype=np.dtype("float32")), f.Array(dtype="float32")),  # type: ignore[arg-type]
        (f.Array(dtype=np.float16), f.Array(dtype="float16")),  # type: ignore[arg-type]
        (f.Scalar(dtype=np.dtype("int64")), f.Scalar(dtype="int64")),  # type: ignore[arg-type]
        (f.Scalar(stored=np.dtype("int8")), f.Scalar(stored="int8")),  # type: ignore[arg-type]
        (f.Mask(size=(np.int64(3), 4)), f.Mask(size=(3, 4))),  # type: ignore[arg-type]
        (f.Bytes(padded=np.bool_(True)), f.Bytes(padded=True)),  # type: ignore[arg-type]
        (f.Keypoints(points=np.int64(3)), f.Keypoints(points=3)),  # type: ignore[arg-type]
    ):
        assert repr(given) == repr(plain)
        given.to_native("a", 0)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: f.Bytes(padded="no"), "Bytes: padded must be True or False, not 'no'"),
        (lambda: f.Array(padded=1), "Array: padded must be True or False, not 1"),
        (lambda: f.Boxes(normalised="no"), "Boxes: normalised must be True or False"),
        (lambda: f.Array(dtype=np.dtype(">f4")), "Array: dtype .* is not one of"),
        (lambda: f.Array(dtype=float), "Array: dtype .* is not one of"),
        (lambda: f.Array(dtype=["float32"]), "Array: dtype .* is not one of"),
        (lambda: f.Array(shape=(True,)), "Array: shape True must be a whole number"),
        (lambda: f.Array(shape=(2.0,)), "Array: shape 2.0 must be a whole number"),
        (lambda: f.Keypoints(values=2.0), "Keypoints: values 2.0 must be 2 or 3"),
        (lambda: f.Mask(size=5), r"Mask: size 5 must be \(height, width\)"),
        (lambda: f.Mask(size=(3,)), r"Mask: size \(3,\) must be \(height, width\)"),
        (lambda: f.Mask(size=(3, 4, 5)), r"Mask: size \(3, 4, 5\) must be \(height, width\)"),
        (lambda: f.Mask(size=(3, 4.0)), "Mask: size 4.0 must be a whole number"),
        (lambda: f.Audio(channels=None), "Audio: channels None must be a whole number"),
        (lambda: nostall.Schema([("a", f.Text())]), "a schema is a mapping from names to kinds"),
        (lambda: nostall.Schema("a"), "a schema is a mapping from names to kinds, not 'a'"),
    ],
)
def test_parameters_of_kinds_are_checked(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
