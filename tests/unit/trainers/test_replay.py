"""A replay gives the recorded weights bit for bit, and with one change says how far it went elsewhere."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from settings.rollout import Fallback
from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import Rescore, Retire, Step
from storage.log.replay_plan import TOLERANCES, CannotReplay, ReplayedStep
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE, seal_folder, verify_folder
from storage.objects.object_store import LocalStore
from storage.records import RolloutGroup, Routes, Turn
from storage.shards.reward_sets import DamagedRewards, NewReward, RewardSet, attempts_of, put_rewards, rewards_key
from storage.shards.shards import read_shard
from tests.architectures import tiny_config
from tests.architectures import tiny_folder as model_folder
from tests.builders import a_config
from tests.unit.trainers.builders import (
    commit,
    config_of,
    groups_of,
    load_causal_lm,
    new_run,
    open_trainer,
    random_rows,
    replayed,
    tiny_model,
)

_STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> RunLog:
    """A run of four steps on two groups each, with optimizer state saved at the third."""
    root = tmp_path_factory.mktemp("finished")
    groups = groups_of(random_rows(tiny_folder, num_groups=2 * _STEPS))
    log = _trained(root, tiny_folder, [groups[2 * n : 2 * n + 2] for n in range(_STEPS)], steps=_STEPS, batch_size=2)
    assert [step.state_path is not None for step in log.refresh().steps] == [False, False, True, False]
    return log


def _trained(
    root: Path,
    model: Path,
    shards: list[list[RolloutGroup]],
    *,
    steps: int,
    config: RunConfig | None = None,
    **rules: Any,
) -> RunLog:
    log = new_run(root, model)
    for number, groups in enumerate(shards):
        commit(log, f"shard-{number}", groups)
    worker = open_trainer(log, config or _config(), cache=root / "cache")
    for _ in range(steps):
        settings = {"max_staleness": 8, "stale_policy": "strict", "min_usable": 2, **rules}
        claim = next_claim(log.refresh(), a_config(**settings))
        assert claim is not None
        worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="session")
    return log


def _file(log: RunLog, key: str | None) -> Path:
    """Where the run's local store has it."""
    assert isinstance(log.store, LocalStore) and key is not None
    return log.store.root / key


@pytest.fixture
def log(finished: RunLog, tmp_path: Path) -> RunLog:
    """A copy of the finished run, to damage or to add to."""
    shutil.copytree(_file(finished, ""), tmp_path / "copy")
    copy = RunLog(LocalStore(tmp_path / "copy"), finished.run_id)
    copy.refresh()
    return copy


def _config(**settings: Any) -> RunConfig:
    return config_of(max_staleness=8, **{"checkpoint_every": 3, "num_minibatches": 2, **settings})


_CONFIG = _config()


def _replay(log: RunLog, tmp_path: Path, first: int, last: int, **options: Any) -> list[ReplayedStep]:
    return replayed(log, tmp_path / "cache", first, last, **{"recorded": _CONFIG, "changed": _CONFIG, **options})


@pytest.mark.parametrize(
    ("first", "last", "resumed_from"), [(1, 4, 0), (3, 3, 0), (4, 4, 3)], ids=["all", "led up to", "over a state"]
)
def test_unchanged_steps_have_the_recorded_weights_and_metrics(
    finished: RunLog, tmp_path: Path, first: int, last: int, resumed_from: int
) -> None:
    # Another gap that is let through is another setting, and a new trainer, that makes the same weights.
    again = _replay(finished, tmp_path, first, last, resumed_from=resumed_from, changed=_config(max_gap=3.0))
    assert all(step.identical for step in again)
    steps = _replay(finished, tmp_path, first, last, resumed_from=resumed_from, save=tmp_path / "kept")
    assert verify_folder(tmp_path / "kept") == steps[-1].recorded_sha256
    load_causal_lm(tmp_path / "kept")
    assert [step.step for step in steps] == list(range(first, last + 1))
    recorded: list[Step] = finished.state.steps[first - 1 : last]
    assert [step.replayed_sha256 for step in steps] == [step.policy.weights_sha256 for step in recorded]
    for step, original in zip(steps, recorded, strict=True):
        assert step.identical and (step.distance, step.cosine) == (0.0, 1.0)
        assert step.replayed == step.recorded and step.recorded.items() <= original.metrics.items()
        assert {"loss", "grad_norm", "entropy", "clip_fraction", "approx_kl"} <= step.replayed.keys()


