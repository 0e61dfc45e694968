"""Native steps and callables in one list: for images, and for samples of several fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from loader_ranks import own_job
from PIL import Image

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.errors import CorruptionError, TransformError, UsageError

SIZE = 16
HEAD = [t.RandomResizedCrop(SIZE), t.RandomHorizontalFlip()]
TAIL = [t.RandomVerticalFlip(), t.RandAugment(), t.ToTensor(), t.Normalize([0.5] * 3, [0.2] * 3)]


def batches(data: Any, transforms: Any, size: int = 8, **more: Any) -> list[Any]:
    source = nostall.ImageFolder(data, index=False) if isinstance(data, Path) else data
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "output": "numpy", "tiers": [], **more}
    with nostall.DataLoader(source, size, transforms=transforms, **options) as made:
        return [each for epoch in made.epochs() for each in epoch]


def unchanged(image: Any) -> Any:
    assert image.dtype == np.uint8 and image.shape[2] == 3
    return image


def brighter(image: Any, context: nostall.Context) -> Any:
    return np.clip(image.astype(int) + context.numpy().integers(-20, 20), 0, 255).astype(np.uint8)


def test_a_callable_between_native_steps_does_not_change_their_draws(image_folder: Path) -> None:
    # Not above: the processes of loaders import this module.
    import torch

    plain = batches(image_folder, [*HEAD, *TAIL])
    between = batches(image_folder, [*HEAD, unchanged, *TAIL], threads=3)
    as_tensor = [
        *HEAD,
        lambda x: torch.from_numpy(x).permute(2, 0, 1),
        t.RandomVerticalFlip(p=0),
        *TAIL,
    ]
    for (images, labels), (same, also), (tensors, _) in zip(
        plain, between, batches(image_folder, as_tensor, epochs=1) * 2, strict=True
    ):
        assert np.array_equal(images, same) and np.array_equal(labels, also)
        assert tensors.dtype == images.dtype and tensors.shape == images.shape
    # Where it begins, and is twice; of images of several sizes.
    first = batches(image_folder, [unchanged, *HEAD, unchanged, *TAIL], decode=True)
    close = [np.abs(a - b).mean() for (a, _), (b, _) in zip(plain, first, strict=True)]
    assert max(close) < 0.3  # decoded whole and not at half the size
    last = batches(image_folder, [*HEAD, brighter], threads=1)
    assert last[0][0].shape == (8, SIZE, SIZE, 3) and last[0][0].dtype == np.uint8
    for (images, _), (again, _) in zip(last, batches(image_folder, [*HEAD, brighter]), strict=True):
        assert np.array_equal(images, again)


@pytest.mark.multi
def test_processes_give_what_threads_give(image_folder: Path) -> None:
    steps = [*HEAD, brighter, *TAIL]
    options: dict[str, Any] = {"epochs": 1, "dtype": "float16"}
    processes = batches(image_folder, steps, workers="processes", threads=1, **options)
    for (a, _), (b, _) in zip(processes, batches(image_folder, steps, **options), strict=True):
        assert a.dtype == np.float16 and np.array_equal(a, b)


def test_lists_that_cannot_be_are_refused_with_the_order_that_works(image_folder: Path) -> None:
    float_first = [*HEAD, t.ToTensor(), lambda x: x]
    assert batches(image_folder, float_first, epochs=1)[0][0].dtype == np.float32
    for steps, error, why in [
        ([*HEAD, unchanged, t.Normalize([0] * 3, [1] * 3)], UsageError,
         "behind unchanged: Normalize needs ToTensor before it; .* behind the last callable"),
        ([*float_first, t.RandomVerticalFlip()], TransformError,
         r"<lambda> gives float32 of shape \(3, 16, 16\), and uint8 .* can be continued from"),
        ([t.Resize(20), unchanged], UsageError, "images of different sizes.*add a Resize"),
        ([*HEAD, 3], UsageError, "has 3, which is neither a step"),
        ([*HEAD, t.ToTensor], UsageError, "neither a step .* nor a callable: give an object"),
    ]:  # fmt: skip
        with pytest.raises(error, match=why):
            batches(image_folder, steps)
    for more, why in [
        ({"decode": True}, "a callable that no native step is before"),
        ({"collate": list, "transforms": [*HEAD, unchanged, t.MixUp()]}, "collate= makes"),
    ]:
        with pytest.raises(UsageError, match=why):
            batches(image_folder, **{"transforms": [*HEAD, unchanged], **more})
    with pytest.raises(UsageError, match="dtype='float16' does nothing here"):
        batches(image_folder, [unchanged], decode=True, dtype="float16")


def not_of_class_1(image: Any, context: nostall.Context) -> Any:
    if context.sample % 3 == 1:
        raise CorruptionError("class 1")
    return image


def test_what_stands_in_went_through_the_native_steps(make_folder: Any) -> None:
    data = nostall.ImageFolder(make_folder(20), index=False)
    options: dict[str, Any] = {"shuffle": False, "epochs": 1}
    (images, _), *_ = batches(data, [*HEAD, t.ToTensor()], 20, **options)
    ((got, labels),) = batches(
        data, [*HEAD, not_of_class_1, t.ToTensor()], 20, on_error="substitute", **options
    )
    for i in range(20):
        (same,) = [j for j in range(20) if np.array_equal(got[i], images[j])]
        assert labels[i] == data.labels[same] and same % 3 != 1 and (i % 3 == 1 or same == i)
    # A file that is damaged is replaced by the native part.
    Path(data.describe(4)).write_bytes(b"\xff\xd8\xff")
    fresh = nostall.ImageFolder(Path(data.describe(0)).parent.parent, index=False)
    ((got, _),) = batches(fresh, [*HEAD, unchanged], 20, on_error="substitute", **options)
    assert len(got) == 20
    with pytest.raises(CorruptionError, match=r"\(sample 4\) cannot be used"):
        batches(fresh, [*HEAD, unchanged], 20, **options)


# ------------------------------------------------------------------------- several fields


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and masks."""
    root = tmp_path_factory.mktemp("in turn")
    rng = np.random.default_rng(1)
    for folder in ("image", "mask"):
        (root / folder).mkdir()
        for i in range(9):
            shape = (30, 40, 3) if folder == "image" else (30, 40)
            pixels = rng.integers(0, 200, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def several(root: Path) -> nostall.Files:
    boxes = [np.array([[2, 3, 20, 25]] * (i % 3), np.float32).reshape(-1, 4) for i in range(9)]
    return nostall.Files(
        {"image": "image", "mask": "mask"},
        {
            "label": np.arange(9),
            "boxes": boxes,
            "classes": [np.arange(i % 3, dtype=np.int64) for i in range(9)],
            "caption": [f"sample {i}" for i in range(9)],
            "meta": [{"i": i} for i in range(9)],
        },
        schema={
            "mask": f.Mask(),
            "boxes": f.Boxes(),
            "classes": f.Array(dtype="int64", rows_of="boxes"),
            "caption": f.Text(),
            "meta": f.Json(),
        },
        root=root,
    )


def whole_sample(sample: Any, context: nostall.Context) -> Any:
    assert list(sample) == ["image", "mask", "label", "boxes", "classes", "caption", "meta"]
    i = context.sample
    assert sample["caption"] == f"sample {i}" and sample["meta"] == {"i": i} == {
        "i": sample["label"]
    }
    assert sample["image"].shape == (SIZE, SIZE, 3) and sample["mask"].shape == (SIZE, SIZE)
    assert sample["boxes"].shape == (i % 3, 4) == (len(sample["classes"]), 4)
    return {
        "image": 255 - sample["image"],
        "boxes": sample["boxes"][:1],
        "classes": sample["classes"][:1],
        "tokens": np.arange(i, dtype=np.int32),
        "length": len(sample["caption"]),
        "words": sample["caption"].split(),
        "meta": None,
    }


TOKENS = {"tokens": f.Array(dtype="int64", shape=(None,), padded=True)}


@pytest.mark.multi
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_callable_takes_the_sample_and_changes_fields(
    several: nostall.Files, workers: Literal["threads", "processes"]
) -> None:
    options: dict[str, Any] = {"shuffle": False, "epochs": 1, "threads": 2}
    plain = batches(several, HEAD, 4, **options)
    steps = [*HEAD, t.Function(whole_sample, schema=TOKENS)]
    found = batches(several, steps, 4, workers=workers, **options)
    for k, (before, after) in enumerate(zip(plain, found, strict=True)):
        samples = range(4 * k, min(4 * k + 4, 9))
        assert list(after) == [*list(before)[:-1], "tokens", "length", "words"]
        assert np.array_equal(after["image"], 255 - before["image"])
        assert np.array_equal(after["mask"], before["mask"])
        assert (
            np.array_equal(after["label"], before["label"])
            and after["caption"] == before["caption"]
        )
        for j, i in enumerate(samples):
            assert np.array_equal(after["boxes"].sample(j), before["boxes"].sample(j)[:1])
            assert np.array_equal(after["classes"].sample(j), range(min(i % 3, 1)))
            assert after["tokens"].values[j].tolist()[:i] == list(range(i))
        assert after["tokens"].lengths.tolist() == list(samples)
        assert after["tokens"].values.dtype == np.int64
        assert after["length"].tolist() == [8] * len(samples)
        assert after["words"] == [["sample", str(i)] for i in samples]


def test_native_steps_go_on_with_what_a_callable_gives(several: nostall.Files) -> None:
    import torch

    options: dict[str, Any] = {"shuffle": False, "output": "torch", "batch": "tuple"}
    chosen = ["image", "mask", "boxes", "classes", "label"]
    tail = [t.RandomCrop(12), t.SanitizeBoundingBoxes(), t.ToTensor()]
    plain = batches(several, [*HEAD, *tail], 4, fields=chosen, **options)
    found = batches(several, [*HEAD, lambda sample: {}, *tail], 4, fields=chosen, **options)
    for before, after in zip(plain, found, strict=True):
        for a, b in zip(before, after, strict=True):
            for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (a, b)), strict=True):
                assert x is y is None or (x.dtype == y.dtype and torch.equal(x, y))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "int64"])
