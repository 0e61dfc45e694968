"""Lists of native steps and callables: what runs natively, what is called, and how they meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.errors import UsageError
from nostall.fields import Boxes, Image, Keypoints, Kind, Mask
from nostall.loader._albumentations import named
from nostall.loader._compile import compile as compile_transforms
from nostall.loader._context import Context, takes_context
from nostall.loader._steps import Step, Transform
from nostall.loader._tv_tensors import HandedOver, OnFields
from nostall.source._source import Pixels

_ORDER = (
    "native steps behind a callable continue from pixels: ToTensor and all that follows it stand "
    "behind the last callable, or the callable behind them all"
)
# Of images that are not there yet, so that a wrong list is refused before it is used.
_ANY = Pixels(256, 256)
_LABELS = 65535  # the greatest label of a mask


@dataclass(frozen=True)
class Function:
    """A callable among transforms, and what it makes of the fields of a sample.

    Args:
        function: called with the sample, and with the `Context` if it has a parameter `context`.
        schema: the kinds of fields that it gives, by name. Of others the first sample decides: an array
            or a number makes an array in which all samples have one shape, anything else a list.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Kind] = field(default_factory=dict)
    _takes: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, Transform):
            raise UsageError(f"Function: {self.function!r} is no callable")
        for name, kind in self.schema.items():
            if not isinstance(kind, Kind):
                raise UsageError(f"Function: field {name}: {kind!r} is no kind of nostall.fields")
        object.__setattr__(self, "_takes", takes_context(self.function))

    def __call__(self, sample: Any, context: Context) -> Any:
        if self._takes:
            return self.function(sample, context=context)
        return self.function(sample)


def name_of(step: Any) -> str:
    """What people call a step."""
    step = step.function if isinstance(step, Function) else step
    return str(getattr(step, "__name__", type(step).__name__))


