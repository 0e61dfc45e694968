"""Other users of the node plant files, links, pipes, tiers and sockets where a training puts its own.

A victim and an attacker are two users, and a third one takes names of sockets while the attacker
connects to those that are left; root makes them and the directory, sticky or plain, with the
kernel's protection of links and of files on and off. The attacker knows every name and comes first;
then the victim trains with a tier there, kept or not, and joins collectives. A case fails if the
training hangs or ends, if a sample is not the victim's, if a file of the victim changed, if the
attacker could read a sample, or if no message names what was planted in the tier's directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from campaigns.outcome import Outcome, Task

FULL = "86 plants"
SMALL = 0.3

VICTIM, ATTACKER, THIRD = 61001, 61002, 61003
SAMPLES, BYTES = 12, 3000
SECRET, PLANTED, PRECIOUS = b"victim's", b"planted.", b"the thesis"
PROTECTIONS = [
    Path("/proc/sys/fs", name)
    for name in (
        "protected_regular",
        "protected_symlinks",
        "protected_fifos",
        "protected_hardlinks",
    )
]
OWN = f"nostall-{VICTIM}"
TIMEOUT = 60.0


@dataclass
class Place:
    """Where one case happens: the victim's data, a precious file of his, and a shared directory."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def precious(self) -> Path:
        return self.root / "home" / "thesis"

    @property
    def shared(self) -> Path:
        return self.root / "shared"


def as_user(uid: int, work: Callable[[], object], seconds: float = TIMEOUT) -> int:
    """Exit status of a child of that user: 0, or 99 if it did not end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(uid)
            os.setgroups([])
            os.setuid(uid)
            os.umask(0o077)
            work()
            status = 0
        except SystemExit as e:
            status = int(e.code or 0)
        except BaseException as e:
            os.write(2, f"{e!r}\n".encode())
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99


def samples(root: Path, content: bytes) -> None:
    (root / "class").mkdir(parents=True)
    for i in range(SAMPLES):
        text = content + b" %03d " % i
        (root / "class" / f"{i:03}.jpg").write_bytes((text * BYTES)[:BYTES])


def train(data: Path, tier: str, job: str, wrong: list[str], epochs: int = 2) -> None:
    """Reads all samples and notes those that are not the victim's."""
    import numpy as np

    import nostall
    from nostall.collective import Communicator

    content = PLANTED if os.getuid() == ATTACKER else SECRET
    with nostall.DataLoader(
        nostall.ImageFolder(data, index=False),
        4,
        epochs=epochs,
        tiers=["ram:10KiB", tier],
        job=job,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
    ) as loader:
        for epoch in loader.epochs():
            for raw, _ in epoch:
                wrong += [
                    "a sample is not the victim's"
                    for i in range(len(raw))
                    if not bytes(raw[i]).startswith(content)
                ]
    with Communicator(job, 0, 1, timeout=20) as alone:
        alone.allreduce(np.ones(4, np.float32), "max")


# ---------------------------------------------------------------------- what the attacker plants


def directory_with_a_kept_tier(place: Place, mode: int = 0o777) -> None:
    """A tier of the same data set, by its names and sizes, with other samples in it."""
    forged = Path(tempfile.mkdtemp(dir=place.shared))
    samples(forged / "data", PLANTED)
    train(forged / "data", f"{forged}:1MiB:keep", "forger", [], epochs=1)
    shutil.move(forged / f"nostall-{ATTACKER}", place.shared / OWN)
    shutil.rmtree(forged)
    for path in (place.shared / OWN).iterdir():
        path.chmod(0o666)
    (place.shared / OWN).chmod(mode)


def link_to_the_victims_directory(place: Place) -> None:
    (place.shared / OWN).symlink_to(place.precious.parent)


def link_to_ones_own_directory(place: Place) -> None:
    directory_with_a_kept_tier(place)
    (place.shared / OWN).rename(place.shared / "elsewhere")
    (place.shared / OWN).symlink_to(place.shared / "elsewhere")


def link_to_nowhere(place: Place) -> None:
    (place.shared / OWN).symlink_to("/nowhere")


def pipe(place: Place) -> None:
    os.mkfifo(place.shared / OWN, 0o666)


def plain_file(place: Place) -> None:
    (place.shared / OWN).write_bytes(b"x")


def hard_link(place: Place) -> None:
    try:
        os.link(place.precious, place.shared / OWN)
    except PermissionError:  # protected_hardlinks
        plain_file(place)


IN_ITS_PLACE = [
    directory_with_a_kept_tier,
    link_to_the_victims_directory,
    link_to_ones_own_directory,
    link_to_nowhere,
    pipe,
    plain_file,
    hard_link,
]


# What lies in a directory that is the victim's, from a time when others could enter it: the tier's
# file, or its manifest, is replaced.


def foreign_file(path: Path, place: Place) -> None:
    path.write_bytes(b"x" * 5000)
    os.chown(path, ATTACKER, ATTACKER)


def open_file(path: Path, place: Place) -> None:
    path.write_bytes(b"x" * 5000)
    os.chown(path, VICTIM, VICTIM)
    path.chmod(0o666)


