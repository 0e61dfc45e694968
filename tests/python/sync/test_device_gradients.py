"""DistributedOptimizer on the simulated device: by its process group, and through the host's engine."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))

import cases
import mutations
import pytest
import torch
import torch.distributed as dist

from nostall.base import _device_clock
from nostall.errors import UsageError

RANK = int(os.environ.get("RANK", "0"))


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(16, 32)
        self.left = torch.nn.Linear(32, 8)
        self.right = torch.nn.Linear(32, 8)
        self.b = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, way: str = "both") -> torch.Tensor:
        h = torch.relu(self.a(x))
        parts = [
            part(h)
            for name, part in (("left", self.left), ("right", self.right))
            if way in (name, "both")
        ]
        return self.b(torch.relu(sum(parts)))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Any, step: int, rank: int = RANK, way: str = "both") -> torch.Tensor:
    device = next(model.parameters()).device
    return model(data(step, rank).to(device), way).square().mean()


def net(device: str = "simdev") -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def made(model: Any, lr: float = 0.1, **options: Any) -> Any:
    import nostall.torch as nt

    more = {
        name: options.pop(name)
        for name in ("overlap_update", "backward_passes_per_step", "process_set")
        if name in options
    }
    options.setdefault("threshold", 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    chosen = nt.SyncOptions(timeout=60, **options)
    return nt.DistributedOptimizer(optimizer, model.named_parameters(), chosen, **more)


def values(model: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def trained(steps: int = 4, **options: Any) -> tuple[list[torch.Tensor], Any]:
    model = net()
    optimizer = made(model, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return values(model), optimizer.gradient_sync


def reference(steps: int = 4) -> list[torch.Tensor]:
    """One process with the data of both ranks: each gradient halved, added up by rank."""
    model = net("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        parts = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            parts.append([p.grad * 0.5 for p in model.parameters()])
        for p, first, second in zip(model.parameters(), *parts, strict=True):
            p.grad = first + second
        optimizer.step()
    return values(model)


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


def collective_stream() -> torch.Stream:
    """That of the last group that reduced something."""
    import simdev.group

    used = [group for group in simdev.group.SimGloo.made if group.streams]
    stream: torch.Stream = used[-1].streams[torch.device("simdev", 0)]
    return stream


STAGED = {"fixed_order": True}


# ---------------------------------------------------------------------------- the same results


def case_every_way_ends_with_the_bits_of_one_process() -> None:
    import simdev

    from nostall.torch._device_gradients import CollectiveSync, StagedSync

    expected = reference()
    quick = {"mode": "negotiated", "cycle": 0.001}
    ways: list[tuple[type, dict[str, Any]]] = [
        (CollectiveSync, {}),
        (CollectiveSync, {"views": False}),
        (CollectiveSync, {"overlap_update": True, "threshold": 100}),
        (CollectiveSync, {"check_finite": True}),
        (StagedSync, STAGED),
        (StagedSync, {**STAGED, "overlap_update": True}),
        (StagedSync, {**quick, "threshold": 1 << 20}),
        (StagedSync, {**quick, "global_sleep_every": 1}),
        (StagedSync, {**quick, "nonblocking": True}),
        (StagedSync, {**quick, "cores": (min(os.sched_getaffinity(0)),)}),
    ]
    for kind, options in ways:
        found, sync = trained(**options)
        assert type(sync) is kind, options
        assert equal(found, expected), options
        assert simdev.reports() == [], options
        sync.close()


def case_graphs_that_differ_by_rank_and_step() -> None:
    import simdev

    narrow = {"compression": "bf16"}
    for options in ({}, STAGED, narrow, {**narrow, **STAGED}):
        model = net()
        optimizer = made(model, lr=0.0, threshold=600, **options)
        own: dict[str, torch.Tensor] = {}
        for name, p in model.named_parameters():
            p.register_hook(lambda g, own=own, name=name: own.__setitem__(name, g.cpu()))
        for step in range(18):
            ways = [("both", "left", "right")[(step * (r + 2) + step // 3) % 3] for r in range(2)]
            if step > 10:
                ways = ["left", "left"]  # steady again: the plan follows
            optimizer.zero_grad()
            loss_of(model, step % 5, way=ways[RANK]).backward()
            optimizer.step()
            gathered: list[Any] = [None, None]
            dist.all_gather_object(gathered, own)
            own.clear()
            for name, p in model.named_parameters():
                parts = [grads[name] for grads in gathered if name in grads]
                if not parts:
                    assert p.grad is None, (step, name)
                else:
                    near = {"rtol": 0.05, "atol": 0.01} if "compression" in options else {}
                    torch.testing.assert_close(p.grad.cpu(), sum(parts) / 2, **near)
        assert optimizer.gradient_sync.replans >= 1
        assert simdev.reports() == []


def case_every_rank_issues_the_same_groups_in_the_same_order() -> None:
    """Rank 1 lacks some of its gradients."""
    model = net()
    optimizer = made(model, threshold=100)
    sizes: list[int] = []
    reduce = dist.all_reduce

    def watched(tensor: torch.Tensor, **named: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, **named)

    with mock.patch.object(dist, "all_reduce", watched):
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step, way="left" if RANK and step > 2 else "both")
            loss.backward()
            optimizer.step()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, sizes)
    assert gathered[0] == gathered[1] and len(set(sizes)) > 4


def case_what_an_optimizer_offers() -> None:
    import simdev

    model = net()
    optimizer = made(model, threshold=1)
    seen: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    loss = loss_of(model, 0)
    optimizer.plan_from(loss)
    names = [name for name, _ in model.named_parameters()]
    groups = optimizer.gradient_sync.plan
    loss.backward()
    optimizer.step()
    assert [names[g[0]] for g in groups if g[0] < len(names)] == seen

    def accumulated(
        by_context: bool,
        first: str = "both",
        last: str = "both",
        alone: bool = False,
        **options: Any,
    ) -> list[torch.Tensor]:
        model = net()
        optimizer = made(model, backward_passes_per_step=1 if by_context else 2, **options)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with optimizer.no_sync() if by_context else contextlib.nullcontext():
                loss_of(model, 10 * step, way=first).backward()
            with optimizer.no_sync() if alone else contextlib.nullcontext():
                loss_of(model, 10 * step + 1, way=last).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert equal(values(model), values_of_rank_0(model))
        return values(model)

    assert equal(accumulated(False), accumulated(True))
    assert equal(accumulated(False), accumulated(True, **STAGED))
    # What the pass that is reduced does not use, and a step without such a pass.
    for options in ({}, STAGED):
        apart = accumulated(False, "left", "right", **options)
        assert equal(apart, accumulated(True, "left", "right", **options))
        assert equal(apart, accumulated(True, "left", "right", alone=True, **options))

    exact = trained()[0]
    for staged in ({}, STAGED):
        narrow = trained(compression="bf16", **staged)[0]
        for a, b in zip(narrow, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
        # What is kept of a step does not change in another one.
        model = net()
        optimizer = made(model, **staged)
        loss_of(model, 0).backward()
        optimizer.step()
        kept = [p.grad for p in model.parameters()]
        before = [g.cpu() for g in kept]
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        assert equal([g.cpu() for g in kept], before)
        # Another step without another backward pass, and ranks with more data than others.
        optimizer.step()
        for step in range(2 + 3 * RANK):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert optimizer.join() == 1
        assert equal(values(model), values_of_rank_0(model))
        # Rank 0 is where all start.
        torch.manual_seed(RANK + 1)
        model = Net().to("simdev")
        made(model, **staged)
        assert equal(values(model), values_of_rank_0(model))
        # Strides of their own.
        conv = torch.nn.Conv2d(3, 8, 3).to("simdev").to(memory_format=torch.channels_last)
        optimizer = made(conv, **staged)
        images = torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last) * (RANK + 1)
        conv(images.to("simdev")).sum().backward()
        optimizer.step()
        assert conv.weight.grad.cpu().eq(54.0).all()
    assert simdev.reports() == []


def values_of_rank_0(model: Any) -> list[torch.Tensor]:
    box = [values(model)]
    dist.broadcast_object_list(box, 0)
    return box[0]


def case_a_device_that_is_not_the_threads_own() -> None:
    devices: list[int] = []

    def watched(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            devices.append(torch.accelerator.current_device_index())
            return original(*arguments, **named)

        return mock.patch.object(dist, name, call)

    with watched("all_gather_object"), watched("broadcast_object_list"):
        model = net("simdev:1")
        optimizer = made(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert len(devices) >= 4 and set(devices) == {1}
    assert torch.accelerator.current_device_index() == 0
    assert equal(values(model), reference())


def case_the_hook_of_ddp() -> None:
    import simdev
    from torch.nn.parallel import DistributedDataParallel

    import nostall.torch as nt

    expected = reference()
    host_only = dist.new_group(backend="gloo")
    for group, order, staged in (
        (None, "any", False),
        (None, "fixed", True),
        (host_only, "any", True),
    ):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        reducer = nt.BucketReducer(order=order)
        reducer.given = group or reducer.given
        model.register_comm_hook(reducer, nt.reduce_bucket)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert equal(values(model), expected)
        assert bool(reducer._reductions) == staged
        assert simdev.reports() == []
        reducer.close()


def case_buckets_of_two_devices_are_reduced_in_the_order_of_the_calls() -> None:
    """By one thread: two would mix buckets up, where ranks' devices differ in speed."""
    import simdev

    import nostall.torch as nt

    reducer = nt.BucketReducer(order="fixed")
    threads: list[int] = []
    reduce = dist.all_reduce

    def watched(tensor: torch.Tensor, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return reduce(tensor, **named)

    buckets = [torch.full((100,), float(RANK + i), device=f"simdev:{i}") for i in range(2)]
    with mock.patch.object(dist, "all_reduce", watched):
        for future in [reducer.reduced(bucket) for bucket in buckets]:
            future.wait()
    assert len(threads) == 2 and len(set(threads)) == 1
    assert [bucket.cpu().unique().tolist() for bucket in buckets] == [[1.0], [3.0]]
    assert simdev.reports() == []


# ---------------------------------------------------------------------------- nothing waits


def case_a_step_returns_before_its_reductions() -> None:
    import simdev

    model = net()
    optimizer = made(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    torch.accelerator.synchronize()
    stream = collective_stream()
    with simdev.held(stream):
        for step in range(2, 4):
            optimizer.zero_grad()
            # The second step learns who gave what in the first, so that one step is ahead.
            if step == 2:
                loss_of(model, step).backward()
                optimizer.step()
        assert not stream.query()
    torch.accelerator.synchronize()
    assert simdev.reports() == []


def case_gradients_are_waited_for_on_the_devices_clock() -> None:
    import simdev

    for staged in ({}, STAGED):
        model = net()
        optimizer = made(model, threshold=1 << 20, **staged)
        loss_of(model, 0).backward()  # before the clock begins: all streams are there
        optimizer.step()
        with cases.recorded():
            sync, tasks = optimizer.gradient_sync, 0
            slow = sync._side if staged else collective_stream()
            simdev.speed(0.007, stream=slow)
            mine = torch.accelerator.current_stream()
            for step in range(1, 3):
                with _device_clock.waiting(torch, mine.device, "input"):
                    optimizer.zero_grad()
                # Its reductions, or the copies of each gradient to the host and back.
                tasks += 2 * len(list(model.parameters())) if staged else len(sync._groups)
                loss_of(model, step).backward()
                optimizer.step()
            _device_clock.end_step(torch, mine.device)
            _device_clock.settle()
            waits = _device_clock.waits_of(mine.device)
        assert waits["gradient"] == waits["seconds"] == pytest.approx(tasks * 0.007), staged
        simdev.release_all()


# ---------------------------------------------------------------------------- without one of them


def one_step(**options: Any) -> None:
    """Steps whose gradients are dropped at once."""
    model = net()
    optimizer = made(model, **options)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> None:
    """A rank alone reduces nothing; its gradients are packed all the same, here late."""
    import simdev

    model = net()
    optimizer = made(model, process_set=[RANK])
    with simdev.held(optimizer.gradient_sync._side):
        loss_of(model, 0).backward()
        optimizer.step()


def lacking_step() -> None:
    """A step that asks who gave the gradients that this rank lacks."""
    model = net()
    optimizer = made(model)
    loss_of(model, 0, way="left").backward()
    optimizer.step()


def dropped_in_backward(**options: Any) -> None:
    """Gradients are dropped, and their memory asked for again, while they are packed."""
    import simdev

    weight = torch.nn.Parameter(torch.ones(5000, device="simdev"))
    other = torch.nn.Parameter(torch.ones(1, device="simdev"))  # so that the group is not complete
    optimizer = made(torch.nn.ParameterList([weight, other]), **options)
    with simdev.held(optimizer.gradient_sync._side):
        (weight * 2).sum().backward()
        optimizer.zero_grad()
        optimizer.gradient_sync._submitted.clear()
        again = [torch.zeros(5000, device="simdev") for _ in range(4)]
    torch.accelerator.synchronize()
    del again


def dropped_after_a_step() -> None:
    """A rank alone: a group's memory is asked for again while counts are copied out of it."""
    import simdev

    from nostall.torch._device_gradients import CollectiveSync

    weight = torch.nn.Parameter(torch.ones(5000, device="simdev"))
    optimizer = made(torch.nn.ParameterList([weight]), process_set=[RANK])
    sizes: list[int] = []
    reduce = CollectiveSync._reduce

    def watched(sync: Any, turn: Any) -> None:
        sizes.append(turn.buffer.numel())
        reduce(sync, turn)

    with simdev.held(optimizer.gradient_sync._side):
        with mock.patch.object(CollectiveSync, "_reduce", watched):
            (weight * 2).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        again = [torch.zeros(size, device="simdev") for size in sizes for _ in range(2)]
    torch.accelerator.synchronize()
    assert weight.detach().cpu().eq(0.8).all()
    del again


@functools.cache
def host_group() -> Any:
    import nostall.torch  # noqa: F401

    return dist.new_group(backend="nostall")


def hook_step() -> None:
    """A bucket through page-locked memory; it is dropped while the sum is copied back."""
    import simdev

    from nostall.torch import _device_gradients

    reduction = _device_gradients.StagedReduction(
        torch.device("simdev", 0), host_group(), ThreadPoolExecutor(1)
    )
    side = reduction._place.stream
    reduce = dist.all_reduce
    for drops in (False, True):
        bucket = torch.zeros(3000, device="simdev") + (RANK + 1)

        def then_hold(tensor: torch.Tensor, drops: bool = drops, **named: Any) -> None:
            reduce(tensor, **named)
            if drops:
                simdev.hold(side)

        with mock.patch.object(dist, "all_reduce", then_hold):
            future = reduction(bucket)
            reduction._thread.submit(int).result()  # it holds the bucket no more
        if drops:
            del future, bucket
            again = torch.zeros(3000, device="simdev")
        else:
            future.wait()
            total = bucket.sum()
        simdev.release(side)
    torch.accelerator.synchronize()
    del again, total


def reported(scenario: Callable[..., None], **options: Any) -> list[str]:
    import simdev

    scenario(**options)
    torch.accelerator.synchronize()
    return simdev.reports()


def reports_of(scenario: Callable[..., None], **options: Any) -> Callable[[], list[str]]:
    return functools.partial(reported, scenario, **options)


NEEDED = {
    "CollectiveSync._pack: follow": (reports_of(one_step), "no event"),
    "CollectiveSync.wait_for: arrive": (reports_of(one_step), "no event"),
    "CollectiveSync.wait_for: follow": (reports_of(alone), "no event"),
    "CollectiveSync.wait_for: follow 2": (reports_of(one_step), "no event"),
    "CollectiveSync.wait_for: record": (reports_of(lacking_step), "early"),
    "_Turn.count: await_copy": (reports_of(lacking_step), "early"),
    "CollectiveSync._submit.pack: use_on": (reports_of(dropped_in_backward), "no event"),
    "CollectiveSync._pack: use_on": (reports_of(dropped_after_a_step), "no event"),
    "StagedSync._stage: follow": (reports_of(one_step, **STAGED), "no event"),
    "StagedSync._stage: record": (reports_of(one_step, **STAGED), "early"),
    "StagedSync._store: follow": (reports_of(one_step, **STAGED), "no event"),
    "StagedSync._pass_on: await_copy": (reports_of(one_step, **STAGED), "early"),
    "StagedSync._stage: use_on": (reports_of(dropped_in_backward, **STAGED), "no event"),
    "StagedReduction.__call__: follow": (reports_of(hook_step), "no event"),
    "StagedReduction.__call__: use_on": (reports_of(hook_step), "no event"),
    "StagedReduction.__call__: record": (reports_of(hook_step), "early"),
    "StagedReduction.__call__.reduce: await_copy": (reports_of(hook_step), "early"),
}


def case_nothing_is_reported() -> None:
    assert reported(one_step, overlap_update=True) == []


def case_without_any_one_wait_or_record_stream() -> None:
    mutations.check(("nostall.torch._device_gradients",), NEEDED, {})


# ---------------------------------------------------------------------------- faults


def case_a_pass_that_is_refused_on_one_rank_changes_no_gradient() -> None:
    import simdev

    expected = reference()
    for staged in ({}, {"views": False}, STAGED):
        model = net()
        optimizer = made(model, **staged)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            torch.accelerator.synchronize()  # what was begun is reduced
            if RANK == 0:
                with pytest.raises(UsageError, match="computed again"):
                    loss_of(model, step + 10).backward()
            optimizer.step()
        assert equal(values(model), expected), staged
        assert simdev.reports() == [], staged


def case_pinning_refused() -> None:
    import simdev

    expected = reference()
    with mock.patch.object(torch, "empty", refusing(torch.empty)):
        for staged in ({}, STAGED):
            with cases.warnings() as said:
                found = trained(**staged)[0]
            assert equal(found, expected)
            assert len(said) == 1 and "page-locked" in said[0], said
    assert simdev.reports() == []


def refusing(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As under `ulimit -l 0`, also for memory that the allocator keeps from before."""

    def refuse(*arguments: Any, **named: Any) -> torch.Tensor:
        if named.get("pin_memory"):
            raise RuntimeError("memory cannot be pinned")
        return empty(*arguments, **named)

    return refuse


def case_devices_that_are_not_for_gradients() -> None:
    import nostall.torch as nt

    meta = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match=r"weight is on meta: .* which here is simdev"):
        nt.DistributedOptimizer(torch.optim.SGD(meta.parameters()), meta.named_parameters())
    both = torch.nn.ModuleList([torch.nn.Linear(2, 2, device=f"simdev:{i}") for i in range(2)])
    with pytest.raises(UsageError, match="make an optimizer for each device"):
        nt.DistributedOptimizer(torch.optim.SGD(both.parameters()), both.named_parameters())
    mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="simdev")])
    with pytest.raises(UsageError, match=r"0\.weight is on cpu"):
        nt.DistributedOptimizer(torch.optim.SGD(mixed.parameters()), mixed.named_parameters())


def case_other_models_are_refused_with_the_first_difference() -> None:
    import nostall.torch as nt
    from nostall.errors import PeerError

    model = torch.nn.Linear(2, 2 + RANK).to("simdev")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(PeerError, match=r"has gradient weight \(\d x float32\) where rank \d has"):
        nt.DistributedOptimizer(optimizer, model.named_parameters())


def case_sets_of_ranks_that_are_none() -> None:
    for wrong in ([0, 5], [RANK, RANK]):
        with pytest.raises(UsageError, match=r"process_set \[.*\] is not a set of ranks below 2"):
            made(net(), process_set=wrong)
    with pytest.raises(UsageError, match=f"rank {RANK} is not in process_set"):
        made(net(), process_set=[1 - RANK])


def case_a_plan_in_the_middle_of_a_step_is_refused() -> None:
    model = net()
    optimizer = made(model)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="before its backward pass"):
        optimizer.plan_from(loss_of(model, 1))
    optimizer.step()


def case_a_state_that_one_rank_alone_has_is_refused() -> None:
    import nostall.torch as nt
    from nostall.errors import PeerError

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if RANK == 0:
        loss_of(model, 0).backward()
        optimizer.step()
    for options in ({}, STAGED):
        with pytest.raises(PeerError, match="load the same state on all ranks"):
            nt.DistributedOptimizer(
                optimizer, model.named_parameters(), nt.SyncOptions(timeout=60, **options)
            )


def case_a_gradient_that_is_not_finite() -> None:
    """No parameter is updated then."""
    for staged in ({}, STAGED):
        model = net()
        optimizer = made(model, check_finite=True, overlap_update=True, threshold=100, **staged)
        for _ in range(2):  # the second one finds a plan
            loss_of(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = values(model)
        # The last of the gradients, so that others are reduced before it.
        model.a.weight.register_hook(lambda gradient: gradient * float("nan"))
        loss_of(model, 0).backward()
        with pytest.raises(UsageError, match=rf"gradient a\.weight of rank {RANK} is not finite"):
            optimizer.step()
        assert equal(values(model), before), staged


def case_a_gradient_of_one_rank_is_refused_by_all() -> None:
    """And the next step is as ever, for all that follow it."""
    told = r"gradient a\.weight of rank 0 is not finite" if RANK == 0 else "of another rank is not"
    ways: list[tuple[str, dict[str, Any]]] = [
        ("simdev", {}), ("simdev", STAGED), ("simdev", {"mode": "negotiated"}),
        ("cpu", {}), ("cpu", {"mode": "negotiated"}),
    ]  # fmt: skip
    for device, options in ways:
        model = net(device)
        optimizer = made(model, check_finite=True, overlap_update=True, **options)
        loss_of(model, 0).backward()
        optimizer.step()
        before = values(model)
        hook = model.a.weight.register_hook(lambda g: g * float("nan") if RANK == 0 else g)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(UsageError, match=told):
            optimizer.step()
        assert equal(values(model), before), (device, options)
        hook.remove()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        assert not equal(values(model), before), (device, options)
        optimizer.gradient_sync.close()


def case_a_rank_on_the_host_and_one_on_a_device_are_refused() -> None:
    for options in ({}, STAGED):
        told = "parameters of rank 0 are on cpu and those of rank 1 on simdev: move the model"
        with pytest.raises(UsageError, match=told):
            made(net("simdev" if RANK else "cpu"), **options)


def case_an_optimizer_that_is_closed_has_no_process_group() -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    optimizer = made(net())
    assert len(dist.distributed_c10d._world.pg_map) == groups + 1
    optimizer.gradient_sync.close()
    assert len(dist.distributed_c10d._world.pg_map) == groups


def case_a_hook_that_is_closed_has_no_process_group() -> None:
    import nostall.torch as nt

    groups = len(dist.distributed_c10d._world.pg_map)
    bucket = torch.full((100,), float(RANK), device="simdev")
    with nt.BucketReducer(order="fixed") as reducer:
        assert len(dist.distributed_c10d._world.pg_map) == groups + 1
        future = reducer.reduced(bucket)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    future.wait()
    assert bucket.cpu().eq(1.0).all()  # what was begun was done
    reducer.close()
    with pytest.raises(UsageError, match="is closed"):
        reducer.reduced(bucket)


def case_a_forked_child_is_refused() -> None:
    for staged in ({}, STAGED):
        model = net()
        optimizer = made(model, **staged)
        loss_of(model, 0).backward()
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except (RuntimeError, UsageError) as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()


def case_z_a_lost_device() -> None:
    """The error comes from backward, or from step; the last case, for the ranks are apart then."""
    import simdev

    for staged in ({}, STAGED):
        model = net()
        optimizer = made(model, **staged)
        simdev.fail_after(25)
        with pytest.raises(RuntimeError, match="device lost"):
            loss_of(model, 0).backward()
            optimizer.step()
        simdev.release_all()
    simdev.reports()


def case_z_a_device_that_is_lost_for_good() -> None:
    """Between backward and step, where threads wait for copies: step says so, and the engine ends."""
    import simdev

    for staged in ({}, STAGED):
        model = net()
        optimizer = made(model, **staged)
        side = optimizer.gradient_sync._side
        with simdev.held(side):
            loss_of(model, 0).backward()
            simdev.lose()
        with pytest.raises(RuntimeError, match="device lost"):
            optimizer.step()
        simdev.release_all()
        optimizer.gradient_sync.close()
    simdev.reports()


def case_z_a_device_that_one_rank_loses() -> None:
    """Through the host's engine: the other rank is told as soon as the optimizer is closed."""
    import simdev

    from nostall.errors import PeerError

    model = net()
    optimizer = made(model, **STAGED)
    if RANK == 0:
        with simdev.held(optimizer.gradient_sync._side):
            loss_of(model, 0).backward()
            simdev.lose()
    else:
        loss_of(model, 0).backward()
    error, words = (RuntimeError, "device lost") if RANK == 0 else (PeerError, "rank 0 .* left")
    with pytest.raises(error, match=words):
        optimizer.step()
    optimizer.gradient_sync.close()
    simdev.release_all()
    simdev.reports()


# ---------------------------------------------------------------------------- for pytest


def test_on_two_ranks_of_the_simulated_device() -> None:
    cases.check(__file__, ranks=2)


if __name__ == "__main__":
    import simdev.group  # noqa: F401

    cases.join("cpu:gloo,simdev:simgloo")
    cases.main(globals())
