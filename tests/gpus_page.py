"""The table of `docs/gpus.md`: what the memory plan says of the usual sizes of models on the usual GPUs.

`python -m tests.gpus_page` writes the table anew; `tests/unit/tasks/checks/test_memory_plan.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.devices import GpuMemory
from settings.run_file import RunConfig
from tasks.checks.memory_plan import Device, Memory, plan_for
from tests.documents import PROJECT

PAGE = PROJECT / "docs/gpus.md"
HEAD = "| Qwen3 shape | "
HEAD_SIZE, VOCABULARY = 128, 151_936
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it is", {}),
    ("checkpointing", {"activation_checkpointing": True}),
    ("checkpointing, offload", {"activation_checkpointing": True, "offload_optimizer": True}),
    ("checkpointing, LoRA", {"activation_checkpointing": True, "lora": {"rank": 16}}),
)
"""Settings that are tried in this order, with their name in the table."""


@dataclass(frozen=True)
class Shape:
    """The sizes in a Qwen3 model's `config.json`."""

    name: str
    hidden: int
    layers: int
    inner: int
    heads: int
    is_tied: bool
    key_value_heads: int = 8

    @property
    def about(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": HEAD_SIZE,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 40_960,
        }

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * HEAD_SIZE * (self.heads + self.key_value_heads) + 2 * HEAD_SIZE
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + self.hidden + VOCABULARY * self.hidden * (1 if self.is_tied else 2)


SHAPES = (
    Shape("0.6B", 1024, 28, 3072, 16, is_tied=True),
    Shape("1.7B", 2048, 28, 6144, 16, is_tied=True),
    Shape("4B", 2560, 36, 9728, 32, is_tied=True),
    Shape("8B", 4096, 36, 12288, 32, is_tied=False),
    Shape("14B", 5120, 40, 17408, 40, is_tied=False),
    Shape("32B", 5120, 64, 25600, 64, is_tied=False),
)
MACHINES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("1 × 24 GB", 1, 24, {}),
    ("1 × 48 GB", 1, 48, {}),
    ("1 × 80 GB", 1, 80, {}),
    ("1 × 141 GB", 1, 141, {}),
    ("2 × 80 GB", 2, 80, {}),
    ("8 × 80 GB", 8, 80, {"train": {"num_ranks": 4}, "rollout": {"num_workers": 4}}),
)
"""Name, GPUs, GB of each, and settings: without any there is one engine and one rank."""


def _plan(shape: Shape, num_gpus: int, gigabytes: int, settings: dict[str, Any], train: dict[str, Any]) -> list[Device]:
    config = RunConfig.model_validate(
        {
            "workflow": "env:Env",
            "batch_size": 64,
            "n_samples": 8,
            "max_staleness": 1,
            "rollout": settings.get("rollout", {}),
            "engine": {"max_model_len": 4096, "vllm": {"dtype": "bfloat16"}},
            "train": {"dtype": "bfloat16", "tokens_per_microbatch": 8192, **settings.get("train", {}), **train},
        }
    )
    total = gigabytes * 10**9
    gpus = [GpuMemory(name=str(number), total=total, free=total) for number in range(num_gpus)]
    return plan_for(config, shape.about, shape.parameters, Memory(gpus=gpus, machine=512 * 10**9))


def _cell(shape: Shape, num_gpus: int, gigabytes: int, settings: dict[str, Any]) -> str:
    """The first of `STEPS` that fits, and what the engine has for keys and values."""
    for name, train in STEPS:
        devices = _plan(shape, num_gpus, gigabytes, settings, train)
        if all(device.needed <= device.free for device in devices):
            caches = [d.parts["keys and values"] for device in devices for d in device.demands if d.process == "engine"]
            return f"{name}; {min(caches) / 1e9:.0f} GB"
    return "–"


def table() -> str:
    """The table as the plan is now."""
    names = " | ".join(name for name, *_ in MACHINES)
    rows = [
        " | ".join([f"| {shape.name}", *(_cell(shape, *machine) for _, *machine in MACHINES)]) + " |"
        for shape in SHAPES
    ]
    return "\n".join([f"{HEAD}{names} |", "|---" * (1 + len(MACHINES)) + "|", *rows])


def page(old: str) -> str:
    """The page with its table as the plan is now."""
    begin = old.index(HEAD)
    return old[:begin] + table() + old[old.index("\n\n", begin) :]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
