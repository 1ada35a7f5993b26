"""Which of two versions is the earlier one, without a library (PEP 440)."""

import re
from itertools import dropwhile

_PHASES = {"a": -3, "alpha": -3, "b": -2, "beta": -2, "c": -1, "rc": -1, "pre": -1, "preview": -1}
_FORM = re.compile(
    r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<phase>[a-z]+)[-_.]?(?P<number>\d*))?.*", re.IGNORECASE
)


def key(version: str) -> tuple[tuple[int, ...], int, int]:
    """What a version is sorted by: its release numbers, then what comes before the release, the release itself, and
    what comes after it. A local label (`+overlay.2`) is left out. Text that is no version is before all of them.
    """
    found = _FORM.fullmatch(version.partition("+")[0].strip())
    if found is None:
        return (), 0, 0
    numbers = [int(number) for number in found["release"].split(".")]
    trimmed = tuple(reversed(list(dropwhile(lambda number: number == 0, reversed(numbers)))))  # 2.0 is 2.0.0
    word = (found["phase"] or "").lower()
    phase = {"": 0, "post": 1, "rev": 1, "r": 1, "dev": -4}.get(word, _PHASES.get(word, 0))
    return trimmed, phase, int(found["number"] or 0)
