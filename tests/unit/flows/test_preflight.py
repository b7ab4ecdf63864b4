"""What is refused before anything heavy starts, where it is not the command line's business."""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.operate.doctor import check_sandbox
from examples.arithmetic import Arithmetic
from rollouts.chat.chat import Chat
from rollouts.production.engine_choice import fitted_to_model, num_sequences
from rollouts.production.worker import RolloutWorker
from rollouts.sandbox import sandbox
from rollouts.workflow import Score, Workflow
from settings.errors import InvalidInput, UserError
from settings.evaluation import EvaluationSettings
from settings.run_file import RunConfig, load_run_file
from storage.log.entries import Session, TaskSet
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore, StoreError
from storage.policies.model_config import model_config, num_positions
from storage.records import Message, Task
from tasks.checks import preflight, trial
from tasks.checks.loading import load_tasks
from tests.builders import a_config
from tests.unit.trainers.builders import tiny_model


class Silent(Arithmetic):
    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return []


def _config(**values: Any) -> RunConfig:
    return a_config(workflow="examples.arithmetic:Arithmetic", **values)


class Forgetful(LocalStore):
    """A store that ignores the condition, as some S3 servers do: every writer wins."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "open_store", lambda uri: Forgetful(tmp_path))
    with pytest.raises(StoreError, match="conditional writes"):
        preflight.check_run(_config(store="", tool_parser="hermes"))


def test_what_cannot_work_is_refused_and_the_rest_passes(tmp_path: Path) -> None:
    preflight.check_run(_config(store=str(tmp_path), tool_parser="hermes"))
    with pytest.raises(ValueError, match="vLLM has no such parser; did you mean 'hermes'"):
        preflight.check_run(_config(store=str(tmp_path), tool_parser="hermess"))
    with pytest.raises(ValueError, match=r"no_such_module:loss' cannot be imported"):
        preflight.check_run(_config(store=str(tmp_path), loss={"kind": "custom", "path": "no_such_module:loss"}))
    with pytest.raises(InvalidInput, match="run = 'a/b c': use letters"):
        preflight.check_run(_config(store=str(tmp_path), run="a/b c"))
    with pytest.raises(InvalidInput, match=r"Silent\.demonstrations\(1, seed=0\) returned no conversation"):
        preflight.check_run(a_config(workflow=f"{__name__}:Silent", store=str(tmp_path)))


@pytest.mark.parametrize("split", ["train", "test"])
def test_other_tasks_than_those_of_the_run_are_refused_or_adopted(tmp_path: Path, split: str) -> None:
    config, other = _config(store=str(tmp_path)), TaskSet(count=3, sha256="", ids_sha256="")
    sets = {"tasks": other} if split == "train" else {"held_out": {"test": other}}
    log = create_run(LocalStore(tmp_path), config.run, config.model_dump(mode="json"))
    log.append(Session(id="s", code_version="", **sets))
    with pytest.raises(InvalidInput, match=f"split '{split}' are not those .* there were 3, .* --adopt-tasks"):
        preflight.check_run(config)
    preflight.check_run(config, adopt_tasks=True)


def test_a_task_whose_metadata_no_digest_can_be_of_is_named() -> None:
    for value in ({1, 2}, np.int64(3), object(), {"a": 1, 2: 3}):
        with pytest.raises(InvalidInput, match="of split .train.: its metadata are no JSON .*; use text, at x:1"):
            trial.check_tasks([Task(id="a", prompt="?", metadata={"n": value})], "train", where="x:1")  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("steps", "width", "compiles"),
    [(1000, 32, True), (20, 32, False), (1000, 2048, False)],
    ids=["long", "short", "wide"],
)
def test_an_engine_on_cpus_compiles_only_a_small_model_in_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, width: int, compiles: bool
) -> None:
    model = tiny_model(tmp_path / "model")
    with open(model / "model.safetensors", "ab") as file:
        file.truncate(width**2 * 32)  # of a size; nothing reads it
    config = a_config(steps=steps, batch_size=16, n_samples=8, max_tokens=48, max_model_len=64)
    assert fitted_to_model(config, model).engine.vllm.get("enforce_eager", False) is not compiles
    for own in (True, False):
        set_by_user = a_config(steps=steps, vllm={"enforce_eager": own})
        assert fitted_to_model(set_by_user, model).engine.vllm["enforce_eager"] is own
    monkeypatch.setattr("rollouts.production.engine_choice.is_cpu_build", lambda: False)
    assert "enforce_eager" not in fitted_to_model(config, model).engine.vllm


def test_on_cpus_attempts_at_a_larger_model_s_prompt_share_small_blocks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def block_size(**settings: Any) -> int | None:
        return fitted_to_model(a_config(**settings), model).engine.vllm.get("block_size")

    model = tiny_model(tmp_path / "model")
    assert block_size() is None
    with open(model / "model.safetensors", "ab") as file:
        file.truncate(10**8)  # nothing reads it
    assert block_size() == 32 and block_size(vllm={"block_size": 128}) == 128
    assert block_size(reproducible=True) is None
    monkeypatch.setattr("rollouts.production.engine_choice.is_cpu_build", lambda: False)
    assert block_size() is None


def test_an_engine_on_a_gpu_computes_as_much_at_a_time_as_the_memory_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM, which knows servers and scripts alone, would compute 128 sequences at a time on any card."""
    model = tiny_model(tmp_path / "model")

    def limits(concurrent: int = 64, **vllm: int) -> tuple[int, int]:
        config = a_config(n_samples=8, max_concurrent=concurrent, vllm=vllm)
        config = config.model_copy(update={"evaluation": EvaluationSettings(max_concurrent=16)})
        arguments = fitted_to_model(config, model).engine.vllm
        assert arguments["max_num_seqs"] == num_sequences(config) or "max_num_batched_tokens" in vllm
        return arguments["max_num_seqs"], arguments["max_num_batched_tokens"]

    monkeypatch.setattr("rollouts.production.engine_choice.is_cpu_build", lambda: False)
    assert limits() == (512, 8192) and limits(1000) == (512, 8192) and limits(4) == (32, 8192)
    assert limits(max_num_seqs=40) == (40, 8192), "what is set stays"
    assert limits(max_num_batched_tokens=64) == (64, 64), "vLLM refuses fewer tokens than sequences"


