"""How reports for a person are laid out. Standard library only."""

import shutil
import sys
import textwrap

WIDTH = 80
"""Columns, where the output is no terminal."""


def width() -> int:
    """Columns of a report: those of the terminal, as far as lines of that length are read with ease."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(40, min(shutil.get_terminal_size((WIDTH, 24)).columns, 100))


def wrapped(text: str, label: str, width: int) -> list[str]:
    """Lines with a hanging indent as wide as `label`, which the first begins with; paths and hashes are not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
