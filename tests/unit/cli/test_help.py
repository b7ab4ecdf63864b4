"""What `--help` and `--version` print: groups of commands, and an example that the command would take."""

from __future__ import annotations

import shlex
from importlib.metadata import version

import click
import pytest
import typer
from typer.testing import CliRunner

from cli.main import COMMANDS, TRAJ, app

EXAMPLES = [*(example for members in COMMANDS.values() for example in members.values()), *TRAJ.values()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_of_a_commands_help_is_one_it_takes(example: str):
    command, words = typer.main.get_command(app), shlex.split(example)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)  # raises for an option or a value that it does not take
    assert f"Example: millrace {example}" == command.epilog


def test_help_lists_every_command_in_a_group_and_has_a_short_name():
    shown = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "80"}).output
    assert all(f"─ {title} ─" in shown for title in COMMANDS) and "─ Commands ─" not in shown
    assert CliRunner().invoke(app, ["traj", "show", "-h"]).exit_code == 0


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("sta", ["status"]), ("traj sh", ["show"]), ("eval run --n", ["--num-tasks", "--n-samples"])],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: list[str]):
    variables = {"COMP_WORDS": f"millrace {typed}", "COMP_CWORD": str(len(typed.split())), "COLUMNS": "80"}
    run = CliRunner().invoke(app, prog_name="millrace", env={**variables, "_MILLRACE_COMPLETE": "complete_bash"})
    assert run.output.split() == completed


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("eval run n_samples=4", "'n_samples=4' is one word too many; write --n-samples 4"),
        ("promote run 20", "'20' is one word too many; options: --version, --max-gap, --json, --store, --tracking"),
        ("up now", "'now' is one word too many; options: none"),
    ],
)
def test_a_word_too_many_is_answered_by_what_the_command_takes(typed: str, answer: str):
    run = CliRunner().invoke(app, typed.split(), env={"COLUMNS": "120"})
    assert run.exit_code == 2 and answer in run.output


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"millrace {version('millrace')}\n"
