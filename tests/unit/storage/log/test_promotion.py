"""A policy becomes the champion unless the log speaks against a step that led to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.log.entries import Evaluation, Quarantine, Retire
from storage.log.promotion import CHAMPION, GAP, NotPromoted, pass_gate, promote, roll_back, why_not_promote
from storage.log.run_log import RunLog
from tests.builders import a_log, a_shard, a_step, a_summary


def _shard(log: RunLog, shard_id: str, position: int, *, version: int) -> None:
    shard = a_shard(shard_id, [a_summary(position, version=version)])
    log.append(replace(shard, head_version=version, tail_version=version))


def _train(log: RunLog, number: int, *, gap: float | None = 0.001) -> None:
    """Shard `s<number>`, sampled by the live policy, and the step that trains it and makes policy `number`."""
    _shard(log, f"s{number}", number, version=number - 1)
    metrics = {} if gap is None else {"engine_gap": gap}
    log.append(replace(a_step(log.state, trained=[f"0.task{number}"]), metrics=metrics))


def _evaluation(version: int, *, num_failed: int = 0, score: float = 0.0, shard_id: str = "e") -> Evaluation:
    counts = {"num_tasks": 3, "n_samples": 2, "num_failed": num_failed}
    facts = {"split": "test", "shard_id": shard_id, "seconds": 1.0, "last_error": "no sandbox"}
    return Evaluation(version=version, score=score, **counts, **facts)  # type: ignore[arg-type]


def _retire(log: RunLog, version: int) -> None:
    log.append(Retire(shard_ids=[], policy_versions=[version], state_paths=[], reason="test"))


@pytest.fixture
def log() -> RunLog:
    """Three steps without a fault."""
    log = a_log()
    for number in (1, 2, 3):
        _train(log, number)
    return log


def _why(log: RunLog, version: int = 3, *, max_gap: float = 1.0) -> list[str]:
    return why_not_promote(log.state, version, max_gap=max_gap)


def test_a_policy_without_a_fault_is_promoted_and_again_without_effect(log: RunLog) -> None:
    alias = promote(log, max_gap=1.0)
    assert (alias.name, alias.version, alias.checksum) == (CHAMPION, 3, log.state.policies[3].weights_sha256)
    entries = log.state.entries
    assert promote(log, 3, max_gap=1.0) == alias and log.state.entries == entries
    assert promote(log, 1, max_gap=1.0).version == log.state.aliases[CHAMPION].version == 1


def test_a_step_with_too_large_a_gap_speaks_against_every_policy_after_it(log: RunLog) -> None:
    """Also one that is no number; none at all does not."""
    _train(log, 4, gap=1.2)
    _train(log, 5, gap=None)
    assert _why(log, 3) == _why(log, 5, max_gap=1.2) == []
    for version in (4, 5):
        assert [line.split(";")[0] for line in _why(log, version)] == [
            "step 4: engine and trainer differed by 1.2 nats per token on the same policy, above 1"
        ]
    with pytest.raises(NotPromoted, match=r"policy 5 of run 'run' is not promoted:\n  step 4"):
        promote(log, max_gap=1.0)
    assert CHAMPION not in log.refresh().aliases
    _train(log, 6, gap=float("nan"))
    assert len(_why(log, 6)) == 2


def test_what_the_champion_was_made_of_is_not_asked_again(log: RunLog) -> None:
    promote(log, 3, max_gap=1.0)
    _train(log, 4)
    log.append(Quarantine(shard_id="s2", reason="cut off"))
    assert _why(log, 4) == []
    log.append(Quarantine(shard_id="s4", reason="cut off"))
    assert _why(log, 4) == ["step 4 trained on shard s4, quarantined since: cut off"]


def test_a_shard_quarantined_for_its_gap_counts_until_a_step_has_shown_the_contrary(log: RunLog) -> None:
    """Any other damage before a step used it is no fault of the policy."""
    for shard_id, position, reason in (("rotten", 5, "its sha256 differs"), ("bad", 4, f"{GAP} 2.5 nats per token")):
        _shard(log, shard_id, position, version=3)
        log.append(Quarantine(shard_id=shard_id, reason=reason))
    assert _why(log, 2) == []
    [line] = _why(log, 3)
    assert line.startswith(f"shard bad, sampled by policy 3, was quarantined: {GAP} 2.5")
    _train(log, 4)  # trains policy 3, with a gap of rounding
    assert _why(log, 3) == _why(log, 4) == []


def test_an_evaluation_that_failed_counts_until_one_succeeds(log: RunLog) -> None:
    log.append(_evaluation(3, num_failed=6))
    assert _why(log) == [
        "every attempt of its evaluation on split 'test' failed: no sandbox; evaluate it again with "
        "`millrace eval RUN --version 3 --split test`"
    ]
    assert _why(log, 2) == []
    with pytest.raises(NotPromoted, match="every attempt of its evaluation"):
        pass_gate(log, _evaluation(3, num_failed=6), min_score=0.0, max_gap=1.0)
    log.append(_evaluation(3, num_failed=5, shard_id="e2"))
    assert _why(log) == []


def test_an_attempt_that_failed_in_the_engine_speaks_against_the_policy_and_one_of_the_environment_does_not(
    log: RunLog,
) -> None:
    for failures, problems in (({"env_error": 2}, 0), ({"engine_error": 1, "timeout": 1}, 1), ({}, 0)):
        evaluation = _evaluation(3, num_failed=sum(failures.values()), shard_id=f"e{failures}")
        log.append(replace(evaluation, failures=failures))
        lines = _why(log)
        assert len(lines) == problems, failures
        assert all(line.startswith("1 of 6 attempts of its evaluation on split 'test' failed in") for line in lines)


def test_a_version_without_weights_is_no_champion(log: RunLog) -> None:
    with pytest.raises(ValueError, match="no policy version 9; it has 0 to 3"):
        promote(log, 9, max_gap=1.0)
    _retire(log, 1)
    with pytest.raises(ValueError, match="policy version 1 of run 'run' was retired"):
        promote(log, 1, max_gap=1.0)


def test_rolling_back_goes_one_champion_back_and_twice_goes_two(log: RunLog) -> None:
    with pytest.raises(ValueError, match="run 'run': there is no earlier champion to go back to"):
        roll_back(log)
    for version in (1, 2, 3):
        promote(log, version, max_gap=1.0)
    assert roll_back(log).version == 2 and log.state.aliases[CHAMPION].version == 2
    assert roll_back(log).version == 1
    with pytest.raises(ValueError, match="policy 1 is its champion, and there is no earlier champion"):
        roll_back(log)
    promote(log, 3, max_gap=1.0)
    assert roll_back(log).version == 1, "2 was rolled back, 1 stood before 3"
    for version in (2, 3):
        promote(log, version, max_gap=1.0)
    _retire(log, 2)
    assert roll_back(log).version == 1, "the weights of 2 are gone"


def _passed(log: RunLog, version: int, *, score: float = 0.9) -> int:
    evaluation = _evaluation(version, score=score, shard_id=f"e{log.state.entries}")
    log.append(evaluation)
    return pass_gate(log, evaluation, min_score=0.8, max_gap=1.0).version


def test_an_evaluation_moves_the_champion_only_forward_and_only_with_the_score(log: RunLog) -> None:
    promote(log, 1, max_gap=1.0)
    for _ in range(2):
        assert _passed(log, 2) == 2
    assert log.entries[-2].kind == "alias", "the second time, only the evaluation is new"
    with pytest.raises(
        NotPromoted, match="policy 2, the champion, is newer; `millrace promote run --version 1 --store memory:`"
    ):
        _passed(log, 1)
    with pytest.raises(NotPromoted, match="it scored 0.500 on split 'test', below 0.8"):
        _passed(log, 2, score=0.5)  # it stays the champion
    assert log.state.aliases[CHAMPION].version == 2
    roll_back(log)
    with pytest.raises(NotPromoted, match="it was the champion and was rolled back to policy 1"):
        _passed(log, 2)
    assert _passed(log, 3) == 3
