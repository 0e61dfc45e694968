"""Objects of S3-compatible and other object stores as files, by ranged GETs of obstore.

Connections are those of `base/_object_client.py`; pass an ``obstore.store`` of your own for anything
else. An object that is replaced while a job reads it is detected by its ETag.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nostall import _native
from nostall.base import _object_client as client
from nostall.base import _options as option_values
from nostall.errors import IoError, UsageError
from nostall.source import _hub as hub
from nostall.source._flight import Flight, Overloaded, never

_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "http://", "https://", hub.SCHEME)
# Classes of obstore's stores that ask a server.
_SERVERS = ("S3Store", "GCSStore", "AzureStore", "HTTPStore")
# Attempts for a range whose body ends early, which the client's own retries do not cover.
_ATTEMPTS = 3

# What the client says where a store asks for fewer requests, or gives no answer in time.
_OVERLOADED = re.compile(r"status code: (429|503)|SlowDown|timed out", re.IGNORECASE)
# What it says where a server refuses a request, and would again.
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d")

# Where a pattern begins to be one.
WILDCARD = re.compile(r"[*?\[]")


def is_url(path: str) -> bool:
    """Whether the path names an object rather than a file."""
    return path.startswith(_SCHEMES)


def split_url(url: str) -> tuple[str, str]:
    """The store's part of a URL (scheme and bucket) and the key in it."""
    if hub.is_of_hub(url):
        return hub.split(url)
    match = re.match(r"([a-z0-9]+://[^/]+)/?(.*)", url)
    if not match:
        raise UsageError(
            f"{url} is not a URL of an object store, as s3://bucket/train is: nostall.ImageFolder "
            "reads folders of this machine"
        )
    return match[1], match[2]


def connect(root: str) -> Any:
    """The store of ``scheme://bucket``, as the environment configures it."""
    if hub.is_of_hub(root):
        return client.connect(hub.address(root), hub.headers())
    return client.connect(root)


def store_identity(store: Any = None) -> str | None:
    """Equal in two processes that find the same objects by the same URLs, in the store given or in
    those that the environment configures; None of a store that says nothing of where it is."""
    where = [getattr(store, name, None) for name in ("config", "url", "prefix")]
    if store is not None and where == [None] * len(where):
        return None
    named = {
        name: value
        for name, value in os.environ.items()
        if value
        and name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))
        and ("ENDPOINT" in name or "ACCOUNT" in name)
    }
    config = sorted((where[0] or {}).items())
    return repr([type(store).__name__, config, str(where[1]), str(where[2]), sorted(named.items())])


