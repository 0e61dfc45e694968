"""What callables give for the fields of samples, put together by field."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Kind, Padded, Ragged, Text
from nostall.fields._kinds import exact

_RAGGED = -1
_Array = Callable[[Any], Any]


@dataclass(frozen=True)
class Form:
    """How a batch has the values of one field; a list where there is no type."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()  # of a sample; -1 differs
    form: str = "dense"

    def fits(self, value: Any) -> bool:
        """Whether a value of a sample can stand in it."""
        if self.dtype is None:
            return True
        try:
            array = self._array(value)
        except (TypeError, ValueError):  # lists of several lengths, a type that NumPy lacks
            return False
        return (
            array.ndim == len(self.shape)
            and all(w in (_RAGGED, s) for w, s in zip(self.shape, array.shape, strict=True))
            and np.can_cast(array.dtype, self.dtype, "same_kind")
        )

    def taken(self, value: Any) -> Any:
        """A value that fits, in the type of the form.

        Raises:
            ValueError: it is of a wider type, and has numbers that this one cannot hold.
        """
        if self.dtype is None:
            return value
        array = self._array(value)
        return array if array.dtype == self.dtype else exact(array, self.dtype)

    def _array(self, value: Any) -> NDArray[Any]:
        """A value as an array; empty lists are of the form's type, and of as many sides."""
        array: NDArray[Any] = np.asarray(_detached(value))
        if array.size == 0 and isinstance(value, (list, tuple)):
            array = array.astype(self.dtype)
            if array.ndim == 1 and len(self.shape) > 1:
                array = array.reshape(0, *(max(side, 0) for side in self.shape[1:]))
        return array

    def collect(self, arrays: Sequence[Any], array: _Array) -> Any:
        """The values of the samples of a batch, as `taken` gives them."""
        if self.dtype is None:
            return list(arrays)
        if self.form == "dense":
            empty = np.empty((0, *self.shape), self.dtype)
            return array(np.stack(arrays) if arrays else empty)
        shapes = np.array([a.shape for a in arrays], np.int64).reshape(-1, len(self.shape))
        by_rows = _RAGGED not in self.shape[1:]
        if self.form == "padded":
            longest = shapes.max(0).tolist() if arrays else [max(side, 0) for side in self.shape]
            whole = np.zeros((len(arrays), *longest), self.dtype)
            for i, one in enumerate(arrays):
                whole[i][tuple(slice(side) for side in one.shape)] = one
            return Padded(array(whole), array(shapes[:, 0].copy() if by_rows else shapes))
        counts = shapes[:, 0] if by_rows else shapes.prod(1)
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        rest = self.shape[1:] if by_rows else ()
        flat = [np.empty((0, *rest), self.dtype), *(a.reshape(-1, *rest) for a in arrays)]
        values_of_all = array(np.concatenate(flat))
        if by_rows:
            return Ragged(values_of_all, array(offsets))
        return Ragged(values_of_all, array(offsets), array(shapes))


@dataclass(frozen=True)
class OfTensors(Form):
    """The form of tensors that NumPy has no array of, as those of bfloat16."""

    type: Any = None  # torch's

    def fits(self, value: Any) -> bool:
        """Whether a value is a tensor of this type and shape."""
        return _is_tensor(value) and value.dtype == self.type and value.shape == self.shape

    def taken(self, value: Any) -> Any:
        """The tensor without its graph."""
        return value.detach()

    def collect(self, arrays: Sequence[Any], array: _Array) -> Any:
        """The tensors of the samples of a batch, as one."""
        import torch

        if not arrays:
            return torch.empty((0, *self.shape), dtype=self.type)
        return torch.stack(list(arrays))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "requires_grad")


def _detached(value: Any) -> Any:
    """A value as NumPy takes it: what training remembers of a tensor is none of its numbers."""
    return value.detach() if _is_tensor(value) else value


def forms_of(kinds: Mapping[str, Kind], program: _native.Program) -> dict[str, Form]:
    """How a batch of a program has the fields that the kinds describe, in their order."""
    return {
        name: Form(None) if isinstance(kind, Text) else Form(np.dtype(dtype), tuple(shape), form)
        for (name, kind), (_, dtype, shape, form) in zip(
            kinds.items(), program.outputs, strict=False
        )
    }


