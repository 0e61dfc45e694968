"""One MPI rank with libnostall_mpi.so preloaded; the expected values are NumPy's. Needs no nostall."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Which node a rank stands for is read when MPI starts, at the import below.
nodes = int(os.environ.get("TEST_NODES", "1"))
names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
ours, all_ranks = (next(int(os.environ[n]) for n in either if n in os.environ) for either in names)
if nodes > 1:
    os.environ["NOSTALL_NODE"] = str(ours * nodes // all_ranks)

from mpi4py import MPI  # noqa: E402

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
node = rank * nodes // size


def by_arrival() -> None:
    # Every rank is late once for each message, and nobody waits between calls.
    for count in (0, 1, 7, 5000, 300_000, 800_000):
        parts = [(np.arange(count) % 7 + r).astype("f4") for r in range(size)]
        expected = sum(parts)
        for late in range(size):
            if rank == late:
                time.sleep(0.02)
            out = np.empty_like(parts[rank])
            world.Allreduce(parts[rank], out, MPI.SUM)
            np.testing.assert_array_equal(out, expected)
            out[:] = parts[rank]
            world.Allreduce(MPI.IN_PLACE, out, MPI.SUM)
            np.testing.assert_array_equal(out, expected)
            world.Allreduce(parts[rank], out, MPI.MAX)
            np.testing.assert_array_equal(out, parts[-1])


def collectives() -> None:
    for kind in ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16"):
        for count in (0, 1, 3, 5000, 300_000):
            parts = [(np.arange(count) % 7 + r).astype(kind) for r in range(size)]
            mine = parts[rank].copy()
            operations = [(MPI.SUM, np.add), (MPI.PROD, np.multiply)]
            if not kind.startswith("c"):
                operations += [(MPI.MAX, np.maximum), (MPI.MIN, np.minimum)]
            for op, function in operations:
                expected = parts[0]
                for part in parts[1:]:
                    expected = function(expected, part)
                out = np.empty_like(mine)
                world.Allreduce(mine, out, op)
                np.testing.assert_array_equal(out, expected)
                out = mine.copy()
                world.Allreduce(MPI.IN_PLACE, out, op)
                np.testing.assert_array_equal(out, expected)
                root = count % size
                out = mine.copy()
                if rank == root:
                    world.Reduce(MPI.IN_PLACE, out, op, root)
                    np.testing.assert_array_equal(out, expected)
                else:
                    world.Reduce(out, None, op, root)
                    np.testing.assert_array_equal(out, mine)
            out = mine.copy()
            world.Bcast(out, size - 1)
            np.testing.assert_array_equal(out, parts[size - 1])
            world.Barrier()


def allgathers() -> None:
    """Equal and uneven parts, in place, in other places, at odd addresses, with gaps, apart or not."""
    for count in (0, 1, 3000, 200_000):
        room = np.zeros(4 * count * (size + 1) + 1, "u1")
        odd = np.frombuffer(room.data[1:], "f4")
        parts = [(np.arange(count) % 7 + r).astype("f4") for r in range(size)]
        # Rank r gives count * r elements, to places in the opposite order with one element between.
        counts = [count * r for r in range(size)]
        places = [sum(counts[r + 1 :]) + size - 1 - r for r in range(size)]
        uneven = [np.resize(parts[r], counts[r]) for r in range(size)]
        expected = np.full(sum(counts) + size, -1.0, "f4")
        for r in range(size):
            expected[places[r] : places[r] + counts[r]] = uneven[r]
        for late in range(size):
            if rank == late:
                time.sleep(0.01)
            for out in (np.empty(count * size, "f4"), odd[: count * size], odd[count:]):
                mine = odd[:count]
                mine[:] = parts[rank]
                sent = mine if nodes == 1 else mine.copy()  # it may overlap what is received
                world.Allgather([sent, MPI.FLOAT], [out, MPI.FLOAT])
                np.testing.assert_array_equal(out, np.concatenate(parts))
                out[:] = -1
                out[rank * count : (rank + 1) * count] = parts[rank]
                world.Allgather(MPI.IN_PLACE, [out, MPI.FLOAT])
                np.testing.assert_array_equal(out, np.concatenate(parts))
            spread = np.full_like(expected, -1)
            world.Allgatherv(uneven[rank], [spread, counts, places, MPI.FLOAT])
            np.testing.assert_array_equal(spread, expected)
            spread[:] = -1
            spread[places[rank] : places[rank] + counts[rank]] = uneven[rank]
            world.Allgatherv(MPI.IN_PLACE, [spread, counts, places, MPI.FLOAT])
            np.testing.assert_array_equal(spread, expected)
    # A rank without data, whose place is that of the next.
    counts = [0 if r == 1 else 5 for r in range(size)]
    places = [sum(counts[:r]) for r in range(size)]
    filled = np.repeat(np.arange(size, dtype="f4"), counts)
    for send in (MPI.IN_PLACE, np.full(counts[rank], rank, "f4")):
        close = np.where(filled == rank, filled, np.float32(-1))
        world.Allgatherv(send, [close, counts, places, MPI.FLOAT])
        np.testing.assert_array_equal(close, filled)
    # Of one rank the columns of a matrix, of the others plain numbers.
    column = MPI.DOUBLE.Create_vector(8, 1, size).Create_resized(0, 8).Commit()
    grid, plain = np.full((8, size), -1.0), np.full(8 * size, -1.0)
    send: list[object] = [np.arange(8.0) + rank, 8, MPI.DOUBLE]
    if rank == 0:
        first = np.zeros((8, size))
        first[:, 0] = np.arange(8.0)
        send = [first, 1, column]
    world.Allgather(send, [grid, 1, column] if rank == 1 else [plain, 8, MPI.DOUBLE])
    all_parts = np.stack([np.arange(8.0) + r for r in range(size)])
    np.testing.assert_array_equal(grid.T if rank == 1 else plain.reshape(size, 8), all_parts)
    assert world.allgather("x" * rank) == ["x" * r for r in range(size)]


def reduce_scatters() -> None:
    """Equal and uneven blocks, one empty, in place, at odd addresses, over one another; all late."""

    def first(a: object, b: object, _: object) -> None:
        np.frombuffer(b, "f4")[:] = np.frombuffer(a, "f4")  # type: ignore[call-overload]

    keep = MPI.Op.Create(first, commute=False)
    for count in (0, 1, 900, 200_000):
        room = np.zeros(4 * count * size + 1, "u1")
        odd = np.frombuffer(room.data[1:], "f4")
        parts = [((np.arange(count * size) + 3 * r) % 7).astype("f4") for r in range(size)]
        expected = sum(parts)
        uneven = [count * size - (size - 2) * (count // 3), *[count // 3] * (size - 2), 0]
        for late in range(size):
            for counts in ([count] * size, uneven):
                equal = counts is not uneven
                begin, mine = sum(counts[:rank]), counts[rank]
                result = expected[begin : begin + mine]
                call = world.Reduce_scatter_block if equal else world.Reduce_scatter
                more = () if equal else (counts,)
                if rank == late:
                    time.sleep(0.01)
                for given in (parts[rank].copy(), odd):
                    given[:] = parts[rank]
                    out = np.empty(mine, "f4")
                    call([given, MPI.FLOAT], [out, MPI.FLOAT], *more)
                    np.testing.assert_array_equal(out, result)
                    np.testing.assert_array_equal(given, parts[rank])
                    call(MPI.IN_PLACE, [given, MPI.FLOAT], *more)
                    np.testing.assert_array_equal(given[:mine], result)
                out[:] = 0
                call(parts[rank], out, *more, MPI.MAX)
                np.testing.assert_array_equal(out, np.max(parts, axis=0)[begin : begin + mine])
        if nodes == 1 and count > 0:  # an error in MPI, whose meaning is clear
            given = parts[rank].copy()
            at = count // 2
            world.Reduce_scatter_block(given, given[at : at + count])
            np.testing.assert_array_equal(
                given[at : at + count], expected[count * rank : count * (rank + 1)]
            )
        # The left operand is that of the lower rank.
        out = np.empty(count, "f4")
        world.Reduce_scatter_block(parts[rank], out, keep)
        np.testing.assert_array_equal(out, parts[0][count * rank : count * (rank + 1)])
    keep.Free()
    # A type with gaps is the MPI's.

    def add(a: object, b: object, _: object) -> None:
        left, right = np.frombuffer(a, "f4"), np.frombuffer(b, "f4")  # type: ignore[call-overload]
        right[::2] += left[: len(right) : 2]

    every_other = MPI.FLOAT.Create_resized(0, 8).Commit()
    total = MPI.Op.Create(add, commute=True)
    out = np.zeros(8, "f4")
    world.Reduce_scatter_block([np.ones(8 * size, "f4"), every_other], [out, every_other], total)
    assert out.tolist() == [size, 0] * 4
    total.Free()


def gathered_early() -> None:
    """The last rank comes when the others have each other's data, and not before."""
    count = 300_000
    path = os.environ["TEST_SHARED"]
    every = np.memmap(path, "f4", "r+", shape=(size, size, count))  # of a rank, from a rank
    for last in range(size):
        world.Barrier()
        mine = np.full(count, 1 + rank + 100 * last, "f4")
        early = [r for r in range(size) if r != last]
        pairs = [(r, of) for r in early for of in early if r != of]
        while rank == last and any((every[r, of] != 1 + of + 100 * last).any() for r, of in pairs):
            time.sleep(0.001)
        if last % 2:
            world.Allgather(mine, every[rank])
        else:
            world.Allgatherv(mine, [every[rank], [count] * size])
        for of in range(size):
            assert (every[rank, of] == 1 + of + 100 * last).all()


