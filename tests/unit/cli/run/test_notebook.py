"""A run in a notebook, where a store may be a path as well as a text."""

from __future__ import annotations

import pytest

import millrace
from settings.errors import NotFound
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore


def test_a_store_is_a_path_or_a_text_and_a_run_that_is_not_there_is_named(log: RunLog, store: LocalStore) -> None:
    for place in (store.root, str(store.root), ""):
        assert millrace.open_run("run", store=place).name == log.run_id
    for name in (None, "other"):
        with pytest.raises(NotFound, match=f"no run '{name}' in .*; runs there: run"):
            millrace.open_run(name, store=store.root)  # type: ignore[arg-type]
