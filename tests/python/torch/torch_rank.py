"""One rank; each function is what one may do.

Started by torch_job.py, or as a program under a launcher, with the function's name as its argument.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import io
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nostall.torch
from nostall.errors import PeerError, UsageError
from nostall.job._world import find_address, find_world
from nostall.observe import trace
from nostall.observe.report import _digest as digest
from nostall.observe.timelines._stream import Source
from nostall.torch import _mesh as mesh
from nostall.torch import _waits as waits
from nostall.torch._aborts import Aborts

torch.set_num_threads(1)
rank = size = 0
limit = timedelta(seconds=60)


def same_as_gloo() -> None:
    """Every operation gives what Gloo gives; sums are of small integers, hence exact."""
    gloo = dist.new_group(backend="gloo")
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64]
    for kind in [*kinds, torch.uint8, torch.int8]:
        for count in (1, 7, 40_001):
            mine = (torch.arange(count) % 3 + rank).to(kind)
            operations = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
            if not kind.is_floating_point:
                operations += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
            for op in operations:
                ours, theirs = mine.clone(), mine.clone()
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                assert torch.equal(ours, theirs), (kind, count, op)
                ours = mine.clone()
                dist.reduce(ours, size - 1, op)
                if rank == size - 1:
                    assert torch.equal(ours, theirs)
                elif os.environ.get("NODES", "1") == "1":  # Gloo overwrites what it reduces
                    assert torch.equal(ours, mine)
            ours = mine.clone()
            dist.broadcast(ours, size - 1)
            assert torch.equal(ours, (torch.arange(count) % 3 + size - 1).to(kind))
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            for r, part in enumerate(parts):
                assert torch.equal(part, (torch.arange(count) % 3 + r).to(kind))
            joined = torch.empty(count * size, dtype=kind)
            dist.all_gather_into_tensor(joined, mine)
            assert torch.equal(joined, torch.cat(parts))
            share = torch.empty_like(mine)
            dist.reduce_scatter_tensor(share, joined)
            assert torch.equal(share, parts[rank] * size)
            dist.reduce_scatter(share, parts)
            assert torch.equal(share, parts[rank] * size)
    for count in (1, 7, 40_001):
        some = torch.arange(count) % (size + 1) >= size - rank
        dist.all_reduce(some)
        wanted = torch.arange(count) % (size + 1) > 0
        assert torch.equal(some.view(torch.uint8), wanted.to(torch.uint8))
    average = torch.full((5,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average, torch.full((5,), (size - 1) / 2))
    strided = torch.arange(12.0).reshape(3, 4).t() + rank
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.arange(12.0).reshape(3, 4).t() * size + size * (size - 1) / 2)
    dist.barrier()


def gathered_early() -> None:
    """The last rank comes when the others have each other's data, and not before."""
    count = 300_000
    shared = torch.from_file(os.environ["TEST_SHARED"], shared=True, size=size * size * count)
    every = shared.view(size, size, count)  # of a rank, from a rank
    for last in range(size):
        dist.barrier()
        mine = torch.full((count,), 1.0 + rank + 100 * last)
        early = [r for r in range(size) if r != last]
        pairs = [(r, of) for r in early for of in early if r != of]
        while rank == last and any((every[r, of] != 1 + of + 100 * last).any() for r, of in pairs):
            time.sleep(0.001)
        if last % 2:
            dist.all_gather_into_tensor(every[rank].view(-1), mine)
        else:
            dist.all_gather(list(every[rank]), mine)
        assert all((every[rank, of] == 1 + of + 100 * last).all() for of in range(size))
    # Uneven parts, one of them with gaps; and a tensor that is gathered is a part of another rank's.
    for count in (1, 50_000):
        parts = [torch.zeros(count * (r + 1)) for r in range(size)]
        parts[1] = torch.zeros(2 * count, 2)[:, 1]
        dist.all_gather(parts, torch.full((count * (rank + 1),), float(rank)))
        assert all((part == r).all() for r, part in enumerate(parts))
        parts = [torch.zeros(count) for _ in range(size)]
        parts[0][:] = rank
        dist.all_gather(parts, parts[0])
        assert all((part == r).all() for r, part in enumerate(parts))


def scattered() -> None:
    """Uneven blocks, one empty and one with gaps; in place; several at once; sizes that do not fit."""
    for count in (1, 50_000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = size * (size + 1) / 2 / (1 if op == dist.ReduceOp.SUM else size)
            blocks = [torch.full((count * r,), float(rank + 1)) for r in range(size)]
            blocks[1] = torch.full((count, 2), float(rank + 1))[:, 1]
            block = torch.zeros(count * rank)
            dist.reduce_scatter(block, blocks, op)
            assert block.tolist() == [total] * (count * rank)
            joined = torch.full((size, count), float(rank + 1))
            dist.reduce_scatter_tensor(joined[rank], joined.view(-1), op)
            assert joined[rank].tolist() == [total] * count
            assert joined[rank - 1].tolist() == [rank + 1] * count
    sources = [torch.full((size * count,), float(rank)) for count in (3, 40_000)]
    outputs = [torch.empty(count) for count in (3, 40_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, source in zip(outputs, sources, strict=True):
            dist.reduce_scatter_tensor(output, source)
    manager.wait()
    assert all((output == size * (size - 1) / 2).all() for output in outputs)
    wholes = [torch.empty(size * count) for count in (3, 40_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, outputs, strict=True):
            dist.all_gather_into_tensor(whole, part)
    manager.wait()
    assert all((whole == size * (size - 1) / 2).all() for whole in wholes)
    dist.barrier()
    world: Any = dist.group.WORLD
    assert not world._delegated.pending()
    if os.environ["NODES"] != "1":
        return
    try:
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * size + 1))
    except UsageError as error:
        assert f"{3 * size + 1} elements" in str(error)
    else:
        sys.exit("accepted")
    dist.barrier()


def overlapping() -> None:
    """Inputs may lie in their outputs, and outputs in their inputs, on one rank alone too."""
    for count in (1, 50_000):
        for begin in (0, rank * count, 1 if rank == 0 else 0):
            joined = torch.zeros(count * size + 1)
            mine = joined[begin : begin + count].fill_(rank + 1)
            dist.all_gather_into_tensor(joined[:-1], mine)
            assert torch.equal(joined[:-1], torch.arange(1.0, size + 1).repeat_interleave(count))
            joined = torch.arange(count * size + 1.0)
            dist.reduce_scatter_tensor(joined[begin : begin + count], joined[:-1])
            wanted = torch.arange(count * size + 1.0)[rank * count : (rank + 1) * count] * size
            assert torch.equal(joined[begin : begin + count], wanted)
            both = torch.zeros(count + 1)
            parts = [torch.zeros(count) for _ in range(size)]
            parts[1 - rank] = both[1:]
            dist.all_gather(parts, both[:-1].fill_(rank))
            assert all((part == r).all() for r, part in enumerate(parts))


def unaligned() -> None:
    """Values may begin at any byte, on one rank alone too."""

    def made(count: int) -> torch.Tensor:
        memory = bytearray(4 * count + (rank == 0))
        return torch.frombuffer(memory, dtype=torch.float32, offset=int(rank == 0)).fill_(rank + 1)

    total = size * (size + 1) / 2
    for count in (1, 50_000):
        one = made(count)
        dist.all_reduce(one)
        assert (one == total).all()
        one = made(count)
        dist.reduce(one, 0)
        assert rank or (one == total).all()
        block = made(count)
        dist.reduce_scatter_tensor(block, made(count * size))
        assert (block == total).all()
        block = made(count)
        dist.reduce_scatter(block, [made(count) for _ in range(size)])
        assert (block == total).all()


def misfitting() -> None:
    """Tensors that do not fit on one rank are an error there, and its end one on the others."""
    world: Any = dist.group.WORLD
    mine, parts = torch.ones(3), [torch.empty(3) for _ in range(size)]
    every = torch.empty(2 * size * 3).view(-1, 2)[:, 0]  # with gaps
    dist.all_gather_into_tensor(every, mine)
    assert every.tolist() == [1.0] * (3 * size)
    short = [*parts[:-1], torch.empty(2)]
    wrong: dict[str, Callable[[], object]] = {
        "all_gather have [3, 3, 2] elements": lambda: dist.all_gather(short, mine),
        "all_gather have [3, 3] elements": lambda: dist.all_gather(parts[1:], mine),
        "of torch.float32, torch.int32; rank 2": lambda: world.allgather(
            [[*parts[1:], mine.int()]], [mine]
        ),
        "all_gather has 8 elements": lambda: dist.all_gather_into_tensor(torch.empty(8), mine),
        "blocks of [3, 3, 2] elements; rank 2": lambda: dist.reduce_scatter(mine, short),
        "blocks of [3, 3] elements; rank 2": lambda: dist.reduce_scatter(mine, parts[1:]),
    }
    for said, call in wrong.items() if rank == size - 1 else ():
        try:
            call()
        except UsageError as error:
            assert said in str(error), error
        else:
            sys.exit(f"accepted: {said}")
    if rank == size - 1:
        os._exit(0)
    try:
        dist.all_gather(parts, mine)
    except PeerError as error:
        assert f"rank {size - 1}" in str(error), error
        print("was told", flush=True)
    os._exit(0)


def message() -> None:
    """From rank 0 to rank 1."""
    if rank == 0:
        dist.send(torch.tensor([42.0]), 1)
    elif rank == 1:
        got = torch.empty(1)
        dist.recv(got, 0)
        assert got.item() == 42


def delegates() -> None:
    """What we leave to Gloo works beside what we do."""
    mine = torch.tensor([float(rank)])
    message()
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered)
    assert rank or [t.item() for t in gathered] == list(range(size))
    part = torch.empty(1)
    dist.scatter(part, [torch.tensor([float(r)]) for r in range(size)] if rank == 0 else None)
    assert part.item() == rank
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank)))
    assert out.tolist() == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size


