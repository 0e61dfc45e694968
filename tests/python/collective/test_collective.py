"""Collectives between real processes; the expected values are NumPy's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import check, run

pytestmark = pytest.mark.multi


@pytest.fixture
def shm() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nostall-test-") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == [], "shared memory was left behind"


def test_ranks_share_memory_where_its_directory_is_not_there(shm: Path) -> None:
    results = run(
        """
with join() as c:
    ours = c.empty(100_000, np.float32)
    ours[:] = rank + 1
    assert (c.allreduce(ours) == 3).all() and (c.allreduce(np.ones(5)) == 2).all()
""",
        2,
        shm / "none",
    )
    assert [status for status, _, _ in results] == [0, 0], results
    assert sum("none" in err and "in no directory" in err for _, _, err in results) == 1


ALL_TYPES = """
with join() as c:
    kinds = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
             "uint32", "uint64", "complex64", "complex128", "bool"]
    for kind in kinds:
        for count in (0, 1, 5000):
            parts = [(np.arange(count) % 5 + r).astype(kind) for r in range(size)]
            mine = parts[rank].copy()
            for name, function in (("sum", np.add), ("prod", np.multiply), ("max", np.maximum)):
                if name == "max" and np.dtype(kind).kind == "c":
                    continue
                expected = parts[0]
                for part in parts[1:]:
                    expected = function(expected, part)
                out = np.empty_like(mine)
                c.allreduce(mine, name, out)
                np.testing.assert_array_equal(out, expected, err_msg=f"{kind} {name}")
                np.testing.assert_array_equal(mine, parts[rank])
                result = c.reduce(mine, name, root=size - 1, out=out)
                assert (result is None) == (rank != size - 1)
    for function, name in ((np.logical_xor, "lxor"), (np.bitwise_and, "band")):
        parts = [np.array([r, 6, 0, 3]) for r in range(size)]
        expected = parts[0]
        for part in parts[1:]:
            expected = function(expected, part).astype(np.int64)
        np.testing.assert_array_equal(c.allreduce(parts[rank].copy(), name), expected)
"""


def test_all_types_and_operations_agree_with_numpy(shm: Path) -> None:
    check(ALL_TYPES, 3, shm)


def test_moves_arrays_of_any_shape(shm: Path) -> None:
    check(
        """
with join() as c:
    for n in (3, 40_000):
        grid = np.arange(2 * n, dtype=np.int64).reshape(2, n) * (rank + 1)
        everyone = c.allgather(grid)
        assert everyone.shape == (size, 2, n)
        np.testing.assert_array_equal(everyone[1], np.arange(2 * n).reshape(2, n) * 2)
        copy = grid.copy()
        copy.flags.writeable = rank != 2  # of its root it is only read
        np.testing.assert_array_equal(c.broadcast(copy, root=2), everyone[2])
        part = c.reduce_scatter(everyone.reshape(-1))
        np.testing.assert_array_equal(part, everyone[rank].reshape(-1) * size)
    c.barrier()
    assert c.stats()["calls"] == 7
