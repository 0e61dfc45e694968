"""One table of options: the argument over the environment over nostall.toml over the default."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import nostall
from nostall.base import _options as options
from nostall.base._sizes import TierSpec
from nostall.base._table import TABLE
from nostall.checkpoint._options import CheckpointArguments, CheckpointOptions
from nostall.cli import main
from nostall.errors import UsageError
from nostall.loader._options import LoaderArguments, LoaderOptions
from nostall.sync import SyncOptions

ANYTHING = ("loader.transforms", "loader.order")  # their own code refuses what cannot be meant
ROOT = Path(__file__).parents[3]


def forget() -> None:
    """As in a process that has read no file yet."""
    options._place.cache_clear()
    options._parsed.cache_clear()


def write(path: Path, text: str) -> None:
    path.write_text(text)
    forget()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOSTALL_CONFIG", raising=False)
    forget()
    yield tmp_path
    forget()


def test_each_place_counts_before_the_next(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.find("sync.timeline").place == "default"
    write(home / "nostall.toml", '[sync]\ntimeline = "file.json"\n[loader]\nthreads = 3\n')
    assert options.find("sync.timeline").place == "nostall.toml: [sync] timeline"
    assert SyncOptions().timeline == "file.json"
    monkeypatch.setenv("NOSTALL_TIMELINE", "variable.json")
    assert options.find("sync.timeline").place == "NOSTALL_TIMELINE"
    assert SyncOptions().timeline == "variable.json"
    assert SyncOptions(timeline="argument.json").timeline == "argument.json"
    assert LoaderOptions().threads == 3 and LoaderOptions(threads=None).threads is None
    monkeypatch.setenv("NOSTALL_TIMELINE", "")  # empty: not set
    assert SyncOptions().timeline == "file.json"

    other = home / "other.toml"
    write(other, '[sync]\ntimeline = "other.json"\n')
    monkeypatch.setenv("NOSTALL_CONFIG", str(other))
    assert (SyncOptions().timeline, LoaderOptions().threads) == ("other.json", None)


def test_the_file_is_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "nostall.toml", "[loader]\nthreads = 3\n")
    assert LoaderOptions().threads == 3
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    (home / "nostall.toml").write_text("[loader]\nthreads = 4\n")
    monkeypatch.chdir(elsewhere)  # where there is none
    assert LoaderOptions().threads == 3


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_can_write_is_not_used(
    mode: int, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = home / "nostall.toml"
    write(path, "[loader]\nthreads = 3\n")
    path.chmod(mode)
    assert LoaderOptions().threads is None
    assert "nostall.toml is not used, because other users can write it" in caplog.text
    monkeypatch.setenv("NOSTALL_CONFIG", str(path))  # the user says so
    assert LoaderOptions().threads == 3


def test_a_pipe_in_the_files_place_is_refused(home: Path) -> None:
    os.mkfifo(home / "nostall.toml")
    with pytest.raises(UsageError, match="is not a file"):
        LoaderOptions()


def test_a_loader_follows_the_file(home: Path, image_folder: Path) -> None:
    write(home / "nostall.toml", '[loader]\ntiers = ["ram:3MiB"]\nstaging = "5MiB"\nthreads = 3\n')
    source = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(source, 4, threads=2) as loader:
        found = loader.settings()
    assert found["tiers"] == [["ram", 3 << 20, ""]]
    assert (found["staging_bytes"], found["threads"]) == (5 << 20, 2)
    chosen = LoaderOptions(threads=1, staging=1 << 20)
    with nostall.DataLoader(source, 4, tiers="auto", options=chosen, threads=4) as loader:
        found = loader.settings()
    assert found["tiers"] == [["ram", source.total_bytes, ""]]
    assert (found["staging_bytes"], found["threads"]) == (1 << 20, 4)
    with pytest.raises(UsageError, match=r"options must be nostall.LoaderOptions, or None, not \{"):
        nostall.DataLoader(source, 4, options={"threads": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[loder]\n", r"nostall.toml has no section \[loder\]: did you mean \[loader\]\?"),
        ("threads = 3\n", r"nostall.toml has no section \[threads\]; it may have loader, sync"),
        ("[loader]\nthread = 3\n", r"\[loader\] has no option thread: did you mean threads\?"),
        ("[loader]\nseed = 3\n", r"\[loader\] seed is not an option of the file: pass seed="),
        ("[job]\nsecret = 'x'\n", r"\[job\] secret is not .* of the file: set NOSTALL_SECRET"),
        ("[loader]\nthreads = '3'\n", r"nostall.toml: \[loader\] threads must be .*, not '3'"),
        ("[loader\n", "nostall.toml is not TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    home: Path, image_folder: Path, text: str, told: str
) -> None:
    write(home / "nostall.toml", text)
    with pytest.raises(UsageError, match=told) as caught:
        nostall.DataLoader(nostall.ImageFolder(image_folder, index=False), 4)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_named_must_be_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(home / "pipe")
    for name, told in (("none", "NOSTALL_CONFIG={} is not there"), ("pipe", "{} is not a file")):
        path = str(home / name)
        monkeypatch.setenv("NOSTALL_CONFIG", path)
        with pytest.raises(UsageError, match=f"^{re.escape(told.format(path))}$"):
            LoaderOptions()


@pytest.mark.parametrize("given", ["10s", "-1", "0", "1e3", "9" * 5000])
def test_a_variable_that_cannot_be_meant_is_named(given: str) -> None:
    name = "NOSTALL_PEER_TIMEOUT_MS"
    with pytest.raises(UsageError, match=f"{name} must be a number of milliseconds from 1 to"):
        options.value("job.peer_timeout_ms", {name: given})
    assert options.value("job.peer_timeout_ms", {name: "250"}) == 250
    assert options.value("job.peer_timeout_ms", {name: ""}) == 10_000
    with pytest.raises(UsageError, match="NOSTALL_OBJECT_TIMEOUT_S must be a number of seconds"):
        options.value("source.object_timeout_s", {"NOSTALL_OBJECT_TIMEOUT_S": given + "s"})
    assert options.value("source.object_timeout_s", {"NOSTALL_OBJECT_TIMEOUT_S": "0.5"}) == 0.5


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -1, -0.5, 1e300, 10**400])
def test_no_option_takes_a_number_that_cannot_be_meant(home: Path, number: float) -> None:
    taken = [o.key for o in TABLE if o.key not in ANYTHING and o.values.wrong(number) is None]
    assert taken == []
    tier = dataclasses.replace(TierSpec("ram", 1), capacity=number)  # type: ignore[arg-type]
    for key, given in (("sync.cores", (number,)), ("loader.tiers", [tier])):
        assert options.row(key).values.wrong(given), key
    write(home / "nostall.toml", f"[source]\nobject_timeout_s = {number}\n")
    with pytest.raises(UsageError, match="object_timeout_s must be a number of seconds above 0"):
        options.value("source.object_timeout_s")


def test_doctor_prints_value_and_place_and_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home / "nostall.toml", "[loader]\nthreads = 3\n")
    monkeypatch.setenv("NOSTALL_SECRET", "0123456789abcdef")
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "many")
    monkeypatch.setenv("NOSTALL_RENDEVOUS", "/meet")
    assert main(["doctor"]) == 1, "one is refused"
    out = capsys.readouterr().out
    assert re.search(r"^loader.threads +3 +nostall.toml: \[loader\] threads$", out, re.M)
    assert re.search(r"^loader.reader +\"auto\" +default$", out, re.M)
    assert re.search(r"^job.secret +set +NOSTALL_SECRET$", out, re.M) and "0123456" not in out
    assert re.search(r"^source.object_retries +refused +NOSTALL_OBJECT_RETRIES must be", out, re.M)
    assert "NOSTALL_RENDEVOUS is read by nothing: did you mean NOSTALL_RENDEZVOUS?" in out


def test_the_table_has_every_default_argument_and_variable() -> None:
    for option in TABLE:
        assert option.otherwise or option.values.wrong(option.default) is None, option.key
    keys = [option.key for option in TABLE]
    assert len(set(keys)) == len(keys)

    signature = inspect.signature(nostall.DataLoader.__init__).parameters
    assert len(signature) - 1 <= 12  # without self
    daily = set(signature) - {"self", "dataset", "options", "rare"}
    rare = get_type_hints(LoaderOptions)
    assert rare == get_type_hints(LoaderArguments)
    assert daily | set(rare) == set(options.names("loader")) and not daily & set(rare)
    for name in daily - {"batch_size", "tiers"}:
        assert signature[name].default == options.row(f"loader.{name}").default
    signature = inspect.signature(nostall.Checkpointer.__init__).parameters
    daily = set(signature) - {"self", "fast", "durable", "options", "rare"}
    rare = get_type_hints(CheckpointOptions)
    assert rare == get_type_hints(CheckpointArguments)
    assert daily | set(rare) == set(options.names("checkpoint")) and not daily & set(rare)
    for name in daily:
        assert signature[name].default == options.row(f"checkpoint.{name}").default
    assert set(get_type_hints(SyncOptions)) == set(options.names("sync"))

    # Nothing reads a variable but by the table, and what native code reads stands in it.
    for path in (ROOT / "python" / "nostall").rglob("*.py"):
        read = re.findall(r"environ[^\n]*NOSTALL_\w+", path.read_text())
        assert not read or path.name == "_table.py", f"{path}: {read}"
    native = {
        name
        for folder in ("native", "mpi", "bindings")
        for path in (ROOT / folder).rglob("*.cc")
        for name in re.findall(r'getenv\("(NOSTALL_\w+)"\)', path.read_text())
    }
    listed = {option.variable for option in TABLE if option.reader}
    assert native - {"NOSTALL_NODE"} == listed
