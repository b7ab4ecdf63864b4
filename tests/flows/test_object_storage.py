"""A whole run whose store is an S3 bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from storage.object_store import open_store
from storage.runs import open_run
from tests.conftest import SCRIPTED, Home


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A bucket on an S3 server on loopback, and the AWS variables that lead there."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="lake")
    yield variables
    server.stop()


def test_a_run_in_a_bucket_trains_and_resumes(home: Home, base_model: Path, bucket: dict[str, str]) -> None:
    home.environment |= bucket
    arguments = ["train", str(SCRIPTED), f"model={base_model}", "store=s3://lake/millrace"]
    home.run(*arguments, "steps=2")
    home.run(*arguments, "steps=3")
    log = open_run(open_store("s3://lake/millrace"), "scripted")
    assert log.state.step == 3 and log.state.positions == set(range(12))
    assert len(log.state.sessions) == 2
    everything = b"".join(log.store.get(log.key(f"log/{name}")) for name in log.store.names(log.key("log")))
    assert b"secret-of-the-test" not in everything + log.store.get(log.key("run.json"))
