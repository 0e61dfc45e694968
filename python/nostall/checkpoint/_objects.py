"""A store of checkpoints below a URL, by requests of obstore.

An object store has no locks, no renames, and removes on no condition. So no name is ever written twice:
each holds a number taken by put-if-absent, or a random token. The job that begins last owns the store;
the one before finds that out before it acknowledges a save and before each removal. What it may remove
all the same is nothing that the later job relies on: docs/formats/checkpoint.md says why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nostall import _native
from nostall.base import _object_client as client
from nostall.base import _process as process
from nostall.checkpoint._format import Branch, Manifest, Part
from nostall.checkpoint._lineage import LEGACY, STRIDE, Ranges
from nostall.checkpoint._place import (
    CheckedPart,
    Copy,
    LostStoreError,
    Pacing,
    UnknownOutcomeError,
    UnreachableError,
    Url,
)
from nostall.checkpoint._store import MARK, Entry, Store, entry_of, part_stays
from nostall.checkpoint._transfer import ObjectPart, Upload, read_blocks
from nostall.errors import CorruptionError, Error, IoError, PeerError, UsageError

_STEP = re.compile(r"step-(\d{12})")
# All names that a checkpointer gives in a step; all else there is the user's.
_OURS = re.compile(
    r"(?P<kind>manifest-|rank-\d{5}\.|word-\d{5}\.|decision\.)(?P<id>[0-9a-f]{8}-\d{6,})"
    r"(?:\.(?P<token>[0-9a-f]{16}))?\.(?:json|safetensors)"
)
# All else there is the user's.
_OWNER = re.compile(r"(\d{12})\.json")
_CLOSED = re.compile(r"(\d{12})\.closed\.json")
_OWNERS, _BRANCHES, _RUNS = ".owners", ".branches", ".runs"
# In a manifest's place: the parts are being removed, and their job can complete them no more.
_GIVEN_UP = b'{"given up": true}'
# Of the attempt that all ranks make together: there is one of a save, by the job that its id names.
_TOGETHER = "0" * 16
# Attempts of a request whose connection ends, which the client's own retries do not all cover.
_ATTEMPTS = 3
# What a job that ends waits for the store's answer to that: seconds.
_LAST_WORD_SECONDS = 5.0

_log = logging.getLogger("nostall")


class ObjectStore(Store):
    """Checkpoints below a URL such as ``s3://bucket/run1``; `kind` is for messages."""

    is_directory = False
    _look_seconds, _looks_per_second, _longest_look = 0.2, 20, 5.0

    def __init__(self, url: Url, kind: str) -> None:
        self.root, self.kind = url, kind
        self._url = url
        scheme, _, rest = url.partition("://")
        bucket, _, self._prefix = rest.partition("/")
        self._bucket = f"{scheme}://{bucket}"
        self._client: Any = None
        self._changing = threading.RLock()
        self._me = {
            "run": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": process.mark(),
            "began": int(time.time()),  # for people
        }
        # The number of this job among the owners, and the first number of its saves; 0: it is none, -1:
        # it was one.
        self._owner = self._first = self._wanted = 0
        # Manifests that may come although nothing has answered, by the ids of their saves.
        self._uncertain: set[str] = set()
        self._manifests: dict[tuple[int, str], Entry] = {}  # they never change
        self._mine: set[str] = set()  # names of manifests that this job has put
        self._given_up: dict[int, list[tuple[int, str]]] = {}
        self._told: Ranges = ()
        self._untold = False

    # ------------------------------------------------------------------ requests

    def key(self, *names: str) -> str:
        """Of an object in its bucket."""
        return "/".join(filter(None, (self._prefix, *names)))

    def place(self, step: int) -> Url:
        return self._url / _step(step)

    def directory(self, step: int) -> Path:
        raise UsageError(f"{self.place(step)} is not a directory")

    def ask(self, doing: str, key: str, call: Callable[[Any, Any], Any]) -> Any:
        """What `call(obstore, store)` gives.

        Raises:
            FileNotFoundError: there is no such object.
            UnreachableError: the store cannot be asked, or refuses.
            UnknownOutcomeError: it may have carried out the request, or may still.
        """
        url = f"{self._bucket}/{key}"
        obstore = client.client(url)
        if self._client is None:
            self._client = self._connect(doing, url)
        attempt = 0
        while True:
            attempt += 1
            try:
                return call(obstore, self._client)
            except Exception as error:
                if isinstance(error, (*_refusals(obstore), Error, TypeError)):
                    raise
                if _no_bucket(error):
                    raise UnreachableError(
                        f"cannot {doing} {url}: {self._bucket} does not exist: make the bucket, or "
                        "correct its name"
                    ) from None
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
                if attempt < _ATTEMPTS and client.worth_another(error):
                    continue
                text = client.explained(error, url) or (
                    f"{client.brief(error)[:500]} (NOSTALL_OBJECT_RETRIES and "
                    "NOSTALL_OBJECT_TIMEOUT_S say how long it is asked)"
                )
                kind = UnreachableError if _is_final(error) else UnknownOutcomeError
                raise kind(f"cannot {doing} {url}: {text}") from None

    def _connect(self, doing: str, url: str) -> Any:
        try:
            return client.connect(self._bucket)
        except Error:
            raise
        except Exception as error:  # of the client, or of boto3 for a profile
            raise UnreachableError(
                f"cannot {doing} {url}: {client.brief(error)[:500]}: correct the URL, or what the "
                "environment says of it (AWS_ENDPOINT_URL, AWS_PROFILE, credentials)"
            ) from None

    def _create(self, key: str, data: bytes) -> bool:
        """Puts an object if there is none of its name; False if there is another one.

        An answer may be lost: what is there decides then.

        Raises:
            UnknownOutcomeError: whether it was put is not known.
        """

        def put(obstore: Any, store: Any) -> None:
            try:
                obstore.put(store, key, data, mode="create", use_multipart=False)
            except Exception as error:
                if _is_unsupported(obstore, error):
                    raise UsageError(_unconditional(self._bucket)) from error
                raise

        for _ in range(_ATTEMPTS):
            try:
                self.ask("write", key, put)
                return True
            except Exception as error:
                refused = isinstance(error, _refusals(client.client(key)))
                if not refused and not isinstance(error, UnknownOutcomeError):
                    raise
                with contextlib.suppress(FileNotFoundError, UnreachableError):
                    return self._read(key) == data  # what is there is never written over
                if not refused:
                    raise
                # Another request for the same name was under way, and has put nothing.
        raise UnknownOutcomeError(
            f"cannot write {self._bucket}/{key}: the store says that it is there, and does not show it"
        )

    def _read(self, key: str) -> bytes:
        def get(obstore: Any, store: Any) -> bytes:
            result = obstore.get(store, key)
            data = bytes(result.bytes())
            if len(data) != int(result.meta["size"]):
                raise OSError(f"the answer has {len(data)} bytes instead of {result.meta['size']}")
            return data

        found: bytes = self.ask("read", key, get)
        return found

    def _list(self, *names: str) -> dict[str, int]:
        """Keys below that place, relative to it, and sizes."""
        return {key: int(meta["size"]) for key, meta in self._objects(*names).items()}

    def _objects(self, *names: str) -> dict[str, Any]:
        """The same, with all that the list says of each."""
        below = self.key(*names)

        def listing(obstore: Any, store: Any) -> dict[str, Any]:
            pages = obstore.list(store, prefix=below or None)
            return {str(meta["path"]): meta for page in pages for meta in page}

        found: dict[str, Any] = self.ask("list", below, listing)
        return {key[len(below) :].lstrip("/"): meta for key, meta in found.items()}

    def _delete(self, keys: Iterable[str]) -> None:
        """Removes objects, all of which are gone when it returns."""
        keys = list(keys)

        def delete(obstore: Any, store: Any) -> None:
            try:
                obstore.delete(store, keys)
            except FileNotFoundError:  # some stores say so, and stop
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(store, key)

        if keys:
            with contextlib.suppress(FileNotFoundError):
                self.ask("remove", keys[0], delete)

    # ------------------------------------------------------------------ looking

    def _sizes(self, step: int) -> dict[str, int]:
        return {n: size for n, size in self._list(_step(step)).items() if "/" not in n}

    def _scan(self) -> dict[int, dict[str, int]]:
        """Names and sizes of all that is in steps, by step."""
        found: dict[int, dict[str, int]] = defaultdict(dict)
        for key, size in self._list().items():
            step, _, name = key.partition("/")
            match = _STEP.fullmatch(step)
            if match and name and "/" not in name:
                found[int(match[1])][name] = size
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        return list(self._scan())

    def read(self, step: int, name: str) -> Entry | None:
        try:
            data = self._read(self.key(_step(step), name))
        except FileNotFoundError:
            return None
        return entry_of(step, self.place(step), name, data) if data != _GIVEN_UP else None

    def _in(self, step: int, names: dict[str, int]) -> list[Entry]:
        """All manifests among these names; one that went meanwhile is none."""
        found = []
        for name in sorted(names):
            match = _OURS.fullmatch(name)
            if match is None or match["kind"] != "manifest-":
                continue
            entry = self._manifests.get((step, name)) or self.read(step, name)
            if entry is None:
                continue
            if entry.manifest is not None:
                self._manifests[step, name] = entry
            found.append(entry)
        return found

    def _best(self, names: dict[str, int], entries: Iterable[Entry]) -> list[Entry]:
        """One of each save, newest first; of several, one whose parts are all there."""
        best: dict[str, Entry] = {}
        for entry in entries:
            id = entry.manifest.id if entry.manifest is not None else entry.name
            if id not in best or (entry.manifest is not None and _whole(names, entry.manifest)):
                best[id] = entry
        return sorted(best.values(), key=_order, reverse=True)

    def saves(self, step: int) -> list[Entry]:
        names = self._sizes(step)
        return self._best(names, self._in(step, names))

    def entries(self) -> list[Entry]:
        """As of a directory. One that lacks parts is damaged; one that lacks all of them was never
        acknowledged, and says nothing of branches."""
        found = []
        for step, names in self._scan().items():
            for entry in self._best(names, self._in(step, names)):
                manifest = entry.manifest
                if manifest is not None and not _whole(names, manifest):
                    damage = f"{entry.path / entry.name} names parts that are not there"
                    there = manifest if any(p.name in names for p in manifest.parts) else None
                    entry = Entry(step, entry.path, there, damage, entry.name)
                found.append(entry)
        return found

    def find(self, step: int, id: str) -> Manifest | None:
        for entry in self.saves(step):
            if entry.manifest is not None and entry.manifest.id == id:
                return entry.manifest
        return None

    def lacks(self, manifest: Manifest) -> bool:
        if manifest.id in self._uncertain:
            return False
        names = self._sizes(manifest.step)
        matches = filter(None, map(_OURS.fullmatch, names))
        # What says that an attempt is given up is none.
        its = {m[0]: names[m[0]] for m in matches if m["id"] == manifest.id}
        return not self._in(manifest.step, its)

    def has(self, step: int, part: Part) -> bool:
        return self._sizes(step).get(part.name) == part.size

    def has_all(self, manifest: Manifest) -> bool:
        return _whole(self._sizes(manifest.step), manifest)

    def missing(self, manifest: Manifest) -> str:
        names = self._sizes(manifest.step)
        for part in manifest.parts:
            size = names.get(part.name)
            if size is None:
                size = self._size(manifest.step, part.name)
            if size is None:
                return f"{self.place(manifest.step) / part.name} does not exist"
            if size != part.size:
                return (
                    f"{self.place(manifest.step) / part.name} has {size} bytes, its manifest says "
                    f"{part.size}"
                )
        return ""

    def _size(self, step: int, name: str) -> int | None:
        """Of an object in a step that a list may not show yet."""
        return self._size_of(self.key(_step(step), name))

    def _size_of(self, key: str) -> int | None:
        try:
            return int(self.ask("look for", key, lambda o, store: o.head(store, key)["size"]))
        except FileNotFoundError:
            return None

    def branch(self) -> Branch | None:
        names = [name for name in self._list(_BRANCHES) if name.endswith(".json")]
        for name in sorted(names, reverse=True):
            with contextlib.suppress(FileNotFoundError):  # a later one is there now
                data = self._read(self.key(_BRANCHES, name))
                return Branch.from_bytes(data, f"{self.root}/{_BRANCHES}/{name}")
        return None

    def seen(self) -> int:
        numbers = [0, *(e.manifest.sequence for e in self.entries() if e.manifest is not None)]
        # What the last owner has taken is its own.
        numbers.append(self._last_owner()[1] - 1)
        with contextlib.suppress(CorruptionError):
            branch = self.branch()
            numbers.append(branch.sequence if branch is not None else 0)
        return max(numbers)

    # ------------------------------------------------------------------ owning

    def make(self) -> None:
        self._list(_OWNERS)  # the bucket is there, and may be read

    def recognize(self) -> None:
        pass

    def check_there(self) -> None:
        pass

    def _last_owner(self) -> tuple[int, int]:
        """Its number, and from where it numbers its saves; of a list, which may be old."""
        numbers = [int(m[1]) for m in map(_OWNER.fullmatch, self._list(_OWNERS)) if m]
        if not numbers:
            return 0, 0
        return max(numbers), self._first_of(max(numbers))

    def _owner_key(self, number: int) -> str:
        return self.key(_OWNERS, f"{number:012d}.json")

    def _first_of(self, number: int) -> int:
        try:
            return int(json.loads(self._read(self._owner_key(number)))["first"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0

    def _closed_key(self, number: int) -> str:
        return self.key(_OWNERS, f"{number:012d}.closed.json")

    def other_owner(self) -> str:
        return self._owner_in_use(self._last_owner()[0])

    def _owner_in_use(self, number: int) -> str:
        """The owner of that number; "" if it has said that it ended, or is known to have."""
        if not number or self._size_of(self._closed_key(number)) is not None:
            return ""
        odd = ValueError, KeyError, TypeError, AttributeError, OverflowError
        with contextlib.suppress(FileNotFoundError, *odd):
            values = json.loads(self._read(self._owner_key(number)))
            if "process" in values and process.has_ended(int(values["pid"]), values["process"]):
                return ""
            words = f"process {values['pid']} on {values['host']}"
            if "began" in values:
                at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(values["began"]))
                words += f", begun at {at}"
            return words
        return "another job"

    def own(self, *, take_over: bool = True) -> None:
        """Takes the store for this job, also from one that has it.

        Raises:
            UsageError: it has no conditional writes; or, without `take_over`, another job may use it.
            UnreachableError: it does not answer.
        """
        seen = self.seen()
        number, first = self._last_owner()
        while True:
            if not take_over and (other := self._owner_in_use(number)):
                raise UsageError(
                    f"{self.root} belongs to {other}, which is not known to have ended: end that job, "
                    "or give --take-over, and nothing that it saves from then on is copied there"
                )
            first = (max(seen, first, 0) // STRIDE + 1) * STRIDE
            number += 1
            data = self._note_of(first)
            if self._create(self._owner_key(number), data):
                break
            first = self._first_of(number)
        if self._create(self._owner_key(number), b"{}"):  # it is there: a second one is refused
            raise UsageError(_unconditional(self._bucket))
        with self._changing:
            self._owner, self._first = number, first
        try:
            self.branch()
        except CorruptionError as error:
            _log.warning("%s; what was saved last counts as the newest", error)
            self._put_aside_branch()

    def _note_of(self, first: int) -> bytes:
        return json.dumps({**self._me, "first": first}).encode()

    def disown(self) -> None:
        number, self._owner = self._owner, -1 if self._owner else 0
        self._told = ()
        if number <= 0:
            return

        def say() -> None:
            with contextlib.suppress(Error, OSError):  # then it is not known that the job has ended
                self._create(self._closed_key(number), b"{}")

        saying = threading.Thread(target=say, name="nostall-checkpoint-last-word", daemon=True)
        try:
            saying.start()
        except RuntimeError:  # no thread can be started, as at the end of a program of Python 3.12
            say()
        else:
            saying.join(_LAST_WORD_SECONDS)

    def check_owned(self) -> None:
        with self._changing:
            if self._owner < 0:
                raise LostStoreError(
                    f"{self.root} is not this job's any more: the checkpointer is closed"
                )
            if not self._owner:
                return
            if self._wanted > self._first:
                self.note_sequence(self._wanted)
            number, mine = self._owner, self._note_of(self._first)
        try:
            there = self._read(self._owner_key(number))
        except FileNotFoundError:
            there = b""
        if there != mine:
            raise LostStoreError(
                f"{self._bucket}/{self._owner_key(number)}, by which this job owns {self.root}, is "
                "gone: begin the job anew, and remove nothing there while a job runs"
            )
        try:
            there = self._read(self._owner_key(number + 1))
        except FileNotFoundError:
            return
        other = "another job"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = json.loads(there)
            other = f"process {values['pid']} on {values['host']}"
        raise LostStoreError(
            f"{self.root} was taken over by {other}, which began later: give every job a store of its "
            "own"
        )

    def note_sequence(self, number: int) -> None:
        """The numbers from there on are this job's, and its saves later than those of owners before."""
        with self._changing:
            if self._owner <= 0 or number <= self._first:
                return
            self._wanted = number
            if self._create(self._owner_key(self._owner + 1), self._note_of(number)):
                self._owner, self._first = self._owner + 1, number
                return
            self._wanted = 0
        self.check_owned()  # says which job it is

    def clean(self, named: Collection[str] = ()) -> list[str]:
        """Removes what owners before have left and no manifest names."""
        rubbish: list[str] = []
        empty: list[str] = []
        # Parts, by the step and the name of what would name them.
        attempts: dict[tuple[int, str], list[str]] = defaultdict(list)
        highest = 0
        for step, names in self._scan().items():
            entries = self._in(step, names)
            whole = [e.manifest for e in entries if e.manifest and _whole(names, e.manifest)]
            highest = max([highest, *(m.sequence for m in whole)])
            if any(entry.manifest is None for entry in entries):
                continue  # damaged: for the user to look at
            manifests = [entry.manifest for entry in entries if entry.manifest is not None]
            stay = {*named, *(part.name for m in manifests for part in m.parts)}
            for entry in entries:
                # All its parts went when an owner that began later did not know it.
                if entry.manifest is not None and not any(
                    p.name in names or self._size(step, p.name) is not None
                    for p in entry.manifest.parts
                ):
                    empty.append(self.key(_step(step), entry.name))
            known = {entry.name for entry in entries}
            for name in names:
                match = _OURS.fullmatch(name)
                if match is None or name in stay or name in known:
                    continue
                if match["token"] is None:
                    rubbish.append(self.key(_step(step), name))
                    continue
                attempts[step, _its_manifest(match)] += (
                    [self.key(_step(step), name)] if match["kind"] != "manifest-" else []
                )
        rubbish += [
            self.key(_OWNERS, name)
            for name in self._list(_OWNERS)
            if (match := _CLOSED.fullmatch(name)) and int(match[1]) < self._owner
        ]
        notes = sorted(name for name in self._list(_BRANCHES) if name.endswith(".json"))
        # Those that a save outranks: the newest may be taken back by the job that is putting it.
        rubbish += [
            self.key(_BRANCHES, name)
            for name in notes[:-1]
            if name[:20].isdecimal() and int(name[:20]) < highest
        ]
        uploads = self._uploads()
        self.check_owned()
        for key in empty:
            _log.warning(
                "%s/%s is removed: none of the parts that it names is there", self._bucket, key
            )
        try:
            given_up = [its for its in attempts if self._give_attempt_up(*its)]
            self.check_owned()  # a later job may have adopted one, and freed its name
            rubbish += [key for its in given_up for key in attempts[its]]
            self._delete(empty)
            self._delete(rubbish)
            self._delete(self.key(_step(step), name) for step, name in given_up)
            for upload in uploads:
                upload()
        except OSError as error:
            _log.warning("what an earlier job left in %s stays: %s", self.root, error)
        return [f"{self._bucket}/{key}" for key in [*empty, *rubbish]]

    def _give_attempt_up(self, step: int, name: str) -> bool:
        """Whether no manifest of that name can come: an earlier job may be about to put it."""
        self._manifests.pop((step, name), None)
        return self._create(self.key(_step(step), name), _GIVEN_UP)

    def _uploads(self) -> list[Callable[[], Any]]:
        """What gives up each of the uploads that were begun and not finished."""
        if not self._bucket.startswith(("s3://", "s3a://")):
            return []  # boto3 knows no others
        try:
            import boto3
        except ImportError:
            return []
        bucket, below = self._bucket.partition("://")[2], self.key("")
        below = below and below + "/"
        found: list[Callable[[], Any]] = []
        try:
            endpoint = os.environ.get("AWS_ENDPOINT_URL") or None
            s3 = boto3.client("s3", endpoint_url=endpoint)
            lister = s3.get_paginator("list_multipart_uploads")
            pages = lister.paginate(Bucket=bucket, Prefix=below)
            uploads = [u for page in pages for u in page.get("Uploads", ())]
            if endpoint and not uploads:
                # MinIO finds none by a prefix that is no whole key. The bucket may have many others'.
                with contextlib.suppress(s3.exceptions.ClientError):
                    pages = lister.paginate(Bucket=bucket, PaginationConfig={"MaxItems": 1000})
                    uploads = [u for page in pages for u in page.get("Uploads", ())]
            for upload in uploads:
                if not str(upload["Key"]).startswith(below):
                    continue
                step, _, name = str(upload["Key"]).removeprefix(below).partition("/")
                if _STEP.fullmatch(step) and _OURS.fullmatch(name):
                    ids = {"Key": upload["Key"], "UploadId": upload["UploadId"]}

                    def give_up(ids: dict[str, str] = ids) -> None:
                        try:
                            s3.abort_multipart_upload(Bucket=bucket, **ids)
                        except Exception as error:
                            _log.warning("an upload stays in %s: %s", self.root, error)

                    found.append(give_up)
        except Exception as error:
            _log.warning("uploads that were interrupted stay in %s: %s", self.root, error)
        return found

    def mark(self, token: str) -> None:
        key = self.key(_RUNS, token)
        self.ask("write", key, lambda o, store: o.put(store, key, b"", use_multipart=False))

    def marked(self, tokens: Sequence[str]) -> list[int]:
        names = self._list(_RUNS)
        return [i for i, token in enumerate(tokens) if token in names]

    def _marks(self) -> dict[str, float]:
        return {
            name: meta["last_modified"].timestamp()
            for name, meta in self._objects(_RUNS).items()
            if MARK.fullmatch(name)
        }

    def _remove_marks(self, tokens: Iterable[str]) -> None:
        self._delete(self.key(_RUNS, token) for token in tokens)

    # ------------------------------------------------------------------ changing

    def make_step(self, step: int) -> None:
        pass

    def step_is_gone(self, step: int) -> bool:
        return False

    def part_name(self, part: Part, id: str) -> str:
        return _part_name(part, id, _TOGETHER)

    def copy_names(self, manifest: Manifest) -> dict[str, str]:
        token = secrets.token_hex(8)
        return {part.name: _part_name(part, manifest.id, token) for part in manifest.parts}

    def publish(self, manifest: Manifest) -> None:
        """Makes the checkpoint complete; its parts are there already.

        Raises:
            PeerError: another job has the store; the checkpoint is not acknowledged.
            UnknownOutcomeError: it may be complete, now or later.
        """
        self.note_sequence(manifest.sequence // STRIDE * STRIDE)  # of a fast directory's save
        self.check_owned()
        self._put_manifest(manifest)
        self.check_owned()  # a job that began meanwhile may have removed the parts
        self._note_begin(manifest)

    def _put_manifest(self, manifest: Manifest) -> None:
        tokens = {match["token"] for p in manifest.parts if (match := _OURS.fullmatch(p.name))}
        # That of its parts, by which a later job finds it without a list.
        token = tokens.pop() if len(tokens) == 1 else secrets.token_hex(8)
        name = f"manifest-{manifest.id}.{token}.json"
        try:
            if not self._create(self.key(_step(manifest.step), name), manifest.to_bytes()):
                self.check_owned()  # a later job has given the parts up
                raise IoError(f"{self.place(manifest.step) / name} is there, and is another one")
        except UnreachableError:
            # Also if it was refused: an attempt before, by the client, may have been carried out.
            self._uncertain.add(manifest.id)
            raise
        self._mine.add(name)

    def adopt(self, manifest: Manifest) -> None:
        """Gives a checkpoint from which the training goes on a name of this job's own.

        A job that had the store before may be about to remove it by the name that it knows.
        """
        if self._owner <= 0:
            return
        names = self._sizes(manifest.step)
        entries = [
            e
            for e in self._in(manifest.step, names)
            if e.manifest is not None and e.manifest.id == manifest.id
        ]
        whole = [e for e in entries if e.manifest is not None and _whole(names, e.manifest)]
        if any(e.name in self._mine for e in whole):
            return
        if whole:
            there = whole[0].manifest
        elif _whole(names, manifest):
            there = manifest  # the job before has just removed its name
        else:
            return
        assert there is not None
        name = f"manifest-{there.id}.{secrets.token_hex(8)}.json"
        key = self.key(_step(there.step), name)
        if self._create(key, there.to_bytes()):
            self._mine.add(name)
            self.check_owned()
            self._delete(self.key(_step(there.step), e.name) for e in entries)

    def publish_alone(self, manifest: Manifest) -> None:
        self.publish(manifest)

    def confirm(self, manifest: Manifest) -> None:
        """What a store shows is durable there."""

    def note_branch(self, branch: Branch) -> None:
        self.note_sequence(branch.sequence // STRIDE * STRIDE)
        self.check_owned()
        key = self.key(_BRANCHES, f"{branch.sequence:020d}.{secrets.token_hex(8)}.json")
        self._create(key, branch.to_bytes())
        try:
            self.check_owned()
        except PeerError:
            self._delete([key])  # the later job may have no record of its own yet
            raise

    def _put_aside_branch(self) -> None:
        """Keeps the newest note, which is damaged, under another name."""
        name = max(name for name in self._list(_BRANCHES) if name.endswith(".json"))
        data = self._read(self.key(_BRANCHES, name))
        self.check_owned()
        self._create(self.key(_BRANCHES, f"{name}.damaged"), data)
        self._delete([self.key(_BRANCHES, name)])

    def remove(self, step: int, id: str) -> None:
        self._remove(step, lambda match: match["id"] == id)

    def remove_step(self, step: int) -> None:
        self.check_owned()
        while (begun := self._begun_by(self.saves(step))) is not None:
            notes = (name for name in self._list(_BRANCHES) if name.endswith(".json"))
            its = [name for name in notes if name.startswith(f"{begun.sequence:020d}.")]
            self._delete(self.key(_BRANCHES, name) for name in its)
        self._remove(step, lambda match: True)

    def _remove(self, step: int, chosen: Callable[[re.Match[str]], bool]) -> None:
        """Manifests first. The order of list, check and removal is what a later job relies on."""
        for _ in range(_ATTEMPTS):
            names = self._sizes(step)
            ours = [m for m in map(_OURS.fullmatch, names) if m and chosen(m)]
            manifests = {e.name for e in self._in(step, {m[0]: names[m[0]] for m in ours})}
            parts = [m for m in ours if m["kind"] != "manifest-"]
            attempts = {_its_manifest(m) for m in parts if m["token"]} - manifests
            given_up = {m[0] for m in ours if m["kind"] == "manifest-"} - manifests
            self.check_owned()
            given_up |= {name for name in attempts if self._give_attempt_up(step, name)}
            late = attempts - given_up  # a manifest was first: it is in the next list
            self._delete(self.key(_step(step), name) for name in manifests)
            self.check_owned()
            self._delete(
                self.key(_step(step), m[0])
                for m in parts
                if not m["token"] or _its_manifest(m) not in late
            )
            self._delete(self.key(_step(step), name) for name in given_up)
            for name in manifests:
                self._manifests.pop((step, name), None)
            if not late:
                return
        raise IoError(
            f"{self.place(step)} cannot be removed: other jobs completed checkpoints there meanwhile: "
            "end them, and try again"
        )

    def discard(self, step: int, name: str) -> None:
        with contextlib.suppress(OSError, PeerError):
            names = self._sizes(step)
            named = {p.name for e in self._in(step, names) if e.manifest for p in e.manifest.parts}
            if name not in named:
                self._delete([self.key(_step(step), name)])

    # ------------------------------------------------------------------ agreeing

    def _leave_word(self, manifest: Manifest, rank: int, word: bytes) -> str:
        self._create(self._word(manifest, rank), word)
        return ""

    def _words(self, manifest: Manifest, ranks: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        names = self._sizes(manifest.step)  # one request, however many ranks are late
        for rank in ranks:
            key = self._word(manifest, rank)
            if key.rpartition("/")[2] in names:
                try:
                    word = self._read(key)
                except FileNotFoundError:  # a list may be ahead
                    continue
                yield rank, word

    def _forget_words(self, manifest: Manifest, ranks: Iterable[int]) -> None:
        self._delete(self._word(manifest, rank) for rank in ranks)

    def _hold(self, manifest: Manifest) -> str:
        return ""  # the decision alone counts

    def _forget(self, step: int, id: str) -> None:
        ours = [m for m in map(_OURS.fullmatch, self._sizes(step)) if m and m["id"] == id]
        notes = "word-", "decision."
        self._delete(self.key(_step(step), m[0]) for m in ours if m[0].startswith(notes))

    def _give_up(self, manifest: Manifest, rank: int, mine: Part | str | None, reason: str) -> str:
        if isinstance(mine, Part):  # no word can be taken back
            raise part_stays(reason, rank)
        return reason

    def _decide(self, manifest: Manifest, *, complete: bool, certain: bool, reason: str) -> None:
        if manifest.world_size > 1:
            with contextlib.suppress(Error, OSError):  # the others do not wait for ever
                decision = {"complete": complete, "certain": certain, "reason": reason}
                self._create(self._decision_key(manifest), json.dumps(decision).encode())

    def _decided(self, manifest: Manifest, rank: int, mine: Part | str | None) -> str | None:
        decision = self._decision(manifest)
        if decision is None:
            return None
        if not decision["complete"] and not decision["certain"]:
            raise PeerError(f"{decision['reason']}; rank {rank}'s part stays")
        return str(decision["reason"])

    def _decision(self, manifest: Manifest) -> dict[str, Any] | None:
        """What rank 0 has decided, if it has."""
        try:
            found = json.loads(self._read(self._decision_key(manifest)))
            return {name: found[name] for name in ("complete", "certain", "reason")}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def aborted(self, manifest: Manifest) -> str | None:
        try:
            decision = self._decision(manifest)
        except OSError:
            return None
        if decision is None or decision["complete"] or not decision["certain"]:
            return None
        return str(decision["reason"])

    def _word(self, manifest: Manifest, rank: int) -> str:
        return self.key(_step(manifest.step), f"word-{rank:05d}.{manifest.id}.json")

    def _decision_key(self, manifest: Manifest) -> str:
        return self.key(_step(manifest.step), f"decision.{manifest.id}.json")

    # ------------------------------------------------------------------ parts

    def copy(self, source: Path, step: int, name: str, part: Part, pacing: Pacing) -> Copy:
        return Upload(self, source, step, name, part, pacing)

    def open(self, step: int, part: Part) -> CheckedPart:
        return ObjectPart(self, step, part)

    def check(
        self,
        step: int,
        part: Part,
        threads: int,
        progress: _native.Progress | None = None,
        priority: _native.Priority = _native.Priority.normal,
    ) -> list[int]:
        return read_blocks(self, step, part, range(len(part.crcs)), None, threads, progress)

    def part_key(self, step: int, name: str) -> str:
        """Of a part in its bucket."""
        return self.key(_step(step), name)

    def part_size(self, step: int, name: str) -> int | None:
        """Of a part, if it is there."""
        return self._size(step, name)


def _step(step: int) -> str:
    return f"step-{step:012d}"


def _part_name(part: Part, id: str, token: str) -> str:
    return f"rank-{part.rank:05d}.{id}.{token}.safetensors"


def _its_manifest(part: re.Match[str]) -> str:
    """The name of what would complete the attempt that a part is of."""
    return f"manifest-{part['id']}.{part['token']}.json"


def _order(entry: Entry) -> tuple[int, float, str]:
    """By the manifests; one that cannot be read comes first."""
    return entry.manifest.order if entry.manifest is not None else (2 * LEGACY, 0.0, entry.name)


def _whole(names: dict[str, int], manifest: Manifest) -> bool:
    return all(names.get(part.name) == part.size for part in manifest.parts)


def _refusals(obstore: Any) -> tuple[type[Exception], ...]:
    """What says that a condition does not hold."""
    return obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError


def _no_bucket(error: Exception) -> bool:
    signs = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
    return any(sign in str(error) for sign in signs)


def _is_final(error: Exception) -> bool:
    """Whether the server has refused, so that nothing was written or will be."""
    status = re.search(r"status code: (\d{3})", client.brief(error))
    refused = status is not None and status[1][0] == "4" and status[1] not in ("408", "409", "429")
    return bool(refused or client.is_denied(error))


def _is_unsupported(obstore: Any, error: Exception) -> bool:
    """Whether the store, or the client for it, knows no conditions."""
    kinds = (NotImplementedError, obstore.exceptions.NotSupportedError)
    return isinstance(error, kinds) or "status code: 501" in client.brief(error)


def _unconditional(bucket: str) -> str:
    return (
        f"{bucket} has no conditional writes (If-None-Match), without which one of two jobs could "
        "write over a checkpoint of the other: use a store that has them, or a directory"
    )
