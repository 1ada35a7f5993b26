"""What the patched layer costs, against stock and against upstream's own fix (5.24.0), in one run.

`scripts/test.sh overhead` prints the table and checks the limits. Every build has a process of its own, and they take
turns; the processes are exchanged twice, because where a process happens to lie in memory shows in nanoseconds. A ratio
is the median over the rounds, each with the two figures of that round.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay import environments
from overlay.measure.turns import Turn, rounds, turn
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, ROOT, STOCK, Variant, installed

WORKER = Path(__file__).with_name("overhead_worker.py")
PROCESSES, ROUNDS = 3, 3
"""Sets of processes, and rounds with each: nine rounds in all."""

PAIRS = (*zip(STOCK, PATCHED, strict=True), (LATEST, PATCHED_LATEST))
BUILDS = [build for pair in PAIRS for build in pair]


@dataclass(frozen=True)
class Row:
    """A figure of every build.

    Attributes:
        question: what the workers are asked.
        unit: of their answers, `ns` or `ms`.
        aim: how many times the unpatched build's figure the patched one's may be.
        latest: the same against 5.24.0, for the patched builds of earlier releases.
        today: where the aim is not met, how many times it is.
    """

    name: str
    question: tuple[str | int | bool, ...]
    unit: str
    aim: float | None = None
    latest: float | None = None
    today: float | None = None


ON_WITH_HOOKS = 1.35
"""Of a layer with hooks: it looks for them, and goes through two methods more to its `forward`."""

CALLS, STEPS, SHARDED_STEPS = 5000, 3, 2
ROWS: tuple[Row, ...] = (
    Row("nn.Module, the control", ("layer", "module", False, CALLS), "ns"),
    Row("nn.Module, hooks", ("layer", "module", True, CALLS), "ns"),
    Row("layer, off", ("layer", "off", False, CALLS), "ns", 1.00, 1.00),
    Row("layer, off, hooks", ("layer", "off", True, CALLS), "ns", 1.00, 1.00),
    Row("layer, off after on", ("layer", "off again", False, CALLS), "ns", 1.00, 1.00),
    Row("layer, off after on, hooks", ("layer", "off again", True, CALLS), "ns", 1.00, 1.00),
    Row("layer, on", ("layer", "on", False, CALLS), "ns", 1.25),
    Row("layer, on, hooks", ("layer", "on", True, CALLS), "ns", 1.25, today=ON_WITH_HOOKS),
    Row("step, no checkpointing", ("step", "none", STEPS), "ms", 1.00),
    Row("step, reentrant", ("step", "reentrant", STEPS), "ms", 1.00),
    Row("step, non-reentrant", ("step", "non-reentrant", STEPS), "ms", 1.00),
    Row("FSDP2, no checkpointing", ("sharded step", "none", SHARDED_STEPS), "ms", 1.00),
    Row("FSDP2, reentrant", ("sharded step", "reentrant", SHARDED_STEPS), "ms", 1.00),
    Row("FSDP2, non-reentrant", ("sharded step", "non-reentrant", SHARDED_STEPS), "ms", 1.00),
)
"""A call of an empty layer, with checkpointing off or on; a training step of a 4-layer Llama, on one rank or on two."""

NOISE = {"ns": 0.03, "ms": 0.05}
"""How far apart the figures of two processes with the same build may lie."""


@dataclass(frozen=True)
class Comparison:
    """A patched build against a build that it is measured by: how many times as long it takes, and may take."""

    row: Row
    patched: Variant
    base: Variant
    aim: float
    ratio: float = field(compare=False)

    def __str__(self) -> str:
        return f"{self.row.name}: {self.patched} is {self.ratio:.2f} of {self.base}"


@dataclass(frozen=True)
class Overhead:
    """What was measured: for each row, each build's figure in each round."""

    figures: dict[Row, dict[Variant, list[float]]]

    @property
    def rounds(self) -> int:
        """How many figures there are of each build in each row."""
        return len(next(iter(self.figures.values()))[LATEST])

    def median(self, row: Row, build: Variant) -> float:
        """In the row's unit."""
        return statistics.median(self.figures[row][build])

    def ratio(self, row: Row, build: Variant, base: Variant) -> float:
        """How many times that of `base` the figure of `build` is."""
        found = self.figures[row]
        return statistics.median(one / other for one, other in zip(found[build], found[base], strict=True))

    def missed(self) -> set[Comparison]:
        """The ratios that are over their aim, or over what they are today, by more than noise."""
        return {one for one in self._ratios() if one.ratio > max(one.row.today or 0, one.aim) + NOISE[one.row.unit]}

    def met(self) -> set[Row]:
        """The rows that are said to miss their aim, and meet it on every build."""
        over = {one.row for one in self._ratios() if one.ratio > one.aim}
        return {row for row in self.figures if row.today is not None and row not in over}

    def _ratios(self) -> Iterator[Comparison]:
        for row in self.figures:
            for stock, patched in PAIRS:
                for base, aim in {LATEST: row.latest, stock: row.aim}.items():
                    if aim is not None:
                        yield Comparison(row, patched, base, aim, self.ratio(row, patched, base))

    def table(self) -> str:
        """At most 100 columns wide."""
        lines = [
            f"CPU time; medians of {self.rounds} rounds, the builds in turn. Load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores (idle otherwise: 1).",
            "The empty layer's checkpoint function only calls through. x: times the build to the left.",
            _line("", [cell for stock, _ in PAIRS for cell in (stock.kind, "patched")], ["x of 5.24.0"], ""),
            _line(
                "",
                [cell for stock, _ in PAIRS for cell in (stock.release, "x")],
                [one.release for one in PATCHED],
                "aim",
            ),
        ]
        for row in self.figures:
            cells = []
            for stock, patched in PAIRS:
                figure = self.median(row, stock)
                cells += [f"{figure:.0f} ns" if row.unit == "ns" else f"{figure:.1f} ms"]
                cells += [f"{self.ratio(row, patched, stock):.2f}"]
            latest = [f"{self.ratio(row, patched, LATEST):.2f}" for patched in PATCHED]
            lines.append(_line(row.name, cells, latest, "" if row.aim is None else f"{row.aim:.2f}"))
        return "\n".join(lines)


def _line(name: str, cells: Sequence[str], latest: Sequence[str], aim: str) -> str:
    columns = [*((cell, 8) for cell in cells), *((cell, 16 // len(latest)) for cell in latest), (aim, 6)]
    return (f"{name:30}" + "".join(f"{cell:>{width}}" for cell, width in columns)).rstrip()


def measure(rows: Sequence[Row] = ROWS, processes: int = PROCESSES) -> Overhead:
    """Ask every build for every row, in turn.

    Raises:
        TurnError: a build could not answer.
    """
    figures: dict[Row, dict[Variant, list[float]]] = {row: {build: [] for build in BUILDS} for row in rows}
    for _ in range(processes):
        with _turns() as turns:
            for row in rows:
                for order in rounds(ROUNDS, BUILDS):
                    for build in order:
                        figures[row][build].append(turns[build].ask(*row.question))
    return Overhead(figures)


@contextlib.contextmanager
def _turns() -> Iterator[dict[Variant, Turn]]:
    command = [str(environments.python("train-2.13")), "-P", str(WORKER)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    with contextlib.ExitStack() as stack:
        turns = {}
        for build in BUILDS:
            path = f"{installed(build)}{os.pathsep}{ROOT}"
            turns[build] = stack.enter_context(turn(command, kept | {"PYTHONPATH": path}))
        for build, one in turns.items():
            label = build.label
            assert one.ask("build").startswith(build.release + label)
        yield turns
