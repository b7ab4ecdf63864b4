"""A rescore scores every recorded attempt once, survives a kill, and never touches what was recorded."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollouts.rewards import rescoring
from rollouts.rewards.rescoring import Comparison, Rescored, Rescoring, load_reward
from rollouts.workflow import Workflow
from storage.log.entries import Evaluation, Quarantine, Retire, Shard
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from storage.records import Message, Task, Trajectory
from storage.shards.reward_sets import RewardNameInUse, read_rewards, rewards_key
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, a_log, a_step, a_trajectory, local_store, provenance
from tests.unit.rollouts.scripted_text import said, user

pytestmark = pytest.mark.server
WORKFLOW = f"{__name__}:Numbers"
REWARDS = '''
import os, signal, time
from pathlib import Path

def longer(reply, answer):
    """By how many characters the reply is longer than the answer."""
    with open(Path(__file__).parent / "calls", "a") as calls:
        calls.write(reply + "\\n")
    if (Path(__file__).parent / reply).exists():
        os.kill(os.getppid(), signal.SIGKILL)
    return {"length": len(reply), "answer": -len(answer)}

def same(reply, answer):
    return float(reply == answer)

def whole(reply, answer):
    return float(len(reply))

whole.with_thoughts = True

def picky(reply, answer):
    if reply == "x0.0":
        raise KeyError("no zero")
    while reply == "x0.1":
        pass
    return None if reply == "x1.0" else 1.0
'''


class Numbers(Workflow):
    """Ten tasks to train on, two held out; the answer of task 3 is `3`."""

    def tasks(self, split: str) -> Sequence[Task]:
        numbers = range(10) if split == "train" else range(90, 92)
        return [Task(id=f"task{number}", prompt="?", answer=str(number)) for number in numbers]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "rewards.py"


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """Three training shards of two groups and two attempts each: attempt 1 of task 3 said `x3.1` and got 1.0."""
    log = a_log(local_store(tmp_path))
    for number in range(3):
        _commit(log, f"s{number}", [2 * number, 2 * number + 1])
    return log


def _commit(log: RunLog, shard_id: str, positions: Sequence[int], *, is_eval: bool = False) -> Shard:
    def attempt(position: int, number: int) -> Trajectory:
        messages = [user("?"), said(f"x{position}.{number}")]
        return a_trajectory(float(number), attempt=number, messages=messages)

    groups = [a_group(p, trajectories=[attempt(p, number) for number in range(2)]) for p in positions]
    return commit_shard(log, groups, provenance=provenance(shard_id), sampling=SAMPLING, is_eval=is_eval)


def _rescore(
    log: RunLog,
    reward: str,
    *,
    name: str = "",
    eval_split: str | None = None,
    timeout: float = 30.0,
    num_processes: int = 2,
) -> Rescored:
    function, rewards = load_reward(reward, name=name)
    work = Rescoring(log, function, rewards, tasks_of=Numbers().tasks, eval_split=eval_split)
    reported: list[int] = []
    result = asyncio.run(work.run(num_processes=num_processes, timeout=timeout, on_attempts=reported.append))
    assert result.skipped or sum(reported) == work.num_attempts
    return result


def _calls(file: Path) -> list[str]:
    return sorted((file.parent / "calls").read_text().split())


def test_every_attempt_is_scored_once_from_its_reply_and_its_tasks_answer_and_later_only_what_is_new(
    log: RunLog, file: Path
) -> None:
    before = log.state.entries
    result = _rescore(log, f"{file}:longer")
    assert _calls(file) == sorted(f"x{p}.{a}" for p in range(6) for a in range(2))
    assert (result.new_shards, result.known_shards, result.skipped, dict(result.failures)) == (3, 0, {}, {})
    state = open_run(log.store, "run").state
    assert state.entries == before + 1, "one entry for all three shards"
    assert state.rescored["longer"].files.keys() == {"s0", "s1", "s2"}
    for shard in state.shards.values():
        rewards = read_rewards(log, shard, "longer")
        assert rewards["reward"].to_pylist() == [3.0] * 4  # x3.1 is four characters, the answer one
        assert rewards["reward_parts"].to_pylist() == [[("length", 4.0), ("answer", -1.0)]] * 4
    found = result.comparisons["train"]
    assert (found.attempts, found.changed, found.nulls) == (12, 12, 0)
    assert found.means == (0.5, 3.0) and found.correlation is None, "a constant has no correlation"
    again = _rescore(log, f"{file}:longer")
    assert log.refresh().entries == before + 1 and len(_calls(file)) == 12
    assert (again.new_shards, again.known_shards) == (0, 3) and again.comparisons == result.comparisons
    _commit(log, "s3", [6, 7])
    more = _rescore(log, f"{file}:longer")
    assert (more.new_shards, more.known_shards) == (1, 3) and len(_calls(file)) == 16
    assert log.state.rescored["longer"].files.keys() == {"s0", "s1", "s2", "s3"}


def test_a_reward_gets_what_follows_the_thoughts_unless_it_asks_for_all(log: RunLog, file: Path) -> None:
    reply = Message(role="assistant", content="<think>6?</think>7", is_completion=True, answer="7")
    attempts = [a_trajectory(0.0, attempt=number, messages=[user("?"), reply]) for number in range(2)]
    shard = commit_shard(log, [a_group(7, trajectories=attempts)], provenance=provenance("s7"), sampling=SAMPLING)
    for reward, value in (("same", 1.0), ("whole", float(len(reply.content)))):
        _rescore(log, f"{file}:{reward}")
        assert read_rewards(log, shard, reward)["reward"].to_pylist() == [value] * 2


def test_a_killed_rescore_goes_on_where_it_was(log: RunLog, file: Path) -> None:
    """The reward function kills its parent at a reply of the second shard, before any log entry was written."""
    (file.parent / "x2.1").touch()
    assert isinstance(log.store, LocalStore)
    code = (
        "from storage.log.runs import open_run; from storage.objects.opening import open_store;"
        f"from {__name__} import _rescore;"
        f"_rescore(open_run(open_store({log.store.uri!r}), 'run'), {f'{file}:longer'!r}, num_processes=1)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not log.refresh().rescored and log.store.exists(rewards_key(log, "longer", "s0"))
    (file.parent / "x2.1").unlink()
    before = len(_calls(file))
    _rescore(log, f"{file}:longer")
    assert len(_calls(file)) == before + 8, "the first shard was not scored a second time"
    assert log.state.rescored["longer"].files.keys() == {"s0", "s1", "s2"}


def test_a_reward_that_raises_or_hangs_and_a_missing_reply_are_null_for_that_attempt_and_counted(
    log: RunLog, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescoring, "SHARDS_PER_ENTRY", 2)
    silent = [a_group(8, trajectories=[a_trajectory(1.0, messages=[user("?")])])]
    commit_shard(log, silent, provenance=provenance("silent"), sampling=SAMPLING)
    before = log.state.entries
    result = _rescore(log, f"{file}:picky", timeout=3.0)
    assert dict(result.failures) == {"raised": 1, "timeout": 1, "no reply": 1}
    assert any(words in result.first_error for words in ("no zero", "was killed", "0.task8"))
    assert read_rewards(log, log.state.shards["s0"], "picky")["reward"].to_pylist() == [None, None, None, 1.0]
    found = result.comparisons["train"]
    assert (found.attempts, found.nulls) == (13, 4), "not applicable is null too, and no failure"
    assert found.sums[0] == 9
    assert log.refresh().entries == before + 2, "shards are logged in batches"


def test_evaluation_shards_are_scored_when_asked_with_the_answers_of_their_split(log: RunLog, file: Path) -> None:
    shard = _commit(log, "e0", [90, 91], is_eval=True)
    log.append(
        Evaluation(version=0, split="test", score=0.0, num_tasks=2, num_failed=0, shard_id=shard.id, seconds=1.0)
    )
    without = _rescore(log, f"{file}:longer")
    assert without.comparisons.keys() == {"train"} and "e0" not in log.state.rescored["longer"].files
    result = _rescore(log, f"{file}:longer", eval_split="test")
    assert (result.new_shards, result.known_shards) == (1, 3)
    assert result.comparisons["test"].attempts == 4
    assert read_rewards(log, shard, "longer")["reward"].to_pylist() == [3.0] * 4  # x90.0 is five, the answer two


def test_a_prompt_the_data_set_does_not_have_is_an_error_before_anything_is_scored(log: RunLog, file: Path) -> None:
    _commit(log, "s3", [11])
    with pytest.raises(ValueError, match=r"prompt 'task11' of shard s3 is not in split 'train'"):
        _rescore(log, f"{file}:longer")
    assert not (file.parent / "calls").exists() and not log.state.rescored


def test_damaged_and_retired_shards_are_left_out_by_name_and_the_others_are_scored(log: RunLog, file: Path) -> None:
    log.append(Quarantine(shard_id="s1", reason="rotten"))
    log.append(a_step(log.state, trained=["0.task0", "0.task1"]))
    log.append(Retire(shard_ids=["s0"], policy_versions=[], state_paths=[], reason="test"))
    _commit(log, "s3", [6, 7])
    log.store.put(log.shard_key("s3"), b"bits")
    result = _rescore(log, f"{file}:longer")
    assert result.skipped.keys() == {"s0", "s1", "s3"} and "rotten" in result.skipped["s1"]
    assert "sha256 differs" in result.skipped["s3"]
    assert log.state.rescored["longer"].files.keys() == {"s2"}


def test_edited_code_needs_a_new_name_that_is_a_file_name(log: RunLog, file: Path) -> None:
    _rescore(log, f"{file}:same")
    kept = log.store.get(rewards_key(log, "same", "s0"))
    file.write_text(REWARDS + "\n# edited\n")
    with pytest.raises(RewardNameInUse, match="--name same-2"):
        _rescore(log, f"{file}:same")
    _rescore(log, f"{file}:same", name="same-2")
    assert log.store.get(rewards_key(log, "same", "s0")) == kept
    assert log.state.rescored["same"].reward_sha256 != log.state.rescored["same-2"].reward_sha256
    for no_file_name in ("../up", "a/b", ".hidden", "-x", "with space", "a" * 101):
        with pytest.raises(ValueError, match="use letters"):
            load_reward(f"{file}:same", name=no_file_name)


def test_means_and_correlation_are_those_of_numpy() -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    old = draw.normal(size=50)
    new = 0.5 * old + draw.normal(size=50)
    comparison = Comparison()
    for pair in zip(old, new, strict=True):
        comparison.add(*map(float, pair))
    comparison.add(1.0, None)
    assert comparison.means == pytest.approx((old.mean(), new.mean()))
    assert comparison.correlation == pytest.approx(np.corrcoef(old, new)[0, 1])
    assert (comparison.attempts, comparison.nulls, comparison.changed) == (51, 1, 51)
    assert Comparison().means is None and Comparison().correlation is None