def test_lengths_that_were_set_must_fit_the_model_and_others_are_cut_to_it(tmp_path: Path) -> None:
    def run(**blocks: Any) -> RunConfig:
        where = {"workflow": "examples.arithmetic:Arithmetic", "store": str(tmp_path)}
        return load_run_file({**where, **blocks})

    preflight.check_run(run())  # the defaults fit every model
    model = tiny_model(tmp_path / "model")
    longest = num_positions(model_config(model))
    fitted = fitted_to_model(run(), model).engine
    assert longest is not None and fitted.max_model_len == longest < 2048
    assert fitted.vllm == {"dtype": "float32"}, "as its weights: vLLM would round them, and its checksum would differ"
    assert fitted_to_model(run(engine={"vllm": {"dtype": "half"}}), model).engine.vllm == {"dtype": "half"}
    for wrong, most in (({"engine": {"max_model_len": 257}}, 256), ({"sampling": {"max_tokens": 256}}, 255)):
        with pytest.raises(InvalidInput, match=f"the tiny model has 256 positions .* use at most {most}"):
            preflight.check_run(run(**wrong))
    short = {"vllm": {"max_num_batched_tokens": 255, "enable_chunked_prefill": False}}
    with pytest.raises(InvalidInput, match="max_num_batched_tokens = 255 is less than engine.max_model_len = 256"):
        preflight.check_run(run(engine=short))
    with pytest.raises(InvalidInput, match=f"engine.max_model_len = 4096, but {model} has {longest} positions"):
        preflight.check_run(
            run(model=str(model), engine={"max_model_len": 4096}, train={"tokens_per_microbatch": 4096})
        )


