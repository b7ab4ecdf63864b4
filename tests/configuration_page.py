"""`docs/configuration.md`, made from the settings: every key with its type, range, default and help.

`python -m tests.configuration_page` writes the page anew; `tests/unit/cli/run/test_config.py` compares the two.
"""

from __future__ import annotations

from cli.run.config import by_table, keys_of
from tests.documents import PROJECT

PAGE = PROJECT / "docs/configuration.md"
HEAD = """# Configuration

Every key of a run file, with its type, range and default. `millrace config KEY` prints the same on the terminal, and
`millrace config --json` for scripts. `tests/configuration_page.py` makes this page from `settings/`.

On the command line a key is written with dots: `millrace train FILE train.max_grad_norm=0.5`. An unknown key is an
error that names the nearest one, also for words of other trainers such as `lr` or `num_generations`. Several run files
are read one over the other, `base.toml cluster.toml`, and settings on the command line count most."""


def page() -> str:
    """The page as the settings are now."""
    parts = [HEAD]
    for title, rows in by_table(keys_of("")).items():
        head = title.replace("[", "`[").replace("]", "]`").replace('kind = "', '`kind = "')
        head = f"{head}`" if "kind" in head else head
        lines = [
            f"## {head[0].upper()}{head[1:]}",
            "",
            "| Key | Type and range | Default | Meaning |",
            "|---|---|---|---|",
        ]
        for row in rows:
            kind = ", ".join(part for part in (row.type, row.range) if part)
            cells = (f"`{row.name.rpartition('.')[2]}`", kind, f"`{row.default}`", row.help)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
