"""One run, one fault after another, each with a named outcome; at the end the weights are the undisturbed run's.

    a life of the run:  start ─▶ a few steps ─▶ a fault ─▶ it goes on, or it ends with a sentence ─▶ the next life

`make chaos` draws a long series of faults, and writes what it has counted to `docs/chaos_SEED.json`. Here those come
once that no other test of this folder has and that a run survives, a worker's death among them, and one at the end that
it does not.
"""

from __future__ import annotations

import collections
import enum
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import psutil
import pytest

from infra.services.services import Service, running_services
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.opening import open_store
from tests.chaos.outcomes import check_trained_once, weights_of
from tests.conftest import PROJECT, SCRIPTED, Home
from tests.faulty_s3 import ALWAYS, FaultyS3
from tests.faulty_s3 import Fault as StoreFault

RUN = "disturbed"
BATCH_SIZE = 4  # of the run file
LONG = int(os.environ.get("MILLRACE_CHAOS_FAULTS", "0"))
"""How many faults a long series has; 0: once each of those no other test has."""
SEED = int(os.environ.get("MILLRACE_CHAOS_SEED", "0"))
STALL_TIMEOUT = 90.0
"""Seconds a step may take: another trainer, who takes 10 s to import torch, takes 40 s on a busy machine."""


AGENTS_OF_RAY = {"ray::RuntimeEnvAgent", "ray::DashboardAgent"}
"""Those look every now and then whether their raylet lives, and end within a minute or two."""


class Fault(enum.Enum):
    """What happens; the exit status, or None if the run goes on; the sentence; within how many seconds."""

    KILL_TRAINER = ("kill -9 of the trainer", None, "another trainer takes its place", 240)
    KILL_WORKER = ("kill -9 of a rollout worker", None, "another worker takes its place", 240)
    STORE_ERRORS = ("503, 500, 409, connections cut, answers lost", None, "", 240)
    STORE_STALLS = ("a write that the store never answers", None, "", 240)
    CLOCK_AHEAD = ("the clock jumps a day ahead", None, "", 240)
    CLOCK_BACK = ("the clock jumps a day back", None, "", 240)
    KILL_DRIVER = ("kill -9 of the driver", -9, "", 120)
    STOP_PREFECT = ("Prefect's server is stopped, and goes on after a while", None, "", 240)
    STOP_TRAINER = ("the trainer is stopped", None, "so it is killed", 240)
    READ_ONLY_STORE = ("the store may not be written", 2, "AccessDenied", 120)
    FULL_STORE = ("the store has no room", 28, "is full", 120)
    FULL_DISK = ("the machine's own disk has no room", 28, "3.1 MB free", 120)
    STOP_MLFLOW = ("MLflow's server is stopped, and goes on after a while", None, "", 240)
    KILL_NODE = ("kill -9 of the raylet", 2, "Ray's raylet has died", 60)
    STOP_NODE = ("the raylet is stopped", 2, "Ray's raylet has died", 60)
    KILL_GCS = ("kill -9 of Ray's GCS", 2, "Ray's GCS, which knows all workers, has died", 60)
    STOP_GCS = ("Ray's GCS is stopped", 2, "Ray's GCS, which knows all workers, has died", 60)
    STOP_DRIVER = ("the driver is stopped, and goes on after a while", None, "", 240)
    DAMAGED_SHARD = ("a bit of a shard changes on its way", None, "", 240)
    KILL_EVERYTHING = ("kill -9 of the process group", -9, "", 60)
    STOP_WORKER = ("a rollout worker is stopped", None, "so it is killed", 240)

    def __init__(self, _: str, status: int | None, sentence: str, seconds: float) -> None:
        self.status = status
        self.sentence = sentence
        self.seconds = seconds


def series() -> list[Fault]:
    """Faults in the order they come."""
    if not LONG:
        elsewhere = {Fault.KILL_EVERYTHING, Fault.KILL_DRIVER, Fault.STOP_WORKER, Fault.STOP_DRIVER}  # test_kill.py, …
        elsewhere |= {Fault.KILL_NODE, Fault.STOP_NODE, Fault.KILL_GCS, Fault.STOP_GCS}  # test_liveness.py
        elsewhere |= {Fault.STOP_TRAINER, Fault.STOP_PREFECT, Fault.STOP_MLFLOW, Fault.READ_ONLY_STORE}  # `make chaos`
        return sorted(set(Fault) - elsewhere, key=lambda fault: (fault.status is not None, list(Fault).index(fault)))
    draw = random.Random(SEED)
    return [draw.choice(list(Fault)) for _ in range(LONG)]


