"""A run in virtual time: the real executor, claims, log and shards around an engine and a trainer that only take time.

    VirtualTimeLoop ─▶ Executor ─▶ shards ─▶ log ─▶ next_claim ─▶ (train_seconds) ─▶ Step ─▶ every k-th: new weights
                          ▲                            └ held back while `should_wait`                     │
                          └────────────── rebase, admit: the quota, and the version of the next tokens ──────┘

In: a `Scenario`. Out: an `Outcome`, the trade-off between staleness and speed. Attempts take log-normal times and
sample tokens all along, each under the policy that is loaded at its moment. Hours of it take seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np

from rollouts.production.attempts import Player
from rollouts.production.executor import Executor
from rollouts.production.leases import Leases
from rollouts.production.prompts import PromptOrder
from settings.rollout import Fallback
from settings.train import StalePolicy
from storage.log.claims import NOTHING, has_sampled_all, next_claim, owed_by
from storage.log.entries import Claim, claimed_groups
from storage.log.producers import Presence
from storage.records import RolloutGroup, Task, Trajectory
from storage.shards.codec import summarise
from tests.builders import a_config, a_group, a_log, a_shard, a_step, a_trajectory, a_turn, wait_for_work
from trainers.data.staleness import lag_of_tokens, tokens_to_train

T = TypeVar("T")

NUM_TASKS = 1000
TICK = 1e-6
"""Seconds that any round of the event loop takes."""
DECILES = 10


class _Selector(selectors.DefaultSelector):
    """Never sleeps: where nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for another one: nothing would ever happen again")
        # As on a real clock, no two looks at it are equal: code may wait for a moment that rounding puts just ahead.
        self.now += max(timeout or 0.0, TICK)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds take no time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """At once, in this thread: another one would live in real time."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


def run_in_virtual_time(script: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in virtual time. Raises `RuntimeError` instead of hanging for ever."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(script)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated."""

    batch_size: int = 64
    max_concurrent: int = 64
    num_workers: int = 1
    """Each with as many groups at once, or its share of what may be in flight at all."""
    max_staleness: float = 1.0
    stale_policy: StalePolicy = "strict"
    schedule: Literal["free", "fixed"] = "free"
    steps_per_update: int = 1
    dynamic_batch: bool = False
    on_nothing_accepted: Fallback = "skip_step"
    pace: bool = True
    rejected: float = 0.0
    """Share of groups that a filter rejects."""
    n_samples: int = 8
    steps: int = 200
    median_seconds: float = 30.0
    """Of an attempt."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of an attempt's seconds."""
    seconds_per_token: float = 10.0
    """Tokens are only there to carry versions: one stands for many."""
    train_seconds: float = 20.0
    publish_seconds: float = 1.0
    shard_seconds: float = 30.0
    seed: int = 0


@dataclass(kw_only=True)
class Outcome:
    """What came of it; rates are those between the first and the last tenth of the steps."""

    scenario: Scenario
    utilisation: float
    """Mean number of running groups / max_concurrent."""
    idle: float
    """Share of time with nothing running."""
    steps_per_hour: float
    outcomes: dict[str, int]
    """Groups by outcome."""
    drop_rate: float
    """Groups that a filter had accepted and staleness took, of all that were accepted."""
    masked: float
    """Share of the claimed groups' sampled tokens that is masked."""
    over_bound: float
    """Share of the trained tokens that is over the bound."""
    length_bias: float
    """Largest difference between the acceptance in one decile of group length and the mean over all."""
    token_bias: float
    """The same for the share of tokens that is trained, of all that were sampled in accepted groups."""
    lag_mean: float
    lag_max: int
    """Of claimed tokens, in weight updates."""
    batches: list[int]
    """Trained groups, per step."""
    attempts: list[int]
    """Groups taken out of the queue, per step."""
    held_seconds: float
    """Mean time per step for which a claim was held back."""
    claims: list[tuple[list[str], ...]]
    """Per step, the ids of its groups by outcome, and the versions that sampled those it trains."""
    owes: set[str]
    """What steps owe to the moment."""


