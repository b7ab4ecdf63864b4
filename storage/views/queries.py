"""SQL over a run: DuckDB views of the shards that its log has committed, and of the log itself.

In: a run's log. Out: `Queries`, which runs SQL and returns Arrow tables; `VIEWS` lists the views.

    log ─▶ committed shards, less quarantined and retired ones ─▶ Arrow files ─▶ trajectories, turns, tokens
        └─▶ groups, steps, evaluations

Only columns that a query names are read. A damaged file is left out and noted; it stops no query. SQL sees the views
and nothing else: no file, no network, no Python variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs

from settings.errors import InvalidInput
from settings.places.hints import command
from settings.places.state_folder import home
from storage.log.entries import OUTCOMES, Evaluation, LogEntry, Shard, Step
from storage.log.history import to_json
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.views.query_rows import RewardRows, ShardRows

Result = TypeVar("Result")

VIEWS = {
    "trajectories": "one row per training sequence: prompt, reply, reward, outcome",
    "groups": "one row per prompt group, from the log: counts, versions, reward, outcome and step",
    "turns": "one row per call of the policy, with the tools it asked for",
    "tokens": "one row per token, prompts too; logprob 0 and version −1 for tokens that were not sampled",
    "steps": "one row per optimizer step: the groups it took, the policy it made, and every metric",
    "evaluations": "one row per held-out score of a policy version, with pass@k and failures",
    "rewards": "one row per attempt and `millrace rescore`: its reward by that function; the recorded one stays",
    "shard_rows": "the shards' columns as they are stored (docs/shard_format.md), and shard_id",
}
"""Every view, and what a row is."""

_GROUPS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("position", pa.int64()),
        ("epoch", pa.int32()),
        ("expected", pa.int32()),
        ("usable", pa.int32()),
        ("accepted", pa.bool_()),
        ("reject_reason", pa.string()),
        ("failures", pa.map_(pa.string(), pa.int32())),
        ("head_version", pa.int32()),
        ("tail_version", pa.int32()),
        ("mean_reward", pa.float64()),
        ("outcome", pa.string()),
        ("step", pa.int32()),
        ("policy_version", pa.int32()),
        ("shard_id", pa.string()),
        ("shard_number", pa.int32()),
    ]
)
_STEPS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("base_version", pa.int32()),
        ("policy_version", pa.int32()),
        ("weights_sha256", pa.string()),
        *((outcome, pa.int32()) for outcome in OUTCOMES),
        ("session_id", pa.string()),
        ("written_at", pa.timestamp("us")),
    ]
)
_EVALUATIONS_SCHEMA = pa.schema(
    [
        ("version", pa.int32()),
        ("split", pa.string()),
        ("score", pa.float64()),
        ("num_tasks", pa.int32()),
        ("num_failed", pa.int32()),
        ("shard_id", pa.string()),
        ("shard_ids", pa.list_(pa.string())),
        ("seconds", pa.float64()),
        ("n_samples", pa.int32()),
        ("pass_at", pa.map_(pa.string(), pa.float64())),
        ("failures", pa.map_(pa.string(), pa.int32())),
        ("last_error", pa.string()),
        ("standard_error", pa.float64()),
        ("pass_all", pa.map_(pa.string(), pa.float64())),
        ("maj_at", pa.map_(pa.string(), pa.float64())),
        ("written_at", pa.timestamp("us")),
    ]
)

_SQL = """
CREATE VIEW trajectories AS
SELECT
    r.group_id || '/' || r.attempt AS id,
    r.prompt_id,
    list_filter(r.messages, lambda m: m.role = 'user')[1].content AS prompt,
    list_filter(r.messages, lambda m: m.is_completion)[-1].content AS reply,
    r.reward, r.reward_parts, r.status,
    g.outcome, g.step, g.policy_version,
    r.head_version, r.tail_version,
    list_sum(list_transform(r.turns, lambda t: t.context_len + t.sampled_len))::INTEGER AS num_tokens,
    list_sum(list_transform(r.turns, lambda t: t.sampled_len))::INTEGER AS num_sampled,
    list_sum(r.logprobs) / list_sum(list_transform(r.turns, lambda t: t.sampled_len)) AS mean_logprob,
    len(r.turns)::INTEGER AS num_turns,
    list_sum(list_transform(r.turns, lambda t: len(t.tool_calls)))::INTEGER AS num_tool_calls,
    r.messages,
    r.group_id, r.attempt, r.sample_idx, r.sequence_idx, r.epoch, g.position, r.group_expected, r.group_usable,
    r.accepted, r.reject_reason, r.is_eval, r.prompt_len, r.sampling,
    r.worker_id, r.queued_at, r.started_at, r.finished_at,
    r.shard_id, g.shard_number
