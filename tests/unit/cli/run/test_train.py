"""`millrace train --dry-run` starts and writes nothing; Prefect away is an error before a run, a warning after it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from cli.run.flow import run_flow
from cli.run.progress import Follower
from cli.run.train import _train
from flows import train_grpo as flow_module
from infra.services.services import ServiceFailed
from rollouts.workflow import Workflow
from settings.run_file import default_values, load_run_file, make_config
from storage.log.entries import Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run
from storage.objects.object_store import LocalStore, StoreError
from tasks.checks import preflight
from tests.builders import BASE, a_log, a_shard, a_step, a_summary
from tests.unit.cli.builders import printed, typed
from tests.unit.trainers.builders import tiny_model

RUN_FILE = "examples/arithmetic.toml"
DRY_RUN = f"train {RUN_FILE} --dry-run"
_HEAVY = """
import sys
from pathlib import Path
from cli.run.dry_run import derived_values
from settings.run_file import load_run_file
derived_values(load_run_file(Path("examples/arithmetic.toml")))
print(*sorted({"torch", "vllm", "ray", "prefect", "mlflow", "transformers"} & sys.modules.keys()))
"""


def _values(overrides: str = "") -> dict[str, Any]:
    return dict(json.loads(typed(f"{DRY_RUN} --json {overrides}").stdout))


def test_batches_are_what_the_settings_multiply_to(home: Path) -> None:
    batches = "batch_size=10 n_samples=4 train.num_minibatches=2 train.num_epochs=3 train.tokens_per_microbatch=1024"
    expected = {
        "attempts_per_step": 40,
        "attempts_per_update": 20,
        "updates_per_step": 6,
        "most_tokens_per_step": 40 * 64,
        "most_sampled_tokens_per_turn": 40 * 8,
        "most_passes_per_update_and_rank": 2,  # 1,280 tokens in packs of 1,024
        "most_groups_ahead": 20,
        "train_tasks": 9800,
        "evaluation_tasks": 200,
        "steps_done": None,
    }
    assert expected.items() <= _values(f"{batches} max_staleness=1").items()
    assert not (home / "store" / "runs").exists()


def test_a_thread_of_a_users_module_does_not_keep_a_command_that_is_over(home: Path, tmp_path: Path) -> None:
    source = "import threading\nfrom examples.arithmetic import Arithmetic\nclass Mine(Arithmetic): pass\n"
    waits = "threading.Thread(target=threading.Event().wait, name='mine').start()\n"
    (tmp_path / "mine.py").write_text(f"{source}{waits}")
    words = [*DRY_RUN.split(), f"workflow={tmp_path / 'mine.py'}:Mine"]
    dry_run = subprocess.run([sys.executable, "-m", "cli.main", *words], capture_output=True, text=True)
    assert dry_run.returncode == 0 and "thread mine goes on: it ends now" in dry_run.stderr, dry_run.stderr


def test_what_a_users_module_prints_is_not_in_the_json(home: Path, tmp_path: Path) -> None:
    """Neither by `print`, nor by a program that it starts."""
    source = "import os\nfrom examples.arithmetic import Arithmetic\nprint('hello')\nos.system('echo there')\n"
    source += "os.sys.stdout.close()\nclass Mine(Arithmetic): pass\n"
    (tmp_path / "mine.py").write_text(source)
    words = [*DRY_RUN.split(), "--json", f"workflow={tmp_path / 'mine.py'}:Mine"]
    dry_run = subprocess.run([sys.executable, "-m", "cli.main", *words], capture_output=True, text=True, check=True)
    assert json.loads(dry_run.stdout)["train_tasks"] == 9800
    assert {"hello", "there"} <= set(dry_run.stderr.splitlines())


def test_parameters_are_counted_in_the_model_folder(home: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(home / "tiny")
    count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())
    sizes = {"trainer_weights_bytes": 4 * count, "trainer_gradients_and_moments_bytes": 12 * count}
    assert {"parameters": count, **sizes}.items() <= _values(f"model={folder}").items()
    with_critic = _values(f"model={folder} train.advantage=gae train.num_ranks=2")
    assert sizes.items() <= with_critic.items()


def test_a_model_of_the_hub_that_is_not_here_has_no_sizes_yet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.checks.preflight.check_on_hub", lambda name, kind: None)
    values = _values("model=nobody/nothing")
    assert values["parameters"] is values["usual_learning_rate"] is None and values["attempts_per_step"] == 512


@pytest.mark.parametrize(
    ("overrides", "usual", "side"),
    [
        ("", [1e-4, 1e-3], ""),
        ("learning_rate=1e-6", [1e-4, 1e-3], "below"),
        ("train.lora.rank=4", [1e-3, 1e-2], "below"),
    ],
)
def test_what_learning_rate_is_usual_for_the_size_is_said(
    overrides: str, usual: list[float], side: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _values(overrides)["usual_learning_rate"] == pytest.approx(usual)
    said = f"is {side} what is usual for this size and kind, {usual[0]:g} to {usual[1]:g}"
    assert (said in caplog.text) == bool(side)
    assert f"{usual[0]:g} to {usual[1]:g}" in printed(f"{DRY_RUN} {overrides}")


def test_a_run_that_exists_is_compared_and_its_steps_are_said(store: LocalStore) -> None:
    config = load_run_file(Path(RUN_FILE)).model_dump(mode="json")
    log = create_run(store, "arithmetic", config, defaults=default_values())
    log.append(BASE)
    log.append(a_shard("s", [a_summary(0)]))
    assert _values("batch_size=8")["steps_done"] == 0  # without a step it begins anew
    log.append(a_step(log.refresh()))
    assert _values()["steps_done"] == 1
    assert "batch_size (64 → 8)" in printed(f"{DRY_RUN} batch_size=8", status=2)


def test_people_get_a_table_and_the_news_that_nothing_was_started() -> None:
    shown = printed(DRY_RUN)
    assert "attempts per step" in shown and "new run" in shown and "nothing was started" in shown
    assert "did you mean 'batch_size'" in printed(f"{DRY_RUN} batch_sise=8", status=2)
    done = subprocess.run([sys.executable, "-c", _HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", "nothing heavy is imported"


NOBODY = "http://somebody:secret@127.0.0.1:9/api"


def test_a_server_that_is_not_there_is_named_before_anything_starts() -> None:
    begun = []

    async def flow() -> None:
        begun.append(True)

    with (
        patch.dict(os.environ),
        temporary_settings({PREFECT_API_URL: NOBODY}),
        pytest.raises(ServiceFailed, match=r"127\.0\.0\.1:9/api does not answer .*unset PREFECT_API_URL") as raised,
    ):
        run_flow(flow, Console())
    assert not begun and "secret" not in str(raised.value)


def test_an_address_without_a_scheme_says_how_it_is_written() -> None:
    with (
        patch.dict(os.environ),
        temporary_settings({PREFECT_API_URL: "127.0.0.1:4200"}),
        pytest.raises(ServiceFailed, match=r"PREFECT_API_URL = '127\.0\.0\.1:4200' is no address: write http://HOST"),
    ):
        run_flow(lambda: None, Console())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("steps", "is_over"), [(0, True), (1, False)])
def test_a_server_that_is_away_at_the_end_spoils_a_run_only_where_steps_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int, is_over: bool
) -> None:
    a_log(LocalStore(tmp_path), run_id="run")
    document = {"workflow": "examples.arithmetic:Arithmetic", "run": "run", "store": str(tmp_path), "steps": steps}
    config = make_config(document, source="test")

    async def away(**_: Any) -> None:
        raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr(flow_module, "train_grpo", away)
    if is_over:
        with caplog.at_level(logging.WARNING):
            asyncio.run(
                _train(config, preflight.Checked(config=config, workflow=Workflow(), tasks={}), adopt_tasks=False)
            )
        assert "Prefect does not know that the run has ended" in caplog.text
    else:
        with pytest.raises(httpx.ConnectError):
            asyncio.run(
                _train(config, preflight.Checked(config=config, workflow=Workflow(), tasks={}), adopt_tasks=False)
            )


def test_the_flow_of_a_command_does_not_check_again_what_the_command_has_checked(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[preflight.Checked | None] = []

    async def train_grpo(**_: Any) -> dict[str, list[str]]:
        checks.append(preflight.CHECKED.get())
        return {"missing": ["MLflow lacks 112 of 420 steps; `millrace sync run` writes them"]}

    monkeypatch.setattr(flow_module, "train_grpo", train_grpo)
    monkeypatch.setattr("cli.run.flow.run_flow", lambda flow, console, **_: asyncio.run(flow()))
    shown = printed(f"train {RUN_FILE}")
    assert "MLflow   MLflow lacks 112 of 420 steps; `millrace sync run` writes them\n" in shown
    assert [type(each.workflow).__name__ for each in checks if each] == [
        "Arithmetic"
    ] and not preflight.CHECKED.get(), "a deployed flow checks for itself"


def test_progress_outlives_a_store_that_is_away_and_shows_what_came_meanwhile(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, page = create_run(store, "run", {"workflow": "module:Thing"}), io.StringIO()
    progress = Follower(open_run(store, "run"), steps=1, console=Console(file=page, width=200))
    log.append(Session(id="s1", code_version="c0de", steps=1))

    def away(*_: object) -> None:
        raise StoreError("store s3://lake: cannot read log/1.json")

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "refresh", away)
        progress._show_new()
    assert "session s1" not in page.getvalue()
    progress._show_new()
    assert "session s1" in page.getvalue()
