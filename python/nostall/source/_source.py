"""`Source`, the base of all sources, and those whose samples are files: `ImageFolder`, `FileList`."""

from __future__ import annotations

import errno
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, Protocol

import numpy as np

from nostall import _native
from nostall.base import _checks as checks
from nostall.base._options import suggestion
from nostall.base._paths import path_of
from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.fields import Image, Scalar, Schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nostall.source._mixture import Mixing

_log = logging.getLogger("nostall")

_LOADERS = {("nostall.loader._loader", name) for name in ("DataLoader", "Epoch")}

_STEPS = "pass the steps as transforms= to nostall.DataLoader"
# What data sets of torchvision take, and where it goes.
_OF_TORCHVISION = {
    "transform": _STEPS,
    "transforms": _STEPS,
    "target_transform": "labels stay as they are: change those of a batch in the loop",
    "loader": "pass a function of the bytes as transforms= to nostall.DataLoader",
    "is_valid_file": "pass the files that count to nostall.FileList",
}

#: torchvision's IMG_EXTENSIONS, so that both see the same files.
IMAGE_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)
LISTING_THREADS = 16
_CLASSES_SHOWN = 10
_INDEX_NAME = ".nostall-index"


@dataclass(frozen=True)
class Pixels:
    """How the bytes of an unencoded sample form pixels, uint8.

    `channels` is 1 (grey) or 3, for steps; `layout` "hwc" or "chw"; `order` "rgb", or "bgr" as OpenCV
    and Caffe have it.

    Raises:
        UsageError: one of them is something else.
    """

    height: int
    width: int
    channels: int = 3
    layout: Literal["hwc", "chw"] = "hwc"
    order: Literal["rgb", "bgr"] = "rgb"

    def __post_init__(self) -> None:
        sides = (self.height, self.width, self.channels)
        if not all(checks.is_whole(side) and side > 0 for side in sides):
            raise UsageError(
                f"pixels of {self.height!r} rows, {self.width!r} columns and {self.channels!r} "
                "channels cannot be: give whole numbers above 0"
            )
        if self.layout not in ("hwc", "chw") or self.order not in ("rgb", "bgr"):
            raise UsageError(
                f'pixels are "hwc" or "chw", not layout={self.layout!r}, and "rgb" or "bgr", not '
                f"order={self.order!r}"
            )

    def image(self, sample: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The sample as RGB, shape (height, width, 3).

        Raises:
            CorruptionError: it has another number of bytes.
        """
        shape = (self.height, self.width, self.channels)
        if sample.size != self.height * self.width * self.channels:
            raise CorruptionError(f"{sample.size} bytes are not pixels of shape {shape}")
        if self.layout == "chw":
            image = np.moveaxis(sample.reshape(shape[2:] + shape[:2]), 0, 2)
        else:
            image = sample.reshape(shape)
        if self.channels == 1:
            image = np.repeat(image, 3, axis=2)
        return np.ascontiguousarray(image[:, :, ::-1] if self.order == "bgr" else image)


class ItemMaker(Protocol):
    """Makes items of a user's data set, and says what is done with them."""

    then: Callable[[Any], Any] | None
    pickles: frozenset[str]
    modules: frozenset[str]
    version: str | int | None

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tells data sets apart of which the items that were looked at are the same, where no
        version says whether all are."""

    def make(self, sample: int) -> bytes:
        """The record of an item, made anew."""

    def were_killed(self, sample: int) -> bool:
        """Whether processes were killed at an item, so that it was not made: it may be good."""


class Source:
    """A fixed list of samples, the same on every process.

    Attributes:
        native: the native source, for the loader.
        pixels: how unencoded samples form pixels; None for encoded images or anything else. May be
            set before the source is given to a loader.
    """

    native: _native.Source
    pixels: Pixels | None = None
    # Whether its batches are `images, labels` by default.
    _pairs: bool = True
    # Floating-point labels lie in the native source as the bits of float64.
    _label_type: np.dtype[Any] = np.dtype(np.int64)
    # The arguments of opening, to open it again in another process.
    _arguments: dict[str, Any]

    def __len__(self) -> int:
        return len(self.native)

    def __getitem__(self, sample: int) -> Any:
        """Refused: what gives samples is named, and what gives their bytes.

        Raises:
            UsageError: always.
        """
        self._refuse_items()

    def _refuse_items(self) -> NoReturn:
        """What `__getitem__` does.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{type(self).__name__} is read by nostall.DataLoader, or sample by sample by "
            "nostall.torch.Dataset(source, decode=True)[i]; source.read(i) gives the bytes of one. "
            "A trainer takes the loader, whose state keeps its position: leave skip_first_batches out"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of opening: unpickling opens the source again, and compares."""
        return _reopen, (type(self), self._arguments, self.fingerprint, self.pixels)

    @property
    def schema(self) -> Schema:
        """The fields of every sample, in the order of the native source."""
        floating = self._label_type.kind == "f"
        return Schema(
            image=Image(),
            label=Scalar(dtype=self._label_type.name, stored="float64" if floating else None),
        )

    def select(self, names: Sequence[str]) -> Source:
        """A source that reads these fields alone, if that saves reading; else this one.

        Raises:
            UsageError: a field is not there.
        """
        self.schema.select(names)
        return self

    @property
    def mixing(self) -> Mixing | None:
        """How a `Mixture` mixes its sources, which the order follows from; None of other sources."""
        return None

    @property
    def over_network(self) -> bool:
        """Whether samples are read from an object store: late, and many requests at once."""
        return False

    @property
    def item_maker(self) -> ItemMaker | None:
        """What makes the samples, if they are items of a data set in Python; else None."""
        return None

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Bytes of every sample, shape (n,)."""
        return self.native.sizes

    def __repr__(self) -> str:
        where = next(iter(self._arguments.values()), None)
        if isinstance(where, (list, tuple)):
            where = f"{where[0]!r} and {len(where) - 1} more" if len(where) > 1 else repr(where[0])
        else:
            where = repr(where)
        classes = getattr(self, "classes", None)
        return (
            f"<{type(self).__name__} {where}: {counted(len(self), 'sample')}"
            + (f" of {counted(len(classes), 'class')}" if classes else "")
            + f", {self.total_bytes / 1e6:.1f} MB>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the samples, their fields and classes."""
        from nostall.base import _html as html

        rows = [("samples", f"{len(self)}, {format_bytes(self.total_bytes)}")]
        classes = getattr(self, "classes", None)
        if classes:
            more = len(classes) - _CLASSES_SHOWN
            named = ", ".join(map(str, classes[:_CLASSES_SHOWN]))
            rows.append(("classes", f"{len(classes)}: {named}" + (", ..." if more > 0 else "")))
        if self.item_maker is None:  # else an item is whatever the data set gives
            rows += [(name, repr(kind)) for name, kind in self.schema.items()]
        return html.table(repr(self), rows)

    @property
    def labels(self) -> NDArray[Any]:
        """Label of every sample, shape (n,): int64, or the floating-point type that was given.

        Of samples with several fields it is the column of integers named `label`.

        Raises:
            UsageError: the samples have no labels.
        """
        if not self._pairs or self.item_maker is not None:
            raise UsageError(
                f"{self!r} has no labels of its own: pass labels= to ClassBalanced, mask= to Filter; "
                "of a source of several fields a column of integers named label counts as labels"
            )
        return self.as_labels(self.native.labels)

    def as_labels(self, native: NDArray[np.int64]) -> NDArray[Any]:
        """Labels as the native source has them, in their own type."""
        if self._label_type.kind != "f":
            return native
        return native.view(np.float64).astype(self._label_type)

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples."""
        return self.native.total_bytes

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash over paths, sizes, labels and classes: equal for equal data sets."""
        return self.native.fingerprint

    def describe(self, sample: int) -> str:
        """The name of the sample in a message: its path."""
        return self.native.describe(sample)

    @property
    def extent(self) -> dict[str, int]:
        """Sizes that a loader's state keeps beside the fingerprint, to say what changed."""
        return {}

    def read(self, sample: int) -> bytes:
        """The bytes of one sample.

        Raises:
            IoError: the file cannot be read or is not as long as the index says, with its path.
            CorruptionError: they are not the bytes that were read first.
        """
        return self.native.read(sample)

    def keep_sums(self) -> None:
        """Stores the learned checksums beside the index, if there is one."""
        error = self.native.keep_sums()
        # A read-only data set is the usual case, not a fault.
        if error != 0 and -error not in (errno.EROFS, errno.EACCES, errno.EPERM):
            _log.warning(
                "cannot store the checksums of %s: %s", self.describe(0), os.strerror(-error)
            )

    def _open_sums(self, index: str, stored: str) -> str:
        """Loads the checksums that are kept beside `stored`; returns why not, if they are of other
        content.

        Where there are none, those of others beside the index are a beginning.
        """
        kept = f"{stored}.sums" if stored else ""
        why = ""
        if index != stored and not os.path.exists(kept):
            why = str(self.native.open_sums(f"{index}.sums"))
        mine = str(self.native.open_sums(kept))
        return why or mine


def way_from(dataset: object) -> str:
    """What to do with something that is given where a `Source` is wanted."""
    if way := way_to_sources(dataset):
        return way
    known = _kinds(dataset)
    if ("torchvision.datasets.folder", "ImageFolder") in known:
        root = str(getattr(dataset, "root", "..."))
        return (
            f"nostall.ImageFolder({root!r}) reads the same files, with the same classes and order; its "
            "transform goes to transforms= of nostall.DataLoader"
        )
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, (str, bytes)):
        return "nostall.Cached(dataset) takes a Dataset of your own"
    return 'open one, for example nostall.ImageFolder("/data/train")'


def expect_source(what: str, given: object) -> None:
    """Raises UsageError, with the way, if `what` is given something else."""
    if not isinstance(given, Source):
        raise UsageError(
            f"{what} takes data sets of nostall, not {type(given).__name__}: {way_from(given)}"
        )


def way_to_sources(given: object) -> str:
    """How to come to the data sets of a loader or a list; "" for anything else."""
    known = _kinds(given)
    if not known.isdisjoint(_LOADERS):
        return "pass the data set that the loader reads, loader.dataset; loaders are made last"
    if ("torch.utils.data.dataloader", "DataLoader") in known:
        return "nostall.Cached(loader.dataset) takes the Dataset that a loader of torch reads"
    if ("torch.utils.data.dataset", "Subset") in known and isinstance(
        getattr(given, "dataset", None), Source
    ):
        return (
            "nostall.Subset(part.dataset, part.indices) is the same part; nostall.Split makes such"
        )
    if isinstance(given, (list, tuple)) and given and all(isinstance(g, Source) for g in given):
        return (
            f"it holds {counted(len(given), 'data set')}, as those of nostall.Split: give each a "
            "loader of its own, or put them together by nostall.Concat"
        )
    return ""


def _kinds(given: object) -> set[tuple[str, str]]:
    return {(kind.__module__, kind.__name__) for kind in type(given).__mro__}


class ImageFolder(Source):
    """One folder per class, as ``torchvision.datasets.ImageFolder`` sees it: same classes and order.

    The listing is stored, and reused while no directory has changed. A file that was rewritten in place
    with another size is detected when it is read, and listed again by ``nostall index`` (with the same
    ``--index`` and ``--extensions``). One of the same size is detected by its checksum, once learned.

    Args:
        root: the data set.
        index: True keeps the stored listing in the data set's folder; where that is read-only, one
            that is there is read, or one is kept in the user's cache folder. A path keeps it there;
            False keeps none.
        allow_empty: accept classes without files.
        extensions: file names that count, lower case with the dot.

    Raises:
        IoError: a directory or file cannot be examined, with its path.
        UsageError: there are no classes, or an empty one.
    """

    native: _native.FolderSource

    def __init__(
        self,
        root: str | os.PathLike[str],
        *more: Never,
        index: bool | str | os.PathLike[str] = True,
        allow_empty: bool = False,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        **of_torch: Never,
    ) -> None:
        refuse_more(ImageFolder, more, of_torch)
        self.root = path_of(root, "root")
        if "://" in self.root:
            raise UsageError(f"{self.root} is no folder: nostall.ObjectFolder reads those of URLs")
        self._arguments = {
            "root": str(Path(self.root).absolute()),
            "index": index,
            "allow_empty": allow_empty,
            "extensions": extensions,
        }
        endings = [e.lower() for e in extensions]
        stored = index_path(self.root, index)
        listing = listing_of(self.root, index, endings)
        self.native = _native.open_folder(
            root=self.root,
            index_path=listing,
            extensions=endings,
            class_per_folder=True,
            allow_empty=allow_empty,
            threads=LISTING_THREADS,
        )
        if why := self._open_sums(listing, stored):
            _log.warning("%s: %s; checksums are learned anew", self.root, why)

    @property
    def classes(self) -> list[str]:
        """Names of the classes; the label of a sample is a place in this list."""
        return self.native.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: i for i, name in enumerate(self.classes)}