class Disturbed:
    """A run in a bucket behind a proxy that can fail, on a machine whose clock can jump and whose disk can fill."""

    def __init__(self, home: Home, proxy: FaultyS3, base_model: Path, services: dict[str, Service]) -> None:
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        self.store = open_store(f"s3://{bucket}/store")
        self._log = RunLog(self.store, RUN)
        self.lives: list[subprocess.Popen[str]] = []
        self.home = home
        self.proxy = proxy
        self.services = services
        self.clock = home.path / "clock"
        self.set_clock(0)
        cache = home.path / "cache"
        self.full = cache.with_suffix(".full")
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "machine"), os.environ.get("PYTHONPATH")]))
        machine = {"PYTHONPATH": path, "CLOCK_FILE": str(self.clock), "FULL_DISK": str(cache)}
        home.environment |= proxy.variables | machine
        timeouts = [f"rollout.stall_timeout={STALL_TIMEOUT}", "rollout.attempt_timeout=20"]
        self.arguments = ["train", str(SCRIPTED), f"model={base_model}", f"store={self.store.uri}"]
        # Weights and states are removed as ever; all steps are replayed at the end.
        self.arguments += ["evaluation.every=0", "retention.replay_steps=100000", *timeouts]
        self.arguments += [f"tracking={services['mlflow'].url}"]

    def start(self) -> subprocess.Popen[str]:
        """The next life, which ends by a fault."""
        self.lives.append(self.home.start(*self.arguments, f"run={RUN}", "steps=100000"))
        return self.lives[-1]

    def state(self) -> RunState:
        """The fold of the log as it stands; `refresh` checks the conservation law."""
        return self._log.refresh()

    def set_clock(self, ahead: int) -> None:
        """Let the run's clock be so many seconds ahead; replaced in one piece, because others are reading it."""
        draft = self.clock.with_suffix(".draft")
        draft.write_text(str(ahead))
        draft.replace(self.clock)

    def output(self) -> str:
        return (self.home.path / "output.txt").read_text()

    def wait_for_step(self, process: subprocess.Popen[str], goal: int, *, seconds: float = 240) -> None:
        self.home.wait(process, lambda: self.state().step >= goal, seconds=seconds)

    def inflict(self, fault: Fault, process: subprocess.Popen[str]) -> None:
        match fault:
            case Fault.KILL_EVERYTHING:
                os.killpg(process.pid, signal.SIGKILL)
            case Fault.KILL_DRIVER:
                process.kill()
            case Fault.KILL_TRAINER:
                self.home.process_of(RUN, "trainer-0").kill()
            case Fault.KILL_NODE | Fault.STOP_NODE | Fault.KILL_GCS | Fault.STOP_GCS:
                family = psutil.Process(process.pid).children(recursive=True)
                part = "raylet" if fault in (Fault.KILL_NODE, Fault.STOP_NODE) else "gcs_server"
                hit = next(child for child in family if child.name() == part)
                hit.kill() if fault in (Fault.KILL_NODE, Fault.KILL_GCS) else hit.suspend()
            case Fault.STOP_TRAINER:
                self.home.process_of(RUN, "trainer-0").suspend()
            case Fault.STOP_DRIVER | Fault.STOP_PREFECT | Fault.STOP_MLFLOW:
                service = {Fault.STOP_PREFECT: "prefect", Fault.STOP_MLFLOW: "mlflow"}.get(fault)
                hit = [psutil.Process(self.services[service].pid if service else process.pid)]
                hit += hit[0].children(recursive=True) if service else []
                for each in hit:
                    each.suspend()
                time.sleep(20)  # as long as they stay stopped
                for each in hit:
                    each.resume()
            case Fault.KILL_WORKER | Fault.STOP_WORKER:
                newest = max(self.home.path.glob(f"logs/{RUN}/rollout-*.log"), key=lambda log: log.stat().st_mtime)
                worker = self.home.process_of(RUN, newest.stem)
                worker.kill() if fault is Fault.KILL_WORKER else worker.suspend()
            case Fault.READ_ONLY_STORE:
                self.proxy.fail(StoreFault.READ_ONLY, times=ALWAYS)
            case Fault.FULL_STORE:
                self.proxy.fail(StoreFault.QUOTA_EXCEEDED, times=ALWAYS)
            case Fault.FULL_DISK:
                self.full.touch()
            case Fault.STORE_ERRORS:
                for kind in (StoreFault.SLOW_DOWN, StoreFault.INTERNAL_ERROR, StoreFault.CONFLICT):
                    self.proxy.fail(kind, times=2)
                for kind in (StoreFault.CUT_REQUEST, StoreFault.LOSE_ANSWER):
                    self.proxy.fail(kind, times=1)
                self.proxy.fail(StoreFault.CUT_ANSWER, times=2, method="GET")
            case Fault.STORE_STALLS:  # after 15 s the client sends it again
                self.proxy.fail(StoreFault.STALL)
            case Fault.DAMAGED_SHARD:
                self.proxy.fail(StoreFault.DAMAGE, part="/shards/")
            case Fault.CLOCK_AHEAD:
                self.set_clock(86400)
            case Fault.CLOCK_BACK:
                self.set_clock(-86400)