FROM shard_rows r LEFT JOIN groups g ON g.shard_id = r.shard_id AND g.id = r.group_id;

CREATE VIEW rewards AS
SELECT group_id || '/' || attempt AS trajectory_id, name, reward, reward_parts, group_id, attempt, shard_id
FROM reward_rows;

CREATE VIEW turns AS
SELECT
    trajectory_id, sequence_idx, turn_idx,
    turn.context_len, turn.sampled_len, turn.finish_reason, turn.generate_seconds,
    turn.tool_calls, len(turn.tool_calls)::INTEGER AS num_tool_calls,
    group_id, attempt, shard_id
FROM (
    SELECT
        group_id || '/' || attempt AS trajectory_id,
        unnest(turns) AS turn, (generate_subscripts(turns, 1) - 1)::INTEGER AS turn_idx,
        sequence_idx, group_id, attempt, shard_id
    FROM shard_rows
);

CREATE VIEW tokens AS
SELECT
    group_id || '/' || attempt AS trajectory_id,
    sequence_idx,
    (generate_subscripts(input_ids, 1) - 1)::INTEGER AS position,
    unnest(input_ids) AS token_id,
    unnest(loss_mask) AS sampled,
    unnest(logprobs) AS logprob,
    unnest(weight_versions) AS weight_version,
    group_id, attempt, shard_id
FROM shard_rows;
"""


class Queries:
    """A run opened for SQL; it does not see later entries. Not thread-safe."""

    def __init__(self, log: RunLog, shards: Sequence[Shard], entries: Sequence[LogEntry]) -> None:
        import duckdb

        state, self._log = log.state, log
        self.left_out: dict[str, str] = {}
        """Shard id → why its rows are left out. A damaged file appears once a query has read it."""
        for shard in shards:
            if shard.id in state.quarantined:
                self.left_out[shard.id] = f"quarantined: {state.quarantined[shard.id]}"
            elif shard.id in state.retired_shards:
                self.left_out[shard.id] = "retired: retention has removed the file"
        readable = [shard for shard in shards if shard.id not in self.left_out]
        self._rows = ShardRows.of(log, readable, left_out=self.left_out)
        scratch = home() / "cache" / f"duckdb-{os.getpid()}"  # which DuckDB makes if a query needs it, and removes
        self._connection = duckdb.connect(config={"python_enable_replacements": False, "temp_directory": str(scratch)})
        tables = {
            "shard_rows": self._rows,
            "groups": _groups(state, shards),
            "steps": _steps(entries),
            "evaluations": _evaluations(entries),
            "reward_rows": RewardRows.of(log, {shard.id for shard in readable}, left_out=self.left_out),
        }
        for name, table in tables.items():
            self._connection.register(name, table)
        self._connection.execute(_SQL)
        # DuckDB takes a scan for one row, and would hash the shards instead of the groups. So the right side of a join
        # is hashed, as it is written.
        self._connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """The result as a table; `parameters` replace the question marks.

        Raises `InvalidInput` for SQL that is wrong or asks for more than the views, `StoreError` or `OSError` if the
        store cannot be reached.
        """
        return self.stream(sql, lambda reader: reader.read_all(), parameters)

    def stream(self, sql: str, use: Callable[[pa.RecordBatchReader], Result], parameters: Sequence[Any] = ()) -> Result:
        """What `use` returns; it gets the result batch by batch. Errors as in `select`."""
        import duckdb

        try:
            relation = self._connection.sql(sql, params=list(parameters) or None)
            if relation is None:
                raise InvalidInput("the SQL is empty")
            return use(relation.to_arrow_reader())
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            failure, self._rows.failure = self._rows.failure, None  # kept, it would keep the connection alive
            if failure is not None:
                raise failure from None
            if isinstance(error, duckdb.Error):
                views = command("traj", "sql", self._log.run_id, store=self._log.store.uri)
                raise InvalidInput(f"{_sentence(error)}\n`{views}` lists the views and their columns") from error
            raise

    def columns(self, view: str) -> dict[str, str]:
        """Name and SQL type of a view's columns."""
        table = self.select(f"DESCRIBE {view}")
        return dict(zip(table["column_name"].to_pylist(), table["column_type"].to_pylist(), strict=True))


