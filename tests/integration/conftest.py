"""Fixtures of the tests against real servers."""

from __future__ import annotations

import pytest

from tests.ceph import Ceph


@pytest.fixture
def server(ceph: Ceph) -> dict[str, str]:
    """Ceph's gateway in place of the mock server."""
    return ceph.variables
