"""What a checkpoint holds: every type comes back as it was, or is refused with its place."""

from __future__ import annotations

import collections
import contextlib
import math
import random
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import nostall
from nostall.checkpoint import _format, rng_state, set_rng_state
from nostall.checkpoint._format import header, layout, parse
from nostall.checkpoint._landing import way_to
from nostall.checkpoint._tree import decode, encode
from nostall.errors import CorruptionError, UsageError
from nostall.torch.checkpoint import StorageWriter, load


def through_bytes(state: Any) -> Any:
    tree, leaves = encode(state)
    leaves = layout(leaves)
    data = bytearray(header(tree, leaves))
    for leaf in leaves:
        array = (
            leaf.owner
            if isinstance(leaf.owner, np.ndarray)
            else leaf.owner.reshape(-1).view(torch.uint8)
        )
        data += np.asarray(array).tobytes()
    tree, arrays = parse(np.frombuffer(bytearray(data), np.uint8))
    return decode(tree, arrays)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bytes_of(a).equal(bytes_of(b))
        )
    if isinstance(a, np.ndarray | np.generic):
        return (
            isinstance(b, type(a))
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and bool(a == b)


def test_every_type_comes_back(tmp_path: Path) -> None:
    state = {
        "scalars": [1, -(2**70), 0.1, float("inf"), float("nan"), -0.0, 1 + 2j, True, None, "é", b"\0"],
        "long": [-(10**5000), 2**2048, bytes(range(256)) * 20, b"x" * 5000],
        "tuple": (1, (2, [3])),
        5: {"int": "keys", None: 1, (1, "a"): 2, 1.5: 3, False: 4},
        "$odd": {"$tensor": "not a tensor"},
        "numpy": {
            name: np.arange(6).reshape(2, 3).astype(name)
            for name in (*"?bBhIqefdFD", ">i4", ">f8", "M8[s]", "S3", "U2")
        },
        "numpy scalar": np.float32(3.5),
        "empty": np.zeros((0, 3), np.int16),
        "strided": np.arange(12).reshape(3, 4)[:, ::2],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "torch": {
            str(d): torch.arange(6).reshape(2, 3).to(d)
            for d in (
                torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
            )
        },
        "zero-dimensional": torch.tensor(7),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 1j]).conj(),
    }  # fmt: skip
    assert same(through_bytes(state), state)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state, 3, level="durable")
        restored = ckpt.restore()
    assert restored is not None and restored.step == 3
    assert same(restored.state, state)


def test_tensors_of_one_value_or_none_come_back(tmp_path: Path) -> None:
    state = {
        "one of many": torch.arange(10)[::10],
        "none": torch.empty((0, 3)),
        "none of NumPy's": torch.from_numpy(np.zeros(1, np.float32)[:0].copy()),  # of stride 0
        "array": np.zeros(1, np.float32)[:0].copy(),
    }
    into: dict[str, Any] = {
        name: torch.zeros(x.shape).to(torch.float32) for name, x in state.items()
    }
    into["one of many"] = torch.full((10,), 5)[::10]
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(state, 3, level="durable")
        ckpt.restore(into=into)
    assert {name: x.tolist() for name, x in into.items()} == {
        name: x.tolist() for name, x in state.items()
    }
    way = way_to(state["one of many"], 7)
    assert way.bytes.tolist() == [0] * 8 and way.end == 15


class Metres(np.ndarray):
    """An array that knows its unit."""

    def __new__(cls, values: Any) -> Metres:
        array = np.asarray(values).view(cls)
        array.unit = "m"  # type: ignore[attr-defined]
        return array


class Wrapper(torch.Tensor):
    """A tensor around another one, as masked ones are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


class Known(Wrapper):
    """One that torch knows as such, as quantised weights are."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Known:
        return Known(inner["inner"])


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.integers(0, 40).map(lambda n: np.arange(n, dtype=np.float32)),
    st.integers(0, 40).map(lambda n: torch.arange(n, dtype=torch.bfloat16)),
)


@settings(max_examples=150)
@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(), st.integers(), st.none()), inner, max_size=4),
        ),
        max_leaves=12,
    )
)
def test_any_nesting_comes_back(state: Any) -> None:
    assert same(through_bytes(state), state)