def list_objects(
    url: str, suffixes: tuple[str, ...] = (), store: Any = None
) -> list[tuple[str, Any]]:
    """(URL, the store's entry), in order: the object itself if there is one of that name, the objects
    that match a pattern as files would, or all objects below it.

    Raises:
        IoError: the store cannot be asked, with the URL.
    """
    obstore = client.client(url)
    root, key = split_url(url)
    store = connect(root) if store is None else store
    pattern = WILDCARD.search(key)
    below = key[: pattern.start()].rpartition("/")[0] if pattern else key.rstrip("/")
    if key and not key.endswith("/") and "*" not in key:  # a name may have the others' characters
        try:
            return [(url, obstore.head(store, key))]
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _failed(url, error) from None
    try:
        if hub.is_of_hub(root):
            found: dict[str, Any] = hub.listing(root, below)
        else:
            pages = obstore.list(store, prefix=below or None)
            found = {str(meta["path"]): meta for page in pages for meta in page}
    except IoError:
        raise
    except Exception as error:
        raise _failed(url, error) from None
    names = sorted(found)
    if pattern:
        parts = key.split("/")
        names = [name for name in names if _matches(name.split("/"), parts)]
    elif suffixes:
        names = [name for name in names if name.endswith(suffixes)]
    return [(f"{root}/{name}", found[name]) for name in names]


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a name is one that ``glob.glob(pattern, recursive=True)`` finds; both by their parts."""
    if not pattern:
        return not name
    part, *rest = pattern
    if part == "**":
        hidden = next((i for i, one in enumerate(name) if one.startswith(".")), len(name))
        return any(_matches(name[i:], rest) for i in range(hidden + 1))
    if not name or (name[0].startswith(".") and not part.startswith(".")):
        return False
    return fnmatch.fnmatchcase(name[0], part) and _matches(name[1:], rest)


def exist(urls: Sequence[str], store: Any = None) -> list[bool]:
    """Whether there is an object of each URL. One that is refused counts as missing: so a store answers
    for those that are not there if it may not be listed, and some servers have answers of their own.

    Raises:
        IoError: the store cannot be asked, with the URL.
    """
    if not urls:
        return []
    obstore = client.client(urls[0])
    roots = {split_url(url)[0] for url in urls}
    stores = {root: connect(root) if store is None else store for root in roots}
    failures: list[IoError] = []

    def there(url: str) -> bool:
        root, key = split_url(url)
        try:
            obstore.head(stores[root], key)
        except FileNotFoundError:
            return False
        except Exception as error:
            if not client.is_denied(error) and not _REFUSED.search(client.brief(error)):
                failures.append(_failed(url, error))
            return False
        return True

    found = Flight(urls[0], _requests()).ask(there, urls, stopped=lambda: bool(failures))
    if failures:  # the others that were asked for would fail alike
        raise failures[0]
    return found


def _requests() -> int | None:
    """In flight at a time; None: as measured."""
    pinned = option_values.value("source.object_requests")
    return None if pinned == "auto" else pinned


def open_objects(
    urls: Sequence[str], store: Any = None, known: Sequence[Any] | None = None
) -> _native.Storage:
    """A storage over objects; with `store`, the URLs' keys are looked up there. `known` is what a
    listing said of them.

    Raises:
        IoError: an object is not there or cannot be examined, with its URL.
    """
    objects = Ranges(urls, store, known)
    return _native.python_storage(
        paths=list(urls),
        sizes=np.array(objects.sizes, np.uint64),
        versions=np.array(objects.versions, np.int64),
        read=objects.read,
    )


class Ranges:
    """Answers the native reader's ranges, many at a time."""

    def __init__(
        self, urls: Sequence[str], store: Any = None, known: Sequence[Any] | None = None
    ) -> None:
        obstore = client.client(urls[0])
        self._urls = list(urls)
        self._stores: dict[str, Any] = {}
        self._given = store
        self._flight = Flight(self._urls[0], _requests())
        self.sizes: list[int] = []
        self.versions: list[int] = []
        self._tags: list[str | None] = []

        failures: list[IoError] = []

        def head(url: str) -> Any:
            try:
                return obstore.head(self._store(url), split_url(url)[1])
            except Exception as error:
                failures.append(_failed(url, error))
                raise failures[-1] from None

        if known is None:
            known = self._flight.ask(head, self._urls, stopped=lambda: bool(failures))
        if failures:  # the others that were asked for would fail alike
            raise failures[0]
        for meta in known:
            if isinstance(meta, BaseException):
                raise meta
            self.sizes.append(int(meta["size"]))
            self._tags.append(_quoted(meta) if _is_server(store) else meta.get("e_tag"))
            self.versions.append(_version(meta))

    def _store(self, url: str) -> Any:
        if self._given is not None:
            return self._given
        root = split_url(url)[0]
        if root not in self._stores:
            self._stores[root] = connect(root)
        return self._stores[root]

    def read(
        self, ranges: list[tuple[int, int, int]], stopped: Callable[[], bool] = never
    ) -> list[Any]:
        """One buffer or exception for every (file, offset, size); none is asked for once `stopped`."""
        if ranges:
            client.client(self._urls[ranges[0][0]])
        return self._flight.ask(self._one, ranges, [size for _, _, size in ranges], stopped)

    def _one(self, asked: tuple[int, int, int]) -> Any:
        file, offset, size = asked
        url = self._urls[file]
        obstore = client.client(url)
        if size == 0:
            return b""
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if self._tags[file]:
            options["if_match"] = self._tags[file]
        error: BaseException = IoError(f"{url} was not asked for")
        for _ in range(_ATTEMPTS):
            try:
                result = obstore.get(self._store(url), split_url(url)[1], options=options)
                body = memoryview(result.bytes()).cast("B")
            except Exception as caught:
                error = _failed(f"{url} at offset {offset}", caught)
                if not client.worth_another(caught):
                    break
                continue
            if len(body) == size:
                return body
            error = IoError(
                f"{url} at offset {offset}: the server gave {len(body)} bytes instead of {size}"
            )
        return error


def _is_server(store: Any) -> bool:
    """Whether a server wants the quotes; another store, as in memory, compares what it gave. obstore
    asks no store that is not of its classes."""
    known = {kind.__name__ for kind in type(store).__mro__ if kind.__module__ == "obstore.store"}
    return store is None or not known.isdisjoint(_SERVERS)


def _quoted(meta: Any) -> str | None:
    """An object's ETag as headers have it; some lists, as that of Azure, leave the quotes out."""
    tag: str | None = meta.get("e_tag")
    return f'"{tag}"' if tag and '"' not in tag else tag


def _version(meta: Any) -> int:
    """A number that differs for another content of the object: from its ETag, or its time."""
    tag = _quoted(meta) or str(meta.get("last_modified"))
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "little", signed=True)


def _failed(url: str, error: Exception) -> IoError:
    """The message for an error of the client; `url` may be followed by a place."""
    kind = type(error).__name__
    text = client.brief(error)
    if isinstance(error, FileNotFoundError):
        return IoError(f"{url} does not exist")
    if "precondition" in kind.lower() or "recondition" in text:
        return IoError(f"{url} was replaced since it was opened: open the data set again")
    sentence = client.explained(error, url)
    if client.is_denied(error):
        return IoError(f"{url}: {sentence}")
    said = sentence or text[:500]
    kind_of_error = Overloaded if _OVERLOADED.search(f"{text} {sentence}") else IoError
    return kind_of_error(f"{url} cannot be read: {said}")
