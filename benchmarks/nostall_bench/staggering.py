"""``nostall simulate staggering``: when it pays to let few readers at a time onto storage with heads
[Pumma 2020, sec. 5.1.3 and 5.2.4], for more readers than one machine can run.

A file is striped over servers. A request waits in its server's queue; it takes its bytes' time, and a
seek before if it does not begin where the last one ended. Each reader has a few requests in flight,
and passes its token on when all that it reads has come: with --stagger n, reader r begins when
reader r - n has ended. Readers begin at random within `--jitter-ms`, as after a step of a training.
"""

from __future__ import annotations

import argparse
import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from nostall.errors import UsageError
from nostall_bench import harness

STRIPE = 1 << 20
# How the reads of one iteration lie in the file.
LAYOUTS = {
    "one range a reader": "unshuffled and coalesced: the readers' ranges follow each other",
    "records at random": "shuffled: records from all over the file",
}


@dataclass(frozen=True)
class HeadStorage:
    """Servers with a head each, and the readers' way to them; seconds and bytes/s."""

    servers: int = 16
    rate: float = 150e6  # of a server
    seek: float = 8e-3
    link: float = 1200e6  # of a reader
    latency: float = 0.5e-3
    in_flight: int = 8  # requests of a reader
    sorted: bool = False  # a server takes the next request upwards, else the one that came first


@dataclass
class _Server:
    """Requests wait as (order or place, number); `head` is the place where the last one ended."""

    head: int = -1
    busy: bool = False
    queue: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Request:
    reader: int
    server: int
    place: int  # among the file's bytes on its server
    bytes: int


def _cut(reader: int, ranges: Sequence[tuple[int, int]], servers: int) -> list[_Request]:
    """The requests for (begin, length) ranges of the file: none crosses a stripe."""
    found = []
    for begin, length in ranges:
        end = begin + length
        while begin < end:
            stripe = begin // STRIPE
            part = min(end, (stripe + 1) * STRIPE) - begin
            place = stripe // servers * STRIPE + begin % STRIPE
            found.append(_Request(reader, stripe % servers, place, part))
            begin += part
    return found


class _Run:
    """One iteration: every reader reads its ranges, then all have ended."""

    def __init__(
        self,
        storage: HeadStorage,
        reads: Sequence[Sequence[tuple[int, int]]],
        stagger: int,
        starts: Sequence[float],
    ) -> None:
        self._storage, self._stagger, self._starts = storage, stagger, starts
        self._requests = [_cut(r, ranges, storage.servers) for r, ranges in enumerate(reads)]
        self._next = [0] * len(reads)
        self._missing = [len(mine) for mine in self._requests]
        self._link_free = [0.0] * len(reads)
        self._servers = [_Server() for _ in range(storage.servers)]
        self._all: list[_Request] = []
        self._events: list[tuple[float, int, str, int]] = []  # time, tie, what, number
        self._count = 0
        self.requests = sum(self._missing)
        self.seeks = 0

    def seconds(self) -> float:
        """Until the last byte of the last reader."""
        first = self._stagger or len(self._requests)
        for reader in range(min(first, len(self._requests))):
            self._at(self._starts[reader], "begin", reader)
        now = 0.0
        while self._events:
            now, _, what, number = heapq.heappop(self._events)
            if what == "begin":
                for _ in range(self._storage.in_flight):
                    self._issue(number, now)
            elif what == "served":
                self._served(number, now)
            else:
                self._came(number, now)
        return now

    def _at(self, time: float, what: str, number: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, what, number))

    def _issue(self, reader: int, now: float) -> None:
        mine = self._requests[reader]
        if self._next[reader] == len(mine):
            return
        request = mine[self._next[reader]]
        self._next[reader] += 1
        number = len(self._all)
        self._all.append(request)
        server = self._servers[request.server]
        if self._storage.sorted:
            insort(server.queue, (request.place, number))
        else:
            server.queue.append((number, number))
        if not server.busy:
            self._serve(server, now)

    def _serve(self, server: _Server, now: float) -> None:
        server.busy = bool(server.queue)
        if not server.queue:
            return
        which = 0
        if self._storage.sorted:
            which = bisect_left(server.queue, (server.head, 0)) % len(server.queue)
        number = server.queue.pop(which)[1]
        request = self._all[number]
        cost = request.bytes / self._storage.rate
        if server.head != request.place:
            self.seeks += 1
            cost += self._storage.seek
        server.head = request.place + request.bytes
        self._at(now + cost, "served", number)

    def _served(self, number: int, now: float) -> None:
        request = self._all[number]
        self._serve(self._servers[request.server], now)
        begin = max(now, self._link_free[request.reader])
        self._link_free[request.reader] = begin + request.bytes / self._storage.link
        self._at(self._link_free[request.reader] + self._storage.latency, "came", number)

    def _came(self, number: int, now: float) -> None:
        reader = self._all[number].reader
        self._missing[reader] -= 1
        self._issue(reader, now)
        after = reader + self._stagger
        if not self._missing[reader] and self._stagger and after < len(self._requests):
            self._at(max(now, self._starts[after]), "begin", after)


