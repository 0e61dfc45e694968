"""The MPI library at first use: compiled once for each MPI, kept where only this user may write.

All but the last test have a shell script for a compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpis import launcher

from nostall.cli import _mpi_library as mpi_library
from nostall.cli import _run as mpi
from nostall.cli import main
from nostall.errors import UsageError
from nostall.observe.report import _arrivals as arrivals

# Writes down what it is called with; what it "links" is the line that linked it.
COMPILER = r"""#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) cat "$here/version" 2>/dev/null; exit ;;
  -show) echo "g++ -I/opt/mpi/include -L/opt/mpi/lib -lmpi"; exit ;;
  *-dM*) cat "$here/macros"; exit ;;
esac
echo "$*" >>"$here/calls"
for word in "$@"; do
  [ "$last" != -o ] || made=$word
  last=$word
done
if [ -e "$here/wait" ]; then while [ ! -e "$here/go" ]; do sleep 0.05; done; fi
case "$*" in
  *"$(cat "$here/fails" 2>/dev/null || echo no file)"*)
    printf 'In file included from a.cc:1:\nb.h:7:2: error: no such thing\nb.h:8: error: more\n' >&2
    exit 1 ;;
esac
echo "$*" >"$made"
"""
MPICH = '#define MPICH_VERSION "5.0.2"\n#define __VERSION__ "12.2.0"\n#define __x86_64__ 1\n'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compiler in PATH, for a nostall without the library, with an empty cache."""
    folder = tmp_path / "bin"
    install(folder / "mpicxx")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mpi, "INSTALLED", tmp_path / "absent.so")
    return folder


