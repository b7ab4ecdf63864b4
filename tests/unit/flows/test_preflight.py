"""What is refused before anything heavy starts, where it is not the command line's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from settings.loss import ClipLoss, CustomLoss
from settings.run_file import RunConfig
from storage.objects.object_store import LocalStore, StoreError
from tasks import preflight
from tests.builders import a_config


def _config(**values: Any) -> RunConfig:
    return a_config(workflow="examples.arithmetic:Arithmetic", **values)


class Forgetful(LocalStore):
    """A store that ignores the condition, as some S3 servers do: every writer wins."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "open_store", lambda uri: Forgetful(tmp_path))
    with pytest.raises(StoreError, match="conditional writes"):
        preflight.check_run(_config(store="", tool_parser="hermes"))


def test_a_good_store_and_workflow_pass(tmp_path: Path) -> None:
    preflight.check_run(_config(store=str(tmp_path), tool_parser="hermes"))


def test_a_tool_parser_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vLLM has no such parser; did you mean 'hermes'"):
        preflight.check_run(_config(store=str(tmp_path), tool_parser="hermess"))


def test_a_custom_loss_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(inputs, beta):\n    return beta\n")
    with pytest.raises(ValueError, match=r"no_such_module:loss' cannot be imported"):
        preflight.check_loss(CustomLoss(path="no_such_module:loss"), with_reference=False)
    with pytest.raises(ValueError, match="missing a required argument: 'beta'"):
        preflight.check_loss(CustomLoss(path=f"{file}:loss"), with_reference=False)
    with pytest.raises(ValueError, match="returns float"):
        preflight.check_loss(CustomLoss(path=f"{file}:loss", arguments={"beta": 1.0}), with_reference=False)


def test_our_own_losses_need_no_trial() -> None:
    preflight.check_loss(ClipLoss(), with_reference=True)
