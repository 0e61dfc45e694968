"""The machine: the variables of [Böhringer 2020, table 3.1]."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.base._toml import read_toml
from nostall.errors import UsageError
from nostall.loader._calibration import Calibration
from nostall.simulate._tables import Curve, Place

MACHINES = Path(__file__).parent / "machines"
MB = 1e6

# Results name these origins of samples beside the storage classes.
_ORIGINS = ("other nodes", "source")
_KEYS = ("N", "c", "beta", "b_c", "b_fs", "t", "p", "d", "r", "w", "names")


@dataclass(frozen=True)
class StorageClass:
    """Storage class j: d_j in MB, p_j, r_j(p) and w_j(p) in MB/s (no points: not known)."""

    name: str
    capacity: float
    threads: int
    read: Curve
    write: Curve = ()


@dataclass(frozen=True)
class Environment:
    """The machine of [Böhringer 2020, table 3.1]. MB and MB/s; `classes[0]` is the staging buffer.

    Attributes:
        N: nodes.
        c: compute throughput of a node.
        beta: preprocessing rate of a thread.
        b_c: network bandwidth of a node to other nodes; 0 if not known, as one node alone needs none.
        b_fs: network bandwidth of a node to the parallel file system.
        t: aggregate random read throughput of the file system by the number of clients.
        classes: staging buffer, then storage classes, fastest first.
        source: the origin of the numbers.
        node_beta: preprocessing rate of a node with all threads, if that was measured: `beta` then
            follows from it and from the threads of the staging buffer.
    """

    N: int
    c: float
    beta: float
    b_c: float
    b_fs: float
    t: Curve
    classes: tuple[StorageClass, ...]
    source: str = field(default="", compare=False)
    node_beta: float = 0.0

    def throughput(self, clients: int) -> float:
        """t(gamma) of [Böhringer 2020, eq. 4.1], MB/s."""
        return _native.interpolate(list(self.t), clients)

    @property
    def local_capacity(self) -> float:
        """D, MB: what one node keeps, without the staging buffer."""
        return sum(c.capacity for c in self.classes[1:])

    def native(self, step_seconds: float = 0.0) -> _native.Model:
        """The model that the engines take; `step_seconds` are added to each batch.

        Raises:
            UsageError: a value cannot be, or lacks; the message names the variable.
        """
        if self.N > 1 and not self.b_c:
            raise UsageError(
                f"N = {self.N} is missing b_c, the network between nodes, which is not known: give it"
            )
        model = _native.Model()
        model.nodes = self.N
        model.compute = self.c
        model.preprocess = self.beta
        model.network = self.b_c or self.b_fs  # of one node: nothing travels there
        model.source_link = self.b_fs
        model.source = list(self.t)
        model.step_seconds = step_seconds
        classes = []
        for c in self.classes:
            one = _native.StorageClass()
            one.capacity = c.capacity
            one.threads = c.threads
            one.read = list(c.read)
            one.write = list(c.write)
            classes.append(one)
        model.classes = classes
        _native.validate_model(model)
        return model


def read_environment(value: Any, place: Place) -> Environment:
    """Reads a table with the keys of [Böhringer 2020, table 3.1].

    `machine` or `calibration` give the values that the table leaves out.

    Raises:
        UsageError: a key is missing, unknown or has a value that cannot be.
    """
    table = place.table(value, (*_KEYS, "machine", "calibration", "source"))
    base: dict[str, Any] = {}
    if "machine" in table and "calibration" in table:
        raise place.error("has both a machine and a calibration: give one")
    if "machine" in table:
        base = machine(str(table.pop("machine")), place / "machine")
    elif "calibration" in table:
        path = Path(place.file).parent / str(table.pop("calibration"))
        base = from_calibration(path)
    table = {**base, **table}
    node_beta = 0.0 if "beta" in table else base.get("node_beta", 0.0)
    known = {*table, *(["beta"] if node_beta else []), *(["b_c"] if table.get("N") == 1 else [])}
    missing = [k for k in ("N", "c", "beta", "b_c", "b_fs", "t", "p", "d", "r") if k not in known]
    if missing:
        raise place.error("is missing " + ", ".join(missing))
    classes = _classes(table, place)
    return Environment(
        N=(place / "N").integer(table["N"], least=1),
        c=(place / "c").number(table["c"], above=0),
        beta=node_beta / classes[0].threads or (place / "beta").number(table["beta"], above=0),
        b_c=(place / "b_c").number(table["b_c"], above=0) if "b_c" in table else 0.0,
        b_fs=(place / "b_fs").number(table["b_fs"], above=0),
        t=(place / "t").curve(table["t"]),
        classes=classes,
        source=str(table.get("source", "")),
        node_beta=node_beta,
    )


def _classes(table: Mapping[str, Any], place: Place) -> tuple[StorageClass, ...]:
    lists = {}
    for key in ("p", "d", "r", "w", "names"):
        values = table.get(key, [])
        if not isinstance(values, list):
            raise (place / key).error(f"must be a list, the staging buffer first, not {values!r}")
        lists[key] = values
    count = len(lists["d"])
    if count == 0:
        raise (place / "d").error("is empty: the staging buffer (class 0) must be there")
    for key in ("p", "r"):
        if len(lists[key]) != count:
            raise (place / key).error(f"has {len(lists[key])} classes, d has {count}")
    for key in ("w", "names"):
        if lists[key] and len(lists[key]) != count:
            raise (place / key).error(f"has {len(lists[key])} classes, d has {count}")
    defaults = ["staging", "RAM", "SSD"]
    classes = []
    for j in range(count):
        write = lists["w"][j] if lists["w"] else ()
        classes.append(
            StorageClass(
                name=str(lists["names"][j])
                if lists["names"]
                else (defaults[j] if j < len(defaults) else f"class {j}"),
                capacity=(place / "d" / j).number(lists["d"][j], least=0),
                threads=(place / "p" / j).integer(lists["p"][j], least=1),
                read=(place / "r" / j).curve(lists["r"][j]),
                write=(place / "w" / j).curve(write) if write else (),
            )
        )
    taken = [*_ORIGINS]
    for j, c in enumerate(classes[1:], 1):
        if c.name in taken:
            raise (place / "names" / j).error(
                f'"{c.name}" is another origin of samples: give each class a name of its own'
            )
        taken.append(c.name)
    if classes[0].capacity <= 0:
        raise (place / "d" / 0).error("the staging buffer must have room")
    return tuple(classes)


def machines() -> list[str]:
    """Names of the machines that come with nostall."""
    return sorted(p.stem for p in MACHINES.glob("*.toml"))


def machine(name: str, place: Place) -> dict[str, Any]:
    """The table of a machine that comes with nostall.

    Raises:
        UsageError: there is none of that name.
    """
    path = MACHINES / f"{name}.toml"
    if name not in machines():
        raise place.error(f'there is no machine "{name}": ' + ", ".join(machines()))
    table: dict[str, Any] = read_toml(path)["environment"]
    return table


def from_calibration(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `nostall calibrate` measured, as an environment's table, with `node_beta` in place of beta.

    It has neither c and d nor what was not measured.

    Raises:
        IoError, UsageError: as Calibration.load.
    """
    found = Calibration.load(path)
    # The staging buffer is memory, as the tier "ram".
    reads = [found.tiers.get("ram", [2e10]), *found.tiers.values()]
    writes = [found.tier_writes.get(name, []) for name in ("ram", *found.tiers)]
    table: dict[str, Any] = {
        "N": found.nodes,
        # What one node alone gets goes over its own link.
        "b_fs": found.source[0] / MB,
        "t": [v / MB for v in found.source],
        "r": [[v / MB for v in r] for r in reads],
        "w": [[v / MB for v in w] for w in writes],
        "names": ["staging", *found.tiers],
        "p": [max(1, found.source_threads), *map(len, found.tiers.values())],
        "source": f"measured, {os.fspath(path)}",
    }
    if found.network:
        table["b_c"] = found.network / MB
    if found.beta:  # table 3.1's is one thread's
        table["node_beta"] = found.beta / MB
    return table


