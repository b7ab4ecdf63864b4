"""What `millrace traj show --color` has to compute first: advantages, and how far trainer and engine are apart.

In: a run's log and a shard row. Out: the row's advantage; or the trainer's minus the engine's logprob, token by token.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.terminal.formatting import number
from settings.errors import InvalidInput, counted, path_errors
from storage.log.run_log import RunLog
from storage.log.runs import find_policy, run_config
from storage.policies.adapters import ADAPTER_CONFIG, has_adapter
from storage.policies.policies import PolicyReader
from storage.views.queries import open_queries

if TYPE_CHECKING:
    from trainers.model.model import PolicyModel

COLORS = ("logprob", "advantage", "version", "gap")
_HEAT = ("green", "yellow", "red")
_VERSION_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass(frozen=True, kw_only=True)
class Coloring:
    """How the sampled tokens look, in order; one entry per token of the row, prompt included."""

    name: str
    styles: Sequence[str]
    values: Sequence[str]
    """What stands beside a token, without markup; empty if the colour says it all."""
    legend: Text


class Colorist:
    """Colours rows of one run. It keeps the last policy it had to load."""

    def __init__(self, log: RunLog, by: str, *, cache: Path) -> None:
        """Raises `InvalidInput` for a `by` that is not in `COLORS`."""
        if by not in COLORS:
            raise InvalidInput(f"--color {by!r}: write one of {', '.join(COLORS)}")
        self._log = log
        self._by = by
        self._cache = cache
        self._model = functools.lru_cache(maxsize=1)(self._load)

    def color(self, row: Mapping[str, Any]) -> Coloring:
        """Raises `UserError` if what it needs is gone."""
        match self._by:
            case "advantage":
                return self._advantage(row)
            case "gap":
                return self._gap(row)
            case "version":
                return by_version(row)
            case _:
                return by_logprob(row)

    def _advantage(self, row: Mapping[str, Any]) -> Coloring:
        """Advantages by the run's own settings, from the rewards of the group's attempts. Raises `InvalidInput` if they
        need more."""
        import torch

        from settings.train import TrainSettings
        from trainers.objective.advantages import advantages_of

        config = run_config(self._log)
        settings = TrainSettings.model_validate(config["train"]).advantage
        if settings.kind not in ("grpo", "leave_one_out", "opo", "pass_at_k") or "batch" in vars(settings).values():
            raise InvalidInput(
                f"--color advantage: with train.advantage.kind = {settings.kind!r} it comes from more than the rewards "
                "of one group; try --color logprob"
            )
        table = open_queries(self._log, shard_ids=[row["shard_id"]]).select(
            "SELECT attempt, any_value(reward) AS reward, sum(len(list_filter(loss_mask, lambda m: m))) AS length "
            "FROM shard_rows WHERE group_id = ? GROUP BY attempt ORDER BY attempt",
            [row["group_id"]],
        )
        attempts, rewards = table["attempt"].to_pylist(), table["reward"].to_pylist()
        rewards_B = torch.tensor([math.nan if reward is None else reward for reward in rewards])
        groups_B = torch.zeros(len(attempts), dtype=torch.int64)
        lengths_B = torch.tensor(table["length"].to_pylist(), dtype=torch.float64)
        advantages_B = advantages_of(
            settings, rewards_B, groups_B, lengths_B=lengths_B, reward_parts_B={}, reward_weights={}
        )
        advantage = float(advantages_B[attempts.index(row["attempt"])])
        mean = f"{float(rewards_B.nanmean()):.3g}"
        why = f"reward {number(row['reward'])}, mean {mean} over {counted(len(attempts), 'attempt')}"
        if row["outcome"] != "trained":
            return by_advantage(row, advantage, f"{why}; never trained: {row['outcome']}")
        oldest = 0
        if config["train"]["stale_policy"] == "mask":
            base_version = self._log.state.steps[row["step"] - 1].claim.base_version
            steps_per_update = config["train"].get("steps_per_update", 1)
            oldest = (base_version // steps_per_update - math.ceil(config["max_staleness"])) * steps_per_update
        return by_advantage(row, advantage, why, oldest=oldest)

    def _gap(self, row: Mapping[str, Any]) -> Coloring:
        sampling = row["sampling"]
        # Greedy and raw logprobs are the engine's before any temperature.
        is_plain = sampling["temperature"] == 0 or sampling["logprobs_mode"] == "raw_logprobs"
        temperature = 1.0 if is_plain else sampling["temperature"]
        gaps = [math.nan] * len(row["input_ids"])
        for version in sorted({v for v in row["weight_versions"] if v >= 0}):
            logprobs = self._logprobs(row["input_ids"], version, temperature)
            for token, sampled_by in enumerate(row["weight_versions"]):
                if sampled_by == version:
                    gaps[token] = logprobs[token] - row["logprobs"][token]
        why = "trainer's logprob minus the engine's"
        if not is_plain and (sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0):
            why += ", which is of the tokens that top-p, top-k and min-p left"
        return by_gap(gaps, why)

    def _logprobs(self, token_ids: list[int], version: int, temperature: float) -> list[float]:
        """Log-probability of every token but the first under a policy, by the trainer's own forward on the CPU."""
        import torch

        from trainers.data.packing import position_ids
        from trainers.model.layout import Layout

        ids_T, lengths = torch.tensor(token_ids), [len(token_ids)]
        layout = Layout(lengths, device=ids_T.device)
        with torch.no_grad():
            logprobs_T, _ = self._model(version)(
                ids_T, torch.roll(ids_T, -1), position_ids(lengths), layout, temperature
            )
        return [0.0, *logprobs_T[:-1].tolist()]

    def _load(self, version: int) -> PolicyModel:
        """The policy that sampled. Raises `UserError` if its weights are gone or are not what the log says."""
        import transformers

        from settings.train import LoraSettings
        from trainers.model.lora import read_adapter
        from trainers.model.model import load_model

        reader, policy = PolicyReader(self._log, self._cache), find_policy(self._log, version)
        with path_errors(f"--color gap needs the weights of policy {version}, which the store does not have"):
            folder = reader.fetch(policy)
        transformers.utils.logging.disable_progress_bar()
        if not has_adapter(folder):
            return load_model(folder)
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
        lora = LoraSettings(rank=about["r"], alpha=about["lora_alpha"], target_modules=about["target_modules"])
        model = load_model(reader.fetch(self._log.state.policies[0]), lora=lora)
        read_adapter(model.causal_lm, folder)
        return model