def test_masks_go_on_in_the_type_of_their_kind(root: Path, dtype: str) -> None:
    parts = {"image": "image", "mask": "mask"}
    source = nostall.Files(parts, schema={"mask": f.Mask(dtype=dtype)}, root=root)
    cut, flip, tensor = t.RandomResizedCrop(SIZE), t.RandomHorizontalFlip(), t.ToTensor()
    plain = batches(source, [cut, flip, tensor], 4)

    def found(*steps: Any) -> list[Any]:
        made = batches(source, list(steps), 4)
        assert len(made) == len(plain)
        for before, after in zip(plain, made, strict=True):
            assert after["mask"].dtype == dtype and np.array_equal(after["image"], before["image"])
        return [batch["mask"] for batch in made]

    masks = [batch["mask"] for batch in plain]
    for before, after in zip(masks, found(cut, lambda sample: {}, flip, tensor), strict=True):
        assert np.array_equal(after, before)
    # Of other types too that a callable gives.
    for of in (lambda mask: mask > 100, lambda mask: mask.astype(np.int64) + 27):
        changed = found(cut, lambda sample, of=of: {"mask": of(sample["mask"])}, flip, tensor)
        for before, after in zip(masks, changed, strict=True):
            assert np.array_equal(after, of(before))


def test_masks_that_native_steps_cannot_take_are_told(root: Path) -> None:
    parts = {"image": "image", "mask": "mask"}
    source = nostall.Files(parts, schema={"mask": f.Mask(dtype="int64")}, root=root)

    def ignoring(sample: Any) -> Any:
        return {"mask": np.where(sample["mask"] < 50, -100, sample["mask"])}

    for step, why in [
        (ignoring, r"field mask: ignoring gives labels from -100 to \d+, .* 0 to 65535: .* as 255"),
        (lambda sample: {"mask": sample["mask"] + 65500}, r"labels from 65\d+ to 65\d+, and"),
        (
            lambda sample: {"mask": sample["mask"] / 2},
            r"gives float64 of shape \(16, 16\), and whole",
        ),
        (lambda sample: {"mask": sample["mask"][None]}, r"gives int64 of shape \(1, 16, 16\), and"),
    ]:
        with pytest.raises(TransformError, match=why):
            batches(source, [*HEAD, step, t.RandomVerticalFlip()], 4)
    plain = batches(source, [*HEAD, t.RandomVerticalFlip()], 4)
    for before, after in zip(
        plain, batches(source, [*HEAD, t.RandomVerticalFlip(), ignoring], 4), strict=True
    ):
        assert np.array_equal(after["mask"], ignoring(before)["mask"])


