"""Samples of several parts: one geometry for all of them, as torchvision v2 has it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from samples import png
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from nostall import errors
from nostall import transforms as t

WIDTH, HEIGHT = 97, 71


def picture(seed: int = 0, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    resized = Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.asarray(resized)


def label_map(seed: int = 0, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (12, 14), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize(size[::-1], Image.Resampling.NEAREST))


def box_rows(seed: int, count: int = 20) -> np.ndarray:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(-10, 110, (count, 2, 2)).astype(np.float32)
    return np.sort(corners, axis=1).reshape(count, 4)


def run(steps: list[t.Transform], *, sample: int = 0, **parts: Any) -> dict[str, Any]:
    return t.compile(steps).apply_record(parts, sample=sample)


def as_torchvision(steps: list[t.Transform], sample: int, image: bool = True) -> Any:
    """The actions drawn for a sample, as a function of torchvision's values."""
    actions = t.compile(steps).drawn(HEIGHT, WIDTH, sample=sample)

    def apply(value: Any) -> Any:
        for name, numbers in actions:
            if name == "crop":
                x, y, w, h = (int(v) for v in numbers)
                value = F.crop(value, y, x, h, w)
            elif name == "resize":
                value = F.resize(value, [int(numbers[1]), int(numbers[0])])
            elif name == "horizontal_flip":
                value = F.horizontal_flip(value)
            elif name == "vertical_flip":
                value = F.vertical_flip(value)
            else:
                raise AssertionError(name)
        return value

    return apply


GEOMETRY: list[list[t.Transform]] = [
    [t.RandomResizedCrop((40, 53), scale=(0.1, 1)), t.RandomHorizontalFlip()],
    [t.Resize(60), t.RandomVerticalFlip(), t.CenterCrop((90, 50))],
    [t.RandomHorizontalFlip(), t.Pad((3, 5, 7, 11)), t.RandomCrop(64), t.Resize((33, 44))],
    [t.RandomCrop((80, 60), padding=20, pad_if_needed=True), t.RandomHorizontalFlip()],
]


@pytest.mark.parametrize("steps", GEOMETRY)
def test_masks_are_torchvisions(steps: list[t.Transform]) -> None:
    mask = label_map()
    for sample in range(20):
        got = run(steps, sample=sample, masks=[(png(mask), "int64")])["masks"][0]
        expected = as_torchvision(steps, sample)(tv_tensors.Mask(torch.from_numpy(mask.copy())))
        np.testing.assert_array_equal(got, expected.numpy())


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("steps", GEOMETRY)
def test_boxes_are_torchvisions_bit_for_bit(steps: list[t.Transform], format: str) -> None:
    data = png(picture())
    for sample in range(20):
        rows = box_rows(sample)
        boxes = F.convert_bounding_box_format(
            tv_tensors.BoundingBoxes(rows, format="XYXY", canvas_size=(HEIGHT, WIDTH)),
            new_format=format,
        )
        got, kept = run(
            steps, sample=sample, images=[data], boxes=[(boxes.numpy(), format, False)]
        )["boxes"][0]
        np.testing.assert_array_equal(got, as_torchvision(steps, sample)(boxes).numpy())
        np.testing.assert_array_equal(kept, np.arange(len(rows)))


IDLE: list[tuple[t.Transform, v2.Transform]] = [
    (t.CenterCrop(8), v2.CenterCrop(8)),
    (t.RandomResizedCrop(8, (1, 1), (1, 1)), v2.RandomResizedCrop(8, (1, 1), (1, 1))),
    (t.Pad(0), v2.Pad(0)),
    (t.RandomCrop(8), v2.RandomCrop(8)),
    (t.RandomCrop(8, padding=0), v2.RandomCrop(8, padding=0)),
    (t.Resize((8, 8)), v2.Resize((8, 8))),
]


@pytest.mark.parametrize(("ours", "theirs"), IDLE, ids=lambda step: type(step).__name__)
@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_are_torchvisions_where_no_pixel_changes(
    ours: t.Transform, theirs: v2.Transform, format: str
) -> None:
    image = picture(size=(8, 8))
    rows = np.array([[2, 2, 12, 6], [-1, 3, 4, 7], [1, 1, 2, 2]], np.float32)
    boxes = F.convert_bounding_box_format(
        tv_tensors.BoundingBoxes(rows, format="XYXY", canvas_size=(8, 8)), new_format=format
    )
    size = [] if ours.to_step()[0] != "Pad" else [t.Resize((8, 8))]
    parts = {"images": [png(image)], "boxes": [(boxes.numpy(), format, False)]}
    got = run([ours, *size], **parts)
    np.testing.assert_array_equal(got["boxes"][0][0], theirs(boxes).numpy())
    np.testing.assert_array_equal(got["images"][0], image)


