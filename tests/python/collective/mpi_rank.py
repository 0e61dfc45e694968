"""One MPI rank with libnostall_mpi.so preloaded; the expected values are NumPy's. Needs no nostall."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size


def exchange() -> None:
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
    inter.Free()
    halves.Free()
    request = world.Iallreduce(MPI.IN_PLACE, total)
    request.Wait()


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


def killed() -> None:
    data = np.ones(1 << 16)
    world.Allreduce(MPI.IN_PLACE, data)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.Allreduce(MPI.IN_PLACE, data)


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
