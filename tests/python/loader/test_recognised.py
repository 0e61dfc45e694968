"""Transforms of torchvision, given to a loader as they are: native where they have equals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import nostall
from nostall import transforms as t

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.1]


class Own(v2.RandomHorizontalFlip):
    """A subclass may do anything."""


def first(folder: Path, transforms: Any, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    options: dict[str, Any] = {"tiers": [], "seed": 3, "output": "torch", **more}
    with nostall.DataLoader(
        nostall.ImageFolder(folder, index=False), 8, transforms=transforms, **options
    ) as loader:
        return *next(iter(loader)), loader.settings()


NATIVE = [t.RandomResizedCrop(16), t.RandomHorizontalFlip(), t.ToTensor(), t.Normalize(MEAN, STD)]
RECIPES: list[Any] = [
    v2.Compose(
        [
            v2.RandomResizedCrop(16),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    ),
    v1.Compose(
        [
            v1.RandomResizedCrop(16),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(MEAN, STD),
        ]
    ),
    [t.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v1.ToTensor(), t.Normalize(MEAN, STD)],
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["v2", "v1", "mixed"])
def test_recipes_run_natively(
    image_folder: Path, recipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nostall"):
        images, labels, settings = first(image_folder, recipe)
    wanted, also, _ = first(image_folder, NATIVE)
    assert torch.equal(images, wanted) and torch.equal(labels, also)
    names = ["RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"]
    assert settings["native_steps"] == names and settings["called_steps"] == []
    assert f"transforms: native {', '.join(names)}; called none" in caplog.text


def test_the_end_says_what_a_batch_is(image_folder: Path) -> None:
    size = [v2.Resize((16, 16))]
    pil, _, _ = first(image_folder, size)
    tensors, _, settings = first(image_folder, v2.Compose([*size, v2.PILToTensor()]))
    assert pil.shape == (8, 16, 16, 3) and torch.equal(tensors, pil.permute(0, 3, 1, 2))
    assert settings["transforms"] == "native"
    both = v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(alpha=0.5, num_classes=3)])
    wanted = first(
        image_folder,
        [*NATIVE, t.RandomChoice([t.MixUp(num_classes=3), t.CutMix(alpha=0.5, num_classes=3)])],
    )
    for recipe in ([*RECIPES[0].transforms, both], v2.Compose([*RECIPES[0].transforms, both])):
        images, targets, _ = first(image_folder, recipe)
        assert torch.equal(images, wanted[0]) and torch.equal(targets, wanted[1])


def test_what_has_no_equal_is_called_with_what_it_takes(image_folder: Path) -> None:
    for recipe, native, called in [
        ([v2.Resize((16, 16)), Own(1.0), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
         ["Resize"], ["Own", "ToImage", "ToDtype"]),
        ([v1.Resize((16, 16)), v1.Lambda(lambda pil: pil.transpose(0)), v1.ToTensor()],
         ["Resize"], ["Lambda", "ToTensor"]),
        ([v2.ToImage(), v2.Resize((16, 16)), Own(1.0), v2.ToDtype(torch.float32, scale=True)],
         ["Resize"], ["Own", "ToDtype"]),
        ([v2.Resize((16, 16)), v1.ToTensor(), Own(1.0)], ["Resize", "ToTensor"], ["Own"]),
    ]:  # fmt: skip
        images, _, settings = first(image_folder, v2.Compose(recipe), shuffle=False)
        assert settings["native_steps"] == native and settings["called_steps"] == called
        straight, _, _ = first(image_folder, [t.Resize((16, 16)), t.ToTensor()], shuffle=False)
        assert torch.allclose(images, straight.flip(3), atol=2 / 255)
    # Native steps that fix no size cannot be cut off: then all are called, as decode=False asks too.
    flips = [v2.ToImage(), v2.RandomHorizontalFlip(0), Own(0.0), v2.CenterCrop(16)]
    images, _, settings = first(image_folder, flips)
    assert settings["native_steps"] == [] and images.shape == (8, 3, 16, 16)
    with pytest.raises(nostall.errors.TransformError):
        first(image_folder, RECIPES[1], decode=False)


def test_a_field_may_have_them(image_folder: Path) -> None:
    transforms = {"image": RECIPES[0]}
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder),
        8,
        transforms=transforms,
        tiers=[],
        seed=3,
        output="numpy",
    ) as loader:
        batch = next(iter(loader))
    assert np.array_equal(batch["image"], first(image_folder, NATIVE, output="numpy")[0])
