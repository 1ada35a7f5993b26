"""Progress of long steps: a bar on a terminal, plain lines elsewhere. All of it goes to stderr."""

import contextlib
import os
import sys
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from overlay.errors import plain


def say(text: str) -> None:
    """One line, made plain (`errors.plain`)."""
    with contextlib.suppress(OSError, AttributeError):  # stderr is closed, or nobody reads it: the work goes on
        sys.stderr.write(f"overlay: {plain(text)}\n")
        sys.stderr.flush()


def _has_size() -> bool:
    """Whether stderr is a terminal with rows and columns."""
    try:
        return all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError, AttributeError):  # it is no terminal, is closed, or is no file
        return False


class Progress:
    """Progress of one step over `total` units (bytes by default).

    On a terminal it is a bar of tqdm's (imported only there); elsewhere, and without tqdm, one line when it starts. So
    it is on a terminal that has no size, as a container's in a CI job may be: tqdm shows nothing there.
    """

    def __init__(self, what: str, total: int, unit: str = "B") -> None:
        self._bar: Any = None
        if _has_size() and find_spec("tqdm") is not None:
            from tqdm import tqdm

            counted = {"unit": unit, "unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
            self._bar = tqdm(total=total, desc=plain(what), leave=False, **counted)
        else:
            say(f"{what}: {total / 1e6:.1f} MB" if unit == "B" else f"{what}: {total} {unit}")

    def advance(self, units: int) -> None:
        """`units` more are done."""
        if self._bar is not None:
            self._bar.update(units)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
