"""The `millrace` command, also as `python -m millrace`. Importing the package first puts our own packages first."""

from cli.main import app

if __name__ == "__main__":
    app()
