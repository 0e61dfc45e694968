"""Transforms of torchvision, given to a loader as they are: native where they have equals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import TransformError, UsageError
from nostall.loader._torchvision import recognise

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
    with pytest.raises(TransformError):
        first(image_folder, RECIPES[1], decode=False)


class OneOf(list[Any]):
    """Does one of its members."""

    def __call__(self, image: Any) -> Any:
        return self[-1](image)


class Last(torch.nn.Sequential):
    def forward(self, image: Any) -> Any:
        return self[-1](image)


class Fewer(v2.Compose):
    def forward(self, image: Any) -> Any:
        return self.transforms[-1](image)


class FewerOfV1(v1.Compose):
    def __call__(self, image: Any) -> Any:
        return self.transforms[-1](image)


@pytest.mark.parametrize(
    "own",
    [OneOf, lambda steps: Last(*steps), Fewer, FewerOfV1],
    ids=["list", "Sequential", "Compose", "ComposeOfV1"],
)
@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose])
def test_a_callable_of_several_steps_is_called_itself(
    image_folder: Path, compose: Any, own: Any
) -> None:
    """What it does with them is not known, also where they can be iterated."""
    one = own([v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0)])
    recipe = compose([v2.CenterCrop(8), one, v1.ToTensor()])
    assert any(step is one for step in recognise([recipe], None)[0])
    assert t.from_torchvision(recipe) is None
    images, _, settings = first(image_folder, recipe, shuffle=False)
    assert settings["called_steps"] == [type(one).__name__, "ToTensor"]
    straight, _, _ = first(image_folder, [t.CenterCrop(8), t.ToTensor()], shuffle=False)
    assert torch.allclose(images, straight.flip(2), atol=1e-6)


def test_containers_that_do_all_their_steps_are_read(image_folder: Path) -> None:
    steps = [v2.CenterCrop(8), v2.RandomHorizontalFlip(1.0)]
    for one in (torch.nn.Sequential(*steps), v1.Compose(steps), steps, tuple(steps)):
        found = t.from_torchvision(v2.Compose([one, v1.ToTensor()]))
        assert found is not None and len(found) == 3


def brighter(image: Any) -> Any:
    """Of the user: an array for an image of Pillow or an array."""
    return np.minimum(np.asarray(image), 127) * 2


def test_what_is_called_gets_images_of_pillow(image_folder: Path) -> None:
    """Torchvision's v2 passes arrays through as they are, and its first version refuses them."""
    wanted, _, _ = first(
        image_folder, [v2.RandomHorizontalFlip(1.0), v2.CenterCrop(16), v2.ToImage()]
    )
    for version in (v1, v2):
        tensor = v1.PILToTensor() if version is v1 else v2.ToImage()
        recipe = [version.RandomHorizontalFlip(1.0), Own(0.0), version.CenterCrop(16), tensor]
        for given in (recipe, version.Compose(recipe)):
            images, _, settings = first(image_folder, given)
            assert settings["called_steps"][1] == "Own"
            assert torch.equal(images, wanted)
        # A function of the user's may take bytes or images; the array that it makes is an image.
        given = version.Compose([brighter, version.CenterCrop(16), tensor])
        with pytest.raises(
            TransformError, match=r"CenterCrop takes an image, .* decode=True gives it"
        ):
            first(image_folder, given)
        images, _, _ = first(image_folder, given, decode=True)
        assert images.shape == (8, 3, 16, 16) and not (images % 2).any()
        # What is no image of Pillow's goes on as it is.
        scaled = [lambda image: image.astype(np.float32) / 255, v1.ToTensor()]
        images, _, _ = first(image_folder, [*scaled, version.CenterCrop(16)], decode=True)
        assert images.dtype == torch.float32 and images.shape == (8, 3, 16, 16)
    # A subclass takes what torchvision's class takes.
    with pytest.raises(TransformError, match=r"Own takes an image, .* decode=True gives it"):
        first(image_folder, [Own(0.0), v2.ToImage()])


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


# ------------------------------------------------------------------------- several fields