@pytest.fixture
def disturbed(
    home: Home, moto: dict[str, str], base_model: Path, services_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disturbed]:
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with FaultyS3(moto).running() as proxy:
        run = Disturbed(home, proxy, base_model, running_services(services_home))
        yield run
        for life in run.lives:
            if life.poll() is None:
                run.inflict(Fault.KILL_EVERYTHING, life)
                life.wait()


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.name() not in AGENTS_OF_RAY
    except psutil.NoSuchProcess:
        return False


def _write_down(state: RunState, count: collections.Counter[str], longest: float, committed: set[str]) -> None:
    """What `make chaos` has counted so far, by itself: positions and prompts, and not what the fold says of them."""
    if not LONG:
        return
    trained = [state.groups[group.group_id] for step in state.steps for group in step.claim.trained]
    prompts = collections.Counter((group.epoch, group.prompt_id) for group in trained)
    taken = {group.position for group in trained}
    document = {
        "seed": SEED,
        "faults": count.total(),
        "by_kind": dict(sorted(count.items())),
        "steps": state.step,
        "lost": len(committed - state.groups.keys()),
        "skipped": len(set(range(BATCH_SIZE * state.step)) - taken),
        "doubled": sum(times - 1 for times in prompts.values()),
        "longest_seconds": round(longest, 1),
    }
    (PROJECT / "docs" / f"chaos_{SEED}.json").write_text(json.dumps(document, indent=1) + "\n")
    assert (document["lost"], document["skipped"], document["doubled"]) == (0, 0, 0)


@pytest.mark.timeout(2400 + 120 * LONG)
def test_every_fault_has_its_outcome_and_none_changes_the_weights(disturbed: Disturbed) -> None:
    run, draw = disturbed, random.Random(SEED)
    process: subprocess.Popen[str] | None = None
    committed: set[str] = set()
    count: collections.Counter[str] = collections.Counter()
    longest = 0.0
    for fault in series():
        if process is None:
            process = run.start()
        run.wait_for_step(process, run.state().step + draw.randint(1, 3))
        family = psutil.Process(process.pid).children(recursive=True)
        said, quarantined = len(run.output()), len(run.state().quarantined)
        inflicted = time.monotonic()
        run.inflict(fault, process)
        if fault.status is None:
            run.wait_for_step(process, run.state().step + 2, seconds=fault.seconds)
            assert run.proxy.all_faults_happened
            assert len(run.state().quarantined) == quarantined + (fault is Fault.DAMAGED_SHARD)
            run.set_clock(0)
        else:
            assert process.wait(timeout=fault.seconds) == fault.status, f"{fault}\n{run.output()[-3000:]}"
            _, alive = psutil.wait_procs(filter(_is_ours, family), timeout=60)
            assert not alive, f"{fault} left {alive}"
            process = None
            run.proxy.heal()
            run.full.unlink(missing_ok=True)
        assert fault.sentence in run.output()[said:], f"{fault}\n{run.output()[said:]}"
        longest = max(longest, time.monotonic() - inflicted)
        state = run.state()
        count[fault.name] += 1
        _write_down(state, count, longest, committed)
        assert committed <= state.groups.keys(), f"{fault} lost a committed group"
        committed = set(state.groups)
    if process is not None:
        process.kill()
        process.wait()
    steps = run.state().step + 1
    run.home.run(*run.arguments, f"run={RUN}", f"steps={steps}")
    state = run.state()
    check_trained_once(state, steps=steps)
    # What ran again in place of a damaged shard are other attempts, so from there on the weights are others.
    again = (step.claim.step for step in state.steps if any(".retry" in g.group_id for g in step.claim.trained))
    comparable = next(again, steps + 1) - 1
    assert LONG or comparable > len(series())
    run.home.run(*run.arguments, "run=undisturbed", f"steps={comparable}")
    undisturbed = RunLog(run.store, "undisturbed").refresh()
    check_trained_once(undisturbed, steps=comparable)
    made = weights_of(undisturbed)
    assert len(set(made)) == comparable, "steps that leave the weights alone would compare equal whatever happened"
    order = [undisturbed.groups[g.group_id].position for step in undisturbed.steps for g in step.claim.trained]
    assert order == list(range(BATCH_SIZE * comparable)), "the run to compare with took its prompts in another order"
    assert weights_of(state)[:comparable] == made
    # All of them, those behind a damaged shard too, are what the recorded shards make of the base model.
    span = ("--from", "1", "--store", run.store.uri, "--json")
    replayed = json.loads(run.home.run("replay", RUN, *span, timeout=120 + 4 * steps).stdout)
    assert replayed["identical"] and len(replayed["steps"]) == steps