def steps_of(transforms: Any) -> list[Any]:
    """The steps of what stands for transforms: a list, or one callable.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(transforms, str):
        raise UsageError(
            f"transforms is the text {transforms!r}: give steps of nostall.transforms, or a callable"
        )
    if isinstance(transforms, type):
        raise UsageError(
            f"transforms is the class {transforms.__name__}: give an object of it, as in "
            f"transforms={transforms.__name__}(...)"
        )
    listed = not callable(transforms) and not isinstance(transforms, Transform)
    if listed and not isinstance(transforms, Iterable):
        raise UsageError(
            f"transforms is {transforms!r}: give steps of nostall.transforms, or a callable"
        )
    steps = list(transforms) if listed else [transforms]
    for step in steps:
        within = getattr(step, "transforms", None)
        if isinstance(step, Transform) or not isinstance(within, (list, tuple)):
            continue
        for inner in within:
            if isinstance(inner, Transform):
                raise UsageError(
                    f"{inner!r} is a native step inside another library's Compose: pass the list of "
                    "its steps itself as transforms="
                )
    return steps


def recognised(
    steps: Sequence[Any], pixels: Pixels | None, kinds: Mapping[str, Kind] | None = None
) -> tuple[list[Any], Literal["chw"] | None]:
    """What `_torchvision.recognise` makes of the steps; it is read where there is a callable."""
    if all(isinstance(step, Transform) for step in steps):
        return list(steps), None
    from nostall.loader._torchvision import recognise

    return recognise(list(steps), pixels, kinds)


class _Drawn(Transform):
    """In the place of native steps that run elsewhere: what follows draws as if they had run here."""

    def __init__(self, draws: int) -> None:
        self._draws = draws

    def to_step(self) -> Step:
        return "Drawn", {"draws": self._draws}


class NativeSteps:
    """Native steps behind a callable, called with its image: uint8 (height, width, 3)."""

    def __init__(
        self,
        steps: Sequence[Transform],
        after: str,
        draws: int,
        dtype: str | None,
        layout: str | None,
    ) -> None:
        self._after = after
        self._steps = [_Drawn(draws), *steps]
        self._types = (dtype, layout)
        self._made: dict[tuple[int, int], _native.Pipeline] = {}
        try:
            self.draws = int(self._pipeline(_ANY.height, _ANY.width).draws)
        except UsageError as error:
            raise UsageError(f"behind {after}: {error}; {_ORDER}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}  # pipelines cannot be pickled

    def _pipeline(self, height: int, width: int) -> _native.Pipeline:
        made = self._made.get((height, width))
        if made is None:
            if len(self._made) >= 64:
                self._made.clear()  # another thread may be about to take one
            dtype, layout = self._types
            made = self._made[height, width] = compile_transforms(
                self._steps, dtype=dtype, layout=layout, pixels=Pixels(height, width)
            )
        return made

    def _pixels(self, image: Any) -> NDArray[np.uint8]:
        array = np.asarray(image)
        if array.ndim == 3 and len(array) == 3 and hasattr(image, "permute"):  # a tensor
            array = array.transpose(1, 2, 0)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise UsageError(
                f"{self._after} gives {array.dtype} of shape {array.shape}, and uint8 (height, width, "
                f"3) is what can be continued from; {_ORDER}"
            )
        return np.ascontiguousarray(array)

    def __call__(self, image: Any, context: Context) -> Any:
        array = self._pixels(image)
        return self._pipeline(*array.shape[:2]).apply(array.reshape(-1), **_key(context))


def _key(context: Context) -> dict[str, int]:
    return {
        "seed": context.seed,
        "epoch": context.epoch,
        "sample": context.sample,
        "occurrence": context.occurrence,
    }


class NativeFields(NativeSteps):
    """The same for the fields of a sample that are transformed as one."""

    def __init__(self, kinds: Mapping[str, Kind], *given: Any) -> None:
        self._kinds = kinds
        super().__init__(*given)

    def _named(self, sample: Mapping[str, Any], kind: type[Kind]) -> list[str]:
        return [
            n for n, k in self._kinds.items() if isinstance(k, kind) and sample.get(n) is not None
        ]

    def __call__(self, sample: Mapping[str, Any], context: Context) -> Any:
        images, masks = self._named(sample, Image), self._named(sample, Mask)
        boxes, points = self._named(sample, Boxes), self._named(sample, Keypoints)
        pixels = [self._pixels(sample[name]) for name in images]
        if not pixels:
            raise UsageError(f"behind {self._after} there is no image left to transform")
        shapes = [np.shape(sample[name]) for name in points]
        made = self._pipeline(*pixels[0].shape[:2]).apply_record(
            {
                "images": [image.reshape(-1) for image in pixels],
                "masks": [(self._labels(n, sample[n]), self._of(n).dtype) for n in masks],
                "boxes": [
                    (_rows(sample[n], 4), self._of(n).format, self._of(n).normalised) for n in boxes
                ],
                "keypoints": [
                    (_rows(sample[n], s[-1]), self._of(n).normalised)
                    for n, s in zip(points, shapes, strict=True)
                ],
            },
            **_key(context),
        )
        out = dict(zip(images + masks, made["images"] + made["masks"], strict=True))
        out.update(zip(boxes, (rows for rows, _ in made["boxes"]), strict=True))
        for name, (_, kept) in zip(boxes, made["boxes"], strict=True):
            for follower, kind in self._kinds.items():
                if getattr(kind, "rows_of", None) == name and sample.get(follower) is not None:
                    out[follower] = self._following(follower, sample, name)[kept]
        for name, shape, rows in zip(points, shapes, made["keypoints"], strict=True):
            out[name] = rows.reshape(shape)
        return out

    def _following(self, name: str, sample: Mapping[str, Any], boxes: str) -> NDArray[Any]:
        rows, count = np.asarray(sample[name]), len(_rows(sample[boxes], 4))
        if len(rows) != count:
            raise UsageError(
                f"field {name}: {self._after} leaves {len(rows)} rows beside {count} of {boxes!r}, "
                "which they go with: change both"
            )
        return rows

    def _of(self, name: str) -> Any:
        return self._kinds[name]

    def _labels(self, name: str, mask: Any) -> NDArray[Any]:
        """A mask as the pipeline takes it: of 16 bits at most, from 0 on."""
        array = np.asarray(mask)
        if array.dtype.kind not in "biu" or array.ndim != 2:
            raise UsageError(
                f"field {name}: {self._after} gives {array.dtype} of shape {array.shape}, and whole "
                "numbers (height, width) are the mask that native steps continue from"
            )
        if array.dtype not in (np.uint8, np.uint16):
            least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
            if least < 0 or most > _LABELS:
                raise UsageError(
                    f"field {name}: {self._after} gives labels from {least} to {most}, and those "
                    f"that native steps continue from are 0 to {_LABELS}: give pixels to ignore one of "
                    "these, as 255, or change it behind the last native step"
                )
            array = array.astype(np.uint16)
        return np.ascontiguousarray(array)


def _draws(step: Callable[..., Any]) -> bool:
    """Whether a step draws from a context's generators: those of native steps are keyed otherwise."""
    function = step.function if isinstance(step, Function) else step
    return takes_context(function) and not isinstance(function, NativeSteps)