def operations() -> None:
    """What has no kernel of ours: pairs, the user's operations, in the order of ranks."""
    pairs = np.array([((rank * 7 + i) % 5, rank) for i in range(2000)], dtype="i4,i4")
    out = np.empty_like(pairs)
    world.Allreduce([pairs, MPI.INT_INT], [out, MPI.INT_INT], MPI.MAXLOC)
    for i in range(2000):
        values = [(r * 7 + i) % 5 for r in range(size)]
        assert tuple(out[i]) == (max(values), values.index(max(values)))

    def compose(a: object, b: object, _: object) -> None:
        left = np.frombuffer(a, "u4").reshape(-1, 2)
        right = np.frombuffer(b, "u4").reshape(-1, 2)
        right[:, 1] = left[:, 0] * right[:, 1] + left[:, 1]
        right[:, 0] *= left[:, 0]

    element = MPI.UNSIGNED.Create_contiguous(2).Commit()
    op = MPI.Op.Create(compose, commute=False)
    for count in (1, 3000):
        parts = [np.full((count, 2), r + 2, "u4") for r in range(size)]
        for part in parts:
            part[:, 1] += np.arange(count, dtype="u4")
        out = np.empty_like(parts[0])
        world.Allreduce([parts[rank], count, element], [out, count, element], op)
        expected = parts[0].copy()
        for part in parts[1:]:
            following = part.copy()
            compose(expected, following, None)
            expected = following
        np.testing.assert_array_equal(out, expected)
    op.Free()
    assert world.allreduce(rank + 1) == size * (size + 1) // 2
    assert world.bcast({"from": rank}, 1) == {"from": 1}


