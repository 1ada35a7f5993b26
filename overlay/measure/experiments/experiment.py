"""What an experiment is made of. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlay.measure.experiments.table import Line

Row = Mapping[str, Any]
"""As a worker puts it."""


def _nothing(_: object) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: as it is asked for.
        title: what the cells of its table say.
        worker: the program that runs in a build (`overlay.measure.rows`). Its first row says which versions it has and
            which rows follow (`overlay.measure.owed`); `state` there is what `loaded.state` says.
        project: of which there are several builds.
        needs: import packages that have to be there.
        ranks: whether it is one of a group of ranks, or of one process.
        lines: makes lines of the rows, which it has by the kind of build.
        environment: what the builds are laid over; its name has `-2.13` and the like after it.
        beside: exact pins to lay over a kind of build, without what they require.
        heads: what the head of a column says of them, by the worker's first row.
        told: what the worker is told beside ranks, backend and the group's name.
    """

    name: str
    title: str
    worker: Path
    project: str
    needs: Sequence[str]
    ranks: bool
    lines: Callable[[Mapping[str, Sequence[Row]]], list[Line]]
    environment: str = "train"
    beside: Callable[[str], Sequence[str]] = _nothing
    heads: Callable[[Row], Sequence[str]] = _nothing
    told: Mapping[str, Any] = field(default_factory=dict)