def asynchronous() -> None:
    tensors = [torch.full((1000 * (i + 1),), float(rank + i)) for i in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    last = torch.tensor([1.0])
    dist.all_reduce(last)
    assert last.item() == size
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert work.is_completed()
        assert (tensor == sum(range(size)) + size * i).all()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert future.then(lambda f: f.value()[0].sum().item()).wait() == 3 * size
    pair = dist.new_group([0, 1])
    if rank < 2:
        both = torch.tensor([float(rank)])
        dist.all_reduce(both, group=pair)
        assert both.item() == 1


def counted_apart() -> None:
    """What members alone make does not change the names of groups that all ranks make."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        for _ in range(2):
            with nostall.torch.BucketReducer(pair) as reducer:
                (total,) = reducer.reduced(torch.ones(3)).wait()
                assert total.tolist() == [2] * 3
        both = nostall.torch.BucketReducer(pair), nostall.torch.BucketReducer(pair)
        assert both[0].group.group_name != both[1].group.group_name
        for reducer in both:
            reducer.close()
    every = dist.new_group(range(size), timeout=limit)
    total = torch.ones(3)
    dist.all_reduce(total, group=every)
    assert total.tolist() == [size] * 3


class Forwarding(dist.Store):  # type: ignore[misc]
    """A store written in Python: it has what torch's class asks of one."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self._store.wait(keys, *limit)


def met_in_python() -> None:
    store = dist.PrefixStore("python", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    where = {"store": Forwarding(store), "rank": rank, "world_size": size}
    dist.init_process_group("nostall", timeout=limit, **where)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 3


def aborted_late() -> None:
    """An abort of a group that was destroyed meanwhile has nothing to end."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    group.abort()


def polled() -> None:
    """Work is asked whether it is complete, where Gloo's has no future too."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["asked"], limit)
    block = torch.empty(1)
    work = dist.reduce_scatter_tensor(block, torch.full((size,), float(rank)), async_op=True)
    if rank == 0:
        assert not work.is_completed()
        store.set("asked", "")
    work.wait()
    assert block.item() == size * (size - 1) / 2


def terminated() -> None:
    """A signal's handler destroys the group while a call starts a thread of the group."""
    start = threading.Thread.start

    def destroy(*_: object) -> None:
        dist.destroy_process_group()
        if os.environ["THEN"] == "exits":
            sys.exit(8)

    def terminate(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGTERM)
        start(thread)

    signal.signal(signal.SIGTERM, destroy)
    with mock.patch.object(threading.Thread, "start", terminate):
        try:
            if os.environ["CALL"] == "watched":
                dist.all_to_all_single(torch.empty(size), torch.ones(size))
            else:
                dist.all_reduce(torch.ones(3), async_op=True)
            raise AssertionError("the group is still there")
        except UsageError as error:
            assert "destroyed" in str(error), error
    sys.exit(8)


def unsplit() -> None:
    """Torch refuses to split a group of this backend, and the group is as it was."""
    try:
        dist.split_group(split_ranks=[[0]])
        raise AssertionError("it was split")
    except RuntimeError:
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [size] * 3


class Kept:
    """A backend of torch, and the last barrier that it began."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def barrier(self, opts: Any) -> Any:
        self.work = self._backend.barrier(opts)
        return self.work


def barred() -> None:
    """After a barrier, what was begun before it has its results, whoever kept its handle."""
    mine = [torch.tensor([float(10 * rank + r)]) for r in range(size)]
    theirs = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(theirs, mine, async_op=True)
    dist.barrier()
    assert [t.item() for t in theirs] == [10 * r + rank for r in range(size)]
    theirs[0].zero_()
    dist.all_to_all(theirs, mine, async_op=True)
    dist.barrier(async_op=True).get_future().wait()
    assert [t.item() for t in theirs] == [10 * r + rank for r in range(size)]

    group = dist.group.WORLD
    reduce, free = group._allreduce, threading.Event()

    def reduce_late(*arguments: Any) -> None:
        free.wait()
        reduce(*arguments)

    group._allreduce = reduce_late
    group._inner["cpu"] = inner = Kept(group._inner["cpu"])
    total = torch.ones(3)
    dist.all_reduce(total, async_op=True)
    work = dist.barrier(async_op=True)
    while group._leaders is not None and not inner.work.is_completed():
        time.sleep(0.001)
    assert not work.is_completed()
    free.set()
    work.wait()
    assert total.tolist() == [size] * 3
    del group._allreduce  # with what it holds


def barred_after_an_error() -> None:
    """A collective of Gloo that failed is not waited for again."""
    for limits in ((), (timedelta(seconds=60),)):
        work = dist.reduce_scatter_tensor(
            torch.empty(1, dtype=torch.int16), torch.ones(size, dtype=torch.int16), async_op=True
        )
        try:
            work.wait(*limits)
            raise AssertionError("Gloo has come to add int16")
        except RuntimeError as error:
            assert "Invalid scalar type" in str(error), error
        # Else each barrier would raise it. Gloo's own may, as long as its thread is at it.
        assert dist.group.WORLD._delegated.pending() == []
        dist.all_reduce(torch.ones(1))


def inherited() -> None:
    """Groups of some ranks have the options of the group of all, unless they are given their own."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    where = {"store": store, "rank": rank, "world_size": size}
    fixed, free = map(nostall.torch.GroupOptions, ("fixed", "any"))
    dist.init_process_group("nostall", timeout=limit, pg_options=fixed, **where)
    for options, calls in ((None, 2), (free, 0)):
        group = dist.new_group([0, 1], pg_options=options)
        told = fail(lambda group=group: dist.all_reduce(torch.ones(1 + rank), group=group))
        assert told.count("in fixed order") == calls, told


def called_back() -> None:
    """Callbacks wait for later operations of the same group, and their callbacks do too."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["attached"])
    first, second, third = (torch.tensor([float(rank + i)]) for i in range(3))

    def begin(tensor: torch.Tensor) -> torch.futures.Future[Any]:
        return dist.all_reduce(tensor, async_op=True).get_future()

    def end(_: object) -> None:
        dist.all_reduce(third)

    done = begin(first).then(lambda _: begin(second).then(end).wait())
    if rank == 0:
        store.set("attached", "")
    done.wait()
    assert [t.item() for t in (first, second, third)] == [1, 3, 5]
    if rank == 1:
        store.wait(["attached to Gloo's"])
    mine, theirs = torch.arange(2.0) + 2 * rank, torch.zeros(2)
    met = dist.all_to_all_single(theirs, mine, async_op=True).get_future()
    met = met.then(lambda _: dist.barrier())
    if rank == 0:
        store.set("attached to Gloo's", "")
    met.wait()
    assert theirs.tolist() == [rank, 2 + rank]
    failed = begin(first).then(lambda _: dist.all_reduce(torch.ones(1), "no operation"))
    try:
        failed.wait()
        raise AssertionError("an error of a callback was lost")
    except RuntimeError as error:
        assert "no operation" in str(error), error


def compressed_data_parallel() -> None:
    """A hook of torch reduces the factors of its bucket in callbacks that wait."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4)))
    model = DistributedDataParallel(layers)
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    torch.manual_seed(rank)
    for _ in range(4):
        model(torch.randn(8, 60)).sum().backward()
        for parameter in model.parameters():
            theirs = parameter.grad.clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(theirs, parameter.grad)


def data_parallel() -> None:
    """DDP's weights are, bit for bit, those of one process that adds gradients in rank order."""
    steps, batch = 6, 8

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(30, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)]
        return torch.nn.Sequential(*layers)

    def data(step: int, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + r)
        x = torch.randn(batch, 30, generator=generator)
        return x, torch.randn(batch, 10, generator=generator)

    trained = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(trained.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        x, y = data(step, rank)
        optimizer.zero_grad()
        time.sleep(0.003 * ((rank + step) % size))
        torch.nn.functional.mse_loss(trained(x), y).backward()
        optimizer.step()
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        sums: list[torch.Tensor] = []
        for r in range(size):
            x, y = data(step, r)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(reference(x), y).backward()
            grads = [p.grad / size for p in reference.parameters()]
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        for p, total in zip(reference.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
    for a, b in zip(trained.module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


class Calling(torch.autograd.Function):
    """Calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradients[0], None


def recorded(directory: str, work: Callable[[], object]) -> digest.Digest:
    """What this rank records meanwhile."""
    trace.start(directory, rank, size)
    work()
    dist.barrier()  # until then no thread serves
    trace.stop()
    return digest.read(Source(Path(directory, f"rank{rank}.trace.json.gz")))


def steps_of_two_buckets(
    outer: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], between: Callable[[], object]
) -> Callable[[], None]:
    """A step of DDP with a bucket for each of two layers, which it has chosen in two steps.

    `outer` computes the second layer; `between` is called in the backward pass, between both.
    """

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = torch.nn.Linear(50, 50, bias=False)
            self.far = torch.nn.Linear(50, 50, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outer(self.far, Calling.apply(self.near(x), between))

    model = DistributedDataParallel(Parts(), bucket_cap_mb=0.001)

    def step() -> None:
        model(torch.ones(2, 50)).sum().backward()

    step()
    step()
    return step


def waits_of_ddp() -> None:
    """The training's waits count, and not what runs beside its backward pass."""
    store = dist.distributed_c10d._get_default_store()
    chosen: dict[str, Callable[[], object]] = {"first": int, "between": int}
    begin = waits.Wait._begin_if_newest

    def told(wait: waits.Wait) -> None:
        begin(wait)
        if rank == 1 and wait._began:
            store.set("waits", "")

    def between() -> None:
        with trace.span("between"):
            if rank == 0:  # the other rank's wait is for this one
                store.get("waits")
            else:  # its first bucket is under way, and waits for this rank's
                store.set("computes", "")

    step = steps_of_two_buckets(
        lambda far, inner: Calling.apply(far(inner), lambda: chosen["first"]()),
        lambda: chosen["between"](),
    )
    chosen["between"] = between
    if rank == 0:
        chosen["first"] = lambda: store.get("computes")
    with mock.patch.object(waits.Wait, "_begin_if_newest", told):
        found = recorded(os.environ["TEST_TRACE"], step)
    peers, reductions = found.category("peers"), found.of("background", "allreduce")
    between_at = found.of("compute", "between")
    assert len(reductions.begin) == 2
    assert set(peers) <= {"wait for allreduce", "barrier", "wait for barrier"}, peers
    waited = found.of("peers", "wait for allreduce")
    assert (waited.begin >= between_at.end).all()
    if rank == 1:
        assert len(waited.begin) == 1, found.spans
        assert waited.end[0] >= reductions.end.max()
        assert between_at.begin[0] < reductions.end.min()


def waits_of_checkpointed_ddp() -> None:
    """At the end of an inner pass nothing is waited for: the outer one computes on."""
    chosen: dict[str, Callable[[], object]] = {"between": int}
    end, reduced = waits.Wait.end, threading.Event()

    def told(wait: waits.Wait) -> None:
        end(wait)
        reduced.set()

    def between() -> None:
        with trace.span("between"):  # as long as what the inner pass began
            assert reduced.wait(60)

    step = steps_of_two_buckets(
        lambda far, inner: checkpoint(far, inner, use_reentrant=True),
        lambda: chosen["between"](),
    )
    chosen["between"] = between
    with mock.patch.object(waits.Wait, "end", told):
        found = recorded(os.environ["TEST_TRACE"], step)
    assert len(found.of("background", "allreduce").begin) == 2
    between_at = found.of("compute", "between")
    assert len(between_at.begin) == 1
    assert (found.of("peers", "wait for allreduce").begin >= between_at.end).all(), found.spans


def waits_of_works() -> None:
    """What is between the start of an operation and its wait does not count."""
    store = dist.distributed_c10d._get_default_store()
    began = waits.Wait._begin

    def told(wait: waits.Wait) -> None:
        began(wait)
        store.set(f"waits {wait._operation}", "")

    def meet(name: str, start: Callable[[], dist.Work]) -> None:
        if rank == 0:
            store.get(f"waits {name}")
            start().wait()
        else:
            work = start()
            with trace.span(f"beside {name}"):
                pass
            with mock.patch.object(waits.Wait, "_begin", told):
                work.wait()

    x = torch.ones(50)
    send = functools.partial(dist.isend if rank == 0 else dist.irecv, x, 1 - rank)
    calls: dict[str, Callable[[], dist.Work]] = {
        "allreduce": lambda: dist.all_reduce(x, async_op=True),
        "allgather": lambda: dist.all_gather([x.clone(), x.clone()], x, async_op=True),
        "recv": send,
    }

    def work() -> None:
        dist.all_gather([x.clone(), x.clone()], x)
        for name, call in calls.items():
            meet(name, call)

    found = recorded(os.environ["TEST_TRACE"], work)
    for name in calls if rank == 1 else ():
        waited = found.of("peers", f"wait for {name}")
        assert len(waited.begin), (name, list(found.spans))
        assert waited.begin[-1] >= found.of("compute", f"beside {name}").end[0]
    if os.environ["NODES"] == "1":
        assert len(found.of("background", "allgather").begin) == 1
        assert len(found.of("peers", "allgather").begin) == 1
        assert len(found.of("background", "allreduce").begin) == 1


def fully_sharded() -> None:
    """FSDP on CPU tensors takes the same steps as one process does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)).double()
    x = torch.arange(32.0).reshape(2, 16).double() / 32
    model(x).square().sum().backward()
    expected = [p.detach() - 0.01 * p.grad for p in model.parameters()]
    model.zero_grad()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    group = dist.group.WORLD
    native, calls = group._node._live(), []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(native, name)

    group._node._live = Counted
    model(x).square().sum().backward()
    del group._node._live
    assert calls.count("reduce_scatter") >= 1
    torch.optim.SGD(model.parameters(), 0.01).step()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.full_tensor(), value)


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a communicator's memory is where the tensor is."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return " rw-s " in line
    return False


def shared() -> None:
    """Tensors in shared memory give the same bits as ordinary ones; DDP's buckets are some."""
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(rank)
        ordinary = torch.randn(3, 5_001).to(kind)
        ours = nostall.torch.empty_shared(3, 5_001, dtype=kind)
        assert in_shared_memory(ours)
        assert not in_shared_memory(ordinary)
        ours.copy_(ordinary)
        mixed = ours if rank == 0 else ordinary.clone()
        dist.all_reduce(ordinary)
        if rank == 0:
            mixed = nostall.torch.empty_shared(3, 5_001, dtype=kind).copy_(ours)
        dist.all_reduce(ours)
        assert torch.equal(ours, ordinary)
        dist.all_reduce(mixed)  # the others' are ordinary
        assert torch.equal(mixed, ordinary)

    def train(kind: type[DistributedDataParallel] | None) -> torch.nn.Module:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 96)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if kind is not None:
            model = kind(model, bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        if kind is None:
            named = model.named_parameters()
            optimizer = nostall.torch.DistributedOptimizer(optimizer, named)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        return model

    kinds = (nostall.torch.DistributedDataParallel, DistributedDataParallel, None)
    trained = [train(kind).parameters() for kind in kinds]
    for a, b, optimized in zip(*trained, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, optimized)
        assert in_shared_memory(a.grad)
        assert not in_shared_memory(b.grad)
    whole = nostall.torch.DistributedDataParallel(torch.nn.Linear(64, 64))
    saved = io.BytesIO()
    torch.save(whole, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(whole), torch.load(saved, weights_only=False)):
        for model in (whole, copied):
            model(torch.ones(2, 64) * (1 + rank)).sum().backward()
        for a, b in zip(whole.parameters(), copied.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        assert in_shared_memory(copied.module.weight.grad)
        whole.zero_grad()
    uneven = nostall.torch.DistributedDataParallel(torch.nn.Linear(64, 64))
    with uneven.join():
        for _ in range(1 + 3 * rank):
            uneven(torch.ones(2, 64)).sum().backward()
    options = nostall.torch.GroupOptions(shared_bytes=1 << 16)
    small = dist.new_group(backend="nostall", pg_options=options)
    try:
        nostall.torch.empty_shared(1 << 20, group=small)
        raise AssertionError("64 KB held 4 MB")
    except ValueError as error:
        assert "shared_bytes" in str(error), error
    small.shutdown()
    try:
        nostall.torch.empty_shared(1, group=small)
        raise AssertionError("the group has ended")
    except UsageError as error:
        assert "closed" in str(error), error


def unconnected() -> None:
    """Gloo refuses rank 1 for once, then for good."""
    if lacks("ProcessGroupGloo.set_timeout", hasattr(dist.ProcessGroupGloo, "set_timeout")):
        return
    refusals = 1

    class Refusing(dist.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, limit: timedelta) -> None:
            nonlocal refusals
            refusals -= 1
            if rank == 1 and refusals >= 0:
                raise RuntimeError("connection refused\nwith lines more")
            # Rank 0 waits in vain for the one that is refused, which fails first.
            if refusals >= 0:
                store.wait(["failure"])
            super().__init__(store, rank, size, timedelta(seconds=0.5) if refusals >= 0 else limit)

    mesh.dist.ProcessGroupGloo = Refusing
    group = dist.new_group()
    outputs = [torch.empty(1) for _ in range(size)]
    dist.gather(torch.tensor([3.0]), outputs if rank == 0 else None, 0, group)
    assert rank != 0 or outputs == [torch.tensor([3.0])] * size
    refusals = 100
    try:
        dist.new_group()
    except PeerError as error:
        assert "rank 1 of 2 could not connect: connection refused, 3 times" in str(error), error
        print(f"rank {rank} was told", flush=True)
    os._exit(0)


def message_later() -> None:
    """A message is waited for as long as the group says, not as long as its making may take."""
    real: Any = mesh.dist.ProcessGroupGloo

    class Brief(real):  # type: ignore[misc]
        """Connects as long as it takes, and then has a short limit of connecting as its timeout."""

        def __init__(self, store: Any, rank: int, size: int, limit: timedelta) -> None:
            super().__init__(store, rank, size, limit)
            self.set_timeout(timedelta(milliseconds=10))

    if hasattr(real, "set_timeout"):
        mesh.dist.ProcessGroupGloo = Brief
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group()
    if rank == 0:
        store.wait(["waiting"])
        time.sleep(0.3)
        dist.send(torch.tensor([42.0]), 1, group)
        store.wait(["timed out"])
        return
    got = torch.empty(1)
    work = dist.irecv(got, 0, group)
    store.set("waiting", "")
    work.wait()
    assert got.item() == 42
    group.set_timeout(timedelta(milliseconds=300))
    try:
        dist.recv(got, 0, group)
        raise AssertionError("nothing was sent")
    except RuntimeError as error:
        assert "300ms" in str(error), error
    store.set("timed out", "")


def pair_of_three() -> None:
    """Two ranks exchange a message that the third knows nothing of."""
    message()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    outputs = [torch.empty(r + 1, 2) for r in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + 1, 2), float(rank))] * size)
    assert all((t == r).all() for r, t in enumerate(outputs))
    late = [torch.empty(r + 1, 2) for r in range(size)]
    work = dist.all_to_all(late, [torch.full((rank + 1, 2), float(rank))] * size, async_op=True)
    work.result()  # waits
    work.wait()
    assert all((t == r).all() for r, t in enumerate(late))


def threads() -> None:
    """Several groups at once, each from a thread of its own."""
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[object] = []

    def use(number: int) -> None:
        try:
            for i in range(60):
                tensor = torch.full((1 + 997 * (i % 7),), float(rank * (number + 1)))
                work = dist.all_reduce(tensor, group=groups[number], async_op=i % 3 == 0)
                if work is not None:
                    work.wait()
                assert (tensor == (number + 1) * size * (size - 1) / 2).all()
        except Exception as error:
            wrong.append(error)

    started = [threading.Thread(target=use, args=(n,)) for n in range(len(groups))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not wrong, wrong


def forked() -> None:
    """A child is refused at once, synchronous or not; its parent goes on."""
    tensor = torch.ones(2_000)
    dist.all_reduce(tensor, async_op=True).wait()
    calls, held, forked = dist.group.WORLD._calls, threading.Event(), threading.Event()

    def call() -> None:
        with calls._changed:
            held.set()
            forked.wait()

    caller = threading.Thread(target=call)
    caller.start()
    held.wait()
    child = os.fork()
    forked.set()
    if child == 0:
        signal.alarm(300)
        with calls.if_open():  # the child has no thread that would give the lock back
            refused = 0
        for asynchronous in (False, True):
            try:
                dist.all_reduce(tensor, async_op=asynchronous)
            except ValueError as error:
                refused += "forked" in str(error)
        try:
            dist.group.WORLD.abort()
        except ValueError as error:
            refused += "forked" in str(error)
        os._exit(0 if refused == 3 else 1)
    caller.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(tensor)
    assert (tensor == size * size).all()


def mismatched() -> None:
    """Calls that differ are an error on all ranks that names the ranks and what they call."""
    try:
        dist.all_reduce(torch.ones(5 if rank == 0 else 7))
    except ValueError as error:
        text = str(error)
        assert "rank 0" in text, text
        assert "5" in text, text
        assert "rank 1" in text, text
        assert "7" in text, text
        print("named", flush=True)
        os._exit(0)


def mistyped() -> None:
    """So are types of as many bytes, and orders, also of calls that move elements."""

    def told(call: Callable[[Any], object], options: Any = None) -> str:
        group = dist.new_group(pg_options=options)
        try:
            call(group)
            dist.barrier(group)  # the root of a broadcast may have left it
        except UsageError as error:
            return str(error)
        raise AssertionError("calls differ")

    for count in (1, 50_000):
        mine = torch.ones(2 * count) if rank == 0 else torch.ones(count, dtype=torch.int64)
        every = mine.repeat(size)
        moves: list[Callable[[Any], object]] = [
            lambda group, mine=mine: dist.broadcast(mine, 0, group),
            lambda group, mine=mine, every=every: dist.all_gather_into_tensor(every, mine, group),
            lambda group, mine=mine, every=every: dist.all_gather(
                list(every.chunk(size)), mine, group
            ),
        ]
        for move in moves:
            text = told(move)
            assert "of float32" in text and "of int64" in text, text
        options = nostall.torch.GroupOptions("fixed" if rank == 0 else "any")
        text = told(lambda group, n=count: dist.all_reduce(torch.ones(n), group=group), options)
        assert "rank 0 calls" in text and text.count(f"{count} float32") == 2, text
        assert text.count("in fixed order") == 1, text


def models_that_differ() -> None:
    """All ranks are told which parameter differs, and what who has."""

    def told(module: torch.nn.Module) -> str:
        try:
            nostall.torch.DistributedDataParallel(module)
        except UsageError as error:
            return str(error)
        raise AssertionError("models differ")

    last = size - 1
    others = "rank 0, 1 has"
    shape = told(torch.nn.Linear(3, 4 if rank == last else 2))
    assert f"parameter 0 on: {others} weight: float32 (2, 3); rank {last} has" in shape, shape
    assert "weight: float32 (4, 3)" in shape, shape
    fewer = told(torch.nn.Linear(3, 2, bias=rank != last))
    assert f"parameter 1 on: {others} bias: float32 (2,); rank {last} has none" in fewer, fewer
    kind = told(torch.nn.Linear(3, 2).to(torch.float64 if rank == last else torch.float32))
    assert "float64 (2, 3)" in kind, kind
    # The group is as before, and what is not trained may differ.
    model = torch.nn.Linear(3, 2)
    model.register_parameter("own", torch.nn.Parameter(torch.ones(1 + rank), requires_grad=False))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    nostall.torch.DistributedDataParallel(model)(torch.ones(1, 3)).sum().backward()


def limits() -> None:
    """A wait's own timeout leaves the operation as it is; an operation's own ends the group."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(3)
    if rank == 1:
        store.wait(["waited"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        try:
            work.wait(timedelta(milliseconds=100))
            raise AssertionError("rank 1 was there")
        except RuntimeError as error:
            assert "0.1 s" in str(error), error
        store.set("waited", "")
    work.wait()
    assert (tensor == size).all()
    options = dist.BarrierOptions()
    options.timeout = timedelta(milliseconds=300)
    if rank == 0:
        try:
            dist.group.WORLD.barrier(options).wait()
        except RuntimeError as error:
            assert "0.3000 s" in str(error), error
            assert "not arrived: 1" in str(error), error
            print("limited", flush=True)
        store.set("limited", "")
    else:
        store.wait(["limited"])
    os._exit(0)


def aborted() -> None:
    """One rank's abort ends what others wait for, or will wait for, on every node."""
    store = dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    group = dist.group.WORLD
    try:
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            time.sleep(0.3)  # so that it is under way, as a rule
            group.abort()
            assert time.monotonic() - begin < 30
            store.set("aborted", "")
            work.wait()
        elif rank < size // 2:
            dist.all_reduce(torch.ones(3))
        else:
            store.wait(["aborted"])
            dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        assert "rank 0 aborted" in str(error), error
        assert time.monotonic() - begin < 30
        try:
            group.barrier().wait()
            raise AssertionError("the group is still there")
        except (PeerError, UsageError):
            print("ended", flush=True)
    os._exit(0)


def made_again() -> None:
    """A group on the store of one that was aborted knows nothing of it."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.group.WORLD.abort()
    else:
        try:
            dist.all_reduce(torch.ones(3))
            raise AssertionError("nobody aborted")
        except PeerError as error:
            assert "rank 0 aborted" in str(error), error
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(0.5)  # the others find what was left there, if anything
    dist.init_process_group("nostall", timeout=limit, store=store, rank=rank, world_size=size)
    sum_of = torch.ones(3)
    dist.all_reduce(sum_of)
    assert sum_of.tolist() == [size] * 3
    alone, *_ = (dist.new_group([r]) for r in range(size) if r == rank)
    if rank == 0:
        alone.abort()
    else:
        dist.all_reduce(sum_of, group=alone)
    dist.barrier()


def resized() -> None:
    """A group of fewer ranks, and then one of all again, on the store of one of all."""
    store = dist.distributed_c10d._get_default_store()
    for ranks in (size - 1, size):
        dist.destroy_process_group()
        if rank < ranks:
            dist.init_process_group(
                "nostall", timeout=limit, store=store, rank=rank, world_size=ranks
            )
        else:
            dist.init_process_group("nostall", store=dist.HashStore(), rank=0, world_size=1)
            store.wait(["fewer were together"], limit)
        sum_of = torch.ones(3)
        dist.all_reduce(sum_of)
        assert sum_of.tolist() == [ranks if rank < ranks else 1] * 3
        if rank == 0 and ranks < size:
            store.set("fewer were together", "")


def poll(work: dist.Work) -> None:
    while not work.is_completed():
        time.sleep(0.01)
    assert not work.is_success()
    raise work.exception()


def delegated_waits(group: dist.ProcessGroup, last: int) -> list[Callable[[], object]]:
    """Begins operations over Gloo in which rank `last` takes no part; the waits for them."""
    one = torch.ones(3)
    works = [
        dist.irecv(one.clone(), last),
        dist.irecv(one.clone(), 1 - rank, tag=9),
        dist.all_reduce(torch.ones(1).to_sparse(), async_op=True),
        dist.all_to_all([torch.empty(3) for _ in range(size)], [one] * size, async_op=True),
    ]
    polled = dist.all_to_all_single(torch.empty(size), torch.ones(size), async_op=True)
    future = dist.all_to_all_single(torch.empty(size), torch.ones(size), async_op=True)
    if rank == 0:  # the root: others only send
        works += [dist.gather(one, [one.clone() for _ in range(size)], async_op=True)]
    if os.environ.get("NODES", "1") != "1":
        works += [
            dist.broadcast(one.clone(), last, async_op=True),
            dist.all_gather([one.clone() for _ in range(size)], one, async_op=True),
            dist.barrier(async_op=True),
        ]
    return [
        *(work.wait for work in works),
        lambda: poll(polled),
        lambda: future.get_future().wait(),
        lambda: group.monitored_barrier(limit, True),
        lambda: works[-1].wait(timedelta(seconds=50)),
    ]


def aborted_delegated() -> None:
    """An abort ends all waits over Gloo: for any rank, and of any kind."""
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    one = torch.ones(3)
    last = size - 1

    # The last rank never arrives; the others begin all of these, in one order, and wait in threads.
    waits = delegated_waits(group, last) if rank != last else []
    ends: list[str] = []

    def end(wait: Callable[[], object]) -> None:
        try:
            wait()
            ends.append("it ended well")
        except RuntimeError as error:
            ends.append(f"{type(error).__name__}: {error}")

    if rank == last:
        store.wait(["under way"])
        time.sleep(0.5)
        group.abort()
        begin = time.monotonic()
        group.abort()  # again is harmless
    else:
        threads = [threading.Thread(target=end, args=(wait,)) for wait in waits]
        before = threading.active_count()
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        assert threading.active_count() <= before + len(threads) + 2, threading.enumerate()
        if store.add("waiting", 1) == last:
            store.set("under way", "")
        begin = time.monotonic()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for text in ends:
            assert "PeerError" in text, ends
            assert f"rank {last} aborted the group" in text, ends
        assert len(ends) == len(waits)
    assert time.monotonic() - begin < 30  # Gloo's timeout is 60 s
    try:
        dist.recv(one, (rank + 1) % size)
        raise AssertionError("the group is still there")
    except PeerError as error:
        assert f"rank {last} aborted the group" in str(error), error
    print("ended", flush=True)
    # All leave together: a rank that left early would be reported by the others.
    if store.add("checked", 1) == size:
        store.set("all checked", "")
    store.wait(["all checked"], timedelta(seconds=60))
    os._exit(0)


def lacks(what: str, has: bool) -> bool:
    """Whether this release of torch lacks what a check needs; if so the test is skipped."""
    if not has:
        print(f"torch lacks {what}", flush=True)
    return not has


def late() -> None:
    """A rank that does not arrive is an error after the timeout, within nodes and between them."""
    if lacks("ProcessGroupGloo.set_timeout", hasattr(dist.ProcessGroupGloo, "set_timeout")):
        return
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"])
        os._exit(0)
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        assert time.monotonic() - begin < 30
        print("limited:", error, flush=True)
    store.set("over", "")
    os._exit(0)


def lost_over_gloo() -> None:
    """Gloo's errors name the job's ranks and what was under way."""
    store = dist.distributed_c10d._get_default_store()
    pair = dist.new_group([1, 2])
    one = torch.ones(1)
    if rank == 2:
        store.wait(["connected 0", "connected 1"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        told = [fail(lambda: dist.recv(one, 2), "connected 0")]
        dist.group.WORLD.set_timeout(timedelta(milliseconds=100))
        told.append(fail(lambda: dist.recv(one, 1)))
        assert "rank 0 lost its connection to rank 2 in recv from rank 2: " in told[0], told
        assert "rank 0 failed in recv from rank 1: Timed out" in told[1], told
        store.set("over", "")
    else:
        told = [fail(lambda: dist.all_reduce(one, group=pair), "connected 1")]
        assert "rank 1 lost its connection to rank 2 in allreduce of ranks 1, 2: " in told[0], told
        store.wait(["over"])
    os._exit(0)


def numbered() -> None:
    """Errors name ranks by their numbers in the job: of a node, of some ranks, and of all."""
    store = dist.distributed_c10d._get_default_store()
    one = torch.ones(1)
    differing, late, aborted = (dist.new_group([2, 3]) for _ in range(3))
    if rank > 1:
        told = fail(lambda: dist.all_reduce(torch.ones(rank), group=differing))
        assert "rank 2 calls allreduce of 2 " in told and "rank 3 calls allreduce of 3 " in told, (
            told
        )
    if rank == 3:
        late.set_timeout(timedelta(milliseconds=100))
        told = fail(lambda: dist.all_reduce(one, group=late))
        assert told.startswith("rank 3 waited 0.1"), told
        assert "for ranks that have not arrived: 2;" in told, told
        aborted.abort()
    if rank == 2:
        told = fail(lambda: dist.recv(one, 3, group=aborted))
        assert told == "rank 3 aborted the group; make a new one", told
        store.wait([f"waits {other}" for other in (0, 1, 3)])
        os.kill(os.getpid(), signal.SIGKILL)
    told = fail(lambda: dist.all_reduce(one), f"waits {rank}")
    lost = (
        "lost its connection to rank 2 in allreduce of ranks 0, 1, 2, 3: Connection closed by peer"
    )
    expected = {0: f"rank 0 {lost}", 1: f"the node of rank 1 {lost}", 3: "rank 2 (process "}
    assert told.startswith(expected[rank]), told
    if rank == 0:
        store.wait(["told 1", "told 3"])  # whose Gloo has a connection to this rank
    store.set(f"told {rank}", "")
    os._exit(0)


def fail(call: Callable[[], object], begun: str = "") -> str:
    """What a call raises."""
    if begun:
        dist.distributed_c10d._get_default_store().set(begun, "")
    try:
        call()
    except (PeerError, UsageError) as error:
        return str(error)
    raise AssertionError("it ended well")


def killed_in_backward() -> None:
    """DDP's native reducer gets the error too, with the rank's name."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model = nostall.torch.DistributedDataParallel(torch.nn.Linear(300, 300))
    for _ in range(3):
        model(torch.ones(2, 300)).sum().backward()
    loss = model(torch.ones(2, 300)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "rank 1" in str(error), error
        print(f"rank {rank} was told", flush=True)
        os._exit(0)


def killed() -> None:
    """A rank dies in the middle; the others get an error at once, not after the timeout."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others at once
    tensor = torch.ones(1 << 18)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        work = dist.all_reduce(tensor, async_op=rank == 2)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - begin < 30
        print(f"rank {rank} was told", flush=True)
        os._exit(0)


def take_part(what: str, **where: Any) -> int:
    """The status of this rank's program."""
    global rank, size
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "NODES" in os.environ:
        os.environ["NOSTALL_NODE"] = f"node {rank * int(os.environ['NODES']) // size}"
    order = "fixed" if what in ("data_parallel", "shared") else "any"
    options = nostall.torch.GroupOptions(order)
    try:
        dist.init_process_group("nostall", timeout=limit, pg_options=options, **where)
        globals()[what]()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def threads_and_files() -> Counter[str]:
    """How many there are, the threads by name."""
    seen: Counter[str] = Counter(files=len(list(Path("/proc/self/fd").iterdir())))
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it just ended
            seen[(task / "comm").read_text().strip()] += 1
    return seen


def expect_no_more_than(before: Counter[str]) -> None:
    """A thread that was joined is in /proc for a moment more."""
    deadline = time.monotonic() + 60
    while not (seen := threads_and_files()) <= before:
        assert time.monotonic() < deadline, f"{seen}, before {before}"
        time.sleep(0.01)


def delegate(group: dist.ProcessGroup | None = None) -> None:
    """Every operation that Gloo's threads run, and an asynchronous one of ours."""
    mine = torch.tensor([float(rank)])
    dist.all_reduce(mine.clone(), group=group, async_op=True).wait()
    dist.gather(mine, [torch.empty(1) for _ in range(size)] if rank == 0 else None, group=group)
    parts = [torch.ones(1) for _ in range(size)] if rank == 0 else None
    dist.scatter(torch.empty(1), parts, group=group)
    dist.all_to_all_single(torch.empty(size), torch.ones(size), group=group)
    dist.all_gather_object([None] * size, {"rank": rank}, group=group)


def averages() -> None:
    """AVG of integers is the sum's quotient, rounded towards zero; of booleans, whether all are set."""
    mean = dist.ReduceOp.AVG
    for kind in (torch.int64, torch.int32, torch.int8, torch.uint8):
        for sign in (1, -1) if kind.is_signed else (1,):
            mine = torch.full((size * 3,), sign * (1 + 3 * rank)).to(kind)
            total = sum(1 + 3 * r for r in range(size))
            wanted = torch.full_like(mine, sign * (total // size))
            for work in (dist.all_reduce, lambda t, op: dist.reduce(t, 1, op)):
                tensor = mine.clone()
                work(tensor, op=mean)
                assert torch.equal(tensor, wanted) or (rank != 1 and work is not dist.all_reduce)
            share = torch.empty(3, dtype=kind)
            dist.reduce_scatter_tensor(share, mine, op=mean)
            assert torch.equal(share, wanted[:3]), share
            dist.reduce_scatter(share.zero_(), list(mine.chunk(size)), op=mean)
            assert torch.equal(share, wanted[:3]), share
    some, every = torch.tensor([rank == 0]), torch.tensor([True])
    dist.all_reduce(some, op=mean)
    dist.all_reduce(every, op=mean)
    assert not some.item()
    assert every.item()


def shorts() -> None:
    """int16, which Gloo lacks: sums and products wrap."""
    op = dist.ReduceOp
    mine = (torch.arange(300) * 100 + rank).to(torch.int16)
    every = torch.stack([(torch.arange(300) * 100 + r).to(torch.int16) for r in range(size)])
    for kind, wanted in (
        (op.SUM, every.sum(0, dtype=torch.int16)),
        (op.PRODUCT, every.prod(0, dtype=torch.int16)),
        (op.MAX, every.amax(0)),
        (op.BAND, every[0] & every[1]),
        (op.AVG, every.sum(0, dtype=torch.int16).div(size, rounding_mode="trunc")),
    ):
        tensor = mine.clone()
        dist.all_reduce(tensor, kind)
        assert torch.equal(tensor, wanted), kind


def negated() -> None:
    """The imaginary part of a conjugate is negated when it is read: that value is sent and written."""
    memory = torch.tensor([5j])
    lazy = memory.conj().imag
    assert lazy.is_neg()
    assert lazy.is_contiguous()
    mine = lazy if rank == 0 else torch.tensor([3.0])
    for root, value in ((0, -5), (1, 3)):
        if rank == root:
            mine.fill_(value)
        dist.broadcast(mine, root)
        assert mine.item() == value
    mine.fill_(rank + 1)
    dist.all_reduce(mine)
    assert mine.item() == size * (size + 1) / 2
    assert rank != 0 or memory.item() == -1j * mine.item()
    parts = [torch.empty(1) for _ in range(size)]
    mine.fill_(rank + 1)
    dist.all_gather(parts, mine)
    assert [part.item() for part in parts] == [1, 2]
    dist.gather(mine, parts if rank == 1 else None, dst=1)
    assert [part.item() for part in parts] == [1, 2]
    dist.scatter(mine, [part * 3 for part in parts] if rank == 1 else None, src=1)
    assert mine.item() == 3 * (rank + 1)
    for sender in range(size):
        if rank == sender:
            dist.send(mine.fill_(7 + rank), 1 - rank)
        else:
            dist.recv(mine, sender)
            assert mine.item() == 7 + sender


def sums_of_booleans() -> None:
    """SUM of booleans is whether any is set, also if as many as a byte counts are."""
    any_set, none_set = torch.ones(size * 2, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    for mine in (any_set, torch.tensor([rank == 0] * size * 2)):
        for work in (dist.all_reduce, lambda t: dist.reduce(t, 1)):
            tensor = mine.clone()
            work(tensor)
            if rank == 1 or work is dist.all_reduce:
                assert tensor.view(torch.uint8).tolist() == [1] * size * 2
        share = torch.empty(2, dtype=torch.bool)
        dist.reduce_scatter_tensor(share, mine)
        assert share.view(torch.uint8).tolist() == [1, 1]
        dist.reduce_scatter(share.zero_(), list(mine.chunk(size)))
        assert share.view(torch.uint8).tolist() == [1, 1]
    dist.all_reduce(none_set)
    assert none_set.view(torch.uint8).tolist() == [0]


def compiled() -> None:
    """What is compiled calls the group, and gives what it gives uncompiled."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.first(x)).relu()

    def train(kind: type[DistributedDataParallel], use: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = use(kind(Net()))
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    def compile_it(function: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")

    for kind in (DistributedDataParallel, nostall.torch.DistributedDataParallel):
        ours, wanted = train(kind, compile_it), train(kind, lambda m: m)
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other)

    def reduce_async(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, async_op=True).wait()
        return x

    def spread(x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, 1)
        return x

    for function in (reduce_async, spread):

        @compile_it
        def around(x: torch.Tensor, call: Any = function) -> torch.Tensor:
            return call(x * 2) + 1

        mine = torch.arange(4.0) + rank
        assert torch.equal(around(mine), function(mine * 2) + 1), function


def has_free_ports(job: str) -> bool:
    """Whether no process has the port that follows from a job's number, or the next one."""
    os.environ["SLURM_JOB_ID"] = job
    address = find_address(find_world())
    assert address is not None
    with socket.socket() as one, socket.socket() as other, suppress(OSError):
        one.bind(("", address[1]))
        other.bind(("", address[1] + 1))
        return True
    return False


def launched() -> None:
    """Under srun `init` finds rank, world and address, and scripts that set RANK find the rest."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    os.environ.update(
        SLURM_PROCID=str(rank),
        SLURM_STEP_NUM_TASKS=str(size),
        SLURM_LOCALID=str(rank),
        SLURM_STEP_TASKS_PER_NODE=str(size),
        SLURM_STEP_ID="0",
    )
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    if rank == 0:
        store.set("job", next(filter(has_free_ports, map(str, itertools.count(os.getpid())))))
    os.environ["SLURM_JOB_ID"] = store.get("job").decode()
    nostall.torch.init(timeout=limit)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    dist.barrier()
    dist.destroy_process_group()
    nostall.torch._launch.fill_environment()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("nostall", timeout=limit)
    world = find_world()
    assert (world.rank, world.local_rank, world.local_world_size) == (rank, rank, size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


def destroyed() -> None:
    """Nothing of a destroyed group is left, although the model still holds it; nor of many groups."""
    if lacks(
        "a constructor of Backend", isinstance(dist.group.WORLD._registered[0], mesh.Registered)
    ):
        return
    gc.disable()  # reference counts alone have to do
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    before = threads_and_files()
    where = {"store": dist.PrefixStore("again", store), "rank": rank, "world_size": size}
    dist.init_process_group("nostall", timeout=limit, **where)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    group = dist.group.WORLD
    delegate()
    dist.monitored_barrier()
    if rank == 0:
        time.sleep(0.3)  # the others watch the store meanwhile
    dist.monitored_barrier()
    with_one = threads_and_files()
    for _ in range(10):
        another = dist.new_group()
        delegate(another)
        dist.destroy_process_group(another)
        del another
        expect_no_more_than(with_one)
    if rank == 0:
        for _ in range(200):
            alone = dist.new_group([0], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=alone, async_op=True).wait()
            dist.destroy_process_group(alone)
            del alone
        expect_no_more_than(with_one)
    dist.barrier()
    dist.destroy_process_group()
    expect_no_more_than(before)
    for gone in (group, group._get_backend(torch.device("cpu"))):
        try:
            gone.gather([[torch.empty(1)] * size], [torch.ones(1)], dist.GatherOptions())
            raise AssertionError("the group is still there")
        except UsageError as error:
            assert "destroyed" in str(error), error
    del model


class Failed(Exception):
    """What a program that ends by an exception raises."""


def learn_slowly(aborts: Aborts, learn: Callable[[Aborts], None] = Aborts.learn) -> None:
    """Asks the store as one that is slow to answer does, in native code."""
    for _ in range(5):
        with suppress(RuntimeError):
            dist.HashStore().wait(["never"], timedelta(seconds=0.1))
    learn(aborts)


def daemons_wait(draw: random.Random) -> None:
    """Threads wait, when the main thread ends, for what does not come, and ask a slow store why."""
    Aborts.learn = learn_slowly
    other = dist.new_group()
    parts = [torch.empty(1) for _ in range(size)]
    waits: list[Callable[[], object]] = [lambda: dist.recv(torch.empty(1), 1 - rank, tag=3)]
    if rank == 0:
        waits += [lambda: dist.barrier(group=other), lambda: dist.gather(parts[0], parts)]
    else:
        waits.append(lambda: dist.all_reduce(torch.ones(9), group=other, async_op=True).wait())
    for wait in waits:
        threading.Thread(target=wait, daemon=True).start()
    time.sleep(draw.choice([0.0, 0.001, 0.05]))  # however far they come


def wait_for_end(store: Any) -> None:
    """Of the process of rank 0."""
    process = Path("/proc") / store.get("pid").decode() / "stat"
    with suppress(FileNotFoundError, ProcessLookupError):
        while process.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.001)


def daemon_asks(store: Any) -> None:
    """A thread of rank 1 asks a slow store, when its main thread ends, why a receive has failed."""
    asks = threading.Event()

    def learn(aborts: Aborts) -> None:
        asks.set()
        learn_slowly(aborts)

    Aborts.learn = learn
    dist.barrier()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        return
    wait_for_end(store)
    threading.Thread(target=dist.recv, args=(torch.empty(1), 0), daemon=True).start()
    asks.wait()


class Slow(ctypes.c_float * 1):
    """Memory that takes long to be given back."""

    def __del__(self) -> None:
        time.sleep(1)


def daemon_drops(store: Any) -> None:
    """A thread of rank 0 drops, when its main thread ends, what it received to, in native code."""

    def receive() -> None:
        work = dist.irecv(torch.from_numpy(np.frombuffer(Slow(), np.float32)), 1)
        with suppress(RuntimeError):
            work.wait()

    dist.barrier()
    if rank == 1:
        wait_for_end(store)
        return
    threading.Thread(target=receive, daemon=True).start()
    while not dist.group.WORLD._calls._inside:
        time.sleep(0.001)
    store.set("pid", str(os.getpid()))


def daemons_compute(store: Any) -> None:
    """Threads of rank 0 are in native code of torch when its main thread ends, or return to it."""
    if rank == 1:
        wait_for_end(store)
        return
    sys.setswitchinterval(1e-6)  # so that many wait for the interpreter's lock
    square = torch.ones(100, 100)

    def compute() -> None:
        with suppress(RuntimeError):
            called = torch.ops._c10d_functional  # native code of torch calls Python
            called.wait_tensor(called.all_reduce(square, "sum", dist.group.WORLD.group_name))
        while True:
            square @ square

    for _ in range(4):
        threading.Thread(target=compute, daemon=True).start()
    while not dist.group.WORLD._calls._inside:
        time.sleep(0.001)
    store.set("pid", str(os.getpid()))


def ends_while_swapping(store: Any) -> int:
    """Rank 0 ends while a thread waits for an all-to-all to which rank 1 does not come."""
    swapped = torch.empty(2).split(1)
    before = dist.all_to_all(list(swapped), [torch.full((1,), float(rank))] * size, async_op=True)
    while not before._work.is_completed():
        time.sleep(0.001)
    if rank == 1:
        wait_for_end(store)
        return 8
    group, told = dist.group.WORLD, []
    work = dist.all_to_all([torch.empty(1)] * size, [torch.ones(1)] * size, async_op=True)
    future = work.get_future()

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not group._calls._inside:
        time.sleep(0.001)
    store.set("pid", str(os.getpid()))
    group.end_with_program()
    thread.join()
    for later in (work.wait, future.wait):
        try:
            later()
        except Exception as error:
            told.append(error)
    print(told, flush=True)
    before.wait()  # it had ended well
    if [float(one) for one in swapped] != [0.0, 1.0]:
        return 4
    waited, again, watched = told
    named = isinstance(waited, PeerError) and isinstance(again, PeerError)
    return 8 if named and "PeerError" in str(watched) else 3


def ends_early(store: Any) -> int:
    """Rank 0 ends in the call after a broadcast to which rank 1 comes when that process is gone."""
    tensor = torch.full((1000,), 7.0 if rank == 0 else 0.0)
    if rank == 1:
        wait_for_end(store)
    dist.broadcast(tensor, 0)
    last = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        store.set("pid", str(os.getpid()))
        return 8
    if (tensor != 7).any():
        return 2
    try:
        last.wait()
    except RuntimeError as error:
        return 8 if "rank 0 ended its program" in str(error) else 3
    return 4


def end(where: dict[str, Any]) -> int:
    """A plain program that ends as ENDING says. tests/campaigns/endings.py knows the statuses."""
    global rank, size
    rank, size = where["rank"], where["world_size"]
    ending, draw = os.environ["ENDING"], random.Random(int(os.environ["SEED"]))
    if "NODES" in os.environ:
        os.environ["NOSTALL_NODE"] = f"node {rank * int(os.environ['NODES']) // size}"
    if "handled" in ending:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    dist.init_process_group("nostall", timeout=limit, **where)
    if ending == "daemons wait":
        daemons_wait(draw)
        return 8
    if ending == "daemon asks":
        daemon_asks(where["store"])
        return 8
    if ending == "daemon drops":
        daemon_drops(where["store"])
        return 8
    if ending == "daemons compute":
        daemons_compute(where["store"])
        return 8
    if ending == "early":
        return ends_early(where["store"])
    if ending == "swapping":
        return ends_while_swapping(where["store"])
    model = DistributedDataParallel(torch.nn.Linear(4, 4)) if draw.random() < 0.5 else None
    for _ in range(draw.randrange(3)):
        delegate()
    tensors = [torch.ones(draw.choice([1, 1000, 100_000])) for _ in range(4)]
    pending: list[Any] = []
    if draw.random() < 0.5 or "pending" in ending:
        pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        swap = torch.empty(size), torch.ones(size)
        pending.append(dist.all_to_all_single(*swap, async_op=True))
        if "pending" not in ending:
            for work in pending:
                work.wait()
    if ending in ("term", "_exit") or "pending" in ending or ending.startswith("peer killed"):
        # Who ends so, or in an operation, may take those of Gloo that others are still in with it.
        where["store"].add("here", 1)
        while where["store"].add("here", 0) < size:
            time.sleep(0.001)
    if ending == "destroy":
        dist.destroy_process_group()
    elif ending.startswith("exception"):
        raise Failed
    elif ending.startswith("exit"):
        sys.exit(3)
    elif ending.startswith("term"):
        os.kill(os.getpid(), signal.SIGTERM)
    elif ending == "_exit":
        os._exit(4)
    elif ending.startswith("fork"):
        child = os.fork()
        if child == 0:
            if "destroy" in ending:
                dist.destroy_process_group()
            sys.exit(5)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.all_reduce(tensors[0])
        return status
    elif ending.startswith("peer killed"):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            last = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            last.append(dist.all_to_all_single(torch.empty(size), torch.ones(size), async_op=True))
            if "waits" in ending:
                for work in last:
                    work.wait()
                return 7
        except RuntimeError:
            return 6
        return 6
    del model
    return 8


def run(what: str, rank: int, size: int, port: int) -> int:
    """For torch_job.py."""
    # Makes torch's pool of threads anew, which is the parent's: threads of autograd that find it
    # so at one time get none, and end the process ("Invalid thread pool!").
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    where = {"store": store, "rank": rank, "world_size": size}
    return end(where) if what == "end" else take_part(what, **where)


if __name__ == "__main__":
    sys.exit(take_part(sys.argv[1]))