def types() -> None:
    """Bcast between a type with gaps and plain numbers."""
    grid = np.arange(40.0).reshape(8, 5) + rank
    column = MPI.DOUBLE.Create_vector(8, 1, 5).Commit()
    plain = np.zeros(8)
    world.Bcast([grid, 1, column] if rank == 0 else [plain, 8, MPI.DOUBLE], 0)
    assert rank == 0 or (plain == np.arange(8) * 5.0).all()
    world.Bcast([plain, 8, MPI.DOUBLE] if rank == 1 else [grid, 1, column], 1)
    assert rank == 1 or (grid[:, 0] == np.arange(8) * 5.0).all()


def transposed() -> None:
    """Types without gaps: of one rank a matrix column by column, of the others plain numbers."""
    grid = np.arange(36.0).reshape(6, 6)
    column = MPI.DOUBLE.Create_vector(6, 1, 6)
    by_columns = column.Create_hvector(6, 1, 8).Commit()
    twice = by_columns.Dup().Create_contiguous(1).Commit()
    in_order = MPI.DOUBLE.Create_contiguous(6).Dup().Create_contiguous(6).Commit()
    for root in range(size):
        for kind in (by_columns, twice):
            here = rank == root
            for all_calls in (world.Bcast, lambda *spec: world.Ibcast(*spec).Wait()):
                out = grid.copy() if here else np.zeros((6, 6))
                all_calls([out, 1, kind if here else in_order], root)
                np.testing.assert_array_equal(out, grid if here else grid.T)
                other = (root + 1) % size
                out = grid.copy() if rank == other else np.zeros((6, 6))
                all_calls([out, 1, kind if here else in_order], other)
                np.testing.assert_array_equal(out, grid.T if here else grid)
            every = np.zeros((size, 6, 6))
            world.Allgather(
                [grid + rank, 1, kind if here else in_order],
                [every, 1, in_order if here else kind],
            )
            for r in range(size):
                sent = (grid + r).T if r == root else grid + r
                np.testing.assert_array_equal(every[r], sent if here else sent.T)


def communicators() -> None:
    halves = world.Split(rank % 2, -rank)
    assert halves.allreduce(rank) == sum(r for r in range(size) if r % 2 == rank % 2)
    total = np.ones(10_000)
    for _ in range(20):
        again = world.Dup()
        again.Allreduce(MPI.IN_PLACE, total)
        again.Free()
    assert total[0] == size**20
    inter = halves.Create_intercomm(0, world, 1 - rank % 2 + (size - 2), 7)
    other = np.zeros(1)
    inter.Allreduce(np.array([float(rank)]), other)
    assert other[0] == sum(r for r in range(size) if r % 2 != rank % 2)
    inter.Allgather(np.array([float(rank)]), others := np.zeros(inter.remote_size))
    assert list(others) == sorted(
        (float(r) for r in range(size) if r % 2 != rank % 2), reverse=True
    )
    inter.Free()
    halves.Free()
    request = world.Iallreduce(MPI.IN_PLACE, total)
    request.Wait()


def between_groups() -> None:
    """Two communicators between the same groups, with calls that differ in kind and number."""
    halves = world.Split(rank % 2, -rank)
    first = halves.Create_intercomm(0, world, 1 - rank % 2 + (size - 2), 7)
    second = first.Dup()
    for _ in range(3):
        first.Allreduce(np.array([float(rank)]), np.zeros(1))
    second.Barrier()
    second.Allgather(np.ones(rank % 2 + 1), np.ones((2 - rank % 2) * second.remote_size))
    for comm in (first, second, halves):
        comm.Free()


def pending() -> None:
    """A message sent before the collective arrives although its sender waits in shared memory."""
    data = np.full(1 << 22, float(rank))
    if rank == 0:
        request = world.Isend(data, 1)
        world.Barrier()
        request.Wait()
    elif rank == 1:
        time.sleep(0.1)
        world.Recv(data, 0)
        assert (data == 0).all()
        world.Barrier()
    else:
        world.Barrier()


def windows() -> None:
    """A rank that waits in a collective answers those who lock its window."""
    window = MPI.Win.Allocate(8, comm=world)
    world.Barrier()
    if rank == 0:
        for _ in range(3):
            window.Lock_all()
            for other in range(size):
                window.Accumulate(np.ones(1), other)
            window.Unlock_all()
    world.Barrier()
    window.Lock(rank)
    assert np.frombuffer(window, "f8")[0] == 3
    window.Unlock(rank)
    window.Free()


def threadless() -> None:
    """Nonblocking calls of a process that gets no more threads."""
    world.Barrier()
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    assert libc.pthread_attr_init(attributes) == 0
    # No address space has room for such a stack.
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 48)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    data = [np.full(100_000, float(rank + 1)) for _ in range(2)]
    requests = [world.Iallreduce(MPI.IN_PLACE, array) for array in data]
    source, received = np.full(10, float(rank)), np.empty(10)
    world.Sendrecv(source, (rank + 1) % size, 0, received, (rank - 1) % size)
    MPI.Request.Waitall(requests)
    assert (received == (rank - 1) % size).all()
    assert all((array == size * (size + 1) / 2).all() for array in data)


