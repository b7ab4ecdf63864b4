"""What the page shows, as JSON by path: the server answers with it, and a report holds it.

                       ┌─▶ curves         from the log alone ────────────────┐
    run's log, shards ─┼─▶ contents, prompts, groups   by SQL over the shards ├─▶ `Pages.get("runs/<run>/<part>")`
                       └─▶ search, conversations, lineage     what was asked ─┘

The parts from the log read only what is new. The others are made when they are asked for, and are bounded by the
`MOST_…` of their modules. Texts of prompts, policies and users are untrusted: here they are values, on the page text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cli.terminal.formatting import held_out
from cli.traj.coloring import COLORS, Colorist
from cli.traj.finding import find_failure, find_trajectories
from cli.ui import contents, search
from cli.ui.conversations import LONG, conversations, tokenizer_of
from cli.ui.curves import TIME, Curves, lanes, time_budget
from cli.ui.groups import group_lists
from cli.ui.metrics import described
from cli.ui.prompts import VISITS, prompt_history
from infra.environment import cache_folder
from settings.block import leaves
from settings.errors import WHOLE_NUMBER, InvalidInput, NotFound, counted, in_one_line, missing_package
from settings.redaction import without_secrets
from storage.log.entries import OUTCOMES
from storage.log.history import to_json
from storage.log.promotion import CHAMPION, gap_of, why_not_promote
from storage.log.run_log import RunLog
from storage.log.runs import RunLogs, is_training, open_run, outcome, run_config
from storage.log.scores import failure_of, own_scores
from storage.objects.object_store import ObjectStore
from storage.views.lineage import policy_lineage

MOST_SESSIONS = 20
MOST_SHARDS = 40
"""Shards of a policy's lineage."""
REPORTED = ("overview", "steps", "environments", "lanes", "contents", "groups", "prompts", "settings", "lineage")
"""Parts of a run that a report holds."""

Part = Callable[..., Any]
_ASKED: dict[str, frozenset[str]] = {
    "steps": frozenset({"first", "width"}),
    "lineage": frozenset({"version"}),
    "trajectory": frozenset({"id", "color"}),
    "trajectories": frozenset({"words", "step", "reward", "status", "length", "environment", "held_out", "after"}),
}
"""What may be asked of a part."""


class _Watched:
    """A run that is being looked at."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.config = run_config(log)
        self.curves = Curves()
        self.made: dict[str, tuple[int, Any]] = {}
        """Parts from the shards, with the number of log entries that they were made of."""
        self._second: RunLog | None = None
        self._in_use = threading.Lock()

    @contextlib.contextmanager
    def second_log(self) -> Iterator[RunLog]:
        """The run in a log that stays as it is: what takes seconds must not stop the one that is followed."""
        if not self._in_use.acquire(blocking=False):
            yield open_run(self.log.store, self.log.run_id)
            return
        try:
            self._second = self._second or RunLog(self.log.store, self.log.run_id)
            self._second.refresh()
            yield self._second
        finally:
            self._in_use.release()


class Pages:
    """The page's data of one store. Threads may share it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._logs = RunLogs(store)
        self._watched: dict[str, _Watched] = {}
        self._folding = threading.RLock()
        self._reading_shards = threading.Semaphore(4)

    def runs(self) -> dict[str, Any]:
        """Every run in a line, the one that was worked on last first; of a damaged one, the reason."""
        with self._folding:
            facts, damaged = self._logs.look(lambda log: {"run": log.run_id, "damaged": "", **_facts(self._watch(log))})
        lines = sorted(facts.values(), key=lambda line: line["last_at"], reverse=True)
        lines += [{"run": name, "damaged": reason} for name, reason in damaged.items()]
        return {"store": without_secrets(self.store.uri), "runs": lines}

    def get(self, run: str, part: str, /, **asked: str) -> Any:
        """A part of a run. Raises `NotFound`, `InvalidInput` for what is asked, and the errors of a damaged run."""
        return self._get(run, part, asked)

    def all(self, run: str) -> dict[str, Any]:
        """All parts that a report has, by name; the shards are opened once."""
        opened = contents.Opened(open_run(self.store, run))
        return {part: self._get(run, part, {}, opened) for part in REPORTED}

    def _get(self, run: str, part: str, asked: dict[str, str], opened: contents.Opened | None = None) -> Any:
        light, heavy = _LIGHT.get(part), _HEAVY.get(part)
        if light is None and heavy is None:
            raise NotFound(f"there is no page {part!r} of a run")
        if unknown := asked.keys() - _ASKED.get(part, frozenset()):
            raise InvalidInput(f"there is no filter {', '.join(sorted(unknown))}")
        with self._folding:
            watched = self._watch(self._logs.open(run))
            if light is not None:
                watched.curves.update(watched.log)
                return light(watched, **asked)
        assert heavy is not None
        with self._reading_shards, watched.second_log() as log:
            if asked or part not in REPORTED:
                return heavy(contents.Opened(log), **asked)
            entries, made = watched.made.get(part, (-1, None))
            if entries != log.state.entries:
                made = {"as_of_step": log.state.step, **heavy(opened or contents.Opened(log))}
                watched.made[part] = (log.state.entries, made)
            return made

    def version(self, run: str) -> str:
        """Another one whenever the run has changed. Raises as `get`."""
        with self._folding:
            watched = self._watch(self._logs.open(run))
            return f"{id(watched):x}-{watched.log.state.entries}-{int(is_training(watched.log))}"

    def _watch(self, log: RunLog) -> _Watched:
        watched = self._watched.get(log.run_id)
        if watched is None or watched.log is not log:
            watched = self._watched[log.run_id] = _Watched(log)
        return watched


