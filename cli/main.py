"""The `millrace` command.

In: a run file and overrides. Out: a trained run, or one clear sentence. Each command imports what it needs when it
runs, so that `millrace --help` is instant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.operate.operations import operations
from cli.terminal.arguments import EvalOption, JsonOption, StoreOption, open_named
from cli.terminal.errors import explained
from cli.traj.traj_commands import traj
from infra.environment import prepare_environment
from settings.errors import InvalidInput

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Post-train language-model agents by reinforcement learning. State lives in .millrace (or $MILLRACE_HOME).",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over the run file's, as key=value: steps=50 train.loss=cispo"),
]

app.add_typer(traj, name="traj")
app.add_typer(operations)  # without a name: at the top level
rollout = typer.Typer(no_args_is_help=True, help="Try a workflow without training.")
app.add_typer(rollout, name="rollout")


@app.callback()
def main() -> None:
    prepare_environment()


@app.command()
def train(
    run_file: Path,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what it comes to, start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train the run a file describes; continues it where it stands."""
    with explained():
        if not dry_run:
            from cli.run.training import train_run

            train_run(run_file, parse_overrides(overrides))
            return
        from cli.run.dry_run import dry_run as derive
        from cli.run.dry_run import print_dry_run

        values = derive(run_file, parse_overrides(overrides))
        if as_json:
            typer.echo(json.dumps(values, indent=2))
        else:
            print_dry_run(values, Console(highlight=False))


@app.command()
def status(
    run: str,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show it again as it grows, until the last step or Ctrl-C.")
    ] = False,
    store: StoreOption = "",
    as_json: JsonOption = False,
) -> None:
    """A run in numbers, read from its log alone."""
    with explained():
        from cli.operate.status import print_status, run_status

        if follow and as_json:
            raise InvalidInput("--json prints the status once: leave out --follow, or --json")
        log = open_named(run, store)
        if follow:
            from cli.operate.live_status import follow_run

            follow_run(log, Console(highlight=False))
            return
        numbers = run_status(log)
        if as_json:
            typer.echo(json.dumps(numbers, indent=2))
        else:
            print_status(numbers, Console(highlight=False))


@app.command(name="eval")
def evaluate(
    run: str,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    split: Annotated[str, typer.Option(help="Split of the workflow; by default the one the run evaluates.")] = "",
    num_tasks: Annotated[int | None, typer.Option(min=1, help="Most problems; by default as the run.")] = None,
    n_samples: Annotated[int | None, typer.Option(min=1, help="Attempts per problem; by default as the run.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; by default as the run.")] = None,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Score one policy version on held-out tasks, on an engine of its own: avg@n, pass@k, failures."""
    with explained():
        from cli.run.evaluate import evaluate_run, print_evaluation

        wanted = {"split": split or None, "num_tasks": num_tasks, "n_samples": n_samples, "temperature": temperature}
        console = Console(highlight=False, stderr=as_json)
        found = evaluate_run(run, version=version, wanted=wanted, store=store, console=console)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            print_evaluation(found, console)


@rollout.command()
def once(
    run: Annotated[str, typer.Argument(help="A run; `millrace train FILE steps=0` makes one without training it.")],
    n: Annotated[int, typer.Option("--n", min=0, help="Prompts to attempt, each as often as the run does.")] = 1,
    store: StoreOption = "",
) -> None:
    """Attempt a run's first prompts once with its live policy and show everything; nothing is committed."""
    with explained():
        from cli.run.rollout import print_groups, rollout_once

        console = Console(highlight=False)
        print_groups(rollout_once(open_named(run, store), num_prompts=n, console=console), console)


@app.command()
def produce(
    run: str,
    name: Annotated[str, typer.Option(help="What its workers are called in the log; by default as this machine.")] = "",
    shards: Annotated[int, typer.Option(min=0, help="End after so many shards; 0: when the run has its steps.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds without anything new in the run before this ends.")] = 3600.0,
    store: StoreOption = "",
) -> None:
    """Make rollouts for a run that is trained on another machine; any number of these may come and go."""
    with explained():
        from cli.run.rollout import produce_for

        console = Console(highlight=False)
        produce_for(run, store=store, name=name, shards=shards, patience=patience, console=console)


@app.command()
def lineage(
    target: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="Or MODEL@ALIAS, or a run; see the options.")],
    policy: Annotated[int | None, typer.Option(help="A policy version of the run, instead of MLflow's number.")] = None,
    trajectory: Annotated[str, typer.Option(help="Every policy this attempt influenced; its id is in `traj ls`.")] = "",
    prompt: Annotated[str, typer.Option(help="The same for every group of a prompt.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read the shards and weights again; check digests.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every prompt, not the first few.")] = False,
    as_json: JsonOption = False,
    store: StoreOption = "",
    tracking: Annotated[
        str, typer.Option(help="MLflow, for what only it knows; by default $MILLRACE_TRACKING, else .millrace's.")
    ] = "",
) -> None:
    """What made a policy: step, shards, prompts, code. Or which policies a trajectory influenced."""
    with explained():
        from cli.operate.lineage import show_lineage

        answer = show_lineage(
            target,
            policy=policy,
            trajectory=trajectory,
            prompt=prompt,
            verify=verify,
            show_all=show_all,
            store=store,
            tracking=tracking,
            console=None if as_json else Console(highlight=False),
        )
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
        if isinstance(answer, dict) and answer.get("problems"):
            raise typer.Exit(1)


