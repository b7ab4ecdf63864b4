"""Questions to a Prefect server, asked until its database is not busy."""

from __future__ import annotations

import time
from typing import Any

import httpx

PATIENCE = 200.0  # seconds


def ask(method: str, url: str, document: dict[str, Any] | None = None) -> Any:
    """The JSON of its answer, None if that is empty. Raises `httpx.HTTPStatusError` for a refusal."""
    deadline = time.monotonic() + PATIENCE
    # A connection for each request: the server closes idle ones, now and then as one is used again.
    while (answer := httpx.request(method, url, json=document, timeout=PATIENCE)).status_code == 503:
        assert time.monotonic() < deadline, answer.text  # its database was busy, as for any of its clients
    answer.raise_for_status()
    return answer.json() if answer.content else None