def background() -> None:
    """Nonblocking calls in every order that MPI allows, beside blocking ones and messages."""
    other = world.Dup()
    other.Barrier()
    total = size * (size + 1) / 2
    data = [np.full(100_000, float(rank + 1)) for _ in range(3)]
    for turn in range(4):
        for array in data:
            array[:] = rank + 1
        # Ranks start on the two communicators in different orders.
        starts = [
            lambda: world.Iallreduce(MPI.IN_PLACE, data[0]),
            lambda: other.Iallreduce(MPI.IN_PLACE, data[1]),
        ]
        order = (0, 1) if rank % 2 == turn % 2 else (1, 0)
        requests = [starts[i]() for i in order]
        source = np.full(50_000, float(rank))
        received = np.empty_like(source)
        send = world.Isend(source, (rank + 1) % size)
        if turn % 2 == 0:
            world.Recv(received, (rank - 1) % size)
            MPI.Request.Waitall([send, *requests])
        else:
            while not MPI.Request.Testall(requests):
                time.sleep(0)
            world.Recv(received, (rank - 1) % size)
            send.Wait()
        assert (received == (rank - 1) % size).all()
        assert (data[0] == total).all() and (data[1] == total).all()
        # A blocking call behind a nonblocking one of the same communicator.
        request = world.Ireduce(data[2], data[0] if rank == 1 else None, root=1)
        world.Bcast(data[1], 0)
        request.Wait()
        assert rank != 1 or (data[0] == total).all()
    small = np.ones(4)
    world.Iallreduce(MPI.IN_PLACE, small).Wait()
    assert (small == size).all()
    persistent = world.Allreduce_init(MPI.IN_PLACE, small)
    persistent.Start()
    persistent.Wait()
    assert (small == size**2).all()
    other.Free()


def started_later() -> None:
    """A wait for one call waits for no later one, which other ranks start when that wait has ended."""
    first, second = np.ones(10_000), np.ones(10_000)
    for _ in range(500):
        first[:] = second[:] = 1
        waits = world.Iallreduce(MPI.IN_PLACE, first)
        if rank == 0:
            later = world.Iallreduce(MPI.IN_PLACE, second)
            waits.Wait()
            for other in range(1, size):
                world.send("waited", other)
        else:
            waits.Wait()
            world.recv(source=0)
            later = world.Iallreduce(MPI.IN_PLACE, second)
        later.Wait()
        assert (first == size).all() and (second == size).all()


def every_kind() -> None:
    """All collectives, blocking and not; the test knows what each rank gives."""
    counts = [r + 1 for r in range(size)]
    total = sum(counts)

    def ones(count: int) -> np.ndarray:
        return np.ones(count, "f4")

    def at_root(array: np.ndarray) -> np.ndarray | None:
        return array if rank == 0 else None

    def uneven() -> tuple[np.ndarray, list[int]]:
        return ones(total), counts

    kinds: dict[str, Callable[[], tuple[object, ...]]] = {
        "Allgather": lambda: (ones(5), ones(5 * size)),
        "Allgatherv": lambda: (ones(rank + 1), uneven()),
        "Gather": lambda: (ones(5), at_root(ones(5 * size))),
        "Gatherv": lambda: (ones(rank + 1), uneven() if rank == 0 else None),
        "Scatter": lambda: (at_root(ones(5 * size)), ones(5)),
        "Scatterv": lambda: (uneven() if rank == 0 else None, ones(rank + 1)),
        "Alltoall": lambda: (ones(5 * size), ones(5 * size)),
        "Alltoallv": lambda: (uneven(), (ones((rank + 1) * size), [rank + 1] * size)),
        "Reduce_scatter": lambda: (ones(total), ones(rank + 1), counts),
        "Reduce_scatter_block": lambda: (ones(5 * size), ones(5)),
        "Scan": lambda: (ones(5), ones(5)),
        "Exscan": lambda: (ones(5), ones(5)),
    }
    for name, make in kinds.items():
        getattr(world, name)(*make())
    places = [4 * r for r in range(size)]
    sent, received = ones(size), ones(size)
    once = [[1] * size, places, [MPI.FLOAT] * size]
    world.Alltoallw([sent, *once], [received, *once])
    world.Allgather(MPI.IN_PLACE, ones(5 * size))
    waits: list[Callable[[MPI.Request], object]] = [
        MPI.Request.Wait,
        lambda request: MPI.Request.Waitall([request]),
        lambda request: MPI.Request.Waitany([request]),
        lambda request: MPI.Request.Waitsome([request]),
        lambda request: poll(request.Test),
        lambda request: poll(lambda: MPI.Request.Testall([request])),
        lambda request: poll(lambda: MPI.Request.Testany([request])[1]),
        lambda request: poll(lambda: MPI.Request.Testsome([request])),
    ]
    started = [
        *(functools.partial(lambda name, make: getattr(world, f"I{name.lower()}")(*make()), n, m)
          for n, m in kinds.items()),
        lambda: world.Ialltoallw([sent, *once], [received, *once]),
        lambda: world.Iallreduce(ones(5), ones(5)),
        lambda: world.Ireduce(ones(5), at_root(ones(5))),
        lambda: world.Ibcast(ones(5)),
        world.Ibarrier,
    ]  # fmt: skip
    for number, start in enumerate(started):
        # The root comes late: the others' calls end when it has come.
        world.Barrier()
        if rank == 0:
            time.sleep(0.005)
        request = start()
        waits[number % len(waits)](request)
    dup = world.Dup()
    dup.Ibarrier().Wait()
    dup.Free()


def poll(test: Callable[[], object]) -> None:
    while not test():
        time.sleep(0)


