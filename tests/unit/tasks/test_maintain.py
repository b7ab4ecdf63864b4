"""What a run removes beside its training, what it says of that, and how much it expects to take."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.log.runs import create_run
from storage.objects.object_store import StoreError
from storage.shards.shards import read_shard
from tasks.checks.space import Space, expected_space
from tasks.maintain import Housekeeping
from tests.builders import BASE, MemoryStore, a_config, a_group, a_step, commit


def _log(**recorded: Any) -> RunLog:
    log = create_run(MemoryStore(), "run", recorded)
    log.append(BASE)
    return log


def _step(log: RunLog) -> RunState:
    commit(log, f"s{log.state.step + 1}", a_group(log.state.step + 1))
    step = a_step(log.state, trained=list(log.state.pending))
    log.store.put(f"{step.policy.path}/model.safetensors", b"w" * 1000)
    return log.append(replace(step, policy=replace(step.policy, anchor=None)))


async def _train(log: RunLog, *, steps: int, **retention: Any) -> list[str]:
    """The versions whose files are there after each third step and after the end."""
    own = RunLog(log.store, "run")
    housekeeping = Housekeeping(own, a_config(retention=retention, evaluation={"every": 0}))
    there = []
    for number in range(1, steps + 1):
        await housekeeping.tidy(_step(log).step)
        if number % 3 == 0:
            there.append(" ".join(name.partition("-")[0] for name in log.store.names("runs/run/policies")))
    await housekeeping.tidy(steps, is_last=True)
    return [*there, " ".join(sorted(name.partition("-")[0] for name in log.store.names("runs/run/policies")))]


async def test_a_run_keeps_its_newest_policies_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="millrace")
    log = _log(retention={})
    there = await _train(log, steps=8, every=3, keep_last=2, replay_steps=0)
    assert there == ["1 2 3", "3 4 5 6", "7 8"], "three steps after the first look, and at the end"
    assert caplog.messages[-1].startswith("retention removed 6.0 KB during training and kept ")
    assert caplog.messages[-1].endswith("policies 0 (base model); 7 (among the newest); 8 (live)")
    assert len(log.refresh().retired_policies) == 6


async def test_a_run_of_before_keeps_everything_unless_its_file_says_otherwise() -> None:
    for recorded, retention, left in (
        ({}, {}, 25),
        ({}, {"keep_last": 2}, 2),
        ({"retention": {}}, {}, 10),
        ({"retention": {}}, {"every": 0}, 25),
    ):
        there = await _train(_log(**recorded), steps=25, **retention)
        assert len(there[-1].split()) == left, (recorded, retention)


async def test_a_store_that_fails_is_one_warning_and_the_next_time_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _log(retention={})
    housekeeping = Housekeeping(RunLog(log.store, "run"), a_config(retention={"every": 1, "keep_last": 2}))

    def fails(keys: object) -> None:
        raise StoreError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(log.store, "delete", fails)
        for _ in range(5):
            await housekeeping.tidy(_step(log).step)
    assert caplog.messages == ["retention could not remove anything this time; the next one tries again: gone"]
    await housekeeping.tidy(_step(log).step)
    assert sorted(log.store.names("runs/run/policies")) == ["5-a", "6-a"]
    assert read_shard(log, log.state.shards["s1"]).num_rows, "a resume needs it: no state was saved"


def test_the_space_a_run_takes_is_counted_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    """16·2·32² = 32,768 parameters in float32: 131,072 bytes a policy, a delta half, a state 393,216, a row 3,316."""
    config = a_config(
        steps=2000, batch_size=1, n_samples=2, warmup={"num_layers": 2, "hidden_size": 32}, evaluation={"every": 0}
    )
    policy, state, step = 131_072, 12 * 32_768, 2 * (256 * 11 + 500)
    everything = policy + 200 * policy + 1800 * policy // 2 + 200 * state + 2000 * step
    kept = policy + 3 * policy + 17 * policy // 2 + 8 * state + 220 * step
    assert expected_space(config, removes=True) == Space(store=kept, everything=everything, databases=60_474_000)
    assert expected_space(config, removes=False).store == everything  # type: ignore[union-attr]
    caplog.set_level(logging.INFO, logger="millrace")
    Housekeeping(_log(retention={}), config).announce()
    assert caplog.messages == [
        "retention keeps the 10 newest policies, all that were evaluated, the best, those with an alias, their "
        "anchors, and what a replay of the last 100 steps needs; the run takes about 6.2 MB of its store, without "
        "retention 236.2 MB, and 60.5 MB in databases"
    ]
