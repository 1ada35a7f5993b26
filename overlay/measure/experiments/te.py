"""TransformerEngine's fusible operations leave the caller's tensors alone, in the first forward of a recompute too.

Its Python code runs with stand-ins for the native library, so a machine without a GPU shows it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import Cell, Line, first_line

INPUTS = {
    **dict.fromkeys(("leaf", "parameter", "detached leaf"), "a parameter, or another leaf"),
    **dict.fromkeys(("non-leaf", "view of a leaf"), "a non-leaf"),
}
"""What the worker calls the tensors of the caller that are trained, and what the table calls them."""

GRADIENTS, NO_GRAD, CHECKPOINT = "with gradients", "under no_grad", "in a reentrant checkpoint"
"""How a pipeline is called."""


def lines(rows: Mapping[str, Sequence[Row]]) -> list[Line]:
    """What was found, by the kind of build, as lines: of tensors that are trained, the worst of each sort."""
    cells: dict[str, dict[str, dict[str, Cell]]] = {}
    for kind, found in rows.items():
        for row in found:
            if row["input"] not in INPUTS or row["way"] == GRADIENTS:
                continue
            if row["way"] == CHECKPOINT:
                what, cell = "gradients", recomputed(row)
            else:
                what, cell = "its requires_grad", kept(row)
            pipelines = cells.setdefault(f"{row['way']}, given {INPUTS[row['input']]}: {what}", {})
            by_kind = pipelines.setdefault(row["pipeline"], {})
            if kind not in by_kind or by_kind[kind].right:
                by_kind[kind] = cell
    return [
        Line(group, pipeline, by_kind) for group, pipelines in cells.items() for pipeline, by_kind in pipelines.items()
    ]


def changed(row: Row) -> bool:
    """Whether the caller's tensors are not what they were: their flags, or their values."""
    return bool(row["before"] != row["after"])


def kept(row: Row) -> Cell:
    """What became of the caller's tensors."""
    if "error" in row:
        return _error(row["error"])
    if changed(row):
        return Cell("lost", False, "lost: the caller's tensor stops training, silently")
    return Cell("kept", True)


def recomputed(row: Row) -> Cell:
    """Whether the gradients are those without a checkpoint."""
    if "error" in row:
        return _error(row["error"])
    return Cell("right", True) if row["same"] else Cell("wrong", False, "wrong: gradients are missing, silently")


def _error(said: str) -> Cell:
    return Cell("RuntimeError", False, f"RuntimeError: {first_line(said).partition('. ')[0]}", said)


EXPERIMENT = Experiment(
    name="te",
    title="what fusible operations do to tensors that they pass through",
    worker=Path(__file__).with_name("te_worker.py"),
    project="transformer_engine",
    needs=("torch", "transformer_engine"),
    ranks=False,
    lines=lines,
)
