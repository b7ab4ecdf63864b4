"""Whole training rounds on one GPU: by turns, split, and split with a step of staleness; and TRL beside them.

In: nothing; a Qwen3 of random weights, made on the spot. Out: a table, the bars it is held to, and JSON.

    python benchmarks/gpu_loop.py [--mode phases-0] [--mode split-0] [--mode split-1] [--mode trl] [--shape 0.6B]
        [--rounds 6] [--prompts 64] [--attempts 8] [--max-tokens 512] [--cold-starts 20] [--seconds 900]
        [--json FILE] [--folder FOLDER]
    python benchmarks/gpu_loop.py --device cpu --shape tiny --rounds 4 --prompts 4 --attempts 2 --max-tokens 16

Each mode is `millrace train` as a user starts it, in a state folder of its own, but for what is compiled. Samples per
second are from the end of the second step to the end of the last. A reward of a coin's toss gives every group a signal;
replies of random weights end at the limit. Memory is what the driver says of each process, looked at all the time: of
the engine when the trainer has most, and the other way round; nothing if it names no process, as in containers. A
mode that fails, or takes more than `--seconds`, is reported, and the next one runs; the JSON is written after each.
Logs are kept if there is a `--folder`.

On CPUs there is nothing to share: `phases-0` is left out, and bars are not looked at. **Not yet run on a GPU.**
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a file, not as a module

from rollouts.chat.chat import Chat  # noqa: E402
from rollouts.workflow import Score, Workflow  # noqa: E402
from storage.records import Task  # noqa: E402

SKIPPED = 2
"""Steps at the start that are no steady state."""
GIB = 2**30
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
MODES: dict[str, dict[str, Any]] = {
    "phases-0": {"max_staleness": 0, "engine.share": "phases"},
    "split-0": {"max_staleness": 0, "engine.share": "split"},
    "split-1": {"max_staleness": 1, "engine.share": "split"},
}
CHANGES = ("sleep", "take_device", "leave_device", "wake")
"""Changes of turn on the GPU; each is a metric `<change>_seconds` of a step."""
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""What is compiled is compiled once for all modes."""


class Coin(Workflow):
    """Whatever a random model says is worth 1 or 0."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{number}", prompt=f"say {number:04}") for number in range(4096)]

    async def run(self, task: Task, chat: Chat) -> Score:
        return Score(reward=toss(await chat.ask(task.prompt)))


def toss(reply: str) -> float:
    """1 or 0."""
    return float(zlib.crc32(reply.encode()) % 2)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every mode does."""

    shape: str
    rounds: int
    prompts: int
    attempts: int
    max_tokens: int
    on_gpu: bool

    @property
    def modes(self) -> list[str]:
        """Those that this machine can run."""
        return [mode for mode in MODES if self.on_gpu or mode != "phases-0"]

    def run_file(self, mode: str, model: Path) -> dict[str, Any]:
        """The run of a mode, by dotted key."""
        longest = 64 + self.max_tokens
        keys: dict[str, Any] = {
            "workflow": "benchmarks.gpu_loop:Coin",
            "run": "loop",
            "model": str(model),
            "steps": self.rounds,
            "batch_size": self.prompts,
            "n_samples": self.attempts,
            "sampling.max_tokens": self.max_tokens,
            "engine.max_model_len": longest,
            "evaluation.every": 0,
            "rollout.max_concurrent": self.prompts,
            "train.tokens_per_microbatch": max(16384, longest) if self.on_gpu else longest,
            **MODES[mode],
        }
        if not self.on_gpu:
            del keys["engine.share"]
        else:
            keys |= {"train.dtype": "bfloat16", "engine.vllm.dtype": "bfloat16"}
        return keys


def make_model(shape: str, folder: Path) -> None:
    """A random Qwen3 and its tokenizer, whose vocabulary is as large."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.workloads.trl import CHARACTERS
    from storage.objects.digests import seal_folder
    from trainers.model.warmup import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer(set(CHARACTERS) | {" ", *"89"})
    size = len(tokenizer) if shape == "tiny" else 151_936
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), size)])
    heads = {"head_dim": 32, "num_key_value_heads": 2} if shape == "tiny" else {"head_dim": 128}
    config = Qwen3Config(
        **{"num_key_value_heads": 8, **SHAPES[shape], **heads},
        vocab_size=size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16 if shape != "tiny" else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal_folder(folder)


class Held:
    """Bytes of the GPU by side, looked at until `stop`."""

    def __init__(self) -> None:
        self.samples: list[dict[str, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """What each side had when the other had most."""
        self._over.set()
        self._thread.join()
        return when_the_other_has_most(self.samples)

    def _look(self) -> None:
        import psutil

        query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.2):
            listed = subprocess.run(query, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
            lines = [line for line in listed.splitlines() if re.fullmatch(r"\d+, *\d+", line.strip())]
            listed, names = "\n".join(lines), {}
            for line in lines:
                pid = int(line.split(",")[0])
                try:
                    names[pid] = " ".join(psutil.Process(pid).cmdline()) or psutil.Process(pid).name()
                except psutil.Error:
                    continue
            self.samples.append(by_side(listed, names))


def by_side(listed: str, names: Mapping[int, str]) -> dict[str, int]:
    """Bytes of engine and trainer, from nvidia-smi's list and the command lines of its processes."""
    held = {"engine": 0, "trainer": 0}
    for line in listed.splitlines():
        pid, mebibytes = line.split(",")
        if int(pid) in names:
            held["engine" if "VLLM" in names[int(pid)] else "trainer"] += int(mebibytes) * 2**20
    return held