def form_of(kind: Kind) -> Form:
    """How a batch has what a kind describes."""
    return forms_of({"": kind}, _native.compile_program([kind.to_native("", 0)]))[""]


def learned(value: Any) -> Form:
    """How a batch has values like this one."""
    if not isinstance(value, numbers.Number) and not hasattr(value, "__array__"):
        return Form(None)
    try:
        array: NDArray[Any] = np.asarray(_detached(value))
    except TypeError:
        if not _is_tensor(value):
            raise
        return OfTensors(None, tuple(value.shape), type=value.dtype)
    if array.dtype.kind not in "biuf":
        return Form(None)
    return Form(array.dtype, array.shape)


class Collected:
    """The fields that callables change or add; each keeps the form that it had first.

    That is the one of the kind that `stated` says, else the one that the field has had if the first
    value fits it, else the one of the first value. `tensors`: whether batches have tensors of torch.
    """

    def __init__(self, own: dict[str, Form], stated: dict[str, Kind], tensors: bool) -> None:
        self._own = own
        self._stated = stated
        self._tensors = tensors
        self._forms: dict[str, Form | None] = {}  # None: left out

    def learn(self, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            if name in self._forms:
                continue
            if value is None:
                self._forms[name] = None
            elif name in self._stated:
                self._forms[name] = form_of(self._stated[name])
            else:
                own = self._own.get(name)
                self._forms[name] = own if own is not None and own.fits(value) else learned(value)

    def check_left_out(
        self, results: Sequence[Mapping[str, Any]], describe: Callable[[int], str]
    ) -> None:
        """Refuses samples that have a value where an earlier one's None leaves the field out.

        `results` are what callables gave for samples; `describe` names the sample of a place.
        """
        for name in [name for name, form in self._forms.items() if form is None]:
            for place, changes in enumerate(results):
                # What is not changed is as the source has it.
                if changes.get(name, self._own.get(name)) is not None:
                    raise UsageError(
                        f"field {name}: {describe(place)} has a value, and the callables give None for "
                        "another sample, which leaves the field out: give a value for all samples, or "
                        "None for all"
                    )

    def names(self) -> list[str]:
        """The fields of a batch: the source's in their order, then new ones."""
        every = [*self._own, *(name for name in self._forms if name not in self._own)]
        return [name for name in every if self._forms.get(name, 0) is not None]

    def is_known(self, name: str) -> bool:
        return name in self._forms

    def collect(
        self,
        name: str,
        results: Sequence[Mapping[str, Any]],
        stored: Callable[[int], Any] | None,
        array: _Array,
        describe: Callable[[int], str],
    ) -> Any:
        """Puts the values of a field together: what callables gave for samples, else what is `stored`.

        `describe` names the sample of a place.
        """
        form = self._forms[name]
        assert form is not None  # names() has no others
        if isinstance(form, OfTensors) and not self._tensors:
            raise UsageError(
                f"field {name}: the callables give tensors of {_description(form)}, and NumPy has no "
                'arrays of them: give another type, or pass output="torch"'
            )
        taken = []
        for place, changes in enumerate(results):
            holds = ""
            is_stored = stored is not None and name not in changes  # None is then JSON's null
            value = stored(place) if stored and is_stored else changes.get(name)
            if (value is not None or is_stored) and form.fits(value):
                try:
                    taken.append(form.taken(value))
                    continue
                except ValueError:
                    holds = ", which cannot hold these numbers"
            what = "no value" if value is None else _description(value)
            raise UsageError(
                f"field {name}: the callables give {what} for {describe(place)}, where a batch has "
                f"{_description(form)}{holds}: give one type and shape, or state the kind by "
                "transforms.Function(..., schema=...)"
            )
        return form.collect(taken, array)


def _description(value: Any) -> str:
    if isinstance(value, Form):
        shape = tuple(None if side == _RAGGED else side for side in value.shape)
        dtype = value.type if isinstance(value, OfTensors) else value.dtype
        return "a list" if dtype is None else f"{dtype} of shape {shape}"
    try:
        array = np.asarray(_detached(value))
    except TypeError:
        return f"{value.dtype} of shape {tuple(value.shape)}"  # as OfTensors
    except ValueError:
        return "lists of several lengths"
    known = array.dtype.kind in "biuf"
    return f"{array.dtype} of shape {array.shape}" if known else type(value).__name__
