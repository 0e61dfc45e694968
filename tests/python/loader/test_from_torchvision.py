"""Transforms of torchvision v2, recognised."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from nostall import transforms as t
from nostall.errors import UsageError

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.1]
Mode = v2.InterpolationMode


def picture() -> tuple[Image.Image, bytes]:
    small = np.random.default_rng(1).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((90, 67), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return image, buffer.getvalue()


def test_steps_take_the_modes_of_torchvision() -> None:
    assert t.Resize(8, interpolation=Mode.BICUBIC) == t.Resize(8, interpolation="bicubic")
    assert t.Resize(8, Mode.NEAREST_EXACT).interpolation == "nearest_exact"
    assert (
        t.RandomResizedCrop(8, interpolation=Mode.NEAREST).to_step()[1]["interpolation"]
        == "nearest"
    )
    for step in (
        t.RandomRotation(3, Mode.BILINEAR),
        t.RandomAffine(3, interpolation=Mode.BILINEAR),
        t.RandomPerspective(interpolation=Mode.BILINEAR),
        t.RandAugment(interpolation=Mode.BILINEAR),
        t.TrivialAugmentWide(interpolation=Mode.BILINEAR),
        t.AutoAugment(interpolation=Mode.BILINEAR),
    ):
        assert step.interpolation == "bilinear"
    with pytest.raises(UsageError, match="interpolation 'lanczos' is not one of bilinear"):
        t.Resize(8, interpolation=Mode.LANCZOS)


def test_a_recipe_becomes_native() -> None:
    recipe = v2.Compose(
        [
            v2.RandomResizedCrop(64, scale=(0.2, 1), interpolation=Mode.BICUBIC),
            v2.RandomHorizontalFlip(0.3),
            v2.RandAugment(2, 7, fill=[1, 2, 3]),
            v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
            v2.Normalize(MEAN, STD),
            v2.RandomErasing(0.25, value="random"),
        ]
    )
    assert t.from_torchvision(recipe) == [
        t.RandomResizedCrop((64, 64), (0.2, 1), interpolation="bicubic"),
        t.RandomHorizontalFlip(0.3),
        t.RandAugment(2, 7, fill=[1, 2, 3]),
        t.ToTensor(),
        t.Normalize(MEAN, STD),
        t.RandomErasing(0.25, value="random"),
    ]


FIXED: list[Any] = [
    v2.Resize((41, 50), Mode.NEAREST),
    v2.Resize((40, 50), Mode.BICUBIC, antialias=False),
    v2.Pad([1, 2, 3, 4], 7, "constant"),
    v2.Pad(3, padding_mode="reflect"),
    v2.RandomCrop((73, 98), [1, 2, 7, 4], fill=9),
    v2.RandomRotation((30, 30), Mode.BILINEAR, center=[3, 9], fill=[4, 5, 6]),
    v2.RandomAffine((9, 9), None, (0.7, 0.7), (5, 5, -3, -3), fill=8),
    v2.ColorJitter((0.3, 0.3)),
    v2.ColorJitter(hue=(0.2, 0.2)),
    v2.Grayscale(3),
    v2.GaussianBlur([3, 7], (0.8, 0.8)),
    v2.RandomSolarize(99, 1),
    v2.RandomPosterize(3, 1),
    v2.RandomInvert(1),
    v2.RandomAutocontrast(1),
    v2.RandomEqualize(1),
    v2.RandomAdjustSharpness(2, 1),
]


@pytest.mark.parametrize("transform", FIXED, ids=lambda x: type(x).__name__)
def test_each_gives_what_torchvision_gives(transform: Any) -> None:
    """Parameters without chance, so that both do the same to one image."""
    image, data = picture()
    expected = np.asarray(transform(image)).astype(int)
    steps = t.from_torchvision(transform)
    assert steps is not None
    got = t.compile([*steps, t.CenterCrop(expected.shape[:2])]).apply(data).astype(int)
    assert np.abs(got - expected).max() <= 1


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomRotation(30, expand=True),
        v2.Resize(40, max_size=50),
        v2.Resize(40, Mode.LANCZOS),
        v2.Grayscale(1),
        v2.ElasticTransform(),
        v2.RandomApply([v2.Grayscale(3)]),
        v2.Pad(1, {torch.Tensor: 3}),
        [v2.ToImage(), v2.ColorJitter(hue=0.1)],  # tensors have other hues than Pillow
        [v2.ToImage(), v2.ToDtype(torch.float16, scale=True)],
        [v2.ToImage(), v2.ToDtype(torch.float32)],
        [v2.ToDtype(torch.float32, scale=True)],
        [v2.Resize(9), lambda image: image],
        [v2.Resize((8, 8)), v2.PILToTensor()],  # channels first, where bytes have them last
        [v2.Resize((8, 8)), v2.ToImage()],
        [v2.ToImage(), v2.Resize((8, 8)), v2.ToPureTensor()],
        v2.SanitizeBoundingBoxes(labels_getter=None),
        v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample["classes"]),
        type("Mine", (v2.Resize,), {})(9),
    ],
)
def test_what_has_no_equal_is_none(transform: Any) -> None:
    assert t.from_torchvision(transform) is None
