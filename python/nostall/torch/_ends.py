"""Finds the rank at the other end of a connection, through the group's store.

Gloo's errors name an address. Every rank writes the addresses of its own ends to the store; they are
read when an error has to be explained.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")
# A message of the transport is "[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer ...".
# A wait that ends because another one timed out has a message without a place. Ranks of a node that
# are not its leader get these behind words of their communicator.
_PLACE = re.compile(
    r"^(?:this communicator is broken: .*?)?(?:\[[^]]*\bgloo/(?:transport|\w+\.\w+)[^]]*\] *|"
    r"(?=Application timeout caused pair closure))"
)


def publish(store: Any, rank: int) -> None:
    """Writes this rank's addresses; called once it is connected with the others."""
    store.set(_key(rank), json.dumps(_own_ends()))


def transport_error(error: BaseException) -> str | None:
    """The message of Gloo's transport without what is before it; None for another error."""
    text = str(error).partition("\n")[0]
    if not _PLACE.match(text):
        return None
    return _PLACE.sub("", text).partition(". This is typically")[0]


def rank_at(text: str, store: Any, size: int) -> int | None:
    """The rank whose address is in the text, if there is one and the store still answers."""
    match = _ADDRESS.search(text)
    if match is None:
        return None
    address, port = _plain(ipaddress.ip_address(match[1])), int(match[2])
    # Some releases of Gloo write the port's bytes in the order of the network.
    wanted = {f"{address} {port}", f"{address} {socket.ntohs(port & 0xFFFF)}"}
    ranks = []
    with suppress(RuntimeError):  # the store is gone
        for rank in range(size):
            key = _key(rank)
            if store.check([key]) and not wanted.isdisjoint(json.loads(bytes(store.get(key)))):
                ranks.append(rank)
    return ranks[0] if len(ranks) == 1 else None


def _key(rank: int) -> str:
    return f"nostall ends {rank}"


def _own_ends() -> list[str]:
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(file)
            if name.startswith("socket:["):
                sockets.add(name[len("socket:[") : -1])
    ends = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            for fields in map(str.split, lines):
                if len(fields) > 9 and fields[9] in sockets:
                    address, _, port = fields[1].partition(":")
                    ends.append(f"{_address(address)} {int(port, 16)}")
    return ends


def _address(digits: str) -> str:
    """Converts the kernel's words of 32 bits, each in this machine's byte order."""
    words = bytes.fromhex(digits)
    raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return _plain(ipaddress.ip_address(raw))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
