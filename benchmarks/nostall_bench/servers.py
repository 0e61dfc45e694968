"""``nostall simulate servers``: parameter servers by topology [Pumma 2020, sec. 8.4.2], as flows.

One update: the gradients of every worker go in once, and the parameters come back to it. Every host
is a worker; servers have a part of the parameters each, on hosts spread evenly. Updates follow each
other without a pause, as asynchronous ones do, so that one takes as long as the busiest link, or the
host with the most messages or the most to add up, needs for it. Allreduce is synchronous: its steps
take their latency and their adding besides. Queues are not modelled: real networks are slower, and
most where most messages meet.

    flat        every worker writes to every server and reads from it
    proxy       one proxy for each local group sums its workers' gradients, and hands out what it reads
    proxies     the same, each host of a group being the proxy for a part of the parameters
    ring        allreduce in one ring over all hosts
    two-level   allreduce: parts summed in each group, rings of the parts between the groups
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.errors import UsageError
from nostall_bench import harness
from nostall_bench.networks import Dragonfly, FatTree, Network, Numbers, Torus

NETWORKS: dict[str, Network] = {
    "fat tree, full": FatTree(),
    "fat tree, 4:1": FatTree(cores=4),
    "torus 8x8x8": Torus(),
    "dragonfly": Dragonfly(),
}


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes/s of adding."""

    message: float = 1e-6  # of a host, for each that it sends or receives
    latency: float = 2e-6  # of a step of allreduce
    add: float = 16e9


@dataclass
class Work:
    """What one update moves and adds: messages by source, target and bytes; bytes that each host adds;
    steps that wait for each other."""

    source: Numbers
    target: Numbers
    bytes: NDArray[np.float64]
    added: NDArray[np.float64]
    steps: int = 0


