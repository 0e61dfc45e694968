"""Data sets on the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION]/path.

The token is that of ``HF_TOKEN``, or the one that ``hf auth login`` keeps; ``HF_ENDPOINT`` names
another hub. A branch or tag is the commit that it names at the first request of the process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nostall.base import _options as options
from nostall.errors import IoError, UsageError

SCHEME = "hf://"
_ATTEMPTS = 4
_PAUSE = 0.5  # seconds before the second attempt, then twice as long each time


def is_of_hub(url: str) -> bool:
    return url.startswith(SCHEME)


def split(url: str) -> tuple[str, str]:
    """The data set's part of a URL, and the path in it."""
    match = re.match(r"(hf://datasets/[^/@]+/[^/]+)/?(.*)", url)
    if not match:
        raise UsageError(
            f"{url} names no file of a data set on the Hub: write hf://datasets/OWNER/NAME/path"
        )
    return match[1], match[2]


def address(root: str) -> str:
    """The URL below which the files of a data set lie."""
    name, _ = _named(root)
    return f"{_endpoint()}/datasets/{name}/resolve/{_commit(_endpoint(), root)}"


def headers() -> dict[str, str]:
    """What is sent with every request."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
        file = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
        token = file.read_text().strip() if file.is_file() else ""
    return {"Authorization": f"Bearer {token}"} if token else {}


def listing(root: str, below: str) -> dict[str, dict[str, Any]]:
    """What a store says of the files below a path, by their paths."""
    name, _ = _named(root)
    path = quote(below)
    url: str | None = (
        f"{_endpoint()}/api/datasets/{name}/tree/{_commit(_endpoint(), root)}/{path}?recursive=true"
    )
    found: dict[str, dict[str, Any]] = {}
    while url:
        entries, url = _asked(url, f"{root}/{below}")
        for entry in entries:
            if entry["type"] == "file":
                # Its hash changes whenever the content does.
                found[entry["path"]] = {"size": entry["size"], "last_modified": entry["oid"]}
    return found


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _named(root: str) -> tuple[str, str]:
    name, _, revision = root.removeprefix(f"{SCHEME}datasets/").partition("@")
    return name, unquote(revision) or "main"


@functools.lru_cache(maxsize=64)
def _commit(endpoint: str, root: str) -> str:
    name, revision = _named(root)
    quoted = quote(revision, safe="")
    answer, _ = _asked(f"{endpoint}/api/datasets/{name}/revision/{quoted}", root)
    return str(answer["sha"])


def _asked(url: str, of: str) -> tuple[Any, str | None]:
    """What the hub answers, and the URL of what follows it.

    Raises:
        IoError: it does not answer, or not so, with `of`.
    """
    import urllib.error
    import urllib.request

    timeout = options.value("source.object_timeout_s")
    for attempt in range(_ATTEMPTS):
        asked = ""
        try:
            request = urllib.request.Request(url, headers=headers())
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                following = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))
                return json.load(answer), following[1] if following else None
        except urllib.error.HTTPError as error:
            error.close()
            asked = error.headers.get("Retry-After", "")
            if error.code in (401, 403, 404):
                raise IoError(
                    f"{of} does not exist on the Hub, or access was denied (status {error.code}): "
                    "check the name, and the token (HF_TOKEN, or hf auth login)"
                ) from None
            failed: Exception = error
        except (OSError, ValueError) as error:
            failed = error
        if attempt + 1 == _ATTEMPTS:
            raise IoError(f"{of} cannot be listed: {failed}") from None
        # A hub that is busy may say for how long; never longer than one is waited for.
        seconds = float(asked) if asked.isdecimal() else _PAUSE * 2**attempt
        time.sleep(min(seconds, timeout))
    raise AssertionError("unreachable")
