"""Lists, verifies, removes or drains the checkpoints of directories, or tries a restore."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.base._options import checked
from nostall.base._sizes import parse_size
from nostall.base._words import counted
from nostall.checkpoint._begin import lineage_of, undrained
from nostall.checkpoint._drain import copy_all, read_back
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import Ranges, is_past
from nostall.checkpoint._open import check_places, open_store
from nostall.checkpoint._place import LostStoreError, Pacing, UnreachableError, url_of
from nostall.checkpoint._restore import describe, on_branch, read_part, view
from nostall.checkpoint._retention import Keep
from nostall.checkpoint._search import manifest_of
from nostall.checkpoint._store import Entry, Store
from nostall.cli._bars import Bars
from nostall.errors import CorruptionError, Error, IoError, UsageError

_THREADS = 4
# Directories that a hint is looked for in, and those that it names.
_LOOKED_AT, _NAMED = 100, 3
# All columns of a row between the step and the state.
_BLANK = " " * 86


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nostall checkpoints``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=help, description=help)

    ls = action("ls", "list the checkpoints, oldest first")
    verify = action(
        "verify",
        "read everything and compare checksums; exit status 5 for damage, 3 for what cannot be read",
    )
    rm = action("rm", "remove steps, or what branches that were given up have left; manifest first")
    branch = action("branch", "go back to a checkpoint: what came after it is superseded")
    dry = action("restore-dry-run", "read what a restore would read, and print what it finds")
    for parser_ in (ls, verify, rm, dry, branch):
        parser_.add_argument(
            "directories",
            nargs="+",
            help="directories: the fast one first, then the durable one, which may be a URL "
            "(s3://bucket/run1)",
        )
    for parser_ in (ls, verify, dry):
        parser_.add_argument("--step", type=int, help="only this one")
    which = rm.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, action="append", help="may be repeated")
    which.add_argument("--superseded", action="store_true", help="every superseded save")
    which = branch.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="of several saves, the current branch's")
    which.add_argument("--id", help="id of the save, as ls shows it")
    dry.add_argument("--rank", type=int, default=0)
    drain = action("drain", "copy complete checkpoints from the fast directory to the durable one")
    drain.add_argument("fast")
    drain.add_argument("durable", help="a directory, or a URL (s3://bucket/run1)")
    drain.add_argument("--rate", help='bytes per second, such as "200MB"; no limit if not given')
    drain.add_argument("--keep", type=int, default=5, help="how many of the newest")
    for parser_ in (rm, branch, drain):
        parser_.add_argument(
            "--take-over",
            action="store_true",
            help="take an object store also from a job that may still run, whose later saves then stay "
            "on its fast directory",
        )


def run(arguments: argparse.Namespace) -> int:
    """0; 5 if anything is damaged, 3 if anything cannot be read."""
    if arguments.action == "drain":
        return _drain(arguments)
    for directory in arguments.directories:
        if url_of(directory) is None and not Path(directory).is_dir():
            raise UsageError(f"there is no directory {directory}")
    if arguments.action == "restore-dry-run" and len(arguments.directories) > 2:
        raise UsageError(
            f"a restore reads two directories, not {len(arguments.directories)}: give the fast one of "
            "its node and the durable one"
        )
    kinds = ["fast", "durable"] if len(arguments.directories) > 1 else ["durable"]
    stores = [
        open_store(directory, kinds[min(i, len(kinds) - 1)])
        for i, directory in enumerate(arguments.directories)
    ]
    if arguments.action == "rm":
        if arguments.superseded:
            return _remove_superseded(stores, arguments.take_over)
        return _remove(stores, arguments.step, arguments.take_over)
    if arguments.action == "branch":
        return _branch(stores, arguments.step, arguments.id, arguments.take_over)
    if arguments.action == "restore-dry-run":
        return _dry_run(stores, arguments.step, arguments.rank)
    return _list(stores, arguments.step, check=arguments.action == "verify")


def _list(stores: Sequence[Store], step: int | None, *, check: bool) -> int:
    status, any_found = 0, False
    for store in stores:
        store.recognize()
    top = view(stores, None).top
    print(
        f"{'STEP':>12}  {'WRITTEN':<19}  {'RANKS':>5}  {'BYTES':>15}  {'METRIC':>10}  {'SAVE':<15}  "
        f"{'BRANCH':<10}  STATE"
    )
    for store in stores:
        found = False
        for entry in store.entries():
            if step is not None and entry.step != step:
                continue
            found = True
            failed = 0
            try:
                problem = _problem(store, entry, check)
                state = f"DAMAGED: {problem}" if problem else ("verified" if check else "complete")
                failed = CorruptionError.exit_code if problem else 0
            except UnreachableError:
                raise
            except IoError as error:
                state, failed = f"UNREADABLE: {error}", error.exit_code
            manifest = entry.manifest
            if failed and manifest is not None:
                store.check_there()  # or all seems to be removed
                if store.lacks(manifest):
                    state, failed = "removed meanwhile", 0  # by the job's retention
            status = max(status, failed)
            print(_row(store, entry, state, top))
        store.check_there()
        incomplete = [s for s in store.steps() if step in (None, s) and not store.saves(s)]
        for other in incomplete:
            print(f"{other:>12}  {_BLANK}not complete")
        if not found and not incomplete:
            below = _below(store) if step is None else ""
            print(f"no checkpoints in {store.root}{below}")
        any_found = any_found or found
    if not any_found and (check or step is not None):
        of = "" if step is None else f" of step {step}"
        raise UsageError(f"there is no complete checkpoint{of} in {_places(stores)}")
    return status


def _below(store: Store) -> str:
    """Which directories in that of the store have checkpoints, if any; it looks for a few."""
    found: list[str] = []
    if store.is_directory:
        with contextlib.suppress(OSError), os.scandir(str(store.root)) as entries:
            for entry in itertools.islice((e for e in entries if e.is_dir()), _LOOKED_AT):
                with contextlib.suppress(IoError):
                    inside = Store(entry.path, store.kind)
                    if any(inside.saves(step) for step in inside.steps()):
                        found.append(entry.path)
    return f"; there are some in {', '.join(sorted(found)[:_NAMED])}" if found else ""


def _places(stores: Sequence[Store]) -> str:
    return ", ".join(str(store.root) for store in stores)


def _row(store: Store, entry: Entry, state: str, top: tuple[int, Ranges] | None) -> str:
    manifest = entry.manifest
    if manifest is None:
        return f"{entry.step:>12}  {_BLANK}{state}"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    ranks = f"{manifest.world_size}{'r' if manifest.replicated else ''}"
    metric = "" if manifest.metric is None else f"{manifest.metric:.6g}"
    where = f"{state} in {entry.path.parent}"
    if manifest.spread:
        here = [str(part.rank) for part in manifest.parts if store.has(entry.step, part)]
        where += f", of it the parts of ranks {', '.join(here) or 'none'}: nodes keep their own"
    current = top is not None and is_past(manifest.sequence, *top)
    branch = "current" if current else "superseded"
    return (
        f"{entry.step:>12}  {written}  {ranks:>5}  {manifest.size:>15}  {metric:>10}  "
        f"{manifest.id:<15}  {branch:<10}  {where}"
    )


def _problem(store: Store, entry: Entry, check: bool) -> str:
    """What is missing or, if it is read, damaged; or "".

    Raises:
        IoError: that is not known.
    """
    if entry.unread:
        raise IoError(entry.damage)
    if entry.manifest is None:
        return entry.damage
    missing = store.missing(entry.manifest)
    return _check(store, entry, entry.manifest) if check and not missing else missing


def _check(store: Store, entry: Entry, manifest: Manifest) -> str:
    for part in manifest.parts:
        path = entry.path / part.name
        if manifest.spread and not store.has(entry.step, part):
            continue  # on another node
        with Bars() as bars:
            bars.show(f"step {manifest.step} rank {part.rank}")
            try:
                bad = store.check(manifest.step, part, _THREADS, _native.Progress())
            except CorruptionError as error:
                return str(error)
        if bad:
            return f"{path}: {describe(part, bad)}"
    return ""


@contextlib.contextmanager
def _owning(stores: Sequence[Store], take_over: bool) -> Iterator[None]:
    """Inside a ``with`` all of them are this command's; it says from whom it takes one over."""
    with contextlib.ExitStack() as owning:
        for store in stores:
            if take_over and (other := store.other_owner()):
                print(
                    f"{store.root} is taken over from {other}: if that job still runs, nothing that it "
                    "saves from now on is copied there",
                    file=sys.stderr,
                )
            store.own(take_over=take_over)
            owning.callback(store.disown)
        yield


