"""Servers of the three protocols of object stores, each behind a proxy that counts and may meddle.

`s3` is MinIO, `az` is Azurite, `gs` is fake-gcs-server. The last one has no writes of Google's XML API,
which the client uses, and no If-Match; the proxy makes of them what it has.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import boto3
from nodes import free_port
from object_server import (
    BUILT,
    ENVIRONMENT,
    Answer,
    Proxy,
    Request,
    header_of,
    minio,
    program_of,
    running,
)

REMEDY = "scripts/store-servers makes it"
# Of Azure's emulators, as documented.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Place(NamedTuple):
    """A server, and how a client finds it."""

    scheme: str
    proxy: Proxy
    environment: dict[str, str]
    make: Callable[[str], None]  # a bucket
    # Whether a request is of an upload in several: a part of it.
    is_part: Callable[[Request], bool]


@contextmanager
def place_of(scheme: str) -> Iterator[Place]:
    command, kind, found = _PLACES[scheme]
    with running(scheme, command) as port:
        proxy = kind(port)
        try:
            yield found(proxy)
        finally:
            proxy.close()


def _s3(proxy: Proxy) -> Place:
    keys = ("aws_access_key_id", "aws_secret_access_key")
    options = {key: ENVIRONMENT[key.upper()] for key in keys}
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=proxy.url, **options)
    return Place(
        "s3",
        proxy,
        {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url},
        lambda name: client.create_bucket(Bucket=name),
        lambda request: "partNumber=" in request.path,
    )


# ------------------------------------------------------------------------------------------ Azure


def _azurite(home: Path) -> tuple[list[str], int]:
    port = free_port()
    main = BUILT / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    return [
        program_of("node", REMEDY), str(main), "--blobHost", "127.0.0.1", "--blobPort", str(port),
        "--location", str(home), "--silent", "--disableTelemetry",
    ], port  # fmt: skip


def _az(proxy: Proxy) -> Place:
    def make(name: str) -> None:
        headers = {
            "x-ms-date": email.utils.formatdate(usegmt=True),
            "x-ms-version": "2021-08-06",
        }
        signed = "PUT" + "\n" * 12 + "".join(f"{k}:{v}\n" for k, v in headers.items())
        signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        _ask(proxy.port, "PUT", f"/{ACCOUNT}/{name}?restype=container", b"", headers)

    environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": proxy.url}
    return Place("az", proxy, environment, make, lambda request: "comp=block&" in request.path)


# ----------------------------------------------------------------------------------------- Google


def _fake_gcs(home: Path) -> tuple[list[str], int]:
    port = free_port()
    return [
        program_of("fake-gcs-server", REMEDY), "-scheme", "http", "-host", "127.0.0.1",
        "-port", str(port), "-backend", "memory", "-log-level", "error",
        "-public-host", "127.0.0.1", "-external-url", f"http://127.0.0.1:{port}",
    ], port  # fmt: skip


class GoogleProxy(Proxy):
    """Makes of writes of the XML API those of the JSON API; the server judges their conditions."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._parts: dict[str, dict[int, bytes]] = {}  # by upload
        self._numbers = itertools.count()

    @property
    def uploads(self) -> int:
        """How many have begun, and are neither complete nor given up."""
        return len(self._parts)

    def _forward(self, request: Request) -> Answer:
        parts = urlsplit(request.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        upload = query.get("uploadId", [""])[0]
        if request.method == "PUT" and upload:
            self._parts[upload][int(query["partNumber"][0])] = request.body
            tag = hashlib.md5(request.body).hexdigest()
            return Answer(200, {"ETag": f'"{tag}"'}, b"")
        if request.method == "PUT":
            return self._put(parts.path, request.headers, request.body)
        if request.method == "POST" and "uploads" in query:
            upload = f"{next(self._numbers)}-{secrets.token_hex(4)}"
            self._parts[upload] = {}
            return _xml("InitiateMultipartUploadResult", UploadId=upload)
        if request.method == "POST" and upload:
            named = re.findall(rb"<PartNumber>(\d+)<", request.body)
            body = b"".join(self._parts[upload][int(number)] for number in named)
            answer = self._put(parts.path, request.headers, body)
            if answer.status != 200:
                return answer
            del self._parts[upload]
            done = _xml("CompleteMultipartUploadResult", ETag=answer.headers["ETag"])
            done.headers |= answer.headers
            return done
        if request.method == "DELETE" and upload:
            del self._parts[upload]
            return Answer(204, {}, b"")
        answer = super()._forward(request)
        wanted = header_of(request.headers, "If-Match")
        matches = not wanted or wanted == header_of(answer.headers, "ETag")
        if request.method == "GET" and answer.status < 300 and not matches:
            return Answer(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
        return answer

    def _put(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        bucket, _, name = path[1:].partition("/")
        asked = {"uploadType": "media", "name": unquote(name)}
        generation = header_of(headers, "x-goog-if-generation-match")
        if generation:
            asked["ifGenerationMatch"] = generation
        target = f"/upload/storage/v1/b/{bucket}/o?{urlencode(asked)}"
        answer = super()._forward(Request("POST", target, {}, body))
        if answer.status != 200:
            return answer
        said = json.loads(answer.body)
        told = {"ETag": f'"{said["etag"]}"', "x-goog-generation": said["generation"]}
        return Answer(200, told, b"")


def _gs(proxy: Proxy) -> Place:
    def make(name: str) -> None:
        body = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        _ask(proxy.port, "POST", "/storage/v1/b?project=tests", body, headers)

    account = {"gcs_base_url": proxy.url, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
    return Place("gs", proxy, environment, make, lambda request: "partNumber=" in request.path)


_PLACES: dict[str, tuple[Callable, type[Proxy], Callable[[Proxy], Place]]] = {
    "s3": (minio, Proxy, _s3),
    "az": (_azurite, Proxy, _az),
    "gs": (_fake_gcs, GoogleProxy, _gs),
}
SCHEMES = tuple(_PLACES)


def _ask(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    server.request(method, path, body, headers)
    answer = server.getresponse()
    said = answer.read()
    server.close()
    assert answer.status < 300, (answer.status, said)


def _xml(element: str, **inner: str) -> Answer:
    text = "".join(f"<{name}>{value}</{name}>" for name, value in inner.items())
    body = f"<?xml version='1.0' encoding='UTF-8'?><{element}>{text}</{element}>"
    return Answer(200, {"Content-Type": "application/xml"}, body.encode())
