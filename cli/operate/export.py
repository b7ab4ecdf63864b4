"""`millrace export`: a policy as a folder that other tools load.

In: a run, a version, a folder that does not exist. Out: that folder, sealed, and what it is.

    whole weights (or base) ─────────▶ HF layout: transformers, vLLM, lm-eval
    adapters ─────────▶ peft's format: PeftModel.from_pretrained(base, folder)
        └── --merge ──▶ HF layout: W + (alpha / rank) · B A in the place of W
    --average: the same with the moving average of the weights (train.ema), from the state saved with that step
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import JsonOption, StoreOption, check_target, open_named, print_json, room_at
from cli.terminal.console import open_console
from infra.environment import cache_folder
from settings.errors import InvalidInput

if TYPE_CHECKING:
    from storage.log.entries import Step
    from storage.log.run_log import RunLog


def export(
    run: str,
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add a policy's adapters to the base model.")] = False,
    average: Annotated[bool, typer.Option("--average", help="The weights' moving average, see train.ema.")] = False,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Write a policy as a folder that transformers, peft, vLLM and others load: whole weights, or adapters."""
    import tempfile

    from storage.log.runs import find_policy
    from storage.objects.digests import verify_folder
    from storage.policies.adapters import has_adapter
    from storage.policies.policies import PolicyReader

    log = open_named(run, store)
    check_target(to, "--to")
    if to.exists():
        raise InvalidInput(f"{to} is there already; remove it, or choose another folder")
    saved = _saved_step(log, version) if average else None
    policy = find_policy(log, saved.policy.version if saved else version)
    policies = PolicyReader(log, cache_folder())
    folder = policies.fetch(policy)
    adapters = has_adapter(folder)
    if merge and not adapters:
        raise InvalidInput(f"policy {policy.version} of run {log.run_id!r} has no adapters to merge; leave --merge out")
    with room_at(to), tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.absolute().parent) as scratch:
        made = Path(scratch) / "content"
        if saved:
            from trainers.checkpoint import save_average

            policy_folder, folder = folder, Path(scratch) / "average"
            save_average(log.store.fetch_folder(saved.state_path or "", cache_folder()), policy_folder, folder)
        if merge:
            from trainers.model.lora import merge_adapter

            merge_adapter(policies.fetch(log.state.policies[0]), folder, made)
        else:
            shutil.copytree(folder, made)
        digest = verify_folder(made)
        os.rename(made, to)  # the folder appears whole or not at all
    exported = {
        "run": log.run_id,
        "version": policy.version,
        "policy_sha256": policy.weights_sha256,
        "weights_sha256": digest,
        "kind": "merged" if merge else "adapter" if adapters else "whole",
        "is_average": average,
        "folder": str(to.absolute()),
        "base": f"{log.store.uri}/{log.state.policies[0].path}" if adapters and not merge else "",
    }
    if as_json:
        print_json(exported)
    else:
        _print(exported, open_console(soft_wrap=True))


def _saved_step(log: RunLog, version: int | None) -> Step:
    """The step with a saved optimizer state that made policy `version`, by default the last one."""
    from storage.log.replay_plan import is_saved

    state = log.state
    saved = {step.policy.version: step for step in state.steps if is_saved(state, step)}
    if not saved or version not in {None, *saved}:
        kept = f"there are those of versions {', '.join(map(str, saved))}" if saved else "there is none"
        wanted = "" if version is None else f" of policy {version}"
        raise InvalidInput(f"run {log.run_id!r} has no saved optimizer state{wanted}, which holds the average; {kept}")
    return saved[max(saved) if version is None else version]


def _print(exported: dict[str, Any], console: Console) -> None:
    what = {"merged": "adapters merged into the base model", "adapter": "adapters", "whole": "a whole model"}
    average = ", moving average" if exported["is_average"] else ""
    console.print(
        f"policy {exported['version']} of run {escape(exported['run'])}, {what[exported['kind']]}{average}: "
        f"[bold]{escape(exported['folder'])}[/], weights {exported['weights_sha256'][:12]}"
    )
    if exported["base"]:
        console.print(f"they belong on {escape(exported['base'])}; --merge makes one model of both")