def link_to_precious(path: Path, place: Place) -> None:
    path.symlink_to(place.precious)


def hard_link_to_precious(path: Path, place: Place) -> None:
    os.link(place.precious, path)


def pipe_there(path: Path, place: Place) -> None:
    os.mkfifo(path, 0o600)
    os.chown(path, VICTIM, VICTIM)


INSIDE = [foreign_file, open_file, link_to_precious, hard_link_to_precious, pipe_there]


# ---------------------------------------------------------------------- sockets


def names_of(job: str) -> Iterator[str]:
    """What the names of the sockets of a job begin with (docs/formats/tier.md)."""
    for room in ("tiers", "collective"):
        value = 0xCBF29CE484222325
        for byte in f"{room} /dev/shm {job}".encode():
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        yield f"nostall-{VICTIM}-{value:016x}-"


@contextlib.contextmanager
def squatter(
    job: str, lasts: list[str], attempts: int, listens: bool, user: int = ATTACKER
) -> Iterator[None]:
    """A process of that user that holds names of the victim's sockets."""
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(user)
        taken = []
        for base in names_of(job):
            for attempt in range(attempts):
                for last in lasts:
                    taken.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    taken[-1].bind(f"\0{base}{attempt}-{last}")
                    if listens:
                        taken[-1].listen()
        os.write(says, b".")
        signal.pause()
    os.read(hears, 1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(hears)
        os.close(says)


@contextlib.contextmanager
def visitor(job: str, attempt: int = 0) -> Iterator[None]:
    """An attacker's process that connects to all sockets of the victim, and keeps the connections."""
    pid = os.fork()
    if pid == 0:
        os.setuid(ATTACKER)
        held = []
        while True:
            for base in names_of(job):
                for last in ("turn", "0"):
                    held.append(
                        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                    )
                    with contextlib.suppress(OSError):
                        held[-1].connect(f"\0{base}{attempt}-{last}")
                        _, files, _, _ = socket.recv_fds(held[-1], 64, 64)
                        if files:
                            os._exit(7)
            held = held[-200:]
    try:
        yield
    finally:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done and os.waitstatus_to_exitcode(status) == 7:
            raise AssertionError("the attacker was given files of the victim")
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---------------------------------------------------------------------- cases


def reads(place: Place) -> int:
    """Run by the attacker: whether a sample of the victim can be read."""
    for top in (place.shared, Path("/dev/shm")):
        for directory, _, files in os.walk(top):
            for name in files:
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    if stat.S_ISREG(path.lstat().st_mode) and SECRET in path.read_bytes():
                        return 1
    return 0


@contextlib.contextmanager
def protection(on: bool) -> Iterator[bool]:
    """The kernel's protection of shared directories; whether it could be set."""
    before = {}
    try:
        for path in PROTECTIONS:
            before[path] = path.read_text()
            path.write_text("1" if on else "0")
        yield True
    except OSError:
        yield False
    finally:
        for path, value in before.items():
            with contextlib.suppress(OSError):
                path.write_text(value)


def make_place(root: Path, sticky: bool) -> Place:
    place = Place(root)
    root.chmod(0o755)
    samples(place.data, SECRET)
    place.precious.parent.mkdir()
    place.precious.write_bytes(PRECIOUS)
    for path in (place.data, *place.data.rglob("*"), place.precious.parent, place.precious):
        os.chown(path, VICTIM, VICTIM)
        path.chmod(0o700 if path.is_dir() else 0o600)
    place.shared.mkdir()
    place.shared.chmod(0o1777 if sticky else 0o777)
    return place


def victim(place: Place, tier: str, job: str, names: str) -> list[str]:
    """Trains as the victim; what went wrong."""
    told = place.root / "told"
    told.touch()
    os.chown(told, VICTIM, VICTIM)

    def work() -> None:
        os.dup2(os.open(told, os.O_WRONLY | os.O_APPEND), 2)
        logging.basicConfig(level=logging.INFO)
        wrong: list[str] = []
        train(place.data, tier, job, wrong)
        for line in wrong:
            print(line, flush=True)
        os._exit(3 if wrong else 0)

    status = as_user(VICTIM, work)
    text = told.read_text()
    wrong = []
    if status == 99:
        wrong.append("it hung")
    elif status == 3:
        wrong.append("a sample is not the victim's")
    elif status != 0:
        wrong.append(f"it ended with status {status}: {text[-300:]}")
    if names and names not in text:
        wrong.append(f"no message names {names}: {text[-300:]!r}")
    if place.precious.read_bytes() != PRECIOUS:
        wrong.append("a file of the victim was changed")
    extra = [p.name for p in place.precious.parent.iterdir() if p != place.precious]
    if extra:
        wrong.append(f"files appeared in the victim's directory: {extra}")
    if as_user(ATTACKER, lambda: os._exit(reads(place))) != 0:
        wrong.append("the attacker can read a sample")
    return wrong


Case = tuple[str, bool, Callable[[Place, str], list[str]]]


def swapped(place: Place, job: str) -> list[str]:
    tier = f"{place.shared}:1MiB:keep"
    if wrong := victim(place, tier, job, ""):
        return wrong

    def swap() -> None:
        (place.shared / OWN).rename(place.shared / "moved")
        directory_with_a_kept_tier(place)

    if as_user(ATTACKER, swap) != 0:
        return ["the attacker's part failed"]
    return victim(place, tier, job, f"{place.shared}/{OWN}")


def planted_names(place: Place, job: str) -> list[str]:
    """Files of every name that begins as a nostall's could; none of them is opened."""

    def plant() -> None:
        for directory in (place.shared, Path("/dev/shm")):
            for base in names_of(job):
                for last in ("catalog", "arena", "collective", "1.tier", "0"):
                    with contextlib.suppress(FileExistsError):
                        (directory / f"{base}{last}").symlink_to(place.precious)

    if as_user(ATTACKER, plant) != 0:
        return ["the attacker's part failed"]
    try:
        return victim(place, f"{place.shared}:1MiB", job, "")
    finally:
        for path in Path("/dev/shm").glob(f"nostall-{VICTIM}-*"):
            path.unlink()


def cases() -> Iterator[Case]:
    """What each is called, whether the directory is sticky, and what it does."""

    def in_its_place(plant: Callable[[Place], None]) -> Callable[[Place, str], list[str]]:
        def run_case(place: Place, job: str) -> list[str]:
            if as_user(ATTACKER, lambda: plant(place)) != 0:
                return ["the attacker's part failed"]
            return victim(place, f"{place.shared}:1MiB:keep", job, f"{place.shared}/{OWN}")

        return run_case

    def inside(
        plant: Callable[[Path, Place], None], suffix: str
    ) -> Callable[[Place, str], list[str]]:
        def run_case(place: Place, job: str) -> list[str]:
            tier = f"{place.shared}:1MiB:keep"
            if wrong := victim(place, tier, job, ""):
                return wrong
            path = next((place.shared / OWN).glob(f"*{suffix}"))
            path.unlink()
            plant(path, place)
            return victim(place, tier, job, str(path))

        return run_case

    def squatted(
        lasts: list[str], attempts: int, listens: bool
    ) -> Callable[[Place, str], list[str]]:
        def run_case(place: Place, job: str) -> list[str]:
            with squatter(job, lasts, attempts, listens):
                return victim(place, f"{place.shared}:1MiB", job, "")

        return run_case

    def visited(place: Place, job: str) -> list[str]:
        with visitor(job):
            return victim(place, f"{place.shared}:1MiB", job, "")

    def visited_while_squatted(place: Place, job: str) -> list[str]:
        # The victim then has the next names, which the visitor finds.
        with squatter(job, ["turn", "0"], 1, True, THIRD), visitor(job, 1):
            return victim(place, f"{place.shared}:1MiB", job, "")

    for sticky in (True, False):
        kind = "sticky" if sticky else "plain"
        for plant in IN_ITS_PLACE:
            yield f"{plant.__name__} in a {kind} directory", sticky, in_its_place(plant)
        for there in INSIDE:
            for suffix in (".tier", ".manifest"):
                yield (
                    f"{there.__name__} as *{suffix} in a {kind} directory",
                    sticky,
                    inside(there, suffix),
                )
        yield f"planted names in a {kind} directory", sticky, planted_names
    yield "a directory swapped in a plain directory", False, swapped
    for listens in (False, True):
        yield f"the first turn taken, listening {listens}", True, squatted(["turn"], 1, listens)
        yield f"the first name taken, listening {listens}", True, squatted(["0"], 1, listens)
    yield "a visitor at all sockets", True, visited
    yield "a visitor where a third user has the first names", True, visited_while_squatted


def run(task: Task) -> Outcome:
    if os.geteuid() != 0:
        return Outcome(missing="root, to be two other users")
    # Users are forked from here, and find everything loaded.
    with tempfile.TemporaryDirectory() as root:
        samples(Path(root, "data"), SECRET)
        train(Path(root, "data"), f"{root}:1MiB", "warm up", [])
    outcome = Outcome()
    found = list(cases())
    chosen = [(case, on) for on in (False, True) for case in found]
    random.Random(task.seed).shuffle(chosen)
    chosen.sort(key=lambda pair: pair[1])  # the kernel's settings change once
    unset = 0
    for number, ((name, sticky, work), on) in enumerate(
        chosen[: task.count(len(chosen), least=10)]
    ):
        with (
            protection(on) as set_,
            tempfile.TemporaryDirectory(
                prefix="nostall-tenant-", ignore_cleanup_errors=True
            ) as root,
        ):
            unset += not set_
            place = make_place(Path(root), sticky)
            case = f"seed {task.seed}, {name}, protection {'on' if on else 'off'}"
            try:
                outcome.failures += [
                    f"{case}: {wrong}" for wrong in work(place, f"tenant {os.getpid()} {number}")
                ]
            except AssertionError as e:
                outcome.failures.append(f"{case}: {e}")
            outcome.cases += 1
    if unset:
        outcome.figures["cases without the kernel's settings"] = unset
    return outcome
