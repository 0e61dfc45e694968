"""An S3 server behind a proxy, for tests of stores on objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from object_server import ENVIRONMENT, Proxy, s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[Proxy]:
    with s3_server() as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


@pytest.fixture(scope="session")
def resource(server: Proxy) -> Any:
    keys = ("aws_access_key_id", "aws_secret_access_key")
    options = {key: ENVIRONMENT[key.upper()] for key in keys}
    return boto3.resource("s3", "us-east-1", endpoint_url=server.url, **options)


@pytest.fixture
def proxy(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "2")
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def bucket(proxy: Proxy, resource: Any, request: pytest.FixtureRequest) -> Any:
    """A bucket of the test's own."""
    found = resource.Bucket(f"bucket-{abs(hash(request.node.nodeid)):x}")
    found.create()
    return found