@settings(max_examples=200)
@given(st.binary(max_size=400), st.integers(0, 300), st.binary(min_size=1, max_size=4))
def test_any_bytes_give_a_state_or_an_error(noise: bytes, at: int, patch: bytes) -> None:
    tree, leaves = encode({"a": np.arange(5), "b": [1, {"c": torch.ones(2)}]})
    good = header(tree, layout(leaves)) + b"\0" * 48
    for data in (noise, len(noise).to_bytes(8, "little") + noise, good[:at] + patch + good[at:]):
        with contextlib.suppress(CorruptionError):
            decode(*parse(np.frombuffer(bytearray(data), np.uint8)))


def test_tied_weights_stay_tied_and_are_written_once() -> None:
    weight = torch.arange(1000.0)
    _tree, leaves = encode({"embed": weight, "head": weight, "part": weight[:10]})
    assert [leaf.nbytes for leaf in leaves] == [4000, 40]
    state = through_bytes({"embed": weight, "head": weight})
    assert state["embed"] is state["head"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, "function"),
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "f4")]), "records"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.float32, "torch.dtype"),
        (Wrapper(torch.ones(2)), "Wrapper without memory"),
        (Known(torch.ones(2)), "Known without memory"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter without memory"),
        (np.ma.array([1, 2], mask=[True, False]), r"MaskedArray.*save \.data and \.mask"),
        (Metres([1.0, 2.0]), r"Metres.*asarray\(\) of it and unit"),
        (Path("/x"), "PosixPath"),
        ({frozenset(): 1}, "frozenset"),
        ("\ud83d\ude00", r"the text '\\ud83d\\ude00' with a pair of surrogates"),
        ({"\ud83d\ude00": np.ones(1), "\U0001f600": np.zeros(1)}, "a pair of surrogates"),
        ({("\ud83d\ude00", 1): 1}, "a pair of surrogates"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_place(value: Any, words: str, tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        with pytest.raises(UsageError, match=words) as error:
            ckpt.save({"model": [1, {"layer": value}]}, 0)
        assert "state['model'][1]['layer']" in str(error.value)
        assert ckpt.restore() is None
        ckpt.save({"model": 1}, 1, level="durable")


def test_memory_that_was_given_back_is_not_read(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    weight.untyped_storage().resize_(0)
    with (
        nostall.Checkpointer(durable=tmp_path) as ckpt,
        pytest.raises(UsageError, match=r"state\['w'\] is a torch.Tensor without memory"),
    ):
        ckpt.save({"w": weight}, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named_by_its_place() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UsageError, match=r"state\['w'\] is a nested, torch.strided tensor"):
        encode({"w": nested})


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_of_numpys_own_kinds_are_saved(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(3,))
    mapped[:] = 7
    state = {"mapped": mapped, "matrix": np.matrix([[1, 2]]), "scalar": np.float64(1)}
    found = through_bytes(state)
    assert all(np.array_equal(found[key], state[key]) for key in state)


def test_values_that_are_too_much_text_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_format, "_LARGEST_HEADER", 100_000)
    state: dict[str, Any] = {"a": {3: ("x", [0.123456789] * 20_000)}, "text": "x" * 10_000}
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        words = r"state\['a'\]\[3\]\[1\] has 240001; make it one array"
        with pytest.raises(UsageError, match=words):
            ckpt.prepare(state)
        with pytest.raises(UsageError, match=words):
            ckpt.save(state, 1)
        assert not list(tmp_path.glob("step-*"))
        fitting = {
            "a": np.array(state["a"][3][1]),
            "bytes": b"x" * 1_000_000,
            "list": [b"y" * 2000],
        }
        ckpt.save(fitting, 2, level="durable")
        found = ckpt.restore()
    assert found is not None and same(found.state, fitting)


def test_bytes_that_change_after_the_save_are_as_they_were(tmp_path: Path) -> None:
    value = bytearray(b"x" * 5000)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        saved = ckpt.save({"value": value}, 1, window=True)
        value[:] = b"y" * 5000
        value.clear()  # its memory is not held
        ckpt.before_update()
        assert saved is not None
        saved.wait()
        found = ckpt.restore()
    assert found is not None and found.state["value"] == b"x" * 5000


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(UsageError, match="deeper"):
        encode(state)


def test_others_can_read_the_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        state = {"b": np.arange(3, dtype=np.int8), "a": {"w": np.arange(5.0)}, "n": 4}
        ckpt.save(state, 0, level="durable")
    (path,) = tmp_path.glob("step-*/*.safetensors")
    read = load_file(path)
    assert set(read) == {"b", "a.w"}
    assert same(read["a.w"], state["a"]["w"]) and same(read["b"], state["b"])


def test_modules_and_optimizers_save_and_load_themselves(tmp_path: Path) -> None:
    def training(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(3):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            schedule.step()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": seed}

    first, second = training(1), training(2)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(first, 10)
        ckpt.wait()
        ckpt.restore(into=second)
    assert second["epoch"] == 1
    for name in ("model", "optimizer", "schedule"):
        assert same(dict(second[name].state_dict()), dict(first[name].state_dict())), name
    assert isinstance(first["model"].state_dict(), collections.OrderedDict)


def test_schedules_with_counts_go_on_after_a_restore(tmp_path: Path) -> None:
    def training() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], 0.5)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, drops], [4])
        return {"optimizer": optimizer, "schedule": schedule}

    def rates(training: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            training["optimizer"].step()
            training["schedule"].step()
            found.append(training["optimizer"].param_groups[0]["lr"])
        return found

    first, second = training(), training()
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        rates(first, 3)
        ckpt.save(first, 3)
        ckpt.restore(into=second)
    assert rates(second, 6) == rates(first, 6)


def test_counters_and_dictionaries_with_defaults_stay_such(tmp_path: Path) -> None:
    def state(**counts: int) -> dict[str, Any]:
        seen = collections.defaultdict(list, {"a": [Pair(1, counts["a"])]})
        seen.update({name: [count] for name, count in counts.items() if name != "a"})
        return {"counts": collections.Counter(counts), "seen": seen}

    saved, into = state(a=2, b=3), state(a=1)
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(saved, 1)
        ckpt.restore(into=into)
        found = ckpt.restore()
    assert found is not None and type(found.state["seen"]) is dict
    assert found.state["counts"].most_common() == [("b", 3), ("a", 2)]
    assert into == saved
    assert type(into["counts"]) is collections.Counter and type(into["seen"]["a"][0]) is Pair
    assert into["seen"]["new"] == []


def test_a_module_is_a_state_and_is_not_called(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.prepare(model)
        ckpt.save(model, 1, level="durable")
        found = ckpt.restore()
        assert found is not None and same(found.state, dict(model.state_dict()))
        ckpt.prepare(lambda: {"model": model})
        ckpt.save(lambda: {"model": model}, 2, level="durable")
        found = ckpt.restore()
        assert found is not None and same(found.state["model"], dict(model.state_dict()))
        ckpt.restore(1, into=(other := torch.nn.Linear(4, 3)))
        assert same(dict(other.state_dict()), dict(model.state_dict()))


class Pair(NamedTuple):
    first: Any
    second: Any


def test_what_lies_in_tuples_is_loaded(tmp_path: Path) -> None:
    def training(value: float) -> dict[str, Any]:
        nets = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
        for net in nets:
            torch.nn.init.constant_(net.weight, value)
        optimizer = torch.optim.SGD(nets[0].parameters(), lr=value)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        fixed = np.full(2, value)
        fixed.flags.writeable = False
        return {
            "nets": nets,
            "opts": [(optimizer, schedule)],
            "hidden": [(torch.full((2,), value), torch.full((3,), value))],
            "ema": {"pair": (np.full(2, value), np.full(3, value))},
            "mixed": Pair(Pair(torch.full((2,), value), value), (value, fixed)),
            "plain": (value, Pair(value, [value, {"none": Pair((), {1: Pair(value, ())})}])),
            "masks": {"none": Pair((), ()), "all": [Pair((), value)]},
            "empty": torch.nn.Sequential().state_dict(),
            "proxy": types.MappingProxyType({"net": torch.nn.Linear(1, 1), "value": value}),
        }

    first, second = training(0.5), training(0.25)
    before = dict(second)
    kept = second["hidden"][0][0], second["mixed"].first.first, second["proxy"]["net"]
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(first, 1, level="durable")
        ckpt.restore(into=second)
        assert second["nets"] is before["nets"] and second["opts"] is before["opts"]
        for one, other in zip(second["nets"], first["nets"], strict=True):
            assert same(dict(one.state_dict()), dict(other.state_dict()))
        assert [one.state_dict() for one in second["opts"][0]] == [
            one.state_dict() for one in first["opts"][0]
        ]
        for name in ("hidden", "ema", "mixed", "plain", "masks"):
            assert same(second[name], first[name]), name
        assert second["empty"]._metadata == first["empty"]._metadata
        assert second["hidden"][0][0] is kept[0] and second["mixed"].first.first is kept[1]
        assert second["proxy"]["net"] is kept[2] and second["proxy"]["value"] == 0.5
        assert kept[2].weight.equal(first["proxy"]["net"].weight)
        other = {**second, "hidden": [(torch.zeros(2), torch.zeros(4))]}
        with pytest.raises(UsageError, match=r"state\['hidden'\]\[0\]\[1\] is of shape \(4,\)"):
            ckpt.restore(into=other)


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        ([np.ones(3), 5], [np.zeros(3), None]),
        ([1, 2], [None, None]),
        ((np.ones(3), [5]), (np.zeros(3), [np.zeros(2)])),
        (torch.ones(3), torch.zeros(3)),
        (np.ones(3), np.zeros(3)),
    ],
)
def test_a_list_a_tuple_or_an_array_is_a_whole_state(tmp_path: Path, saved: Any, into: Any) -> None:
    if isinstance(saved, tuple):
        saved, into = (saved[0], [saved[0]]), (into[0], [into[0].copy()])
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save(saved, 1, level="durable")
        ckpt.restore(into=into)
    assert same(into, saved)


