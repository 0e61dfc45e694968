"""DLIO's plug-ins where DLIO is not installed; with it, they are tested by `make dlio-test`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from nostall.base import _options as options


class Base:
    """In the place of DLIO's loader."""

    def __init__(self, format_type: str, dataset_type: Any, epoch_number: int, name: str) -> None:
        self.format_type, self.dataset_type, self.batch_size = format_type, dataset_type, 1
        self._args = MagicMock(
            epochs=1, seed=0, num_samples_per_file=1, my_rank=0, comm_size=1, read_threads=1,
            record_length=1, record_length_stdev=0, prefetch_size=0,
        )  # fmt: skip


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

    instance = SimpleNamespace(local_rank=lambda: 0, npernode=lambda: 1, nnodes=lambda: 1)
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


def test_without_dlio_the_plug_ins_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dlio_benchmark", None)
    monkeypatch.delitem(sys.modules, "nostall.plugins.dlio", raising=False)
    with pytest.raises(ImportError, match="install dlio-benchmark"):
        import nostall.plugins.dlio  # noqa: F401
