"""Objects of S3-compatible and other object stores as files, by ranged GETs of obstore.

Credentials come from the standard places (environment, profile, instance); an endpoint from
``AWS_ENDPOINT_URL``. Pass an ``obstore.store`` of your own for anything else. An object that is
replaced while a job reads it is noticed by its ETag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from nostall import _native
from nostall.errors import IoError, UsageError

_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "http://", "https://")
_IN_FLIGHT = 32
# Of one range whose body ends early: what the client's own retries do not cover.
_ATTEMPTS = 3


def is_url(path: str) -> bool:
    """Whether the path names an object rather than a file."""
    return path.startswith(_SCHEMES)


def split_url(url: str) -> tuple[str, str]:
    """The store's part of a URL (scheme and bucket) and the key in it."""
    match = re.match(r"([a-z0-9]+://[^/]+)/?(.*)", url)
    if not match:
        raise UsageError(f"{url} is no URL of an object store")
    return match[1], match[2]


def connect(root: str) -> Any:
    """The store of ``scheme://bucket``, as the environment configures it."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise UsageError(
            f"reading {root} needs the package obstore: pip install 'nostall[objects]'"
        ) from None
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    timeout = os.environ.get("NOSTALL_OBJECT_TIMEOUT_S", "30")
    options: dict[str, Any] = {"timeout": f"{timeout}s", "connect_timeout": "5s"}
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    return from_url(
        root,
        client_options=options,
        retry_config={
            "max_retries": int(os.environ.get("NOSTALL_OBJECT_RETRIES", "8")),
            "retry_timeout": timedelta(seconds=2 * float(timeout)),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        },
    )


def list_urls(url: str, suffixes: tuple[str, ...] = ()) -> list[str]:
    """The object itself if there is one of that name, else all below it, in order."""
    import obstore

    root, key = split_url(url)
    store = connect(root)
    if key and not key.endswith("/"):
        try:
            obstore.head(store, key)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _failed(url, error) from None
        else:
            return [url]
    try:
        found = [
            str(meta["path"])
            for page in obstore.list(store, prefix=key.rstrip("/") or None)
            for meta in page
        ]
    except Exception as error:
        raise _failed(url, error) from None
    return [f"{root}/{name}" for name in sorted(found) if not suffixes or name.endswith(suffixes)]


def open_objects(urls: Sequence[str], store: Any = None) -> _native.Storage:
    """A storage over objects; with `store`, the URLs' keys are looked up there.

    Raises:
        IoError: an object is not there or cannot be examined, with its URL.
    """
    objects = _Objects(urls, store)
    return _native.python_storage(
        paths=list(urls), sizes=np.array(objects.sizes, np.uint64), read=objects.read
    )


class _Objects:
    """Answers the native reader's ranges, many at a time."""

    def __init__(self, urls: Sequence[str], store: Any) -> None:
        import obstore

        self._urls = list(urls)
        self._stores: dict[str, Any] = {}
        self._given = store
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self.sizes: list[int] = []
        self._tags: list[str | None] = []

        def head(url: str) -> Any:
            try:
                return obstore.head(self._store(url), split_url(url)[1])
            except Exception as error:
                raise _failed(url, error) from None

        for meta in self._threads().map(head, self._urls):
            self.sizes.append(int(meta["size"]))
            self._tags.append(meta.get("e_tag"))

    def _store(self, url: str) -> Any:
        if self._given is not None:
            return self._given
        root = split_url(url)[0]
        if root not in self._stores:
            self._stores[root] = connect(root)
        return self._stores[root]

    def _threads(self) -> ThreadPoolExecutor:
        # Threads do not survive a fork.
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(_IN_FLIGHT, "nostall objects")
        return self._pool[1]

    def read(self, ranges: list[tuple[int, int, int]]) -> list[Any]:
        """One buffer or exception for every (file, offset, size)."""
        return list(self._threads().map(self._one, ranges))

    def _one(self, asked: tuple[int, int, int]) -> Any:
        import obstore

        file, offset, size = asked
        url = self._urls[file]
        if size == 0:
            return b""
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if self._tags[file]:
            options["if_match"] = self._tags[file]
        error: BaseException = IoError(f"{url}: nothing was tried")
        for _ in range(_ATTEMPTS):
            try:
                result = obstore.get(self._store(url), split_url(url)[1], options=options)
                body = memoryview(result.bytes()).cast("B")
            except Exception as caught:
                error = _failed(url, caught)
                if not _worth_another(caught):
                    break
                continue
            if len(body) == size:
                return body
            error = IoError(
                f"{url}: the server gave {len(body)} bytes instead of {size} at offset {offset}"
            )
        return error


def _worth_another(error: Exception) -> bool:
    text = str(error).lower()
    return "body" in text or "closed" in text or "connection" in text


def _failed(url: str, error: Exception) -> IoError:
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError):
        return IoError(f"{url} does not exist")
    if "precondition" in kind.lower() or "precondition" in text.lower():
        return IoError(f"{url} was replaced since it was opened: open the data set again")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return IoError(
            f"{url}: access was denied ({text[:300]}): check the credentials (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or a profile) and whether they expired"
        )
    return IoError(f"{url} cannot be read: {text[:500]}")
