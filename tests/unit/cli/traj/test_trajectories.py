"""`millrace traj …` on a small run: what each command finds, says and refuses."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.traj.coloring import Colorist, by_advantage, by_gap, by_logprob, by_version
from cli.traj.diff import Side, compare
from cli.traj.finding import decode, find_trajectories, load_tokenizer, split_id
from cli.traj.stats import trajectory_stats
from storage.log.entries import Policy, Quarantine, Retire, Session, Shard
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run
from storage.objects.digests import DIGEST_FILE, verify_folder
from storage.objects.object_store import LocalStore
from storage.records import Message, ToolCall, Trajectory
from storage.views.queries import open_queries
from tests.builders import a_group, a_step, a_trajectory, a_turn
from tests.unit.cli import builders
from tests.unit.cli.builders import assert_refused, commit

TRAIN = {"advantage": {"kind": "grpo", "scale": "none"}, "stale_policy": "strict"}
printed = partial(builders.printed, columns=100)


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """Two steps' worth of shards and a held-out one, with a real tokenizer and real weights."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    LocalStore(folder).put_folder(base_model, "models/base", last=DIGEST_FILE)
    _a_run(LocalStore(folder), "run")
    return folder


@pytest.fixture
def log(whole_store: Path, store: LocalStore) -> RunLog:
    shutil.copytree(whole_store, store.root)
    return open_run(store, "run")


def _a_run(store: LocalStore, run_id: str, **train: Any) -> RunLog:
    log = create_run(store, run_id, {"train": TRAIN | train, "max_staleness": 0})
    log.append(Session(id="first", code_version="c0de"))
    digest = verify_folder(store.root / "models" / "base")
    log.append(Policy(version=0, path="models/base", weights_sha256=digest, parent=None))
    attempts = [
        _attempt(log, 1.0, 0, "3+4=", "7", logprobs=[-0.1, -0.2]),
        _attempt(log, 0.0, 1, "3+4=", "8", logprobs=[-2.5, -0.3]),
        _attempt(log, 0.0, 2, "3+4=", "8", logprobs=[-2.5, -0.1], status="truncated"),
    ]
    commit(log, "s0", a_group(0, trajectories=attempts, expected=4))
    log.append(a_step(log.state, trained=["0.task0"]))
    later = [
        _attempt(log, 0.5, 0, "5+4=", "99", logprobs=[-0.1, -0.2, -0.3], versions=[0, 1, 1]),
        _attempt(log, 0.25, 1, "5+4=", "90", logprobs=[-0.4, -1.7, -0.3], versions=[1, 1, 1]),
    ]
    commit(log, "s1", a_group(1, trajectories=later))
    held_out = a_group(-1, group_id="eval1.test", trajectories=[_attempt(log, 0.0, 0, "1+1=", "3")])
    commit(log, "e1", held_out, is_eval=True)
    return log


def _attempt(
    log: RunLog, reward: float, attempt: int, prompt: str, reply: str, *, status: str = "ok", **turn: Any
) -> Trajectory:
    sampled = [*_ids(log, reply), load_tokenizer(log).token_to_id("<end>")]
    turns = [a_turn(sampled, context=_ids(log, prompt), **turn)]
    said = [Message(role="user", content=prompt), Message(role="assistant", content=reply, is_completion=True)]
    parts: dict[str, float | None] = {"exact": reward}
    return a_trajectory(reward, attempt=attempt, turns=turns, messages=said, status=status, reward_parts=parts)


def _ids(log: RunLog, text: str) -> list[int]:
    return list(load_tokenizer(log).encode(text, add_special_tokens=False).ids)


def _row(log: RunLog, trajectory_id: str) -> dict[str, Any]:
    (row,) = find_trajectories(log, trajectory_id=trajectory_id)
    return row


def test_the_newest_come_first_unless_others_are_asked_for(log: RunLog):
    choices: list[tuple[dict[str, Any], str]] = [
        ({"count": 9}, "0.task1/0 0.task1/1 0.task0/0 0.task0/1 0.task0/2"),
        ({"include_eval": True}, "eval1.test/0"),
        ({"worst": True, "count": 3}, "0.task0/1 0.task0/2 0.task1/1"),
        ({"best": True, "count": 2}, "0.task0/0 0.task1/0"),
        ({"trajectory_id": "eval1.test/0"}, "eval1.test/0"),
        ({"group": "0.task0", "count": 2}, "0.task0/0 0.task0/1"),
        ({"step": 1, "count": 9}, "0.task0/0 0.task0/1 0.task0/2"),
        ({"where": "status = 'truncated' -- cut", "count": 9}, "0.task0/2"),
    ]
    for options, ids in choices:
        assert [row["id"] for row in find_trajectories(log, **options)] == ids.split()
    row = _row(log, "0.task0/1")
    assert (row["outcome"], row["step"], row["policy_version"], row["shard_id"]) == ("trained", 1, 1, "s0")


