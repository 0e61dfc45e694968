"""Random draws of Python callables: those of a sample's context repeat wherever it is drawn."""

from __future__ import annotations

import gc
import importlib
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from light import DAMAGED, FATAL, UNSENT, damaged_and_fatal
from loader_ranks import own_job

import nostall
from nostall.errors import TransformError


def noise(raw: Any, context: nostall.Context) -> Any:
    return np.array(
        [
            raw.size,
            context.sample,
            context.epoch,
            context.numpy().integers(2**31),
            context.python().randrange(2**31),
            int(torch.randint(2**31, (1,), generator=context.torch())),
        ]
    )


def drawn(
    folder: Path, world: int = 1, order: Any = "torch", **options: Any
) -> list[list[list[int]]]:
    """Of two epochs, all samples of all ranks in the order of the global batches."""
    epochs: list[list[list[int]]] = []
    for rank in range(world):
        with nostall.DataLoader(
            nostall.ImageFolder(folder),
            8 // world,
            epochs=2,
            seed=5,
            tiers=[],
            output="numpy",
            rank=rank,
            world_size=world,
            job=own_job(f"context {rank} of {world}"),
            order=order,
            **{"transforms": noise, **options},
        ) as loader:
            for epoch in loader.epochs():
                rows = np.concatenate([values for values, _ in epoch]).tolist()
                epochs.append(rows)
    return [sorted(row for rank in range(world) for row in epochs[e + 2 * rank]) for e in range(2)]


def test_draws_of_a_context_are_those_of_its_sample(image_folder: Path) -> None:
    first, second = whole = drawn(image_folder, threads=1)
    assert [row[1] for row in sorted(first, key=lambda r: r[1])] == list(range(61))
    assert {row[2] for row in first} == {0}
    assert {row[2] for row in second} == {1}
    for column in (3, 4, 5):
        assert len({row[column] for row in first + second}) == 2 * 61
    assert drawn(image_folder, threads=4) == whole
    assert drawn(image_folder, threads=1, workers="processes") == whole


def test_they_are_the_same_on_any_number_of_ranks(image_folder: Path) -> None:
    # 61 samples fill 2 ranks by one sample that comes twice.
    one, two = drawn(image_folder), drawn(image_folder, world=2)
    for a, b in zip(one, two, strict=True):
        assert {tuple(r) for r in a} == {tuple(r) for r in b}


def test_a_sample_that_comes_again_draws_anew(image_folder: Path) -> None:
    rows = drawn(image_folder, order=[3, 3, 4, 3])[0]
    assert len({row[3] for row in rows}) == 4
    assert rows == drawn(image_folder, order=[3, 3, 4, 3])[0]


def bytes_of(raw: Any) -> Any:
    return raw[:0].astype(np.int64)


def draw_more(values: Any, context: nostall.Context) -> Any:
    draws = [
        int(context.numpy().integers(2**31)),
        context.python().randrange(2**31),
        int(torch.randint(2**31, (1,), generator=context.torch())),
    ]
    return np.append(values, np.array(draws))


def test_callables_of_a_loader_draw_apart(image_folder: Path) -> None:
    alone = drawn(image_folder, transforms=[bytes_of, draw_more])[0]
    transforms = [bytes_of, draw_more, nostall.transforms.Function(draw_more)]
    rows = drawn(image_folder, transforms=transforms)[0]
    # The first that draws does so as if it were the only one.
    assert sorted(row[:3] for row in rows) == alone
    assert len({row[column] for row in rows for column in (0, 3)}) == 2 * 61
    for column in range(3):
        assert all(row[column] != row[column + 3] for row in rows)


def test_callables_of_fields_draw_apart() -> None:
    zeros = np.zeros((4, 0), np.int64)
    data = nostall.Arrays({"left": zeros, "right": zeros})

    def columns(transforms: Any) -> Any:
        options: dict[str, Any] = {"transforms": transforms, "shuffle": False, "tiers": []}
        with nostall.DataLoader(data, 4, epochs=1, seed=5, output="numpy", **options) as loader:
            (batch,) = loader
        return batch

    both = columns({"left": [draw_more], "right": [draw_more]})
    assert (both["left"] == columns({"left": [draw_more]})["left"]).all()
    assert (both["left"] != both["right"]).all()


def test_every_generator_begins_anew() -> None:
    context = nostall.Context(sample=2**40, epoch=3, seed=2**64 - 1, occurrence=1)
    for make in (lambda: context.numpy().random(), lambda: context.python().random()):
        assert make() == make()
    assert nostall.Context(1, 0, 0).numpy().random() != nostall.Context(0, 1, 0).numpy().random()
    # Of this release and all later ones.
    assert nostall.Context(7, 2, 5).numpy().integers(2**32, size=3).tolist() == GOLDEN


GOLDEN = [3851132574, 1149438968, 1560962823]


def of_the_process(raw: Any) -> Any:
    return np.array(
        [
            raw.size,
            random.randrange(2**31),
            np.random.randint(2**31),
            int(torch.randint(2**31, (1,))),
        ]
    )


@pytest.mark.long
def test_draws_of_worker_processes_repeat(image_folder: Path) -> None:
    options: dict[str, Any] = {"transforms": of_the_process, "workers": "processes"}
    one = drawn(image_folder, threads=1, **options)
    assert drawn(image_folder, threads=2, **options) == one
    assert one[0] != one[1]


