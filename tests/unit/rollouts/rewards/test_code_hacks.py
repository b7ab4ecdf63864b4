"""Code that does not solve its task and tries to be graded as if it did: each is worth 0, and what it raises is its own.

The tricks are from public reports on reward hacking of code environments (METR 2025, Anthropic's and OpenAI's system
cards, SWE-bench and KernelBench issues), and from the parts that code and tests have in common here.
"""

# ruff: noqa: E501 - tables, one line a case
from __future__ import annotations

import json

import pytest

from rollouts.rewards.answers import matches, math_answer
from rollouts.rewards.code_reward import unit_tests
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout
from rollouts.sandbox.sandbox import sandbox_report

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report())),
]

TASKS: dict[str, tuple[str, str]] = {
    # name → tests, and code that passes them
    "add": (
        "import math\nassert add(2, 3) == 5\nassert abs(add(2, 2) - 4) < 1e-9\nassert math.isclose(add(2, 4), 6)\nassert 7 - add(3, 4) == 0\nassert sorted([add(1, 2), 1]) == [1, 3]",
        "def add(a, b): return a + b",
    ),
    "unimported": (
        "assert math.isclose(add(2, 3), 5)\nassert Counter(text()) == Counter('aab')\nassert isclose(add(1, 1), 2) and abs(add(1, 0) - 1) < 1\nassert np.allclose(add(2, 2), 4) and add(2, 2) == 4",
        "import math\nfrom collections import Counter\nfrom math import isclose\nimport numpy as np\ndef add(a, b): return a + b\ndef text(): return 'baa'",
    ),
    "unimported too": (
        "assert root(2) == sqrt(2)\nassert root(9) == approx(3)\nwith raises(ValueError): root(-1)\nassert allclose(root(4), 2)\nassert array_equal([root(1)], [1])",
        "from math import sqrt\nfrom numpy import allclose, array_equal\nfrom pytest import approx, raises\ndef root(x): return sqrt(x)",
    ),
    "map": (
        "for got, want in zip(map(f, [1, 2]), [1, 4]): assert got == want\nassert all(map(lambda x: f(x) == x * x, [2, 3]))\nassert [*filter(f, [0, 1])] == [1]\nfor x in iter(lambda: f(2), 4): assert x == 4\nassert all(A(x).x == x for x in [1]) and all(map(lambda x: A(x).x == x, [1]))",
        "def f(x): return x * x\nclass A:\n    def __init__(self, x): self.x = x",
    ),
    "star": (
        "import math\nfrom math import isclose\nfrom solution import *\ndef near(a, b): return isclose(a, b) and math.isclose(a, b)\nassert near(add(2, 3), 5)",
        "def add(a, b): return a + b",
    ),
    "list": (
        "assert 3 in f([3, 1])\nassert f([2, 1]).index(2) == 1\nassert f(['b', 'a'])[0].startswith('a')\nassert not f([])\nassert f([2, 1]) == [1, 2]\nassert {*f([1])} == {1}\nassert set(f([1])).issubset({1, 2}) and f([4]) == [4]",
        "def f(x): return sorted(x)",
    ),
    "json": (json.dumps({"inputs": [[2, 3], [1, 1]], "outputs": [5, 2], "fn_name": "add"}), "def add(a, b): return a + b"),
    "method": (
        json.dumps({"inputs": [[2, 3], [1, 1]], "outputs": [5, 2], "fn_name": "add"}),
        "class Solution:\n    def add(self, a: List[int], b): return a + b",
    ),
    "stdin": (json.dumps([{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "2"}]), "print(sum(map(int, input().split())))"),
    "pytest": (
        "import pytest\nfrom solution import add\n@pytest.mark.parametrize('a,b,c', [(2, 3, 5), (1, 1, 2)])\ndef test_add(a, b, c): assert add(a, b) == c\ndef test_near(): assert add(1, .5) == pytest.approx(1.5)",
        "def add(a, b): return a + b",
    ),
    "unittest": (
        "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(2, 3), 5)\n    def test_b(self): self.assertAlmostEqual(add(1, .5), 1.5)\n    def test_c(self): self.assertIn(add(1, 1), [2])\n    def test_d(self): self.assertTrue(add(1, 1) == 2)",
        "def add(a, b): return a + b",
    ),
    "vector": (
        "v = Vector(3, 4)\nassert v.norm() == 5\nassert abs(v.norm() - 5) < 1e-9\nassert v.pair() == (3, 4)\nassert v.pair() in [(3, 4)]\nassert abs(length(v) - 5) < 1e-9",
        "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def norm(self): return (self.x ** 2 + self.y ** 2) ** .5\n    def pair(self): return self.x, self.y\ndef length(v): return v.norm()",
    ),
    "function": ("assert abs(Sum(2, 3) - 5) < 1e-9\nassert Sum(1, 1) in [2] and 1 - Sum(0, 1) == 0\nr = Sum(3, 3)\nassert r - 6 == 0", "def Sum(a, b): return a + b"),
    "raises": (
        "import pytest\ndef test_a():\n    with pytest.raises(ValueError, match='negative'): root(-1)\ndef test_b():\n    try: root(-4)\n    except ValueError: pass\n    else: assert False\n    assert root(4) == 2\ndef test_c(): assert root(9) == 3",
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** .5",
    ),
    "callback": (
        "seen = []\neach([1, 2], seen.append)\nassert seen == [1, 2]\ndef check(x): assert x in (1, 2)\ndef counted():\n    counted.num = 0\n    def one(x):\n        check(x)\n        counted.num += 1\n    each([1, 2], one)\n    assert counted.num == 2\ncounted()",
        "def each(items, f):\n    for item in items: f(item)",
    ),
    "any error": (
        "def fails(x):\n    try: f(x)\n    except BaseException: return True\nassert fails(-1) and f(2) == 4",
        "def f(x):\n    assert x > 0\n    return x * x",
    ),
    "with": ("with Box(5) as box: assert box.size == 5", "class Box:\n    def __init__(self, size): self.size = size\n    def __enter__(self): return self\n    def __exit__(self, *_): pass"),
    "tests' class": (
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n    def same(self, other): return self.v == other.v and (self.next is other.next or self.next.same(other.next))\nassert reverse(Node(1, Node(2))).same(Node(2, Node(1)))",
        "def reverse(node):\n    done = None\n    while node: node.next, done, node = done, node, node.next\n    return done",
    ),
    "state": ("import random\nrandom.seed(3)\nexpected = sorted(random.random() for _ in range(3))\nrandom.seed(3)\nassert ordered(random.random) == expected", "def ordered(draw): return sorted(draw() for _ in range(3))"),
}  # fmt: skip