def _rows(value: Any, columns: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(value, np.float32).reshape(-1, columns)


class Composed:
    """Calls one function after the other, as torchvision's Compose does; can be pickled.

    With `merges` a sample is a mapping of fields, to which each adds, or changes, what it gives.
    Each that draws has draws of its own, behind those of `drawn` others. The fields `following` are for
    native steps alone, and for what comes behind a callable that gives them.
    """

    def __init__(
        self,
        steps: Iterable[Callable[..., Any]],
        merges: bool = False,
        drawn: int = 0,
        following: Iterable[str] = (),
    ) -> None:
        self.steps: list[tuple[Callable[..., Any], bool, int]] = []
        self.merges = merges
        self.drawn = drawn
        self.following = frozenset(following)
        for step in steps:
            self.steps.append((step, takes_context(step), self.drawn))
            self.drawn += _draws(step)

    def __call__(self, sample: Any, context: Context) -> Any:
        hidden = self.following
        for step, takes, place in self.steps:
            own = replace(context, step=place) if takes and place else context
            native = isinstance(step, NativeSteps)
            given = sample
            if hidden and not native:
                given = {name: value for name, value in sample.items() if name not in hidden}
            result = step(given, context=own) if takes else step(given)
            if self.merges:
                if not isinstance(result, Mapping):
                    raise UsageError(
                        f"{name_of(step)} gives {type(result).__name__} for a sample of several "
                        "fields, and not a mapping of those that it changes"
                    )
                if not native:
                    hidden = hidden.difference(result)
                result = {**sample, **result}
            sample = result
        return sample


@dataclass
class Arranged:
    """A list of steps: the pipeline of the native ones that it begins with, and what is called then."""

    pipeline: _native.Pipeline | None
    called: list[Callable[..., Any]]
    native: list[str]  # names
    python: list[str]
    typed: bool = False  # whether native steps give the type and layout that are asked for


def _takes_the_usual(step: Any) -> bool:
    return isinstance(getattr(step, "function", step), (HandedOver, OnFields))


def _callable(step: Any, kinds: Mapping[str, Kind] | None) -> Any:
    """A step as it is called."""
    if isinstance(step, Function):
        return replace(step, function=named(step.function, kinds))
    return named(step, kinds)


def arrange(
    steps: Sequence[Any],
    *,
    dtype: str | None,
    layout: str | None,
    pixels: Pixels | None,
    kinds: Mapping[str, Kind] | None = None,
    following: Mapping[str, Kind] | None = None,
) -> Arranged:
    """Of native steps and callables in turn; `kinds` are those of a group of several fields.

    `following` are those of other fields, whose rows go with boxes of the group.

    The native steps that come last give `dtype` and `layout`, unless transforms of torchvision are
    called behind them: these take images of the usual type and layout alone.

    Raises:
        UsageError: native steps cannot follow what is before them, or a step is no step.
    """
    runs: list[list[Any]] = []
    for step in steps:
        native = isinstance(step, Transform)
        forgotten = isinstance(step, type) and issubclass(step, Transform)
        if not native and (not callable(step) or forgotten):
            raise UsageError(
                f"transforms has {step!r}, which is neither a step of nostall.transforms nor a "
                "callable" + (": give an object of it" if forgotten else "")
            )
        if native and runs and isinstance(runs[-1][0], Transform):
            runs[-1].append(step)
        else:
            runs.append([step])
    last = max((i for i, run in enumerate(runs) if isinstance(run[0], Transform)), default=-1)
    typed = last >= 0 and not any(map(_takes_the_usual, itertools.chain(*runs[last + 1 :])))
    made = Arranged(None, [], [], [], typed)
    draws = 0
    for i, run in enumerate(runs):
        if not isinstance(run[0], Transform):
            run = [_callable(step, kinds) for step in run]
            made.called += run
            for step in run:
                if not isinstance(step, HandedOver):
                    inner = step.function if isinstance(step, Function) else step
                    made.python += getattr(inner, "names", [name_of(step)])
            continue
        made.native += [name_of(step) for step in run]
        types = (dtype, layout) if typed and i == last else (None, None)
        if i == 0:
            made.pipeline = compile_transforms(run, dtype=types[0], layout=types[1], pixels=pixels)
            draws = int(made.pipeline.draws)
            continue
        given = (run, made.python[-1], draws, *types)
        follows = (
            NativeSteps(*given)
            if kinds is None
            else NativeFields({**kinds, **(following or {})}, *given)
        )
        draws = follows.draws
        made.called.append(follows)
    return made
