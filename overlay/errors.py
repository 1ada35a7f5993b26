"""The exceptions that a user of `overlay` meets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 10_000
"""Characters that a line may have: what is wrong in a file may be all of it."""


def escaped(text: str, kept: str = "") -> str:
    """`text` as a terminal shows it as it is: names come from archives, index pages, patches and git, and may hold
    terminal escapes, line ends, or characters that turn the text around (CVE-2021-42574). What cannot be printed is
    escaped as in a Python string, but for the characters in `kept`."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode("ascii") for each in text
    )


def plain(text: str) -> str:
    """`text` as one line, `escaped`: line ends become spaces; of what is longer than LONGEST characters the middle is
    left out."""
    text = escaped(text.replace("\r\n", "\n").replace("\n", " "))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


class OverlayError(Exception):
    """What was expected, what was found and what to do, in one line (`plain`). The command line prints it and exits
    1."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class OverlayMismatchError(OverlayError):
    """An installed file that the overlay covers is none of those that it has a patch for, nor one that is right.

    It is no ImportError: much code takes one for a package that is not installed, and goes on without it.
    """


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Gives an OSError from here the name of `place` where it has none, as that of a write to an open file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
