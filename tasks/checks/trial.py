"""Tasks played in seconds on a scripted engine, before anything heavy starts.

    check_tasks        ids, prompts and answers are text, and ids differ
    check_demonstrations  they have replies, and the characters of the prompts
    check_splits       no held-out task is trained on, and no answer is missing among others
    play_tasks         two tasks per split ─▶ run ─▶ a score, or the user's error: every start does it;
                       turns as the workflow takes them ─▶ the model's chat template ─▶ a prompt;
                       all prompts leave room for a reply
    check_repeats      the same tasks twice ─▶ the same turns and scores: what `reproducible = true` needs
    check_references   reference_reply ─▶ reward 1: what `--dry-run` and `doctor` check too

In: a workflow and the run's configuration. Out: nothing, or the error with the task, or with the user's file and line.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tools import ToolUnavailable
from rollouts.production.evaluation import CORRECT
from rollouts.rewards.scoring import RewardFailed, RewardTimeout
from rollouts.workflow import Workflow, WrongWorkflow, place_of
from settings.errors import InvalidInput, counted, failure_text, has_users_frames
from settings.run_file import RunConfig
from settings.warmup import DEMONSTRATIONS, TINY_POSITIONS
from storage.records import Message, Task
from tasks.checks.playing import (
    Outcome,
    attempts_at,
    demonstrated,
    errors_of_users,
    first_tasks,
    known_replies,
    users_method,
)
from tasks.checks.scripted_chat import Unknown
from trainers.model.fetch import local_folder

logger = logging.getLogger("millrace.preflight")

_PLAYED = 2
"""Tasks of each split that every start plays."""
_NAMED = 3
"""Ids in a sentence about several tasks."""
_COUNTED = 200
"""The longest prompts of a split, whose tokens are counted."""
_MARKS = 2
"""Tokens of the tiny model's template: whose turn it is."""
_MOST_CHARACTERS = 10
_SECONDS = 10.0
"""A task that takes longer is passed over at a start."""
_NEVER = re.compile(
    r"\A[^ ]+: (?:(?:\w+\.)*(?:InvalidInput|SandboxUnavailable)\b|TypeError: \w+\(\) (?:missing|takes) \d+ )"
)
"""How errors of a reward process begin that are no reply's fault."""


def check_tasks(tasks: Sequence[Task], split: str, *, where: str) -> None:
    """Raise `InvalidInput` for the first task of a split whose fields are not text or JSON, or whose id another has.

    `where` is the file and line that made them.
    """
    for task in tasks:
        if not isinstance(task, Task):
            raise InvalidInput(f"tasks({split!r}) has a {type(task).__name__}, not a Task, at {where}")
        if isinstance(task.id, str) and not (task.id and task.id.isprintable()):
            raise InvalidInput(f"task id {task.id!r} of split {split!r}: an id is text that can be printed, at {where}")
        for name in ("id", "prompt", "answer"):
            if not isinstance(value := getattr(task, name), str):
                fix = "build messages in `run`" if name == "prompt" else f"use str({name})"
                what = f"task {task.id!r} of split {split!r}: {name} is a {type(value).__name__}, not text"
                raise InvalidInput(f"{what}: {fix}, at {where}")
        if not isinstance(task.metadata, dict):
            kind = type(task.metadata).__name__
            raise InvalidInput(
                f"task {task.id!r} of split {split!r}: metadata is a {kind}, not a dictionary, at {where}"
            )
        try:
            json.dumps(task.metadata, sort_keys=True)  # as its digest is made: keys of two types have no order
        except (TypeError, ValueError) as error:
            what = f"task {task.id!r} of split {split!r}: its metadata are no JSON ({error})"
            raise InvalidInput(f"{what}; use text, at {where}") from None
    if doubled := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise InvalidInput(
            f"{len(doubled)} task ids of split {split!r} occur more than once, for example {doubled[0]!r}: prompt "
            f"order and lineage know a task by its id; make them unique, at {where}"
        )