@pytest.mark.parametrize("into", [(1, np.zeros(3)), 5, (1, 2)])
def test_what_cannot_be_filled_is_refused(tmp_path: Path, into: Any) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save((1, np.ones(3)) if isinstance(into, tuple) else 7, 1, level="durable")
        kind = type(into).__name__
        with pytest.raises(UsageError, match=f"into= is a {kind}, not all of which can be filled"):
            ckpt.restore(into=into)


class Keeper:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: Any = {
            "moment": torch.ones(3000),
            "steps": [torch.ones(()), np.ones(2), {"tied": torch.ones(())}],
        }
        self.kept["steps"].append(self.kept["steps"][0])

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def test_what_an_object_keeps_of_its_state_does_not_keep_the_file(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"keeper": Keeper()}, 1, level="durable")
        into = {"keeper": Keeper()}
        found = ckpt.restore(into=into)
    assert found is not None
    kept, saved = into["keeper"].kept, found.state["keeper"]
    assert same(kept, saved)
    kept["steps"][0] += 1  # in place, as an optimizer counts its steps
    kept["steps"][1][:] += 1
    assert saved["steps"][0] == 1 and (saved["steps"][1] == 1).all()
    assert kept["steps"][3] is kept["steps"][0]  # tied, as before


def test_a_tensor_without_memory_is_not_filled(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"a": torch.ones(3), "b": 1}, 1, level="durable")
        into = {"a": torch.empty(3, device="meta"), "b": 0}
        with pytest.raises(
            UsageError, match=r"state\['a'\] is a tensor without memory, on .* meta"
        ):
            ckpt.restore(into=into)
        assert into["b"] == 0
        into["a"] = None
        ckpt.restore(into=into)
        assert torch.equal(into["a"], torch.ones(3))


