"""The real engine, in one part, in two, and with adapters; and whole runs on it: one is killed, some play agents of
others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from rollouts.chat.chat_tokens import ChatTokens
from storage.log.claims import NOTHING
from storage.log.entries import Alias
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from storage.shards.schema import ROUTES
from storage.shards.shards import read_shard
from tests.conftest import PROJECT, Home, a_base_model
from tests.engine import agents
from tests.engine.policies import with_experts

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

_ADAPTERS_ON_GPUS = {"DTYPE": "bfloat16"}
"""For `check_lora`: vLLM's kernels for adapters on GPUs take no other."""
ARITHMETIC = PROJECT / "examples" / "arithmetic.toml"


def _aliases(log: RunLog) -> list[Alias]:
    return [entry.body for entry in log.entries if isinstance(entry.body, Alias)]


def _run_checks(module: str, base: Path, scratch: Path, seconds: float = 1100, **environment: str) -> str:
    """Run a module of checks with a base model and a folder to write in, and see that all of them passed; returns the
    last line of what it says.

    vLLM starts child processes by re-importing `__main__`, so it gets a process that is not pytest.
    """
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.engine.{module}", str(base), str(scratch)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings, **environment},
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # vLLM's core would go on, and compute
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-3000:] + complained[-3000:]
    assert "all checks passed" in said
    return said.splitlines()[-1]


@pytest.mark.parametrize("module", ["check_engine", "check_lora", "check_merged", "check_routes"])
def test_engine_in_a_process_of_its_own(base_model: Path, tmp_path: Path, module: str) -> None:
    _run_checks(module, base_model, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3700)  # eight minutes on two quiet cores, and much longer beside other work
