"""Where vLLM's core comes from, with a stand-in of the one name of vLLM that matters."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.engines.vllm_core import CoreStart
from tests.processes import has_imported, num_new_pages

ARGUMENTS: dict[str, dict[str, Any]] = {"forked": {}, "spawned": {"tensor_parallel_size": 2}}


def _spawning() -> Any:
    return multiprocessing.get_context("spawn")


@pytest.fixture
def in_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that is started as vLLM starts its core."""
    vllm = SimpleNamespace(utils=SimpleNamespace(get_mp_context=_spawning))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", vllm)
    monkeypatch.setattr("rollouts.engines.vllm_core.IMPORTED", ["tabnanny"])
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it may be another test's

    def call(arguments: dict[str, Any], function: Callable[..., Any], *given: Any) -> Any:
        core = CoreStart(arguments)
        with core.starting(), ProcessPoolExecutor(1, mp_context=vllm.utils.get_mp_context()) as started:
            found = started.submit(function, *given).result(timeout=60)
        assert vllm.utils.get_mp_context is _spawning
        return found

    yield call
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "imported"), [("forked", True), ("spawned", False)])
def test_a_core_of_one_part_has_imported_everything_when_it_starts(in_core: Any, kind: str, imported: bool):
    assert in_core(ARGUMENTS[kind], has_imported, "tabnanny") is imported


def test_on_gpus_the_core_is_started_as_vllm_does_it(in_core: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.engines.vllm_core.CPU_BUILD", "no-such-distribution")
    assert not in_core({}, has_imported, "tabnanny")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_a_step_of_the_core_frees_is_there_for_its_next_one_and_for_no_other_process(in_core: Any, kind: str):
    found = in_core(ARGUMENTS[kind], num_new_pages)
    assert found < 8_000 < num_new_pages(), "of 16,384 pages, those the kernel had to give anew"
