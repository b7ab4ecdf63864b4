"""Sampled attempts as MLflow traces: prompts, replies, tool calls and rewards.

In: a log entry that a few attempts stand for, and its shards. Out: traces with a span per turn, tool call and scoring,
the rewards as feedback. An id is the digest of an attempt's place in the store, so sending it again changes nothing.

    Evaluation, Step ─▶ first readable shard ─▶ attempts from the lowest reward to the highest ─▶ spans, feedback

A shard records the begin and end of an attempt and the duration of turns and calls; a span begins where the last ends.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from settings.tracking import TraceSettings
from storage.log.entries import Evaluation, LogEntry, Step
from storage.log.run_log import RunLog
from storage.log.runs import birth_id
from storage.objects.digests import sha256_of
from storage.records import NOT_SAMPLED
from storage.shards.schema import BadShard
from storage.shards.shards import DamagedShard, read_shard

logger = logging.getLogger("millrace.traces")

_COLUMNS = (
    *("group_id", "prompt_id", "attempt", "sequence_idx", "head_version", "tail_version"),
    *("reward", "reward_parts", "status", "turns", "messages", "started_at", "finished_at"),
)
_LONGEST_TEXT = 20_000  # characters of one message; the shard has all of it


class Traces:
    """Sends the attempts that stand for an entry; `client` is an `mlflow.tracing.client.TracingClient`."""

    def __init__(self, log: RunLog, client: Any, settings: TraceSettings) -> None:
        self._log = log
        self._client = client
        self._settings = settings

    def send(
        self, entry: LogEntry, *, experiment_id: str, run_id: str, find_model: Callable[[int], str | None]
    ) -> None:
        """Send the traces of an entry. `find_model` has MLflow's number of a policy version.

        Shards that are removed or damaged have no traces. Raises `ConnectionError` if the server does not say that it
        takes traces.
        """
        groups: set[str] | None = None  # all of them
        match entry.body:
            case Evaluation(shard_ids=shard_ids, split=split):
                about, count = {"millrace.of": "evaluation", "millrace.split": split}, self._settings.per_evaluation
            case Step(claim=claim, shard_sha256=shards) if claim.step % self._settings.every == 0:
                about, count = {"millrace.of": "training", "millrace.step": str(claim.step)}, self._settings.per_step
                shard_ids, groups = list(shards), {group.group_id for group in claim.trained}
            case _:
                return
        for shard_id, rows in self._attempts(shard_ids, groups, count):
            first = rows[0]
            tags = {**about, "millrace.run_id": self._log.run_id, "millrace.shard": shard_id}
            tags["millrace.trajectory"] = f"{first['group_id']}/{first['attempt']}"
            tags["millrace.status"] = first["status"]
            versions = {row[key] for row in rows for key in ("head_version", "tail_version")} - {NOT_SAMPLED}
            if versions:
                tags["millrace.version"] = str(max(versions))
                if model := find_model(max(versions)):
                    tags["millrace.model_version"] = f"models:/{self._log.run_id}/{model}"
            place = json.dumps([*self._run, shard_id, first["group_id"], first["attempt"]])
            trace_id = "tr-" + sha256_of(place.encode())[:32]  # MLflow's form of an OpenTelemetry trace id
            try:
                self._client.log_spans(experiment_id, _spans(trace_id, rows))
            except NotImplementedError as error:
                # MLflow's client remembers until its end that a server did not tell its version.
                self._client.store._get_server_version.cache_clear()
                raise ConnectionError(
                    f"{error}; a server before 3.4 takes no traces: set traces.per_evaluation and traces.per_step to 0"
                ) from error
            self._client.start_trace(_trace_info(trace_id, rows, tags, experiment_id=experiment_id, run_id=run_id))

    @functools.cached_property
    def _run(self) -> list[str]:
        """What tells the run's traces from those of every other."""
        birth = birth_id(self._log)
        return [birth] if birth else [self._log.store.uri, self._log.run_id]

    def _attempts(
        self, shard_ids: Sequence[str], groups: set[str] | None, count: int
    ) -> list[tuple[str, list[dict[str, Any]]]]:
        """Up to `count` attempts of the first shard that can be read, evenly spaced by reward."""
        for shard_id in shard_ids if count else ():
            if (shard := self._log.state.shards.get(shard_id)) is None:
                continue
            try:
                table = read_shard(self._log, shard, columns=_COLUMNS)
            except (DamagedShard, BadShard) as error:
                logger.info("no traces: %s", error)
                continue
            chosen = _chosen(table, groups, count)
            return [(shard_id, table.select(_COLUMNS).take(indices).to_pylist()) for indices in chosen]
        return []