def check_splits(tasks: Mapping[str, Sequence[Task]]) -> None:
    """Warn of held-out tasks that are trained on too, and of tasks without an answer if others have one."""
    has_answers = any(task.answer for members in tasks.values() for task in members)
    for split, members in tasks.items():
        if has_answers and (missing := [task.id for task in members if not task.answer.strip()]):
            logger.warning(
                "%s of split %r have no answer, so a reward that compares with it is wrong; add the answers, or leave "
                "these tasks out",
                _some(missing, members),
                split,
            )
    trained = {_content(task) for task in tasks["train"]}
    for split, members in tasks.items():
        shared = [task.id for task in members if _content(task) in trained]
        if split != "train" and shared and len(trained) > 1:  # else the id alone tells tasks apart
            logger.warning(
                "%s of split %r are in split 'train' too, so the held-out score counts what was trained on; hold other "
                "tasks out",
                _some(shared, members),
                split,
            )


def check_demonstrations(workflow: Workflow, tasks: Mapping[str, Sequence[Task]]) -> None:
    """What the tiny model learns from: warn of conversations that are longer than it, and of characters of prompts that
    none has. Raises `InvalidInput` for conversations without a reply."""
    chats = demonstrated(workflow, 200)
    lengths = [sum(len(message.content.encode("utf-8", "replace")) + 1 for message in chat) for chat in chats]
    replies = [sum(message.role == "assistant" for message in chat) for chat in chats]
    seen = {character for chat in chats for message in chat for character in message.content}
    unseen = {character for members in tasks.values() for task in members for character in task.prompt} - seen
    if unseen:  # a character may be rare
        for chat in demonstrated(workflow, DEMONSTRATIONS):
            unseen -= {character for message in chat for character in message.content}
    if missing := replies.count(0):
        what = f"{counted(missing, 'conversation')} of demonstrations(200, seed=0) without an assistant's message"
        raise InvalidInput(f"{what}: replies are what is learnt, at {place_of(workflow.demonstrations)}")
    if max(lengths) > TINY_POSITIONS:
        logger.warning(
            "a conversation of demonstrations() has %d tokens, and the tiny model has %d positions: it cannot say all",
            max(lengths),
            TINY_POSITIONS,
        )
    if unseen:
        logger.warning(
            "prompts have characters that no demonstration has, and the tiny model's tokenizer leaves them out: %s",
            " ".join(map(repr, sorted(unseen)[:_MOST_CHARACTERS])),
        )


def _content(task: Task) -> tuple[str, str, str]:
    return task.prompt, task.answer, json.dumps(task.metadata, sort_keys=True)


def _some(ids: Sequence[str], members: Sequence[Task]) -> str:
    named = ", ".join([*map(repr, ids[:_NAMED]), *["…"] * (len(ids) > _NAMED)])
    return f"{len(ids):,} of {counted(len(members), 'task')} ({named})"


def play_tasks(
    workflow: Workflow, tasks: Mapping[str, Sequence[Task]], config: RunConfig, *, positions: int | None
) -> None:
    """Play the first tasks of each split with replies that the workflow knows, or plain text.

    `positions` are those of the run's model, None if they are not known. Raises `InvalidInput` for what `run` raises,
    for turns that the model's chat template cannot render and for prompts without room for a reply, if the model is on
    this machine; `WrongWorkflow` if it returns no score. With plain text only errors that no reply can cause are
    raised, the others are warnings: the policy may say anything, and such attempts are `env_error`.
    """
    check_splits(tasks)
    first, replies = first_tasks(tasks, _PLAYED), known_replies(workflow)
    if not config.model and type(workflow).demonstrations is not Workflow.demonstrations:
        check_demonstrations(workflow, tasks)
    outcomes = attempts_at(first, workflow, config, replies, seconds=_SECONDS)
    warned: set[str] = set()
    for (split, task), outcome in zip(first, outcomes, strict=True):
        error = outcome.error
        if error is None or isinstance(error, Unknown):  # what calls tools is left to `check_references`
            continue
        is_bug = outcome.is_known and not _is_of_a_server(error)
        if isinstance(error, WrongWorkflow) or _is_certain(error) or is_bug:
            what = f"task {task.id!r} of split {split!r}, played before anything was started"
            if isinstance(error, InvalidInput) and has_users_frames(error):  # what our functions refuse, with its place
                raise InvalidInput(f"{what}: {failure_text(error)}") from error
            with errors_of_users(what, users_method(workflow)):
                raise error
        if (text := failure_text(error)) not in warned:
            logger.warning("task %r of split %r, tried with a made-up reply: %s", task.id, split, text)
        warned.add(text)
    if outcomes and all(outcome.error is None and not outcome.turns for outcome in outcomes):
        method = users_method(workflow)
        what = f"{method.__qualname__} asked the policy nothing in {len(outcomes)} attempts that were tried"
        raise InvalidInput(f"{what}, so nothing can be trained; `await chat.ask(…)` does. It is at {place_of(method)}")
    if outcomes and all(outcome.error is None and outcome.reward is None for outcome in outcomes):
        why = "None means not applicable, as NaN does: such attempts enter no mean and are not trained"
        logger.warning("every attempt that was tried (%d) has the reward None; %s", len(outcomes), why)
    has_tools = any(outcome.has_tools for outcome in outcomes)
    tokens = check_template(config, several_turns=any(len(each.turns) > 1 for each in outcomes), with_tools=has_tools)
    if config.model and tokens is None:
        return  # the model, and how it counts, is not on this machine
    for split, members in tasks.items():
        played = [
            (task, outcome.turns[0][0])
            for (its, task), outcome in zip(first, outcomes, strict=True)
            if its == split and outcome.turns
        ]
        check_prompts(members, split, played, tokens, config, positions=positions)