def _facts(watched: _Watched) -> dict[str, Any]:
    """What the list of runs and the head of a run's page say."""
    log, config, state = watched.log, watched.config, watched.log.state
    scores = own_scores(log, config)
    champion = state.aliases.get(CHAMPION)
    return {
        "workflow": config.get("workflow"),
        "model": config.get("model"),
        "training": is_training(log),
        "outcome": outcome(log),
        "reason": in_one_line(without_secrets(state.ended.reason)) if state.ended else "",
        "paused": state.paused,
        "step": state.step,
        "target": state.sessions[-1].steps if state.sessions else 0,
        "trajectories": state.num_trajectories,
        "before": _score(scores[0]) if scores else None,
        "after": _score(scores[-1]) if scores else None,
        "champion": champion.version if champion else None,
        "worked_seconds": state.worked_seconds,
        "started_at": state.started_at,
        "last_at": state.last_at,
        "entries": state.entries,
    }


def _score(evaluation: Any) -> dict[str, Any]:
    return {
        "version": evaluation.version,
        "split": evaluation.split,
        "score": evaluation.score,
        "standard_error": evaluation.standard_error,
        "tasks": evaluation.num_tasks,
        "text": " ".join(held_out(evaluation)),
    }


# ── from the log ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _overview(watched: _Watched) -> dict[str, Any]:
    log, state, curves = watched.log, watched.log.state, watched.curves
    scored, own = [each for each in state.evaluations if not each.failed], own_scores(log, watched.config)
    others = [each for each in scored if not own or each.split != own[0].split]
    evaluations = sorted([*own, *others], key=lambda evaluation: evaluation.version)
    counters = state.counters()
    memory = curves.column("peak_memory_bytes")
    return {
        **_facts(watched),
        "run": log.run_id,
        "place": without_secrets(f"{log.store.uri}/{log.prefix}"),
        "code_version": state.sessions[-1].code_version if state.sessions else "unknown",
        "sessions": len(state.sessions),
        "policy": state.newest_version,
        "aliases": sorted((name, alias.version) for name, alias in state.aliases.items()),
        "scores": [_score(evaluation) for evaluation in evaluations],
        "evaluation_seconds": sum(evaluation.seconds for evaluation in state.evaluations),
        "shards": len(state.shards),
        "trained_tokens": curves.total("trained_tokens"),
        "peak_memory_bytes": float(memory[np.isfinite(memory)].max(initial=0.0)),
        "counters": counters,
        "terms": [(name, counters[name]) for name in (*OUTCOMES, "pending")],
        "rescored": sorted(state.rescored),
        "time": time_budget(curves),
        "phases": TIME,
        "notes": _notes(log),
    }


def _notes(log: RunLog) -> list[str]:
    """What is missing of the run, in sentences."""
    state = log.state
    notes = [f"shard {shard_id} is quarantined: {why}" for shard_id, why in state.quarantined.items()]
    failed = [failure_of(evaluation) for evaluation in state.evaluations if evaluation.failed]
    for sentences, noun in ((notes, "quarantined shard"), (failed, "failed evaluation")):
        if len(sentences) > contents.MOST_NOTES:
            sentences[contents.MOST_NOTES :] = [f"and {counted(len(sentences) - contents.MOST_NOTES, f'more {noun}')}"]
    notes += [f"{text[0].upper()}{text[1:]}." for text in failed]
    if retired := sum(shard_id in state.shards for shard_id in state.retired_shards):  # the rest never were in the log
        shards = counted(retired, "shard")
        policies = counted(len(state.retired_policies), "policy version")
        notes.append(
            f"Retention has removed the files of {shards}, and the weights of {policies}. "
            "Their groups are counted; their tokens and conversations are gone."
        )
    return notes


def _settings(watched: _Watched) -> dict[str, Any]:
    state = watched.log.state
    return {
        "settings": [(key, _shown(value)) for key, value in leaves(watched.config)],
        "sessions": [to_json(session) for session in state.sessions[-MOST_SESSIONS:]],
        "num_sessions": len(state.sessions),
    }


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 500 else f"{text[:500]}… ({len(text):,} characters)"


