"""Memory and time of log-probabilities with their gradients: in slices, and from a whole batch's logits.

In: nothing; random matrices. Out: a table, and JSON. Needs torch alone.

    python -m benchmarks.logprobs_memory [--tokens 32768] [--vocabulary 151936] [--hidden 1024] [--dtype float32]
                                         [--device cpu] [--json FILE]

Every measurement is a process of its own. Memory is the peak of a forward and a backward pass above what the inputs
(hidden states, output matrix, targets) take: on the CPU the process's resident memory, on a GPU what torch allocated.
The gradient of the output matrix is part of it, and is also named alone: any way of training needs that one. The
whole batch's logits are measured at `--plain-tokens` tokens and scaled up: their memory is linear in tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainers.model.logprobs import linear_logprobs

SMALL_VOCABULARIES = (96, 512)


def plain_logprobs(
    hidden_TD: torch.Tensor, output_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook: logits, softmax, gather; entropy without a gradient."""
    log_p_TV = (hidden_TD @ output_VD.T).float().log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    return log_p_TV.gather(1, targets_T[:, None])[:, 0], entropy_T


def one_pass(
    *, way: str, tokens: int, vocabulary: int, hidden: int, dtype: str, device: str, repeats: int
) -> dict[str, float]:
    """Peak bytes above the inputs over one pass, and the median seconds of `repeats` more."""
    torch.manual_seed(0)
    kind = {"dtype": getattr(torch, dtype), "device": device}
    hidden_TD = torch.randn(tokens, hidden, **kind).requires_grad_()
    output_VD = (torch.randn(vocabulary, hidden, **kind) * hidden**-0.5).requires_grad_()
    targets_T = torch.randint(vocabulary, (tokens,), device=device)
    upstream_T = torch.randn(tokens, device=device) / tokens

    def step() -> None:
        hidden_TD.grad = output_VD.grad = None
        if way == "plain":
            logprobs_T, _ = plain_logprobs(hidden_TD, output_VD, targets_T)
        else:
            options = {"compile": way == "compiled"}
            logprobs_T, _ = linear_logprobs(hidden_TD, output_VD, targets_T, temperature=1.0, **options)
        logprobs_T.backward(upstream_T)
        if device == "cuda":
            torch.cuda.synchronize()

    small = torch.randn(8, 8, **kind)
    (small @ small).sum().item()  # libraries load their own buffers before anything is counted
    if device == "cuda":
        if way == "compiled":
            step()  # compiling is not what is measured
            hidden_TD.grad = output_VD.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = _resident_bytes()
    started = time.perf_counter()
    step()
    seconds = [time.perf_counter() - started]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * _peak_kilobytes()
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "peak_bytes": float(peak - before),
        "matrix_gradient_bytes": float(output_VD.numel() * output_VD.element_size()),
        "seconds": statistics.median(seconds[1:] or seconds),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_a_process(**arguments: Any) -> dict[str, float]:
    """`one_pass` in a child, so that one way's peak is not another's."""
    command = [sys.executable, "-m", "benchmarks.logprobs_memory", "--one-pass", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--plain-tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-pass", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_pass:
        print(json.dumps(one_pass(**json.loads(arguments.one_pass))))
        return
    shape = {"vocabulary": arguments.vocabulary, "hidden": arguments.hidden}
    kind = {"dtype": arguments.dtype, "device": arguments.device}
    repeats = 5 if arguments.device == "cuda" else 0
    ways = ["slices", "compiled"] if arguments.device == "cuda" else ["slices"]
    scale = arguments.tokens / arguments.plain_tokens
    plain = in_a_process(way="plain", tokens=arguments.plain_tokens, repeats=repeats, **shape, **kind)
    # All but the matrix's gradient grows with the tokens.
    extra = (plain["peak_bytes"] - plain["matrix_gradient_bytes"]) * scale
    large = {"plain, scaled up": {**plain, "peak_bytes": extra + plain["matrix_gradient_bytes"]}}
    large["plain, scaled up"]["seconds"] *= scale
    for way in ways:
        large[way] = in_a_process(way=way, tokens=arguments.tokens, repeats=repeats, **shape, **kind)
    peak = large["slices"]["peak_bytes"]
    ratio = large["plain, scaled up"]["peak_bytes"] / peak
    print(f"{ratio:.0f} times less memory at {arguments.tokens} tokens × {arguments.vocabulary} tokens of vocabulary")
    print(f"{'':18}{'peak GB':>10}{'without matrix gradient':>26}{'seconds':>10}")
    for way, row in large.items():
        alone = row["peak_bytes"] - row["matrix_gradient_bytes"]
        print(f"{way:18}{row['peak_bytes'] / 1e9:10.2f}{alone / 1e9:26.2f}{row['seconds']:10.2f}")
    small = {}
    for vocabulary in SMALL_VOCABULARIES:
        case = {"tokens": 1024, "vocabulary": vocabulary, "hidden": 256, "repeats": 60, **kind}
        rows = {way: in_a_process(way=way, **case) for way in ("plain", "slices")}
        small[str(vocabulary)] = {way: row["seconds"] for way, row in rows.items()}
        times = ", ".join(f"{way} {row['seconds'] * 1e3:.2f} ms" for way, row in rows.items())
        print(f"1024 tokens × {vocabulary} tokens of vocabulary: {times}")
    if arguments.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        if arguments.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        results = {
            "memory_ratio": ratio,
            "tokens": arguments.tokens,
            **shape,
            **kind,
            "plain_tokens": arguments.plain_tokens,
            "machine": machine,
            "large": large,
            "small_vocabulary_seconds": small,
        }
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
