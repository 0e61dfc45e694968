"""Three changed lines for data-parallel training: gradients are reduced while backward runs.

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = nostall.torch.DistributedOptimizer(optimizer, model.named_parameters())
...
loss.backward()
optimizer.step()
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from nostall import _native
from nostall.base._tensors import octets_of
from nostall.errors import PeerError, UsageError
from nostall.job._meeting import meet
from nostall.job._rendezvous import initialised_store
from nostall.job._world import find_world
from nostall.sync import NOT_FINITE, Ranks, Spec, SyncOptions, find_ranks, make_engine, members_of
from nostall.torch._graph import backward_graph

# A pattern of gradients is planned for once it came this often in a row.
_STEADY = 3
# Numbers that travel beside the gradients; only the count of ranks that gave them matters.
_SIGNS = ("(rank is active)", "(rank has sparse gradients)", "(rank has changed a gradient)")
# Torch's schedulers put a function in place of an optimizer's `step`, to see that it is called; they
# know it by this attribute.
_SCHEDULED = "_wrapped_by_lr_sched"

_log = logging.getLogger("nostall")

_all: weakref.WeakSet[GradientSync] = weakref.WeakSet()


def _forked() -> None:
    """Drops gradients in a forked child, which has zeros in place of the ranks' shared memory."""
    for sync in list(_all):
        sync.drop_views()


os.register_at_fork(after_in_child=_forked)


