"""Every mistake is named with its file and key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import scenario, tables

from nostall.errors import IoError, UsageError
from nostall.simulate import Policy, load_scenario, make_policy, simulate
from nostall.simulate._scenario import Scenario, Training, read_scenario
from nostall.simulate._sweep import scaling, sweep, with_values
from nostall.simulate._tables import Place

_ONE_POINT = {"1": 66}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"environment": {"c": 0}}, "environment.c: must be above 0"),
        ({"environment": {"c": float("nan")}}, "environment.c: must be finite"),
        ({"environment": {"c": 10**400}}, "environment.c: must be finite, not 1000"),
        ({"environment": {"b_c": -5}}, "environment.b_c: must be above 0"),
        ({"environment": {"b_fs": "fast"}}, "environment.b_fs: must be a number, not 'fast'"),
        ({"environment": {"N": 0}}, "environment.N: must be a whole number from 1"),
        ({"environment": {"N": 2.5}}, "environment.N: must be a whole number"),
        (
            {"environment": {"N": 2**31}},
            "environment.N: must be a whole number from 1 to 2147483647",
        ),
        (
            {"environment": {"p": [2, 10**30, 2]}},
            "environment.p.1: must be a whole number from 1 to",
        ),
        ({"environment": {"t": {}}}, "environment.t: must be throughputs"),
        ({"environment": {"t": {"1": 0}}}, "environment.t.1: must be above 0"),
        ({"environment": {"t": {"one": 5}}}, "'one' is not a number of threads"),
        ({"environment": {"t": {"1": 5, "1.0": 6}}}, "names one number of threads twice"),
        ({"environment": {"d": [0, 100, 200]}}, "environment.d.0: the staging buffer"),
        ({"environment": {"d": [20, -1, 200]}}, "environment.d.1: must be at least 0"),
        ({"environment": {"d": []}}, "environment.d: is empty"),
        ({"environment": {"p": [2, 2]}}, "environment.p: has 2 classes, d has 3"),
        ({"environment": {"p": [2, 0, 2]}}, "environment.p.1: must be a whole number"),
        ({"environment": {"w": [1]}}, "environment.w: has 1 classes"),
        ({"environment": {"names": ["a", "b", "b"]}}, 'environment.names.2: "b" is another origin'),
        ({"environment": {"names": ["a", "b", "source"]}}, "environment.names.2"),
        ({"environment": {"names": ["a", "other nodes", "c"]}}, "environment.names.1"),
        ({"environment": {"betta": 5}}, 'environment.betta: unknown key: did you mean "beta"?'),
        ({"environment": {"machine": "summit-9"}}, 'there is no machine "summit-9"'),
        ({"environment": {"machine": "a", "calibration": "b"}}, "both a machine and a calibration"),
        ({"dataset": {"distribution": "nrom"}}, "has no distribution 'nrom'"),
        ({"dataset": {"samples": 0}}, "dataset.samples: must be a whole number"),
        (
            {"dataset": {"samples": 2**32 - 1}},
            "samples: must be a whole number from 1 to 4294967294",
        ),
        ({"dataset": {"scale": -1}}, "dataset.scale: must be at least 0"),
        ({"dataset": {"min": -1}}, "dataset.min: must be at least 0"),
        ({"dataset": {"min": 2, "max": 1}}, "dataset.max: must be at least 2"),
        ({"dataset": {"path": "."}}, "either a distribution"),
        ({"dataset": {"loc": -9.0}}, "gives samples of size 0 only"),
        ({"dataset": {"distribution": "gamma"}}, "dataset.parameters: gamma cannot be drawn"),
        ({"training": {"E": 0}}, "training.E: must be a whole number"),
        ({"training": {"B": 10**30}}, "training.B: must be a whole number from 1 to 2147483647"),
        ({"training": {"seed": 2**64}}, "training.seed: must be a whole number from 0 to"),
        ({"training": {"B": 5000}}, "training: B = 5000 leaves no batch"),
        ({"training": {"scheme": "fair"}}, "training.scheme: must be one of uniform"),
        ({"training": {"drop_last": 1}}, "training.drop_last: must be true or false"),
        ({"training": {"epochs": 3}}, "training.epochs: unknown key"),
        ({"policies": ["hdmpl"]}, 'there is no policy "hdmpl": did you mean "hdmlp"?'),
        ({"policies": []}, "policies: must be a list"),
        ({"policies": [{"name": "hdmlp", "fast": True}]}, 'policy "hdmlp" has no option fast'),
        ({"policies": ["own.py:Mine"]}, "there is no file own.py"),
        ({"step": {"checkpoint": 3}}, "checkpoint_every (batches) go together"),
        ({"step": {"engine": -1}}, "step.engine: must be at least 0"),
        ({"sweep": {"d.1": 5}}, "sweep: must give lists"),
        ({"prices": {"d.1": -5}}, "prices.d.1: must be at least 0"),
        ({"machine": {}}, "machine: unknown key"),
    ],
)
def test_mistakes_name_file_and_key(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_scenario(tables(**changes), Place("mine.toml"))
    assert str(caught.value).startswith("mine.toml: ")
    assert names in str(caught.value)


@pytest.mark.parametrize("table", ["environment", "dataset", "training"])
def test_missing_tables_and_keys(table: str) -> None:
    whole = tables()
    without = {k: v for k, v in whole.items() if k != table}
    with pytest.raises(UsageError, match=rf"mine.toml: is missing \[{table}\]"):
        read_scenario(without, Place("mine.toml"))
    key = {"environment": "b_fs", "dataset": "samples", "training": "E"}[table]
    whole[table].pop(key)
    with pytest.raises(UsageError, match=rf"mine.toml: {table}: is missing {key}"):
        read_scenario(whole, Place("mine.toml"))


def test_tables_of_one_point_are_constant() -> None:
    one = scenario(environment={"t": _ONE_POINT, "r": [{"2": 20000}, {"2": 20000}, {"2": 86}]})
    assert one.environment.throughput(4) == 66
    assert all(o.seconds > 0 or o.why for o in simulate(one))


def test_negative_sizes_are_clipped_and_counted() -> None:
    one = scenario(dataset={"loc": 0.1, "scale": 0.1})
    assert one.dataset.sizes.min() == 0
    assert one.dataset.clipped == (one.dataset.sizes == 0).sum() > 100


def test_any_distribution_of_scipy() -> None:
    gamma = {"distribution": "gamma", "parameters": {"a": 2.0}, "loc": 0.0, "scale": 0.2}
    one = scenario(dataset=gamma)
    assert one.dataset.total == pytest.approx(1200 * 0.4, rel=0.1)
    counted = {"distribution": "poisson", "parameters": {"mu": 3.0}, "loc": 0, "scale": 0.1}
    assert scenario(dataset=counted).dataset.total == pytest.approx(1200 * 0.3, rel=0.1)


def test_sizes_of_real_data(image_folder: Path, tmp_path: Path) -> None:
    changed = tables(training={"B": 8})
    changed["dataset"] = {"path": str(image_folder)}
    one = read_scenario(changed, Place(str(tmp_path / "mine.toml")))
    files = sorted(p.stat().st_size for p in image_folder.rglob("*.jpg"))
    assert sorted(np.rint(one.dataset.sizes * 1e6).astype(int)) == files
    np.save(tmp_path / "sizes.npy", np.array([5_000_000] * 100))
    changed["dataset"] = {"path": "sizes.npy"}
    assert read_scenario(changed, Place(str(tmp_path / "mine.toml"))).dataset.total == 500
    changed["dataset"] = {"path": "nothing"}
    with pytest.raises(UsageError, match=r"dataset.path: .* is not a folder"):
        read_scenario(changed, Place(str(tmp_path / "mine.toml")))


def with_sizes(path: Path, sizes: Any, **training: Any) -> Scenario:
    np.save(path, np.asarray(sizes))
    changed = tables(training={"B": 8, **training})
    changed["dataset"] = {"path": str(path)}
    return read_scenario(changed, Place("mine.toml"))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (np.zeros(100), "has samples of size 0 only"),
        ([5.0, -1.0], "has sizes that are negative or not finite"),
        ([5.0, float("nan")], "has sizes that are negative or not finite"),
        ([5.0, float("inf")], "has sizes that are negative or not finite"),
        ([[5.0]], "is not one list of sizes"),
    ],
    ids=["zero", "negative", "nan", "infinite", "rows"],
)
def test_sizes_that_cannot_be(sizes: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"mine.toml: dataset.path: .*sizes.npy {says}"):
        with_sizes(tmp_path / "sizes.npy", sizes)


def test_a_training_of_samples_without_bytes(tmp_path: Path) -> None:
    one = with_sizes(tmp_path / "sizes.npy", [5_000_000, 0, 0, 0, 0], E=1, B=4, drop_last=True)
    trainings = (replace(one.training, seed=seed) for seed in range(100))
    without = next(t for t in trainings if 0 not in t.plan(5, 4).epoch_order(0))
    with pytest.raises(UsageError, match="the training takes no time: it has samples of size 0"):
        simulate(replace(one, training=without))


def test_room_for_more_than_any_data_set() -> None:
    enough, more = (
        simulate(with_values(scenario(), {"d.1": room}), shuffle=False) for room in (1e6, 1e14)
    )
    assert [o.seconds for o in more] == pytest.approx([o.seconds for o in enough], nan_ok=True)


def test_sizes_of_small_types(tmp_path: Path) -> None:
    halves = with_sizes(tmp_path / "sizes.npy", np.full(200, 60_000, np.float16))
    assert halves.dataset.total == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01", b"PK\x03\x04", b"sizes"])
def test_files_without_sizes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "sizes.npy").write_bytes(content)
    changed = tables()
    changed["dataset"] = {"path": "sizes.npy"}
    with pytest.raises(UsageError, match=r"dataset.path: cannot read .*sizes.npy"):
        read_scenario(changed, Place(str(tmp_path / "mine.toml")))


@pytest.mark.parametrize("shape", [10**15, 10**30], ids=["memory", "number"])
def test_more_sizes_than_any_memory_has(shape: int, tmp_path: Path) -> None:
    with open(tmp_path / "sizes.npy", "wb") as file:
        head = {"descr": "<f8", "fortran_order": False, "shape": (shape,)}
        np.lib.format.write_array_header_1_0(file, head)
    changed = tables()
    changed["dataset"] = {"path": "sizes.npy"}
    with pytest.raises(UsageError, match=r"dataset.path: cannot read .*sizes.npy"):
        read_scenario(changed, Place(str(tmp_path / "mine.toml")))


def test_a_folder_of_empty_files(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "0.jpg").touch()
    changed = tables()
    changed["dataset"] = {"path": "data"}
    with pytest.raises(UsageError, match=r"dataset.path: .*data has samples of size 0 only"):
        read_scenario(changed, Place(str(tmp_path / "mine.toml")))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no scenario scenario-9: environment"):
        load_scenario("scenario-9")
    with pytest.raises(IoError, match="No such file"):
        load_scenario(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[environment\n")
    with pytest.raises(UsageError, match=r"broken.toml is not TOML"):
        load_scenario(broken)


def test_policies_from_files(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("class Mine:\n    pass\n")
    with pytest.raises(UsageError, match="has no policy Mine"):
        make_policy(f"{path}:Mine")
    path.write_text("import nostall.simulate\nclass Mine(nostall.simulate.Policy):\n    pass\n")
    with pytest.raises(UsageError, match=r"Mine in .*own.py must define decide"):
        make_policy(f"{path}:Mine")


def test_unknown_variables_and_modes() -> None:
    one = scenario()
    for values, names in (
        ({"d.9": 5}, "only 3 storage classes"),
        ({"x": 5}, "x is not a variable"),
        ({"N": 0}, "N: must be a whole number"),
        ({"E": 1.5}, "E: must be a whole number"),
        ({"B": 10**30}, "B: must be a whole number from 1 to 2147483647"),
        ({"p.1": 10**30}, "p.1: must be a whole number from 1 to"),
    ):
        with pytest.raises(UsageError, match=names):
            with_values(one, values)
    with pytest.raises(UsageError, match="mode must be one of"):
        simulate(one, ["published"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"modes must be one or more of .*, not \[\]"):
        simulate(one, [])
    with pytest.raises(UsageError, match="grids must be a list of mappings, not the mapping"):
        sweep(one, {"d.1": [1, 2]}, ["consistent"])  # type: ignore[arg-type]


@pytest.mark.parametrize("B", [0, -3, 2.5, 10**30])
def test_a_training_without_a_batch_cannot_be_planned(B: Any) -> None:
    with pytest.raises(UsageError, match="global_batch_size must be an integer from 1 to"):
        Training(E=1, B=B).plan(100, 2)


def test_a_policy_that_keeps_too_much_is_named() -> None:
    class Wrong(Policy):
        name = "wrong"

        def decide(self, job: Any) -> Any:
            from nostall._native import Decision, Filling

            decision = Decision()
            decision.filling = Filling.prefetch
            decision.set_kept([[np.array([job.samples], np.uint32)]] * job.nodes)
            return decision

    with pytest.raises(UsageError, match="keeps sample 1200 of 1200"):
        simulate(replace(scenario(), policies=(Wrong(),)))


def test_machines_as_environment() -> None:
    from nostall.simulate._environment import machines

    training = {"N": 2, "c": 100, "beta": 200}
    for name in machines():
        whole = tables()
        whole["environment"] = {"machine": name, **training}
        one = read_scenario(whole, Place("mine.toml"))
        assert one.environment.N == 2 and one.environment.source


def calibrated(folder: Path, measured: dict[str, Any], **environment: Any) -> Scenario:
    """A scenario on a machine of two nodes that was calibrated; `measured` replaces what was found."""
    from nostall.cli._calibrate import to_toml

    found = {
        "sample_bytes": 100_000,
        "nodes": 2,
        "beta": 4e8,
        "network": {"bandwidth": 2e9, "latency": 1e-5},
        "source": {"threads": 4, "one_node": {"1": 5e7}, "nodes": [6e7, 9e7]},
        "tiers": [
            {"name": "ram", "read": [5e9, 8e9], "write": [4e9, 6e9]},
            {"name": "/ssd", "read": [5e8, 6e8], "write": [3e8, 3e8]},
        ],
    }
    (folder / "measured.toml").write_text(to_toml(found | measured))
    whole = tables(policies=["lower-bound"])
    whole["environment"] = {"calibration": "measured.toml", "c": 80, **environment}
    return read_scenario(whole, Place(str(folder / "mine.toml")))


def test_calibrations_as_environment(tmp_path: Path) -> None:
    found = calibrated(tmp_path, {}, d=[200, 100, 500]).environment
    assert (found.N, found.c, found.b_c, found.throughput(2)) == (2, 80, 2000, 90)
    # The link of one node, not what two nodes get together.
    assert found.b_fs == 60
    assert [c.name for c in found.classes] == ["staging", "ram", "/ssd"]
    assert found.classes[2].read[-1] == (2, 600)
    assert [c.write[-1] for c in found.classes] == [(2, 6000), (2, 6000), (2, 300)]
    with pytest.raises(UsageError, match=r"mine.toml: environment: is missing d"):
        calibrated(tmp_path, {})


def test_a_calibrated_node_decodes_as_it_was_measured_whatever_its_threads(tmp_path: Path) -> None:
    def decodes(scenario: Scenario) -> float:
        return scenario.environment.beta * scenario.environment.classes[0].threads

    d = [200, 100, 500]
    one = calibrated(tmp_path, {}, d=d)
    assert one.environment.classes[0].threads == 4 and decodes(one) == pytest.approx(400)
    assert decodes(calibrated(tmp_path, {}, d=d, p=[16, 2, 2])) == pytest.approx(400)
    assert decodes(with_values(one, {"p.0": 32, "p.1": 3})) == pytest.approx(400)
    # What is given is a thread's.
    assert calibrated(tmp_path, {}, d=d, p=[16, 2, 2], beta=7).environment.beta == 7
    assert with_values(one, {"beta": 7, "p.0": 3}).environment.beta == 7
    with pytest.raises(UsageError, match="environment: is missing beta"):
        calibrated(tmp_path, {"beta": 0.0}, d=d)


def test_a_network_that_was_not_measured_is_not_made_up(tmp_path: Path) -> None:
    alone = {"nodes": 1, "network": {}, "source": {"threads": 1, "one_node": {}, "nodes": [6e7]}}
    d = [200, 100, 500]
    for n in (2, 8):
        with pytest.raises(UsageError, match="environment: is missing b_c"):
            calibrated(tmp_path, alone, d=d, N=n)
    assert calibrated(tmp_path, alone, d=d, N=8, b_c=50).environment.b_c == 50
    one = calibrated(tmp_path, alone, d=d)
    assert simulate(one, ["consistent"])[0].seconds > 0
    for run in (
        lambda: simulate(with_values(one, {"N": 4})),
        lambda: scaling(one, [4], ["consistent"]),
    ):
        with pytest.raises(UsageError, match="N = 4 is missing b_c"):
            run()
    assert with_values(one, {"N": 4, "b_c": 50}).environment.b_c == 50


def test_what_a_sweep_sets_is_not_missed_before_it(tmp_path: Path) -> None:
    alone = {"nodes": 1, "network": {}, "source": {"threads": 1, "one_node": {}, "nodes": [6e7]}}
    eight = with_values(calibrated(tmp_path, alone, d=[200, 100, 500]), {"N": 8})
    points = sweep(eight, [{"b_c": [1000, 10000]}], ["consistent"])
    assert all(seconds > 0 for point in points for seconds in point.seconds.values())
    assert scaling(eight, [1], ["consistent"])[1][0].seconds > 0
    state = tmp_path / "state"
    with pytest.raises(UsageError, match="N = 8 is missing b_c"):
        sweep(eight, [{"N": [1, 8]}], ["consistent"], state=state)
    assert not state.exists()
