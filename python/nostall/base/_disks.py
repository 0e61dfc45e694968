"""The disk of this machine that a tier "local:400GiB" lies on."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nostall.errors import UsageError

# Those of disks in this machine; others may be another machine's, or memory.
_OF_DISKS = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "reiserfs", "xfs", "zfs")
# Block devices that lie on other machines.
_FAR = ("/dev/nbd", "/dev/rbd", "/dev/drbd")
# Where launchers and sites say that a job's local disk is.
_NAMED = ("SLURM_TMPDIR", "LOCAL_SCRATCH", "TMPDIR")
_USUAL = ("/var/tmp", "/tmp")
# Mounts of the system itself, which containers make too.
_SYSTEMS = ("boot", "dev", "etc", "proc", "root", "run", "snap", "sys", "usr")

_log = logging.getLogger("nostall")


@dataclass(frozen=True)
class Mount:
    """A mounted file system: its place, kind, device, and the device's number "major:minor".

    `root` is the directory of it that is mounted, `options` are its own.
    """

    place: str
    kind: str
    device: str
    number: str
    root: str
    options: str

    @property
    def is_disk(self) -> bool:
        """Whether it is a disk of this machine, as far as the kernel says."""
        return self.kind in _OF_DISKS and not self.device.startswith(_FAR)


def mounts(table: str) -> list[Mount]:
    """The file systems of a /proc/self/mountinfo, the last one that was mounted at a place.

    Names are as the kernel has them: of any bytes but a line feed's, which alone ends a line.
    """
    found = {}
    for line in filter(None, table.split("\n")):
        head, _, tail = line.partition(" - ")
        number, root, place = head.split(" ")[2:5]
        kind, device, options = tail.split(" ")[:3]
        place = _unescaped(place)
        found[place] = Mount(place, kind, device, number, _unescaped(root), options)
    return list(found.values())


def _unescaped(path: str) -> str:
    return os.fsdecode(os.fsencode(path).decode("unicode_escape").encode("latin-1"))


def mount_of(path: str, known: list[Mount]) -> Mount | None:
    """The file system that a path lies on."""
    real = os.path.realpath(path)
    around = [m for m in known if real == m.place or real.startswith(m.place.rstrip("/") + "/")]
    return max(around, key=lambda m: len(m.place), default=None)


def choose(
    environment: Mapping[str, str], known: list[Mount], *, devices: str = "/sys/dev/block"
) -> str:
    """A directory on a local disk that this user can write to.

    The one that the launcher names; else of the solid-state disks the largest, else of the others.
    Sizes and not free bytes count, so that all ranks of a node choose the same.

    Raises:
        UsageError: there is none, with what there is.
    """
    places = {m.place: m for m in known if m.is_disk and not _is_of_system(m.place)}
    for path in (*_USUAL, *(environment.get(name, "") for name in _NAMED)):
        mount = mount_of(path, known) if path and os.path.isdir(path) else None
        if mount is not None and mount.is_disk:
            places[path] = mount
    ranked = []
    for path, mount in places.items():
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            continue
        named = [name for name in _NAMED if environment.get(name) == path]
        disk = os.statvfs(path)
        size = disk.f_frsize * disk.f_blocks
        order = _NAMED.index(named[0]) if named else len(_NAMED)
        ranked.append(((order, _turns(devices, mount.number), -size, path), path, mount))
    if not ranked:
        seen = ", ".join(f"{m.place} ({m.kind})" for m in known if m.device != "none")
        raise UsageError(
            'tier "local": no disk of this machine can be written to: name a directory, as '
            f'"/nvme/cache:400GiB"; there are {seen[:400] or "no mounts"}'
        )
    (_, turns, _, _), path, mount = min(ranked)
    _log.info(
        'tier "local": %s on %s (%s, %s)',
        path,
        mount.device,
        mount.kind,
        "a rotating disk" if turns else "solid state",
    )
    return path


def _is_of_system(place: str) -> bool:
    return place == "/" or Path(place).parts[1] in _SYSTEMS


def _turns(devices: str, number: str) -> bool:
    """Whether the kernel says that a disk rotates; of a partition it says so of the whole disk."""
    for folder in (Path(devices, number), Path(devices, number, "..")):
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False


@functools.cache
def local_directory() -> str:
    """Where tiers lie on a local disk; chosen once in a process."""
    return choose(os.environ, mounts(os.fsdecode(Path("/proc/self/mountinfo").read_bytes())))
