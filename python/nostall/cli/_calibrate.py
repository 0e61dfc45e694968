"""``nostall calibrate``: what this cluster's memory, disks, network and storage deliver.

Run it alone for one node, or under the job's launcher (torchrun, mpirun, srun) for several: then the
source is read by 1, 2, ... nodes at once, and samples travel between them. Writes a TOML file with
the variables of [Böhringer 2020, table 3.1], in bytes and seconds, from which
``nostall.DataLoader(calibration=...)`` starts.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.base._programs import find_program
from nostall.base._sizes import TierSpec, parse_size, parse_tiers
from nostall.errors import UNREADABLE, IoError, UsageError
from nostall.job import _cluster as cluster
from nostall.job._rendezvous import find_rendezvous
from nostall.job._world import AllGather, World, find_world

_SAMPLE_BYTES = 100_000
# Writes to a disk between two flushes, so that the disk is measured and not memory.
_FLUSH_EVERY = 32
# One more thread counts if it adds at least this share of what the first one gives.
_WORTH = 0.1
# Of a file, at once: bounds the memory of a thread.
_PIECE = 4 << 20
# What an exchange between two nodes may take beside the measurement; it gives up after 60 s by itself.
_EXCHANGE_SECONDS = 90.0
# For which ranks wait for each other beside what is measured; more than an exchange takes.
_MEET_SECONDS = 120.0

_OUT = "nostall-calibration.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall calibrate``."""
    parser.add_argument("source", help="the dataset's folder, on the storage to be measured")
    parser.add_argument(
        "--tiers", nargs="*", default=["ram:256MiB"], help='as for DataLoader: "/nvme/cache:1GiB"'
    )
    parser.add_argument("--out", default=_OUT, help=f"the file to write; {_OUT}")
    parser.add_argument("--seconds", type=float, default=1.0, help="per point measured")
    parser.add_argument("--max-threads", type=int, default=8)
    parser.add_argument("--sample-bytes", default=str(_SAMPLE_BYTES), help="of tiers and network")
    parser.add_argument("--side", type=int, default=224, help="of the images that beta is for")


@dataclass
class Curve:
    """Bytes/s delivered to 1, 2, ... readers, and how many are worth having."""

    points: list[float]

    @property
    def threads(self) -> int:
        best = 1
        for n in range(1, len(self.points)):
            if self.points[n] - self.points[best - 1] > _WORTH * self.points[0] * (n + 1 - best):
                best = n + 1
        return best


def run(arguments: argparse.Namespace) -> int:
    """Measures; rank 0 prints the file's path and content."""
    world = find_world()
    size = parse_size(arguments.sample_bytes)
    if size == 0:
        raise UsageError(f"--sample-bytes {arguments.sample_bytes}: a sample has 1 byte or more")
    tiers = parse_tiers(arguments.tiers, dataset_bytes=0, local_world_size=1)
    seconds, most = arguments.seconds, arguments.max_threads
    allgather = _allgather(world, _patience(len(tiers), most, seconds))
    nodes = _nodes(allgather)
    first_of_node = nodes.index(nodes[world.rank]) == world.rank
    files = _files(Path(arguments.source), allgather(os.urandom(8))[0])
    source = _Source(files)
    result: dict[str, Any] = {"sample_bytes": size, "nodes": max(nodes) + 1}

    curves = {}
    if first_of_node:
        for tier in tiers:
            curves[tier.path or "ram"] = tier_curves(tier, size, most, seconds)
    result["tiers"] = [
        {"name": name, "read": read, "write": write} for name, (read, write) in curves.items()
    ]
    allgather(b"")
    # Threads on one node first, then the best number of them on 1, 2, ... nodes at once.
    alone = Curve([])
    if world.rank == 0:
        alone = Curve([source.read(n, seconds) for n in _counts(most)])
    counts = _counts(most)
    threads = counts[alone.threads - 1] if world.rank == 0 else 0
    told = allgather(f"{threads} {source.place}".encode())[0]
    threads, place = map(int, told.split())
    source.spread(place, nodes[world.rank], max(nodes) + 1)
    result["source"] = {
        "threads": threads,
        "one_node": dict(zip(map(str, counts), alone.points, strict=False)),
        "nodes": _across(allgather, nodes, world, first_of_node, source, threads, seconds),
    }
    result["network"] = _network(allgather, nodes, world, first_of_node, size, seconds)
    result["beta"] = _beta(arguments, files, seconds) if world.rank == 0 else 0.0
    allgather(b"")
    if world.rank == 0:
        text = to_toml(result)
        out = arguments.out
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise IoError(f"cannot write {out}: {error.strerror}") from error
        print(text + f"# written to {out}")
    return 0


