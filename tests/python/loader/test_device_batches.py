"""DataLoader(device=...) on the simulated device: the same batches in order, and what fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import mutations
import numpy as np
import pytest
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

import nostall
from nostall import fields as f
from nostall import transforms as t
from nostall.base import _device_clock
from nostall.errors import UsageError
from nostall.loader._ahead import Ahead
from nostall.observe._stats import Stats
from nostall.observe.report import _run as runs
from nostall.observe.report import _run_page as run_page
from nostall.observe.timelines import analyze
from nostall.torch import copy_into

SIZE = (24, 32)
FLOATS = [t.Resize(SIZE), t.ToTensor(), t.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]


@functools.cache
def folder() -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from conftest import write_jpeg

    held = tempfile.TemporaryDirectory()
    folder.held = held  # type: ignore[attr-defined]
    for i in range(37):
        write_jpeg(Path(held.name) / f"class{i % 3}" / f"{i:03d}.jpg", i)
    return Path(held.name)


def loader(steps: Any = FLOATS, size: int = 4, source: Any = None, **more: Any) -> Any:
    return nostall.DataLoader(
        nostall.ImageFolder(folder(), index=False) if source is None else source,
        size,
        epochs=3,
        seed=1,
        transforms=steps,
        tiers=[],
        **more,
    )


def flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from flat(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from flat(each)


def batches(**more: Any) -> list[list[torch.Tensor]]:
    with loader(**more) as source:
        return [
            [tensor.cpu() for tensor in flat(batch)] for epoch in source.epochs() for batch in epoch
        ]


def same(**more: Any) -> None:
    """The batches of the device are those of the host, bit for bit, and nothing is reported."""
    import simdev

    with loader(device="simdev", **more) as source:
        for batch in source:
            assert {tensor.device.type for tensor in flat(batch)} == {"simdev"}
    for here, there in zip(batches(**more), batches(device="simdev", **more), strict=True):
        for mine, theirs in zip(here, there, strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            assert mine.equal(theirs)
    assert simdev.reports() == []


def used() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def on_side(batches: Any) -> torch.Stream:
    """The stream on which a running iteration's loader copies."""
    return batches._recipe.place.stream


# ---------------------------------------------------------------------------- the same batches


def case_floats_are_made_on_the_device_with_the_same_bits() -> None:
    same()
    for dtype in ("float16", "float32"):
        for layout in ("chw", "hwc"):
            same(dtype=dtype, layout=layout)
    same(steps=[t.Resize(SIZE), t.ToTensor()])


MIXED = t.RandomChoice([t.MixUp(alpha=0.8), t.CutMix()])


def case_batches_are_mixed_on_the_device_with_the_same_bits() -> None:
    for dtype, layout in (("float16", "chw"), ("float32", "hwc")):
        same(steps=[*FLOATS, MIXED], dtype=dtype, layout=layout)
    same(steps=[*FLOATS, t.CutMix(num_classes=3, p=0.5)])
    # The last batch has one sample, which is mixed with itself.
    same(steps=[*FLOATS, t.MixUp()], size=12)


@functools.cache
def several() -> nostall.Files:
    """An image, its mask, its boxes and two labels."""
    root = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(1)
    for folder, shape in (("images", (30, 40, 3)), ("masks", (30, 40)), ("others", (20, 20, 3))):
        (root / folder).mkdir()
        for i in range(9):
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    boxes = [np.array([[5, 5, 15, 15], [0, 0, 30, 20]], np.float32)] * 9
    columns = {"boxes": boxes, "label": np.arange(9, dtype=np.uint8), "id": np.arange(9)}
    schema = {"mask": f.Mask(), "boxes": f.Boxes(), "label": f.Scalar(dtype="uint8")}
    parts = {"image": "images", "mask": "masks", "other": "others"}
    return nostall.Files(parts, columns, schema={**schema, "id": f.Scalar()}, root=root)


