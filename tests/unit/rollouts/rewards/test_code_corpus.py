"""Right code is worth 1 and wrong code 0, in every kind of fence and under every form of tests that data sets have."""

# ruff: noqa: E501 - tables, one line a case
from __future__ import annotations

import json
import textwrap

import pytest

from rollouts.rewards.code_blocks import python_block
from rollouts.rewards.code_reward import unit_tests
from rollouts.sandbox.sandbox import sandbox_report
from settings.errors import InvalidInput

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report())),
]

ADD = "def add(a, b):\n    return a + b"
FENCES = [
    *(f"```{tag}\nCODE\n```" for tag in ("python", "Python3", "python3.11", 'python title="a.py"', "py {.x}", "PY")),
    *(f"```{tag}\nCODE\n```" for tag in ("{python}", "{.py}", " python", "ipython3", "python:a.py", "", "python  ")),
    *("~~~python\nCODE\n~~~", "````python\nCODE\n````", "~~~~ py\nCODE\n~~~~~", "```python\nCODE\n  ```  "),
    *(
        "1. So:\n\n   ```python\n|   CODE\n   ```",
        "* So\n  * so\n      ~~~py\n|      CODE\n      ~~~",
        "- ```python\n|  CODE",
    ),
    *(
        "1. So:\n\n       ```python\n|       CODE\n       ```",
        "\t```python\n|\tCODE\n\t```",
        "1. a\n   ```python\nCODE\n   ```",
    ),
    *("> ```python\n|> CODE\n> ```", "> - So:\n>   ```py\n|>   CODE\n>   ```", "   ```python\n|   CODE\n   ```"),
    *(
        "<answer>\n```python\nCODE\n```\n</answer>",
        "<think>?</think>\n```py\nCODE\n```",
        "```python\nCODE",
        "```py\nCODE```",
    ),
    *("So: ```python\nCODE\n```", "```python\nno\n```\nSo: ```python\nCODE\n```", "```py\nno\n```\n```py\nCODE\n```"),
    *(
        "```python\nCODE\n```\n```text\n5\n```",
        "```\n5\n```\n```python\nCODE\n```\n```\n5\n```",
        "```bash\nls\n```\n```\nCODE\n```",
    ),
    *(
        '```python\ns = "```"\nCODE\n```',
        '```python\n"""\n```\nadd(1)\n```\n"""\nCODE\n```',
        "```python\n# ```\nCODE\n```",
    ),
    *(
        '```python\ns = """```python\nx\n```"""\nCODE\n```\nDone',
        "`a` ``b``\n\n```python\nCODE\n```",
        "```python\n\nCODE\n\n\n```",
    ),
    *(
        "*\n\n```python\nCODE\n```\n---",
        "```python\nCODE\n```\n```pycon\n>>> add(1, 1)\n```",
        "# A\n```python\nCODE\n```\n## B",
    ),
]


def _in(fence: str, code: str) -> str:
    """`CODE` in a fence; a line that begins with `|` is a prefix of every line of the code."""
    lines = []
    for line in fence.split("\n"):
        prefix, is_code, rest = line.partition("CODE")
        own = prefix.removeprefix("|") if prefix.startswith("|") else ""
        lines.append(textwrap.indent(code, own, lambda _: True) + rest if is_code else line)
    return "\n".join(lines)


@pytest.mark.parametrize("fence", FENCES)
def test_code_is_found_in_every_kind_of_fence(fence: str):
    for newline in ("\n", "\r\n", "\r"):
        block = python_block(_in(fence, ADD).replace("\n", newline))
        space: dict[str, object] = {}
        exec(block or "", space)
        assert space["add"](2, 3) == 5, block  # type: ignore[operator]
    assert unit_tests(_in(fence, ADD).replace("\n", "\r\n"), "assert add(2, 3) == 5") == 1.0
    assert unit_tests(_in(fence, ADD.replace("+", "-")), "assert add(2, 3) == 5") == 0.0


@pytest.mark.parametrize(
    "reply",
    ["", "no", ADD, "```text\nCODE\n```", "```pycon\nCODE\n```", "`CODE`", "```python-repl\nCODE\n```", "```c\nCODE"],
)
def test_what_is_no_block_of_python_is_none(reply: str):
    assert python_block(_in(reply, ADD)) is None and unit_tests(_in(reply, ADD), "assert add(2, 3) == 5") == 0.0