def test_what_cannot_be_shown_is_one_sentence(log: RunLog):
    refused = {
        "0.task9/0": "no group '0.task9'",
        "0.task0/9": "no 0.task0/9",
        "0.task0": "write GROUP/ATTEMPT",
        f"0.task0/{'9' * 5000}": "write GROUP/ATTEMPT",
        "0.task0/0 --worst": "leave out --worst",
        "--worst --best": "exclude each other",
        "--step 7": "steps 1 to 1",
        "--where 'rewrd > 1'": '"reward"',
        "--where 'reward <'": "traj sql run` lists the views and their columns",
        "--where 'reward > 1'": "no such trajectory",
        "--color mood": "logprob, advantage, version, gap",
    }
    assert_refused("traj show run {}", refused)
    assert split_id("0.a/b/3") == ("0.a/b", 3)


def test_a_damaged_shard_is_passed_over_and_its_id_says_why(log: RunLog, store: LocalStore):
    path = store.root / log.shard_key("s1")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    shown = printed("traj show run")
    assert "0.task0/0" in shown and "left out: shard s1: its sha256 differs" in shown
    assert "left out" not in printed("traj show run 0.task0/0")
    assert "sha256" in printed("traj show run 0.task1/0", status=2)
    log.append(Quarantine(shard_id="s0", reason="looked odd"))
    assert "quarantined: looked odd" in printed("traj show run 0.task0/0", status=2)


