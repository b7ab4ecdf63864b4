"""Right code is worth 1 and wrong code 0, in every kind of fence and under every form of tests that data sets have."""

# ruff: noqa: E501 - tables, one line a case
from __future__ import annotations

import base64
import json
import pickle
import textwrap
import zlib

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
T = "class T:\n    def __init__(s, x): s.x = x\n    def __mod__(s, n): return {}\n    def __divmod__(s, n): return s.x // n, {}"
V = "class V:\n    def __init__(s, x): s.x = x\n    def __mul__(s, n): return V({})\n    def __eq__(s, o): return isinstance(o, V) and s.x == o.x"
VALUE = "import collections, datetime\ndef f(): return {}"
RAISES = (
    "import pytest\nimport solution\ndef test_f():\n    with pytest.raises(solution.Odd, match='odd 3'): solution.f(3)"
)


def _packed(tests: object) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


FORMS: list[tuple[object, str, str]] = [
    (_packed([{"input": "2 3", "output": "5", "testtype": "stdin"}, {"input": "0 1\n", "output": "1\n"}]), "print(sum(map(int, input().split())))", "print(7)"),
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
    ("assert isinstance(T(7), T) and T(7) % 4 == 3\nassert divmod(T(7), 2) == (3, 1)", T.format("s.x % n", "s.x % n"), T.format("0", "0")),
    ("import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(V(1) * 2, V(2))", V.format("s.x * n"), V.format("0")),
    ("assert abs(Sum(2, 3) - 5) < 1e-9 and Sum(1, 1) - 2 == 0", "def Sum(a, b): return a + b", "class Sum:\n    def __init__(s, *_): pass\n    def __sub__(s, _): return 0"),
    ("assert float(C()) == 0.5 and abs(C()) == 1", "class C:\n    def __float__(self): return 0.5\n    def __abs__(self): return 1", "class C: pass"),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "right", "wrong"), FORMS)
def test_right_code_is_worth_one_and_wrong_code_nothing_under_every_form(tests: object, right: str, wrong: str):
    text = tests if isinstance(tests, str) else json.dumps(tests)
    assert unit_tests(f"```python\n{right}\n```", text) == 1.0
    assert unit_tests(f"```python\n{wrong}\n```", text) == unit_tests("I cannot.", text) == 0.0


