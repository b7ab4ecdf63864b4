"""`millrace lineage`: what made a policy, and what became of a trajectory, on the terminal.

In: `MODEL@VERSION`, `MODEL@ALIAS`, or a run with a policy version, trajectory or prompt. Out: text, or JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import JsonOption, StoreOption, TrackingOption, open_named, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import held_out, number, plain_table, versions_of
from infra.environment import tracking_uri
from settings.errors import InvalidInput, counted, ranges
from settings.places.hints import command
from settings.places.state_folder import home

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.views.lineage import AttemptFacts, GroupLineage, PolicyLineage, ShardUse

_GROUPS_SHOWN = 5


def lineage(
    target: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="Or MODEL@ALIAS, or a run; see the options.")],
    policy: Annotated[int | None, typer.Option(help="A policy version of the run, instead of MLflow's number.")] = None,
    trajectory: Annotated[str, typer.Option(help="Every policy this attempt influenced; its id is in `traj ls`.")] = "",
    prompt: Annotated[str, typer.Option(help="The same for every group of a prompt.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read the shards and weights again; check digests.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every prompt, not the first few.")] = False,
    as_json: JsonOption = False,
    store: StoreOption = "",
    tracking: TrackingOption = "",
) -> None:
    """What made a policy: step, shards, prompts, code. Or which policies a trajectory influenced."""
    from storage.log.history import to_json
    from storage.retention.retention import reading
    from storage.views.lineage import policy_lineage, prompt_lineage, trajectory_lineage

    run, at, name = target.partition("@")
    given = {"MODEL@VERSION": at, "--policy": policy is not None, "--trajectory": trajectory, "--prompt": prompt}
    asked = [option for option, value in given.items() if value]
    if len(asked) > 1:
        raise InvalidInput(f"{' and '.join(asked)} ask different things; give one of them")
    if at and not name:
        raise InvalidInput(f"{target!r}: write MODEL@VERSION or MODEL@ALIAS, for example {run}@rollout")
    if verify and (trajectory or prompt):
        raise InvalidInput("--verify checks the files behind a policy; leave it out with --trajectory and --prompt")
    log, console = open_named(run, store), open_console(soft_wrap=True)
    if trajectory or prompt:
        groups = [trajectory_lineage(log, trajectory)] if trajectory else prompt_lineage(log, prompt)
        if as_json:
            print_json(to_json(groups[0] if trajectory else groups))
        else:
            for group in groups:
                _print_group(log, group, console)
        return
    if at:
        policy = _version(log, name, tracking)
    elif policy is None:
        policy = log.state.newest_version
    with reading(log, "lineage --verify", quiet=True) if verify else contextlib.nullcontext():
        made = policy_lineage(log, policy, verify=verify)
    if as_json:
        print_json(to_json(made))
    else:
        _print_policy(made, console, show_all=show_all, mlflow=_mlflow_page(made, tracking))
    if made.problems:
        raise typer.Exit(1)


def _version(log: RunLog, name: str, tracking: str) -> int:
    """The policy version a user's name means: from the log, else from MLflow, which knows aliases set in its UI."""
    from storage.views.lineage import find_version

    if (version := find_version(log, name)) is not None:
        return version
    from storage.tracking.follower import FollowerUnavailable
    from storage.tracking.mlflow_run import registered_version

    try:
        return registered_version(log, name, tracking_uri=tracking_uri(tracking))
    except FollowerUnavailable as error:
        aliases = ", ".join(sorted(log.state.aliases)) or "none"
        raise InvalidInput(
            f"the log of run {log.run_id!r} has no {'registered version' if name.isdecimal() else 'alias'} {name!r} "
            f"(its aliases: {aliases}), and MLflow cannot be asked ({error}); "
            f"start it with `{command('up')}`, name it with --tracking, or give --policy N"
        ) from error


def _mlflow_page(made: PolicyLineage, tracking: str) -> str:
    """Address of the version in MLflow's UI, if one is running or `tracking` names a server; else empty."""
    from infra.services.services import TRAINING_VIEW, running_services

    server = running_services(home()).get("mlflow") if not tracking else None
    root = server.url if server else tracking_uri(tracking)
    if not root.startswith("http") or made.registry_version is None:
        return ""
    return f"{root}/#/models/{made.registry_model}/versions/{made.registry_version}{TRAINING_VIEW}"