def _patience(tiers: int, most: int, seconds: float) -> float:
    """Seconds for which ranks wait for each other: the first of a node measures its tiers, and rank 0
    the source, between two allgathers."""
    return _MEET_SECONDS + (2 * tiers + 1) * len(_counts(most)) * seconds


def _allgather(world: World, patience: float) -> AllGather:
    """The allgather of the job, also used as a barrier; alone it is the identity."""
    if world.world_size == 1:
        return lambda mine: [mine]
    rounds = iter(range(1 << 30))

    def gather(mine: bytes) -> list[bytes]:
        name = f"calibrate {next(rounds)}"
        meet = find_rendezvous(world.rank, world.world_size, name, timeout=patience)
        if meet is None:
            raise UsageError(
                "nothing connects the ranks: run it under torchrun, or set NOSTALL_RENDEZVOUS"
            )
        return meet(mine)

    return gather


def _nodes(allgather: AllGather) -> list[int]:
    names = [part.decode() for part in allgather(cluster.node_identity().encode())]
    known = list(dict.fromkeys(names))
    return [known.index(name) for name in names]


def _counts(most: int) -> list[int]:
    return list(range(1, max(1, most) + 1))


def _files(root: Path, seed: bytes) -> list[str]:
    """The regular files below a folder, in an order that is the same wherever the seed is; none of
    sub-folders that cannot be listed."""
    files, folders = [], [str(root)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file():
                        files.append(entry.path)
        except OSError as error:
            if folder == str(root):
                raise IoError(f"cannot list {folder}: {error.strerror}") from error
    if not files:
        raise UsageError(f"{root} has no files to read")
    files.sort()
    random.Random(seed).shuffle(files)
    return files


def _timed(work: Callable[[int, threading.Event], int], threads: int, seconds: float) -> float:
    """Bytes/s of `threads` calls of work(thread, stop), each of which returns its bytes.

    Work is done before `stop` is looked at: a thread that gets no processor until then counts too.
    What a call raises ends all, and is raised here.
    """
    stop, done = threading.Event(), [0] * threads
    failures: list[Exception] = []

    def one(thread: int) -> None:
        try:
            done[thread] = work(thread, stop)
        except Exception as error:
            failures.append(error)
            stop.set()

    workers = [threading.Thread(target=one, args=(i,)) for i in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    try:
        stop.wait(seconds)
    finally:
        stop.set()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(done) / (time.perf_counter() - began)


class _Source:
    """Files in random order, each once as long as they last, for one measurement after the other.

    `place` is that of the file with which the next measurement begins.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self.place = 0
        self._node, self._nodes = 0, 1

    def spread(self, place: int, node: int, nodes: int) -> None:
        """From `place` on, reads what falls to this node, where all nodes have one order and one
        number of threads.

        What another node has read may come from the memory of the storage's servers.
        """
        self.place, self._node, self._nodes = place, node, nodes

    def read(self, threads: int, seconds: float) -> float:
        """t: bytes/s, from the file on at which the last measurement ended.

        Where there are fewer files than threads of all nodes, those of one file read different pieces
        of it.
        """
        files, first, readers = self._files, self.place, threads * self._nodes
        step = min(readers, len(files))
        read = [0] * threads

        def work(thread: int, stop: threading.Event) -> int:
            reader = self._node * threads + thread
            moved, at = 0, first + reader % step
            share, shares = reader // step, len(range(reader % step, readers, step))
            while True:
                path = files[at % len(files)]
                try:
                    moved += _read_share(path, share, shares, stop)
                except OSError as error:
                    raise IoError(f"cannot read {path}: {error.strerror}") from error
                read[thread] += 1
                if stop.is_set():
                    return moved
                at += step

        rate = _timed(work, threads, seconds)
        self.place = (first + max(read) * step) % len(files)
        return rate


def _read_share(path: str, share: int, shares: int, stop: threading.Event) -> int:
    """The bytes of a thread's pieces of a file, or of the first of them if `stop` comes."""
    moved = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # What others have read would come from memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if shares > 1:  # else no size is asked for, which may be a request to a server
            shares = min(shares, max(1, -(-os.fstat(descriptor).st_size // _PIECE)))
        for piece in itertools.count(share % shares, shares):
            part = len(os.pread(descriptor, _PIECE, piece * _PIECE))
            os.posix_fadvise(descriptor, piece * _PIECE, _PIECE, os.POSIX_FADV_DONTNEED)
            moved += part
            if part < _PIECE or stop.is_set():
                break
    finally:
        os.close(descriptor)
    return moved


def tier_curves(
    tier: TierSpec, size: int, most: int, seconds: float
) -> tuple[list[float], list[float]]:
    """r_j(1..p) and w_j(1..p): records of `size` bytes, read and written in random order."""
    directory = tier.path if tier.kind == "file" else "/dev/shm"
    block = os.urandom(size)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        there = os.statvfs(directory)
        free = there.f_bavail * there.f_frsize
        slots = min(max(size * 64, min(tier.capacity, 256 << 20)), free // 2) // size
        if slots == 0:
            raise UsageError(
                f"{directory} has {free} bytes free, too few to measure samples of {size} bytes: "
                "free some, or pass a smaller --sample-bytes"
            )
        with tempfile.TemporaryFile(dir=directory, prefix="nostall-calibrate-") as file:
            descriptor = file.fileno()
            for i in range(slots):
                os.pwrite(descriptor, block, i * size)
            if tier.kind == "file":
                os.fsync(descriptor)

            def write(thread: int, stop: threading.Event) -> int:
                draw, moved = random.Random(thread), 0
                while True:
                    for _ in range(_FLUSH_EVERY):
                        moved += os.pwrite(descriptor, block, draw.randrange(slots) * size)
                    if tier.kind == "file":
                        os.fdatasync(descriptor)
                    if stop.is_set():
                        return moved

            def read(thread: int, stop: threading.Event) -> int:
                draw, moved = random.Random(thread), 0
                while True:
                    at = draw.randrange(slots) * size
                    moved += len(os.pread(descriptor, size, at))
                    if tier.kind == "file":
                        os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_DONTNEED)
                    if stop.is_set():
                        return moved

            written = [_timed(write, n, seconds) for n in _counts(most)]
            if tier.kind == "file":
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return [_timed(read, n, seconds) for n in _counts(most)], written
    except OSError as error:
        smaller = "; name a smaller one, such as --tiers ram:32MiB"
        hint = smaller if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise IoError(f"cannot measure the tier in {directory}: {error.strerror}{hint}") from error


def _across(
    allgather: AllGather,
    nodes: Sequence[int],
    world: World,
    first_of_node: bool,
    source: _Source,
    threads: int,
    seconds: float,
) -> list[float]:
    """t(1..N): bytes/s of N nodes together."""
    curve = []
    for count in range(1, max(nodes) + 2):
        allgather(b"ready")
        reading = first_of_node and nodes[world.rank] < count
        mine = source.read(threads, seconds) if reading else 0.0
        curve.append(sum(float(part) for part in allgather(repr(mine).encode())))
    return curve


def _network(
    allgather: AllGather,
    nodes: Sequence[int],
    world: World,
    first_of_node: bool,
    size: int,
    seconds: float,
) -> dict[str, float]:
    """b_c: samples from node 0 to node 1 through the whole exchange.

    Empty on one node, and, with a warning on rank 0, if the two exchange nothing.
    """
    if max(nodes) == 0:
        return {}
    program = find_program("nostall-exchange", Path(__file__).resolve().parents[1])
    role = {0: "serve", 1: "ask"}.get(nodes[world.rank]) if first_of_node else None
    address = line = b""
    with contextlib.ExitStack() as stack:
        process = None
        if role and program:
            numbers = map(str, (size, 16, max(1, round(seconds))))
            words = [str(program), role, *cluster.ucx(), *numbers]
            process = stack.enter_context(_limited(words, _EXCHANGE_SECONDS + seconds))
        if role == "serve":
            address = _line_of(process)
        served = allgather(address)
        if role == "ask":
            _send(process, next((a for a in served if a), b""))
            address = _line_of(process)
        asked = allgather(address if role == "ask" else b"")
        if role == "serve":
            _send(process, next((a for a in asked if a), b""))
        if role == "ask":
            line = _line_of(process)
        answers = [measured for part in allgather(line) if (measured := _measured(part))]
    if answers:
        return answers[0]
    if world.rank == 0:
        print(
            "nostall calibrate: nodes 0 and 1 exchanged no samples, so b_c is left out; "
            "NOSTALL_UCX_DEVICES names the network devices that connect them",
            file=sys.stderr,
        )
    return {}


@contextlib.contextmanager
def _limited(words: Sequence[str], seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """A program that gets lines and gives lines; reads of its lines end within `seconds`.

    It ends when its input does, which is at the end of the block, or after an error at once.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, bufsize=0)
    limit = threading.Timer(seconds, process.kill)
    limit.daemon = True
    limit.start()
    try:
        with process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
    finally:
        limit.cancel()


def _measured(line: bytes) -> dict[str, float]:
    """What the program that asks has told; nothing if no sample came or the line was cut off."""
    try:
        found = json.loads(line)
        bandwidth, latency = found["megabytes_per_s"] * 1e6, found["latency_us"] * 1e-6
    except UNREADABLE:
        return {}
    return {"bandwidth": bandwidth, "latency": latency} if bandwidth > 0 else {}


def _line_of(process: subprocess.Popen[bytes] | None) -> bytes:
    """The next line that it prints; empty if there is no process, or it has ended."""
    if process is None:
        return b""
    assert process.stdout is not None
    return process.stdout.readline()


def _send(process: subprocess.Popen[bytes] | None, line: bytes) -> None:
    """A line for its input; what has ended gets none."""
    if process is None:
        return
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)


def _beta(arguments: argparse.Namespace, files: Sequence[str], seconds: float) -> float:
    """Bytes/s that one node can transform, from memory; 0 if the files are not images."""
    import nostall
    from nostall.loader import transforms as t

    images = [f for f in files if f.lower().endswith((".jpg", ".jpeg", ".png", ".webp"))][:256]
    if not images:
        return 0.0
    dataset = nostall.FileList(images)
    steps = [t.RandomResizedCrop(arguments.side), t.RandomHorizontalFlip(), t.ToTensor()]
    rates = []
    with nostall.DataLoader(
        dataset,
        32,
        epochs=1000,
        transforms=steps,
        tiers=[f"ram:{dataset.total_bytes + 1}"],
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        on_error="substitute",
        output="numpy",
    ) as loader:
        deadline = time.perf_counter() + 2 * seconds
        for epoch in loader.epochs():
            began = time.perf_counter()
            for _ in epoch:
                pass
            if epoch.index > 0:
                rates.append(dataset.total_bytes / (time.perf_counter() - began))
            if epoch.index > 1 and time.perf_counter() > deadline:
                break
    return statistics.median(rates)


def to_toml(result: dict[str, Any]) -> str:
    """The file's text."""

    def numbers(values: Sequence[float]) -> str:
        return "[" + ", ".join(f"{v:.6g}" for v in values) + "]"

    lines = [
        "# Measured by nostall calibrate. Bytes and seconds; letters: docs/guide/simulate.md.",
        "format = 1",
        f"sample_bytes = {result['sample_bytes']}",
        "",
        "[environment]",
        f"N = {result['nodes']}",
    ]
    if result["beta"]:
        lines.append(f"beta = {result['beta']:.6g}  # bytes/s that a node transforms")
    if result["network"]:
        lines.append(f"b_c = {result['network']['bandwidth']:.6g}")
        lines.append(f"latency = {result['network']['latency']:.3g}  # of a fetch")
    source = result["source"]
    lines += [
        "",
        "[source]",
        f"threads = {source['threads']}  # readers on a node beyond which another brings little",
        f"t = {numbers(source['nodes'])}  # with 1, 2, ... nodes reading",
        f"one_node = {numbers(list(source['one_node'].values()))}  # with 1, 2, ... threads",
    ]
    for tier in result["tiers"]:
        lines += [
            "",
            "[[tiers]]",
            f"name = {json.dumps(tier['name'])}",
            f"threads = {Curve(tier['read']).threads}",
            f"r = {numbers(tier['read'])}  # with 1, 2, ... threads",
            f"w = {numbers(tier['write'])}",
        ]
    return "\n".join(lines) + "\n"
