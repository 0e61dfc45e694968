"""The plug-ins for DLIO without it: formats, options. In DLIO they are tested by `make dlio-test`."""

from __future__ import annotations

import gc
import io
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from nostall.base import _options as options
from nostall.errors import UsageError


class Base:
    """In the place of DLIO's loader."""

    def __init__(self, format_type: str, dataset_type: Any, epoch_number: int, name: str) -> None:
        self.format_type, self.dataset_type, self.batch_size = format_type, dataset_type, 1
        self.epoch_number = epoch_number
        self._args = MagicMock(
            epochs=1, seed=0, num_samples_per_file=1, my_rank=0, comm_size=1, read_threads=1,
            record_length=1, record_length_stdev=0, prefetch_size=0, preprocess_time=0,
            preprocess_time_stdev=0, resized_image=np.eye(4, dtype=np.uint8), **GIVEN,
        )  # fmt: skip

    def next(self) -> None:
        """Nothing, as there."""


# Of DLIO's arguments, those that the sources look at.
GIVEN: dict[str, Any] = {"num_dset_per_record": None, "storage_options": None}


@pytest.fixture
def dlio(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plug-in, with just so much of DLIO that its loader can be made."""
    for name in (
        "checkpointing.base_checkpointing", "common.enumerations", "reader.reader_handler",
        "data_loader.base_data_loader", "utils.utility",
    ):  # fmt: skip
        module = MagicMock(BaseDataLoader=Base, BaseCheckpointing=object, FormatReader=object)
        monkeypatch.setitem(sys.modules, f"dlio_benchmark.{name}", module)
    monkeypatch.delitem(sys.modules, "nostall.plugins.dlio", raising=False)
    import nostall.plugins.dlio as plugin

    # Of two ranks, of which the other one knows no more files.
    ranks = SimpleNamespace(allgather=lambda mine: [mine, mine[:1]])
    instance = SimpleNamespace(
        local_rank=lambda: 0, npernode=lambda: 1, nnodes=lambda: 1, comm=lambda: ranks
    )
    monkeypatch.setattr(plugin.DLIOMPI, "get_instance", lambda: instance)
    yield plugin
    sys.modules.pop("nostall.plugins.dlio")


def test_its_tiers_are_those_of_the_file_unless_the_variable_says_more(
    dlio: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "nostall.toml"
    config.write_text('[loader]\ntiers = ["ram:3MiB"]\n')
    monkeypatch.setenv("NOSTALL_CONFIG", str(config))
    sample = tmp_path / "a.npy"
    sample.write_bytes(b"1")
    for variable, capacity in (("", 3 << 20), ("ram:2MiB", 2 << 20), ("auto", 1)):
        monkeypatch.setenv("NOSTALL_DLIO_TIERS", variable)
        loader = dlio.DataLoader("npy", dlio.DatasetType.TRAIN, 1)
        loader._args.file_list_train = [str(sample)]
        loader.read()
        with loader.loader:
            assert loader.loader.settings()["tiers"] == [["ram", capacity, ""]]
    options._parsed.cache_clear()


def _hdf5(path: Path, samples: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("records", data=samples)
        file.create_dataset("labels", data=[0] * len(samples))


def _parquet(path: Path, samples: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    flat = samples.reshape(len(samples), -1)
    data = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    parquet.write_table(pa.table({"data": data}), path, row_group_size=2)


def _indexed_binary(path: Path, samples: Any) -> None:
    path.write_bytes(samples.tobytes())
    size = samples[0].nbytes
    (np.arange(len(samples)) * size).tofile(f"{path}.off.idx")
    np.full(len(samples), size).tofile(f"{path}.sz.idx")


def _tfrecord(path: Path, samples: Any) -> None:
    from source.protobuf import write_tfrecord

    write_tfrecord(path, [sample.tobytes() for sample in samples])


# Format -> what writes a file as DLIO's generator does, and samples of a file.
WRITERS: dict[str, tuple[Any, int]] = {
    "npz": (lambda path, x: np.savez(path, x=np.moveaxis(x, 0, -1), y=[0]), 1),
    "npy": (lambda path, x: np.save(path, np.moveaxis(x, 0, -1)), 1),
    "png": (lambda path, x: Image.fromarray(x[0]).save(path), 1),
    "jpeg": (lambda path, x: Image.fromarray(x[0]).save(path), 1),
    "tfrecord": (_tfrecord, 5),
    "hdf5": (_hdf5, 5),
    "parquet": (_parquet, 5),
    "indexed_binary": (_indexed_binary, 5),
    "mmap_indexed_binary": (_indexed_binary, 5),
}


def write(folder: Path, kind: str) -> tuple[list[str], list[bytes], int]:
    """Three files as DLIO writes them; the samples, and how many a file has."""
    writer, each = WRITERS[kind]
    draws = np.random.default_rng(3)
    files, samples = [], []
    for i in range(3):
        # Sizes differ from file to file, as with record_length_stdev; a Parquet column has one.
        side = 6 if kind == "parquet" else 6 + i
        data = draws.integers(0, 255, (each, side, side), dtype=np.uint8)
        path = folder / f"img_{i}_of_3.{kind}"
        writer(path, data)
        if kind == "jpeg":
            data = np.asarray(Image.open(path))[None]
        files.append(str(path))
        samples += [x.tobytes() for x in data]
    return files, samples, each


def content(parsed: Any) -> bytes:
    """The bytes of what a parser gives."""
    values = parsed.values() if isinstance(parsed, dict) else [parsed]
    return b"".join(np.ascontiguousarray(v).tobytes() for v in values)


def test_every_format_is_written_here(dlio: ModuleType) -> None:
    assert dlio._FORMATS.keys() == WRITERS.keys()


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_of_a_format_come_in_dlios_numbering(
    dlio: ModuleType, tmp_path: Path, kind: str
) -> None:
    files, samples, each = write(tmp_path, kind)
    source = dlio._source(kind, files, SimpleNamespace(num_samples_per_file=each, **GIVEN))
    parse = dlio._FORMATS[kind].parse
    assert [content(parse(source.read(i))) for i in range(len(source))] == samples


@pytest.mark.parametrize("kind", WRITERS)
def test_a_loader_parses_every_sample_and_hands_out_dlios_own(
    dlio: ModuleType, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, samples, each = write(tmp_path, kind)
    one, seen = dlio._FORMATS[kind], []

    def parse(data: Any) -> Any:
        parsed = one.parse(data)
        seen.append(content(parsed))
        return parsed

    monkeypatch.setitem(dlio._FORMATS, kind, one._replace(parse=parse))
    loader = dlio.DataLoader(kind, dlio.DatasetType.TRAIN, 1)
    loader.batch_size = 3
    loader._args.file_list_train, loader._args.num_samples_per_file = files, each
    loader.read()
    with loader.loader:
        batches = list(loader.next())
    assert sorted(seen) == sorted(samples)
    assert [b.shape for b in batches] == [(3, 4, 4)] * (len(samples) // 3)
    assert all((b == np.eye(4)).all() for b in batches)


def test_arrays_are_what_numpy_reads(dlio: ModuleType, tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for name, array in {"c": values, "f": np.asfortranarray(values), "one": values[0, 0]}.items():
        np.save(tmp_path / f"{name}.npy", array)
        np.savez_compressed(tmp_path / f"{name}.npz", x=array, y=[0])
        for kind in ("npy", "npz"):
            found = dlio._FORMATS[kind].parse((tmp_path / f"{name}.{kind}").read_bytes())
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


class _Cycle:
    """What the garbage collector ends, wherever a thread is; then another thread can go on."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(3):
            pass


def test_threads_unpack_arrays_at_once(
    dlio: ModuleType, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`ast` of Python 3.11 fails where threads take turns inside it, as NumPy's readers do."""
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    np.save(tmp_path / "a.npy", np.arange(6))
    data = (tmp_path / "a.npy").read_bytes()

    def unpack(_: int) -> int:
        _Cycle()
        return int(dlio._npy(data).sum())

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(unpack, range(8000))) == {15}


def test_npz_is_unpacked_into_memory_that_stays(dlio: ModuleType) -> None:
    arrays = (
        np.random.default_rng(0).integers(0, 255, (2000, 2001), np.uint8),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(5.0),
        np.empty((0, 3), np.float32),
    )
    for save in (np.savez, np.savez_compressed):
        for array in arrays:
            file = io.BytesIO()
            save(file, x=array)
            data = np.frombuffer(file.getvalue(), np.uint8)
            dlio._npz(data)
            tracemalloc.start()
            found = dlio._npz(data)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert found.dtype == array.dtype and found.shape == array.shape
            np.testing.assert_array_equal(found, array)
            assert most < 2_000_000  # of 4 MB


def test_a_damaged_npz_is_told(dlio: ModuleType) -> None:
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, x=np.arange(1000))
        data = bytearray(file.getvalue())
        data[len(data) // 2] ^= 1
        with pytest.raises((zipfile.BadZipFile, zlib.error)):
            dlio._npz(bytes(data))
        with pytest.raises(zipfile.BadZipFile):
            dlio._npz(file.getvalue()[:-30])


def test_a_loader_reads_the_columns_of_dlios_storage_options(
    dlio: ModuleType, tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pairs = [[i, i + 1] for i in range(4)]
    columns = {name: pa.array(pairs, pa.list_(pa.float32(), 2)) for name in "ab"}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    given = SimpleNamespace(num_samples_per_file=4, storage_options={"columns": ["b"]})
    assert list(dlio._source("parquet", [str(tmp_path / "a.parquet")], given).schema) == ["b"]


def test_datasets_of_a_record_are_its_fields(dlio: ModuleType, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    for i in range(2):
        with h5py.File(tmp_path / f"{i}.hdf5", "w") as file:
            for k in range(2):
                file.create_dataset(f"records_{k}", data=data + 10 * k + i)
    given = SimpleNamespace(num_samples_per_file=3, num_dset_per_record=2)
    source = dlio._source("hdf5", [str(tmp_path / f"{i}.hdf5") for i in range(2)], given)
    assert source.read(4) == (data[1] + 1).tobytes() + (data[1] + 11).tobytes()


def test_what_is_not_read_is_refused(dlio: ModuleType, tmp_path: Path) -> None:
    def refused(match: str, kind: str, files: list[str], each: int) -> None:
        with pytest.raises(UsageError, match=match):
            dlio._source(kind, files, SimpleNamespace(num_samples_per_file=each, **GIVEN))

    refused("csv is not among npz, npy", "csv", [], 1)
    refused("npz files of 4 samples: .* per file, or tfrecord, hdf5, parquet", "npz", ["a.npz"], 4)
    files, _, each = write(tmp_path, "hdf5")
    refused("3 hdf5 files have 15 samples, not 4 each", "hdf5", files, each - 1)
    path = tmp_path / "a.indexed_binary"
    _indexed_binary(path, np.zeros((5, 8), np.uint8))
    np.array([0, 8, 16, 0, 8]).tofile(f"{path}.off.idx")
    refused("not of one size, one after the other", "indexed_binary", [str(path)], 5)
    _indexed_binary(path, np.zeros((5, 8), np.uint8))
    for samples in (4, 6):
        refused(f"has 5 samples and not {samples}", "indexed_binary", [str(path)], samples)
    path.write_bytes(bytes(39))
    refused("is cut off", "indexed_binary", [str(path)], 5)


def test_without_dlio_the_plug_ins_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dlio_benchmark", None)
    monkeypatch.delitem(sys.modules, "nostall.plugins.dlio", raising=False)
    with pytest.raises(ImportError, match="install dlio-benchmark"):
        import nostall.plugins.dlio  # noqa: F401