def when_the_other_has_most(samples: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes at most of each side, and of each when the other has most. Empty if one was never seen."""
    if not all(any(each[side] for each in samples) for side in ("trainer", "engine")):
        return {}
    at_training, at_generating = (max(samples, key=lambda each: each[side]) for side in ("trainer", "engine"))
    return {
        "engine_bytes": at_generating["engine"],
        "trainer_bytes": at_training["trainer"],
        "engine_bytes_while_training": at_training["engine"],
        "trainer_bytes_while_generating": at_generating["trainer"],
    }


def run_mode(
    work: Work, mode: str, model: Path, scratch: Path, *, seconds: float
) -> tuple[list[tuple[float, dict[str, float]]], list[float], dict[str, int]]:
    """Train; returns when each step was committed, its metrics, pauses of publications, what was held; or raises."""
    from storage.log.entries import Alias, Step
    from storage.log.runs import open_run
    from storage.objects.opening import open_store

    scratch.mkdir()
    arguments = [f"{key}={json.dumps(value)}" for key, value in work.run_file(mode, model).items() if key != "workflow"]
    run_file = scratch / "run.toml"
    run_file.write_text('workflow = "benchmarks.gpu_loop:Coin"\n')
    caches = {name: str(scratch.parent / "caches" / folder) for name, folder in CACHES.items()}
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # where packages were brought along, they are there
    environment = {**caches, **os.environ, "MILLRACE_HOME": str(scratch / "home"), "PYTHONPATH": path}
    command = [sys.executable, "-m", "millrace", "train", str(run_file), *arguments]
    held, said = Held() if work.on_gpu else None, scratch / "said.log"
    try:
        with open(said, "w") as output:
            code: object = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=seconds
            ).returncode
    except subprocess.TimeoutExpired:
        code = f"nothing after {seconds:g} s"
    finally:
        memory = held.stop() if held is not None else {}
    if code:
        raise RuntimeError(f"{mode} ended with {code}:\n{said.read_text()[-4000:]}")
    log = open_run(open_store((scratch / "home" / "store").as_uri()), "loop")
    steps = [(entry.written_at, entry.body.metrics) for entry in log.entries if isinstance(entry.body, Step)]
    published = [entry.body for entry in log.entries if isinstance(entry.body, Alias) and entry.body.version]
    return steps, [alias.paused_seconds for alias in published][SKIPPED:], memory


def summarise(
    steps: Sequence[tuple[float, Mapping[str, float]]],
    paused: Sequence[float],
    memory: Mapping[str, int],
    work: Work,
) -> dict[str, float]:
    """Numbers of one mode; `steps` are the seconds at which each was committed, and its metrics."""
    steady = steps[SKIPPED:]
    seconds = steps[-1][0] - steps[SKIPPED - 1][0]

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for _, metrics in steady)

    trained = sum(metrics["trained_tokens"] for _, metrics in steady)
    training = sum(metrics["train_seconds"] for _, metrics in steady)
    generating = sum(metrics.get("generate_seconds", 0.0) for _, metrics in steady)
    turns = sum(median(f"{change}_seconds") for change in CHANGES)
    numbers = {
        "samples_per_second": len(steady) * work.prompts * work.attempts / seconds,
        "round_seconds": seconds / len(steady),
        "train_tokens_per_second": trained / training,
        "generate_tokens_per_second": trained / generating if generating else 0.0,
        "mfu": median("mfu"),
        "publish_seconds": statistics.median(paused) if paused else 0.0,
        "turns_share_of_round": turns * len(steady) / seconds,
        "engine_gap_first": steps[0][1].get("engine_gap", 0.0),
        "engine_gap": median("engine_gap"),
        "trainer_gpu_bytes": max(metrics.get("trainer_gpu_bytes", 0.0) for _, metrics in steps),
        "gpu_bytes_as_training_begins": median("system/gpu_0_memory_usage_megabytes") * 1e6,
    }
    return {**numbers, **{f"{change}_seconds": median(f"{change}_seconds") for change in CHANGES}, **memory}


def bars(results: Mapping[str, Mapping[str, float]], *, cold_starts: tuple[int, int]) -> dict[str, tuple[float, bool]]:
    """Name of each bar → its number, and whether that is good enough; only of what was measured."""
    made: dict[str, tuple[float, bool]] = {}
    started, tried = cold_starts
    if tried:
        made["cold starts, of " + str(tried)] = (started, started == tried)
    phases, split, ahead = (results.get(mode) for mode in ("phases-0", "split-0", "split-1"))
    if phases:
        if "engine_bytes_while_training" in phases:
            held = phases["engine_bytes_while_training"] / GIB
            made["GiB of a sleeping engine, at most 1"] = (held, held <= 1)
        made["seconds of a publication, at most 1"] = (phases["publish_seconds"], phases["publish_seconds"] <= 1)
        made["share of turns in a round, at most 0.05"] = (
            phases["turns_share_of_round"],
            phases["turns_share_of_round"] <= 0.05,
        )
        first, later = phases["engine_gap_first"], phases["engine_gap"]
        made["gap after waking, of the first round's, at most 1.1"] = (later / max(first, 1e-9), later <= 1.1 * first)
    if phases and split:
        times = phases["samples_per_second"] / split["samples_per_second"]
        made["turns : split, samples/s, at least 1.3"] = (times, times >= 1.3)
    if ahead and split:
        times = ahead["samples_per_second"] / split["samples_per_second"]
        made["staleness 1 : 0, samples/s, at least 1.5"] = (times, times >= 1.5)
    return made


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Refuses what cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", action="append", choices=[*MODES, "trl"], help="all of Millrace's by default")
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--cold-starts", type=int, default=0, help="short runs of one round by turns, after all else")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of each mode")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="a new one, in which model, stores and logs are kept")
    options = parser.parse_args(arguments)
    if options.rounds <= SKIPPED:
        parser.error(f"--rounds {options.rounds}: the first {SKIPPED} are not counted; take more")
    if options.device == "cpu" and {"phases-0", "trl"} & set(options.mode or ()):
        parser.error("--device cpu: phases-0 and trl share a GPU; take split-0 and split-1")
    return options


class Report:
    """What has been measured so far, on the screen and in a file."""

    def __init__(self, options: argparse.Namespace, work: Work) -> None:
        self.results: dict[str, dict[str, float]] = {}
        self.failures: dict[str, str] = {}
        self.cold_starts = (0, 0)
        self._options, self._work = options, work

    def measure(self, name: str, action: Callable[[], Mapping[str, float]]) -> bool:
        """Do it, and say what came of it; False if it failed."""
        try:
            self.results[name] = dict(action())
            print(name, json.dumps(self.results[name], indent=1), flush=True)
        except Exception as error:  # noqa: BLE001 - a GPU is lent by the minute: what comes next is measured anyway
            self.failures[name] = f"{type(error).__name__}: {error}"
            print(f"FAILED {name}: {self.failures[name]}", file=sys.stderr, flush=True)
        self.write()
        return name in self.results

    def bars(self) -> dict[str, tuple[float, bool]]:
        return bars(self.results, cold_starts=self.cold_starts) if self._work.on_gpu else {}

    def write(self) -> None:
        """Everything, to the file that was named."""
        if self._options.json:
            about = {"work": vars(self._work), "machine": platform.platform(), "modes": self.results}
            report = {**about, "failures": self.failures, "bars": self.bars()}
            self._options.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure and print."""
    options = parsed()
    names = ("shape", "rounds", "prompts", "attempts", "max_tokens")
    work = Work(**{name: getattr(options, name) for name in names}, on_gpu=options.device == "cuda")
    report = Report(options, work)
    with contextlib.ExitStack() as stack:
        scratch = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-loop-")))
        scratch.mkdir(parents=True, exist_ok=True)
        model = scratch / "model"
        make_model(work.shape, model)

        def measured(mode: str) -> Mapping[str, float]:
            if mode == "trl":
                from benchmarks.workloads.gpu_trl import run_trl

                sizes_of_work = {name: getattr(work, name) for name in ("rounds", "prompts", "attempts", "max_tokens")}
                asked = [task.prompt for task in Coin().tasks("train")]
                return run_trl(asked, toss, model, scratch / "trl", skipped=SKIPPED, **sizes_of_work)
            return summarise(*run_mode(work, mode, model, scratch / mode, seconds=options.seconds), work)

        for mode in sorted(options.mode or work.modes, key=lambda mode: mode == "trl"):  # it keeps the GPU's memory
            report.measure(mode, functools.partial(measured, mode))
        short = Work(**{**vars(work), "rounds": 1, "prompts": 4, "attempts": 2, "max_tokens": 16})
        for number in range(options.cold_starts if work.on_gpu else 0):
            name = f"cold-{number}"

            def start(name: str = name) -> Mapping[str, float]:
                started = time.time()
                run_mode(short, "phases-0", model, scratch / name, seconds=options.seconds)
                return {"seconds": time.time() - started}

            report.cold_starts = (report.cold_starts[0] + report.measure(name, start), number + 1)
    for name, (measure, holds) in report.bars().items():
        print(f"{'holds' if holds else 'MISSED':6}  {measure:10.3f}  {name}")
    report.write()
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
