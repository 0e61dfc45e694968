"""``nostall checkpoints``: what it prints, and what it exits with."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nostall
from nostall import _native
from nostall.checkpoint._format import Manifest
from nostall.checkpoint._store import Entry, Store, io_errors, part_name
from nostall.cli import _checkpoints, main
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError


@pytest.fixture
def tiers(tmp_path: Path) -> list[str]:
    """Steps 1 to 3 durable, 3 on the fast tier as well."""
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, durable, level="durable") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": np.full(9, step), "opt": {"lr": 0.5}}, step, metric=step / 4)
    return [str(fast), str(durable)]


def damage(directory: str, step: int) -> Path:
    (path,) = Path(directory).glob(f"step-{step:012d}/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_ls_lists_what_is_complete(tiers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (Path(tiers[1]) / "step-000000000009").mkdir()
    assert main(["checkpoints", "ls", *tiers]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["3", "1", "2", "3", "9"]
    assert "0.75" in lines[1] and "not complete" in lines[-1]
    assert main(["checkpoints", "ls", "--step", "2", tiers[1]]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_verify_finds_damage(tiers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", *tiers]) == 0
    assert capsys.readouterr().out.count("verified") == 4
    path = damage(tiers[1], 2)
    (Path(tiers[1]) / "step-000000000001" / "manifest.json").write_text("{}")
    assert main(["checkpoints", "verify", *tiers]) == 5
    output = capsys.readouterr().out
    assert output.count("DAMAGED") == 2 and str(path) in output and "CRC32C" in output


def test_what_the_job_removes_meanwhile_is_not_called_damaged(
    tiers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = _checkpoints._check

    def slowly(store: Store, entry: Entry, manifest: Manifest) -> str:
        shutil.rmtree(entry.path.parent / "step-000000000002", ignore_errors=True)
        return check(store, entry, manifest)

    monkeypatch.setattr(_checkpoints, "_check", slowly)
    assert main(["checkpoints", "verify", tiers[1]]) == 0
    output = capsys.readouterr().out
    assert output.count("verified") == 2 and output.count("removed meanwhile") == 1


def test_what_a_failing_disk_does_not_give_is_not_called_removed(
    tiers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, failing = Path.read_bytes, []

    def fail_from_here_on(store: Store, step: int, *more: Any) -> list[int]:
        failing.append(step)
        with io_errors("read", store.place(step)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(path: Path) -> bytes:
        if failing and path.name == "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Store, "check", fail_from_here_on)
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert main(["checkpoints", "verify", tiers[1]]) == IoError.exit_code
    said = capsys.readouterr().out
    assert said.count("UNREADABLE: ") == 3 and "removed meanwhile" not in said


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("when", ["_check", "view"])
def test_checkpoints_of_a_directory_that_goes_are_not_called_removed(
    tiers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
    there: bool,
) -> None:
    """A file system that is not mounted any more leaves an empty directory, or none."""
    inner = getattr(_checkpoints, when)

    def late(*arguments: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            shutil.move(tiers[1], f"{tiers[1]}.elsewhere")
            if there:
                Path(tiers[1]).mkdir()
        return inner(*arguments)

    monkeypatch.setattr(_checkpoints, when, late)
    assert main(["checkpoints", "verify", tiers[1]]) == IoError.exit_code
    said = capsys.readouterr()
    assert "removed meanwhile" not in said.out
    assert f"{tiers[1]} is not the directory" in said.err and "Mount its file" in said.err


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """The system lets nobody read the file; root could, so that root is somebody else meanwhile."""
    path.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        path.chmod(0o644)


@pytest.mark.parametrize("name", ["*.safetensors", "manifest.json"])
def test_what_cannot_be_read_is_not_called_damaged(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # whose parents all may pass
        os.chmod(home, 0o755)
        with nostall.Checkpointer(durable=home, level="durable") as ckpt:
            for step in (1, 2):
                ckpt.save({"step": step}, step)
        assert main(["checkpoints", "verify", home]) == 0
        assert main(["checkpoints", "restore-dry-run", home]) == 0
        (path,) = Path(home).glob(f"step-000000000002/{name}")
        capsys.readouterr()
        with refused(path):
            assert main(["checkpoints", "verify", home]) == IoError.exit_code
            said = capsys.readouterr().out
            assert "UNREADABLE: " in said and str(path) in said and "Permission denied" in said
            assert "DAMAGED" not in said and said.count("verified") == 1
            # As a restore would, which goes back to the one before.
            assert main(["checkpoints", "restore-dry-run", home]) == 0
            assert "would restore step 1" in capsys.readouterr().out
        damage(home, 1)
        with refused(path):
            assert main(["checkpoints", "verify", home]) == CorruptionError.exit_code


def test_a_part_that_cannot_be_looked_for_is_not_called_damaged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        os.chmod(home, 0o755)
        with nostall.Checkpointer(durable=home, level="durable") as ckpt:
            for step in (1, 2):
                ckpt.save({"step": step}, step)
        (path,) = Path(home).glob("step-000000000002/*.safetensors")
        elsewhere = Path(home) / "elsewhere"
        elsewhere.mkdir()
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
        with refused(elsewhere):
            assert main(["checkpoints", "ls", home]) == IoError.exit_code
            said = capsys.readouterr().out
            assert f"UNREADABLE: cannot look for {path}: Permission denied" in said
            # As a restore would, which goes back to the one before and says why.
            assert main(["checkpoints", "restore-dry-run", home]) == 0
            said = capsys.readouterr().out
            assert f"passed over: cannot look for {path}: Permission denied" in said
            assert "would restore step 1" in said
        path.unlink()
        assert main(["checkpoints", "ls", home]) == CorruptionError.exit_code
        assert f"DAMAGED: {path} does not exist" in capsys.readouterr().out


def test_rm_removes_and_says_what(tiers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "rm", "--step", "3", "--step", "1", *tiers]) == 0
    output = capsys.readouterr().out
    assert output.count("removed step") == 3 and output.count("no step") == 1
    with nostall.Checkpointer(*tiers) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.step == 2
        assert main(["checkpoints", "rm", "--step", "2", tiers[1]]) == 2
    assert "another running job" in capsys.readouterr().err


def test_names_of_any_bytes_keep_no_command_from_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"{tmp_path}/\udcff"
    with nostall.Checkpointer(durable=root, level="durable") as ckpt:
        for step in (1, 2):
            ckpt.save({"value": step}, step)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8", "strict"))
    assert main(["checkpoints", "rm", root, "--step", "1", "--step", "2"]) == 0
    lines = [f"removed step {step} from {tmp_path}/\\xff\n" for step in (1, 2)]
    assert printed.getvalue().decode() == "".join(lines) and Store(root, "durable").steps() == []


def test_what_is_not_there_is_an_error(
    tiers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["checkpoints", "ls", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out.endswith(f"no checkpoints in {tmp_path / 'empty'}\n")
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    said = f"no checkpoints in {tmp_path}; there are some in {', '.join(sorted(tiers))}\n"
    assert capsys.readouterr().out.endswith(said)
    for words, told in (
        (["verify", str(tmp_path / "empty")], f"no complete checkpoint in {tmp_path / 'empty'}"),
        (["verify", "--step", "7", *tiers], f"of step 7 in {tiers[0]}, {tiers[1]}"),
        (["ls", "--step", "7", tiers[1]], f"of step 7 in {tiers[1]}"),
        (["rm", "--step", "7", "--step", "1", "--step", "8", *tiers], "no step 7, 8 in "),
    ):
        assert main(["checkpoints", *words]) == UsageError.exit_code
        assert told in capsys.readouterr().err
    with nostall.Checkpointer(*tiers) as ckpt:
        assert 1 not in ckpt.durable.steps()  # those that are there are removed


def test_restore_dry_run_reads_as_a_restore_would(
    tiers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = damage(tiers[0], 3)
    assert main(["checkpoints", "restore-dry-run", *tiers]) == 0
    output = capsys.readouterr().out
    assert f"passed over: {path}" in output and f"would restore step 3 from {tiers[1]}" in output
    assert "state['w']: int64 of shape (9,)" in output and "state['opt']['lr']: 0.5" in output
    for step in (1, 2, 3):
        damage(tiers[1], step)
    assert main(["checkpoints", "restore-dry-run", *tiers]) == 5


@pytest.mark.parametrize("limited", ["fast", "both", "fast and the other one goes"])
def test_restore_dry_run_takes_another_copy_of_what_a_limit_hides(
    tiers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limited: str,
) -> None:
    opened = Store.open

    def limit(store: Store, *arguments: Any) -> Any:
        if store.kind == "fast" and "goes" in limited:
            shutil.rmtree(Store(tiers[1], "durable").directory(3))
        if limited == "both" or store.kind == "fast":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(store, *arguments)

    monkeypatch.setattr(Store, "open", limit)
    status = main(["checkpoints", "restore-dry-run", *tiers])
    said = capsys.readouterr()
    if limited != "fast":  # no older one
        assert status == IoError.exit_code and "ulimit -n" in said.err
    else:
        assert status == 0 and f"would restore step 3 from {tiers[1]}" in said.out


def test_restore_dry_run_does_not_count_the_import_of_torch(tmp_path: Path) -> None:
    with nostall.Checkpointer(durable=tmp_path / "ckpt") as ckpt:
        ckpt.save({"w": (torch.zeros(9), 1)}, 1, level="durable")
    # A torch whose import takes long: it sets the clock forward.
    (tmp_path / "torch.py").write_text(
        "import time\n"
        "clock = time.perf_counter\n"
        "time.perf_counter = lambda: clock() + 1000\n"
        "class dtype: pass\n"
        "class Tensor:\n"
        "    shape = (9,)\n"
        "    as_strided = view = reshape = lambda self, *_: self\n"
        "float32 = Tensor.dtype = dtype()\n"
        "from_numpy = lambda _: Tensor()\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "nostall", "checkpoints", "restore-dry-run", tmp_path / "ckpt"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"bytes in ([\d.]+) s .*\n.*\n.*state\['w'\]: tuple of 2", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 1000


def test_restore_dry_run_refuses_what_a_restore_refuses(
    tiers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "restore-dry-run", "--rank", "1", *tiers]) == UsageError.exit_code
    assert "has no part of rank 1" in capsys.readouterr().err
    assert main(["checkpoints", "restore-dry-run", "--step", "7", *tiers]) == UsageError.exit_code
    assert "there is no complete checkpoint of step 7 in" in capsys.readouterr().err


def test_restore_dry_run_refuses_more_directories_than_a_restore_reads(
    tiers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    words = ["checkpoints", "restore-dry-run", tiers[0], str(older), tiers[1]]
    assert main(words) == UsageError.exit_code
    said = capsys.readouterr()
    assert said.out == ""
    assert "a restore reads two directories, not 3: give the fast one" in said.err


def test_restore_dry_run_passes_over_what_torch_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        ckpt.save({"step": 1}, 1)
        ckpt.save({"step": 2}, 2)
    store = Store(tmp_path, "durable")
    manifest = store.manifests()[-1]
    store.publish(dataclasses.replace(manifest, extra={"dcp": {}}))
    assert main(["checkpoints", "restore-dry-run", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "passed over: step 2" in output and "would restore step 1" in output
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.step == 1


def test_drain_refuses_a_directory_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    fast.mkdir()
    assert main(["checkpoints", "drain", str(fast), str(durable)]) == UsageError.exit_code
    assert f"there never was a checkpoint in {fast}" in capsys.readouterr().err
    assert not durable.exists()
    nostall.Checkpointer(fast).close()  # a job that has saved nothing
    assert main(["checkpoints", "drain", str(fast), str(durable)]) == 0


def test_drain_continues_without_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, durable = str(tmp_path / "fast"), str(tmp_path / "durable")
    with nostall.Checkpointer(fast, level="fast") as ckpt:
        for step in range(3):
            ckpt.save({"step": step}, step)
    assert main(["checkpoints", "drain", fast, durable, "--keep", "2", "--rate", "100MB"]) == 0
    assert "2 checkpoints drained" in capsys.readouterr().out
    assert main(["checkpoints", "verify", durable]) == 0
    assert capsys.readouterr().out.count("verified") == 2


def test_rm_takes_no_good_save_with_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path, "durable")
    manifest, words = store.directory(1) / "manifest.json", ["checkpoints", "rm", str(tmp_path)]
    for value in (1, 2):
        with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
            ckpt.save({"value": value}, 1)
        if value == 1:
            manifest.write_bytes(b"{}")
            assert main(["checkpoints", "verify", str(tmp_path)]) == CorruptionError.exit_code
    assert main([*words, "--step", "1"]) == UsageError.exit_code
    (good,) = store.manifests()
    said = capsys.readouterr().err
    assert f"has the saves {good.id} beside a damaged one" in said
    assert f"remove {manifest} alone" in said
    manifest.unlink()
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    with nostall.Checkpointer(durable=tmp_path) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.state["value"] == 2
    assert len(list(store.directory(1).iterdir())) == 2  # the part of the damaged one is gone
    assert main([*words, "--step", "1"]) == 0
    assert store.steps() == []


def test_rm_calls_nothing_damaged_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nostall.Checkpointer(durable=tmp_path, level="durable") as ckpt:
        saved = ckpt.save({"value": 1}, 1)
    assert saved is not None
    store = Store(tmp_path, "durable")
    manifest = store.directory(1) / "manifest.json"
    manifest.rename(manifest.with_name(f"manifest-{saved.id}.json"))
    manifest.symlink_to(manifest.name)  # a loop
    words = ["checkpoints", "rm", str(tmp_path), "--step", "1"]
    assert main(words) == IoError.exit_code
    said = capsys.readouterr().err
    assert f"{manifest} cannot be read" in said and f"the saves {saved.id} beside it" in said
    assert "a damaged one" not in said and len(store.manifests()) == 1
    manifest.unlink()
    assert main(words) == 0 and store.steps() == []


def three_saves(home: Path) -> tuple[Store, Store]:
    """A fast directory with steps 1 to 3, and a durable one with none."""
    fast, durable = Store(home / "fast", "fast"), Store(home / "durable", "durable")
    with nostall.Checkpointer(fast.root, level="fast", keep=3) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"step": step}, step)
    return fast, durable


@pytest.mark.parametrize("action", ["drain", "rm"])
def test_a_reader_that_goes_away_ends_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """It is not the checkpoint that fails whose word cannot be printed."""
    fast, durable = three_saves(tmp_path)
    words = ["checkpoints", "drain", str(fast.root), str(durable.root)]
    if action == "rm":
        assert main(words) == 0
        assert main(["checkpoints", "branch", str(durable.root), "--step", "1"]) == 0
        words = ["checkpoints", "rm", str(durable.root), "--superseded"]

    def gone(*_: Any, **options: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(_checkpoints, "print", gone, raising=False)
    main(words)
    assert [m.step for m in durable.manifests()] == ([1] if action == "drain" else [1, 3])


@pytest.mark.parametrize(
    ("failing", "error"), [((1,), IoError), ((1, 2), IoError), ((1, 2), PeerError)]
)
def test_what_fails_keeps_no_other_checkpoint_from_its_turn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: tuple[int, ...],
    error: type[Error],
) -> None:
    fast, durable = three_saves(tmp_path)
    words = ["checkpoints", "drain", str(fast.root), str(durable.root)]
    prepare, remove = Store.prepare, Store.remove

    def refuse(store: Store, step: int, *more: Any) -> Any:
        if step in failing:
            raise error(f"step {step} is refused")
        return remove(store, step, *more) if more else prepare(store, step)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "prepare", refuse)
        assert main(words) == error.exit_code
    said = capsys.readouterr()
    assert "; ".join(f"step {step} is refused" for step in failing) in said.err
    drained = [m.step for m in durable.manifests()]
    assert drained == [step for step in (1, 2, 3) if step not in failing]
    assert main(words) == 0
    assert main(["checkpoints", "branch", str(durable.root), "--step", "1"]) == 0
    failing = tuple(step + 1 for step in failing[:1])
    words = ["checkpoints", "rm", str(durable.root), "--superseded"]
    with monkeypatch.context() as patched:
        patched.setattr(Store, "remove", refuse)
        assert main(words) == error.exit_code
    assert "step 2 is refused" in capsys.readouterr().err
    assert [m.step for m in durable.manifests()] == [1, 2]


def test_drain_removes_what_a_killed_one_has_left(
    tiers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tiers[1], "durable")
    before = sorted(store.root.rglob("step-*/*"))
    left, of_user = (
        store.directory(3) / name
        for name in (part_name(0, store.saves(3)[0].id, 77), "notes.safetensors")
    )
    words = ["checkpoints", "drain", *tiers]

    def drained() -> list[Path]:
        left.touch()
        of_user.touch()
        assert main(words) == 0
        return sorted(store.root.rglob("step-*/*"))

    assert drained() == sorted([*before, of_user])
    lock = _native.DirectoryLock(str(store.root / ".lock"))  # a running job's
    assert lock.acquire() == _native.Locked.yes
    left.touch()
    assert main(words) == UsageError.exit_code and left.exists()
    lock.release()

    class NoLock:
        def __init__(self, path: str) -> None:
            pass

        def acquire(self) -> _native.Locked:
            return _native.Locked.unsupported

        def release(self) -> None:
            pass

    monkeypatch.setattr(_native, "DirectoryLock", NoLock)
    assert drained() == sorted([*before, of_user, left])
    assert "has no locks: nothing keeps" in caplog.text


@pytest.mark.parametrize("rate", ["300", "0.5B", "fast", ""])
def test_drain_takes_the_rates_that_a_checkpointer_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: str
) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, level="fast") as ckpt:
        ckpt.save({"step": 1}, 1)
    assert main(["checkpoints", "drain", str(fast), str(durable), "--rate", rate]) == 2
    said = 'nostall: rate must be bytes per second, as "200MB" with its unit, or a number of at'
    assert capsys.readouterr().err.startswith(said)
    assert not durable.exists()


def test_drain_reads_a_copy_back_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    with nostall.Checkpointer(fast, level="fast") as ckpt:
        ckpt.save({"step": 1}, 1)
    file_copy = _native.FileCopy

    class Damaging:
        def __init__(self, source: str, target: str, *more: Any, **options: Any) -> None:
            self.target, self.copy = target, file_copy(source, target, *more, **options)

        def run(self) -> None:
            self.copy.run()
            damage(str(durable), 1)

    with monkeypatch.context() as patched:
        patched.setattr(_native, "FileCopy", Damaging)
        assert main(["checkpoints", "drain", str(fast), str(durable)]) != 0
    assert "reads back with 1 damaged blocks" in capsys.readouterr().err
    assert Store(durable, "durable").manifests() == []
    assert main(["checkpoints", "drain", str(fast), str(durable)]) == 0
    assert "1 checkpoint drained" in capsys.readouterr().out


def test_a_directory_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "ls", "/nonexistent/ckpt"]) == 2
    assert "/nonexistent/ckpt" in capsys.readouterr().err


def test_a_directory_without_checkpoints_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "restore-dry-run", str(tmp_path)]) == UsageError.exit_code
    said = f"there is no complete checkpoint in {tmp_path}"
    assert capsys.readouterr().err == f"nostall: {said}\n"
    with nostall.Checkpointer(durable=tmp_path / "run", level="durable") as ckpt:
        ckpt.save({"value": 1}, 1)
    assert main(["checkpoints", "restore-dry-run", str(tmp_path)]) == UsageError.exit_code
    assert capsys.readouterr().err == f"nostall: {said}; there are some in {tmp_path / 'run'}\n"
    (manifest,) = (tmp_path / "run").glob("*/*manifest*")
    manifest.unlink()
    assert main(["checkpoints", "restore-dry-run", str(tmp_path)]) == UsageError.exit_code
    assert capsys.readouterr().err == f"nostall: {said}\n", "no step there is complete"


def test_restore_dry_run_of_superseded_checkpoints_alone_is_no_error_of_use(
    tiers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "branch", "--step", "1", *tiers]) == 0
    assert main(["checkpoints", "rm", "--step", "1", *tiers]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "restore-dry-run", *tiers]) == 5
    out = capsys.readouterr().out
    assert out.count("superseded: step") >= 2
    assert out.endswith(f"nothing can be restored from {', '.join(tiers)}\n")


def test_checkpoints_that_are_spread_over_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nostall.Checkpointer(tmp_path / "fast", level="fast") as ckpt:
        ckpt.save({"a": np.arange(10)}, 3)
    store = Store(tmp_path / "fast", "fast")
    (entry,) = store.entries()
    assert entry.manifest is not None
    mine = entry.manifest.parts[0]
    other = dataclasses.replace(mine, rank=1, name=mine.name.replace("00000.", "00001.", 1))
    store.publish(
        dataclasses.replace(entry.manifest, world_size=2, parts=(mine, other), spread=True)
    )
    assert main(["checkpoints", "verify", str(tmp_path / "fast")]) == 0
    assert "of it the parts of ranks 0" in capsys.readouterr().out
    arguments = ["checkpoints", "restore-dry-run", str(tmp_path / "fast"), "--rank"]
    assert main([*arguments, "0"]) == 0
    assert main([*arguments, "1"]) == 5
    assert "rank 1 is on another node" in capsys.readouterr().out
    assert main(["checkpoints", "drain", str(tmp_path / "fast"), str(tmp_path / "durable")]) == 0
    out = capsys.readouterr().out
    assert "other nodes have parts" in out and "0 checkpoints drained" in out
