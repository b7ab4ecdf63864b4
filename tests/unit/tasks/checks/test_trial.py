"""Mistakes of a first environment: each is found before anything starts, with the user's file and line."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import load_object
from rollouts.chat.chat_tokens import ChatTokens
from settings.errors import InvalidInput
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tasks.checks import playing, trial
from tasks.checks.loading import load_tasks, load_workflow
from tasks.checks.preflight import check_run
from tasks.checks.trial import check_references
from tests.builders import a_config
from tests.unit.rollouts.chat.template_families import byte_tokenizer, tokenizer_of

_WORKFLOW = """
from millrace import Message, Score, Task, Workflow, score; from string import printable as SEEN

def broken(reply):
    return {}[reply]

class Mine(Workflow):
    def tasks(self, split):
        return [Task(id=f"{split}-{n}", prompt="7?", answer="7") for n in range(3)]

    def demonstrations(self, count, seed):
        return [[Message(role="user", content=x), Message(role="assistant", content="7")] for x in ("7?", SEEN)]

"""


def _check(folder: Path, methods: str, **settings: Any) -> None:
    file = folder / "mine.py"
    file.write_text(_WORKFLOW + "\n".join(f"    {line}" for line in methods.strip().splitlines()))
    usual = {"store": str(folder / "store"), "batch_size": 3, "learning_rate": 5e-4}
    check_run(a_config(**{"workflow": f"{file}:Mine", **usual, **settings}))


_ASKS = "async def run(self, task, chat):\n    await chat.ask('p')\n    return 1\n"


@pytest.mark.parametrize("method", ["score_group(self, task, attempts)", "close(self)"])
def test_a_method_that_never_returns_ends_the_check(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(playing, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(trial, "_SECONDS", 0.5)
    waits = f"async def {method}:\n    import asyncio\n    await asyncio.Event().wait()"
    problem = (
        contextlib.nullcontext() if "group" in method else pytest.raises(InvalidInput, match=r"Mine.close\(\): Ti")
    )
    with problem, contextlib.chdir(tmp_path):
        _check(tmp_path, f"{_ASKS}{waits}")
    assert "TimeoutError" in caplog.text or "group" not in method


@pytest.mark.parametrize(
    "methods, kind, sentence",
    [
        ("x = 1", InvalidInput, r"has no run\(\); write it"),
        ("def run(self, task, chat):\n    return 1", InvalidInput, r"write `async def run`, at .*mine\.py:14"),
        ("async def run(self, task, chat):\n    return (1, 2)", Exception, r"Mine.run returned tuple.*mine\.py:14"),
        (
            _ASKS + "def accept(self, group):\n    return group.rewards",
            InvalidInput,
            r"AttributeError: 'RolloutGroup' object has no attribute 'rewards'\n  at .*mine\.py:18",
        ),
        (
            _ASKS + "def accept(self, group):\n    pass",
            Exception,
            r"accept returned None.*mine\.py:17",
        ),
        (_ASKS + "def accept(self, group):\n    return 'no'", Exception, r"accept returned 'no'.*mine\.py:17"),
        (
            _ASKS + "async def score_group(self, task, attempts):\n    return [1.0]",
            Exception,
            r"score_group returned 1 score for 2 attempts; return one Score each, in a list. It is at .*mine\.py:17",
        ),
        (
            _ASKS + "async def score_group(self, task, attempts):\n    return {0: 1.0, 1: 0.0}",
            Exception,
            r"score_group returned dict for 2 attempts; return one Score each, in a list. It is at .*mine\.py:17",
        ),
        (
            "async def run(self, task, chat):\n    await chat.ask('p')\n    return Score(rewrd=1)",
            InvalidInput,
            r"got an unexpected keyword argument 'rewrd'\n  at .*mine\.py:16 in run",
        ),
        (
            _ASKS.replace("return 1", "return Score(reward=1, parts={1: 2.0})"),
            Exception,
            r"a Score with a part named 1, and not by a text. It is at .*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt='p', metadata=[1])]\n" + _ASKS,
            InvalidInput,
            r"task 'a' of split 'train': metadata is a list, not a dictionary, at .*mine\.py:14",
        ),
        *(
            (
                f"def demonstrations(self, count, seed):\n    {body}\n{_ASKS}",
                InvalidInput,
                rf"demonstrations\(200, seed=0\) {sentence}, at .*mine\.py:14",
            )
            for body, sentence in {
                "yield [Message(role='user', content='0')]": "returned generator; return a list of conversations",
                "return [('0', '7')]": "has a tuple of str as a conversation, not a list of Message",
                "return [[{'role': 'user', 'content': '0'}]]": "has a list of dict as a conversation, not a list of .*",
                "return [Message(role='user', content='0')]": "has a Message as a conversation, not a list of Message",
                "return [[Message(role='user', content=None)]]": "has a message whose content is None, not text",
            }.items()
        ),
        (
            "def __init__(self, dataset):\n    pass\ndef tasks(self, split):\n"
            "    return [Task(id='a', prompt=str(self.dataset))]\n" + _ASKS,
            Exception,
            r"Mine.__init__ does not call super\(\).__init__\(dataset\); it must, first",
        ),
        (_ASKS.replace("return 1", "exit(3)"), Exception, r"Mine.run ended with SystemExit\(3\); .*mine\.py:14"),
        (
            "async def run(self, task, chat):\n    return score(len, await chat.ask('p'))",
            Exception,
            r"returned what was not awaited: write `await` before score\(…\). It is at .*mine\.py:14",
        ),
        (
            "async def run(self, task, chat):\n    return await score(lambda r: 1, await chat.ask('p'))",
            InvalidInput,
            "<lambda>: InvalidInput: a reward is a function of a module, which another process finds",
        ),
        (
            "async def run(self, task, chat):\n    return float(await chat.ask('p', tools=[print]) == '7')",
            InvalidInput,
            "tools: print is neither a function decorated with @tool nor a schema",
        ),
        *(
            (
                f"async def run(self, task, chat):\n    return await chat.ask('p', tools={one})",
                InvalidInput,
                rf"tools is a list, not a {kind}: write `tools=\[…\]`, also for one tool",
            )
            for one, kind in {"{'function': {}}": "dict", "'look_up'": "str"}.items()
        ),
        (
            "async def run(self, task, chat):\n    return float(chat.ask('p') == '7')",
            InvalidInput,
            r"Mine.run asked the policy nothing in 4 attempts .*; `await chat.ask\(…\)` does. It is at .*mine\.py:14",
        ),
        ("async def run(self, task):\n    return 1", InvalidInput, r"takes 2 positional arguments but 3 .*mine\.py:14"),
        (
            "async def run(self, task, chat):\n    return Score(reward='1')",
            Exception,
            r"a Score whose reward is '1', and not a number. It is at .*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    return {'train': []}[split]\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"has no tasks in split 'train'",
        ),
        (
            "def tasks(self, split):\n    if split == 'train':\n        return [Task(id='a', prompt='p')]\n"
            "    raise KeyError(split)\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"has no split 'test', or cannot make its tasks: KeyError: 'test'\n  at .*mine\.py:17 in tasks",
        ),
        ("tasks = []\n" + _ASKS, InvalidInput, "Mine.tasks is a list, not a method: write `def tasks`"),
        (
            "@property\ndef tasks(self):\n    return []\n" + _ASKS,
            InvalidInput,
            "Mine.tasks is a property, not a method: write `def tasks`",
        ),
        (
            "async def run(self, task, chat):\n    import asyncio\n    raise asyncio.CancelledError('mine')",
            Exception,
            r"Mine.run raised CancelledError: mine[^\0]*; raise another error. It is at .*mine\.py:14",
        ),
        (
            "async def run(self, task, chat):\n    return float(await chat.say('p') == '7')",
            InvalidInput,
            "'Chat' object has no attribute 'say'",
        ),
        (
            "def tasks(self, split):\n    yield 1\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"tasks\('train'\) returned generator; return a list of Task, at .*mine\.py:14",
        ),
        *(
            (
                f"async def {name}(self, *_):\n    {body}\n{_ASKS}",
                InvalidInput,
                rf"Mine.{name} is awaited by nothing: write `def {name}`, at .*mine\.py:14",
            )
            for name in ("tasks", "demonstrations", "reference_reply", "accept")
            for body in ("return []", "yield 1")
        ),
        (
            "def tasks(self, split):\n    return [Task(id=f'{split}-{n}', prompt='7' * 250) for n in range(3)]\n"
            "async def run(self, task, chat):\n    await chat.ask('Add up: ' + task.prompt)\n    return 1",
            InvalidInput,
            "the prompts of split 'train' leave no room for a reply: task 'train-0' asks with 260 tokens, and prompt "
            "and replies have 256; shorten the prompts, or choose a model with more positions",
        ),
        (
            "def tasks(self, split):\n    import random\n    return [Task(id=f'{random.random()}', prompt='7?')]\n"
            + _ASKS,
            InvalidInput,
            r"Mine.tasks\('train'\) returns other tasks each time, and every process calls it; .*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    exit('no data')\n" + _ASKS,
            InvalidInput,
            "ends with SystemExit.'no data'.; .*:14",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a\\nb', prompt='7?')]\n" + _ASKS,
            InvalidInput,
            r"task id 'a\\nb' of split 'train': an id is text that can be printed, at .*mine\.py:14",
        ),
        (
            "def demonstrations(self, count, seed):\n    return [[Message(role='user', content='7?')]] * 9\n" + _ASKS,
            InvalidInput,
            r"9 conversations of demonstrations\(200, seed=0\) without an assistant's message: replies .*mine\.py:14",
        ),
        (
            "async def run(self, task, chat):\n    return await score('exact', await chat.ask('p'), '7')",
            InvalidInput,
            r"score\(\) takes a reward function first, and then its arguments, not 'exact'\n  at .*mine\.py:15 in run",
        ),
        (
            "async def run(self, task, chat):\n    from millrace import exact\n"
            "    return await score(exact, await chat.ask('p'))",
            InvalidInput,
            r"played before .*TypeError: exact\(\) missing 1 required positional argument: 'answer'",
        ),
        *(
            (
                "def tasks(self, split):\n    return [Task(id=f'{split}-{n}', prompt='7?') for n in range(3)]\n"
                "async def run(self, task, chat):\n"
                f"    from millrace import {reward}, score\n"
                f"    return await score({reward}, await chat.ask(task.prompt), task.answer)",
                InvalidInput,
                f"task 'train-0' of split 'train', played before .*{sentence}",
            )
            for reward, sentence in {
                "exact": "the task has no answer to compare with",
                "gsm8k": "the reference answer '' holds no final answer",
                "math_answer": "the reference answer '' holds no mathematical expression",
                "matches": "the pattern is empty",
            }.items()
        ),
        (
            "def reference_reply(self, task, messages):\n    return 7\n"
            "async def run(self, task, chat):\n    return float(await chat.ask('7?'))",
            Exception,
            r"reference_reply returned int, not text, at .*mine\.py:14",
        ),
        (
            "preload = ['no_such_module']\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            "preload names 'no_such_module', and there is no such module",
        ),
        *(
            (f"preload = {value}\n{_ASKS}", InvalidInput, rf"preload is {value}; write a list of names of modules")
            for value in ("3", "'json'")
        ),
        (
            _ASKS + "async def close(self):\n    raise RuntimeError('bye')",
            InvalidInput,
            r"Mine.close\(\): RuntimeError: bye\n  at .*mine\.py:18 in close",
        ),
        (
            "def __init__(self):\n    pass\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"takes 1 positi",
        ),
        (
            "async def run(self, task, chat):\n    from millrace import unit_tests\n"
            "    return await score(unit_tests, await chat.ask('1?'), 'x = 1\\nimport nowhere\\nassert f()')",
            InvalidInput,
            r"played before anything was started: .*line 2: the tests import nowhere, which is not installed"
            r"[^\0]*\n  at .*mine\.py:16 in run",
        ),
        ("import os; os._exit(0)", InvalidInput, r"its module ends with SystemExit\(0\) at .*mine\.py:14"),
        (
            _ASKS.replace("return 1", "__import__('os')._exit(0)"),
            Exception,
            r"Mine.run ended with SystemExit\(0\); .*mine\.py:14",
        ),
        (
            "class Panic(BaseException):\n    pass\nraise Panic('index')",
            InvalidInput,
            r"workflow = .*: Panic: index\n  at .*mine\.py:16",
        ),
        ("exit(3)", InvalidInput, r"its module ends with SystemExit\(3\) at .*mine\.py:14; put what a script"),
        (
            "def demonstrations(self, count, seed):\n    return [[Message(role='bot', content='7')]]\n" + _ASKS,
            Exception,
            r"a message of role 'bot'; roles are assistant, system, tool, user, at .*mine\.py:14",
        ),
        ("raise OSError('no disk')", InvalidInput, r"workflow = .*: OSError: no disk\n  at .*mine\.py:14"),
        ("async def run(self, task, chat):\n    return None", Exception, r"Mine.run returned NoneType"),
        (
            "def tasks(self, split):\n"
            "    return [Task(id=str(n), prompt='p', answer='answer is 10000') for n in range(9)]\n"
            "async def run(self, task, chat):\n    from millrace import math_answer, score\n"
            "    return await score(math_answer, await chat.ask('p'), task.answer)",
            InvalidInput,
            r"the reference answer 'answer is 10000' is a sentence",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt='p'), Task(id='a', prompt='q')]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"1 task ids of split 'train' occur more than once, for example 'a'.*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    return [Task(id=3, prompt='p')]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"task 3 of split 'train': id is a int, not text: use str\(id\), at .*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt=[{'role': 'user'}])]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"prompt is a list, not text: build messages in `run`",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt='p', answer=7)]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"answer is a int, not text: use str\(answer\)",
        ),
        (
            "def tasks(self, split):\n    return range(10**9)\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"has 1,000,000,000 tasks in split 'train', .* return at most 10,000,000, at .*mine\.py:14",
        ),
        (
            "def tasks(self, split):\n    return ['p']\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"tasks\('train'\) has a str, not a Task",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_its_place(
    tmp_path: Path, methods: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        _check(tmp_path, methods)


@pytest.mark.parametrize(
    "body, error, line",
    [
        ("return task.answr", "AttributeError: 'Task' object has no attribute 'answr'", "return task.answr"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'", "import nowhere"),
        ("return undefined_name", "NameError: name 'undefined_name' is not defined", "return undefined_name"),
        # The demonstration's reply is one that the workflow knows: what fails at it fails for every policy.
        (
            "reply = await chat.ask(task.prompt)\n    return {'8': 1.0}[reply]",
            "KeyError: '7'",
            "return {'8': 1.0}[reply]",
        ),
        ("return await score(broken, '7')", "RewardFailed: .*: KeyError: '7'", "return {}[reply]"),
        (
            "return await chat.ask([])",
            r"TypeError: chat.ask\(\) takes the user's text, not a list",
            "return await chat.ask",
        ),
    ],
)
def test_what_run_raises_is_a_sentence_with_the_users_line(tmp_path: Path, body: str, error: str, line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _check(tmp_path, f"async def run(self, task, chat):\n    {body}")
    first, where, *_ = str(caught.value).split("\n")
    assert re.match(f"task 'train-0' of split 'train', played before anything was started: {error}", first), first
    assert re.match(r"  at \S*mine.py:\d+ in (run|broken): ", where) and line in where, where


@pytest.mark.parametrize(
    ("head", "body", "sentence"),
    [
        ("@dataclasses.dataclass(frozen=True)\n", "", "takes 1 positional"),
        ("", "    @abc.abstractmethod\n    def todo(self): ...\n", "Can't instantiate abstract class"),
    ],
)
def test_what_cannot_be_made_is_said_with_the_line_of_the_users_class(
    tmp_path: Path, head: str, body: str, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    imports = "import abc, dataclasses\nfrom millrace import Workflow\n"
    file.write_text(f"{imports}{head}class Mine(Workflow, abc.ABC):\n    x = 1\n{body}")
    with pytest.raises(InvalidInput, match=rf"{sentence}.*; it is at .*mine\.py:3"):
        check_run(a_config(workflow=f"{file}:Mine", store=str(tmp_path / "store")))


def test_a_reward_that_is_a_coroutine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "async_rewards.py").write_text("async def mine(reply):\n    return 1.0\n")
    ask = "    return await score(mine, await chat.ask('p'))"
    with pytest.raises(InvalidInput, match="async_rewards.*mine: InvalidInput: a reward is called .* write `def`"):
        _check(tmp_path, f"async def run(self, task, chat):\n    from async_rewards import mine\n{ask}")


def test_one_error_of_all_attempts_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(
            tmp_path,
            "def demonstrations(self, count, seed):\n"
            "    return [[Message(role='user', content='7? '), Message(role='assistant', content='7')]]\n"
            "async def run(self, task, chat):\n    return {}[await chat.ask('p')]",
        )
    assert caplog.text.count("tried with a made-up reply: KeyError") == 1


@pytest.mark.parametrize("body", ["return 1", "return True", "return await score(exact, '7', task.answer)"])
def test_a_number_and_a_score_are_both_fine(tmp_path: Path, body: str) -> None:
    _check(tmp_path, _ASKS.replace("return 1", f"from millrace import exact, score\n    {body}"))


def test_an_error_that_another_reply_might_not_cause_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(
            tmp_path,
            "def demonstrations(self, count, seed):\n"
            "    return [[Message(role='user', content='?'), Message(role='assistant', content='7')]]\n"
            "async def run(self, task, chat):\n    reply = await chat.ask(task.prompt)\n    return int(reply[:-2])",
        )
    assert "tried with a made-up reply: ValueError" in caplog.text


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ("Task(id=f'{split}-{n}', prompt=f'{split} {n}', answer='7')", ""),
        ("Task(id=f'{split}-{n}', prompt=f'{split}?', answer='7' if split == 'test' else str(n))", ""),
        ("Task(id=f'{split}-{n}', prompt='Play.', metadata={})", ""),  # the id decides, such as a seed
        (
            "Task(id=f'{split}-{n}', prompt=f'{n}?', answer='7')",
            "5 of 5 tasks ('test-0', 'test-1', 'test-2', …) of split 'test' are in split 'train' too",
        ),
        (
            "Task(id=f'{split}-{n}', prompt=f'{min(n, 2)} {split if n else 0}', answer='7')",
            "1 of 5 tasks ('test-0') of split 'test' are in split 'train' too",
        ),
        (
            "Task(id=f'{split}-{n}', prompt=f'{split} {n}', answer='7' if n or split == 'test' else ' ')",
            "1 of 5 tasks ('train-0') of split 'train' have no answer",
        ),
        (
            "Task(id=f'{split}-{n}', prompt=f'{split} {n}', answer='7' if split == 'train' else '')",
            "5 of 5 tasks ('test-0', 'test-1', 'test-2', …) of split 'test' have no answer",
        ),
        (
            "Task(id=f'{split}-{n}', prompt=f'{split} {n}' * (1 + n * 9), answer='7')",
            "1 of 5 tasks ('train-4') of split 'train' leave no room for a reply: task 'train-4' asks with ",
        ),
        (
            "Task(id=f'{split}-{n}', prompt=f'{split} ë{n}', answer='7')",
            "the tiny model's tokenizer leaves them out: 'ë'",
        ),
    ],
)
def test_what_is_wrong_with_some_tasks_is_a_warning_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tasks: str, sentence: str
) -> None:
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(
            tmp_path,
            f"def tasks(self, split):\n    return [{tasks} for n in range(5)]\n"
            "async def run(self, task, chat):\n    await chat.ask(task.prompt)\n    return 1",
        )
    found = [message for message in caplog.messages if "isolate" not in message]
    assert (sentence in "\n".join(found)) if sentence else not found


def test_a_demonstration_longer_than_the_tiny_model_and_a_held_out_score_of_training_tasks_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = "[[Message(role='user', content=SEEN), Message(role='assistant', content='7' * 300)]]"
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(
            tmp_path,
            f"def demonstrations(self, count, seed):\n    return {long}\n{_ASKS}",
            evaluation={"split": "train"},
        )
    assert "has 402 tokens, and the tiny model has 256 positions" in caplog.text
    assert "evaluation.split = 'train': the held-out score is one of tasks that are trained on" in caplog.text


def test_an_error_is_followed_by_no_warning_of_a_coroutine_that_was_not_awaited(tmp_path: Path) -> None:
    body = "reply = chat.ask('p')\n    return float(len(reply))"
    with pytest.raises(InvalidInput, match="object of type 'coroutine' has no len"), warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(tmp_path, f"async def run(self, task, chat):\n    {body}")
    gc.collect()


@pytest.mark.parametrize(("rate", "side"), [(5.0, "above"), (5e-4, ""), (1e-6, "below")])
def test_a_learning_rate_that_is_unusual_for_the_model_is_a_warning_of_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rate: float, side: str
) -> None:
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(tmp_path, _ASKS, learning_rate=rate)
    sentence = f"learning_rate = {rate:g} is {side} what is usual for this size and kind, 0.0001 to 0.001"
    assert (sentence in caplog.text) == bool(side)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"dataset": "data.jsonl"}, r"dataset = 'data.jsonl': .*Mine never reads it; use self.dataset in tasks\(\)"),
        (
            {"vllm": {"tensor_paralel_size": 2}},
            r"engine.vllm.tensor_paralel_size: .*did you mean 'tensor_parallel_size'",
        ),
        ({"vllm": {"max_num_seqs": "many"}}, "engine.vllm.max_num_seqs = 'many': .* a valid integer"),
        ({"vllm": {"dtype": "float99"}}, "engine.vllm.dtype = 'float99': .* 'bfloat16', 'float' or 'float32'"),
        (
            {"vllm": {"quantization": "fp8"}},
            "quantization = 'fp8', on CPUs: .*static_scaled_fp8_quant .*; use 'fp8_per_channel'",
        ),
        ({"vllm": {"block_size": 3}}, "block_size = 3, on CPUs: .* takes multiples of 32; use one, or leave it out"),
        ({"vllm": {"quantization": "mxfp8"}}, "Failed to find a kernel that can implement"),
        ({"vllm": {"quantization": "int8_per_channel_weight_only"}}, "it quantises no layer but experts"),
        ({"vllm": {"quantization": "awq"}}, "reads weights that are quantised already, and policies are not"),
        (
            {"vllm": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}},
            "speculative_config, on CPUs: the log-probabilities .* are not the policy's",
        ),
        ({"vllm": {"tensor_parallel_size": 3}}, "does not divide the model's 4 attention heads"),
        (
            {"num_ranks": 3, "sequence_parallel": 3},
            "train.sequence_parallel = 3 does not divide the model's 4 attention heads",
        ),
        ({"num_ranks": 10_000}, "of this machine.*10000 × trainer.*fits: train.num_ranks = 1"),
        ({"batch_size": 7}, "batch_size = 7 prompts, but split 'train' has 3 tasks, .* up to 3 times: .* at most 3"),
        ({"tracking": "http://127.0.0.1:9"}, "tracking = 'http://127.0.0.1:9': no server answers"),
        ({"tracking": "nonsense://x"}, "tracking = 'nonsense://x': MLflow knows no nonsense://"),
        (
            {"tracking": "mlruns"},
            "tracking = 'mlruns': MLflow writes into no folder any more; use a file, sqlite:///mlr",
        ),
        ({"tracking": "file:///x/y"}, "tracking = 'file:///x/y': .* use a file, sqlite:////x/y/mlflow.db, or http"),
        ({"tracking": "http://[::1"}, r"tracking = 'http://\[::1' is no address: Invalid IPv6 URL"),
        (
            {"tracking": "postgresql://h:99999/x"},
            "tracking = 'postgresql://h:99999/x' is no address: Port out of range",
        ),
        ({"tracking": "http://a b/"}, "tracking = 'http://a b/': no server answers"),
        ({"tracking": "sqlite:////no/where.db"}, "there is no folder /no"),
        ({"tracking": "sqlite://"}, "tracking = 'sqlite://' names no file; write sqlite:///FOLDER/mlflow.db"),
        ({"tracking": "sqlite:////tmp"}, "tracking = 'sqlite:////tmp' names no file"),
        ({"tracking": {"also": "wandb"}}, "tracking.also = \\['wandb'\\]: there is no key for Weights & Biases"),
    ],
)
def test_a_setting_that_nothing_takes_is_refused(
    tmp_path: Path, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(InvalidInput, match=sentence):
        _check(tmp_path, _ASKS, **settings)


def test_of_a_run_that_exists_the_same_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_run(LocalStore(tmp_path / "store"), "mine", {"seed": 0})
    late = {"batch_size": 7, "tracking": "http://127.0.0.1:9", "run": "mine"}
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(tmp_path, _ASKS, **late)
    assert "up to 3 times" in caplog.text and "run mine goes on, and its log keeps everything for later" in caplog.text


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100), "model.safetensors is damaged"),
    ],
)
def test_a_broken_model_folder_is_refused(tmp_path: Path, base_model: Path, harm: Any, sentence: str) -> None:
    shutil.copytree(base_model, tmp_path / "model")
    harm(tmp_path / "model")
    with pytest.raises(InvalidInput, match=sentence):
        _check(tmp_path, "async def run(self, task, chat):\n    return 1", model=str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("family", "asks", "sentence"),
    [
        ("qwen3", ["'1'", "'2'", "'3', tools=[look]"], ""),
        ("gpt-oss", ["'1', tools=[look]"], ""),
        ("gemma", ["'1'", "'2'"], ""),
        ("gemma", ["'1', tools=[look]"], "refuses these messages: Conversation roles must alternate"),
        ("phi3", ["'1', tools=[look]"], "leaves out what tools return"),
        ("never ends", ["'1'"], ""),
        ("never ends", ["'1'", "'2'"], "does not end an assistant's reply with a special token"),
        ("refuses", ["'1'"], "refuses these messages: no chat here"),
    ],
)
def test_the_turns_a_workflow_takes_are_rendered_with_the_models_template(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, family: str, asks: list[str], sentence: str
) -> None:
    own = {
        "never ends": "{% for m in messages %}{{ m.content }} {% endfor %}",
        "refuses": "{{ raise_exception('no chat here') }}",
    }
    template = own.get(family, "")
    tokenizer = byte_tokenizer(template=template, special=["<e>"], end="<e>") if template else tokenizer_of(family)
    monkeypatch.setattr(ChatTokens, "load", lambda folder, settings: ChatTokens(tokenizer, settings=settings))
    look = '@tool\n    def look(key: str) -> str:\n        "Look it up."\n        return key'
    lines = [f"await chat.ask({ask})" for ask in asks]
    body = "\n    ".join(["from millrace import tool", look, *lines, "return 1"])
    with pytest.raises(InvalidInput, match=sentence) if sentence else contextlib.nullcontext():
        _check(tmp_path, f"async def run(self, task, chat):\n    {body}", model=str(base_model))


@pytest.mark.parametrize(
    ("family", "given", "is_refused"),
    [
        ("llama3.2", {}, True),
        ("llama3.2", {"date_string": "26 Jul 2024"}, False),
        ("gpt-oss", {}, True),  # takes no day
        ("qwen3", {}, False),
    ],
)
def test_a_template_that_names_the_day_is_refused_if_a_run_is_to_be_reproducible(
    tmp_path: Path,
    base_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    given: dict[str, str],
    is_refused: bool,
) -> None:
    tokenizer = tokenizer_of(family, fixed_day=False)
    monkeypatch.setattr(ChatTokens, "load", lambda folder, settings: ChatTokens(tokenizer, settings=settings))
    body = "async def run(self, task, chat):\n    await chat.ask('1')\n    return 1"
    settings = {"model": str(base_model), "chat_template_kwargs": given}
    _check(tmp_path, body, **settings)
    sentence = r"reproducible = true: the model's chat template names the day .*date_string = .26 Jul 2024"
    with pytest.raises(InvalidInput, match=sentence) if is_refused else contextlib.nullcontext():
        _check(tmp_path, body, reproducible=True, **settings)


def test_a_start_does_not_load_vllm_for_a_reply_that_calls_tools() -> None:
    code = """
