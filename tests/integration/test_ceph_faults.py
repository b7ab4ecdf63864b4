"""The faults of the unit tests in front of a real object server: Ceph's gateway. Skipped where it cannot be had."""

from tests.unit.storage.test_s3_faults import *  # noqa: F403
