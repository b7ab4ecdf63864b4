"""Every key of a run file: on the terminal, and on its page of the documents."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from cli.main import app
from tests import configuration_page


def _config(*words: str) -> str:
    done = CliRunner().invoke(app, ["config", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_page_has_every_key_as_the_settings_have_it():
    assert configuration_page.PAGE.read_text() == configuration_page.page(), "run `python -m tests.configuration_page`"


def test_a_table_a_key_and_all_of_them_are_listed():
    assert "[rollout]" in (everything := _config()) and "top level" in everything and "learning_rate" in everything
    assert "coefficient" in (table := _config("train.kl")) and "learning_rate" not in table
    assert json.loads(_config("train.lora.rank", "--json")) == [
        {
            "name": "train.lora.rank",
            "kind": "",
            "type": "integer",
            "range": "at least 1, at most 512",
            "default": "16",
            "help": "Rank of the update of each adapted matrix; vLLM serves up to 512.",
        }
    ]
    kinds = [row["kind"] for row in json.loads(_config("train.loss.clip_low", "--json"))]
    assert kinds == ["cispo", "clip", "dppo", "gspo"]


def test_an_unknown_key_names_the_nearest_one():
    done = CliRunner().invoke(app, ["config", "train.lr"])
    assert done.exit_code == 2 and "train.lr: no such key; did you mean 'learning_rate'?" in done.output