@pytest.mark.parametrize("module", ["check_engine", "check_lora", "check_routes"])
def test_an_engine_that_schedules_and_samples_as_on_a_gpu(base_model: Path, tmp_path: Path, module: str) -> None:
    path = os.pathsep.join([str(PROJECT / "tests" / "engine" / "gpu_runner"), str(PROJECT)])
    _run_checks(module, base_model, tmp_path, 3600, GPU_RUNNER="1", PYTHONPATH=path, **_ADAPTERS_ON_GPUS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("module", ["check_engine", "check_lora", "check_sleep", "check_routes"])
def test_an_engine_on_a_gpu(base_model: Path, tmp_path: Path, module: str) -> None:
    """In float32 vLLM's attention would multiply in tf32, and the checks allow 2e-3 nats."""
    _run_checks(module, base_model, tmp_path, TRITON_F32_DEFAULT="ieee", **_ADAPTERS_ON_GPUS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("share", ["phases", "split"])
def test_a_run_on_one_gpu_is_killed_and_goes_on(home: Home, base_model: Path, share: str) -> None:
    arguments = ["train", str(ARITHMETIC), f"model={base_model}", "steps=6", "batch_size=8", "evaluation.every=3"]
    arguments += ["evaluation.num_tasks=16", "max_staleness=0", f"engine.share={share}"]
    process = home.alone().start(*arguments)
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    home.wait(process, lambda: log.refresh().step >= 2)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"holds the GPU: {alive}"
    home.run(*arguments)
    state = log.refresh()
    assert state.step == 6 and state.positions == set(range(48))
    assert [evaluation.version for evaluation in state.evaluations] == [0, 3, 6]
    gaps = [step.metrics["engine_gap"] for step in state.steps]
    assert max(gaps) <= 2 * gaps[0] + 1e-3, "no wake brought other weights, which are off by ten times as much"
    assert ("sleep_seconds" in state.steps[-1].metrics) == (share == "phases")
    assert all(0 < step.metrics["trainer_gpu_bytes"] < 2**32 for step in state.steps), "of a tiny model"


@pytest.mark.slow
def test_an_engine_of_two_parts_in_a_process_of_its_own(tmp_path: Path) -> None:
    base = a_base_model(tmp_path / "base", hidden_size=64)  # two heads: each part has one
    _run_checks("check_parallel", base, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_batch_of_a_reproducible_engine(tmp_path: Path, dtype: str) -> None:
    base = a_base_model(tmp_path / "base", hidden_size=256)  # wide enough for vLLM's own products to differ
    wide = _run_checks("check_reproducible", base, tmp_path, DTYPE=dtype, LIMITS="wide")
    assert wide == _run_checks("check_reproducible", base, tmp_path, DTYPE=dtype, LIMITS="narrow")


def test_engines_that_compute_otherwise_are_measured_or_refused(tmp_path: Path) -> None:
    base = a_base_model(tmp_path / "base", hidden_size=256)  # vLLM quantises no narrow layers
    _run_checks("check_precision", base, tmp_path)


@pytest.mark.slow
def test_the_probe_names_a_layer_of_an_engine_left_alone(tmp_path: Path) -> None:
    base = a_base_model(tmp_path / "base", hidden_size=256)
    _run_checks("check_reproducible", base, tmp_path, DTYPE="float32", LIMITS="none")


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(["max_staleness=0"], id="synchronous", marks=pytest.mark.slow),
        pytest.param(["max_staleness=1", "rollout.schedule=fixed"], id="fixed"),
    ],
)
def test_a_reproducible_run_has_the_same_policies_under_another_load(
    home: Home, tmp_path: Path, schedule: list[str]
) -> None:
    base = a_base_model(tmp_path / "base", hidden_size=128)
    arguments = ["train", str(ARITHMETIC), "reproducible=true", *schedule, f"model={base}", "steps=3"]
    arguments += ["batch_size=8", "evaluation.num_tasks=16", "evaluation.every=3"]
    home.run(*arguments)
    home.run(*arguments, "run=again", "rollout.max_concurrent=3", "engine.vllm.enable_prefix_caching=false")
    once, again = (RunLog(LocalStore(home.path / "store"), run).refresh() for run in ("arithmetic", "again"))
    assert [step.policy.weights_sha256 for step in once.steps] == [step.policy.weights_sha256 for step in again.steps]
    assert once.evaluations[-1].score == again.evaluations[-1].score
    assert home.status("again")["reproducible"] == "all 3 of 3 steps"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_reproducible_run_has_the_same_policies_whatever_happens_to_it(tmp_path: Path) -> None:
    """SIGKILL in each phase, Ctrl-C, an empty cache, two workers, other work on the machine; also with adapters."""
    base = a_base_model(tmp_path / "base", hidden_size=128)
    command = [sys.executable, "-m", "benchmarks.repeated_runs", "arithmetic", f"model={base}", "batch_size=8"]
    out = tmp_path / "runs.json"
    done = subprocess.run([*command, "--steps", "6", "--json", str(out)], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = json.loads(out.read_text())["runs"]
    assert {row["kind"] for row in rows} == {"synchronous", "fixed", "lora"} and len(rows) == 20
    assert all(row["equal_policies"] == row["steps"] == row["different_policies"] == 6 for row in rows)
    assert all(row["as_filed"] == [6, 6] for row in rows)


@pytest.mark.slow
def test_a_run_whose_trainer_broadcasts_its_policies(home: Home, base_model: Path) -> None:
    arguments = ["train", str(ARITHMETIC), f"model={base_model}", "steps=3", "batch_size=8", "evaluation.every=0"]
    done = home.run(*arguments, "engine.weight_transfer=gloo", "rollout.num_workers=2")
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    log.refresh()
    transfers = {alias.version: alias.transfer for alias in _aliases(log)}
    assert transfers == {0: "", 1: "gloo", 2: "gloo", 3: "gloo"}
    assert "broadcast" not in done.stdout, "no failure was said"


def test_a_killed_run_continues_on_the_real_engine_and_leaves_no_process(home: Home, base_model: Path) -> None:
    arguments = ["train", str(ARITHMETIC), f"model={base_model}", "steps=4", "batch_size=8", "evaluation.num_tasks=16"]
    arguments += ["train.checkpoint_every=2", "evaluation.every=2", "max_staleness=0", "engine.weight_transfer=gloo"]
    process = home.alone().start(*arguments)
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    home.wait(process, lambda: log.refresh().step >= 1 and bool(log.state.evaluations))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"left behind: {alive}"
    committed = set(log.refresh().groups)
    home.run(*arguments)
    state = log.refresh()
    assert committed <= state.groups.keys()
    assert state.step == 4 and state.positions == set(range(32))
    assert [evaluation.version for evaluation in state.evaluations] == [0, 2, 4]
    # The policy that an engine starts with is read from the store.
    assert {alias.transfer for alias in _aliases(log) if alias.version} >= {"gloo"}
    # What the engine draws belongs to its token: a run that is not killed, with another load, has the same policies.
    home.run(*arguments, "run=again", "rollout.max_concurrent=3")
    again = RunLog(LocalStore(home.path / "store"), "again").refresh()
    assert [step.policy.weights_sha256 for step in again.steps] == [step.policy.weights_sha256 for step in state.steps]
    assert [each.score for each in again.evaluations] == [each.score for each in state.evaluations]
    assert {step.owes for step in [*state.steps, *again.steps]} == {NOTHING}
    # The engine computes what the trainer computes: the gap is rounding, not another policy.
    assert all(step.metrics["engine_gap"] <= 1e-4 for step in state.steps)


def test_a_run_with_experts_is_trained_through_those_of_its_engine(
    home: Home, base_model: Path, tmp_path: Path
) -> None:
    base = with_experts(base_model, tmp_path / "experts")
    arguments = ["train", str(ARITHMETIC), f"model={base}", "steps=3", "batch_size=8", "evaluation.num_tasks=16"]
    arguments += ["evaluation.every=3", "learning_rate=1e-3"]
    home.run(*arguments, "train.router_replay=true", "max_staleness=0")
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    steps = log.refresh().steps
    assert [step.metrics["routes_replayed"] for step in steps] == [1.0] * 3
    gaps = [step.metrics["engine_gap"] for step in steps if "engine_gap" in step.metrics]
    assert gaps and max(gaps) <= 1e-4
    for shard in log.state.shards.values():
        assert (ROUTES in read_shard(log, shard).column_names) != shard.is_eval
    replayed = json.loads(home.run("replay", "arithmetic", "--from", "1", "--to", "3", "--json").stdout)
    assert [step["identical"] for step in replayed["steps"]] == [True] * 3
    refused = home.run(*arguments, "run=dense", f"model={base_model}", "train.router_replay=true", check=False)
    assert "has no experts; leave it out" in refused.stderr + refused.stdout and refused.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "n_samples"), [("Coder", 3), ("Caller", 3), ("Searcher", 8)])
