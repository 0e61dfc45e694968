"""Transforms of torchvision as the native ones that do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from nostall.errors import UsageError
from nostall.fields import Boxes, Image, Kind, Mask
from nostall.loader import _color_steps as c
from nostall.loader import _geometry_steps as g
from nostall.loader import _mixing as m
from nostall.loader import _usual_steps as u
from nostall.loader._compile import compile as compile_transforms
from nostall.loader._steps import Transform
from nostall.loader._tv_tensors import HOME, HandedOver, OnFields, is_of_torchvision
from nostall.source._source import Pixels

_HOMES = (HOME, "torchvision.tv_tensors.")
_WARPING = {"nearest": "nearest", "bilinear": "bilinear", "bicubic": "bicubic"}
_OF_PIL = {**_WARPING, "nearest": "nearest_exact", "nearest-exact": "nearest_exact"}
_OF_TENSORS = {**_WARPING, "nearest-exact": "nearest_exact"}


class _Unequal(Exception):
    """A transform, or a parameter of it, that no native one equals."""


def _only(condition: bool) -> None:
    if not condition:
        raise _Unequal


def _fill(value: Any) -> Any:
    if isinstance(value, dict):  # by torchvision's types
        named = _by_type(value)
        _only(None not in named)
        others = named.get("others")
        return {part.lower(): _fill(named.get(part, others)) for part in ("Image", "Mask")}
    if value is None:
        return 0
    _only(isinstance(value, (int, float, list, tuple)))
    return value if isinstance(value, (int, float)) or len(value) == 3 else value[0]


def _mode(names: dict[str, str], value: Any) -> Any:
    name = getattr(value, "value", value)
    _only(name in names)
    return names[name]


def _resampled(x: Any, tensors: bool) -> dict[str, Any]:
    if not tensors:  # Pillow resizes antialiased, whatever is asked for
        return {"interpolation": _mode(_OF_PIL, x.interpolation)}
    return {"interpolation": _mode(_OF_TENSORS, x.interpolation), "antialias": bool(x.antialias)}


def _warped(x: Any) -> dict[str, Any]:
    return {"interpolation": _mode(_WARPING, x.interpolation), "fill": _fill(x.fill)}


def _resize(x: Any, tensors: bool) -> Transform:
    _only(x.size is not None and x.max_size is None)
    size = x.size if isinstance(x.size, int) else tuple(x.size)
    return u.Resize(size, **_resampled(x, tensors))


def _random_crop(x: Any, _: bool) -> Transform:
    padding = x.padding
    if padding is not None and ".v2." in type(x).__module__:
        padding = [padding[i] for i in (0, 2, 1, 3)]  # it keeps left, right, top, bottom
    return g.RandomCrop(tuple(x.size), padding, x.pad_if_needed, _fill(x.fill), x.padding_mode)


def _rotation(x: Any, _: bool) -> Transform:
    _only(not x.expand)
    return g.RandomRotation(tuple(x.degrees), center=x.center, **_warped(x))


def _erasing(x: Any, _: bool) -> Transform:
    value: Any = "random" if x.value is None else x.value
    return c.RandomErasing(x.p, tuple(x.scale), tuple(x.ratio), value)


# What gives the same on images of Pillow and on tensors; the second argument says which they are.
_ANYWHERE: dict[str, Callable[[Any, bool], Transform]] = {
    "Resize": _resize,
    "CenterCrop": lambda x, _: u.CenterCrop(tuple(x.size)),
    "RandomResizedCrop": lambda x, tensors: u.RandomResizedCrop(
        tuple(x.size), tuple(x.scale), tuple(x.ratio), **_resampled(x, tensors)
    ),
    "RandomHorizontalFlip": lambda x, _: u.RandomHorizontalFlip(x.p),
    "RandomVerticalFlip": lambda x, _: g.RandomVerticalFlip(x.p),
    "Pad": lambda x, _: g.Pad(x.padding, _fill(x.fill), x.padding_mode),
    "RandomCrop": _random_crop,
    "RandomInvert": lambda x, _: c.RandomInvert(x.p),
    "RandomPosterize": lambda x, _: c.RandomPosterize(x.bits, x.p),
    "GaussianBlur": lambda x, _: c.GaussianBlur(tuple(x.kernel_size), tuple(x.sigma)),
}

# What gives the same on images of Pillow.
_PIL: dict[str, Callable[[Any, bool], Transform]] = {
    "RandomRotation": _rotation,
    "RandomAffine": lambda x, _: g.RandomAffine(
        tuple(x.degrees), x.translate, x.scale, x.shear, center=x.center, **_warped(x)
    ),
    "RandomPerspective": lambda x, _: g.RandomPerspective(x.distortion_scale, x.p, **_warped(x)),
    "ColorJitter": lambda x, _: c.ColorJitter(x.brightness, x.contrast, x.saturation, x.hue),
    "Grayscale": lambda x, _: c.Grayscale(x.num_output_channels),
    "RandomGrayscale": lambda x, _: c.RandomGrayscale(x.p),
    "RandomSolarize": lambda x, _: c.RandomSolarize(x.threshold, x.p),
    "RandomAutocontrast": lambda x, _: c.RandomAutocontrast(x.p),
    "RandomEqualize": lambda x, _: c.RandomEqualize(x.p),
    "RandomAdjustSharpness": lambda x, _: c.RandomAdjustSharpness(x.sharpness_factor, x.p),
    "RandAugment": lambda x, _: c.RandAugment(
        x.num_ops, x.magnitude, x.num_magnitude_bins, **_warped(x)
    ),
    "TrivialAugmentWide": lambda x, _: c.TrivialAugmentWide(x.num_magnitude_bins, **_warped(x)),
    "AutoAugment": lambda x, _: c.AutoAugment(x.policy.value, **_warped(x)),
}

# What gives the same on tensors of floating point.
_FLOAT: dict[str, Callable[[Any, bool], Transform]] = {
    "Normalize": lambda x, _: u.Normalize(x.mean, x.std),
    "RandomErasing": _erasing,
}


# Of whole batches.
_BATCHES: dict[str, Callable[[Any], m.BatchTransform]] = {
    "MixUp": lambda x: m.MixUp(alpha=x.alpha, num_classes=x.num_classes),
    "CutMix": lambda x: m.CutMix(alpha=x.alpha, num_classes=x.num_classes),
    "RandomChoice": lambda x: m.RandomChoice([_of_batches(y) for y in x.transforms], x.p),
}


def _of_batches(transform: Any) -> m.BatchTransform:
    """Raises UsageError if it is one whose labels are found otherwise."""
    name = _name(transform)
    _only(name in _BATCHES)
    step = _BATCHES[str(name)](transform)
    getter = getattr(transform, "_labels_getter", None)
    default = getter is None or getattr(getter, "__name__", "") == "_find_labels_default_heuristic"
    if not default or getattr(step, "num_classes", 1) is None:
        raise UsageError(
            f"{name} of torchvision is done to batches, with num_classes= and labels_getter='default' "
            f"alone: give nostall.transforms.{name}, which has labels= for the name of the field"
        )
    return step


def _flat(transforms: Any) -> Iterator[Any]:
    if _name(transforms) == "Compose":
        transforms = transforms.transforms
    if _holds_steps(transforms):
        for transform in transforms:
            yield from _flat(transform)
    else:
        yield transforms


def _holds_steps(transforms: Any) -> bool:
    """Whether it does all that it gives when iterated, as a callable of the user's own may not."""
    kind = type(transforms)
    if f"{kind.__module__}.{kind.__qualname__}" == "torch.nn.modules.container.Sequential":
        return True
    return isinstance(transforms, Iterable) and not callable(transforms)