@pytest.mark.parametrize("steps", GEOMETRY)
def test_keypoints_are_torchvisions_bit_for_bit(steps: list[t.Transform]) -> None:
    data = png(picture())
    for sample in range(20):
        rows = box_rows(sample).reshape(-1, 2)
        got = run(steps, sample=sample, images=[data], keypoints=[(rows, False)])["keypoints"][0]
        points = tv_tensors.KeyPoints(rows, canvas_size=(HEIGHT, WIDTH))
        np.testing.assert_array_equal(got, as_torchvision(steps, sample)(points).numpy())


@pytest.mark.parametrize("steps", GEOMETRY)
def test_every_image_of_a_sample_gets_the_same_cut(steps: list[t.Transform]) -> None:
    data, other = png(picture(1)), png(picture(2))
    pipeline = t.compile(steps)
    for sample in range(10):
        got = pipeline.apply_record({"images": [data, other, data]}, sample=sample)["images"]
        np.testing.assert_array_equal(got[0], pipeline.apply(data, sample=sample))
        np.testing.assert_array_equal(got[1], pipeline.apply(other, sample=sample))
        np.testing.assert_array_equal(got[2], got[0])


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_masks_have_pillows_values(mode: str) -> None:
    mask = label_map()
    if mode == "I;16":
        image = Image.fromarray(mask.astype(np.uint16) * 251)
    elif mode == "P":
        image = Image.fromarray(mask)
        image.putpalette([i % 7 * 30 for i in range(768)])
    else:
        image = Image.fromarray(mask).convert(mode)
    data = png(image)
    got = run([t.CenterCrop((HEIGHT, WIDTH))], masks=[(data, "int32")])["masks"][0]
    np.testing.assert_array_equal(got, np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_are_as_stored(bits: int) -> None:
    image = Image.fromarray(label_map() % (1 << bits))
    image.putpalette([i % 7 * 30 for i in range(3 << bits)])
    data = png(image, bits=bits)
    got = run([t.CenterCrop((HEIGHT, WIDTH))], masks=[(data, "uint8")])["masks"][0]
    np.testing.assert_array_equal(got, label_map() % (1 << bits))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "int64", "float32"])
def test_masks_come_in_the_type_asked_for(dtype: str) -> None:
    got = run([t.CenterCrop((HEIGHT, WIDTH))], masks=[(png(label_map()), dtype)])["masks"][0]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, label_map())


def test_a_fill_of_masks_is_their_own() -> None:
    parts = {"images": [png(picture())], "masks": [(png(label_map()), "int64")]}
    got = run([t.Pad((2, 1), fill={"image": (9, 8, 7), "mask": 255}), t.Resize((73, 101))], **parts)
    assert (got["masks"][0][0] == 255).all() and (got["masks"][0][:, :2] == 255).all()
    assert (got["images"][0][0] == (9, 8, 7)).all()
    np.testing.assert_array_equal(got["masks"][0][1:-1, 2:-2], label_map())


def test_sanitize_takes_out_boxes_and_says_which_stay() -> None:
    steps = [
        t.CenterCrop((60, 60)),
        t.ClampBoundingBoxes(),
        t.SanitizeBoundingBoxes(min_size=3, min_area=30),
    ]
    for sample in range(20):
        rows = box_rows(sample)
        boxes = tv_tensors.BoundingBoxes(rows, format="XYXY", canvas_size=(HEIGHT, WIDTH))
        cut = F.clamp_bounding_boxes(F.center_crop(boxes, [60, 60]))
        expected, valid = F.sanitize_bounding_boxes(cut, min_size=3, min_area=30)
        got, kept = run(steps, images=[png(picture())], boxes=[(rows, "xyxy", False)])["boxes"][0]
        np.testing.assert_array_equal(got, expected.numpy())
        np.testing.assert_array_equal(kept, np.flatnonzero(valid.numpy()))