class GradientSync:
    """Reduces the gradients of parameters; made by `DistributedOptimizer`.

    Attributes:
        engine: the native engine; None where a device's own process group reduces.
        control: the engine through which ranks speak between steps; where they negotiate, another one.
        members: the ranks that take part, as the job counts them.
        plan: groups of parameter numbers, as they are reduced (mode ``"planned"``).
        analysis: nodes, edges and seconds of the last walk through autograd's graph.
        replans: how often the plan followed a changed graph.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: SyncOptions,
        ranks: Ranks,
        passes: int,
    ) -> None:
        self.options, self.ranks, self.passes = options, ranks, passes
        self.members = list(range(ranks.ranks))
        self._parameters = [p for _, p in named]
        self._forms = [_form(p) for p in self._parameters]
        self._names = [n for n, _ in named]
        signs = (*_SIGNS, NOT_FINITE) if options.check_finite else _SIGNS
        self._signs = torch.zeros(len(signs), dtype=torch.float32, device="cpu")
        self._not_finite: list[int] = []
        tensors = [(n, p.numel(), str(p.dtype).removeprefix("torch.")) for n, p in named]
        self.engine: Any = None
        self._specs = self._connect(
            [*tensors, *((sign, 1, "float32") for sign in signs)], [p.shape for _, p in named]
        )
        self.control: Any = self.engine
        self._numbers = {id(p): i for i, p in enumerate(self._parameters)}
        self._passes_left = [passes] * len(named)
        # Those with a gradient of this step, in its order: also of passes that only accumulate.
        self._accumulated: dict[int, None] = {}
        self._submitted: dict[int, torch.Tensor] = {}
        # The gradients as they were given, each with torch's count of its changes.
        self._as_given: dict[int, tuple[torch.Tensor, int]] = {}
        self._changed = ""  # why the step is refused
        self._views = options.views and options.mode == "planned" and options.compression is None
        # Ranks that negotiate have no common moment to gather rows.
        self._gathers_rows = options.mode == "planned"
        self._ready_order: list[int] = []
        self._paused = False
        self._orders: dict[bytes, list[int]] = {}
        self._pattern, self._seen = b"", 0
        self._planned_pattern: bytes | None = None
        self._explicit = False
        self.plan: list[list[int]] = []
        self.analysis: tuple[int, int, float] | None = None
        self.replans = 0
        # Hooks must not keep this object alive: the parameters hold them.
        me = weakref.ref(self)
        trained = [(i, p) for i, p in enumerate(self._parameters) if p.requires_grad]
        self._hooks = [p.register_hook(_hook(me, i, GradientSync.admit)) for i, p in trained]
        self._last: dict[int, Any] = {}  # of each parameter's hooks
        for i, _ in trained:
            self._listen(i)
        _all.add(self)

    # ------------------------------------------------------------------ what reduces

    def _connect(self, tensors: list[tuple[str, int, str]], shapes: list[torch.Size]) -> list[Spec]:
        # The engine's own check would end the step of one rank, and leave the others waiting.
        options = dataclasses.replace(self.options, check_finite=False)
        self.engine, specs = make_engine(tensors, options, self.ranks, shapes)
        return specs

    def wait_for(self, i: int) -> None:
        """Waits for one gradient."""
        self.engine.wait_for(i)

    def _wait(self) -> None:
        self.engine.wait()

    def _given(self, numbers: Iterable[int]) -> NDArray[np.bool_]:
        """Which of them some rank gave in the step that ended."""
        given: NDArray[np.bool_] = np.asarray(self.engine.contributors())[list(numbers)] > 0
        return given

    def _gathered(self, mine: Any) -> list[Any]:
        """What each rank gives, in plain values."""
        return [json.loads(b) for b in self.control.all_gather(json.dumps(mine).encode())]

    def _agreed(self, order: Sequence[int]) -> list[int]:
        """Rank 0's order."""
        agreed = self.engine.broadcast(np.array(order, np.uint32).tobytes(), 0)
        return list(map(int, np.frombuffer(agreed, np.uint32)))

    def _set_plan(self, groups: list[list[int]]) -> None:
        self.engine.set_plan(groups)

    # ------------------------------------------------------------------ while backward runs

    def _listen(self, i: int) -> None:
        """Has `ready` called after all other hooks of parameter i."""
        ready = _hook(weakref.ref(self), i, GradientSync.ready)
        self._last[i] = self._parameters[i].register_post_accumulate_grad_hook(ready)

    def admit(self, i: int) -> None:
        """Called before autograd adds to the gradient of parameter i: it may be under reduction."""
        if next(reversed(self._parameters[i]._post_accumulate_grad_hooks)) != self._last[i].id:
            self._last[i].remove()
            self._listen(i)
        if i in self._submitted and _accumulates(self._parameters[i]):
            self._refuse_again(i)

    def _refuse_again(self, i: int) -> None:
        if i in self._submitted:
            raise UsageError(
                f"the gradient of {self._names[i]} was computed again before optimizer.step(): "
                f"pass backward_passes_per_step={self.passes + 1} or more, use no_sync() for all "
                "passes but the last, or, with a GradScaler, call optimizer.synchronize() "
                "after each backward pass whose gradients may be left out"
            )

    def ready(self, i: int) -> None:
        """Called when parameter i has its gradient."""
        parameter = self._parameters[i]
        if not parameter.requires_grad:
            return  # frozen amid the step: autograd adds nothing, but calls
        if parameter.grad is None:
            return  # autograd had nothing to add
        self._refuse_again(i)  # what `admit` cannot see: backward() of the parameter itself
        self._accumulated[i] = None
        if self._paused:
            return
        self._passes_left[i] -= 1
        if self._passes_left[i] > 0:
            return
        self._ready_order.append(i)
        gradient = parameter.grad
        if gradient.is_sparse:
            return  # gathered when the step ends
        self._give(i, gradient)

    def _give(self, i: int, gradient: torch.Tensor) -> None:
        if (now := _form(gradient)) != (then := self._forms[i]):
            raise UsageError(
                f"the gradient of {self._names[i]} is {now[0]} x {now[1]} on {now[2]}, and was "
                f"{then[0]} x {then[1]} on {then[2]} when the DistributedOptimizer was made: make "
                "it again, with the same arguments"
            )
        if self.options.check_finite:
            self._check_finite(i, gradient.detach())
        self._submit(i, gradient)
        self._note(i)

    def _note(self, i: int) -> None:
        """Remembers how a gradient was given."""
        given = self._parameters[i].grad
        assert given is not None
        # Torch counts no changes of inference tensors, and none that the engine makes.
        if not given.is_inference():
            self._as_given[i] = given, given._version

    def _find_changed(self) -> str:
        """Why a gradient cannot be used that is not the one that was given; "" if there is none."""
        for i, (given, changes) in self._as_given.items():
            now = self._parameters[i].grad
            if now is not given or now._version != changes:
                return (
                    f"the gradient of {self._names[i]} was changed after its backward pass, while it "
                    "was being reduced: call optimizer.synchronize() first, change it, and call "
                    "optimizer.step() within optimizer.skip_synchronize()"
                )
        return ""

    def _refuse_changed(self) -> None:
        """On all ranks: the gradient would be another one on each."""
        if not self._signed(2):
            return
        mine, self._changed = self._changed, ""
        self._settle()
        raise UsageError(
            mine
            or "a gradient of another rank was changed while it was being reduced: the error of that "
            "rank names it"
        )

    def _check_finite(self, i: int, gradient: torch.Tensor) -> None:
        if not torch.isfinite(gradient).all():
            self._not_finite.append(i)

    def _submit(self, i: int, gradient: torch.Tensor) -> None:
        parameter = self._parameters[i]
        # A gradient with other strides, or with a graph, stays in its own memory.
        if self._views and gradient.is_contiguous() and not gradient.requires_grad:
            place = self.engine.submit_in_place(i, gradient.data_ptr(), True)
            self._submitted[i] = parameter.grad = place.view(gradient.shape)
            return
        memory = gradient if gradient.is_contiguous() else gradient.contiguous()
        self._submitted[i] = memory
        self.engine.submit(i, memory.data_ptr(), True)

    def _submit_nothing(self, i: int) -> None:
        parameter = self._parameters[i]
        if self._views:
            place = self.engine.submit_in_place(i, 0, False)
            self._submitted[i] = place.view(parameter.shape)
        else:
            self._submitted[i] = torch.zeros_like(
                parameter, memory_format=torch.contiguous_format, requires_grad=False
            )
            self.engine.submit(i, self._submitted[i].data_ptr(), False)

    # ------------------------------------------------------------------ the end of a step

    def finish(self) -> None:
        """Submits zeros for parameters without a gradient here, so that every group is complete."""
        self._changed = self._find_changed()
        for i in (*self._accumulated, *range(len(self._parameters))):
            if i in self._submitted:
                continue
            gradient = self._parameters[i].grad
            if gradient is not None and gradient.is_sparse:  # gathered when the step ends
                if self.options.check_finite:
                    self._check_finite(i, gradient.detach().coalesce().values())
                self._submit_nothing(i)
            # The optimizer would use it, so it counts: of fewer passes than announced, of no_sync(), of
            # an earlier step, or the program's own.
            elif gradient is not None:
                self._ready_order.append(i)
                self._give(i, gradient)
            else:
                self._submit_nothing(i)
        self._sign(True, bool(self._sparse()), bool(self._changed), bool(self._found_not_finite()))

    def _found_not_finite(self) -> list[int]:
        """Gradients of this rank and step."""
        return self._not_finite

    def _sign(self, *signs: bool) -> None:
        for i, present in enumerate(signs[: len(self._signs)]):
            address = self._signs.data_ptr() + i * self._signs.element_size()
            self.engine.submit(len(self._parameters) + i, address, present)

    def _signed(self, sign: int) -> bool:
        """Whether any rank gave that sign in the step that ended."""
        return bool(self._given([len(self._parameters) + sign])[0])

    def wait(self) -> None:
        """Waits for all reductions; gradients that no rank had are None."""
        self._wait()
        self._refuse_changed()
        self._refuse_not_finite()
        self._store(range(len(self._parameters)))
        self._refuse_overflow()
        self._end()

    def _refuse_not_finite(self) -> None:
        """On all ranks, and before any parameter is updated."""
        if not self.options.check_finite or not self._signed(len(_SIGNS)):
            return
        mine = self._found_not_finite()
        self._settle()
        if mine:
            raise UsageError(
                f"gradient {self._names[mine[0]]} of rank {self.members[self.ranks.rank]} is not finite"
            )
        raise UsageError(
            "a gradient of another rank is not finite: the error of that rank names it"
        )

    def _refuse_overflow(self) -> None:
        """Finite gradients may be too large for the type that they travel in; all ranks see it."""
        if not self.options.check_finite or self.options.compression != "fp16":
            return
        for name, parameter in zip(self._names, self._parameters, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or torch.isfinite(gradient).all():
                continue
            self._settle()
            raise UsageError(
                f'gradient {name} is too large for fp16: pass compression="bf16", or none, or scale '
                "the loss"
            )

    def _end(self) -> None:
        if self._signed(1):
            self._gather_sparse()
        self._settle()

    def _store(self, numbers: Sequence[int]) -> None:
        for i, given in zip(numbers, self._given(numbers), strict=True):
            parameter, memory = self._parameters[i], self._submitted[i]
            if parameter.grad is not None and parameter.grad.is_sparse:
                continue
            if not given:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = memory.to(parameter.dtype)  # it may be in the type that travels
            elif parameter.grad.data_ptr() != memory.data_ptr():
                parameter.grad.copy_(memory)

    def _settle(self) -> None:
        order = self._ready_order
        self._accumulated = {}
        self._submitted = {}
        self._as_given = {}
        self._not_finite = []
        self._ready_order = []
        self._passes_left = [self.passes] * len(self._parameters)
        if self.options.mode == "planned":
            self._follow(order)

    def _follow(self, order: list[int]) -> None:
        """Follows the step that ended, in which gradients came in this order."""
        self._replan(self._given(range(len(self._specs))), order)

    def _replan(self, present: NDArray[np.bool_], order: list[int]) -> None:
        """Changes the plan with the graph: all ranks see the same pattern, so all decide alike."""
        pattern = np.packbits(present).tobytes()
        if pattern == self._planned_pattern:
            self._pattern, self._seen = pattern, 0
            return
        self._seen = self._seen + 1 if pattern == self._pattern else 1
        self._pattern = pattern
        if self._planned_pattern is not None and self._seen < _STEADY:
            return
        if self._explicit and self._planned_pattern is None:
            self._planned_pattern = pattern  # the graph that plan_from() walked
            return
        if pattern not in self._orders:
            self._orders[pattern] = self._agreed(order)
        self._use(
            _native.fuse_reductions(self._orders[pattern], self._specs, self.options.threshold)
        )
        if self._planned_pattern is not None:
            self.replans += 1
        self._planned_pattern = pattern

    def _use(self, groups: list[list[int]]) -> None:
        self._detach()  # else the buffers of both plans would take memory
        self._set_plan(groups)
        self.plan = groups

    def plan_from(self, loss: torch.Tensor) -> None:
        """Plans the reductions from autograd's graph of this loss, before its backward pass.

        All ranks call it; the order of rank 0 is used. Without it the first backward pass gives it.
        """
        import time

        if self.options.mode != "planned":
            raise UsageError("only mode='planned' has a plan")
        if self._submitted:
            raise UsageError(
                "gradients of this step are being reduced: plan the next one before its backward pass"
            )
        begin = time.perf_counter()
        graph = backward_graph(loss, self._numbers)
        groups, nodes, edges = _native.plan_reductions(graph, self._specs, self.options.threshold)
        self.analysis = nodes, edges, time.perf_counter() - begin
        agreed = self._agreed([t for group in groups for t in group])
        self._use(_native.fuse_reductions(agreed, self._specs, self.options.threshold))
        self._explicit = True

    # ------------------------------------------------------------------ sparse, uneven, start

    def _sparse(self) -> list[int]:
        return [
            i for i, p in enumerate(self._parameters) if p.grad is not None and p.grad.is_sparse
        ]

    def make_dense(self) -> None:
        """Makes sparse gradients dense where their rows are not gathered."""
        if not self._gathers_rows:
            for i in self._sparse():
                gradient = self._parameters[i].grad
                assert gradient is not None
                dense = gradient.to_dense()
                self._parameters[i].grad = dense
                self._give(i, dense)

    def _gather_sparse(self) -> None:
        """Gathers the rows of all ranks on every rank, added up."""
        mine = {}
        for i in self._sparse():
            gradient = self._parameters[i].grad
            assert gradient is not None
            part = gradient.coalesce()
            # As bytes: NumPy has no bfloat16.
            values = part.values().contiguous().view(torch.uint8)
            mine[i] = (part.indices().numpy(), values.numpy())
        everyone = [_unpack(b) for b in self.engine.all_gather(_pack(mine))]
        numbers = sorted({i for rank in everyone for i in rank})
        for i in numbers:
            if self._given([i])[0]:  # all ranks see it
                self._settle()
                raise UsageError(
                    f"the gradient of {self._names[i]} is sparse on some ranks and dense on others: "
                    "give its module sparse=False"
                )
        for i in numbers:
            parts = [rank[i] for rank in everyone if i in rank]
            indices = torch.from_numpy(np.concatenate([p[0] for p in parts], axis=1))
            kind, shape = self._parameters[i].dtype, self._parameters[i].shape
            values = torch.from_numpy(np.concatenate([p[1] for p in parts])).view(kind)
            if self.options.mean:
                values = values / self.ranks.ranks
            self._parameters[i].grad = torch.sparse_coo_tensor(
                indices, values, shape, check_invariants=False
            ).coalesce()

    def join(self, optimizer: torch.optim.Optimizer) -> int:
        """For a rank without more data: submits zeros until no rank has data.

        Then all ranks have the parameters and the optimizer's state of the rank that joined last.

        Returns:
            That rank; the first one of several.
        """
        if self._submitted:
            raise UsageError("gradients wait for optimizer.step(): call it before join()")
        for i in self._accumulated:
            self._parameters[i].grad = None  # of a step that does not come
        turns = self._gathered(self._give_zeros())
        last: int = turns.index(min(turns))
        if len(set(turns)) > 1:
            self._take_over(optimizer, last)
        return self.members[last]

    def _give_zeros(self) -> int:
        """In each step of ranks that have data, and in one of all; returns how many these were."""
        for turn in itertools.count(1):
            for i in self._sparse():
                self._parameters[i].grad = None  # of an earlier step
            for i in range(len(self._parameters)):
                self._submit_nothing(i)
            self._sign(False, False, False, False)
            self._wait()
            self._refuse_changed()
            self._refuse_not_finite()
            if not self._signed(0):
                self._forget()
                return turn
            self._end()
        raise AssertionError  # the count has no end

    def _forget(self) -> None:
        """Ends a step that counts for nothing, and what was accumulated for the next one."""
        self._accumulated = {}
        self._submitted = {}
        self._as_given = {}
        self._ready_order = []
        self._passes_left = [self.passes] * len(self._parameters)

    def _take_over(self, optimizer: torch.optim.Optimizer, root: int) -> None:
        """Gives all ranks the parameters and the state of rank `root`, also where they had none."""
        mine = [_described(optimizer), _left_out(optimizer)] if self.ranks.rank == root else None
        kinds, left = self._gathered(mine)[root]
        if left:
            _log.warning(
                "%s of the optimizer's state stay each rank's own, for they are neither tensors nor "
                "plain values: broadcast them from the rank that join() returns",
                ", ".join(left),
            )
        parameters = _parameters_of(optimizer)
        self._broadcast([*(p.data for p in parameters), *_like(optimizer, kinds)], root)

    def start(self, parameters: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
        """Gives the parameters and the optimizer's state of all ranks rank 0's values.

        Raises:
            PeerError: a rank's optimizer has a state of its own kind.
        """
        kinds = [f"{t.dtype} of shape {list(t.shape)} on {t.device.type}" for t in state]
        for other, theirs in enumerate(self._gathered(kinds)):
            if theirs != kinds:
                raise PeerError(
                    f"the optimizer of rank {self.members[self.ranks.rank]} has a state of "
                    f"{len(kinds)} tensors, and that of rank {self.members[other]} one of "
                    f"{len(theirs)}, or of other shapes, types or devices: "
                    "load the same state on all ranks, or on none"
                )
        self._broadcast([*parameters, *state])

    def _broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        buffer = io.BytesIO()
        if self.ranks.rank == root:
            for tensor in tensors:
                host = tensor.detach().cpu().contiguous()
                buffer.write(octets_of(host).numpy().tobytes())
        data = self.control.broadcast(buffer.getvalue(), root)
        at = 0
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                if size == 0:
                    continue
                part = torch.frombuffer(bytearray(data[at : at + size]), dtype=tensor.dtype)
                tensor.copy_(part.view(tensor.shape))
                at += size

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients only accumulate inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Removes the hooks, gives the gradients memory of their own, and lets go of other ranks."""
        self._release()

    def _release(self) -> None:
        for hook in (*self._hooks, *self._last.values()):
            hook.remove()
        self._hooks, self._last = [], {}
        # As long as they lie in the ranks' shared memory, this rank stays connected.
        self._detach()
        self._views = False

    def _detach(self) -> None:
        if not self._views:
            return
        # The collector may run this in any mode. An inference tensor cannot be accumulated into,
        # and a gradient with a graph keeps it.
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in self._parameters:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.clone()

    def drop_views(self) -> None:
        """In a forked child: drops the gradients, which would read as zeros."""
        if self._views:
            for parameter in self._parameters:
                parameter.grad = None
            self._submitted, self._as_given = {}, {}
            self._views = False

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_hooks"):
            self._release()


def _form(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.numel(), tensor.dtype, tensor.device


def _hook(
    me: weakref.ref[GradientSync], i: int, call: Callable[[GradientSync, int], None]
) -> Callable[..., None]:
    def hook(*_: object) -> None:
        sync = me()
        if sync is not None:
            call(sync, i)

    torch.utils.hooks.unserializable_hook(hook)
    return hook


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the pass under way adds to the parameter's gradient, as far as autograd tells."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad() hands this gradient out
        return False


def _pack(parts: dict[int, tuple[Any, Any]]) -> bytes:
    buffer = io.BytesIO()
    arrays = {}
    for i, (indices, values) in parts.items():
        arrays[f"i{i}"], arrays[f"v{i}"] = indices, values
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _unpack(data: bytes) -> dict[int, tuple[Any, Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {int(n[1:]): (arrays[n], arrays[f"v{n[1:]}"]) for n in arrays.files if n[0] == "i"}


class _Distributed:
    """What `DistributedOptimizer` adds to an optimizer's own class."""

    gradient_sync: GradientSync
    _nostall_skip: bool
    _nostall_overlap: bool

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """For copy.deepcopy and torch.save."""
        raise UsageError(
            "a DistributedOptimizer is neither copied nor saved whole, for a copy would not reduce "
            "gradients: take its state_dict(), and load it into a new optimizer"
        )

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; for clipping, or a GradScaler, before `step`."""
        self._nostall_give().wait()

    def _nostall_give(self) -> GradientSync:
        """Gives what this rank has, so that every group is complete."""
        sync = self.gradient_sync
        for parameter in _parameters_of(self):
            gradient = parameter.grad
            if id(parameter) in sync._numbers or gradient is None:
                continue
            told = f"a gradient of shape {list(parameter.shape)} is not reduced, for its parameter "
            if parameter.requires_grad:
                raise UsageError(
                    f"{told}was frozen, or in no group, when the DistributedOptimizer was made: make "
                    "it again, with the same arguments"
                )
            # Torch updates by it all the same, each rank by its own.
            if gradient.is_sparse or gradient.any():
                raise UsageError(
                    f"{told}is frozen, and has it from before: set the parameter's grad to None"
                )
            parameter.grad = None  # by zeros too, where other ranks may have none
        sync.make_dense()
        sync.finish()
        return sync

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, gradients accumulate on this rank alone."""
        return self.gradient_sync.paused()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not synchronize: it was done by hand."""
        self._nostall_skip = True
        try:
            yield
        finally:
            self._nostall_skip = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` reads before it looks at gradients, and may leave `step` out."""
        if not self._nostall_skip:
            raise UsageError(
                "a GradScaler looks at gradients that are still being reduced: call "
                "optimizer.synchronize() after the backward pass, before scaler.unscale_, and "
                "scaler.step within optimizer.skip_synchronize()"
            )
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(vars(self).get("_step_supports_amp_scaling", inherited))

    def plan_from(self, loss: torch.Tensor) -> None:
        """Plans the reductions from this loss's graph; see `GradientSync.plan_from`."""
        self.gradient_sync.plan_from(loss)

    def join(self) -> int:
        """Called by each rank when its data ends; the other ranks may continue.

        When it returns, all ranks have the parameters and the optimizer's state of the rank that
        called it last, which made all updates.

        Returns:
            That rank; of several, the lowest.
        """
        return self.gradient_sync.join(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes, then the optimizer's own step."""
        if closure is not None:
            raise UsageError("a closure would run backward again inside step: call it before")
        if self._nostall_skip:
            return super().step()  # type: ignore[misc]
        sync = self.gradient_sync
        # What all ranks have to give is known when all is reduced.
        if self._nostall_overlap and sync.plan and not sync.options.check_finite:
            return self._step_by_group()
        self.synchronize()
        return super().step()  # type: ignore[misc]

    def _step_by_group(self) -> None:
        """Updates the parameters of each group as soon as it is reduced."""
        sync = self._nostall_give()
        sparse = set(sync._sparse())
        for numbers in sync.plan:
            own = [i for i in numbers if i < len(sync._parameters)]
            for i in own:
                sync.wait_for(i)
            sync._store(own)
            self._nostall_update(i for i in own if i not in sparse)
        sync._wait()
        sync._refuse_changed()  # after the updates, which are the same on all ranks
        sync._end()
        self._nostall_update(sync._sparse())  # their rows are those of all ranks when the step ends

    def _nostall_update(self, numbers: Iterable[int]) -> None:
        """The optimizer's own step, of these parameters alone."""
        members = {id(self.gradient_sync._parameters[i]) for i in numbers}
        if not members:
            return
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        all_parameters = [g["params"] for g in groups]
        try:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = [p for p in parameters if id(p) in members]
            super().step()  # type: ignore[misc]
        finally:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters


# Else load_state_dict() would have it call the hooks of a step too, before gradients are reduced.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    options: SyncOptions | None = None,
    *,
    backward_passes_per_step: int = 1,
    process_set: Sequence[int] | None = None,
    broadcast: bool = True,
    overlap_update: bool = False,
) -> Any:
    """Makes `optimizer` reduce gradients over all ranks; the same object is returned.

    Args:
        optimizer: any torch optimizer; it keeps its class, state and schedulers. Also one that was
            returned before, once other parameters are to be trained; the other arguments do not stay.
        named_parameters: as ``model.named_parameters()``; names for messages. All parameters of the
            optimizer if None.
        options: how gradients are reduced; the same on all ranks.
        backward_passes_per_step: backward passes whose gradients add up before they are reduced.
        process_set: ranks that take part; all if None.
        broadcast: start from rank 0's parameters and optimizer state.
        overlap_update: update each group once it is reduced, while later groups are being reduced;
            for optimizers whose update of a parameter needs that parameter's gradient alone.

    The returned optimizer has `synchronize`, `skip_synchronize`, `no_sync`, `plan_from`, `join`, and
    `gradient_sync`.

    Raises:
        UsageError: a parameter without a name, or twice; parameters on several devices, or on one
            that torch has no streams for; a `step` of the optimizer's own that no scheduler of torch
            has made.
        PeerError: ranks have other parameters, with the first difference, or optimizers with other
            states.
    """
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"DistributedOptimizer takes an optimizer of torch, not a {type(optimizer).__name__}"
        )
    parameters = _parameters_of(optimizer)
    if named_parameters is None:
        named = [(f"parameter {i}", p) for i, p in enumerate(parameters)]
    else:
        try:
            names = {id(p): n for n, p in named_parameters}
        except (TypeError, ValueError) as error:
            raise UsageError(
                "named_parameters holds pairs of a name and a parameter: give "
                "model.named_parameters()"
            ) from error
        lacking = [i for i, p in enumerate(parameters) if id(p) not in names]
        if lacking:
            raise UsageError(
                f"parameter {lacking[0]} of the optimizer is not among named_parameters"
            )
        named = [(names[id(p)], p) for p in parameters]
    if len({n for n, _ in named}) != len(named):
        raise UsageError("two parameters have the same name")
    if backward_passes_per_step < 1:
        raise UsageError("backward_passes_per_step must be at least 1")
    scheduled = _is_scheduled(optimizer)
    needed = [(n, p) for n, p in named if p.requires_grad]
    options = options or SyncOptions()
    sync = _sync_for(needed, options, process_set, backward_passes_per_step)
    if broadcast:
        sync.start([p.data for p in parameters], _state_tensors(optimizer))
    kind = type(optimizer)
    if isinstance(optimizer, _Distributed):
        optimizer.gradient_sync.close()
        kind = kind.__bases__[1]
    distributed = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer.__class__ = distributed
    if scheduled:
        optimizer.step = _scheduled(optimizer)
    optimizer.gradient_sync = sync
    optimizer._nostall_skip = False
    optimizer._nostall_overlap = overlap_update
    return optimizer


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler has put a function in place of the optimizer's `step`.

    Raises:
        UsageError: something else has, which would go on to be called.
    """
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, _SCHEDULED):
        raise UsageError(
            f"{getattr(own, '__qualname__', own)} has taken the place of this optimizer's step, and "
            "would not reduce gradients: make the DistributedOptimizer first"
        )
    return own is not None


def _scheduled(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The `step` of the optimizer's class, as schedulers know it."""
    me, of_class = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(of_class)
    def step(*arguments: Any, **named: Any) -> Any:
        mine: Any = me()
        mine._opt_called = True
        return of_class(mine, *arguments, **named)

    setattr(step, _SCHEDULED, True)
    return step


def _sync_for(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    options: SyncOptions,
    process_set: Sequence[int] | None,
    passes: int,
) -> GradientSync:
    on_host = all(parameter.device.type == "cpu" for _, parameter in named)
    if not on_host:
        from nostall.torch import _device_gradients

        place = _device_gradients.device_of(named).type
    _meet("cpu" if on_host else place, process_set)
    if on_host:
        sync = GradientSync(named, options, find_ranks(process_set), passes)
    else:
        sync = _device_gradients.make(named, options, process_set, passes)
    sync.members = members_of(process_set, find_world())
    if options.mode != "planned":
        sync.control = _control(options, process_set)
    return sync


def _control(options: SyncOptions, process_set: Sequence[int] | None) -> Any:
    """An engine whose thread sleeps: that of ranks that negotiate has no moment for other words."""
    quiet = dataclasses.replace(
        options,
        mode="planned",
        nonblocking=False,
        global_sleep_every=0,
        cores=(),
        check_finite=False,
        timeline="",
    )
    engine, _ = make_engine([("(control)", 1, "float32")], quiet, find_ranks(process_set))
    return engine


_met: collections.Counter[tuple[int, ...]] = collections.Counter()


def _meet(place: str, process_set: Sequence[int] | None) -> None:
    """Refuses ranks whose parameters are in other places: they would reduce in other ways.

    Raises:
        UsageError: they are, with two of these ranks.
    """
    world = find_world()
    members = members_of(process_set, world)
    store = initialised_store(world.world_size)
    if store is None or len(members) == 1:
        return
    name = f"places {_met[tuple(members)]} of {members}"
    _met[tuple(members)] += 1
    rank, limit = members.index(world.rank), store.timeout.total_seconds()
    parts = meet(store, rank, len(members), name, place.encode(), limit).parts
    places = [part.decode() for part in parts]
    other = next((i for i, there in enumerate(places) if there != places[0]), None)
    if other is not None:
        raise UsageError(
            f"the parameters of rank {members[0]} are on {places[0]} and those of rank "
            f"{members[other]} on {places[other]}: move the model to one kind of device on all ranks"
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = []
    for parameter in _parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        tensors += [state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor)]
    return tensors


def _kind(value: Any) -> Any:
    """Of a tensor in an optimizer's state: what another rank needs to make one like it."""
    if not isinstance(value, torch.Tensor):
        return None
    return [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type != "cpu"]


def _described(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter by its names: kinds of tensors, and plain values."""
    return [
        {
            name: [_kind(value), None if isinstance(value, torch.Tensor) else value]
            for name, value in optimizer.state.get(parameter, {}).items()
            if value is None or isinstance(value, (torch.Tensor, bool, int, float, str))
        }
        for parameter in _parameters_of(optimizer)
    ]


def _left_out(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the state's values that are not described."""
    described = _described(optimizer)
    parameters = zip(_parameters_of(optimizer), described, strict=True)
    return sorted(
        {n for p, names in parameters for n in optimizer.state.get(p, {}) if n not in names}
    )


def _like(optimizer: torch.optim.Optimizer, kinds: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The tensors of the described state, made where this optimizer has others, or none."""
    tensors = []
    for parameter, names in zip(_parameters_of(optimizer), kinds, strict=True):
        for name, (kind, value) in names.items():
            state = optimizer.state[parameter]
            if kind is None:
                state[name] = value
                continue
            if _kind(state.get(name)) != kind:
                of, shape, on_device = kind
                device = parameter.device if on_device else torch.device("cpu")
                state[name] = torch.empty(shape, dtype=getattr(torch, of), device=device)
            tensors.append(state[name])
    return tensors