ADD = "def add(a, b): return 99\n"
YES = "class Yes:\n    def __eq__(self, other): return True\n    def __getattr__(self, name): return lambda *_: True\n    def __call__(self, *_, **__): return True\n"
YES += "".join(
    f"    def __{name}__(self, *_): return True\n"
    for name in ["ne", "lt", "le", "gt", "ge", "contains", "bool", "isclose"]
)
YES += "".join(
    f"    def __{name}__(self, *_): return 0\n"
    for name in ["sub", "rsub", "abs", "float", "int", "index", "round", "hash", "len", "add"]
)
YES += "    def __iter__(self): return iter([])\n    def __getitem__(self, key): return self\n    def __instancecheck__(self, other): return True\n    def __str__(self): return 'a'\n"
WIRE = "import sys\nwire = sys.modules['rollouts.sandbox.code_tests.wire']\n"
FORGED = WIRE + ADD + "wire.Link._encode = lambda self, value, kept=None: {}\n"
HACKS: list[tuple[str, str]] = [
    # names that the tests use
    *(("add", ADD + f"{name} = lambda *_, **__: True") for name in ("abs", "sorted", "len", "isinstance", "print", "__import__", "__build_class__")),
    *(("add", ADD + code) for code in ("__builtins__ = {'abs': lambda x: 0}", "__builtins__['abs'] = lambda x: 0", "__name__ = __file__ = 'x'")),
    ("add", ADD + "class math: isclose = staticmethod(lambda *_: True)"),
    ("add", ADD + "class K(str):\n    def startswith(self, *_): return False\n    __hash__ = str.__hash__\nglobals()[K('__builtins__')] = {'abs': lambda x: 0}"),
    *(("unimported", ADD + "def text(): return 'zz'\n" + code) for code in (
        "class math: isclose = staticmethod(lambda *_: True)", "class Counter:\n    def __init__(self, _): pass\n    def __eq__(self, other): return True", "def isclose(*_): return True", "class np: allclose = staticmethod(lambda *_: True)", "import math\nmath.isclose = lambda *_: True")),
    *(("unimported too", f"def root(x): return 99\n{code}") for code in (
        "def sqrt(x): return 99", "def approx(x): return 99", "class raises:\n    def __init__(self, _): pass\n    def __enter__(self): pass\n    def __exit__(self, *_): pass", "def allclose(*_): return True\narray_equal = allclose")),
    *(("star", ADD + code) for code in ("def isclose(*_): return True", "class math: isclose = staticmethod(lambda *_: True)", "def near(*_): return True", "__all__ = ['add', 'near', 'math', 'isclose']\ndef near(*_): return True\nmath = isclose = near")),
    *(("json", ADD + f"def {name}(*_): return {value}") for name, value in (("passes", "True"), ("as_json", "[5, 2]"), ("hasattr", "1"), ("getattr", "lambda *_: 5"))),
    *(("json", ADD + f"{name} = {value}") for name, value in (("calls", "[]"), ("name", "'add'"), ("json", "__import__('types').SimpleNamespace(loads=lambda _: [])"))),
    ("pytest", ADD + "import pytest\npytest.approx = lambda x: 99\nclass pytest: raises = approx = mark = None"),
    # Python's own, replaced where the code runs
    *(("add", ADD + code) for code in (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.sorted = lambda x: [1, 3]", "import math\nmath.isclose = lambda *_: True", "import sys, types\nsys.modules['math'] = types.SimpleNamespace(isclose=lambda *_: True)",
        "import builtins\nbuiltins.__import__ = lambda *_: None", "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})", "import ctypes\nctypes.memset(id(5) + 24, 99, 1)", "import operator\noperator.eq = lambda *_: True", "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)")),
    ("unittest", ADD + "import unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertTrue = unittest.TestCase.assertIn = lambda *_: None\nunittest.main = lambda: None"),
    ("pytest", ADD + "import _pytest.runner, _pytest.python\n_pytest.runner.call_and_report = _pytest.python.Function.runtest = lambda *_: None"),
    ("pytest", ADD + "from _pytest.outcomes import Skipped, XFailed\ndef add(a, b): raise Skipped('x')"),
    *((task, f"import {module}\ndef add(a, b): raise {error}") for task in ("pytest", "unittest") for module, error in (("unittest", "unittest.SkipTest('x')"), ("pytest", "pytest.skip.Exception('x')"), ("pytest", "pytest.exit.Exception('x', 0)"), ("pytest", "pytest.xfail.Exception('x')"))),
    ("pytest", "class FixtureLookupError(Exception): argname = 'x'\ndef add(a, b): raise FixtureLookupError('x')"),
    # results that are no data
    *((task, YES + "def add(a, b): return Yes()\ndef text(): return Yes()") for task in ("add", "unimported", "star", "json", "pytest", "unittest")),
    ("list", YES + "def f(x): return Yes()"),
    ("list", "class L(list):\n    def __eq__(self, other): return True\n    def __contains__(self, x): return True\n    def index(self, x): return 1\ndef f(x): return L([L([0])])"),
    ("method", YES + "class Solution:\n    def add(self, a, b): return Yes()"),
    *(("add", f"class N({kind}):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    __lt__ = __eq__\n    __hash__ = {kind}.__hash__\ndef add(a, b): return N('99')") for kind in ("int", "float", "str")),
    ("add", "import numpy as np\nclass A(np.ndarray):\n    def __eq__(self, o): return True\ndef add(a, b): return np.zeros(1).view(A)"),
    ("add", "from unittest.mock import ANY, MagicMock\ndef add(a, b): return ANY if a == 2 else MagicMock()"),
    ("add", "class add:\n    def __new__(cls, *_): return object.__new__(cls)\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __eq__(self, other): return True\n    def __float__(self): return 99."),
    ("function", "class Sum:\n    def __init__(self, *_): pass\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __contains__(self, x): return True\n    def __eq__(self, other): return True"),
    ("vector", YES + "class Vector(Yes):\n    def __init__(self, *_): pass\n    def norm(self): return self\n    def pair(self): return self"),
    ("vector", YES + "class Vector(Yes):\n    def __init__(self, *_): pass\n    norm = pair = lambda self: None\nlength = Vector"),
    ("vector", YES + "class Vector:\n    def __init__(self, *_): pass\n    def norm(self): return Yes()\n    pair = norm"),
    ("with", "class Box:\n    def __init__(self, size): self.size = 0\n    def __enter__(self): return self\n    def __exit__(self, *_): return True"),
    # errors
    *(("raises", f"class ValueError(BaseException): pass\ndef root(x): {code}") for code in ("raise ValueError('negative')", "return __import__('os')._exit(0)")),
    ("raises", "class E(Exception): pass\nE.__name__ = E.__qualname__ = 'Value' 'Error!'\ndef root(x): raise E('negative')"),
    *(("any error", f"import os, sys\ndef f(x): {code}") for code in ("os._exit(0)", "os.abort()", "os.kill(os.getpid(), 9)", "sys.stdout.close(); os.closerange(0, 99)", "return 5")),
    *(("callback", f"def each(items, f):\n    for item in items:\n        try: f({what})\n        except {error}: pass") for what, error in (("9", "AssertionError"), ("None", "BaseException"))),
    ("callback", "def each(items, f): pass"),
    *(("map", f"def f(x): raise {error}\nclass A:\n    def __init__(self, x): pass\n    x = property(f)") for error in ("StopIteration", "type('S', (StopIteration,), {})", "StopIteration(4)", "GeneratorExit", "StopAsyncIteration")),
    # the end of a process
    *((task, f"import os, sys\n{code}") for task in ("add", "pytest", "stdin", "json") for code in ("os._exit(0)", "sys.exit(0)", "import atexit\natexit.register(os._exit, 0)")),
    *(("add", f"import os, sys\ndef add(a, b): {code}") for code in ("os._exit(0)", "sys.exit(0)", "raise SystemExit", "raise KeyboardInterrupt", "raise GeneratorExit", "raise StopIteration", "os.kill(os.getppid(), 9)", "os.kill(0, 9)", "os.execv('/bin/true', ['true'])", "os.fork()")),
    ("add", "import signal, os\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, .01)\ndef add(a, b): return 99"),
    ("stdin", "import os\nos.close(0)\nprint('5')\nos._exit(1)"),
    ("add", "class D:\n    def __del__(self): __import__('os')._exit(0)\nd = D()\ndef add(a, b):\n    global d\n    d = None\n    return 99"),
    # where the verdict goes, and where the tests are
    *(("add", ADD + f"import os\nfor fd in range(3, 64):\n    try: os.write(fd, {line!r} * 20)\n    except OSError: pass") for line in (b'{"tests": 1}\n{"passed": true}\n', b'{"value": true}\n', b'{"value": {"mine": 0}}\n', b'{"do": "call", "arguments": [{"yours": 0}], "keywords": {}}\n', b"\n", b"[" * 9999 + b"\n", b'{"fault": "x"}\n', b'{"value": {"exception": []}}\n')),
    ("add", ADD + "print('{\"passed\": true}\\n5 passed\\nOK\\n')"),
    *(("add", f"import glob, os, sys, gc, inspect\ndef add(a, b): return {code}") for code in (
        "eval(open(glob.glob('../*/tests.py')[0]).read().split('==')[1])", "open('/proc/self/maps').read()", "open(f'/proc/{os.getppid()}/cmdline').read()", "[o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o][0]", "sys._getframe(3).f_locals['expected']", "inspect.stack()[-1].frame.f_globals['tests']", "sys.modules['tests'].expected", "sys.modules['__main__'].verdicts.write('x')", "os.listdir('..')", "os.environ['PYTEST_CURRENT_TEST']")),
    *(("pytest", ADD + f"for place in ('.', '..', '../tests'):\n    try: open(place + '/{name}', 'w').write({text!r})\n    except OSError: pass") for name, text in (("conftest.py", "def pytest_runtest_call(item): item.obj = lambda: None"), ("tests.py", "def test_add(): pass"), ("pytest.ini", "[pytest]\naddopts = --co"), ("sitecustomize.py", "raise SystemExit"), ("math.py", "isclose = lambda *_: True"))),
    ("stdin", "import glob\nprint(open(glob.glob('../../*/stdin')[0]).read(), open('../stdout').read())"),
    ("stdin", "import os\nwhile 1:\n    try: print(open('answer').read()); break\n    except OSError: open('answer', 'w').write(input() + 'x')"),
    ("add", ADD + "import threading, os, time\ndef late():\n    while 1:\n        for fd in range(3, 64):\n            try: os.write(fd, b'{\"value\": true, \"passed\": true}\\n')\n            except OSError: pass\nthreading.Thread(target=late, daemon=True).start()"),
    # what crosses, forged
    ("add", FORGED),
    *(("add", FORGED.replace("{}", forged)) for forged in ('{"type": "object"}', '{"error": [["_pytest.outcomes.Skipped"], [], {}, ""]}', '{"mine": True}', '{"yours": 0}', '{"kept": 0}', '{"module": "os"}', '{"namedtuple": ["N", ["x"], [99]]}', '{"Counter": [[1, {"mine": 0}]]}')),
    ("state", "def ordered(draw): return sorted(getattr(draw, '__self__').sample([0, 1], 2))"),
    ("state", "def ordered(draw): return draw.__globals__['expected']"),
    ("state", WIRE + "def ordered(draw): return draw._link.ask('getattr', '{0.__self__}', 'format')(draw)"),
    ("callback", WIRE + "def each(items, f): return f._link.ask('getattr', f, '__globals__')['seen'].extend([1, 2])"),
    ("callback", WIRE + "def each(items, f): f._link.ask('getattr', f, '__self__'); f._link.ask('setattr', f, 'num', 2)"),
    ("tests' class", "def reverse(node):\n    node.same = lambda other: True\n    return node"),
    ("tests' class", "def reverse(node):\n    type(node).same = node.same.__func__.__code__ = None\n    return node"),
    ("tests' class", YES + "def reverse(node): return Yes()"),
    ("tests' class", YES + "def reverse(node):\n    node.v = node.next = Yes()\n    return node"),
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_code_that_solves_the_task_is_worth_one(task: str):
    tests, right = TASKS[task]
    assert unit_tests(f"```python\n{right}\n```", tests, 60.0) == 1.0


@pytest.mark.parametrize(("task", "code"), HACKS)
def test_a_hack_is_worth_nothing(task: str, code: str):
    assert unit_tests(f"```python\n{code}\n```", TASKS[task][0], 4.0) == 0.0


ERRORS = [
    *("ImportError('x', name='numpy')", "ModuleNotFoundError('x')", "MemoryError", "RecursionError", "OSError(2, 'x')", "FileNotFoundError", "SystemExit(3)"),
    *("KeyboardInterrupt", "UnicodeDecodeError('utf-8', b'', 0, 1, '')", "ExceptionGroup('x', [ValueError()])", "BaseExceptionGroup('x', [KeyboardInterrupt()])"),
    *("SystemError", "BrokenPipeError", "EOFError", "TimeoutError", "type('E', (BaseException,), {'__str__': lambda self: 1 / 0})", "type('E', (Exception,), {'args': property(lambda self: 1 / 0)})"),
]  # fmt: skip
CRASHES: list[tuple[str, str]] = [
    *((task, f"def add(a, b): raise {error}") for task in ("add", "pytest") for error in ERRORS),
    *((task, f"raise {error}") for task in ("json", "stdin") for error in ERRORS[:7]),
    *((task, "import numpy_of_mine") for task in ("add", "json", "stdin", "pytest")),
    *(("add", f"def add(a, b):\n    {code}") for code in (
        "return add(a, b)", "x = []\n    x.append(x)\n    return x", "a = [[]]\n    for _ in range(10**5): a = [a]\n    return a", "return 'x' * 2**30", "return [0] * 2**28", "return iter(int, 1)", "return 10**10**6", "while True: print('x' * 10**6)",
        "while True: pass", "import sys\n    sys.setrecursionlimit(10**9)\n    return (lambda f: f(f))(lambda f: f(f))", "import os\n    os.closerange(0, 99)", "import resource\n    resource.setrlimit(resource.RLIMIT_AS, (0, 0))\n    return [0] * 99999", "open('x', 'w').write('x' * 2**25)", "return __import__('ctypes').string_at(0)")),
    *(("stdin", code) for code in ("print('\\n' * (2**24 - 9))", "while True: print('x' * 99999)", "while True: pass", "import sys\nsys.stdout.buffer.write(b'\\xff' * 2**23)", "x = [0] * 2**28", "def f(): f()\nf()", "import ctypes\nctypes.string_at(0)", "raise ValueError('\\udc80')", ")(", "\0")),
]  # fmt: skip


@pytest.mark.parametrize(("task", "code"), CRASHES)
def test_what_code_raises_or_uses_up_is_its_own_failure_and_no_error_of_the_reward(task: str, code: str):
    assert unit_tests(f"```python\n{code}\n```", TASKS[task][0], 2.0) == 0.0


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        ("import importlib\nname = f()\nassert importlib.import_module(name).x", "def f(): return 'no_such_module'"),
        ("import pytest\n@pytest.mark.parametrize('x', f())\ndef test_a(x): assert x == 1", "def f(): return []"),
        (
            "import pytest\nimport solution\nif hasattr(solution, 'f'):\n    p = pytest\nelse:\n    p = pytest\ndef test_a():\n    if f(1) == 2: p.skip('x')\n    assert f(1) == 1",
            "def f(x): return 2",
        ),
        ("assert g(iter(f())) == 6", "def f(): return [1]\ndef g(x): return 5"),
    ],
)
def test_code_cannot_choose_that_it_is_not_scored(tests: str, code: str):
    assert unit_tests(f"```python\n{code}\n```", tests) == 0.0


async def test_a_built_in_reward_that_a_reply_makes_endless_or_too_large_is_0():
    async with RewardPool(num_processes=1, timeout=4.0, memory_gb=1.0) as pool:
        with pytest.raises(RewardTimeout):  # no reply so far: the machine may be to blame
            await pool.score(matches, "a" * 99 + "b", r"^(a+)+$")
        assert (await pool.score(matches, "a", "a")).reward == 1.0
        for reward, reply, other in (
            (matches, "a" * 99 + "b", r"^(a+)+$"),
            (math_answer, r"\boxed{9^{9^{9^{9}}}}", "2"),
            (unit_tests, "```\n" + "`" * 99_999, TASKS["add"][0]),
            (unit_tests, "```py\nwhile 1: pass\n```", TASKS["add"][0]),
        ):
            assert (await pool.score(reward, reply, other)).reward == 0.0
        with pytest.raises(RewardFailed):  # a pattern that is none is the user's
            await pool.score(matches, "a", "(")