def _name(transform: Any) -> str | None:
    """Of a class of torchvision's itself: what a subclass does is not known."""
    return _type_name(type(transform))


def _type_name(kind: type) -> str | None:
    return kind.__name__ if f"{kind.__module__}.".startswith(_HOMES) else None


def _by_type(given: Mapping[Any, Any]) -> dict[str | None, Any]:
    """What is given for torchvision's types, by their names, and for "others"."""
    return {each if each == "others" else _type_name(each): x for each, x in given.items()}


class _Reader:
    """Finds the native equals of one transform after the other, by what an image is by then.

    `kinds` are those of the fields that are transformed as one; None of an image alone.
    """

    def __init__(self, kinds: Mapping[str, Kind] | None = None) -> None:
        self.kind: Literal["pil", "tensor", "float"] = "pil"
        self._unknown = kinds is None
        self._kinds = kinds or {}

    def read(self, transform: Any) -> list[Transform]:
        """Raises _Unequal if there are none."""
        name = _name(transform)
        if name in ("Identity", "ToPureTensor") or (name == "ToPILImage" and self.kind == "pil"):
            return []
        if name in ("ToImage", "PILToTensor"):
            _only(self.kind != "float")
            self.kind = "tensor"
            return []
        converts = name in ("ToDtype", "ConvertImageDtype") and self.kind == "tensor"
        if name == "ToTensor" or converts:
            _only(self.kind != "float")
            if converts:
                _only(self._dtype(transform.dtype) == "torch.float32")
                _only(name != "ToDtype" or transform.scale)
            self.kind = "float"
            return [u.ToTensor()]
        if name == "ClampBoundingBoxes":
            return [g.ClampBoundingBoxes()]
        if name == "ConvertBoundingBoxFormat":
            wanted = str(getattr(transform.format, "name", transform.format)).lower()
            boxes = [kind for kind in self._kinds.values() if isinstance(kind, Boxes)]
            _only(all(kind.format == wanted for kind in boxes))
            return []
        if name == "SanitizeBoundingBoxes":
            self._check_labels(transform.labels_getter)
            return [g.SanitizeBoundingBoxes(transform.min_size, transform.min_area)]
        known = _FLOAT if self.kind == "float" else _ANYWHERE
        known = {**known, **_PIL} if self.kind == "pil" else known
        _only(name in known)
        try:
            return [known[str(name)](transform, self.kind == "tensor")]
        except UsageError:
            raise _Unequal from None

    def _dtype(self, given: Any) -> str:
        """What images become, where others stay what they are."""
        if not isinstance(given, dict):
            return str(given)
        by_name = _by_type(given)
        others = by_name.get("others")
        for kind in self._kinds.values():
            dtype = by_name.get(type(kind).__name__, others)
            if isinstance(kind, Mask):
                _only(dtype is None or str(dtype) == f"torch.{kind.dtype}")
            elif not isinstance(kind, Image):
                _only(others is None and not {"BoundingBoxes", "KeyPoints"} & set(by_name))
        return str(by_name.get("Image", others))

    def _check_labels(self, getter: Any) -> None:
        """Torchvision takes out the rows of one field: here they must be those of `rows_of`."""
        _only(getter == "default" or (getter is None and not self._unknown))
        follow = [name for name, kind in self._kinds.items() if getattr(kind, "rows_of", None)]
        if getter is None:
            _only(not follow)
        elif self._kinds:
            named = [name for name in self._kinds if name.lower() == "labels"]
            named += [name for name in self._kinds if "label" in name.lower()]
            _only(bool(named) and named[0] in follow)