def check_prompts(
    tasks: Sequence[Task],
    split: str,
    played: Sequence[tuple[Task, Sequence[int]]],
    tokens: ChatTokens | None,
    config: RunConfig,
    *,
    positions: int | None,
) -> None:
    """Count the tokens of a split's longest prompts, with what the workflow put around those that were `played`, given
    as the characters that it asked with. Without `tokens` the model is the tiny one: a byte is a token.

    Raises `InvalidInput` if no task leaves room for a reply, and warns of those that do not.
    """
    room = min(config.engine.max_model_len, positions or config.engine.max_model_len)

    def count(text: str) -> int:
        return len(tokens.prompt([Message(role="user", content=text)])) if tokens else len(text.encode()) + _MARKS

    asked = [(task, "".join(map(chr, ids))) for task, ids in played]
    around = [count(text) - count(task.prompt) for task, text in asked if task.prompt in text]
    if not around:
        return  # prompts of its own
    longest = sorted(tasks, key=lambda task: -len(task.prompt.encode()))
    sizes = {task.id: count(task.prompt) + min(around) for task in [*longest[:_COUNTED], longest[-1]]}
    if not (over := [task_id for task_id, size in sizes.items() if size >= room]):
        return
    which = "the prompts" if longest[-1].id in over else "at least " * (len(over) == _COUNTED) + _some(over, tasks)
    fix = "raise engine.max_model_len" if room != positions else "choose a model with more positions"
    problem = (
        f"{which} of split {split!r} leave no room for a reply: task {over[0]!r} asks with {sizes[over[0]]:,} tokens, "
        f"and prompt and replies have {room:,}; shorten the prompts, or {fix}"
    )
    if longest[-1].id in over:
        raise InvalidInput(problem)
    logger.warning(problem)


def check_repeats(workflow: Workflow, tasks: Mapping[str, Sequence[Task]], config: RunConfig) -> None:
    """Play the first tasks of each split twice, with the same replies and other states of the global generators.

    Raises `InvalidInput` for a task that asks or scores otherwise the second time.
    """
    first, replies = first_tasks(tasks, _PLAYED), known_replies(workflow)

    def played(seed: int) -> list[Outcome]:
        with _global_generators(seed):
            return attempts_at(first, workflow, config, replies, seconds=_SECONDS)

    once, again = played(1), played(2)
    for place, (split, task) in enumerate(first):
        if once[place].error or again[place].error or _same(once[place], again[place]):
            continue
        what = f"reproducible = true: task {task.id!r} of split {split!r}"
        if _same(once[place], played(1)[place]):
            raise InvalidInput(
                f"{what} draws from the global random generator (random or numpy.random), which attempts share in no "
                f"fixed order; draw from random.Random(task.id), at {place_of(users_method(workflow))}"
            )
        raise InvalidInput(
            f"{what} asks or scores otherwise when the same replies are played again: it reads the clock, a service or "
            f"a generator without a seed; let it depend on its task alone, at {place_of(users_method(workflow))}"
        )


