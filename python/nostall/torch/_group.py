"""The torch.distributed backend "nostall": node-local tensors through nostall.collective.

    torch.distributed.init_process_group("nostall")

CPU tensors of a group whose ranks share a node are reduced, gathered and broadcast over shared
memory; a group over several nodes reduces within each node, then among their local leaders by Gloo,
in parts so that both overlap (native/collective/two_level.h). Everything else is delegated to torch's
own backends: point to point, scatter and sparse tensors to Gloo, GPU tensors to NCCL.

Operations of a group run in the order of their calls; asynchronous ones on a thread of the group.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import re
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.futures import Future

from nostall import _native
from nostall.base._options import in_force
from nostall.collective import Communicator
from nostall.errors import PeerError, UsageError
from nostall.job._cluster import node_identity
from nostall.job._meeting import meet
from nostall.torch import _ends as ends
from nostall.torch._aborts import Aborts, Doing
from nostall.torch._between import LeaderTensor
from nostall.torch._callbacks import Callbacks, serve
from nostall.torch._calls import Calls, ended_with_program
from nostall.torch._launch import fill_environment
from nostall.torch._mesh import Registered, connect, hang_up, registered
from nostall.torch._waits import Wait, give

_TYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_OPERATIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
# Gloo adds booleans as bytes; a mean of zeros and ones is rounded towards zero.
_OF_BOOLEANS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.AVG: ReduceOp.MIN}
# What older releases of torch call them.
_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
_MESSAGES = ("send", "recv", "recv_anysource")
_BITWISE = ("band", "bor", "bxor")
# Where errors of the node's communicator name ranks (native/collective).
_RANKS_OF_NODE = re.compile(r"\b(rank |not arrived: )(\d+(?:, \d+)*)")
# Between nodes a message travels in parts of this size, each as soon as its node has reduced it.
_PART_BYTES = 4 << 20
# Half of a process's address space: each process maps the bytes of all ranks of its node.
_MOST_SHARED_BYTES = 1 << 46
# Seconds after which a thread that does not end is left behind at the end of the program.
_LAST_WAIT = 5.0
# Seconds for threads to leave torch's native code at the end, where it would end the process.
_LAST_STEPS = 0.05
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Options:
    """`pg_options` of the backend; `order` is that of NOSTALL_ORDER where it is not given.

    "fixed": sums have the same bits for any order of arrival; within a node they are a left fold in
    the order of ranks. "any": large sums of floats may differ from run to run in their last bits.

    `shared_bytes` bounds each rank's tensors in shared memory (`nostall.torch.empty_shared`, DDP's
    buckets); it is the same on all ranks. Only what is used takes memory.

    Raises UsageError for another `order`, or if `shared_bytes` is not an int from 0 to 2**46.
    """

    order: Literal["any", "fixed"] = in_force("torch.order")
    shared_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.order, str) or self.order not in ("any", "fixed"):
            raise UsageError(f'order={self.order!r} is neither "any" nor "fixed"')
        size = self.shared_bytes
        whole = hasattr(size, "__index__") and not isinstance(size, bool)
        if not whole or not 0 <= size <= _MOST_SHARED_BYTES:
            raise UsageError(
                f"shared_bytes={size!r} is not a number of bytes: give an int from 0 to 2**46, "
                "such as 1 << 30"
            )


class _Work(dist.Work):  # type: ignore[misc]
    """An operation under way; wait() raises what it raised. Waits count in `calls`.

    Callbacks of its future run in `callbacks`: in the thread that ends it, one that waits for another
    operation of the group would wait for ever.
    """

    def __init__(
        self, name: str, future: Future[list[torch.Tensor]], calls: Calls, callbacks: Callbacks
    ) -> None:
        super().__init__()
        self._name = name
        self._future = future
        self._calls = calls
        self._callbacks = callbacks

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises PeerError if a timeout is given and passes; the operation continues."""
        if not self._future.done():
            with Wait(self._name):
                self._wait(timeout)
        self._future.wait()  # raises the operation's error, if any
        return True

    def _wait(self, timeout: timedelta | None) -> None:
        if _is_set(timeout):
            assert timeout is not None
            over = threading.Event()
            self._future.add_done_callback(lambda _: over.set())
            if not over.wait(timeout.total_seconds()):
                raise PeerError(
                    f"the operation waited for was not done after {timeout.total_seconds():g} s; "
                    "it goes on: wait again, or raise the timeout of this wait"
                )
        if not self._future.done():
            with self._calls.waiting():
                self._future.wait()

    def is_success(self) -> bool:
        return bool(self._future.done()) and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Future[list[torch.Tensor]]:
        # Native code (DDP's reducer) sees the error of this future. It takes a Python Future with an
        # exception for one with a result.
        future = self._future
        ended = future if future.done() else self._callbacks.after(future)
        return give(ended, self._name, lambda _: future.value())

    def result(self) -> list[torch.Tensor]:
        return list(self._future.value())