@app.command()
def gc(
    runs: Annotated[list[str] | None, typer.Argument(help="Every run in the store by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    keep_last: Annotated[int, typer.Option(help="Keep the newest so many policies of each run.")] = 5,
    keep_every: Annotated[int, typer.Option(help="Keep every so many policy versions one more; 0: none.")] = 0,
    older_than: Annotated[str, typer.Option(help="Remove only what is older: 12h, 30d, 8w.")] = "",
    max_size: Annotated[str, typer.Option(help="Oldest first, until all named runs are no larger: 50GB.")] = "",
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    ignore_readers: Annotated[bool, typer.Option("--ignore-readers", help="Even while somebody reads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with a reason for every item.")] = False,
    store: StoreOption = "",
) -> None:
    """Remove files that no kept policy, pending group or reader needs.

    A policy is also kept while it is the base model, live, has an alias or the best score.
    """
    with explained():
        from cli.operate.housekeeping import collect
        from storage.retention.rules import make_rules

        rules = make_rules(keep_last=keep_last, keep_every=keep_every, older_than=older_than, max_size=max_size)
        collect(
            runs or [],
            rules,
            dry_run=dry_run,
            sure=sure,
            ignore_readers=ignore_readers,
            store=store,
            as_json=as_json,
        )


@app.command()
def replay(
    run: str,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Training settings to change in the span: train.loss.clip_high=0.3"),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    first: Annotated[int | None, typer.Option("--from", help="First step of a span.")] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last step of a span; the newest by default.")] = None,
    lr: Annotated[float | None, typer.Option(help="Another learning rate.")] = None,
    advantage: Annotated[
        str | None, typer.Option(help="Another train.advantage, with its defaults: leave_one_out, opo, …")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Another train.loss, with its defaults: cispo, gspo, sapo, …")
    ] = None,
    rewards: Annotated[str, typer.Option(help="Train on these rewards of `millrace rescore`.")] = "",
    save: Annotated[str, typer.Option(help="A new folder for the replayed policy.")] = "",
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Train recorded steps again without generating: to the same weights, or to see what one change does."""
    with explained():
        from cli.run.replay import print_replay, replay_run, span_of

        flags = {"learning_rate": lr, "train.advantage": advantage, "train.loss": loss}
        changes = parse_overrides(overrides) | {key: value for key, value in flags.items() if value is not None}
        start, end = span_of(step=step, first=first, last=last)
        console = Console(highlight=False, stderr=as_json)
        places = {"rewards": rewards, "save": save, "store": store}
        found = replay_run(run, first=start, last=end, changes=changes, console=console, **places)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            print_replay(found, console)
        if found["unchanged"] and not found["identical"]:
            raise typer.Exit(1)


@app.command()
def rescore(
    run: str,
    reward: Annotated[str, typer.Option(help="module:function or file.py:function of (reply, answer).")],
    name: Annotated[str, typer.Option(help="What the new rewards are called; by default like the function.")] = "",
    include_eval: EvalOption = False,
    processes: Annotated[int, typer.Option(min=0, help="Reward processes; 0: one per core.")] = 0,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Compute new rewards for recorded attempts, beside the recorded ones; nothing is overwritten."""
    with explained():
        from cli.run.rescore import print_rescored, rescore_run, rescored_json

        log, console = open_named(run, store), Console(highlight=False, stderr=as_json)
        result = rescore_run(
            log, reward=reward, name=name, include_eval=include_eval, processes=processes, console=console
        )
        if as_json:
            typer.echo(json.dumps(rescored_json(result), indent=2))
        else:
            print_rescored(log, result, console)


@app.command()
def export(
    run: str,
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a policy's adapters to the base model's weights.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="The moving average of the weights that train.ema keeps.")
    ] = False,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Write a policy as a folder that transformers, peft, vLLM and others load: whole weights, or adapters."""
    with explained():
        from cli.operate.export import export_policy, print_exported

        exported = export_policy(open_named(run, store), to, version=version, merge=merge, average=average)
        if as_json:
            typer.echo(json.dumps(exported, indent=2))
        else:
            print_exported(exported, Console(highlight=False))


@app.command()
def index(
    run: str,
    embedding: Annotated[
        str, typer.Option(help="module:function from texts to vectors, for `traj search --similar`; it is remembered.")
    ] = "",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start again from the shards.")] = False,
    store: StoreOption = "",
) -> None:
    """Bring a run's search index up to date with its shards."""
    with explained():
        from cli.traj.search import build_index

        build_index(open_named(run, store), embedding=embedding, rebuild=rebuild, console=Console(highlight=False))


