"""What cannot be meant is refused in a sentence; what fails is told by its right name."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import prefork
import pytest
from loader_ranks import own_job
from PIL import Image

import nostall
from nostall import _native
from nostall import transforms as t
from nostall.errors import CorruptionError, TransformError, UsageError
from nostall.loader._python_transforms import PythonStage

CROP = [t.RandomResizedCrop(16, scale=(0.1, 0.4)), t.RandomHorizontalFlip(), t.ToTensor()]


def make(folder: Path, **options: Any) -> nostall.DataLoader:
    arguments: dict[str, Any] = {"batch_size": 4, "tiers": [], "output": "numpy"}
    return nostall.DataLoader(nostall.ImageFolder(folder, index=False), **(arguments | options))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"shuffle": "yes"}, "shuffle must be True or False, or None, not 'yes'"),
        ({"drop_last": 1}, "drop_last must be True or False, not 1"),
        ({"epochs": "3"}, "epochs must be an integer from 1 to .*, or None, not '3'"),
        ({"batch_size": "16"}, "batch_size must be an integer .*, not '16'"),
        ({"batch_size": True}, "batch_size must be an integer .*, not True"),
        ({"threads": "all"}, "threads must be an integer from 1 to 1024, or None, not 'all'"),
        ({"dtype": np.float32}, 'dtype must be "uint8", "float16" or "float32", or None, not'),
        ({"layout": "nchw"}, "layout must be"),
        ({"on_error": "skip"}, 'on_error must be "raise" or "substitute"'),
        ({"reader": "fast"}, "reader must be"),
        ({"scheme": "mine"}, "scheme must be"),
        ({"tiers": 5}, 'tiers must be "auto", a tier as text, or a list of tiers, not 5'),
        ({"tiers": [5]}, "tiers must be"),
        ({"tiers": "ram:2000000TiB"}, "GiB of memory, which no machine has"),
        ({"collate": 3}, "collate must be a function, or None"),
        ({"num_workers": 4}, "no option num_workers: pass threads="),
        ({"collate_fn": list}, "no option collate_fn: pass collate="),
        ({"cache": 1}, "no option cache: pass tiers="),
        ({"batchsize": 4}, r"no option batchsize: did you mean batch_size=\?"),
        ({"order": [1, 2], "shuffle": True}, "shuffle=True does not go with order= a sequence"),
        ({"order": "keyed", "shuffle": False}, 'shuffle=False does not go with order= "keyed"'),
        ({"transforms": dict}, "transforms is the class dict: give an object of it"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(
    image_folder: Path, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        make(image_folder, **wrong)
    assert "\n" not in str(caught.value)


_WAY = "pass the steps as transforms= to nostall.DataLoader"


@pytest.mark.parametrize(
    ("open_it", "told"),
    [
        (
            lambda: nostall.ImageFolder("/", transform=str),
            f"ImageFolder has no option transform: {_WAY}",
        ),
        (lambda: nostall.ImageFolder("/", str), f"ImageFolder has no option transform: {_WAY}"),
        (
            lambda: nostall.ImageFolder("/", target_transform=str),
            "change those of a batch in the loop",
        ),
        (
            lambda: nostall.ImageFolder("/", loader=str),
            "pass a function of the bytes as transforms=",
        ),
        (
            lambda: nostall.ImageFolder("/", is_valid_file=str),
            "pass the files that count to nostall.FileList",
        ),
        (
            lambda: nostall.ImageFolder("/", False),
            "takes arguments after root by their names, not False",
        ),
        (lambda: nostall.ImageFolder("/", extension=1), r"extension: did you mean extensions=\?"),
        (
            lambda: nostall.ImageNet("/", "val", transform=str),
            f"ImageNet has no option transform: {_WAY}",
        ),
        (lambda: nostall.COCO("/", "a.json", str), f"COCO has no option transform: {_WAY}"),
        (lambda: nostall.VOC("/", transforms=str), f"VOC has no option transforms: {_WAY}"),
    ],
)
def test_arguments_of_torchvision_are_refused_with_the_way(
    open_it: Callable[[], Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        open_it()


@pytest.mark.parametrize(
    "open_it",
    [
        nostall.ImageFolder,
        lambda path: nostall.FileList(["a"], root=path if path is not None else 5),
        lambda path: nostall.FileList([path]),
        nostall.TarShards,
        lambda path: nostall.TarShards([path]),
        nostall.TFRecord,
        nostall.Parquet,
        nostall.LMDB,
        lambda path: nostall.HDF5(path, "x"),
        nostall.Manifest,
        lambda path: nostall.COCO("/", path),
    ],
)
@pytest.mark.parametrize("path", [None, 7, b"data"])
def test_what_is_no_path_is_refused(open_it: Callable[[Any], Any], path: Any) -> None:
    with pytest.raises(
        UsageError, match=r"must be a path, as str or pathlib\.Path, not "
    ) as caught:
        open_it(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("open_it", "told"),
    [
        (
            lambda: nostall.ImageFolder("s3://bucket/train"),
            "s3://bucket/train is no folder: .*Object",
        ),
        (
            lambda: nostall.ObjectFolder("/data/train"),
            "/data/train/ is not a URL .*: nostall.Image",
        ),
        (
            lambda: nostall.FileList("/data"),
            "not '/data': for all files below .* pass root='/data'",
        ),
    ],
)
def test_what_opens_another_place_is_named(open_it: Callable[[], Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        open_it()


def plane(image: Any) -> Any:
    return image[:, :, 0]


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_callable_that_takes_bytes_for_an_image_is_told(image_folder: Path, workers: str) -> None:
    told = "given the bytes of the file: decode=True gives it the image"
    with (
        make(image_folder, transforms=plane, workers=workers, threads=1) as loader,
        pytest.raises(TransformError, match=told),
    ):
        next(iter(loader))
    with (
        make(image_folder, transforms=plane, workers=workers, threads=1, decode=False) as loader,
        pytest.raises(TransformError) as caught,
    ):
        next(iter(loader))
    assert told not in str(caught.value)


@pytest.mark.parametrize("state", [None, {}, {"a": 1}, {"version": 1}, [1]])
def test_what_is_no_state_of_a_loader_is_refused(image_folder: Path, state: Any) -> None:
    with make(image_folder) as loader, pytest.raises(UsageError, match="not a state of a loader"):
        loader.load_state_dict(state)


TYPED = """
import functools
import operator
import sys
import nostall