USES: list[tuple[str, str]] = [
    # what tests do with code: it prints, is given functions, iterators and objects, raises, keeps state, and is compared
    ("def test_a(capsys):\n    hello('x')\n    assert capsys.readouterr().out == 'hello x\\n'", "def hello(n): print('hello', n)"),
    ("import io, sys\nsys.stdout = io.StringIO()\nhello('x')\nassert sys.stdout.getvalue() == 'hello x\\n'", "def hello(n): print('hello', n)"),
    ("import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out): hello('x')\nassert out.getvalue() == 'hello x\\n'", "def hello(n): print('hello', n)"),
    ("assert apply(lambda x: x + 1, 2) == 3", "def apply(f, x): return f(x)"),
    ("assert apply(len, 'abc') == 3 and apply(int, '3') == 3", "def apply(f, x): return f(x)"),
    ("calls = []\n@twice\ndef g(x):\n    calls.append(x)\n    return x\nassert g(3) == 3 and calls == [3, 3]", "def twice(f):\n    def inner(*a):\n        f(*a)\n        return f(*a)\n    return inner"),
    ("def gen():\n    yield 1\n    yield 2\nassert total(gen()) == 3 and total(iter([1, 2])) == 3", "def total(x): return sum(x)"),
    ("assert sorted_by([3, 1], key=lambda x: -x) == [3, 1]", "def sorted_by(x, key): return sorted(x, key=key)"),
    ("assert issubclass(Dog, Animal) and isinstance(Dog(), Animal) and not issubclass(Animal, Dog)", "class Animal: pass\nclass Dog(Animal): pass"),
    ("assert Color.RED is Color.RED and best() is Color.RED and best() == Color.RED and Color.RED.value == 1", "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef best(): return Color.RED"),
    ("assert Single() is Single()", "class Single:\n    it = None\n    def __new__(cls):\n        cls.it = cls.it or object.__new__(cls)\n        return cls.it"),
    ("import pytest, json\ndef test_a():\n    with pytest.raises(json.JSONDecodeError): load('{')\ndef test_b():\n    with pytest.raises(KeyError) as e: key('a')\n    assert e.value.args == ('a',) and str(e.value) == \"'a'\"", "import json\ndef load(x): return json.loads(x)\ndef key(x): return {}[x]"),
    ("import pytest\nfrom solution import Low, pay\ndef test_a():\n    with pytest.raises(Low) as e: pay(5)\n    assert e.value.missing == 5 and str(e.value) == 'low: 5'", "class Low(Exception):\n    def __init__(self, missing):\n        super().__init__()\n        self.missing = missing\n    def __str__(self): return f'low: {self.missing}'\ndef pay(x): raise Low(x)"),
    ("import pytest\nfrom solution import Both, f\ndef test_a():\n    with pytest.raises(ValueError): f()\n    with pytest.raises(KeyError): f()\n    with pytest.raises(Both): f()", "class Both(KeyError, ValueError): pass\ndef f(): raise Both('x')"),
    ("g = [[0, 0], [0, 0]]\nrow = g[1]\nmark(g, at=[1, 1])\nassert row == [0, 1] and g[1] is row", "def mark(g, at): g[at[0]][at[1]] = 1"),
    ("a, b = [3], [1]\nx = [a, b]\nsort(x)\nassert x == [[1], [3]] and a == [3] and x[1] is a", "def sort(x): x.sort()"),
    ("import sys\ndef test_exit():\n    import pytest\n    with pytest.raises(SystemExit) as e: main()\n    assert e.value.code == 2", "import sys\ndef main(): sys.exit(2)"),
    ("assert Vector(1, 2) * 2 == Vector(2, 4) and 2 * Vector(1, 2) == Vector(2, 4) and 1 in Vector(1, 2) and not Vector(0, 0)\nassert {Vector(1, 1): 3}[Vector(1, 1)] == 3 and len({Vector(1, 1), Vector(1, 1)}) == 1", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Vector:\n    x: int\n    y: int\n    def __mul__(self, n): return Vector(self.x * n, self.y * n)\n    __rmul__ = __mul__\n    def __contains__(self, n): return n in (self.x, self.y)\n    def __bool__(self): return bool(self.x or self.y)"),
    ("class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\ndef to_list(n):\n    out = []\n    while n: out, n = out + [n.val], n.next\n    return out\nassert to_list(Solution().rev(ListNode(1, ListNode(2)))) == [2, 1]", "class Solution:\n    def rev(self, head):\n        prev = None\n        while head:\n            nxt = head.next\n            head.next = prev\n            prev, head = head, nxt\n        return prev"),
    ("class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\ndef to_list(n):\n    out = []\n    while n: out, n = out + [n.val], n.next\n    return out\nassert to_list(double(ListNode(1, ListNode(2)))) == [2, 4]", "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\ndef double(n): return n and ListNode(n.val * 2, double(n.next))"),
    ("acc = Account(5)\nacc.deposit(5)\nacc.limit = 3\nassert acc.balance == 10 and acc.limit == 3 and hasattr(acc, 'deposit') and not hasattr(acc, 'x') and add.__name__ == 'add'\nassert make(3)(4) == 7", "class Account:\n    def __init__(self, b): self.balance = b\n    def deposit(self, x): self.balance += x\ndef add(): pass\ndef make(a): return lambda b: a + b"),
    ("from decimal import Decimal\nassert total(['1.1', '2.2']) == Decimal('3.3')\nassert 2 in keys({2: 1}) and list(keys({1: 2})) == [1] and list(zipped([1], [2])) == [(1, 2)]", "from decimal import Decimal\ndef total(x): return sum(map(Decimal, x))\ndef keys(d): return d.keys()\ndef zipped(a, b): return zip(a, b)"),
    ("import numpy as np\na = np.array([1, 2, 3])\nassert total(a) == 12 and (double(a) == np.array([2, 4, 6])).all() and double(a[:0]).shape == (0,)\nput(a)\nassert a.tolist() == [1, 0, 0] and double(np.float32([1])).dtype == np.float32", "def total(x): return int((x * 2).sum())\ndef double(x): return x * 2\ndef put(x): x[x > 1] = 0"),
    ("assert zeros(2).shape == (2, 2)", "import numpy as np\ndef zeros(n): return np.zeros((n, n))"),
    ("from uuid import UUID\nfrom pathlib import Path\nassert same(UUID(int=5)) == UUID(int=5) and ending(Path('a/b.txt')) == '.txt'", "def same(x): return x\ndef ending(path): return path.suffix"),
    ("for case in ['add(2, 3) == 5']: assert eval(case)", "def add(a, b): return a + b"),
    ("import math\nassert math.isclose(root(4), 2)\nassert fib.cache_info().hits == 0 and fib(3) == 2", "import functools\ndef root(x): return x ** .5\n@functools.lru_cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)"),
    ("import io\nassert count(io.StringIO('a\\nb')) == 2 and first(__import__('re').compile('a+'), 'baa') == 'aa'", "def count(f): return len(f.readlines())\ndef first(p, s): return p.search(s).group()"),
    ("import unittest\nfrom solution import root\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError): root(-1)\n        self.assertRaisesRegex(ValueError, 'neg', root, -1)\n        self.assertAlmostEqual(root(2), 1.41421356, places=5)\n        self.assertIsNone(root(None))\n        self.assertCountEqual([root(1), root(4)], [2, 1])", "def root(x):\n    if x is None: return None\n    if x < 0: raise ValueError('neg')\n    return x ** .5"),
    # a list, dictionary or set that both have, a global of the code, and what is set in Python itself
    ("f()\nassert count == 1", "count = 0\ndef f():\n    global count\n    count += 1"),
    ("f(1)\nf(2)\nassert seen == [1, 2]", "seen = []\ndef f(x): seen.append(x)"),
    ("from solution import seen, f\nf(1)\nassert seen == [1]", "seen = []\ndef f(x): seen.append(x)"),
    ("import solution\nsolution.f(1)\nassert solution.seen == [1]", "seen = []\ndef f(x): seen.append(x)"),
    ("cache.clear()\nf(3)\nassert 3 in cache", "cache = {1: 2}\ndef f(x): cache[x] = x"),
    ("global_list.append(1)\nassert total() == 1", "global_list = []\ndef total(): return sum(global_list)"),
    ("stack.push(1)\nassert stack.pop() == 1", "class S:\n    def __init__(self): self.x=[]\n    def push(self,v): self.x.append(v)\n    def pop(self): return self.x.pop()\nstack = S()"),
    ("config['debug'] = True\nassert debug() is True", "config = {'debug': False}\ndef debug(): return config['debug']"),
    ("import solution\ndef test_a():\n    solution.seen.clear()\n    solution.f(1)\n    assert solution.seen == [1]", "seen = [5]\ndef f(x): seen.append(x)"),
    ("import solution\ndef test_a():\n    solution.registry['x'] = lambda: 3\n    assert solution.call('x') == 3", "registry = {}\ndef call(n): return registry[n]()"),
    ("register('a', lambda: 3)\nassert handlers['a']() == 3", "handlers = {}\ndef register(n, f): handlers[n] = f"),
    ("import random\nrandom.seed(1)\na = shuffled([1,2,3,4,5])\nrandom.seed(1)\nassert shuffled([1,2,3,4,5]) == a", "import random\ndef shuffled(x):\n    x = x[:]\n    random.shuffle(x)\n    return x"),
    ("import random\nrandom.seed(42)\nx = random.random()\nrandom.seed(42)\nassert draw() == x", "import random\ndef draw(): return random.random()"),
    ("import numpy as np\nnp.random.seed(0)\na = np.random.rand(3)\nnp.random.seed(0)\nassert (draw(3) == a).all()", "import numpy as np\ndef draw(n): return np.random.rand(n)"),
    ("import sys\nsys.setrecursionlimit(10000)\nassert depth(5000) == 5000", "def depth(n): return 0 if n == 0 else 1 + depth(n-1)"),
    ("x = [1,2]\nassert same(x) is x", "def same(x): return x"),
    ("x = [1,2]\ny = keep(x)\ny.append(3)\nassert x == [1,2,3]", "def keep(x): return x"),
    ("x = [1,2]\nh = Holder(x)\nx.append(3)\nassert h.total() == 6", "class Holder:\n    def __init__(self,x): self.x=x\n    def total(self): return sum(self.x)"),
    ("h = Holder()\nh.items.append(3)\nassert h.total() == 3", "class Holder:\n    def __init__(self): self.items=[]\n    def total(self): return sum(self.items)"),
    ("h = Holder()\nh.items['a'] = 3\nassert h.total() == 3 and len(h.items) == 1", "class Holder:\n    def __init__(self): self.items={}\n    def total(self): return sum(self.items.values())"),
    ("g = Grid()\ng.cells[0][1] = 5\nassert g.total() == 5", "class Grid:\n    def __init__(self): self.cells=[[0,0],[0,0]]\n    def total(self): return sum(map(sum, self.cells))"),
    ("a = f()\nb = f()\nassert a is b", "L=[]\ndef f(): return L"),
    ("a = get()\na.append(1)\nassert get() == [1]", "L=[]\ndef get(): return L"),
    ("import array\nx = array.array('i', [1,2])\ndouble(x)\nassert list(x) == [2,4]", "def double(x):\n    for i in range(len(x)): x[i] *= 2"),
    ("from collections import defaultdict\nd = defaultdict(list)\nput(d, 'a', 1)\nassert d['a'] == [1]", "def put(d, k, v): d[k].append(v)"),
    ("import types\nn = types.SimpleNamespace(a=1)\nbump(n)\nassert n.a == 2", "def bump(n): n.a += 1"),
    ("import threading\nt = [threading.Thread(target=inc) for _ in range(4)]\n[x.start() for x in t]\n[x.join() for x in t]\nassert value() == 4", "n=0\ndef inc():\n    global n\n    n+=1\ndef value(): return n"),
    ("x = [1]\nx.append(x)\nassert f(x) == 2", "def f(x): return len(x)"),
    ("import solution\nassert 'add' in dir(solution) and callable(solution.add)", "def add(a,b): return a+b"),
    ("assert Point(1).__class__.__name__ == 'Point' and type(Point(1)) is Point", "class Point:\n    def __init__(self,x): self.x=x"),
    ("a = Acc()\na += 5\nassert a.v == 5", "class Acc:\n    v=0\n    def __iadd__(self, n):\n        self.v += n\n        return self"),
    ("m = M([[1,2],[3,4]])\nassert (m @ m).rows == [[7,10],[15,22]]", "class M:\n    def __init__(self,r): self.rows=r\n    def __matmul__(self,o): return M([[sum(a*b for a,b in zip(r,c)) for c in zip(*o.rows)] for r in self.rows])"),
    ("b = B(6)\nassert (b & B(3)).v == 2 and (b | B(1)).v == 7 and (b << 1).v == 12 and (~b).v == -7", "class B:\n    def __init__(self,v): self.v=v\n    def __and__(s,o): return B(s.v&o.v)\n    def __or__(s,o): return B(s.v|o.v)\n    def __lshift__(s,n): return B(s.v<<n)\n    def __invert__(s): return B(~s.v)"),
    ("assert list(reversed(L([1,2]))) == [2,1]", "class L:\n    def __init__(self,x): self.x=x\n    def __reversed__(self): return reversed(self.x)"),
    ("x = L([1,2,3])\nassert x[1:] == [2,3] and x[-1] == 3 and 2 in x and len(x) == 3 and [*x] == [1,2,3]", "class L:\n    def __init__(self,x): self.x=x\n    def __getitem__(self,i): return self.x[i]\n    def __len__(self): return len(self.x)"),
    ("from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as e: assert list(e.map(sq, range(5))) == [0,1,4,9,16]", "def sq(x): return x*x"),
    ("import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nfrom solution import add\ndef test_a(): assert add(1,1)==2", "def add(a,b): return a+b"),
    ("import os\nassert join('a','b') == os.path.join('a','b')", "import os\ndef join(a,b): return os.path.join(a,b)"),
    ("it = It()\nassert it.following() == 1\ntry: it.following()\nexcept StopIteration: pass\nelse: assert False", "class It:\n    def __init__(self): self.x = iter([1])\n    def following(self): return next(self.x)"),
    ("fs = FileSystem()\nfs.mkdir('/a')\nassert fs.ls('/') == ['a'] and fs.exists('/a')", "class FileSystem:\n    def __init__(s): s.d=[]\n    def mkdir(s,p): s.d.append(p[1:])\n    def ls(s,p): return s.d\n    def exists(s,p): return p[1:] in s.d"),
    ("assert type(f()) is dict and type(f()) == dict and isinstance(f(), dict)", "def f(): return {'a':1}"),
    ("r = f()\nassert r['zz'] == 0", "from collections import defaultdict\ndef f(): return defaultdict(int)"),
    ("def setup_function():\n    global s\n    s = Stack()\ndef test_a():\n    s.push(1)\n    assert s.items == [1]", "class Stack:\n    def __init__(s): s.items=[]\n    def push(s,x): s.items.append(x)"),
    ("count = 0\ndef test_a():\n    global count\n    count = 1\n    assert add(1,1)==2", "def add(a,b): return a+b"),
    ("d = {}\nput(d, 'a', [1])\nd['a'].append(2)\nassert get(d, 'a') == [1, 2]", "def put(d,k,v): d[k]=v\ndef get(d,k): return d[k]"),
    ("c = Cache()\nx = [1]\nc.put('a', x)\nx.append(2)\nassert c.get('a') == [1,2] and c.get('a') is x", "class Cache:\n    def __init__(s): s.d={}\n    def put(s,k,v): s.d[k]=v\n    def get(s,k): return s.d[k]"),
    ("a = [[1]]\nb = shallow(a)\nb[0].append(2)\nassert a == [[1, 2]]\nb.append(3)\nassert a == [[1,2]]", "def shallow(x): return list(x)"),
    ("g = Graph()\ng.edges['a'] = {'b'}\ng.edges['a'].add('c')\nassert g.degree('a') == 2", "class Graph:\n    def __init__(s): s.edges={}\n    def degree(s,k): return len(s.edges[k])"),
    ("out = []\nrun(out.append)\nassert out == [1]", "def run(f): f(1)"),
    ("m = {}\nrun(m.update)\nassert m == {'a': 1}", "def run(f): f(a=1)"),
    ("a, b = f()\na.append(1)\nassert b == [1]", "def f():\n    x=[]\n    return x, x"),
    ("m = [[0]*2]*2\nput(m)\nassert m == [[1,0],[1,0]]", "def put(m): m[0][0]=1"),
    ("import random\nr = random.Random(3)\nassert f(r) >= 0", "def f(r): return r.random()"),
    ("class T:\n    x = 1\nT.x = 2\nassert f(T) == 2", "def f(c): return c.x"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(type(P(1)).__name__, 'P')\n        self.assertIsInstance(P(1), P)", "class P:\n    def __init__(s,x): s.x=x"),
    ("e = None\ntry: f()\nexcept Exception as err: e = err\nassert type(e).__name__ == 'Odd' and e.__class__ is not ValueError", "class Odd(ValueError): pass\ndef f(): raise Odd('x')"),
    ("import pytest\n@pytest.fixture(autouse=True)\ndef clean():\n    registry.clear()\n    yield\ndef test_a():\n    register('a')\n    assert registry == ['a']\ndef test_b():\n    register('b')\n    assert registry == ['b']", "registry = []\ndef register(x): registry.append(x)"),
    ("reset()\nassert counter() == 1 and counter() == 2 and total == 2", "total = 0\ndef reset():\n    global total\n    total = 0\ndef counter():\n    global total\n    total += 1\n    return total"),
    ("p = Point(1)\np.tags.append('x')\np.meta['k'] = {'z': [1]}\np.meta['k']['z'].append(2)\nassert p.show() == (['x'], {'k': {'z': [1, 2]}})", "class Point:\n    def __init__(s,x): s.tags=[]; s.meta={}\n    def show(s): return s.tags, s.meta"),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "code"), USES)
def test_what_tests_do_with_code_has_its_effect_across_the_two_processes(tests: str, code: str):
    assert unit_tests(f"```python\n{code}\n```", tests) == 1.0


NOT_ACROSS = [
    # right in one process
    ("def test_a(tmp_path):\n    p = tmp_path/'x.txt'\n    p.write_text('2 3')\n    assert add_file(p) == 5", "tmp_path"),
    ("import os\nwith open('in.txt','w') as f: f.write('1 2')\nassert total('in.txt') == 3\nos.remove('in.txt')", "open"),
    ("from pathlib import Path\nsave('out.txt', 'hi')\nassert Path('out.txt').read_text() == 'hi'", "read_text"),
    ("import os\nsave('out.txt')\nassert os.path.exists('out.txt')", "os.path.exists"),
    ("import os\nmake('d')\nassert os.path.isdir('d') and os.listdir('d') == []", "os.path.isdir"),
    ("import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute('create table t(x)')\nc.execute('insert into t values (3)')\nassert total(c) == 3", "sqlite3"),
    ("import os\nos.environ['KEY'] = '5'\nassert key() == '5'", "os.environ"),
    ("import shutil\nmake('d')\nshutil.rmtree('d')\nassert add(1,1)==2", "shutil"),
    ("import solution\nsolution.LIMIT = 3\nassert solution.f() == 3", "solution"),
    ("import subprocess, sys\nout = subprocess.run([sys.executable, 'solution.py'], capture_output=True, text=True, input='1 2').stdout\nassert out.strip() == '3'", "subprocess"),
    ("import typing\nassert typing.get_type_hints(add) == {}", "typing.get_type_hints"),
    ("assert add.__code__.co_argcount == 2", "__code__"),
    ("assert vars(Point(1)) == {'x': 1}", "vars"),
    ("import dataclasses\nassert dataclasses.asdict(P(1)) == {'x':1}", "dataclasses.asdict"),
    ("import warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    f()\n    assert len(w) == 1", "catch_warnings"),
    ("import pytest\ndef test_a():\n    with pytest.warns(UserWarning): f()", "pytest.warns"),
    ("import time\ntime.sleep = lambda s: None\nassert f() == 1", "time"),
    ("def fake(self): return 9\nAccount.interest = fake\nassert Account(3).total() == 9", "Account"),
    ("import types\nassert isinstance(gen(), types.GeneratorType)", "types.GeneratorType"),
    ("from os import remove\nassert add(1, 1) == 2", "os.remove"),
    ("class T:\n    def test_a(self):\n        with self.assertLogs(): add(1, 1)", "self.assertLogs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([{"input": "1", "output": "1", "testtype": "functional"}], "do not name it"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "one argument in JSON a line"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f g"}, "name one function"),
        ({"inputs": [1], "outputs": ["1"]}, "JSON tests must be"),
        ("async def test_a(): assert add(1, 1) == 2", "line 1: test_a is a coroutine"),
        ("x = 1\ndef test_a(caplog):\n    add(1, 1)", "line 2: the tests use caplog: the code under test runs in"),
        ("import io, sys\nsys.stdin = io.StringIO()\nassert add(1, 1) == 2", "line 2: the tests use sys: "),
        ("class C(Base): pass\nassert C()", "line 1: C derives from a class of the code"),
        ("assert pow(2, 3) == 8", "use no name that the code could define"),
        *(
            (f"import pytest, unittest, solution\n{skip}", "line [23]: the tests decide while they run")
            for skip in (
                "def test_a():\n    if add(1, 1) != 2: pytest.skip('x')",
                "@pytest.mark.skipif(not hasattr(solution, 'add'), reason='x')\ndef test_a(): assert add(1, 1) == 2",
                "def test_a():\n    unittest.SkipTest('x')\n    assert add(1, 1) == 2",
                "def test_a():\n    pytest.xfail('x')\n    assert add(1, 1) == 2",
            )
        ),
        ("import builtins\nbuiltins.input = lambda: 1\nassert add(1, 1) == 2", "line 2: the tests use builtins"),
        ("from unittest import mock\nassert add(1, 1) == 2", "line 1: the tests use mock"),
        ("import os, pandas as pd\nassert add(pd.Series([1]), 1).sum() == 2", "line 1: the tests use pandas: the code"),
        ("x = 1\nassert add(pd.Series([1]), 1).sum() == 2", "line 2: the tests use pd: the code under test runs in"),
        ("from torch import tensor\nassert add(tensor(1), 1) == 2", "line 1: the tests use torch"),
        ("import asyncio\nassert asyncio.run(add(1, 1)) == 2", "its coroutines cannot be awaited here"),
        ("import tempfile\nassert add(tempfile.mktemp(), '')", "neither opens the files of the other"),
        ("import inspect\nassert inspect.signature(add)", "line 1: the tests use inspect"),
        ("x = 1\nassert add.__doc__", "line 2: the tests use __doc__: .* is not seen here"),
        (
            base64.b64encode(zlib.compress(bytes(range(256)))).decode(),
            "packed, and not as LiveCodeBench packs its private ones",
        ),
        (_packed([{"input": "[1]", "output": "1", "testtype": "functional"}]), "do not name it"),
        *((tests, f"the tests use {name}: the code under test") for tests, name in NOT_ACROSS),
        *(
            (f"x = 1\nassert {test}", "line 2: `.*` computes with plain data, and the tests do not say whether T is")
            for test in (
                "T(7) % 4 == 3",
                "divmod(T(7), 2) == (3, 1)",
                "3 + T(4) == 7",
                "sum([T(1), T(2)]) == 3",
                "T(7) - 4 == 3",
                "round(T(7) / 2, 1) == 3.5",
            )
        ),
        ("t = T(7)\nassert t * 2 == 14", "line 2: `t \\* 2` computes with plain data"),
        (
            "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(T(7) % 4, 3)",
            "whether T is",
        ),
        *(
            (
                f"assert M(5).cents == 500\n{test}",
                "line [23]: .* compares an object of the code's class M with plain data",
            )
            for test in (
                "assert M(5) == 5",
                "assert M(5) < 6",
                "assert 5 in [M(5)] or M(5) in [5]",
                "m = M(5)\nassert m == 5",
            )
        ),
        (
            "def test_a():\n    global n\n    n = 0\n    f()\n    assert n == 1",
            "line 3: the tests bind the global n in",
        ),
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
        ("import json.no_such\nassert add(1, 1) == 2", "line 1: the tests cannot be run here"),
        ("def test_a(no_such_fixture): assert add(1, 1) == 2", "test_a: there is no fixture 'no_such_fixture'"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): assert add(1, 1) == 2", "skip themselves"),
    ],
)
def test_tests_that_turn_out_not_to_run_are_an_error_and_no_reward(tests: str, words: str):
    with pytest.raises(InvalidInput, match=words):
        unit_tests(f"```python\n{ADD}\nclass Base: pass\n```", tests)
