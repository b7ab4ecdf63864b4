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


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"millrace {version('millrace')}\n"