def first(raw):
    return raw[:4]

data = nostall.ImageFolder(sys.argv[1], index=False)
nostall.DataLoader(data, 4, transforms=first, tiers=[])
named = functools.partial(operator.is_not, {"__main__": ["__main__", "first"], "at": "__main__"})
nostall.DataLoader(data, 4, transforms=named, tiers=[], workers="processes").close()
print("data are sent", flush=True)
nostall.DataLoader(data, 4, transforms=first, tiers=[], workers="processes")
"""


def test_a_callable_of_an_interpreter_is_not_sent_to_processes(image_folder: Path) -> None:
    run = prefork.run(["-c", TYPED, str(image_folder)], torch=True, timeout=60)
    assert run.returncode == 1
    assert "data are sent" in run.stdout, run.stderr
    assert "typed into a notebook or an interpreter" in run.stderr.splitlines()[-1]


def flat(image: Any) -> Any:
    return image.ravel()[:1]


def test_options_that_would_do_nothing_are_refused(
    image_folder: Path,
) -> None:
    fields = {"fields": ["image"]}
    for idle, arguments in (
        ({"dtype": "float32"}, {}),
        ({"layout": "chw"}, {}),
        ({"dtype": "float32"}, {"transforms": flat}),
        ({"layout": "chw"}, {"transforms": flat}),
        ({"dtype": "float32"}, fields),
        ({"decode": True}, {}),
        ({"decode": False}, {"transforms": CROP}),
        ({"decode": True}, {**fields, "transforms": CROP}),
        ({"workers": "processes"}, {}),
        ({"workers": "processes"}, {"transforms": CROP}),
    ):
        (name,) = idle
        with pytest.raises(UsageError, match=rf"{name}=.* does nothing here: it goes with"):
            make(image_folder, **idle, **arguments)
    items = nostall.Cached([1, 2], makers=1)
    try:
        for idle in ({"dtype": "uint8"}, {"layout": "chw"}, {"decode": True}):
            with pytest.raises(UsageError, match="does nothing here"):
                nostall.DataLoader(items, 1, **idle)
        with pytest.raises(UsageError, match=r"workers='processes' does nothing .* then="):
            nostall.DataLoader(items, 1, workers="processes")
    finally:
        items.close()
    # None is no choice, and options from elsewhere may be for other loaders.
    make(image_folder, dtype=None, decode=None, workers="threads").close()
    make(image_folder, options=nostall.LoaderOptions(dtype="uint8")).close()


def test_a_tier_larger_than_the_machine_keeps_a_small_data_set(image_folder: Path) -> None:
    with make(image_folder, tiers="ram:99999GiB", epochs=2) as loader:
        assert sum(len(y) for epoch in loader.epochs() for _, y in epoch) == 2 * 61
        assert loader.settings()["tiers"] == [["ram", loader.dataset.total_bytes, ""]]


def test_an_epoch_without_a_batch_is_told(
    image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = nostall.ImageFolder(image_folder)
    loader = nostall.DataLoader(folder, len(folder) + 1, epochs=1, drop_last=True)
    assert list(loader) == []
    words = f"an epoch has no batch: {len(folder)} samples cannot fill a batch of {len(folder) + 1}"
    assert words in caplog.text


def test_numbers_and_flags_of_numpy_become_plain(image_folder: Path) -> None:
    numbers = {"batch_size": np.int64(8), "epochs": np.int32(90), "seed": np.uint64(2**64 - 1)}
    with make(image_folder, **numbers, shuffle=np.False_, drop_last=np.True_) as loader:
        loader.set_epoch(np.int64(3))
        _, labels = next(iter(loader))
        assert labels.tolist() == loader.dataset.labels[:8].tolist()
        kept = loader.state_dict() | loader.settings()
        assert json.loads(json.dumps(kept)) == kept
        assert (loader.epochs_total, loader.drop_last) == (90, True)
        assert type(loader.batch_size) is int and type(loader.drop_last) is bool


def test_what_is_fixed_cannot_be_set(image_folder: Path) -> None:
    loader = make(image_folder)
    with pytest.raises(UsageError, match="batch_size is fixed at 4"):
        loader.batch_size = 8
    assert loader.batch_size == 4
    assert "ImageFolder" in repr(loader) and "61 samples of 3 classes" in repr(loader)
    assert "16 batches an epoch" in repr(loader)


# ------------------------------------------------------------------------------- labels


def test_floating_point_labels_keep_their_type_and_values(image_folder: Path) -> None:
    paths = sorted(image_folder.glob("*/*.jpg"))[:10]
    for labels in (
        [0.5 * i for i in range(10)],
        np.linspace(-3, 3, 10, dtype=np.float32),
        np.arange(10, dtype=np.float16),
    ):
        source = nostall.FileList(paths, labels)
        expected = np.asarray(labels)
        assert source.labels.dtype == expected.dtype
        assert source.labels.tolist() == expected.tolist()
        with nostall.DataLoader(source, 4, shuffle=False, tiers=[], output="numpy") as loader:
            got = [y for _, y in loader]
        assert all(y.dtype == expected.dtype for y in got)
        assert np.concatenate(got).tolist() == expected.tolist()
    other = nostall.FileList(paths, [0.25 * i for i in range(10)])
    assert other.fingerprint != nostall.FileList(paths, [0.5 * i for i in range(10)]).fingerprint
    assert nostall.FileList(paths, np.arange(10, dtype=np.uint8)).labels.dtype == np.int64


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([[1, 2], [3, 4]], r"one number per file, not an array of shape \(2, 2\)"),
        ([[1, 2], [3]], "one number per file"),
        (["cat", "dog"], r"not text \('cat'\): number the classes"),
        ([1j, 2j], "not complex128"),
        (np.array([2**63, 1], np.uint64), "not uint64"),
        ([None, 1], "not object"),
    ],
)
def test_labels_that_are_no_numbers_are_refused(image_folder: Path, labels: Any, told: str) -> None:
    paths = sorted(image_folder.glob("*/*.jpg"))[:2]
    with pytest.raises(UsageError, match=told):
        nostall.FileList(paths, labels)


# ------------------------------------------------------------------------------- draws


def test_a_sample_that_an_order_repeats_is_cut_anew(image_folder: Path) -> None:
    with make(image_folder, batch_size=8, order=[5] * 15 + [6], transforms=CROP) as loader:
        images = [image.tobytes() for x, _ in loader for image in x]
    assert len(set(images)) == 16
    encoded = nostall.ImageFolder(image_folder, index=False).read(5)
    pipeline = t.compile(CROP)
    assert images[:15] == [
        pipeline.apply(encoded, sample=5, occurrence=k).tobytes() for k in range(15)
    ]
    # The first one is what it is where nothing repeats.
    with make(image_folder, order=[5], transforms=CROP) as loader:
        assert next(iter(loader))[0].tobytes() == images[0]
    # On any number of ranks.
    parts = []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "batch_size": 4}
        with make(image_folder, order=[5] * 15 + [6], transforms=CROP, **options) as loader:
            parts.append([image.tobytes() for x, _ in loader for image in x])
    assert [x for pair in zip(*parts, strict=True) for x in pair] == images


# ------------------------------------------------------------------------------- batches


def as_dict(images: list[Any]) -> dict[str, Any]:
    return {"images": list(images)}


@pytest.mark.parametrize("error", [CancelledError, BrokenExecutor])
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_collate_raises_is_not_taken_for_an_end(
    image_folder: Path, error: type[Exception], workers: Any
) -> None:
    def collate(samples: list[Any]) -> Any:
        raise error("of the program's own work")

    with (
        make(image_folder, transforms=len, collate=collate, workers=workers, threads=1) as loader,
        pytest.raises(error, match="the program's own"),
    ):
        next(iter(loader))


def test_collate_makes_the_batches_of_every_kind_of_transform(image_folder: Path) -> None:
    for transforms in (CROP, None, lambda raw: raw[:10]):
        with make(image_folder, transforms=transforms, collate=as_dict) as loader:
            plain = make(image_folder, transforms=transforms)
            with plain:
                for (made, labels), (x, y) in zip(loader, plain, strict=True):
                    assert labels.tolist() == y.tolist()
                    assert [a.tolist() for a in made["images"]] == [
                        x[i].tolist() for i in range(len(x))
                    ]


@pytest.mark.parametrize("result", [{"a": 1}, (1, 2), "text", None])
def test_results_that_make_no_array_name_collate(image_folder: Path, result: Any) -> None:
    told = rf"callable gives {type(result).__name__} for .*jpg.*: pass collate="
    with (
        make(image_folder, transforms=lambda raw: result) as loader,
        pytest.raises(UsageError, match=told),
    ):
        next(iter(loader))
    with make(image_folder, transforms=lambda raw: result, collate=list) as loader:
        assert next(iter(loader))[0] == [result] * 4


# ------------------------------------------------------------------------------- callables


def decode_by_pillow(raw: np.ndarray) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(raw.tobytes())).convert("RGB").resize((8, 8)))


def wrong_in_code(raw: np.ndarray) -> np.ndarray:
    return {"right": raw}["wrong"]


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
@pytest.mark.parametrize("decode", [False, True])
def test_an_error_of_the_callable_is_its_own(
    image_folder: Path, on_error: Any, decode: bool
) -> None:
    with (
        make(image_folder, transforms=wrong_in_code, decode=decode, on_error=on_error) as loader,
        pytest.raises(TransformError, match=r"failed for .*jpg.*KeyError: 'wrong'") as caught,
    ):
        next(iter(loader))
    assert "damaged file" not in str(caught.value) and "repair" not in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_next is not None  # into the user's own function
    assert not isinstance(caught.value, CorruptionError)


def test_a_callable_that_processes_cannot_get_is_refused(image_folder: Path) -> None:
    with pytest.raises(UsageError, match="function of a module, not a lambda"):
        make(image_folder, transforms=lambda raw: raw, workers="processes")
    items = nostall.Cached([1, 2], makers=1, then=lambda item: item)
    try:
        with pytest.raises(UsageError, match="function of a module, not a lambda"):
            nostall.DataLoader(items, 1, workers="processes")
    finally:
        items.close()


@pytest.mark.multi
def test_an_error_in_another_process_comes_with_its_lines(image_folder: Path) -> None:
    with (
        make(image_folder, transforms=wrong_in_code, workers="processes", threads=1) as loader,
        pytest.raises(TransformError, match=r"KeyError: 'wrong'") as caught,
    ):
        next(iter(loader))
    assert 'return {"right": raw}["wrong"]' in str(caught.value)


def crashes_at_five(raw: np.ndarray, context: nostall.Context) -> np.ndarray:
    if context.sample == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return raw[:10]


@pytest.mark.multi
def test_a_callable_that_crashes_is_told_with_its_sample(image_folder: Path) -> None:
    options: dict[str, Any] = {"workers": "processes", "threads": 2, "shuffle": False}
    with make(image_folder, transforms=crashes_at_five, **options) as loader:
        name = nostall.ImageFolder(image_folder).describe(5)
        with pytest.raises(
            TransformError, match=rf"{name} \(sample 5\): their process was ended by SIGSEGV"
        ):
            list(loader)


def waits_at_zero(raw: np.ndarray, context: nostall.Context) -> np.ndarray:
    if context.sample == 0:
        signal.pause()
    return crashes_at_five(raw, context)


@pytest.mark.multi
def test_a_crash_is_told_with_its_sample_while_its_batch_is_sent(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, worker_died = PythonStage.submit, PythonStage._worker_died
    heard = threading.Event()

    def slowly(stage: PythonStage, batch: _native.Batch) -> Any:
        work = submit(stage, batch)
        assert 5 not in batch.samples or heard.wait(300)
        return work

    def hear(*given: Any) -> Any:
        heard.set()
        return worker_died(*given)

    monkeypatch.setattr(PythonStage, "submit", slowly)
    monkeypatch.setattr(PythonStage, "_worker_died", hear)
    options: dict[str, Any] = {"workers": "processes", "threads": 2, "shuffle": False}
    with (
        make(image_folder, transforms=waits_at_zero, **options) as loader,
        pytest.raises(TransformError, match=r"\(sample 5\): their process was ended by SIGSEGV"),
    ):
        next(iter(loader))


def ends_its_process(raw: np.ndarray) -> np.ndarray:
    with contextlib.suppress(FileExistsError):
        Path(os.environ["NOSTALL_TEST_MARK"]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return raw[:10]


@pytest.mark.multi
def test_a_worker_process_that_dies_is_told_of_and_replaced(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_TEST_MARK", str(tmp_path / "killed once"))
    options: dict[str, Any] = {"workers": "processes", "threads": 1}
    with make(image_folder, transforms=ends_its_process, **options) as loader:
        with pytest.raises(
            TransformError,
            match=r"transforms was ended by SIGKILL at work on .*\.jpg \(sample \d+\): .* memory",
        ):
            next(iter(loader))
        loader.set_epoch(0)
        assert sum(len(x) for x, _ in loader) == 61


def test_a_callable_without_a_module_is_taken(image_folder: Path) -> None:
    function = np.ndarray.tobytes
    assert not hasattr(function, "__module__")
    with make(image_folder, transforms=function, collate=list) as loader:
        assert [type(sample) for sample in next(iter(loader))[0]] == [bytes] * 4


def test_what_each_rank_takes_whole_is_not_dealt_to_owners(image_folder: Path) -> None:
    with nostall.DataLoader(
        nostall.ImageFolder(image_folder), 4, rank=0, world_size=2, tiers=[], output="numpy",
        scheme="whole", assignment="locality", job=own_job("whole"),
    ) as loader, pytest.raises(UsageError, match="takes them all: leave one of them out"):  # fmt: skip
        next(iter(loader))


def candidates(seed: int, bad: int, samples: int, **order: Any) -> list[int]:
    plan = nostall.Plan(samples=samples, batch_size=1, epochs=1, seed=seed, **order)
    drawn: list[int] = _native.StandIns(plan.native).of(bad).tolist()
    return drawn


def test_damage_is_replaced_whoever_decodes_and_in_the_same_way(
    make_folder: Callable[[int], Path],
) -> None:
    root = make_folder(40)
    folder = nostall.ImageFolder(root, index=False)
    victims = [3, 11, 12, 30, 31]
    for sample in victims[:3]:
        path = Path(folder.describe(sample))
        path.write_bytes(path.read_bytes()[:100] + bytes(path.stat().st_size - 100))
    for sample in victims[3:]:
        Path(folder.describe(sample)).unlink()

    def stand_ins(transforms: Any, **options: Any) -> dict[int, int]:
        found = {}
        with nostall.DataLoader(
            folder, 40, shuffle=False, transforms=transforms, on_error="substitute",
            tiers=[], output="numpy", seed=9, **options,
        ) as loader:  # fmt: skip
            ((x, labels),) = loader
            assert sorted(loader.stats().epochs[0].substituted) == victims
            # By its label, which comes with it; the images tell which.
            assert len(x) == 40
            plain = x.reshape(40, -1)
        for victim in victims:
            (same,) = [
                i for i in range(40)
                if i not in victims and (plain[i] == plain[victim]).all()
            ]  # fmt: skip
            assert labels[victim] == folder.labels[same]
            found[victim] = same
        return found

    small = [t.Resize((8, 8)), t.ToTensor()]
    native = stand_ins(small)
    assert native == stand_ins(decode_by_pillow)
    assert native == stand_ins(lambda image: image[:8, :8].copy(), decode=True)
    good = [i for i in range(40) if i not in victims]
    assert native == {v: next(c for c in candidates(9, v, 40) if c in good) for v in victims}


def test_a_data_set_that_is_mostly_damaged_ends_soon(make_folder: Callable[[int], Path]) -> None:
    root = make_folder(40)
    folder = nostall.ImageFolder(root, index=False)
    for sample in range(39):
        path = Path(folder.describe(sample))
        path.write_bytes(path.read_bytes()[:100] + bytes(path.stat().st_size - 100))
    drawn = ([c for c in candidates(7, i, 40) if c != i] for i in range(8))
    tries = [those.index(39) + 1 for those in drawn]
    assert [i for i, made in enumerate(tries) if made > 64] == [6]
    tried, read = sum(tries[:6]) + 64, 0

    def count(image: Any) -> Any:
        nonlocal read
        read += 1
        return decode_by_pillow(image)

    for transforms in ([t.Resize((8, 8)), t.ToTensor()], count):
        with nostall.DataLoader(
            folder, 8, shuffle=False, transforms=transforms, on_error="substitute",
            tiers=[], output="numpy", seed=7, threads=1,
        ) as loader, pytest.raises(
            CorruptionError,
            match=rf"sample 6\) .*no other sample could stand in its place: of {tried} that were tried "
            rf"for this batch {tried - 6} \(96 %\) cannot be used: check the data set",
        ):  # fmt: skip
            next(iter(loader))
    assert tried < read <= tried + 4 * 8  # of batches ahead


def test_stand_ins_are_those_of_the_page_on_formats() -> None:
    # docs/formats/order.md
    assert candidates(0, 0, 1000)[:4] == [79, 401, 360, 869]
    assert candidates(7, 123, 1000)[:4] == [994, 773, 782, 435]
    third = nostall.Weighted([float(i % 3 == 0) for i in range(1000)])
    assert candidates(7, 123, 1000, order=third)[:4] == [540, 609, 516, 885]
    assert candidates(7, 123, 1000, order=[500, 2, 500, 7])[:4] == [500, 2, 500, 7]
    assert len(candidates(0, 0, 1)) == 1024


def marked(values: Any) -> Any:
    if values[0] < 0:
        raise CorruptionError("it is damaged")
    return values


@pytest.mark.parametrize(
    "order",
    [
        [2, 4, 3, 5],
        nostall.Weighted([0, 0, 1, 1, 1, 1, 0, 0]),
        nostall.Weighted([0, 0, 1, 1, 1, 1, 0, 0], 4, replacement=False),
    ],
)
def test_no_sample_that_the_order_leaves_out_stands_in(order: Any) -> None:
    data = nostall.Arrays({"x": np.array([[0], [1], [2], [-1], [4], [5], [6], [7]])})
    options: dict[str, Any] = {"tiers": [], "output": "numpy", "on_error": "substitute"}
    transforms = {"x": marked}
    with nostall.DataLoader(
        data, 4, epochs=9, seed=3, order=order, transforms=transforms, **options
    ) as loader:
        given = {int(x) for epoch in loader.epochs() for batch in epoch for x in batch["x"][:, 0]}
        assert sum(len(epoch.substituted) for epoch in loader.stats().epochs) > 4
    assert given == {2, 4, 5}


def test_no_file_that_the_order_leaves_out_stands_in(make_folder: Callable[[int], Path]) -> None:
    folder = nostall.ImageFolder(make_folder(40), index=False)
    good, bad = sorted([2, 3], key=lambda sample: folder.sizes[sample])
    Path(folder.describe(bad)).unlink()
    for transforms in (None, [t.Resize((8, 8)), t.ToTensor()]):
        with nostall.DataLoader(
            folder, 2, epochs=1, order=[bad, good], transforms=transforms, tiers=[],
            on_error="substitute", output="numpy",
        ) as loader:  # fmt: skip
            ((first, second), labels) = next(iter(loader))
        assert (first == second).all() and (labels == folder.labels[good]).all()


def test_no_sample_of_a_source_of_weight_0_stands_in() -> None:
    def numbers(values: list[int]) -> nostall.Arrays:
        return nostall.Arrays({"x": np.array(values).reshape(-1, 1)})

    of, none = numbers([2, -1, 4, 5]), numbers([10, 11, 12, 13])
    mixture = nostall.Mixture({none: 0, of: 1}, samples=4)
    with nostall.DataLoader(
        mixture, 4, epochs=20, transforms={"x": marked}, tiers=[], output="numpy",
        on_error="substitute",
    ) as loader:  # fmt: skip
        given = {int(x) for epoch in loader.epochs() for batch in epoch for x in batch["x"][:, 0]}
    assert given == {2, 4, 5}


def test_steps_of_image_libraries_get_the_decoded_image(image_folder: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    torch = pytest.importorskip("torch")
    steps = [v2.ToImage(), v2.CenterCrop(16), v2.ToDtype(torch.float32, scale=True)]
    expected = None
    for transforms in (v2.Compose(steps), steps, torch.nn.Sequential(*steps)):
        with make(image_folder, transforms=transforms, shuffle=False, output="torch") as loader:
            x, _ = next(iter(loader))
        assert x.shape == (4, 3, 16, 16)
        assert expected is None or torch.equal(x, expected)
        expected = x
    encoded = nostall.ImageFolder(image_folder, index=False).read(0)
    image = torch.from_numpy(np.asarray(_native.decode_rgb(encoded)))
    assert expected is not None
    middle = image.permute(2, 0, 1)[:, 7:23, 12:28].float() / 255
    assert torch.allclose(expected[0], middle, atol=1e-6)
    # A function of the user's comes first: it takes what it takes.
    own = v2.Compose([v2.Lambda(decode_by_pillow), v2.ToImage()])
    with make(image_folder, transforms=own, output="torch") as loader:
        assert next(iter(loader))[0].shape == (4, 3, 8, 8)
    with pytest.raises(UsageError, match="native step inside"):
        make(image_folder, transforms=v2.Compose([t.Resize(8)]))


# ------------------------------------------------------------------------------- epochs


def test_a_loader_without_epochs_goes_on_for_ever(image_folder: Path, tmp_path: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with make(image_folder, tiers=["ram:8MiB"]) as loader:
        for epoch in range(4):
            order = np.concatenate([y for _, y in loader])
            assert order.tolist() == folder.labels[loader.plan.epoch_order(epoch)].tolist()
            stats = loader.stats()
            assert [e.epoch for e in stats.epochs] == list(range(epoch + 1))
            # What was read for the next epoch already counts there.
            assert stats.source_bytes <= stats.lower_bound_bytes == folder.total_bytes
        loader.set_epoch(1000)
        assert len([1 for _ in loader]) == len(loader)
        state = loader.state_dict()
        assert state["epoch"] == 1001
    with make(image_folder) as loader:
        loader.load_state_dict(state)
        assert loader.position == (1001, 0)
        assert len([1 for _ in loader]) == len(loader)
        assert loader.position == (1002, 0)
        # What would run for ever is refused where it is written.
        with pytest.raises(UsageError, match=r"epochs\(\) would not end.* pass it"):
            loader.epochs()
    with make(image_folder, epochs=2) as loader:
        for epoch in loader.epochs():
            for _ in epoch:
                pass
        with pytest.raises(UsageError, match="this job of 2 epochs has ended"):
            next(iter(loader))


def test_what_is_no_data_set_is_told_what_takes_it(tmp_path: Path) -> None:
    np.zeros(100, np.uint16).tofile(tmp_path / "ids.bin")
    for given, way in (
        (
            nostall.Tokens(tmp_path / "ids.bin", dtype="uint16"),
            r"nostall\.Windows\(tokens, length\)",
        ),
        ([1, 2, 3], r"nostall\.Cached\(dataset\) takes a Dataset"),
        (3, r"open one, for example nostall\.ImageFolder"),
    ):
        with pytest.raises(UsageError, match=way):
            nostall.DataLoader(given, 2)


def test_a_folder_of_torchvision_is_told_its_own_kind(image_folder: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")

    class Own(datasets.ImageFolder):  # type: ignore[misc]
        """A user's subclass."""

    for kind in (datasets.ImageFolder, Own):
        given = kind(image_folder)
        way = rf"nostall\.ImageFolder\('{re.escape(str(image_folder))}'\) reads the same files"
        for takes in (
            lambda data: nostall.DataLoader(data, 2),
            lambda data: nostall.Split(data, 0.5),
            nostall.torch.Dataset,
        ):
            with pytest.raises(UsageError, match=way):
                takes(given)
    with pytest.raises(UsageError, match=r"nostall\.Cached\(dataset\) takes"):
        nostall.Split([1, 2, 3], 0.5)