def _add(found: list[Any], steps: Iterable[Transform]) -> None:
    """Steps for boxes alone may follow ToTensor in torchvision, which does not touch boxes."""
    for step in steps:
        tensor = next((i for i, each in enumerate(found) if isinstance(each, u.ToTensor)), None)
        late = isinstance(step, (g.ClampBoundingBoxes, g.SanitizeBoundingBoxes))
        found.insert(len(found) if tensor is None or not late else tensor, step)


def from_torchvision(transforms: Any) -> list[Transform] | None:
    """The native transforms that do what those of ``torchvision.transforms`` do, or None.

    `transforms` is one, a list, or a ``Compose``, of v2 or of the first version, to be given an image
    of Pillow. Values agree as the guide's table says; draws have torchvision's distribution, not its
    stream. None if one of them, or a parameter, has no equal here, or if they end with a tensor of
    bytes, which would have its channels last: the transforms can still be passed to the loader.
    """
    found: list[Transform] = []
    reader = _Reader()
    try:
        for transform in _flat(transforms):
            _add(found, reader.read(transform))
        _only(reader.kind != "tensor")  # its batches would be channels last
    except _Unequal:
        return None
    return found


def _is_given(step: Any) -> bool:
    """Whether a step of a list is of torchvision, also as the function of a `Function`."""
    return is_of_torchvision(getattr(step, "function", step))


