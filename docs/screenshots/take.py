"""The screenshots of this folder, taken in headless Chromium from a real run: `python docs/screenshots/take.py RUN`.

In: a run that was started through Prefect, and the services of `millrace up`. Out: PNG files beside this one.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from infra.environment import home
from infra.services import running_services

HERE = Path(__file__).resolve().parent
LOADING = 15_000  # milliseconds of the page's own clock


def take(name: str, url: str, *, height: int = 1000) -> None:
    """One page as NAME.png."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as profile:
        size = [f"--window-size=1400,{height}", "--hide-scrollbars", f"--virtual-time-budget={LOADING}"]
        quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        shot = f"--screenshot={HERE / name}.png"
        subprocess.run([str(browser), *quiet, *size, shot, url], check=True, capture_output=True, timeout=180)
    print(name, url)


async def flow_run_id(run: str) -> str:
    """The newest flow run of this name."""
    async with get_client() as client:
        found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run])))
        return str(found[-1].id)


def main(run: str) -> None:
    services = running_services(home())
    prefect, mlflow = services["prefect"].url, services["mlflow"].url
    client = MlflowClient(tracking_uri=mlflow)
    experiment = client.get_experiment_by_name("millrace")
    assert experiment is not None
    [tracked] = client.search_runs([experiment.experiment_id], f"tags.`millrace.run_id` = '{run}'", max_results=1)
    take("prefect_run", f"{prefect}/runs/flow-run/{asyncio.run(flow_run_id(run))}")
    take("prefect_artifacts", f"{prefect}/artifacts")
    take("mlflow_run", f"{mlflow}/#/experiments/{experiment.experiment_id}/runs/{tracked.info.run_id}/model-metrics")
    take("mlflow_registry", f"{mlflow}/#/models/{run}")
    take("mlflow_traces", f"{mlflow}/#/experiments/{experiment.experiment_id}/traces")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "cli.main", "report", run, "--out", str(page)], check=True)
        take("report", page.as_uri(), height=1800)


if __name__ == "__main__":
    main(sys.argv[1])