def case_images_of_several_fields_are_finished_on_the_device() -> None:
    flips = [t.RandomHorizontalFlip(), *FLOATS]
    pair = ["image", "label"]
    with watched() as seen:
        same(source=several(), fields=["image", "mask", "boxes", "label", "id"], steps=flips)
        same(source=several(), fields=pair, steps=[*FLOATS, MIXED], batch="tuple")
        same(source=several(), fields=pair, steps={"image": [*FLOATS, t.MixUp(num_classes=9)]})
        # One image is mixed as it is, the other one finished.
        each = {"image": [t.Resize(SIZE), t.CutMix(labels="label")], "other": FLOATS}
        same(source=several(), fields=["image", "other", "label"], steps=each)
        each = {"image": [*FLOATS, t.CutMix(labels="label")], "other": FLOATS}
        same(source=several(), fields=["image", "other", "label"], steps=each)
    assert not [kind for kind, shape, _ in seen if kind is torch.float32 and len(shape) == 4]
    # A callable takes floats: they are made on the host.
    called = {"image": FLOATS, "id": lambda number: number + 1}
    same(source=several(), fields=["image", "id"], steps=called)


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Any, ...]]]:
    """Type, shape and whether it is page-locked of each array that is copied to the device."""
    from nostall.torch import _device

    seen = []
    copy = _device.Sending._copy

    def one(self: Any, host: torch.Tensor, *into: Any) -> torch.Tensor:
        seen.append((host.dtype, tuple(host.shape), host.is_pinned()))
        return copy(self, host, *into)

    with mock.patch.object(_device.Sending, "_copy", one):
        yield seen


def case_a_quarter_of_the_bytes_travels() -> None:
    with watched() as seen:
        batches(device="simdev")
    assert {kind for kind, _, _ in seen} == {torch.uint8, torch.int64}
    # All of it lies in page-locked memory.
    assert all(pinned for _, _, pinned in seen)
    with loader(device="simdev") as source:
        settings = source.settings()
    assert settings["native_steps"] == ["Resize"]
    assert settings["device_steps"] == ["ToTensor", "Normalize"]


def case_other_batches() -> None:
    same(steps=[t.Resize(SIZE)])  # uint8
    erasing = [*FLOATS, t.RandomErasing(p=1.0)]
    same(steps=erasing)
    same(steps=[t.Resize(SIZE), t.MixUp(num_classes=3)])  # uint8
    same(steps=lambda raw: torch.full((3,), float(len(raw))))
    same(steps=FLOATS, collate=lambda samples: {"all": torch.stack(samples), "n": len(samples)})
    for kind in (UserDict, functools.partial(defaultdict, list), MappingProxyType):
        same(collate=lambda samples, kind=kind: kind({"all": torch.stack(samples)}))


def case_samples_that_are_pixels() -> None:
    """The device does all that is asked for."""
    import simdev

    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    for i in range(8):
        (folder / f"{i}.raw").write_bytes(rng.bytes(6 * 5 * 3))
    found = []
    for more in ({}, {"device": "simdev"}):
        source = nostall.FileList(sorted(folder.iterdir()))
        source.pixels = nostall.Pixels(6, 5)
        steps = [t.ToTensor(), t.Normalize([0.5] * 3, [0.25] * 3)]
        with nostall.DataLoader(source, 4, transforms=steps, tiers=[], **more) as made:
            found.append([images.cpu() for images, _ in made])
    assert all(mine.equal(theirs) for mine, theirs in zip(*found, strict=True))
    with pytest.raises(UsageError, match="bytes as they are stored"):
        loader([], device="simdev")
    assert simdev.reports() == []


def case_tensors_of_the_device_stay_where_they_are() -> None:
    with cases.warnings() as said:
        same(collate=lambda samples: torch.stack(samples).to("simdev"))
    assert said == []


def case_ragged_fields() -> None:
    """The bytes of files, whose lengths differ: values and offsets."""
    same(fields=["image", "label"], steps=None)


def case_images_in_texts() -> None:
    """Each batch has another number of images."""
    folder = Path(tempfile.mkdtemp())
    ids = np.arange(1, 200, dtype=np.uint16)
    ids[ids % 10 == 0] = 1  # an image
    ids[ids % 25 == 0] = 0  # the end of a document
    ids[-1] = 0
    ids.tofile(folder / "tokens.bin")
    count = int((ids == 1).sum())
    for i in range(count):
        Image.fromarray(np.full((8, 9, 3), i, np.uint8)).save(folder / f"{i:02d}.png")
    images = nostall.FileList(sorted(path.name for path in folder.glob("*.png")), root=folder)
    tokens = nostall.Tokens(folder / "tokens.bin", dtype="uint16", end=0)
    units = nostall.Interleaved(tokens, images, 96, image=1, cost=3)
    same(source=units, steps={"images": FLOATS}, size=2)


def case_an_epoch_again_after_a_break() -> None:
    with loader(device="simdev") as source:
        whole = [labels.cpu().tolist() for _, labels in source]
        source.set_epoch(0)
        for index, (_, labels) in enumerate(source):
            assert labels.cpu().tolist() == whole[index]
            if index == 3:
                break
        state = source.state_dict()
        assert state["batch"] == 4
    with loader(device="simdev") as source:
        source.load_state_dict(state)
        assert [labels.cpu().tolist() for _, labels in source] == whole[4:]