class Counts(dict[str, int]):
    """A dictionary that saves and loads itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.update(state["items"])


def test_a_dictionary_with_a_state_dict_is_such_an_object(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"counts": Counts(a=1, b=2)}, 1, level="durable")
        into = {"counts": Counts(c=3)}
        ckpt.restore(into=into)
        found = ckpt.restore()
    assert into["counts"] == {"a": 1, "b": 2}
    assert found is not None and found.state == {"counts": {"items": [("a", 1), ("b", 2)]}}


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [None, True, 7, 0.5, math.inf, 1j, "text", b"bytes"])
def test_the_state_of_an_object_may_be_any_value(state: Any, tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"own": Holder(state), "of one": Holder(Holder(state))}, 1, level="durable")
        into = {"own": Holder(()), "of one": Holder(())}
        ckpt.restore(into=into)
    assert same([into["own"].state, into["of one"].state], [state, state])


class Registry(dict[str, Any]):
    """A mapping whose own state may be something that a checkpoint cannot hold."""

    more: object = torch.device("cpu")

    def state_dict(self) -> dict[str, Any]:
        return {**self, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


class Itself(dict[str, Any]):
    """A mapping that is its own state."""

    def state_dict(self) -> Itself:
        return self

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def test_a_mapping_whose_own_state_cannot_be_held_is_saved_by_its_entries() -> None:
    weight = torch.arange(3.0)
    tree, leaves = encode({"kept": Registry(weight=weight), "own": Itself(weight=weight)})
    assert tree["kept"].keys() == tree["own"].keys() == {"weight"}
    assert [leaf.name for leaf in leaves] == ["kept.weight"]
    with pytest.raises(UsageError, match=r"state\['kept'\]\['lock'\] is a builtins.object"):
        encode({"kept": Registry(weight=weight, lock=object())})


class Versioned(torch.nn.Linear):
    """A module whose weights mean something else since its version 2."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_know_the_version_of_what_they_load(tmp_path: Path) -> None:
    first, second = (torch.nn.Sequential(Versioned(2, 2)) for _ in range(2))
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"net": first}, 1, level="durable")
        ckpt.restore(into={"net": second})
    assert same(dict(second.state_dict()), dict(first.state_dict()))