import sys
from examples.calculator_agent import CalculatorAgent
from tasks.checks.loading import load_tasks
from tasks.checks.trial import play_tasks
from tests.builders import a_config
play_tasks(workflow := CalculatorAgent(), load_tasks(workflow, a_config()), a_config(), positions=None)
print("vllm" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


_AGENT = """
import asyncio, threading
from openai import OpenAI

class Agent(AgentWorkflow):
    all_at_once = threading.Barrier(12)

    def tasks(self, split):
        return [Task(id=f"{split}-{n}", prompt="7?", answer="7") for n in range(6)]

    async def run_agent(self, task, *, base_url, api_key):
        def play():
            self.all_at_once.wait(20)
            with OpenAI(base_url=base_url, api_key=api_key) as client:
                options = {"tools": [TOOL], "tool_choice": "required"} if FORCED else {"logprobs": True}
                made = client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": task.prompt}], **options
                ).choices[0]
            if FORCED:
                [call] = made.message.tool_calls
                return float(call.function.name == "answer")
            assert made.logprobs.content[0].token == "<"
            return float(made.message.content == task.answer)
        return await asyncio.to_thread(play)

    def reference_reply(self, task, messages):
        call = '<tool_call>\\n{"name": "answer", "arguments": {}}\\n</tool_call>'
        return call if FORCED else f"<think>7?</think>{task.answer}"

TOOL = {"type": "function", "function": {"name": "answer", "parameters": {"type": "object", "properties": {}}}}
"""


@pytest.mark.server
@pytest.mark.parametrize("forced", [False, True])
def test_an_agent_that_blocks_a_thread_is_tried_through_the_endpoint_as_a_run_plays_it(
    tmp_path: Path, forced: bool
) -> None:
    """All twelve attempts at once, with thoughts, log-probabilities or forced calls; it hung with four of them."""
    file = tmp_path / "mine.py"
    file.write_text(f"from millrace import AgentWorkflow, Task\nFORCED = {forced}\n{_AGENT}")
    config = a_config(workflow=f"{file}:Agent", guided_decoding=forced, tool_parser="hermes", attempt_timeout=60.0)
    workflow = load_object(config.workflow)(None)
    assert check_references(workflow, load_tasks(workflow, config), config, num_tasks=6) == 12


def test_tasks_that_take_long_to_make_are_named_while_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A start that waits for the user's code, and says nothing, looks as if it hung."""

    def told() -> bool:
        return any("mine.py" in message for message in caplog.messages)

    monkeypatch.setattr(threading, "told", told, raising=False)
    monkeypatch.setattr("tasks.checks.playing._BLOCKED_SECONDS", 0.2)
    file = tmp_path / "mine.py"
    file.write_text(_SLOW)
    config = a_config(workflow=f"{file}:Mine")
    assert load_tasks(load_workflow(config), config)
    assert re.search(r"has taken 0 s, and the start waits for it\n  at .*mine\.py:[78] in tasks: ", caplog.text)


_SLOW = """
import threading, time
from millrace import Task, Workflow

class Mine(Workflow):
    def tasks(self, split):
        while not threading.told():
            time.sleep(0.1)
        return [Task(id="a", prompt="a")]
    async def run(self, task, chat):
        return 1.0
"""


def test_code_that_holds_up_every_attempt_is_named_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    named, handler, preflight = threading.Event(), logging.Handler(), logging.getLogger("millrace.preflight")
    monkeypatch.setattr(handler, "emit", lambda record: named.set() if "held up" in record.getMessage() else None)
    monkeypatch.setattr(preflight, "handlers", [*preflight.handlers, handler])
    monkeypatch.setattr(threading, "named", named, raising=False)
    monkeypatch.setattr("tasks.checks.playing._BLOCKED_SECONDS", 0.2)
    _check(
        tmp_path,
        "async def run(self, task, chat):\n    import threading\n    assert threading.named.wait(30)\n"
        "    return float(await chat.ask('7?'))",
    )
    assert re.search(r"held up every attempt for .*to_thread\n  at .*mine\.py:16 in run: assert thr", caplog.text)
