"""A whole run whose store is an S3 bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.log.runs import open_run
from storage.objects.opening import open_store
from tests.conftest import SCRIPTED, Home


@pytest.mark.slow
def test_a_run_in_a_bucket_trains_and_resumes(
    home: Home, base_model: Path, bucket: str, server: dict[str, str]
) -> None:
    home.environment |= server
    arguments = ["train", str(SCRIPTED), f"model={base_model}", f"store=s3://{bucket}/lake"]
    home.run(*arguments, "steps=2")
    home.run(*arguments, "steps=3")
    log = open_run(open_store(f"s3://{bucket}/lake"), "scripted")
    assert log.state.step == 3 and log.state.positions == set(range(12))
    assert len(log.state.sessions) == 2
    everything = b"".join(log.store.get(log.key(f"log/{name}")) for name in log.store.names(log.key("log")))
    assert server["AWS_SECRET_ACCESS_KEY"].encode() not in everything + log.store.get(log.key("run.json"))