TWO_SUM = "class Solution:\n    def two(self, nums: List[int], t: int) -> List[int]:\n        return list(RETURN)"
CASES = {"inputs": [[[2, 7, 1], 9], [[3, 4], 7]], "outputs": [[0, 1], [0, 1]], "fn_name": "two"}
TEXTS = [{"input": "[2, 7, 1]\n9", "output": "[0, 1]", "testtype": "functional", "metadata": {"func_name": "two"}}]
TWO = "def two(nums, t): return [i for i, n in enumerate(nums) if t - n in nums][:2]", "def two(nums, t): return [1, 0]"
METHOD = tuple(
    TWO_SUM.replace("RETURN", each)
    for each in ("deque(i for i, n in enumerate(nums) if t - n in nums and n < math.inf)", "[9]")
)
ECHO = "print(input())\nprint(input())", "print(1)\nprint(input())"
PLUS = ADD, "def add(a, b):\n    return a - b - 1"
TEST_CLASS = "class {}:\n    def test_a(self):\n        assert add(2, 3) == 5\n    def test_b(self):\n        assert add(0, 1) == 1"
UNITTEST = (
    "import unittest\nfrom solution import add\nclass Adds(unittest.TestCase):\n    def setUp(self): self.x = 2\n"
)
UNITTEST += "    def test_a(self): self.assertEqual(add(self.x, 3), 5)\n"
MAIN = "\nif __name__ == '__main__':\n    {}"
STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
STACK += "    def __contains__(self, x): return {}\n    def __len__(self): return {}"
ERROR = "class Odd(ValueError): pass\ndef f(x):\n    if x % 2: raise {}('odd ' + str(x))"
VALUE = "import collections, datetime\ndef f(): return {}"
RAISES = (
    "import pytest\nimport solution\ndef test_f():\n    with pytest.raises(solution.Odd, match='odd 3'): solution.f(3)"
)
FORMS: list[tuple[object, str, str]] = [
    # LiveCodeBench and APPS: functions, methods, standard input
    ("assert Solution().two([2, 7, 1], 9) == [0, 1]", *METHOD),
    *((CASES, *TWO), (CASES, *METHOD), (TEXTS, *TWO), (TEXTS, *METHOD), ({**CASES, "outputs": [[[0, 1]]] * 2}, *TWO)),
    ({"inputs": [[1]], "outputs": [{"1": [2]}], "fn_name": "f"}, "def f(x): return {x: (2,)}", "def f(x): return {x: 2}"),
    ({"inputs": ["1", "[]"], "outputs": ["[1]", "[[]]"], "fn_name": "f"}, "def f(x): return [x]", "def f(x): return x"),
    ({"inputs": [[2]], "outputs": [4], "fn_name": "pow"}, "def pow(x): return x * x", "def power(x): return x * x"),
    ({"inputs": [[[1, 2]]], "outputs": [3], "func_name": "f"}, "def f(x): return sum(x)", "def f(x): return reduce(sub, x)"),
    ({"inputs": [["1", "2"]], "outputs": [["1", "2"]], "fn_name": None}, *ECHO),
    ([{"input": "1\n2", "output": "1\n2\n", "testtype": "stdin"}], "print(input())\nprint(input())", "print(1, input())"),
    (["assert add(2, 3) == 5", "assert add(0, 1) == 1"], *PLUS),
    # pytest and unittest
    ("import pytest\n@pytest.mark.parametrize('a,b,c', [(2, 3, 5), (0, 1, 1)])\ndef test_a(a, b, c): assert add(a, b) == c", *PLUS),
    ("from pytest import approx\ndef test_a(): assert add(2, .5) == approx(2.5)", *PLUS),
    ("import pytest\n@pytest.fixture\ndef two(): return 2\ndef test_a(two): assert add(two, 3) == 5", *PLUS),
    ("def test_a(tmp_path):\n    (tmp_path / 'x').write_text('2')\n    assert add(int((tmp_path / 'x').read_text()), 3) == 5", *PLUS),
    ("import pytest\n@pytest.mark.skip\ndef test_b(): assert False\ndef test_a(): assert add(2, 3) == 5", *PLUS),
    *((TEST_CLASS.format("TestAdd"), *PLUS), (TEST_CLASS.format("Adds"), *PLUS), (TEST_CLASS.format("T(object)"), *PLUS)),
    *((UNITTEST, *PLUS), (UNITTEST + "unittest.main()", *PLUS), (UNITTEST + MAIN.format("unittest.main()"), *PLUS)),
    (UNITTEST + "    def test_b(self):\n        for x in (1, 2):\n            with self.subTest(x=x): self.assertEqual(add(x, x), 2 * x)", *PLUS),
    ("import sys, pytest\ndef test_a(): assert add(2, 3) == 5\nsys.exit(pytest.main())", *PLUS),
    (RAISES, ERROR.format("Odd"), ERROR.format("ValueError")),
    # asserts
    (MAIN.format("assert add(2, 3) == 5"), *PLUS),
    ("def test(f):\n    assert f(2, 3) == 5\ntest(add)", *PLUS),
    ("def check(f):\n    assert f(2, 3) == 5\ncheck(add)\nprint('All passed')", *PLUS),
    ("def check(f):\n    assert f(2, 3) == 5\ndef main(): check(add)" + MAIN.format("main()"), *PLUS),
    ("for a, b, c in [(2, 3, 5), (0, 1, 1)]:\n    if add(a, b) != c: raise AssertionError", *PLUS),
    ("import sys\ntry:\n    assert add(2, 3) == 5\nexcept AssertionError: sys.exit(1)", *PLUS),
    ("import numpy as np\nnp.testing.assert_allclose(add(2, 3), 5)", *PLUS),
    ("try:\n    f(3)\n    assert False\nexcept ValueError as e:\n    assert 'odd' in str(e)", ERROR.format("Odd"), ERROR.format("Exception")),
    ("from solution import _f\nassert _f(1) == 2", "def _f(x): return x + 1", "def _f(x): return x"),
    # values
    ("assert f().x == 1 and f() == (1, 2)", VALUE.format("collections.namedtuple('P', 'x y')(1, 2)"), VALUE.format("(1, 2)")),
    ("import datetime as d\nassert f() == d.date(2024, 2, 29)", VALUE.format("datetime.date(2024, 2, 29)"), VALUE.format("'2024-02-29'")),
    ("import datetime as d\nassert f() == d.timedelta(1)", VALUE.format("datetime.timedelta(1)"), VALUE.format("1")),
    ("from collections import deque\nassert f() == deque([1])", VALUE.format("collections.deque([1])"), VALUE.format("[1]")),
    ("assert f()['z'] == 0", VALUE.format("collections.Counter('a')"), VALUE.format("{'a': 1}")),
    ("s = Stack()\ns.push(1)\nassert 1 in s and 2 not in s and len(s) == 1", STACK.format("x in self.items", "len(self.items)"), STACK.format("False", "0")),
    ("assert isinstance(f(), C) and not isinstance(1, C)", "class C: pass\ndef f(): return C()", "class C: pass\ndef f(): return 1"),
    ("with C() as x: assert x == 1", "class C:\n    def __enter__(self): return 1\n    def __exit__(self, *_): pass", "class C: pass"),
    ("assert float(C()) == 0.5 and abs(C()) == 1", "class C:\n    def __float__(self): return 0.5\n    def __abs__(self): return 1", "class C: pass"),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "right", "wrong"), FORMS)
