"""MixUp and CutMix of finished batches against torchvision v2 with the parameters that were drawn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_ranks import own_job
from PIL import Image
from torchvision.transforms import v2

import nostall
from nostall import _native
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import UsageError

SIZE, CLASSES, SEED = 24, 3, 5
STEPS = [t.RandomResizedCrop(SIZE), t.RandomHorizontalFlip(), t.ToTensor()]
BOTH = t.RandomChoice([t.MixUp(alpha=0.8, num_classes=CLASSES), t.CutMix(num_classes=CLASSES)])


def mixing(
    *mixers: tuple[str, float, float], p: float = 1.0, classes: int = 0, shift: int = 1
) -> Any:
    return _native.compile_mixing(list(mixers), p=p, classes=classes, shift=shift)


MIXED = mixing(("mixup", 0.8, 1), ("cutmix", 1, 1))


def by_torchvision(
    drawn: tuple[str, float, tuple[int, ...]], images: Any, labels: Any, classes: int = CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """What v2 gives for (kind, lam, box), with its own random numbers replaced."""
    kind, lam, (x, y, width, height) = drawn
    if kind == "none":
        one_hot = torch.nn.functional.one_hot(torch.as_tensor(labels), classes)
        return np.asarray(images), one_hot.float().numpy()
    step: Any = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[kind](num_classes=classes)
    parameters = {"lam": lam, "lam_adjusted": lam, "box": (x, y, x + width, y + height)}
    step.make_params = lambda _: parameters
    mixed, targets = step(torch.as_tensor(images), torch.as_tensor(labels))
    return mixed.numpy(), targets.numpy()


def loader(folder: Path, transforms: Any, batch: int = 8, **more: Any) -> nostall.DataLoader:
    options: dict[str, Any] = {"epochs": 2, "seed": SEED, "output": "numpy", "tiers": [], **more}
    return nostall.DataLoader(nostall.ImageFolder(folder), batch, transforms=transforms, **options)


def batches(folder: Path, transforms: Any, **more: Any) -> list[tuple[Any, Any]]:
    with loader(folder, transforms, **more) as made:
        return [batch for epoch in made.epochs() for batch in epoch]


def test_the_draws_are_those_of_the_format() -> None:
    def drawn(batch: int, epoch: int = 1) -> Any:
        return MIXED.drawn(224, 224, seed=7, epoch=epoch, batch=batch)

    # docs/formats/order.md
    found = [(kind, pytest.approx(lam), box) for kind, lam, box in map(drawn, range(4))]
    assert found == [
        ("mixup", 0.72264713, (0, 0, 0, 0)),
        ("cutmix", 0.50015944, (0, 72, 165, 152)),
        ("mixup", 0.83306098, (0, 0, 0, 0)),
        ("cutmix", 0.92338967, (135, 16, 62, 62)),
    ]
    assert drawn(0, epoch=2) != drawn(0)
    seldom = mixing(("mixup", 1, 1), ("cutmix", 1, 3), p=0.25)
    kinds = [seldom.drawn(8, 8, batch=i)[0] for i in range(4000)]
    assert kinds.count("none") / 4000 == pytest.approx(0.75, abs=0.03)
    assert kinds.count("cutmix") / kinds.count("mixup") == pytest.approx(3, abs=0.6)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 3.0, 200.0])
def test_lam_has_the_beta_distribution(alpha: float) -> None:
    one = mixing(("mixup", alpha, 1))
    lam = np.array([one.drawn(8, 8, batch=i)[1] for i in range(8000)])
    assert np.all((lam >= 0) & (lam <= 1)) and lam.mean() == pytest.approx(0.5, abs=0.02)
    assert lam.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_values_are_those_of_torchvision(dtype: str, layout: str, samples: int) -> None:
    rng = np.random.default_rng(samples)
    shape = (samples, 3, 101, 67)  # more than a block
    images = rng.normal(0, 2, shape) if dtype != "uint8" else rng.integers(0, 256, shape)
    images = images.astype(dtype)
    labels = rng.integers(0, CLASSES, samples)
    seen = set()
    for batch in range(6):
        drawn = MIXED.drawn(101, 67, batch=batch)
        seen.add(drawn[0])
        planes = images.astype(np.float32) if drawn[0] == "mixup" else images
        wanted, probabilities = by_torchvision(drawn, planes, labels)
        got = np.ascontiguousarray(images if layout == "chw" else images.transpose(0, 2, 3, 1))
        native = mixing(("mixup", 0.8, 1), ("cutmix", 1, 1), classes=CLASSES)
        lam, targets = native.apply(got, labels, batch=batch)
        got = got if layout == "chw" else got.transpose(0, 3, 1, 2)
        assert lam == drawn[1] and np.array_equal(targets, probabilities)
        if drawn[0] == "cutmix" or samples == 1:
            assert np.array_equal(got, images if samples == 1 else wanted)
        elif dtype == "float32":
            assert np.array_equal(got, wanted)
        else:  # a sample of bytes is rounded to the nearest level
            close = (
                {"rtol": 2e-3, "atol": 2e-3} if dtype == "float16" else {"rtol": 0, "atol": 0.51}
            )
            assert np.allclose(got.astype(np.float32), wanted, **close)
    assert seen == {"mixup", "cutmix"}


@pytest.mark.parametrize("shift", [2, 3, 4, 9])
def test_partners_may_be_further_away(shift: int) -> None:
    images = np.random.default_rng(0).normal(size=(6, 3, 5, 4)).astype(np.float32)
    lam, _ = mixing(("mixup", 1, 1), shift=shift).apply(
        (got := images.copy()), np.zeros(6, np.int64)
    )
    rolled = np.roll(images, shift, 0)
    assert np.allclose(got, lam * images + (1 - lam) * rolled, atol=1e-6)


def test_a_loader_mixes_what_it_would_hand_out(image_folder: Path) -> None:
    plain = batches(image_folder, STEPS)
    mixed = batches(image_folder, [*STEPS, BOTH], threads=3)
    kinds = []
    for i, ((images, labels), (got, targets)) in enumerate(zip(plain, mixed, strict=True)):
        drawn = MIXED.drawn(SIZE, SIZE, seed=SEED, epoch=i // 8, batch=i % 8)
        kinds.append(drawn[0])
        wanted, probabilities = by_torchvision(drawn, images, labels)
        assert np.array_equal(got, wanted) and np.array_equal(targets, probabilities)
        assert targets.dtype == np.float32 and targets.sum(1) == pytest.approx(1)
    assert set(kinds) == {"mixup", "cutmix"} and len(plain[-1][1]) == 5
    # By callables, whose results are mixed when they are a batch.
    pipeline = t.compile(STEPS)

    def called(encoded: Any, context: nostall.Context) -> Any:
        return pipeline.apply(encoded, seed=SEED, epoch=context.epoch, sample=context.sample)

    for (images, targets), (got, probabilities) in zip(
        mixed, batches(image_folder, [called, BOTH], output="torch"), strict=True
    ):
        assert np.array_equal(got.numpy(), images)
        assert np.array_equal(probabilities.numpy(), targets)


def test_images_of_callables_may_lie_in_any_order(image_folder: Path) -> None:
    """NumPy stacks transposed images in the order of their memory."""
    pipeline = t.compile([*STEPS], layout="hwc")

    def called(encoded: Any, context: nostall.Context) -> Any:
        image = pipeline.apply(encoded, seed=SEED, epoch=context.epoch, sample=context.sample)
        return image.transpose(2, 0, 1)

    wanted = batches(image_folder, [*STEPS, BOTH])
    for (images, _), (got, _) in zip(wanted, batches(image_folder, [called, BOTH]), strict=True):
        assert not got.flags.c_contiguous and np.array_equal(got, images)


def test_ranks_and_resumed_jobs_mix_alike(image_folder: Path) -> None:
    steps = [*STEPS, t.MixUp()]
    one = [labels.lam for _, labels in batches(image_folder, steps)]
    ranks: list[list[Any]] = [[], []]

    def rank(number: int) -> None:
        ranks[number] = batches(
            image_folder, steps, batch=4, rank=number, world_size=2, job=own_job("mix"), peers="off"
        )

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in ranks:
        assert [labels.lam for _, labels in found] == one
    for _, labels in ranks[0]:  # with another sample of the same rank's
        assert np.array_equal(labels.others, np.roll(labels.labels, 1))
    with loader(image_folder, steps) as first:
        taken = iter(first)
        whole = [next(taken) for _ in range(5)]
        state = first.state_dict()
        whole += list(taken)
    with loader(image_folder, steps) as second:
        second.load_state_dict(state)
        for (images, labels), (got, mixed) in zip(whole[5:], second, strict=True):
            assert np.array_equal(images, got) and labels.lam == mixed.lam


def test_repeated_augmentation_mixes_with_another_sample(image_folder: Path) -> None:
    order = nostall.RepeatedAugmentation(3)
    found = batches(image_folder, [*STEPS, t.MixUp()], order=order, epochs=1)
    plain = batches(image_folder, STEPS, order=order, epochs=1)
    for (images, labels), (got, mixed) in zip(plain, found, strict=True):
        assert np.array_equal(mixed.others, np.roll(labels, 3))
        rolled = np.roll(images, 3, 0)
        assert np.allclose(got, mixed.lam * images + (1 - mixed.lam) * rolled, atol=1e-6)


def test_labels_of_numbers_and_batches_that_are_not_mixed(image_folder: Path) -> None:
    files = sorted(image_folder.rglob("*.jpg"))[:10]
    data = nostall.FileList(files, np.linspace(0, 1, 10, dtype=np.float32))
    options: dict[str, Any] = {"tiers": [], "output": "torch", "shuffle": False}
    with nostall.DataLoader(data, 5, transforms=[*STEPS, t.CutMix()], **options) as made:
        for _, (lam, labels, others) in made:
            assert 0 <= lam <= 1 and torch.equal(others, labels.roll(1, 0))
    never = t.MixUp(p=0, num_classes=CLASSES)
    ((images, targets), *_) = batches(image_folder, [*STEPS, never], shuffle=False)
    ((plain, labels), *_) = batches(image_folder, STEPS, shuffle=False)
    assert np.array_equal(images, plain) and np.array_equal(targets, np.eye(CLASSES)[labels])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> nostall.Files:
    root = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(1)
    for folder in ("images", "masks"):
        (root / folder).mkdir()
        for i in range(9):
            shape = (30, 40, 3) if folder == "images" else (30, 40)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    return nostall.Files(
        {"image": "images", "mask": "masks"},
        {"label": np.arange(9, dtype=np.uint8), "weight": rng.random(9).astype(np.float32)},
        schema={
            "mask": f.Mask(),
            "label": f.Scalar(dtype="uint8"),
            "weight": f.Scalar(dtype="float32"),
        },
        root=root,
    )


def test_batches_of_several_fields_are_mixed(several: nostall.Files) -> None:
    options: dict[str, Any] = {"seed": SEED, "output": "numpy", "tiers": [], "batch": "dict"}
    options["fields"] = ["image", "label", "weight"]
    mixed = t.RandomChoice([t.MixUp(alpha=0.8, num_classes=9), t.CutMix(num_classes=9)])
    with (
        nostall.DataLoader(several, 4, transforms=STEPS, **options) as plain,
        nostall.DataLoader(several, 4, transforms=[*STEPS, mixed], **options) as made,
        nostall.DataLoader(
            several, 4, transforms={"image": [*STEPS, t.MixUp()]}, **options
        ) as lean,
    ):
        for i, (before, after, pairs) in enumerate(zip(plain, made, lean, strict=True)):
            drawn = MIXED.drawn(SIZE, SIZE, seed=SEED, batch=i)
            labels = before["label"].astype(np.int64)
            images, targets = by_torchvision(drawn, before["image"], labels, 9)
            assert list(after) == ["image", "label", "weight"]
            # A batch of one sample is left as it is, and torchvision rounds it.
            assert np.allclose(after["image"], images, rtol=0, atol=1e-7 if i == 2 else 0)
            assert np.array_equal(after["label"], targets)
            assert np.array_equal(after["weight"], before["weight"])
            assert np.array_equal(pairs["label"].labels, labels)


def _second_is_small(sample: Any) -> Any:
    return {"small": np.zeros((3, 4, 4), np.float32)}


def test_what_cannot_be_mixed_is_refused(image_folder: Path, several: nostall.Files) -> None:
    with pytest.raises(UsageError, match=r"\.jpg \(sample \d+\) has the label 2.*num_classes=2"):
        batches(image_folder, [*STEPS, t.MixUp(num_classes=2)])
    for steps, why in [
        ([t.MixUp(), *STEPS], "MixUp mixes the samples of a batch: it stands once, at the end"),
        ([*STEPS, t.CutMix(), t.MixUp()], "CutMix mixes the samples of a batch: it stands once"),
        ([lambda raw: np.zeros((4, 4), np.uint8), t.MixUp()], r"a batch of shape \(8, 4, 4\)"),
        ([lambda raw: np.zeros((3, 4, 4)), t.MixUp()], "uint8, float16 or float32"),
    ]:
        with pytest.raises(UsageError, match=why):
            batches(image_folder, steps)
    with pytest.raises(UsageError, match="collate= makes"):
        loader(image_folder, [lambda raw: raw, t.MixUp()], collate=list)
    with pytest.raises(UsageError, match="at the end of transforms= of a DataLoader"):
        t.compile([*STEPS, t.MixUp()])
    data = nostall.FileList(sorted(image_folder.rglob("*.jpg")), np.zeros(61, np.float32))
    with pytest.raises(UsageError, match=r"those of .* are float32: leave it out"):
        nostall.DataLoader(data, 4, transforms=[*STEPS, t.MixUp(num_classes=3)])
    for transforms, more, why in [
        ([*STEPS, t.MixUp()], {}, "MixUp mixes images, and 'mask'.*is of Mask: leave it out"),
        ([*STEPS, t.MixUp(labels="no")], {"fields": ["image", "label"]}, "labels=, one of label"),
        ([*STEPS, t.MixUp()], {"fields": ["image"]}, "there are none"),
        (
            [*STEPS, t.MixUp(num_classes=9, labels="weight")],
            {"fields": ["image", "weight"]},
            "a field of integers",
        ),
    ]:
        with pytest.raises(UsageError, match=why):
            nostall.DataLoader(several, 4, transforms=transforms, batch="dict", tiers=[], **more)
    twice = nostall.Files(
        {"image": "images", "small": "images"},
        {"label": np.arange(9)},
        root=several.root,
    )
    sizes = {("image", "small"): [*STEPS, _second_is_small, t.CutMix(num_classes=9)]}
    with (
        nostall.DataLoader(twice, 4, transforms=sizes, tiers=[]) as made,
        pytest.raises(
            UsageError, match=r"one shape.*image has \(3, \d+, \d+\), small has \(3, 4, 4\)"
        ),
    ):
        next(iter(made))
    changed = [lambda sample: {"image": np.zeros((3, 4, 4), np.float32)}]
    steps = [*changed, t.MixUp(num_classes=9, labels="weight")]
    fields = ["image", "weight"]
    with (
        nostall.DataLoader(several, 4, transforms=steps, fields=fields, tiers=[]) as made,
        pytest.raises(UsageError, match="are float32: leave it out"),
    ):
        next(iter(made))
    assert type(t.MixUp(num_classes=np.int64(9)).num_classes) is int
    for make, why in [
        (lambda: t.MixUp(alpha=0), "alpha = 0 must be a number between"),
        (lambda: t.CutMix(num_classes=0), "num_classes 0 must be a whole number"),
        (lambda: t.MixUp(num_classes=2.5), "num_classes 2.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: t.MixUp(alpha="1"), "alpha = '1' must be a number between"),  # type: ignore[arg-type]
        (lambda: t.MixUp(p=2), "p = 2 must be a number between"),
        (lambda: t.RandomChoice([]), "must be some of MixUp and CutMix"),
        (lambda: t.RandomChoice([t.MixUp(), t.CutMix()], p=[1]), "a weight, 0 or more, for each"),
        (lambda: t.RandomChoice([t.MixUp(num_classes=3), t.CutMix()]), "num_classes differs"),
    ]:
        with pytest.raises(UsageError, match=why):
            make()
