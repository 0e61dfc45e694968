"""What the environment says wrongly of object stores is told in one sentence, before any request."""

from __future__ import annotations

from pathlib import Path

import pytest

import nostall
from nostall.base import _object_client as client
from nostall.errors import UsageError

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