def freed() -> None:
    """Communicators whose work is under way when they are freed."""
    column = MPI.DOUBLE.Create_vector(10_000, 1, 2).Commit()
    for _ in range(20):
        comm = world.Dup()
        comm.Barrier()
        sums = np.ones(10_000)
        grid = np.full(20_000, float(rank))
        requests = [comm.Iallreduce(MPI.IN_PLACE, sums), comm.Ibcast([grid, 1, column], 1)]
        comm.Free()
        requests[0].Wait()
        requests[1].Wait()
        assert (sums == size).all()
        assert (grid[::2] == 1).all() and (grid[1::2] == rank).all()


def memory() -> None:
    count = 1 << 18
    shared = MPI.Alloc_mem(8 * count)
    data = np.frombuffer(shared, dtype=np.float64)
    ordinary = np.empty(count)
    for turn in range(10):
        # Now and then some rank has other memory.
        mine = ordinary if turn % 3 == 2 and rank == turn % size else data
        mine[:] = rank + turn
        world.Allreduce(MPI.IN_PLACE, mine)
        assert (mine == size * turn + size * (size - 1) / 2).all()
    del data, mine
    MPI.Free_mem(shared)
    # More than the arena holds, if memory did not come back.
    for _ in range(10):
        MPI.Free_mem(MPI.Alloc_mem(8 << 20))
    small = MPI.Alloc_mem(100)
    MPI.Free_mem(small)


def threads() -> None:
    """MPI_THREAD_MULTIPLE: every thread has a communicator of its own."""
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    comms = [world.Dup() for _ in range(3)]
    failed: list[int] = []

    def work(number: int) -> None:
        for call in range(200):
            value = np.full(10 if call % 2 else 5000, float(call * (rank + 1)))
            comms[number].Allreduce(MPI.IN_PLACE, value)
            if not (value == call * size * (size + 1) / 2).all():
                failed.append(call)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed
    for comm in comms:
        comm.Free()


def tell_in_file() -> None:
    """What this rank prints goes to a file: a launcher may lose what comes just before an abort."""
    told = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 2)


def killed() -> None:
    data = np.ones(1 << 16)
    tell_in_file()
    world.Allreduce(MPI.IN_PLACE, data)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.Allreduce(MPI.IN_PLACE, data)
    except MPI.Exception:
        # A launcher may end the other survivor when the first ends.
        while Path(os.environ["TOLD"]).read_text().count("\n") < size - 1:
            time.sleep(0.01)
        os._exit(3)  # MPI_Finalize may wait for the dead rank


def buffers() -> None:
    """Buffers that are not aligned, that overlap, or that are one."""
    double = MPI.DOUBLE
    for count in (5, 5000, 100_000):
        parts = [np.arange(count) % 7.0 + r for r in range(size)]
        expected = sum(parts)
        room = np.zeros(8 * count + 24, "u1")
        at = {n: np.frombuffer(room.data[n : n + 8 * count], "f8") for n in (1, 3, 8, 16)}
        for mine, out in ((at[1], at[1]), (at[8], at[8]), (at[8], at[16]), (at[3], at[8])):
            mine[:] = parts[rank]
            world.Allreduce([mine, double], [out, double])
            np.testing.assert_array_equal(out, expected)
            mine[:] = parts[rank]
            world.Reduce([mine, double], [out, double] if rank == 1 else None, root=1)
            np.testing.assert_array_equal(
                out if rank == 1 else mine, (parts[rank], expected)[rank == 1]
            )
            mine[:] = parts[rank]
            world.Iallreduce([mine, double], [out, double]).Wait()
            np.testing.assert_array_equal(out, expected)
        at[3][:] = parts[rank]
        world.Allreduce(MPI.IN_PLACE, [at[3], double])
        np.testing.assert_array_equal(at[3], expected)
        at[1][:] = parts[rank]
        world.Bcast([at[1], double], 1)
        np.testing.assert_array_equal(at[1], parts[1])


def gaps() -> None:
    """A reduction of a type with gaps is the MPI's."""

    def add(a: object, b: object, _: object) -> None:
        left, right = np.frombuffer(a, "f8"), np.frombuffer(b, "f8")  # type: ignore[call-overload]
        right[::2] += left[: len(right) : 2]

    every_other = MPI.DOUBLE.Create_resized(0, 16).Commit()
    op = MPI.Op.Create(add, commute=True)
    values = np.full(20, float(rank))
    out = np.full(20, -1.0)
    world.Allreduce([values, 10, every_other], [out, 10, every_other], op)
    assert (out[::2] == size * (size - 1) / 2).all()
    assert (out[1::2] == -1).all()


def forked() -> None:
    """A child that comes and goes between calls changes nothing, whatever it does at its end."""
    data = np.full(20_000, 1.0)
    for turn in range(3):
        world.Allreduce(MPI.IN_PLACE, data)
        child = os.fork()
        if child == 0:
            os._exit(0)
        if turn == 1:
            os.waitpid(child, 0)
        world.Iallreduce(MPI.IN_PLACE, data).Wait()
        world.Barrier()
    assert data[0] == size**6


def killed_with_child() -> None:
    """A rank dies while a child of it lives on, which ends after the job."""
    data = np.ones(1 << 16)
    world.Allreduce(MPI.IN_PLACE, data)
    if rank == 1:
        launcher = os.getppid()
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            if "PMI_FD" in os.environ:
                os.close(int(os.environ["PMI_FD"]))  # MPICH's launcher waits for its end
            while os.path.exists(f"/proc/{launcher}"):
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.Allreduce(MPI.IN_PLACE, data)


def absent() -> None:
    """A rank that does not come, once."""
    world.alltoall([0] * size)  # the MPI's own, which waits for as long as it takes
    if rank == 1:
        time.sleep(60)  # rank 0 ends the job
        os._exit(7)
    tell_in_file()
    try:
        world.Allreduce(MPI.IN_PLACE, np.ones(10))
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_OTHER:
            print(f"rank {rank} was told of an error of class MPI_ERR_OTHER", file=sys.stderr)
            sys.stderr.flush()
    world.Abort(5)