def _pairs(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """Every one of `a` with every one of `b`."""
    return np.repeat(a, len(b)), np.tile(b, len(a))


def _both_ways(source: Numbers, target: Numbers, size: NDArray[np.float64], hosts: int) -> Work:
    """Gradients there, where they are added up, and parameters back."""
    added = np.bincount(target, size, hosts).astype(np.float64)
    there = np.concatenate([source, target])
    back = np.concatenate([target, source])
    return Work(there, back, np.concatenate([size, size]), added)


def _servers(network: Network, count: int) -> Numbers:
    return np.arange(count) * network.hosts // count


def _flat(network: Network, size: float, servers: int) -> Work:
    source, target = _pairs(np.arange(network.hosts), _servers(network, servers))
    each = np.full(len(source), size / servers)
    return _both_ways(source, target, each, network.hosts)


def _proxy(network: Network, size: float, servers: int) -> Work:
    hosts = np.arange(network.hosts)
    proxies = hosts[:: network.group]
    source, target = _pairs(proxies, _servers(network, servers))
    source = np.concatenate([hosts, source])
    target = np.concatenate([hosts // network.group * network.group, target])
    each = np.concatenate([np.full(network.hosts, size), np.full(len(source) - network.hosts, 0.0)])
    each[network.hosts :] = size / servers
    return _both_ways(source, target, each, network.hosts)


def _in_groups(network: Network) -> tuple[Numbers, Numbers]:
    """Every host with every host of its group."""
    hosts = np.arange(network.hosts)
    first = np.repeat(hosts, network.group)
    return first, first // network.group * network.group + np.tile(
        np.arange(network.group), network.hosts
    )


def _proxies(network: Network, size: float, servers: int) -> Work:
    source, target = _in_groups(network)
    near = np.full(len(source), size / network.group)
    # Part i of a group, and the servers that have some of it.
    proxies, holders = _pairs(np.arange(network.hosts), np.arange(servers))
    part = proxies % network.group
    begin = np.maximum(part / network.group, holders / servers)
    end = np.minimum((part + 1) / network.group, (holders + 1) / servers)
    there = end - begin > 1e-12
    source = np.concatenate([source, proxies[there]])
    target = np.concatenate([target, _servers(network, servers)[holders[there]]])
    each = np.concatenate([near, (end - begin)[there] * size])
    return _both_ways(source, target, each, network.hosts)


def _ring(network: Network, size: float, servers: int) -> Work:
    n, hosts = network.hosts, np.arange(network.hosts)
    each = np.full(n, 2 * (n - 1) / n * size)
    return Work(hosts, (hosts + 1) % n, each, np.full(n, size), 2 * (n - 1))


def _two_level(network: Network, size: float, servers: int) -> Work:
    n, group = network.hosts, network.group
    groups, hosts = n // group, np.arange(n)
    near, to = _in_groups(network)
    part = np.full(len(near), size / group)
    between = np.full(n, 2 * (groups - 1) / groups * size / group)
    return Work(
        np.concatenate([near, near, hosts]),
        np.concatenate([to, to, (hosts + group) % n]),
        np.concatenate([part, part, between]),
        np.full(n, size * (1 + 1 / group)),
        2 + 2 * (groups - 1),
    )


WAYS: dict[str, Callable[[Network, float, int], Work]] = {
    "flat": _flat,
    "proxy": _proxy,
    "proxies": _proxies,
    "ring": _ring,
    "two-level": _two_level,
}


@dataclass(frozen=True)
class Update:
    """What one update costs: bytes over all links between groups, and over the busiest one; seconds,
    and what takes them."""

    network: str
    hosts: int
    way: str
    servers: int
    upper: float
    busiest_upper: float
    seconds: float
    bound: str


def update(
    name: str, network: Network, way: str, size: float, servers: int, costs: Costs
) -> Update:
    """One update of `size` bytes of parameters."""
    work = WAYS[way](network, size, servers)
    far = work.source != work.target
    load = np.zeros(len(network.rates))
    for links in network.routes(work.source[far], work.target[far]):
        there = links >= 0
        load += np.bincount(links[there], work.bytes[far][there], len(load))
    messages = np.bincount(np.concatenate([work.source[far], work.target[far]]))
    upper = np.where(network.upper, load, 0.0)
    parts = {
        "a link between groups": float((upper / network.rates).max()),
        "a link inside": float(((load - upper) / network.rates).max()),
        "messages of a host": float(messages.max()) * costs.message,
        "adding": float(work.added.max()) / costs.add,
    }
    bound = max(parts, key=lambda k: parts[k])
    seconds = parts[bound]
    if work.steps:  # each of them adds up what came before it sends on
        seconds += work.steps * costs.latency + (parts["adding"] if bound != "adding" else 0.0)
    return Update(
        *(name, network.hosts, way, servers if way in ("flat", "proxy", "proxies") else 0),
        *(float(upper.sum()), float(upper.max()), seconds, bound),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall simulate servers``."""
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--servers", type=int, nargs="+", default=[32, 512], help="1 to 512")
    parser.add_argument("--size", type=float, default=102, help="of all parameters, MB")
    parser.add_argument("--message-us", type=float, default=1, help="of a host, for each message")
    parser.add_argument("--latency-us", type=float, default=2, help="of a step of allreduce")
    parser.add_argument("--add", type=float, default=16, help="GB/s that a host adds up")
    harness.add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Computes, prints the table."""
    if not 1 <= min(arguments.servers) <= max(arguments.servers) <= 512:
        raise UsageError("--servers must be 1 to 512: a host has one at most")
    if min(arguments.size, arguments.add) <= 0:
        raise UsageError("--size and --add must be above 0")
    costs = Costs(arguments.message_us / 1e6, arguments.latency_us / 1e6, arguments.add * 1e9)
    rows = list(_updates(arguments, costs))
    _print(rows, arguments.size)
    harness.write(arguments.json, costs=asdict(costs), rows=[asdict(r) for r in rows])
    return 0


def _updates(arguments: argparse.Namespace, costs: Costs) -> Iterator[Update]:
    for name in arguments.networks:
        for way in arguments.ways:
            counts = arguments.servers if way in ("flat", "proxy", "proxies") else [0]
            for servers in counts:
                yield update(name, NETWORKS[name], way, arguments.size * 1e6, servers, costs)


def _print(rows: Sequence[Update], size: float) -> None:
    table = harness.table(
        f"one update of {size:g} MB on {rows[0].hosts} hosts",
        *("network", "way", "servers", "GB between groups", "busiest of these links, GB", "ms"),
        "bound by",
        left=2,
    )
    for row in rows:
        table.add_row(
            *(row.network, row.way, str(row.servers or ""), f"{row.upper / 1e9:.1f}"),
            *(f"{row.busiest_upper / 1e9:.2f}", f"{row.seconds * 1e3:.1f}", row.bound),
        )
    harness.console().print(table)
