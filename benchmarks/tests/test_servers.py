"""Parameter servers as flows: routes of the networks, bytes that follow by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nostall.cli import main
from nostall_bench.networks import Dragonfly, FatTree, Network, Torus
from nostall_bench.servers import NETWORKS, WAYS, Costs, update

FREE = Costs(message=0.0, latency=0.0, add=1e18)


def all_pairs(network: Network) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every host with every host, and the hops of each message."""
    hosts = np.arange(network.hosts)
    source, target = np.repeat(hosts, len(hosts)), np.tile(hosts, len(hosts))
    hops = np.array(network.routes(source, target))
    assert hops.max() < len(network.rates) == len(network.upper)
    return source, target, hops


def test_a_torus_takes_the_shorter_way_in_each_dimension() -> None:
    network = Torus((4, 3, 2))
    source, target, hops = all_pairs(network)
    expected = 0
    for stride, side in ((1, 4), (4, 3), (12, 2)):
        ahead = (target // stride - source // stride) % side
        expected = expected + np.minimum(ahead, side - ahead)
    assert ((hops >= 0).sum(axis=0) == expected).all()
    # Every place has six links, and traffic from all to all uses them.
    assert set(hops[hops >= 0]) <= set(range(24 * 6))


def test_a_dragonfly_takes_one_link_between_groups() -> None:
    network = Dragonfly(groups=5, routers=2, down=3)
    source, target, hops = all_pairs(network)
    far = source // network.group != target // network.group
    between = np.where(hops >= 0, network.upper[hops], False).sum(axis=0)
    assert (between == far).all()
    # To the gate, over, and on from the gate; a router is not left for itself.
    assert (hops >= 0).sum(axis=0).max() == 5
    # The link from one group to another is one for all their hosts.
    links = {
        (s // 6, t // 6): h[2] for s, t, h in zip(source, target, hops.T, strict=True) if h[2] >= 0
    }
    assert len(set(links.values())) == 5 * 4


def test_bytes_between_groups_follow_by_hand() -> None:
    tree = FatTree(leaves=2, down=2, cores=1, link=100.0)
    # One server on host 0: hosts 2 and 3 push and pull over two links between switches each.
    flat = update("", tree, "flat", 100.0, 1, FREE)
    assert (flat.upper, flat.busiest_upper) == (800.0, 200.0)
    # Three workers meet at the server's link.
    assert (flat.seconds, flat.bound) == (3.0, "a link inside")
    # Their sum crosses once.
    proxy = update("", tree, "proxy", 100.0, 1, FREE)
    assert (proxy.upper, proxy.busiest_upper, proxy.seconds) == (400.0, 100.0, 2.0)
    ring = update("", tree, "ring", 100.0, 0, FREE)
    assert (ring.upper, ring.seconds) == (2 * 2 * 150.0, 1.5)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_proxies_sum_a_group_before_it_crosses(name: str) -> None:
    network = NETWORKS[name]
    found = {way: update(name, network, way, 1e8, 64, FREE) for way in WAYS}
    for way in ("proxy", "proxies"):
        assert found[way].upper == pytest.approx(found["flat"].upper / network.group, rel=0.02)
    # A proxy's own link is the narrow place, unless all hosts share its work.
    assert found["proxies"].seconds < found["proxy"].seconds
    assert found["proxies"].seconds < found["flat"].seconds


def test_what_else_bounds_an_update_is_named() -> None:
    tree = FatTree(leaves=4, down=4, cores=4)
    assert update("", tree, "flat", 1e6, 16, Costs(message=1.0)).bound == "messages of a host"
    assert update("", tree, "proxy", 1e6, 16, Costs(add=1e3)).bound == "adding"


def test_the_command_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    words = ["simulate", "servers", "--networks", "dragonfly", "--servers", "16"]
    assert main([*words, "--json", str(out)]) == 0
    assert [r["way"] for r in json.loads(out.read_text())["rows"]] == list(WAYS)
    assert "bound by" in capsys.readouterr().out
    assert main(["simulate", "servers", "--servers", "513"]) == 2
