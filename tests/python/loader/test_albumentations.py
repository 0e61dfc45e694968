"""Transforms that are called as albumentations' are: by the names of what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import UsageError

SIZE = 8


class Basic:
    """In the manner of the library, which is not installed: flips half of the samples."""

    available_keys = frozenset({"image", "mask", "bboxes"})

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, *args: Any, **data: Any) -> dict[str, Any]:
        if args:
            raise KeyError("You have to pass data to augmentations as named arguments")
        if self._random.random() < 0.5:
            data |= {n: data[n][:, ::-1] for n in ("image", "mask") if n in data}
        return data


Basic.__module__ = "albumentations.core.transforms_interface"


class Flip(Basic):
    """Of the user's own: it can be pickled."""


def batches(source: Any, transforms: Any, **more: Any) -> list[Any]:
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "output": "numpy", "tiers": [], **more}
    with nostall.DataLoader(source, 8, transforms=transforms, **options) as made:
        return [each for epoch in made.epochs() for each in epoch]


@pytest.mark.multi
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_an_image_is_passed_by_its_name_and_draws_repeat(
    image_folder: Path, workers: Literal["threads", "processes"]
) -> None:
    source = nostall.ImageFolder(image_folder, index=False)
    plain = batches(source, [t.Resize((SIZE, SIZE))])
    again = batches(source, [t.Resize((SIZE, SIZE)), Flip()], threads=1)
    found = batches(source, [t.Resize((SIZE, SIZE)), Flip()], workers=workers, threads=2)
    flipped = set()
    for (before, _), (one, _), (two, _) in zip(plain, again, found, strict=True):
        np.testing.assert_array_equal(one, two)
        for a, b in zip(before, two, strict=True):
            flipped.add(np.array_equal(b, a[:, ::-1]))
            assert np.array_equal(b, a) or np.array_equal(b, a[:, ::-1])
    assert flipped == {True, False}


class Positional(Basic):
    """Of the user's own, with a call of its own."""

    def __call__(self, picture: Any) -> Any:
        return super().__call__(image=picture)["image"]


def test_a_call_of_the_users_own_stays_as_it_is(image_folder: Path) -> None:
    source = nostall.ImageFolder(image_folder, index=False)
    for images, _ in batches(source, [t.Function(Positional()), t.CenterCrop(SIZE)], decode=True):
        assert images.shape[1:] == (SIZE, SIZE, 3)


def test_images_are_decoded_and_native_steps_go_on(image_folder: Path) -> None:
    source = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(
        source, 8, transforms=[Basic(), t.CenterCrop(SIZE), t.ToTensor()], tiers=[]
    ) as loader:
        assert loader.settings()["called_steps"] == ["Basic"]
        images, _ = next(iter(loader))
        assert images.shape == (8, 3, SIZE, SIZE)


def test_fields_are_passed_by_their_names(tmp_path: Path) -> None:
    for folder in ("image", "mask"):
        (tmp_path / folder).mkdir()
        for i in range(16):
            rows = np.arange(SIZE * SIZE, dtype=np.uint8).reshape(SIZE, SIZE)
            Image.fromarray(rows).save(tmp_path / folder / f"{i}.png")
    parts = {"image": "image", "mask": "mask"}
    boxes = [np.zeros((1, 4), np.float32)] * 16

    def source(name: str) -> nostall.Files:
        schema = {"mask": f.Mask(), name: f.Boxes()}
        return nostall.Files(parts, {name: boxes}, schema=schema, root=tmp_path)

    steps = [t.Resize((SIZE, SIZE)), t.Function(Flip()), t.RandomCrop(SIZE)]
    for transforms in (steps, {("image", "mask", "bboxes"): steps}):
        firsts = []
        for batch in batches(source("bboxes"), transforms):
            np.testing.assert_array_equal(batch["image"][..., 0], batch["mask"])
            firsts += batch["mask"][:, 0, 0].tolist()
        assert set(firsts) == {0, SIZE - 1}
    with pytest.raises(UsageError, match="field boxes: Flip of albumentations would leave it"):
        batches(source("boxes"), steps)