@pytest.mark.multi
def test_what_stands_in_is_made_where_others_are() -> None:
    def made(kinds: list[int], order: list[int]) -> Any:
        data = nostall.Arrays({"x": np.array(kinds).reshape(-1, 1)})
        with nostall.DataLoader(
            data, 1, steps=1, seed=5, tiers=[], output="numpy", order=order, threads=1,
            transforms={"x": damaged_and_fatal}, on_error="substitute", workers="processes",
        ) as loader:  # fmt: skip
            ((sample, pid, drawn),) = next(iter(loader))["x"].tolist()
        assert sample != order[0]
        assert pid != os.getpid()
        return sample, drawn

    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    sample, drawn = made([DAMAGED, 0, 0], [0, 2])
    assert made([DAMAGED, 0, 0], [0, 2]) == (sample, drawn)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
    wanted = nostall.Context(sample, 0, 5)._number() & (2**32 - 1)
    assert drawn == np.random.RandomState(wanted).randint(2**31)
    with pytest.raises(TransformError, match=r"\(sample 2\): their process was ended by SIGSEGV"):
        made([DAMAGED, 0, FATAL], [0, 2])


@pytest.mark.multi
def test_what_stood_in_is_not_kept_when_it_cannot_be_sent() -> None:
    data = nostall.Arrays({"x": np.array([DAMAGED, UNSENT]).reshape(-1, 1)})
    with nostall.DataLoader(
        data, 1, epochs=1, tiers=[], order=[0, 1], threads=1, on_error="substitute",
        transforms={"x": damaged_and_fatal}, workers="processes",
    ) as loader:  # fmt: skip
        with pytest.raises(Exception, match="pickle"):
            next(iter(loader))
        stage = loader._recipe.stage
        assert stage is not None and stage._single == ([], [])


# It is imported by worker processes, which this module would let import torch.
LATE = """
import sys
import numpy as np

def draw(raw, context):
    late = "torch" not in sys.modules
    import torch
    return np.array([context.sample, context.epoch, int(torch.randint(2**31, (1,))), late])
"""


@pytest.mark.multi
def test_torch_draws_the_same_if_a_callable_is_the_first_to_import_it(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_torch_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    late = importlib.import_module("imports_torch_late").draw
    first, second = drawn(image_folder, transforms=late, workers="processes", threads=1)
    rows = first + second
    assert sum(row[3] for row in rows) == 1
    for sample, epoch, number, _ in rows:
        generator = nostall.Context(sample, epoch, 5).torch()
        assert number == int(torch.randint(2**31, (1,), generator=generator))


class Steps:
    """A callable object, and a step among others."""

    def __call__(self, value: Any, *, context: nostall.Context) -> Any:
        return np.array([len(np.atleast_1d(value)), context.sample])


def test_steps_of_a_list_may_take_it_or_not(image_folder: Path) -> None:
    rows = drawn(image_folder, transforms=[lambda raw: raw[:5], Steps()])[0]
    assert rows == [[5, i] for i in range(61)]


def test_then_of_a_cached_data_set_takes_it() -> None:
    def then(item: Any, context: nostall.Context) -> Any:
        return np.array([item, context.sample, context.epoch])

    source = nostall.Cached([10, 11, 12], then=then, makers=1)
    with nostall.DataLoader(source, 3, epochs=2, tiers=[], output="numpy") as loader:
        for epoch in loader.epochs():
            for batch in epoch:
                assert sorted(batch.tolist()) == [[10 + i, i, epoch.index] for i in range(3)]
    source.close()


Form = Literal["threads", "processes"]


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_what_stands_in_draws_its_own(tmp_path: Path, image_folder: Path, workers: Form) -> None:
    for i, path in enumerate(sorted(image_folder.rglob("*.jpg"))[:6]):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{i}.jpg").write_bytes(b"" if i == 2 else path.read_bytes())
    rows = drawn(
        tmp_path, transforms=noise, on_error="substitute", threads=1, workers=workers, decode=True
    )[0]
    numbers = [row[1] for row in rows]
    assert 2 not in numbers
    (twice,) = {n for n in numbers if numbers.count(n) == 2}
    same = [row for row in rows if row[1] == twice]
    assert same[0] == same[1]


LOOKED = """
import importlib.util, sys
from nostall.loader._context import Context

Context(3, 0, 1).seed_all()
sys.meta_path.insert(1, object())  # which importlib passes over
before = len(sys.meta_path)
for _ in range(2):  # as libraries find out what is there
    assert importlib.util.find_spec("torch") is not None
import torch
assert torch.seeds == [Context(3, 0, 1)._number()], torch.seeds
assert len(sys.meta_path) == before - 1
"""


def test_torch_is_seeded_when_it_is_imported_not_when_it_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("seeds = []\nmanual_seed = seeds.append\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", LOOKED]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, "PYTHONPATH": path})


class Model:
    """What a bound method keeps alive."""

    def twice(self, raw: Any) -> Any:
        return np.array([2 * raw.size])


@pytest.mark.parametrize("as_function", [False, True])
def test_a_callable_goes_with_its_loader(image_folder: Path, as_function: bool) -> None:
    model = Model()
    step: Any = nostall.transforms.Function(model.twice) if as_function else model.twice
    data = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(data, 8, transforms=step, tiers=[]) as loader:
        for _ in loader:
            pass
    gone = weakref.ref(model)
    del loader, step, model
    gc.collect()
    assert gone() is None
