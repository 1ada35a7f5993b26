"""What experiments found, side by side: a case a line, a build a column. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_CHECKPOINT = "no checkpoint: layers are not recomputed, although it was asked for: right gradients show nothing then"
"""The note of a cell that would be right for nothing."""


@dataclass(frozen=True)
class Cell:
    """What a build does in a case.

    Attributes:
        text: a figure or a word or two, for the table.
        right: whether it is as it should be.
        note: a sentence below the table, where `text` does not say it all; the same one is there once.
        said: what an error said, whole.
    """

    text: str
    right: bool
    note: str = ""
    said: str = ""


def figure(error: float, rounding: float) -> str:
    """A relative error for a cell: one that is more than rounding is not shown as none."""
    return f"{error:.3f}" if error <= rounding or 0.0005 <= error < 1000 else f"{error:.0e}"


def first_line(said: str) -> str:
    """Of what an error said."""
    return next((line.strip() for line in said.splitlines() if line.strip()), "no message")


@dataclass(frozen=True)
class Line:
    """A case.

    Attributes:
        group: a heading for this line and those after it.
        case: what is done.
        cells: by the kind of build; one that could not be measured has none.
    """

    group: str
    case: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Column:
    """A build.

    Attributes:
        kind: `stock`, `patched`, `latest`, or `here`.
        heads: what it is, in short parts: the release, of `here` what `overlay doctor` calls it, and what is beside it.
    """

    kind: str
    heads: Sequence[str]


@dataclass
class Table:
    """An experiment.

    Attributes:
        name: `fsdp2`, as it is asked for.
        title: what the cells say.
        about: what all columns have in common: torch, ranks, backend.
        failed: by the kind of build, why it could not be measured.
    """

    name: str
    title: str
    about: str
    columns: Sequence[Column] = ()
    lines: Sequence[Line] = ()
    failed: dict[str, str] = field(default_factory=dict)

    def wrong(self, kind: str) -> list[Line]:
        """The lines in which a build is not as it should be."""
        return [line for line in self.lines if kind in line.cells and not line.cells[kind].right]