def replace_value(environment: Environment, key: str, value: Any) -> Environment:
    """A copy with one variable changed: "c", "b_fs", "d.1", "p.0", "r.2" (a curve), ...

    Raises:
        UsageError: there is no such variable.
    """
    name, _, index = key.partition(".")
    place = Place("sweep", key)
    if name in ("c", "beta", "b_c", "b_fs") and not index:
        number: dict[str, Any] = {name: place.number(value, above=0)}
        if name == "beta":
            number["node_beta"] = 0.0
        return replace(environment, **number)
    if name == "N" and not index:
        return replace(environment, N=place.integer(value, least=1))
    if name == "t" and not index:
        return replace(environment, t=place.curve(value))
    if name in ("p", "d", "r", "w") and index.isdigit():
        j = int(index)
        if j >= len(environment.classes):
            raise place.error(f"there are only {len(environment.classes)} storage classes")
        old = environment.classes[j]
        new = {
            "p": lambda: replace(old, threads=place.integer(value, least=1)),
            "d": lambda: replace(old, capacity=place.number(value, least=0)),
            "r": lambda: replace(old, read=place.curve(value)),
            "w": lambda: replace(old, write=place.curve(value)),
        }[name]()
        classes = (*environment.classes[:j], new, *environment.classes[j + 1 :])
        beta = environment.node_beta / classes[0].threads or environment.beta
        return replace(environment, classes=classes, beta=beta)
    raise UsageError(
        f"{key} is not a variable of the environment: N, c, beta, b_c, b_fs, t, or p, d, r, w with "
        "a class, as d.1"
    )
