"""What `millrace traj show --color` has to compute first: advantages, and how far trainer and engine are apart.

In: a run's log and a shard row. Out: the row's advantage; or the trainer's minus the engine's logprob, token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.terminal.formatting import number
from cli.traj.trajectory_view import Coloring, by_advantage, by_gap, by_logprob, by_version
from settings.errors import InvalidInput
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.objects.digests import DigestMismatch, verify_folder
from storage.policies.adapters import ADAPTER_CONFIG, has_adapter
from storage.policies.policies import PolicyReader
from storage.views.queries import open_queries

if TYPE_CHECKING:
    from trainers.model.model import PolicyModel

COLORS = ("logprob", "advantage", "version", "gap")


class Colorist:
    """Colours rows of one run. It keeps the last policy it had to load."""

    def __init__(self, log: RunLog, *, cache: Path) -> None:
        self._log = log
        self._cache = cache
        self._loaded: tuple[int, PolicyModel] | None = None

    def color(self, row: Mapping[str, Any], by: str) -> Coloring:
        """Raises `ValueError` for a `by` that is not in `COLORS`, and where what it needs is gone."""
        match by:
            case "logprob":
                return by_logprob(row)
            case "version":
                return by_version(row)
            case "advantage":
                return self._advantage(row)
            case "gap":
                return self._gap(row)
        raise InvalidInput(f"--color {by!r}: write one of {', '.join(COLORS)}")

    def _advantage(self, row: Mapping[str, Any]) -> Coloring:
        """The advantage by the run's own settings, from the rewards of the group's attempts.

        Raises `ValueError` where they are not enough to tell.
        """
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
        advantages_B = advantages_of(
            settings,
            rewards_B,
            groups_B,
            lengths_B=torch.tensor(table["length"].to_pylist(), dtype=torch.float64),
            reward_parts_B={},
            reward_weights={},
        ).advantages_B
        advantage = float(advantages_B[attempts.index(row["attempt"])])
        mean = f"{float(rewards_B.nanmean()):.3g}"
        why = f"reward {number(row['reward'])}, mean {mean} over {len(attempts)} attempts"
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
        from trainers.model.attention import Layout

        input_ids_T = torch.tensor(token_ids)
        targets_T = torch.roll(input_ids_T, -1)
        lengths = [len(token_ids)]
        with torch.no_grad():
            logprobs_T, _ = self._model(version)(
                input_ids_T,
                targets_T,
                position_ids(lengths),
                Layout(lengths, device=input_ids_T.device),
                temperature,
            )
        return [0.0, *logprobs_T[:-1].tolist()]

    def _model(self, version: int) -> PolicyModel:
        if self._loaded is None or self._loaded[0] != version:
            self._loaded = (version, self._load(version))
        return self._loaded[1]

    def _load(self, version: int) -> PolicyModel:
        """The policy that sampled. Raises `ValueError` where its weights are gone or are not what the log says."""
        state = self._log.state
        if version in state.retired_policies:
            raise InvalidInput(f"--color gap needs the weights of policy {version}, and retention has removed them")
        policy = state.policies.get(version)
        if policy is None:
            raise InvalidInput(f"--color gap needs the weights of policy {version}, which is not in this run's log")
        try:
            folder = PolicyReader(self._log, self._cache).fetch(policy)
            is_it = verify_folder(folder) == policy.weights_sha256
        except FileNotFoundError:
            raise InvalidInput(f"--color gap: the weights of policy {version} are missing from the store") from None
        except DigestMismatch as error:
            raise InvalidInput(f"--color gap: the weights of policy {version} are damaged: {error}") from error
        if not is_it:
            raise InvalidInput(f"--color gap: the weights in {folder} are not those of policy {version} in the log")
        import transformers

        from settings.train import LoraSettings
        from trainers.model.lora import read_adapter
        from trainers.model.model import load_model

        transformers.utils.logging.disable_progress_bar()
        if not has_adapter(folder):
            return load_model(folder)
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
        lora = LoraSettings(rank=about["r"], alpha=about["lora_alpha"], target_modules=about["target_modules"])
        model = load_model(PolicyReader(self._log, self._cache).fetch(state.policies[0]), lora=lora)
        read_adapter(model.causal_lm, folder)
        return model
