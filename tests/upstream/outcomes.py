"""What became of the tests of a run, and what is different between two runs of the same tests."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORST = ("failed", "xfailed", "skipped", "xpassed", "passed")
"""Outcomes, the worst first: a test that passed and whose teardown failed has failed."""

PASSES = ("passed", "xpassed")


@dataclass
class Outcomes:
    """The outcomes of one run.

    Attributes:
        tests: the outcome of each test and of each subtest, by its name. Subtests of the same name are numbered.
        said: the end of the report of each that failed.
        finished: how many tests have ended, without their subtests.
        collected: how many tests there are to run, 0 as long as that is not known.
        version: what was tested, "" as long as that is not known.
        path: where that was imported from.
    """

    tests: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    finished: int = 0
    collected: int = 0
    version: str = ""
    path: str = ""

    @classmethod
    def read(cls, file: Path) -> "Outcomes":
        """What `recorder.py` has written so far; a line that is not whole yet is left for the next time."""
        outcomes = cls()
        if not file.is_file():
            return outcomes
        ended: set[str] = set()
        repeated: Counter[str] = Counter()
        for text in file.read_text("utf-8").splitlines(keepends=True):
            if not text.endswith("\n"):
                break
            line = json.loads(text)
            outcomes.version = line.get("version", outcomes.version)
            outcomes.path = line.get("path", outcomes.path)
            outcomes.collected = line.get("collected", outcomes.collected)
            if "test" not in line:
                continue
            name = line["test"]
            if line.get("subtest"):
                repeated[name] += 1
                name += f" #{repeated[name]}" if repeated[name] > 1 else ""
            else:
                ended.add(name)
            outcomes.tests[name] = min(outcomes.tests.get(name, "passed"), line["outcome"], key=WORST.index)
            if line.get("said"):
                outcomes.said[name] = line["said"]
        outcomes.finished = len(ended)
        return outcomes

    def having(self, *outcomes: str) -> list[str]:
        """The tests with one of some outcomes, in the order of their names."""
        return sorted(name for name, found in self.tests.items() if found in outcomes)

    def counts(self) -> Mapping[str, int]:
        """How many have each outcome, subtests counted."""
        return Counter(self.tests.values())

    def __str__(self) -> str:
        counts = self.counts()
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(WORST) if counts[outcome]) or "no test"


@dataclass(frozen=True)
class Difference:
    """Two runs of the same tests, by name of test or subtest.

    Attributes:
        lost: what passes on stock, even where upstream expects it to fail, and does not on patched, or is not there.
        gained: what passes on patched and does not on stock.
        failing: what fails on both.
        other: what is neither and has different outcomes.
    """

    lost: list[str]
    gained: list[str]
    failing: list[str]
    other: list[str]

    @classmethod
    def between(cls, stock: Outcomes, patched: Outcomes) -> "Difference":
        passes, now = set(stock.having(*PASSES)), set(patched.having(*PASSES))
        lost, gained = passes - now, now - passes
        # A subtest is reported where it is reached: of a test that now fails before them, the others are lost with it
        different = {
            name
            for name in stock.tests.keys() | patched.tests.keys()
            if stock.tests.get(name) != patched.tests.get(name)
        }
        failing = set(stock.having("failed")) & set(patched.having("failed"))
        return cls(sorted(lost), sorted(gained), sorted(failing), sorted(different - lost - gained))
