"""The messages that the pages of troubleshooting and several nodes quote are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guide" / "troubleshooting.md"
NODES = ROOT / "docs" / "guide" / "clusters.md"


def sources() -> str:
    """All sources, literals that follow each other joined."""
    found = [
        path.read_text()
        for room in ("python/nostall", "native", "bindings")
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".cc", ".h")
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(found))


def quoted(page: str) -> list[str]:
    """The fixed parts of the messages: … and numbers stand for what differs."""
    heads = (head.replace("\n", " ") for head in re.findall(r"^\*\*(.+?)\*\*", page, re.M | re.S))
    messages = (message for head in heads for message in re.findall(r'"([^"]+)"', head))
    parts = (part.strip(" .():") for message in messages for part in re.split(r"…|\d+", message))
    return [part for part in parts if part]


def test_quoted_messages_are_those_of_the_sources() -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) > 15
    written = sources()
    assert [part for part in messages if part not in written] == []


def test_messages_of_several_nodes_are_those_of_the_sources() -> None:
    table = NODES.read_text().partition("## Trouble")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)}
    messages -= {"Destination is unreachable"}  # of UCX
    assert len(messages) > 10
    written = sources()
    for message in messages:
        # Numbers, names of files and variables, and what follows a colon differ.
        fixed = re.split(
            r"\[?\d[\d.]*\]?(?: in ~/\S+)?|^meet |^NOSTALL_SECRET", message.partition(":")[0]
        )
        assert all(part in written for part in fixed), message
