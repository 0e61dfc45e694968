"""Emulated hosts: what runs on them sees a name, a mount and a memory of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nostall.errors import UsageError
from nostall_bench import hosts

NEEDS = pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))
MEMORY = 128 << 20


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Path, dict[str, list[Path]]]]:
    """A folder for `Hosts`, and one that each of two hosts sees other files in. Prints the folder's log
    at the end, for what is told of a test that fails."""
    seen = tmp_path / "seen"
    seen.mkdir()
    roots = [tmp_path / f"root{i}" for i in range(2)]
    for i, root in enumerate(roots):
        root.mkdir()
        (root / "file").write_text(f"of host {i}\n")
    yield tmp_path, {str(seen): roots}
    print((tmp_path / "log").read_text())


@NEEDS
@pytest.mark.multi
def test_ranks_of_a_host_have_its_name_mount_and_memory(
    two: tuple[Path, dict[str, list[Path]]],
) -> None:
    folder, mounts = two
    log = folder / "log"
    words = (
        f"hostname; cat {folder}/seen/file; ls /dev/shm | wc -l; "
        "grep -o 'nsb.*' /proc/self/cgroup | head -1"
    )
    with hosts.Hosts(2, MEMORY, folder) as on:
        on.run(["sh", "-c", f'echo "$({words})" | tr "\\n" " "'], 2, mounts, log=log, timeout=400)
        names = on.names
    said = [f"{name} of host {i} 0 {name}" for i, name in enumerate(names) for _ in range(2)]
    found = log.read_text()
    assert [found.count(line) for line in said] == [2] * 4
    assert not any(Path("/sys/fs/cgroup/memory", name).exists() for name in names)


@NEEDS
@pytest.mark.multi
def test_a_job_that_takes_more_than_a_hosts_memory_says_so(
    two: tuple[Path, dict[str, list[Path]]],
) -> None:
    folder, mounts = two
    command = [sys.executable, "-c", f"bytearray({2 * MEMORY})"]
    with (
        hosts.Hosts(2, MEMORY, folder) as on,
        pytest.raises(UsageError, match=f"killed for a host's memory of {MEMORY} bytes: see"),
    ):
        on.run(command, 1, mounts, log=folder / "log", timeout=400)


@NEEDS
@pytest.mark.multi
def test_a_job_that_takes_too_long_is_ended(two: tuple[Path, dict[str, list[Path]]]) -> None:
    folder, mounts = two
    with (
        hosts.Hosts(2, MEMORY, folder) as on,
        pytest.raises(UsageError, match="took more than 3 s"),
    ):
        on.run(["sleep", "1000"], 1, mounts, log=folder / "log", timeout=3)


@NEEDS
def test_a_host_has_no_swap_beside_its_memory(tmp_path: Path) -> None:
    with hosts.Hosts(1, MEMORY, tmp_path) as on:
        (group,) = on._groups.values()
        limit = group / on._swap
        if limit.exists():
            most = MEMORY if on._swap.startswith("memory.memsw") else 0
            assert int(limit.read_text()) == most
        else:  # this kernel accounts none
            assert len(Path("/proc/swaps").read_text().splitlines()) == 1


def test_a_group_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "missing", lambda: None)
    monkeypatch.setattr(hosts, "_controller", lambda: (tmp_path, "limit", "swap"))
    on, asked = hosts.Hosts(3, MEMORY, tmp_path), []

    def remove(group: Path) -> bool:
        asked.append(group)
        if len(asked) == 1:
            raise PermissionError(13, "Permission denied")
        return len(asked) > 2

    monkeypatch.setattr(on, "_remove", remove)
    with pytest.raises(
        UsageError, match=r"-0 cannot be removed: .*denied; .*-1 does not empty: its"
    ):
        on.close()
    assert len(asked) == 3


@NEEDS
def test_the_first_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = hosts.Hosts(2, MEMORY, tmp_path)
    first, second = on._groups.values()
    second.mkdir()  # another one's
    with pytest.raises(UsageError, match=r"cannot emulate hosts: .*File exists"), on:
        pass
    assert not first.exists()

    def stay(group: Path) -> bool:
        raise UsageError("it does not empty")

    for inside in (None, KeyError("what ended the run")):
        on = hosts.Hosts(1, MEMORY, tmp_path)
        monkeypatch.setattr(on, "_remove", stay)
        with pytest.raises(KeyError if inside else UsageError), on:
            if inside:
                raise inside
        monkeypatch.undo()
        on.close()
