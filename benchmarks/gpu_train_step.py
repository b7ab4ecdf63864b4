"""A whole RL step of Qwen3-0.6B and 1.7B on one GPU: tokens per second, share of the peak (MFU), memory.

In: nothing; random weights, tokens and advantages. Out: a table, and JSON. A bare machine with torch ≥ 2.11,
transformers ≥ 5 and numpy runs it: of this repository it needs `trainers/` alone, and of that nothing that reads
settings.

    python benchmarks/gpu_train_step.py [--shape 0.6B] [--shape 1.7B] [--tokens 16384] [--tokens 65536]
        [--sequences many] [--sequences one] [--tokens-per-microbatch 16384] [--no-compile] [--checkpointing]
        [--profile] [--peak-tflops 989] [--json FILE]
    python benchmarks/gpu_train_step.py --device cpu --tiny         proves on any machine that it runs

The step: log-probabilities of the policy as it is (a forward pass without gradient), then, pack after pack, forward,
clipped loss averaged over all tokens, backward; clip to norm 1; fused AdamW. Every token is trained, which is the most
the output matrix can be asked for. `many` sequences of 1,024 to 4,096 tokens stand end to end in packs, or `one`
sequence is as long as the step, and one pack.

Precision: the model's parameters are bfloat16, and so are its activations; softmax, loss and norms of states are
float32. Float32 master weights beside it hold what AdamW updates, with float32 moments; each pack's bfloat16
gradients are added up in float32, and the masters are rounded to bfloat16 after each update. The trainer has the same
from FSDP2 (`MixedPrecisionPolicy`), which a single GPU does not need.

FLOPs of a step of T tokens, sequences of length L, counting a multiply-add as 2:

    8 N T + 4 · layers · Σ 2 · heads · head width · L²

N are the parameters of all linear layers and of the output matrix, not the embedding that is only looked up: 2 N T
for the old log-probabilities, 2 N T for the forward and 4 N T for the backward pass. Σ 2 · heads · width · L² is one
causal attention forward, half of the square; its backward counts twice that. What is computed again (logits in the
backward pass, layers under `--checkpointing`) is not counted. MFU = FLOPs / seconds / peak; the default peak is the
989 TFLOP/s of dense bfloat16 on an H100 or H200 SXM.

Defaults, and why. Packs of 16k tokens fill the GPU's matrix units, and their activations (0.6B: about 1.2 MB a token;
1.7B: 2.1 MB) fit in 80 GB without computing layers again, which would cost a quarter of the step; so 64k tokens are
four packs. Larger packs want `--checkpointing`. `--compile` is on: without it, norms, rotary embeddings and what is
done to 152k logits per token are dozens of passes over memory, about as long as the multiplications. Logits may
take 10 GiB: half of it holds those of a pack of 16k tokens, and the backward pass need not compute them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a file, not as a module

from trainers.data.operations import Operations  # noqa: E402
from trainers.data.packing import position_ids  # noqa: E402
from trainers.model.layout import Layout  # noqa: E402
from trainers.model.model import PolicyModel, load_model  # noqa: E402
from trainers.objective.aggregation import aggregation_weights  # noqa: E402
from trainers.objective.losses import LossInputs, clip_loss  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
SHORTEST, LONGEST = 1024, 4096
LOGITS_GIB = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """Sequences end to end, at predicting positions: tensors of shape [T]."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    layout: Layout
    sequences: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