def _on_fields(
    steps: Iterable[Any], kinds: Mapping[str, Kind], pil: bool, composed: set[int]
) -> list[Any]:
    """The steps, where those of torchvision that follow each other get what they are for.

    `composed` are the ids of those inside a Compose, of which also functions of the user get that.
    """
    out: list[Any] = []
    for step in steps:
        if not _is_given(step) and id(step) not in composed:
            out.append(step)
        elif hasattr(step, "function"):
            out.append(dataclasses.replace(step, function=OnFields([step.function], kinds, pil)))
        elif out and isinstance(out[-1], OnFields):
            out[-1] = OnFields([*out[-1].steps, step], kinds, pil)
        else:
            out.append(OnFields([step], kinds, pil))
    return out


def _handed_over(steps: Iterable[Any]) -> Iterator[Any]:
    """The steps, where those of torchvision get images of Pillow for arrays, as in its data sets."""
    own = True
    for step in steps:
        if own and _takes_images(step):
            yield HandedOver("pil", _shown(step))
        own = not is_of_torchvision(step)
        yield step


def _takes_images(step: Any) -> bool:
    """Whether it is torchvision's, for images; in a container the first one decides."""
    while inner := getattr(step, "transforms", None):
        step = next(iter(inner))
    return is_of_torchvision(step) and _name(step) not in ("ToPILImage", "Lambda")


def _shown(step: Any) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def recognise(
    steps: list[Any], pixels: Pixels | None, kinds: Mapping[str, Kind] | None = None
) -> tuple[list[Any], Literal["chw"] | None]:
    """Transforms of torchvision among the steps as native ones, from the first on while they have them.

    The rest is called, with images of Pillow or tensors as torchvision's take them; all are if the
    native ones fix no size. Beside it the layout that they end with, if it is not the usual one.
    `kinds` are those of the fields that are transformed as one; None of an image alone.
    """
    flat: list[Any] = []
    composed: set[int] = set()
    for step in steps:
        inner = list(_flat(step)) if _name(step) == "Compose" else [step]
        composed |= set(map(id, inner)) if inner != [step] else set()
        flat += inner
    if not any(map(_is_given, flat)):
        return steps, None
    found: list[Any] = []
    reader = _Reader(kinds)
    try:
        last: list[Any] = [_of_batches(flat[-1])]
        flat = flat[:-1]
    except _Unequal:
        last = []
    rest: list[Any] = []
    for place, step in enumerate(flat):
        try:
            _add(found, [step] if isinstance(step, Transform) else reader.read(step))
        except _Unequal:
            rest = flat[place:]
            break
        if isinstance(step, u.ToTensor):
            reader.kind = "float"
    natives = [step for step in found if not isinstance(step, m.BatchTransform)]
    try:
        _only(bool(natives))
        compile_transforms(natives, pixels=pixels)
    except (_Unequal, UsageError):
        if kinds is not None:
            return [*_on_fields(flat, kinds, True, composed), *last], None
        return [*_handed_over(flat), *last], None
    if kinds is not None:
        rest = _on_fields(rest, kinds, reader.kind == "pil", composed)
    elif rest and any(map(is_of_torchvision, flat[: len(flat) - len(rest) + 1])):
        found.append(HandedOver(reader.kind, _shown(rest[0])))
    return [*found, *rest, *last], "chw" if reader.kind == "tensor" and not rest else None
