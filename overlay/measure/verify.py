"""One run of experiments: each on every build, one after the other, and a table of each.

A run that was stopped is gone on with by the next one (`overlay.measure.resume`).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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

MEETING = 3600.0
"""Seconds that the ranks of several hosts wait for each other until they have met: one of them may have environments to
make, and rank 0 does first what is of one process."""

AGAIN = PATIENCE
"""As `MEETING`, once they have: a rank that has failed is there for the next measurement as soon as that has ended."""


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
    return _Run(plan).done()


class _Run:
    """A plan as it is run, and what was found so far."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.report = Report(next((kind for kind in ("patched", "here") if kind in plan.kinds), None))
        self.results = resume.Kept(plan.keep)
        self.meeting = MEETING
        self.lost = ""
        """Since when ranks of other hosts are gone, and why nothing is begun any more that needs them; or empty."""

    def done(self) -> Report:
        plan = self.plan
        # What is of one process is rank 0's
        ours = {one.name: one for one in plan.experiments if one.ranks or plan.place is None or plan.place.rank == 0}
        if plan.place is not None:  # all at first, so that no host waits later for what another has to make
            made = {(name, kind): plan.build(one, kind) for name, one in ours.items() for kind in plan.kinds}
            self.plan = replace(plan, build=lambda experiment, kind: made[experiment.name, kind])
        # Of ranks that have met each other none waits long for what rank 0 does alone, and none ends during that
        order = sorted(enumerate(plan.experiments), key=lambda one: plan.place is not None and one[1].ranks)
        tables = {
            number: self._table(experiment, number * len(plan.kinds))
            for number, experiment in order
            if experiment.name in ours
        }
        self.report.tables += [tables[number] for number in sorted(tables)]
        self.results.forget()
        return self.report

    def _table(self, experiment: Experiment, number: int) -> Table:
        """An experiment on each build.

        Args:
            number: of its first measurement among those of the plan, which is the same on every rank.
        """
        found: dict[str, list[Row]] = {}
        about: Row = {}
        columns: list[Column] = []
        failed: dict[str, str] = {}
        for i, kind in enumerate(self.plan.kinds):
            build = self.plan.build(experiment, kind)
            heads = [build.release]
            try:
                about, *found[kind] = self._rows(experiment, build, number + i)
                release, _, _ = str(about.get(experiment.project) or build.release).partition("+")
                heads = [release, str(about.get("state", "")) if kind == "here" else "", *experiment.heads(about)]
            except rows.WorkerError as error:
                failed[kind] = str(error) if isinstance(error, rows.LostError) else _reason(str(error))
                say(f"{experiment.name} on {build}: {failed[kind]}")
            columns.append(Column(kind, [head for head in heads if head]))
        lines = experiment.lines(found)
        return Table(experiment.name, experiment.title, _about(self.plan, experiment, about), columns, lines, failed)

    def _rows(self, experiment: Experiment, build: Build, number: int) -> list[Row]:
        """As `_measured`, or from a run that was stopped."""
        plan = self.plan
        asked = {
            "experiment": experiment.name,
            "ranks": plan.ranks,
            "backend": plan.backend,
            "told": dict(experiment.told),
        }
        key = resume.key(build, asked)
        if (found := self.results.find(key)) is not None:
            say(f"{experiment.name} on {build}: measured already, by a run that did not come to its end")
            return found
        found = self._measured(experiment, build, number)
        self.results.keep(key, found)
        return found

    def _measured(self, experiment: Experiment, build: Build, number: int) -> list[Row]:
        """What the worker has, and its rows; under a launcher they are those of this rank.

        Args:
            number: of this measurement among those of the plan, which is the same on every rank.

        Raises:
            LostError: ranks of other hosts did not come to this measurement, or to one before it.
            WorkerError: see `rows.read`, and `owed.checked`.
        """
        plan = self.plan
        what = f"{experiment.name} on {build}"
        first = plan.place is None or plan.place.rank == 0
        variables = dict(build.variables(1))
        command = [build.interpreter, "-P", str(experiment.worker)]
        told = {
            "ranks": [plan.ranks],
            "backend": plan.backend,
            "name": f"{number:03} {what}",
            "meeting": self.meeting,
            **experiment.told,
        }
        if experiment.ranks and self.lost:
            raise rows.LostError(self.lost)
        seen: list[Row] = []
        with contextlib.ExitStack() as stack:
            bar: Progress | None = None
            read = owed.checked(rows.read(command, variables, told, PATIENCE, self._met))
            try:
                for row in stack.enter_context(contextlib.closing(read)):
                    if seen and bar is not None:
                        bar.advance(1)
                    elif not seen and first:
                        bar = stack.enter_context(Progress(what, len(row["owed"]), "measurements"))
                    seen.append(row)
            except rows.LostError as error:
                self.lost = f"not begun: at {what}, {error}"
                raise
        return seen

    def _met(self) -> None:
        self.meeting = AGAIN


def missing(experiment: Experiment) -> list[str]:
    """The packages that an experiment needs and this Python has not."""
    return [name for name in experiment.needs if find_spec(name) is None]


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
