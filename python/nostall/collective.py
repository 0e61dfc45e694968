"""Collectives of the ranks of one node, over shared memory, in the order in which ranks arrive.

    from nostall.collective import Communicator

    with Communicator() as node:             # rank, size and job from torchrun, mpirun or srun
        gradients = node.empty(1 << 20, np.float32)   # shared memory: reduced where it is
        node.allreduce(gradients)

All ranks call the same operations in the same order with arrays of the same size and type; if one
does not, all ranks raise UsageError, which names both calls. If a rank dies, or does not arrive
within the timeout, all ranks raise PeerError, and the communicator cannot be used any more.

Algorithms (`algorithm=`): "cooperative" (nostall's own), "arrival_leader" and "arrival_chain"
([Mohammadalizadehbakhtevari 2021, alg. 4.1 and 5.1]), "leader", "recursive_doubling", "ring", "rsa",
"binomial".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nostall import _native
from nostall.base._options import value
from nostall.errors import UsageError
from nostall.job._place import find_place

__all__ = ["ALGORITHMS", "OPERATIONS", "Communicator", "Operation"]

Algorithm = Literal[
    "cooperative",
    "arrival_leader",
    "arrival_chain",
    "leader",
    "recursive_doubling",
    "ring",
    "rsa",
    "binomial",
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
OPERATIONS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")
Array = NDArray[Any]

_TYPES = {
    np.dtype(name): name
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}
# Communicators that one job makes without naming them, in order.
_numbers = itertools.count()


@dataclass(frozen=True)
class Operation:
    """An operation that the user defines.

    `function(left, right)` returns the elementwise result for two arrays of the same length; it must
    be associative. Unless it is `commutative`, results keep the order of ranks. The collective raises
    what the function raises; its result is then undefined on all ranks.
    """

    function: Callable[[Array, Array], Array]
    commutative: bool = False


class Communicator:
    """The ranks of one node.

    Args:
        job: a text that all ranks of this communicator pass, and no other communicator. By default the
            communicators of a job are numbered in the order in which each rank makes them.
        rank: of this process on the node; by default from torchrun, mpirun or srun.
        size: how many ranks the node has; by default as `rank`.
        order: "fixed" gives the same bits for any order of arrival and by any algorithm (a left fold in
            the order of ranks); "any" lets large floating-point sums differ from call to call in their
            last bits.
        timeout: seconds after which a rank that does not arrive is an error.
        window_bytes: size of the shared memory through which early ranks run ahead; up to two are used.
        arena_bytes: limit on the arrays of `empty` of one rank; less where `ulimit -f` and `-v` say so.
        directory: where shared memory is.

    Calls from several threads take turns. A forked child cannot use its parent's communicator.
    """

    def __init__(
        self,
        job: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        *,
        order: Literal["any", "fixed"] = "any",
        timeout: float = 600.0,
        window_bytes: int = 64 << 20,
        arena_bytes: int = 1 << 30,
        directory: str = "/dev/shm",
    ) -> None:
        if (rank is None) != (size is None):
            raise UsageError("give both rank and size, or neither")
        if order not in ("any", "fixed"):
            raise UsageError(f'order={order!r} is neither "any" nor "fixed"')
        if rank is None or size is None:
            world = find_place()
            rank, size = world.local_rank, world.local_world_size
            job = f"{world.job} {next(_numbers) if job is None else job}"
        if job is None:
            raise UsageError("with rank and size give job, the same text on all ranks")
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} is not in a communicator of {size}")
        self._fixed = order == "fixed"
        self._reducers: dict[tuple[str, np.dtype[Any]], _native.Reducer] = {}
        self._open: _native.Communicator | None = _native.open_communicator(
            job,
            rank,
            size,
            timeout,
            window_bytes,
            arena_bytes,
            directory,
            str(value("collective.table")),
        )
        self.rank = rank
        self.size = size

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the communicator. Arrays from `empty` stay valid."""
        if self._open is not None:
            self._open.leave()
        self._open = None

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of this rank, from the next call on."""
        self._live().set_timeout(seconds)

    def abort(self, what: str = "aborted it") -> None:
        """Ends the communicator for all ranks: calls under way, and later ones, raise PeerError.

        `what` is the part of that error that says what this rank did.
        """
        self._live().abort(what)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._live().barrier()

    def allreduce(
        self,
        array: Array,
        op: str | Operation = "sum",
        out: Array | None = None,
        *,
        algorithm: Algorithm = "cooperative",
    ) -> Array:
        """The ranks' arrays combined, on all ranks: in `out`, or in place without one."""
        target = array if out is None else out
        self._same(array, target)
        source, result = _addresses(array, target)
        self._live().allreduce(
            source,
            result,
            array.size,
            self._reducer(op, array.dtype),
            algorithm,
            self._fixed,
        )
        return target

    def reduce(
        self,
        array: Array,
        op: str | Operation = "sum",
        root: int = 0,
        out: Array | None = None,
        *,
        algorithm: Algorithm = "cooperative",
    ) -> Array | None:
        """The ranks' arrays combined, on `root` alone: in `out`, or in place without one.

        Other ranks leave when they have given their part, get None, and keep their arrays.
        """
        target = array if out is None else out
        is_root = self.rank == root
        if is_root:
            self._same(array, target)
            source, result = _addresses(array, target)
        else:
            source, result = _address(array), 0
        self._live().reduce(
            source,
            result,
            array.size,
            self._reducer(op, array.dtype),
            self._root(root),
            algorithm,
            self._fixed,
        )
        return target if is_root else None

    def broadcast(
        self,
        array: Array,
        root: int = 0,
        *,
        algorithm: Literal["cooperative", "binomial"] = "cooperative",
    ) -> Array:
        """Overwrites `array` with that of `root`, which may leave before the others arrive."""
        self._live().broadcast(
            _address(array, writable=self.rank != root),
            array.nbytes,
            self._root(root),
            _TYPES.get(array.dtype, ""),
            algorithm,
        )
        return array

    def reduce_scatter(
        self,
        array: Array,
        op: str | Operation = "sum",
        out: Array | None = None,
        *,
        counts: Sequence[int] | None = None,
    ) -> Array:
        """This rank's part of the ranks' arrays combined.

        `array` has `size` parts of equal length, flat, or with `counts` one of counts[r] elements for
        each rank r. `out` may be `array`, whose beginning then gets the result.
        """
        if counts is None and array.size % self.size != 0:
            raise UsageError(f"{array.size} elements cannot be shared equally by {self.size} ranks")
        each = [array.size // self.size] if counts is None else [int(count) for count in counts]
        if counts is not None and (
            len(each) != self.size or min(each) < 0 or sum(each) != array.size
        ):
            raise UsageError(
                f"counts={each} are not {self.size} numbers of elements, one of each rank, whose sum "
                f"is that of the array, {array.size}"
            )
        mine = each[self.rank] if counts is not None else each[0]
        target = np.empty(mine, array.dtype) if out is None else out
        if target.dtype != array.dtype or (target.size != mine and target is not array):
            raise UsageError(
                f"out has {target.size} elements of {target.dtype}; it needs "
                f"{mine} of {array.dtype}"
            )
        source, result = _addresses(array, target)
        self._live().reduce_scatter(
            source,
            result,
            each,
            self._reducer(op, array.dtype),
            self._fixed,
        )
        return target if target is not array else array.reshape(-1)[:mine]

    def allgather(self, array: Array, out: Array | None = None) -> Array:
        """All ranks' arrays, which have the same shape: `out` has the shape (size, *shape)."""
        target = np.empty((self.size, *array.shape), array.dtype) if out is None else out
        if target.dtype != array.dtype or target.size != array.size * self.size:
            raise UsageError(
                f"out has {target.size} elements of {target.dtype}; it needs "
                f"{array.size * self.size} of {array.dtype}"
            )
        source, result = _addresses(array, target)
        self._live().allgather(
            source,
            result,
            array.nbytes,
            _TYPES.get(array.dtype, ""),
        )
        return target

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        """An array in shared memory: if all ranks pass such arrays they are reduced where they are.

        Freed with the last reference to it. Raises UsageError if it does not fit `arena_bytes`.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        memory = cast("NDArray[np.uint8] | None", _native.allocate_shared(self._live(), size))
        if memory is None:
            raise UsageError(
                f"no room for {size} bytes of shared memory; raise arena_bytes, or the limits that it "
                "keeps (ulimit -f and -v)"
            )
        array: Array = memory.view(kind).reshape(shape)
        return array

    def stats(self) -> dict[str, float]:
        """Calls, bytes given, sleeps (waits longer than the spin) and the seconds slept."""
        stats = self._live().stats()
        return {
            "calls": stats.calls,
            "bytes": stats.bytes,
            "sleeps": stats.sleeps,
            "wait_seconds": stats.wait_ns / 1e9,
        }

    def _live(self) -> _native.Communicator:
        if self._open is None:
            raise UsageError("this communicator was closed")
        return self._open

    def _root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} is not in a communicator of {self.size}")
        return root

    @staticmethod
    def _same(array: Array, target: Array) -> None:
        if target is not array and (target.dtype != array.dtype or target.size != array.size):
            raise UsageError(
                f"out has {target.size} elements of {target.dtype}; the array has {array.size} of "
                f"{array.dtype}"
            )

    def _reducer(self, op: str | Operation, kind: np.dtype[Any]) -> _native.Reducer:
        if isinstance(op, Operation):
            return _native.Reducer(_combine_with(op.function, kind), kind.itemsize, op.commutative)
        found = self._reducers.get((op, kind))
        if found is None:
            if kind not in _TYPES:
                raise UsageError(f"{op} is not defined for {kind}; pass an Operation")
            found = self._reducers[op, kind] = _native.Reducer(op, _TYPES[kind])
        return found


def _combine_with(
    function: Callable[[Array, Array], Array], kind: np.dtype[Any]
) -> Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]:
    def combine(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> None:
        operand = left.view(kind)
        operand.flags.writeable = False
        result = right.view(kind)
        result[:] = function(operand, result)

    return combine


def _addresses(array: Array, target: Array) -> tuple[int, int]:
    result = _address(target, writable=True)
    return result if target is array else _address(array), result


def _address(array: Array, writable: bool = False) -> int:
    flags = array.flags
    if not flags.c_contiguous:
        raise UsageError("the array is not contiguous; pass numpy.ascontiguousarray of it")
    if writable and not flags.writeable:
        raise UsageError("the array that gets the result is read-only")
    if array.dtype.hasobject:
        raise UsageError("arrays of Python objects cannot be shared")
    return _native.address_of(array)