class _SimulatedPlayer:
    """Stands in for `rollouts.production.attempts.Player`: a group lasts as long as its longest attempt."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._num_running, self._since = 0, 0.0
        self.area = self.empty = 0.0
        """Running groups, and the absence of any, integrated over time."""
        self.swaps: list[tuple[float, int]] = [(-1.0, 0)]
        """When which version was loaded."""
        self.accepted: dict[str, bool] = {}
        """What the filter says of a group, also of one that never gets so far."""

    def count(self, change: int = 0) -> None:
        """So many more groups run from now on."""
        now = asyncio.get_running_loop().time()
        self.area += self._num_running * (now - self._since)
        self.empty += (self._num_running == 0) * (now - self._since)
        self._since = now
        self._num_running += change

    async def group(
        self, task: Task, *, group_id: str, position: int, epoch: int, n_samples: int, **_: Any
    ) -> RolloutGroup:
        # The same prompt is the same work in every scenario.
        draw = np.random.default_rng([self._scenario.seed, position])
        durations = draw.lognormal(math.log(self._scenario.median_seconds), self._scenario.sigma, n_samples)
        self.accepted[group_id] = accepted = bool(draw.random() >= self._scenario.rejected)
        started = asyncio.get_running_loop().time()
        self.count(+1)
        try:
            await asyncio.sleep(float(durations.max()))
        finally:
            self.count(-1)
        attempts = [self._attempt(n, started=started, seconds=float(durations[n])) for n in range(n_samples)]
        group = a_group(position, group_id=group_id, trajectories=attempts, accepted=accepted)
        return dataclasses.replace(group, task=task, epoch=epoch)

    def _attempt(self, attempt: int, *, started: float, seconds: float) -> Trajectory:
        num_tokens = max(1, round(seconds / self._scenario.seconds_per_token))
        times = started + seconds * np.arange(num_tokens) / num_tokens
        at = np.searchsorted([time for time, _ in self.swaps], times, side="right") - 1
        turn = a_turn([5] * num_tokens, versions=[self.swaps[i][1] for i in at])
        return a_trajectory(float(attempt % 2), attempt=attempt, turns=[turn])


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to its last step."""
    return run_in_virtual_time(_Simulation(scenario).run())


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._log = a_log()
        self._player = _SimulatedPlayer(scenario)
        self._arrived = asyncio.Event()
        self._version = 0
        self._held_seconds = 0.0
        self._owes: set[str] = set()
        # By group: the versions of its tokens if it was accepted; if it was claimed, their lags and which are trained.
        self._versions: dict[str, np.ndarray] = {}
        self._lags: dict[str, np.ndarray] = {}
        self._trained: dict[str, np.ndarray] = {}
        self._readings: list[tuple[float, float, float]] = []
        margin = scenario.steps // 10
        self._first, self._last = max(1, margin), scenario.steps - margin
        settings = ("n_samples", "batch_size", "max_staleness", "stale_policy", "steps", "steps_per_update")
        settings += ("schedule", "dynamic_batch", "on_nothing_accepted", "max_concurrent", "shard_seconds")
        values = {name: getattr(scenario, name) for name in settings}
        self._config = a_config(**values, min_usable=1, retries=0, shard_bytes=10**9)
        prompts = PromptOrder([Task(id=f"task{n}", prompt="") for n in range(NUM_TASKS)], seed=0)
        lock, player = asyncio.Lock(), cast(Player, self._player)
        self._leases: list[Leases] = []
        self._executors: list[Executor] = []
        for number in range(scenario.num_workers):
            presence = Presence(self._log, f"rollout-{number}", outside=False, lease_timeout=60.0)
            leases = Leases(log=self._log, lock=lock, config=self._config, presence=presence, prompts=prompts)
            executor = Executor(player=player, lease=leases.take, quota=leases.quota, config=self._config)
            self._leases.append(leases)
            self._executors.append(executor)

    async def run(self) -> Outcome:
        for leases in self._leases:
            await leases.presence.join()
        producing = [asyncio.create_task(self._produce(executor)) for executor in self._executors]
        training = asyncio.create_task(self._train())
        await asyncio.wait([*producing, training], return_when=asyncio.FIRST_COMPLETED)
        for producer in producing:
            if producer.done():
                producer.result()
            producer.cancel()
        outcome = training.result()
        for executor in self._executors:
            await executor.close()
        return outcome

    def _rebase(self) -> None:
        for leases, executor in zip(self._leases, self._executors, strict=True):
            leases.rebase(self._version)
            executor.admit()

    async def _produce(self, executor: Executor) -> None:
        self._rebase()
        while True:
            await wait_for_work(executor)
            self._commit(executor, await executor.prepare_batch())

    def _commit(self, executor: Executor, groups: Sequence[RolloutGroup]) -> None:
        if groups:
            self._log.append(a_shard(f"s{self._log.state.entries}", [summarise(group) for group in groups]))
        executor.mark_committed(groups)
        self._rebase()  # some may have gone over the bound before they were committed
        for group in groups:
            if group.accepted:
                turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
                self._versions[group.id] = np.concatenate([turn.weight_versions for turn in turns])
        self._arrived.set()

    async def _train(self) -> Outcome:
        loop, scenario = asyncio.get_running_loop(), self._scenario
        while self._log.state.step < scenario.steps:
            claim = await self._next_claim()
            if claim.step in (self._first, self._last):
                self._player.count()
                self._readings.append((loop.time(), self._player.area, self._player.empty))
            self._count(claim)
            if (owed := owed_by(self._log.state, claim, self._config)) != NOTHING:
                self._owes.add(owed)
            await asyncio.sleep(scenario.train_seconds)
            self._log.append(a_step(self._log.state, claim))
            if self._log.state.newest_version % scenario.steps_per_update == 0:
                while scenario.schedule == "fixed" and not has_sampled_all(
                    self._version, self._log.state, self._config
                ):
                    self._arrived.clear()
                    self._rebase()
                    await self._arrived.wait()
                await asyncio.sleep(scenario.publish_seconds)
                self._version = self._log.state.newest_version
                self._player.swaps.append((loop.time(), self._version))
            self._rebase()
        return self._outcome()

    async def _next_claim(self) -> Claim:
        """As `tasks.steps.next_batch` does it."""
        loop, paced = asyncio.get_running_loop(), not self._scenario.pace
        while True:
            self._arrived.clear()
            claim = next_claim(self._log.state, self._config)
            if claim is None:
                await self._arrived.wait()
                continue
            if paced:
                return claim
            since, paced = loop.time(), True
            for executor in self._executors:
                if await executor.wait_for_stragglers(claim.base_version):
                    self._commit(executor, executor.hand_out())
            self._held_seconds += loop.time() - since

    def _count(self, claim: Claim) -> None:
        """What the trainer would do with the claim, by its own rule."""
        scenario = self._scenario
        for group in claim.trained:
            versions_T = self._versions[group.group_id]
            sampled_T = np.ones(len(versions_T), dtype=bool)
            lag_T = lag_of_tokens(
                versions_T, sampled_T, base_version=claim.base_version, steps_per_update=scenario.steps_per_update
            )
            self._lags[group.group_id] = lag_T
            self._trained[group.group_id] = tokens_to_train(
                lag_T, sampled_T, max_staleness=scenario.max_staleness, stale_policy=scenario.stale_policy
            )

    def _outcome(self) -> Outcome:
        scenario, state = self._scenario, self._log.state
        seconds, area, empty = np.subtract(self._readings[1], self._readings[0]).tolist()
        done = {g: outcome for g, outcome in state.outcomes.items() if self._first < state.step_of[g] <= self._last}
        accepted = [group_id for group_id in done if self._player.accepted[group_id]]
        # A cancelled one had no end in sight.
        lengths = np.array([len(self._versions[g]) if g in self._versions else math.inf for g in accepted])
        is_trained = np.array([done[g] == "trained" for g in accepted], dtype=float)
        finished = np.isfinite(lengths)
        share = np.array([self._trained[g].sum() if g in self._trained else 0 for g in accepted]) / lengths
        lag_T = np.concatenate([np.zeros(0), *self._lags.values()])
        trained_T = np.concatenate([np.zeros(0, dtype=bool), *self._trained.values()])
        return Outcome(
            scenario=scenario,
            utilisation=area / seconds / scenario.max_concurrent,
            idle=empty / seconds,
            steps_per_hour=3600 * (self._last - self._first) / seconds,
            outcomes=state.counters(),
            drop_rate=float(1 - is_trained.mean()) if accepted else 0.0,
            masked=1 - float(trained_T.sum()) / max(1, len(lag_T)),
            over_bound=float((lag_T[trained_T] > math.ceil(scenario.max_staleness)).sum()) / max(1, trained_T.sum()),
            length_bias=_largest_deviation(lengths, is_trained),
            token_bias=_largest_deviation(lengths[finished], share[finished]),
            lag_mean=float(lag_T.sum()) / max(1, len(lag_T)),
            lag_max=int(lag_T.max(initial=0)),
            batches=[len(step.claim.trained) for step in state.steps],
            attempts=[len(claimed_groups(step)) for step in state.steps],
            held_seconds=self._held_seconds / scenario.steps,
            claims=[
                (
                    [f"{outcome} {group.group_id}" for outcome, group in claimed_groups(step)],
                    [f"{sorted(set(self._versions[group.group_id].tolist()))}" for group in step.claim.trained],
                )
                for step in state.steps
            ],
            owes=self._owes,
        )


def _largest_deviation(lengths: np.ndarray, share: np.ndarray) -> float:
    """How far the mean of `share` in one decile of `lengths` is from the mean over all."""
    if not len(lengths):
        return 0.0
    order = np.argsort(lengths, kind="stable")
    deciles = [share[part].mean() for part in np.array_split(order, DECILES) if len(part)]
    return float(np.abs(np.array(deciles) - share.mean()).max())