def case_two_iterations_of_one_loader() -> None:
    with loader(device="simdev") as source:
        first = iter(source)
        next(first)
        assert len(list(source)) == len(source)
        with pytest.raises(UsageError, match="another iteration"):
            next(first)


# ---------------------------------------------------------------------------- order and lifetimes


def consume(stream: torch.Stream | None = None) -> list[float]:
    """Sums of all batches, where copies wait until the consumer has asked for their use."""
    import simdev

    sums = []
    with loader(device="simdev", size=8) as source, stream or contextlib.nullcontext():
        for images, labels in source:
            side = on_side(source)
            with simdev.held(side):
                total = images.sum() + labels.sum()
            sums.append(total.item())
            del images, labels
    return sums


def case_a_consumer_on_another_stream() -> None:
    import simdev

    expected = consume()
    assert consume(torch.Stream(device="simdev")) == expected
    assert simdev.reports() == []


def case_consumers_on_several_streams() -> None:
    """Each batch belongs to the stream that was current when it was handed over."""
    import simdev

    expected = consume()
    streams = [torch.Stream(device="simdev") for _ in range(3)]
    sums = []
    with loader(device="simdev", size=8) as source:
        running = iter(source)
        for index in range(len(source)):
            with streams[index % 3]:
                images, labels = next(running)
                sums.append((images.sum() + labels.sum()).item())
    assert sums == expected
    assert (reports := simdev.reports()) == [], reports


def case_consumers_in_threads_that_chose_no_stream() -> None:
    """Each has the default stream of the device, whatever others have chosen."""
    import simdev

    expected = consume()
    with torch.Stream(device="simdev"), ThreadPoolExecutor(2) as pool:
        found = [pool.submit(consume) for _ in range(2)]
        assert [each.result() for each in found] == [expected] * 2
    assert (reports := simdev.reports()) == [], reports


def case_the_order_needs_nothing_that_other_threads_waited_for() -> None:
    import simdev

    simdev.host_by_thread(True)
    same()
    case_a_consumer_on_another_stream()
    case_consumers_on_several_streams()


def slow_consumer() -> list[str]:
    """Batches are used late, and dropped at once."""
    import simdev

    consumer = torch.accelerator.current_stream()
    with loader(device="simdev", size=8, device_ahead=1) as source:
        held = []
        for images, labels in source:
            if len(held) < 2:
                simdev.hold(consumer)
                held.append((images * 2, labels * 2))
                del images, labels
                continue
            simdev.release(consumer)
    simdev.release(consumer)
    torch.accelerator.synchronize()
    return simdev.reports()


def case_a_batch_is_kept_until_its_consumer_has_used_it() -> None:
    assert slow_consumer() == []


def used_at_once() -> list[str]:
    """A batch is used while its copy is held."""
    import simdev

    with loader(device="simdev") as source:
        running = iter(source)
        with simdev.held(on_side(source)):
            images, _ = next(running)
            total = images.sum()
        torch.accelerator.synchronize()
        running.close()
    del total
    return simdev.reports()


def copied_late(slabs: int, looks: str) -> list[str]:
    """Copies are held until the host looks at one of their events in this way."""
    import simdev

    from nostall.torch import _device

    class Looked(torch.Event):
        pass

    def look(event: torch.Event) -> Any:
        simdev.release(stream)
        return getattr(torch.Event, looks)(event)

    setattr(Looked, looks, look)
    made = mock.patch.object(_device.Device, "event", lambda self: Looked(device=self.device))
    slab = 4 * 3 * SIZE[0] * SIZE[1]
    with made, loader(device="simdev", staging=slabs * slab) as source:
        stream, running = source._recipe.place.stream, iter(source)
        with simdev.held(stream):
            # When the last one comes the stage has used memory of the first ones again.
            held = list(itertools.islice(running, 8))
        running.close()
    torch.accelerator.synchronize()
    del held
    return simdev.reports()


NEEDED = {
    "Sending.sent: record": (used_at_once, "no event"),
    "Sending.wait_on: wait_event": (used_at_once, "no event"),
    "Sending.hand_over: use_on": (slow_consumer, "no event"),
    "Sending.is_copied: synchronize": (functools.partial(copied_late, 4, "synchronize"), "reused"),
    "Sending.is_copied: query": (functools.partial(copied_late, 2, "query"), "reused"),
}


def case_without_any_one_wait_or_record_stream() -> None:
    mutations.check(("nostall.torch._device",), NEEDED, {})


