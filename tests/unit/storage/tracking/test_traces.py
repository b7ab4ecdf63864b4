"""MLflow shows sampled attempts turn by turn, with real times and rewards, and none of them twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from settings.tracking import TraceSettings
from storage.log.entries import Evaluation, LogEntry, Retire, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.records import Message, ToolCall, Trajectory
from storage.tracking.registry import Registry
from storage.tracking.traces import Traces
from tests.builders import BASE, a_claim, a_group, a_log, a_step, a_trajectory, a_turn, commit, local_store

_NOON = 1_800_000_000.0


def _agent(reward: float, *, attempt: int) -> Trajectory:
    """Two turns, two calls after the first, one of which failed."""
    calls = [
        ToolCall(name="add", arguments='{"a": 37}', result="82", seconds=0.5),
        ToolCall(name="look", arguments="{}", result="no such page", failed=True, seconds=0.25),
    ]
    turns = [
        a_turn([12, 13], context=[2, 8, 3], generate_seconds=1.0, tool_calls=calls),
        a_turn([6, 1], context=[9], generate_seconds=2.0),
    ]
    messages = [
        Message(role="user", content="What is 37+45?"),
        Message(role="assistant", content="add(37, 45)", is_completion=True),
        Message(role="tool", content="82"),
        Message(role="assistant", content="It is 82.", is_completion=True),
    ]
    parts = {"exact": reward, "format": None}
    times: dict[str, Any] = {"started_at": _NOON, "finished_at": _NOON + 4.0}
    return a_trajectory(reward, attempt=attempt, turns=turns, messages=messages, reward_parts=parts, **times)


def _evaluation(shard_id: str, version: int = 0) -> Evaluation:
    counts: dict[str, Any] = {"num_tasks": 1, "num_failed": 0, "n_samples": 5, "seconds": 1.0}
    return Evaluation(version=version, split="test", score=0.5, shard_id=shard_id, **counts)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    """An evaluation of five attempts and two steps; no test changes it."""
    log = create_run(local_store(tmp_path_factory.mktemp("store")), "run", {"traces": {"every": 2}})
    log.append(Session(id="first", code_version="c0de1"))
    log.append(BASE)
    rewards = (0.5, 0.0, 1.0, 0.25, 0.75)
    tries = [_agent(reward, attempt=attempt) for attempt, reward in enumerate(rewards)]
    commit(log, "e0", a_group(0, trajectories=tries, expected=5), is_eval=True)
    log.append(_evaluation("e0"))
    for step in (0, 1):
        commit(log, f"s{step}", a_group(step))
        log.append(a_step(log.state, a_claim(log.state, trained=[f"0.task{step}"])))
    return log


class _Mirror:
    """What MLflow has of a run after `sync`."""

    def __init__(self, log: RunLog, folder: Path) -> None:
        from mlflow import MlflowClient

        self.log = log
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self.sync()

    def sync(self) -> None:
        Registry(self.log, tracking_uri=self.uri).sync()
        [self.run] = self.client.search_runs([self.client.get_experiment_by_name("millrace").experiment_id])
        traces = self.client.search_traces(locations=[self.run.info.experiment_id], max_results=100)
        self.traces = sorted(traces, key=lambda trace: (trace.info.tags["millrace.of"], _rewards(trace)["reward"]))


@pytest.fixture(scope="module")
def mirror(log: RunLog, tmp_path_factory: pytest.TempPathFactory) -> _Mirror:
    return _Mirror(log, tmp_path_factory.mktemp("mlflow"))


def _rewards(trace: Any) -> dict[str, float]:
    return {assessment.name: assessment.value for assessment in trace.info.assessments}


def test_an_evaluation_and_every_nth_step_show_their_worst_and_their_best_attempt_once(mirror: _Mirror) -> None:
    tags = [trace.info.tags for trace in mirror.traces]
    assert [one["millrace.of"] for one in tags] == ["evaluation", "evaluation", "training", "training"]
    assert [_rewards(trace)["reward"] for trace in mirror.traces] == [0.0, 1.0, 0.0, 1.0]
    assert [one.get("millrace.step") for one in tags] == [None, None, "2", "2"]
    assert [one["millrace.trajectory"] for one in tags] == ["0.task0/1", "0.task0/2", "0.task1/1", "0.task1/0"]
    assert {trace.info.trace_metadata["mlflow.sourceRun"] for trace in mirror.traces} == {mirror.run.info.run_id}
    assert [tags[0][f"millrace.{name}"] for name in ("run_id", "shard", "version")] == ["run", "e0", "0"]
    version = mirror.client.get_model_version("run", tags[0]["millrace.model_version"].rpartition("/")[2])
    assert version.tags["millrace.version"] == "0"
    # Sent again, because it was killed before it wrote the cursor.
    before = [(t.info.trace_id, len(t.data.spans), _rewards(t), len(t.info.assessments)) for t in mirror.traces]
    mirror.client.set_tag(mirror.run.info.run_id, "millrace.synced_entries", "0")
    mirror.sync()
    after = [(t.info.trace_id, len(t.data.spans), _rewards(t), len(t.info.assessments)) for t in mirror.traces]
    assert after == before and [num_spans for _, num_spans, *_ in after] == [6, 6, 3, 3]


def test_a_trace_has_turns_and_calls_with_their_times_and_texts(mirror: _Mirror) -> None:
    trace = mirror.traces[1]
    spans = {span.name: span for span in trace.data.spans}
    assert [(name, span.span_type) for name, span in spans.items()] == [
        ("attempt", "AGENT"), ("turn 1", "CHAT_MODEL"), ("add", "TOOL"), ("look", "TOOL"), ("turn 2", "CHAT_MODEL"),
        ("reward", "EVALUATOR"),
    ]  # fmt: skip
    noon = int(_NOON * 1e9)
    times = [((span.start_time_ns - noon) / 1e9, (span.end_time_ns - noon) / 1e9) for span in spans.values()]
    assert times == [(0.0, 4.0), (0.0, 1.0), (1.0, 1.5), (1.5, 1.75), (1.75, 3.75), (3.75, 4.0)]
    root = spans["attempt"].span_id
    assert [span.parent_id for span in spans.values()] == [None] + [root] * 5
    assert spans["turn 1"].inputs == {"messages": [{"role": "user", "content": "What is 37+45?"}]}
    assert spans["turn 2"].inputs == {"messages": [{"role": "tool", "content": "82"}]}
    assert spans["turn 2"].outputs["reply"] == "It is 82."
    assert (spans["add"].inputs, spans["add"].outputs) == ({"arguments": '{"a": 37}'}, {"result": "82"})
    assert [str(spans[name].status.status_code.value) for name in ("add", "look")] == ["OK", "ERROR"]
    assert _rewards(trace) == {"reward": 1.0, "reward/exact": 1.0}
    assert trace.info.execution_duration == 4000 and trace.info.request_time == int(_NOON * 1000)


def _sent(log: RunLog, entry: LogEntry, **settings: int) -> list[Any]:
    """What a server gets for an entry."""
    sent: list[Any] = []
    client = SimpleNamespace(log_spans=lambda experiment_id, spans: None, start_trace=sent.append)
    traces = Traces(log, client, TraceSettings(**settings))
    traces.send(entry, experiment_id="1", run_id="r", find_model=lambda version: None)
    return sent


def test_shards_that_are_gone_or_damaged_and_failed_attempts_have_no_traces(tmp_path: Path) -> None:
    log = a_log(local_store(tmp_path))
    failed = [a_trajectory(None, attempt=attempt, turns=[], status="env_error") for attempt in range(2)]
    commit(log, "failed", a_group(0, trajectories=failed, expected=2), is_eval=True)
    for position, shard_id in enumerate(("damaged", "retired", "whole"), start=1):
        commit(log, shard_id, a_group(position), is_eval=True)
    log.store.put(log.shard_key("damaged"), log.store.get(log.shard_key("damaged"))[:-40])
    log.append(Retire(shard_ids=["retired"], policy_versions=[], state_paths=[], reason="by age"))
    num_sent = {}
    for shard_id in ("failed", "damaged", "never-committed", "retired", "whole"):
        log.append(_evaluation(shard_id))
        num_sent[shard_id] = len(_sent(log, log.entries[-1]))
    assert num_sent == {"failed": 0, "damaged": 0, "never-committed": 0, "retired": 0, "whole": 2}


def test_attempts_are_chosen_from_the_lowest_reward_to_the_highest(log: RunLog) -> None:
    entry = next(entry for entry in log.entries if isinstance(entry.body, Evaluation))
    five = [0.0, 0.25, 0.5, 0.75, 1.0]
    for count, rewards in {0: [], 1: [1.0], 2: [0.0, 1.0], 3: [0.0, 0.5, 1.0], 9: five}.items():
        sent = _sent(log, entry, per_evaluation=count)
        assert [info.assessments[0].value for info in sent] == rewards