def test_a_run_keeps_its_arithmetic_and_a_replay_under_another_agrees_within_the_tolerance(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of(random_rows(tiny_folder, num_groups=4))
    shards, config = [groups[:2], groups[2:]], _config(dtype="bfloat16", decoupled={})
    runs = {}
    for version in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr("trainers.run_trainer.ARITHMETIC", version)
            if version == 1:  # as it was before it was recorded
                patch.setattr("trainers.run_trainer.RunTrainer.arithmetic", lambda self, step: "")
            runs[version] = _trained(tmp_path / str(version), tiny_folder, shards, steps=1, config=config, batch_size=2)
    same = {"recorded": config, "changed": config}
    weights = [log.refresh().steps[0].policy.weights_sha256 for log in runs.values()]
    assert weights[0] != weights[1]
    for version, log in runs.items():
        cache = tmp_path / f"cache-{version}"
        worker = open_trainer(log, config, cache=cache)
        claim = next_claim(log.refresh(), a_config(max_staleness=8, batch_size=2))
        assert claim is not None
        step = worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="another")
        assert step.arithmetic.startswith(f"{version}, torch {torch.__version__}, ")
        assert all(each.identical for each in _replay(log, cache, 1, 2, **same))
    with monkeypatch.context() as patch:  # as if the recorded version were no longer known
        patch.setattr("trainers.run_trainer.version_of", lambda arithmetic: 1)
        [replayed] = _replay(runs[2], tmp_path / "cache-2", 1, 1, **same)
    assert not replayed.identical and replayed.agrees
    assert (replayed.recorded_arithmetic[0], replayed.replayed_arithmetic[0]) == ("2", "1")
    assert replayed.distance is not None and 1e-3 < replayed.distance < replayed.tolerance == TOLERANCES["bfloat16"]
    assert not dataclasses.replace(replayed, replayed_arithmetic=replayed.recorded_arithmetic).agrees
    assert not dataclasses.replace(replayed, distance=0.2).agrees


def test_a_run_goes_on_with_smaller_packs_and_a_replay_with_the_recorded_ones_says_so(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of(random_rows(tiny_folder, num_groups=8))
    recorded, smaller = _config(tokens_per_microbatch=512), _config(tokens_per_microbatch=24)
    document = {"train": recorded.train.model_dump()}
    monkeypatch.setattr("trainers.run_trainer.run_config", lambda log: document)
    log = _trained(tmp_path, tiny_folder, [groups[:4], groups[4:]], steps=1, config=recorded, batch_size=4)
    claim = next_claim(log.refresh(), a_config(max_staleness=8, batch_size=4))
    assert claim is not None
    worker = open_trainer(log, smaller, cache=tmp_path / "cache")
    step = worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="another")
    assert step.arithmetic == f"{log.refresh().steps[0].arithmetic}, tokens_per_microbatch = 24"
    first, second = _replay(log, tmp_path, 1, 2, recorded=recorded, changed=recorded)
    assert first.identical and not second.identical and second.agrees
    assert second.replayed_arithmetic == first.recorded_arithmetic


@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
def test_steps_with_nothing_accepted_are_replayed_as_they_were(
    tmp_path: Path, tiny_folder: Path, fallback: Fallback
) -> None:
    groups = groups_of(random_rows(tiny_folder, num_groups=6))
    shards = [[dataclasses.replace(group, accepted=group.position not in (0, 2, 5))] for group in groups]
    rules = {"batch_size": 1, "dynamic_batch": True, "on_nothing_accepted": fallback}
    log = _trained(tmp_path, tiny_folder, shards, steps=6, **rules)
    assert [step.claim.fallback for step in log.refresh().steps] == [fallback, "", fallback, "", "", fallback]
    for first, last in ((1, 6), (3, 3), (2, 4)):
        steps = _replay(log, tmp_path, first, last)
        assert all(step.identical and step.replayed == step.recorded for step in steps)
    changed = _replay(log, tmp_path, 2, 3, changed=_config(learning_rate=2e-3))
    assert not any(step.identical for step in changed)


