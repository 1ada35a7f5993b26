"""What a run that was stopped has found, for the next one. A run that comes to its end forgets it.

Standard library only.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay.errors import OverlayError
from overlay.measure.builds import Build
from overlay.progress import say
from overlay.queue import kept

FRESH = 24 * 3600.0
"""Seconds for which it is of use."""

KIND = "verify"
"""The folder of the cache."""


class Kept:
    """The rows of each measurement of a run.

    Args:
        on: whether anything is looked up or kept at all.
    """

    def __init__(self, on: bool) -> None:
        self._looks = self._keeps = on
        self._used: list[str] = []

    def find(self, key: str) -> list[Any] | None:
        """What was kept in the last day."""
        self._used.append(key)
        found = kept.find(KIND, key) if self._looks else None
        if found is None or not 0 <= time.time() - found["at"] < FRESH:
            return None
        return list(found["rows"])

    def keep(self, key: str, rows: list[Any]) -> None:
        """Keeps rows. A cache that cannot be written is no reason to stop, and is told once."""
        if self._keeps:
            try:
                kept.keep(KIND, key, {"at": time.time(), "rows": rows})
            except (OSError, OverlayError) as error:
                say(f"what is found is not kept for the next run, should this one be stopped: {error}")
                self._keeps = False

    def forget(self) -> None:
        """At the end of the run."""
        for key in self._used if self._looks else ():
            with contextlib.suppress(OSError):  # the folder cannot be written any more
                kept.forget(KIND, key)


def key(build: Build, asked: Mapping[str, Any]) -> str:
    """Of all that a result is made from: environments lie in folders that are named by their content.

    Args:
        asked: what decides beside the build, for JSON.
    """
    sources = kept.content_of(sorted(Path(__file__).parent.rglob("*.py")))
    return kept.key(sources, str(build), build.interpreter, [str(folder) for folder in build.laid_over], dict(asked))