""",
        3,
        shm,
    )


SCATTERS = """
both = np.random.default_rng([2026, size])  # the same draws on all ranks
own = np.random.default_rng(rank)
names = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
def scatter(c):
    kind = both.choice(["float16", "float32", "float64", "int8", "int64", "uint16", "complex64"])
    name = both.choice(["sum", "prod"] if kind == "complex64" else list(names))
    most = both.choice([1, 9, 700, 5000, 90_000])
    counts = both.integers(0, most, size, endpoint=True) * (both.random(size) < 0.75)
    if both.random() < 0.3:
        counts[:] = most
    begin = counts[:rank].sum()
    parts = [both.integers(1, 3, counts.sum()).astype(kind) for _ in range(size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = names[name](expected, part)
    given = parts[rank].copy()
    way = both.integers(4)
    out = [None, given, np.empty(counts[rank], kind), given[begin : begin + counts[rank]]][way]
    if own.random() < 0.4:
        time.sleep(own.random() / 1000)
    equal = len(set(counts)) == 1 and both.random() < 0.8
    got = c.reduce_scatter(given, name, out, **({} if equal else {"counts": counts}))
    np.testing.assert_array_equal(got, expected[begin : begin + counts[rank]], f"{kind} {name}")
    if way % 2 == 0:
        np.testing.assert_array_equal(given, parts[rank])
for order in ("any", "fixed"):
    with Communicator(job + order, rank, size, directory=directory, order=order) as c:
        for _ in range(60):
            scatter(c)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_reduce_scatters_of_any_blocks_agree_with_numpy(ranks: int, shm: Path) -> None:
    check(SCATTERS, ranks, shm)


def test_a_fixed_order_keeps_the_bits_of_a_reduce_scatter(shm: Path) -> None:
    check(
        """
with join(order="fixed") as c:
    parts = [np.random.default_rng(r).standard_normal(60_000).astype("f4") for r in range(size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for late in range(size):
        time.sleep(0.01 * (rank == late))
        got = c.reduce_scatter(parts[rank])
        assert got.tobytes() == expected.reshape(size, -1)[rank].tobytes(), late
    # An operation that does not commute has this order anyway: the left operand is the lower rank's.
    keep = Operation(lambda left, right: left)
with Communicator(job + "any", rank, size, directory=directory) as c:
    for late in range(size):
        time.sleep(0.01 * (rank == late))
        got = c.reduce_scatter(parts[rank], keep, counts=[0, 59_999, 1])
        assert (got == parts[0][:59_999] if rank == 1 else got == parts[0][59_999:]).all() or rank == 0
""",
        3,
        shm,
    )


def test_a_fixed_order_is_a_left_fold_by_every_algorithm(shm: Path) -> None:
    check(
        """
from nostall.collective import ALGORITHMS
with join(order="fixed") as c:
    parts = [np.random.default_rng(r).standard_normal(3000).astype("f4") for r in range(size)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for algorithm in ALGORITHMS:
        got = c.allreduce(parts[rank].copy(), algorithm=algorithm)
        assert got.tobytes() == expected.tobytes(), algorithm
    for algorithm in ("cooperative", "arrival_leader", "arrival_chain", "leader", "binomial"):
        got = c.reduce(parts[rank].copy(), root=1, algorithm=algorithm)
        assert rank != 1 or got.tobytes() == expected.tobytes(), algorithm
""",
        4,
        shm,
    )


def test_every_algorithm_can_be_chosen(shm: Path) -> None:
    check(
        """
from nostall.collective import ALGORITHMS
with join() as c:
    for algorithm in ALGORITHMS:
        a = np.full(30_000, rank + 1, np.float32)
        assert (c.allreduce(a, algorithm=algorithm) == 10).all(), algorithm
    try:
        c.allreduce(a, algorithm="fastest")
    except errors.UsageError as error:
        assert "fastest" in str(error)
    else:
        sys.exit("accepted")
""",
        4,
        shm,
    )


def test_fixed_order_repeats_bit_for_bit_whoever_is_late(shm: Path) -> None:
    check(
        """
parts = [np.random.default_rng(r).standard_normal(50_000).astype(np.float32) for r in range(size)]
expected = parts[0]
for part in parts[1:]:
    expected = expected + part
with join(order="fixed") as c:
    shared = c.empty(50_000, np.float32)
    for late in range(size):
        for array in (parts[rank].copy(), shared):
            array[:] = parts[rank]
            if rank == late:
                time.sleep(0.01)
            c.allreduce(array)
            assert array.tobytes() == expected.tobytes()
""",
        4,
        shm,
    )


def test_user_operations_keep_the_order_of_ranks(shm: Path) -> None:
    check(
        """
# (a, b) stands for x -> a x + b; composing them does not commute.
pair = np.dtype([("a", np.int64), ("b", np.int64)])
def compose(left, right):
    out = np.empty_like(left)
    out["a"] = left["a"] * right["a"]
    out["b"] = left["a"] * right["b"] + left["b"]
    return out
for count in (1, 3000):
    parts = [np.zeros(count, pair) for _ in range(size)]
    for r, part in enumerate(parts):
        part["a"], part["b"] = r + 2, np.arange(count) + r
    expected = parts[0]
    for part in parts[1:]:
        expected = compose(expected, part)
    with Communicator(f"{job} {count}", rank, size, directory=directory) as c:
        time.sleep(0.02 * (size - rank))
        assert c.allreduce(parts[rank].copy(), Operation(compose)).tolist() == expected.tolist()
        result = c.reduce(parts[rank].copy(), Operation(compose), root=1)
        assert rank != 1 or result.tolist() == expected.tolist()
""",
        3,
        shm,
    )


def test_what_a_user_operation_raises_is_raised(shm: Path) -> None:
    out = check(
        """
def refuse(left, right):
    raise ArithmeticError("no sum today")
with join() as c:
    try:
        c.allreduce(np.ones(4), Operation(refuse))
    except ArithmeticError as error:
        print(error)
    assert c.allreduce(np.ones(4))[0] == size
""",
        2,
        shm,
    )
    assert out == ["no sum today"] * 2


def test_a_killed_rank_is_named_by_all_others(shm: Path) -> None:
    results = run(
        """
with join() as c:
    data = np.ones(1 << 19)
    c.allreduce(data)
    if rank == 2:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            c.allreduce(data)
    except errors.PeerError as error:  # of the death, not of the timeout
        assert "rank 2" in str(error) and "died" in str(error), error
        try:
            c.barrier()
        except errors.PeerError as again:
            assert "broken" in str(again)
            print("told twice")
""",
        3,
        shm,
    )
    assert [status for status, _, _ in results] == [0, 0, -signal.SIGKILL], results
    assert [out.strip() for _, out, _ in results[:2]] == ["told twice"] * 2


def test_an_error_of_one_rank_alone_is_an_error_on_the_others_at_once(shm: Path) -> None:
    # Rank 1 has no memory for what the algorithm keeps beside the array.
    out = check(
        """
import resource
with join(timeout=50) as node:
    array = np.ones(8 << 20)
    node.barrier()
    if rank == 0:
        tell("in the allreduce", str(os.getpid()))
    else:
        until_asleep(wait_for("in the allreduce"))
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        node.allreduce(array, algorithm="recursive_doubling")
    except (errors.Error, MemoryError) as error:  # of the other rank, not of the timeout
        print(type(error).__name__, "rank 1 could not go on" in str(error))
""",
        2,
        shm,
    )
    assert out == ["PeerError True", "MemoryError False"]


def test_a_rank_that_dies_while_others_join_is_named(shm: Path) -> None:
    results = run(
        """
def die_once_both_have_joined():
    wanted = [int(wait_for("rank 0")).to_bytes(4, "little"), os.getpid().to_bytes(4, "little")]
    while True:  # until the segment names both processes
        # It has no name: this process has it open.
        for number in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{number}").startswith(directory):
                    continue
                with open(f"/proc/self/fd/{number}", "rb") as file:
                    begin = file.read(1 << 20)
            except OSError:
                continue
            if all(pid in begin for pid in wanted):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
if rank == 0:
    tell("rank 0", str(os.getpid()))
elif rank == 1:
    threading.Thread(target=die_once_both_have_joined, daemon=True).start()
else:
    sys.exit()
try:
    join(timeout=50)
except errors.PeerError as error:
    print(error)
""",
        3,
        shm,
    )
    assert results[1][0] == -9
    assert "rank 1 (process" in results[0][1], results
    assert "died" in results[0][1], results
    assert not list(shm.iterdir())


def test_abort_ends_calls_under_way(shm: Path) -> None:
    out = check(
        """
node = join(timeout=50)
node.set_timeout(40)
if rank == 0:
    threading.Timer(0.3, node.abort).start()
else:
    wait_for("the end")
try:
    node.barrier()
except errors.PeerError as error:
    tell("the end")
    print("rank 0 aborted it" in str(error))
""",
        2,
        shm,
    )
    assert out == ["True", "True"]


def test_a_rank_that_does_not_come_is_named_after_the_timeout(shm: Path) -> None:
    results = run(
        """
with join() as c:
    if rank == 1:
        wait_for("the error")
    else:
        c.set_timeout(1.0)
        try:
            c.allreduce(np.ones(3))
        except errors.PeerError as error:
            print(error)
        tell("the error")
""",
        2,
        shm,
    )
    assert "not arrived: 1" in results[0][1], results


def test_calls_that_do_not_match_are_named(shm: Path) -> None:
    out = check(
        """
with join() as c:
    try:
        c.allreduce(np.ones(10 + rank))
    except errors.UsageError as error:
        print(error)
""",
        2,
        shm,
    )
    for text in out:
        assert "10 float64 elements, sum" in text
        assert "11 float64 elements, sum" in text


def test_roots_that_do_not_match_are_named(shm: Path) -> None:
    """In calls from which both ranks leave early."""
    out = check(
        """
for number, call in enumerate((
    lambda c: c.broadcast(np.ones(4), root=rank),
    lambda c: c.reduce(np.ones(4), root=1 - rank),
    lambda c: c.reduce(np.ones(4), root=1 - rank, algorithm="leader"),
)):
    with Communicator(f"{job} {number}", rank, size, directory=directory) as c:
        try:
            call(c)
            c.barrier()
        except errors.UsageError as error:
            print(error)
""",
        2,
        shm,
    )
    for text in out:
        sent, reduced, led = text.splitlines()
        assert "from rank 0" in sent and "from rank 1" in sent
        assert "to rank 0" in reduced and "to rank 1" in reduced
        assert "to rank 0, by leader" in led and "to rank 1, by leader" in led


def test_types_and_algorithms_that_do_not_match_are_named(shm: Path) -> None:
    out = check(
        """
mine = np.ones(4, "f4" if rank == 0 else "i4")
either = Operation(lambda left, right: left)
wide = np.ones(4, "f8" if rank == 0 else "f4")
for number, call in enumerate((
    lambda c: (c.broadcast(mine), c.barrier()),
    lambda c: c.allgather(mine),
    lambda c: c.allreduce(wide, either),
    lambda c: c.allreduce(np.ones(4), algorithm="ring" if rank == 0 else "leader"),
)):
    with Communicator(f"{job} {number}", rank, size, directory=directory) as c:
        try:
            call(c)
        except errors.UsageError as error:
            print(error)
""",
        2,
        shm,
    )
    for text in out:
        moved, gathered, reduced, by = text.splitlines()
        assert "bytes of float32" in moved and "bytes of int32" in moved
        assert "bytes of float32" in gathered and "bytes of int32" in gathered
        assert "elements of 8 bytes" in reduced and "elements of 4 bytes" in reduced
        assert "sum, by ring" in by and "sum, by leader" in by


def test_bad_arrays_are_refused_before_anything_is_sent(shm: Path) -> None:
    check(
        """
with join() as c:
    grid = np.ones((4, 4))
    frozen = np.ones(4)
    frozen.flags.writeable = False
    for call in (
        lambda: c.allreduce(grid[:, 1]),
        lambda: c.allreduce(frozen),
        lambda: c.allreduce(np.ones(4), out=np.ones(5)),
        lambda: c.allreduce(np.array(["a"], dtype=object), Operation(np.add)),
        lambda: c.allreduce(np.array(["a"])),
        lambda: c.broadcast(np.zeros(2, [("name", object)])),
        lambda: c.broadcast(frozen, root=1 - rank),
        lambda: c.allreduce(grid.reshape(-1)[:8], out=grid.reshape(-1)[4:12]),
        lambda: c.broadcast(np.ones(3), root=2),
        lambda: c.reduce_scatter(np.ones(3)),
        lambda: c.reduce_scatter(np.ones(4), out=np.ones(3)),
        lambda: c.reduce_scatter(np.ones(4), out=np.ones(2, "f4")),
        lambda: c.reduce_scatter(np.ones(4), counts=[4]),
        lambda: c.reduce_scatter(np.ones(4), counts=[1, 2]),
        lambda: c.reduce_scatter(np.ones(4), counts=[5, -1]),
        lambda: c.reduce_scatter(grid, out=grid.reshape(-1)[1:9]),
        lambda: c.allreduce(np.ones(2), "mean"),
        lambda: c.allreduce(np.ones(2, complex), "max"),
        lambda: c.empty(1 << 40),
    ):
        try:
            call()
        except errors.UsageError:
            pass
        else:
            sys.exit("accepted")
    assert c.allreduce(np.ones(2))[0] == 2
""",
        2,
        shm,
    )


def test_a_forked_child_is_refused_and_the_parent_goes_on(shm: Path) -> None:
    check(
        """
with join() as c:
    child = os.fork()
    if child == 0:
        try:
            c.barrier()
        except errors.UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    c.barrier()
""",
        2,
        shm,
    )


def test_a_forked_child_has_zeros_where_shared_arrays_were(shm: Path) -> None:
    check(
        """
with join() as c:
    array = c.empty(5000, "f4")
    array[:] = 3
    child = os.fork()
    if child == 0:
        zeros = not array.any()
        array[:] = 4
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(7 if (array == 4).all() else 1)
        right = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 7
        os._exit(7 if zeros and right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (c.allreduce(array) == 3 * size).all()
""",
        2,
        shm,
    )


def test_a_limit_of_file_sizes_bounds_arenas_or_is_named(shm: Path) -> None:
    check(
        """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
limit(200 << 20)
with Communicator(job + "small", rank, size, directory=directory, window_bytes=16 << 20) as c:
    assert (c.allreduce(c.empty(1000) * 0 + 1) == size).all()
    try:
        c.empty(30 << 20)
    except errors.UsageError as error:
        assert "ulimit -f" in str(error), error
    else:
        sys.exit("more than the limit")
limit(1 << 20)
try:
    Communicator(job + "none", rank, size, directory=directory)
except errors.IoError as error:
    assert "ulimit -f" in str(error), error
else:
    sys.exit("no error")
""",
        2,
        shm,
    )


def test_a_name_is_free_again_when_a_communicator_was_left(shm: Path) -> None:
    check(
        """
for _ in range(150):
    with join(timeout=60, window_bytes=1 << 20, arena_bytes=1 << 20) as c:
        pass
""",
        3,
        shm,
    )


def test_waiting_costs_next_to_nothing(shm: Path) -> None:
    out = check(
        """
with join() as c:
    c.barrier()
    if rank == 0:
        time.sleep(0.4)
    begin, used = time.monotonic(), time.thread_time()
    c.allreduce(np.ones(1000))
    print((time.thread_time() - used) / max(0.4, time.monotonic() - begin))
""",
        4,
        shm,
    )
    # Threads that spun would take all of the time that they get.
    assert sum(float(text) for text in out[1:]) < 0.25


def test_torchrun_variables_say_who_joins(shm: Path) -> None:
    check(
        """
os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                  LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT="1",
                  TORCHELASTIC_RUN_ID=job)
first, second = Communicator(directory=directory), Communicator(directory=directory)
assert (first.rank, first.size) == (rank, size)
assert first.allreduce(np.ones(1))[0] + second.allreduce(np.ones(1))[0] == 2 * size
""",
        2,
        shm,
    )


def test_timeouts_of_any_length_are_kept_and_impossible_ones_refused(shm: Path) -> None:
    check(
        """
import math
for seconds in (math.inf, 1e10, 1e300, 1e-12):
    with Communicator(f"long {rank}", 0, 1, directory=directory, timeout=seconds) as node:
        node.barrier()
with join() as node:
    for seconds in (math.inf, 1e10, 60.0):
        node.set_timeout(seconds)
        if rank == 1:
            time.sleep(0.1)
        assert node.allreduce(np.ones(3))[0] == size
    for seconds, text in ((math.nan, "nan"), (0.0, "0"), (-2.5, "-2.5"), (-math.inf, "-inf")):
        for call in (node.set_timeout, lambda t: Communicator("no", 0, 1, timeout=t)):
            try:
                call(seconds)
            except errors.UsageError as error:
                assert str(error).endswith(f"more than 0 seconds, not {text}"), error
            else:
                raise AssertionError(seconds)
    node.barrier()
""",
        2,
        shm,
    )