def _remove(stores: Sequence[Store], steps: Sequence[int], take_over: bool) -> int:
    missing = set(steps)
    with _owning(stores, take_over):
        for store in stores:
            for step in steps:
                _refuse_whole_beside_damaged(store, step)
        for store in stores:
            for step in steps:
                if step in store.steps():
                    store.remove_step(step)
                    missing.discard(step)
                    print(f"removed step {step} from {store.root}")
                else:
                    print(f"no step {step} in {store.root}")
    if missing:
        steps_ = ", ".join(map(str, sorted(missing)))
        raise UsageError(f"there is no step {steps_} in {_places(stores)}")
    return 0


def _refuse_whole_beside_damaged(store: Store, step: int) -> None:
    """Refuses to remove a step where a damaged save may be meant, and good ones would go too.

    Raises:
        UsageError: there are both.
        IoError: that is not known, as a manifest beside good ones cannot be read.
    """
    saves = store.saves(step)
    good = [entry.id for entry in saves if entry.id]
    for entry in saves:
        if not good or entry.id:
            continue
        path = entry.path / entry.name
        if entry.unread:
            raise IoError(
                f"{entry.damage}, and rm removes the saves {', '.join(good)} beside it too: make it "
                "readable, then repeat this command"
            )
        raise UsageError(
            f"step {step} in {store.root} has the saves {', '.join(good)} beside a damaged one, and rm "
            f"removes all of them: remove {path} alone, and the job's next start removes its parts; to "
            "remove the others too, repeat this command then"
        )


