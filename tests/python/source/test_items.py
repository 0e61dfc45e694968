"""Items of Python as records: what comes back, what is refused, what any bytes give."""

from __future__ import annotations

import collections
import datetime
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from torch.utils.data import default_collate
from torchvision import tv_tensors

from nostall.errors import CorruptionError, UsageError
from nostall.source._item_writer import encode
from nostall.source._items import collate, collate_items, decode

Pair = collections.namedtuple("Pair", ["image", "label"])


def array(record: bytes) -> Any:
    return np.frombuffer(record, np.uint8)


def again(item: Any, pickles: tuple[str, ...] = ()) -> Any:
    return decode(array(encode(item, pickles)), frozenset(pickles))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, Image.Image):
        return (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
    return bool(a == b)


def _raw(tensor: torch.Tensor) -> Any:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # of the usual strides
    return plain.reshape(-1).view(torch.uint8).numpy()


ARRAYS = hnp.arrays(
    st.one_of(
        hnp.integer_dtypes(endianness="<"),
        hnp.unsigned_integer_dtypes(endianness="<"),
        hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
        hnp.boolean_dtypes(),
        hnp.byte_string_dtypes(min_len=1),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(),
    st.binary(max_size=40),
    ARRAYS,
    hnp.arrays(np.float32, (2, 3)).map(torch.from_numpy),
    hnp.arrays(np.int16, (3,)).map(lambda a: a[0]),
)
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.integers(-5, 5), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


@given(ITEMS)
def test_any_item_comes_back(item: Any) -> None:
    assert same(again(item), item)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_tensors_of_every_type_come_back(dtype: torch.dtype) -> None:
    item = torch.arange(6).reshape(2, 3).to(dtype)
    assert same(again(item), item)
    assert same(again(item.t()), item.t())  # strides do not


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.int32, torch.float32, torch.int64, torch.float64],
)
def test_tensors_of_one_value_or_none_come_back(dtype: torch.dtype) -> None:
    of_numpy = torch.from_numpy(np.zeros(3, np.uint8)[:0].copy()).to(dtype)  # of stride 0
    one = torch.arange(10).to(dtype)[::10]
    for item in (torch.zeros((0, 4), dtype=dtype), of_numpy, one, one[0]):
        assert same(again(item), item)
        batch = collate([array(encode(item))] * 2, "torch")
        assert same(batch, torch.stack([item] * 2))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_pictures_of_every_mode_come_back(mode: str) -> None:
    rgb = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))
    item = rgb.convert("L").convert(mode) if mode == "I;16" else rgb.convert(mode)
    back = again(item)
    assert same(back, item)
    assert back.convert("RGB").tobytes() == item.convert("RGB").tobytes()


def test_tensors_of_torchvision_keep_their_kind() -> None:
    boxes = tv_tensors.BoundingBoxes(
        [[1.0, 2, 3, 4]], format="CXCYWH", canvas_size=(30, 40), clamping_mode="hard"
    )
    points = tv_tensors.KeyPoints([[1.0, 2]], canvas_size=(30, 40))
    image, back, points_back = again((tv_tensors.Image(torch.zeros(3, 4, 5)), boxes, points))
    assert type(image) is tv_tensors.Image
    assert type(points_back) is tv_tensors.KeyPoints
    assert points_back.canvas_size == points.canvas_size and torch.equal(points_back, points)
    assert back.clamping_mode == "hard"
    assert type(back) is tv_tensors.BoundingBoxes
    assert (back.format, back.canvas_size) == (boxes.format, boxes.canvas_size)
    assert torch.equal(back, boxes)


def test_what_is_read_may_be_written_to() -> None:
    tensor, values = again((torch.zeros(3), np.zeros(3)))
    tensor += 1
    values += 1


def with_transparency() -> Any:
    picture = Image.new("P", (2, 2))
    picture.info["transparency"] = 0
    return picture


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"when": datetime.date(2020, 1, 1)}, r"item\['when'\] is a datetime\.date.*pickles="),
        ([1, {2, 3}], r"item\[1\] is a builtins\.set"),
        (np.array([None]), "type object"),
        (torch.zeros(2).to_sparse(), "not dense"),
        ({(1, 2): 3}, "key"),
        (2**70, "builtins.int"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray: give a plain array"),
        (with_transparency(), "with transparency"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_place(item: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(item)


def test_a_pickle_needs_its_name_to_be_written_and_read() -> None:
    item = {"when": datetime.date(2020, 1, 1)}
    assert again(item, ("datetime.date",)) == item
    record = array(encode(item, ("datetime.date",)))
    with pytest.raises(CorruptionError, match=r"datetime\.date, which was not allowed"):
        decode(record)


class Reaching:
    """Its pickle calls another function."""

    def __reduce__(self) -> Any:
        return print, ("called",)


def test_a_pickle_finds_nothing_that_was_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{Reaching.__module__}.Reaching"
    record = array(encode(Reaching(), (name,)))
    with pytest.raises(CorruptionError, match=r"asks for builtins\.print"):
        decode(record, frozenset((name,)))
    assert capsys.readouterr().out == ""


def check_total(record: Any) -> None:
    try:
        decode(record)
        collate([record, record], "numpy")
    except (CorruptionError, UsageError):
        pass


GOOD = [
    encode((torch.zeros(2, 3), {"a": 1, "b": "text"}, b"bytes", 0.5, None)),
    encode(Pair(np.zeros(3, "<i2"), [True, np.float32(1)])),
]


@settings(max_examples=300)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255))))
def test_changed_records_give_an_item_or_an_error(
    good: bytes, changes: list[tuple[int, int]]
) -> None:
    record = bytearray(good)
    for at, value in changes:
        record[at % len(record)] = value
    check_total(array(bytes(record)))