def test_agents_of_others_train_unchanged(home: Home, tmp_path: Path, agent: str, n_samples: int) -> None:
    """smolagents' CodeAgent and ToolCallingAgent, and one in the style of Search-R1: two steps of each."""
    model = agents.base_model(tmp_path / "base", num_layers=2 if agent == "Searcher" else 1)
    (tmp_path / "run.toml").write_text(f"""
        workflow = "tests.engine.agents:{agent}"
        run = "agents"
        model = "{model}"
        steps = 2
        batch_size = 1
        n_samples = {n_samples}
        learning_rate = 1e-3
        sampling.max_tokens = 160
        evaluation.every = 0
        train.tokens_per_microbatch = {agents.CONTEXT}
        train.num_threads = 1
        [engine]
        max_model_len = {agents.CONTEXT}
        guided_decoding = true
        tool_parser = "hermes"
        vllm = {{dtype = "float32", enforce_eager = true}}
        """)
    home.run("train", str(tmp_path / "run.toml"), timeout=1100)
    log = RunLog(LocalStore(home.path / "store"), "agents")
    steps = log.refresh().steps
    assert len({step.policy.weights_sha256 for step in steps}) == 2
    rows = [row for shard in log.state.shards.values() for row in read_shard(log, shard).to_pylist()]
    assert {row["status"] for row in rows} <= {"ok", "truncated"} and len({row["reward"] for row in rows}) > 1
    requests = [request for row in rows for request in row["requests"]]
    tokenizer = ChatTokens.load(model).tokenizer
    match agent:
        case "Coder":
            assert {tuple(each["stop"]) for each in requests} == {("Observation:", "Calling tools:", "</code>")}
        case "Caller":
            forced = [row for row in rows if any(each["constraint"] for each in row["requests"])]
            texts = [tokenizer.decode(row["input_ids"]).rpartition("<assistant>")[2] for row in forced]
            assert texts and all(re.match(r'<tool_call>\s*{"name": "(add|final_answer)"', text) for text in texts)
        case "Searcher":
            assert {row["sequence_idx"] for row in rows} == {0}
            assert any(each["stopped_by"] == "</search>" for each in requests)
            texts = [tokenizer.decode(row["input_ids"]) for row in rows if len(row["turns"]) > 1]
            assert texts and all("<end><user><information>" in text for text in texts)
    assert all(step.metrics["engine_gap"] <= 1e-4 for step in steps)