def test_worst_unpacks_only_what_it_shows(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    from storage.views import query_rows

    whole: list[str] = []
    read = query_rows.read_columns

    def watched(log: RunLog, shard: Shard, columns: list[str]) -> pa.Table:
        if "messages" in columns:
            whole.append(shard.id)
        return read(log, shard, columns)

    monkeypatch.setattr(query_rows, "read_columns", watched)
    find_trajectories(log, worst=True)
    assert whole == ["s0"]


def test_show_prints_the_conversation_reward_and_tokens(log: RunLog):
    shown = printed("traj show run 0.task0/1")
    assert "reward 0 (exact 0)  policy 0  ok" in shown
    assert "user  3+4=" in shown and "assistant  8" in shown
    assert "8 -2.50@0  <end> -0.30@0" in shown
    assert "0.task0/1  trained 1  shard s0" in shown
    assert printed("traj show run --worst -n 2").count("reward 0") == 2
    commit(log, "s2", a_group(2, trajectories=[_attempt(log, 1.0, 0, "1+1=", "2" * 60)]))
    shown = printed("traj show run 0.task2/0")
    assert "2" * 60 + "<end>" in shown and "@0" not in shown, "a long reply is running text"


def test_turns_and_tools_are_shown_where_there_are_any(log: RunLog):
    calls = [
        ToolCall(name="add", arguments='{"a": 3}', result="7", seconds=0.5),
        ToolCall(name="add", arguments="{", result="no JSON\x1b[2J", failed=True),
    ]
    ids = {text: _ids(log, text) for text in ("3+4=", "7", "8", "9", "=")}
    turns = [
        a_turn(ids["8"], context=ids["3+4="], logprobs=[-1.0], tool_calls=calls, generate_seconds=0.25),
        a_turn(ids["7"], context=ids["="], logprobs=[-1.0], versions=1, finish_reason="length"),
        a_turn(ids["9"], context=ids["9"], logprobs=[-1.0], versions=1, sequence_idx=1),
    ]
    commit(log, "s2", a_group(2, trajectories=[a_trajectory(0.5, turns=turns)]))
    shown = printed("traj show run 0.task2/0")
    assert "turn 1  8 -1.00@0" in shown and "stop, 1 token in 0.25 s" in shown
    assert "turn 2  7 -1.00@1" in shown and "length, 1 token" in shown
    assert 'add({"a": 3}) → 7  0.5 s' in shown
    assert "add({) failed no JSON·[2J" in shown and "\x1b[2J" not in shown
    assert "sequence  1 of the same attempt" in shown


def test_a_failed_attempt_is_listed_in_a_line_and_shown_with_its_frames(log: RunLog):
    error = "KeyError: 'answr'\n  at my/env.py:31 in look_up: f()\n  at my/env.py:12 in run: g()"
    failed = a_trajectory(None, attempt=1, status="env_error", error=error)
    assert printed("traj ls run --failed") == "no attempt of run run has failed; held-out ones are listed with --eval\n"
    commit(log, "s2", a_group(2, trajectories=[a_trajectory(), failed]))
    assert printed("traj ls run --failed") == "0.task2/1  env_error  KeyError: 'answr' at my/env.py:31\n"
    shown = printed("traj show run 0.task2/1")
    assert "0.task2/1  env_error, no reward" in shown and all(line in shown for line in error.splitlines())
    assert "no reward" not in printed("traj show run 0.task2/0")
    assert trajectory_stats(open_queries(log))["failures"] == {"env_error": 1}


def test_colours_tell_surprise_and_policies_apart(log: RunLog):
    coloring = by_logprob(_row(log, "0.task1/1"))
    assert list(coloring.styles[4:]) == ["yellow", "red", "yellow"], "after the prompt"
    assert list(coloring.values[4:]) == ["-0.40@1", "-1.70@1", "-0.30@1"]
    coloring = by_version(_row(log, "0.task1/0"))
    first, second, third = coloring.styles[4:]
    assert first != second == third
    assert coloring.legend.plain.split() == ["■", "0", "(1", "token)", "■", "1", "(2", "tokens)"]
    assert "9 @0  9 @1" in printed("traj show run 0.task1/0 --color version")


def test_the_advantage_is_the_run_s_own_and_masked_tokens_have_none(log: RunLog, store: LocalStore, tmp_path: Path):
    row = _row(log, "0.task0/0")

    def legend(log: RunLog, row: dict[str, Any]) -> str:
        return Colorist(log, "advantage", cache=tmp_path).color(row).legend.plain

    assert legend(log, row) == "+0.667  reward 1, mean 0.333 over 3 attempts"
    scaled = _a_run(store, "scaled", advantage="grpo")
    assert legend(scaled, row).startswith(f"+{2 / 3 / math.sqrt(1 / 3):.3f}"[:5])
    assert "never trained: pending" in legend(log, _row(log, "0.task1/0"))
    masked = by_advantage({"weight_versions": [-1, 0, 2]}, -2.0, "why", oldest=1)
    assert list(masked.styles) == ["dim", "dim", "bold red"] and "1 stale token masked" in masked.legend.plain


def test_the_gap_is_between_trainer_and_engine(log: RunLog, tmp_path: Path, base_model: Path):
    """The recorded logprobs are replaced by the model's own, once exactly and once off by 0.25."""
    import torch
    from transformers import AutoModelForCausalLM

    row = _row(log, "0.task0/0")
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        exact = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    first = row["prompt_len"]
    row["logprobs"] = [0.0] * first + [exact[first - 1], exact[first] - 0.25]
    coloring = Colorist(log, "gap", cache=tmp_path).color(row)
    assert list(coloring.styles[first:]) == ["green", "red"]
    assert coloring.values[first + 1] == "+0.2" or coloring.values[first + 1] == "+0.3"
    assert "largest 0.25" in coloring.legend.plain and "mean 0.12" in coloring.legend.plain
    row["sampling"] = {**row["sampling"], "temperature": 2.0}
    assert coloring.legend.plain != Colorist(log, "gap", cache=tmp_path).color(row).legend.plain
    assert list(by_gap([math.nan, 0.05], "why").values) == ["", "+0.05"]


def test_a_gap_needs_weights_that_are_still_there(log: RunLog, store: LocalStore):
    show = "traj show run --color gap"
    assert "weights of policy 1, which the store does not have" in printed(f"{show} 0.task1/1", status=2)
    weights = store.root / "models" / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "differs from its digest" in printed(f"{show} 0.task0/0", status=2)
    log.append(Retire(shard_ids=[], policy_versions=[0], state_paths=[], reason="old"))
    assert "was retired: its weights are gone" in printed(f"{show} 0.task0/0", status=2)


def test_ls_has_a_line_for_each(log: RunLog):
    lines = printed("traj ls run").splitlines()
    assert lines[0].split() == ["id", "prompt", "reply", "reward", "status", "policy", "outcome", "tokens"]
    assert lines[1].split() == ["0.task1/0", "5+4=", "99", "0.5", "ok", "0–1", "pending", "3"]
    assert lines[3].split() == ["0.task0/0", "3+4=", "7", "1", "ok", "0", "trained", "1", "2"]
    assert len(lines) == 6
    assert "the newest 2" in printed("traj ls run -n 2")
    assert "eval1.test/0" in printed("traj ls run --eval")
    assert len(printed("traj ls run --where 'reward = 0'").splitlines()) == 3
    assert "--eval" in printed("traj ls run --where is_eval", status=2)


def test_ls_cuts_long_replies_and_says_which_shards_are_missing(log: RunLog, store: LocalStore):
    commit(log, "s2", a_group(2, trajectories=[_attempt(log, 1.0, 0, "1+1=", "2" * 300)]))
    (store.root / log.shard_key("s1")).unlink()
    listed = printed("traj ls run")
    line = listed.splitlines()[1]
    assert line.startswith("0.task2/0") and line.split()[-1] == "301" and len(line) == 100 and "2…" in line
    assert "left out: shard s1: the file is missing" in listed


def test_diff_marks_where_two_attempts_part(log: RunLog):
    shown = printed("traj diff run 0.task1/0 0.task1/1")
    assert "they part" not in shown
    assert "the first 1 sampled tokens are the same; then '9' (-0.20) against '0' (-1.70)" in shown
    (line,) = [line for line in shown.splitlines() if line.split()[:2] == ["4", "9"]]
    assert line.split() == ["4", "9", "0", "-0.100", "1", "-0.400", "-0.300"]
    shown = printed("traj diff run 0.task0/0 0.task0/1")
    assert "they part at the first sampled token: '7' (-0.10) against '8' (-2.50)" in shown
    assert "the same 2 sampled tokens" in printed("traj diff run 0.task0/1 0.task0/2")
    assert "different prompts" in printed("traj diff run 0.task0/1 0.task1/0")


def test_diff_compares_runs_by_text_where_tokenizers_differ(log: RunLog, store: LocalStore):
    other = _a_run(store, "other")
    assert "other: 0.task0/0" in printed("traj diff run 0.task0/0 0.task0/0 --run-b other")
    rows = [_row(one, "0.task0/0") for one in (log, other)]
    pieces = decode(load_tokenizer(log), rows[0]["input_ids"])
    left, right = (Side(name="", row=row, pieces=pieces) for row in rows)
    shifted = right._replace(row={**right.row, "input_ids": [i + 1 for i in right.row["input_ids"]]})
    assert compare(left, shifted).parted_at == 0
    assert compare(left, shifted, by_text=True).shared == [4, 5]


def test_stats_are_those_of_the_attempts(log: RunLog):
    stats = trajectory_stats(open_queries(log), by="version")
    numbers = {"attempts": 5, "groups": 2, "reward_mean": 0.35, "reward_p50": 0.25, "tokens_mean": 2.4, "tokens_max": 3}
    numbers |= dict.fromkeys(("truncated_share", "same_in_group_share", "same_over_run_share"), 0.2)
    assert {name: stats[name] for name in numbers} == pytest.approx(numbers)
    assert stats["prompts"] == {"number": 2, "never_solved": 1, "always_solved": 0, "solved_from": 1.0}
    assert stats["statuses"] == {"ok": 4, "truncated": 1}
    assert stats["outcomes"] == {"trained": 3, "pending": 2}
    assert stats["histogram"] == [("0", 2), ("0.25", 1), ("0.5", 1), ("1", 1)]
    assert [(row["key"], row["attempts"]) for row in stats["by"]] == [(0, 3), (1, 2)]
    assert trajectory_stats(open_queries(log), where="reward < 1", solved=0.5)["prompts"]["never_solved"] == 1
    assert trajectory_stats(open_queries(log), include_eval=True)["attempts"] == 6


def test_many_rewards_are_put_into_bins(log: RunLog):
    attempts = [a_trajectory(i / 20, attempt=i) for i in range(21)]
    commit(log, "s2", a_group(2, trajectories=attempts))
    histogram = trajectory_stats(open_queries(log), where="prompt_id = 'task2'")["histogram"]
    assert [label for label, _ in histogram] == [f"{i / 10:g} …" for i in range(10)]
    assert sum(count for _, count in histogram) == 21 and all(count for _, count in histogram)


def test_quantiles_are_numpys(log: RunLog):
    """Of attempts: the turns and tokens of a forked one are those of all its sequences."""
    random = np.random.default_rng(0)
    lengths = [[int(n) for n in random.integers(1, 40, size=size)] for size in random.integers(1, 6, size=30)]
    seconds = random.exponential(size=30)
    attempts = [
        a_trajectory(
            attempt=i,
            turns=[a_turn([12] * n, sequence_idx=int(i % 2 and turn > 1)) for turn, n in enumerate(lengths[i])],
            started_at=1e9,
            finished_at=1e9 + seconds[i],
        )
        for i in range(30)
    ]
    commit(log, "s2", a_group(2, trajectories=attempts))
    stats = trajectory_stats(open_queries(log), where="prompt_id = 'task2'", by="prompt")
    values = {"seconds": seconds, "turns": [len(turns) for turns in lengths], "tokens": [sum(n) for n in lengths]}
    for found in (stats, *stats["by"]):
        for name, column in values.items():
            wanted = {f"{name}_p{point}": np.percentile(column, point) for point in (50, 95, 99)}
            wanted |= {f"{name}_mean": np.mean(column), f"{name}_max": np.max(column)}
            assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
    shown = printed("traj stats run --where", "prompt_id = 'task2'")
    for name in values:
        (line,) = [line.split() for line in shown.splitlines() if line.split()[:1] == [name]]
        assert line[line.index("p99") + 1] == f"{stats[f'{name}_p99']:.4g}"


def test_stats_as_text_and_as_json(log: RunLog):
    text = printed("traj stats run --by prompt")
    assert "5 in 2 groups at 2 prompts" in text and "never solved 1 (50.0%)" in text and "█" in text
    assert ["task0", "3", "0.333"] in [line.split()[:3] for line in text.splitlines()]
    assert "mean none  p50 none" in text, "no attempt says when it ran"
    timed = a_trajectory(started_at=100.0, finished_at=102.5)
    commit(log, "s2", a_group(2, trajectories=[timed, a_trajectory(attempt=1)]))
    assert trajectory_stats(open_queries(log))["seconds_p99"] == 2.5, "the others are in no quantile"
    stats = json.loads(printed("traj stats run --by step --json"))
    assert [row["key"] for row in stats["by"]] == [1, None]
    assert "version, step, prompt, status" in printed("traj stats run --by mood", status=2)
    assert "--eval" in printed("traj stats run --where 'reward > 5'", status=2)


def test_sql_prints_a_table_json_or_csv(log: RunLog):
    sql = partial(printed, "traj sql run")
    query = "select id, reward, reward_parts, sum(1) as n from trajectories where id = '0.task0/0' group by all"
    assert sql(query).splitlines()[1].split() == ["0.task0/0", "1", '{"exact":', "1.0}", "1"]
    row = {"id": "0.task0/0", "reward": 1.0, "reward_parts": {"exact": 1.0}, "n": 1}
    assert json.loads(sql(query, "--json")) == [row]
    assert list(csv.reader(io.StringIO(sql(query, "--csv")))) == [
        ["id", "reward", "reward_parts", "n"],
        ["0.task0/0", "1.0", '{"exact": 1.0}', "1"],
    ]
    assert json.loads(sql("select 1 where false", "--json")) == []
    assert "no rows" in sql("select 1 where false")
    odd = "select 'nan'::double as a, written_at as b, 12.50::decimal(4, 2) as c from steps"
    (found,) = json.loads(sql(odd, "--json"))
    assert found["a"] is None and found["b"].startswith("20") and found["c"] == 12.5


def test_sql_fits_the_terminal_and_knows_the_views(log: RunLog):
    sql = partial(printed, "traj sql run")
    wide = sql("select * from trajectories where id = '0.task0/0'")
    assert "        prompt  3+4=" in wide and "        reply  7" in wide, "one value to a line"
    long = sql("select * from range(100000)")
    assert "the first 200 rows" in long and len(long.splitlines()) == 202
    views = sql()
    names = "trajectories groups turns tokens steps evaluations mean_logprob:double loss:double"
    assert [name for name in names.split() if name not in views] == []
    example = next(line for line in views.splitlines() if line.startswith("millrace traj sql run"))
    assert "reward" in sql(shlex.split(example)[-1])
    wrong = sql("select rewrd from trajectories", status=2)
    assert '"reward"' in wrong and "`millrace traj sql run` lists" in wrong
    assert "exclude each other" in sql("select 1", "--json", "--csv", status=2)


def test_export_writes_a_data_set_and_says_what_is_in_it(log: RunLog, tmp_path: Path):
    export = partial(printed, "traj export run", str(tmp_path / "out.parquet"))
    assert "5 conversations" in export()
    assert "add --force" in export(status=2)
    assert "1 pair," in export("--format", "dpo", "--margin", "0.5", "--force")
    assert pq.read_table(tmp_path / "out.parquet")["chosen_id"].to_pylist() == ["0.task0/0"]
    assert "sft or dpo" in export("--format", "csv", status=2)
    assert "--format dpo" in export("--margin", "1", "--force", status=2)
    assert "nothing to export" in export("--where", "reward > 9", "--force", status=2)