def test_named_rewards_reach_the_step_from_recorded_shards(tmp_path: Path, tiny_folder: Path) -> None:
    groups = groups_of(random_rows(tiny_folder, num_groups=2))
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        attempt = trajectory.attempt
        trajectory.reward_parts.update(right=float(attempt == 0), short=float(attempt))
    log = _trained(tmp_path, tiny_folder, [groups], steps=1, batch_size=2)
    by_part = _config(advantage={"kind": "grpo", "per_reward": True}, learning_rate=2e-3)
    [step] = _replay(log, tmp_path, 1, 1, changed=by_part)
    assert step.recorded["reward/right"] == pytest.approx(1 / 3) and step.replayed["reward/short"] == 1.0
    assert not step.identical


@pytest.mark.parametrize("first", [1, 2, 4], ids=["from the base policy", "led up to", "over a saved state"])
@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"learning_rate": 2e-3}, "learning_rate"),
        ({"loss": "cispo"}, "loss"),
        ({"advantage": {"kind": "grpo", "scale": "none"}}, ""),
        ({"weight_decay": 0.1}, ""),
        ({"dtype": "bfloat16"}, ""),
        # What the recorded state knows nothing of:
        ({"loss": {"kind": "sft", "min_reward": 0.5}}, "trained_tokens"),
        ({"advantage": "gae", "critic": {"learning_rate": 1e-3}}, ""),
        ({"kl": {"coefficient": 0.1}, "reference": {"kind": "base"}}, ""),
        ({"ema": 0.9, "num_epochs": 2}, ""),
    ],
    ids=str,
)
def test_a_change_begins_with_the_span_and_says_how_far_it_leads(
    finished: RunLog, tmp_path: Path, first: int, change: dict[str, object], metric: str
) -> None:
    once, again = (_replay(finished, tmp_path, first, first, changed=_config(**change))[0] for _ in range(2))
    assert once == again
    assert not once.identical and once.recorded_sha256 != once.replayed_sha256
    assert once.distance and 0 < once.distance < 4 and once.cosine is not None
    assert not metric or once.replayed[metric] != once.recorded[metric]
    assert ("value_loss" in once.replayed, "reference_kl" in once.replayed) == ("critic" in change, "kl" in change)
    if "dtype" not in change and "loss" not in change:
        # The first mini-batch of a step computes its gap before any update: equal, as nothing was changed before.
        assert once.replayed["off_policy_kl"] == once.recorded["off_policy_kl"]
    if metric == "learning_rate" and first == 1:
        # Adam's first update is proportional to the learning rate; the second mini-batch's only nearly.
        assert once.distance == pytest.approx(1.0, abs=0.2) and once.cosine == pytest.approx(1.0, abs=0.05)


def test_without_the_recorded_weights_digests_still_compare(log: RunLog, tmp_path: Path) -> None:
    log.append(Retire(shard_ids=[], policy_versions=[2], state_paths=[], reason="test"))
    [same] = _replay(log, tmp_path, 2, 2)
    [other] = _replay(log, tmp_path, 2, 2, changed=_config(learning_rate=2e-3))
    assert same.identical and not other.identical
    assert other.distance is None and other.cosine is None


def test_a_span_that_needs_weights_retention_removed_says_where_it_can_start(log: RunLog, tmp_path: Path) -> None:
    log.append(Retire(shard_ids=[], policy_versions=[1], state_paths=[], reason="test"))
    shutil.rmtree(_file(log, log.state.policies[1].path))
    elsewhere = _config(learning_rate=2e-3)  # stands for hardware that computes something else
    with pytest.raises(CannotReplay, match=r"up to 1 gave other.*step 2.*policy 1: retention removed.*--from 4"):
        _replay(log, tmp_path, 2, 2, recorded=elsewhere)
    [step] = _replay(log, tmp_path, 2, 2)
    assert step.identical, "weights that come out as recorded need none of the removed ones"


def test_a_state_of_another_step_than_the_log_says_is_refused(log: RunLog, tmp_path: Path) -> None:
    folder = _file(log, log.state.steps[2].state_path)
    (folder / "state.json").write_text('{"step": 7}')
    (folder / DIGEST_FILE).unlink()
    seal_folder(folder)
    with pytest.raises(ValueError, match=r"holds the state of step 7.*of step 3"):
        _replay(log, tmp_path, 4, 4)


@pytest.mark.parametrize("damaged", ["state.safetensors", DIGEST_FILE])
def test_a_damaged_state_is_passed_over_for_an_earlier_one(log: RunLog, tmp_path: Path, damaged: str) -> None:
    file = _file(log, log.state.steps[2].state_path) / damaged
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    [step] = _replay(log, tmp_path, 4, 4, resumed_from=0)
    assert step.identical