class _Unfinished:
    """Collectives over Gloo that may be under way, up to the wait for them.

    They are kept here: what is left to do at the end of one is done also where the program dropped it.
    There is no lock, so a signal's handler may end the group at any step.
    """

    def __init__(self) -> None:
        self._works: set[_Delegated] = set()

    def add(self, work: _Delegated) -> None:
        self.pending()
        self._works.add(work)

    def discard(self, work: _Delegated) -> None:
        self._works.discard(work)

    def clear(self) -> None:
        self._works.clear()

    def pending(self) -> list[_Delegated]:
        """Those that have not ended; others are dropped."""
        for work in list(self._works):
            if work.has_ended():
                self._works.discard(work)
        return list(self._works)


class _Delegated(dist.Work):  # type: ignore[misc]
    """An operation of Gloo. If a rank aborts the group, waits end with an error that names it.

    A message has no future and is complete once it was waited for, for at most `limit`, because Gloo
    applies to messages the timeout of making connections. Other operations have a timeout of their
    own, and are in `unfinished`. `last` is called once, when the operation has ended well, and gives
    its result.
    """

    def __init__(
        self,
        aborts: Aborts,
        calls: Calls,
        work: Any,
        doing: Doing,
        unfinished: _Unfinished | None = None,
        *,
        limit: timedelta | None = None,
        last: Callable[[], list[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self._aborts = aborts
        self._calls = calls
        self._work = work
        self._doing = doing
        self._unfinished = unfinished
        self._limit = limit
        self._last = last
        self._result: list[torch.Tensor] | None = None
        self._lock = threading.RLock()  # a signal's handler may call amid _finish
        self._is_watched = limit is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout if _is_set(timeout) else self._limit
        done, began = True, time.monotonic()
        with self._calls.if_open() as is_open:
            if is_open:
                try:
                    with self._aborts.watching(self._doing), Wait(self._doing.name):
                        done = bool(self._work.wait() if limit is None else self._work.wait(limit))
                finally:
                    # It goes on if only the wait ended. Not all that failed say that they are complete.
                    goes_on = limit and time.monotonic() - began >= limit.total_seconds()
                    if self._unfinished is not None and not goes_on:
                        self._unfinished.discard(self)
            elif not self.is_success():
                raise ended_with_program()
        self._finish()
        return done

    def wait_for_result(self) -> None:
        """As wait(), but not for callbacks: Gloo runs them before its work is complete."""
        try:
            future = self._work.get_future()
        except RuntimeError:  # some of Gloo's have none
            self.wait()
            return
        if not future.done():
            with self._calls.if_open() as is_open:
                if not is_open:
                    raise ended_with_program()
                with self._aborts.watching(self._doing), Wait(self._doing.name):
                    future.wait()
        self._finish()

    def is_completed(self) -> bool:
        if self.has_ended():
            return True
        self._watch()  # the caller may be waiting like this
        return False

    def has_ended(self) -> bool:
        """As is_completed(), for who does not wait."""
        if not self._work.is_completed():
            return False
        if self.is_success():
            self._finish()
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_completed() and self._work.is_success())

    def exception(self) -> BaseException | None:
        error: BaseException | None
        try:
            error = self._work.exception()
        except TypeError:  # releases of torch that cannot convert it
            error = self._raised()
        try:
            if isinstance(error, RuntimeError):
                self._fail(error)
        except RuntimeError as named:
            return named
        return error

    def _raised(self) -> BaseException | None:
        """What a wait raises, of an operation that has ended."""
        if not self._work.is_completed() or self._work.is_success():
            return None
        try:
            self._work.wait()
        except RuntimeError as error:
            return error
        return None

    def get_future(self) -> Future[Any]:
        self._watch()
        return give(self._work.get_future(), self._doing.name, self._value)

    def result(self) -> list[torch.Tensor]:
        if self._last is not None:
            self.wait()
        return list(self._work.result()) if self._result is None else self._result

    def synchronize(self) -> None:
        self._work.synchronize()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    _source_rank = source_rank

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            with suppress(RuntimeError):  # some of Gloo's have no future; a wait is watched anyhow
                self._aborts.watch(self._work.get_future())

    def _value(self, done: Future[Any]) -> Any:
        try:
            value = done.value()
        except RuntimeError as error:
            self._fail(error)
        self._finish()
        return value if self._result is None else self._result

    def _finish(self) -> None:
        with self._lock:
            if self._last is not None:
                self._result, self._last = self._last(), None

    def _fail(self, error: RuntimeError) -> NoReturn:
        """Explains the error, by the store unless the group ends with the program."""
        with self._calls.if_open() as is_open:
            self._aborts.fail(error, self._doing, asks=is_open)


# Groups that were not dropped. Python calls this before it ends threads at any point.
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


_had_groups = threading.Event()


@atexit.register
def _end_with_program() -> None:
    for group in list(_groups):
        group.end_with_program()
    # Threads may still be in native code of torch or Gloo, also for groups that were destroyed. A
    # program without a group ends as if nostall were not there.
    if _had_groups.is_set() and not _native.keep_ended_threads():
        time.sleep(_LAST_STEPS)


def _keep_for_ever(one: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _keep_all() -> None:
    """In a forked child, where Gloo would wait for threads that only the parent has."""
    for group in list(_groups):
        group._calls.renew()
        _keep_for_ever(group)


os.register_at_fork(after_in_child=_keep_all)


class Group(ProcessGroup):  # type: ignore[misc]
    """One process group. Made by torch, see register_backend."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, options: Options
    ) -> None:
        super().__init__(rank, size)
        _had_groups.set()
        self._rank, self._size, self._timeout = rank, size, timeout
        self._options = options
        self._name = ""
        self._process = os.getpid()
        self._reducers: dict[tuple[str, str], _native.Reducer] = {}
        try:
            met = meet(
                store, rank, size, "group", node_identity().encode(), timeout.total_seconds()
            )
        except PeerError as error:
            raise PeerError(f"{error}, or give init_process_group a longer timeout") from error
        # Torch gives one name, and hence one store, to groups whose ranks do not know each other. And
        # it may have entries of earlier groups of this name.
        store = HashStore() if size == 1 else PrefixStore(f"nostall {met.number}", store)
        self._store = store
        nodes = [part.decode() for part in met.parts]
        local = self._local = [r for r in range(size) if nodes[r] == nodes[rank]]
        try:
            self._node = Communicator(
                f"{met.number} {local[0]}",
                local.index(rank),
                len(local),
                order=options.order,
                timeout=timeout.total_seconds(),
                arena_bytes=int(options.shared_bytes),
            )
        except PeerError as error:
            raise self._renumbered(error) from error
        self._limit = timeout
        # All ranks take part now. Later they need not: two of them may exchange a message.
        self._inner: dict[str, Any] = {}
        self._registered: list[Any] = []
        self._delegated = _Unfinished()
        self._keep("cpu", connect(PrefixStore("nostall cpu", store), rank, size, timeout))
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        self._fixed = options.order == "fixed"
        leaders = [nodes.index(name) for name in dict.fromkeys(nodes)]
        self._one_node = len(leaders) == 1
        self._aborts = Aborts(
            store, rank, size, self._end_waiting, self._global_rank, timeout.total_seconds()
        )
        self._leaders: Any = None
        if not self._one_node and rank in leaders:
            among = PrefixStore("nostall leaders", store)
            self._leaders = connect(among, leaders.index(rank), len(leaders), timeout)
        if size > 1:
            ends.publish(store, rank)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: deque[None] = deque()  # an entry for each operation of ours
        # Both allow for a signal's handler that uses or destroys the group while a call is inside.
        self._lock = threading.RLock()
        self._is_closed = False
        self._calls = Calls()
        self._callbacks = Callbacks()
        self._thread: threading.Thread | None = None
        # Run if a group is dropped without shutdown().
        weakref.finalize(self, self._queue.put, None).atexit = False
        weakref.finalize(self, self._callbacks.end).atexit = False
        _groups.add(self)

    # What torch reads of a group.

    def getBackendName(self) -> str:
        return "nostall"

    def name(self) -> str:
        return "nostall"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of all later operations."""
        self._timeout = timeout
        for backend in self._backends():
            if hasattr(backend, "set_timeout"):  # not in every release
                backend.set_timeout(timeout)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def empty(self, shape: torch.Size, kind: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in shared memory, see nostall.torch.empty_shared."""
        size = shape.numel() * kind.itemsize
        memory = _native.allocate_shared(self._node._live(), size)
        if memory is None:
            raise UsageError(
                f"no room for {size} bytes of shared memory; raise the group's "
                f"GroupOptions(shared_bytes=...), now {self._options.shared_bytes}, or the limits that "
                "it keeps (ulimit -f and -v)"
            )
        return torch.from_numpy(memory).view(kind).view(shape)

    # Ours.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._reduce_all(
            "allreduce", tensors, dist.AllreduceOptions() if opts is None else opts
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        return self._reduce_all("allreduce_coalesced", tensors, opts)

    def _reduce_all(self, name: str, tensors: Tensors, opts: Any) -> Any:
        op = self._operation(opts.reduceOp, tensors)
        if op is None:
            return self._delegate(name, tensors, tensors, opts)
        average = opts.reduceOp.op == ReduceOp.AVG

        def work() -> list[torch.Tensor]:
            for tensor in tensors:
                flat = _contiguous(tensor)
                self._allreduce(flat, op)
                if average:
                    _divide(flat, self._size)
                _copy_back(tensor, flat)
            return list(tensors)

        return self._do(name, work, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = dist.ReduceOptions() if opts is None else opts
        op = self._operation(opts.reduceOp, tensors)
        if op is None or not self._one_node:
            return self._delegate_reduction("reduce", tensors, tensors[:1], opts, tensors)
        average = opts.reduceOp.op == ReduceOp.AVG

        def work() -> list[torch.Tensor]:
            flat = _contiguous(tensors[0])
            is_root = self._rank == opts.rootRank
            self._on_node(
                "reduce",
                flat.data_ptr(),
                flat.data_ptr() if is_root else 0,
                flat.numel(),
                self._reducer(op, flat),
                opts.rootRank,
                "cooperative",
                self._fixed,
            )
            if is_root:
                if average:
                    _divide(flat, self._size)
                _copy_back(tensors[0], flat)
            return list(tensors)

        return self._do("reduce", work, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = dist.BroadcastOptions() if opts is None else opts
        if not self._one_node or not _plain(tensors):
            return self._delegate("broadcast", tensors, tensors, opts)

        def work() -> list[torch.Tensor]:
            flat = _contiguous(tensors[0])
            self._on_node(
                "broadcast",
                flat.data_ptr(),
                flat.nbytes,
                opts.rootRank,
                _TYPES.get(flat.dtype, ""),
            )
            _copy_back(tensors[0], flat)
            return list(tensors)

        return self._do("broadcast", work, opts)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        flat_outputs = [t for group in outputs for t in group]
        mine = inputs[0]
        if not self._one_node or not _plain([*inputs, *flat_outputs]):
            return self._delegate("allgather", inputs, outputs, inputs, opts)
        # Others do not see what does not fit here, so all ways but an error would part the ranks.
        counts = [t.numel() for t in flat_outputs]
        fits = len(counts) == self._size and counts[self._rank] == mine.numel()
        if not fits or any(t.dtype != mine.dtype for t in flat_outputs):
            raise UsageError(
                f"the outputs of all_gather have {counts} elements of "
                f"{', '.join(sorted({str(t.dtype) for t in flat_outputs}))}; rank {self._rank} of "
                f"{self._size} gives {mine.numel()} of {mine.dtype}"
            )

        def work() -> list[torch.Tensor]:
            source = _contiguous(mine)
            targets = [_contiguous(t) for t in flat_outputs]
            for r, target in enumerate(targets):
                source = _apart(source, target, 0 if r == self._rank else None)
            self._on_node(
                "allgatherv",
                source.data_ptr(),
                [t.data_ptr() for t in targets],
                [t.nbytes for t in targets],
                _TYPES.get(mine.dtype, ""),
            )
            for output, target in zip(flat_outputs, targets, strict=True):
                _copy_back(output, target)
            return flat_outputs

        return self._do("allgather", work, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        return self._gather_single("all_gather_single", [output], [source], opts, output, source)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        name = "all_gather_single_coalesced"
        return self._gather_single(name, outputs, inputs, opts, outputs, inputs)

    # The same under the names of older releases.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        parts = list(inputs[0])
        counts = [t.numel() for t in parts]
        op = self._scatter_operation(opts, [*outputs, *parts])
        if op is None:
            return self._delegate_reduction("reduce_scatter", parts, outputs, opts, outputs, inputs)
        if len(parts) != self._size or counts[self._rank] != outputs[0].numel():
            raise UsageError(
                f"the input of reduce_scatter has blocks of {counts} elements; rank {self._rank} of "
                f"{self._size} gets {outputs[0].numel()}"
            )
        joined = torch.cat([t.detach().reshape(-1) for t in parts])
        return self._reduce_scatter([(outputs[0], joined, counts, op)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        name = "reduce_scatter_single"
        return self._scatter_single(name, [output], [source], opts, output, source)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        name = "reduce_scatter_single_coalesced"
        return self._scatter_single(name, outputs, inputs, opts, outputs, inputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        before = self._delegated.pending()
        # Gloo pairs the calls of ranks by their order, so this is not left to the group's thread.
        among = None if self._one_node else self._delegate("barrier", [], opts)

        def work() -> list[torch.Tensor]:
            for each in before:
                each.wait_for_result()
            if among is None:
                self._on_node("barrier")
            else:
                among.wait()
            return []

        return self._do("barrier", work, opts)

    # Delegated.

    def gather(self, outputs: Any, inputs: Tensors, opts: Any) -> Any:
        return self._delegate("gather", inputs, outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any) -> Any:
        return self._delegate("scatter", outputs, outputs, inputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        kind = inputs[0].dtype
        every = [*outputs, *inputs]
        if not _plain(every) or any(t.dtype != kind for t in every):
            return self._delegate("alltoall", inputs, outputs, inputs, opts)
        # Gloo's own alltoall takes lists of tensors of one size only.
        source = torch.cat([t.detach().reshape(-1) for t in inputs])
        counts = [t.numel() for t in outputs]
        target = source.new_empty(sum(counts))

        def distribute() -> list[torch.Tensor]:
            for output, part in zip(outputs, target.split(counts), strict=True):
                output.detach().copy_(part.view(output.shape))
            return list(outputs)

        sizes = counts, [t.numel() for t in inputs]
        return self._delegate(
            "alltoall_base", [source], target, source, *sizes, opts, last=distribute
        )

    def all_to_all_single(self, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> Any:
        return self._delegate("all_to_all_single", [source], output, source, *rest)

    def alltoall_base(self, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> Any:
        return self._delegate("alltoall_base", [source], output, source, *rest)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any) -> Any:
        return self._delegate("allgather_coalesced", inputs, outputs, inputs, opts)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._delegate("send", tensors, tensors, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._delegate("recv", tensors, tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._delegate("recv_anysource", tensors, tensors, tag)

    def monitored_barrier(self, *arguments: Any, **named: Any) -> Any:
        self._refuse()
        doing = Doing("monitored_barrier")
        with self._calls, self._aborts.watching(doing), Wait(doing.name):
            return self._inner_for("cpu").monitored_barrier(*arguments, **named)

    # Its end.

    def shutdown(self) -> None:
        """Leaves the group. Ends its threads, and Gloo's, when their work is done.

        Gloo is released although other objects may hold the group: objects that its threads hold
        would need the GIL while Python shuts down.
        """
        if os.getpid() != self._process:
            return  # it is the parent's
        self._end_threads(None)
        self._node.close()
        self._aborts.close()
        for backend in self._backends():
            backend.shutdown()
        self._drop()

    def abort(self) -> None:
        """Ends the group, and every operation under way with PeerError, on all ranks.

        Ranks that wait, within the node or over Gloo, get the error within a second, through the
        store or because this rank closes its connections; other ranks get it when they next wait. A
        receive from any source continues to its timeout, because Gloo cannot end it.
        """
        self._refuse_child()
        self._aborts.announce(self._rank)
        for backend in self._backends():
            backend.abort()
        self.shutdown()

    def end_with_program(self) -> None:
        """As shutdown(), but operations under way end now, with PeerError on all ranks of the node."""
        if os.getpid() != self._process:
            return
        is_called = self._calls.refuse()
        is_busy = len(self._under_way) > 0
        if is_busy:
            with suppress(UsageError):  # it was closed
                self._node._live().end_from_here(
                    "ended its program while an operation was under way"
                )
        if is_busy or is_called or self._aborts.is_waiting() or self._delegated.pending():
            for gloo in self._gloos():
                hang_up(gloo)
        if not self._calls.wait(_LAST_WAIT):
            _keep_for_ever(self)  # that thread is not woken any more
            return
        self._node.close()
        self._end_threads(_LAST_WAIT)
        self._aborts.close()
        if "cuda" not in self._inner:  # NCCL's end is torch's
            self._drop()

    def _end_threads(self, seconds: float | None) -> None:
        """Once they have done what they were given, which is waited for at most that long."""
        self._is_closed = True
        self._queue.put(None)  # also for a thread that is being started
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self._callbacks.end()
        self._callbacks.join(_LAST_WAIT)

    def _drop(self) -> None:
        """Drops the last reference to Gloo, which joins its threads."""
        self._delegated.clear()
        self._inner.clear()
        self._leaders = None
        for backend in self._registered:
            if isinstance(backend, Registered):
                backend.drop()
        self._registered.clear()

    # How.

    def _operation(self, op: Any, tensors: Tensors) -> str | None:
        """nostall's name of the operation, or None if torch's backends have to do it."""
        kind = tensors[0].dtype
        name = _OPERATIONS.get(_OF_BOOLEANS.get(op.op, op.op) if kind == torch.bool else op.op)
        if name is None or not _plain(tensors) or any(t.dtype != kind for t in tensors):
            return None
        if kind.is_complex and name not in ("sum", "prod"):
            return None
        if kind.is_floating_point and name in _BITWISE:
            return None
        return name if kind in _TYPES else None

    def _scatter_operation(self, opts: Any, tensors: Tensors) -> str | None:
        return self._operation(opts.reduceOp, tensors) if self._one_node else None

    def _reducer(self, op: str, tensor: torch.Tensor) -> _native.Reducer:
        key = (op, _TYPES[tensor.dtype])
        if key not in self._reducers:
            self._reducers[key] = _native.Reducer(*key)
        return self._reducers[key]

    def _allreduce(self, flat: torch.Tensor, op: str) -> None:
        if flat.dtype == torch.int16 and not self._one_node:  # Gloo has none
            wide = flat.int()
            self._allreduce(wide, op)
            flat.copy_(wide)
            return
        count, reducer, address = flat.numel(), self._reducer(op, flat), flat.data_ptr()
        if self._one_node:
            arguments = address, address, count, reducer, "cooperative", self._fixed
            self._on_node("allreduce", *arguments)
            return
        leaders = None
        if self._leaders is not None:
            among = dist.AllreduceOptions()
            among.reduceOp = next(k for k, v in _OPERATIONS.items() if v == op)
            among.timeout = self._limit
            leaders = LeaderTensor(flat, lambda part: self._leaders.allreduce([part], among))
        self._on_node(
            "two_level_allreduce", leaders, address, count, reducer, self._fixed, _PART_BYTES
        )

    def _scatter_single(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any, *arguments: Any
    ) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        scatters = []
        for output, source in zip(outputs, inputs, strict=True):
            op = self._scatter_operation(opts, [output, source])
            if op is None:
                return self._delegate_reduction(name, inputs, outputs, opts, *arguments)
            if source.numel() != output.numel() * self._size:
                raise UsageError(
                    f"the input of reduce_scatter has {source.numel()} elements; {self._size} ranks "
                    f"get {output.numel()} each"
                )
            scatters.append((output, source, [output.numel()], op))
        return self._reduce_scatter(scatters, opts)

    def _reduce_scatter(
        self, scatters: Sequence[tuple[torch.Tensor, torch.Tensor, list[int], str]], opts: Any
    ) -> Any:
        """Of (output, input, counts, operation): counts[r] elements for rank r, or one for each."""
        average = opts.reduceOp.op == ReduceOp.AVG

        def work() -> list[torch.Tensor]:
            for output, source, counts, op in scatters:
                flat, target = _contiguous(source), _contiguous(output)
                before = sum(counts[: self._rank]) if len(counts) > 1 else self._rank * counts[0]
                flat = _apart(flat, target, -before * flat.element_size())
                reducer = self._reducer(op, flat)
                self._on_node(
                    "reduce_scatter",
                    flat.data_ptr(),
                    target.data_ptr(),
                    counts,
                    reducer,
                    self._fixed,
                )
                if average:
                    _divide(target, self._size)
                _copy_back(output, target)
            return [output for output, *_ in scatters]

        return self._do("reduce_scatter_single", work, opts)

    def _end_waiting(self) -> None:
        """Aborts this rank's communicator, and ends the ranks that wait for it."""
        # On one node the aborting rank ends all waits: the errors name the first that does so.
        if not self._one_node or self._aborts.by == self._rank:
            with suppress(UsageError):  # it was closed
                self._node.abort()
        for gloo in self._gloos():
            hang_up(gloo)

    def _gloos(self) -> list[Any]:
        inner = [gloo for device, gloo in self._inner.items() if device == "cpu"]
        return [*inner, *([] if self._leaders is None else [self._leaders])]

    def _backends(self) -> list[Any]:
        """The backends of torch that this group uses."""
        return [*self._inner.values(), *([] if self._leaders is None else [self._leaders])]

    def _gather_single(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any, *arguments: Any
    ) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if not self._one_node or not _plain([*outputs, *inputs]):
            return self._delegate(name, inputs, *arguments, opts)

        def work() -> list[torch.Tensor]:
            for output, source in zip(outputs, inputs, strict=True):
                target = _contiguous(output)
                self._allgather(_contiguous(source), target)
                _copy_back(output, target)
            return list(outputs)

        return self._do(name, work, opts)

    def _allgather(self, source: torch.Tensor, output: torch.Tensor) -> None:
        if output.nbytes != source.nbytes * self._size or output.dtype != source.dtype:
            raise UsageError(
                f"the output of all_gather has {output.numel()} elements of {output.dtype}; "
                f"{self._size} ranks give {source.numel()} of {source.dtype} each"
            )
        source = _apart(source, output, self._rank * source.nbytes)
        self._on_node(
            "allgather",
            source.data_ptr(),
            output.data_ptr(),
            source.nbytes,
            _TYPES.get(source.dtype, ""),
        )

    def _delegate(
        self,
        name: str,
        tensors: Tensors,
        *arguments: Any,
        last: Callable[[], list[torch.Tensor]] | None = None,
    ) -> Any:
        self._refuse()
        device = tensors[0].device.type if len(tensors) > 0 else "cpu"
        if device == "cpu":
            arguments, last = _for_gloo(name, arguments, last)
        doing = Doing(name, arguments[1] if name in ("send", "recv") else None)
        with self._calls:
            try:
                inner = self._inner_for(device)
                older = _OLDER_NAMES.get(name, name)
                work = getattr(inner, name if hasattr(inner, name) else older)(*arguments)
            except RuntimeError as error:
                self._aborts.fail(error, doing)
            if device != "cpu":
                return work
            if name in _MESSAGES:
                return _Delegated(
                    self._aborts, self._calls, work, doing, limit=self._timeout, last=last
                )
            delegated = _Delegated(
                self._aborts, self._calls, work, doing, self._delegated, last=last
            )
            self._delegated.add(delegated)
        return delegated

    def _on_node(self, call: str, *arguments: Any) -> None:
        """A call of the node's communicator, whose errors name ranks as the job does."""
        try:
            getattr(self._node._live(), call)(*arguments)
        except (PeerError, UsageError) as error:
            raise self._renumbered(error) from error

    def _renumbered(self, error: PeerError | UsageError) -> PeerError | UsageError:
        """An error of the node's communicator, which numbers the node's ranks from 0, in the job's
        numbers."""
        numbers = {str(i): str(self._global_rank(rank)) for i, rank in enumerate(self._local)}

        def number(match: re.Match[str]) -> str:
            return match[1] + ", ".join(numbers.get(r, r) for r in match[2].split(", "))

        return type(error)(_RANKS_OF_NODE.sub(number, str(error)))

    def _global_rank(self, rank: int) -> int:
        """The number in the job of a rank of this group."""
        try:
            return int(dist.get_global_rank(self, rank))
        except (
            RuntimeError,
            ValueError,
        ):  # torch does not know the group: it was made by hand, or is destroyed
            return rank

    def _delegate_reduction(
        self, name: str, tensors: Tensors, results: Tensors, opts: Any, *arguments: Any
    ) -> Any:
        """Computes what Gloo lacks: AVG of integers, and sums of booleans."""
        op = opts.reduceOp.op
        exact = not all(t.is_floating_point() or t.is_complex() for t in results)
        if op not in _OF_BOOLEANS or not exact or not _plain(results):
            return self._delegate(name, tensors, *arguments, opts)
        booleans = all(t.dtype == torch.bool for t in results)
        opts.reduceOp = _OF_BOOLEANS[op] if booleans else ReduceOp.SUM
        if op == ReduceOp.SUM:
            return self._delegate(name, tensors, *arguments, opts)
        # Not all of Gloo's reductions have a future, so asynchronous ones are waited for here too.
        self._delegate(name, tensors, *arguments, opts).wait()
        if name != "reduce" or opts.rootRank == self._rank:
            for result in results:
                _divide(result.detach(), self._size)
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(list(results))
        return _Work(name, future, self._calls, self._callbacks)

    def _refuse(self) -> None:
        """Raises if this process cannot use the group, as far as it knows."""
        self._refuse_child()
        self._aborts.refuse()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError("the process group was destroyed; make a new one")

    def _refuse_child(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"this process was forked from rank {self._rank} of a process group; make a group "
                "of the child's own"
            )

    def _inner_for(self, device: str) -> Any:
        """Torch's backend for the device; NCCL itself does not connect before its first call."""
        if device not in self._inner:
            self._refuse_closed()
            store = PrefixStore(f"nostall {device}", self._store)
            if device == "cuda" and dist.is_nccl_available():
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                made = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            else:
                raise UsageError(
                    f'the backend "nostall" has no backend for tensors on {device}: move them to the '
                    "CPU, or use a torch that has NCCL"
                )
            self._keep(device, made)
        return self._inner[device]

    def _keep(self, device: str, backend: Any) -> None:
        # Torch reads the backends of the devices of a group, to find out what they support.
        self._inner[device] = backend
        self._registered.append(registered(backend))
        self._register_backend(
            torch.device(device), ProcessGroup.BackendType.CUSTOM, self._registered[-1]
        )

    def _do(self, name: str, operation: Callable[[], list[torch.Tensor]], opts: Any) -> Any:
        self._refuse()
        limit = opts.timeout if _is_set(opts.timeout) else self._timeout

        def work() -> list[torch.Tensor]:
            try:
                if limit != self._limit:
                    self._node.set_timeout(limit.total_seconds())
                    self._limit = limit
                if self._one_node:
                    return operation()  # an abort ends it, and is named, within the node
                with self._aborts.watching(Doing(name)):
                    return operation()
            finally:
                self._under_way.pop()

        future: Future[list[torch.Tensor]] = Future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            self._refuse_closed()
            waits = len(self._under_way) > 0 or getattr(opts, "asyncOp", True)
            if waits and self._thread is None:
                thread = threading.Thread(target=serve, args=(self._queue,), daemon=True)
                thread.start()  # may be refused; then nothing has changed
                self._thread = thread
            self._under_way.append(None)
            if waits:
                self._queue.put(run)
        self._refuse_closed()  # by a signal's handler meanwhile, after which nobody may serve the queue
        if not waits:
            with self._calls:
                future.set_result(work())
        return _Work(name, future, self._calls, self._callbacks)


def _is_set(timeout: timedelta | None) -> bool:
    """Whether a timeout is given; torch passes -1 ms or 0 for none."""
    return timeout is not None and timeout > timedelta(0)


def _plain(tensors: Tensors) -> bool:
    return all(t.device.type == "cpu" and t.layout == torch.strided for t in tensors)


def _divide(total: torch.Tensor, ranks: int) -> None:
    """Turns a sum into AVG; integers are rounded towards zero, as by NCCL."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(ranks)
    elif total.dtype != torch.bool:  # its sum is a minimum
        total.div_(ranks, rounding_mode="trunc")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """One whose memory is its values, aligned to their type: not those that are conjugated or negated
    when they are read."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.clone() if flat.data_ptr() % flat.element_size() else flat


def _apart(source: torch.Tensor, target: torch.Tensor, in_place: int | None) -> torch.Tensor:
    """The source, or a copy where it shares memory with the target, but does not begin `in_place` bytes
    behind the target's begin."""
    distance = source.data_ptr() - target.data_ptr()
    is_beside = distance >= target.nbytes or -distance >= source.nbytes
    return source if is_beside or distance == in_place else source.clone()


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat)


def _for_gloo(
    name: str, arguments: tuple[Any, ...], last: Callable[[], list[torch.Tensor]] | None
) -> tuple[tuple[Any, ...], Callable[[], list[torch.Tensor]] | None]:
    """The arguments of a call to Gloo, which sends memory as it is, and what to do after it."""

    def tensors(argument: Any) -> list[torch.Tensor]:
        if isinstance(argument, torch.Tensor):
            return [argument]
        if not isinstance(argument, (list, tuple)):
            return []
        return [tensor for each in argument for tensor in tensors(each)]

    every = [tensor for argument in arguments for tensor in tensors(argument)]
    lazy = [t for t in every if t.layout == torch.strided and (t.is_conj() or t.is_neg())]
    if not lazy:
        return arguments, last
    read = {id(t): t.detach().resolve_conj().resolve_neg() for t in lazy}

    def exchanged(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [exchanged(each) for each in argument]
        return read.get(id(argument), argument)

    outputs = [] if name == "send" else tensors(arguments[0])

    def write() -> list[torch.Tensor]:
        for output in outputs:
            if id(output) in read:
                output.detach().copy_(read[id(output)])
        return outputs if last is None else last()

    return tuple(exchanged(argument) for argument in arguments), write


def _hide_from_compiler() -> None:
    """Lets compiled programs call a group without compiling it, because it does more than tensor work.

    torch._dynamo.disable does the same, but imports all of Dynamo at the first call.
    """
    methods = {n: m for n, m in vars(Group).items() if isinstance(m, types.FunctionType)}
    frames = torch._C._dynamo.eval_frame
    for name, method in methods.items():
        if name == "__init__":
            continue
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
            setattr(method, "_torchdynamo_disable", True)  # noqa: B010
        else:
            setattr(Group, name, torch._dynamo.disable(method))


_hide_from_compiler()


def _create(options: Any, backend_options: object | None) -> Group:
    if backend_options is None:
        default = dist.group.WORLD
        backend_options = default._options if isinstance(default, Group) else Options()
    if not isinstance(backend_options, Options):
        raise UsageError(
            f"pg_options of the backend nostall are nostall.torch.GroupOptions, not "
            f"{type(backend_options).__name__}"
        )
    return Group(
        options.store, options.group_rank, options.group_size, options.timeout, backend_options
    )


def register_backend() -> None:
    """Registers ``torch.distributed.init_process_group("nostall")``; a second call is harmless.

    Under srun and mpirun it also sets the variables that this call reads.
    """
    fill_environment()
    if "NOSTALL" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "nostall", _create, extended_api=True, devices=["cpu", "cuda"]
        )