def case_memory_is_taken_once() -> None:
    """Memory of all 27 batches is that of a few of them, page-locked or on the device."""
    pinned = []
    from nostall.torch import _device

    memory = _device.Device.memory

    def counted(self: Any, size: int) -> Any:
        pinned.append(size)
        return memory(self, size)

    with mock.patch.object(_device.Device, "memory", counted):
        slab = 4 * 3 * SIZE[0] * SIZE[1]
        before = torch.accelerator.memory_stats()["num_device_alloc"]
        with loader(device="simdev", drop_last=True, staging=4 * slab, device_ahead=1) as source:
            count = 0
            for epoch in source.epochs():
                for images, labels in epoch:
                    torch.accelerator.synchronize()
                    del images, labels
                    count += 1
    assert count == 27
    # Four batches staged, two being copied, one that is sent.
    assert len(pinned) <= 7, pinned
    # Bytes, images and labels of a batch that is used, one ahead, one that is made, one that was
    # dropped; and what images are multiplied by.
    assert torch.accelerator.memory_stats()["num_device_alloc"] - before <= 4 * 3 + 1


def case_nothing_is_copied_or_taken_once_all_memory_is_there() -> None:
    """Labels lie in the batch's page-locked memory, as images do: epochs after the first copy nothing
    on the host, and all together take the memory there, and the device's, of a few batches."""
    from nostall.torch import _device

    counted = {"memory": 0, "pin_memory": 0, "view": 0}

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return original(*arguments, **named)

        return mock.patch.object(owner, name, call)

    def allocated() -> int:
        return torch.accelerator.memory_stats()["num_device_alloc"]

    slab = 4 * 3 * SIZE[0] * SIZE[1]
    more = {"drop_last": True, "staging": 4 * slab, "device_ahead": 1}
    before = allocated()
    with (
        counting(_device.Device, "memory"),
        counting(torch.Tensor, "pin_memory"),
        counting(_device.Device, "view"),
        loader(device="simdev", **more) as source,
    ):
        found = []
        for epoch in source.epochs():
            for images, labels in epoch:
                torch.accelerator.synchronize()
                del images, labels
            found.append((counted["memory"], counted["pin_memory"]))
    # Of page-locked copies there is one: what images are multiplied by. Slabs are as many as batches
    # that are staged, copied or sent at once; the first epoch need not have had all of these.
    assert [pinned for _, pinned in found] == [1, 1, 1] and counted["memory"] <= 7, found
    # Tensors over images and labels of each slab, and not of each of 27 batches.
    assert counted["view"] <= 2 * counted["memory"] < 27, counted
    assert allocated() - before <= 4 * 3 + 1  # as above, in whatever order copies and uses end


def case_copies_read_where_decoders_wrote() -> None:
    """Images and labels cross the bus from the memory that the stage fills: from no copy of it."""
    from nostall.torch import _device

    slabs: list[range] = []
    memory, copy = _device.Device.memory, _device.Sending._copy
    read = 0

    def taken(self: Any, size: int) -> Any:
        slab = memory(self, size)
        slabs.append(range(slab.ctypes.data, slab.ctypes.data + slab.nbytes))
        return slab

    def copied(self: Any, host: torch.Tensor, *into: Any) -> torch.Tensor:
        nonlocal read
        first, last = host.data_ptr(), host.data_ptr() + host.nbytes - 1
        assert any(first in slab and last in slab for slab in slabs), (host.shape, host.dtype)
        read += 1
        return copy(self, host, *into)

    with (
        mock.patch.object(_device.Device, "memory", taken),
        mock.patch.object(_device.Sending, "_copy", copied),
    ):
        count = len(batches(device="simdev"))
        assert read == 2 * count
        batches(device="simdev", source=several(), fields=["image", "mask", "id"])
        assert read > 2 * count


def case_page_locked_memory_that_is_given_back_is_free() -> None:
    """Tensors over it are forgotten, also where another slab may come to lie there."""
    from nostall.torch import _device

    place = _device.place("simdev")
    assert place is not None
    size = 3 << 20  # that nothing keeps
    slab = [place.memory(size)]
    address = slab[0].ctypes.data
    batch: Any = SimpleNamespace(
        place=(address, 2), output=lambda number: slab[0][8:24].view(np.int64)
    )
    views = place.views(batch)
    views[0] = place.view(batch, 0, None)
    assert views[0][0].is_pinned() and views[0][0].data_ptr() == address + 8
    assert place.views(batch) is views
    slab.clear()
    assert place.views(batch) is not views
    views.clear()
    assert address not in place._slabs
    assert all(begin != address for begin, _ in place._views)


def case_the_next_batch_costs_no_wait_for_its_copy() -> None:
    """next() returns while the copies of all batches are held."""
    import simdev

    expected = batches()[0][0].sum().item()
    with loader(device="simdev") as source:
        running = iter(source)
        with simdev.held(on_side(source)):
            images, _ = next(running)
            assert not on_side(source).query()
            total = images.sum()
        assert total.item() == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------- what takes batches


