"""The exceptions that a user of `overlay` meets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OverlayError(Exception):
    """What was expected, what was found and what to do, in one line. The command line prints it and exits 1."""


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