@pytest.mark.parametrize(
    ("dtype", "wide", "most"), [("uint8", "uint16", 255), ("float16", "float64", 65504)]
)
def test_numbers_that_the_type_of_their_field_cannot_hold_are_told(
    dtype: str, wide: str, most: int
) -> None:
    source = nostall.Files({}, {"x": np.arange(6)}, schema={"x": f.Scalar(dtype=dtype)})

    def with_fourth(number: int) -> list[Any]:
        steps = {"x": lambda x: np.asarray(number if x == 3 else x, wide)}
        return batches(source, steps, 6, shuffle=False, epochs=1)

    (batch,) = with_fourth(most)
    assert batch["x"].dtype == dtype and batch["x"].tolist() == [0, 1, 2, most, 4, 5]
    told = rf"field x: the callables give {wide} .*sample 3\), .* has {dtype} .*cannot hold"
    with pytest.raises(UsageError, match=told):
        with_fourth(2 * most)


def test_callables_of_one_field_take_its_value(several: nostall.Files) -> None:
    transforms = {
        ("image", "mask", "boxes"): [*HEAD, lambda sample: {"image": sample["image"] // 2}],
        "caption": str.upper,
        "label": [lambda label: label + 100, lambda label: float(label)],
    }
    for batch in batches(several, transforms, 4, shuffle=False, epochs=1):
        assert batch["image"].max() < 128 and batch["caption"][0].startswith("SAMPLE ")
        assert batch["label"].dtype == np.float64 and batch["label"].min() >= 100
    # Images that nothing native has touched are decoded, unless they should not be.
    (first, *_) = batches(several, {"image": lambda x: x[:5, :5]}, 4, epochs=1)
    assert first["image"].shape == (4, 5, 5, 3)
    (first, *_) = batches(several, {"image": len}, 4, epochs=1, decode=False)
    assert first["image"].shape == (4,) and first["image"].min() > 1000
    mixed = [t.Resize((8, 8)), lambda x: x, t.ToTensor(), t.MixUp(num_classes=9)]
    for batch in batches(several, {"image": mixed}, 4, epochs=1, fields=["image", "label"]):
        assert batch["label"].shape == (len(batch["image"]), 9)
        assert batch["image"].dtype == np.float32


def fails_for_two(sample: Any, context: nostall.Context) -> Any:
    if context.sample == 2:
        raise CorruptionError("two")
    return {"number": context.sample}


def test_samples_of_fields_that_fail_are_told_or_replaced_whole(several: nostall.Files) -> None:
    steps = [*HEAD, fails_for_two]
    with pytest.raises(CorruptionError, match=r"sample 2\) cannot be used: two"):
        batches(several, steps, 9)
    (batch, *_) = batches(several, steps, 9, on_error="substitute", shuffle=False)
    other = int(batch["number"][2])
    assert other != 2 and batch["label"][2] == other and batch["meta"][2] == {"i": other}
    assert np.array_equal(batch["image"][2], batch["image"][other])
    assert len(batch["boxes"].sample(2)) == other % 3

    def sized(sample: Any, context: nostall.Context) -> Any:
        return {"new": np.zeros(1 + context.sample)}

    for function, why in [
        (sized, r"field new: .*float64 of shape \(2,\) for .*sample 1\).*float64 of shape \(1,\)"),
        (
            lambda sample: {} if sample["label"] == 1 else {"new": 1},
            r"field new: .*no value for .*sample 1",
        ),
        (lambda sample: {"label": 0.5}, None),
    ]:
        if why is None:
            assert batches(several, [*HEAD, function], 9)[0]["label"].dtype == np.float64
            continue
        with pytest.raises(UsageError, match=why):
            batches(several, [*HEAD, function], 9, shuffle=False)
    with pytest.raises(TransformError, match="gives list for a sample of several fields"):
        batches(several, [*HEAD, list], 9)
    with pytest.raises(UsageError, match="'nothing', which is no field of this loader"):
        batches(several, {"nothing": len}, 9)
    with pytest.raises(UsageError, match="is no kind of nostall"):
        t.Function(len, schema={"new": int})  # type: ignore[dict-item]


@pytest.mark.parametrize("size", [1, 9])
def test_a_field_is_left_out_of_all_samples_or_of_none(several: nostall.Files, size: int) -> None:
    def found(function: Any) -> list[Any]:
        return batches(several, [*HEAD, function], size, shuffle=False, epochs=1)

    def caption_of_others(sample: Any) -> Any:
        return {"caption": None if sample["label"] == 0 else sample["caption"].upper()}

    def new_of_others(sample: Any) -> Any:
        return {"new": None if sample["label"] == 0 else 1}

    for function, name in ((caption_of_others, "caption"), (new_of_others, "new")):
        with pytest.raises(
            UsageError, match=rf"field {name}: .*sample 1\) has a value, and .* None"
        ):
            found(function)
    # What a callable does not name keeps the value of the source.
    with pytest.raises(UsageError, match=r"field caption: .*sample 1\) has a value, and .* None"):
        found(lambda sample: {"caption": None} if sample["label"] == 0 else {})
    # A new field has no value where it is not given.
    for batch in found(lambda sample: {"new": None} if sample["label"] == 0 else {}):
        assert "new" not in batch and "caption" in batch


def test_an_empty_share_has_the_fields_of_others(several: nostall.Files) -> None:
    # 9 samples in global batches of 4, resumed on two ranks: the last batch has one sample.
    steps = [*HEAD, t.Function(whole_sample, schema=TOKENS)]
    with nostall.DataLoader(several, 4, transforms=steps, tiers=[], epochs=1) as one:
        next(iter(one))
        state = json.loads(json.dumps(one.state_dict()))
    with nostall.DataLoader(
        several, 2, transforms=steps, tiers=[], epochs=1, rank=1, world_size=2, job=own_job("turn"),
        peers="off", output="numpy",
    ) as rank:  # fmt: skip
        rank.load_state_dict(state)
        *_, last = rank
    assert len(last["image"]) == 0 and last["image"].shape == (0, SIZE, SIZE, 3)
    assert last["length"].shape == (0,) and last["words"] == [] and "meta" not in last
    assert len(last["tokens"].values) == 0 and last["caption"] == []


def test_rows_go_with_boxes_that_a_list_for_their_image_takes_out(root: Path) -> None:
    boxes = np.array([[0, 0, 2, 2], [12, 8, 30, 25]], np.float32)  # the first is cut off
    source = nostall.Files(
        {"image": "image"},
        {"boxes": [boxes] * 9, "classes": [np.array([i, 10 + i]) for i in range(9)]},
        schema={"boxes": f.Boxes(), "classes": f.Array(dtype="int64", rows_of="boxes")},
        root=root,
    )

    def sees_its_own(sample: Any) -> Any:
        assert list(sample) == ["image", "boxes"]
        return {}

    tail = [t.CenterCrop(20), t.SanitizeBoundingBoxes()]
    for steps in (
        [*tail, sees_its_own],
        [sees_its_own, *tail],
        [sees_its_own, *tail, sees_its_own],
    ):
        transforms = {("image", "boxes"): steps, "classes": lambda classes: classes}
        options: dict[str, Any] = {"shuffle": False, "epochs": 1}
        for batch in batches(source, transforms, 9, **options):
            assert [len(batch["boxes"].sample(i)) for i in range(9)] == [1] * 9
            assert batch["classes"].values.tolist() == list(range(10, 19))
            assert batch["classes"].values.dtype == np.int64

    def drops(sample: Any) -> Any:
        return {"boxes": sample["boxes"][1:]}

    with pytest.raises(
        TransformError, match="field classes: drops leaves 2 rows beside 1 of 'boxes'"
    ):
        batches(source, {("image", "boxes"): [drops, *tail]}, 9)


def writes_in_place(sample: Any) -> Any:
    if sample["meta"] is not None:
        sample["meta"]["i"] += 100
    return {}


@pytest.mark.multi
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_is_written_into_json_is_kept(
    tmp_path: Path, workers: Literal["threads", "processes"]
) -> None:
    for i in range(6):
        (tmp_path / f"{i}.json").write_text(json.dumps({"i": i} if i % 2 else None))
    source = nostall.Files({"meta": "."}, schema={"meta": f.Json()}, root=tmp_path)
    options: dict[str, Any] = {"shuffle": False, "epochs": 1, "workers": workers, "threads": 1}
    made = batches(source, writes_in_place, 3, **options)
    assert [meta for batch in made for meta in batch["meta"]] == [
        None,
        {"i": 101},
        None,
        {"i": 103},
        None,
        {"i": 105},
    ]


def test_empty_lists_are_empty_arrays_of_the_kind_that_is_stated() -> None:
    source = nostall.Files({}, {"x": np.arange(4)})
    kinds = {"ids": f.Array(dtype="int64", shape=(None,)), "rows": f.Array(shape=(None, 4))}

    def function(sample: Any) -> Any:
        n = int(sample["x"]) % 2
        return {"ids": [7] * n, "rows": [[1.0, 2.0, 3.0, 4.0]] * n}

    (batch,) = batches(source, [t.Function(function, kinds)], 4, shuffle=False, epochs=1)
    assert batch["ids"].values.tolist() == [7, 7] and batch["ids"].values.dtype == np.int64
    assert batch["rows"].values.shape == (2, 4) and batch["rows"].values.dtype == np.float32
    assert batch["ids"].offsets.tolist() == batch["rows"].offsets.tolist() == [0, 0, 1, 1, 2]

    def ragged(sample: Any) -> Any:
        return {"rows": [[1.0], [2.0, 3.0]] if sample["x"] == 2 else []}

    told = r"field rows: the callables give lists of several lengths for .*sample 2\), .*float32"
    with pytest.raises(UsageError, match=told):
        batches(source, [t.Function(ragged, kinds)], 4, shuffle=False, epochs=1)


def as_tensors(sample: Any) -> Any:
    import torch

    x = torch.full((3,), float(sample["x"]))
    return {"half": x.to(torch.bfloat16), "weight": x.clone().requires_grad_()}


@pytest.mark.multi
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_tensors_that_numpy_does_not_take(workers: Literal["threads", "processes"]) -> None:
    import torch

    source = nostall.Files({}, {"x": np.arange(4)})
    options: dict[str, Any] = {"shuffle": False, "epochs": 1, "workers": workers, "threads": 1}
    (batch,) = batches(source, as_tensors, 4, output="torch", **options)
    expected = torch.arange(4.0)[:, None].expand(4, 3)
    assert torch.equal(batch["half"], expected.to(torch.bfloat16))
    assert torch.equal(batch["weight"], expected) and not batch["weight"].requires_grad
    with pytest.raises(
        UsageError, match=r"field half: .* tensors of torch.bfloat16 of shape \(3,\)"
    ):
        batches(source, as_tensors, 4, **options)

    def other(sample: Any) -> Any:
        return {"half": torch.zeros(2 + int(sample["x"]), dtype=torch.bfloat16)}

    told = r"field half: .*bfloat16 of shape \(3,\) for .*sample 1\), .*bfloat16 of shape \(2,\)"
    with pytest.raises(UsageError, match=told):
        batches(source, other, 4, output="torch", shuffle=False, epochs=1)


def writes_into_the_image(sample: Any) -> Any:
    sample["image"][:] = 7
    return {}


@pytest.mark.multi
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_decoded_image_may_be_written_to(
    several: nostall.Files, workers: Literal["threads", "processes"]
) -> None:
    options: dict[str, Any] = {"epochs": 1, "workers": workers, "threads": 1}
    for batch in batches(several, writes_into_the_image, 9, fields=["image", "label"], **options):
        assert (batch["image"] == 7).all()


def test_pipelines_may_be_dropped_while_another_thread_takes_one() -> None:
    from nostall.loader._in_turn import NativeSteps

    steps = NativeSteps([t.CenterCrop(4)], "f", 0, None, None)

    class Cleared(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()  # another thread does
            return found

    image = np.zeros((9, 9, 3), np.uint8)
    steps._made = Cleared()
    for _ in range(2):
        assert steps(image, nostall.Context(0, 0, 0)).shape == (4, 4, 3)
