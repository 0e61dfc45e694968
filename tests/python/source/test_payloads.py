"""What lies inside the values of a database: Caffe's Datum, tf.train.Example, pickles; and samples
that are pixels, through the native pipeline and through callables, against PIL and NumPy."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
from checks import check_source
from PIL import Image
from protobuf import datum, example, field

import nostall
from nostall import transforms
from nostall.errors import CorruptionError, UsageError

RANDOM = np.random.default_rng(0)
COUNT = 40
HEIGHT, WIDTH = 24, 18
CONTENTS = [RANDOM.bytes(int(n)) for n in [0, 1, *RANDOM.integers(0, 9000, COUNT - 2)]]
LABELS = [int(x) for x in RANDOM.integers(-5, 1 << 31, COUNT)]
IMAGES = RANDOM.integers(0, 255, (COUNT, HEIGHT, WIDTH, 3), dtype=np.uint8)


def write(path: Path, values: list[bytes]) -> Path:
    with lmdb.open(str(path), map_size=1 << 26) as env, env.begin(write=True) as t:
        for i, value in enumerate(values):
            t.put(b"%08d" % i, value)  # as Caffe's convert_imageset: zeros before
    return path


def test_encoded_datums(tmp_path: Path) -> None:
    values = [
        datum(c, x, (3, 30, 40), encoded=True)
        for c, x in zip(CONTENTS, [abs(x) for x in LABELS], strict=True)
    ]
    source = nostall.LMDB(write(tmp_path / "db", values), values="datum")
    assert source.pixels is None
    check_source(source, CONTENTS, [abs(x) for x in LABELS])
    assert nostall.LMDB(tmp_path / "db", values="datum").index_reused


def test_examples_in_a_database(tmp_path: Path) -> None:
    values = [
        example({"image/class/label": x, "image/encoded": c})
        for c, x in zip(CONTENTS, LABELS, strict=True)
    ]
    check_source(nostall.LMDB(write(tmp_path / "db", values), values="example"), CONTENTS, LABELS)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("kind", [tuple, list])
def test_pickled_pairs(tmp_path: Path, protocol: int, kind: Any) -> None:
    values = [pickle.dumps(kind((c, x)), protocol) for c, x in zip(CONTENTS, LABELS, strict=True)]
    check_source(nostall.LMDB(write(tmp_path / "db", values), values="pickled"), CONTENTS, LABELS)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_values_that_are_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[str, bytes, type[Exception], str]] = [
        ("pickled", pickle.dumps((b"x", Evil())), UsageError, "not followed"),
        ("pickled", pickle.dumps((3, 4)), UsageError, "several integers"),
        ("pickled", pickle.dumps((3,)), UsageError, "no bytes"),
        ("pickled", pickle.dumps((b"x" * 300, 4))[:50], CorruptionError, "no sound pickle"),
        ("pickled", b"", UsageError, "no bytes"),
        ("datum", b"\xff" * 20, CorruptionError, "is no Datum"),
        ("datum", field(5, 3), UsageError, "no bytes"),
        ("datum", datum(b"12345", 0, (3, 2, 2)), CorruptionError, "channels x height x width"),
        ("example", example({"a": b"x"}), UsageError, 'no feature "image/encoded"'),
        ("example", b"\xff" * 20, CorruptionError, r"no tf\.train\.Example"),
    ]
    for n, (values, value, kind, text) in enumerate(cases):
        path = write(tmp_path / str(n), [value])
        with pytest.raises(kind, match=rf"offset \d+ of {path}/data\.mdb.*{text}"):
            nostall.LMDB(path, values=values)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------- pixels


def sources(path: Path) -> dict[str, nostall.Source]:
    """The same images in every way that pixels are kept."""
    as_bgr = IMAGES[:, :, :, ::-1].transpose(0, 3, 1, 2)
    values = [datum(p.tobytes(), i, (3, HEIGHT, WIDTH)) for i, p in enumerate(as_bgr)]
    with h5py.File(path / "a.h5", "w") as file:
        file["hwc"] = IMAGES
        file["chw"] = IMAGES.transpose(0, 3, 1, 2)
        file.create_dataset("gzip", data=IMAGES, chunks=(7, HEIGHT, WIDTH, 3), compression="gzip")
        file["labels"] = np.arange(COUNT)
    found: dict[str, nostall.Source] = {
        name: nostall.HDF5(path / "a.h5", name, labels="labels") for name in ("hwc", "chw", "gzip")
    }
    found["datum"] = nostall.LMDB(write(path / "db", values), values="datum")
    return found


@pytest.fixture(scope="module")
def all_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nostall.Source]:
    return sources(tmp_path_factory.mktemp("pixels"))


KINDS = ["hwc", "chw", "gzip", "datum"]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_as_they_are(all_sources: dict[str, nostall.Source], kind: str) -> None:
    steps = [transforms.CenterCrop((HEIGHT, WIDTH))]
    with nostall.DataLoader(
        all_sources[kind], 8, seed=1, transforms=steps, tiers=["ram:1MiB"], output="numpy"
    ) as loader:
        seen = []
        for images, labels in loader:
            np.testing.assert_array_equal(images, IMAGES[labels])
            seen += labels.tolist()
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_does_what_it_does_to_a_png(
    all_sources: dict[str, nostall.Source], kind: str, tmp_path: Path
) -> None:
    for i, image in enumerate(IMAGES):
        (tmp_path / "png" / "c").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / f"png/c/{i:03d}.png")
    png = nostall.ImageFolder(tmp_path / "png", index=False)
    steps = [
        transforms.RandomResizedCrop(13),
        transforms.RandomHorizontalFlip(),
        transforms.RandomVerticalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    ]
    options: dict[str, Any] = {"seed": 3, "epochs": 2, "tiers": [], "output": "numpy"}
    with (
        nostall.DataLoader(all_sources[kind], 8, transforms=steps, **options) as ours,
        nostall.DataLoader(png, 8, transforms=steps, **options) as theirs,
    ):
        for _ in range(2):
            for (a, _), (b, _) in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


def test_resized_as_pil_does(all_sources: dict[str, nostall.Source]) -> None:
    pipeline = transforms.compile([transforms.Resize((11, 9))], pixels=all_sources["hwc"].pixels)
    for i in range(COUNT):
        ours = pipeline.apply(all_sources["hwc"].read(i)).astype(int)
        pil = Image.fromarray(IMAGES[i]).resize((9, 11), Image.Resampling.BILINEAR)
        assert np.abs(ours - np.asarray(pil)).max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_callables_get_images_too(all_sources: dict[str, nostall.Source], kind: str) -> None:
    with nostall.DataLoader(
        all_sources[kind],
        8,
        transforms=lambda image: image[::2, ::2],
        decode=True,
        tiers=[],
        output="numpy",
    ) as loader:
        for images, labels in loader:
            np.testing.assert_array_equal(images, IMAGES[labels][:, ::2, ::2])


@pytest.mark.parametrize("shape", [(COUNT, 9, 7), (COUNT, 9, 7, 1), (COUNT, 1, 9, 7)])
def test_grey_is_taken_for_all_channels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    grey = RANDOM.integers(0, 255, shape, dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = grey
    source = nostall.HDF5(tmp_path / "a.h5", "x")
    pipeline = transforms.compile([transforms.CenterCrop((9, 7))], pixels=source.pixels)
    for i in range(COUNT):
        image = pipeline.apply(source.read(i))
        np.testing.assert_array_equal(image, np.repeat(grey[i].reshape(9, 7, 1), 3, axis=2))


def test_pixels_of_other_kinds(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["floats"] = np.zeros((3, 4, 4, 3), np.float32)
        file["five"] = np.zeros((3, 4, 4, 5), np.uint8)
    assert nostall.HDF5(tmp_path / "a.h5", "floats").pixels is None
    assert nostall.HDF5(tmp_path / "a.h5", "five").pixels is None
    values = [datum(bytes(12), 0, (3, 2, 2)), datum(bytes(27), 0, (3, 3, 3))]
    with pytest.raises(UsageError, match=r"'00000001' has the shape \(3, 3, 3\)"):
        nostall.LMDB(write(tmp_path / "db", values), values="datum")
    with pytest.raises(UsageError, match="5 channels"):
        transforms.compile([transforms.CenterCrop(4)], pixels=nostall.Pixels(4, 4, 5))
    pipeline = transforms.compile([transforms.CenterCrop(4)], pixels=nostall.Pixels(4, 4))
    with pytest.raises(CorruptionError, match="47 bytes are not 4 x 4 pixels of 3 channels"):
        pipeline.apply(bytes(47))
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "png")
    with pytest.raises(CorruptionError, match="are not 4 x 4 pixels"):
        pipeline.apply(buffer.getvalue())


def test_the_shape_is_kept_with_the_places(tmp_path: Path) -> None:
    values = [datum(bytes(12), 0, (3, 2, 2))] * 5
    first = nostall.LMDB(write(tmp_path / "db", values), values="datum")
    again = nostall.LMDB(tmp_path / "db", values="datum")
    assert again.index_reused
    assert again.pixels == first.pixels == nostall.Pixels(2, 2, 3, "chw", "bgr")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-2, 2), "-2 rows"),
        ((2, 2.0), "2.0 columns"),
        ((True, 2), "True rows"),
        ((2, 2, 0), "0 channels"),
        ((2, 2, 3, "CHW"), "not layout='CHW'"),
        ((2, 2, 3, "hwc", "BGR"), "not order='BGR'"),
    ],
)
def test_pixels_that_cannot_be_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nostall.Pixels(*arguments)