def test_a_damaged_shard_names_itself_and_the_way_out(log: RunLog, tmp_path: Path) -> None:
    path = _file(log, log.shard_key("shard-1"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CannotReplay, match=r"step 2 cannot.*shard-1.arrow.*Put the file back.*--from 4"):
        _replay(log, tmp_path, 1, 3)
    with pytest.raises(CannotReplay, match="step 2"):
        _replay(log, tmp_path, 3, 3)
    [step] = _replay(log, tmp_path, 4, 4)  # what it promises
    assert step.identical


def _rescore(log: RunLog, name: str, *, factor: float | None) -> None:
    """Rewards that are the recorded ones times `factor`; with None all but the first are None."""
    wanted, files = RewardSet(name=name, reward="test:reward", reward_sha256="0" * 64), {}
    for shard in log.state.shards.values():
        attempts = attempts_of(read_shard(log, shard))
        rewards = [
            NewReward(reward=a.recorded * factor if factor and a.recorded is not None else None, parts={})
            for a in attempts
        ]
        if not factor:
            rewards[0] = rewards[0]._replace(reward=1.0)
        files[shard.id], _ = put_rewards(log, shard, wanted, attempts, rewards)
    log.append(Rescore(name=name, reward=wanted.reward, reward_sha256=wanted.reward_sha256, files=files))


def test_equal_rewards_of_a_rescore_give_the_recorded_weights_and_others_do_not(log: RunLog, tmp_path: Path) -> None:
    _rescore(log, "same", factor=1.0)
    _rescore(log, "negated", factor=-1.0)
    assert all(step.identical for step in _replay(log, tmp_path, 1, 4, rewards="same"))
    [negated] = _replay(log, tmp_path, 4, 4, rewards="negated")
    assert negated.replayed["reward"] == pytest.approx(-negated.recorded["reward"])
    assert not negated.identical and negated.cosine is not None and negated.cosine < 0.9
    _rescore(log, "gone", factor=None)
    [step] = _replay(log, tmp_path, 1, 1, rewards="gone")
    # One known reward in all: no group has a preference, so there is no gradient.
    assert step.replayed["grad_norm"] == 0 and step.replayed["reward"] == 1.0
    assert step.cosine is None, "nothing moved, so there is no direction"


def test_damaged_rewards_name_the_file_and_the_way_out(log: RunLog, tmp_path: Path) -> None:
    _rescore(log, "same", factor=1.0)
    log.store.put(rewards_key(log, "same", "shard-0"), b"not these")
    with pytest.raises(DamagedRewards, match=r"rewards/same/shard-0.arrow.*sha256 differs.*another name"):
        _replay(log, tmp_path, 1, 1, rewards="same")


def test_a_run_that_replays_routes_is_replayed_bit_for_bit_and_without_them_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(folder)
    config = tiny_config("qwen3_moe", num_hidden_layers=2, vocab_size=len(AutoTokenizer.from_pretrained(folder)))
    model_folder(folder, config)
    groups = groups_of(random_rows(folder, num_groups=4))
    draw = np.random.default_rng(0)

    def routed(turn: Turn) -> Turn:
        number = len(turn.context_ids) + len(turn.sampled_ids) - 1
        first = draw.integers(4, size=(number, 2, 1), dtype=np.uint8)
        ids = np.concatenate([first, (first + 1) % 4], -1).tobytes()
        return dataclasses.replace(turn, routes=Routes(ids=ids, layers=2, choices=2, id_bytes=1))

    with_routes = [
        dataclasses.replace(group, trajectories=[dataclasses.replace(t, turns=[routed(t.turns[0])]) for t in attempts])
        for group in groups
        for attempts in [group.trajectories]
    ]
    recorded = _config(router_replay=True)
    shards = [with_routes[:2], groups[2:]]  # a shard from before the key was set is trained as it was
    log = _trained(tmp_path, folder, shards, steps=2, batch_size=2, config=recorded)
    assert [step.metrics.get("routes_replayed") for step in log.refresh().steps] == [1.0, None]
    steps = replayed(log, tmp_path / "cache", 1, 2, recorded=recorded, changed=recorded)
    assert all(step.identical for step in steps)
    plain = replayed(log, tmp_path / "cache", 1, 2, recorded=recorded, changed=_config())
    assert not plain[0].identical and "routes_replayed" not in plain[0].replayed