def open_queries(log: RunLog, *, shard_ids: Collection[str] | None = None) -> Queries:
    """Open the views of `VIEWS` over a run.

    With `shard_ids` they hold those shards alone, `steps` and `evaluations` are empty, and no other part of the log is
    read. The digest of every shard that a query reads is compared with the log's.
    """
    if shard_ids is not None:
        return Queries(log, [log.state.shards[shard_id] for shard_id in shard_ids], [])
    entries = list(log.entries)  # each is unpacked once
    return Queries(log, [e.body for e in entries if isinstance(e.body, Shard)], entries)


def _groups(state: RunState, shards: Sequence[Shard]) -> pa.Table:
    """Every group of the shards, except those that were lost with a quarantined shard."""
    numbers = {shard_id: number for number, shard_id in enumerate(state.shards)}
    rows: list[dict[str, Any]] = []
    for shard in shards:
        for group in shard.groups:
            outcome = "eval" if shard.is_eval else state.outcomes.get(group.id)
            if outcome is None and group.id not in state.pending:
                continue
            step = None if shard.is_eval else state.step_of.get(group.id)
            rows.append(
                {
                    **vars(group),
                    "failures": list(group.failures.items()),
                    "outcome": outcome or "pending",
                    "step": step,
                    "policy_version": step if outcome == "trained" else None,  # step k makes version k
                    "shard_id": shard.id,
                    "shard_number": numbers[shard.id],
                }
            )
    return pa.Table.from_pylist(rows, schema=_GROUPS_SCHEMA)


def _steps(entries: Sequence[LogEntry]) -> pa.Table:
    """A row per step; every metric is a column, which is null in steps without it."""
    steps = [(entry.body, entry.written_at) for entry in entries if isinstance(entry.body, Step)]
    names = dict.fromkeys(name for step, _ in steps for name in step.metrics if name not in _STEPS_SCHEMA.names)
    schema = pa.schema([*_STEPS_SCHEMA, *(pa.field(name, pa.float64()) for name in names)])
    rows = [
        {
            **step.metrics,
            "step": step.claim.step,
            "base_version": step.claim.base_version,
            "policy_version": step.policy.version,
            "weights_sha256": step.policy.weights_sha256,
            **{outcome: len(getattr(step.claim, outcome)) for outcome in OUTCOMES},
            "session_id": step.session_id,
            "written_at": _microseconds(written_at),
        }
        for step, written_at in steps
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _evaluations(entries: Sequence[LogEntry]) -> pa.Table:
    rows = [
        {
            **to_json(evaluation),
            "shard_ids": evaluation.shard_ids,
            **{name: list(getattr(evaluation, name).items()) for name in ("pass_at", "pass_all", "maj_at", "failures")},
            "written_at": _microseconds(entry.written_at),
        }
        for entry in entries
        if isinstance(evaluation := entry.body, Evaluation)
    ]
    return pa.Table.from_pylist(rows, schema=_EVALUATIONS_SCHEMA)


def _microseconds(unix_seconds: float) -> int:
    return int(unix_seconds * 1e6)


def _sentence(error: Exception) -> str:
    """DuckDB's message without its picture of the query and without the list of all operators."""
    text = str(error).split("\n\nLINE")[0]
    first, *others = text.splitlines()
    hints = [line for line in others if line.startswith(("Candidate bindings", "Did you mean"))]
    return " ".join([first, *hints])
