"""`millrace promote` and `rollback`: make a policy the champion unless the log speaks against it, and take that back.

In: a run and a policy version. Out: the alias `champion` in the log, and in MLflow.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from infra.environment import tracking_uri
from settings.redaction import without_secrets
from storage.log.entries import Alias
from storage.log.promotion import promote, roll_back
from storage.log.run_log import RunLog
from storage.log.runs import is_training, run_config, teller_lock
from storage.tracking.registry import Registry, RegistryUnavailable

_LARGEST_GAP = 1.0
"""Where a run from before the setting existed does not say, in nats per token."""


def promote_policy(
    log: RunLog, *, version: int | None, max_gap: float | None, tracking: str, console: Console
) -> Alias:
    """Promote a policy of the run, the newest by default, and say so; again where MLflow was not told.

    `max_gap` is the run's `train.max_gap` where it is null. Raises `storage.log.promotion.NotPromoted`.
    """
    config = run_config(log)
    allowed = config.get("train", {}).get("max_gap", _LARGEST_GAP) if max_gap is None else max_gap
    alias = promote(log, version, max_gap=allowed)
    _say(log, f"policy {alias.version} of run {log.run_id} is the champion", tracking=tracking, console=console)
    return alias


def roll_back_champion(log: RunLog, *, tracking: str, console: Console) -> Alias:
    """Make the champion before this one the champion again, and say so. Raises `ValueError` where there is none."""
    alias = roll_back(log)
    _say(log, f"policy {alias.version} of run {log.run_id} is the champion again", tracking=tracking, console=console)
    return alias


def _say(log: RunLog, sentence: str, *, tracking: str, console: Console) -> None:
    console.print(escape(sentence), soft_wrap=True)
    console.print(f"[dim]MLflow: {escape(_tell_mlflow(log, tracking))}[/]", soft_wrap=True)


def _tell_mlflow(log: RunLog, tracking: str) -> str:
    uri = tracking_uri(tracking)
    if is_training(log):
        return "the run is being trained, which brings the alias there with its next step"
    try:
        with teller_lock(log):
            for registration in Registry(log, tracking_uri=uri).sync(finished=True):
                log.append(registration)
    except RegistryUnavailable as error:
        return without_secrets(f"{uri} was not told ({error}); promote again, or continue the run, and it will be")
    return without_secrets(f"{log.run_id}@champion at {uri}")