def test_the_state_of_a_module_keeps_its_versions() -> None:
    module = torch.nn.Sequential(Versioned(2, 2))
    state = through_bytes({"net": module, "dict": module.state_dict()})
    for one in (*state.values(), *through_bytes(state).values()):
        assert same(dict(one), dict(module.state_dict()))
        torch.nn.Sequential(Versioned(2, 2)).load_state_dict(one)


def test_versions_that_no_checkpoint_can_hold_are_left_out() -> None:
    state = collections.OrderedDict(w=1)
    state._metadata = {"": {"version": 3}, "a": {"x": object()}, "b": {"x": torch.ones(1)}}  # type: ignore[attr-defined]
    assert through_bytes(state)._metadata == {"": {"version": 3}}


def test_what_older_releases_have_written_is_read() -> None:
    tree = {"bytes": {"$bytes": "eHl6"}, "net": {"weight": 1, "bias": 2}}
    state = decode(tree, {})
    assert state == {"bytes": b"xyz", "net": {"weight": 1, "bias": 2}}
    assert type(state["net"]) is dict


def test_restoring_into_other_names_is_refused(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"a": 1}, 1, level="durable")
        with pytest.raises(
            UsageError, match=r"step 1 cannot be restored: .*'b'.*read restore\(\).state"
        ):
            ckpt.restore(into={"b": 1})


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        ckpt.save({"rng": rng_state()}, 0, level="durable")
        expected = (random.random(), np.random.rand(), torch.rand(2))
        found = ckpt.restore()
    assert found is not None
    set_rng_state(found.state["rng"])
    assert same((random.random(), np.random.rand(), torch.rand(2)), expected)


class Generators:
    """What torch has for an accelerator with so many devices."""

    def __init__(self, devices: int) -> None:
        self.states = [torch.full((2,), i, dtype=torch.uint8) for i in range(devices)]

    def is_available(self) -> bool:
        return bool(self.states)

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for i, state in enumerate(states):
            self.states[i] = state


@pytest.mark.parametrize("devices", [0, 1, 2, 3])
def test_generators_of_fewer_or_more_devices_are_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, devices: int
) -> None:
    found = types.SimpleNamespace(type="another")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch, "another", Generators(2), raising=False)
    state = rng_state()
    state["another"] = [one + 100 for one in state["another"]]
    monkeypatch.setattr(torch, "another", there := Generators(devices))
    set_rng_state(state)
    assert [int(one[0]) for one in there.states] == [100, 101, 2][:devices]
    words = f"{devices} of 2 saved states of generators are set"
    assert (words in caplog.text) == (devices < 2)


def test_a_module_of_another_shape_is_told_with_its_step_and_place(tmp_path: Path) -> None:
    with nostall.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"nets": [torch.nn.Linear(4, 3)]}, 7, level="fast")
        other = torch.nn.Linear(4, 5)
        words = (
            r"^step 7 cannot be restored: state\['nets'\]\[0\] does not fit: Error\(s\) in loading"
        )
        with pytest.raises(UsageError, match=words) as caught:
            ckpt.restore(into={"nets": [other]})
        assert "size mismatch for weight" in str(caught.value)
        assert "restore().state without into=" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(RuntimeError, match=r"^Error\(s\) in loading"):  # it is torch's own call
            other.load_state_dict(ckpt.restore().state["nets"][0])


@pytest.mark.parametrize("older", [False, True])
def test_what_torch_has_saved_is_passed_over_with_what_loads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, older: bool
) -> None:
    state = {"w": torch.ones(5)}
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        if older:
            ckpt.save(state, 1)
    writer = StorageWriter(tmp_path)
    dcp.save({"w": torch.zeros(5)}, checkpoint_id="2", storage_writer=writer, no_dist=True)
    writer.close()
    words = f"step 2 in {tmp_path} was saved by torch.distributed.checkpoint: load it with nostall"
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        told = pytest.raises(CorruptionError, match=f"no checkpoint can be restored: {words}")
        with contextlib.nullcontext() if older else told:
            found = ckpt.restore()
            assert found is not None and found.step == 1 and same(found.state, state)
    assert f"passing over a checkpoint: {words}" in caplog.text
    loaded = {"w": torch.ones(5)}
    assert load(loaded, tmp_path, no_dist=True) == 2 and not loaded["w"].any()
