"""Augmentation against torchvision v2's functional on PIL images, with the parameters drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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

WIDTH, HEIGHT = 90, 67
FILL = (12, 130, 250)


def picture(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Smooth colour, edges, noise, grey and saturated patches; the levels of odd ones are few."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    image = np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    image[5:15, 5:25] = rng.integers(0, 256)
    image[20:30, 5:25] = (255, 0, int(rng.integers(0, 256)))
    return Image.fromarray(image // 3 + 40 if seed % 2 else image)


PILLOW = {"nearest": Image.Resampling.NEAREST, "bilinear": Image.Resampling.BILINEAR}
PILLOW["bicubic"] = Image.Resampling.BICUBIC
TONES: dict[str, Callable[[Any, float], Any]] = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": F.adjust_hue,
    "sharpness": F.adjust_sharpness,
    "solarize": F.solarize,
    "posterize": lambda image, bits: F.posterize(image, int(bits)),
    "grayscale": lambda image, _: F.rgb_to_grayscale(image, num_output_channels=3),
    "invert": lambda image, _: F.invert(image),
    "autocontrast": lambda image, _: F.autocontrast(image),
    "equalize": lambda image, _: F.equalize(image),
}


def by_torchvision(
    image: Image.Image,
    actions: list[tuple[str, list[float]]],
    *,
    interpolation: str = "nearest",
    fill: tuple[int, int, int] = FILL,
    kernel: tuple[int, int] = (1, 1),
) -> Image.Image:
    for name, numbers in actions:
        if name in TONES:
            image = TONES[name](image, numbers[0])
        elif name == "gaussian_blur":
            image = F.gaussian_blur(image, list(kernel), [numbers[0]] * 2)
        elif name == "warp":
            affine = numbers[6] == 0 and numbers[7] == 0
            kind = Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE
            data = numbers[:6] if affine else numbers
            image = image.transform(image.size, kind, data, PILLOW[interpolation], fillcolor=fill)
        elif name == "horizontal_flip":
            image = F.horizontal_flip(image)
        elif name == "crop":
            x, y, w, h = map(int, numbers)
            image = F.crop(image, y, x, h, w)
        else:
            raise AssertionError(name)
    return image


def difference(
    step: t.Transform, *, samples: int = 12, sizes: tuple[int, int] = (WIDTH, HEIGHT), **how: Any
) -> tuple[int, float]:
    """The largest and the mean difference in levels over some samples."""
    most, total = 0, 0.0
    pipeline = t.compile([step, t.CenterCrop(sizes[::-1])])
    for sample in range(samples):
        image = picture(sample, *sizes)
        actions = pipeline.drawn(sizes[1], sizes[0], sample=sample)
        got = pipeline.apply(png(image), sample=sample).astype(int)
        expected = np.asarray(by_torchvision(image, actions, **how)).astype(int)
        error = np.abs(got - expected)
        most, total = max(most, int(error.max())), total + float(error.mean())
    return most, total / samples


EXACT: list[t.Transform] = [
    t.ColorJitter(brightness=0.9),
    t.ColorJitter(contrast=0.9),
    t.ColorJitter(saturation=0.9),
    t.ColorJitter(hue=0.5),
    t.ColorJitter(0.4, 0.4, 0.4, 0.2),
    t.Grayscale(),
    t.RandomGrayscale(1),
    t.RandomInvert(1),
    t.RandomSolarize(100.5, 1),
    t.RandomPosterize(3, 1),
    t.RandomAutocontrast(1),
    t.RandomEqualize(1),
    t.RandomAdjustSharpness(0, 1),
    t.RandomAdjustSharpness(2.5, 1),
    t.RandAugment(3, 15, fill=FILL),
    t.TrivialAugmentWide(fill=FILL),
    t.AutoAugment("imagenet", fill=FILL),
    t.AutoAugment("cifar10", fill=FILL),
    t.AutoAugment("svhn", fill=FILL),
    t.RandomRotation(180, fill=FILL),
    t.RandomRotation(30, center=(3, 80), fill=FILL),
    t.RandomAffine(40, (0.3, 0.2), (0.5, 1.7), (-20, 20, -10, 30), fill=FILL),
    t.RandomPerspective(0.8, 1, "nearest", fill=FILL),
]


@pytest.mark.parametrize("step", EXACT, ids=lambda step: type(step).__name__)
def test_exact(step: t.Transform) -> None:
    assert difference(step)[0] == 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", [t.RandomRotation, t.RandomAffine, t.RandomPerspective])
def test_warps_between_pixels_agree_within_one_level(kind: Any, interpolation: Any) -> None:
    steps = {
        t.RandomRotation: lambda: t.RandomRotation(180, interpolation, fill=FILL),
        t.RandomAffine: lambda: t.RandomAffine(
            40, (0.3, 0.2), (0.5, 1.7), 20, interpolation, fill=FILL
        ),
        t.RandomPerspective: lambda: t.RandomPerspective(0.7, 1, interpolation, fill=FILL),
    }
    most, mean = difference(steps[kind](), interpolation=interpolation)
    assert most <= 1 and mean < 0.2


@pytest.mark.parametrize("kernel", [(3, 3), (23, 5), (9, 51)])
def test_gaussian_blur_agrees_within_one_level(kernel: tuple[int, int]) -> None:
    most, mean = difference(t.GaussianBlur(kernel, (0.1, 5.0)), kernel=kernel)
    assert most <= 1 and mean < 0.05


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (3, 3), (1, 50)])
def test_tiny_images(size: tuple[int, int]) -> None:
    for step in EXACT[:-1]:
        assert difference(step, samples=3, sizes=size)[0] == 0, step


def drawn(step: t.Transform, sample: int) -> list[tuple[str, list[float]]]:
    return t.compile([step, t.CenterCrop((HEIGHT, WIDTH))]).drawn(HEIGHT, WIDTH, sample=sample)


def test_matrices_are_torchvisions() -> None:
    """A rotation and an affine map by torchvision itself, with angles of our own."""
    image = picture(0)
    for angle in (-133.3, 17.0, 90.0, 180.0, 270.0):
        step = t.RandomRotation((angle, angle), fill=FILL)
        got = t.compile([step, t.CenterCrop((HEIGHT, WIDTH))]).apply(png(image))
        expected = F.rotate(image, angle, fill=list(FILL))
        np.testing.assert_array_equal(got, np.asarray(expected))
        affine = t.RandomAffine((angle, angle), None, (0.7, 0.7), (11, 11, -7, -7), fill=FILL)
        got = t.compile([affine, t.CenterCrop((HEIGHT, WIDTH))]).apply(png(image))
        expected = F.affine(image, angle, [0, 0], 0.7, [11, -7], fill=list(FILL))
        np.testing.assert_array_equal(got, np.asarray(expected))


MAGNITUDES = [
    (t.RandAugment(1, 11, fill=FILL), v2.RandAugment(1, 11, fill=list(FILL))),
    (t.TrivialAugmentWide(fill=FILL), v2.TrivialAugmentWide(fill=list(FILL))),
    (t.AutoAugment("svhn", fill=FILL), v2.AutoAugment(v2.AutoAugmentPolicy.SVHN, fill=list(FILL))),
]


@pytest.mark.parametrize(("ours", "theirs"), MAGNITUDES, ids=["rand", "trivial", "auto"])
def test_policies_have_torchvisions_operations(ours: t.Transform, theirs: Any) -> None:
    """Everything that torchvision makes of an image in many tries is what we make in some other."""
    torch.manual_seed(1)
    image = picture(2, 24, 18)
    data = png(image)
    pipeline = t.compile([ours, t.CenterCrop((18, 24))])
    made = {pipeline.apply(data, sample=sample).tobytes() for sample in range(3000)}
    wanted = {np.asarray(theirs(image)).tobytes() for _ in range(60)}
    assert len(wanted - made) <= 3  # some combinations are rarer than one in 3000


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "nearest_exact"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(40, 30), (200, 150), (30, 200)])
def test_resize_is_torchvisions(interpolation: Any, antialias: bool, size: tuple[int, int]) -> None:
    image = picture(4)
    got = t.compile([t.Resize(size, interpolation, antialias)]).apply(png(image)).astype(int)
    tensor = F.pil_to_tensor(image)
    mode = v2.InterpolationMode(interpolation.replace("_", "-"))
    expected = F.resize(tensor, list(size), mode, antialias=antialias)
    error = np.abs(got - expected.numpy().transpose(1, 2, 0).astype(int))
    assert error.max() <= (0 if "nearest" in interpolation else 1)


@pytest.mark.parametrize("size", range(1, 10))
def test_crops_are_the_pixels_of_their_box(size: int) -> None:
    image = picture(5, size + 1, size)
    pixels = np.asarray(image)
    for height, width in itertools.product(range(1, size + 1), range(1, size + 2)):
        pipeline = t.compile([t.RandomCrop((height, width))])
        for sample in range(6):
            crops = [(0, 0, 0, 0), *(n for _, n in pipeline.drawn(size, size + 1, sample=sample))]
            x, y = map(int, crops[-1][:2])
            got = pipeline.apply(png(image), sample=sample)
            np.testing.assert_array_equal(got, pixels[y : y + height, x : x + width])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(HEIGHT, 50), (30, WIDTH), (HEIGHT, WIDTH)])
def test_a_crop_of_an_axis_that_was_not_resized_is_a_slice(
    interpolation: Any, antialias: bool, size: tuple[int, int]
) -> None:
    resize = t.Resize(size, interpolation, antialias)
    whole = t.compile([resize]).apply(png(picture(6)))
    got = t.compile([resize, t.CenterCrop(24)]).apply(png(picture(6)))
    expected = F.center_crop(torch.from_numpy(whole).permute(2, 0, 1), [24, 24])
    np.testing.assert_array_equal(got, expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_pads_are_torchvisions(mode: Any) -> None:
    image = picture(0)
    fill: Any = FILL if mode == "constant" else 0
    got = t.compile([t.Pad((9, 5, 2, 1), fill, mode), t.CenterCrop((73, 101))]).apply(png(image))
    expected = F.pad(
        image, [9, 5, 2, 1], fill=list(FILL) if mode == "constant" else 0, padding_mode=mode
    )
    np.testing.assert_array_equal(got, np.asarray(expected))


WARPS: list[t.Transform] = [
    t.RandomRotation(60),
    t.RandomAffine(40, (0.3, 0.2), (0.5, 1.7), 20),
    t.RandomPerspective(0.6, 1),
]


@pytest.mark.parametrize("step", WARPS, ids=lambda step: type(step).__name__)
def test_warps_move_masks_boxes_and_keypoints_with_the_image(step: t.Transform) -> None:
    """A bright dot: boxes and keypoints say where it is after the warp, and the mask has it."""
    pipeline = t.compile([step, t.CenterCrop((HEIGHT, WIDTH))])
    for sample in range(8):
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[30:36, 40:46] = 200
        box = np.array([[40, 30, 46, 36]], np.float32)
        got = pipeline.apply_record(
            {
                "images": [png(np.stack([mask] * 3, axis=-1))],
                "masks": [(png(mask), "int64")],
                "boxes": [(box, "xyxy", False)],
                "keypoints": [(np.array([[43, 33]], np.float32), False)],
            },
            sample=sample,
        )
        assert set(np.unique(got["masks"][0])) <= {0, 200}
        y, x = np.nonzero(got["masks"][0])
        if (
            len(x) == 0
            or min(x.min(), y.min()) == 0
            or x.max() == WIDTH - 1
            or y.max() == HEIGHT - 1
        ):
            continue
        np.testing.assert_allclose(
            got["boxes"][0][0][0], [x.min(), y.min(), x.max() + 1, y.max() + 1], atol=1.01
        )
        np.testing.assert_allclose(
            got["keypoints"][0][0], [x.mean() + 0.5, y.mean() + 0.5], atol=1.01
        )
        bright = got["images"][0][..., 0] > 150
        assert (bright != (got["masks"][0] == 200)).sum() <= 24  # its edges


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_and_keypoints_turn_as_torchvisions(format: str) -> None:
    rng = np.random.default_rng(3)
    corners = np.sort(rng.uniform(0, 67, (20, 2, 2)), axis=1).reshape(20, 4).astype(np.float32)
    boxes = F.convert_bounding_box_format(
        tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(HEIGHT, WIDTH)),
        new_format=format,
    )
    points = tv_tensors.KeyPoints(corners[:, :2], canvas_size=(HEIGHT, WIDTH))
    parts = {
        "images": [png(picture(0))],
        "boxes": [(boxes.numpy(), format, False)],
        "keypoints": [(points.numpy(), False)],
    }
    for angle in (-70.0, 10.0):
        rotation = t.RandomRotation((angle, angle))
        affine = t.RandomAffine((angle, angle), None, (0.7, 0.7), (11, 11, -7, -7))
        cases = [
            (rotation, lambda v, a=angle: F.rotate(v, a)),
            (affine, lambda v, a=angle: F.affine(v, a, [0, 0], 0.7, [11, -7])),
        ]
        perspective = t.RandomPerspective(0.6, 1)
        _, coefficients = drawn(perspective, 0)[0]
        cases.append(
            (perspective, lambda v, c=coefficients: F.perspective(v, None, None, coefficients=c))
        )
        for step, theirs in cases:
            got = t.compile([step, t.CenterCrop((HEIGHT, WIDTH))]).apply_record(parts)
            np.testing.assert_allclose(
                got["boxes"][0][0], theirs(boxes).numpy(), rtol=1e-5, atol=1e-4
            )
            np.testing.assert_allclose(
                got["keypoints"][0], theirs(points).numpy(), rtol=1e-5, atol=1e-4
            )


def test_erasing_overwrites_the_box_that_was_drawn() -> None:
    data = png(picture(0))
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
    plain = t.compile([t.CenterCrop((HEIGHT, WIDTH)), t.ToTensor(), t.Normalize(mean, std)])
    for layout in ("chw", "hwc"):
        for before in (True, False):
            tail: list[t.Transform] = [t.Normalize(mean, std), t.RandomErasing(1, value=(1, 2, 3))]
            steps = [t.CenterCrop((HEIGHT, WIDTH)), t.ToTensor(), *(tail[::-1] if before else tail)]
            pipeline = t.compile(steps, layout=layout)
            for sample in range(6):
                got = pipeline.apply(data, sample=sample)
                expected = plain.apply(data)
                name, (x, y, w, h) = pipeline.drawn(HEIGHT, WIDTH, sample=sample)[-1]
                assert name == "erase"
                value = np.array([1, 2, 3], np.float32)
                value = (value - mean) / std if before else value
                box = np.s_[:, int(y) : int(y + h), int(x) : int(x + w)]
                expected[box] = value[:, None, None]
                got = got if layout == "chw" else got.transpose(2, 0, 1)
                np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_erased_noise_is_normal_and_repeats() -> None:
    steps = [t.Resize((200, 200)), t.ToTensor(), t.RandomErasing(1, (0.8, 0.8), (1, 1), "random")]
    pipeline = t.compile(steps)
    got = pipeline.apply(png(picture(0)), sample=3)
    np.testing.assert_array_equal(got, pipeline.apply(png(picture(0)), sample=3))
    ((_, (x, y, w, h)),) = pipeline.drawn(200, 200, sample=3)
    noise = got[:, int(y) : int(y + h), int(x) : int(x + w)]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.03
    assert (pipeline.apply(png(picture(0)), sample=4) != got).any()


def test_a_step_takes_the_same_draws_whatever_it_draws() -> None:
    """What follows a step does not depend on whether, or on what, the step did."""
    flip = t.RandomHorizontalFlip()
    size = t.CenterCrop((HEIGHT, WIDTH))
    pairs = [
        (t.RandomPerspective(p=0), t.RandomPerspective(p=1)),
        (t.RandomErasing(0), t.RandomErasing(1)),
        (t.ColorJitter(), t.ColorJitter(1, 1, 1, 0.5)),
        (t.RandomAffine(0), t.RandomAffine(9, (0.1, 0.1), (0.5, 2), 30)),
        (t.RandomCrop((HEIGHT, WIDTH)), t.RandomCrop((HEIGHT, WIDTH), padding=8)),
        (t.RandomGrayscale(0), t.RandomGrayscale(1)),
    ]
    for never, always in pairs:
        front = [size, t.ToTensor()] if isinstance(never, t.RandomErasing) else [size]
        for sample in range(20):
            last = [
                t.compile(
                    [*front, step, t.RandomErasing(0.5)]
                    if isinstance(never, t.RandomErasing)
                    else [*front, step, flip, size]
                ).drawn(HEIGHT, WIDTH, sample=sample)
                for step in (never, always)
            ]
            kind = "erase" if isinstance(never, t.RandomErasing) else "horizontal_flip"
            found = [[action for action in actions if action[0] == kind] for actions in last]
            if kind == "erase":
                assert found[1][1:] == found[0]
            else:
                assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t.Resize(9, "lanczos"), "interpolation 'lanczos' is not one of"),  # type: ignore[arg-type]
        (lambda: t.Pad((1, 2, 3)), "padding .* must be one, two or four"),
        (lambda: t.Pad(1, 300), "must be one or three levels"),
        (lambda: t.Pad(1, {"boxes": 1}), "fill has 'boxes'"),
        (lambda: t.RandomCrop(9, padding=-1), "padding -1 must be"),
        (lambda: t.ColorJitter(hue=0.6), "hue 0.6 must be"),
        (lambda: t.ColorJitter(brightness=-1), "brightness -1, as one number"),
        (lambda: t.GaussianBlur(4), "kernel_size 4 must be one or two odd numbers"),
        (lambda: t.GaussianBlur(3, 0), "sigma .* must be two positive numbers"),
        (lambda: t.RandomAffine(3, shear=90), "shear 90 must be"),
        (lambda: t.RandomAffine(3, (2, 0)), "translate = 2.0 must be a number between"),
        (lambda: t.RandomAffine(3, (0.1,)), r"translate \(0.1,\) must be two parts"),
        (lambda: t.RandomAffine(3, (0.1, 0.2, 0.3)), "must be two parts, of the width and"),
        (lambda: t.RandAugment(magnitude=31), "magnitude 31 must be"),
        (lambda: t.AutoAugment("coco"), "policy 'coco' is not one of"),  # type: ignore[arg-type]
        (lambda: t.RandomErasing(value="white"), "value 'white' is not one of"),  # type: ignore[arg-type]
        (lambda: t.RandomPosterize(9), "bits 9 must be"),
        (lambda: t.Grayscale(1), "num_output_channels 1 must be 3"),  # type: ignore[arg-type]
        (lambda: t.Pad(1, 0.5), "fill 0.5 must be one or three levels, whole"),
        (lambda: t.Pad(1, 127.9), "fill 127.9 must be one or three levels, whole"),
        (lambda: t.Pad(1, True), "fill True must be one or three levels, whole"),
        (lambda: t.Pad(1, (True, 0, 0)), "fill .*True.* must be one or three levels, whole"),
        (lambda: t.Pad(1, "9"), "fill '9' must be one or three levels, whole"),  # type: ignore[arg-type]
        (lambda: t.RandomCrop(8, fill=(0.485, 0.456, 0.406)), r"fill \(0.485, .* levels, whole"),
        (lambda: t.RandomRotation(8, fill={"mask": 0.7}), "fill of masks 0.7 must be a whole"),
        (lambda: t.RandAugment(fill={"mask": True}), "fill of masks True must be a whole"),
        (lambda: t.RandomResizedCrop(8, scale=0.5), "scale 0.5 must be two positive numbers"),  # type: ignore[arg-type]
        (lambda: t.RandomResizedCrop(8, ("0.1", "1")), "scale .* must be two positive numbers"),  # type: ignore[arg-type]
        (lambda: t.RandomErasing(scale=0.5), "scale 0.5 must be two ascending parts"),  # type: ignore[arg-type]
        (lambda: t.RandomErasing(value=None), "value None must be one or three numbers"),  # type: ignore[arg-type]
        (lambda: t.RandomAffine(0, translate=0.5), "translate 0.5 must be two parts"),  # type: ignore[arg-type]
        (lambda: t.RandomAffine(0, shear="ab"), "shear 'ab' must be a number"),  # type: ignore[arg-type]
        (lambda: t.RandomAffine(0, center=5), r"center 5 must be \(x, y\)"),  # type: ignore[arg-type]
        (lambda: t.RandomRotation(None), "degrees None must be a number"),  # type: ignore[arg-type]
        (lambda: t.RandomRotation("x"), "degrees 'x' must be a number"),  # type: ignore[arg-type]
        (lambda: t.RandomRotation(True), "degrees True must be a number"),
        (lambda: t.RandomHorizontalFlip("0.5"), "p = '0.5' must be a number"),  # type: ignore[arg-type]
        (lambda: t.RandomHorizontalFlip(None), "p = None must be a number"),  # type: ignore[arg-type]
        (lambda: t.RandomHorizontalFlip(float("nan")), "p = nan must be a number"),
        (lambda: t.GaussianBlur(2.5), "kernel_size 2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: t.Pad("1"), "padding '1' must be a whole number"),  # type: ignore[arg-type]
        (lambda: t.Resize(8, antialias="no"), "Resize: antialias must be True or False"),  # type: ignore[arg-type]
        (lambda: t.RandomCrop(8, pad_if_needed=1), "pad_if_needed must be True or False"),  # type: ignore[arg-type]
        (lambda: t.RandomCrop(8, padding=False), "padding False must be a whole number"),
    ],
)
def test_parameters_are_checked(make: Callable[[], t.Transform], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        make()


def test_a_fill_may_be_a_whole_number_of_any_type() -> None:
    fills: list[Any] = [127, 127.0, np.uint8(127), np.float32(127)]
    for fill in [*fills, {"image": (127.0, 127, 127), "mask": 127.0}]:
        step = t.Pad(1, fill).to_step()[1]
        assert (step["fill"], step["mask_fill"]) == ([127] * 3, 127)


@pytest.mark.parametrize(
    "given, plain",
    [
        (lambda: t.ColorJitter(np.float32(0.5)), lambda: t.ColorJitter(0.5)),
        (lambda: t.Pad(np.int64(1), np.uint8(7)), lambda: t.Pad(1, 7)),
        (lambda: t.Pad(np.array([1, 2])), lambda: t.Pad((1, 2))),
        (lambda: t.GaussianBlur(np.int64(3), np.float32(1)), lambda: t.GaussianBlur(3, 1.0)),
        (lambda: t.RandomErasing(value=np.float32(0.5)), lambda: t.RandomErasing(value=0.5)),
        (lambda: t.Resize(np.int64(8)), lambda: t.Resize(8)),
        (lambda: t.Resize((np.int64(8), 9)), lambda: t.Resize((8, 9))),
        (lambda: t.Resize(8, antialias=np.bool_(False)), lambda: t.Resize(8, antialias=False)),
        (lambda: t.RandomPosterize(np.int64(3)), lambda: t.RandomPosterize(3)),
        (lambda: t.RandAugment(np.int64(3)), lambda: t.RandAugment(3)),
        (lambda: t.RandomAffine(0, shear=np.float32(2)), lambda: t.RandomAffine(0, shear=2)),
    ],
)
def test_numbers_of_numpy_are_taken(
    given: Callable[[], t.Transform], plain: Callable[[], t.Transform]
) -> None:
    assert given().to_step() == plain().to_step()
    before = [t.ToTensor()] if isinstance(plain(), t.RandomErasing) else []
    t.compile([t.Resize((9, 9)), *before, given(), *([] if before else [t.Resize((9, 9))])])


def test_colours_come_before_tensors() -> None:
    with pytest.raises(errors.UsageError, match="RandAugment must come before ToTensor"):
        t.compile([t.Resize((9, 9)), t.ToTensor(), t.RandAugment()])
    with pytest.raises(errors.UsageError, match="RandomErasing needs ToTensor before it"):
        t.compile([t.Resize((9, 9)), t.RandomErasing()])


def test_a_kernel_wider_than_the_image_is_an_error() -> None:
    pipeline = t.compile([t.Resize((5, 5)), t.GaussianBlur(11)])
    with pytest.raises(errors.CorruptionError, match="half the kernel must be smaller"):
        pipeline.apply(png(picture(0)))


# What seed 7, epoch 2, sample 11 draws on 67 x 90 pixels: the same in every release.
GOLDEN: list[tuple[t.Transform, str, list[float]]] = [
    (t.RandomResizedCrop(40), "crop", [6, 0, 69, 66]),
    (t.RandomCrop((50, 60)), "crop", [17, 13, 60, 50]),
    (
        t.RandomRotation(30),
        "warp",
        [0.968189, -0.250218, 9.813785, 0.250218, 0.968189, -10.194168, 0, 0],
    ),
    (
        t.RandomAffine(30, (0.1, 0.2), (0.5, 2), (-5, 5, -9, 9)),
        "warp",
        [0.78745, 0.201494, -0.189198, -0.257358, 0.772875, 10.945538, 0, 0],
    ),
    (
        t.RandomPerspective(p=1),
        "warp",
        [1.400757, -0.162879, -15.766661, 0.133265, 1.237461, -20.294367, 0.00081, -0.003418],
    ),
    (t.ColorJitter(0.4, 0.5, 0.6, 0.1), "brightness", [0.989594]),
    (t.GaussianBlur(3), "gaussian_blur", [1.508864]),
    (t.RandAugment(2, 9), "posterize", [7]),
    (t.TrivialAugmentWide(), "posterize", [5]),
    (t.AutoAugment(), "warp", [1, 0.166667, 0, 0, 1, 0, 0, 0]),
    (t.RandomErasing(1), "erase", [61, 2, 21, 58]),
]


@pytest.mark.parametrize(("step", "name", "numbers"), GOLDEN, ids=lambda v: type(v).__name__)
def test_draws_are_those_of_every_release(
    step: t.Transform, name: str, numbers: list[float]
) -> None:
    size = t.CenterCrop((67, 90))
    erases = isinstance(step, t.RandomErasing)
    steps = [size, t.ToTensor(), step] if erases else [step, size]
    actions = t.compile(steps).drawn(67, 90, seed=7, epoch=2, sample=11)
    made, values = actions[-1 if erases else 0]
    assert made == name
    np.testing.assert_allclose(values, numbers, atol=1e-6)


def test_the_flattest_blur_has_no_negative_weight() -> None:
    image = np.zeros((300, 300, 3), np.uint8)
    image[150] = 255
    pipeline = t.compile([t.Resize((300, 300)), t.GaussianBlur(295, (5000, 5000))])
    assert int(pipeline.apply(png(image)).max()) <= 2


def test_a_mask_that_would_be_a_million_pixels_long_is_refused() -> None:
    pipeline = t.compile([t.Resize(1024), t.CenterCrop(224)])
    narrow = np.zeros((65535, 1), np.uint8)
    parts = {"images": [png(np.zeros((65535, 1, 3), np.uint8))], "masks": [(png(narrow), "uint8")]}
    with pytest.raises(errors.CorruptionError, match="so odd a shape"):
        pipeline.apply_record(parts)
