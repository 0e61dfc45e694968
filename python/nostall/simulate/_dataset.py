"""Sizes of samples: from a distribution, or of a real dataset [Böhringer 2020, sec. 4.1.2]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UNREADABLE
from nostall.simulate._tables import Place

MB = 1e6


@dataclass(frozen=True)
class Dataset:
    """`sizes` in MB, shape (F,); `clipped` counts samples that were moved to the bounds."""

    sizes: NDArray[np.float64]
    clipped: int = 0
    source: str = ""

    @property
    def total(self) -> float:
        """S, MB."""
        return float(self.sizes.sum())

    def __len__(self) -> int:
        return len(self.sizes)


def read_dataset(value: Any, place: Place, seed: int) -> Dataset:
    """From a table: `samples` and a `distribution`, or a `path`.

    Raises:
        UsageError: a key is missing, unknown, contradicts another or has an impossible value.
    """
    known = ("samples", "distribution", "loc", "scale", "min", "max", "parameters", "path")
    table = place.table(value, known)
    if ("path" in table) == ("distribution" in table):
        raise place.error("needs either a distribution (with samples) or a path")
    if "path" in table:
        others = sorted(set(table) - {"path"})
        if others:
            raise (place / others[0]).error("does not go with a path, whose sizes are used")
        return from_path(Path(place.file).parent / str(table["path"]), place / "path")
    if "samples" not in table:
        raise place.error("is missing samples")
    samples = (place / "samples").integer(table["samples"], least=1, most=2**32 - 2)
    low = (place / "min").number(table.get("min", 0.0), least=0)
    high = (place / "max").number(table["max"], least=low) if "max" in table else np.inf
    drawn = _draw(table, place, samples, seed)
    if drawn.shape != (samples,) or not np.isfinite(drawn).all():
        raise (place / "distribution").error("gives sizes that are not finite numbers")
    sizes = np.clip(drawn, low, high)
    clipped = int((drawn != sizes).sum())
    if not sizes.any():
        raise place.error("gives samples of size 0 only")
    return Dataset(sizes, clipped, str(table["distribution"]))


def _draw(table: dict[str, Any], place: Place, samples: int, seed: int) -> NDArray[np.float64]:
    name = table["distribution"]
    loc = (place / "loc").number(table.get("loc", 0.0))
    scale = (place / "scale").number(table.get("scale", 1.0), least=0)
    more = place / "parameters"
    parameters = {
        k: (more / k).number(v)
        for k, v in more.table(table.get("parameters", {}), table.get("parameters", {})).items()
    }
    random = np.random.default_rng(seed)
    if name == "constant":
        return np.full(samples, loc)
    if name == "norm" and not parameters:  # needs no scipy
        return random.normal(loc, scale, samples)
    if scale == 0:
        raise (place / "scale").error(f"must be above 0 for {name}")
    try:
        from scipy import stats
    except ImportError as error:
        raise (place / "distribution").error(
            f'{name} needs scipy (pip install "nostall[cli]"); without it there are norm and constant'
        ) from error
    distribution = getattr(stats, str(name), None)
    if not isinstance(distribution, (stats.rv_continuous, stats.rv_discrete)):
        raise (place / "distribution").error(f"scipy.stats has no distribution {name!r}")
    try:
        if isinstance(distribution, stats.rv_discrete):
            drawn = distribution.rvs(
                **parameters, loc=loc, size=samples, random_state=random
            ) * float(scale)
        else:
            drawn = distribution.rvs(
                **parameters, loc=loc, scale=scale, size=samples, random_state=random
            )
    except (TypeError, ValueError) as error:
        raise more.error(f"{name} cannot be drawn from: {error}") from error
    return np.asarray(drawn, dtype=np.float64)


def from_path(path: Path, place: Place) -> Dataset:
    """The sizes of the files of a folder, or of `numpy.save`d bytes (shape (F,)).

    Raises:
        UsageError: there is neither.
    """
    from nostall.source._source import ImageFolder

    if path.suffix == ".npy":
        try:
            with open(path, "rb") as file:
                stored = np.lib.format.read_array(file)
        except (OSError, MemoryError, *UNREADABLE) as error:
            raise place.error(f"cannot read {path}: {error}") from error
        if stored.ndim != 1 or stored.dtype.kind not in "iuf" or not stored.size:
            raise place.error(f"{path} is not one list of sizes")
        # No smaller type, in which sums and shares overflow.
        sizes = np.asarray(stored, np.float64) / MB
        if not (np.isfinite(sizes) & (sizes >= 0)).all():
            raise place.error(f"{path} has sizes that are negative or not finite")
    elif path.is_dir():
        sizes = np.asarray(ImageFolder(str(path), index=False).sizes, np.float64) / MB
    else:
        raise place.error(f"{path} is not a folder")
    if not sizes.any():
        raise place.error(f"{path} has samples of size 0 only")
    return Dataset(sizes, 0, str(path))
