"""The names that users import: each is there, loaded on demand, and known to type checkers."""

from __future__ import annotations

import subprocess
import sys

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