SIDE = 40
FLOAT = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
FILL = {tv_tensors.Image: (1, 2, 3), tv_tensors.Mask: 255}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> nostall.Files:
    root = tmp_path_factory.mktemp("scenes")
    rng = np.random.default_rng(1)
    for folder in ("image", "mask"):
        (root / folder).mkdir()
        for i in range(6):
            shape = (SIDE, 48, 3) if folder == "image" else (SIDE, 48)
            pixels = rng.integers(0, 200, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    boxes = [np.array([[2, 3, 20, 25], [30, 30, 33, 33]], np.float32)[: i % 3] for i in range(6)]
    points = [np.array([[2, 3, 2], [47, 39, 1]], np.float32)] * 6
    return nostall.Files(
        {"image": "image", "mask": "mask"},
        {
            "boxes": boxes,
            "labels": [np.arange(i % 3) for i in range(6)],
            "points": points,
            "caption": [f"sample {i}" for i in range(6)],
        },
        schema={
            "mask": f.Mask(dtype="int64"),
            "boxes": f.Boxes(),
            "labels": f.Array(dtype="int64", rows_of="boxes"),
            "points": f.Keypoints(values=3),
            "caption": f.Text(),
        },
        root=root,
    )


def whole(data: Any, transforms: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options: dict[str, Any] = {"tiers": [], "seed": 3, "output": "numpy", "shuffle": False, **more}
    with nostall.DataLoader(data, 6, transforms=transforms, **options) as loader:
        return next(iter(loader)), loader.settings()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, f.Ragged):
        return equal(one.values, other.values) and equal(one.offsets, other.offsets)
    return one == other if isinstance(one, list) else np.array_equal(one, other)


def test_recipes_of_several_fields_run_natively(scenes: nostall.Files) -> None:
    moves = [t.RandomAffine(9, fill={"image": (1, 2, 3), "mask": 255}), t.RandomResizedCrop(16)]
    ours = [*moves, t.SanitizeBoundingBoxes(), t.ToTensor(), t.Normalize(MEAN, STD)]
    wanted, _ = whole(scenes, ours)
    recipe = v2.Compose(
        [
            v2.RandomAffine(9, fill=FILL),
            v2.RandomResizedCrop(16),
            v2.ToImage(),
            v2.ToDtype(FLOAT, scale=True),
            v2.ConvertBoundingBoxFormat("XYXY"),
            v2.SanitizeBoundingBoxes(),
            v2.Normalize(MEAN, STD),
            v2.ToPureTensor(),
        ]
    )
    for given in (recipe, {("image", "mask", "boxes", "points", "labels"): recipe}):
        batch, settings = whole(scenes, given)
        names = ["RandomAffine", "RandomResizedCrop", "SanitizeBoundingBoxes", "ToTensor"]
        assert settings["native_steps"] == [*names, "Normalize"] and not settings["called_steps"]
        assert list(batch) == list(wanted)
        assert all(equal(batch[name], wanted[name]) for name in wanted)
    assert len(wanted["labels"].values) == len(wanted["boxes"].values) < 6


def test_what_has_no_equal_gets_what_it_moves(scenes: nostall.Files) -> None:
    """Called with tensors of torchvision, and not with arrays, which it would leave as they are."""
    labels = v2.SanitizeBoundingBoxes(min_size=5, labels_getter=lambda sample: sample["labels"])
    turns = [v2.Resize((16, 24)), Own(1.0), labels, v2.ToImage(), v2.ToDtype(FLOAT, scale=True)]
    batch, settings = whole(scenes, v2.Compose(turns))
    assert settings["native_steps"] == ["Resize"]
    assert settings["called_steps"] == ["Own", "SanitizeBoundingBoxes", "ToImage", "ToDtype"]
    mirrored = [t.Resize((16, 24)), t.RandomHorizontalFlip(1.0), t.SanitizeBoundingBoxes(5)]
    wanted, _ = whole(scenes, [*mirrored, t.ToTensor()])
    assert np.abs(batch["image"] - wanted["image"]).max() < 1e-6
    assert 0 < len(batch["labels"].values) < 6
    for name in ("mask", "boxes", "labels", "points", "caption"):
        assert equal(batch[name], wanted[name]), name
    # Nothing native fixes the size: all is called, from images of Pillow on, also with a schema.
    seen: list[Any] = []
    every = v2.Compose([v2.Lambda(lambda x: seen.append(type(x)) or x), *turns[1:]])
    ragged = t.Function(every, schema={"image": f.Array(dtype="float32", shape=(3, None, None))})
    batch, settings = whole(scenes, [ragged, lambda sample: {"wide": sample["image"].shape[2]}])
    assert Image.Image in {kind.__mro__[-2] for kind in seen} and tv_tensors.Mask in seen
    assert settings["called_steps"] == ["Compose", "<lambda>"]
    assert batch["wide"].tolist() == [48] * 6
    assert batch["image"].sample(0).shape == (3, SIDE, 48) and batch["mask"].sample(0).shape == (
        SIDE,
        48,
    )


def test_what_is_called_behind_native_tensors_knows_their_size(scenes: nostall.Files) -> None:
    clean = v2.SanitizeBoundingBoxes(min_size=5, labels_getter=lambda sample: sample["labels"])
    float_first = [v2.Resize((16, 24)), v2.ToImage(), v2.ToDtype(FLOAT, scale=True)]
    batch, settings = whole(scenes, [*float_first, Own(1.0), clean])
    assert settings["native_steps"] == ["Resize", "ToTensor"]
    mirrored = [t.Resize((16, 24)), t.RandomHorizontalFlip(1.0), t.SanitizeBoundingBoxes(5)]
    wanted, _ = whole(scenes, [*mirrored, t.ToTensor()])
    assert all(equal(batch[name], wanted[name]) for name in wanted)
    assert len(wanted["boxes"].values) > 0


@pytest.mark.parametrize("behind", [[], [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]])
def test_what_is_called_gets_images_of_the_usual_layout(scenes: nostall.Files, behind: Any) -> None:
    own = [v2.Resize((16, 24)), *behind, Own(1.0)]
    for given in (own, {"image": own}, [own[0], lambda sample: {}, *own[1:]]):
        chosen = {"fields": ["image"]}
        wanted, _ = whole(scenes, given, **chosen)
        for name, asked in (("layout", "hwc" if behind else "chw"), ("dtype", "float16")):
            with pytest.raises(UsageError, match=rf"{name}='{asked}' does nothing here: .*behind"):
                whole(scenes, given, **chosen, **{name: asked})
            # It may be that of all loaders.
            usual = nostall.LoaderOptions(**{name: asked})
            batch, _ = whole(scenes, given, **chosen, options=usual)
            assert equal(batch["image"], wanted["image"])
    tail = [Own(1.0), t.ToTensor()]
    last, _ = whole(scenes, [v2.Resize((16, 24)), *tail], fields=["image"], layout="hwc")
    assert last["image"].shape == (6, 16, 24, 3)


def test_parts_of_the_canvas_stay_parts(scenes: nostall.Files) -> None:
    parts = [np.array([[0.25, 0.5]], np.float32)] * 6
    boxes = [np.array([[0.0, 0.5, 0.25, 1.0]], np.float32)] * 6
    data = nostall.Files(
        {"image": "image"},
        {"boxes": boxes, "points": parts},
        schema={"boxes": f.Boxes(normalised=True), "points": f.Keypoints(normalised=True)},
        root=scenes.root,
    )
    batch, _ = whole(data, [v2.Resize((16, 24)), Own(1.0)])
    assert np.array_equal(batch["boxes"].values, [[0.75, 0.5, 1.0, 1.0]] * 6)
    assert np.allclose(batch["points"].values, [[17 / 24, 0.5]] * 6)  # of pixels, as torchvision


def test_torchvisions_without_a_meaning_here_are_refused(scenes: nostall.Files) -> None:
    mix = v2.MixUp(num_classes=3, labels_getter=lambda batch: batch["labels"])
    for transforms, why in [
        ([v2.Resize((8, 8)), mix], "MixUp of torchvision.*give nostall.transforms.MixUp"),
        ({"mask": [v2.Resize((8, 8))]}, "field mask: Resize of torchvision is for images"),
        ({"image": [v2.Resize((8, 8))]}, "'mask'.*would not lie on its image|field mask"),
    ]:
        with pytest.raises(UsageError, match=why):
            whole(scenes, transforms)
    with pytest.raises(UsageError, match="no image among caption"):
        whole(scenes, [Own(1.0)], fields=["caption"])
