"""Errors that their reader can mend: a command prints one of these as a single line, every other as a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something outside of this program has to change; the message names the thing and the fix."""


class InvalidInput(UserError, ValueError):
    """A value that was given cannot be used."""


class NotFound(UserError, FileNotFoundError):
    """Something that was named is not there."""