def _chosen(table: pa.Table, groups: set[str] | None, count: int) -> list[list[int]]:
    """Row numbers of each attempt that is shown."""
    rows_of: dict[tuple[str, int], list[int]] = {}
    rewards: dict[tuple[str, int], float] = {}
    for number, row in enumerate(table.select(["group_id", "attempt", "reward"]).to_pylist()):
        if groups is None or row["group_id"] in groups:
            attempt = row["group_id"], row["attempt"]
            rows_of.setdefault(attempt, []).append(number)
            rewards[attempt] = -math.inf if row["reward"] is None or math.isnan(row["reward"]) else row["reward"]
    ordered = sorted(rows_of, key=lambda key: (rewards[key], key))
    if len(ordered) > count:
        # The lowest and the highest, and between them what is left evenly spaced; one alone is the highest.
        last = len(ordered) - 1
        ordered = [ordered[round(last * k / (count - 1)) if count > 1 else last] for k in range(count)]
    return [rows_of[key] for key in ordered]


def _spans(trace_id: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The attempt, and below it each turn, each tool call and the scoring, one after another."""
    from mlflow.entities import Span, SpanType

    spans: list[Any] = []

    def add(name: str, kind: str, start: int, end: int, inputs: Any, outputs: Any, *, failed: bool = False) -> None:
        """Times in Unix nanoseconds."""
        attributes = {
            "mlflow.traceRequestId": trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
        }
        content = {
            "trace_id": trace_id,
            "span_id": _span_id(trace_id, len(spans)),
            "parent_span_id": _span_id(trace_id, 0) if spans else None,
            "name": name,
            "start_time_unix_nano": start,
            "end_time_unix_nano": end,
            "status": {"code": "ERROR" if failed else "OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
        }
        spans.append(Span.from_dict(content))

    first = rows[0]
    now = _nanoseconds(first["started_at"])
    end = max(now, _nanoseconds(first["finished_at"]))
    prompts, replies = _conversation(first["messages"])
    outcome = {"status": first["status"], "reward": first["reward"], "reply": replies[-1] if replies else ""}
    add("attempt", SpanType.AGENT, now, end, {"messages": prompts[0]}, outcome)
    for index, turn in enumerate(turn for row in rows for turn in row["turns"]):
        start, now = now, min(end, now + _nanoseconds(turn["generate_seconds"]))
        inputs = {"messages": prompts[index]} if index < len(prompts) else {}
        outputs = {"reply": replies[index]} if index < len(replies) else {}
        outputs |= {"sampled_tokens": turn["sampled_len"], "finish_reason": turn["finish_reason"]}
        add(f"turn {index + 1}", SpanType.CHAT_MODEL, start, now, inputs, outputs)
        for call in turn["tool_calls"]:
            start, now = now, min(end, now + _nanoseconds(call["seconds"]))
            shown = {"arguments": _short(call["arguments"])}, {"result": _short(call["result"])}
            add(call["name"] or "tool", SpanType.TOOL, start, now, *shown, failed=call["failed"])
    scored = {"reward": first["reward"], "parts": dict(first["reward_parts"] or [])}
    add("reward", SpanType.EVALUATOR, now, end, {}, scored)
    return spans


def _conversation(messages: Sequence[dict[str, Any]]) -> tuple[list[list[dict[str, str]]], list[str]]:
    """New messages before each turn, and the reply of each turn."""
    prompts: list[list[dict[str, str]]] = [[]]
    replies = []
    for message in messages:
        if message["is_completion"]:
            replies.append(_short(message["content"]))
            prompts.append([])
        else:
            prompts[-1].append({"role": message["role"], "content": _short(message["content"])})
    return prompts[: max(1, len(replies))], replies


def _trace_info(
    trace_id: str, rows: Sequence[dict[str, Any]], tags: dict[str, str], *, experiment_id: str, run_id: str
) -> Any:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    first = rows[0]
    prompts, replies = _conversation(first["messages"])
    begun, ended = int(first["started_at"] * 1000), int(first["finished_at"] * 1000)
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=begun,
        execution_duration=max(0, ended - begun),
        state=TraceState.OK,
        client_request_id=tags["millrace.trajectory"],
        request_preview=prompts[0][-1]["content"][:1000] if prompts[0] else "",
        response_preview=replies[-1][:1000] if replies else "",
        trace_metadata={"mlflow.sourceRun": run_id},
        tags={"mlflow.traceName": f"{tags['millrace.of']} {first['prompt_id']}"[:250], **tags},
        assessments=list(_feedback(trace_id, first, ended)),
    )


def _feedback(trace_id: str, row: dict[str, Any], when: int) -> Iterator[Any]:
    """The reward and its parts, except those that are None or not finite."""
    from mlflow.entities import AssessmentSource, Feedback

    rewards = {"reward": row["reward"], **{f"reward/{name}": value for name, value in row["reward_parts"] or []}}
    for name, value in rewards.items():
        if value is None or not math.isfinite(value):
            continue
        feedback = Feedback(
            name=name,
            value=float(value),
            source=AssessmentSource(source_type="CODE", source_id="millrace.reward"),
            trace_id=trace_id,
            create_time_ms=when,
            last_update_time_ms=when,
        )
        feedback.assessment_id = "a-" + sha256_of(f"{trace_id}/{name}".encode())[:32]
        yield feedback


def _span_id(trace_id: str, number: int) -> str:
    return sha256_of(f"{trace_id}/{number}".encode())[:16]


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " …"
