"""scripts/check-wheel names what a portable wheel may not have, and agrees with scripts/wheel."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from nostall import _native

SCRIPTS = Path(__file__).parents[3] / "scripts"
CHECK = runpy.run_path(str(SCRIPTS / "check-wheel"))
BUILD = runpy.run_path(str(SCRIPTS / "wheel"))
# The first version of glibc that has it, not that of this machine.
CLOCK = "pthread_condattr_setclock@GLIBC_" + (
    "2.17" if os.uname().machine == "aarch64" else "2.3.3"
)
SOURCE = """
#include <stdio.h>
#ifndef WALL
extern int set_clock(void*, int);
__asm__(".symver set_clock, CLOCK");
#else
static int set_clock(void* attributes, int clock) { return clock; }
#endif
int PyInit__native(void) { return puts("libc++ Hardening assertion") + set_clock(0, 0); }
#ifdef OTHER
int other(void) { return 1; }
#endif
""".replace("CLOCK", CLOCK)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("library"))


def compiled(folder: Path, *options: str, source: str = SOURCE) -> Path:
    made = folder / "_native.abi3.so"
    (folder / "native.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", *options, "native.c", "-o", made.name], cwd=folder, check=True
    )
    return made


def check(folder: Path, library: Path, **changes: bytes | None) -> str:
    """What is said of a wheel with that library, and other files changed."""
    inside = sorted(CHECK["INSIDE"]["nostall"])
    files = {f"nostall-1.dist-info/licenses/inside/{name}.txt": b"as is" for name in inside}
    files["nostall/_native.abi3.so"] = library.read_bytes()
    files |= {"nostall/bin/nostall-exchange": b"", "nostall/_native.pyi": b""}
    files |= dict.fromkeys(CHECK["SOURCES"], b"")
    files["nostall-1.dist-info/RECORD"] = b"nostall/_native.abi3.so,,\n"
    wheel = folder / "nostall-1-cp312-abi3-manylinux_2_28_x86_64.whl"
    for name, data in changes.items():
        if data is None:
            del files[name]
        else:
            files[name] = data
    with zipfile.ZipFile(wheel, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "check-wheel"), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if "hold" in done.stdout else 1), done.stderr
    return done.stdout


def test_a_wheel_as_it_should_be_passes(library: Path, tmp_path: Path) -> None:
    assert check(tmp_path, library) == "1 wheels hold what they promise\n"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("nostall-1.dist-info/licenses/inside/zlib.txt", None, "the licence of zlib is missing"),
        ("nostall/_native.abi3.so", None, "there is no extension"),
        ("nostall/_native.pyi", None, "there are no types of the extension"),
        ("nostall/sources/mpi/wrappers.cc", None, "lacks 1 sources of the MPI library"),
        ("nostall/bin/nostall-exchange", None, "nostall-exchange are missing"),
        ("nostall/bin/nostall-limit", b"", "nostall/bin/nostall-limit do not belong"),
        ("nostall/data", b"x" * 15_000_001, "15.0 MB are over 15"),
    ],
)
def test_a_wrong_file_is_named(
    library: Path, tmp_path: Path, name: str, data: bytes | None, said: str
) -> None:
    assert said in check(tmp_path, library, **{name: data})


def test_a_library_of_the_build_machine_is_named(tmp_path: Path) -> None:
    said = check(tmp_path, Path(_native.__file__))
    assert "libstdc++.so.6" in said and "needs glibc 2.3" in said
    assert "has no checks of indices" in said


def test_an_exported_name_is_named(tmp_path: Path) -> None:
    said = check(tmp_path, compiled(tmp_path, "-DOTHER"))
    assert "exports 1 names, of them other" in said


def test_waits_by_the_wall_clock_are_named(tmp_path: Path) -> None:
    assert "waits by the wall clock" in check(tmp_path, compiled(tmp_path, "-DWALL"))


def test_a_folder_of_the_build_machine_is_named(tmp_path: Path) -> None:
    source = SOURCE.replace("assertion", f"assertion in {SCRIPTS.parent}/native")
    assert f"names {SCRIPTS.parent}, a folder of" in check(
        tmp_path, compiled(tmp_path, source=source)
    )


def test_auditwheel_looks_at_a_wheel_too(library: Path, tmp_path: Path) -> None:
    audited = CHECK["audited"]
    audited.__globals__["TOOLS"] = Path(sys.executable)
    check(tmp_path, library)
    (wheel,) = tmp_path.glob("*.whl")
    assert list(audited(wheel)) == []
    check(tmp_path, Path(_native.__file__))
    first, second, *_ = audited(wheel)
    assert first.startswith("auditwheel finds symbols of manylinux_2_3")
    assert second.startswith("auditwheel misses ") and "libsodium.so" in second


@pytest.mark.parametrize(
    ("own", "turns", "slow"),
    [
        # Other processes took part of the first turns.
        ([(9.0, 9.0), (9.0, 1.1), (1.1, 9.0)], 3, []),
        ([(9.0, 9.0)] * 10 + [(1.1, 1.1)], 11, []),
        ([(1.2, 1.1)], 20, ["takes 1200 ms for decoding, 1.20 times the local build's"]),
        ([(1.1, 2.0)], 20, ["takes 2000 ms for a keyed order, 2.00 times the local build's"]),
    ],
)
def test_a_wheel_that_stays_slower_than_the_local_build_is_named(
    own: list[tuple[float, float]],
    turns: int,
    slow: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = list(own)

    def times(python: Path) -> tuple[float, float]:
        if python == CHECK["LOCAL"]:
            return (1.0, 1.0)
        return left.pop(0) if len(left) > 1 else left[0]

    assert list(CHECK["slowdown"](times, Path("own"))) == slow
    assert f"after {turns} turns" in capsys.readouterr().out


def test_what_is_built_is_what_is_checked() -> None:
    assert BUILD["INSIDE"] == CHECK["INSIDE"]
    assert {*BUILD["PACKAGES"]} == {*CHECK["PROGRAMS"]} == {*CHECK["INSIDE"]}
    sources = BUILD["SOURCES"]
    assert len({s.name for s in sources}) == len(sources)
    assert {s.name for s in sources} <= set().union(*BUILD["INSIDE"].values())
    for source in sources:
        assert re.fullmatch("[0-9a-f]{64}", source.sha256), source
        assert source.suite in ("bookworm", "trixie", "sid"), source
    assert BUILD["WITHOUT_STABLE"] < {*BUILD["PYTHON_HEADERS"]}


def test_wheels_are_tried_as_readme_installs_them_and_by_tests_that_are_there() -> None:
    bare = runpy.run_path(str(SCRIPTS / "check-root"))
    foreign = runpy.run_path(str(SCRIPTS / "check-foreign"))
    wheels = [
        f"dist/{n}-manylinux_2_28_x86_64.whl"
        for n in ("nostall-1-cp311-cp311", "nostall_bench-1-py3-none")
    ]
    for line, installed in ((bare["INSTALL"], wheels[:1]), (bare["DEMO"], wheels)):
        patterns = [word for word in line.split() if word.startswith("dist/")]
        assert len(patterns) == len(installed)
        for name, pattern in zip(installed, patterns, strict=True):
            assert fnmatch(name, pattern)
    for test in bare["TESTS"] + foreign["TESTS"]:
        assert (SCRIPTS.parent / test).exists(), test
    fits = {
        v: CHECK["fitting"](v, [Path(w) for w in wheels], "x86_64")
        for v in foreign["PYTHONS"].values()
    }
    assert fits == {(3, 11): Path(wheels[0]), (3, 13): None}


def test_python_that_does_not_run_is_named(library: Path, tmp_path: Path) -> None:
    check(tmp_path, library)
    (wheel,) = tmp_path.glob("*.whl")
    command = [sys.executable, str(SCRIPTS / "check-wheel"), "--try", "python0.1", "--", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("python0.1: does not run: "), done.stdout + done.stderr


def check_sdist(
    sdist: Path, folder: Path, without: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """As where the variables hide what the build needs: only the files are looked at."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "check-sdist"), str(sdist)],
        env=os.environ | {"TMPDIR": str(folder)} | without,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_source_distribution_is_whole(tmp_path: Path) -> None:
    made = BUILD["source_distribution"](Path(sys.executable), tmp_path)
    no_compiler = {"CXX": "no-such-compiler"}
    for without, said in (
        (no_compiler, "a compiler"),
        ({"PKG_CONFIG_LIBDIR": str(tmp_path)}, "the headers of libjpeg"),
    ):
        done = check_sdist(made, tmp_path, without)
        told = done.stdout + done.stderr
        assert done.returncode == 0 and f"is whole; not tried without {said}" in told, told
    home = tmp_path / "nostall-1"
    with tarfile.open(made) as files:
        names = files.getnames()
    for name in {n.split("/")[1] for n in names} - {"LICENSE"}:
        (home / name).mkdir(parents=True)
    wrong = tmp_path / "nostall-1.tar.gz"
    for said in ("lacks LICENSE", "has files that a build made"):
        with tarfile.open(wrong, "w:gz") as files:
            files.add(home, "nostall-1")
        done = check_sdist(wrong, tmp_path, no_compiler)
        assert done.returncode == 1 and said in done.stderr, done.stderr
        (home / "LICENSE").touch()
        (home / "native" / "a.o").touch()