def mismatched() -> None:
    """Ranks that call different things are all told; each time on another communicator."""
    data, out = np.ones(100, "f4"), np.ones(100, "f4")
    mine = rank == 1
    cases = [
        lambda comm: comm.Allreduce(data[: 70 if mine else 100], out[: 70 if mine else 100]),
        lambda comm: comm.Allreduce(data, out, MPI.MAX if mine else MPI.SUM),
        lambda comm: comm.Allreduce(MPI.IN_PLACE, out.view("i4") if mine else out),
        lambda comm: comm.Bcast(data, 0 if mine else 2),
        lambda comm: comm.Barrier() if mine else comm.Reduce(data, out, root=0),
        lambda comm: comm.Allgather(data[: 7 + mine], out[: (7 + mine) * size]),
        lambda comm: comm.Allgather([data, 8 if mine else 9, MPI.FLOAT], [out, 9, MPI.FLOAT]),
    ]
    for case in cases:
        comm = world.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            case(comm)
            comm.Barrier()  # who had nothing to wait for is told by the next call
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_OTHER
        else:
            print("nobody told rank", rank, flush=True)
            world.Abort(5)
        comm.Free()
    # What was broken was each case's alone.
    world.Allreduce(MPI.IN_PLACE, data)
    assert (data == size).all()


def revoked() -> None:
    """Ranks that wait are told that the communicator was revoked, and so are later calls."""
    comm = world.Dup()
    comm.Barrier()
    world.Barrier()  # all have left that of the communicator
    if rank == 0:
        time.sleep(0.2)
        comm.Revoke()
    for _ in range(2):
        try:
            comm.Allreduce(MPI.IN_PLACE, np.ones(10))
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_REVOKED
        else:
            world.Abort(5)
    comm.Free()
    world.Barrier()


def raises(error_classes: int | tuple[int, ...], call: Callable[[], object]) -> None:
    expected = error_classes if isinstance(error_classes, tuple) else (error_classes,)
    try:
        call()
    except MPI.Exception as error:
        told = error.Get_error_class()
        if told in expected:
            return
        print("rank", rank, "was told", told, "not", expected, flush=True)
    else:
        print("nobody told rank", rank, flush=True)
    world.Abort(5)


# MPICH's nonblocking collectives do not say more than that something is wrong.
too_much = (MPI.ERR_TRUNCATE, MPI.ERR_OTHER)


def disagreeing_nodes() -> None:
    """An MPI's error between nodes is one on all ranks of the node, then on those of all nodes."""
    dup = world.Dup()
    data, sent = np.zeros(1000), np.zeros(100 if node == 0 else 10)
    for comm in (dup, world):
        comm.Allreduce(MPI.IN_PLACE, data)
        world.allgather(rank)  # the MPI's own: who is told in the allreduce above raises there
        if node == 0:
            with contextlib.suppress(MPI.Exception):  # told by the other node while it comes
                comm.Bcast(sent, 0)
        else:
            raises(too_much, functools.partial(comm.Bcast, sent, 0))
        # Nobody hangs, whatever they call.
        raises(too_much, comm.Barrier)
        raises(too_much, functools.partial(comm.Allreduce, MPI.IN_PLACE, data))
    dup.Free()


def disagreeing_by_arrival() -> None:
    """The same with the allreduce by arrival: one call fails, if only the next one on some ranks."""
    comm = world.Dup()
    comm.Barrier()
    world.allgather(rank)  # the MPI's own: all have left the barrier
    data = np.zeros(100 if node == 0 else 10)
    with contextlib.suppress(MPI.Exception):
        comm.Allreduce(MPI.IN_PLACE, data)
    raises(too_much, comm.Barrier)
    comm.Free()


def absent_elsewhere() -> None:
    """A rank that does not come ends the waiting on the other node as well."""
    if node == 0:
        os.environ["NOSTALL_MPI_TIMEOUT"] = "3"  # the other node's is a day
    comm = world.Dup()
    comm.allgather(rank)  # the MPI's own, which waits for as long as it takes
    others = [r for r in range(size) if r != 1]
    if rank == 1:
        for other in others:
            world.recv(source=other)
    raises(MPI.ERR_OTHER, lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(10)))
    if rank != 1:
        world.send("told", 1)
    comm.Free()


def absent_node() -> None:
    """A node that does not come is named as such, before the first rank that waits for it."""
    comm = world.Dup()
    comm.allgather(rank)  # the MPI's own, which waits for as long as it takes
    if node == nodes - 1:
        for other in range(size - size // nodes):
            world.recv(source=other)
    raises(MPI.ERR_OTHER, lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(10)))
    if node != nodes - 1:
        for other in range(size - size // nodes, size):
            world.send("told", other)
    comm.Free()


def revoked_elsewhere() -> None:
    """Ranks that wait on another node are told without the help of their own node's first rank."""
    comm = world.Dup()
    comm.Barrier()
    world.Barrier()  # all have left that of the communicator
    wait = lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(10))  # noqa: E731
    if rank == 1:
        time.sleep(0.2)
        comm.Revoke()
    if rank == size - size // nodes:  # the first of the last node waits for those of its node
        for other in range(rank + 1, size):
            world.recv(source=other)
    for _ in range(2):
        raises(MPI.ERR_REVOKED, wait)
    if rank > size - size // nodes:
        world.send("told", size - size // nodes)
    raises(MPI.ERR_REVOKED, lambda: comm.Bcast(np.ones(100_000), 0))
    comm.Free()


def revoked_by_mpi() -> None:
    """A revocation that the library did not see, of an MPI that is fault tolerant."""
    comm = world.Dup()
    comm.Barrier()
    world.Barrier()  # all have left that of the communicator
    if rank == 1:
        time.sleep(0.2)
        handle = ctypes.c_void_p.from_address(MPI._addressof(comm))
        assert ctypes.CDLL(None).PMPIX_Comm_revoke(handle) == 0
    raises(MPI.ERR_REVOKED, lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(10)))
    comm.Free()
    # Revoked before its first collective; all ranks but one give its handle to the next one.
    for _ in range(5):
        unused = MPI.COMM_SELF.Dup()
        handle = ctypes.c_void_p.from_address(MPI._addressof(unused))
        assert ctypes.CDLL(None).PMPIX_Comm_revoke(handle) == 0
        raises(MPI.ERR_REVOKED, unused.Barrier)
        if rank > 0:
            unused.Free()
        following = world.Dup()
        following.Barrier()
        following.Free()


