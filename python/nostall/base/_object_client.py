"""The client of object stores, obstore: connections, and what its errors mean.

Credentials come from the standard places (environment, profile, container, instance); an endpoint
from ``AWS_ENDPOINT_URL``. Every request ends within ``NOSTALL_OBJECT_TIMEOUT_S`` (30) seconds. It is
repeated at most ``NOSTALL_OBJECT_RETRIES`` (8) times if that can help.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nostall.base import _options as options
from nostall.errors import IoError, UsageError

_CLOUDS = {
    **dict.fromkeys(("s3", "s3a"), "AWS"),
    **dict.fromkeys(("az", "abfs", "abfss", "azure"), "AZURE"),
    "gs": "GOOGLE",
}
# What the client reads of the environment for a scheme: all of it, the endpoint of S3, and what goes
# into headers. It panics at each request where one of the last two is malformed; of other URLs it says
# so itself, or needs none.
_VARIABLES = {scheme: re.compile(rf"{cloud}_\w+") for scheme, cloud in _CLOUDS.items()}
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_URL = re.compile(r"https?://[\w!#$%&'()*+,./:;=?@\[\]~-]+", re.IGNORECASE | re.ASCII)
_HEADERS = re.compile(r"AWS_((DEFAULT_)?REGION|ACCESS_KEY_ID|(SESSION_)?TOKEN)|AZURE_\w*TOKEN")
_SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD).*")
# Where instances and containers of a cloud find credentials.
_METADATA = re.compile(
    r"https?://(169\.254\.170\.\d+|[^/\s]+/(latest/(api/token|meta-data)|computeMetadata|metadata/identity)\b)"
)
# What gives credentials for a cloud, and what of them may be wrong.
_CREDENTIALS = {
    "AWS": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or a profile",
    ),
    "AZURE": (
        "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    ),
    "GOOGLE": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    ),
}
# The process in which the client was first used: its threads do not survive a fork, and in a forked
# process it would wait for them for ever.
_client_process: int | None = None


def connect(root: str, headers: dict[str, str] | None = None) -> Any:
    """The store of ``scheme://bucket``, as the environment configures it.

    An endpoint of S3 that is empty is removed from the environment, which the client reads itself.

    Raises:
        UsageError: the client is not installed, or a variable of the environment is malformed.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UsageError(_needed(root)) from None
    for name in _ENDPOINTS:
        if os.environ.get(name) == "":  # as good as unset; the client takes it for a URL
            del os.environ[name]
    variables = _variables(root)
    timeout = options.value("source.object_timeout_s")
    client: dict[str, Any] = {"timeout": f"{timeout:g}s", "connect_timeout": "5s"}
    if headers is not None:
        client["default_headers"] = headers
    # Stores are asked by https unless the environment says http: of an endpoint, a base URL, or the
    # emulator. What is given here would hide AWS_ALLOW_HTTP and its like from the client.
    client["allow_http"] = not root.lower().startswith("https://")
    profile = _profile(root)
    try:
        return from_url(
            root,
            client_options=client,
            **profile,
            retry_config={
                "max_retries": options.value("source.object_retries"),
                "retry_timeout": timedelta(seconds=2 * timeout),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        )
    except BaseError as error:
        text = brief(error)
        for name, value in variables.items():
            if value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text):
                raise UsageError(f"{root}: {name}={value} in the environment: {text}") from None
        raise


def _variables(root: str) -> dict[str, str]:
    """What the environment says of such a store, without secrets.

    Raises:
        UsageError: the client would panic at one of them.
    """
    ours = _VARIABLES.get(urlsplit(root).scheme, re.compile("(?!)"))
    found = {name: value for name, value in os.environ.items() if ours.fullmatch(name)}
    for name, value in found.items():
        if name in _ENDPOINTS and not _is_url(value):
            raise UsageError(
                f"{root}: {name}={value!r} in the environment is not a URL such as "
                "https://host:9000: correct it, or unset it"
            )
        odd = re.search("[^ -~]", value) if _HEADERS.fullmatch(name) else None
        if odd is not None:
            raise UsageError(
                f"{root}: {name} in the environment has the character {odd[0]!r} at place "
                f"{odd.start()}, which no request can carry: correct it"
            )
    return {name: value for name, value in found.items() if not _SECRET.fullmatch(name)}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(_URL.fullmatch(text) and parts.hostname and parts.port != 0)
    except ValueError:  # its port, or what is in brackets
        return False


def _needed(url: str) -> str:
    return f"{url} needs the package obstore: pip install 'nostall[objects]'"