class FileList(Source):
    """Files given one by one, or every file below a folder.

    Args:
        paths: the files, relative to `root` or absolute; None takes every file below `root`.
        labels: one number per file, integers or floating-point (regression targets, which keep their
            type: float64 if they are Python's, as torch collates them); 0 for all if None.
        root: where relative paths start; the working directory if None.

    Raises:
        IoError: a file cannot be examined, with its path.
        UsageError: the list is empty, labels and paths differ in number, or labels are not numbers.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]] | None = None,
        labels: Sequence[float] | NDArray[Any] | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(paths, (str, os.PathLike)):
            raise UsageError(
                f"paths must be a list of files, not {os.fspath(paths)!r}: for all files below a "
                f"folder pass root={os.fspath(paths)!r} alone"
            )
        self.root = path_of(root, "root") if root is not None else str(Path.cwd())
        self._arguments = {
            "root": str(Path(self.root).absolute()),
            "paths": paths,
            "labels": labels,
        }
        if paths is None:
            if root is None or labels is not None:
                raise UsageError("FileList without paths needs a root, and takes no labels")
            self.native = _native.open_folder(
                root=self.root,
                index_path="",
                extensions=[],
                class_per_folder=False,
                allow_empty=False,
                threads=LISTING_THREADS,
            )
        else:
            numbers = as_numbers(labels)
            self._label_type = numbers.dtype
            if numbers.dtype.kind == "f":
                numbers = numbers.astype(np.float64).view(np.int64)
            listed = [path_of(p, "a file of paths") for p in paths]
            self._arguments["paths"] = listed
            if not listed:
                raise UsageError(
                    "FileList: the list of files is empty: if it was found by a pattern, no file "
                    f"matches that; relative patterns start at the working directory, {Path.cwd()}"
                )
            if labels is not None and not len(numbers):  # else it would be 0 for all
                raise UsageError(f"there are 0 labels for {len(listed)} paths")
            try:
                self.native = open_files(self.root, listed, numbers.tolist())
            except (IoError, UsageError) as error:
                told = _told_of_list(str(error), listed, self.root)
                if told is None:
                    raise
                failed = type(error)(told)
                if isinstance(failed, IoError) and isinstance(error, IoError):
                    failed.errno = error.errno
                raise failed from error


def _told_of_list(said: str, listed: Sequence[str], root: str) -> str | None:
    """What is said of a file, with its place in the list and the likely cause; None of all else."""
    for place, path in enumerate(listed):
        whole = os.path.join(root, path)
        if said.startswith((f"cannot examine {whole}: ", f"{whole} is not a file")):
            start = "" if os.path.isabs(path) else f"; relative paths start at root={root!r}"
            return (
                f"FileList: paths[{place}] of {len(listed)}: {said}: was it found by a wrong pattern, "
                f"or has it gone since?{start}"
            )
    return None


def open_files(root: str, paths: Sequence[str], labels: Sequence[int]) -> _native.FolderSource:
    """The source of these files.

    Raises:
        IoError: a file cannot be examined, with its path.
        UsageError: one is a URL, or there are none.
    """
    try:
        return _native.open_files(root=root, paths=paths, labels=labels, threads=LISTING_THREADS)
    except IoError as error:
        url = next((path for path in (root, *paths) if "://" in path), None)
        if url is None:
            raise
        raise UsageError(
            f"{url} is no file: nostall.ObjectFolder reads objects, and so do the record stores"
        ) from error


def as_numbers(labels: Any) -> NDArray[Any]:
    """Labels as int64, float16, float32 or float64, shape (n,); of none if there are none."""
    if labels is None:
        return np.zeros(0, np.int64)
    refuse_masked(labels, "labels")
    try:
        found = np.asarray(labels)
    except ValueError as error:
        raise UsageError(f"labels must be one number per file: {error}") from None
    if found.ndim != 1:
        raise UsageError(
            f"labels must be one number per file, not an array of shape {found.shape}: other labels "
            'are a column of nostall.Files({"image": paths}, {"label": labels})'
        )
    if found.dtype.kind == "f" and found.dtype.itemsize <= 8:
        return found
    fits = found.dtype.kind in "biu" and not (found.size and int(found.max()) >= 2**63)
    if not fits:
        kind = "text" if found.dtype.kind in "US" else found.dtype.name
        raise UsageError(
            f"labels must be integers or floating-point numbers, not {kind} ({labels[0]!r}): number "
            "the classes"
        )
    return found.astype(np.int64)


def refuse_masked(values: Any, what: str) -> None:
    """Values behind a mask are not meant, and arrays of other kinds would have them."""
    if np.ma.is_masked(values):
        masked = int(np.ma.getmaskarray(values).sum())
        raise UsageError(f"{what}: {masked} of the values are masked: fill them, by filled(value)")


def whole_numbers(labels: Any, what: str) -> NDArray[np.int64]:
    """Labels as they are kept.

    Raises:
        UsageError: `what` has others than integers, or one that does not fit.
    """
    found = np.asarray(labels)
    if found.size and found.dtype.kind not in "biu":
        raise UsageError(
            f"{what} must be integers, not {found.dtype}: read other values as fields (columns=, "
            "members= or features=)"
        )
    if found.dtype.kind == "u" and found.size and int(found.max()) >= 2**63:
        raise UsageError(f"{what} must be less than 2**63, not {int(found.max())}")
    return found.astype(np.int64)


def refuse_more(kind: type[Source], placed: Sequence[object], named: Mapping[str, object]) -> None:
    """Raises UsageError for arguments that `kind` lacks; of those of torchvision it says the way."""
    if not placed and not named:
        return
    parameters = inspect.signature(kind).parameters.values()
    if placed and not callable(placed[0]):
        last = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][-1]
        raise UsageError(
            f"{kind.__name__} takes arguments after {last} by their names, not {placed[0]!r}"
        )
    name = "transform" if placed else next(iter(named))
    if name in _OF_TORCHVISION:
        hint = f": {_OF_TORCHVISION[name]}"
    else:
        hint = suggestion(name, [p.name for p in parameters if p.annotation != "Never"], "{}=")
    raise UsageError(f"{kind.__name__} has no option {name}{hint}")


def arguments_of(given: dict[str, Any], but: str = "") -> dict[str, Any]:
    """The arguments of an ``__init__``, from its ``locals()`` at its begin, without `but`."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__", but)}