def refused() -> None:
    """What the MPI refuses is its error, alike on all ranks, and changes nothing."""
    three = MPI.DOUBLE.Create_contiguous(3).Commit()
    cases = [
        (MPI.C_BOOL, MPI.SUM),
        (MPI.C_BOOL, MPI.MAXLOC),
        (MPI.INT_INT, MPI.MAX),
        (MPI.FLOAT, MPI.BAND),
        (MPI.FLOAT, MPI.LAND),
        (MPI.INTEGER, MPI.LXOR),
        (three, MPI.SUM),
    ]
    for kind, op in cases:
        sent, got = np.ones(24 * 4 * size, "u1"), np.full(24 * 4 * size, 7, "u1")
        given, room = [sent, 4, kind], [got, 4, kind]
        raises(MPI.ERR_OP, lambda: world.Allreduce(given, room, op))  # noqa: B023
        raises(MPI.ERR_OP, lambda: world.Reduce(given, room, op, 1))  # noqa: B023
        blocks = [sent, 4 * size, kind]
        every = [4] * size
        raises(MPI.ERR_OP, lambda: world.Reduce_scatter(blocks, room, every, op))  # noqa: B023
        assert (got == 7).all()
    three.Free()
    raises(MPI.ERR_TYPE, lambda: world.Bcast([np.ones(4), 4, MPI.DATATYPE_NULL]))
    # What the standard has beyond our kernels.
    some = np.array([rank == 0, True, False])
    world.Allreduce(MPI.IN_PLACE, [some, MPI.C_BOOL], MPI.LAND)
    assert some.tolist() == [size == 1, True, False]
    long = np.full(100, np.longdouble(rank + 1))
    world.Allreduce(MPI.IN_PLACE, [long, MPI.LONG_DOUBLE], MPI.SUM)
    assert (long == size * (size + 1) / 2).all()
    raw = np.full(100, 1 << rank, "u1")
    world.Allreduce(MPI.IN_PLACE, [raw, MPI.BYTE], MPI.BOR)
    assert (raw == (1 << size) - 1).all()
    whole = np.full(100, rank, "i8")
    for kind in (MPI.AINT, MPI.OFFSET, MPI.COUNT):
        whole[:] = rank
        world.Allreduce(MPI.IN_PLACE, [whole, kind], MPI.MAX)
        assert (whole == size - 1).all()


def duplicate_alone() -> None:
    """All communicates on a duplicate, as libraries do."""
    own = world.Dup()
    assert own.allreduce(1) == size
    total = np.ones(1000)
    own.Allreduce(MPI.IN_PLACE, total)
    own.Free()


def at_the_end() -> None:
    """What MPI_Finalize calls still communicates, and has its memory."""
    total = np.ones(1000)
    world.Allreduce(MPI.IN_PLACE, total)
    others = world.Split(rank % 2)
    others.Barrier()
    memory = MPI.Alloc_mem(1 << 20)
    data = np.frombuffer(memory, "f8")
    ended = []

    def end(comm: MPI.Comm, key: int, value: object) -> None:
        data[:] = rank
        world.Allreduce(MPI.IN_PLACE, data)
        ended.append(bool((data == size * (size - 1) / 2).all()))
        others.Barrier()
        world.Bcast(total, 1)
        more = MPI.Alloc_mem(1 << 20)
        MPI.Free_mem(more)
        MPI.Free_mem(memory)
        if rank == 0 and ended == [True]:  # a launcher may kill a rank that has finalized
            print("all right", flush=True)

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=end), None)
    MPI.Finalize()
    assert ended == [True]


def exits() -> None:
    """Leaves MPI_Finalize to an exit handler."""
    # A launcher may lose what a rank has printed that it kills.
    with open(os.environ["TOLD"], "a") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    total = np.ones(1000)
    for comm in (world, *(world.Split(rank % 2) for _ in range(3))):
        comm.Allreduce(MPI.IN_PLACE, total)
    world.Iallreduce(MPI.IN_PLACE, total).Wait()
    MPI.Alloc_mem(1 << 20)
    handles = [ctypes.c_long(MPI._handleof(one)) for one in (MPI.INT, MPI.SUM, world)]
    ctypes.CDLL(None).remember(*handles)


def left_receive() -> None:
    """A receive of any message that nobody sends, while MPI_Finalize runs."""
    room = np.zeros(8 << 20, "u1")
    request = world.Irecv(room)
    ended = []

    def end(comm: MPI.Comm, key: int, value: object) -> None:
        ended.append(request.Test())
        request.Cancel()
        request.Wait()
        if rank == 0 and ended == [False]:  # a launcher may kill a rank that has finalized
            print("all right", flush=True)

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=end), None)
    MPI.Finalize()
    assert ended == [False]
    assert not room.any()