def _lineage(watched: _Watched, version: str = "") -> dict[str, Any]:
    """What made a policy, by default the newest; and whether it may be promoted."""
    log, state = watched.log, watched.log.state
    if state.live is None:
        return {}
    if version and not re.fullmatch(WHOLE_NUMBER, version):
        raise InvalidInput(f"policy version {version!r}: write a number")
    made = policy_lineage(log, int(version) if version else state.newest_version)
    max_gap = gap_of(watched.config)
    problems = why_not_promote(state, made.version, max_gap=max_gap)
    if made.retired:
        problems.append("its weights are gone: retention has removed them")
    groups = {group.id: group for group in made.groups}
    sampled: dict[str, set[int]] = {}
    for group_id, group in groups.items():
        sampled.setdefault(state.shard_of.get(group_id, ""), set()).update((group.head_version, group.tail_version))
    marked = {alias.version for alias in state.aliases.values()} | {e.version for e in state.evaluations}
    return {
        **{
            field.name: getattr(made, field.name)
            for field in dataclasses.fields(made)
            if field.name not in ("groups", "shards", "evaluations", "problems", "verified")
        },
        "store": without_secrets(made.store),
        "weights": without_secrets(made.weights),
        "groups": len(made.groups),
        "shards": [
            {"id": use.id, "groups": use.groups, "rows": use.rows, "problem": use.problem}
            | {"sampled_by": sorted(v for v in sampled.get(use.id, ()) if v >= 0)}
            for use in made.shards[:MOST_SHARDS]
        ],
        "num_shards": len(made.shards),
        "children": [made.version + 1] if made.version < state.newest_version else [],
        "scores": [_score(evaluation) for evaluation in made.evaluations if not evaluation.failed],
        "choices": sorted({0, state.newest_version, *marked}, reverse=True)[:200],
        "champion": state.aliases[CHAMPION].version if CHAMPION in state.aliases else None,
        "problems": problems,
        "max_gap": max_gap,
    }


def _steps(watched: _Watched, first: str = "0", width: str = "0") -> dict[str, Any]:
    if not (re.fullmatch(WHOLE_NUMBER, first) and re.fullmatch(WHOLE_NUMBER, width)):
        raise InvalidInput("first and width of the steps are whole numbers")
    return watched.curves.part(first=int(first), width=int(width))


_LIGHT: dict[str, Part] = {
    "overview": _overview,
    "steps": _steps,
    "environments": lambda watched: watched.curves.environments(watched.log),
    "lanes": lambda watched: lanes(watched.log),
    "settings": _settings,
    "lineage": _lineage,
}

# ── from the shards ──────────────────────────────────────────────────────────────────────────────────────────────────


def _groups(opened: contents.Opened) -> dict[str, Any]:
    return {"lists": group_lists(opened.log, opened.queries), "rewards": opened.rewards}


def _prompts(opened: contents.Opened) -> dict[str, Any]:
    histories = [prompt_history(opened.queries, name, opened.rewards) for name in VISITS]
    return {"rewards": opened.rewards, "histories": histories}


def _trajectory(opened: contents.Opened, id: str = "", color: str = COLORS[0]) -> dict[str, Any]:
    """An attempt whole; one row per training sequence."""
    log = opened.log
    if failure := find_failure(log, id):
        return {"id": id, "status": failure.status, "error": without_secrets(failure.error), "sequences": []}
    colorist, rows = Colorist(log, color, cache=cache_folder()), find_trajectories(log, trajectory_id=id)
    whole = f"{rows[0]['group_id']}/{rows[0]['attempt']}"
    try:
        shown = conversations(log, {whole: rows[0]["shard_id"]}, tokenizer_of(log), LONG, color=colorist.color)[whole]
    except ImportError as error:
        if missing := missing_package(error.name):
            raise missing from error
        raise
    return {"id": id, "colors": COLORS, "sequences": shown}


def _trajectories(opened: contents.Opened, held_out: str = "", **asked: str) -> dict[str, Any]:
    return search.find(opened.log, held_out=bool(held_out), **asked)


_HEAVY: dict[str, Part] = {
    "contents": contents.contents_of,
    "groups": _groups,
    "prompts": _prompts,
    "trajectory": _trajectory,
    "trajectories": _trajectories,
    "index": lambda opened: {"behind": search.shards_to_index(opened.log)},
}


def reported(store: ObjectStore, run: str) -> dict[str, Any]:
    """Everything that a report of a run holds, by path."""
    parts = {f"runs/{run}/{part}": value for part, value in Pages(store).all(run).items()}
    return {"metrics": described(), **parts}


def as_json(value: Any) -> str:
    """JSON without NaN and the infinities, which it lacks: they are null. In ASCII, so that any text survives."""
    return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