def _reopen(
    kind: type[Source], arguments: dict[str, Any], fingerprint: int, pixels: Pixels | None
) -> Source:
    source = kind(**arguments)
    if source.fingerprint != fingerprint:
        raise IoError(
            f"{next(iter(arguments.values()))} changed since it was opened: start again, every process "
            "must see the same files"
        )
    source.pixels = pixels
    return source


def index_path(root: str, index: bool | str | os.PathLike[str] = True) -> str:
    """The file of the stored listing of `root`; empty for none."""
    if index is False:
        return ""
    if index is not True:
        return path_of(index, "index")
    if os.access(root, os.W_OK):
        return str(Path(root) / _INDEX_NAME)
    cache = cache_folder()
    if cache is None:
        return ""
    import hashlib

    name = hashlib.sha256(os.path.realpath(root).encode(errors="surrogateescape")).hexdigest()[:16]
    return str(cache / f"{name}.index")


def listing_of(root: str, index: bool | str | os.PathLike[str], extensions: Sequence[str]) -> str:
    """The file of `index_path`, or that of others beside data that this user may not change, if it
    holds."""
    stored, beside = index_path(root, index), str(Path(root) / _INDEX_NAME)
    if index is not True or stored == beside or not os.path.exists(beside):
        return stored
    why = _native.check_index(
        root=root, index_path=beside, extensions=list(extensions), class_per_folder=True
    )
    return stored if why else beside


def cache_folder() -> Path | None:
    """The user's cache folder; None if there can be none."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nostall"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: neither HOME nor an entry in passwd
        return None
    return cache