def test_right_code_is_worth_one_and_wrong_code_nothing_under_every_form(tests: object, right: str, wrong: str):
    text = tests if isinstance(tests, str) else json.dumps(tests)
    assert unit_tests(f"```python\n{right}\n```", text) == 1.0
    assert unit_tests(f"```python\n{wrong}\n```", text) == unit_tests("I cannot.", text) == 0.0


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([{"input": "1", "output": "1", "testtype": "functional"}], "do not name it"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "one argument in JSON a line"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f g"}, "name one function"),
        ({"inputs": [1], "outputs": ["1"]}, "JSON tests must be"),
        ("async def test_a(): assert add(1, 1) == 2", "line 1: test_a is a coroutine"),
        ("x = 1\ndef test_a(capsys):\n    add(1, 1)", "line 2: the tests use capsys: the code under test runs in"),
        ("import io, sys\nsys.stdout = io.StringIO()\nassert add(1, 1) == 2", "line 2: the tests use sys: "),
        ("from contextlib import *\nwith redirect_stdout(None): add(1, 1)", "line 2: the tests use redirect_stdout"),
        ("import builtins\nbuiltins.input = lambda: 1\nassert add(1, 1) == 2", "line 2: the tests use builtins"),
        ("from unittest import mock\nassert add(1, 1) == 2", "line 1: the tests use mock"),
        ("x = 1\nimport no_such_package\nassert add(1, 1) == 2", "line 2: the tests import no_such_package"),
    ],
)
def test_tests_that_no_code_can_pass_here_are_refused_whatever_the_reply(tests: object, words: str):
    for reply in ("42", f"```python\n{ADD}\n```"):
        with pytest.raises(InvalidInput, match=words):
            unit_tests(reply, tests if isinstance(tests, str) else json.dumps(tests))


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("x = open('data.txt').read()\nassert add(1, 1) == 2", "line 1: the tests cannot be run here"),
        ("def test_a(no_such_fixture): assert add(1, 1) == 2", "test_a: there is no fixture 'no_such_fixture'"),
        ("class C(Base): pass\nassert C()", "derive a class"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): assert add(1, 1) == 2", "skip themselves"),
    ],
)
def test_tests_that_turn_out_not_to_run_are_an_error_and_no_reward(tests: str, words: str):
    with pytest.raises(InvalidInput, match=words):
        unit_tests(f"```python\n{ADD}\nclass Base: pass\n```", tests)