def test_a_box_outside_becomes_empty_and_is_taken_out_if_asked() -> None:
    rows = np.array([[0, 0, 5, 5], [40, 30, 60, 50]], dtype=np.float32)
    parts = {"images": [png(picture())], "boxes": [(rows, "xywh", False)]}
    got, kept = run([t.CenterCrop(40)], **parts)["boxes"][0]
    assert list(got[0]) == [0, 0, 0, 0] and list(kept) == [0, 1]
    _, kept = run([t.CenterCrop(40), t.SanitizeBoundingBoxes()], **parts)["boxes"][0]
    assert list(kept) == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_box_that_is_no_number_is_an_error_or_taken_out(bad: float) -> None:
    rows = np.array([[5, 5, 30, 30], [5, 5, bad, 30], [6, 6, 30, 30]], dtype=np.float32)
    parts = {"images": [png(picture())], "boxes": [(rows, "xyxy", False)]}
    with pytest.raises(
        errors.CorruptionError, match="box 1 has a coordinate that is NaN or infinite"
    ):
        run([t.CenterCrop(64)], **parts)
    got, kept = run([t.CenterCrop(64), t.SanitizeBoundingBoxes()], **parts)["boxes"][0]
    assert list(kept) == [0, 2] and np.isfinite(got).all()


def test_no_boxes_are_no_boxes() -> None:
    parts = {
        "images": [png(picture())],
        "boxes": [(np.empty((0, 4), np.float32), "xyxy", False)],
    }
    got, kept = run([t.RandomResizedCrop(32), t.SanitizeBoundingBoxes()], **parts)["boxes"][0]
    assert got.shape == (0, 4) and kept.shape == (0,)


def test_normalised_coordinates_stay_normalised() -> None:
    rows = np.array([[0.5, 0.5, 0.2, 0.4]], dtype=np.float32)
    points = np.array([[0.25, 0.5]], dtype=np.float32)
    parts = {"boxes": [(rows, "cxcywh", True)], "keypoints": [(points, True)]}
    got = run([t.Resize((31, 200))], images=[png(picture())], **parts)
    np.testing.assert_allclose(got["boxes"][0][0], rows, rtol=1e-6)
    np.testing.assert_allclose(got["keypoints"][0], points, rtol=1e-6)


def test_a_keypoint_off_the_canvas_is_not_visible() -> None:
    points = np.array([[48, 35, 2], [2, 2, 2], [50, 36, 1], [0, 0, 0]], dtype=np.float32)
    got = run([t.CenterCrop(40)], images=[png(picture())], keypoints=[(points, False)])
    np.testing.assert_array_equal(got["keypoints"][0][:, 2], [2, 0, 1, 0])


def test_a_mask_of_another_size_is_an_error() -> None:
    parts = {
        "images": [png(picture())],
        "masks": [(png(label_map(0, (HEIGHT, WIDTH + 1))), "uint8")],
    }
    message = "picture of 71x98 in a sample whose first has 71x97"
    with pytest.raises(errors.CorruptionError, match=message):
        run([t.CenterCrop(40)], **parts)
    with pytest.raises(errors.CorruptionError, match=message):
        run([t.CenterCrop(40)], images=[png(picture()), png(picture(0, (HEIGHT, WIDTH + 1)))])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (b"GIF89a", "not a PNG"),
        (png(picture()), "a mask of colours"),
        (png(Image.fromarray(label_map()).convert("LA")), "a mask of colours"),
        (png(label_map())[:-30], "PNG: "),
    ],
)
def test_what_is_no_mask_is_refused(mask: bytes, message: str) -> None:
    with pytest.raises(errors.CorruptionError, match=message):
        run([t.CenterCrop(40)], masks=[(mask, "uint8")])


def test_a_label_that_the_type_cannot_hold_is_an_error() -> None:
    mask = np.full((HEIGHT, WIDTH), 40000, np.uint16)
    for dtype in ("uint8", "int16"):
        with pytest.raises(errors.CorruptionError, match="value 40000, which its type cannot hold"):
            run([t.CenterCrop(40)], masks=[(png(mask), dtype)])
    assert run([t.CenterCrop(40)], masks=[(png(mask), "uint16")])["masks"][0].max() == 40000


def test_a_record_without_picture_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="without image and mask"):
        run([t.CenterCrop(40)], boxes=[(box_rows(0), "xyxy", False)])


def test_grey_of_16_bits_is_no_image() -> None:
    data = png(np.full((HEIGHT, WIDTH), 40000, np.uint16))
    with pytest.raises(errors.CorruptionError, match="16-bit grey"):
        t.compile([t.CenterCrop(40)]).apply(data)


def test_a_crop_that_grows_again_brings_nothing_back() -> None:
    got = t.compile([t.CenterCrop(20), t.CenterCrop(40)]).apply(png(picture()))
    assert not got[:10].any() and not got[:, 30:].any() and got[10:30, 10:30].any()


def test_a_crop_larger_than_the_image_is_an_error() -> None:
    with pytest.raises(errors.CorruptionError, match="RandomCrop to 80x80 of an image of 71x97"):
        t.compile([t.RandomCrop(80)]).apply(png(picture()))
