"""Code is worth the share of tests it passes, and no trick inside its own process makes it worth more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from rollouts.rewards import code_reward
from rollouts.rewards.code_reward import unit_tests
from rollouts.rewards.scoring import RewardFailed, RewardPool
from rollouts.sandbox.sandbox import SandboxUnavailable, sandbox_report
from rollouts.workflow import Score

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report())),
]

ASSERTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
PAIRS = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1", "output": "0"}])
RIGHT = "def add(a, b):\n    return a + b"
HALF = "def add(a, b):\n    return abs(a) + abs(b)"
RIGHT_SCRIPT = "a, b = map(int, input().split())\nprint(a + b)"
HOG = "def add(a, b):\n    kept = bytearray(2**33) if a < 0 else 0\n    return a + b"
SAME = "def same(x): return x"
HALF_SCRIPT = "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"
SHOUT = "def shout(x): return x.upper() + 'ß🙂'\nif __name__ == '__main__': print(shout(input()))"


def _reply(code: str) -> str:
    return f"Let me think. `add` is easy:\n```python\n{code}\n```\nThat is it."


@pytest.mark.parametrize(
    ("reply", "tests", "worth"),
    [
        *((_reply(RIGHT), ASSERTS, 1.0), (_reply(HALF), ASSERTS, 0.5), (_reply(HOG), ASSERTS, 0.5)),
        *((_reply(RIGHT_SCRIPT), PAIRS, 1.0), (_reply(HALF_SCRIPT), PAIRS, 0.5)),
        (_reply(HALF) + _reply(RIGHT), ASSERTS, 1.0),  # the last Python block counts
        (_reply(RIGHT) + "\n```text\nadd\n```", ASSERTS, 1.0),
        (f"```py\n{RIGHT}", ASSERTS, 1.0),
        (_reply("print('1  \\n2\\n\\n')"), '[{"input": "", "output": "1\\n2"}]', 1.0),  # white space at ends of lines
        (_reply("print('1  \\n2\\n\\n')"), '{"inputs": ["", ""], "outputs": ["1\\n2", "1 2"]}', 0.5),
        (_reply("print(5)\nraise KeyError"), '[{"input": "", "output": "5"}]', 0.0),
        (_reply(SHOUT), "assert shout('ü') == 'Üß🙂'", 1.0),
        (_reply(SHOUT), '[{"input": "ü", "output": "Üß🙂"}]', 1.0),
        (_reply("x = '\udc80'\nprint(1)"), '[{"input": "", "output": "1"}]', 1.0),
    ],
)
def test_code_is_worth_the_share_of_tests_it_passes(reply: str, tests: str, worth: float):
    assert unit_tests(reply, tests) == worth


def test_a_reply_without_working_code_is_worth_nothing():
    for reply in ("", "I cannot.", RIGHT, f"```c\n{RIGHT}\n```", "```python\n```", "```python\n)(\n```"):
        assert unit_tests(reply, ASSERTS) == unit_tests(reply, PAIRS) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        *("import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit"),
        "print('2 passed'); print('{\"passed\": true}')",
        "class Everything:\n    def __eq__(self, other): return True\ndef add(a, b): return Everything()",
        "class Nine(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Nine(9)",
        "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.isinstance = lambda *_: True\n"
        "def add(a, b): return 1",
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"tests": 1}\\n{"passed": true}\\n\')\n'
        "    except OSError: pass",
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"value": {"dict": []}}\\n\' * 9)\n'
        "    except OSError: pass",
        "open('../tests/tests.py', 'w').write('assert True')\ndef add(a, b): return 0",
        "import glob\ndef add(a, b): return eval(open(glob.glob('../*/tests.py')[0]).read().split('==')[1])",
        "import gc\ndef add(a, b): return [o for o in gc.get_objects() if isinstance(o, dict) and 'passed' in o][0]",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import sys, json\njson.dumps = lambda *_: '{\"value\": true}'\ndef add(a, b): return 1",
    ],
)
def test_tricks_are_worth_nothing(code: str):
    assert unit_tests(_reply(code), ASSERTS) == 0.0


def test_what_the_tests_compare_with_stays_pythons_own():
    code = "def add(a, b): return 99\ndef abs(x): return 0\ndef len(x): return 2\ndef sorted(x): return 'x'"
    assert unit_tests(_reply(code), "assert abs(add(2, 3) - 5) < 0.1\nassert len([add(1, 1)]) == 2") == 0.0
    code = "import math\nmath.isclose = lambda *_: True\ndef add(a, b): return 99"
    assert unit_tests(_reply(code), "assert math.isclose(add(2, 3), 5)") == 0.0
    code = "class A:\n    def __eq__(self, o): return True\n    __lt__ = __gt__ = __le__ = __ge__ = __eq__\n"
    code += "def f(): return A()"
    tests = "assert f() == 1\nassert f() > 0\nassert f() < 0\nassert 1 == f()\nassert f() in [1]\nassert not f()"
    assert unit_tests(_reply(code), tests) == 0.0


def test_an_endless_loop_costs_what_comes_after_it_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    code = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    script = "a, b = map(int, input().split())\nwhile a < 0: pass\nprint(a + b)"
    assert unit_tests(_reply(code), ASSERTS, 2.0) == unit_tests(_reply(script), PAIRS, 2.0) == 0.5
    assert list(tmp_path.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (RIGHT, "def check(candidate):\n    assert candidate(2, 3) == 5\n\ncheck(add)"),
        (RIGHT, "import random\nfor _ in range(9):\n    a = random.random()\n    assert add(a, 1) == a + 1"),
        (RIGHT, "from solution import add as plus\ndef test_it():\n    assert plus(1, b=1) == 2\n"),
        (RIGHT, "import solution\nassert solution.add([1], (2).__index__ and [2]) == [1, 2]"),
        ("def sort(x): x.sort()", "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]"),
        ("def put(d, s): d['a'] = 1; s.add(2)", "d, s = {}, {1}\nput(d, s)\nassert d == {'a': 1} and s == {1, 2}"),
        ("def up(n):\n    for i in range(n): yield i", "assert list(up(3)) == [0, 1, 2]\nassert sum(up(4)) == 6"),
        (SAME, "x = {1: (2, {3}), 'a': [b'b', 1j, None, True, frozenset({4})]}\nassert same(x) == x"),
        (SAME, "assert str(same(float('nan'))) == 'nan' and same(range(3)) == range(3)"),
        ("from math import factorial", "assert factorial(3000) > 10**9000"),
        ("from fractions import Fraction\ndef half(): return Fraction(1, 2)", "assert half() == 0.5"),
        ("import numpy as np\ndef double(x): return np.array(x) * 2", "assert double([1, 2]) == [2, 4]"),
        (
            "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
            "def total(node): return node.v + (total(node.next) if node.next else 0)",
            "root = Node(1, Node(2))\nroot.next.next = Node(3)\nassert total(root) == 6\nassert root.next.v == 2",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
            "    def __add__(self, other): return P(self.x + other.x)",
            "assert P(1) + P(2) == P(3)\nassert P(1) != P(2)\nassert str(P(1)) == 'P(x=1)'",
        ),
        (
            "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
            "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)",
        ),
    ],
)
def test_tests_in_the_forms_that_data_sets_have(code: str, tests: str):
    assert unit_tests(_reply(code), tests) == 1.0


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        *(("", "nothing to pass"), ("x = 1", "nothing to pass"), ("assert add(", "do not parse")),
        ("import no_such_package\nassert add(2, 3) == 5", "no_such_package"),
        *(('[{"input": 1, "output": "1"}]', "JSON tests must be"), ("[]", "JSON tests must be")),
        ('{"inputs": ["1"], "outputs": []}', "JSON tests must be"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_and_no_reward(tests: str, words: str):
    with pytest.raises(ValueError, match=words):
        unit_tests(_reply(RIGHT), tests)


def test_a_machine_that_cannot_isolate_is_refused_unless_it_is_accepted(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise SandboxUnavailable("no Landlock")

    monkeypatch.setattr(code_reward, "require_sandbox", refuse)
    with pytest.raises(SandboxUnavailable):
        unit_tests(_reply(RIGHT), ASSERTS)
    assert unit_tests(_reply(RIGHT), ASSERTS, allow_unsandboxed=True) == 1.0


async def test_in_a_reward_process_it_is_a_reward_like_any_other_and_its_sandboxes_die_with_it():
    others = set(psutil.Process().children(recursive=True))  # servers of other tests
    seen: set[psutil.Process] = set()
    async with RewardPool(num_processes=1, timeout=4.0, memory_gb=4.0) as pool:
        scored = await pool.score(unit_tests, _reply(HALF), ASSERTS)
        assert scored == Score(reward=0.5, parts={"unit_tests": 0.5})
        with pytest.raises(RewardFailed, match="nothing to pass"):
            await pool.score(unit_tests, _reply(HALF), "x = 1")
        scoring = asyncio.create_task(pool.score(unit_tests, _reply("while True: pass"), ASSERTS, 600.0))
        while not scoring.done():
            seen |= set(await asyncio.to_thread(psutil.Process().children, recursive=True))
            await asyncio.sleep(0.05)
        assert (await scoring).reward == 0.0, "the reply chose it, and the reward has worked before"
    seen -= others
    assert len(seen) >= 3  # the reward's process, the code's and the tests'
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