def check_template(config: RunConfig, *, several_turns: bool, with_tools: bool) -> ChatTokens | None:
    """Render the turns that a workflow takes with the chat template of the run's model, if it is on this machine;
    returns its tokenizer, or None.

    Raises `InvalidInput` for a template that has no first, second or third turn, or shows no results of tools; and, if
    the run is to be reproducible, for one that names the day.
    """
    if not config.model or (folder := local_folder(config.model)) is None:
        return None
    try:
        tokens = ChatTokens.load(folder, settings=config.engine.chat_template_kwargs)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises; `InvalidInput` is a `ValueError`
        raise InvalidInput(f"model = {config.model!r}: its tokenizer cannot be used: {error}") from error
    tokens.prompt([Message(role="user", content="0")])
    if config.reproducible:
        tokens.check_day()
    if several_turns or with_tools:
        tokens.check_turns(with_call=with_tools)
    return tokens


def check_references(
    workflow: Workflow, tasks: Mapping[str, Sequence[Task]], config: RunConfig, *, num_tasks: int = 20
) -> int:
    """Play `reference_reply` on the first tasks of each split; returns how many tasks were won, each with reward 1.

    Passed over are tasks without a reference, without a tool's server, or whose reference calls tools while the model,
    whose tokenizer reads the calls, is not on this machine. Raises `InvalidInput` if any other task is not won.
    """
    if type(workflow).reference_reply is Workflow.reference_reply:
        return 0
    first, seconds = first_tasks(tasks, num_tasks), config.rollout.attempt_timeout
    outcomes = attempts_at(first, workflow, config, workflow.reference_reply, seconds=seconds, loads_vllm=True)
    tried = [
        (task, outcome)
        for task, outcome in zip(first, outcomes, strict=True)
        if outcome.is_known and not isinstance(outcome.error, ToolUnavailable)
    ]
    compares = type(workflow).score_group is not Workflow.score_group  # then `run` has no say
    lost = [(split, task.id, why) for (split, task), outcome in tried if (why := _lost(outcome, compares))]
    if lost:
        split, task_id, why = lost[0]
        raise InvalidInput(
            f"reference_reply does not win {len(lost)} of {len(first)} tasks. task {task_id!r} of split {split!r}: "
            f"{why}\nMend the task's answer, its reward or reference_reply, which may return None if it does not know"
        )
    return len(tried)


def _lost(outcome: Outcome, compares: bool) -> str:
    if outcome.error is not None:
        return failure_text(outcome.error)
    won = compares or (outcome.reward or 0.0) >= CORRECT
    return "" if won else f"its reward is {outcome.reward}, and an attempt that wins has {CORRECT:g}"


_SIGNATURE = re.compile(r"\(\) (?:got an unexpected keyword|missing \d+ required|takes .* positional arguments?\b)")


def _is_certain(error: BaseException) -> bool:
    """True if no other reply could have avoided it: a name that is nowhere, a field that our objects do not have, a
    call with other arguments than the function has, and what our rewards say of the task or the machine."""
    ours = isinstance(error, AttributeError) and type(error.obj).__module__.partition(".")[0] in ("rollouts", "storage")
    if isinstance(error, RewardFailed) and _NEVER.search(str(error)):
        return True
    calls_amiss = isinstance(error, TypeError) and bool(_SIGNATURE.search(str(error)))
    return ours or calls_amiss or issubclass(_kind(error), NameError | ImportError | InvalidInput)


def _kind(error: BaseException) -> type[BaseException]:
    """The class of an error, or if a reward process only has its name, the one of that name."""
    if not isinstance(error, RewardFailed):
        return type(error)
    name = str(error).partition(": ")[2].partition("\n")[0].partition(":")[0]
    kind = InvalidInput if name == InvalidInput.__name__ else getattr(builtins, name, None)
    return kind if isinstance(kind, type) else OSError


def _is_of_a_server(error: BaseException) -> bool:
    """True for what may be different when the run is under way: networks, servers, time."""
    of_a_network = type(error).__module__.partition(".")[0] in ("aiohttp", "httpx", "openai", "requests")
    return of_a_network or isinstance(error, RewardTimeout | ToolUnavailable) or issubclass(_kind(error), OSError)


def _same(one: Outcome, other: Outcome) -> bool:
    return (one.turns, one.reward) == (other.turns, other.reward)


@contextlib.contextmanager
def _global_generators(seed: int) -> Iterator[None]:
    """The generators that all code of this process shares begin at `seed`, and afterwards go on where they were."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
