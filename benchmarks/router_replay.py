"""How far engine and trainer are apart with experts, by themselves and with the engine's routes replayed.

In: tiny random models with experts, in float32 and bfloat16, on a CPU. Out: `docs/router_replay.json`, and a table.

    python -m benchmarks.router_replay ["OLMoE, 8 of 64" …] [--json docs/router_replay.json]

    equal choices   of all layers and tokens, those with the same experts on both sides, before replay and with it
    gap             mean |trainer − engine| of a sampled token's log-probability, in nats
    far tokens      sampled tokens that are more than 0.1 nats apart
    sampled only    the gap if only tokens whose states gave a sampled token were replayed, and the prompt's were not
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE, 2 of 128": ("qwen3_moe", {"num_local_experts": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "Qwen3-MoE, 8 of 128": ("qwen3_moe", {"num_local_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    "OLMoE, 8 of 64": ("olmoe", {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 128}),
    "gpt-oss, 4 of 32": ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 128}),
    "Mixtral, 2 of 8": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "GLM-4-MoE, 4 of 64": ("glm4_moe", {"n_routed_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True}),
}
_SIZES: dict[str, Any] = {"num_hidden_layers": 8, "moe_intermediate_size": 128, "initializer_range": 0.1}
_PROMPTS, _TOKENS, _FAR = 32, 160, 0.1


def main(
    models: Annotated[list[str] | None, typer.Argument()] = None,
    json_file: Annotated[Path, typer.Option("--json")] = Path("docs/router_replay.json"),
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
) -> None:
    """Measure, each case in a process of its own, and write the file."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    rows = []
    for name in models or _MODELS:
        for dtype in dtypes.split(","):
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as one, tempfile.TemporaryDirectory() as scratch:
                measured = one.submit(_measure, name, dtype, Path(scratch) / "model").result()
            rows.append({"model": name, "layers": _SIZES["num_hidden_layers"], "dtype": dtype, **measured})
            print(json.dumps(rows[-1]), flush=True)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    json_file.write_text(json.dumps({"day": day, "models": rows}, indent=1) + "\n")


def _measure(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    import numpy as np
    from vllm import SamplingParams

    from benchmarks.models import _llm, _trainer
    from rollouts.engines.vllm.core_start import with_routes
    from tests.architectures import tiny_config, tiny_folder

    model_type, sizes = _MODELS[name]
    tiny_folder(folder, tiny_config(model_type, dtype=dtype, **_SIZES, **sizes))
    with _trainer() as trainer:
        llm = _llm(folder, dtype=dtype, max_model_len=256, max_num_seqs=32, **with_routes())
        [(_, error)] = llm.collective_rpc("capture_routes")
        assert not error, error
        draw = np.random.default_rng(0)
        prompts = [draw.integers(3, 96, length).tolist() for length in draw.integers(4, 64, _PROMPTS)]
        sampling = SamplingParams(max_tokens=_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        replies = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rows = []
        for ids, reply in zip(prompts, replies, strict=True):
            [completion] = reply.outputs
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            rows.append(
                (ids, list(completion.token_ids), [at[t].logprob for at, t in pairs], completion.routed_experts)
            )
        return trainer.submit(_compare, folder, dtype, rows).result()


def _compare(folder: Path, dtype: str, rows: list[tuple[list[int], list[int], list[float], Any]]) -> dict[str, Any]:
    """What the trainer makes of prompts, sampled tokens, their log-probabilities and routes."""
    import numpy as np
    import torch

    from trainers.data.packing import position_ids
    from trainers.model.layout import Layout
    from trainers.model.model import load_model

    model = load_model(folder)
    model.routers.replay(model.causal_lm)
    for parameter in model.parameters():  # as in training: what is no parameter stays in float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    sequences = [[*prompt, *sampled] for prompt, sampled, *_ in rows]
    lengths = [len(ids) - 1 for ids in sequences]
    ids_T = torch.tensor([token for ids in sequences for token in ids[:-1]])
    targets_T = torch.tensor([token for ids in sequences for token in ids[1:]])
    mask_T = np.concatenate([[False] * (len(prompt) - 1) + [True] * len(sampled) for prompt, sampled, *_ in rows])
    sampled_logprobs = np.concatenate([logprobs for _, _, logprobs, _ in rows])
    routes_TLC = torch.from_numpy(np.concatenate([routes for *_, routes in rows]).astype(np.int64))
    assert len(routes_TLC) == len(ids_T)

    def forward(given_TLC: torch.Tensor | None) -> tuple[np.ndarray, float]:
        """|trainer − engine| of every sampled token, and the share of choices that are the engine's."""
        layout = Layout(lengths, device=ids_T.device)
        if given_TLC is not None:
            layout.replay(given_TLC)
        with torch.no_grad():
            logprobs_T, _ = model(ids_T, targets_T, position_ids(lengths), layout, 1.0)
        chosen_TLC = torch.stack([seen.chosen for seen in model.routers.seen], 1).sort(-1).values
        engine_TLC = routes_TLC[:, -chosen_TLC.shape[1] :].sort(-1).values  # the first layers may have no experts
        equal = (chosen_TLC == engine_TLC).all(-1).double().mean()
        return np.abs(logprobs_T.float().numpy()[mask_T] - sampled_logprobs), float(equal)

    (own, equal), (replayed, equal_after) = forward(None), forward(routes_TLC)
    only_TLC = torch.where(torch.from_numpy(mask_T)[:, None, None], routes_TLC, -1)
    return {
        "sampled_tokens": int(mask_T.sum()),
        "equal_choices": equal,
        "equal_choices_replayed": equal_after,
        "gap": float(own.mean()),
        "gap_replayed": float(replayed.mean()),
        "gap_replayed_sampled_only": float(forward(only_TLC)[0].mean()),
        "far_tokens": float((own > _FAR).mean()),
        "far_tokens_replayed": float((replayed > _FAR).mean()),
    }


if __name__ == "__main__":
    typer.run(main)
