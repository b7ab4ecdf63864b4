"""The names that users import: each is there, loaded on demand, and known to type checkers."""

from __future__ import annotations

import ast
import contextlib
import gc
import subprocess
import sys
import threading

import pytest

import millrace
from tests import api_page


def test_every_name_is_what_its_module_has():
    values = {name: getattr(millrace, name) for name in dir(millrace)}
    assert len(values) > 50 and values == {
        name: getattr(sys.modules[millrace._HOME[name]], name) for name in millrace.__all__
    }


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Workflows'"):
        _ = millrace.Workflows
    with pytest.raises(ImportError, match="cannot import name 'Workflows' from 'millrace'"):
        from millrace import Workflows  # noqa: F401


def test_an_environment_loads_no_engine_and_no_trainer():
    heavy = ["torch", "vllm", "mlflow", "ray", "duckdb", "verifiers", "prefect"]
    code = f"import sys, examples.arithmetic; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_reference_page_has_every_name_as_the_code_has_it():
    assert sorted(" ".join(api_page.SECTIONS.values()).split()) == millrace.__all__
    assert api_page.PAGE.read_text() == api_page.page(), "run `python -m tests.api_page`"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="newer ones count each thread's depth apart")
@pytest.mark.parametrize("alone", [True, False], ids=["as it is", "without the lock"])
def test_a_thread_that_parses_while_the_collector_lets_it_in_spoils_no_other_threads_tree(alone: bool) -> None:
    source, parse = "x = [1, [2, 3]]\n" * 500, ast.parse if alone else ast.parse.__wrapped__  # type: ignore[attr-defined]
    other = threading.Thread(target=parse, args=(source,))

    def let_other_in(phase: str, info: dict[str, int]) -> None:
        if other.ident is None:
            other.start()
            other.join(0.3)

    def parse_deep(depth: int) -> ast.Module:
        return parse_deep(depth - 1) if depth else parse(source)

    gc.callbacks.append(let_other_in)
    try:
        with contextlib.nullcontext() if alone else pytest.raises(SystemError, match="recursion depth mismatch"):
            assert len(parse_deep(50).body) == 500
    finally:
        gc.callbacks.remove(let_other_in)
    assert other.ident is not None, "the collector did not run"
    other.join()