def _worked(failed: list[Error | OSError], store: Store, change: Callable[[], None]) -> bool:
    """Whether a change did; what fails is noted, so that the other checkpoints have their turn.

    Raises:
        Error: all that was noted, where the others would fail too, after requests in vain: the object
            store does not answer a small request either, or is another job's.
    """
    try:
        change()
    except (Error, OSError) as error:
        failed.append(error)
        if isinstance(error, UnreachableError | LostStoreError) and not store.is_directory:
            try:
                store.check_owned()  # it may have refused this one alone, or not in time
            except (Error, OSError):
                _raise_all(failed)
        return False
    return True


def _raise_all(failed: Sequence[Error | OSError]) -> None:
    """What was noted, as one error, of the kind that all have in common if there is one."""
    if len(failed) > 1:
        damaged = any(isinstance(error, CorruptionError) for error in failed)
        kind: type[Error] = CorruptionError if damaged else IoError
        if len(set(map(type, failed))) == 1 and isinstance(failed[0], Error):
            kind = type(failed[0])
        raise kind("; ".join(map(str, failed)))
    if failed:
        raise failed[0]


def _remove_superseded(stores: Sequence[Store], take_over: bool) -> int:
    with _owning(stores, take_over):
        top, removed = view(stores, None).top, False
        failed: list[Error | OSError] = []
        for store in stores:
            for manifest in store.manifests():
                if top is None or is_past(manifest.sequence, *top):
                    continue
                removed = True
                remove = functools.partial(store.remove, manifest.step, manifest.id)
                if _worked(failed, store, remove):
                    print(f"removed save {manifest.id} of step {manifest.step} from {store.root}")
    _raise_all(failed)
    if not removed:
        print(f"no superseded saves in {_places(stores)}")
    return 0


def _branch(stores: Sequence[Store], step: int | None, id: str | None, take_over: bool) -> int:
    with _owning(stores, take_over):
        found = view(stores, step)
        chosen = next((c for c in found.choices if id in (None, c.id)), None)
        if chosen is None:
            of = f"of step {step}" if id is None else f"with the id {id}"
            raise UsageError(f"there is no undamaged checkpoint {of} in {_places(stores)}")
        manifest = next(m for s in stores if (m := s.find(chosen.step, chosen.id)) is not None)
        lineage = lineage_of(stores, stores)
        lineage.restored(manifest)
        number, abandoned = lineage.begin()
        for store in stores:
            store.note_branch(Branch(number, abandoned, manifest.step, manifest.id))
    print(f"the next restore gives step {manifest.step}, of save {manifest.id}")
    return 0