def _profile(root: str) -> dict[str, Any]:
    """Credentials of a profile (``~/.aws``), which the client itself does not read."""
    named = os.environ.get("AWS_PROFILE", "")
    folder = Path(os.path.expanduser("~/.aws"))  # unexpanded if the user has no home
    there = named or (folder / "credentials").exists() or (folder / "config").exists()
    direct = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if not root.startswith(("s3://", "s3a://")) or not there or any(map(os.environ.get, direct)):
        return {}
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if not named:
            return {}
        raise UsageError(
            f"{root} with AWS_PROFILE={named} needs the package boto3: pip install boto3"
        ) from None
    session = Session()
    if session.get_credentials() is None:
        return {}
    return {"credential_provider": Boto3CredentialProvider(session)}


def client(url: str) -> Any:
    """The module obstore, for a request to `url`.

    Raises:
        UsageError: it is not installed.
        IoError: this process was forked from one that has used it.
    """
    global _client_process
    try:
        import obstore
    except ImportError:
        raise UsageError(_needed(url)) from None
    if _client_process is None:
        _client_process = os.getpid()
    if _client_process != os.getpid():
        raise IoError(
            f"{url} cannot be read in a process that was forked from one that reads object stores: "
            'start processes with "spawn"'
        )
    return obstore


def worth_another(error: Exception) -> bool:
    """Whether the client has neither a final answer from the server nor given up trying."""
    text = brief(error)
    if isinstance(error, FileNotFoundError):
        return False
    return not any(sign in text for sign in ("status code", "retries", "recondition"))


def brief(error: Exception) -> str:
    """What the client says, on one line."""
    return " ".join(str(error).split(" Debug source:")[0].split("\n\nDebug source:")[0].split())


def explained(error: Exception, url: str) -> str:
    """What an error of a request to `url`, or to what it begins with, means and what to do about it;
    "" where the client's own words say it best."""
    return _without_credentials(error, url) or _denied(error, url) or _unanswered(error)


def is_denied(error: Exception) -> bool:
    """Whether an answer denies access."""
    text = brief(error)
    kinds = ("PermissionDeniedError", "UnauthenticatedError")
    signs = ("ExpiredToken", "InvalidAccessKeyId", "status code: 401", "status code: 403")
    return type(error).__name__ in kinds or any(sign in text for sign in signs)


def _denied(error: Exception, url: str) -> str:
    """The sentence for an answer that denies access; "" for any other error."""
    text = brief(error)
    if not is_denied(error):
        return ""
    code, message = (re.search(rf"<{name}>([^<]+)<", text) for name in ("Code", "Message"))
    said = ": ".join(dict.fromkeys(part[1] for part in (code, message) if part))
    cloud = _cloud(url)
    named = f" ({_CREDENTIALS[cloud][1]})" if cloud else ""
    return (
        f"access was denied{_by(text)} ({said or text[:300]}): check the credentials{named} and "
        "whether they expired"
    )


def _without_credentials(error: Exception, url: str) -> str:
    """The sentence where the client went to look for credentials in vain; "" for any other."""
    text, cloud = brief(error), _cloud(url)
    if not cloud or not _METADATA.search(text):
        return ""
    return (
        f"there are no credentials: set {_CREDENTIALS[cloud][0]}, or for a public bucket "
        f"{cloud}_SKIP_SIGNATURE=true (the machine's own service for credentials was asked{_by(text)} "
        "and gave none)"
    )


def _cloud(url: str) -> str:
    """Whose protocol it is; "" where a URL names a server."""
    return _CLOUDS.get(url.partition("://")[0], "")


def _unanswered(error: Exception) -> str:
    """The sentence where no server answered; "" for any other error."""
    text = brief(error)
    if "error sending request" not in text:
        return ""
    # The client says the cause in its debugging words alone.
    if "kind: Timeout" in str(error) or "TimedOut" in str(error):
        cause = "the request timed out"
    else:
        found = re.search(r'(?:message|error): "([^"]+)"', str(error))
        cause = found[1] if found else "no connection"
    endpoint = ", and AWS_ENDPOINT_URL" if "S3" in text else ""
    return (
        f"no answer came{_by(text, 'from')} ({cause}): check the network{endpoint}; "
        "NOSTALL_OBJECT_RETRIES and NOSTALL_OBJECT_TIMEOUT_S say how long a store is asked"
    )


def _by(text: str, word: str = "by") -> str:
    """Who was asked, with a blank before it; "" where the client does not say."""
    asked = re.search(r"Error performing [A-Z]+ (https?://[^/\s]+)", text)
    return f" {word} {asked[1]}" if asked else ""