def test_what_is_subscripted_names_what_gives_samples(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder)
    first, _ = nostall.Split(folder, 0.5)
    for source in (folder, first):
        with pytest.raises(
            UsageError, match=r"nostall\.torch\.Dataset\(source, decode=True\)\[i\]"
        ):
            source[0]
        with pytest.raises(UsageError, match=r"nostall\.DataLoader"):
            list(source)
    assert nostall.torch.Dataset(folder, decode=True, tiers=[])[0][0].shape[2] == 3
    with nostall.DataLoader(folder, 4, epochs=1, tiers=[]) as loader:
        for given in (loader, next(loader.epochs())):
            with pytest.raises(UsageError, match=r"for batch in epoch"):
                given[0]


def test_a_raw_batch_that_is_taken_for_a_tensor_names_transforms(image_folder: Path) -> None:
    with make(image_folder) as loader:
        raw, _ = next(iter(loader))
    with pytest.raises(AttributeError, match=r"has no flatten: .* pass transforms="):
        raw.flatten()
    assert not hasattr(raw, "to")
    assert [len(sample) for sample in copy.deepcopy(raw)] == raw.lengths.tolist()


def test_what_holds_data_sets_names_the_way_to_them(image_folder: Path) -> None:
    # Not above: the processes of loaders import this module.
    import torch.utils.data

    folder = nostall.ImageFolder(image_folder)
    takes: list[Callable[[Any], Any]] = [
        lambda data: nostall.DataLoader(data, 4),
        lambda data: nostall.Split(data, 0.9),
        lambda data: nostall.Subset(data, [1]),
        lambda data: nostall.Filter(data, labels=[1]),
        lambda data: nostall.Concat([data, data]),
        lambda data: nostall.Mixture({data: 1.0}),
        nostall.Cached,
        nostall.Tiers,
        nostall.torch.Dataset,
    ]
    with nostall.DataLoader(folder, 4, epochs=1, tiers=[]) as loader:
        ways: list[tuple[Any, str]] = [
            (
                loader,
                "pass the data set that the loader reads, loader.dataset; loaders are made last",
            ),
            (next(loader.epochs()), "pass the data set that the loader reads, loader.dataset"),
            (
                nostall.Split(folder, 0.9),
                "it holds 2 data sets, as those of nostall.Split: give each",
            ),
            (
                torch.utils.data.DataLoader([1]),
                r"nostall.Cached\(loader.dataset\) takes the Dataset",
            ),
            (
                torch.utils.data.random_split(folder, [0.5, 0.5])[0],
                r"nostall.Subset\(part.dataset, part.indices\) is the same part",
            ),
        ]
        for given, way in ways:
            for take in takes:
                with pytest.raises(UsageError, match=way):
                    take(given)
    with pytest.raises(UsageError, match=r"takes a Dataset of your own"):
        nostall.DataLoader(torch.utils.data.Subset([1, 2], [0]), 1)  # type: ignore[arg-type]
    drawn = torch.utils.data.WeightedRandomSampler([1.0] * len(folder), 4)
    with pytest.raises(
        UsageError, match=r"a WeightedRandomSampler of torch.*nostall\.Weighted\(weights\)"
    ):
        nostall.DataLoader(folder, 4, order=drawn)  # type: ignore[arg-type]
    parts = nostall.Split(loader.dataset, 0.9)
    assert [len(nostall.DataLoader(part, 61, epochs=1, tiers=[])) for part in parts] == [1, 1]
