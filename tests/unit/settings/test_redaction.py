"""Secrets do not leave: not in messages, not in logs, not in the settings of a run."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from infra.structured_logs import json_handler
from settings.redaction import redact_logs, secret_settings, without_secrets

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
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("mail me@host: now", "mail me@host: now"),
    ],
)
def test_messages_name_no_password(said: str, shown: str):
    assert without_secrets(said) == shown


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MILLRACE_NOTIFY"]
)
def test_the_value_of_a_secret_in_the_environment_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OTHER_TOKEN", f"{KEY}-and-more")
    assert without_secrets(f"401: {KEY} is wrong, so is {KEY}-and-more") == "401: *** is wrong, so is ***"


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")  # a name, not a secret
    monkeypatch.setenv("SHORT_TOKEN", "test")
    said = "a test of AKIAIOSFODNN7EXAMPLE"
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
    assert KEY not in said


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