def trained(device: str, compiled: Any = None, into: bool = False) -> list[float]:
    """The losses of a small model, on batches as they come or in memory that stays."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 2, 5, stride=5), torch.nn.Flatten(), torch.nn.LazyLinear(3)]
    model = torch.nn.Sequential(*layers)
    model(torch.zeros(1, 3, *SIZE))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
    losses, buffers = [], None
    with loader(device=device, drop_last=True) as source:
        for batch in source:
            if into:
                buffers = copy_into(map_like(batch) if buffers is None else buffers, batch)
                batch = buffers
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            del batch, images, labels
    return [loss.item() for loss in losses]


def map_like(batch: Any) -> Any:
    return type(batch)(torch.empty_like(tensor) for tensor in batch)


def case_compiled_models_train() -> None:
    import simdev

    expected = trained("cpu")
    for backend in (None, "eager", "aot_eager"):
        assert trained("simdev", backend) == pytest.approx(expected, rel=1e-4), backend
    assert simdev.reports() == []


def case_batches_in_memory_that_stays() -> None:
    """As the inputs of a CUDA graph: the same tensors in every step, filled on the device."""
    import simdev

    assert trained("simdev", into=True) == trained("simdev")
    assert simdev.reports() == []
    buffers = {"a": torch.zeros(2, device="simdev"), "b": (torch.zeros(1), 3)}
    made = copy_into(buffers, {"a": torch.ones(2), "b": (torch.full((1,), 2.0), "text")})
    assert made["a"] is buffers["a"] and made["a"].tolist() == [1, 1]
    assert made["b"][0] is buffers["b"][0] and made["b"][0].item() == 2 and made["b"][1] == "text"
    lists = defaultdict(list, a=torch.zeros(2, device="simdev"))
    made = copy_into(lists, defaultdict(list, a=torch.ones(2)))
    assert made["a"] is lists["a"] and made["a"].tolist() == [1, 1] and made["none"] == []
    for wrong, why in (
        ({"a": torch.ones(3), "b": (torch.ones(1), 3)}, "pass drop_last=True"),
        ({"a": torch.ones(2, dtype=torch.int8), "b": (torch.ones(1), 3)}, "torch.int8 of shape"),
        ({"a": torch.ones(2)}, "another structure than the batch"),
        ({"a": torch.ones(2), "b": [torch.ones(1), 3]}, "another structure than the batch"),
        ({"a": torch.ones(2), "b": (torch.ones(1),)}, "another structure than the batch"),
    ):
        with pytest.raises(UsageError, match=why):
            copy_into(buffers, wrong)


def case_two_ranks_with_a_device_each_in_one_process() -> None:
    """One thread takes batches of both in turn, as DataParallel does."""
    import simdev

    job = {"world_size": 2, "peers": "off", "local_rank": 0, "local_world_size": 1}
    expected = [batches(rank=rank, **job) for rank in range(2)]
    found: list[list[Any]] = [[], []]
    with (
        loader(device="simdev:0", rank=0, **job) as one,
        loader(device="simdev:1", rank=1, **job) as two,
    ):
        for epochs in zip(one.epochs(), two.epochs(), strict=True):
            for pair in zip(*epochs, strict=True):
                for rank, (images, labels) in enumerate(pair):
                    assert images.device.index == labels.device.index == rank
                    found[rank].append([images * 1, labels * 1])
    for rank in range(2):
        for mine, theirs in zip(expected[rank], found[rank], strict=True):
            assert all(a.equal(b.cpu()) for a, b in zip(mine, theirs, strict=True))
    assert torch.accelerator.current_device_index() == 0
    assert simdev.reports() == []


def case_batches_through_dlpack() -> None:
    """Another library's tensor over the batch's own memory, in the order of the current stream."""
    import simdev

    expected = [images.sum().item() for images, _ in batches()[:10]]
    sums = []
    with loader(device="simdev") as source, torch.Stream(device="simdev"):
        for images, _ in source:
            with simdev.held(on_side(source)):
                other = torch.utils.dlpack.from_dlpack(images.__dlpack__())
                assert other.data_ptr() == images.data_ptr()
                total = other.sum()
            sums.append(total.item())
            del images, other
    assert sums == pytest.approx(expected, rel=1e-4)
    assert simdev.reports() == []


def through_dlpack(waits: bool) -> list[str]:
    """Another library uses batches on a stream of its own, and keeps them when the loop has not."""
    import simdev

    theirs, sums = torch.Stream(device="simdev"), []
    with loader(device="simdev") as source:
        for images, _ in source:
            with simdev.held(on_side(source)):
                images.add_(0)  # what the host has seen end needs no event; it has not seen this
                if waits:  # as __dlpack__(stream=) does on CUDA
                    theirs.wait_stream(torch.accelerator.current_stream())
                other = torch.utils.dlpack.from_dlpack(images.__dlpack__())
                with theirs:
                    total = other.sum()
                images.record_stream(theirs)  # of what is over its memory torch takes no note
            del images, other
            sums.append(total)
    theirs.synchronize()
    if waits:
        expected = [images.sum().item() for images, _ in batches()[:10]]
        assert [total.item() for total in sums] == pytest.approx(expected, rel=1e-4)
    return simdev.reports()


def case_batches_through_dlpack_on_another_stream() -> None:
    assert through_dlpack(waits=True) == []
    assert any("no event" in line for line in through_dlpack(waits=False))


# ---------------------------------------------------------------------------- faults


def case_no_memory_while_ahead() -> None:
    import simdev

    one = 8 * 3 * SIZE[0] * SIZE[1] * 4
    expected = batches(size=8)
    before = used()
    torch.accelerator.empty_cache()
    simdev.capacity(before + 3 * one)
    with cases.warnings() as said:
        found = []
        with loader(device="simdev", size=8) as source:
            for epoch in source.epochs():
                for images, labels in epoch:
                    # Until the thread has found that there is room for no more.
                    while not said and not found:
                        threading.Event().wait(0.001)
                    found.append([images.cpu(), labels.cpu()])
    # Two ahead leave no room once the consumer has used one batch while it waits for the next.
    assert 1 <= len(said) <= 2 and all("fewer are sent ahead" in each for each in said), said
    for mine, theirs in zip(expected, found, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


def case_a_batch_that_is_sent_again_is_mixed_once() -> None:
    from nostall.torch import _device

    def steps(raw: Any, context: nostall.Context) -> torch.Tensor:
        return torch.full((3, 4, 4), float(context.sample))

    tree = _device.Sending.tree
    mixed: dict[str, Any] = {"steps": [steps, t.MixUp(num_classes=3)]}
    full = iter([True, False, True])

    def sometimes(self: Any, value: Any) -> Any:
        if next(full, False):
            raise torch.OutOfMemoryError
        return tree(self, value)

    expected = batches(**mixed)
    with mock.patch.object(_device.Sending, "tree", sometimes):
        found = batches(device="simdev", **mixed)
    assert next(full, None) is None
    for mine, theirs in zip(expected, found, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


def case_an_iteration_that_its_own_thread_collects() -> None:
    """The collector of cycles runs in any thread, that of the device among them."""
    from nostall.loader import _loader

    ends: list[threading.Thread] = []

    class Watched(_loader.Ahead):
        def _waited(self) -> None:
            if threading.current_thread() not in ends:
                ends.append(threading.current_thread())
                self.close()
            super()._waited()

    with (
        mock.patch.object(_loader, "Ahead", Watched),
        loader(device="simdev", device_ahead=1) as source,
    ):
        running = iter(source)
        with contextlib.suppress(Exception):
            next(running)
        ends[0].join(60)
        assert not ends[0].is_alive()


def case_a_consumer_that_keeps_all_batches() -> None:
    import simdev

    one = 8 * 3 * SIZE[0] * SIZE[1] * 4
    torch.accelerator.empty_cache()
    simdev.capacity(used() + 4 * one)
    kept = []
    with loader(device="simdev", size=8) as source:
        with pytest.raises(torch.OutOfMemoryError):
            kept.extend(source)
        assert 1 <= len(kept) <= 4
        kept.clear()


def case_a_bound_in_bytes() -> None:
    """One batch is ahead where the bound is smaller than two."""
    before = used()
    one = 4 * 3 * SIZE[0] * SIZE[1] * 4
    with loader(device="simdev", device_ahead=1) as source:
        for images, labels in source:
            del images, labels
            torch.accelerator.synchronize()
            # One ahead and one that is being made, with what it is made of.
            assert torch.accelerator.memory_allocated() - before < 3.5 * one


def case_pinning_refused() -> None:
    import simdev

    steps = [t.Resize((171, 91)), *FLOATS[1:]]  # of a size that nothing keeps
    expected = batches(steps=steps)
    simdev.refuse_pinning(True)
    with cases.warnings() as said:
        found = batches(steps=steps, device="simdev")
    assert len(said) == 1 and "page-locked" in said[0], said
    for mine, theirs in zip(expected, found, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


def case_pinning_refused_after_some_memory() -> None:
    """As where `ulimit -l` is reached: some slabs are page-locked, and the others copied from."""
    import simdev

    from nostall.torch import _device

    steps = [t.Resize((173, 89)), *FLOATS[1:]]  # of a size that nothing keeps
    expected = batches(steps=steps)
    taken: list[int] = []
    memory = _device.Device.memory

    def limited(self: Any, size: int) -> Any:
        taken.append(size)
        simdev.refuse_pinning(len(taken) > 2)
        return memory(self, size)

    limit = mock.patch.object(_device.Device, "memory", limited)
    with cases.warnings() as said, limit, watched() as seen:
        found = batches(steps=steps, device="simdev")
    assert len(taken) > 2 and {pinned for _, _, pinned in seen} == {True, False}
    assert len(said) == 1 and "page-locked" in said[0], said
    for mine, theirs in zip(expected, found, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))
    assert simdev.reports() == []


def case_an_early_end() -> None:
    import simdev

    with loader(device="simdev") as source:
        running = iter(source)
        with simdev.held(on_side(source)):
            next(running)
            # What is under way reads memory of the stage: the end waits for it.
            ending = threading.Thread(target=running.close)
            ending.start()
            ending.join(0.2)
            assert ending.is_alive()
        ending.join()
        assert len(list(source)) == len(source)
    assert not [thread for thread in threading.enumerate() if thread.name == "nostall-device"]


def case_an_error_in_a_copy() -> None:
    import simdev

    with loader(device="simdev", device_ahead=1) as source:
        running = iter(source)
        next(running)
        simdev.fail_after(1)
        with pytest.raises(RuntimeError, match="device lost"):
            list(running)
    simdev.reports()


def case_a_device_that_is_lost_for_good() -> None:
    """Whatever its threads do at that moment: the loop gets the error, and the loader ends."""
    import simdev

    slab = 4 * 3 * SIZE[0] * SIZE[1]
    moments: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
        "waits for a copy": ({"staging": 4 * slab}, lambda ahead: len(ahead._copying) >= 2),
        "waits for the loop": ({"device_ahead": 1}, lambda ahead: ahead._held_up),
        "is done": ({}, lambda ahead: ahead._error is not None),
    }
    for moment, (more, comes) in moments.items():
        with loader(device="simdev", **more) as source:
            running = iter(source)
            next(running)
            if "copy" in moment:
                simdev.hold(on_side(source))
            while not comes(source._ahead):
                time.sleep(0.001)
            simdev.lose()
            with pytest.raises(RuntimeError, match="device lost"):
                list(running)
            with pytest.raises(RuntimeError, match="device lost"):
                next(iter(source))
        assert not [each for each in threading.enumerate() if each.name == "nostall-device"]
        simdev.release_all()
    torch.accelerator.synchronize()
    simdev.reports()  # of memory that a lost device reads no more
    same()


def case_an_error_of_a_callable_comes_in_its_turn() -> None:
    def fails(raw: Any, context: Any) -> torch.Tensor:
        if context.sample == 5:
            raise ValueError("no such thing")
        return torch.ones(2)

    with loader(fails, device="simdev", shuffle=False) as source:
        running = iter(source)
        next(running)
        with pytest.raises(nostall.errors.TransformError, match="no such thing"):
            next(running)


def case_a_forked_child_is_refused_and_frees_nothing_of_the_device() -> None:
    with loader(device="simdev") as source:
        running = iter(source)
        next(running)
        torch.accelerator.synchronize()
        while len(source._ahead._ready) < 2:
            time.sleep(0.001)
        gc.collect()  # what other cases left to the collector is not to be found by the child's
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                next(running)
            except UsageError as error:
                os.write(write, str(error).encode())
                status = 0
            os._exit(status)  # the device aborts a child that has given it memory back
        os.close(write)
        assert b"forked child must make its own" in os.read(read, 4096)
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0
        next(running)


def case_devices_that_are_not_there() -> None:
    with cases.warnings() as said:
        found = batches(device="meta")
    assert len(said) == 1 and "batches stay on the host" in said[0], said
    assert found[0][0].device.type == "cpu"
    with pytest.raises(UsageError, match="torch finds 2 simdev devices"):
        loader(device="simdev:2")
    with pytest.raises(UsageError, match="nonsense"):
        loader(device="nonsense")
    with pytest.raises(UsageError, match="pass output="):
        loader(device="simdev", output="numpy")
    with pytest.raises(UsageError, match="bytes as they are stored"):
        nostall.DataLoader(nostall.ImageFolder(folder()), 4, device="simdev")


def case_a_second_device() -> None:
    with loader(device="simdev:1") as source:
        images, labels = next(iter(source))
        assert images.device.index == labels.device.index == 1
        assert torch.accelerator.current_device_index() == 0


# ---------------------------------------------------------------------------- what is waited for


def kept(place: Path) -> Stats:
    """What the loader of the run left."""
    nostall.trace.stop()
    return runs.read(place).stats[0]


def stepped(source: Any, copy: float, compute: float) -> None:
    """An epoch in which each batch takes so long to copy, and each step to compute."""
    import simdev

    weight = torch.ones(1, device="simdev")
    batches = iter(source)
    simdev.speed(copy / 2, stream=source._recipe.place.stream)  # images and labels
    simdev.speed(compute)
    for _ in batches:
        simdev.call("compute", weight, lambda host: None)


def case_waits_for_copies_on_the_devices_clock() -> None:
    with cases.recorded() as place:
        with (
            loader([t.Resize(SIZE)], device="simdev", size=8) as source,
            profile(activities=[ProfilerActivity.PrivateUse1]) as profiler,
        ):
            stepped(source, copy=0.008, compute=0.005)
            torch.accelerator.synchronize()
        profiler.export_chrome_trace(str(place / "kineto.json"))
        (device,) = analyze([place / "kineto.json"]).devices
        stats = kept(place)
    # The first batch is waited for wholly, each later one for the 3 ms that its copy takes longer.
    assert stats.device == pytest.approx(
        {"steps": 5, "seconds": 0.045, "input": 0, "copy": 0.020, "gradient": 0, "checkpoint": 0}
    )
    # torch.profiler's trace says the same, of the whole as one step.
    assert device.waits == pytest.approx({**stats.device, "steps": 1}, abs=1e-5)
    assert (
        "a step on the device takes 9.000 ms, without waits for copies of batches 5.000 ms"
        in str(stats)
    )


def case_copies_that_are_hidden_are_not_waited_for() -> None:
    with cases.recorded() as place:
        with loader([t.Resize(SIZE)], device="simdev", size=8) as source:
            stepped(source, copy=0.002, compute=0.005)
        waits = kept(place).device
    assert waits["copy"] == pytest.approx(0.002) and waits["seconds"] == pytest.approx(0.027)


def case_waits_for_input_on_the_devices_clock() -> None:
    import simdev

    asked = threading.Semaphore(0)

    def late(samples: list[Any]) -> torch.Tensor:
        assert asked.acquire(timeout=100)
        return torch.zeros(len(samples))

    def slow(ahead: Ahead) -> Any:
        simdev.pass_time(0.020)  # until the batch is there
        asked.release()
        return wait(ahead)

    wait = Ahead.take
    with cases.recorded() as place, mock.patch.object(Ahead, "take", slow):
        with loader(np.asarray, collate=late, device="simdev", size=8) as source:
            stepped(source, copy=0.008, compute=0.005)
        stats = kept(place)
        found = runs.read(place)
    # 20 ms and then, behind 5 ms of computing and 8 ms of copying, 7 ms.
    assert stats.device == pytest.approx(
        {"steps": 5, "seconds": 0.113, "input": 0.048, "copy": 0.040, "gradient": 0,
         "checkpoint": 0}
    )  # fmt: skip
    assert "A step on the device takes 22.600 ms" in runs.words(found)
    assert "without waits for input 13.000 ms" in runs.words(found)
    assert "without any 5.000 ms" in runs.words(found)
    (digest,) = (rank.digest for rank in found.ranks)
    assert digest is not None
    lane = digest.category("device simdev:0")
    assert lane["step"].seconds == pytest.approx(0.113)
    assert lane["input"].seconds == pytest.approx(0.048)
    page = run_page.page([found])
    assert "What each device did" in page and "rank 0, simdev:0" in page


def case_a_device_that_is_lost_in_a_recorded_run() -> None:
    """What it waited for is not known from there on, which is said; the run ends without waiting."""
    import simdev

    with tempfile.TemporaryDirectory() as place, cases.warnings() as said:
        nostall.trace.start(place, rank=0)
        with loader([t.Resize(SIZE)], device="simdev", size=8, device_ahead=1) as source:
            running = iter(source)
            next(running)
            simdev.hold(torch.accelerator.current_stream())
            next(running)
            simdev.lose()
            with pytest.raises(RuntimeError, match="device lost"):
                list(running)
        for thread in threading.enumerate():
            if thread.name == "nostall-clock":
                thread.join(60)
        with mock.patch.object(_device_clock, "_END", "no time to wait for"):
            nostall.trace.stop()
    assert len(said) == 1 and "are not recorded: simdev: device lost" in said[0], said
    simdev.release_all()
    torch.accelerator.synchronize()
    simdev.reports()


# ---------------------------------------------------------------------------- for pytest


def test_on_the_simulated_device() -> None:
    cases.check(__file__)


if __name__ == "__main__":
    cases.main(globals())
