"""Secrets do not leave: not in messages, not in logs, not in the settings of a run."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import pytest

from infra.environment import tracking_uri
from infra.structured_logs import json_handler
from settings.errors import InvalidInput
from settings.redaction import redact_error, redact_logs, secret_settings, without_secrets
from settings.run_file import ConfigError, make_config

KEY = "sk-abcdefgh12345678"


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger of a process that says no secrets; the factory of the other tests comes back."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    before = logging.getLogRecordFactory()
    redact_logs()
    logger = logging.getLogger("test-of-redaction")
    logger.propagate = False
    yield logger
    logging.setLogRecordFactory(before)
    logger.handlers.clear()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no answer from https://me:s3cret@host/path", "no answer from https://***@host/path"),
        ("postgresql://user:@db/mlflow and http://a:b@c", "postgresql://***@db/mlflow and http://***@c"),
        ("https://me:pa/ss@w@host:80/x to s3://b", "https://***@host:80/x to s3://b"),
        ("redis://:only@host/0, amqp://a:b%2Fc@d", "redis://***@host/0, amqp://***@d"),
        ("me:secret@host", "***@host"),
        ("GET /f?X-Amz-Signature=1f&X-Amz-Expires=6", "GET /f?X-Amz-Signature=***&X-Amz-Expires=6"),
        ("/f?a=1&X-Amz-Security-Token=2e%3D&sig=3d#x", "/f?a=1&X-Amz-Security-Token=***&sig=***#x"),
        ("http://h/?api_key=k&token=t&page=2", "http://h/?api_key=***&token=***&page=2"),
        ("postgresql://db/x?user=me&password=p", "postgresql://db/x?user=me&password=***"),
        ("host=db password=p user=me", "host=db password=*** user=me"),
        ("Authorization: Basic bWU6cA==", "Authorization: Basic ***"),
        ("{'authorization': 'Bearer abcdef123'}", "{'authorization': 'Bearer ***'}"),
        ("X-Api-Key: abc, x: 1", "X-Api-Key: ***, x: 1"),
        ("with hf_abcdefghijklmnopqrstuv", "with ***"),
        ("-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY----- and", "*** and"),
        ('{"password": "a#b c", \\\\"api_key\\\\": \\\\"k\\\\"}', '{"password": "***", \\\\"api_key\\\\": \\\\"***"}'),
        ("client_secret='s t' and AccountKey=a+b==;X", "client_secret='***' and AccountKey=***;X"),
        ("password: p, --api-key k --page 2", "password: ***, --api-key *** --page 2"),
        ("Set-Cookie: sid=1f; Path=/", "Set-Cookie: ***"),
        ("X-Vault-Token: abc and private-token: 1", "X-Vault-Token: *** and private-token: ***"),
        ("https://0123456789abcdef0123@o1.ingest.sentry.io/1", "https://***@o1.ingest.sentry.io/1"),
        ("https://hooks.slack.com/services/T0/B0/abc is away", "https://hooks.slack.com/*** is away"),
        ("npm_abcdefghijklmnopqrstuvwxyz0123456789 rk_live_abcdefghijklmnop", "*** ***"),
        ("sk-abcdefghijklmnopqrst123 eyJhbGciOiJ.eyJzdWIiOiIx.c2ln", "*** ***"),
        ("no password: any1 --password=anything", "no password: *** --password=***"),
        ("passphrase: the quick", "passphrase: *** quick"),
        ("Authorization: Nothing, x-api-key: required-1", "Authorization: ***, x-api-key: ***"),
        *(
            (text, text)
            for text in [
                "MLflow's server has no password: any client may read, and password: required; --api-key is missing",
                "no api-key: set one; Authorization: none given. Client(api_key=None, password=null)",
                "sqlite:////home/me/mlflow.db",
                "mailto:me@host and python:3.11@sha256:0f",
                "mail me@host: now",
                "http://127.0.0.1:5000/#/experiments/0 and me@host",
                "tokens=7 max_tokens=16 eos_token=<end> key=value",
                "a bearer of news; authorized",
                "judge.api_key: Field required; no credentials: none found; pad_token='<pad>'",
                "http://me@host/x and postgresql://mlflow_of_production@db/x",
                "s3://bucket/prefix/a=1",
                "models:/run@champion",
            ]
        ),
    ],
)
def test_messages_name_no_password(said: str, shown: str):
    assert without_secrets(said) == shown


@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MILLRACE_NOTIFY"),
        *("PGPASS", "PGPASSWORD", "GITHUB_PAT", "GPG_PASSPHRASE", "SMTP_PASS", "DB_PWD", "SENTRY_DSN", "STORAGE_SAS"),
        *("ACCESS_TOKEN_PROD", "TOKEN_GITHUB", "SSHPASS", "HTTP_AUTHORIZATION", "UNLOCK_PASSCODE"),
        *("PREFECT_AUTH", "API_KEY_2", "DB_PASSWORD_PROD", "SLACK_WEBHOOK_URL", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_the_value_of_a_secret_in_the_environment_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OTHER_TOKEN", f"{KEY}-and-more")
    assert without_secrets(f"401: {KEY} is wrong, so is {KEY}-and-more") == "401: *** is wrong, so is ***"


@pytest.mark.parametrize("password", ["pa/ss'word", "pa%2Fss%40word"])
def test_the_password_of_an_address_in_the_environment_is_not_shown_by_itself(
    password: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MIRROR", f"https://me:{password}@host/x")
    for form in (password, unquote(password), quote(password, safe=""), repr(unquote(password))):
        assert without_secrets(f"user me, password {form} is wrong") in (
            "user me, password *** is wrong",
            "user me, password '***' is wrong",
            'user me, password "***" is wrong',
        )


def test_nor_is_a_signature_of_an_address_there_however_it_is_quoted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MIRROR", f"https://host/x?X-Amz-Signature={KEY}&X-Amz-Expires=60")
    assert without_secrets(f"Location: {quote(os.environ['MIRROR'], safe='')}").endswith("%3D***%26X-Amz-Expires%3D60")


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")  # a name, not a secret
    monkeypatch.setenv("SHORT_TOKEN", "test")
    for name in (
        "PWD",
        "OLDPWD",
        "SSH_AUTH_SOCK",
        "GOLDEN_COMPASS",
        "TOKEN_FILE",
        "TOKEN_URL",
        "RUN_PATH",
        "JUDGE_API_KEY_ENV",
    ):
        monkeypatch.setenv(name, "/home/somebody")
    said = "a test of AKIAIOSFODNN7EXAMPLE in /home/somebody"
    assert without_secrets(said) == said


@pytest.mark.parametrize("as_json", [False, True])
def test_logs_say_no_secret(logger: logging.Logger, as_json: bool):
    stream = io.StringIO()
    logger.addHandler(json_handler(stream, dict) if as_json else logging.StreamHandler(stream))
    logger.warning("the judge at %s refused %s", "http://me:pass@judge", KEY)
    try:
        raise ValueError(f"no such key: {KEY}")
    except ValueError:
        logger.exception("the judge")
    said = stream.getvalue()
    assert "the judge at http://***@judge refused ***" in said
    assert "ValueError: no such key: ***" in said and "Traceback" in said
    logger.warning("\x1b]0;title\x07 and \x9b2J")
    said = stream.getvalue()
    assert KEY not in said and not set("\x1b\x07\x9b") & set(said)


def test_the_words_of_an_error_and_of_those_behind_it_are_redacted_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    refused, away, missing = ValueError(f"no {KEY}", 7), OSError(111, f"no answer of {KEY}"), KeyError(KEY)
    refused.add_note(f"with {KEY}")
    refused.__cause__, away.__context__ = away, refused  # a circle
    redact_error(ExceptionGroup("both", [refused, missing]))
    assert refused.args == ("no ***", 7) and refused.__notes__ == ["with ***"]
    assert str(away) == "[Errno 111] no answer of ***" and str(missing) == "'***'"


def test_redacting_twice_is_redacting_once_and_arguments_that_do_not_fit_are_left_to_the_handler(
    logger: logging.Logger,
):
    before = logging.getLogRecordFactory()
    redact_logs()
    assert logging.getLogRecordFactory() is before
    record = logger.makeRecord(logger.name, logging.INFO, "file", 1, "%d", ("word",), None)
    assert record.msg == "%d" and record.args == ("word",)


def test_settings_that_look_like_secrets_are_found_and_others_are_not():
    document = {
        "engine": {"vllm": {"hf_token": "hf_x", "max_num_seqs": 4, "eos_token": "<end>"}},
        "judge": {"api_key": "sk-1", "api_key_env": "JUDGE_KEY"},
        "train": {"tokens_per_microbatch": 1024, "password": ""},
        "token": "t",
    }
    assert list(secret_settings(document)) == ["engine.vllm.hf_token", "judge.api_key", "token"]


@pytest.mark.parametrize("piece", ["a", "a:", "://a:", "a.", "eyJ-", "password", "x=", "Bearer ", "?sig", "sk-"])
def test_no_text_takes_long(piece: str):
    started = time.process_time()
    without_secrets(piece * (50_000 // len(piece)))
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tracking": f"https://me:{KEY}@host"}, "tracking"),
        ({"tracking": {"uri": f"postgresql://me:{KEY}/x@host/db"}}, "tracking.uri"),
        ({"dataset": f"https://host/f.json?X-Amz-Signature={KEY}"}, "dataset"),
        ({"reward": {"judge": {"base_url": f"https://host/v1?api_key={KEY}"}}}, "reward.judge.base_url"),
        ({"engine": {"vllm": {"hf_token": KEY}}}, "engine.vllm.hf_token"),
        ({"engine": {"vllm": {"passphrase": KEY}}}, "engine.vllm.passphrase"),
        ({"engine": {"vllm": {"github_pat": KEY}}}, "engine.vllm.github_pat"),
        *(
            ({"workflow_settings": {name: KEY}}, f"workflow_settings.{name}")
            for name in ("clientSecret", "x-api-key", "private_token", "encryption_key", "connection_string")
        ),
        ({"engine": {"vllm": {"extra": [f"hf_{KEY.replace('-', '')}abcdef"]}}}, "engine.vllm.extra.0"),
    ],
)
def test_a_run_file_with_a_secret_is_refused_and_does_not_repeat_it(settings: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        make_config({"workflow": "tests:none", **settings}, source="run.toml")
    assert f"run.toml: {key} looks" in str(refused.value) and KEY not in str(refused.value)


def test_an_address_with_a_password_is_of_the_environment_alone(monkeypatch: pytest.MonkeyPatch):
    address = f"https://me:{KEY}@host"
    monkeypatch.setenv("MILLRACE_TRACKING", address)
    assert tracking_uri("") == address
    with pytest.raises(InvalidInput, match=r"tracking = 'https://\*\*\*@host' holds a password.* MILLRACE_TRACKING"):
        tracking_uri(address)
