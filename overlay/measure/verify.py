"""One run of experiments: each on every build, one after the other, and a table of each.

A run that was stopped is gone on with by the next one (`overlay.measure.resume`).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from overlay.measure import owed, resume, rows
from overlay.measure.builds import Build
from overlay.measure.experiments import contracts, fsdp2, te, zero3
from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import Column, Table
from overlay.measure.launch import Place
from overlay.progress import Progress, say

EXPERIMENTS = {one.EXPERIMENT.name: one.EXPERIMENT for one in (fsdp2, te, zero3, contracts)}

ALONE = {name for name, one in EXPERIMENTS.items() if not one.ranks}
"""Of one process."""

PATIENCE = 300.0
"""Seconds that a row may take: the first one has the imports in it."""


@dataclass
class Report:
    """What a run found.

    Attributes:
        left_out: experiments that could not be run here, and why.
        judged: the kind of build that has to be right, if it was measured: `patched` or `here`.
    """

    judged: str | None
    tables: list[Table] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def off(self) -> list[str]:
        """What is not as it should be, a line each: of the judged build, and what could not be measured."""
        found = [
            f"{table.name} on {kind}: not measured: {why}"
            for table in self.tables
            for kind, why in table.failed.items()
        ]
        for table in self.tables if self.judged else ():
            if self.judged in table.failed:
                continue
            if not table.lines:
                found.append(f"{table.name} on {self.judged}: not measured: there was no case")
            for line in table.lines:
                cell = line.cells.get(self.judged or "")
                if cell is None or not cell.right:
                    text = "not measured" if cell is None else cell.text
                    found.append(f"{table.name} on {self.judged}: {line.group}, {line.case}: {text}")
        return found


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        builds: of an experiment, by the kind; made when its turn comes.
        ranks: of a group; with `place` that is what it was launched with.
        place: this process among those that were launched together, if it was.
        keep: whether what is found is of use to the next run, where this one is stopped.
    """

    experiments: Sequence[Experiment]
    kinds: Sequence[str]
    build: Callable[[Experiment, str], Build]
    ranks: int
    backend: str
    place: Place | None = None
    keep: bool = True


def run(plan: Plan) -> Report:
    """Runs the plan. On a rank that is not the first, the report has what that one saw of what all ranks run.

    Raises:
        OverlayError: a build cannot be made.
    """
    report = Report(next((kind for kind in ("patched", "here") if kind in plan.kinds), None))
    results = resume.Kept(plan.keep)
    for number, experiment in enumerate(plan.experiments):
        if experiment.ranks or plan.place is None or plan.place.rank == 0:  # what is of one process is rank 0's
            report.tables.append(_table(plan, experiment, number * len(plan.kinds), results))
    results.forget()
    return report


def _table(plan: Plan, experiment: Experiment, number: int, results: resume.Kept) -> Table:
    """An experiment on each build.

    Args:
        number: of its first measurement among those of the plan, which is the same on every rank.
    """
    found: dict[str, list[Row]] = {}
    about: Row = {}
    columns: list[Column] = []
    failed: dict[str, str] = {}
    for i, kind in enumerate(plan.kinds):
        build = plan.build(experiment, kind)
        heads = [build.release]
        try:
            about, *found[kind] = _rows(plan, experiment, build, number + i, results)
            release, _, _ = str(about.get(experiment.project) or build.release).partition("+")
            heads = [release, str(about.get("state", "")) if kind == "here" else "", *experiment.heads(about)]
        except rows.WorkerError as error:
            failed[kind] = _reason(str(error))
            say(f"{experiment.name} on {build}: {failed[kind]}")
        columns.append(Column(kind, [head for head in heads if head]))
    lines = experiment.lines(found)
    return Table(experiment.name, experiment.title, _about(plan, experiment, about), columns, lines, failed)


def _rows(plan: Plan, experiment: Experiment, build: Build, number: int, results: resume.Kept) -> list[Row]:
    """As `_measured`, or from a run that was stopped."""
    asked = {"experiment": experiment.name, "ranks": plan.ranks, "backend": plan.backend, "told": dict(experiment.told)}
    key = resume.key(build, asked)
    if (found := results.find(key)) is not None:
        say(f"{experiment.name} on {build}: measured already, by a run that did not come to its end")
        return found
    found = _measured(plan, experiment, build, number)
    results.keep(key, found)
    return found


def missing(experiment: Experiment) -> list[str]:
    """The packages that an experiment needs and this Python has not."""
    return [name for name in experiment.needs if find_spec(name) is None]


def _measured(plan: Plan, experiment: Experiment, build: Build, number: int) -> list[Row]:
    """What the worker has and how much it does, and its rows; those are of rank 0.

    Args:
        number: of this measurement among those of the plan, which is the same on every rank.

    Raises:
        WorkerError: see `rows.read`, and `owed.checked`.
    """
    what = f"{experiment.name} on {build}"
    first = plan.place is None or plan.place.rank == 0
    variables = dict(build.variables(1))
    command = [build.interpreter, "-P", str(experiment.worker)]
    told = {
        "ranks": [plan.ranks],
        "backend": plan.backend,
        "name": f"{number:03} {what}",
        **experiment.told,
    }
    seen: list[Row] = []
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        read = owed.checked(rows.read(command, variables, told, PATIENCE))
        for row in stack.enter_context(contextlib.closing(read)):
            if seen and bar is not None:
                bar.advance(1)
            elif not seen and first:
                bar = stack.enter_context(Progress(what, len(row["owed"]), "measurements"))
            seen.append(row)
    return seen


def _reason(error: str) -> str:
    """How a worker ended, and the line that says most of why."""
    how, _, said = error.partition("\n")
    last = [line.strip() for line in said.splitlines() if line.strip()]
    return f"it {how}" + (f": {last[-1][:200]}" if last else "")


def _about(plan: Plan, experiment: Experiment, about: Row) -> str:
    parts = [f"torch {str(about['torch']).partition('+')[0]}"] if "torch" in about else []
    if experiment.ranks:
        parts += [f"{plan.ranks} rank{'s' * (plan.ranks > 1)}", plan.backend]
    return ", ".join(parts)
