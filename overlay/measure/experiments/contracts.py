"""What third-party code relies on in a layer that is checkpointed: the fix takes none of it away."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import Cell, Line

GROUPS = {
    "on-purpose-table": "where stock is silently wrong",
    "upstream-table": "as on stock before 5.23",
}
"""The tables of docs/compatibility.md that are judged, and their headings here."""


def lines(rows: Mapping[str, Sequence[Row]]) -> list[Line]:
    """What was found, by the kind of build, as lines: of the scenarios that have one right answer."""
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    for kind, found in rows.items():
        for row in found:
            if row["right"] is not None:
                right = row["found"] == row["right"]
                cell = Cell("holds", True) if right else Cell("broken", False, f"{row['case']}: {row['found']}")
                cells.setdefault((GROUPS[row["table"]], f"{row['case']}: {row['right']}"), {})[kind] = cell
    return [Line(group, case, by_kind) for (group, case), by_kind in cells.items()]


EXPERIMENT = Experiment(
    name="contracts",
    title="whether what third-party code relies on holds",
    worker=Path(__file__).with_name("contracts_worker.py"),
    project="transformers",
    needs=("torch", "transformers"),
    ranks=False,
    lines=lines,
)
