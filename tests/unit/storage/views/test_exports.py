"""Data sets for other trainers, read back the way their users read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage.records import Message, Trajectory
from storage.views.exports import export_rows
from storage.views.queries import Queries, open_queries
from tests.builders import a_group, a_log, a_trajectory, a_turn, commit, local_store


def _said(prompt: str, *reply: str) -> list[Message]:
    """A conversation: one prompt, then replies with a tool's result between each two."""
    messages = [Message(role="user", content=prompt)]
    for index, text in enumerate(reply):
        messages += [Message(role="tool", content="ok")] if index else []
        messages.append(Message(role="assistant", content=text, is_completion=True))
    return messages


def _attempts(*scored: tuple[float, str]) -> list[Trajectory]:
    return [a_trajectory(reward, attempt=i, messages=_said("3+4", text)) for i, (reward, text) in enumerate(scored)]


def _queries(folder: Path, groups: dict[str, Sequence[Trajectory]], held_out: Sequence[Trajectory] = ()) -> Queries:
    """A run with groups by name, and perhaps a held-out one."""
    log = a_log(local_store(folder))
    made = [a_group(i, group_id=name, trajectories=attempts) for i, (name, attempts) in enumerate(groups.items())]
    commit(log, "s0", *made)
    if held_out:
        commit(log, "e0", a_group(9, group_id="held-out", trajectories=held_out), is_eval=True)
    return open_queries(log)


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Queries:
    groups = {
        "clear": _attempts((0.5, "maybe"), (1.0, "seven"), (0.0, "no"), (1.0, "7"), (0.0, "nothing")),
        "close": _attempts((0.5, "maybe"), (0.75, "perhaps")),
        "tied": _attempts((1.0, "7"), (1.0, "seven")),
    }
    return _queries(tmp_path_factory.mktemp("run"), groups, held_out=_attempts((1.0, "secret"), (0.0, "hidden")))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_sft_has_a_conversation_per_attempt(queries: Queries, tmp_path: Path):
    file = tmp_path / "sft.parquet"
    assert export_rows(queries, file, "sft", where="reward >= 1 -- the good ones") == 4
    rows = pq.read_table(file).to_pylist()
    assert rows[0] == {
        "messages": [_message("user", "3+4"), _message("assistant", "seven")],
        "prompt_id": "task0",
        "reward": 1.0,
        "reward_parts": [],
        "trajectory_id": "clear/1",
    }
    assert [row["trajectory_id"] for row in rows] == ["clear/1", "clear/3", "tied/0", "tied/1"]
    assert export_rows(queries, file, "sft", force=True) == 9
    assert export_rows(queries, file, "sft", include_eval=True, force=True) == 11


def test_dpo_pairs_the_best_with_the_worst_and_skips_ties(queries: Queries, tmp_path: Path):
    file = tmp_path / "dpo.parquet"
    assert export_rows(queries, file, "dpo", margin=0.25) == 2
    first, second = pq.read_table(file).to_pylist()
    assert first == {
        "prompt": [_message("user", "3+4")],
        "chosen": [_message("assistant", "seven")],
        "rejected": [_message("assistant", "no")],
        "prompt_id": "task0",
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "chosen_id": "clear/1",
        "rejected_id": "clear/2",
    }
    assert (second["chosen_id"], second["rejected_id"]) == ("close/1", "close/0")
    assert export_rows(queries, file, "dpo", include_eval=True, force=True) == 3
    assert export_rows(queries, file, "dpo", margin=0.26, force=True) == 1, "rewards at least so far apart"
    where = "reply <> 'seven' and group_id = 'clear'"
    assert export_rows(queries, file, "dpo", where=where, force=True) == 1, "chosen before they are paired"
    assert pq.read_table(file)["chosen_id"].to_pylist() == ["clear/3"]


def test_pairs_have_one_prompt_and_two_replies_and_an_edited_history_is_one_conversation(tmp_path: Path):
    def attempts(*conversations: list[Message]) -> list[Trajectory]:
        return [a_trajectory(1.0 - i, attempt=i, messages=messages) for i, messages in enumerate(conversations)]

    edited = [a_turn(), a_turn(sequence_idx=1)]
    queries = _queries(
        tmp_path,
        {
            "several": attempts(_said("3+4", "think", "7"), _said("3+4", "think", "8")),
            "other prompt": attempts(_said("3+4", "7"), _said("4+3", "8")),
            "same reply": attempts(_said("3+4", "7"), _said("3+4", "7")),
            "silent": attempts(_said("3+4"), _said("3+4")),
            "edited": [a_trajectory(1.0, turns=edited, messages=_said("3+4", "7"))],
        },
    )
    file = tmp_path / "dpo.parquet"
    assert export_rows(queries, file, "dpo") == 1
    (row,) = pq.read_table(file).to_pylist()
    assert row["prompt"] == [_message("user", "3+4")]
    assert row["chosen"] == [_message("assistant", "think"), _message("tool", "ok"), _message("assistant", "7")]
    assert row["rejected"][-1] == _message("assistant", "8")
    assert export_rows(queries, tmp_path / "sft.parquet", "sft", where="group_id = 'edited'") == 1


def test_what_cannot_be_exported_leaves_no_file_and_a_file_is_replaced_only_by_force(queries: Queries, tmp_path: Path):
    file = tmp_path / "out.parquet"
    file.write_text("mine")
    for where, sentence in {"reward > 9": "nothing to export", "rewrd > 0": '"reward"', "reward >": "syntax"}.items():
        for kind in ("sft", "dpo"):
            with pytest.raises(ValueError, match=sentence):
                export_rows(queries, file, kind, where=where, force=True)
    with pytest.raises(ValueError, match="--force"):
        export_rows(queries, file, "sft")
    with pytest.raises(ValueError, match="no folder"):
        export_rows(queries, tmp_path / "nowhere" / "out.parquet", "sft")
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    assert export_rows(queries, file, "sft", force=True) == 9


def test_hugging_face_datasets_reads_them(queries: Queries, tmp_path: Path):
    import datasets

    read = {}
    for kind in ("sft", "dpo"):
        file = tmp_path / f"{kind}.parquet"
        export_rows(queries, file, kind)
        read[kind] = datasets.load_dataset("parquet", data_files=str(file), cache_dir=str(tmp_path / "cache"))["train"]
    assert read["sft"].column_names == ["messages", "prompt_id", "reward", "reward_parts", "trajectory_id"]
    assert read["dpo"].column_names[:3] == ["prompt", "chosen", "rejected"]
    assert (len(read["sft"]), len(read["dpo"])) == (9, 2)
    assert read["dpo"][0]["chosen"] == [_message("assistant", "seven")]
