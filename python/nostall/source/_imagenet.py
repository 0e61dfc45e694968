"""ImageNet (ILSVRC2012) as it is distributed: folders of synsets, and a development kit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Never

import numpy as np
from numpy.typing import NDArray

from nostall import _native
from nostall.base._paths import path_of
from nostall.errors import CorruptionError, IoError, UsageError
from nostall.source._source import IMAGE_EXTENSIONS, FileList, ImageFolder, Source, refuse_more

_DEVKIT = "ILSVRC2012_devkit_t12"
_META = Path("data", "meta.mat")
_TRUTH = Path("data", "ILSVRC2012_validation_ground_truth.txt")


class ImageNet(Source):
    """ImageNet's training or validation images, with the labels and classes of its development kit.

    Labels are those of ``torchvision.datasets.ImageNet``: the place of a synset's id (``n01440764``)
    among all sorted. Validation images may lie in one folder, as they are distributed (their labels
    are the devkit's ground truth, in the order of the sorted file names), or in a folder per synset.

    Args:
        root: the folder that has ``train`` or ``val``.
        split: which of them.
        devkit: the unpacked development kit; ``ILSVRC2012_devkit_t12`` in `root` if None. Its
            meta.mat needs SciPy.
        index: of folders per synset, as of `ImageFolder`.

    Attributes:
        synsets: their ids, sorted: the label of a sample is a place in this list.
        classes: the names of each, as ``("tench", "Tinca tinca")``.

    Raises:
        IoError: a file or folder cannot be read, with its path.
        CorruptionError: the devkit is not as it is distributed, with its file.
        UsageError: the folders are not those of the devkit's synsets, or its ground truth is not of as
            many images as there are; SciPy is missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: Literal["train", "val"] = "train",
        *more: Never,
        devkit: str | os.PathLike[str] | None = None,
        index: bool | str | os.PathLike[str] = True,
        **of_torch: Never,
    ) -> None:
        refuse_more(ImageNet, more, of_torch)
        if split not in ("train", "val"):
            raise UsageError(f'split must be "train" or "val", not {split!r}')
        top = Path(path_of(root, "root")).absolute()
        self.root = str(top / split)
        kit = top / _DEVKIT if devkit is None else Path(path_of(devkit, "devkit")).absolute()
        self._arguments = {"root": str(top), "split": split, "devkit": str(kit), "index": index}
        names, of_number = _synsets(kit / _META)
        self.synsets = sorted(names)
        self.classes = [names[synset] for synset in self.synsets]
        flat = _images(self.root) if split == "val" else []
        self.native: _native.Source
        if flat:
            label = {synset: place for place, synset in enumerate(self.synsets)}
            labels = [label[synset] for synset in _truth(kit / _TRUTH, of_number)]
            if len(labels) != len(flat):
                raise UsageError(
                    f"{self.root} has {len(flat)} images and {kit / _TRUTH} has {len(labels)} lines: "
                    "all images of the validation set are needed"
                )
            self.native = FileList(flat, labels, root=self.root).native
            return
        folder = ImageFolder(self.root, index=index)
        odd = sorted({*folder.classes} ^ {*self.synsets})
        if odd:
            what = (
                "is no synset of" if odd[0] in folder.classes else "lacks a folder for a synset of"
            )
            raise UsageError(
                f"{self.root}: {odd[0]} {what} {kit / _META} ({len(odd)} such): for some of the "
                "classes use ImageFolder, or a devkit of these"
            )
        self.native = folder.native

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each name of a class."""
        return {name: label for label, names in enumerate(self.classes) for name in names}


def _synsets(path: Path) -> tuple[dict[str, tuple[str, ...]], dict[int, str]]:
    """The names of each synset that images belong to, and its id by its number in ILSVRC2012."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UsageError(
            f"{path} needs SciPy to be read: pip install 'nostall[cli]', or open the folders with "
            "ImageFolder"
        ) from None
    try:
        with path.open("rb") as file:
            rows: NDArray[Any] = np.atleast_1d(loadmat(file, squeeze_me=True)["synsets"])
        # Synsets with children are groups of others; no image has them for its class.
        leaves = rows[rows["num_children"].astype(np.int64) == 0]
        of_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
        names = {str(row["WNID"]): tuple(str(row["words"]).split(", ")) for row in leaves}
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from None
    except Exception as error:  # whatever a reader of a damaged file raises
        raise CorruptionError(f"{path} is not the meta.mat of ILSVRC2012: {error!r}") from None
    if not names or len(names) != len(leaves) or len(of_number) != len(leaves):
        raise CorruptionError(f"{path} has no synsets, or one twice")
    return names, of_number


def _truth(path: Path, of_number: dict[int, str]) -> list[str]:
    """The synset of each validation image."""
    found = []
    try:
        lines = path.read_text(encoding="ascii", errors="replace").split()
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        synset = of_number.get(int(line)) if line.isdecimal() else None
        if synset is None:
            raise CorruptionError(
                f"{path}, line {number}: {line[:40]!r} is the number of no synset"
            )
        found.append(synset)
    return found


def _images(folder: str) -> list[str]:
    """The names of the images that lie in the folder itself, sorted."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                e.name
                for e in entries
                if e.name.lower().endswith(IMAGE_EXTENSIONS) and not e.is_dir()
            )
    except OSError as error:
        raise IoError(f"{folder}: {error.strerror}") from None