def unused_on_device(device: int, host: int, count: int) -> None:
    """Where a call reads and writes nothing, a buffer may be anywhere; mpi4py would give null."""

    def handle(of: object) -> ctypes.c_void_p:
        return ctypes.c_void_p(MPI._handleof(of))

    there, here, some = ctypes.c_void_p(device), ctypes.c_void_p(host), ctypes.c_int(count)
    kind, total, comm, none = handle(MPI.DOUBLE), handle(MPI.SUM), handle(world), ctypes.c_int(0)
    request, status = ctypes.c_void_p(), MPI.Status()
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("Reduce", (here, here if rank == 0 else there, some, kind, total, 0, comm)),
        ("Allreduce", (there, there, none, kind, total, comm)),
        ("Reduce", (there, there, none, kind, total, 0, comm)),
        ("Bcast", (there, none, kind, 0, comm)),
        ("Allgather", (there, none, kind, there, none, kind, comm)),
        ("Reduce_scatter_block", (there, there, none, kind, total, comm)),
        ("Ireduce", (here, here if rank == 0 else there, some, kind, total, 0, comm)),
        ("Iallreduce", (there, there, none, kind, total, comm)),
        ("Ibcast", (there, none, kind, 0, comm)),
    ]
    for name, arguments in calls:
        later = (ctypes.byref(request),) if name.startswith("I") else ()
        library = ctypes.CDLL(None)
        assert getattr(library, f"MPI_{name}")(*arguments, *later) == MPI.SUCCESS, name
        if later:
            assert (
                library.MPI_Wait(*later, ctypes.c_void_p(MPI._addressof(status))) == MPI.SUCCESS
            ), name


def on_device() -> None:
    """A buffer of one rank that the processor cannot read ends its communicator, on all ranks."""
    count = 1 << 16
    comms = [world.Dup() for _ in range(9)]
    for comm in comms:
        comm.Barrier()
    driver = ctypes.CDLL(os.environ["TEST_CUDA"])
    hidden = mmap.mmap(-1, 8 * count * size)
    data = np.frombuffer(hidden, "f8")
    address = data.ctypes.data
    driver.pretend(ctypes.c_size_t(address), ctypes.c_size_t(data.nbytes), 1)
    # What both can read is as any other.
    data[:] = rank
    world.Allreduce(MPI.IN_PLACE, data)
    assert (data == size * (size - 1) / 2).all()
    driver.pretend(ctypes.c_size_t(address), ctypes.c_size_t(data.nbytes), 0)
    assert (
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(data.nbytes), 0) == 0
    )
    host, out = np.ones(count * size), np.ones(count * size)
    mine = data if rank == 1 else host
    unused_on_device(address, host.ctypes.data, count)
    calls = [
        lambda comm: comm.Allreduce(mine[:count], out[:count]),
        lambda comm: comm.Allreduce(MPI.IN_PLACE, mine[:count]),
        lambda comm: comm.Reduce(out[:count], mine[:count], root=1),
        lambda comm: comm.Bcast(mine[:count], 1),
        lambda comm: comm.Allgather(mine[:count], out),
        lambda comm: comm.Reduce_scatter_block(mine, out[:count]),
        lambda comm: comm.Iallreduce(mine[:count], out[:count]).Wait(),
        lambda comm: comm.Ireduce(mine[:count], out[:count], root=0).Wait(),
        lambda comm: comm.Ibcast(mine[:count], 1).Wait(),
    ]
    for comm, call in zip(comms, calls, strict=True):

        def told(comm: MPI.Intracomm = comm, call: Callable[..., object] = call) -> None:
            call(comm)
            comm.Barrier()  # who had nothing to wait for is told by the next call

        raises(MPI.ERR_OTHER, told)
        comm.Free()


def huge() -> None:
    """More than 2^31 elements. The same few pages stand for all but the last ones."""
    pages, times = 1 << 24, 129
    total = pages * times
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.memfd_create("pages")
    os.ftruncate(file, 2 * pages)
    shared, fixed = mmap.MAP_SHARED, 0x10
    base = libc.mmap(None, total, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for i in range(times):
        at = pages if i == times - 1 else 0
        got = libc.mmap(base + i * pages, pages, 3, shared | fixed, file, at)
        assert got == base + i * pages, os.strerror(ctypes.get_errno())
    buffer = (ctypes.c_uint8 * total).from_address(base)
    data = np.frombuffer(buffer, "u1")
    data[:pages] = 5 + rank
    data[-pages:] = 7 - rank
    data[-1] = 100 + rank
    world.Allreduce(MPI.IN_PLACE, data, MPI.MAX)
    assert (data[:pages] == 5 + size - 1).all()
    assert (data[-pages:-1] == 7).all()
    assert data[-1] == 100 + size - 1
    # One element of a type whose size no int has.
    kind = MPI.BYTE.Create_contiguous(pages).Create_contiguous(times).Commit()
    data[-1] = 50 + rank
    world.Bcast([data, 1, kind], 0)
    assert data[-1] == 50


def random_delays() -> None:
    """Many small calls, each rank late now and then."""
    random = np.random.default_rng(rank)
    value = np.zeros(3)
    for call in range(3000):
        if random.random() < 0.05:
            time.sleep(random.random() * 1e-3)
        value[:] = call + rank
        world.Allreduce(MPI.IN_PLACE, value)
        assert value[0] == size * call + size * (size - 1) / 2


for name in sys.argv[1:]:
    globals()[name]()
if rank == 0:
    print("all right", flush=True)
