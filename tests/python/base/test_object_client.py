"""What is wrong with the environment or the way to an object store is told in one sentence."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import nostall
from nostall.base import _object_client as client
from nostall.errors import IoError, UsageError

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "x", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("AWS_ENDPOINT_URL", "localhost:9000", "'localhost:9000' .*is not a URL such as https://"),
        ("AWS_ENDPOINT_URL", "http://", "is not a URL"),
        ("AWS_ENDPOINT_URL", "http://[bad", "is not a URL"),
        ("AWS_ENDPOINT_URL", "http://host:99999", "is not a URL"),
        ("AWS_ENDPOINT_URL", "http://host:9000 ", "'http://host:9000 ' in the env.* is not a URL"),
        ("AWS_ENDPOINT", "nonsense", "'nonsense' in the environment is not a URL"),
        ("AWS_ENDPOINT_URL_S3", "http://host/<x>", "is not a URL"),
        ("AWS_ACCESS_KEY_ID", "a\nb", r"has the character '\\n' at place 1, .*: correct it"),
        ("AWS_SESSION_TOKEN", "\u00e9", "has the character '\u00e9' at place 0"),
        ("AWS_SKIP_SIGNATURE", "maybe", "=maybe in the environment: .*boolean"),
        ("AWS_CONDITIONAL_PUT", "maybe", "=maybe in the environment: .*maybe"),
        ("AWS_SERVER_SIDE_ENCRYPTION", "maybe", "=maybe in the environment: .*maybe"),
    ],
)
def test_what_is_malformed_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"s3://bucket.*{name}.*{sentence}") as one:
        client.connect("s3://bucket")
    assert "\n" not in str(one.value)
    with pytest.raises(UsageError, match=name):
        nostall.TarShards("s3://bucket/a.tar")
    with pytest.raises(UsageError, match=name):
        nostall.Checkpointer(tmp_path, "s3://bucket/run")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9000", "HTTPS://h/p", "http://[::1]:80", "https://a_b"]
)
def test_what_is_well_formed_is_taken(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AZURE_ENDPOINT", "of another cloud")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "not needed with a key")
    client.connect("s3://bucket")


def test_a_host_of_azures_tokens_needs_no_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "login.microsoftonline.com")
    client.connect("az://container")


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_empty_endpoint_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "0")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv(name, "")
    store = client.connect("s3://bucket")
    with pytest.raises(Exception, match=r"https://s3\.r\.amazonaws\.com/bucket/a"):
        client.client("s3://bucket/a").head(store, "a")


def test_an_endpoint_of_any_cloud_may_be_http(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "0")
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    with refusing() as endpoint:
        key = json.dumps({**account, "gcs_base_url": endpoint})
        for url, environment in (
            ("s3://bucket", {"AWS_ENDPOINT": endpoint}),
            ("s3://bucket", {"AWS_ENDPOINT_URL_S3": endpoint}),
            ("gs://bucket", {"GOOGLE_SERVICE_ACCOUNT_KEY": key}),
            ("gs://bucket", {"GOOGLE_BASE_URL": endpoint, "GOOGLE_SKIP_SIGNATURE": "true"}),
            ("az://bucket", {"AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_SKIP_SIGNATURE": "true",
                             "AZURE_STORAGE_ACCOUNT_NAME": "me"}),
        ):  # fmt: skip
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                store = client.connect(url)
                with pytest.raises(Exception) as one:
                    client.client(f"{url}/a").get(store, "a")
            sentence = client.explained(one.value, url)
            assert sentence.startswith(f"access was denied by {endpoint}"), url
            (name,) = re.findall(r"check the credentials \((\w+?)_", sentence)
            assert all(variable.startswith(name) for variable in environment), sentence


def told(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> str:
    """What is said of a request to `endpoint` that fails."""
    monkeypatch.setenv("NOSTALL_OBJECT_RETRIES", "0")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = client.connect("s3://bucket")
    with pytest.raises(Exception) as one:
        client.client("s3://bucket/a").get(store, "a")
    assert "\n" not in client.explained(one.value, "s3://bucket")
    with pytest.raises(
        IoError, match=re.escape(client.explained(one.value, "s3://bucket").split(" (")[0])
    ):
        nostall.TarShards("s3://bucket/a.tar")
    return client.explained(one.value, "s3://bucket")


def test_a_server_that_is_not_there_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        sentence = told(monkeypatch, endpoint)
    words = (
        f"no answer came from {endpoint} (Connection refused): check the network, and AWS_ENDPOINT"
    )
    assert sentence.startswith(words)


def test_a_server_that_does_not_answer_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_OBJECT_TIMEOUT_S", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sentence = told(monkeypatch, endpoint)
    assert sentence.startswith(f"no answer came from {endpoint} (the request timed out): check")


@contextmanager
def refusing() -> Iterator[str]:
    """A server that refuses each request in the words of S3."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = b"<Error><Code>InvalidAccessKeyId</Code><Message>No such key.</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_HEAD = do_PUT = do_GET

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_refusal_is_told_in_the_words_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing() as endpoint:
        sentence = told(monkeypatch, endpoint)
    words = (
        f"access was denied by {endpoint} (InvalidAccessKeyId: No such key.): check the credentials"
    )
    assert sentence.startswith(words)


def test_credentials_that_are_nowhere_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with refusing() as endpoint:  # as a machine that is no instance of Amazon's, or has no role
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", endpoint)
        sentence = told(monkeypatch, endpoint)
    assert sentence.startswith("there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET")
    assert endpoint in sentence


@pytest.mark.parametrize(
    ("url", "where", "words"),
    [
        ("gs://b", "computeMetadata/v1/instance", "set GOOGLE_APPLICATION_CRED.*GOOGLE_SKIP_SIG"),
        ("az://b", "metadata/identity/oauth2", "set AZURE_STORAGE_ACCOUNT_KEY or .*AZURE_SKIP_SIG"),
    ],
)
def test_credentials_of_each_cloud_are_named(url: str, where: str, words: str) -> None:
    asked = Exception(
        f"Generic error: Error performing token request: Error performing GET http://10.0.0.1/{where} "
        "in 1ms - Server returned non-2xx status code: 403 Forbidden"
    )
    sentence = client.explained(asked, url)
    assert re.match(f"there are no credentials: {words}", sentence)
    assert "asked by http://10.0.0.1 and" in sentence and "AWS" not in sentence