def install(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(COMPILER)
    path.chmod(0o755)
    (path.parent / "macros").write_text(MPICH)


def kept(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache" / "nostall" / "mpi"))


def test_it_is_compiled_once_and_kept_for_this_user(
    compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--build"]) == 0
    said = capsys.readouterr()
    path = Path(said.out.strip())
    assert path.parent == tmp_path / "cache" / "nostall" / "mpi"
    assert kept(tmp_path) == [path.name]
    assert path.name.startswith("libnostall_mpi-")
    assert "-mpich-5.0.2-" in path.name
    assert said.err == (
        f"nostall: compiling libnostall_mpi.so for MPICH 5.0.2 by {compiler / 'mpicxx'}, once, into "
        f"{path.parent}\n"
    )
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert "-Wl,-rpath,/opt/mpi/lib" in path.read_text()
    calls = (compiler / "calls").read_text().splitlines()
    assert [
        ("-mavx2" in c, "-mavx512f" in c) for c in calls if "kernels" in c and " -c " in c
    ].count((True, False)) == 1
    assert main(["run", "--build"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")
    assert mpi.library("mpirun") == path
    assert (compiler / "calls").read_text().splitlines() == calls


def test_every_mpi_and_compiler_has_a_library_of_its_own(compiler: Path, tmp_path: Path) -> None:
    first = mpi.library()
    (compiler / "macros").write_text(MPICH.replace("12.2.0", "13.1.0"))
    second = mpi.library()
    (compiler / "macros").write_text(
        "#define OMPI_MAJOR_VERSION 4\n#define OMPI_MINOR_VERSION 1\n#define OMPI_RELEASE_VERSION 4\n"
    )
    third = mpi.library()
    assert "-open-mpi-4.1.4-" in third.name
    assert "-mavx2" not in (compiler / "calls").read_text().splitlines()[-2]
    install(tmp_path / "other" / "mpicxx.mpich")
    shutil.copy(tmp_path / "other" / "mpicxx.mpich", tmp_path / "other" / "mpiexec.mpich")
    fourth = mpi.library(str(tmp_path / "other" / "mpiexec.mpich"))
    assert len({first, second, third, fourth}) == len(kept(tmp_path)) == 4


def test_the_launchers_own_compiler_comes_first(compiler: Path, tmp_path: Path) -> None:
    install(tmp_path / "other" / "mpicxx")
    for name in ("mpiexec", "mpiexec.hydra", "srun"):
        shutil.copy(tmp_path / "other" / "mpicxx", tmp_path / "other" / name)
    found = {
        name: mpi_library.find_mpicxx(str(tmp_path / "other" / name))
        for name in ("mpiexec", "mpiexec.hydra", "srun", "absent")
    }
    beside, in_path = str(tmp_path / "other" / "mpicxx"), str(compiler / "mpicxx")
    assert found == {
        **{"mpiexec": beside, "mpiexec.hydra": beside},
        **{"srun": in_path, "absent": in_path},
    }


def test_without_a_compiler_the_remedy_is_named(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (compiler / "mpicxx").unlink()
    for words in (["run", "--", "mpirun", "-n", "2", "./program"], ["run", "--build"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            "nostall: libnostall_mpi.so cannot be built for this MPI, for there is "
        )
        assert "no mpicxx in PATH: install" in said
        assert "apt-get install g++ libopenmpi-dev" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("fails", ["native_base.cc", "kernels_avx512.cc -o", "-shared"])
def test_what_a_broken_compiler_says_is_told_and_nothing_is_kept(
    fails: str, compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (compiler / "fails").write_text(fails)
    assert main(["run", "--build"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith(
        f"nostall: {compiler / 'mpicxx'} cannot compile libnostall_mpi.so: "
        "b.h:7:2: error: no such thing ("
    )
    assert len(said) == 2
    assert kept(tmp_path) == []
    (compiler / "fails").unlink()
    assert main(["run", "--build"]) == 0


def test_a_compiler_that_finds_no_mpi_is_told(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (compiler / "mpicxx").write_text("#!/bin/sh\necho 'cannot find c++' >&2\nexit 3\n")
    assert main(["run", "--build"]) == 2
    assert "cannot compile libnostall_mpi.so: cannot find c++ (it" in capsys.readouterr().err


def test_of_two_builds_at_once_one_compiles(compiler: Path, tmp_path: Path) -> None:
    (compiler / "wait").touch()
    command = [sys.executable, "-m", "nostall", "run", "--build"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    builds = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    first = [build.stderr.readline() for build in builds]
    assert sorted(line.split()[1] for line in first) == ["compiling", "waiting"]
    (compiler / "go").touch()
    made = {build.communicate(timeout=400)[0].strip() for build in builds}
    assert [build.returncode for build in builds] == [0, 0]
    assert [str(tmp_path / "cache" / "nostall" / "mpi" / name) for name in kept(tmp_path)] == [
        *made
    ]
    assert sum("-shared" in c for c in (compiler / "calls").read_text().splitlines()) == 1


def test_a_killed_build_holds_up_no_other(compiler: Path, tmp_path: Path) -> None:
    (compiler / "wait").touch()
    command = [sys.executable, "-m", "nostall", "run", "--build"]
    build = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert build.stderr
    assert "compiling" in build.stderr.readline()
    os.killpg(build.pid, 9)
    build.wait()
    (compiler / "go").touch()
    made = mpi.library()
    assert kept(tmp_path) == [made.name]


def test_a_cache_that_cannot_be_written_is_named_before_anything_is_compiled(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    for place in ("/proc", str(tmp_path / "file")):  # where root makes no folder either
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        assert main(["run", "--build"]) == 3
        said = capsys.readouterr().err
        assert said.startswith(f"nostall: {place}/nostall/mpi cannot keep libnostall_mpi.so (")
        assert "set XDG_CACHE_HOME to a directory that you may write" in said
    assert not (compiler / "calls").exists()


def test_a_library_that_others_could_have_put_there_is_not_loaded(
    compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mpi.library()
    path.parent.chmod(0o777)
    assert main(["run", "--", "mpirun", "./program"]) == 2
    assert "lets others write" in capsys.readouterr().err
    path.parent.chmod(0o700)
    shutil.move(path, tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert main(["run", "--", "mpirun", "./program"]) == 2
    assert "is no plain file of user" in capsys.readouterr().err


def test_folders_above_the_library_are_this_users_alone(
    compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o002)
    try:
        path = mpi.library()
    finally:
        os.umask(before)
    for folder in (path.parent, path.parent.parent, tmp_path / "cache"):
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "cache").chmod(0o770)
    capsys.readouterr()
    assert main(["run", "--", "mpirun", "./program"]) == 2
    told = (
        f"another user may exchange what is in {tmp_path / 'cache'} (user {os.geteuid()}, mode 770)"
    )
    assert told in capsys.readouterr().err
    (tmp_path / "cache").chmod(0o1777)  # as /tmp, where none removes what is another's
    assert mpi.library() == path


def test_a_library_that_is_cut_is_compiled_anew(compiler: Path) -> None:
    path = mpi.library()
    path.write_bytes(b"")
    assert mpi.library() == path
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("version", "macros", "told"),
    [
        (
            "mpirun (Open MPI) 4.1.4",
            MPICH,
            "is of Open MPI, but {} is of MPICH 5.0.2: pass --mpicxx",
        ),
        (
            "HYDRA build details:",
            "#define OMPI_MAJOR_VERSION 5\n",
            "is of MPICH, but {} is of Open MPI 5.0.0: pass --mpicxx",
        ),
        ("HYDRA build details:", MPICH, None),
        ("mpirun (Open MPI) 5.0.0", "#define OMPI_MAJOR_VERSION 5\n", None),
        ("something else", MPICH, None),
    ],
)
def test_a_launcher_of_another_mpi_than_the_compiler_is_told(
    compiler: Path, version: str, macros: str, told: str | None
) -> None:
    install(compiler / "mpirun")
    (compiler / "version").write_text(version)
    (compiler / "macros").write_text(macros)
    if told is None:
        assert mpi.library("mpirun").exists()
        return
    with pytest.raises(UsageError, match=re.escape(told.format(compiler / "mpicxx"))):
        mpi.library("mpirun")
    assert not (compiler / "calls").exists()


def test_a_launcher_that_is_a_link_brings_the_compiler_beside_its_file(
    compiler: Path, tmp_path: Path
) -> None:
    install(tmp_path / "opt" / "mpicxx.mpich")
    shutil.copy(tmp_path / "opt" / "mpicxx.mpich", tmp_path / "opt" / "mpiexec.hydra")
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "mpiexec.hydra"
    link.symlink_to(tmp_path / "opt" / "mpiexec.hydra")
    assert mpi_library.find_mpicxx(str(link)) == str(tmp_path / "opt" / "mpicxx.mpich")


def test_a_path_that_ld_preload_cannot_carry_is_refused(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert main(["run", "--build"]) == 2
    assert "has a space or a colon" in capsys.readouterr().err


def test_a_given_library_and_a_build_exclude_each_other(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--build", "--library", "/x.so", "--", "mpirun", "./program"]) == 2
    assert "leave out --build and --mpicxx" in capsys.readouterr().err


def test_the_doctor_says_for_which_mpi_it_is_built(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(*words: str) -> str:
        assert main(["doctor", *words]) == 0
        said = capsys.readouterr().out.splitlines()
        return next((line for line in said if "libnostall_mpi" in line or "MPI pro" in line), "")

    by = compiler / "mpicxx"
    assert doctor().endswith(f"nostall run compiles it at first use, for MPICH 5.0.2 by {by}")
    assert doctor("--fix-hints").startswith("nostall run --build ")
    path = mpi.library()
    assert doctor() == f"libnostall_mpi built for MPICH 5.0.2 ({by}): {path}"
    assert not doctor("--fix-hints")
    monkeypatch.setattr(mpi, "INSTALLED", by)
    assert "it was built with nostall" in doctor()
    assert f"; built for MPICH 5.0.2 ({by})" in doctor()
    monkeypatch.setattr(mpi, "INSTALLED", compiler / "absent")
    by.write_text("#!/bin/sh\nexit 3\n")
    assert "not built (MPI programs): " in doctor()


@pytest.mark.long
@pytest.mark.multi
def test_the_library_that_was_compiled_profiles_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without optimization it is compiled in half the time.
    fast = tmp_path / "fast"
    fast.write_text('#!/bin/sh\nexec g++ "$@" -O0 -U_FORTIFY_SOURCE\n')
    fast.chmod(0o755)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_CXX", str(fast))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "for _ in range(3):\n"
        "    sums = np.full(100, world.rank, 'f8')\n    world.Allreduce(MPI.IN_PLACE, sums)\n"
        "    assert (sums == 3).all()\n"
    )
    words = [*launcher("openmpi"), "-n", "3", sys.executable, str(program)]
    options = ["--build", "--verbose", "--profile", str(tmp_path / "profile")]
    done = subprocess.run(
        [sys.executable, "-m", "nostall", "run", *options, "--", *words],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compiling libnostall_mpi.so for Open MPI" in done.stderr
    assert "nostall: rank 0: allreduce 3 " in done.stderr
    calls = [
        call
        for call in arrivals.read(arrivals.find([str(tmp_path / "profile")])).calls
        if call.operation == "allreduce"
    ]
    assert [np.shape(call.arrived) for call in calls] == [(3,)] * 3
    assert all((call.left > call.arrived).all() for call in calls)
    assert len(kept(tmp_path)) == 1
