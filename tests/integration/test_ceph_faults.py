"""The faults of the unit tests in front of a real object server: Ceph's gateway. Skipped where it cannot be had."""

from __future__ import annotations

import pytest

from tests.ceph import Ceph
from tests.unit.storage.test_s3_faults import *  # noqa: F403


@pytest.fixture  # type: ignore[no-redef]
def server(ceph: Ceph) -> dict[str, str]:
    return ceph.variables