@app.command()
def report(
    run: str,
    out: Annotated[Path | None, typer.Option(help="The file; by default reports/RUN.html in the state folder.")] = None,
    store: StoreOption = "",
) -> None:
    """Write one web page about a run, that opens from disk: curves, time, staleness, groups, prompts."""
    with explained():
        from cli.report.report import write_report

        typer.echo(write_report(open_named(run, store), out).as_uri())


@app.command()
def doctor(run_file: Annotated[Path | None, typer.Argument(help="Check this run file's places too.")] = None) -> None:
    """Check that everything a run needs is here, and say how to fix what is not."""
    with explained():
        from cli.operate.doctor import diagnose
        from settings.run_file import load_run_file

        config = load_run_file(run_file) if run_file else None
        if not diagnose(config, Console(highlight=False)):
            raise typer.Exit(1)


@app.command()
def up() -> None:
    """Start Prefect, MLflow and a worker on this machine, and deploy prefect.yaml."""
    with explained():
        from cli.operate.services import up as start

        start(Console(highlight=False))


@app.command()
def down() -> None:
    """Stop what `millrace up` started."""
    from cli.operate.services import down as stop

    stop(Console(highlight=False))


def parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs; values in TOML's form, bare words as strings.

    Raises `ValueError` for a pair without `=`.
    """
    import tomllib

    parsed: dict[str, Any] = {}
    for pair in pairs or []:
        key, separator, text = pair.partition("=")
        if not separator:
            raise InvalidInput(f"{pair!r}: write overrides as key=value, for example steps=50")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text
    return parsed


if __name__ == "__main__":
    app()