def by_logprob(row: Mapping[str, Any]) -> Coloring:
    """Green for what the policy was sure of, red for what surprised it; with the version that sampled the token."""
    versions = row["weight_versions"]
    return Coloring(
        name="logprob",
        styles=[_heat(-logprob, low=0.2, high=1.5) for logprob in row["logprobs"]],
        values=[f"{logprob:.2f}@{version}" for logprob, version in zip(row["logprobs"], versions, strict=True)],
        legend=_heat_legend("> −0.2", "> −1.5", "below"),
    )


def by_version(row: Mapping[str, Any]) -> Coloring:
    """A colour per policy version."""
    counts = Counter(sorted(version for version in row["weight_versions"] if version >= 0))
    style_of = dict(zip(counts, itertools.cycle(_VERSION_STYLES), strict=False))
    return Coloring(
        name="version",
        styles=[style_of.get(version, "") for version in row["weight_versions"]],
        values=[f"@{version}" for version in row["weight_versions"]] if len(counts) > 1 else [],
        legend=_legend(
            (style_of[version], f"{version} ({counted(count, 'token')})") for version, count in counts.items()
        ),
    )


def by_advantage(row: Mapping[str, Any], advantage: float, why: str, *, oldest: int = 0) -> Coloring:
    """The attempt's one advantage on every token; none on tokens of versions before `oldest`, which were masked."""
    style = "dim" if advantage == 0 else "green" if advantage > 0 else "red"
    style = f"bold {style}" if abs(advantage) > 1 else style
    masked = sum(1 for version in row["weight_versions"] if 0 <= version < oldest)
    legend = Text().append(f"{advantage:+.3f}", style=style).append(f"  {why}")
    if masked:
        legend.append(f"; {counted(masked, 'stale token')} masked (dim)")
    return Coloring(
        name="advantage",
        styles=[style if version >= oldest else "dim" for version in row["weight_versions"]],
        values=[],
        legend=legend,
    )


def by_gap(gaps: Sequence[float], why: str) -> Coloring:
    """Trainer's minus engine's logprob of each token; NaN for tokens that were not sampled."""
    sizes = [abs(gap) for gap in gaps if not math.isnan(gap)]
    legend = _heat_legend("< 0.01", "< 0.1", "more")
    legend.append(f"   mean {sum(sizes) / max(1, len(sizes)):.2g}, largest {max(sizes, default=0):.2g}; {why}")
    return Coloring(
        name="gap",
        styles=["" if math.isnan(gap) else _heat(abs(gap), low=0.01, high=0.1) for gap in gaps],
        values=["" if math.isnan(gap) else f"{gap:+.1g}" for gap in gaps],
        legend=legend,
    )


def _heat(distance: float, *, low: float, high: float) -> str:
    return _HEAT[(distance >= low) + (distance >= high)]


def _legend(entries: Iterable[tuple[str, str]]) -> Text:
    """A square of each style, and what it stands for."""
    legend = Text()
    for style, text in entries:
        legend.append("■", style=style).append(f" {text}  ")
    return legend


def _heat_legend(*texts: str) -> Text:
    return _legend(zip(_HEAT, texts, strict=True))