def reads_of(
    layout: str, readers: int, each: int, record: int, seed: int
) -> list[list[tuple[int, int]]]:
    """(begin, length) ranges of each reader, in the order in which it reads them."""
    if layout == "one range a reader":
        return [[(r * each, each)] for r in range(readers)]
    # A hundred times what one iteration reads.
    draw, size = random.Random(seed), 100 * readers * each
    return [
        sorted((draw.randrange(size - record), record) for _ in range(max(1, each // record)))
        for _ in range(readers)
    ]


@dataclass(frozen=True)
class Staggered:
    """One way of reading; `share` is of what servers without seeks and links would give."""

    readers: int
    layout: str
    queue: str
    stagger: int  # 0: all at once
    seconds: float
    share: float
    seeks_a_request: float


def simulate(
    storage: HeadStorage,
    reads: Sequence[Sequence[tuple[int, int]]],
    stagger: int,
    *,
    jitter: float = 0.0,
    seed: int = 1,
) -> tuple[float, int, int]:
    """Seconds, seeks and requests of one iteration.

    Args:
        reads: (begin, length) ranges of each reader.
        stagger: readers that read at once; 0 for all.
        jitter: seconds over which the readers begin.
    """
    draw = random.Random(seed)
    run = _Run(storage, reads, stagger, [jitter * draw.random() for _ in reads])
    return run.seconds(), run.seeks, run.requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate staggering``."""
    parser.add_argument("--readers", type=int, nargs="+", default=[4, 16, 64, 512, 4096])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--rate", type=float, default=150, help="of a server, MB/s")
    parser.add_argument("--seek-ms", type=float, default=8)
    parser.add_argument("--link", type=float, default=1200, help="of a reader, MB/s")
    parser.add_argument("--latency-ms", type=float, default=0.5)
    parser.add_argument("--in-flight", type=int, default=8, help="requests of a reader")
    parser.add_argument(
        "--queues", nargs="+", choices=["fifo", "sorted"], default=["fifo", "sorted"]
    )
    parser.add_argument("--each", type=float, default=16, help="MiB that a reader reads")
    parser.add_argument("--record-kb", type=float, default=150, help="of records at random")
    parser.add_argument("--stagger", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--jitter-ms", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulates, prints the table."""
    numbers = (*arguments.readers, *arguments.stagger, arguments.servers, arguments.in_flight)
    if min(numbers) < 1 or min(arguments.rate, arguments.link, arguments.each) <= 0:
        raise UsageError("readers, servers, rates and what is read must be above 0")
    storage = HeadStorage(
        servers=arguments.servers,
        rate=arguments.rate * 1e6,
        seek=arguments.seek_ms / 1e3,
        link=arguments.link * 1e6,
        latency=arguments.latency_ms / 1e3,
        in_flight=arguments.in_flight,
    )
    rows: list[Staggered] = []
    for layout in arguments.layouts:
        for queue in arguments.queues:
            for readers in arguments.readers:
                rows += _compare(
                    replace(storage, sorted=queue == "sorted"), layout, readers, arguments
                )
    _print(rows)
    harness.write(arguments.json, storage=asdict(storage), rows=[asdict(r) for r in rows])
    return 0


def _compare(
    storage: HeadStorage, layout: str, readers: int, arguments: argparse.Namespace
) -> list[Staggered]:
    each = int(arguments.each * (1 << 20))
    record = int(arguments.record_kb * 1e3)
    reads = reads_of(layout, readers, each, record, arguments.seed)
    wanted = sum(length for mine in reads for _, length in mine)
    limit = wanted / min(storage.servers * storage.rate, readers * storage.link)
    found = []
    for stagger in (0, *(n for n in arguments.stagger if n < readers)):
        seconds, seeks, requests = simulate(
            storage, reads, stagger, jitter=arguments.jitter_ms / 1e3, seed=arguments.seed
        )
        queue = "sorted" if storage.sorted else "fifo"
        share, each_seeks = limit / seconds, seeks / requests
        found.append(Staggered(readers, layout, queue, stagger, seconds, share, each_seeks))
    return found


def _print(rows: Sequence[Staggered]) -> None:
    table = harness.table(
        "share of what the servers give without seeks (seeks a request)",
        *("reads", "queue", "readers", "all at once", "best in turn", "at once then", "gain"),
        left=2,
    )
    groups: dict[tuple[str, str, int], list[Staggered]] = {}
    for row in rows:
        groups.setdefault((row.layout, row.queue, row.readers), []).append(row)
    for (layout, queue, readers), (free, *turns) in groups.items():
        cells = [layout, queue, f"{readers:,}", f"{free.share:.2f} ({free.seeks_a_request:.2f})"]
        if turns:
            best = min(turns, key=lambda r: r.seconds)
            cells += [f"{best.share:.2f} ({best.seeks_a_request:.2f})", str(best.stagger)]
            cells.append(f"{free.seconds / best.seconds:.2f}")
        table.add_row(*cells)
    harness.console().print(table)
