"""`millrace up` and `millrace down`: Prefect and MLflow in the browser.

In: the state folder. Out: two URLs, a worker, and the deployments of prefect.yaml.
"""

from __future__ import annotations

import os

import typer

from cli.terminal.console import open_console, working
from infra.environment import make_home
from settings.places.hints import command, program
from settings.places.state_folder import home, store_uri


def up() -> None:
    """Start Prefect, MLflow and a worker on this machine, and deploy prefect.yaml."""
    import asyncio

    make_home()  # before Prefect is imported, which warns if it is not there
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from infra.services.services import NOTIFY, TRAINING_VIEW, start_services
    from storage.log.runs import open_run
    from storage.objects.opening import open_store
    from tasks.prefect.flow_runs import crash_lost_flow_runs

    console = open_console()
    if destination := os.environ.get(NOTIFY):
        from tasks.prefect.notifications import check_destination

        check_destination(destination)
    with working("starting") as announce:
        services = start_services(home(), announce=announce)
        api = f"{services['prefect'].url}/api"
        announce("looking for flow runs whose process is gone")
        with temporary_settings({PREFECT_API_URL: api}):  # no flow run without a process stays Running
            lost = asyncio.run(crash_lost_flow_runs(lambda store, run: open_run(open_store(store_uri(store)), run)))
    if lost:
        console.print(f"marked as crashed, their processes are gone: {', '.join(lost)}")
    console.print(
        f"Prefect  [bold]{services['prefect'].url}[/]\n"
        f"MLflow   [bold]{services['mlflow'].url}/#/experiments{TRAINING_VIEW}[/]\n"
        f"worker   process {services['worker'].pid}, logs in {home() / 'logs'}\n\n"
        "Train through Prefect, here or from the form in the browser:\n"
        f"  export PREFECT_API_URL={api}\n"
        f"  {program('prefect')} deployment run 'train-grpo/train' -p run=my-run -p steps=20 --watch\n"
        f"Stop with `{command('down')}`.",
        soft_wrap=True,
    )


def down() -> None:
    """Stop what `millrace up` started."""
    from infra.services.services import stop_services

    stopped = stop_services(home())
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")