class Step:
    """Model, master weights and optimizer."""

    def __init__(self, model: PolicyModel) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        for master in self.masters:
            master.requires_grad_()
            master.grad = torch.zeros_like(master)
        self.gradients = [gradient for master in self.masters if (gradient := master.grad) is not None]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, betas=(0.9, 0.99), fused=True)

    def __call__(self, packs: list[Pack]) -> dict[str, float]:
        """One update; returns loss and gradient norm, which have waited for the GPU."""
        with torch.no_grad():
            old = [self._forward(pack)[0] for pack in packs]
        torch._foreach_zero_(self.gradients)
        loss = torch.zeros((), device=self.gradients[0].device)
        for pack, old_T in zip(packs, old, strict=True):
            logprobs_T, entropy_T = self._forward(pack)
            ones_T = torch.ones_like(logprobs_T)
            inputs = LossInputs(
                logprobs=logprobs_T,
                old_logprobs=old_T,
                sampled_logprobs=old_T,
                advantages=pack.advantages,
                mask=ones_T,
                weights=pack.weights,
                importance=ones_T,
                sequences=pack.sequences,
                entropy=entropy_T,
            )
            output = clip_loss(inputs, clip_low=0.2, clip_high=0.28)
            output.loss.backward()
            loss += output.loss.detach()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            torch._foreach_add_(self.gradients, gradients)
            for parameter in self.parameters:
                parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return {"loss": float(loss), "grad_norm": float(norm)}

    def forget(self) -> None:
        """Drop the gradients of a step that was cut off."""
        for parameter in self.parameters:
            parameter.grad = None

    def _forward(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_T, entropy_T = self.model(pack.input_ids, pack.targets, pack.position_ids, pack.layout, 1.0)
        return logprobs_T, entropy_T


def make_model(shape: str, device: torch.device, *, compile: bool, checkpointing: bool) -> PolicyModel:
    """Random weights of the shape, through a folder; loaded as the trainer loads, with its check of attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    is_tiny = shape == "tiny"
    config = Qwen3Config(
        vocab_size=512 if is_tiny else 151_936,
        num_key_value_heads=1 if is_tiny else 8,
        head_dim=32 if is_tiny else 128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        with torch.device(device):
            Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        model = load_model(
            Path(folder),
            dtype=torch.bfloat16,
            compile=compile,
            logits_gib=LOGITS_GIB,
            activation_checkpointing=checkpointing,
        ).to(device)
    return model


def draw_lengths(total: int, draw: np.random.Generator, *, shortest: int, longest: int) -> list[int]:
    """Lengths that add up to `total`: equal packs need one compilation. The last one may be shorter."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(draw.integers(shortest, longest + 1))))
    return lengths


def make_packs(
    *, tokens: int, budget: int, vocabulary: int, device: torch.device, shortest: int, longest: int
) -> list[Pack]:
    """`tokens` in packs of `budget`."""
    draw = np.random.default_rng(0)
    parts = [min(budget, tokens - start) for start in range(0, tokens, budget)]
    drawn = [draw_lengths(part, draw, shortest=shortest, longest=longest) for part in parts]
    num_sequences = sum(map(len, drawn))
    packs = []
    for lengths in drawn:
        counts = np.array(lengths)
        weights = aggregation_weights(
            counts, aggregation="token_mean", num_tokens=tokens, num_sequences=num_sequences, max_tokens=longest
        )
        ids = torch.from_numpy(draw.integers(0, vocabulary, size=(2, counts.sum()))).to(device)
        per_token = (draw.standard_normal(len(lengths)), weights)
        advantages, weights_T = (torch.from_numpy(np.repeat(v, counts).astype(np.float32)) for v in per_token)
        packs.append(
            Pack(
                input_ids=ids[0],
                targets=ids[1],
                position_ids=position_ids(lengths).to(device),
                layout=Layout(counts, device=device),
                sequences=torch.from_numpy(np.repeat(np.arange(len(lengths)), counts)).to(device),
                advantages=advantages.to(device),
                weights=weights_T.to(device),
            )
        )
    return packs


def flops_of(model: PolicyModel, packs: list[Pack]) -> float:
    """The operations of one step; the formula is at the head of this file."""
    tokens = sum(len(pack.input_ids) for pack in packs)
    squares = sum(float(pack.layout.lengths_S.double().square().sum()) for pack in packs)
    return 4 * Operations.of(model.causal_lm).forward(computed=tokens, predicted=tokens, pairs=squares / 2)


def measure(step: Step, packs: list[Pack], *, device: torch.device, steps: int, peak_flops: float) -> dict[str, Any]:
    """Median seconds of `steps` updates after two more; what was compiled, was compiled in those."""
    for _ in range(2):
        step(packs)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {}
    for _ in range(steps):
        started = time.perf_counter()
        metrics = step(packs)
        seconds.append(time.perf_counter() - started)
    median, flops = statistics.median(seconds), flops_of(step.model, packs)
    num_tokens = sum(len(pack.input_ids) for pack in packs)
    is_cuda = device.type == "cuda"
    return {
        "tokens": num_tokens,
        "packs": len(packs),
        "tokens_per_second": num_tokens / median,
        "seconds": median,
        "all_seconds": seconds,
        "flops": flops,
        "mfu": flops / median / peak_flops,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else _resident_peak_bytes(),
        **metrics,
    }


def _resident_peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def profiled(action: Callable[[], object], *, device: torch.device) -> str:
    """Where the time of one step goes, as a table."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        action()
    order = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70)
    return table


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--sequences", action="append", choices=["many", "one"], help="default: both")
    parser.add_argument("--tokens-per-microbatch", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers and short sequences")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward pass")
    parser.add_argument("--profile", action="store_true", help="print where one more step's time goes")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU, dense bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; `--device cpu --tiny` shows that the benchmark runs")
    if arguments.tiny and arguments.shape:
        parser.error("--tiny is a shape of its own; leave --shape out")
    device = torch.device(arguments.device)
    compile = arguments.device == "cuda" if arguments.compile is None else arguments.compile
    shapes = ["tiny"] if arguments.tiny else arguments.shape or ["0.6B", "1.7B"]
    tokens = arguments.tokens or ([512, 2048] if arguments.tiny else [16_384, 65_536])
    budget = arguments.tokens_per_microbatch or (1024 if arguments.tiny else 16_384)
    shortest, longest = (64, 256) if arguments.tiny else (SHORTEST, LONGEST)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    results = {
        "machine": machine,
        "peak_tflops": arguments.peak_tflops,
        "compile": compile,
        "checkpointing": arguments.checkpointing,
        "tokens_per_microbatch": budget,
        "runs": rows,
    }
    heads = {"tokens": 9, "packs": 7, "tokens/s": 11, "MFU": 9, "seconds": 9, "peak GB": 9, "loss": 10}
    print(f"{'shape':6} sequences" + "".join(f"{name:>{width}}" for name, width in heads.items()))
    for shape in shapes:
        step = Step(make_model(shape, device, compile=compile, checkpointing=arguments.checkpointing))
        vocabulary = step.model.causal_lm.config.vocab_size
        for sequences, count in itertools.product(arguments.sequences or ["many", "one"], tokens):
            sizes = {"budget": budget, "shortest": shortest, "longest": longest}
            if sequences == "one":
                sizes = dict.fromkeys(sizes, count)
            packs = make_packs(tokens=count, vocabulary=vocabulary, device=device, **sizes)
            try:
                row = measure(
                    step, packs, device=device, steps=arguments.steps, peak_flops=arguments.peak_tflops * 1e12
                )
            except torch.OutOfMemoryError:
                step.forget()
                print(
                    f"{shape:6}{sequences:>10}{count:9,}{len(packs):7}  does not fit: try --checkpointing", flush=True
                )
                continue
            rows.append({"shape": shape, "sequences": sequences, **row})
            print(
                f"{shape:6}{sequences:>10}{count:9,}{row['packs']:7}{row['tokens_per_second']:11,.0f}{row['mfu']:9.2%}"
                f"{row['seconds']:9.3f}{row['peak_bytes'] / 1e9:9.2f}{row['loss']:10.5f}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
            if arguments.profile:
                print(profiled(functools.partial(step, packs), device=device), flush=True)
        del step
        gc.collect()  # a compiled layer refers to itself
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
