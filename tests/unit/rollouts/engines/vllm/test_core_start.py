"""Where vLLM's core comes from, with a stand-in of the one name of vLLM that matters."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.engines.vllm.core_start import CoreStart, with_latent_attention
from tests.processes import has_imported, num_new_pages

pytestmark = pytest.mark.server


def _spawning() -> Any:
    return multiprocessing.get_context("spawn")


@pytest.fixture
def in_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that is started as vLLM starts its core."""
    vllm = SimpleNamespace(utils=SimpleNamespace(get_mp_context=_spawning))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", vllm)
    monkeypatch.setattr("rollouts.engines.vllm.core_start.IMPORTED", ["tabnanny"])
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it may be another test's

    def call(arguments: dict[str, Any], function: Callable[..., Any], *given: Any) -> Any:
        core = CoreStart(arguments)
        with core.starting(), ProcessPoolExecutor(1, mp_context=vllm.utils.get_mp_context()) as started:
            found = started.submit(function, *given).result(timeout=60)
        assert vllm.utils.get_mp_context is _spawning
        return found

    yield call
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("parts", "on_gpu"), [(1, False), (2, False), (1, True)], ids=["forked", "parts", "GPU"])
def test_a_core_of_one_part_on_cpus_has_imported_everything_and_every_core_keeps_freed_memory(
    in_core: Any, monkeypatch: pytest.MonkeyPatch, parts: int, on_gpu: bool
):
    if on_gpu:
        monkeypatch.setattr("rollouts.engines.vllm.core_start.CPU_BUILD", "no-such-distribution")
    found, new_pages = in_core({"tensor_parallel_size": parts}, _look)
    assert found is (parts == 1 and not on_gpu)
    if hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        assert new_pages < 8_000 < num_new_pages(), "of 16,384 pages, those the kernel had to give anew"


@pytest.mark.parametrize(("parts", "on_gpu"), [(2, False), (1, True)], ids=["parts", "GPU"])
def test_a_core_is_no_fork_of_a_process_that_may_have_asked_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, parts: int, on_gpu: bool
) -> None:
    """vLLM sees whether CUDA computes in this process, not whether it was asked for: a fork could not begin with it."""
    from vllm.utils.system_utils import get_mp_context

    if on_gpu:
        monkeypatch.setattr("rollouts.engines.vllm.core_start.CPU_BUILD", "no-such-distribution")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert get_mp_context().get_start_method() == "fork"
    with CoreStart({"tensor_parallel_size": parts}).starting():
        assert get_mp_context().get_start_method() == "spawn"
    assert get_mp_context().get_start_method() == "fork"


@pytest.mark.parametrize(
    ("arguments", "about", "backend"),
    [
        ({"dtype": "float32"}, {"kv_lora_rank": 512}, "CPU_MLA"),
        ({}, {"kv_lora_rank": 512, "dtype": "float32"}, "CPU_MLA"),
        ({"dtype": "bfloat16"}, {"kv_lora_rank": 512}, None),
        ({"dtype": "float32"}, {}, None),
        ({"dtype": "float32", "attention_backend": "AMX_MLA"}, {"kv_lora_rank": 512}, "AMX_MLA"),
    ],
)
def test_latent_attention_in_float32_is_the_one_that_computes_in_it(
    tmp_path: Path, arguments: dict[str, Any], about: dict[str, Any], backend: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert with_latent_attention(arguments, tmp_path).get("attention_backend") == backend


def _look() -> tuple[bool, int]:
    return has_imported("tabnanny"), num_new_pages()


def test_the_cause_that_the_core_has_written_to_the_log_is_raised(tmp_path: Path) -> None:
    code = """
import os, sys
from infra.process_output import redirect_output
from rollouts.engines.vllm.core_start import CoreFailed, _root_cause
redirect_output(sys.argv[1])
try:
    with _root_cause():
        os.system(f"{sys.executable} -c 'raise ValueError(7)'")
        raise RuntimeError("Engine core initialization failed. See root cause above.")
except CoreFailed as error:
    os._exit(3 if str(error).startswith("ValueError: 7") else 4)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "worker.log")])
    assert done.returncode == 3, (tmp_path / "worker.log").read_text()