def _dry_run(stores: Sequence[Store], step: int | None, rank: int) -> int:
    looked = view(stores, step)
    passed_over = bool(looked.problems)
    unread: dict[str, UnreachableError] = {}  # by ids: an older one is not restored in their place
    for problem in looked.problems:
        print(f"passed over: {problem}")
    for number, choice in enumerate(looked.choices):
        found = choice.step
        if step is None and not on_branch(choice, looked.top):
            print(f"superseded: step {found}, save {choice.id}")
            continue
        store = next(s for s in stores if s.kind == choice.kind)
        passed_over = True
        try:
            manifest = manifest_of(store, found, choice.id)
            part = manifest.part_of(rank)
            if part is not None and manifest.spread and not store.has(found, part):
                raise IoError(f"step {found}: the part of rank {rank} is on another node")
            if part is not None:
                with Bars() as bars:
                    show = functools.partial(bars.show, f"reading step {found}")
                    restored = read_part(store, manifest, rank, _THREADS, show)
        except (Error, OSError) as error:
            if isinstance(error, UnreachableError):
                unread[choice.id] = error
            if choice.id in unread and choice.id not in [
                c.id for c in looked.choices[number + 1 :]
            ]:
                raise unread[choice.id] from None
            print(f"passed over: {error}")
            continue
        if part is None:  # a restore by so many ranks is refused
            raise UsageError(f"step {found} in {store.root} has no part of rank {rank}")
        print(
            f"would restore step {found} from {store.root}: {part.size} bytes in "
            f"{restored.seconds:.2f} s ({part.size / max(restored.seconds, 1e-9) / 1e6:.0f} MB/s)"
        )
        for line in _outline(restored.state):
            print(f"  {line}")
        return 0
    if not (passed_over or looked.choices):
        of = "" if step is None else f" of step {step}"
        below = "" if step is not None else "".join(_below(store) for store in stores)
        raise UsageError(f"there is no complete checkpoint{of} in {_places(stores)}{below}")
    print(f"nothing can be restored from {_places(stores)}")
    return CorruptionError.exit_code


def _outline(state: Any, name: str = "state", depth: int = 0) -> list[str]:
    """Two levels of a state, a line each."""
    if isinstance(state, dict) and depth < 2:
        lines = [f"{name}: {len(state)} entries"]
        for key, value in state.items():
            lines += _outline(value, f"{name}[{key!r}]", depth + 1)
        return lines
    shape = getattr(state, "shape", None)
    if shape is not None:
        return [f"{name}: {state.dtype} of shape {tuple(shape)}"]
    if isinstance(state, dict | list | tuple):
        return [f"{name}: {type(state).__name__} of {len(state)}"]
    return [f"{name}: {str(state)[:60]}"]


def _drain(arguments: argparse.Namespace) -> int:
    check_places(arguments.fast, arguments.durable)
    fast, durable = Store(arguments.fast, "fast"), open_store(arguments.durable, "durable")
    if not Path(fast.root).is_dir():
        raise UsageError(f"there is no directory {fast.root}")
    if not fast.steps() and not fast.seen():
        raise UsageError(
            f"there never was a checkpoint in {fast.root}: give the fast directory of a job"
        )
    rate = 0
    if arguments.rate is not None:
        rate = parse_size(checked("checkpoint.rate", arguments.rate))

    def copy(manifest: Manifest, part: Part, name: str) -> None:
        source, pacing = fast.directory(manifest.step) / part.name, Pacing(rate)
        durable.copy(source, manifest.step, name, part, pacing).run()
        read_back(durable, manifest.step, part, name, _native.Priority.normal)

    with _owning([fast, durable], arguments.take_over):
        if durable.is_exclusive:  # else the parts may be of a save that a running job completes
            durable.clean()
        waiting = undrained(fast, durable, Keep(arguments.keep))
        failed: list[Error | OSError] = []
        for manifest in waiting:
            copy_one = functools.partial(copy, manifest)
            if _worked(failed, durable, functools.partial(copy_all, durable, manifest, copy_one)):
                print(f"step {manifest.step}: {manifest.size} bytes are in {durable.root} now")
        for entry in fast.entries():
            if entry.manifest is not None and not all(
                fast.has(entry.step, part) for part in entry.manifest.parts
            ):
                print(
                    f"step {entry.step}: other nodes have parts of it; the job's next start drains it"
                )
        print(f"{counted(len(waiting) - len(failed), 'checkpoint')} drained")
    _raise_all(failed)
    return 0