def test_adapters_beside_experts_are_refused_where_vllm_cannot_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    settings: dict[str, Any] = {"model": str(tmp_path), "train": {"lora": {"rank": 4}}}
    run = load_run_file({"workflow": "examples.arithmetic:Arithmetic", **settings})
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: True)
    config.write_text('{"num_experts": 4}')
    with pytest.raises(InvalidInput, match="holds no adapters in a model with experts .* leave train.lora out"):
        preflight.check_adapters(run)
    config.write_text('{"num_experts": null}')
    preflight.check_adapters(run)
    config.write_text('{"num_experts": 4}')
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: False)
    preflight.check_adapters(run)


def test_adapters_in_float32_are_refused_where_vllm_s_kernels_have_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assertion in vLLM's own source, which would otherwise be met when an engine has loaded its weights."""
    kernel = Path(next(iter(find_spec("vllm").submodule_search_locations))) / "lora/ops/triton_ops/lora_shrink_op.py"  # type: ignore[union-attr, arg-type]
    assert "assert inputs.dtype in [torch.float16, torch.bfloat16]\n" in kernel.read_text()
    model = tiny_model(tmp_path / "model")
    run = a_config(lora={"rank": 4}, model=str(model))
    for is_cpu, dtype in ((True, "float32"), (False, "bfloat16")):
        monkeypatch.setattr("rollouts.production.engine_choice.is_cpu_build", lambda is_cpu=is_cpu: is_cpu)
        assert fitted_to_model(run, model).engine.vllm["dtype"] == dtype
        assert fitted_to_model(a_config(), model).engine.vllm["dtype"] == "float32", "without adapters"
        monkeypatch.setattr(preflight, "is_cpu_build", lambda is_cpu=is_cpu: is_cpu)
        preflight.check_adapters(run)
        chosen = a_config(lora={"rank": 4}, vllm={"dtype": "float32"})
        if is_cpu:
            preflight.check_adapters(chosen)
            continue
        with pytest.raises(InvalidInput, match="vllm.dtype = 'float32': .* 16 bits alone; use 'bfloat16'"):
            preflight.check_adapters(chosen)


class _Echo(Workflow):
    reward: float | None = 1.0
    reference: str | None = "7"

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{number}", prompt="Say 7.", answer="7") for number in range(30)]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return Score(reward=self.reward if reply == task.answer else 0.0)

    def reference_reply(self, task: Task, messages: Any) -> str | None:
        return self.reference


class _Silent(_Echo):
    reference_reply = Workflow.reference_reply