@given(st.sampled_from(GOOD), st.integers(0, 400))
def test_records_that_are_cut_give_an_error(good: bytes, length: int) -> None:
    record = array(good[:length])
    if length < len(good):
        with pytest.raises(CorruptionError):
            decode(record)


@given(st.binary(max_size=64))
def test_any_bytes_give_an_item_or_an_error(data: bytes) -> None:
    check_total(array(data))


@given(st.text(max_size=60))
def test_any_template_gives_an_item_or_an_error(template: str) -> None:
    text = template.encode("utf-8", "replace")
    body = struct.pack("<II", len(text), 8 + len(text) + 256) + text + bytes(256)
    check_total(array(body))


def alike(a: Any, b: Any) -> bool:
    """Equal batches: tensors as tensors, what is a list in one a list in the other."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def batch_of(n: int, vary: bool) -> list[Any]:
    return [
        (
            torch.full((2, 3), float(i)),
            {"label": i, "name": "x" * (i if vary else 2), "weight": np.float32(i), "ok": i > 1},
            Pair(np.arange(3) + i, [0.5 * i]),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("vary", [False, True])
def test_a_batch_is_what_torch_makes(vary: bool) -> None:
    items = batch_of(5, vary)
    records = [array(encode(item)) for item in items]
    assert alike(collate(records, "torch"), default_collate(items))
    assert alike(collate_items(items, "torch"), default_collate(items))


class Named(NamedTuple):
    text: str
    parts: list[str]


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_texts_come_in_the_containers_that_torch_gives(output: str) -> None:
    for item in (
        "a",
        {"text": "a", "parts": ["b", b"c"]},
        ("a", b"b", ["c", ("d",)], {"text": "e"}),
        ["a", {"inside": ("b", "c")}],
        Named("a", ["b", "c"]),
    ):
        items = [item, item]
        records = [array(encode(item))] * 2
        for made in (collate(records, output), collate_items(items, output)):
            assert alike(made, default_collate(items))


def test_a_batch_of_numpy_has_arrays_in_the_places_of_tensors() -> None:
    items = batch_of(4, True)
    for made in (
        collate([array(encode(i)) for i in items], "numpy"),
        collate_items(items, "numpy"),
    ):
        assert made[0].shape == (4, 2, 3)
        assert made[0].dtype == np.float32
        assert made[1]["label"].tolist() == [0, 1, 2, 3]
        assert made[1]["name"] == ["", "x", "xx", "xxx"]
        assert made[1]["ok"].dtype == np.bool_
        assert made[2].image.shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_a_type_that_numpy_lacks_stays_a_tensor_whatever_was_imported(dtype: torch.dtype) -> None:
    pytest.importorskip("ml_dtypes")  # after which NumPy knows their names
    items = [{"a": torch.full((2,), i, dtype=dtype)} for i in range(2)]
    records = [array(encode(item)) for item in items]
    for batch in (collate(records, "numpy"), collate_items(items, "numpy")):
        assert batch["a"].dtype is dtype
        assert batch["a"].float().tolist() == [[0, 0], [1, 1]]


def test_templates_that_differ_in_order_alone_make_the_same_batch() -> None:
    items = [{"a": 1, "b": 2}, {"b": 20, "a": 10}]
    assert alike(collate([array(encode(i)) for i in items], "torch"), default_collate(items))


def test_items_of_other_shapes_or_kinds_are_refused() -> None:
    records = [array(encode(torch.zeros(2))), array(encode(torch.zeros(3)))]
    with pytest.raises(UsageError, match=r"cannot be put together.*collate="):
        collate(records, "torch")
    with pytest.raises(UsageError, match="cannot be put together"):
        collate([array(encode(None))] * 2, "numpy")


def test_the_format_is_what_the_page_says() -> None:
    record = encode({"x": np.array([1, 2], "<u2"), "t": "ab"})
    template = b'{"d":[["x",["n","<u2",[2]]],["t","s"]]}'
    assert record[:8] == struct.pack("<II", len(template), len(record))
    assert record[8 : 8 + len(template)] == template
    assert record[64:96] == b"\1\0\2\0".ljust(16, b"\0") + b"\2".ljust(16, b"\0")
    assert record[96:] == b"ab"


class Outer:
    class Inner(NamedTuple):
        a: int


def test_named_tuples_of_classes_come_back() -> None:
    assert again(Outer.Inner(3)) == Outer.Inner(3)


def test_a_record_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_imported_yet.py").write_text(
        "import collections\nP = collections.namedtuple('P', 'a')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    template = b'{"o":"not_imported_yet:P","v":["i"]}'
    record = struct.pack("<II", len(template), 80) + template.ljust(56) + bytes(16)
    with pytest.raises(CorruptionError, match="none of that name"):
        decode(array(record))
    assert "not_imported_yet" not in sys.modules


def test_arrays_of_text_and_complex_numbers_are_put_together_as_torch_does() -> None:
    for unknown in (np.array(["a"]), np.longdouble(1), np.ones(2, np.longdouble)):
        with pytest.raises(UsageError, match=r"cannot be put together.*collate="):
            collate([array(encode(unknown))], "torch")
    batch = collate([array(encode(np.array([1j])))] * 2, "torch")
    assert torch.equal(batch, default_collate([np.array([1j])] * 2))
