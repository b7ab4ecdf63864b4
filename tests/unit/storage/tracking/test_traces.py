"""MLflow shows sampled attempts turn by turn, with real times and rewards, and none of them twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from settings.evaluation import TraceSettings
from storage.log.entries import Evaluation, Quarantine, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.records import Message, RolloutGroup, ToolCall, Trajectory
from storage.shards.shards import commit_shard
from storage.tracking.registry import Registry
from storage.tracking.traces import Traces
from tests.builders import BASE, SAMPLING, a_claim, a_group, a_step, a_trajectory, a_turn, local_store, provenance

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


def _commit(log: RunLog, shard_id: str, *groups: RolloutGroup, is_eval: bool = False) -> None:
    commit_shard(log, groups, provenance=provenance(shard_id), sampling=SAMPLING, is_eval=is_eval)


def _evaluation(shard_id: str, version: int = 0) -> Evaluation:
    counts: dict[str, Any] = {"num_tasks": 1, "num_failed": 0, "n_samples": 5, "seconds": 1.0}
    return Evaluation(version=version, split="test", score=0.5, shard_id=shard_id, **counts)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    log = create_run(local_store(tmp_path / "store"), "run", {"traces": {"every": 2}})
    log.append(Session(id="first", code_version="c0de1"))
    log.append(BASE)
    rewards = (0.5, 0.0, 1.0, 0.25, 0.75)
    tries = [_agent(reward, attempt=attempt) for attempt, reward in enumerate(rewards)]
    _commit(log, "e0", a_group(0, trajectories=tries, expected=5), is_eval=True)
    log.append(_evaluation("e0"))
    for step in (0, 1):
        _commit(log, f"s{step}", a_group(step))
        log.append(a_step(log.state, a_claim(log.state, trained=[f"0.task{step}"])))
    return log


class _Mirror:
    def __init__(self, tmp_path: Path) -> None:
        from mlflow import MlflowClient

        self.uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def sync(self, log: RunLog) -> Registry:
        registry = Registry(log, tracking_uri=self.uri)
        registry.sync()
        return registry

    def run(self) -> Any:
        experiment = self.client.get_experiment_by_name("millrace")
        [run] = self.client.search_runs([experiment.experiment_id])
        return run

    def traces(self) -> list[Any]:
        """By reward."""
        found = self.client.search_traces(locations=[self.run().info.experiment_id], max_results=100)
        return sorted(found, key=lambda trace: (trace.info.tags["millrace.of"], _rewards(trace)["reward"]))


@pytest.fixture
def mirror(tmp_path: Path) -> _Mirror:
    return _Mirror(tmp_path)


def _rewards(trace: Any) -> dict[str, float]:
    return {assessment.name: assessment.value for assessment in trace.info.assessments}


def test_an_evaluation_shows_its_worst_and_its_best_attempt_and_every_nth_step_too(
    log: RunLog, mirror: _Mirror
) -> None:
    mirror.sync(log)
    traces = mirror.traces()
    assert [(trace.info.tags["millrace.of"], _rewards(trace)["reward"]) for trace in traces] == [
        ("evaluation", 0.0),
        ("evaluation", 1.0),
        ("training", 0.0),
        ("training", 1.0),
    ]
    assert {trace.info.tags.get("millrace.step") for trace in traces} == {None, "2"}
    shown = [trace.info.tags["millrace.trajectory"] for trace in traces]
    assert shown == ["0.task0/1", "0.task0/2", "0.task1/1", "0.task1/0"]


def test_a_trace_has_turns_and_calls_with_their_times_and_texts(log: RunLog, mirror: _Mirror) -> None:
    mirror.sync(log)
    trace = mirror.traces()[1]
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


def test_a_trace_leads_to_the_run_the_model_version_and_the_shard(log: RunLog, mirror: _Mirror) -> None:
    mirror.sync(log)
    run = mirror.run()
    trace = mirror.traces()[0]
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.info.run_id
    tags = trace.info.tags
    assert (tags["millrace.run_id"], tags["millrace.shard"], tags["millrace.version"]) == ("run", "e0", "0")
    version = mirror.client.get_model_version("run", tags["millrace.model_version"].rpartition("/")[2])
    assert version.tags["millrace.version"] == "0"


def test_sending_again_after_a_kill_doubles_nothing(log: RunLog, mirror: _Mirror) -> None:
    run_id = mirror.sync(log)._ensure_run()
    before = mirror.traces()
    mirror.client.set_tag(run_id, "millrace.synced_entries", "0")  # the cursor was not written any more
    mirror.sync(log)
    after = mirror.traces()
    assert [t.info.trace_id for t in after] == [t.info.trace_id for t in before]
    assert [len(t.data.spans) for t in after] == [6, 6, 3, 3]
    assert [_rewards(t) for t in after] == [_rewards(t) for t in before]
    assert [len(t.info.assessments) for t in after] == [2, 2, 1, 1]


def test_what_is_gone_or_damaged_is_left_out(log: RunLog, mirror: _Mirror) -> None:
    log.append(_evaluation("never-committed", version=1))
    path = log.store.root / log.shard_key("e0")  # type: ignore[attr-defined]
    path.write_bytes(path.read_bytes()[:-40])
    log.append(Quarantine(shard_id="s0", reason="rotten"))
    mirror.sync(log)
    assert [trace.info.tags["millrace.of"] for trace in mirror.traces()] == ["training", "training"]
    assert mirror.run().data.tags["millrace.synced_entries"] == str(log.state.entries)


def test_an_evaluation_in_which_every_attempt_failed_has_no_traces(log: RunLog, mirror: _Mirror) -> None:
    failed = [a_trajectory(None, attempt=attempt, turns=[], status="env_error") for attempt in range(2)]
    _commit(log, "e1", a_group(9, trajectories=failed, expected=2), is_eval=True)
    log.append(_evaluation("e1", version=1))
    mirror.sync(log)
    assert all(trace.info.tags["millrace.shard"] != "e1" for trace in mirror.traces())


@pytest.mark.parametrize(
    ("count", "rewards"), [(0, []), (1, [1.0]), (2, [0.0, 1.0]), (3, [0.0, 0.5, 1.0]), (9, [0.0, 0.25, 0.5, 0.75, 1.0])]
)
def test_attempts_are_chosen_from_the_lowest_reward_to_the_highest(
    log: RunLog, count: int, rewards: list[float]
) -> None:
    sent: list[Any] = []

    class Client:
        def log_spans(self, experiment_id: str, spans: list[Any]) -> None: ...

        def start_trace(self, info: Any) -> None:
            sent.append(info)

    entry = next(entry for entry in log.entries if isinstance(entry.body, Evaluation))
    traces = Traces(log, Client(), TraceSettings(per_evaluation=count))
    assert traces.send(entry, experiment_id="1", run_id="r", find_model=lambda version: None) == len(rewards)
    assert [info.assessments[0].value for info in sent] == rewards
