"""Scenario files: a machine, a dataset, a training and policies, in TOML (docs/guide/simulate.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nostall.base._toml import read_toml
from nostall.errors import UsageError
from nostall.plan import Plan
from nostall.simulate._dataset import Dataset, read_dataset
from nostall.simulate._environment import Environment, read_environment
from nostall.simulate._policies import Policy, make_policy
from nostall.simulate._tables import Curve, Place

SCENARIOS = Path(__file__).parent / "scenarios"

# The policies of [Böhringer 2020, table 5.1], and this loader's own.
ALL_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lower-bound", {}),
    ("naive", {}),
    ("hdmlp", {}),
    ("staging-pool", {}),
    ("deepio", {"opportunistic": False}),
    ("deepio", {"opportunistic": True}),
    ("parallel-staging", {}),
    ("lbann", {"preloading": False}),
    ("lbann", {"preloading": True}),
    ("locality-aware", {}),
    ("nostall", {}),
)


@dataclass(frozen=True)
class Training:
    """The variables of [Böhringer 2020, sec. 4.1.3]; `B` is the global batch."""

    E: int
    B: int
    drop_last: bool = True
    scheme: Literal["uniform", "whole", "imbalanced"] = "uniform"
    order: Literal["torch", "keyed", "sequential"] = "torch"
    seed: int = 0

    def plan(self, samples: int, nodes: int) -> Plan:
        """The loader's plan with one rank per node.

        Raises:
            UsageError: it cannot be planned.
        """
        # Published batches need not be a multiple of the nodes.
        plan = Plan(
            samples=samples,
            world_size=nodes,
            epochs=self.E,
            seed=self.seed,
            drop_last=self.drop_last,
            order=self.order,
            scheme=self.scheme,
            global_batch_size=self.B,
        )
        if len(plan) == 0:
            raise UsageError(
                f"B = {self.B} leaves no batch of {samples} samples on {nodes} nodes: use a smaller "
                "one, or drop_last = false"
            )
        return plan


@dataclass(frozen=True)
class Step:
    """Costs of a training step beside computing and data, in seconds: collectives by the number of
    nodes, the gradient engine, and a checkpoint every `checkpoint_every` batches."""

    collectives: Curve = ()
    engine: float = 0.0
    checkpoint: float = 0.0
    checkpoint_every: int = 0

    def seconds(self, nodes: int) -> float:
        """Per batch on `nodes` nodes; checkpoints are spread evenly."""
        from nostall import _native

        collective = _native.interpolate(list(self.collectives), nodes) if self.collectives else 0.0
        saved = self.checkpoint / self.checkpoint_every if self.checkpoint_every else 0.0
        return collective + self.engine + saved


@dataclass(frozen=True)
class Scenario:
    """Everything that a simulation needs."""

    name: str
    environment: Environment
    dataset: Dataset
    training: Training
    policies: tuple[Policy, ...]
    step: Step = field(default_factory=Step)
    sweep: tuple[dict[str, list[Any]], ...] = ()
    prices: dict[str, float] = field(default_factory=dict)
    description: str = ""


def scenarios() -> list[str]:
    """Names of the scenarios that come with nostall."""
    return sorted(p.stem for p in SCENARIOS.glob("*.toml"))


def load_scenario(name: str | os.PathLike[str]) -> Scenario:
    """A scenario of that name that comes with nostall, or a file.

    Raises:
        IoError: the file cannot be read.
        UsageError: a key is missing, unknown, contradicts another or has an impossible value; the
            message names file and key.
    """
    text = os.fspath(name)
    path = SCENARIOS / f"{text}.toml" if text in scenarios() else Path(text)
    if not path.exists() and path.suffix != ".toml":
        raise UsageError(f"there is no scenario {text}: {', '.join(scenarios())}, or a TOML file")
    return read_scenario(read_toml(path), Place(str(path)))


def read_scenario(value: Any, place: Place = Place("scenario")) -> Scenario:  # noqa: B008
    """From the file's tables; `place` names it in errors.

    Raises:
        UsageError: as load_scenario.
    """
    table = place.table(
        value,
        (
            "name",
            "description",
            "environment",
            "dataset",
            "training",
            "policies",
            "step",
            "sweep",
            "prices",
        ),
    )
    for key in ("environment", "dataset", "training"):
        if key not in table:
            raise place.error(f"is missing [{key}]")
    training = read_training(table["training"], place / "training")
    environment = read_environment(table["environment"], place / "environment")
    dataset = read_dataset(table["dataset"], place / "dataset", training.seed)
    try:
        training.plan(len(dataset), environment.N)
    except UsageError as error:
        raise (place / "training").error(str(error)) from error
    grids = table.get("sweep", [])
    grids = [grids] if isinstance(grids, dict) else grids
    for grid in grids if isinstance(grids, list) else [None]:
        if not isinstance(grid, dict) or any(
            not isinstance(v, list) or not v for v in grid.values()
        ):
            raise (place / "sweep").error('must give lists of values: "d.1" = [10, 20]')
    prices = table.get("prices", {})
    prices = (place / "prices").table(prices, prices)
    return Scenario(
        name=str(table.get("name", Path(place.file).stem)),
        environment=environment,
        dataset=dataset,
        training=training,
        policies=_policies(table.get("policies"), place / "policies"),
        step=_step(table.get("step", {}), place / "step"),
        sweep=tuple(grids),
        prices={k: (place / "prices" / k).number(v, least=0) for k, v in prices.items()},
        description=str(table.get("description", "")),
    )


def read_training(value: Any, place: Place) -> Training:
    """From a table.

    Raises:
        UsageError: a key is missing, unknown or has an impossible value.
    """
    table = place.table(value, ("E", "B", "drop_last", "scheme", "order", "seed"))
    for key in ("E", "B"):
        if key not in table:
            raise place.error(f"is missing {key}")
    if not isinstance(table.get("drop_last", True), bool):
        raise (place / "drop_last").error("must be true or false")
    for key, choices in (
        ("scheme", ("uniform", "whole", "imbalanced")),
        ("order", ("torch", "keyed", "sequential")),
    ):
        if key in table and table[key] not in choices:
            raise (place / key).error(f"must be one of {', '.join(choices)}, not {table[key]!r}")
    return Training(
        E=(place / "E").integer(table["E"], least=1),
        B=(place / "B").integer(table["B"], least=1),
        drop_last=table.get("drop_last", True),
        scheme=table.get("scheme", "uniform"),
        order=table.get("order", "torch"),
        seed=(place / "seed").integer(table.get("seed", 0), least=0, most=2**64 - 1),
    )


def _policies(value: Any, place: Place) -> tuple[Policy, ...]:
    if value is None:
        return tuple(make_policy(name, options) for name, options in ALL_POLICIES)
    if not isinstance(value, list) or not value:
        raise place.error(f"must be a list of policies, not {value!r}")
    made = []
    for i, entry in enumerate(value):
        options: dict[str, Any] = {}
        if isinstance(entry, dict):
            options = dict(entry)
            entry = options.pop("name", None)
        if not isinstance(entry, str):
            raise (place / i).error('must be a name, or {name = "...", option = ...}')
        if ":" in entry:
            entry = str(Path(place.file).parent / entry)
        try:
            made.append(make_policy(entry, options))
        except UsageError as error:
            raise (place / i).error(str(error)) from error
    return tuple(made)


def _step(value: Any, place: Place) -> Step:
    table = place.table(value, ("collectives", "engine", "checkpoint", "checkpoint_every"))
    every = (place / "checkpoint_every").integer(table.get("checkpoint_every", 0), least=0)
    if ("checkpoint" in table) != (every > 0):
        raise place.error("checkpoint (seconds) and checkpoint_every (batches) go together")
    collectives = table.get("collectives")
    return Step(
        collectives=(place / "collectives").curve(collectives, zero=True) if collectives else (),
        engine=(place / "engine").number(table.get("engine", 0.0), least=0),
        checkpoint=(place / "checkpoint").number(table.get("checkpoint", 0.0), least=0),
        checkpoint_every=every,
    )