class _Broken(_Echo):
    async def run(self, task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        return Score(reward=float(task.id))


class _Ranked(_Echo):
    reward = None

    async def score_group(self, task: Task, attempts: Any) -> list[Score]:
        return [Score(reward=1.0) for _ in attempts]


class _TwoTurns(_Echo):
    async def run(self, task: Task, chat: Chat) -> Score:
        assert [await chat.ask(task.prompt), await chat.ask("Again.")] == ["7", "sept: grün 🙂"]
        assert [message.content for message in chat.messages] == ["Say 7.", "7", "Again.", "sept: grün 🙂"]
        return Score(reward=1.0)

    def reference_reply(self, task: Task, messages: Any) -> str:
        return {"Say 7.": "7", "Again.": "sept: grün 🙂"}[messages[-1].content]


class _Nothing(Workflow):
    pass


def _won(workflow: type[Workflow], **fields: Any) -> int:
    played = workflow(None)
    vars(played).update(fields)
    return trial.check_references(played, load_tasks(played, a_config()), a_config())


def test_twenty_tasks_of_each_split_are_won_by_their_reference() -> None:
    assert [_won(workflow) for workflow in (_Echo, _TwoTurns, _Ranked)] == [40, 40, 40]
    assert _won(_Silent) == _won(_Echo, reference=None) == 0


@pytest.mark.parametrize(
    ("workflow", "fields", "words"),
    [
        (_Echo, {"reference": "8"}, "its reward is 0.0, and an attempt that wins has 1"),
        (_Echo, {"reward": 0.5}, "its reward is 0.5"),
        (_Echo, {"reward": None}, "its reward is None"),
        (
            _Broken,
            {},
            "ValueError: could not convert string to float: 'train-0'\n  at {file}:{line} in run: return Score",
        ),
    ],
)
def test_a_reference_that_does_not_win_is_refused_with_the_task(
    workflow: type[Workflow], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        _won(workflow, **fields)
    message = str(caught.value)
    start = "reference_reply does not win 40 of 40 tasks. task 'train-0' of split 'train': "
    file, line = Path(__file__).relative_to(Path.cwd()), _Broken.run.__code__.co_firstlineno + 2
    assert message.startswith(start + words.format(file=file, line=line)), message
    assert "Mend the task's answer, its reward or reference_reply" in message


@pytest.mark.parametrize(("name", "missing"), [("_Nothing", "tasks"), ("_Echo", "demonstrations")])
def test_a_workflow_without_its_methods_is_refused_by_name(tmp_path: Path, name: str, missing: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{name} has no {missing}\(\); write it"):
        preflight.check_run(a_config(workflow=f"{__name__}:{name}", store=str(tmp_path)))


def test_a_machine_without_a_sandbox_is_named_at_the_start_or_refused_if_the_run_demands_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = "files: this kernel has no Landlock"
    demanding = _config(store=str(tmp_path), require_sandbox=True)
    preflight.check_sandbox(demanding)
    preflight.check_sandbox(_config(store=str(tmp_path)))
    assert not caplog.messages
    for module in (sandbox, preflight):
        monkeypatch.setattr(module, "sandbox_report", lambda: (missing,))
    with pytest.raises(UserError, match=f"cannot isolate code that a policy wrote: {missing}"):
        preflight.check_run(demanding)
    elsewhere = RolloutWorker.open(demanding, store_uri=str(tmp_path), name="r", cache="c", code_version="v")
    with pytest.raises(UserError, match=missing):
        asyncio.run(elsewhere)
    assert (check_sandbox(None).fix, "run where" in check_sandbox(demanding).fix) == ("", True)
    preflight.check_run(_config(store=str(tmp_path), tool_parser="hermes"))
    assert [message for message in caplog.messages if f"a policy wrote: {missing}. Code rewards" in message]


@pytest.mark.parametrize(
    ("about", "engine", "refusal"),
    [
        ({"model_type": "olmoe", "num_experts": 64}, {}, ""),
        ({"model_type": "glm4_moe", "n_routed_experts": 8}, {"vllm": {"pipeline_parallel_size": 1}}, ""),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 8, "kv_lora_rank": 512},
            {},
            "build for CPUs has no prefix cache for 'deepseek_v3'",
        ),
        ({"model_type": "llama"}, {}, "a model of type 'llama' has no experts; leave it out"),
        ({"model_type": "phimoe", "num_local_experts": 16}, {}, "the routers of 'phimoe' do not take experts"),
        ({"model_type": "olmoe", "num_experts": 64}, {"kind": "scripted"}, "engine.kind = 'scripted' has no experts"),
        *(
            ({"model_type": "olmoe", "num_experts": 64}, {"vllm": {name: value}}, f"vllm.{name} = {value!r}: vLLM then")
            for name, value in {
                "enable_prefix_caching": False,
                "pipeline_parallel_size": 2,
                "scheduler_cls": "my.Scheduler",
                "enforce_eager": False,
            }.items()
        ),
    ],
)
def test_router_replay_is_refused_where_experts_are_not_known_or_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], engine: dict[str, Any], refusal: str
) -> None:
    monkeypatch.setattr(preflight, "is_cpu_build", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(about))
    where = {"workflow": "examples.arithmetic:Arithmetic", "model": str(tmp_path)}
    run = load_run_file({**where, "train": {"router_replay": True}, "engine": engine})
    with pytest.raises(InvalidInput, match=refusal) if refusal else contextlib.nullcontext():
        preflight.check_router_replay(run)
    preflight.check_router_replay(load_run_file({**where, "engine": engine}))