def _print_policy(made: PolicyLineage, console: Console, *, show_all: bool, mlflow: str) -> None:
    state = [*(["live"] if made.live else []), *made.aliases, *(["weights retired"] if made.retired else [])]
    registered = f"{made.registry_model} version {made.registry_version}" if made.registry_version else "not registered"
    facts = {"policy": f"[bold]{made.version}[/] of run {escape(made.run)}"}
    if state:
        facts["policy"] += f"  ({escape(', '.join(state))})"
    facts["registry"] = escape(f"{registered}  {mlflow}".rstrip())
    facts["weights"] = f"{escape(made.weights)}\nsha256 {made.weights_sha256}"
    parents = [*map(str, made.parents), *(["…"] if made.parents and made.parents[-1] else [])]
    facts["trained from"] = " → ".join(parents) or "nothing: it is the base model"
    if made.step is not None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in made.outcomes.items())
        facts["step"] = f"{made.step}, session {escape(made.session_id or 'not recorded')}: {counts}"
        facts["sampled by"] = _policies(made.sampled_by)
        facts["data set"] = f"{made.dataset_digest} (groups and files, as in MLflow)"
    facts["reward code"] = f"sha256 {made.reward_sha256}" if made.reward_sha256 else "not recorded"
    facts["code"] = escape(made.code_version) or "not recorded"
    facts["configuration"] = f"{escape(made.config)}\nsha256 {made.config_sha256}"
    scores = [escape(f"{e.split}: {' '.join(held_out(e))}") for e in made.evaluations]
    facts["evaluations"] = "\n".join(scores) or "none"
    if made.verified:
        good = f"[green]verified[/]: {counted(len(made.shards), 'shard')} and the policy's files are as recorded"
        facts["digests"] = "\n".join(f"[red]{escape(problem)}[/]" for problem in made.problems) or good
    _print_facts(facts, console)
    for shard in made.shards:
        _print_facts({"shard": _shard(shard)}, console)
    if made.groups:
        _print_groups(made, console, show_all=show_all)


def _print_groups(made: PolicyLineage, console: Console, *, show_all: bool) -> None:
    shown = made.groups if show_all else made.groups[:_GROUPS_SHOWN]
    table = plain_table("prompt", "group", "usable", "reward", "sampled by")
    for group in shown:
        versions = versions_of(vars(group))
        usable = f"{group.usable} of {group.expected}"
        table.add_row(escape(group.prompt_id), escape(group.id), usable, number(group.mean_reward), versions)
    console.print(f"\n{counted(len(made.groups), 'prompt')}")
    console.print(table, soft_wrap=False)
    if len(shown) < len(made.groups):
        console.print(f"[dim]… {len(made.groups) - len(shown)} more; --all shows them[/]")


def _print_group(log: RunLog, lineage: GroupLineage, console: Console) -> None:
    group = lineage.group
    failed = ", ".join(f"{count} {escape(status)}" for status, count in group.failures.items())
    prompt = f"prompt {escape(group.prompt_id)}, epoch {group.epoch}"
    facts = {
        "group": f"[bold]{escape(group.id)}[/] of run {escape(log.run_id)}: {prompt}",
        "attempts": f"{group.usable} usable of {group.expected}" + (f" ({failed})" if failed else ""),
        "shard": _shard(lineage.shard),
    }
    if lineage.attempt is not None:
        facts["attempt"] = _attempt(lineage.attempt)
    if group.rows:
        facts["sampled by"] = _policies(range(group.head_version, group.tail_version + 1))
    facts["outcome"] = lineage.outcome + (f": {escape(lineage.reason)}" if lineage.reason else "")
    if lineage.step is not None:
        facts["step"] = str(lineage.step)
    if lineage.influenced:
        facts["influenced"] = f"{_policies(lineage.influenced)} ({len(lineage.influenced)})"
        notes = [f"{lineage.live} is live"] if lineage.live is not None else []
        notes += [f"{version} is {escape(repr(name))}" for name, version in lineage.aliases.items()]
        notes += [f"{ranges(lineage.registered)} registered in MLflow"] if lineage.registered else []
        notes += [f"weights of {ranges(lineage.retired)} retired"] if lineage.retired else []
        facts["of these"] = ", ".join(notes) or "none is live, registered or has an alias"
    else:
        facts["influenced"] = "no policy" + (" yet" if lineage.outcome == "pending" else "")
    _print_facts(facts, console)


def _print_facts(facts: dict[str, str], console: Console) -> None:
    for name, value in facts.items():
        first, *more = value.split("\n")
        console.print("\n".join([f"[dim]{name:<13}[/] {first}", *(" " * 14 + line for line in more)]))


def _shard(shard: ShardUse) -> str:
    problem = f"\n[red]{escape(shard.problem)}[/]" if shard.problem else ""
    groups = f", {counted(shard.groups, 'group')} trained here" if shard.groups else ""
    return f"{escape(shard.uri)}\nsha256 {shard.sha256}, {counted(shard.rows, 'row')}{groups}{problem}"


def _attempt(facts: AttemptFacts) -> str:
    parts = ", ".join(f"{escape(name)} {number(value)}" for name, value in facts.reward_parts.items())
    return (
        f"{facts.attempt}: reward {number(facts.reward)}" + (f" ({parts})" if parts else "") + f", {facts.status}, "
        f"{counted(facts.sampled_tokens, 'token')} sampled by {_policies(facts.versions)}"
    )


def _policies(versions: Sequence[int]) -> str:
    return f"{'policy' if len(versions) == 1 else 'policies'} {ranges(versions)}"
